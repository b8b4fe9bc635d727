"""A Problem's arrays and numbers under the record's names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays import is_device, memory_order
from ..problem import Problem
from .params import UNBOUNDED, Layout

# The gradient's name in the record, by argument.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks", "alibi_slopes": "dslopes"}


def tensors(problem: Problem) -> dict[str, Any]:
    """The arrays that a call reads, by record name; host integers of more than one value are still on the host."""
    p = problem
    found = {"q": p.q, "k": p.k, "v": p.v, "mask": p.mask, "bias": p.bias}
    found |= {"sinks": p.sinks, "slopes": p.alibi_slopes}
    integers = _integers(problem)
    found |= {name: x for name, x in integers.items() if not _is_number(x)}
    if p.dropout is not None:
        for name, x in (("dropout_seed", p.dropout.seed), ("dropout_offset", p.dropout.offset)):
            found[name] = x if is_device(x) else None
    return {
        name: x if is_device(x) or name not in integers else np.ascontiguousarray(x)
        for name, x in found.items()
        if x is not None
    }


def numbers(problem: Problem) -> tuple[float, ...]:
    """The numbers of a call in the order of `params.NUMBERS`; what is given as an array counts as absent."""
    p = problem
    integers = {"q_length": p.seqlen_q, "kv_length": p.seqlen_k, "query_offset": 0, "dropout_t": 0}
    integers |= {name: _number(x) for name, x in _integers(p).items() if _is_number(x)}
    left, right = (UNBOUNDED if x is None else min(x, UNBOUNDED) for x in (p.left, p.right))
    first = (p.scale, p.softcap or 0.0, *integers.values())
    drop = p.dropout
    if drop is None:
        return (*first, 0, 0, left, right, 0, 0, 65536)
    seed, offset = (x if isinstance(x, int) else 0 for x in (drop.seed, drop.offset))
    return (*first, seed, offset, left, right, drop.origin_i, drop.origin_j, drop.threshold)


def _integers(problem: Problem) -> dict[str, Any]:
    p = problem
    found = {"q_length": p.q_lengths, "kv_length": p.kv_lengths, "query_offset": p.query_offset}
    found["dropout_t"] = p.dropout.origin_t if p.dropout else None
    return {name: x for name, x in found.items() if x is not None}


def _is_number(x: Any) -> bool:
    return not is_device(x) and np.size(x) == 1


def _number(x: Any) -> int:
    return int(np.reshape(x, ())) if isinstance(x, np.ndarray) else int(x)


def layouts(arrays: dict[str, Any]) -> dict[str, Layout]:
    """The layout of every array."""
    return {name: Layout.of(x) for name, x in arrays.items()}


def layout_in_order(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> Layout:
    """The layout of `cupyflash.arrays.empty_in_order`."""
    result, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(memory_order(len(shape), like)):
        result[axis] = step
        step *= shape[axis]
    return Layout(tuple(shape), tuple(result), np.dtype(dtype))


def result_layouts(problem: Problem) -> dict[str, Layout]:
    """The layouts of out and lse that a call makes."""
    p = problem
    out = layout_in_order(p.out_shape, p.out_dtype, p.q)
    return {"out": out, "lse": layout_in_order(p.lse_shape, p.lse_dtype, None)}


def gradient_layouts(problem: Problem, wrt: Iterable[str]) -> dict[str, Layout]:
    """The layouts of gradients that a call makes, by record name."""
    likes = {GRADIENTS[name]: getattr(problem, name) for name in wrt}
    return {name: layout_in_order(x.shape, x.dtype, x) for name, x in likes.items()}


def layout_bytes(layout: Layout) -> int:
    """Bytes of a dense array of that layout."""
    return math.prod(layout.shape) * layout.dtype.itemsize
