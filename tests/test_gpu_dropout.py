"""The kernels' dropout bits are those of `dropout_mask`, in the forward and in both backward kernels."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, host

import cupyflash
from cupyflash import testing

pytestmark = pytest.mark.gpu

SEED, OFFSET, ORIGIN, P = 0xFEEDFACE12345678, 77, (5, 19, 33), 0.375
OPTIONS = {"dropout_p": P, "dropout_seed": SEED, "dropout_offset": OFFSET, "dropout_origin": ORIGIN}
FORMS = [
    (np.float16, 8, "contiguous"),
    (np.float16, 96, "transposed"),
    (BFLOAT16, 64, "heads_inside"),
    (np.float32, 1, "reversed"),
    (np.float32, 128, "stepped"),
    (np.float64, 72, "offset"),
    (np.float64, 256, "contiguous"),
]


def expected_mask(batch, heads, m, n):
    return cupyflash.dropout_mask((batch, heads, m, n), P, SEED, offset=OFFSET, origin=ORIGIN)


def laid_out(cupy, shape, dtype, layout, value=0.0):
    return testing.lay_out(cupy.full(shape, value, dtype), layout)


@pytest.mark.parametrize(("dtype", "d", "layout"), FORMS)
def test_the_forward_applies_the_published_mask(cupy, dtype, d, layout):
    batch, heads, m, n = 2, 2, 131, 150
    q, k = (laid_out(cupy, (batch, heads, length, d), dtype, layout) for length in (m, n))
    eye = cupy.broadcast_to(cupy.eye(n, dtype=np.float32).astype(dtype), (batch, heads, n, n))
    kept = host(cupyflash.attention(q, k, testing.lay_out(eye, layout), **OPTIONS)) != 0
    np.testing.assert_array_equal(kept, expected_mask(batch, heads, m, n))


@pytest.mark.parametrize(("dtype", "d", "layout"), FORMS)
def test_the_key_gradients_apply_the_published_mask(cupy, dtype, d, layout):
    """dv = (r p)^T dout: with one-hot dout and equal weights, its zeros are the dropped pairs."""
    batch, heads, m, n = 2, 2, 131, 150
    q, k = (laid_out(cupy, (batch, heads, length, d), dtype, layout) for length in (m, n))
    v = laid_out(cupy, (batch, heads, n, m), dtype, layout, 1.0)
    dout = testing.lay_out(
        cupy.broadcast_to(cupy.eye(m, dtype=np.float32).astype(dtype), (batch, heads, m, m)), layout
    )
    _, vjp = cupyflash.attention_vjp(q, k, v, wrt="v", **OPTIONS)
    kept = host(vjp(dout).v) != 0
    np.testing.assert_array_equal(kept.swapaxes(-1, -2), expected_mask(batch, heads, m, n))


@pytest.mark.parametrize(("dtype", "d", "layout"), FORMS)
def test_the_query_gradients_apply_the_published_mask(cupy, dtype, d, layout):
    """With delta 0, dout v^T = 1 and one-hot k, dq = scale p r."""
    batch, heads, m, n = 2, 2, 131, 150
    q = laid_out(cupy, (batch, heads, m, n), dtype, layout)
    k = testing.lay_out(
        cupy.broadcast_to(cupy.eye(n, dtype=np.float32).astype(dtype), (batch, heads, n, n)), layout
    )
    v, dout = (laid_out(cupy, (batch, heads, length, d), dtype, layout, 1.0) for length in (n, m))
    score = np.float64 if dtype == np.float64 else np.float32
    lse = cupy.full((batch, heads, m), np.log(n), score)
    gradients = cupyflash.attention_backward(
        dout, q, k, v, None, lse, delta=cupy.zeros_like(lse), wrt="q", **OPTIONS
    )
    np.testing.assert_array_equal(host(gradients.q) != 0, expected_mask(batch, heads, m, n))


@pytest.mark.parametrize(
    ("p", "origin"), [(0.1, (0, 0, 0)), (0.5, (7, 32, 16)), (0.75, (0, 16, 0)), (1.0, (0, 0, 0))]
)
@pytest.mark.parametrize("columns", [60, 128, 200])  # of values: kernels for head dims 64, 128 and 256
def test_groups_of_the_whole_matrix_are_drawn_as_published(cupy, columns, p, origin):
    """Where 16 x 16 blocks fall together with those of the whole matrix, eight elements are drawn at once."""
    options = {"dropout_p": p, "dropout_seed": SEED, "dropout_origin": origin}
    heads, n = 2, 150
    q, k = (cupy.zeros((1, heads, length, 64), np.float16) for length in (columns, n))
    v = cupy.ones((1, heads, n, columns), np.float16)
    dout = cupy.broadcast_to(cupy.eye(columns, dtype=np.float16), (1, heads, columns, columns)).copy()
    _, vjp = cupyflash.attention_vjp(q, k, v, wrt="v", **options)
    kept = host(vjp(dout).v) != 0
    expected = cupyflash.dropout_mask((1, heads, columns, n), p, SEED, origin=origin)
    np.testing.assert_array_equal(kept.swapaxes(-1, -2), expected)


def test_a_device_seed_gives_the_bits_of_the_same_number(cupy):
    q = k = cupy.zeros((1, 1, 40, 8), np.float32)
    v = cupy.eye(40, dtype=np.float32)[None, None]
    given = OPTIONS | {"dropout_seed": cupy.asarray(SEED, np.uint64), "dropout_offset": cupy.asarray(OFFSET)}
    np.testing.assert_array_equal(
        host(cupyflash.attention(q, k, v, **given)), host(cupyflash.attention(q, k, v, **OPTIONS))
    )
