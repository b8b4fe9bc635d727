"""Host arrays with backend="cuda": checked where they are, computed on copies on the GPU, results brought back."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from ..arrays import empty_in_order
from ..problem import GRADIENT_NAMES, Gradients, Problem
from ..request import BackwardRequest
from . import device, launch

_ARRAYS = (*GRADIENT_NAMES, "mask")  # lengths and offsets go by themselves, as they do beside device arrays
_RESULTS = ("dout", "out", "lse", "dlse", "delta")


def forward(problem: Problem, out: Any, lse: Any, *, need_lse: bool, workspace: Any) -> tuple[Any, Any]:
    """`launch.forward` of a problem of host arrays; out and lse are host arrays, or None."""
    cupy = device.require_gpu()
    targets = (None if x is None else cupy.empty(x.shape, x.dtype) for x in (out, lse))
    results = launch.forward(_moved(cupy, problem), *targets, need_lse=need_lse, workspace=workspace)
    return _back(results[0], out, problem.q), _back(results[1], lse, None)


def backward(request: BackwardRequest, *, workspace: Any) -> Gradients:
    """`launch.backward` of a request of host arrays."""
    cupy = device.require_gpu()
    given = {name: _copied(cupy, getattr(request, name)) for name in _RESULTS}
    targets = Gradients(*(_copied(cupy, x) for x in request.targets))
    moved = dataclasses.replace(request, problem=_moved(cupy, request.problem), targets=targets, **given)
    gradients = launch.backward(moved, workspace=workspace)
    return Gradients(*map(_back, gradients, request.targets, _arguments(request.problem)))


def _arguments(problem: Problem) -> list[Any]:
    """What gradients are like: the differentiable arguments, as they were given."""
    found = {name: getattr(problem, name) for name in GRADIENT_NAMES}
    return [x[0] if name in problem.two_d else x for name, x in found.items()]


def _moved(cupy: ModuleType, problem: Problem) -> Problem:
    """The problem with copies on the current device."""
    return dataclasses.replace(problem, **{name: _copied(cupy, getattr(problem, name)) for name in _ARRAYS})


def _copied(cupy: ModuleType, x: Any) -> Any:
    return None if x is None else cupy.asarray(x)


def _back(result: Any, target: Any, like: Any) -> Any:
    """A result on the host: in ``target``, or in a new array in the memory order of ``like``."""
    if result is None:
        return None
    if target is None:
        target = empty_in_order(np, result.shape, result.dtype, like)
    target[...] = result.get()
    return target
