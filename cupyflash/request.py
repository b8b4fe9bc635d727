"""BackwardRequest: one call of attention_backward, validated and normalised once, like Problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .arrays import as_operand
from .problem import GRADIENT_NAMES, Gradients, Problem


@dataclass(frozen=True, eq=False)
class BackwardRequest:
    """A Problem with its cotangents, the forward's results, and which gradients are wanted where."""

    problem: Problem
    dout: Any
    out: Any
    lse: Any
    dlse: Any
    delta: Any
    wrt: tuple[str, ...]
    targets: Gradients
    accumulate: bool

    @classmethod
    def create(
        cls,
        problem: Problem,
        dout: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        delta: Any = None,
        wrt: Any = None,
        grads_out: Any = None,
        accumulate: bool = False,
    ) -> BackwardRequest:
        """Check the arguments of attention_backward and return the normalised request."""
        p = problem
        if out is None and delta is None:
            raise ValueError("out is None: give out, or delta = sum_e dout * out of shape (..., heads_q, m)")
        narrow = (p.dtype, p.score_dtype)
        dout = _result(dout, "dout", p, p.out_shape, narrow)
        out = None if out is None else _result(out, "out", p, p.out_shape, narrow)
        lse, dlse, delta = (
            None if x is None else _result(x, name, p, p.lse_shape, (p.score_dtype,))
            for x, name in ((lse, "lse"), (dlse, "dlse"), (delta, "delta"))
        )
        if lse is None:
            raise ValueError("lse is None: attention(..., return_lse=True) gives it")
        accumulate = checks.flag(accumulate, "accumulate")
        results = [x for x in (dout, out, lse, dlse, delta) if x is not None]
        targets = _targets(p, grads_out, results)
        wanted = wanted_gradients(p, wrt, targets if grads_out is not None else None)
        missing = [name for name in wanted if getattr(targets, name) is None]
        if accumulate and missing:
            raise ValueError(
                f"accumulate=True adds to grads_out, which has no array for {', '.join(missing)}"
            )
        return cls(p, dout, out, lse, dlse, delta, wanted, targets, accumulate)


def wanted_gradients(problem: Problem, wrt: Any, targets: Gradients | None = None) -> tuple[str, ...]:
    """The names in ``wrt``, in GRADIENT_NAMES order; None: those with a target, else every array argument."""
    if wrt is None:
        if targets is None:
            return problem.differentiable
        return tuple(name for name in GRADIENT_NAMES if getattr(targets, name) is not None)
    if isinstance(wrt, str):
        wrt = (wrt,)
    if not isinstance(wrt, Iterable):
        raise TypeError(f"wrt must be names of arguments, got {checks.describe(wrt)}")
    wrt = tuple(wrt)  # an iterator gives its names but once
    for name in wrt:
        if name not in GRADIENT_NAMES:
            raise ValueError(f"wrt names {name!r}; expected a selection of {', '.join(GRADIENT_NAMES)}")
        if getattr(problem, name) is None:
            raise ValueError(f"wrt names {name!r}, but no {name}= was given")
    return tuple(name for name in GRADIENT_NAMES if name in wrt)


def _result(x: Any, name: str, problem: Problem, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]) -> Any:
    """An array shaped like a result of the forward, with the heads axis that 2-D results lack."""
    x = checks.same_place(as_operand(x, name), name, problem.q)
    expected = shape[1:] if problem.squeeze else shape
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} must have dtype {' or '.join(sorted({str(d) for d in dtypes}))}, got {x.dtype}"
        )
    return x[None] if problem.squeeze else x


def _targets(problem: Problem, grads_out: Any, results: list[Any]) -> Gradients:
    """``grads_out``, each array checked and apart from every array that is read and from the others."""
    if grads_out is None:
        return Gradients()
    if not isinstance(grads_out, Gradients):
        raise TypeError(
            f"grads_out must be a cupyflash.Gradients of arrays or None, got {type(grads_out).__name__}"
        )
    taken = [*problem.inputs(), *results]
    for name, x in zip(GRADIENT_NAMES, grads_out):
        if x is None:
            continue
        argument = getattr(problem, name)
        if argument is None:
            raise ValueError(f"grads_out.{name} is given, but no {name}= was given")
        checks.output(x, f"grads_out.{name}", problem.shape_of(name), argument.dtype, taken, problem.q)
        taken.append(x)
    return grads_out
