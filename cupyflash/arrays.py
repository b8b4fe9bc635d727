"""Arrays of NumPy and CuPy behind one set of questions; CuPy is never imported for a NumPy call."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

# bfloat16 is ml_dtypes' extension type; NumPy alone knows it only once ml_dtypes is imported.
DTYPE_NAMES = ("float16", "bfloat16", "float32", "float64")


def score_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of scores, softmax and sums: float32 for 16-bit and float32 arrays, else float64."""
    return np.dtype(np.float32 if dtype.name in DTYPE_NAMES[:3] else np.float64)


def loaded_cupy() -> Any:
    """CuPy if something has imported it, once the thread that does so is done; else None."""
    if "cupy" not in sys.modules:
        return None
    import cupy

    return cupy


def is_device(x: Any) -> bool:
    """Whether ``x`` is a CuPy array."""
    cupy = loaded_cupy()
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_module(x: Any) -> ModuleType:
    """``cupy`` for a CuPy array, else ``numpy``."""
    return sys.modules["cupy"] if is_device(x) else np


def as_operand(x: Any, name: str) -> Any:
    """An ndarray of NumPy or CuPy for what the caller gave, without a copy where the memory allows it.

    CuPy arrays and NumPy arrays pass through; other device arrays come in by
    ``__cuda_array_interface__`` or DLPack, ordered after their producer; everything else by
    ``np.asarray``.
    """
    if type(x) is np.ndarray or is_device(x):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array; expected a plain array: give the mask as mask= (True = attend) "
            f"and the data as {name}.data"
        )
    if getattr(x, "requires_grad", False):
        raise TypeError(
            f"{name} requires grad, which cupyflash cannot record: pass {name}.detach() and use "
            "cupyflash.attention_vjp for gradients"
        )
    if hasattr(x, "__cuda_array_interface__") or _on_cuda(x):
        return _from_device(x, name)
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return np.from_dlpack(x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is no array: {error}") from None


def native(x: Any) -> Any:
    """``x`` in native byte order."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _on_cuda(x: Any) -> bool:
    """Whether a DLPack object lives in CUDA memory (device types 2 and 13, CUDA and managed)."""
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in (2, 13)


def _from_device(x: Any, name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"{name} is a CUDA array ({type(x).__name__}) but CuPy is not installed: "
            "pip install 'cupyflash[cuda12]'"
        ) from error
    # DLPack first: it carries bfloat16 and hands over on the consumer's stream.
    return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)


def memory_order(ndim: int, like: Any) -> list[int]:
    """The axes of ``like`` from the outermost in memory to the innermost; 0, 1, ... if it has not ``ndim`` axes.

    Axes that have no place in memory (stride 0 or length 1) keep their position.
    """
    strides, order = getattr(like, "strides", None), list(range(ndim))
    if strides is None or len(strides) != ndim:
        return order
    placed = [axis for axis, step in enumerate(strides) if step and like.shape[axis] > 1]
    for position, axis in zip(placed, sorted(placed, key=lambda axis: -abs(strides[axis]))):
        order[position] = axis
    return order


def empty_in_order(xp: Any, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """A new array, made by ``xp.empty``, whose axes lie in memory in the order of those of ``like``.

    C order if the ranks differ.
    """
    order = memory_order(len(shape), like)
    if order == list(range(len(shape))):
        return xp.empty(shape, dtype)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return xp.empty([shape[axis] for axis in order], dtype).transpose(inverse)


def stand_in(x: Any) -> Any:
    """An array with the shape and dtype of a mere description, holding one element of memory."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")) or hasattr(x, "strides"):
        return x
    dtype = np.dtype(x.dtype)
    strides = [dtype.itemsize]
    for size in x.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return np.lib.stride_tricks.as_strided(
        np.zeros((), dtype), x.shape, strides[: len(x.shape)], writeable=False
    )


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays of one library have an element in common (strided interleaving is understood)."""
    if is_device(a) != is_device(b):
        return False
    if a.size == 0 or b.size == 0:
        return False
    x, y = _shadow(a), _shadow(b)
    if not np.may_share_memory(x, y):
        return False
    try:
        work: Any = 100_000  # candidates to try; the stubs know -1 and 0 alone
        return bool(np.shares_memory(x, y, max_work=work))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Any) -> bool:
    """Whether two indices of an array name one element of memory."""
    if x.size == 0:
        return False
    reach = x.dtype.itemsize  # of the axes so far, from the innermost on
    for step, size in sorted((abs(step), size) for step, size in zip(x.strides, x.shape) if size > 1):
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False
    # Two such indices differ first along some axis; moved there, one lies at 0 and the other behind it.
    while x.shape[0] == 1 or not share_memory(x[:1], x[1:]):
        if x.ndim == 1:
            return False
        x = x[0]
    return True


def _shadow(a: Any) -> np.ndarray:
    """A NumPy view with a device array's addresses: for arithmetic on bounds alone, never read."""
    if not is_device(a):
        return a
    interface = {
        "version": 3,
        "data": (a.data.ptr, False),
        "shape": a.shape,
        "strides": a.strides,
        "typestr": f"|V{a.dtype.itemsize}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
