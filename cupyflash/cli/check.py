"""``cupyflash check``: exact, small and fast, each claim on its own evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from .. import reference, testing
from ..cuda.emulate import BuildError, EmulationError
from ..problem import Gradients
from ._case import Case, EmulatedCase, random_arrays
from ._judge import judged
from ._measure import fastest, measured, to_host
from ._options import (
    DTYPES,
    Integers,
    api_options,
    attention_options,
    described,
    json_option,
    shape_options,
    shapes,
)
from ._report import emit, steps

CLAIMS = ("exactness", "memory", "speed")
AnyCase = TypeVar("AnyCase", bound=Case)
SHAPE, EMULATED_SHAPE = "1,4,1024,64", "1,2,130,64"
# Extra memory may grow like length**1, and no measurement is exact; the score matrix grows like length**2.
MOST_GROWTH = 1.25
PLAIN_LIMIT = 2**29


@click.command(
    short_help="Exact, small, fast: check each claim.",
    epilog="""\b
Examples:
  cupyflash check
  cupyflash check --claim exactness --shape 2,8,512,64 --heads-kv 2 --causal --dtype float16
  cupyflash check --claim memory --lengths 2048,4096,8192
  cupyflash check --claim speed --shape 1,8,4096,64 --json
  cupyflash check --emulate --causal --dropout-p 0.1 --dropout-seed 1
""",
)
@click.option(
    "--claim", "claims", multiple=True, type=click.Choice(CLAIMS), help="One of them; default all three."
)
@click.option(
    "--shape",
    type=Integers(low=0),
    default=SHAPE,
    show_default=True,
    help="...,heads,length,head_dim of q.",
)
@shape_options
@click.option("--dtype", type=DTYPES, default="float32", show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random arrays."
)
@click.option(
    "--lengths",
    type=Integers(low=1),
    default="1024,2048,4096",
    show_default=True,
    help="Two or more lengths, each at least twice the last, at which memory is measured.",
)
@click.option(
    "--emulate",
    is_flag=True,
    help=f"Run the GPU's kernels on the CPU, with their memory accesses checked (needs g++): exactness alone, "
    f"by default of {EMULATED_SHAPE}.",
)
@attention_options
@json_option
def command(
    claims: tuple[str, ...],
    shape: tuple[int, ...],
    seqlen_k: int | None,
    heads_kv: int | None,
    head_dim_v: int | None,
    dtype: str,
    seed: int,
    lengths: tuple[int, ...],
    emulate: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    r"""Check three claims. Exit code 1 if exactness or memory fails; speed is reported, not judged.

    \b
    exactness  out, lse and every gradient against the float64 reference, next to the plain computation
               of the same precision: at most twice its error and one rounding unit
    memory     bytes allocated beyond the results, measured at growing lengths: at most linear growth
    speed      time beside that of the plain computation, softmax in place
    """
    if emulate:
        if set(claims) - {"exactness"}:
            raise click.UsageError(
                "--emulate has no timing and no memory of a GPU: it checks --claim exactness alone"
            )
        claims = ("exactness",)
        if click.get_current_context().get_parameter_source("shape") == ParameterSource.DEFAULT:
            shape = Integers().convert(EMULATED_SHAPE, None, None)
    claims = claims or CLAIMS
    if isinstance(lengths, int) or any(b < 2 * a for a, b in pairwise(lengths)):
        raise click.UsageError(
            f"--lengths needs two or more lengths, each at least twice the last: got {lengths}"
        )
    wanted = shapes(shape, seqlen_k, heads_kv, head_dim_v)
    options = api_options(flags, heads=shape[-3] if len(shape) > 2 else 1)

    def make(wanted: tuple[tuple[int, ...], ...], kind: type[AnyCase]) -> AnyCase:
        case = kind(random_arrays(wanted, dtype, seed), options)
        case.set_dout(random_arrays((case.out_shape,), dtype, seed + 1)[0])
        case.forward()
        return case

    report: dict[str, Any] = {
        "shapes": dict(zip("qkv", wanted)),
        "dtype": dtype,
        "options": described(options),
    }
    if "exactness" in claims:
        report["exactness"] = (
            _emulated(lambda: make(wanted, EmulatedCase)) if emulate else _exactness(make(wanted, Case))
        )
    if "memory" in claims:
        grown = [tuple((*x[:-2], length, x[-1]) for x in wanted) for length in lengths]
        report["memory"] = _memory([make(x, Case) for x in grown], lengths)
    if "speed" in claims:
        report["speed"] = _speed(make(wanted, Case))
    passed = all(report[claim].get("passed", True) for claim in claims)
    emit(report | {"passed": passed}, as_json)
    if not passed:
        click.get_current_context().exit(1)


def _exactness(case: Case) -> dict[str, Any]:
    arrays, options = case.arrays, case.options
    # Each computation differentiates its own forward.
    computations: list[Callable[[], Any]] = [
        case.backward,
        case.plain,
        partial(testing.plain_backward, case.dout, *arrays, **options),
        partial(reference.attention, *arrays, return_lse=True, **options),
        partial(reference.attention_backward, case.dout, *arrays, **options),
    ]
    ours, plain, plain_gradients, exact, exact_gradients = (run() for run in steps(computations, "exactness"))
    names = ("out", "lse", *(f"d{name}" for name in Gradients._fields))
    results = zip((case.out, case.lse, *ours), (*plain, *plain_gradients), (*exact, *exact_gradients))
    lines = [judged(name, *to_host(ways)) for name, ways in zip(names, results) if ways[0] is not None]
    return {"results": lines, "passed": all(line["passed"] for line in lines)}


def _emulated(make: Callable[[], EmulatedCase]) -> dict[str, Any]:
    """Exactness of the emulated kernels, or the fault that one of them has."""
    try:
        case = make()
        found = _exactness(case)
    except (EmulationError, BuildError) as error:
        return {"fault": str(error), "passed": False}
    return {"kernels": [str(config) for config in dict.fromkeys(case.machine.launched)], **found}


def _memory(cases: list[Case], lengths: tuple[int, ...]) -> dict[str, Any]:
    ways: dict[str, tuple[Callable[[Case], Any], Callable[[Case], Any]]] = {
        "forward": (Case.forward, Case.plain),
        "backward": (Case.backward, Case.plain_backward),
    }
    section: dict[str, Any] = {}
    for name, (ours, plain) in ways.items():
        lines = []
        for length, case in steps(list(zip(lengths, cases)), f"memory {name}"):
            matrices = math.prod(case.problem.score_shape) * case.problem.score_dtype.itemsize
            beside = (
                measured(partial(plain, case), case.on_device).extra_bytes
                if matrices <= PLAIN_LIMIT
                else None
            )
            lines.append(
                {
                    "length": length,
                    "extra_bytes": measured(partial(ours, case), case.on_device).extra_bytes,
                    "plain_extra_bytes": beside,
                    "score_matrices_bytes": matrices,
                }
            )
        growth = _growth(lines[-2:])
        section[name] = lines
        section[f"{name}_growth"] = f"length^{growth:.2f} from {lengths[-2]} to {lengths[-1]}"
        section["passed"] = section.get("passed", True) and growth <= MOST_GROWTH
    return section


def _growth(lines: list[dict[str, Any]]) -> float:
    """The exponent of length with which extra memory grew between two measurements."""
    first, last = lines
    ratio = max(last["extra_bytes"], 1) / max(first["extra_bytes"], 1)
    return math.log(ratio) / math.log(last["length"] / first["length"])


def _speed(case: Case) -> dict[str, Any]:
    pairs = (("forward", case.forward, case.plain), ("backward", case.backward, case.plain_backward))
    lines = []
    for name, ours, plain in steps(pairs, "timing"):
        seconds, plain_seconds = (fastest(call, 3, case.on_device) for call in (ours, plain))
        lines.append(
            {
                "pass": name,
                "seconds": seconds,
                "plain_seconds": plain_seconds,
                "times_as_fast": plain_seconds / seconds,
            }
        )
    return {"passes": lines}
