"""Memory of the CPU backend, by what was really allocated: NumPy reports its arrays to tracemalloc."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support import normal

import cupyflash
from cupyflash import Gradients
from cupyflash.cpu import workers

MIB = 2**20
FORWARD_BAR, BACKWARD_BAR = 64 * MIB, 160 * MIB
LONG = 32768
# Few tiles are left to compute; a mask, a bias or a distance built whole would still be hundreds of MiB.
NARROW = {"window": (16, 3), "q_lengths": 8192}


@pytest.fixture(autouse=True)
def two_threads():
    """Each worker has buffers: how many there are at once is up to the machine otherwise."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


def allocated(call):
    """The most bytes that ``call`` held at once beyond what there was before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def operands(heads=1, heads_kv=1, length=LONG, dtype=np.float32, batch=1):
    """Arrays q, k, v whose batch items and heads are one another's memory."""
    rows = [normal(np, (length, 64), dtype, seed) for seed in range(3)]
    return tuple(
        np.broadcast_to(x, (batch, h, length, 64)) for x, h in zip(rows, (heads, heads_kv, heads_kv))
    )


def measure(q, k, v, **options):
    """Bytes beyond inputs and outputs of (forward, backward with every gradient)."""
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:-1], np.promote_types(q.dtype, np.float32))
    forward = allocated(lambda: cupyflash.attention(q, k, v, out=(out, lse), return_lse=True, **options))
    arguments = {"q": q, "k": k, "v": v, **options}
    wanted = (arguments.get(name) for name in Gradients._fields)
    grads = Gradients(*(None if x is None else np.empty(x.shape, x.dtype) for x in wanted))
    dout = np.broadcast_to(normal(np, (64,), q.dtype, 9), q.shape)
    dlse = np.broadcast_to(lse.dtype.type(0.5), lse.shape)
    backward = allocated(
        lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, grads_out=grads, **options)
    )
    return forward, backward


def assert_under_the_bars(forward, backward):
    assert forward < FORWARD_BAR, f"forward: {forward / MIB:.1f} MiB"
    assert backward < BACKWARD_BAR, f"backward: {backward / MIB:.1f} MiB"


SLOPES, SINKS = (normal(np, (1,), seed=seed) ** 2 for seed in (3, 4))
BIAS = normal(np, (1, 1, 1, LONG), seed=5)
DROPOUT = {"dropout_p": 0.1, "dropout_seed": 3}
OPTIONS = {
    "causal": {"causal": True, **NARROW},
    "kv_lengths": {"kv_lengths": [LONG - 1000], **NARROW},
    "alibi": {"alibi_slopes": SLOPES, **NARROW},
    "softcap": {"softcap": 5.0, **NARROW},
    "dropout": {**DROPOUT, **NARROW},
    "bias of keys": {"bias": BIAS, **NARROW},
    "bias of queries": {"bias": BIAS.swapaxes(-1, -2), **NARROW},
    "mask of keys": {"mask": BIAS > -1, **NARROW},
    "sinks": {"sinks": SINKS, **NARROW},
    "everything": {
        "causal": True,
        **NARROW,
        "kv_lengths": [LONG - 1000],
        "bias": BIAS,
        "mask": BIAS > -1,
        "alibi_slopes": SLOPES,
        "softcap": 5.0,
        "sinks": SINKS,
        **DROPOUT,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_option_is_built_whole(options):
    assert_under_the_bars(*measure(*operands(), **options))


@pytest.mark.parametrize("dtype", [np.float16, np.float64], ids=["float16", "float64"])
def test_no_operand_is_converted_whole(dtype):
    assert_under_the_bars(*measure(*operands(dtype=dtype), sinks=SINKS, **NARROW))


def test_grouped_heads():
    assert_under_the_bars(*measure(*operands(heads=8), **NARROW))


def test_every_row_over_every_key():
    q, k, v = operands()
    out = np.empty(q.shape, q.dtype)
    extra = allocated(lambda: cupyflash.attention(q[:, :, :1024], k, v, out=out[:, :, :1024]))
    assert extra < FORWARD_BAR


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["none", *OPTIONS])
def test_the_whole_score_matrix(options):
    options = {name: value for name, value in options.items() if name not in NARROW}
    assert_under_the_bars(*measure(*operands(), **options))


@pytest.mark.slow
def test_the_whole_score_matrix_of_grouped_heads():
    assert_under_the_bars(*measure(*operands(heads=8), causal=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_a_batch_of_heads_takes_no_more_than_twice_what_one_takes(dtype):
    options = {"window": (64, 0), "q_lengths": 1024}
    one = measure(*operands(length=8192, dtype=dtype), **options)
    many = measure(*operands(heads=16, heads_kv=16, length=8192, dtype=dtype, batch=4), **options)
    for pass_, few, more in zip(("forward", "backward"), one, many):
        assert more <= 2 * few, f"{pass_}: {more / MIB:.2f} MiB for 64 heads, {few / MIB:.2f} MiB for one"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_plan_states_the_workspace(backward):
    arrays = operands(length=8192)
    stated = cupyflash.plan(*arrays, backward=backward).workspace_bytes
    found = measure(*arrays, window=(1000, 1000))[backward]
    assert stated <= found <= 1.5 * stated + MIB


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_plan_states_no_more_workers_than_tasks(backward, monkeypatch):
    arrays = operands(length=8192)
    stated = []
    for threads in (1, 2, 1000, 2000):
        monkeypatch.setattr(workers, "thread_count", lambda threads=threads: threads)
        stated.append(cupyflash.plan(*arrays, backward=backward).workspace_bytes)
    assert stated[0] * 2 == stated[1] < stated[2] == stated[3] <= 32 * stated[0]
