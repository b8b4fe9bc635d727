"""The way of a call: host arrays to the CPU backend, device arrays to CUDA, results back in the caller's form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import checks, cpu
from .arrays import is_device, stand_in
from .cost import Plan
from .problem import Gradients, Problem
from .request import BackwardRequest, wanted_gradients

OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Problem.create).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


@functools.cache
def _cuda() -> ModuleType:
    """The CUDA backend, imported when a call first needs it: `import cupyflash` does not wait for it."""
    from . import cuda

    return cuda


def check_names(options: dict[str, Any], function: str) -> None:
    """Refuse a keyword that `cupyflash.attention` does not take, in the words of Python's own error."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def attention(
    q: Any, k: Any, v: Any, options: dict[str, Any], *, return_lse: bool, out: Any, workspace: Any
) -> Any:
    """`cupyflash.attention`."""
    key = None
    if out is None and workspace is None and is_device(q):
        key, result = _cuda().recall((q, k, v), options, (return_lse,))
        if result is not None:
            return result
    problem = Problem.create(q, k, v, **options)
    result = _forward(problem, return_lse, out, workspace)[0]
    if key is not None:
        _cuda().keep_forward(key, problem, return_lse)
    return result


def attention_vjp(
    q: Any, k: Any, v: Any, options: dict[str, Any], *, wrt: Any, return_lse: bool, out: Any, workspace: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """`cupyflash.attention_vjp`."""
    options, wrt = OPTIONS | options, tuple(wrt) if isinstance(wrt, list) else wrt
    key = results = problem = None
    if out is None and workspace is None and is_device(q):
        key, results = _cuda().recall((q, k, v), options, (wrt, return_lse))
    if results is not None:
        full, lse = results
        result = results if return_lse else full
    else:
        problem = Problem.create(q, k, v, **options)
        wrt = wanted_gradients(problem, wrt)
        result, full, lse = _forward(problem, return_lse, out, workspace, need_lse=True)
        if problem.squeeze:
            full, lse = full[0], lse[0]
        if key is not None:
            _cuda().keep_forward(key, problem, True)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        request = {"dlse": dlse, "delta": None, "wrt": wrt, "grads_out": None, "accumulate": False}
        return _backward((dout, q, k, v, full, lse), options, request, problem=problem)

    return result, vjp


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    options: dict[str, Any],
    request: dict[str, Any],
    *,
    workspace: Any,
) -> Gradients:
    """`cupyflash.attention_backward`."""
    if isinstance(request["wrt"], list):
        request["wrt"] = tuple(request["wrt"])
    return _backward((dout, q, k, v, out, lse), OPTIONS | options, request, workspace=workspace)


def plan(
    q: Any, k: Any, v: Any, options: dict[str, Any], *, backward: bool, family: str | None, arch: int | None
) -> Plan:
    """`cupyflash.plan`."""
    backward = checks.flag(backward, "backward")
    if family is not None or arch is not None:
        options = {"backend": "cuda"} | options
    described = {name: stand_in(x) for name, x in options.items()}
    problem = Problem.create(stand_in(q), stand_in(k), stand_in(v), **described)
    if problem.backend == "cuda":
        return _cuda().plan(problem, backward=backward, family=family, arch=arch)
    return cpu.plan(problem, backward)


def _forward(
    problem: Problem, return_lse: bool, out: Any, workspace: Any, need_lse: bool = False
) -> tuple[Any, Any, Any]:
    """(what the caller gets, out with its heads axis, lse with its heads axis)."""
    return_lse = checks.flag(return_lse, "return_lse")
    targets: tuple[Any, ...] = (None, None) if out is None else _given_outputs(problem, out, return_lse)
    if problem.squeeze:
        targets = tuple(None if x is None else x[None] for x in targets)
    if problem.backend == "cuda":
        way = _cuda() if is_device(problem.q) else _cuda().transfer
        full, lse = way.forward(problem, *targets, need_lse=need_lse or return_lse, workspace=workspace)
    else:
        full, lse = cpu.forward(problem, *targets)
    if out is not None:
        return out, full, lse
    result = (full[0], None if lse is None else lse[0]) if problem.squeeze else (full, lse)
    return (result if return_lse else result[0]), full, lse


def _given_outputs(problem: Problem, out: Any, return_lse: bool) -> tuple[Any, Any]:
    """The ``out=`` argument as (out, lse or None), checked."""
    if return_lse and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"with return_lse=True out must be a pair (out, lse), got {type(out).__name__}")
    target, lse = out if return_lse else (out, None)
    inputs = problem.inputs()
    skip = 1 if problem.squeeze else 0
    checks.output(target, "out", problem.out_shape[skip:], problem.out_dtype, inputs, problem.q)
    if return_lse:
        checks.output(lse, "lse", problem.lse_shape[skip:], problem.lse_dtype, [*inputs, target], problem.q)
    return target, lse


def _backward(
    arrays: tuple[Any, ...],
    options: dict[str, Any],
    request: dict[str, Any],
    *,
    problem: Problem | None = None,
    workspace: Any = None,
) -> Gradients:
    """The gradients; ``problem`` is that of the operands and the options if it is there already."""
    dout, q, k, v, out, lse = arrays
    key = None
    if workspace is None and request["grads_out"] is None and is_device(q):
        read = (q, k, v, out, lse, dout, request["dlse"], request["delta"])
        key, result = _cuda().recall(read, options, (request["wrt"], request["accumulate"]))
        if result is not None:
            return result
    problem = problem or Problem.create(q, k, v, **options)
    checked = BackwardRequest.create(problem, dout, out, lse, **request)
    if problem.backend == "cpu":
        return cpu.backward(checked)
    way = _cuda() if is_device(problem.q) else _cuda().transfer
    result = way.backward(checked, workspace=workspace)
    if key is not None:
        _cuda().keep_backward(key, checked)
    return result
