"""Running recipes: what is allocated and copied for a call, and the launches themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays import empty_in_order
from ..problem import GRADIENT_NAMES, Gradients, Problem
from ..request import BackwardRequest
from .backward_recipe import backward_recipe
from .families import Family, choose_family
from .flatten import flat_backward, flat_forward
from .machine import gpu
from .operands import GRADIENTS, gradient_layouts, layout_in_order, layouts, numbers, tensors
from .params import ADDRESSES, CALL_BYTES, Layout, lead_axes, pack_call
from .recipe import Recipe, Sizes, forward_recipe
from .sm90_launch import readable


def forward(
    problem: Problem,
    out: Any = None,
    lse: Any = None,
    *,
    need_lse: bool = True,
    workspace: Any = None,
    machine: Any = None,
) -> tuple[Any, Any]:
    """(out, lse) in full form; what is None is allocated, lse only where it is wanted."""
    machine = machine or gpu(problem.q.device.id)
    with machine.current():
        arrays, sizes = _uploaded(machine, tensors(problem)), Sizes.of(problem)
        given = {name: x for name, x in (("out", out), ("lse", lse)) if x is not None}
        made = {"out": layout_in_order(problem.out_shape, problem.out_dtype, problem.q)}
        family, _ = choose_family(problem, machine.compute_capability)
        if not fits(sizes, made | layouts(arrays | given), family.lead_axes):
            _refuse_capture(machine)
            return flat_forward(
                problem,
                out,
                lse,
                lambda p: fits_copied(p, family),
                lambda p, x: forward(p, x, need_lse=need_lse, workspace=workspace, machine=machine),
            )
        if family.arch_suffix:
            arrays |= _kept(machine, readable(problem))
        if out is None:
            out = empty_in_order(machine, problem.out_shape, problem.out_dtype, problem.q)
        if lse is None and need_lse:
            lse = machine.empty(problem.lse_shape, problem.lse_dtype)
            machine.keep_for_graph(lse)  # a vjp may be all that holds it
        arrays |= {"out": out} | ({} if lse is None else {"lse": lse})
        found = tuple(layouts(arrays).items())
        recipe = forward_recipe(family.name, machine.compute_capability, sizes, found)
        _check_workspace(machine, workspace, recipe.workspace_bytes)
        addresses = _addresses(machine, arrays)
        if recipe.workspace:
            workspace = _scratch(machine, recipe) if workspace is None else workspace
            addresses |= {name: machine.address(workspace) + offset for name, offset in recipe.workspace}
        run(recipe, machine, addresses, numbers(problem))
    return out, lse


def backward(request: BackwardRequest, *, workspace: Any = None, machine: Any = None) -> Gradients:
    """The gradients that are wanted, in their arguments' shapes."""
    p = request.problem
    machine = machine or gpu(p.q.device.id)
    with machine.current():
        arrays, sizes = _uploaded(machine, tensors(p)) | cotangents(request), Sizes.of(p)
        targets = {GRADIENTS[name]: x for name, x in zip(GRADIENT_NAMES, request.targets) if x is not None}
        made = gradient_layouts(p, request.wrt)
        family, _ = choose_family(p, machine.compute_capability, backward=True)
        if not fits(sizes, made | layouts(arrays | targets), family.lead_axes):
            _refuse_capture(machine)
            return flat_backward(
                request,
                lambda p: fits_copied(p, family),
                lambda moved: backward(moved, workspace=workspace, machine=machine),
            )
        results = {name: _gradient_array(machine, request, name) for name in request.wrt}
        arrays |= {GRADIENTS[name]: x for name, x in results.items()}
        if arrays["dout"] is not request.dout:
            machine.keep_for_graph(arrays["dout"])
        if family.arch_suffix:
            arrays |= _kept(machine, readable(p, arrays["dout"]))
        cc = machine.compute_capability
        wanted = frozenset(name[1:] for name in made)
        found = tuple(layouts(arrays).items())
        recipe = backward_recipe(family.name, cc, sizes, found, wanted, request.accumulate)
        _check_workspace(machine, workspace, recipe.workspace_bytes)
        if workspace is None:
            workspace = _scratch(machine, recipe)
        if not recipe.launches and not request.accumulate:
            for x in results.values():
                x.fill(0)
        start = machine.address(workspace)
        addresses = _addresses(machine, arrays) | {name: start + offset for name, offset in recipe.workspace}
        run(recipe, machine, addresses, numbers(p))
    return _as_given(request, results)


def cotangents(request: BackwardRequest) -> dict[str, Any]:
    """What the backward reads beside the problem's arrays; dout in q's dtype."""
    given = {name: getattr(request, name) for name in ("dout", "out", "lse", "dlse", "delta")}
    if given["dout"].dtype != request.problem.dtype:
        given["dout"] = given["dout"].astype(request.problem.dtype)
    return {name: x for name, x in given.items() if x is not None}


def _gradient_array(machine: Any, request: BackwardRequest, name: str) -> Any:
    """Where a gradient goes, with the heads axis that a 2-D argument lacks."""
    argument, target = getattr(request.problem, name), getattr(request.targets, name)
    if target is None:
        return empty_in_order(machine, argument.shape, argument.dtype, argument)
    return target[None] if name in request.problem.two_d else target


def _as_given(request: BackwardRequest, results: dict[str, Any]) -> Gradients:
    """The gradients in the arguments' own shapes; arrays of the caller's come back as the very objects."""
    found: dict[str, Any] = {}
    for name, x in results.items():
        target = getattr(request.targets, name)
        shaped = x[0] if name in request.problem.two_d else x
        found[name] = shaped if target is None else target
    return Gradients(**found)


def run(recipe: Recipe, machine: Any, addresses: dict[str, int], values: Iterable[float]) -> None:
    """Launch a recipe on the current stream; nothing is launched before every kernel is there."""
    kernels = [machine.load(launch.config) for launch in recipe.launches]
    row, values = [addresses.get(name, 0) for name in ADDRESSES], tuple(values)
    for launch, kernel in zip(recipe.launches, kernels):
        seen = [0 if index in launch.hidden else x for index, x in enumerate(row)] if launch.hidden else row
        record = np.void(pack_call(seen, values) + launch.record[CALL_BYTES:])
        config, grid, arguments = launch.config, launch.grid, [record]
        if launch.extras is not None:
            grid = min(grid, machine.multiprocessors) if launch.extras.stays else grid
            counter = machine.counter() if launch.extras.counts else 0
            behind = (launch.extras.maps(seen), *launch.extras.records(seen, values, counter))
            arguments += map(np.void, behind)
        kernel.function((grid,), (config.threads,), tuple(arguments), config.shared_bytes)


def fits(sizes: Sizes, found: dict[str, Layout], most_lead_axes: int) -> bool:
    """Whether a record can express these layouts, with so many leading axes."""
    return all(x.expressible() for x in found.values()) and lead_axes(sizes, found) <= most_lead_axes


def fits_copied(problem: Problem, family: Family) -> bool:
    """The same of a problem whose operands and results are in C order: the operands decide."""
    return fits(Sizes.of(problem), layouts(tensors(problem)), family.lead_axes)


def _addresses(machine: Any, arrays: dict[str, Any]) -> dict[str, int]:
    found = {name: machine.address(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if found[name] % x.dtype.itemsize:
            raise ValueError(
                f"{name} lies at an address that is no multiple of its itemsize {x.dtype.itemsize}: copy it first"
            )
    return found


def _scratch(machine: Any, recipe: Recipe) -> Any:
    """A workspace of the call's own."""
    workspace = machine.empty(recipe.workspace_bytes, np.uint8)
    machine.keep_for_graph(workspace)
    return workspace


def _kept(machine: Any, copies: dict[str, Any]) -> dict[str, Any]:
    machine.keep_for_graph(*copies.values())
    return copies


def _refuse_capture(machine: Any) -> None:
    """Flat copies come and go with the call; a graph would use their memory when it is another's."""
    if machine.captures():
        raise RuntimeError(
            "these layouts are copied for the call, which a CUDA graph cannot capture: give arrays whose strides are "
            "multiples of the itemsize and whose leading axes can be merged (C-contiguous ones can)"
        )


def _uploaded(machine: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, those of host integers replaced by copies where the machine reads them."""
    return {name: x if machine.owns(x) else machine.upload(x) for name, x in arrays.items()}


def _check_workspace(machine: Any, workspace: Any, need: int) -> None:
    """Refuse a ``workspace=`` that cannot serve."""
    if workspace is None:
        return
    if getattr(workspace, "dtype", None) != np.uint8:
        kind = getattr(workspace, "dtype", type(workspace).__name__)
        raise TypeError(f"workspace must be a uint8 array on the device of q, got {kind}")
    if not machine.owns(workspace):
        raise TypeError("workspace must be a uint8 array on the device of q: it lies elsewhere")
    if not workspace.flags.c_contiguous or machine.address(workspace) % 16:
        raise ValueError("workspace must be contiguous and start at a multiple of 16 bytes")
    if workspace.size < need:
        raise ValueError(
            f"workspace has {workspace.size} bytes, this call needs {need}: see plan(...).workspace_bytes"
        )
