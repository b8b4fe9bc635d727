"""CuPy on demand: what is there, what is missing, and in which words to say so."""

from __future__ import annotations

import functools
from types import ModuleType

from ..arrays import loaded_cupy

LEAST_CUPY = 14
LEAST_NVRTC_FOR_SUFFIXES = (12, 9)  # older ones refuse the second -arch that CuPy adds


def require_cupy() -> ModuleType:
    """CuPy, or a RuntimeError that says why it cannot be used; no GPU is needed yet."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"CuPy is not installed ({error}): pip install 'cupyflash[cuda12]' (CUDA 12) or 'cupyflash[cuda13]'"
        ) from error
    except OSError as error:  # CuPy creates its cache folder when imported
        raise RuntimeError(unwritable_cache(error)) from error
    if int(cupy.__version__.split(".")[0]) < LEAST_CUPY:
        raise RuntimeError(f"CuPy {cupy.__version__} is too old: cupyflash needs {LEAST_CUPY} or newer")
    return cupy


def unwritable_cache(error: OSError) -> str:
    """The text for a kernel cache that cannot be written."""
    return (
        f"CuPy cannot write its kernel cache ({error}): set CUPY_CACHE_DIR to a writable folder, "
        "or CUPY_CACHE_IN_MEMORY=1 to compile anew in every process"
    )


def missing() -> str | None:
    """Why the CUDA backend cannot run here; None where it can. Creates no CUDA context."""
    try:
        cupy = require_cupy()
    except RuntimeError as error:
        return str(error)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable NVIDIA driver or GPU: {error}"
    return None if count else "no NVIDIA GPU is visible (see CUDA_VISIBLE_DEVICES)"


def require_gpu() -> ModuleType:
    """CuPy with a GPU behind it, or a RuntimeError that says what is missing."""
    if reason := missing():
        raise RuntimeError(f"backend='cuda' is not available: {reason}")
    return require_cupy()


@functools.cache
def compute_capability(device: int) -> int:
    """The compute capability of a device as one number: 90 for 9.0."""
    return int(require_cupy().cuda.Device(device).compute_capability)


def capturing(cupy: ModuleType) -> bool:
    """Whether the current stream is recording a CUDA graph."""
    stream = cupy.cuda.get_current_stream()
    # The default streams cannot, and may not be asked.
    return stream.ptr not in (0, 1, 2) and stream.is_capturing()


def too_old_for_suffixes() -> str | None:
    """Why NVRTC cannot compile for sm_90a and the like; None where it can, or where CuPy is not loaded."""
    cupy = loaded_cupy()
    if cupy is None or (version := tuple(cupy.cuda.nvrtc.getVersion())) >= LEAST_NVRTC_FOR_SUFFIXES:
        return None
    least, found = (".".join(map(str, x)) for x in (LEAST_NVRTC_FOR_SUFFIXES, version))
    return f"needs NVRTC {least} or newer, CuPy has {found}"


def available_backends() -> tuple[str, ...]:
    """Name the backends that can run on this machine.

    Returns
    -------
    tuple of str
        "cpu", and "cuda" where CuPy, a driver and a GPU are there. `cupyflash info` says what is missing.

    Examples
    --------
    >>> import cupyflash
    >>> "cpu" in cupyflash.available_backends()
    True
    """
    return ("cpu",) if missing() else ("cpu", "cuda")
