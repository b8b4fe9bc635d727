"""Forward pass of one tile of query rows: online softmax over tiles of keys (FlashAttention-2, algorithm 1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..masks import Visibility
from ..problem import Problem
from .scores import SMALL, Scorer, largest_norm
from .tiles import Buffers, Index, Operand, Tiles, matrix_index, visibility_runs


class RowTile(NamedTuple):
    """A tile of rows of consecutive score matrices that share a `Visibility`."""

    matrices: range
    rows: slice
    visibility: Visibility


def row_tiles(problem: Problem, tiles: Tiles) -> Iterator[RowTile]:
    """Every row of the result once; the last rows first, which under a causal mask have the most keys."""
    p = problem
    for first, stop, visibility in visibility_runs(p):
        for t in range(first * p.heads_q, stop * p.heads_q, tiles.stack):
            matrices = range(t, min(t + tiles.stack, stop * p.heads_q))
            for row in reversed(range(0, p.seqlen_q, tiles.block_q)):
                yield RowTile(matrices, slice(row, min(row + tiles.block_q, p.seqlen_q)), visibility)


class ForwardWorker:
    """One thread's forward pass: calls write their rows of out and lse."""

    def __init__(self, problem: Problem, tiles: Tiles, out: np.ndarray, lse: np.ndarray) -> None:
        self._problem, self._tiles = problem, tiles
        self._out, self._lse = Operand(out, problem.out_shape), Operand(lse, problem.lse_shape)
        self._heads = (*problem.lead, problem.heads_q)
        self._buffers = Buffers(problem, tiles, backward=False)
        self._scorer = Scorer(problem, tiles, self._buffers)
        self._sinks = None if problem.sinks is None else Operand(problem.sinks, self._heads)
        # The norms of the keys cost a pass over n x d numbers, and save two over m x n.
        self._seeks_small = self._scorer.bare and problem.seqlen_q >= problem.head_dim
        self._norms_of: Any = None
        self._norms: list[float] = []

    def __call__(self, tile: RowTile) -> None:
        """Compute the rows below q_length, and write 0 and -inf to the others."""
        rows, q_length = tile.rows, tile.visibility.q_length
        used = slice(rows.start, max(rows.start, min(rows.stop, q_length)))
        index = matrix_index(tile.matrices, self._heads)
        if used.start < used.stop:
            self._attend(index, used, len(tile.matrices), tile.visibility)
        if used.stop < rows.stop:
            rest = slice(used.stop, rows.stop)
            shape = (len(tile.matrices), rest.stop - rest.start)
            self._out.write(index, rest, np.zeros((*shape, self._problem.head_dim_v), np.float32))
            self._lse.write(index, rest, np.full(shape, -np.inf, np.float32))

    def _attend(self, index: Index, rows: slice, stack: int, visibility: Visibility) -> None:
        *lead, head = index
        kv_index = (*lead, head // self._problem.group)
        keys = visibility.keys_of_some(rows.start, rows.stop)
        q = self._scorer.load_q(index, rows, stack)
        small = False
        if self._seeks_small:
            norm_k = self._norm_of_keys(kv_index, visibility.kv_length, *keys)
            small = largest_norm(q) * norm_k <= SMALL
        m, l, u = self._summarize(index, kv_index, rows, keys, visibility, q, small)
        if small and ((l < 1e-6).any(where=l > 0) or not np.isfinite(u).all()):
            # Without the maximum as a unit, values of v near the ends of the number range are lost.
            q = self._scorer.load_q(index, rows, stack)
            m, l, u = self._summarize(index, kv_index, rows, keys, visibility, q, small=False)
        self._finish(index, rows, m, l, u)

    def _norm_of_keys(self, kv_index: Index, kv_length: int, start: int, stop: int) -> float:
        """The largest norm of the tiles of keys that [start, stop) touches."""
        block = self._tiles.block_kv
        if self._norms_of != (kv_index, kv_length):
            tiles = (slice(col, min(col + block, kv_length)) for col in range(0, kv_length, block))
            self._norms = [largest_norm(self._scorer.load_k(kv_index, cols, 1)) for cols in tiles]
            self._norms_of = (kv_index, kv_length)
        # A NaN must come out as one: max() may lose it.
        return float(np.max(self._norms[start // block : -(-stop // block)], initial=0))

    def _summarize(
        self,
        index: Index,
        kv_index: Index,
        rows: slice,
        keys: tuple[int, int],
        visibility: Visibility,
        q: np.ndarray,
        small: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The summary m, l, u of the keys: l and u are ``exp(s - m) @ (1, v)``, m is -inf where no key was seen.

        m is the maximum of a row; where scores are ``small`` it is 0, which saves two passes over each tile, and
        the exponentials may be powers of two, log2(e) being folded into q.
        """
        scorer, take = self._scorer, self._buffers.take
        stack, height = q.shape[:2]
        m = np.full((stack, height), -np.inf, q.dtype)
        l, u = np.zeros_like(m), take("out", stack, height, self._problem.head_dim_v)
        u.fill(0)
        exponential: np.ufunc = np.exp
        if small and exp2_is_fast(q.dtype.char):
            exponential = np.exp2
            q *= q.dtype.type(math.log2(math.e))
        start, stop = keys
        for col in range(start, stop, self._tiles.block_kv):
            cols = slice(col, min(col + self._tiles.block_kv, stop))
            first, last = visibility.rows_of_some(cols.start, cols.stop)
            seeing = slice(max(rows.start, first), min(rows.stop, last))
            part = slice(seeing.start - rows.start, seeing.stop - rows.start)
            own_m, own_l, own_u = m[:, part], l[:, part], u[:, part]
            k, v = scorer.load_k(kv_index, cols, stack), scorer.load_v(kv_index, cols, stack)
            scores = take("scores", stack, own_l.shape[1], cols.stop - col)
            np.matmul(q[:, part], k.swapaxes(-1, -2), out=scores)
            scorer.options(scores, index, seeing, cols, visibility)
            if not small:
                _subtract_max(scores, own_m, own_l, own_u)
            p = exponential(scores, out=scores)
            own_l += np.matmul(p, take("ones", p.shape[-1]))
            dropped = scorer.dropped(index, seeing, cols)
            if dropped is not None:
                np.copyto(p, 0, where=dropped)
            own_u += np.matmul(p, v, out=take("product", *own_u.shape))
        if small:
            m[l > 0] = 0
        return m, l, u

    def _finish(self, index: Index, rows: slice, m: np.ndarray, l: np.ndarray, u: np.ndarray) -> None:
        """Take the sink in, normalise, and store."""
        u[m == -np.inf] = 0  # saw no key: nothing of v, were it NaN
        if self._sinks is not None:
            sinks = self._sinks.read(index).astype(m.dtype)[:, None]
            top = np.maximum(m, sinks)
            shift = np.where(top == -np.inf, 0, top)
            kept = np.exp(m - shift)
            l, m = l * kept + np.exp(sinks - shift), top
            u *= kept[..., None]
        if self._problem.dropout is not None:
            u *= m.dtype.type(self._problem.dropout.scale)
        u /= np.where(l == 0, 1, l)[..., None]
        self._out.write(index, rows, u)
        # A score of +inf leaves NaN in l, and its own value in m.
        self._lse.write(index, rows, np.where(m == np.inf, m, m + np.log(l)))


def _subtract_max(scores: np.ndarray, m: np.ndarray, l: np.ndarray, u: np.ndarray) -> None:
    """Take the row maxima into m and from the scores; l and u are rescaled only where some row's has grown."""
    top = np.maximum(m, scores.max(axis=-1))
    # Rows that have seen nothing yet: exp(-inf - 0) is the 0 they need, exp(-inf + inf) is not.
    shift = np.where(top == -np.inf, 0, top)
    if not np.array_equal(top, m):
        kept = np.exp(m - shift)
        l *= kept
        u *= kept[..., None]
        m[...] = top
    scores -= shift[..., None]


@functools.cache
def exp2_is_fast(char: str) -> bool:
    """Whether NumPy has vector code for exp2 on this machine: then it beats exp, which has some everywhere."""
    try:
        from numpy.lib.introspect import opt_func_info
    except ImportError:
        return False
    targets = opt_func_info(func_name="^exp2$").get("exp2", {}).get(2 * char, {})
    return not targets.get("current", "baseline").startswith("baseline")
