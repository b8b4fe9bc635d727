"""The same bits: from run to run, whatever the batch or the strides beside the values."""

from __future__ import annotations

import numpy as np
import pytest
from support import DTYPE_IDS, DTYPES, assert_same, cotangents, host, normal, qkv

import cupyflash
from cupyflash import testing

pytestmark = pytest.mark.gpu

BATCH, HEADS, M, N = 3, 4, 150, 203


def everything(xp, q, k, v, dout, dlse, **options):
    """out, lse and all gradients, on the host."""
    results, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    return host((results, tuple(vjp(dout, dlse))))


def arguments(cupy, dtype, item=slice(None)):
    """Operands and array options of a call, or of some items of its batch."""
    q, k, v = qkv(cupy, BATCH, HEADS, M, N, 40, heads_kv=2, dtype=dtype)
    dout, dlse = cotangents(cupy, q, q[..., 0].astype(np.float64 if dtype == np.float64 else np.float32))
    options = {
        "bias": normal(cupy, (BATCH, HEADS, M, N), dtype, 31),
        "mask": normal(cupy, (BATCH, 1, M, N), seed=32) > -1,
        "sinks": normal(cupy, (BATCH, HEADS), seed=33),
        "alibi_slopes": normal(cupy, (BATCH, HEADS), seed=34),
        "kv_lengths": cupy.asarray([203, 90, 1]),
    }
    arrays = [x[item] for x in (q, k, v, dout, dlse)]
    return arrays, {name: x[item] for name, x in options.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("form", ["plain", "causal", "dropout", "everything"])
def test_J01_thirty_runs_give_the_same_bits(cupy, dtype, form):
    arrays, options = arguments(cupy, dtype)
    chosen = {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "dropout": {"dropout_p": 0.2, "dropout_seed": 11},
        "everything": options
        | {"causal": "bottom_right", "softcap": 5.0, "dropout_p": 0.2, "dropout_seed": 11},
    }[form]
    first = everything(cupy, *arrays, **chosen)
    for run in range(29):
        assert_same(everything(cupy, *arrays, **chosen), first, f"run {run}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_an_item_alone_gives_the_bits_it_has_in_a_batch(cupy, dtype):
    common = {"window": (100, 60), "query_offset": 5, "dropout_p": 0.2, "dropout_seed": 11}
    arrays, options = arguments(cupy, dtype)
    (out, lse), gradients = everything(cupy, *arrays, **options, **common)
    for item in range(BATCH):
        arrays, options = arguments(cupy, dtype, slice(item, item + 1))
        origin = {"dropout_origin": (item * HEADS, 0, 0)}
        alone = everything(cupy, *arrays, **options, **common, **origin)
        assert_same(alone[0], (out[item : item + 1], lse[item : item + 1]), f"item {item}")
        for name, actual, full in zip(cupyflash.Gradients._fields, alone[1], gradients):
            assert_same(actual, full[item : item + 1], f"gradient of {name}, item {item}")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"window": (300, 100)}], ids=str)
def test_J01_many_tiles_of_keys_add_to_dq_in_one_order(cupy, form, dim):
    q, k, v = qkv(cupy, 3, 4, 1500, 1500, dim, heads_kv=2, dtype=DTYPES[1])
    cotangent = cotangents(cupy, q, q[..., 0].astype(np.float32))
    first = everything(cupy, q, k, v, *cotangent, **form)
    for run in range(29):
        assert_same(everything(cupy, q, k, v, *cotangent, **form), first, f"run {run}")
    for item in range(3):
        alone = everything(cupy, *(x[item : item + 1] for x in (q, k, v, *cotangent)), **form)
        for one, full in zip((*alone[0], *alone[1][:3]), (*first[0], *first[1][:3])):
            assert_same(one, full[item : item + 1], f"item {item}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("layout", [layout for layout in testing.LAYOUTS if layout != "read_only"])
def test_E01_strides_and_alignment_do_not_change_bits(cupy, dtype, layout):
    arrays, options = arguments(cupy, dtype)
    options["query_offset"] = 40
    expected = everything(cupy, *arrays, **options)
    laid_out = [testing.lay_out(x, layout) for x in arrays[:4]]
    options["bias"] = testing.lay_out(options["bias"], layout)
    assert_same(everything(cupy, *laid_out, arrays[4], **options), expected, layout)


def test_B07_fresh_memory_holding_nan_changes_nothing(poisoned_pool):
    cupy = poisoned_pool
    arrays, options = arguments(cupy, np.dtype(np.float16))
    options["causal"] = "bottom_right"
    first = everything(cupy, *arrays, **options)
    cupy.get_default_memory_pool().free_all_blocks()
    assert_same(everything(cupy, *arrays, **options), first)
