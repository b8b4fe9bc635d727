"""``cupyflash compile``: kernels compiled ahead of the first call, or checked without a GPU."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import click
import numpy as np

from ..cuda import device
from ._files import dtype_of
from ._options import DTYPES, Integers, Window, json_option
from ._report import emit, steps, usage_errors


class _Shape(NamedTuple):
    """An array in description, as `cupyflash.compile_kernels` takes it."""

    shape: tuple[int, ...]
    dtype: Any


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "mask": {"mask": _Shape((1, 1), np.dtype(bool))},
    "bias": {"bias": _Shape((1, 1), np.dtype(np.float32))},
    "alibi": {"alibi_slopes": _Shape((1,), np.dtype(np.float32))},
    "softcap": {"softcap": 1.0},
    "sinks": {"sinks": _Shape((1,), np.dtype(np.float32))},
    "lengths": {"kv_lengths": 1},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 0},
}


@click.command(
    epilog="""\b
Examples:
  cupyflash compile --dtype float16 --head-dim 64,128 --backward
  cupyflash compile --dtype float32 --head-dim 64 --option causal --option bias
  cupyflash compile --arch 80,90 --head-dim 128 --option all --backward
"""
)
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, default=["float16"], show_default=True)
@click.option(
    "--head-dim", type=Integers(low=1), default="64,128", show_default=True, help="Head dims of q and k."
)
@click.option("--head-dim-v", type=click.IntRange(min=1), help="Size of a value, where not that of a key.")
@click.option(
    "--option",
    "names",
    type=click.Choice([*OPTIONS, "all"]),
    multiple=True,
    help="An option that the calls will use; several are used together.",
)
@click.option("--window", type=Window(), help="Keys before and after the query, e.g. 128,0.")
@click.option(
    "--backward/--forward", default=False, help="The backward's kernels too.  [default: forward alone]"
)
@click.option("--family", help="A kernel family instead of the fastest that takes the call.")
@click.option("--arch", type=Integers(low=1), help="Compute capabilities to check for, e.g. 80,90.")
@json_option
def command(
    dtypes: tuple[str, ...],
    head_dim: int | tuple[int, ...],
    head_dim_v: int | None,
    names: tuple[str, ...],
    window: Any,
    backward: bool,
    family: str | None,
    arch: int | tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Compile the kernels of calls to come.

    Without --arch: for this machine's GPU, into CuPy's kernel cache, so that later processes load them at once.
    With --arch: a check by NVRTC alone, which needs no GPU and keeps nothing.

    Exit code 1 where a kernel does not compile.
    """
    from ..cuda.module import CompileError

    if arch is None and (reason := device.missing()):
        raise click.UsageError(f"there is no GPU to compile for ({reason}): --arch 90 checks without one")
    head_dims = (head_dim,) if isinstance(head_dim, int) else head_dim
    archs = (arch,) if arch is None or isinstance(arch, int) else arch
    options = {} if window is None else {"window": window}
    for name in OPTIONS if "all" in names else names:
        options |= OPTIONS[name]
    work = list(itertools.product(archs, dtypes, head_dims, (False, True) if backward else (False,)))
    rows, failures = [], []
    for one, dtype, d, is_backward in steps(work, "compiling"):
        try:
            with usage_errors():
                rows += _compiled(one, dtype, d, head_dim_v or d, is_backward, family, options)
        except click.UsageError as error:
            if not isinstance(error.__cause__, CompileError):
                raise
            failures.append(str(error))
    rows = [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]
    emit({"kernels": rows} | ({"failures": failures} if failures else {}), as_json)
    if failures:
        raise SystemExit(1)


def _compiled(
    arch: int | None, dtype: str, d: int, e: int, backward: bool, family: str | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row of the report for each kernel of one call."""
    from .. import compile_kernels

    q, v = (_Shape((1, 1, size), dtype_of(dtype)) for size in (d, e))
    reports = compile_kernels(q, q, v, backward=backward, family=family, arch=arch, **options)
    return [
        {
            "kernel": str(report.config),
            "arch": f"sm_{report.arch}",
            "registers": report.registers,
            "spill_bytes": report.spill_bytes,
            "shared_bytes": report.shared_bytes,
            "compile_seconds": round(report.seconds, 4),
        }
        for report in reports
    ]
