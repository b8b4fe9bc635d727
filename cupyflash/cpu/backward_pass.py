"""Backward pass of one tile of keys: scores recomputed from lse, tile by tile (FlashAttention-2, algorithm 2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..request import BackwardRequest
from .gradients import GradientSums, Task
from .scores import SMALL, Scorer, distances, largest_norm, toeplitz
from .shares import TaskShares, Visit
from .tiles import Buffers, Index, Operand, Tiles, matrix_index, visibility_runs


class Rows(NamedTuple):
    """What a tile of rows takes from the forward pass, (stack, rows)."""

    lse: np.ndarray  # +inf where no key was seen, so that every weight is 0
    change: np.ndarray  # delta - dlse
    unseeing: np.ndarray | None  # where no key was seen; None: nowhere
    norm: float  # the largest of q's if lse is small, else inf

    def cut(self, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of it."""
        if (start, stop) == (0, self.lse.shape[1]):
            return self
        part = slice(start, stop)
        unseeing = None if self.unseeing is None else self.unseeing[:, part]
        return Rows(self.lse[:, part], self.change[:, part], unseeing, self.norm)


class Keys(NamedTuple):
    """A tile of keys (stack, keys, ...), and what the shares of their gradients are added to, None if not wanted."""

    k: np.ndarray
    v: np.ndarray
    dk: np.ndarray | None
    dv: np.ndarray | None
    norm: float  # the largest of k's if anyone will ask for it

    def cut(self, start: int, stop: int) -> Keys:
        """Keys ``start`` to ``stop`` of it."""
        part = slice(start, stop)
        dk, dv = (None if x is None else x[:, part] for x in (self.dk, self.dv))
        return Keys(self.k[:, part], self.v[:, part], dk, dv, self.norm)


class RowReader:
    """Reads tiles of rows into one worker's buffers."""

    def __init__(self, request: BackwardRequest, scorer: Scorer, buffers: Buffers) -> None:
        p = request.problem
        self._scorer, self._buffers = scorer, buffers
        self._dout = Operand(request.dout, p.out_shape)
        self._out = None if request.out is None else Operand(request.out, p.out_shape)
        self._lse = Operand(request.lse, p.lse_shape)
        self._dlse, self._delta = (
            None if x is None else Operand(x, p.lse_shape) for x in (request.dlse, request.delta)
        )

    def rows(self, index: Index, rows: slice, stack: int) -> Rows:
        """Lse and delta of a tile."""
        lse = np.array(self._lse.read(index, rows))
        change = np.zeros_like(lse)
        if self._delta is not None:
            change += self._delta.read(index, rows)
        elif self._out is not None:
            dout = self.dout(index, rows, stack)[..., :-1]
            product = self._buffers.take("out", *dout.shape)
            product[...] = self._out.read(index, rows, slice(None))
            product *= dout
            change += product.sum(axis=-1)
        if self._dlse is not None:
            change -= self._dlse.read(index, rows)
        unseeing = lse == -np.inf
        lse[unseeing], change[unseeing] = np.inf, 0
        is_small = self._scorer.bare and (np.abs(lse) <= SMALL).all()
        norm = largest_norm(self._scorer.load_q(index, rows, stack)[..., :-1]) if is_small else np.inf
        return Rows(lse, change, unseeing if unseeing.any() else None, norm)

    def dout(self, index: Index, rows: slice, stack: int) -> np.ndarray:
        """Dout (stack, rows, e + 1), the last column free."""
        tile = self._buffers.take("dout", stack, rows.stop - rows.start, self._dout.shape[-1] + 1)
        tile[..., :-1] = self._dout.read(index, rows, slice(None))
        return tile


class BackwardWorker:
    """One thread's backward pass."""

    def __init__(self, sums: GradientSums, tiles: Tiles) -> None:
        request = sums.request
        p = self._problem = request.problem
        self._sums, self._tiles, self._wrt = sums, tiles, frozenset(request.wrt)
        self._buffers = Buffers(p, tiles, backward=True)
        self._scorer = Scorer(p, tiles, self._buffers)
        self._reader = RowReader(request, self._scorer, self._buffers)

    def __call__(self, task: Task) -> None:
        """Add one key tile's shares to every wanted gradient."""
        shares = TaskShares(self._sums, task)
        for number, inner in enumerate(np.ndindex(*self._sums.inner_shape)):
            self._member(task, shares, number, inner)
            shares.close(inner)
        shares.commit()

    def _member(self, task: Task, shares: TaskShares, number: int, inner: tuple[int, ...]) -> None:
        """The shares of one (batch item, kv head), or of a stack of them."""
        p, block = self._problem, self._tiles.block_q
        kv_index, stack = self._sums.kv_index(task, inner), len(task.units)
        visibility = self._sums.visibility(kv_index)
        cols = slice(task.cols.start, min(task.cols.stop, visibility.kv_length))
        start, stop = visibility.rows_of_some(cols.start, cols.stop)
        if start == stop:
            return
        k = self._scorer.load_k(kv_index, cols, stack)
        v = self._scorer.load_v(kv_index, cols, stack)
        norm = largest_norm(k[..., :-1]) if self._scorer.bare else np.inf
        dk, dv = (shares.of_keys(name, inner, kv_index) for name in ("k", "v"))
        keys = Keys(k, v, dk, dv, norm)
        for row in range(start // block * block, stop, block):
            rows = slice(max(row, start), min(row + block, stop))
            first, last = visibility.keys_of_some(rows.start, rows.stop)
            seen = slice(max(cols.start, first), min(cols.stop, last))
            seen_keys = keys.cut(seen.start - cols.start, seen.stop - cols.start)
            place = number * -(-p.seqlen_q // block) + row // block
            self._sums.order.advance(task.key, place)
            for head in range(p.group):
                q_index = (*kv_index[:-1], kv_index[-1] * p.group + head)
                visit = Visit(inner, head, q_index, kv_index, visibility, place)
                known = self._known_rows(task, visit, slice(row, min(row + block, visibility.q_length)))
                known = known.cut(rows.start - row, rows.stop - row)
                self._tile(shares, visit, rows, seen, known, seen_keys)

    def _known_rows(self, task: Task, visit: Visit, rows: slice) -> Rows:
        """The tile's `Rows`, found by the first of its unit's tasks that comes by."""
        found = self._sums.known_rows(task)
        key = (visit.inner, visit.head, rows.start)
        if key not in found:
            found[key] = self._reader.rows(visit.q_index, rows, len(task.units))
        return found[key]

    def _tile(
        self, shares: TaskShares, visit: Visit, rows: slice, cols: slice, known: Rows, keys: Keys
    ) -> None:
        take, p = self._buffers.take, self._problem
        stack, width, height = *keys.k.shape[:2], rows.stop - rows.start
        q = self._scorer.load_q(visit.q_index, rows, stack)
        dout = self._reader.dout(visit.q_index, rows, stack)
        if known.unseeing is not None:
            q[known.unseeing] = dout[known.unseeing] = 0
        capped = None if p.softcap is None else take("capped", stack, height, width)
        weights, closed = self._weights(visit, rows, cols, q, keys, known, capped)
        dropped = self._scorer.dropped(visit.q_index, rows, cols)
        if p.dropout is not None:
            dout[..., :-1] *= p.score_dtype.type(p.dropout.scale)
        if self._wrt & {"q", "k", "bias", "alibi_slopes"}:
            dscores = self._dscores(weights, dout, keys.v, known, dropped)
            if closed is not None and not np.isfinite(known.change).all():
                np.copyto(dscores, 0, where=closed)  # elsewhere the weight 0 has made it 0
            self._add_options(shares, visit, rows, cols, dscores)
            if capped is not None:
                np.multiply(capped, capped, out=capped)
                dscores *= np.subtract(1, capped, out=capped)
            if keys.dk is not None:
                product = take("product", stack, width, p.head_dim)
                keys.dk[...] += np.matmul(dscores.swapaxes(-1, -2), q[..., :-1], out=product)
            if "q" in self._wrt:
                dq = np.matmul(dscores, keys.k[..., :-1], out=take("product", stack, height, p.head_dim))
                dq *= p.score_dtype.type(p.scale)
                if known.unseeing is not None:
                    dq[known.unseeing] = 0  # nothing of k, were it NaN
                shares.add_q(visit, rows, dq)
        if keys.dv is not None:
            if dropped is not None:
                np.copyto(weights, 0, where=dropped)
            product = take("product", stack, width, p.head_dim_v)
            keys.dv[...] += np.matmul(weights.swapaxes(-1, -2), dout[..., :-1], out=product)

    def _add_options(
        self, shares: TaskShares, visit: Visit, rows: slice, cols: slice, dscores: np.ndarray
    ) -> None:
        """The shares of dbias and dslopes."""
        if "bias" in self._wrt:
            shares.add_bias(visit, rows, cols, dscores)
        if "alibi_slopes" in self._wrt:
            far = toeplitz(distances(rows, cols, visit.visibility.offset, dscores.dtype), *dscores.shape[1:])
            per_row = np.einsum("sij,ij->si", dscores, far)
            shares.add_slopes(visit, -per_row.sum(axis=-1, dtype=np.float64))

    def _weights(
        self,
        visit: Visit,
        rows: slice,
        cols: slice,
        q: np.ndarray,
        keys: Keys,
        known: Rows,
        capped: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """exp(s - lse) in the score buffer, and where it was selected to 0.

        Where scores and lse are small, s - lse comes out of the product itself, lse in q's spare column against
        k's ones. Large scores must be formed before lse is taken from them, so that equal ones cancel.
        """
        k = keys.k
        scores = self._buffers.take("scores", *q.shape[:2], k.shape[1])
        is_small = known.norm * keys.norm <= SMALL
        if is_small:
            q[..., -1] = -known.lse
            np.matmul(q, k.swapaxes(-1, -2), out=scores)
        else:
            np.matmul(q[..., :-1], k[..., :-1].swapaxes(-1, -2), out=scores)
        closed = self._scorer.options(scores, visit.q_index, rows, cols, visit.visibility, capped)
        if not is_small:
            scores -= known.lse[..., None]
        np.exp(scores, out=scores)
        if closed is not None and np.isnan(known.lse).any():
            np.copyto(scores, 0, where=closed)
        return scores, closed

    def _dscores(
        self, weights: np.ndarray, dout: np.ndarray, v: np.ndarray, known: Rows, dropped: np.ndarray | None
    ) -> np.ndarray:
        """P * (dP - delta + dlse) in its buffer."""
        dscores = self._buffers.take("dscores", *weights.shape)
        if dropped is None and self._tiles.stack == 1 and weights.shape[-1] > 1:
            dout[..., -1] = -known.change  # against v's ones
            np.matmul(dout, v.swapaxes(-1, -2), out=dscores)
        else:
            if weights.shape[-1] > 1:
                np.matmul(dout[..., :-1], v[..., :-1].swapaxes(-1, -2), out=dscores)
            else:  # summed as delta is, so that the two cancel where a row sees this key alone
                np.sum(dout[..., :-1] * v[..., :-1], axis=-1, keepdims=True, out=dscores)
            if dropped is not None:
                np.copyto(dscores, 0, where=dropped)
            dscores -= known.change[..., None]
        dscores *= weights
        return dscores


def add_sink_gradients(sums: GradientSums, tiles: Tiles) -> None:
    """dsinks: no tile of scores is in it, only each row's lse and delta."""
    p = sums.request.problem
    heads = (*p.lead, p.heads_q)
    sinks, total = Operand(p.sinks, heads), sums.totals["sinks"]
    buffers = Buffers(p, tiles, backward=True)
    reader = RowReader(sums.request, Scorer(p, tiles, buffers), buffers)
    for first, stop, visibility in visibility_runs(p):
        for t in range(first * p.heads_q, stop * p.heads_q):
            index = matrix_index(range(t, t + 1), heads)
            for row in range(0, visibility.q_length, tiles.block_q):
                known = reader.rows(index, slice(row, min(row + tiles.block_q, visibility.q_length)), 1)
                weight = np.exp(sinks.read(index).astype(known.lse.dtype)[:, None] - known.lse)
                total.add(index, (), (weight * -known.change).sum(axis=-1, dtype=np.float64))
