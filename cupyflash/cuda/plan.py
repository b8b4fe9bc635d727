"""`cupyflash.plan` for the CUDA backend: what would run, without a GPU, an allocation or a compile."""

from __future__ import annotations

from typing import NamedTuple

from .. import cost
from ..arrays import is_device
from ..problem import Problem
from . import module, sm90_launch
from .backward_recipe import backward_recipe
from .device import compute_capability, missing, require_cupy
from .families import choose_family
from .flatten import copied_problem, described, most_bytes
from .launch import fits, fits_copied
from .operands import gradient_layouts, layout_bytes, layout_in_order, layouts, result_layouts, tensors
from .params import Layout
from .recipe import Recipe, Sizes, forward_recipe


def plan(
    problem: Problem, *, backward: bool = False, family: str | None = None, arch: int | None = None
) -> cost.Plan:
    """What a call would run and cost.

    Parameters
    ----------
    problem : Problem
        The call; its operands need only shapes, strides and dtypes.
    backward : bool
        Plan the gradients of all array arguments.
    family : str, optional
        A kernel family instead of the fastest that takes the call.
    arch : int, optional
        A compute capability such as 90 instead of the device's.

    Returns
    -------
    cost.Plan
        registers is None where the kernel is not compiled yet.

    Raises
    ------
    ValueError
        An unknown family, or one that does not take the call.
    RuntimeError
        There is no GPU and no ``arch``.
    """
    p = problem
    found = planned(p, backward, family, arch)
    recipe, main = found.recipe, found.recipe.main
    geometry = None if main is None else main.geometry
    block_q, block_kv = (geometry.block_q, geometry.block_kv) if geometry else (1, 1)
    report = None if main is None or arch is not None else module.report_of(main)
    return cost.Plan(
        backend="cuda",
        family=found.family,
        config=str(main) if main else f"{found.family}, nothing to launch",
        block_q=block_q,
        block_kv=block_kv,
        splits=recipe.runs,
        kernels=tuple(launch.config.kernel for launch in recipe.launches),
        flops=cost.flops(p, backward),
        bytes_moved=cost.bytes_tiled(p, block_q, block_kv, backward),
        workspace_bytes=found.workspace_bytes,
        copied_bytes=found.copied_bytes,
        output_bytes=found.output_bytes,
        registers=report.registers if report else None,
        shared_bytes=report.shared_bytes if report else None,
        passed_over=found.passed_over,
    )


class Planned(NamedTuple):
    """What would be launched, by which family, and what it allocates; ``passed_over`` is as in `cost.Plan`.

    ``workspace_bytes`` is enough for fewer gradients too: without that of slopes one kernel may make dq, dk and dv.
    """

    recipe: Recipe
    workspace_bytes: int
    family: str
    passed_over: tuple[tuple[str, str], ...]
    copied_bytes: int
    output_bytes: int


def planned(problem: Problem, backward: bool, family: str | None, arch: int | None) -> Planned:
    """The recipe of a call, whose operands need only shapes, strides and dtypes; arguments as `plan`'s."""
    cc = _compute_capability(problem) if arch is None else arch
    chosen, passed_over = choose_family(problem, cc, family, backward=backward)
    found, results = layouts(tensors(problem)), _results(problem, backward)
    output = sum(map(layout_bytes, results.values()))
    copied, given = 0, problem
    if not fits(Sizes.of(problem), found | results, chosen.lead_axes):
        problem = copied_problem(problem, lambda p: fits_copied(p, chosen), described)
        found, results = layouts(tensors(problem)), _results(problem, backward)
    if backward:
        found |= _cotangents(problem)
    if chosen.arch_suffix:
        made = sm90_launch.copies(problem, found["dout"] if backward else None)
        copied += sum(copy.nbytes for copy in made.values())
        found |= {name: copy.layout for name, copy in made.items()}
    sizes = Sizes.of(problem)
    if not backward:
        recipe = forward_recipe(chosen.name, cc, sizes, tuple((found | results).items()))
        workspace = recipe.workspace_bytes
    else:
        laid, wanted = tuple((found | results).items()), frozenset(name[1:] for name in results)
        recipe, fewer = (
            backward_recipe(chosen.name, cc, sizes, laid, names, False)
            for names in (wanted, wanted - {"slopes"})
        )
        workspace = max(recipe.workspace_bytes, fewer.workspace_bytes)
    if problem is not given:
        copied = most_bytes(given, problem, backward, workspace + copied) - output - workspace
    return Planned(recipe, workspace, chosen.name, passed_over, copied, output)


def _compute_capability(problem: Problem) -> int:
    """That of the device that a call would run on."""
    if is_device(problem.q):
        return compute_capability(problem.q.device.id)
    if reason := missing():
        raise RuntimeError(
            f"there is no GPU to plan for ({reason}): give arch=, a compute capability such as 90"
        )
    return compute_capability(require_cupy().cuda.runtime.getDevice())


def _results(problem: Problem, backward: bool) -> dict[str, Layout]:
    """Layouts of what a call allocates: out and lse, or the gradients of all array arguments."""
    return gradient_layouts(problem, problem.differentiable) if backward else result_layouts(problem)


def _cotangents(problem: Problem) -> dict[str, Layout]:
    """Layouts of what a backward reads beside the operands; dout and out lie as `attention` makes out."""
    dout = layout_in_order(problem.out_shape, problem.dtype, problem.q)
    return {"dout": dout, **result_layouts(problem)}
