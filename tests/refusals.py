"""Tables of refused arguments: options of `call`, the exception, and what its text holds around " ... "."""

from __future__ import annotations

import numpy as np
import pytest
from support import BFLOAT16, qkv

import cupyflash

M, N = 5, 7


def operands(xp, **changes):
    """q (1, 4, 5, 8), k (1, 2, 7, 8), v (1, 2, 7, 6)."""
    return dict(zip("qkv", qkv(xp, heads=4, heads_kv=2, m=M, n=N, e=6))) | changes


def call(xp, **options):
    """`attention` with some of q, k, v and options replaced."""
    changed = {name: options.pop(name) for name in "qkv" if name in options}
    return cupyflash.attention(*operands(xp, **changed).values(), **options)


def ones(xp, *shape, dtype=np.float32):
    return xp.ones(shape, dtype)


def assert_refused(run, error, text):
    """``run`` raises ``error``, in whose text the pieces around " ... " stand."""
    with pytest.raises(error) as caught:
        run()
    assert not [piece for piece in text.split(" ... ") if piece not in str(caught.value)], str(caught.value)


class RequiresGrad:
    """What matters of a tensor that records gradients."""

    requires_grad = True

    def __array__(self, *args, **options):
        raise AssertionError("must not be read")


OPERANDS = {
    "q 1-D": (
        lambda xp: {"q": ones(xp, 8)},
        ValueError,
        "q must have shape (..., heads, length, head_dim) ... (8,)",
    ),
    "v 0-d": (lambda xp: {"v": ones(xp)}, ValueError, "v must have shape ... got ()"),
    "k of another head_dim": (
        lambda xp: {"k": ones(xp, 1, 2, N, 9)},
        ValueError,
        "k must have q's head_dim d = 8 ... (1, 2, 7, 9)",
    ),
    "v of another length": (
        lambda xp: {"v": ones(xp, 1, 2, 6, 8)},
        ValueError,
        "v must have k's heads and length ... (..., 2, 7, e) ... (1, 2, 6, 8)",
    ),
    "v of other heads": (
        lambda xp: {"v": ones(xp, 1, 4, N, 8)},
        ValueError,
        "v must have k's heads ... (1, 4, 7, 8)",
    ),
    "heads that do not divide": (
        lambda xp: {"q": ones(xp, 1, 3, M, 8)},
        ValueError,
        "heads_q must be a positive multiple of heads_kv ... q has 3 heads, k and v have 2",
    ),
    "no heads": (lambda xp: {"q": ones(xp, 1, 0, M, 8)}, ValueError, "positive multiple ... q has 0 heads"),
    "no kv heads": (
        lambda xp: {"k": ones(xp, 1, 0, N, 8), "v": ones(xp, 1, 0, N, 8)},
        ValueError,
        "positive multiple ... k and v have 0",
    ),
    "head_dim 0": (
        lambda xp: {"q": ones(xp, 1, 4, M, 0), "k": ones(xp, 1, 2, N, 0)},
        ValueError,
        "head_dim d >= 1 ... (1, 4, 5, 0)",
    ),
    "leading axes": (
        lambda xp: {"q": ones(xp, 3, 4, M, 8), "k": ones(xp, 2, 2, N, 8)},
        ValueError,
        "leading axes of q, k and v must broadcast ... (3,) ... (2,)",
    ),
    "integers": (
        lambda xp: {"q": ones(xp, 1, 4, M, 8, dtype=np.int64)},
        TypeError,
        "q must have one of the dtypes ... bfloat16 ... int64",
    ),
    "complex": (
        lambda xp: {"k": ones(xp, 1, 2, N, 8, dtype=np.complex64)},
        TypeError,
        "k must have one of ... complex64",
    ),
    "two dtypes": (
        lambda xp: {"v": ones(xp, 1, 2, N, 8, dtype=np.float16)},
        TypeError,
        "share one dtype ... v is float16, q is float32 ... v.astype(q.dtype)",
    ),
    "bfloat16 beside float16": (
        lambda xp: {"q": ones(xp, 1, 4, M, 8, dtype=np.float16), "k": ones(xp, 1, 2, N, 8, dtype=BFLOAT16)},
        TypeError,
        "k is bfloat16, q is float16",
    ),
    "a masked array": (
        lambda xp: {"q": np.ma.masked_array(np.ones((1, 4, M, 8)))},
        TypeError,
        "q is a masked array ... mask= ... q.data",
    ),
    "a tensor that requires grad": (
        lambda xp: {"k": RequiresGrad()},
        TypeError,
        "k requires grad ... k.detach() ... attention_vjp",
    ),
}


OUTPUTS = {
    "out a list": (lambda xp: {"out": [[0.0]]}, TypeError, "out must be an array ... list"),
    "out shape": (
        lambda xp: {"out": ones(xp, 1, 4, M, 8)},
        ValueError,
        "out must have shape (1, 4, 5, 6) ... (1, 4, 5, 8)",
    ),
    "out dtype": (
        lambda xp: {"out": ones(xp, 1, 4, M, 6, dtype=np.float64)},
        TypeError,
        "out must have dtype float32 ... float64",
    ),
    "out overlaps itself": (
        lambda xp: {"out": xp.lib.stride_tricks.as_strided(ones(xp, 6), (1, 4, M, 6), (0, 0, 0, 4))},
        ValueError,
        "out has overlapping elements ... strides (0, 0, 0, 4)",
    ),
    "rows of out overlap": (
        lambda xp: {
            "out": xp.lib.stride_tricks.as_strided(ones(xp, 200), (1, 4, M, 6), (0, 4 * 6 * M, 4 * 5, 4))
        },
        ValueError,
        "out has overlapping elements ... strides (0, 120, 20, 4)",
    ),
    "out alone beside return_lse": (
        lambda xp: {"out": ones(xp, 1, 4, M, 6), "return_lse": True},
        TypeError,
        "out must be a pair (out, lse) ... ndarray",
    ),
    "a pair without return_lse": (
        lambda xp: {"out": (ones(xp, 1, 4, M, 6), ones(xp, 1, 4, M))},
        TypeError,
        "out must be an array ... tuple",
    ),
    "lse dtype": (
        lambda xp: {"out": (ones(xp, 1, 4, M, 6), ones(xp, 1, 4, M, dtype=np.float64)), "return_lse": True},
        TypeError,
        "lse must have dtype float32 ... float64",
    ),
    "lse shape": (
        lambda xp: {"out": (ones(xp, 1, 4, M, 6), ones(xp, 1, 4, M, 1)), "return_lse": True},
        ValueError,
        "lse must have shape (1, 4, 5) ... (1, 4, 5, 1)",
    ),
}
