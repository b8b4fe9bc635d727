#!/usr/bin/env python3
"""Speed, host time and memory of the CUDA backend on this GPU, as one JSON: python scripts/bench_gpu.py OUT.json

Everything in one process, so that ratios hold: every dtype beside the plain CuPy computation, single options beside
the plain call, host time of a small call, and one head of 100,000 x 128. A family is forced by CUPYFLASH_FAMILY.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np

import cupyflash
from cupyflash import testing
from cupyflash.cli._timing import medians

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64,
}
SHAPE = (4, 16, 4096, 64)


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Random normal values on the device."""
    return cp.random.default_rng(seed).standard_normal(shape, dtype=cp.float32).astype(dtype)


def operands(dtype: Any, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Any, Any, Any]:
    """q, k, v, dout."""
    return tuple(normal(shape, dtype, seed) for seed in range(4))


def passes(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> dict[str, Any]:
    """The forward and the backward alone, as calls without arguments."""
    vjp = cupyflash.attention_vjp(q, k, v, wrt=("q", "k", "v"), **options)[1]
    return {"forward": lambda: cupyflash.attention(q, k, v, **options), "backward": lambda: vjp(dout)}


def beside_plain() -> list[dict[str, Any]]:
    """Each dtype at SHAPE beside the plain CuPy computation."""
    rows = []
    for name, dtype in DTYPES.items():
        q, k, v, dout = operands(dtype)
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        ours = passes(q, k, v, dout)
        plain = {
            "forward": partial(testing.plain, q, k, v),
            "backward": partial(testing.plain_backward, dout, q, k, v, out, lse, wrt=("q", "k", "v")),
        }
        for pass_name, call in ours.items():
            times = medians({"cupyflash": call, "plain": plain[pass_name]}, 5, True)
            flops = 4 * np.prod(SHAPE, dtype=float) * SHAPE[2] * (2.5 if pass_name == "backward" else 1)
            rows.append(
                {
                    "dtype": name,
                    "pass": pass_name,
                    "kernel": cupyflash.plan(q, k, v, backward=pass_name == "backward").config,
                    "seconds": times["cupyflash"],
                    "tflops": flops / times["cupyflash"] / 1e12,
                    "plain_ratio": times["plain"] / times["cupyflash"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def options() -> list[dict[str, Any]]:
    """Single options beside the plain call, float32 at SHAPE."""
    q, k, v, dout = operands(np.float32)
    batch, heads, length, _ = SHAPE
    variants = {
        "plain": {},
        "causal": {"causal": True},
        "window 512": {"causal": True, "window": (511, 0)},
        "mask": {"mask": cp.random.default_rng(5).random((batch, 1, length, length), dtype=cp.float32) < 0.5},
        "bias": {"bias": normal((1, heads, length, length), np.float32, 6)},
        "alibi": {"alibi_slopes": cp.asarray(cupyflash.alibi_slopes(heads))},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": normal((heads,), np.float32, 7)},
        "kv_lengths": {"kv_lengths": cp.full(batch, length, cp.int32)},
        "dropout 0.1": {"dropout_p": 0.1, "dropout_seed": 1},
    }
    rows = []
    for pass_name in ("forward", "backward"):
        calls = {name: passes(q, k, v, dout, **chosen)[pass_name] for name, chosen in variants.items()}
        times = medians(calls, 3, True)
        rows += [
            {"option": name, "pass": pass_name, "seconds": seconds, "ratio": seconds / times["plain"]}
            for name, seconds in times.items()
        ]
    print(*rows, sep="\n", flush=True)
    return rows


def host() -> dict[str, float]:
    """Median host microseconds of a call (1, 8, 128, 64), cycling 16 sets of arrays, new outputs each time."""
    sets = [operands(np.float16, (1, 8, 128, 64))[:3] for _ in range(16)]
    lengths = cp.full(1, 100, cp.int32)
    result = {}
    for name, chosen in {"plain": {}, "kv_lengths": {"kv_lengths": lengths}}.items():
        for arrays in sets:
            cupyflash.attention(*arrays, **chosen)
        cp.cuda.Device().synchronize()
        spent = []
        for number in range(1000):
            arrays = sets[number % 16]
            start = time.perf_counter()
            cupyflash.attention(*arrays, **chosen)
            spent.append(time.perf_counter() - start)
            if number % 50 == 49:
                cp.cuda.Device().synchronize()
        result[name] = statistics.median(spent) * 1e6
    print("host us", result, flush=True)
    return result


def memory() -> list[dict[str, Any]]:
    """Peak pool bytes beyond inputs and results, one head of float16 x 128, by length."""
    rows = []
    held: Any = ()
    for length in (25_000, 50_000, 100_000, 200_000):
        q, k, v, dout = operands(np.float16, (1, 1, length, 128))
        for backward in (False, True):
            cp.cuda.Device().synchronize()
            pool = cp.cuda.MemoryPool()
            began = time.perf_counter()
            with cp.cuda.using_allocator(pool.malloc):
                if backward:
                    held = cupyflash.attention_backward(dout, q, k, v, *held)
                else:
                    held = cupyflash.attention(q, k, v, return_lse=True)
            cp.cuda.Device().synchronize()
            spent = time.perf_counter() - began
            results = sum(x.nbytes for x in held if x is not None)
            planned = cupyflash.plan(q, k, v, backward=backward)
            rows.append(
                {
                    "length": length,
                    "pass": "backward" if backward else "forward",
                    "extra_bytes": pool.total_bytes() - results,
                    "planned_bytes": planned.workspace_bytes + planned.copied_bytes,
                    "kernel": planned.config,
                    "seconds": spent,
                }
            )
            print(rows[-1], flush=True)
        held = ()
    return rows


def main() -> None:
    """Measure and write."""
    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    forced = os.environ.get("CUPYFLASH_FAMILY")
    report = {
        "device": device,
        "cuda_driver": cp.cuda.runtime.driverGetVersion(),
        "nvrtc": list(cp.cuda.nvrtc.getVersion()),
        "cupy": cp.__version__,
        "cupyflash": cupyflash.__version__,
        "family": forced or "default",
        "date": time.strftime("%Y-%m-%d"),
        "command": (f"CUPYFLASH_FAMILY={forced} " if forced else "") + "python scripts/bench_gpu.py OUT.json",
        "shape": SHAPE,
    }
    report |= {"beside_plain": beside_plain(), "options": options(), "host_us": host(), "memory": memory()}
    with open(sys.argv[1], "w") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
