"""Compiled kernels: one CuPy module per (config, device), and the GPU-free compile of the same strings.

On a GPU, `cupy.RawModule` compiles and keeps the cubin in CuPy's disk cache. Without one, `compile_offline`
gives the same source and options to NVRTC and keeps its log, for tests and for `cupyflash compile`.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import Any

from .configs import Config
from .device import capturing, require_cupy, unwritable_cache

OPTIONS = ("-std=c++17",)
# What CuPy's RawModule adds to the caller's options (cupy 14): the offline compile must see the same.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
LOG_LINES = 40
STATIC_SHARED_LIMIT = 48 * 1024  # bytes of dynamic shared memory that need no attribute


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries the kernel's name and the compiler's log."""

    def __init__(self, config: Config, arch: str, log: str):
        lines = log.strip().splitlines()
        text = "\n".join(lines[:LOG_LINES])
        more = f"\n... {len(lines) - LOG_LINES} more lines in .log" if len(lines) > LOG_LINES else ""
        super().__init__(f"NVRTC could not compile the kernel '{config}' for sm_{arch}:\n{text}{more}")
        self.config, self.arch, self.log = config, arch, log


@dataclass(frozen=True)
class Report:
    """What one compile gave.

    Attributes
    ----------
    config : Config
        The kernel; its text is its name.
    arch : str
        Architecture, as in sm_<arch>.
    registers : int
        Per thread.
    spill_bytes, stack_bytes : int
        Local memory per thread: spilled registers, and the whole stack frame. For a kernel that came through CuPy,
        which does not part them, both are the whole.
    shared_bytes : int
        Static and dynamic shared memory per block.
    seconds : float
        Time of the compile, or of the load from CuPy's cache.
    log : str
        The compiler's log ("" for a kernel that came through CuPy).
    """

    config: Config
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    log: str = ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel loaded on one device."""

    config: Config
    function: Any  # cupy.cuda.Function
    report: Report


_loaded: dict[tuple[Config, int], Kernel] = {}
_locks: dict[tuple[Config, int], threading.Lock] = {}


def load(config: Config, device: int) -> Kernel:
    """The kernel on that device, compiled at most once whichever thread asks first."""
    key = (config, device)
    kernel = _loaded.get(key)
    if kernel is None:
        with _locks.setdefault(key, threading.Lock()):
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _loaded[key] = _compile(config, device)
    return kernel


def is_loaded(config: Config, device: int) -> bool:
    """Whether the kernel is ready on that device."""
    return (config, device) in _loaded


def report_of(config: Config) -> Report | None:
    """What is known of a kernel that some device has; None before it is compiled."""
    return next((kernel.report for (other, _), kernel in list(_loaded.items()) if other == config), None)


def _compile(config: Config, device: int) -> Kernel:
    cupy = require_cupy()
    if capturing(cupy):
        raise RuntimeError(
            f"the kernel '{config}' is not loaded yet, and loading is not possible while a CUDA graph is captured: "
            "make one call with the same shapes, dtypes and options before the capture"
        )
    start = time.perf_counter()
    with cupy.cuda.Device(device):
        arch = config.arch(int(cupy.cuda.Device().compute_capability))
        flag = () if arch.isdigit() else (f"-arch=sm_{arch}",)  # CuPy appends the plain one
        module = cupy.RawModule(code=config.source(), options=OPTIONS + flag)
        try:
            raw = module.get_function(config.entry_point)
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(config, arch, error.get_message()) from None
        except OSError as error:
            raise RuntimeError(unwritable_cache(error)) from error
        if config.shared_bytes > STATIC_SHARED_LIMIT:
            raw.max_dynamic_shared_size_bytes = config.shared_bytes
        report = Report(
            config=config,
            arch=arch,
            registers=raw.num_regs,
            spill_bytes=raw.local_size_bytes,
            stack_bytes=raw.local_size_bytes,
            shared_bytes=raw.shared_size_bytes + config.shared_bytes,
            seconds=time.perf_counter() - start,
        )
        return Kernel(config, raw.kernel, report)


def compile_offline(config: Config, compute_capability: int) -> Report:
    """Compile with NVRTC alone: the very string and options of a GPU run, without a GPU or a driver."""
    require_cupy()
    from cupy.cuda import nvrtc

    arch = config.arch(compute_capability)
    known = nvrtc.getSupportedArchs()
    if compute_capability not in known:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise RuntimeError(
            f"NVRTC {version} has no sm_{compute_capability}; it compiles for {', '.join(map(str, known))}"
        )
    caches = nvrtc.getVersion() >= (12, 9)  # and what comes out of NVRTC's own cache has no log
    uncached = ("--no-cache",) if caches else ()
    options = (*OPTIONS, *CUPY_OPTIONS, f"-arch=sm_{arch}", "--ptxas-options=-v", *uncached)
    start = time.perf_counter()
    program = nvrtc.createProgram(config.source(), "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        raise CompileError(config, arch, nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - start
    return Report(
        config=config,
        arch=arch,
        registers=_figure(log, r"Used (\d+) registers"),
        spill_bytes=_figure(log, r"(\d+) bytes spill stores") + _figure(log, r"(\d+) bytes spill loads"),
        stack_bytes=_figure(log, r"(\d+) bytes stack frame"),
        shared_bytes=_figure(log, r"(\d+) bytes smem", absent=0) + config.shared_bytes,
        seconds=seconds,
        log=log,
    )


def _figure(log: str, pattern: str, absent: int | None = None) -> int:
    """The largest number that ptxas reports in that phrase."""
    found = re.findall(pattern, log)
    if not found and absent is None:
        raise ValueError(f"the compiler's log has no line like {pattern!r}:\n{log}")
    return max(map(int, found), default=absent or 0)
