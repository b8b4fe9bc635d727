"""Time and memory of one call."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays import is_device
from ..cuda import device


class Measured(NamedTuple):
    """What a call gave, how long it took, and the bytes it had allocated at once, its results included."""

    result: Any
    seconds: float
    peak_bytes: int

    @property
    def extra_bytes(self) -> int:
        """Bytes allocated beyond the results."""
        return max(0, self.peak_bytes - total_bytes(self.result))


def measured(call: Callable[[], Any], on_device: bool = False) -> Measured:
    """Run a call and count what it allocates: NumPy's arrays by tracemalloc, CuPy's by the growth of its pool.

    Memory-mapped files and arrays that were there before do not count.
    """
    return _on_device(call) if on_device else _on_host(call)


def fastest(call: Callable[[], Any], repeat: int, on_device: bool = False) -> float:
    """Seconds of the fastest of several runs, nothing traced."""
    return min(_timed(call, on_device)[1] for _ in range(repeat))


def total_bytes(result: Any) -> int:
    """Bytes of all arrays in a nest of tuples."""
    if isinstance(result, tuple):
        return sum(map(total_bytes, result))
    return getattr(result, "nbytes", 0)


def to_host(x: Any) -> Any:
    """NumPy arrays for the CuPy arrays in a nest of tuples."""
    if isinstance(x, tuple):
        return type(x)(*map(to_host, x)) if hasattr(x, "_fields") else tuple(map(to_host, x))
    return x.get() if is_device(x) else x


def _on_host(call: Callable[[], Any]) -> Measured:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result, seconds = _timed(call, on_device=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Measured(result, seconds, peak - before)


def _on_device(call: Callable[[], Any]) -> Measured:
    pool = device.require_cupy().get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result, seconds = _timed(call, on_device=True)
    return Measured(result, seconds, pool.total_bytes() - before)


def _timed(call: Callable[[], Any], on_device: bool) -> tuple[Any, float]:
    wait = device.require_cupy().cuda.runtime.deviceSynchronize if on_device else lambda: None
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - start
