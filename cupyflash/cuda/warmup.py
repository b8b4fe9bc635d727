"""Kernels ahead of the first call: compile them, and ask whether they are compiled."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..arrays import is_device, stand_in
from ..problem import Problem
from . import module
from .configs import Config
from .device import require_gpu
from .machine import gpu
from .plan import planned


def compile_kernels(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    backward: bool = False,
    family: str | None = None,
    arch: int | None = None,
    **options: Any,
) -> tuple[module.Report, ...]:
    """Compile the kernels that a call would need, or check that they compile for another GPU.

    Parameters
    ----------
    q, k, v : array_like, or anything with ``shape`` and ``dtype``
        As in `cupyflash.plan`. Head dims and dtype choose the kernels; where lengths, batch and heads choose between
        forms of one (``plan(...).config``), theirs is compiled.
    backward : bool
        The kernels of `cupyflash.attention_backward` instead of those of `cupyflash.attention`.
    family : str, optional
        A kernel family instead of the fastest that takes the call.
    arch : int, optional
        A compute capability such as 90: the kernels are compiled by NVRTC alone, without a GPU, and not kept.
        Default: the device of q, or the current one; the kernels are loaded there, and CuPy's cache keeps them for
        later processes.
    **options
        The options of `cupyflash.attention`; arrays may be given by shape and dtype.

    Returns
    -------
    tuple of Report
        For each kernel its config, architecture, registers, spilled bytes, shared memory and seconds.

    Raises
    ------
    CompileError
        With NVRTC's log; a RuntimeError.
    RuntimeError
        No GPU and no arch, no CuPy, or an NVRTC that does not know the architecture.
    ValueError, TypeError
        As `cupyflash.attention`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> x = np.broadcast_to(np.float32(0), (1, 1, 128, 64))
    >>> [report] = cupyflash.compile_kernels(x, x, x, arch=80, causal=True)
    >>> report.spill_bytes
    0
    """
    device = _device(q) if arch is None else 0
    configs = _configs(q, k, v, backward, family, arch, options)

    def compile_one(config: Config) -> module.Report:
        if arch is not None:
            return module.compile_offline(config, arch)
        machine = gpu(device)
        with machine.current():
            return machine.load(config).report

    workers = max(1, min(len(configs), os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:  # NVRTC compiles outside the interpreter lock
        return tuple(pool.map(compile_one, configs))


def is_compiled(
    q: Any, k: Any, v: Any, /, *, backward: bool = False, family: str | None = None, **options: Any
) -> bool:
    """Tell whether a call would find all its kernels loaded, so that it starts without a compile.

    Parameters
    ----------
    q, k, v, backward, family, **options
        As in `compile_kernels`.

    Returns
    -------
    bool
        Whether this process has the kernels on the device of q (or the current one). A kernel that is only in
        CuPy's disk cache is loaded from there in milliseconds when it is first called, and counts as False.

    Raises
    ------
    RuntimeError
        No GPU.
    ValueError, TypeError
        As `cupyflash.attention`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> x = np.broadcast_to(np.float32(0), (1, 1, 128, 64))
    >>> cupyflash.is_compiled(x, x, x)  # doctest: +SKIP
    True
    """
    device = _device(q)
    return all(
        module.is_loaded(config, device) for config in _configs(q, k, v, backward, family, None, options)
    )


def _configs(
    q: Any, k: Any, v: Any, backward: bool, family: str | None, arch: int | None, options: dict[str, Any]
) -> list[Config]:
    """The distinct kernels of a call."""
    described = {name: stand_in(x) for name, x in options.items()} | {"backend": "cuda"}
    problem = Problem.create(stand_in(q), stand_in(k), stand_in(v), **described)
    recipe = planned(problem, backward, family, arch).recipe
    return list(dict.fromkeys(launch.config for launch in recipe.launches))


def _device(q: Any) -> int:
    return q.device.id if is_device(q) else require_gpu().cuda.runtime.getDevice()
