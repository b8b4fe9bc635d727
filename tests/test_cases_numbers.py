"""Small inputs that broke other libraries: extreme values, dropout, determinism and merging (H, I, J)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from support import BFLOAT16, DTYPES, NEG_INF, assert_same, check, eye_values, host, normal, qkv, wide

import cupyflash
from cupyflash import dropout_mask, reference


@pytest.mark.parametrize("length", [1, 2, 3, 4, 300])
def test_H01_equal_scores_cancel_exactly(xp, length):
    x = xp.full((1, 1, length, 64), 133120, BFLOAT16)
    (out, lse), vjp = cupyflash.attention_vjp(x, x, x, return_lse=True)
    assert_same(out, x)
    np.testing.assert_allclose(host(lse), 133120.0**2 * 8 + math.log(length), rtol=1e-6)
    assert all(np.isfinite(wide(g)).all() for g in vjp(x)[:3])


def test_H02_constant_inputs_of_a_thousand(xp):
    x = xp.full((1, 1, 50, 64), 1000, np.float32)
    out, vjp = cupyflash.attention_vjp(x, x, x)
    np.testing.assert_allclose(host(out), 1000, rtol=1e-6)
    gradients = host(vjp(normal(xp, x.shape)))
    assert all(np.isfinite(g).all() for g in gradients[:3])
    x[...] = 1
    flat = host(cupyflash.attention_vjp(x, x, x)[1](normal(xp, x.shape)))
    assert max(abs(flat.q).max(), abs(flat.k).max()) < 1e-4


def test_H05_float32_is_float32(xp):
    q, k, v = qkv(xp, heads=2, m=512, d=64)
    out = wide(cupyflash.attention(q, k, v))
    assert abs(out - wide(reference.attention(q, k, v))).max() < 1e-5


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_H05_the_exact_precisions_keep_the_bound(xp, precision):
    if xp is not np and precision == "tf32x3" and int(xp.cuda.Device().compute_capability) < 80:
        pytest.skip("needs tensor cores that multiply TF32")
    check(*qkv(xp, heads=2, m=65, d=64), precision=precision)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 1e4])
def test_H06_any_finite_scale(xp, scale):
    q, k, v = qkv(xp, m=6)
    mask = xp.asarray(np.tri(6, k=-1, dtype=bool))
    # At 1e4 lse is so large that its own last place shows in the gradients (contract section 7).
    out, _, _ = check(q, k, v, mask=mask, scale=scale, backward=scale < 100)
    assert not out[0, 0, 0].any()
    if abs(scale) < 1e-10:
        mean = np.cumsum(wide(v)[0, 0], 0)[:-1] / np.arange(1, 6)[:, None]
        np.testing.assert_allclose(out[0, 0, 1:], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("softcap", [10.0, 15.0])
def test_H07_softcap(xp, softcap):
    q, k, v = qkv(xp, heads=2, m=40, d=16, size=5)
    out, _, _ = check(q, k, v, softcap=softcap)
    scores = softcap * np.tanh(wide(q) @ wide(k).swapaxes(-1, -2) / 4 / softcap)
    assert abs(scores).max() > 0.9 * softcap
    weights = np.exp(scores)
    exact = weights / weights.sum(-1, keepdims=True) @ wide(v)
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-4)


def test_H09_dropped_rows_have_their_sum_in_expectation_and_lse_of_before(xp):
    q, k, v = qkv(xp, m=256, d=8)
    v[...] = 1
    out, lse = cupyflash.attention(q, k, v, dropout_p=0.5, dropout_seed=3, return_lse=True)
    sums = wide(out)[0, 0, :, 0]
    assert sums.std() > 0.01
    assert abs(sums.mean() - 1) < 0.05
    assert_same(lse, cupyflash.attention(q, k, v, return_lse=True)[1])


def kept(xp, q, k, **dropout):
    """The mask that a call applied, read from its weights."""
    v = eye_values(xp, k.shape[-2], k.dtype, k.shape[0], k.shape[1])
    return wide(cupyflash.attention(q, k, v, **dropout)) > 0


def test_I02_seeds_and_offsets_give_masks_of_their_own(xp):
    q, k, _ = qkv(xp, m=128, d=4)
    masks = [
        kept(xp, q, k, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset)
        for seed, offset in ((0, 0), (1, 0), (2**32, 0), (0, 1))
    ]
    for a in range(4):
        for b in range(a):
            assert abs((masks[a] == masks[b]).mean() - 0.5) < 5 * 0.5 / 128


@pytest.mark.parametrize(
    ("p", "error"),
    [(-1, ValueError), (1.5, ValueError), (math.nan, ValueError), ("0.1", TypeError), (True, TypeError)],
)
def test_I03_probabilities_that_are_none(xp, p, error):
    q, k, v = qkv(xp)
    with pytest.raises(error, match="dropout_p must"):
        cupyflash.attention(q, k, v, dropout_p=p, dropout_seed=1)


@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.01, 0.1, 0.9, 0.99, 0.999])
def test_I04_I05_the_probability_is_honoured(xp, p):
    like = None if xp is np else xp.zeros(1)
    keep = host(dropout_mask((4096, 1024), p, seed=11, like=like))
    spread = math.sqrt(p * (1 - p) / keep.size)
    assert abs((1 - keep.mean()) - p) < 5 * spread + 2**-17
    q, k, v = qkv(xp, m=512, n=512, d=4)
    q[...], v[...] = 0, 1
    out = wide(cupyflash.attention(q, k, v, dropout_p=p, dropout_seed=11))[0, 0, :, 0]
    assert abs(out.mean() - 1) < 5 * math.sqrt(p / (1 - p)) / 512 + 1e-4


def test_I06_dropping_everything(xp):
    out, lse, gradients = check(*qkv(xp, m=9), dropout_p=1.0, dropout_seed=0)
    assert not out.any()
    assert np.isfinite(lse).all()
    assert not gradients.v.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("d", [3, 64])
def test_I08_the_mask_depends_on_nothing_else(xp, dtype, d):
    q, k, _ = qkv(xp, batch=2, heads=4, heads_kv=2, m=70, n=90, d=d, dtype=dtype)
    dropout = {"dropout_p": 0.3, "dropout_seed": 2**40 + 5, "dropout_offset": 9}
    whole = dropout_mask((2, 4, 70, 90), 0.3, seed=2**40 + 5, offset=9)
    assert np.array_equal(kept(xp, q, k, **dropout), whole)
    assert np.array_equal(kept(xp, q[:, :, ::-1][:, :, ::-1], k[..., ::-1], **dropout), whole)
    # Batch item 1, heads 2 and 3 are matrices 6 and 7 of the whole, 0 and 1 of the part.
    part = kept(xp, q[1:, 2:, 33:], k[1:, 1:, 50:], **dropout, dropout_origin=(6, 33, 50))
    assert np.array_equal(part, whole[1:, 2:, 33:, 50:])
    # Heads 0 and 1 of both items: matrices 0, 1, 4, 5 of the whole, 0 to 3 of the part.
    part = kept(xp, q[:, :2], k[:, :1], **dropout, dropout_origin=(np.array([[0], [2]]), 0, 0))
    assert np.array_equal(part, whole[:, :2])


def philox(counter, key, rounds=7):
    """Philox4x32 written out on Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def published(seed, offset, t, i, j):
    """The 16 random bits of one element, from contract section 5 word for word."""
    counter = (4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, t, offset)
    w = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return w[2 * (i // 8 % 2) + j // 8 % 2] >> 16 * (j % 2) & 0xFFFF


def test_I10_the_mask_is_the_published_function(xp):
    seed, offset, p = 0x0123456789ABCDEF, 0xFFFFFFFE, 0.37
    expected = np.zeros((2, 3, 19, 35), bool)
    for b, h, i, j in np.ndindex(*expected.shape):
        expected[b, h, i, j] = published(seed, offset, 3 * b + h + 100, i + 7, j + 2**31 - 40) < round(
            0.63 * 65536
        )
    dropout = {"seed": seed, "offset": offset, "origin": (100, 7, 2**31 - 40)}
    assert np.array_equal(dropout_mask(expected.shape, p, **dropout), expected)
    q, k, _ = qkv(xp, batch=2, heads=3, m=19, n=35)
    applied = kept(xp, q, k, dropout_p=p, **{f"dropout_{name}": value for name, value in dropout.items()})
    assert np.array_equal(applied, expected)


def test_I10_kept_is_strictly_below_the_threshold(xp):
    q, k, _ = qkv(xp, m=9, n=10)
    for i, j in ((0, 0), (3, 5), (8, 9)):
        bits = published(6, 0, 0, i, j)
        for threshold in (bits, bits + 1):
            mask = kept(xp, q, k, dropout_p=1 - threshold / 65536, dropout_seed=6)
            assert mask[0, 0, i, j] == (bits < threshold)


def test_I11_no_call_moves_another(xp):
    q, k, v = qkv(xp, m=40)
    dropout = {"dropout_p": 0.5, "dropout_seed": 1}
    first = cupyflash.attention(q, k, v, **dropout)
    second = cupyflash.attention(q, k, v, **dropout, dropout_offset=1)
    assert not np.array_equal(host(first), host(second))
    assert_same(cupyflash.attention(q, k, v, **dropout), first)


def test_I12_no_dropout_unless_asked_for(xp):
    q, k, v = qkv(xp, m=40)
    assert_same(cupyflash.attention(q, k, v), cupyflash.attention(q, k, v, dropout_p=0.0))
    assert_same(cupyflash.attention(q, k, v), cupyflash.attention(q, k, v, dropout_p=0, dropout_seed=7))


@pytest.mark.parametrize("deterministic", [{}, {"deterministic": True}], ids=["J01", "J02"])
def test_J01_J02_the_same_bits_from_run_to_run(xp, deterministic):
    size, runs = (
        ({"heads": 4, "m": 300, "d": 32}, 4) if xp is np else ({"heads": 32, "m": 1024, "d": 128}, 30)
    )
    q, k, v = qkv(xp, **size)
    bias = normal(xp, (1, 1, 1, q.shape[-2]), seed=4)

    def run():
        result, vjp = cupyflash.attention_vjp(
            q, k, v, bias=bias, causal=True, return_lse=True, **deterministic
        )
        return (*result, *vjp(q))

    first = run()
    for _ in range(runs - 1):
        assert_same(run(), first)


def test_J06_the_merge_of_parts_is_the_whole(xp):
    q, k, v = qkv(xp, heads=2, m=10, n=108)
    cuts = (0, 1, 8, 108)
    parts = [cupyflash.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in pairwise(cuts)]
    exact = reference.attention(q, k, v, return_lse=True)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for merged, value in zip(cupyflash.merge(*(parts[part] for part in order)), exact):
            np.testing.assert_allclose(host(merged), wide(value), rtol=0, atol=2e-6)
    nested = cupyflash.merge(parts[0], cupyflash.merge(*parts[1:]))
    np.testing.assert_allclose(host(nested[0]), wide(exact[0]), rtol=0, atol=2e-6)


def test_J07_values_of_an_empty_part_are_not_read(xp):
    full = normal(xp, (3, 4)), normal(xp, (3,))
    empty = xp.full((3, 4), np.nan, np.float32), xp.full((3,), NEG_INF, np.float32)
    assert_same(cupyflash.merge(empty, full), full)
    (merged, vjp) = cupyflash.merge_vjp([empty, full])
    assert_same(merged, full)
    (dout_empty, dlse_empty), (dout_full, dlse_full) = host(vjp(full[0], full[1]))
    assert not dout_empty.any()
    assert not dlse_empty.any()
    np.testing.assert_allclose(dout_full, host(full[0]), rtol=1e-6)
    np.testing.assert_allclose(dlse_full, host(full[1]), rtol=1e-6)
