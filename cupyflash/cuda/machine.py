"""What launches run on. `launch` asks a machine for everything that is not arithmetic on sizes.

The other machine is the emulation (`cupyflash.cuda.emulate`), which has NumPy arrays and the same methods.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..arrays import is_device
from . import module
from .configs import Config
from .counters import Counters
from .device import capturing, compute_capability, require_gpu

MOST_UPLOADS = 256
_uploads: dict[tuple[Any, ...], Any] = {}
_in_graphs: list[Any] = []  # memory of ours whose addresses a captured graph holds: never freed
_upload_lock = threading.Lock()


class Gpu:
    """One device, CuPy's arrays and its memory pool."""

    def __init__(self, device: int):
        self.xp = require_gpu()
        self.device = device
        self._counters: Counters | None = None

    @property
    def compute_capability(self) -> int:
        """90 for 9.0."""
        return compute_capability(self.device)

    @functools.cached_property
    def multiprocessors(self) -> int:
        """How many the device has."""
        return int(self.xp.cuda.Device(self.device).attributes["MultiProcessorCount"])

    def counter(self) -> int:
        """Where two zeros lie that one launch may count in, and leaves zero; the device is current."""
        in_graph = self.captures()
        if self._counters is None:
            if in_graph:
                raise RuntimeError(
                    "make one call before the capture of a CUDA graph: it needs memory that lasts"
                )
            with _upload_lock:
                self._counters = self._counters or Counters(self._copy)
        return self._counters.address(in_graph)

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the device is the current one."""
        cuda = self.xp.cuda
        return nullcontext() if cuda.runtime.getDevice() == self.device else cuda.Device(self.device)

    def load(self, config: Config) -> module.Kernel:
        """The kernel, compiled if this device has not got it yet; the device is current."""
        return module.load(config, self.device)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """A new array."""
        return self.xp.empty(shape, dtype)

    def captures(self) -> bool:
        """Whether the current stream is recording a CUDA graph."""
        return capturing(self.xp)

    def keep_for_graph(self, *memory: Any) -> None:
        """Hold memory that launches use for good, if they are being captured: the graph may run at any time."""
        if self.captures():
            _in_graphs.extend(memory)

    def owns(self, x: Any) -> bool:
        """Whether an array lies here."""
        return is_device(x) and x.device.id == self.device

    def address(self, x: Any) -> int:
        """Where an array's first element lies."""
        return x.data.ptr

    def upload(self, x: np.ndarray) -> Any:
        """A copy of a host array, kept for the next call with the same values."""
        key, in_graph = (self.device, x.shape, x.dtype, x.tobytes()), self.captures()
        with _upload_lock:
            if (found := _uploads.get(key)) is not None:
                if in_graph:
                    _in_graphs.append(found)
                return found
            if in_graph:
                raise RuntimeError(
                    "lengths or offsets on the host cannot be copied to the device while a CUDA graph is captured: "
                    "pass them as CuPy arrays, or make one call with the same values before the capture"
                )
            if len(_uploads) >= MOST_UPLOADS:
                _uploads.clear()
            _uploads[key] = self._copy(x)
            return _uploads[key]

    def _copy(self, x: np.ndarray) -> Any:
        cuda = self.xp.cuda
        # Not from the pool: freeing such memory waits for the kernels that may still read it.
        memory = cuda.MemoryPointer(cuda.Memory(max(1, x.nbytes)), 0)
        copy = self.xp.ndarray(x.shape, x.dtype, memory)
        with cuda.Stream(non_blocking=True) as stream:
            copy.set(x)
            stream.synchronize()
        return copy


@functools.cache
def gpu(device: int) -> Gpu:
    """The machine of that device."""
    return Gpu(device)
