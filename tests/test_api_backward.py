"""The public backward beside its numbers: what a vjp keeps, which gradients it gives, shares, and where they go."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, NEG_INF, assert_same, host, normal, qkv, wide

import cupyflash
from cupyflash import Gradients

SIXTEEN = [np.float16, BFLOAT16]


def test_the_vjp_may_be_called_again_and_keeps_references(xp):
    q, k, v = qkv(xp, m=12)
    _, vjp = cupyflash.attention_vjp(q, k, v)
    first = vjp(q)
    second = vjp(2 * q)
    assert_same(vjp(q), first)
    assert_same(second.v, 2 * first.v)
    v[...] = 0
    assert not np.array_equal(host(vjp(q).q), host(first.q))
    assert_same(vjp(q).v, first.v)


def test_wrt_selects_gradients(xp):
    q, k, v = qkv(xp, m=12)
    options = {"bias": normal(xp, (12, 12)), "sinks": normal(xp, (1,)), "alibi_slopes": 0.25}
    whole = cupyflash.attention_vjp(q, k, v, **options)[1](q)
    assert [x is not None for x in whole] == [True] * 5 + [False]  # a Python float is no array
    for wrt in ("q", "bias", ["v", "k"], ("sinks",), ()):
        some = cupyflash.attention_vjp(q, k, v, wrt=wrt, **options)[1](q)
        for name, actual, expected in zip(Gradients._fields, some, whole):
            assert_same(actual, expected if name in wrt else None, name)


def test_wrt_may_be_an_iterator(xp):
    q, k, v = qkv(xp, m=12)
    out, vjp = cupyflash.attention_vjp(q, k, v, wrt=iter("kv"))
    for _ in range(2):
        assert [x is not None for x in vjp(out)] == [False, True, True, False, False, False]


def test_a_number_has_a_gradient_when_asked_for(xp):
    q, k, v = qkv(xp, m=12, dtype=np.float64)
    run = {"causal": True, "wrt": "alibi_slopes"}
    number = cupyflash.attention_vjp(q, k, v, alibi_slopes=0.25, **run)[1](q).alibi_slopes
    array = cupyflash.attention_vjp(q, k, v, alibi_slopes=xp.full((1,), 0.25), **run)[1](q).alibi_slopes
    assert number.shape == ()
    np.testing.assert_allclose(host(number), host(array)[0], rtol=1e-12)


def test_delta_stands_for_out(xp):
    q, k, v = qkv(xp, heads=2, m=20)
    dout = normal(xp, q.shape, seed=9)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    by_out = cupyflash.attention_backward(dout, q, k, v, out, lse)
    by_delta = cupyflash.attention_backward(dout, q, k, v, None, lse, delta=(dout * out).sum(-1))
    for a, b in zip(by_out[:3], by_delta[:3]):
        np.testing.assert_allclose(host(a), host(b), rtol=0, atol=2e-6)


def test_gradient_shares_over_merged_keys_add_up(xp):
    q, k, v = qkv(xp, heads=4, heads_kv=2, m=11, n=30, dtype=np.float64)
    bias = normal(xp, (4, 11, 30), np.float64)
    dout, dlse = normal(xp, q.shape, np.float64, 8), normal(xp, q.shape[:3], np.float64, 9)
    pieces = [slice(0, 4), slice(4, 17), slice(17, 30)]
    arguments = [
        ((k[:, :, s], v[:, :, s]), {"bias": bias[..., s], "causal": True, "query_offset": 19 - s.start})
        for s in pieces
    ]
    out, lse = cupyflash.merge(
        *(cupyflash.attention(q, *kv, return_lse=True, **options) for kv, options in arguments)
    )
    whole = cupyflash.attention_vjp(q, k, v, bias=bias, causal="bottom_right")[1](dout, dlse)
    accumulator = xp.zeros_like(q)
    for s, (kv, options) in zip(pieces, arguments):
        target = Gradients(q=accumulator)
        share = cupyflash.attention_backward(
            dout, q, *kv, out, lse, dlse=dlse, grads_out=target, accumulate=True, **options
        )
        assert share.q is accumulator
        share = cupyflash.attention_backward(dout, q, *kv, out, lse, dlse=dlse, **options)
        np.testing.assert_allclose(host(share.k), host(whole.k)[:, :, s], rtol=0, atol=1e-13)
        np.testing.assert_allclose(host(share.v), host(whole.v)[:, :, s], rtol=0, atol=1e-13)
        np.testing.assert_allclose(host(share.bias), host(whole.bias)[..., s], rtol=0, atol=1e-13)
    np.testing.assert_allclose(host(accumulator), host(whole.q), rtol=0, atol=1e-13)


def test_merge_vjp_shares_are_those_of_the_whole(xp):
    """The chain merge_vjp -> attention_vjp of each part gives the gradients of one call."""
    q, k, v = qkv(xp, m=11, n=30, dtype=np.float64)
    dout, dlse = normal(xp, q.shape, np.float64, 8), normal(xp, q.shape[:3], np.float64, 9)
    cuts = [slice(0, 13), slice(13, 30)]
    parts, vjps = zip(*(cupyflash.attention_vjp(q, k[:, :, s], v[:, :, s], return_lse=True) for s in cuts))
    _, merge_vjp = cupyflash.merge_vjp(parts)
    gradients = [vjp(*cotangent) for vjp, cotangent in zip(vjps, merge_vjp(dout, dlse))]
    whole = cupyflash.attention_vjp(q, k, v)[1](dout, dlse)
    np.testing.assert_allclose(host(gradients[0].q + gradients[1].q), host(whole.q), rtol=0, atol=1e-12)
    for s, gradient in zip(cuts, gradients):
        np.testing.assert_allclose(host(gradient.k), host(whole.k)[:, :, s], rtol=0, atol=1e-12)
        np.testing.assert_allclose(host(gradient.v), host(whole.v)[:, :, s], rtol=0, atol=1e-12)


def all_arguments(xp, dtype=np.float32):
    """(dout, q, k, v, out, lse), options with every differentiable argument, and its gradients."""
    q, k, v = qkv(xp, batch=2, heads=4, heads_kv=2, m=20, dtype=dtype)
    options = {
        "bias": normal(xp, (1, 4, 1, 20), dtype, 5),
        "sinks": normal(xp, (4,), dtype, 6),
        "alibi_slopes": normal(xp, (4,), dtype, 7, size=0.1),
    }
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout = normal(xp, q.shape, dtype, 8)
    positional = (dout, q, k, v, out, lse)
    return positional, options, cupyflash.attention_backward(*positional, **options)


def test_grads_out_is_written_and_returned(xp):
    positional, options, expected = all_arguments(xp)
    targets = Gradients(*(xp.full(x.shape, np.nan, x.dtype) for x in expected))
    result = cupyflash.attention_backward(*positional, grads_out=targets, **options)
    for given, returned in zip(targets, result):
        assert returned is given
    assert_same(tuple(targets), tuple(expected))


def test_accumulate_adds(xp):
    positional, options, expected = all_arguments(xp)
    start = Gradients(*(normal(xp, x.shape, x.dtype, 20 + part) for part, x in enumerate(expected)))
    targets = Gradients(*(x.copy() for x in start))
    cupyflash.attention_backward(*positional, grads_out=targets, accumulate=True, **options)
    for target, before, gradient in zip(targets, start, expected):
        np.testing.assert_allclose(host(target), host(before + gradient), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_grads_out_in_float32_for_16_bit_arguments(xp, dtype):
    positional, options, expected = all_arguments(xp, dtype)
    targets = Gradients(*(xp.zeros(x.shape, np.float32) for x in expected))
    cupyflash.attention_backward(*positional, grads_out=targets, **options)
    for target, narrow in zip(targets, expected):
        assert narrow.dtype == dtype
        assert_same(target.astype(dtype), narrow)
    assert any(not np.array_equal(wide(target), wide(narrow)) for target, narrow in zip(targets, expected))
    cupyflash.attention_backward(*positional, grads_out=targets, accumulate=True, **options)
    for target, narrow in zip(targets, expected):
        np.testing.assert_allclose(host(target) / 2, wide(narrow), rtol=2**-7, atol=1e-3)


def test_grads_out_sets_what_is_wanted(xp):
    positional, options, expected = all_arguments(xp)
    target = xp.zeros(expected.k.shape, np.float32)[::-1][::-1]
    result = cupyflash.attention_backward(*positional, grads_out=Gradients(k=target), **options)
    assert [x is not None for x in result] == [False, True, False, False, False, False]
    assert result.k is target
    assert_same(target, expected.k)
    mixed = cupyflash.attention_backward(
        *positional, grads_out=Gradients(k=target), wrt=("q", "k"), **options
    )
    assert mixed.k is target
    assert_same(mixed.q, expected.q)


def test_dout_in_float32_for_16_bit_inputs(xp):
    q, k, v = qkv(xp, m=20, dtype=np.float16)
    _, vjp = cupyflash.attention_vjp(q, k, v)
    assert_same(vjp(q), vjp(q.astype(np.float32)))


def test_gradients_go_nowhere_past_lengths(xp):
    q, k, v = qkv(xp, batch=2, m=8)
    options = {"q_lengths": [3, 8], "kv_lengths": [8, 5], "sinks": xp.zeros(1, np.float32)}
    (_, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    gradients = host(vjp(q, xp.ones((2, 1, 8), np.float32)))
    assert np.all(host(lse)[0, 0, 3:] == NEG_INF)
    assert not gradients.q[0, 0, 3:].any()
    assert not gradients.k[1, 0, 5:].any()
    assert not gradients.v[1, 0, 5:].any()
