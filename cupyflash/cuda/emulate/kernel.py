"""A compiled kernel that is called as CuPy calls one, and executes on the CPU."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MESSAGE_BYTES = 4096
_ALIGNMENT = 64  # of arguments: tensor maps ask for it


class EmulationError(RuntimeError):
    """A kernel did what a GPU would punish or hide; the text names kernel, block, thread and place."""


class Memory(NamedTuple):
    """A range of addresses that a launch may touch."""

    name: str
    begin: int
    end: int
    writable: bool


class _Range(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("writable", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    """As in core/emulate/block.hpp."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("flush_subnormals", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
    )


class Function:
    """A kernel on the CPU, with the call of `cupy.cuda.Function`.

    Parameters
    ----------
    name : str
        For messages.
    library : Path
        The shared object that `build` made.
    checked : bool
        Whether it was built with mode "checked".
    seed : int
        0: blocks, warps and lanes in their natural order; else in the random order of that seed. Results must not
        depend on it.
    workers : int
        CPU threads that execute blocks; 0 is one a core.
    flush_subnormals : bool
        Round float32 operands and results below the normal range to 0, as CuPy's -ftz=true does.
    static_bytes : int
        Shared memory of a block beside that of the launch.
    memory : callable, optional
        From the bytes of the arguments to the `Memory` that the kernel may touch beside its own. Where it is absent
        or finds nothing, any address is good. Only checked kernels ask.
    """

    def __init__(
        self,
        name: str,
        library: Path,
        *,
        checked: bool,
        seed: int = 0,
        workers: int = 0,
        flush_subnormals: bool = True,
        static_bytes: int = 0,
        memory: Callable[[Sequence[bytes]], Sequence[Memory]] | None = None,
    ):
        self.name, self.library, self.checked = name, library, checked
        self.seed, self.flush_subnormals, self.memory = seed, flush_subnormals, memory
        self.static_bytes = static_bytes
        self.workers = workers or len(os.sched_getaffinity(0))
        loaded = ctypes.CDLL(str(library))
        self._launch = loaded.cupyflash_emulate_launch
        sizes = (ctypes.c_uint32 * 64)()
        loaded.cupyflash_emulate_parameters(sizes)
        self.parameter_bytes = list(sizes)[: list(sizes).index(0)]

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
    ) -> None:
        """Execute, and raise EmulationError with the first fault.

        Parameters
        ----------
        grid, block : sequence of int
            Only the first axis may exceed 1.
        args : sequence of numpy.generic or numpy.ndarray
            Arguments by value, each with the bytes of its parameter.
        shared_mem : int
            Dynamic shared memory of a block, in bytes.
        """
        (blocks, *more_blocks), (threads, *more_threads) = grid, block
        if max([1, *more_blocks, *more_threads]) > 1 or threads % 32 or not 0 < threads <= 1024:
            raise ValueError(
                f"{self.name}: grid {grid} of blocks {block}: only whole warps along x are emulated"
            )
        values = [np.ascontiguousarray(x).tobytes() for x in args]
        if [len(value) for value in values] != self.parameter_bytes:
            given = [len(value) for value in values]
            raise TypeError(
                f"{self.name} has parameters of {self.parameter_bytes} bytes, got arguments of {given}"
            )
        held = [ctypes.create_string_buffer(len(value) + _ALIGNMENT) for value in values]
        places = [ctypes.addressof(x) + -ctypes.addressof(x) % _ALIGNMENT for x in held]
        for place, value in zip(places, values):
            ctypes.memmove(place, value, len(value))
        memory = self.memory(values) if self.checked and self.memory else ()
        ranges = [_Range(m.name.encode(), m.begin, m.end, m.writable) for m in memory]
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        launch = _Launch(
            kernel=self.name.encode(),
            arguments=(ctypes.c_void_p * len(places))(*places),
            ranges=(_Range * len(ranges))(*ranges),
            range_count=len(memory),
            seed=self.seed,
            grid=blocks,
            threads=threads,
            shared_bytes=shared_mem + self.static_bytes,
            workers=max(1, min(self.workers, blocks)),
            flush_subnormals=self.flush_subnormals,
            checked=self.checked,
            message=ctypes.cast(message, ctypes.c_char_p),
            message_bytes=_MESSAGE_BYTES,
        )
        if self._launch(ctypes.byref(launch)):
            raise EmulationError(f"kernel '{self.name}', {self._with_places(message.value.decode())}")

    def _with_places(self, message: str) -> str:
        """Addresses in the code become files and lines."""
        return re.sub(r"<\+(0x[0-9a-f]+)>", lambda found: _place(self.library, found[1]), message)


def _place(library: Path, address: str) -> str:
    """Where an instruction comes from: the innermost line, and the outermost one that it was inlined into."""
    done = subprocess.run(["addr2line", "-i", "-e", str(library), address], capture_output=True, text=True)
    lines = [
        line.partition(" (")[0].lstrip("/") for line in done.stdout.split("\n") if line and line[0] != "?"
    ]
    if not lines:
        return f"code address {address}"
    return lines[0] if len(lines) == 1 else f"{lines[0]} (in {lines[-1]})"
