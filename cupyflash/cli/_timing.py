"""Median times of several computations in one run, taken in turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..cuda import device

SECONDS_PER_ROUND = 0.05
MOST_CALLS = 200


def medians(calls: dict[str, Callable[[], Any]], rounds: int, on_device: bool) -> dict[str, float]:
    """Seconds of one call of each, the median over rounds.

    Every round runs all of them in a fresh order, so that a GPU's clock treats them alike. Each is called once
    before, and often enough in a round for the clock to resolve it.
    """
    counts, found = {}, {name: list[float]() for name in calls}
    for name, call in calls.items():
        call()
        counts[name] = max(
            1, min(MOST_CALLS, int(SECONDS_PER_ROUND / max(_seconds(call, 1, on_device), 1e-7)))
        )
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            found[name].append(_seconds(calls[name], counts[name], on_device))
    return {name: statistics.median(times) for name, times in found.items()}


def _seconds(call: Callable[[], Any], count: int, on_device: bool) -> float:
    """Seconds of one of ``count`` calls in a row: on the GPU's clock, or on the host's."""
    if not on_device:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    cuda = device.require_cupy().cuda
    first, last = cuda.Event(), cuda.Event()
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return cuda.get_elapsed_time(first, last) * 1e-3 / count
