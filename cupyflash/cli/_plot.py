"""Drawings, with matplotlib where it is installed (the extra ``plot``)."""

from __future__ import annotations

from typing import Any, BinaryIO

import click
import numpy as np

from ..roofline import Bound


def require_matplotlib() -> None:
    """Refuse ``--plot`` where matplotlib is missing, before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: pip install 'cupyflash[plot]'") from error


def draw_roofline(
    file: BinaryIO, bounds: dict[str, Bound], peak_flops: float, peak_bytes: float, title: str
) -> None:
    """The two roofs and a point for each algorithm, as PNG."""
    figure, axes = _figure(7.0, 4.5)
    ridge = peak_flops / peak_bytes
    intensities = [bound.intensity for bound in bounds.values() if bound.intensity > 0]
    span = np.geomspace(min([ridge, *intensities]) / 4, max([ridge, *intensities]) * 4, 200)
    axes.loglog(span, np.minimum(peak_flops, span * peak_bytes) / 1e12, color="black", linewidth=1.5)
    for name, bound in bounds.items():
        if bound.intensity > 0:
            axes.loglog(
                bound.intensity, bound.flops_per_second / 1e12, "o", label=f"{name} ({bound.limit} bound)"
            )
    axes.axvline(ridge, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("arithmetic intensity (FLOP / byte)")
    axes.set_ylabel("attainable TFLOP/s")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    if intensities:
        axes.legend()
    figure.savefig(file, format="png", dpi=120)


def draw_mask(file: BinaryIO, allowed: np.ndarray, kept: np.ndarray | None, title: str) -> None:
    """Who sees whom, as PNG: queries downwards, keys to the right; dropped pairs in a third colour."""
    from matplotlib.colors import ListedColormap

    figure, axes = _figure(6.0, 6.0)
    picture = allowed.astype(np.uint8)
    colours: tuple[str, ...]
    if kept is not None:
        picture += allowed & kept
        names, colours = "hidden, dropped, kept", ("#f0f0f0", "#f4a261", "#1d4e89")
    else:
        names, colours = "hidden, visible", ("#f0f0f0", "#1d4e89")
    axes.imshow(
        picture,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=len(colours) - 1,
        interpolation="nearest",
        aspect="auto",
    )
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    axes.set_title(f"{title}\n(light to dark: {names})", fontsize=9)
    figure.savefig(file, format="png", dpi=120)


def draw_bars(file: BinaryIO, values: dict[str, float], unit: str, title: str) -> None:
    """One bar for each name, as PNG."""
    figure, axes = _figure(max(4.0, 1.2 * len(values)), 4.0)
    bars = axes.bar(list(values), list(values.values()), color="#1d4e89")
    axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelsize=8)
    figure.savefig(file, format="png", dpi=120)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of its own canvas: no display, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
