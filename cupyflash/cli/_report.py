"""How commands speak: reports as text or JSON, errors of the API as usage errors, progress on a terminal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import numpy as np

Item = TypeVar("Item")


@contextmanager
def usage_errors(prefix: str = "", *more: type[Exception]) -> Iterator[None]:
    """Turn what the API raises for bad arguments (and the types in ``more``) into a usage error with its text."""
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError, OverflowError, *more)
    try:
        yield
    except refusals as error:
        raise click.UsageError(prefix + (str(error) or type(error).__name__)) from error


def steps(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Go through the items under a progress bar on stderr; without a terminal there is none."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, label=label, file=sys.stderr) as bar:
        yield from bar


def emit(report: dict[str, Any], as_json: bool) -> None:
    """Print a report: a dict of values, of dicts, and of lists of equal-keyed dicts (tables)."""
    click.echo(json.dumps(_plain(report), indent=2) if as_json else "\n".join(_lines(report)))


def bytes_text(count: float) -> str:
    """Bytes in binary and decimal units: ``128 MiB (134 MB)``."""
    if count < 1024:
        return f"{count:.0f} B"
    return f"{_scaled(count, 1024, ('KiB', 'MiB', 'GiB', 'TiB', 'PiB'))} ({_scaled(count, 1000, _BYTES)})"


_BYTES = ("kB", "MB", "GB", "TB", "PB")
_FLOPS = ("kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = min(max(1, int(math.log(max(value, 1), base))), len(units))
    return f"{value / base**power:.3g} {units[power - 1]}"


def _text(key: str, value: Any) -> str:
    """One value for a person to read; the last word of its key tells the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(key, x) for x in value) or "none"
    if not isinstance(value, (int, float)):
        return str(value)
    unit = key.rsplit("_", 1)[-1]
    if not math.isfinite(value):
        return str(value)
    if key.endswith("flops_per_second"):
        return _scaled(value, 1000, _FLOPS) + "/s"
    if key.endswith("bytes_per_second"):
        return _scaled(value, 1000, _BYTES) + "/s"
    if unit == "bytes":
        return bytes_text(value)
    if unit == "flops":
        return _scaled(value, 1000, _FLOPS)
    if unit == "seconds":
        return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _lines(report: dict[str, Any], indent: str = "") -> Iterator[str]:
    width = max((len(key) for key in report), default=0)
    for key, value in report.items():
        label = key.replace("_", " ")
        if isinstance(value, dict) and value:
            yield f"{indent}{label}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{label}"
            yield from (f"{indent}  {line}" for line in _table(value))
        elif isinstance(value, str) and "\n" in value:
            yield from value.splitlines()
        else:
            yield f"{indent}{label:<{width}}  {_text(key, value)}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    cells = [[key.replace("_", " ") for key in rows[0]]]
    cells += [[_text(key, value) for key, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _plain(value: Any) -> Any:
    """The value in JSON's own types; what JSON has no number for (nan, inf) becomes its name."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
