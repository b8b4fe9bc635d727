"""Calls that no record can express, run on copies.

The record holds a few leading axes and strides in whole elements. A call with more leading axes that do not merge, or
with strides that are no multiple of the itemsize, is copied: its operands into C-ordered memory, and where even their
leading axes are too many, as operands that are broadcast along different ones have, into one leading axis each. Its
results come back through dense arrays where they are not such arrays themselves; broadcast axes of gradients that the
copies lack are summed after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..arrays import array_module, empty_in_order, memory_order, stand_in
from ..problem import GRADIENT_NAMES, Gradients, Problem
from ..request import BackwardRequest
from .params import Layout, c_strides

# How many axes of an operand lie behind the leading ones.
_TAILS = {"q": 3, "k": 3, "v": 3, "mask": 3, "bias": 3, "sinks": 1, "alibi_slopes": 1}
_TAILS |= {"q_lengths": 0, "kv_lengths": 0, "query_offset": 0}

Copy = Callable[[Any, tuple[int, ...]], Any]


def _copied(x: Any, shape: tuple[int, ...]) -> Any:
    xp = array_module(x)
    return xp.ascontiguousarray(xp.broadcast_to(x, shape))


def copied_problem(problem: Problem, fits: Callable[[Problem], bool], copy: Copy = _copied) -> Problem:
    """The same call with operands in C order, and with one leading axis if it does not fit with its own.

    Which of both depends on shapes alone, so that strides do not change bits. ``copy(x, shape)`` is to broadcast x.
    """
    if fits(_with_operands(problem, lambda x: described(x, x.shape))):
        return _with_operands(problem, lambda x: copy(x, x.shape))
    return flat_problem(problem, copy)


def flat_problem(problem: Problem, copy: Copy = _copied) -> Problem:
    """The same call with copied operands and one leading axis."""
    p = problem

    def merged(x: Any, tail: int) -> Any:
        rest = x.shape[x.ndim - tail :]
        return copy(x, (*p.lead, *rest)).reshape(p.batch, *rest)

    form = _with_operands(p, lambda x: copy(x, x.shape), merged)
    return dataclasses.replace(form, lead=(p.batch,))


def described(x: Any, shape: tuple[int, ...]) -> Any:
    """What a copy would look like, without its memory."""
    return stand_in(SimpleNamespace(shape=shape, dtype=x.dtype))


def most_bytes(problem: Problem, form: Problem, backward: bool, during: int) -> int:
    """The most bytes that a call takes at once, ``during`` of which its copied form takes for itself."""
    p, wide = problem, problem.score_dtype.itemsize
    rows = p.batch * p.heads_q * p.seqlen_q
    during += sum(_bytes(getattr(form, name)) for name in _TAILS if _is_copied(p, form, name))
    out, turned = rows * p.head_dim_v * p.dtype.itemsize, not _in_c_order(p.out_shape, p.q)
    if not backward:
        return out + rows * wide + max(during, out * turned)
    during += 2 * out * turned  # dout and out, which lie as `attention` makes out
    made = after = largest = 0
    for name in p.differentiable:
        x, copy = getattr(p, name), getattr(form, name)
        if _is_summed(x, copy):
            made += math.prod(copy.shape) * wide
            after += _bytes(x)
            largest = max(largest, math.prod(x.shape) * wide + _bytes(x))
        else:
            made += _bytes(x)
            after += 0 if _in_c_order(x.shape, x) else _bytes(x)
    return made + max(during, after + largest)


def flat_forward(
    problem: Problem,
    out: Any,
    lse: Any,
    fits: Callable[[Problem], bool],
    forward: Callable[[Problem, Any], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Run ``forward`` on copies, into an ``out`` of the wanted dtype, and bring its results to their places."""
    p = problem

    def on_copies() -> tuple[Any, Any]:  # which are gone when results are copied: `most_bytes` counts on it
        form, made = copied_problem(p, fits), None
        if out is not None and out.dtype != p.out_dtype:
            made = array_module(p.q).empty(form.out_shape, out.dtype)
        return forward(form, made)

    results = on_copies()
    return (
        _placed(results[0].reshape(p.out_shape), out, p.out_dtype, p.q),
        lse if results[1] is None else _placed(results[1].reshape(p.lse_shape), lse, p.lse_dtype, None),
    )


def flat_backward(
    request: BackwardRequest,
    fits: Callable[[Problem], bool],
    backward: Callable[[BackwardRequest], Gradients],
) -> Gradients:
    """Run ``backward`` on copies and sum what was broadcast for them, in the score dtype."""
    gradients = backward(_on_copies(request, copied_problem(request.problem, fits)))
    return Gradients(*(_summed(request, name, x) for name, x in zip(GRADIENT_NAMES, gradients)))


def _on_copies(request: BackwardRequest, form: Problem) -> BackwardRequest:
    """The same request there. Gradients that need no sum and no addition are rounded there, others after it."""
    p, targets = request.problem, {}
    xp = array_module(p.q)
    for name in request.wrt:
        target, argument, copy = (getattr(x, name) for x in (request.targets, p, form))
        exact = request.accumulate or _is_summed(argument, copy)
        dtype = argument.dtype if target is None else target.dtype
        targets[name] = xp.empty(copy.shape, p.score_dtype if exact else dtype)
    results: dict[str, Any] = {
        name: None
        if (x := getattr(request, name)) is None
        else xp.ascontiguousarray(x).reshape(*form.lead, *x.shape[len(p.lead) :])
        for name in ("dout", "out", "lse", "dlse", "delta")
    }
    return BackwardRequest(
        problem=form, wrt=request.wrt, targets=Gradients(**targets), accumulate=False, **results
    )


def _with_operands(
    problem: Problem, copy: Callable[[Any], Any], merged: Callable[[Any, int], Any] | None = None
) -> Problem:
    """The problem with copied operands; ``merged`` copies those with leading axes, given how many axes are behind."""

    def change(x: Any, tail: int) -> Any:
        if x.ndim <= tail:
            return x if Layout.of(x).expressible() else copy(x)
        return copy(x) if merged is None else merged(x, tail)

    found = {name: (getattr(problem, name), tail) for name, tail in _TAILS.items()}
    changes = {name: change(x, tail) for name, (x, tail) in found.items() if hasattr(x, "shape")}
    dropout = problem.dropout
    if dropout is not None and hasattr(dropout.origin_t, "shape"):
        changes["dropout"] = dataclasses.replace(dropout, origin_t=change(dropout.origin_t, 1))
    return dataclasses.replace(problem, two_d=(), **changes)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _is_copied(problem: Problem, form: Problem, name: str) -> bool:
    """Whether an operand is not what its copy would be."""
    x, copy = getattr(problem, name), getattr(form, name)
    if not hasattr(x, "shape") or copy is x:
        return False
    layout = Layout.of(x)
    steps = c_strides(layout.shape, layout.dtype.itemsize)
    whole = all(n == 1 or s == step for n, s, step in zip(layout.shape, layout.strides, steps, strict=True))
    return not whole or math.prod(x.shape) != math.prod(copy.shape)


def _is_summed(argument: Any, copy: Any) -> bool:
    """Whether an argument was broadcast for its copy, whose gradient has axes too many."""
    return math.prod(copy.shape) != math.prod(argument.shape)


def _in_c_order(shape: tuple[int, ...], like: Any) -> bool:
    """Whether `empty_in_order` gives a C-ordered array."""
    return memory_order(len(shape), like) == list(range(len(shape)))


def _placed(result: Any, target: Any, dtype: Any, like: Any) -> Any:
    """A C-ordered result in ``target``, or in a new array in the memory order of ``like``, which it may be itself."""
    if target is None:
        if result.dtype == dtype and _in_c_order(result.shape, like):
            return result
        target = empty_in_order(array_module(result), result.shape, dtype, like)
    target[...] = result.astype(target.dtype, copy=False)
    return target


def _summed(request: BackwardRequest, name: str, gradient: Any) -> Any:
    """A copy's gradient in its argument's own shape, rounded once."""
    if gradient is None:
        return None
    p = request.problem
    argument, target = getattr(p, name), getattr(request.targets, name)
    own = argument.shape
    if _is_summed(argument, gradient):
        full = gradient.reshape(*p.lead, *gradient.shape[1:])
        padded = (1,) * (full.ndim - len(own)) + own
        axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != full.shape[axis])
        gradient = full.sum(axis=axes, dtype=p.score_dtype)
    gradient = gradient.reshape(own)
    if name in p.two_d:
        gradient, argument = gradient[0], argument[0]
    if request.accumulate:
        gradient = target.astype(p.score_dtype) + gradient
    return _placed(gradient, target, argument.dtype, argument)
