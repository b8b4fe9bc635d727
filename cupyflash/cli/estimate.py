"""``cupyflash estimate``: what a call costs, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import cost
from ..problem import Problem
from ..roofline import GPUS, Bound, roofline
from ._files import dtype_of, refuse_existing, write_whole
from ._options import (
    DTYPES,
    PRECISION,
    TARGET,
    Integers,
    api_options,
    force_option,
    json_option,
    position_options,
    shape_options,
    shapes,
)
from ._plot import draw_roofline, require_matplotlib
from ._report import emit, usage_errors


@click.command(
    short_help="What a call costs: bytes, FLOPs, roofline.",
    epilog="""\b
Examples:
  cupyflash estimate --shape 1,1,8192,64
  cupyflash estimate --shape 1,1,100000,64 --causal --gpu H100-SXM
  cupyflash estimate --shape 4,32,8192,128 --dtype bfloat16 --backward --gpu A100-80GB --plot roof.png
  cupyflash estimate --shape 1,8,4096,64 --dtype float32 --peak-tflops 1.2 --bandwidth 40
""",
)
@click.option(
    "--shape",
    type=Integers(low=0),
    default="1,1,8192,64",
    show_default=True,
    help="...,heads,length,head_dim of q.",
)
@shape_options
@click.option("--dtype", type=DTYPES, default="float16", show_default=True)
@position_options
@click.option("--backward", is_flag=True, help="The gradients' cost instead of the forward's.")
@click.option("--block-q", type=click.IntRange(min=1), default=128, show_default=True, help="Queries a tile.")
@click.option("--block-kv", type=click.IntRange(min=1), default=128, show_default=True, help="Keys a tile.")
@click.option(
    "--gpu", type=click.Choice(list(GPUS), case_sensitive=False), help="Bound the time on this GPU."
)
@click.option(
    "--precision",
    type=PRECISION,
    default="ieee",
    show_default=True,
    help="Products of float32 that --gpu counts on.",
)
@click.option(
    "--peak-tflops", type=click.FloatRange(min=0, min_open=True), help="Peak rate, instead of --gpu."
)
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), help="GB/s, instead of --gpu.")
@click.option("--plot", type=TARGET, help="Draw the roofline to this PNG file.")
@force_option
@json_option
def command(
    shape: tuple[int, ...],
    seqlen_k: int | None,
    heads_kv: int | None,
    head_dim_v: int | None,
    dtype: str,
    backward: bool,
    block_q: int,
    block_kv: int,
    gpu: str | None,
    precision: str,
    peak_tflops: float | None,
    bandwidth: float | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
    **positions: Any,
) -> None:
    """Bytes, FLOPs, arithmetic intensity and the roofline bound of a call; nothing of its size is allocated.

    Three ways to do it: naive stores its score matrices; tiled re-reads keys and values once a query tile
    and finds them in no cache; once is a perfect cache, each array passing a single time.
    """
    peaks = _peaks(gpu, dtype, precision, peak_tflops, bandwidth)
    if plot is not None:
        if peaks is None:
            raise click.UsageError("--plot draws a roofline: give --gpu, or --peak-tflops and --bandwidth")
        require_matplotlib()
        refuse_existing(plot, force)
    q_shape, k_shape, v_shape = shapes(shape, seqlen_k, heads_kv, head_dim_v)
    element = np.zeros((), dtype_of(dtype))
    with usage_errors():
        q, k, v = (np.broadcast_to(element, x) for x in (q_shape, k_shape, v_shape))
        problem = Problem.create(q, k, v, **api_options(positions, heads=0))
    report = _estimate(problem, block_q, block_kv, backward)
    bounds = {}
    if peaks is not None:
        bounds = {
            way["algorithm"]: roofline(way["flops"], way["bytes"], *peaks)
            for way in report["algorithms"]
            if way["bytes"]
        }
        report["roofline"] = _roofline_report(bounds, gpu, peaks)
    if plot is not None and peaks is not None:
        title = f"{gpu or 'given rates'}: q {q_shape} {dtype} {'backward' if backward else 'forward'}"
        write_whole(plot, lambda file: draw_roofline(file, bounds, *peaks, title), force)
        report["plot"] = str(plot)
    emit(report, as_json)


def _estimate(problem: Problem, block_q: int, block_kv: int, backward: bool) -> dict[str, Any]:
    matrices = problem.batch * problem.heads_q
    flops = cost.flops(problem, backward)
    dense_pairs = matrices * problem.seqlen_q * problem.seqlen_k
    pairs = cost.total_pairs(problem)
    products = (
        3 * problem.head_dim + 2 * problem.head_dim_v if backward else problem.head_dim + problem.head_dim_v
    )
    tiled = cost.bytes_tiled(problem, block_q, block_kv, backward)
    ways = (
        ("naive", 2 * dense_pairs * products, cost.bytes_naive(problem, backward), cost.peak_bytes_naive),
        ("tiled", flops, tiled, cost.peak_bytes_tiled),
        ("once", flops, min(tiled, cost.bytes_once(problem, backward)), cost.peak_bytes_tiled),
    )
    return {
        "score_matrices": matrices,
        "score_matrix_bytes": cost.score_matrix_bytes(problem, matrices=1),
        "all_score_matrices_bytes": cost.score_matrix_bytes(problem),
        "visible_pairs": pairs,
        "visible_fraction": pairs / dense_pairs if dense_pairs else 0.0,
        "flops": flops,
        "algorithms": [
            {
                "algorithm": name,
                "flops": work,
                "bytes": moved,
                "flop_per_byte": work / moved if moved else 0.0,
                "peak_memory_bytes": peak(problem, backward),
            }
            for name, work, moved, peak in ways
        ],
    }


def _peaks(
    gpu: str | None, dtype: str, precision: str, peak_tflops: float | None, bandwidth: float | None
) -> tuple[float, float] | None:
    """FLOP/s and byte/s of the machine that was named or described; None if none was."""
    if gpu is None:
        if (peak_tflops is None) != (bandwidth is None):
            raise click.UsageError("--peak-tflops and --bandwidth go together (or name a --gpu)")
        return None if peak_tflops is None or bandwidth is None else (peak_tflops * 1e12, bandwidth * 1e9)
    if peak_tflops is not None or bandwidth is not None:
        raise click.UsageError("give --gpu, or --peak-tflops and --bandwidth, not both")
    machine = GPUS[gpu]
    kind = "tf32" if dtype == "float32" and precision != "ieee" else dtype
    with usage_errors(f"{gpu}: "):
        peak = machine.peak_flops(kind)
    # Three tf32 products make one of float32's precision.
    return (peak / 3 if kind == "tf32" and precision == "tf32x3" else peak), machine.peak_bytes


def _roofline_report(bounds: dict[str, Bound], gpu: str | None, peaks: tuple[float, float]) -> dict[str, Any]:
    return {
        "machine": gpu or "as given",
        "source": GPUS[gpu].source if gpu else "the command line",
        "peak_flops_per_second": peaks[0],
        "bandwidth_bytes_per_second": peaks[1],
        "ridge_flop_per_byte": peaks[0] / peaks[1],
        "bounds": [
            {
                "algorithm": name,
                "limit": bound.limit,
                "at_least_seconds": bound.seconds,
                "at_most_flops_per_second": bound.flops_per_second,
            }
            for name, bound in bounds.items()
        ],
    }
