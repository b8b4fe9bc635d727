"""testing: the plain computation's precision, and that the assertions fail when they should."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import reference, testing

INF = math.inf
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# half the spacing of numbers at 1
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
OPTIONS = {
    "default": {},
    "softcap": {"softcap": 1.5},
    "window": {"window": (20, 5), "query_offset": 3},
    "causal_sinks": {"causal": "bottom_right", "sinks": np.array([0.5, -1, 0, 2], np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0], np.float32), "query_offset": 0},
    "bias": {"bias": np.linspace(-2, 2, 70, dtype=np.float32)},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 3},
    "lengths": {"q_lengths": [50, 0], "kv_lengths": [33, 70]},
}


def with_names(grads):
    return {name: grad for name, grad in grads._asdict().items() if grad is not None}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_plain_has_the_error_of_its_precision(dtype, name):
    sizes = {
        "lead": (2,),
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 50,
        "seqlen_k": 70,
        "head_dim": 24,
        "head_dim_v": 17,
    }
    q, k, v, dout = testing.random_inputs(np.random.default_rng(0), dtype=dtype, **sizes)
    options = OPTIONS[name]
    out, lse = testing.plain(q, k, v, return_lse=True, **options)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **options)
    score = np.float64 if dtype == "float64" else np.float32
    assert (out.dtype, lse.dtype) == (q.dtype, score)
    # p rounded, then the result: each within one rounding of the largest value; the rest is sums in the score dtype
    unit = ROUNDING[dtype]
    found = testing.errors(out, exact)
    assert unit / 50 < found.max < (2.5 if q.dtype.itemsize == 2 else 16) * unit * np.abs(exact).max()
    assert found.rms < found.max
    finite = np.isfinite(exact_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(
        lse[finite], exact_lse[finite], rtol=0, atol=16 * ROUNDING[np.dtype(score).name] * 4
    )

    dlse = np.random.default_rng(1).normal(size=lse.shape).astype(score)
    grads = with_names(testing.plain_backward(dout, q, k, v, dlse=dlse, **options))
    expected = with_names(reference.attention_backward(dout, q, k, v, dlse=dlse, **options))
    assert grads.keys() == expected.keys()
    for argument, grad in grads.items():
        given = {"q": q, "k": k, "v": v}.get(argument, options.get(argument))
        assert (grad.shape, grad.dtype) == (given.shape, given.dtype)
        found, place = testing.errors(grad, expected[argument]), max(unit, ROUNDING[grad.dtype.name])
        assert found.max < 32 * place * max(1, np.abs(expected[argument]).max()), argument


def three_weights(dtype):
    """A row with weights 1/6, 1/3, 1/2 whatever q and k."""
    q, k = np.zeros((1, 1), dtype), np.ones((3, 1), dtype)
    return q, k, np.log(np.array([1, 2, 3], np.float32))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_p_is_rounded_to_a_16_bit_input_dtype(dtype):
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    q, k, bias = three_weights(dtype)
    v = np.array([[0], [1.5], [-1]], dtype)  # 1.5 / 3 - 1 / 2 = 0
    third = np.float64(np.array(1 / 3).astype(dtype)) if dtype.itemsize == 2 else 1 / 3
    assert float(testing.plain(q, k, v, bias=bias)[0, 0]) == pytest.approx(1.5 * third - 0.5, abs=2e-7)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_ds_is_rounded_to_a_16_bit_input_dtype(dtype):
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    q, _, bias = three_weights(dtype)
    k = np.array([[2], [5], [0]], dtype)
    v, dout = np.array([[1], [0], [0]], dtype), np.ones((1, 1), dtype)
    delta = np.full((1,), 1 / 6, np.float64 if dtype == np.float64 else np.float32)
    grads = testing.plain_backward(dout, q, k, v, delta=delta, bias=bias, scale=1.0)
    ds = np.array([5 / 36, -1 / 18, -1 / 12])  # dq = 2 ds[0] + 5 ds[1] = 0 without rounding
    if dtype.itemsize == 2:
        ds = ds.astype(dtype).astype(np.float64)
        assert abs(2 * ds[0] + 5 * ds[1]) > 1e-4
    assert float(grads.q[0, 0]) == pytest.approx(2 * ds[0] + 5 * ds[1], abs=2e-7)
    np.testing.assert_allclose(grads.bias, ds, atol=2e-7)


def test_float64_is_told_from_its_reference():
    q, k, v, _ = testing.random_inputs(np.random.default_rng(2), seqlen_q=64, head_dim=32, dtype="float64")
    if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        assert testing.errors(testing.plain(q, k, v), reference.attention(q, k, v)).max > 0


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("largest", [1.0, 1.999, 2.0, 1000.0])
def test_error_bound_is_twice_plain_and_one_spacing(dtype, largest):
    reference_values = np.array([largest, -largest / 3, INF, np.nan])
    plain = reference_values + np.array([0.25, 0, 0, 0])
    spacing = 2 * ROUNDING[dtype] * 2.0 ** math.floor(math.log2(largest))
    bound = testing.error_bound(plain, reference_values, BFLOAT16 if dtype == "bfloat16" else dtype)
    assert bound.max == 2 * 0.25 + spacing
    assert bound.rms == pytest.approx(2 * 0.25 / math.sqrt(2) + spacing, rel=1e-12)


def test_error_bound_of_zeros_and_of_nothing():
    assert testing.error_bound(np.zeros(3, np.float32), np.zeros(3)).max == 2.0**-149
    assert testing.error_bound(np.zeros(3, np.float16), np.zeros(3)).max == 2.0**-24
    assert testing.error_bound(np.zeros((0, 2), np.float32), np.zeros((0, 2))).rms == 2.0**-149
    testing.assert_close(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)), "nothing")


def test_assert_close_at_the_bound_and_past_it():
    exact = np.linspace(-1, 1, 12).reshape(3, 4)
    plain = exact.copy()
    plain[0, 0] += 1e-3
    inside, outside = exact.copy(), exact.copy()
    inside[2, 1] -= 1.99e-3
    outside[2, 1] -= 2.01e-3
    testing.assert_close(inside, plain, exact, "inside")
    with pytest.raises(
        AssertionError, match=r"case 7: max error 2\.010e-03 .*worst at \(2, 1\).*expected .*plain"
    ):
        testing.assert_close(outside, plain, exact, "case 7")
    everywhere = exact + 1.5e-3
    with pytest.raises(AssertionError, match=r"rms 1\.500e-03"):
        testing.assert_close(everywhere, plain, exact, "rms alone")


@pytest.mark.parametrize(
    ("wrong", "at"), [(np.nan, 1.0), (INF, 1.0), (INF, -INF), (0.0, np.nan), (0.0, -INF), (np.nan, INF)]
)
@pytest.mark.parametrize("check", [testing.assert_close, testing.assert_lse_close])
def test_nan_and_infinities_are_compared_first(wrong, at, check):
    exact = np.array([[1.0, 2.0], [at, np.nan]])
    actual = exact.copy()
    check(actual, exact, exact, "the same")
    actual[1, 0] = wrong
    actual[0, 1] = 50.0
    with pytest.raises(AssertionError, match=r"^x: NaN or infinities .* first at \(1, 0\)"):
        check(actual, exact, exact, "x")
    with pytest.raises(AssertionError, match=r"^x \(plain\): NaN"):
        check(exact, actual, exact, "x")


def test_shapes_are_compared():
    with pytest.raises(AssertionError, match=r"shape \(3, 1\), expected \(3,\)"):
        testing.assert_close(np.zeros((3, 1)), np.zeros(3), np.zeros(3), "x")


@pytest.mark.parametrize(("dtype", "unit"), [(np.float32, 2.0**-22), (np.float64, 2.0**-50)])
def test_lse_bound_grows_with_lse(dtype, unit):
    exact = np.array([0.5, -64.0, -INF])
    plain = exact.astype(dtype)
    testing.assert_lse_close(exact + np.array([0.9, 48, 0]) * unit, plain, exact, "lse")
    for excess, index in (([1.1, 0, 0], 0), ([1.1, 48, 0], 0), ([0.5, -80, 0], 1)):
        with pytest.raises(AssertionError, match=rf"worst at \({index},\)"):
            testing.assert_lse_close(exact + np.array(excess) * unit, plain, exact, "lse")
    plain = plain + np.array([0, 1e-3, 0], dtype)
    testing.assert_lse_close(exact + np.array([1.99e-3, 0, 0]), plain, exact, "lse")


@given(
    layout=st.sampled_from(testing.LAYOUTS),
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=5).map(tuple),
    dtype=st.sampled_from([np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]),
)
def test_layouts_hold_the_same_values(layout, shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    y = testing.lay_out(x, layout)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.tobytes() == x.tobytes()


def test_layouts_are_what_they_are_called():
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    made = {layout: testing.lay_out(x, layout) for layout in testing.LAYOUTS}
    strides = {layout: tuple(step // 4 for step in y.strides) for layout, y in made.items()}
    assert strides == {
        "contiguous": (60, 20, 5, 1),
        "heads_inside": (60, 5, 15, 1),
        "transposed": (60, 20, 1, 4),
        "sliced": (210, 70, 10, 1),
        "stepped": (240, 80, 20, 2),
        "reversed": (60, 20, -5, -1),
        "offset": (60, 20, 5, 1),
        "read_only": (60, 20, 5, 1),
    }
    assert not made["read_only"].flags.writeable
    assert made["offset"].ctypes.data % 16 != made["contiguous"].ctypes.data % 16
    for layout in ("sliced", "stepped"):
        buffer = made[layout].base
        assert np.isnan(buffer).sum() == buffer.size - x.size
    with pytest.raises(ValueError, match="layout must be one of contiguous"):
        testing.lay_out(x, "fortran")


def test_random_inputs_take_their_sizes_and_layouts():
    sizes = {
        "lead": (2,),
        "heads_q": 6,
        "heads_kv": 3,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "head_dim": 4,
        "head_dim_v": 2,
    }
    layouts = ("contiguous", "transposed", "reversed", "read_only")
    arrays = testing.random_inputs(np.random.default_rng(0), dtype="bfloat16", layouts=layouts, **sizes)
    assert [x.shape for x in arrays] == [(2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), (2, 6, 5, 2)]
    assert {x.dtype for x in arrays} == {BFLOAT16}
    assert arrays[1].strides[-2] == 2
    assert arrays[2].strides[-1] == -2
    same = testing.random_inputs(np.random.default_rng(0), dtype=BFLOAT16, **sizes)
    for x, y in zip(arrays, same):
        np.testing.assert_array_equal(x, y)
    wide = testing.random_inputs(np.random.default_rng(0), seqlen_q=200, spread=3.0)
    assert [round(float(x.std())) for x in wide] == [3, 3, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts_on_the_device(cupy, layout):
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    y = testing.lay_out(cupy.asarray(x), layout)
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), x)
    assert y.strides == testing.lay_out(x, layout).strides
    testing.assert_close(y, cupy.asarray(x), x.astype(np.float64), layout)
    testing.assert_lse_close(y, x, cupy.asarray(x), layout)
