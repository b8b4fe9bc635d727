"""The emulation against the GPU: the same instructions, and the same calls, give the same on both."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import KERNEL, assembled, needs_compiler, record, run
from support import BFLOAT16, eye_values, host, normal, qkv
from test_emulate import BATCH, HEADS, PORTABLE, D, arrays, cases, edges
from test_emulate_words import (
    CONVERSIONS,
    M16N8,
    MATRICES,
    MMAS,
    PRODUCTS,
    STEPS,
    converted,
    moved,
    product,
    spread,
)

import cupyflash
from cupyflash import reference, testing
from cupyflash.cuda.emulate import Machine

pytestmark = [needs_compiler, pytest.mark.gpu]


def launch(cupy, text, threads=64, **fields):
    """Run `toy(const Record)` on the GPU, on copies of the arrays; return them."""
    module = cupy.RawModule(code=assembled(text, emulate=False), options=("-std=c++17",))
    copies = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in fields.items()}
    addresses = {name: x.data.ptr if isinstance(x, cupy.ndarray) else x for name, x in copies.items()}
    module.get_function(KERNEL)((1,), (threads,), (record(**addresses),), shared_mem=1024)
    return {name: host(x) for name, x in copies.items()}


@pytest.mark.parametrize(
    ("which", "given", "made"),
    [
        (1, np.float32, np.uint16),
        (2, np.float64, np.uint16),
        (4, np.float32, np.uint16),
        (5, np.float64, np.uint16),
        (6, np.float32, np.uint16),
    ],
)
def test_conversions_have_the_same_bits(cupy, which, given, made):
    x = spread(given)
    on_gpu = launch(cupy, CONVERSIONS, x=x, y=np.zeros(x.size, made), count=x.size, which=which)["y"]
    np.testing.assert_array_equal(on_gpu, converted(which, x, made))


@pytest.mark.parametrize(
    ("which", "low", "high"), [(7, -87, 88), (8, 1e-30, 1e30), (9, -9, 9), (10, -125, 127)]
)
def test_functions_agree_within_their_last_places(cupy, which, low, high):
    x = np.random.default_rng(1).uniform(low, high, 50000).astype(np.float32)
    on_gpu = launch(cupy, CONVERSIONS, x=x, y=np.zeros_like(x), count=x.size, which=which)["y"]
    emulated = converted(which, x, np.float32)
    assert (np.abs(on_gpu - emulated) <= 4 * np.spacing(np.abs(emulated))).all()


@pytest.mark.parametrize(("word", "dtype", "depth"), MMAS[:2])
def test_mma_agrees_up_to_the_partial_sums_that_hardware_cuts(cupy, word, dtype, depth):
    fields, expected = product(dtype, depth)
    text = PRODUCTS.replace("PRODUCT\n", word + M16N8)
    on_gpu = launch(cupy, text, threads=32, **fields)["d"]
    run(text, threads=32, writes=("d",), **fields)
    assert np.abs(on_gpu - fields["d"]).max() <= 2.0**-21 * np.abs(expected).max()


@pytest.mark.parametrize("step", [step for step in STEPS if step != "stmatrix_x4"])
def test_matrices_reach_the_same_lanes(cupy, step):
    x, y = moved(STEPS[step])
    text = MATRICES.replace('#include "core/emulate/ptx_sm90.cuh"\n', "").replace("STEP", STEPS[step])
    np.testing.assert_array_equal(launch(cupy, text, threads=32, x=x, y=np.zeros_like(y))["y"], y)


def on_device(cupy, options):
    """Array options on the GPU, the integers on the host."""
    floats = ("mask", "bias", "sinks", "alibi_slopes")
    return {name: cupy.asarray(x) if name in floats else x for name, x in options.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", cases(2, 2, np.float32))
def test_calls_agree(cupy, name, dtype):
    """NaN and infinities in the same places, and values that two sound computations may have."""
    m, n = edges(dtype)[-1]
    options = cases(m, n, dtype)[name]
    q, k, v = arrays(m, n, dtype, options)
    machine = Machine("plain", compute_capability=PORTABLE)
    emulated = machine.attention(q, k, v, **options)
    given = on_device(cupy, options)
    on_gpu = cupyflash.attention(*map(cupy.asarray, (q, k, v)), return_lse=True, **given)
    dout, dlse = (normal(np, x.shape, x.dtype, seed) for x, seed in zip(emulated, (90, 91)))
    emulated_gradients = machine.attention_backward(dout, q, k, v, *emulated, dlse=dlse, **options)
    gradients = cupyflash.attention_backward(
        *map(cupy.asarray, (dout, q, k, v, *emulated)), dlse=cupy.asarray(dlse), **given
    )
    plain = testing.plain(q, k, v, return_lse=True, **options)
    exact = reference.attention(q, k, v, return_lse=True, **options)
    near = testing.plain_backward(dout, q, k, v, *emulated, dlse=dlse, **options)
    true = reference.attention_backward(dout, q, k, v, *emulated, dlse=dlse, **options)
    for what, a, b, p, x in zip(
        ("out", "lse", *cupyflash.Gradients._fields),
        (*host(on_gpu), *host(gradients)),
        (*emulated, *emulated_gradients),
        (*plain, *near),
        (*exact, *true),
        strict=True,
    ):
        if a is None:
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), what)
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b), what)
        assert testing.errors(a, b).max <= 2 * testing.error_bound(p, x).max, f"{what} of {name}"


def test_dropout_bits_agree(cupy):
    m, n = 67, 40
    options = {"dropout_p": 0.4, "dropout_seed": 99, "dropout_origin": (7, 5, 1000)}
    q, k, _ = qkv(np, BATCH, HEADS, m, n, D)
    v = eye_values(np, n, np.float32, BATCH, HEADS)
    emulated, _ = Machine("plain", compute_capability=PORTABLE).attention(q, k, v, **options)
    on_gpu = host(cupyflash.attention(*map(cupy.asarray, (q, k, v)), **options))
    np.testing.assert_array_equal(on_gpu != 0, emulated != 0)
