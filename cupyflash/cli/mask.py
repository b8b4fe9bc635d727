"""``cupyflash mask``: who sees whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from ._files import refuse_existing, write_whole
from ._options import (
    TARGET,
    Integers,
    api_options,
    dropout_options,
    force_option,
    json_option,
    position_options,
)
from ._plot import draw_mask, require_matplotlib
from ._report import emit, usage_errors

TEXT_LIMIT = 64 * 128
PLOT_LIMIT = 4096 * 4096


@click.command(
    short_help="Who sees whom.",
    epilog="""\b
Examples:
  cupyflash mask --shape 6,6 --causal
  cupyflash mask --shape 4,8 --causal bottom_right --window 2,0
  cupyflash mask --shape 16,32 --dropout-p 0.3 --dropout-seed 7
  cupyflash mask --shape 1024,1024 --window 128,64 --plot window.png
""",
)
@click.option(
    "--shape", type=Integers(count=2, low=0), default="8,8", show_default=True, help="Queries and keys: m,n."
)
@position_options
@dropout_options
@click.option("--plot", type=TARGET, help="Draw it to this PNG file.")
@force_option
@json_option
def command(shape: tuple[int, int], plot: Path | None, force: bool, as_json: bool, **flags: Any) -> None:
    """Show which key a query may see, one row a query: 1 sees, 0 does not (hidden, or dropped).

    Options mean what they mean in cupyflash run. Large shapes need --plot.
    """
    m, n = shape
    if m * n > (PLOT_LIMIT if plot else TEXT_LIMIT):
        limit = (
            f"--plot draws up to {PLOT_LIMIT} pairs" if plot else f"text shows up to {TEXT_LIMIT}: use --plot"
        )
        raise click.UsageError(f"{m} x {n} = {m * n} pairs are too many: {limit}")
    if plot is not None:
        require_matplotlib()
        refuse_existing(plot, force)
    with usage_errors():
        allowed, kept = _masks(m, n, api_options(flags, heads=1))
    seen = allowed if kept is None else allowed & kept
    report: dict[str, Any] = {
        "queries": m,
        "keys": n,
        "allowed": int(allowed.sum()),
        "rows_that_see_nothing": int((~allowed.any(axis=1)).sum()),
    }
    if kept is not None:
        report["kept"] = int(seen.sum())
    if plot is not None:
        given = ", ".join(f"{name}={value}" for name, value in flags.items() if value is not None)
        write_whole(plot, lambda file: draw_mask(file, allowed, kept, given or "all"), force)
        report["plot"] = str(plot)
    else:
        rows = ["".join("01"[cell] for cell in row) for row in seen.astype(int)]
        report["mask"] = rows if as_json else "\n" + "\n".join(" ".join(row) for row in rows)
    emit(report, as_json)


def _masks(m: int, n: int, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """(allowed by position and lengths, kept by dropout or None) for one score matrix."""
    from .. import dropout_mask
    from ..problem import Problem

    x = np.float32(0)
    problem = Problem.create(
        np.broadcast_to(x, (m, 1)), np.broadcast_to(x, (n, 1)), np.broadcast_to(x, (n, 1)), **options
    )
    allowed = problem.visibility(*problem.host_lengths()).allowed(range(m), range(n))
    if not options.get("dropout_p"):
        return allowed, None
    kept = dropout_mask(
        (1, m, n),
        options["dropout_p"],
        options["dropout_seed"],
        options.get("dropout_offset", 0),
        options.get("dropout_origin", (0, 0, 0)),
    )
    return allowed, kept[0]
