"""Small inputs that broke other libraries: bias, mask, heads and head dims (F, G)."""

from __future__ import annotations

import numpy as np
import pytest
from support import NEG_INF, assert_same, check, host, normal, qkv, wide

import cupyflash


def test_F01_a_key_padding_mask(xp):
    q, k, v = qkv(xp, batch=3, heads=2, m=9)
    mask = normal(xp, (3, 1, 1, 9)) > 0
    out, lse, _ = check(q, k, v, mask=mask)
    whole = xp.broadcast_to(mask, (3, 2, 9, 9)).copy()
    assert_same((out, lse), host(cupyflash.attention(q, k, v, mask=whole, return_lse=True)))


@pytest.mark.parametrize(
    "shape", [(1, 1, 9, 9), (3, 1, 1, 9), (2, 1, 1), (9, 1), (), (3, 2, 9, 9), (1, 2, 1, 9)]
)
def test_F04_the_gradient_of_a_broadcast_bias(xp, shape):
    q, k, v = qkv(xp, batch=3, heads=2, m=9)
    bias = normal(xp, shape, seed=5)
    _, _, gradients = check(q, k, v, bias=bias)
    assert gradients.bias.shape == shape


def test_F04_the_gradient_of_a_broadcast_bias_is_the_sum_of_the_whole(xp):
    q, k, v = qkv(xp, batch=3, heads=2, m=9, dtype=np.float64)
    bias = normal(xp, (1, 2, 1, 9), np.float64)
    whole = xp.broadcast_to(bias, (3, 2, 9, 9)).copy()
    small, large = (
        wide(cupyflash.attention_vjp(q, k, v, bias=x, wrt="bias")[1](q).bias) for x in (bias, whole)
    )
    np.testing.assert_allclose(small, large.sum((0, 2), keepdims=True), rtol=0, atol=1e-13)


def test_F07_a_zero_cotangent_gives_zero(xp):
    q, k, v = qkv(xp, heads=2, m=70)
    options = {"bias": normal(xp, (70, 70)), "sinks": normal(xp, (2,)), "alibi_slopes": normal(xp, (2,))}
    gradients = cupyflash.attention_vjp(q, k, v, **options)[1](xp.zeros_like(q))
    assert not any(host(x).any() for x in gradients)


def test_F09_a_bias_beside_a_large_head_dim(xp):
    check(*qkv(xp, m=16, d=1024), bias=normal(xp, (1, 1, 16, 16)))


def test_F10_a_batch_item_without_a_key(xp):
    q, k, v = qkv(xp, batch=2, m=4)
    out, _, gradients = check(q, k, v, mask=xp.asarray([True, False])[:, None, None, None])
    assert not out[1].any()
    assert not any(x[1].any() for x in gradients[:3])


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_F11_a_short_last_axis_is_refused(xp, name):
    q, k, v = qkv(xp, m=5)
    option = xp.ones((5, 3), bool if name == "mask" else np.float32)
    with pytest.raises(ValueError, match=rf"{name} must broadcast to .*\(1, 1, 5, 5\), got shape \(5, 3\)"):
        cupyflash.attention(q, k, v, **{name: option})


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(3, 2), (33, 2), (2, 4)])
def test_G01_heads_that_do_not_divide(xp, heads_q, heads_kv):
    q, k, v = qkv(xp, heads=heads_q, heads_kv=heads_kv)
    with pytest.raises(ValueError, match=rf"q has {heads_q} heads, k and v have {heads_kv}"):
        cupyflash.attention(q, k, v)


def test_G03_the_order_of_grouped_heads(xp):
    q, k, _ = qkv(xp, heads=6, heads_kv=2, m=3)
    v = xp.broadcast_to(xp.asarray(np.eye(2, dtype=np.float32))[:, None], (2, 3, 2))
    out = wide(cupyflash.attention(q, k, v))
    np.testing.assert_allclose(out[0, :, 0].argmax(-1), [0, 0, 0, 1, 1, 1])
    check(q, k, v)


@pytest.mark.parametrize(("d", "e"), [(128, 64), (128, 144), (128, 256), (8, 16), (1, 1), (3, 5), (300, 7)])
def test_G05_value_channels_of_their_own_number(xp, d, e):
    check(*qkv(xp, heads=2, m=20, n=23, d=d, e=e))


def test_G06_all_channels_count(xp):
    q, k, v = qkv(xp, m=10, d=128)
    q[..., :64], k[..., :64] = 1, 1
    out, _, _ = check(q, k, v)
    assert abs(out - host(v).mean(2, keepdims=True)).max() > 0.1


@pytest.mark.parametrize("d", [*range(1, 41), 63, 64, 65, 96, 127, 128, 129, 192, 256, 257, 320, 512])
def test_G07_every_head_dim(xp, d):
    check(*qkv(xp, m=7, n=9, d=d))


def test_G08_alibi_with_forty_heads(xp):
    slopes = cupyflash.alibi_slopes(40)
    assert slopes[:3].tolist() == [2**-0.25, 2**-0.5, 2**-0.75] or np.allclose(
        slopes[:3], 2.0 ** -np.arange(0.25, 1, 0.25)
    )
    np.testing.assert_allclose(slopes[32:], 2.0 ** (-0.125 * np.arange(1, 16, 2)), rtol=1e-6)
    check(*qkv(xp, heads=40, m=55, d=4), alibi_slopes=xp.asarray(slopes))


def test_alibi_counts_the_distance_to_the_offset_position(xp):
    q, k, v = qkv(xp, m=2, n=4)
    i, j = xp.arange(2)[:, None], xp.arange(4)
    bias = (-0.5 * abs(i + 2 - j)).astype(np.float32)
    slopes = xp.full((1,), 0.5, np.float32)
    with_slopes = cupyflash.attention(q, k, v, alibi_slopes=slopes, causal="bottom_right")
    with_bias = cupyflash.attention(q, k, v, bias=bias, causal="bottom_right")
    np.testing.assert_allclose(host(with_slopes), host(with_bias), rtol=0, atol=1e-6)


def test_a_sink_takes_probability_and_gives_no_value(xp):
    q, k, v = qkv(xp, heads=2, m=3)
    sinks = xp.asarray([0.5, NEG_INF], np.float32)
    out, lse = (wide(x) for x in cupyflash.attention(q, k, v, sinks=sinks, return_lse=True))
    bare, bare_lse = (wide(x) for x in cupyflash.attention(q, k, v, return_lse=True))
    share = np.exp(bare_lse - np.logaddexp(bare_lse, [[[0.5], [NEG_INF]]]))
    np.testing.assert_allclose(out, bare * share[..., None], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(bare_lse, [[[0.5], [NEG_INF]]]), rtol=0, atol=1e-6)
    check(q, k, v, sinks=xp.asarray([0.5, -2], np.float32))


def test_an_empty_row_keeps_its_sink_and_a_row_past_its_length_does_not(xp):
    q, k, v = qkv(xp, heads=2, m=3)
    sinks = xp.asarray([0.5, -2], np.float32)
    out, lse, gradients = check(
        q, k, v, sinks=sinks, kv_lengths=0, q_lengths=2, dlse=xp.ones((1, 2, 3), np.float32)
    )
    assert not out.any()
    assert lse[0].tolist() == [[0.5, 0.5, NEG_INF], [-2, -2, NEG_INF]]
    assert gradients.sinks.tolist() == [2, 2]
