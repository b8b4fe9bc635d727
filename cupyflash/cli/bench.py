"""``cupyflash bench``: how fast, beside the plain computation, the peers that are installed, and the roofline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import __version__, cost, plan
from ..cuda import device
from ..roofline import GPUS, roofline
from ._case import Case, random_arrays
from ._files import refuse_existing, write_whole
from ._options import (
    DTYPES,
    TARGET,
    Integers,
    api_options,
    attention_options,
    described,
    force_option,
    json_option,
    shape_options,
    shapes,
)
from ._peers import peer_calls
from ._plot import draw_bars, require_matplotlib
from ._report import emit, steps, usage_errors
from ._timing import medians

OURS = "cupyflash"


@click.command(
    short_help="Time it beside the plain computation and peers.",
    epilog="""\b
Examples:
  cupyflash bench
  cupyflash bench --shape 4,16,4096,64 --dtype float32 --dtype float16 --pass forward
  cupyflash bench --shape 4,16,4096,128 --dtype bfloat16 --causal --json
  cupyflash bench --backend cpu --shape 1,8,1024,64 --no-peers --plot bench.png
""",
)
@click.option(
    "--shape",
    type=Integers(low=1),
    help="...,heads,length,head_dim of q.  [default: 4,16,4096,64; CPU: 1,8,1024,64]",
)
@shape_options
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, default=["float32"], show_default=True)
@click.option(
    "--pass",
    "passes",
    type=click.Choice(["forward", "backward"]),
    multiple=True,
    help="One of them; default both.",
)
@attention_options
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Medians are over rounds."
)
@click.option(
    "--gpu", type=click.Choice(list(GPUS), case_sensitive=False), help="Whose roofline to compare with."
)
@click.option("--plain/--no-plain", default=True, help="Time the plain computation too.  [default: yes]")
@click.option("--peers/--no-peers", default=True, help="Time the peers that are installed.  [default: yes]")
@click.option("--plot", type=TARGET, help="Draw the speeds to this PNG file.")
@force_option
@json_option
def command(
    shape: tuple[int, ...] | None,
    seqlen_k: int | None,
    heads_kv: int | None,
    head_dim_v: int | None,
    dtypes: tuple[str, ...],
    passes: tuple[str, ...],
    rounds: int,
    gpu: str | None,
    plain: bool,
    peers: bool,
    plot: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Median times in one process, all libraries in turn; only ratios within one run count.

    plain ratio is the plain computation's time over a library's; roofline share is the least time that FLOPs and
    bytes allow over the time taken. Backward means the gradients alone, from the forward's stored results.
    """
    if plot is not None:
        require_matplotlib()
        refuse_existing(plot, force)
    if flags["backend"] is None:
        flags["backend"] = "cpu" if device.missing() else "cuda"
    on_device = flags["backend"] == "cuda"
    wanted = shapes(
        shape or ((4, 16, 4096, 64) if on_device else (1, 8, 1024, 64)), seqlen_k, heads_kv, head_dim_v
    )
    options = api_options(flags, heads=wanted[0][-3] if len(wanted[0]) > 2 else 1)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    work = [(dtype, name) for dtype in dtypes for name in passes or ("forward", "backward")]
    for dtype, name in steps(work, "timing"):
        case = Case(random_arrays(wanted, dtype, 0), options)
        case.set_dout(random_arrays((case.out_shape,), dtype, 1)[0])
        with usage_errors():
            case.forward()
            calls, refused = _calls(case, name == "backward", plain, peers)
        left_out |= {f"{library}, {dtype} {name}": reason for library, reason in refused.items()}
        peaks = _peaks(gpu or (_device_gpu() if on_device else None), case)
        rows += _rows(case, dtype, name, medians(calls, rounds, on_device), peaks)
    report = {
        "machine": _machine(on_device),
        "shapes": dict(zip("qkv", wanted)),
        "options": described(options),
        "times": rows,
    }
    if left_out:
        report["left_out"] = left_out
    if plot is not None:
        bars = {f"{row['library']}\n{row['dtype']} {row['pass']}": row["tflop_per_second"] for row in rows}
        write_whole(
            plot, lambda file: draw_bars(file, bars, "TFLOP/s", f"q {wanted[0]}, k {wanted[1]}"), force
        )
        report["plot"] = str(plot)
    emit(report, as_json)


def _calls(
    case: Case, backward: bool, plain: bool, peers: bool
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What is timed, by library, and what is not, with the reason."""
    calls: dict[str, Callable[[], Any]] = {OURS: case.backward if backward else case.forward}
    left_out: dict[str, str] = {}
    if plain:
        call = case.plain_backward if backward else case.plain
        try:
            call()
        except MemoryError:
            left_out["plain"] = f"its score matrices take {cost.score_matrix_bytes(case.problem)} bytes each"
        else:
            calls["plain"] = call
    if peers:
        others, refused = peer_calls(case, backward)
        calls |= others
        left_out |= refused
    return calls, left_out


def _rows(
    case: Case, dtype: str, name: str, times: dict[str, float], peaks: tuple[float, float] | None
) -> list[dict[str, Any]]:
    backward = name == "backward"
    flops, moved = cost.flops(case.problem, backward), cost.bytes_once(case.problem, backward)
    least = roofline(flops, moved, *peaks).seconds if peaks else None
    kernel = plan(*case.arrays, backward=backward, **case.options).config
    return [
        {
            "library": library,
            "dtype": dtype,
            "pass": name,
            "median_seconds": seconds,
            "tflop_per_second": flops / seconds / 1e12,
            "plain_ratio": times["plain"] / seconds if "plain" in times else None,
            "roofline_share": least / seconds if least else None,
            "kernel": kernel if library == OURS else None,
        }
        for library, seconds in times.items()
    ]


def _device_gpu() -> str | None:
    """The name in the table of GPUs of the current device, if it stands there."""
    name = re.sub(r"[^A-Z0-9]", "", _machine(True)["device"].upper())
    return next((key for key in GPUS if re.sub(r"[^A-Z0-9]", "", key.upper()) in name), None)


def _peaks(gpu: str | None, case: Case) -> tuple[float, float] | None:
    """FLOP/s for the case's dtype and byte/s of that GPU; None where either is unknown."""
    if gpu is None or getattr(GPUS[gpu], case.problem.dtype.name) is None:
        return None
    return GPUS[gpu].peak_flops(case.problem.dtype.name), GPUS[gpu].peak_bytes


def _machine(on_device: bool) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    versions = {"cupyflash": __version__, "numpy": np.__version__}
    if not on_device:
        return {"device": "cpu"} | versions
    cupy = device.require_gpu()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    driver, toolkit = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    return {
        "device": name,
        "cuda_driver": driver,
        "cuda_runtime": toolkit,
        "cupy": cupy.__version__,
    } | versions
