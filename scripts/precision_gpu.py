"""Errors of float32 in each precision and of float64 on a GPU, beside the plain ones: JSON on standard output.

python scripts/precision_gpu.py > precision.json
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
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
PRECISIONS = {  # None: what is computed by default
    "float32": (None, "tf32x3", "tf32", "ieee"),
    "float64": (None,),
}
HEAD_DIMS = (64, 128)
RESULTS = ("out", "dq", "dk", "dv")


def operands(dtype: str, head_dim: int, inputs: str) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, LENGTH, head_dim)) for _ in range(4)]
    return [(x * factor).astype(dtype) for x, factor in zip(arrays, (*INPUTS[inputs], 1), strict=True)]


def computed_plainly(case: tuple[str, int, str]) -> tuple[list[np.ndarray], list[testing.Errors]]:
    """out, dq, dk and dv by the reference, and the errors of the plain computation."""
    *arrays, dout = operands(*case)
    exact = [reference.attention(*arrays), *reference.attention_backward(dout, *arrays)[:3]]
    plain = [testing.plain(*arrays), *testing.plain_backward(dout, *arrays)[:3]]
    return exact, [testing.errors(x, y) for x, y in zip(plain, exact, strict=True)]


def rows() -> Any:
    """One row for each dtype, head dim, kind of input and precision."""
    cases = list(product(PRECISIONS, HEAD_DIMS, INPUTS))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # the reference of float64 is slow
        references = list(pool.map(computed_plainly, cases))
    cupy = require_gpu()
    for (dtype, head_dim, inputs), (exact, plain) in zip(cases, references, strict=True):
        *arrays, dout = map(cupy.asarray, operands(dtype, head_dim, inputs))
        for precision in PRECISIONS[dtype]:
            out, vjp = cupyflash.attention_vjp(*arrays, precision=precision)
            ours = [testing.errors(x.get(), y) for x, y in zip((out, *vjp(dout)[:3]), exact, strict=True)]
            yield {
                "dtype": dtype,
                "precision": precision,
                "family": cupyflash.plan(*arrays, precision=precision).family,
                "head_dim": head_dim,
                "inputs": inputs,
                **{
                    name: {"max": x.max, "rms": x.rms, "plain_max": y.max, "plain_rms": y.rms}
                    for name, x, y in zip(RESULTS, ours, plain, strict=True)
                },
            }


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
