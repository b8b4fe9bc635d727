"""The rules on arguments: each function takes what the caller gave and returns it normalised, or raises.

Texts name the argument, what was expected, what came, and what to do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

from .arrays import DTYPE_NAMES, as_operand, is_device, native, overlaps_itself, share_memory

OFFSET_LIMIT = 2**60  # the largest |query_offset|: sums of positions and bounds then fit 64 bits
WINDOW_LIMIT = 2**61  # a wider window bounds nothing
PRECISIONS = ("ieee", "tf32x3", "tf32")


def describe(x: Any) -> str:
    """A short name for a value in an error text."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    return f"{x!r} ({type(x).__name__})"


def number(x: Any, name: str) -> float:
    """A finite real number; bool, str and NaN are refused."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, (bool, np.bool_, str)) or not is_number(x):
        raise TypeError(f"{name} must be a real number, got {describe(x)}")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {x}")
    return value


def in_range(value: float, name: str, dtype: np.dtype) -> float:
    """A number that does not overflow in the score dtype."""
    if abs(value) > float(np.finfo(dtype).max):
        raise ValueError(f"{name} = {value} is outside the range of the score dtype {dtype}")
    return value


def is_number(x: Any) -> bool:
    """Whether a value is a plain number, not an array; bfloat16 scalars are not registered as real."""
    return isinstance(x, numbers.Real) or (isinstance(x, np.generic) and x.dtype.name in DTYPE_NAMES)


def integer(x: Any, name: str, low: int | None = None, high: int | None = None) -> int:
    """An int within [low, high]; bool and float are refused."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {describe(x)}")
    value = int(x)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return value


def flag(x: Any, name: str) -> bool:
    """A bool, not merely something truthy."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {describe(x)}")
    return bool(x)


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...], name: str, axes: str) -> None:
    """Refuse a shape that does not broadcast to ``target``, or that would enlarge it."""
    fits = len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1]))
    if not fits:
        raise ValueError(f"{name} must broadcast to {axes} = {target}, got shape {tuple(shape)}")


def float_array(x: Any, name: str, target: tuple[int, ...], axes: str, like: Any) -> Any:
    """A bias, sinks or slopes operand: a float array, or a number, that broadcasts to ``target``."""
    if isinstance(x, (bool, str)):
        raise TypeError(f"{name} must be a float array or a number, got {describe(x)}")
    if is_number(x):
        try:
            x = np.asarray(float(x))
        except OverflowError:
            raise ValueError(f"{name} = {x} is outside the range of float64") from None
    x = as_operand(x, name)
    if x.dtype.name not in DTYPE_NAMES:
        hint = "; give a boolean mask as mask=" if x.dtype == np.bool_ else ""
        raise TypeError(f"{name} must have one of the dtypes {', '.join(DTYPE_NAMES)}, got {x.dtype}{hint}")
    broadcasts(x.shape, target, name, axes)
    return same_place(x, name, like)


def bool_mask(x: Any, target: tuple[int, ...], like: Any) -> Any:
    """The mask operand: bool, True = attend, broadcasting to the scores."""
    x = as_operand(x, "mask")
    if x.dtype != np.bool_:
        raise TypeError(
            f"mask must be bool with True = attend, got dtype {x.dtype}: write mask != 0 for a 0/1 mask, "
            "or pass an additive one as bias="
        )
    broadcasts(x.shape, target, "mask", "(..., heads_q, m, n)")
    return same_place(x, "mask", like)


def same_place(x: Any, name: str, like: Any) -> Any:
    """``x`` where ``like`` is: byte order made native on the host, two devices refused."""
    if is_device(like):
        if not is_device(x):
            if isinstance(x, np.ndarray) and x.ndim == 0:
                import cupy

                with like.device:
                    return cupy.asarray(x)
            raise ValueError(f"{name} is on the host but q is on {like.device}: pass cupy.asarray({name})")
        if x.device != like.device:
            raise ValueError(
                f"{name} is on {x.device} but q is on {like.device}: all arrays must share one device"
            )
        return x
    if is_device(x):
        raise ValueError(f"{name} is on {x.device} but q is on the host: pass cupy.asnumpy({name})")
    return native(x)


def integers(x: Any, name: str, target: tuple[int, ...], low: int | None, high: int | None, like: Any) -> Any:
    """Lengths or offsets: integers that broadcast to the leading axes; host values are range-checked.

    Host values come back as an int64 array; device values stay where they are, unread.
    """
    if isinstance(x, (bool, np.bool_, str, float)):
        raise TypeError(f"{name} must be an integer or an integer array, got {describe(x)}")
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {x}")
    x = as_operand(x, name)
    if x.dtype.kind not in "iu":
        if not (x.size == 0 and not is_device(x)):
            raise TypeError(f"{name} must have an integer dtype, got {x.dtype}")
        x = x.astype(np.int64)
    broadcasts(x.shape, target, name, "the leading axes (without heads)")
    if is_device(x):
        return same_place(x, name, like)
    if x.size and ((low is not None and x.min() < low) or (high is not None and x.max() > high)):
        wrong = int(x.min()) if low is not None and x.min() < low else int(x.max())
        raise ValueError(f"{name} must lie in [{low}, {high}], got {wrong}")
    return x.astype(np.int64)


def output(
    x: Any, name: str, shape: tuple[int, ...], dtype: np.dtype, taken: Iterable[Any], like: Any
) -> None:
    """An array to write to: right place, shape and dtype, writeable, apart from every array in ``taken``."""
    if not (isinstance(x, np.ndarray) or is_device(x)):
        raise TypeError(f"{name} must be an array, got {describe(x)}")
    same_place(x, name, like)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    allowed = {dtype, np.dtype(np.float32)} if dtype.itemsize == 2 else {dtype}
    if x.dtype not in allowed:
        raise TypeError(
            f"{name} must have dtype {' or '.join(sorted(str(d) for d in allowed))}, got {x.dtype}"
        )
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only: give a writeable array")
    if overlaps_itself(x):
        raise ValueError(
            f"{name} has overlapping elements (strides {tuple(x.strides)} of shape {shape}): give an array of its own"
        )
    if any(share_memory(x, y) for y in taken):
        raise ValueError(f"{name} shares memory with an input or another output: give an array of its own")


def window_bounds(window: Any) -> tuple[int | None, int | None]:
    """(left, right): None = no bound, 0 is a real bound, any larger int saturates."""
    if window is None:
        return (None, None)
    if isinstance(window, (str, bytes)) or not hasattr(window, "__len__") or len(window) != 2:
        raise ValueError(
            f"window must be a pair (left, right) of ints >= 0 or None, got {window!r}: "
            "window=(w, 0) looks back w keys"
        )
    left, right = (
        None if bound is None else min(integer(bound, f"window[{side}]", low=0), WINDOW_LIMIT)
        for side, bound in enumerate(window)
    )
    return (left, right)


def alignment(
    causal: Any,
    query_offset: Any,
    window: tuple[int | None, int | None],
    slopes: Any,
    lengths: tuple[int, int],
    lead: tuple[int, ...],
    like: Any,
) -> tuple[Any, bool]:
    """(query_offset, bottom_right) for the lengths (m, n); where they differ, alignment is not guessed."""
    words = isinstance(causal, str) and causal in ("top_left", "bottom_right")
    if not (words or isinstance(causal, (bool, np.bool_))):
        raise ValueError(f"causal must be True, False, 'top_left' or 'bottom_right', got {describe(causal)}")
    if isinstance(causal, str):
        if query_offset is not None:
            raise ValueError(
                f"causal={causal!r} sets the offset: leave out query_offset, or give causal=True"
            )
        return 0, causal == "bottom_right"
    if query_offset is not None:
        return integers(query_offset, "query_offset", lead, -OFFSET_LIMIT, OFFSET_LIMIT, like), False
    m, n = lengths
    if m != n and (causal or window != (None, None) or slopes is not None):
        what = "causal=True" if causal else "a window" if window != (None, None) else "alibi_slopes"
        raise ValueError(
            f"{what} speaks of positions, but m = {m} queries and n = {n} keys differ and libraries align them "
            "differently: give causal='top_left' (offset 0), causal='bottom_right' (offset n - m) or query_offset="
        )
    return 0, False


def precision(precision: Any, dtype: np.dtype) -> str | None:
    """How products of float32 are computed; None leaves it to the backend."""
    if precision is None:
        return None
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)} or None, got {precision!r}")
    if dtype != np.float32:
        raise ValueError(f"precision is a choice for float32 alone: q is {dtype}; leave it out")
    return precision


def backend(backend: Any, q: Any) -> str:
    """The backend's name; None is where q lies."""
    if backend not in (None, "cpu", "cuda"):
        raise ValueError(f"backend must be 'cpu', 'cuda' or None, got {backend!r}")
    if backend == "cpu" and is_device(q):
        raise ValueError(f"backend='cpu' takes host arrays but q is on {q.device}: pass cupy.asnumpy(q), ...")
    return backend or ("cuda" if is_device(q) else "cpu")
