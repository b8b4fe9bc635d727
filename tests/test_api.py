"""The public forward beside its numbers: outputs, memory order, ranks, dtypes, and what is not written."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, DTYPE_IDS, DTYPES, assert_same, host, normal, qkv, wide

import cupyflash
from cupyflash import reference

SIXTEEN = [np.float16, BFLOAT16]


def test_out_is_the_object_given(xp):
    q, k, v = qkv(xp, heads=2, m=9)
    expected = cupyflash.attention(q, k, v, return_lse=True)
    out, lse = xp.empty_like(q), xp.empty(q.shape[:3], np.float32)
    assert cupyflash.attention(q, k, v, out=out) is out
    assert_same(out, expected[0])
    pair = (xp.empty_like(q), lse)
    result = cupyflash.attention(q, k, v, out=pair, return_lse=True)
    assert result[0] is pair[0]
    assert result[1] is lse
    assert_same(result, expected)
    (result, vjp) = cupyflash.attention_vjp(q, k, v, out=pair, return_lse=True)
    assert result[0] is pair[0]
    assert_same(vjp(q), cupyflash.attention_vjp(q, k, v)[1](q))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_out_in_float32_for_16_bit_inputs_is_not_rounded(xp, dtype):
    q, k, v = qkv(xp, heads=2, m=33, dtype=dtype)
    out = cupyflash.attention(q, k, v, out=xp.empty(q.shape, np.float32))
    exact = wide(reference.attention(q, k, v))
    narrow = cupyflash.attention(q, k, v)
    assert out.dtype == np.float32
    assert narrow.dtype == dtype
    assert_same(out.astype(dtype), narrow)
    assert not np.array_equal(wide(out), wide(narrow))
    assert abs(wide(out) - exact).max() < 0.75 * abs(wide(narrow) - exact).max()  # weights may be 16-bit


@pytest.mark.parametrize("order", ["transposed", "reversed", "stepped"])
def test_out_may_have_any_strides(xp, order):
    q, k, v = qkv(xp, heads=2, m=9)
    views = {
        "transposed": lambda: xp.empty((8, 9, 2, 1), np.float32).T,
        "reversed": lambda: xp.empty((1, 2, 9, 8), np.float32)[:, ::-1, ::-1, ::-1],
        "stepped": lambda: xp.empty((1, 2, 9, 16), np.float32)[..., ::2],
    }
    out = views[order]()
    cupyflash.attention(q, k, v, out=out)
    assert_same(out, cupyflash.attention(q, k, v))


def memory_order(x):
    """Axes from the outermost in memory to the innermost."""
    return sorted(range(x.ndim), key=lambda axis: -x.strides[axis])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_results_have_the_memory_order_of_their_arguments(xp, order):
    inverse = np.argsort(order)

    def lay_out(x):
        return xp.ascontiguousarray(x.transpose(order)).transpose(inverse)

    q, k, v = (lay_out(x) for x in qkv(xp, batch=2, heads=3, m=5, n=5, d=7))
    bias = lay_out(normal(xp, (2, 3, 5, 5)))
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, bias=bias, return_lse=True)
    gradients = vjp(q)
    for x in (out, gradients.q, gradients.k, gradients.v, gradients.bias):
        assert memory_order(x) == list(order)
        assert x.transpose(order).flags.c_contiguous
    assert lse.flags.c_contiguous


def test_a_batch_length_heads_array_gives_the_same_order_back(xp):
    q, k, v = (normal(xp, (2, 11, 3, 4), seed=part).swapaxes(1, 2) for part in range(3))
    out = cupyflash.attention(q, k, v)
    assert out.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_two_dimensional_arrays_are_one_head(xp, dtype):
    q, k, v = (x[0, 0] for x in qkv(xp, m=6, n=9, d=4, e=3, dtype=dtype))
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, bias=normal(xp, (6, 9)))
    gradients = vjp(out, lse)
    (out3, lse3), vjp3 = cupyflash.attention_vjp(
        q[None], k[None], v[None], return_lse=True, bias=normal(xp, (6, 9))
    )
    assert out.shape == (6, 3)
    assert lse.shape == (6,)
    assert [x.shape for x in gradients[:4]] == [(6, 4), (9, 4), (9, 3), (6, 9)]
    assert_same((out, lse), (out3[0], lse3[0]))
    gradients3 = vjp3(out3, lse3)
    assert_same(gradients[:3], tuple(x[0] for x in gradients3[:3]))
    assert_same(gradients.bias, gradients3.bias)
    again = cupyflash.attention_backward(out, q, k, v, out, lse, dlse=lse, bias=normal(xp, (6, 9)))
    assert_same(again[:3], gradients[:3])


def test_two_dimensional_keys_beside_a_batch_of_queries(xp):
    q, k, v = normal(xp, (3, 1, 6, 4)), normal(xp, (9, 4), seed=1), normal(xp, (9, 5), seed=2)
    out, vjp = cupyflash.attention_vjp(q, k, v)
    gradients = vjp(out)
    assert [x.shape for x in gradients[:3]] == [(3, 1, 6, 4), (9, 4), (9, 5)]
    exact = reference.attention_backward(out, q, k, v)
    for actual, value in zip(gradients[:3], exact):
        np.testing.assert_allclose(host(actual), wide(value), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 1, 2, 1, 2)])
def test_leading_axes_broadcast_as_in_matmul(xp, lead):
    q = normal(xp, (*lead, 2, 4, 6))
    k, v = normal(xp, (*lead[1:], 1, 5, 6), seed=1), normal(xp, (1, 5, 3), seed=2)
    out, vjp = cupyflash.attention_vjp(q, k, v)
    assert out.shape == (*lead, 2, 4, 3)
    exact = reference.attention(q, k, v)
    np.testing.assert_allclose(host(out), wide(exact), rtol=0, atol=1e-6)
    assert [x.shape for x in vjp(out)[:3]] == [x.shape for x in (q, k, v)]


def test_lists_and_scalars_are_arrays():
    out = cupyflash.attention([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0], [3.0]], scale=0, bias=0.5)
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, [[2.0]])


def test_lengths_may_be_ints_sequences_or_arrays(xp):
    q, k, v = qkv(xp, batch=2, m=6)
    expected = cupyflash.attention(q, k, v, kv_lengths=xp.asarray([4, 4]), q_lengths=xp.asarray([5, 5]))
    for given in (4, [4], (4, 4), np.int32(4), np.array([4, 4], np.uint8)):
        assert_same(cupyflash.attention(q, k, v, kv_lengths=given, q_lengths=5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_dtypes_of_results(xp, dtype):
    q, k, v = qkv(xp, m=6, dtype=dtype)
    options = {"bias": normal(xp, (6, 6), np.float64), "sinks": normal(xp, (1,), np.float16)}
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    gradients = vjp(out)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert [x.dtype for x in gradients[:5]] == [dtype, dtype, dtype, np.float64, np.float16]


def test_inputs_are_not_written(xp):
    q, k, v = qkv(xp, batch=2, heads=2, m=20)
    options = {
        "mask": normal(xp, (20, 20)) > -1,
        "bias": normal(xp, (20, 20)),
        "sinks": normal(xp, (2,)),
        "alibi_slopes": normal(xp, (2,)),
        "kv_lengths": xp.asarray([7, 20]),
    }
    dout, dlse = normal(xp, q.shape), normal(xp, q.shape[:3])
    everything = (q, k, v, *options.values(), dout, dlse)
    before = [x.copy() for x in everything]
    cupyflash.attention_vjp(q, k, v, **options)[1](dout, dlse)
    assert_same(everything, tuple(before))


def test_big_endian_arrays_are_converted_on_the_cpu():
    q, k, v = qkv(np, heads=2, m=5, n=7)
    swapped = [x.astype(x.dtype.newbyteorder(">")) for x in (q, k, v)]
    bias = normal(np, (5, 7))
    (out, lse), vjp = cupyflash.attention_vjp(*swapped, bias=bias.astype(">f4"), return_lse=True)
    expected, expected_vjp = cupyflash.attention_vjp(q, k, v, bias=bias, return_lse=True)
    assert_same((out, lse), expected)
    assert_same(vjp(out.astype(">f4"), lse.astype(">f4")), expected_vjp(*expected))


def test_plan_allocates_nothing_and_takes_descriptions(xp):
    class Shape:
        shape, dtype = (64, 128, 65536, 128), np.dtype(np.float16)

    plan = cupyflash.plan(Shape, Shape, Shape, causal=True)
    x = xp.broadcast_to(xp.zeros(1, np.float16), Shape.shape)
    assert plan.flops == cupyflash.plan(x, x, x, causal=True).flops
    assert plan.flops == 4 * 128 * 64 * 128 * (65536 * 65537 // 2)
    assert (
        cupyflash.plan(Shape, Shape, Shape, backward=True).flops > cupyflash.plan(Shape, Shape, Shape).flops
    )


def test_alibi_slopes_are_geometric():
    np.testing.assert_allclose(cupyflash.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(cupyflash.alibi_slopes(1), [2.0**-8])
    np.testing.assert_allclose(cupyflash.alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_empty_outputs_may_be_given(xp, shape):
    q = xp.ones((*shape[:3], 4))
    v = xp.ones((shape[0], 2, 5, shape[3]))
    out = xp.empty(shape)
    assert cupyflash.attention(q, xp.ones((*v.shape[:3], 4)), v, out=out) is out


@pytest.mark.parametrize("options", [{"scale": 1e39}, {"softcap": 1e39}, {"softcap": 1e-46}], ids=str)
def test_numbers_beyond_the_score_dtype_are_refused(xp, options):
    x = xp.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match=next(iter(options))):
        cupyflash.attention(x, x, x, **options)
    assert cupyflash.attention(
        x.astype(np.float64), x.astype(np.float64), x.astype(np.float64), **options
    ).shape


@pytest.mark.parametrize("option", ["kv_lengths", "query_offset", "scale", "bias", "sinks"])
def test_integers_beyond_64_bits_are_refused_by_name(xp, option):
    x = xp.ones((3, 4))
    with pytest.raises(ValueError, match=option):
        cupyflash.attention(x, x, x, **{option: 10**400})
