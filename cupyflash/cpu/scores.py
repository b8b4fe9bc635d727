"""The scores of one tile with every option."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..masks import Visibility
from ..problem import Problem
from .tiles import Buffers, Index, Operand, Tiles

# Where all scores lie within +-SMALL (Cauchy-Schwarz), exp neither overflows nor loses a score for want of a maximum.
SMALL = 32.0

_ALL = slice(None)


def distances(rows: slice, cols: slice, offset: int, dtype: np.dtype) -> np.ndarray:
    """|i + offset - j| on the diagonals of a tile, see `toeplitz`."""
    count = rows.stop - rows.start + cols.stop - cols.start - 1
    return np.abs(np.arange(count, 0, -1, dtype=np.float64) + (rows.start + offset - cols.stop)).astype(dtype)


def toeplitz(diagonals: np.ndarray, height: int, width: int) -> np.ndarray:
    """The (height, width) view of height + width - 1 numbers, one a diagonal, the lower left corner's first."""
    step = diagonals.itemsize
    return as_strided(diagonals[height - 1 :], (height, width), (-step, step), writeable=False)


def _outside(rows: slice, cols: slice, visibility: Visibility) -> tuple[np.ndarray, slice]:
    """Where position forbids in a tile inside the lengths, and between which of its rows that happens."""
    height, width = rows.stop - rows.start, cols.stop - cols.start
    # There it depends on j - i alone: the last row, prolonged, passes every diagonal.
    j = np.arange(cols.start, cols.stop + height - 1)
    endless = visibility._replace(q_length=rows.stop, kv_length=cols.stop + height)
    diagonals = ~endless.allowed([rows.stop - 1], j)[0]
    first, last = np.flatnonzero(diagonals)[[0, -1]].tolist()
    between = slice(max(0, height - 1 - last), min(height, height + width - 1 - first))
    return toeplitz(diagonals, height, width), between


class Scorer:
    """The scores of a tile in the contract's order: scale, softcap, bias, ALiBi, selection."""

    def __init__(self, problem: Problem, tiles: Tiles, buffers: Buffers) -> None:
        p = problem
        heads, kv_heads = (*p.lead, p.heads_q), (*p.lead, p.heads_kv)
        self._dropout, self._softcap, self._dtype = p.dropout, p.softcap, p.score_dtype
        self._buffers = buffers
        self._q = Operand(p.q, (*heads, *p.q.shape[-2:]))
        self._k, self._v = (Operand(x, (*kv_heads, *x.shape[-2:])) for x in (p.k, p.v))
        self._mask, self._bias = (None if x is None else Operand(x, p.score_shape) for x in (p.mask, p.bias))
        self._slopes = None if p.alibi_slopes is None else Operand(p.alibi_slopes, heads)
        self._factor = p.score_dtype.type(p.scale)
        self._always = (
            p.mask is not None or p.bias is not None or p.alibi_slopes is not None or bool(p.softcap)
        )
        # Whether the scores are the bare products, and many enough for bounds on them to be worth finding.
        self.bare = tiles.stack == 1 and p.bias is None and p.alibi_slopes is None and p.softcap is None
        if p.dropout is not None:
            self._numbers = p.dropout.numbers(heads)

    def load_q(self, index: Index, rows: slice, stack: int) -> np.ndarray:
        """Scaled queries (stack, rows, d); the spare column, where there is one, is free."""
        return self._load("q", self._q, index, rows, stack, self._factor)

    def load_k(self, index: Index, cols: slice, stack: int) -> np.ndarray:
        """Keys (stack, cols, d), and a spare column of ones."""
        return self._load("k", self._k, index, cols, stack)

    def load_v(self, index: Index, cols: slice, stack: int) -> np.ndarray:
        """Values (stack, cols, e), and a spare column of ones."""
        return self._load("v", self._v, index, cols, stack)

    def _load(
        self, name: str, x: Operand, index: Index, cut: slice, stack: int, factor: Any = None
    ) -> np.ndarray:
        width = x.shape[-1]
        tile = self._buffers.take(name, stack, cut.stop - cut.start, width + self._buffers.spare)
        own = tile[..., :width]
        own[...] = x.read(index, cut, slice(None))
        if factor is not None:
            own *= factor
        elif self._buffers.spare:
            tile[..., width] = 1
        return tile

    def options(
        self,
        scores: np.ndarray,
        index: Index,
        rows: slice,
        cols: slice,
        visibility: Visibility,
        capped: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Softcap, bias and ALiBi in place, -inf where not allowed; returns where that is, None for nowhere.

        ``capped``: where to keep the tanh of the softcap.
        """
        start, stop = visibility.keys_of_all(rows.start, rows.stop)
        inside = start <= cols.start <= cols.stop <= stop
        if inside and not self._always:
            return None
        if self._softcap is not None:
            softcap = self._dtype.type(self._softcap)
            scores /= softcap
            capped = np.tanh(scores, out=scores if capped is None else capped)
            np.multiply(capped, softcap, out=scores)
        closed, between = self._closed(index, rows, cols, visibility, inside)
        if self._bias is not None:
            bias = self._bias.read(index, rows, cols).astype(self._dtype)
            scores += bias
            if (never := np.isneginf(bias)).any():
                closed, between = (never if closed is None else closed | never), _ALL
        if self._slopes is not None:
            slopes = self._slopes.read(index).astype(self._dtype)
            far = distances(rows, cols, visibility.offset, self._dtype)
            for matrix, slope in zip(scores, np.broadcast_to(slopes, len(scores))):
                matrix -= toeplitz(far * slope, *matrix.shape)
        if closed is not None:
            where = closed[:, between] if closed.shape[1] > 1 else closed
            np.copyto(scores[:, between], -np.inf, where=where)
        return closed

    def _closed(
        self, index: Index, rows: slice, cols: slice, visibility: Visibility, inside: bool
    ) -> tuple[np.ndarray | None, slice]:
        """Where position or mask forbid, (stack or 1, rows or 1, cols or 1) or None, and between which rows.

        ``inside``: every row sees every key, as far as position goes.
        """
        closed, between = None, _ALL
        if not inside:
            outside, between = _outside(rows, cols, visibility)
            closed = outside[None]
        if self._mask is not None:
            hidden = ~self._mask.read(index, rows, cols)
            if hidden.any():
                closed, between = (hidden if closed is None else closed | hidden), _ALL
        return closed, between

    def dropped(self, index: Index, rows: slice, cols: slice) -> np.ndarray | None:
        """Where dropout drops, (stack, rows, cols); None without dropout."""
        if self._dropout is None:
            return None
        numbers = np.atleast_1d(self._numbers[index])
        # One after the other: their random words stay in cache.
        return ~np.concatenate([self._dropout.keep_tiles(t, rows, cols) for t in numbers[:, None]])


def largest_norm(rows: np.ndarray) -> float:
    """The greatest Euclidean norm of a row; inf or NaN where one is not finite."""
    return math.sqrt(np.einsum("...i,...i->...", rows, rows).max(initial=0))
