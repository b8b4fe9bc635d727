"""Tiles: their sizes, the buffers they are computed in, and how they are read from and written to whole arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..masks import Visibility
from ..problem import Problem

# The longest side of a tile that a task keeps (queries in the forward pass, keys in the backward pass), and the least
# bytes of scores along the side that it moves over. Keeping the longer side saves reading the other again and again.
_KEPT_QUERIES, _KEPT_KEYS, _MOVED_BYTES = 1024, 512, 1024
# Small score matrices are stacked up to a tile of this size, which stays in a second-level cache.
_TILE_BYTES = 2**19

Index = tuple[Any, ...]  # one int, or one array of ints a stacked matrix, for each leading axis and the head


class Tiles(NamedTuple):
    """Tile sizes: ``stack`` small score matrices of one `Visibility` are computed together."""

    block_q: int
    block_kv: int
    stack: int


def choose_tiles(problem: Problem, backward: bool) -> Tiles:
    """Tile sizes from the shape without leading axes: results do not depend on the batch."""
    p = problem
    itemsize, width = p.score_dtype.itemsize, max(p.head_dim, p.head_dim_v)
    elements = _TILE_BYTES // itemsize
    sides = (p.seqlen_k, p.seqlen_q) if backward else (p.seqlen_q, p.seqlen_k)
    kept = max(1, min(sides[0], _KEPT_KEYS if backward else _KEPT_QUERIES))
    moved = max(_MOVED_BYTES // itemsize, min(elements // kept, elements // width))
    moved = max(1, min(sides[1], moved))
    stack = max(1, elements // max(kept * moved, (kept + moved) * width))
    return Tiles(moved, kept, stack) if backward else Tiles(kept, moved, stack)


def buffer_shapes(problem: Problem, tiles: Tiles, backward: bool) -> dict[str, tuple[int, ...]]:
    """What one worker holds, in the score dtype. In the backward pass operands have one column more."""
    (block_q, block_kv, stack), d, e = tiles, problem.head_dim, problem.head_dim_v
    shapes: dict[str, tuple[int, ...]]
    shapes = {"scores": (stack, block_q, block_kv), "out": (stack, block_q, e)}
    if not backward:
        return shapes | {
            "q": (stack, block_q, d),
            "k": (stack, block_kv, d),
            "v": (stack, block_kv, e),
            "product": (stack, block_q, e),
            "ones": (block_kv,),
        }
    if problem.softcap is not None:
        shapes["capped"] = (stack, block_q, block_kv)
    return shapes | {
        "dscores": (stack, block_q, block_kv),
        "q": (stack, block_q, d + 1),
        "k": (stack, block_kv, d + 1),
        "v": (stack, block_kv, e + 1),
        "dout": (stack, block_q, e + 1),
        "product": (stack, max(block_q, block_kv), max(d, e)),
    }


class Buffers:
    """One worker's memory. Tiles of any size come back contiguous, so that equal shapes give equal bits."""

    def __init__(self, problem: Problem, tiles: Tiles, backward: bool) -> None:
        shapes = buffer_shapes(problem, tiles, backward)
        self.spare = int(backward)
        self._flat = {name: _on_cache_line(math.prod(x), problem.score_dtype) for name, x in shapes.items()}
        if "ones" in self._flat:
            self._flat["ones"].fill(1)

    def take(self, name: str, *shape: int) -> np.ndarray:
        """The first elements of a buffer as an array of ``shape``."""
        return self._flat[name][: math.prod(shape)].reshape(shape)


def _on_cache_line(count: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised vector that starts on a cache line, which products are up to a tenth faster on."""
    line = 64
    memory = np.empty(count * dtype.itemsize + line, np.uint8)
    start = -memory.ctypes.data % line
    return memory[start : start + count * dtype.itemsize].view(dtype)


class Operand:
    """An array read and written tile by tile under the subscripts of the shape that it broadcasts to."""

    def __init__(self, x: np.ndarray, shape: tuple[int, ...]) -> None:
        self.array = x[(None,) * (len(shape) - x.ndim)]
        pairs = enumerate(zip(self.array.shape, shape))
        self._broadcast = [axis for axis, (own, size) in pairs if own == 1 and size != 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's own, with axes of length 1 in front."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """The array's."""
        return self.array.dtype

    def read(self, index: Index, *cuts: slice) -> np.ndarray:
        """A tile (stack or 1, ...): a view for one matrix, a copy for several."""
        place, stacked = self._place(index, cuts)
        tile = self.array[place]
        return tile if stacked else tile[None]

    def write(self, index: Index, cut: slice, tile: np.ndarray) -> None:
        """Store a tile (stack, ...)."""
        place, stacked = self._place(index, (cut,))
        self.array[place] = tile if stacked else tile[0]

    def add(self, index: Index, cuts: tuple[slice, ...], tile: np.ndarray) -> None:
        """Add a tile (stack, ...), in the tile's dtype, rounded once."""
        place, stacked = self._place(index, cuts)
        if stacked:
            self.array[place] = self.array[place] + tile
        else:
            view = self.array[(*place, ...)]
            np.add(view, tile[0], out=view, casting="unsafe")

    def _place(self, index: Index, cuts: tuple[slice, ...]) -> tuple[tuple[Any, ...], bool]:
        """The subscript, and whether it selects several matrices."""
        if not self._broadcast:
            return (*index, *cuts), isinstance(index[-1], np.ndarray)
        place = [*index, *cuts]
        for axis in self._broadcast:
            place[axis] = 0 if axis < len(index) else slice(0, 1)
        return tuple(place), any(isinstance(i, np.ndarray) for i in place)


def matrix_index(numbers: range, shape: tuple[int, ...]) -> Index:
    """Subscripts of consecutive matrices: ints for one, arrays for several."""
    if len(numbers) == 1:
        return tuple(int(i) for i in np.unravel_index(numbers[0], shape))
    return np.unravel_index(np.arange(numbers.start, numbers.stop), shape)


def visibility_runs(problem: Problem) -> Iterator[tuple[int, int, Visibility]]:
    """(first, stop, who sees whom) of consecutive batch items with equal lengths and offset."""
    p = problem
    rows = np.stack([x.reshape(-1) for x in p.host_lengths()], axis=1)
    starts = [0, *(np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1).tolist(), p.batch]
    for first, stop in itertools.pairwise(starts):
        if first < stop:
            yield first, stop, p.visibility(*rows[first])
