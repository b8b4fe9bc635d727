"""Small inputs that broke other libraries: empty rows, infinities, and places that must not be read (A, B)."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, DTYPE_IDS, DTYPES, NEG_INF, assert_same, check, host, normal, qkv, wide

import cupyflash
from cupyflash import reference, testing

LOWEST = np.finfo(np.float32).min


def test_A01_first_tile_at_the_lowest_finite_bias(xp):
    q, k, v = qkv(xp, m=5, n=200)
    bias = xp.zeros((1, 1, 5, 200), np.float32)
    bias[..., :128] = LOWEST
    out, lse, gradients = check(q, k, v, bias=bias)
    exact, exact_lse = reference.attention(q, k[:, :, 128:], v[:, :, 128:], return_lse=True)
    np.testing.assert_allclose(out, wide(exact), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, wide(exact_lse), rtol=0, atol=1e-6)
    assert not gradients.k[:, :, :128].any()


def test_A02_a_finite_bias_is_not_a_mask(xp):
    q, k, v = qkv(xp, m=3, d=4)
    bias = xp.ones((3, 3), np.float32)
    bias[0] = LOWEST
    out, vjp = cupyflash.attention_vjp(q, k, v, bias=bias)
    np.testing.assert_allclose(wide(out)[0, 0, 0], wide(v)[0, 0].mean(0), rtol=1e-6, atol=1e-7)
    assert all(np.isfinite(host(x)).all() for x in vjp(out)[:4])


def test_A03_an_empty_row_poisons_no_other_gradient(xp):
    q, k, v = qkv(xp, batch=2, m=4, d=1)
    mask = xp.asarray([[True] * 4, [True, True, True, False]])[:, None, None]
    bias = xp.full((4, 4), NEG_INF, np.float32)
    for i in range(4):
        bias[i, i] = 0
    dout = xp.ones_like(q)
    dout[1] = 0
    _, lse, gradients = check(q, k, v, mask=mask, bias=bias, dout=dout, dlse=xp.zeros((2, 1, 4), np.float32))
    assert lse[1, 0, 3] == NEG_INF
    for gradient in gradients[:3]:
        assert np.isfinite(gradient).all()
        assert not gradient[1].any()


def test_A04_a_band_whose_first_tiles_are_empty(xp):
    q, k, v = qkv(xp, m=600, d=2)
    i, j = xp.arange(600)[:, None], xp.arange(600)
    bias = xp.where((j > i - 10) & (j <= i), 0, NEG_INF).astype(np.float32)
    check(q, k, v, bias=bias)


@pytest.mark.parametrize("window", [None, (20, 0)])
def test_A05_very_negative_scores_after_an_empty_tile(xp, window):
    q, k, v = qkv(xp, heads=14, heads_kv=2, m=88, n=448, size=0.01)
    q, k = q + np.float32(10.3), k - np.float32(10.3)
    v[..., 0] = 1
    out, lse, _ = check(q, k, v, causal="bottom_right", window=window)
    np.testing.assert_allclose(out[..., 0], 1, rtol=1e-5)
    assert np.all((lse > -320) & (lse < -280))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_A06_scores_below_any_finite_sentinel(xp, dtype):
    v = normal(xp, (1, 1, 4, 128), dtype)
    q = xp.full((1, 1, 4, 128), 43.75, dtype)
    out, lse, _ = check(q, -q, v)
    np.testing.assert_allclose(wide(out)[0, 0, 0], wide(v)[0, 0].mean(0), rtol=0, atol=0.01)
    np.testing.assert_allclose(lse, -(43.75**2) * np.sqrt(128) + np.log(4), rtol=1e-6)


def test_A07_a_single_key_far_below(xp):
    q = xp.full((1, 1, 1, 128), 64, BFLOAT16)
    v = normal(xp, q.shape, BFLOAT16)
    out, lse = cupyflash.attention(q, -q, v, return_lse=True)
    assert_same(out, v)
    np.testing.assert_allclose(host(lse), -524288 / np.sqrt(128), rtol=2**-22)


def test_A08_rows_before_the_first_key(xp):
    out, lse, _ = check(*qkv(xp, m=7, n=3), causal="bottom_right")
    assert not out[:, :, :4].any()
    assert np.all(lse[..., :4] == NEG_INF)
    assert np.isfinite(lse[..., 4:]).all()


def test_A09_merging_empty_parts(xp):
    empty = xp.zeros((3, 4), np.float16), xp.full((3,), NEG_INF, np.float32)
    full = normal(xp, (3, 4), np.float16), normal(xp, (3,))
    assert_same(cupyflash.merge(empty, empty), empty)
    assert_same(cupyflash.merge(empty, full), full)
    assert_same(cupyflash.merge(full, empty, empty), full)


def test_A10_an_empty_row_is_not_the_mean(xp):
    mask = xp.ones((5, 5), bool)
    mask[2] = False
    out, lse, _ = check(*qkv(xp, m=5), mask=mask)
    assert not out[0, 0, 2].any()
    assert lse[0, 0, 2] == NEG_INF


@pytest.mark.parametrize("cause", ["bias", "overflow"])
def test_A10_a_row_of_minus_infinities_is_empty(xp, cause):
    q, k, v = qkv(xp, m=3)
    bias = None
    if cause == "bias":
        bias = xp.zeros((3, 3), np.float32)
        bias[1] = NEG_INF
    else:
        q[:, :, 1], k[...] = 1e30, -1e30
    out, vjp = cupyflash.attention_vjp(q, k, v, bias=bias, return_lse=True)
    assert not host(out[0])[0, 0, 1].any()
    assert host(out[1])[0, 0, 1] == NEG_INF
    assert not host(vjp(xp.ones_like(q)).q)[0, 0, 1].any()


def test_A11_a_mask_of_true_changes_no_bit(xp):
    q, k, v = qkv(xp, heads=2, m=70)
    results = []
    for mask in (None, xp.ones((70, 70), bool)):
        result, vjp = cupyflash.attention_vjp(q, k, v, mask=mask, return_lse=True)
        results.append((*result, *vjp(q)))
    assert_same(*results)


def test_A14_both_paths_give_zero_and_a_nan_would_show(xp):
    q, k, v = qkv(xp, m=3)
    mask = xp.asarray([[True], [False], [True]])
    for function in (cupyflash.attention, reference.attention, testing.plain):
        assert not wide(function(q, k, v, mask=mask))[0, 0, 1].any()
    zero = xp.zeros((2, 3), np.float32)
    broken = zero.copy()
    broken[1, 2] = np.nan
    with pytest.raises(AssertionError, match=r"1, 2"):
        testing.assert_close(broken, zero, zero.astype(np.float64), "out")


def test_A15_an_empty_part_leaves_the_other_alone(xp):
    q, k, v = qkv(xp, m=4, n=6)
    empty = cupyflash.attention(q, k[:, :, :2], v[:, :, :2], kv_lengths=0, return_lse=True)
    second = cupyflash.attention(q, k[:, :, 2:], v[:, :, 2:], return_lse=True)
    assert np.all(host(empty[1]) == NEG_INF)
    assert_same(cupyflash.merge(empty, second), second)


def test_A18_float64_stays_float64(xp):
    q, k, v = qkv(xp, m=3, dtype=np.float64)
    out, lse, _ = check(q, k, v, mask=xp.zeros((3, 3), bool))
    assert out.dtype == lse.dtype == np.float64
    assert not out.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_A19_zero_length_sequences(xp, dtype):
    lengths = xp.asarray([0, 32, 96, 128])
    q, k, v = qkv(xp, batch=4, heads=2, m=128, dtype=dtype)
    out, lse, gradients = check(q, k, v, kv_lengths=lengths)
    assert not out[0].any()
    assert np.all(lse[0] == NEG_INF)
    assert not any(gradient[0].any() for gradient in gradients[:3])


def test_B01_nan_in_a_masked_key(xp):
    q, k, v = (normal(xp, (1, 2, 4), seed=part) for part in range(3))
    mask = xp.asarray([[True, False], [True, False]])
    outs = []
    for value in (np.nan, np.inf, 1e10):
        k[0, 1, 0] = value
        outs.append(cupyflash.attention(q, k, v, mask=mask, return_lse=True))
    assert np.isfinite(host(outs[0][0])).all()
    assert_same(outs[0], outs[2])
    assert_same(outs[1], outs[2])


@pytest.mark.parametrize("how", ["causal", "mask"])
def test_B01_nan_in_the_bias_where_nothing_is_allowed(xp, how):
    q, k, v = qkv(xp, heads=2, m=70)
    bias, allowed = normal(xp, (2, 70, 70), seed=4), xp.asarray(np.tri(70, dtype=bool))
    options = {"causal": True} if how == "causal" else {"mask": allowed}

    def run():
        result, vjp = cupyflash.attention_vjp(q, k, v, bias=bias, return_lse=True, **options)
        return (*result, *vjp(q)[:4])

    clean = run()
    bias[:, ~allowed] = np.nan
    assert_same(run(), clean)


def poison_past(x, lengths, axis):
    """NaN (False for a mask) at and past each item's length."""
    for item, length in enumerate(lengths):
        index = [item, *[slice(None)] * (x.ndim - 1)]
        index[axis] = slice(length, None)
        x[tuple(index)] = np.nan


@pytest.mark.parametrize(("lengths", "size", "d"), [((1, 3), 3, 64), ((107,), 256, 16)], ids=["B02", "B03"])
def test_B02_B03_nan_past_the_length(xp, lengths, size, d):
    batch = len(lengths)
    q, k, v = qkv(xp, batch=batch, heads=2, m=size, d=d)
    dout, bias = normal(xp, q.shape, seed=8), normal(xp, (batch, 1, size, size), seed=9)
    dlse = normal(xp, q.shape[:3], seed=10)
    options = {"q_lengths": xp.asarray(lengths), "kv_lengths": xp.asarray(lengths)}

    def run():
        result, vjp = cupyflash.attention_vjp(q, k, v, bias=bias, return_lse=True, **options)
        return (*result, *vjp(dout, dlse)[:4])

    clean = run()
    for x, axis in ((q, 2), (k, 2), (v, 2), (dout, 2), (dlse, 2), (bias, 2), (bias, 3)):
        poison_past(x, lengths, axis)
    assert_same(run(), clean)


@pytest.mark.parametrize("length", [60, 1020])
def test_B07_fresh_memory_is_not_read(xp, length):
    q, k, v = qkv(xp, heads=2, m=length, d=32)

    def run():
        poison = [xp.full(size, np.nan, np.float32) for size in (q.size, q.size // 32, 64 * length)]
        del poison
        result, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True)
        return (*result, *vjp(q)[:3])

    first = run()
    assert all(np.isfinite(host(x)).all() for x in first)
    assert_same(run(), first)


def test_B09_nan_in_a_query_stays_in_its_row(xp):
    q, k, v = qkv(xp, m=5)
    clean = host(cupyflash.attention(q, k, v, return_lse=True))
    q[0, 0, 0, 3] = np.nan
    out, lse = host(cupyflash.attention(q, k, v, return_lse=True))
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse[0, 0, 0])
    assert_same((out[:, :, 1:], lse[..., 1:]), (clean[0][:, :, 1:], clean[1][..., 1:]))


def test_B09_nan_in_a_key_reaches_only_who_sees_it(xp):
    q, k, v = qkv(xp, m=5)
    clean = host(cupyflash.attention(q, k, v, causal=True, return_lse=True))
    k[0, 0, 3, 1] = np.nan
    out, lse = host(cupyflash.attention(q, k, v, causal=True, return_lse=True))
    assert np.isnan(out[0, 0, 3:]).all()
    assert np.isnan(lse[0, 0, 3:]).all()
    assert_same((out[:, :, :3], lse[..., :3]), (clean[0][:, :, :3], clean[1][..., :3]))


@pytest.mark.parametrize("cause", ["bias", "overflow"])
def test_B10_plus_infinity_stays_in_its_row(xp, cause):
    q, k, v = qkv(xp, m=5)
    bias = xp.zeros((5, 5), np.float32)
    clean = host(cupyflash.attention(q, k, v, bias=bias, return_lse=True))
    if cause == "bias":
        bias[2, 3] = np.inf
    else:
        q[0, 0, 2], k = 1e30, abs(k)
        clean = host(cupyflash.attention(q, k, v, bias=bias, return_lse=True))
        q[0, 0, 2] = 3e38
    out, lse = host(cupyflash.attention(q, k, v, bias=bias, return_lse=True))
    assert np.isnan(out[0, 0, 2]).all()
    assert lse[0, 0, 2] == np.inf
    others = [0, 1, 3, 4]
    assert_same((out[:, :, others], lse[..., others]), (clean[0][:, :, others], clean[1][..., others]))
