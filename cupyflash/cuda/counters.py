"""Counters in device memory for kernels whose blocks take their work one by one: zero before and after a launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

SLOTS = 2**15
SLOT_BYTES = 8


class Counters:
    """The counters of one device.

    Launches that may run at the same time need counters of their own. Direct ones take turns with more slots than a
    device has launches in flight; one that is captured in a graph keeps its slot, for the graph may run at any time.

    Parameters
    ----------
    copy : callable
        Makes a lasting copy of a host array on the device, ready for every stream.
    """

    def __init__(self, copy: Callable[[np.ndarray], Any]):
        self._zeros = copy(np.zeros(2 * SLOTS * SLOT_BYTES, np.uint8))
        self._start: int = self._zeros.data.ptr
        self._launched, self._captured = itertools.count(), itertools.count()  # counting is atomic

    def address(self, in_graph: bool) -> int:
        """A slot for one launch."""
        if not in_graph:
            return self._start + SLOT_BYTES * (next(self._launched) % SLOTS)
        slot = next(self._captured)
        if slot >= SLOTS:
            raise RuntimeError(
                f"more than {SLOTS} launches have been captured in CUDA graphs in this process"
            )
        return self._start + SLOT_BYTES * (SLOTS + slot)
