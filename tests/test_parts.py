"""parts: merging against one computation over all keys, and its vjp against central differences."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash import merge, merge_vjp, reference, testing

INF = math.inf
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def parts_of(dtype, cuts, seed=0):
    """(parts over consecutive key ranges, q, k, v); a range may be empty."""
    rng = np.random.default_rng(seed)
    q, k, v, _ = testing.random_inputs(rng, heads_q=2, seqlen_q=9, seqlen_k=cuts[-1], dtype=dtype)
    spans = list(zip((0, *cuts), cuts))
    run = testing.plain if dtype != "float64" else reference.attention
    return [run(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in spans], (q, k, v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_merging_parts_of_the_keys_is_one_call(dtype):
    parts, (q, k, v) = parts_of(dtype, (1, 8, 8, 108))
    exact = reference.attention(q, k, v, return_lse=True)
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-22, "float64": 2**-50}[dtype]
    for order in (parts, parts[::-1]):
        out, lse = merge(*order)
        assert (out.dtype, lse.dtype) == (parts[0][0].dtype, parts[0][1].dtype)
        np.testing.assert_allclose(
            out.astype(np.float64), exact[0], rtol=0, atol=4 * unit * np.abs(exact[0]).max()
        )
        np.testing.assert_allclose(lse, exact[1], rtol=0, atol=2e-6 if dtype != "float64" else 2e-14)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_rows_of_a_part_without_keys_are_not_read(dtype):
    score = np.float64 if dtype == np.float64 else np.float32
    rng = np.random.default_rng(2)
    out = rng.normal(size=(4, 3)).astype(dtype)
    out[0, 0] = -0.0
    out[1] = np.nan
    lse = np.array([0.1, 0.2, np.nan, INF], score)
    empty = (np.full((4, 3), np.nan, dtype), np.full(4, -INF, score))
    for parts in ([(out, lse)], [(out, lse), empty], [empty, empty, (out, lse)]):
        merged, merged_lse = merge(*parts)
        assert merged.tobytes() == out.tobytes()
        assert merged_lse.tobytes() == lse.tobytes()
    merged, merged_lse = merge(empty, empty)
    assert not merged.astype(np.float64).any()
    assert np.isneginf(merged_lse).all()


def test_a_row_merges_by_itself():
    a = (np.array([[1.0], [2.0], [np.nan]]), np.array([0.0, 0.0, -INF]))
    b = (np.array([[3.0], [np.nan], [np.nan]]), np.array([0.0, -INF, -INF]))
    out, lse = merge(a, b)
    np.testing.assert_array_equal(out, [[2.0], [2.0], [0.0]])
    np.testing.assert_allclose(lse, [math.log(2), 0.0, -INF])


def test_infinite_lse_gives_nan_in_that_row_alone():
    a = (np.array([[np.nan], [1.0]]), np.array([INF, 0.0]))
    b = (np.array([[1.0], [1.0]]), np.array([0.0, 0.0]))
    out, lse = merge(a, b)
    assert np.isnan(out[0, 0])
    assert lse[0] == INF
    assert out[1, 0] == pytest.approx(1.0)


def test_merge_vjp_against_central_differences():
    rng = np.random.default_rng(3)
    parts = [(rng.normal(size=(3, 2)), rng.normal(size=3)) for _ in range(3)]
    parts[1][1][1] = parts[2][1][1] = -INF
    parts[1][0][1] = np.nan
    parts[0][1][2] = parts[1][1][2] = parts[2][1][2] = -INF
    dout, dlse = rng.normal(size=(3, 2)), rng.normal(size=3)

    def loss():
        out, lse = merge(*parts)
        return (dout * out).sum() + (dlse * np.where(np.isinf(lse), 0, lse)).sum()

    (out, lse), vjp = merge_vjp(parts)
    np.testing.assert_array_equal(out, merge(*parts)[0])
    np.testing.assert_array_equal(lse, merge(*parts)[1])
    for part, grads in zip(parts, vjp(dout, dlse)):
        present = np.isfinite(part[1])
        for x, grad in zip(part, grads):
            assert not grad[~present].any()
            for index in np.argwhere(np.broadcast_to(present.reshape(-1, *[1] * (x.ndim - 1)), x.shape)):
                at, kept, step = tuple(index), x[tuple(index)], 1e-5
                x[at] = kept + step
                above = loss()
                x[at] = kept - step
                numeric = (above - loss()) / (2 * step)
                x[at] = kept
                assert grad[at] == pytest.approx(numeric, rel=1e-7, abs=1e-9)


def test_merge_vjp_without_dlse_and_with_one_part():
    out, lse = np.array([[1.0, 2.0]], np.float32), np.array([0.5], np.float32)
    _, vjp = merge_vjp([(out, lse)])
    dout = np.array([[3.0, 4.0]], np.float32)
    ((d_out, d_lse),) = vjp(dout)
    np.testing.assert_array_equal(d_out, dout)
    np.testing.assert_array_equal(d_lse, [0.0])
    assert (d_out.dtype, d_lse.dtype) == (np.dtype(np.float32), np.dtype(np.float32))
    np.testing.assert_array_equal(vjp(dout, np.array([7.0], np.float32))[0][1], [7.0])


def test_merge_vjp_gives_16_bit_cotangents_in_their_dtype():
    part = (np.ones((2, 3), np.float16), np.zeros(2, np.float32))
    _, vjp = merge_vjp([part, part])
    for d_out, d_lse in vjp(np.ones((2, 3), np.float16)):
        assert (d_out.dtype, d_lse.dtype) == (np.dtype(np.float16), np.dtype(np.float32))
        np.testing.assert_array_equal(d_out, np.full((2, 3), 0.5))


GOOD = (np.zeros((2, 3)), np.zeros(2))


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ([], ValueError, "at least one part"),
        ([GOOD, np.zeros(3)], TypeError, "part 1 must be a pair"),
        (
            [GOOD, (np.zeros((2, 3), np.float32), np.zeros(2, np.float32))],
            TypeError,
            "part 1's out must have dtype",
        ),
        ([(np.zeros((2, 3), int), np.zeros(2))], TypeError, "part 0's out must have dtype float16"),
        ([(np.zeros((2, 3), np.float16), np.zeros(2))], TypeError, "lse must have dtype float32"),
        ([GOOD, (np.zeros((2, 4)), np.zeros(2))], ValueError, r"part 1's out must have shape \(2, 3\)"),
        ([(np.zeros((2, 3)), np.zeros(3))], ValueError, r"lse must have shape \(2,\)"),
    ],
)
def test_bad_parts(parts, error, words):
    with pytest.raises(error, match=words):
        merge(*parts)
    with pytest.raises(error, match=words):
        merge_vjp(parts)


def test_bad_cotangents():
    _, vjp = merge_vjp([GOOD])
    with pytest.raises(ValueError, match="dout must have shape"):
        vjp(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="dlse must have shape"):
        vjp(np.zeros((2, 3)), np.zeros((2, 1)))


@pytest.mark.gpu
def test_device_merges_equal_host_merges(cupy):
    parts, _ = parts_of("float32", (5, 5, 40))
    out, lse = merge(*parts)
    on_device = [tuple(map(cupy.asarray, part)) for part in parts]
    (d_out, d_lse), vjp = merge_vjp(on_device)
    np.testing.assert_allclose(d_out.get(), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_lse.get(), lse, rtol=1e-5)
    expected = merge_vjp(parts)[1](out, lse)
    for pair, other in zip(vjp(d_out, d_lse), expected):
        for x, y in zip(pair, other):
            np.testing.assert_allclose(x.get(), y, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="part 1 must be cupy arrays"):
        merge(on_device[0], parts[1])


def test_parts_of_another_byte_order_are_converted():
    part = (np.ones((1, 2), ">f4"), np.zeros(1, ">f4"))
    out, lse = merge(part, part)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_complex_cotangents_are_refused():
    _, vjp = merge_vjp([(np.ones((1, 2)), np.zeros(1))])
    with pytest.raises(TypeError, match="dout must have one of the dtypes"):
        vjp(np.ones((1, 2), complex))
