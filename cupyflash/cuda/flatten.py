"""Calls that no record can express, run on copies with a single leading axis.

The record holds four leading axes and strides in whole elements. A call with more leading axes that do not merge,
or with strides that are no multiple of the itemsize, is copied: its operands are broadcast over the leading axes
into dense memory, its results come back through dense arrays where they are not such arrays themselves, and broadcast
axes of gradients are summed after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ..arrays import array_module, empty_in_order, memory_order
from ..problem import GRADIENT_NAMES, Gradients, Problem
from ..request import BackwardRequest
from .params import Layout, c_strides

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


def flat_bytes(problem: Problem, backward: bool, during: int) -> int:
    """The most bytes that a call takes at once, ``during`` of which its flat form takes for itself."""
    p, wide = problem, problem.score_dtype.itemsize
    rows = p.batch * p.heads_q * p.seqlen_q
    during += sum(_copied_bytes(p, getattr(p, name), tail) for name, tail in _TAILS.items())
    out, turned = rows * p.head_dim_v * p.dtype.itemsize, not _in_c_order(p.out_shape, p.q)
    if not backward:
        return out + rows * wide + max(during, out * turned)
    during += 2 * out * turned  # dout and out, which lie as `attention` makes out
    flat = after = largest = 0
    for name in p.differentiable:
        x, tail = getattr(p, name), _TAILS[name]
        own = math.prod(x.shape)
        if not _is_summed(p, name):
            flat += own * x.dtype.itemsize
            after += 0 if _in_c_order(x.shape, x) else own * x.dtype.itemsize
            continue
        flat += p.batch * math.prod(x.shape[x.ndim - tail :]) * wide
        after += own * x.dtype.itemsize
        largest = max(largest, own * (wide + x.dtype.itemsize))
    return flat + max(during, after + largest)


def flat_forward(
    problem: Problem, out: Any, lse: Any, forward: Callable[[Problem, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Run ``forward`` on the copy, into an ``out`` of the wanted dtype, and bring its results to their places."""
    p = problem
    flat_out = None
    if out is not None and out.dtype != p.out_dtype:
        flat_out = array_module(p.q).empty((p.batch, *p.out_shape[len(p.lead) :]), out.dtype)
    results = forward(flat_problem(p), flat_out)
    return (
        _placed(results[0].reshape(p.out_shape), out, p.out_dtype, p.q),
        lse if results[1] is None else _placed(results[1].reshape(p.lse_shape), lse, p.lse_dtype, None),
    )


def flat_backward(request: BackwardRequest, backward: Callable[[BackwardRequest], Gradients]) -> Gradients:
    """Run ``backward`` on the copy and sum what was broadcast, in the score dtype."""
    gradients = backward(_flat_request(request))
    return Gradients(*(_summed(request, name, x) for name, x in zip(GRADIENT_NAMES, gradients)))


def _flat_request(request: BackwardRequest) -> BackwardRequest:
    """The same request on the copy. Gradients that need no sum and no addition are rounded there, others after it."""
    p, targets = request.problem, {}
    flat, xp = flat_problem(p), array_module(p.q)
    for name in request.wrt:
        target = getattr(request.targets, name)
        dtype = getattr(p, name).dtype if target is None else target.dtype
        exact = request.accumulate or _is_summed(p, name)
        targets[name] = xp.empty(getattr(flat, name).shape, p.score_dtype if exact else dtype)
    results: dict[str, Any] = {
        name: None if (x := getattr(request, name)) is None else _merged(p, x)
        for name in ("dout", "out", "lse", "dlse", "delta")
    }
    return BackwardRequest(
        problem=flat, wrt=request.wrt, targets=Gradients(**targets), accumulate=False, **results
    )


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
    return _merged(problem, xp.broadcast_to(x, (*problem.lead, *x.shape[x.ndim - tail :])))


def _copied_bytes(problem: Problem, x: Any, tail: int) -> int:
    """Bytes of the copy that `_flat` makes."""
    if x is None or isinstance(x, int) or (x.ndim <= tail and Layout.of(x).expressible()):
        return 0
    lead, rest = problem.lead if x.ndim > tail else (), x.shape[max(0, x.ndim - tail) :]
    whole = x.shape == (*lead, *rest) and _is_contiguous(Layout.of(x))
    return 0 if whole else math.prod((*lead, *rest)) * x.dtype.itemsize


def _is_contiguous(layout: Layout) -> bool:
    steps = c_strides(layout.shape, layout.dtype.itemsize)
    return all(n == 1 or s == step for n, s, step in zip(layout.shape, layout.strides, steps, strict=True))


def _in_c_order(shape: tuple[int, ...], like: Any) -> bool:
    """Whether `empty_in_order` gives a C-ordered array."""
    return memory_order(len(shape), like) == list(range(len(shape)))


def _is_summed(problem: Problem, name: str) -> bool:
    """Whether the flat gradient of an argument has leading axes that the argument was broadcast over."""
    shape, tail = getattr(problem, name).shape, _TAILS[name]
    return len(shape) > tail and shape[: len(shape) - tail] != problem.lead


def _placed(result: Any, target: Any, dtype: Any, like: Any) -> Any:
    """A C-ordered result in ``target``, or in a new array in the memory order of ``like``, which it may be itself."""
    if target is None:
        if result.dtype == dtype and _in_c_order(result.shape, like):
            return result
        target = empty_in_order(array_module(result), result.shape, dtype, like)
    target[...] = result.astype(target.dtype, copy=False)
    return target


def _summed(request: BackwardRequest, name: str, gradient: Any) -> Any:
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
        gradient = (full.sum(axis=axes, dtype=p.score_dtype) if axes else full).reshape(own)
    if name in p.two_d:
        gradient, argument = gradient[0], argument[0]
    if request.accumulate:
        gradient = target.astype(p.score_dtype) + gradient
    return _placed(gradient, target, argument.dtype, argument)
