"""Calls that no record can express, run on copies with a single leading axis.

The record holds four leading axes and strides in whole elements. A call with more leading axes that do not merge,
or with strides that are no multiple of the itemsize, is copied: its operands are broadcast over the leading axes
into dense memory, its results come back through dense arrays, and broadcast axes of gradients are summed after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ..arrays import array_module, empty_in_order
from ..problem import GRADIENT_NAMES, Gradients, Problem
from ..request import BackwardRequest
from .params import Layout

# How many axes of an operand lie behind the leading ones.
_TAILS = {"q": 3, "k": 3, "v": 3, "mask": 3, "bias": 3, "sinks": 1, "alibi_slopes": 1}
_TAILS |= {"q_lengths": 0, "kv_lengths": 0, "query_offset": 0}


def flat_problem(problem: Problem) -> Problem:
    """The same call with copied operands and one leading axis."""
    changes = {name: _flat(problem, getattr(problem, name), tail) for name, tail in _TAILS.items()}
    if dropout := problem.dropout:
        origin = _flat(problem, dropout.origin_t, 1)
        changes["dropout"] = dataclasses.replace(dropout, origin_t=origin)
    return dataclasses.replace(problem, lead=(problem.batch,), two_d=(), **changes)


def copied_bytes(problem: Problem) -> int:
    """Bytes of the copies that `flat_problem` makes."""
    total = 0
    for name, tail in _TAILS.items():
        x = getattr(problem, name)
        if x is not None and not isinstance(x, int) and x.ndim > tail:
            total += problem.batch * math.prod(x.shape[x.ndim - tail :]) * x.dtype.itemsize
    return total


def flat_forward(
    problem: Problem, out: Any, lse: Any, forward: Callable[[Problem], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Run ``forward`` on the copy and bring its results into ``out`` and ``lse`` (allocated where None)."""
    xp = array_module(problem.q)
    results = forward(flat_problem(problem))
    if out is None:
        out = empty_in_order(xp, problem.out_shape, problem.out_dtype, problem.q)
    if lse is None and results[1] is not None:
        lse = xp.empty(problem.lse_shape, problem.lse_dtype)
    for target, result in zip((out, lse), results):
        if target is not None:
            target[...] = result.reshape(target.shape)
    return out, lse


def flat_backward(request: BackwardRequest, backward: Callable[[BackwardRequest], Gradients]) -> Gradients:
    """Run ``backward`` on the copy, in the score dtype, and sum what was broadcast."""
    p = request.problem
    xp = array_module(p.q)
    flat = flat_problem(p)
    results: dict[str, Any] = {
        name: None if (x := getattr(request, name)) is None else _merged(p, x)
        for name in ("dout", "out", "lse", "dlse", "delta")
    }
    targets = Gradients(**{name: xp.empty(getattr(flat, name).shape, p.score_dtype) for name in request.wrt})
    moved = BackwardRequest(problem=flat, wrt=request.wrt, targets=targets, accumulate=False, **results)
    gradients = backward(moved)
    return Gradients(*(_summed(request, name, x, xp) for name, x in zip(GRADIENT_NAMES, gradients)))


def _merged(problem: Problem, x: Any) -> Any:
    """An array over all leading axes, which become one."""
    return array_module(x).ascontiguousarray(x).reshape(problem.batch, *x.shape[len(problem.lead) :])


def _flat(problem: Problem, x: Any, tail: int) -> Any:
    """An operand broadcast over the leading axes, which become one; as it is where it has none of them."""
    if x is None or isinstance(x, int):
        return x
    xp = array_module(x)
    if x.ndim <= tail:
        return x if Layout.of(x).expressible() else xp.ascontiguousarray(x)
    rest = x.shape[x.ndim - tail :]
    return _merged(problem, xp.broadcast_to(x, (*problem.lead, *rest)))


def _summed(request: BackwardRequest, name: str, gradient: Any, xp: Any) -> Any:
    """A flat gradient in its argument's own shape, rounded once."""
    if gradient is None:
        return None
    p = request.problem
    argument, target = getattr(p, name), getattr(request.targets, name)
    own = argument.shape
    if len(own) > _TAILS[name]:
        full = gradient.reshape(*p.lead, *gradient.shape[1:])
        padded = (1,) * (full.ndim - len(own)) + own
        axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != full.shape[axis])
        gradient = full.sum(axis=axes, dtype=p.score_dtype).reshape(own)
    if name in p.two_d:
        gradient, argument = gradient[0], argument[0]
    if target is None:
        target = empty_in_order(xp, gradient.shape, argument.dtype, argument)
    elif request.accumulate:
        gradient = target.astype(p.score_dtype) + gradient
    target[...] = gradient.astype(target.dtype)
    return target
