"""Errors of float32 in each precision and of float64 on a GPU, beside the plain ones: JSON on standard output.

python scripts/precision_gpu.py > precision.json
"""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Any

import numpy as np

import cupyflash
from cupyflash import reference, testing
from cupyflash.cuda.device import require_gpu

LENGTH = 512
INPUTS = {  # factors of q, k and v, which are normal
    "ordinary": (1, 1, 1),
    "scores of 50": (12, 1, 1),
    "scores of 500": (120, 1, 1),
    "k x 1e4": (1, 1e4, 1),
    "k x 1e-4": (1, 1e-4, 1),
    "v x 1e4": (1, 1, 1e4),
    "v x 1e-4": (1, 1, 1e-4),
}
PRECISIONS = {"float32": ("tf32x3", "tf32", "ieee"), "float64": (None,)}


def results(module: Any, arrays: list[Any], dout: Any, **options: Any) -> tuple[Any, ...]:
    """out, dq, dk and dv of cupyflash, the reference or the plain computation."""
    if module is cupyflash:
        out, vjp = cupyflash.attention_vjp(*arrays, **options)
        return (out, *vjp(dout)[:3])
    forward, backward = (
        (testing.plain, testing.plain_backward)
        if module is testing
        else (module.attention, module.attention_backward)
    )
    return (forward(*arrays), *backward(dout, *arrays)[:3])


def rows() -> Any:
    """One row for each dtype, head dim, kind of input and precision."""
    cupy = require_gpu()
    for (dtype, precisions), head_dim, (name, factors) in product(
        PRECISIONS.items(), (64, 128), INPUTS.items()
    ):
        rng = np.random.default_rng(0)
        *qkv, dout = (rng.standard_normal((1, 2, LENGTH, head_dim)) for _ in range(4))
        arrays = [(x * factor).astype(dtype) for x, factor in zip(qkv, factors, strict=True)]
        dout = dout.astype(dtype)
        exact, plain = results(reference, arrays, dout), results(testing, arrays, dout)
        on_gpu = [cupy.asarray(x) for x in (*arrays, dout)]
        for precision in precisions:
            found = results(cupyflash, on_gpu[:3], on_gpu[3], precision=precision)
            row = {"dtype": dtype, "precision": precision, "head_dim": head_dim, "inputs": name}
            for what, x, y, z in zip(("out", "dq", "dk", "dv"), found, plain, exact, strict=True):
                ours, theirs = testing.errors(x.get(), z), testing.errors(y, z)
                row[what] = {
                    "max": ours.max,
                    "rms": ours.rms,
                    "plain_max": theirs.max,
                    "plain_rms": theirs.rms,
                }
            yield row


def report() -> dict[str, Any]:
    """The rows, and where they come from."""
    cupy = require_gpu()
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "cupy": cupy.__version__,
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "date": time.strftime("%Y-%m-%d"),
        "length": LENGTH,
        "rows": list(rows()),
    }


if __name__ == "__main__":
    print(json.dumps(report(), indent=1))
