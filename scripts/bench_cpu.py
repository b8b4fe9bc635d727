#!/usr/bin/env python
"""Speed of the CPU backend beside the plain computation, and beside PyTorch's where torch is installed.

One process; the candidates of a row take turns, and a ratio is one of medians. Plain holds the whole score matrix,
float32 throughout, with as few passes over it as there can be: softmax in place, the division left to the output, a
backward pass that recomputes P from lse. Rows with one thread give BLAS one thread and the backend one worker; the
others leave both what they have by default.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupyflash

try:
    import torch
except ImportError:
    torch = None

Call = Callable[[], Any]


def plain_forward(q: Any, k: Any, v: Any, hidden: Any = None) -> tuple[Any, Any]:
    """(out, lse) with the score matrix in memory; ``hidden``: where not to attend."""
    p = _scaled(q) @ k.swapaxes(-1, -2)
    if hidden is not None:
        np.copyto(p, -np.inf, where=hidden)
    top = p.max(axis=-1, keepdims=True)
    p -= top
    np.exp(p, out=p)
    total = p.sum(axis=-1, keepdims=True)
    out = p @ v
    out /= total
    return out, (top + np.log(total))[..., 0]


def plain_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, hidden: Any = None
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) with two score matrices in memory."""
    q = _scaled(q)
    p = q @ k.swapaxes(-1, -2)
    if hidden is not None:
        np.copyto(p, -np.inf, where=hidden)
    p -= lse[..., None]
    np.exp(p, out=p)
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    return _scaled(ds @ k), ds.swapaxes(-1, -2) @ q, dv


def _scaled(x: Any) -> Any:
    return x * np.float32(x.shape[-1] ** -0.5)


def candidates(shape: tuple[int, ...]) -> dict[str, dict[str, Call]]:
    """Pass -> who computes it -> the call."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    calls: dict[str, dict[str, Call]] = {}
    for causal in (False, True):
        hidden = ~np.tri(shape[-2], dtype=bool) if causal else None
        stored = (dout, q, k, v, *cupyflash.attention(q, k, v, causal=causal, return_lse=True))
        suffix, options = (" causal", {"causal": True}) if causal else ("", {})
        calls["forward" + suffix] = {
            "cupyflash": partial(cupyflash.attention, q, k, v, **options),
            "plain": partial(plain_forward, q, k, v, hidden),
        }
        calls["backward" + suffix] = {
            "cupyflash": partial(cupyflash.attention_backward, *stored, **options),
            "plain": partial(plain_backward, *stored, hidden),
        }
        if torch is not None:
            forward, backward = _torch_calls(q, k, v, dout, causal)
            calls["forward" + suffix]["torch"], calls["backward" + suffix]["torch"] = forward, backward
    return calls


def _torch_calls(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> tuple[Call, Call]:
    attend = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    out, cotangent = attend(*tensors, is_causal=causal), torch.from_numpy(dout)

    def forward() -> Any:
        with torch.no_grad():
            return attend(*tensors, is_causal=causal)

    return forward, lambda: torch.autograd.grad(out, tensors, cotangent, retain_graph=True)


def check_plain() -> None:
    """Plain computes the same, in float32 throughout: its peak memory has no room for a wider score matrix."""
    length = 1024
    matrix = 4 * length * length
    for name, calls in candidates((1, 1, length, 64)).items():
        tracemalloc.start()
        plain = calls["plain"]()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for x, y in zip(
            plain, calls["cupyflash"]() if name.startswith("backward") else [calls["cupyflash"]()]
        ):
            assert x.dtype == np.float32
            np.testing.assert_allclose(x, y, atol=1e-5)
        # Forward S, backward P and dP; the results are each a sixteenth of a matrix.
        matrices = 1 if name.startswith("forward") else 2
        assert peak < (matrices + 0.5) * matrix, (
            f"plain {name} allocates {peak / matrix:.2f} float32 matrices"
        )


def measure(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for package in ("numpy", "threadpoolctl", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    blas = [{key: x.get(key) for key in ("internal_api", "version", "num_threads")} for x in _blas()]
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "versions": versions,
        "blas": blas,
    }


def _blas() -> list[dict[str, Any]]:
    return [x for x in threadpool_info() if x["user_api"] == "blas"]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@click.command(epilog="Example: scripts/bench_cpu.py --repeats 5 --json scripts/results/cpu.json")
@click.option("--batch", default=1, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--length", default=4096, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Turns; the median counts.")
@click.option(
    "--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here."
)
def main(batch: int, heads: int, length: int, head_dim: int, repeats: int, target: Path | None) -> None:
    """Time the CPU backend against the plain computation."""
    check_plain()
    shape = (batch, heads, length, head_dim)
    results: dict[str, Any] = {**environment(), "shape": list(shape), "dtype": "float32", "rows": []}
    calls = candidates(shape)
    threads = max((x["num_threads"] for x in _blas()), default=1)
    click.echo(f"{shape} float32, {results['cpu']}, numpy {np.__version__}, median of {repeats}")
    for count in sorted({1, threads}):
        if torch is not None:
            torch.set_num_threads(count)
        with threadpool_limits(count, user_api="blas"):
            for name, group in calls.items():
                row = {"pass": name, "threads": count, "seconds": measure(group, repeats)}
                ours = row["seconds"]["cupyflash"]
                row["ratio"] = {
                    who: seconds / ours for who, seconds in row["seconds"].items() if who != "cupyflash"
                }
                results["rows"].append(row)
                others = "  ".join(
                    f"{who} {row['seconds'][who]:.3f} s ({ratio:.2f} x)"
                    for who, ratio in row["ratio"].items()
                )
                click.echo(f"threads {count}  {name:<16} cupyflash {ours:.3f} s  {others}")
    if target is not None:
        target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
