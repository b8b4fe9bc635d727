"""``cupyflash run``: attention on your arrays, or on random ones, that checks itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import cost, plan
from ._case import Case, random_arrays
from ._files import as_dtype, load_npy, load_npz, refuse_existing, write_whole
from ._judge import judge_forward, judge_gradients
from ._measure import fastest, measured, to_host
from ._options import (
    DTYPES,
    FILE,
    TARGET,
    Integers,
    api_options,
    array_options,
    attention_options,
    described,
    force_option,
    json_option,
    shape_options,
    shapes,
)
from ._report import emit, usage_errors
from ._sample import sampled_columns, sampled_rows

DEFAULT_SHAPE = (1, 4, 1024, 64)
REPEAT_ON_DEVICE = 3


@click.command(
    short_help="Run attention on your arrays or random ones; it checks itself.",
    epilog="""\b
Examples:
  cupyflash run --shape 1,8,2048,64 --causal
  cupyflash run --shape 2,8,512,128 --heads-kv 2 --dtype bfloat16 --backward
  cupyflash run --shape 1,4,1,64 --seqlen-k 4096 --causal bottom_right
  cupyflash run --npz qkv.npz --window 256,0 --output out.npz
  cupyflash run --q q.npy --k k.npy --v v.npy --bias bias.npy --json
  cupyflash run --shape 1,2,512,64 --dropout-p 0.1 --dropout-seed 7 --backward
""",
)
@click.option("--npz", type=FILE, help=".npz with arrays q, k and v.")
@click.option("--q", "q_file", type=FILE, help=".npy of q; with --k and --v, memory-mapped.")
@click.option("--k", "k_file", type=FILE, help=".npy of k.")
@click.option("--v", "v_file", type=FILE, help=".npy of v.")
@click.option(
    "--shape",
    type=Integers(low=0),
    help=f"Random q of this shape: ...,heads,length,head_dim.  [default: {','.join(map(str, DEFAULT_SHAPE))}]",
)
@shape_options
@click.option("--dtype", type=DTYPES, help="Convert to it.  [default: as stored; float32 if random]")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random arrays and sample."
)
@attention_options
@array_options
@click.option("--backward", is_flag=True, help="Gradients of q, k, v and of float arrays among the options.")
@click.option("--dout", type=FILE, help=".npy of out's cotangent.  [default: random]")
@click.option(
    "--repeat",
    type=click.IntRange(min=0),
    help="Further runs, the fastest of which is reported.  [default: 0 on the CPU, 3 on a GPU]",
)
@click.option(
    "--sample", type=click.IntRange(min=0), default=128, show_default=True, help="Rows to check; 0: none."
)
@click.option("--output", type=TARGET, help="Write out and lse (and gradients) to this .npz.")
@force_option
@json_option
def command(
    npz: Path | None,
    q_file: Path | None,
    k_file: Path | None,
    v_file: Path | None,
    shape: tuple[int, ...] | None,
    seqlen_k: int | None,
    heads_kv: int | None,
    head_dim_v: int | None,
    dtype: str | None,
    seed: int,
    backward: bool,
    dout: Path | None,
    repeat: int | None,
    sample: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run attention; report kernel, time, memory and the error at a sample of rows.

    The error is against the float64 reference and stands beside the bound that the result is held to: twice
    the error of the plain computation of the same precision, plus one rounding unit. With so few rows a single
    order of summation can be lucky, so that of the plain computation may be any of eight. Exit code 1 if it is
    exceeded in all.
    """
    if output is not None:
        refuse_existing(output, force)
    files = (q_file, k_file, v_file)
    if npz is None and not any(files):
        wanted = shapes(DEFAULT_SHAPE if shape is None else shape, seqlen_k, heads_kv, head_dim_v)
        arrays = random_arrays(wanted, dtype or "float32", seed)
    elif (shape, seqlen_k, heads_kv, head_dim_v) == (None, None, None, None):
        arrays = tuple(as_dtype(x, dtype) for x in _load(npz, files))
    else:
        raise click.UsageError(
            "--shape and its companions are for random arrays: leave them out beside files"
        )
    heads = arrays[0].shape[-3] if arrays[0].ndim > 2 else 1
    case = Case(arrays, api_options(flags, heads))
    if backward:
        case.set_dout(_cotangent(case, dout, seed))
    if repeat is None:
        repeat = REPEAT_ON_DEVICE if case.on_device else 0
    report: dict[str, Any] = {
        "arrays": described(dict(zip("qkv", case.arrays))),
        "options": described(case.options),
        "forward": _measured(case, case.forward, repeat, backward=False),
    }
    if backward:
        report["backward"] = _measured(case, case.backward, repeat, backward=True)
    if sample:
        report["check"] = _checked(case, sample, seed)
        report["passed"] = all(line["passed"] for line in report["check"])
    if output is not None:
        write_whole(output, lambda file: np.savez(file, **_results(case)), force)
        report["output"] = str(output)
    emit(report, as_json)
    if not report.get("passed", True):
        click.get_current_context().exit(1)


def _measured(case: Case, call: Callable[[], Any], repeat: int, backward: bool) -> dict[str, Any]:
    """Run a pass; its section of the report."""
    with usage_errors():
        planned = plan(*case.arrays, backward=backward, **case.options)
    first = measured(call, case.on_device)
    seconds = fastest(call, repeat, case.on_device) if repeat else first.seconds
    return {
        "kernel": planned.config,
        "seconds": seconds,
        "flops": planned.flops,
        "flops_per_second": planned.flops / seconds,
        "extra_memory_bytes": first.extra_bytes,
        "all_score_matrices_bytes": cost.score_matrix_bytes(case.problem),
    }


def _checked(case: Case, sample: int, seed: int) -> list[dict[str, Any]]:
    """The errors at sampled rows, line by line; nothing where there are no rows."""
    problem = case.problem
    rows = sampled_rows(problem, sample, seed)
    if not rows:
        return []
    out, lse = case.with_heads(case.out), case.with_heads(case.lse)
    lines = judge_forward(problem, out, lse, rows)
    if case.gradients is not None:
        columns = sampled_columns(problem, sample, seed)
        dout = case.with_heads(case.dout)
        lines += judge_gradients(problem, dout, out, lse, case.gradients, rows, columns)
    return lines


def _results(case: Case) -> dict[str, Any]:
    """Every array computed, by the name it is saved under, on the host."""
    named = {"out": case.out, "lse": case.lse}
    if case.gradients is not None:
        named |= {f"d{name}": x for name, x in case.gradients._asdict().items() if x is not None}
    return {name: to_host(x) for name, x in named.items()}


def _cotangent(case: Case, file: Path | None, seed: int) -> np.ndarray:
    """What --dout holds, or random numbers, in the shape of out."""
    dtype = case.problem.dtype.name
    if file is None:
        return random_arrays((case.out_shape,), dtype, seed + 1)[0]
    dout = as_dtype(load_npy(file), dtype)
    if dout.shape != case.out_shape:
        raise click.UsageError(f"--dout must have out's shape {case.out_shape}, got {dout.shape}")
    return dout


def _load(npz: Path | None, files: tuple[Path | None, Path | None, Path | None]) -> list[np.ndarray]:
    if npz is not None:
        if any(files):
            raise click.UsageError("give --npz, or --q, --k and --v, not both")
        return load_npz(npz, ("q", "k", "v"))
    if None in files:
        raise click.UsageError("--q, --k and --v go together")
    return [load_npy(file) for file in files if file is not None]
