"""Streaming: keys and values that never stand in memory whole, forward by merge and backward by shares."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support import normal

import cupyflash
from cupyflash import Gradients, reference, testing

HEADS, M, N, D, CHUNK = 2, 48, 20_000, 32, 4096
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "query_offset": N - M},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 9, "dropout_offset": 4},
    "dropout of a shard": {"dropout_p": 0.25, "dropout_seed": 9, "dropout_origin": (7, 30, 1000)},
    "sinks": {"sinks": np.float32([0.5, 9.0])},
}


@pytest.fixture
def stored(tmp_path):
    """q and dout in memory, k and v in files, and files for dk and dv."""
    q, dout = normal(np, (HEADS, M, D), seed=1), normal(np, (HEADS, M, D), seed=2)
    shape = (HEADS, N, D)
    k, v, dk, dv = (
        np.memmap(tmp_path / name, np.float32, "w+", shape=shape) for name in ("k", "v", "dk", "dv")
    )
    for seed, x in enumerate((k, v)):
        x[:] = normal(np, shape, seed=seed + 3)
    return q, dout, k, v, dk, dv


def chunk_options(options, start):
    """The options of the call for keys from ``start`` on."""
    own = dict(options)
    if "query_offset" in own:
        own["query_offset"] -= start
    if "dropout_p" in own:
        t, i, j = own.get("dropout_origin", (0, 0, 0))
        own["dropout_origin"] = (t, i, j + start)
    if start:
        own.pop("sinks", None)  # it takes its probability once
    return own


def stream(q, dout, k, v, dk, dv, options):
    """Attention and its gradients, one chunk of keys at a time."""
    chunks = [(start, slice(start, min(start + CHUNK, N))) for start in range(0, N, CHUNK)]
    out = lse = None
    for start, keys in chunks:
        own = chunk_options(options, start)
        part = cupyflash.attention(q, k[:, keys], v[:, keys], return_lse=True, **own)
        out, lse = part if out is None else cupyflash.merge((out, lse), part)
    dq = np.zeros_like(q)
    dsinks = np.zeros_like(options["sinks"]) if "sinks" in options else None
    dk[:], dv[:] = 0, 0
    delta = (dout * out).sum(axis=-1)
    for start, keys in chunks:
        own = chunk_options(options, start)
        targets = Gradients(q=dq, k=dk[:, keys], v=dv[:, keys], sinks=dsinks if "sinks" in own else None)
        cupyflash.attention_backward(
            dout, q, k[:, keys], v[:, keys], None, lse, delta=delta, grads_out=targets, accumulate=True, **own
        )
    return out, lse, Gradients(q=dq, k=dk, v=dv, sinks=dsinks)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_of_memory_mapped_keys_are_the_whole(stored, options):
    q, dout, k, v, dk, dv = stored
    out, lse, grads = stream(q, dout, k, v, dk, dv, options)
    modules = (testing.plain, testing.plain_backward), (reference.attention, reference.attention_backward)
    (plain, exact), (plain_grads, exact_grads) = (
        [forward(q, k, v, return_lse=True, **options) for forward, _ in modules],
        [backward(dout, q, k, v, **options) for _, backward in modules],
    )
    testing.assert_close(out, plain[0], exact[0], "out")
    testing.assert_lse_close(lse, plain[1], exact[1], "lse")
    for name, *gradients in zip(Gradients._fields, grads, plain_grads, exact_grads):
        assert (gradients[0] is None) == (gradients[2] is None), name
        if gradients[0] is not None:
            testing.assert_close(*gradients, f"d{name}")


def test_the_whole_call_and_the_streamed_one_drop_the_same_weights(stored):
    q, dout, k, v, dk, dv = stored
    options = OPTIONS["dropout of a shard"]
    out, _, grads = stream(q, dout, k, v, dk, dv, options)
    whole, vjp = cupyflash.attention_vjp(q, k, v, **options)
    for name, x, y in (("out", out, whole), *zip(Gradients._fields, grads, vjp(dout))):
        if y is not None:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6, err_msg=name)


def test_streaming_holds_less_than_the_keys(stored):
    q, dout, k, v, dk, dv = stored
    tracemalloc.start()
    try:
        stream(q, dout, k, v, dk, dv, OPTIONS["dropout"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < k.nbytes, f"{peak} bytes allocated, k alone has {k.nbytes}"
