"""Small inputs that broke other libraries: lengths, tiles, causal alignment and windows (C, D)."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, NEG_INF, assert_same, check, eye_values, host, normal, qkv, wide

import cupyflash


def test_C01_a_single_token(xp):
    q, k, v = qkv(xp, m=1, d=16, dtype=np.float16)
    gradients = host(cupyflash.attention_vjp(q, k, v)[1](xp.ones_like(q)))
    assert not gradients.q.any()
    assert not gradients.k.any()
    assert np.all(gradients.v == 1)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_C02_far_fewer_keys_than_queries(xp, causal):
    q, k, v = qkv(xp, batch=3, m=146, n=1, d=32, dtype=np.float16)
    _, lse, gradients = check(q, k, v, causal=causal, q_lengths=xp.asarray([76, 34, 146]), kv_lengths=1)
    seen = np.isfinite(lse[:, 0]).sum(-1)
    assert seen.tolist() == ([76, 34, 146] if causal == "top_left" else [1, 1, 1])
    assert all(np.isfinite(wide(x)).all() for x in gradients[:3])


def very_negative(xp, length):
    """q, k, v whose scores are all about -120, so that exp(0 - lse) would overflow."""
    q, k, v = qkv(xp, m=length, d=64, size=0.01)
    return q + np.float32(3.873), k - np.float32(3.873), v


def test_C03_padded_scores_with_a_very_negative_lse(xp):
    for length in (*range(1, 261), 704):
        q, k, v = very_negative(xp, length)
        out, vjp = cupyflash.attention_vjp(q, k, v, mask=xp.ones((length, length), bool))
        for gradient in (out, *vjp(out)[:3]):
            assert np.isfinite(host(gradient)).all(), length


@pytest.mark.parametrize("length", [1, 64, 65, 129, 192, 257])
def test_C03_very_negative_scores_match(xp, length):
    check(*very_negative(xp, length))


def test_C04_a_length_that_is_no_multiple(xp):
    check(*qkv(xp, heads=2, m=100, d=64, dtype=BFLOAT16))


def test_C06_one_query_and_transposed_keys(xp):
    buffers = [normal(xp, (1, 16, 2, 228), seed=part) for part in range(2)]
    q = normal(xp, (1, 2, 1, 16), seed=7)
    for length in range(128, 229, 4):
        k, v = (x[..., :length].transpose(0, 2, 3, 1) for x in buffers)
        check(q, k, v)


def test_C07_a_block_and_a_half(xp):
    check(*qkv(xp, m=192, d=16))


def test_C08_one_query(xp):
    check(*qkv(xp, batch=4, heads=32, m=1, n=20, d=128))


def test_C09_every_small_pair_of_lengths(xp):
    for m in range(1, 18):
        for n in range(1, 18):
            check(*qkv(xp, m=m, n=n, d=4), causal="bottom_right")


def test_C10_shorter_than_a_tile(xp):
    check(*qkv(xp, m=5, d=3))


@pytest.mark.parametrize(("m", "n"), [(33, 77), (77, 33)])
def test_C11_unequal_lengths(xp, m, n):
    check(*qkv(xp, heads=2, m=m, n=n, d=64))


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("swap", [False, True])
def test_C13_tiles_wholly_in_the_future(xp, causal, swap):
    shape = cupyflash.plan(*qkv(xp, m=4096, d=8))
    m, n = (shape.block_q + 1, shape.block_kv + 1)[:: -1 if swap else 1]
    check(*qkv(xp, m=m, n=n, d=8), causal=causal)


def test_C14_length_one_beside_empty_sequences(xp):
    q, k, v = qkv(xp, batch=4, heads=9, heads_kv=3, m=1, n=5, d=64)
    lengths = {"q_lengths": xp.asarray([0, 1, 0, 1]), "kv_lengths": xp.asarray([0, 3, 0, 5])}
    out, lse, _ = check(q, k, v, causal="bottom_right", **lengths)
    assert np.isfinite(lse[[1, 3]]).all()
    assert np.all(lse[[0, 2]] == NEG_INF)
    assert not out[[0, 2]].any()


def test_C16_zero_keys_write_nothing_beside_the_output(xp):
    q, k, v = qkv(xp, batch=2, m=3, n=4)
    guarded = xp.full((4, 1, 5, 10), 7, np.float32), xp.full((4, 1, 5), 7, np.float32)
    out, lse = guarded[0][1:3, :, 1:4, 1:9], guarded[1][1:3, :, 1:4]
    result = cupyflash.attention(q, k, v, kv_lengths=xp.asarray([0, 4]), return_lse=True, out=(out, lse))
    assert result[0] is out
    assert not host(out)[0].any()
    assert np.all(host(lse)[0] == NEG_INF)
    assert np.isfinite(host(lse)[1]).all()
    for whole, part in zip(guarded, (out, lse)):
        part[...] = 7
        assert np.all(host(whole) == 7)


@pytest.mark.parametrize(
    ("shape_q", "shape_kv"),
    [
        ((0, 2, 3, 4), (0, 2, 3, 4)),
        ((2, 2, 0, 4), (2, 2, 3, 4)),
        ((2, 2, 3, 4), (2, 2, 0, 4)),
        ((2, 2, 0, 4), (2, 2, 0, 4)),
    ],
    ids=["batch 0", "m 0", "n 0", "m n 0"],
)
def test_C18_zero_sizes(xp, shape_q, shape_kv):
    q, k, v = normal(xp, shape_q), normal(xp, shape_kv), normal(xp, (*shape_kv[:3], 5))
    out, lse, gradients = check(q, k, v)
    assert out.shape == (*shape_q[:3], 5)
    assert not out.any()
    assert np.all(lse == NEG_INF)
    assert not any(gradient.any() for gradient in gradients[:3])


def test_C18_no_value_channels_give_a_true_lse(xp):
    q, k, v = qkv(xp, m=3, e=2)
    out, lse = cupyflash.attention(q, k, v[..., :0], return_lse=True)
    assert out.shape == (1, 1, 3, 0)
    assert_same(lse, cupyflash.attention(q, k, v, return_lse=True)[1])


@pytest.mark.parametrize("axis", ["heads", "head_dim"])
def test_C18_no_heads_and_no_head_dim_are_refused(xp, axis):
    shape = (1, 0, 3, 4) if axis == "heads" else (1, 2, 3, 0)
    x = xp.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"heads_kv|head_dim"):
        cupyflash.attention(x, x, x)


def test_C19_an_empty_batch_with_dropout(xp):
    q, k, v = qkv(xp, batch=0, heads=2, m=3)
    out, vjp = cupyflash.attention_vjp(q, k, v, dropout_p=0.1, dropout_seed=1)
    assert out.shape == q.shape
    assert [x.shape for x in vjp(out)[:3]] == [q.shape] * 3


def test_C21_a_loss_through_lse_at_changing_lengths(xp):
    for length in (100, 200, 100):
        q, k, v = qkv(xp, m=length, d=16, seed=length)
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        dout = xp.broadcast_to(xp.exp(lse)[..., None], out.shape)
        check(q, k, v, dout=dout, dlse=(out * dout).sum(-1))


@pytest.mark.parametrize(
    ("causal", "keys_seen"), [("bottom_right", [0, 0, 0, 1, 2]), ("top_left", [1, 2, 2, 2, 2])]
)
def test_D01_the_alignment_is_a_named_choice(xp, causal, keys_seen):
    q, k, _ = qkv(xp, m=5, n=2)
    weights = wide(cupyflash.attention(q, k, eye_values(xp, 2), causal=causal))[0, 0]
    assert (weights > 0).sum(-1).tolist() == keys_seen


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_D02_a_far_right_bound_is_no_bound(xp, causal):
    q, k, v = qkv(xp, m=8, n=3)
    offset = {} if causal else {"query_offset": -5}
    far = cupyflash.attention(q, k, v, window=(None, 10**30), causal=causal, **offset)
    assert_same(far, cupyflash.attention(q, k, v, causal=causal, **offset))


def test_D03_windows_that_amount_to_causal(xp):
    q, k, v = qkv(xp, m=130, d=16, dtype=np.float16)
    causal = cupyflash.attention(q, k, v, causal=True)
    for left in (None, 130, 129, 10**9):
        assert_same(cupyflash.attention(q, k, v, window=(left, 0)), causal, f"left {left}")


@pytest.mark.parametrize("window", [(-1, -3), (-1, 0), (0, -1)])
def test_D04_negative_sizes_are_refused(xp, window):
    q, k, v = qkv(xp, m=3)
    with pytest.raises(ValueError, match=r"window\[[01]\] must be at least 0, got -"):
        cupyflash.attention(q, k, v, window=window)


def seen(xp, m, n, **options):
    """Which keys have weight, as 0/1 text."""
    q, k, _ = qkv(xp, m=m, n=n)
    weights = wide(cupyflash.attention(q, k, eye_values(xp, n), **options))[0, 0]
    return ["".join("1" if w > 0 else "0" for w in row) for row in weights]


def test_D05_zero_is_a_real_bound(xp):
    assert seen(xp, 3, 3, window=(None, 0)) == ["100", "110", "111"]
    assert seen(xp, 3, 3, window=(0, None)) == ["111", "011", "001"]
    assert seen(xp, 3, 3, window=(0, 0)) == ["100", "010", "001"]


def test_D06_a_left_window_with_right_zero_sees_no_future(xp):
    assert seen(xp, 5, 5, window=(3, 0)) == ["10000", "11000", "11100", "11110", "01111"]


def test_D07_window_sizes_are_inclusive(xp):
    assert seen(xp, 5, 5, window=(2, 1)) == ["11000", "11100", "11110", "01111", "00111"]


def test_windows_and_causal_intersect_around_the_offset(xp):
    assert seen(xp, 3, 5, window=(1, 3), causal=True, query_offset=2) == ["01100", "00110", "00011"]
    assert seen(xp, 3, 5, window=(1, 1), query_offset=-1) == ["10000", "11000", "11100"]
