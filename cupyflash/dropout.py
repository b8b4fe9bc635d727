"""Dropout as a pure function of seed, offset and position: Philox4x32 with 7 rounds, and the mask made of it.

Element (i, j) of score matrix t is kept or dropped by 16 bits of one Philox call. A call serves the eight elements
that one thread of an m16n8 tensor-core accumulator holds in a 16x16 block, so a kernel, a tile of any size and this
module make the same mask. Nothing is stored, and there is no global state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import checks
from .arrays import array_module, as_operand, is_device
from .philox import low_word, philox4x32

_BLOCK = 16
# How many Philox calls are in flight at once: on the host their 64-bit products stay in cache.
_CALLS_HOST, _CALLS_DEVICE = 2**14, 2**24


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout function's arguments, checked, for 0 < p <= 1."""

    p: float
    threshold: int  # kept <=> 16-bit random number < threshold
    seed: Any  # int, or 0-d device array
    offset: Any
    origin_t: Any  # int, or host integer array that broadcasts to (..., heads)
    origin_i: int
    origin_j: int

    @property
    def scale(self) -> float:
        """What a kept weight is multiplied by."""
        return 65536.0 / self.threshold if self.threshold else 0.0

    @classmethod
    def create(
        cls,
        p: Any,
        seed: Any,
        offset: Any,
        origin: Any,
        head_shape: tuple[int, ...],
        prefix: str = "dropout_",
    ) -> Dropout | None:
        """Check the arguments; None for p = 0. ``prefix`` is what their names begin with in an error text."""
        keep_below = threshold(p, f"{prefix}p")
        if p > 0 and seed is None:
            raise ValueError(
                f"{prefix}seed is required when {prefix}p > 0 (there is no global state): give an int"
            )
        seed = 0 if seed is None else _counter(seed, f"{prefix}seed", 2**64 - 1)
        offset = _counter(offset, f"{prefix}offset", 2**32 - 1)
        if isinstance(origin, str) or not hasattr(origin, "__len__") or len(origin) != 3:
            raise ValueError(f"{prefix}origin must be (t0, i0, j0), got {origin!r}")
        i, j = (checks.integer(origin[axis], f"{prefix}origin[{axis}]", 0, 2**31 - 1) for axis in (1, 2))
        if is_device(origin[0]):
            raise ValueError(
                f"{prefix}origin[0] is on {origin[0].device}: give an int or a host array, whose range is checked"
            )
        t = checks.integers(origin[0], f"{prefix}origin[0]", head_shape, -(2**32), 2**32 - 1, None)
        if p == 0:
            return None
        made = cls(float(p), keep_below, seed, offset, int(t) if t.ndim == 0 else t, i, j)
        low, high = made._number_range(head_shape)
        if low < 0 or high >= 2**32:
            raise ValueError(
                f"score matrices are numbered from 0 to at most 2^32 - 1 for dropout: {prefix}origin[0] and "
                f"the shape {head_shape} lead to {low} .. {high}"
            )
        return made

    def _number_range(self, head_shape: tuple[int, ...]) -> tuple[int, int]:
        """The least and the greatest t; (0, 0) where there is no matrix."""
        count = math.prod(head_shape)
        if count == 0:
            return (0, 0)
        if isinstance(self.origin_t, int):
            return (self.origin_t, self.origin_t + count - 1)
        numbers = self.numbers(head_shape)
        return (int(numbers.min()), int(numbers.max()))

    def numbers(self, head_shape: tuple[int, ...]) -> np.ndarray:
        """The score matrices' numbers t, origin included, int64 of ``head_shape``."""
        return np.arange(math.prod(head_shape), dtype=np.int64).reshape(head_shape) + self.origin_t

    def keep_matrices(self, head_shape: tuple[int, ...], m: int, n: int, xp: ModuleType = np) -> Any:
        """The mask of all score matrices, bool (*head_shape, m, n), as an array of ``xp``."""
        numbers = self.numbers(head_shape).reshape(-1)
        kept = xp.empty((len(numbers), m, n), bool)
        # A chunk is some 16-row bands of one matrix, or several whole matrices.
        bands = max(1, (_CALLS_HOST if xp is np else _CALLS_DEVICE) // (32 * (n // _BLOCK + 1)))
        height = _BLOCK * min(bands, m // _BLOCK + 1)
        step = max(1, _BLOCK * bands // height)
        for t in range(0, len(numbers), step):
            for i in range(0, m, height):
                rows = slice(i, min(m, i + height))
                kept[t : t + step, rows] = self.keep_tiles(numbers[t : t + step], rows, slice(0, n), xp)
        return kept.reshape(*head_shape, m, n)

    def keep_tiles(self, numbers: np.ndarray, rows: slice, cols: slice, xp: ModuleType = np) -> Any:
        """The mask of one tile in each of some matrices, bool (len(numbers), rows, cols), as an array of ``xp``.

        Whole 16x16 blocks around the tile, then cut to it.
        """
        size_i, size_j = (max(x.stop - x.start, 0) for x in (rows, cols))
        if self.threshold > 0xFFFF or size_i * size_j == 0:
            return xp.ones((len(numbers), size_i, size_j), bool)
        i, j = self.origin_i + rows.start, self.origin_j + cols.start
        first_i, first_j = i // _BLOCK, j // _BLOCK
        blocks_i, blocks_j = -(-(i + size_i) // _BLOCK) - first_i, -(-(j + size_j) // _BLOCK) - first_j
        seed, offset = (int(x) if xp is np else x for x in (self.seed, self.offset))
        counter = (
            _range(xp, 4 * first_j, 4 * blocks_j),
            _range(xp, 8 * first_i, 8 * blocks_i)[:, None],
            xp.asarray(numbers.astype(np.uint32))[:, None, None],
            xp.asarray(offset).astype(np.uint32).reshape(1, 1, 1),
        )
        seed = xp.asarray(seed, np.uint64)
        words = philox4x32(counter, (low_word(seed), low_word(seed >> np.uint64(32))))
        # Eight neighbours (J, b) of one row travel as one 64-bit item.
        kept = xp.empty((len(numbers), blocks_i, 2, 8, blocks_j, 2), np.uint64)
        for index, word in enumerate(words):
            a, b = divmod(index, 2)
            eight = (word.astype("<u4", order="C").view("<u2") < self.threshold).view(np.uint64)
            kept[:, :, a, :, :, b] = eight.reshape(len(numbers), blocks_i, 8, blocks_j)
        whole = kept.view(bool).reshape(len(numbers), _BLOCK * blocks_i, _BLOCK * blocks_j)
        i, j = i - _BLOCK * first_i, j - _BLOCK * first_j
        return whole[:, i : i + size_i, j : j + size_j]


def threshold(p: float, name: str = "p") -> int:
    """How many of the 65536 values of a 16-bit random number keep an element.

    Parameters
    ----------
    p : float
        Probability of dropping, in [0, 1].
    name : str
        What an error text calls it.

    Returns
    -------
    int
        ``rint((1 - p) * 65536)``, ties to even; at least 1 for p < 1, and 0 for p = 1.

    Raises
    ------
    TypeError
        p is not a real number (bool and str are none).
    ValueError
        p is NaN or outside [0, 1].

    Examples
    --------
    >>> from cupyflash.dropout import threshold
    >>> threshold(0.1), threshold(1 - 1e-9), threshold(1)
    (58982, 1, 0)
    """
    p = checks.number(p, name)
    if not 0 <= p <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {p}")
    return max(int(np.rint((1.0 - p) * 65536.0)), 1 if p < 1 else 0)


def dropout_mask(
    shape: tuple[int, ...], p: float, seed: Any, offset: Any = 0, origin: Any = (0, 0, 0), like: Any = None
) -> Any:
    """The mask that attention applies for the same arguments, on every backend.

    Parameters
    ----------
    shape : tuple of int
        (..., heads, m, n): the shape of the scores. (m, n) is one head.
    p : float
        Probability of dropping, in [0, 1]; honoured to 2**-16.
    seed : int or 0-d uint64 device array
        In [0, 2**64).
    offset : int or 0-d device array
        In [0, 2**32).
    origin : (t0, i0, j0)
        Added to the score matrix's, row's and column's numbers; t0 an int or an array over (..., heads),
        0 <= i0, j0 < 2**31.
    like : array, optional
        A CuPy array gives a CuPy mask on the current device; else the mask is a NumPy array.

    Returns
    -------
    bool array of ``shape``
        True = kept. A kept weight is multiplied by ``65536 / threshold(p)``.

    Raises
    ------
    ValueError
        p is NaN or outside [0, 1]; a seed, offset or origin out of range; more than 2**32 score matrices; no seed
        although p > 0.
    TypeError
        p is not a real number; a seed, offset or origin is not an integer.

    Notes
    -----
    With i and j in 16x16 blocks, ``I, a, g = i // 16, (i // 8) % 2, i % 8`` and
    ``J, b, c, e = j // 16, (j // 8) % 2, (j % 8) // 2, j % 2``::

        w = philox4x32_7(counter = (4*J + c, 8*I + g, t, offset), key = (seed & 0xffffffff, seed >> 32))
        kept = (w[2*a + b] >> (16 * e)) & 0xffff < threshold(p)

    t numbers the score matrices row-major over the leading axes and query heads.

    Examples
    --------
    >>> import cupyflash
    >>> mask = cupyflash.dropout_mask((2, 100, 200), 0.25, seed=7)
    >>> mask.shape, round(float(mask.mean()), 2)
    ((2, 100, 200), 0.75)
    >>> part = cupyflash.dropout_mask((1, 50, 200), 0.25, seed=7, origin=(1, 50, 0))
    >>> bool((part[0] == mask[1, 50:]).all())
    True
    """
    if not isinstance(shape, Iterable):
        raise TypeError(f"shape must be (..., heads, m, n) or (m, n), got {checks.describe(shape)}")
    sizes = tuple(checks.integer(size, f"shape[{axis}]", low=0) for axis, size in enumerate(shape))
    if len(sizes) < 2:
        raise ValueError(f"shape must be (..., heads, m, n) or (m, n), got {shape}")
    xp = array_module(like)
    head_shape = sizes[:-2]
    dropout = Dropout.create(p, seed, offset, origin, head_shape, prefix="")
    if dropout is None:
        return xp.ones(sizes, bool)
    return dropout.keep_matrices(head_shape, sizes[-2], sizes[-1], xp)


def _counter(x: Any, name: str, high: int) -> Any:
    """A seed or offset: an int in range, or a 0-d unsigned device array, left unread."""
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        x = as_operand(x, name)
    if is_device(x):
        if x.ndim != 0 or x.dtype.kind not in "ui":
            raise TypeError(f"{name} on the device must be a 0-d integer array, got {checks.describe(x)}")
        return x
    return checks.integer(x, name, 0, high)


def _range(xp: ModuleType, start: int, count: int) -> Any:
    return xp.arange(start, start + count, dtype=np.int64).astype(np.uint32)
