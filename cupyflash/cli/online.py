"""``cupyflash online``: the block-by-block softmax, step by step."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from ._options import Numbers, json_option
from ._report import emit


@click.command(
    short_help="The block-by-block softmax, step by step.",
    epilog="""\b
Examples:
  cupyflash online
  cupyflash online --scores 1,2,3,4 --values 1,0,0,1 --block 2
  cupyflash online --scores=-inf,5,0 --values 1,2,3 --json
""",
)
@click.option(
    "--scores", type=Numbers(), default="1000,1001,999", show_default=True, help="One row of scores."
)
@click.option("--values", type=Numbers(), default="2,4,8", show_default=True, help="One value a score.")
@click.option("--block", type=click.IntRange(min=1), default=1, show_default=True, help="Scores a block.")
@json_option
def command(scores: tuple[float, ...], values: tuple[float, ...], block: int, as_json: bool) -> None:
    """Softmax-weighted mean of values, merged block by block as the kernels do.

    A block is summed up by m, its largest score, l = sum exp(s - m) and u = sum exp(s - m) * value. Two summaries
    merge by scaling each by exp(m_old - m_new) and adding; u / l at the end is the exact result, and no exponent
    was ever above 0.
    """
    if len(scores) != len(values):
        raise click.UsageError(f"--scores has {len(scores)} numbers and --values has {len(values)}")
    emit(_merged(np.array(scores), np.array(values), block), as_json)


def _merged(scores: np.ndarray, values: np.ndarray, block: int) -> dict[str, Any]:
    from .. import online

    steps: list[dict[str, Any]] = []
    total = online.summarize(scores[:0], values[:0])  # of no key: (-inf, 0, 0)
    for start in range(0, len(scores), block):
        part = slice(start, start + block)
        summary = online.summarize(scores[part], values[part])
        total = online.merge(total, summary)
        out, _ = online.finish(total)
        steps.append(
            {
                "block": list(scores[part]),
                "block_m": float(summary.m),
                "block_l": float(summary.l),
                "block_u": float(summary.u),
                "m": float(total.m),
                "l": float(total.l),
                "u": float(total.u),
                "u/l": float(out),
            }
        )
    out, lse = online.finish(total)
    return {"steps": steps, "out": float(out), "lse": float(lse)}
