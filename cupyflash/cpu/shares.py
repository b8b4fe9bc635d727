"""What one task of the backward pass adds to each gradient, and when."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..masks import Visibility
from .gradients import GradientSums, Task
from .tiles import Index, Operand
from .workers import END

_ALL = slice(None)


class Visit(NamedTuple):
    """One query head's (or stack of heads') tile row, inside a task."""

    inner: tuple[int, ...]
    head: int  # within the group
    q_index: Index
    kv_index: Index
    visibility: Visibility
    place: int  # in the order of dq's shares


class TaskShares:
    """What one task adds to each gradient."""

    def __init__(self, sums: GradientSums, task: Task) -> None:
        self._sums, self._task = sums, task
        self._dtype = sums.request.problem.score_dtype
        self._own: dict[str, _Pending] = {x: _Pending(sums, x) for x in ("k", "v") if x in sums.views}
        if sums.matrix_bias and sums.views["bias"].dtype != self._dtype:
            self._own["bias"] = _Pending(sums, "bias")
        self._common: dict[Any, tuple[Index, np.ndarray]] = {}

    def of_keys(self, name: str, inner: tuple[int, ...], kv_index: Index) -> np.ndarray | None:
        """What to add this task's rows of dk or dv to, (stack, keys, head_dim); None if they are not wanted."""
        if name not in self._own:
            return None
        shape = (len(self._task.units), _size(self._task.cols), self._sums.views[name].shape[-1])
        return self._own[name].get(inner, 0, kv_index, shape, self._dtype)

    def add_q(self, visit: Visit, rows: slice, tile: np.ndarray) -> None:
        """A share of dq, after the one of the task before."""
        sums, view = self._sums, self._sums.views["q"]
        if self._task.column:
            sums.order.wait(self._task.before, visit.place + 1)
        if view.dtype == tile.dtype:
            view.add(visit.q_index, (rows, _ALL), tile)
            return
        pending = sums.unit_sums.setdefault(self._task.units.start, {})
        own = tuple(i if size > 1 else 0 for i, size in zip(visit.inner, view.shape))
        key = (own[:-1], visit.inner[-1], visit.head)
        if (total := pending.get(key)) is None:
            # Two tasks may come here at once, with different rows: setdefault lets one array win.
            empty = np.zeros((len(tile), *view.shape[-2:]), tile.dtype)
            total = pending.setdefault(key, (visit.q_index, empty))
        total[1][:, rows] += tile

    def add_bias(self, visit: Visit, rows: slice, cols: slice, tile: np.ndarray) -> None:
        """A share of dbias: dS of a tile."""
        view = self._sums.views["bias"]
        if not self._sums.matrix_bias:
            self._add_bias_line(view, visit, rows, cols, tile)
        elif view.dtype == tile.dtype:
            view.add(visit.q_index, (rows, cols), tile)
        else:
            width = _size(self._task.cols)
            head = visit.head if view.shape[-3] > 1 else 0
            shape = (len(tile), view.shape[-2], width)
            total = self._own["bias"].get(visit.inner, head, visit.q_index, shape, tile.dtype)
            total[:, rows, _relative(cols, self._task.cols)] += tile

    def _add_bias_line(self, view: Operand, visit: Visit, rows: slice, cols: slice, tile: np.ndarray) -> None:
        by_row, by_col = (size > 1 for size in view.shape[-2:])
        height = view.shape[-2]
        width = _size(self._task.cols) if by_col else 1
        line = tile if by_row else np.matmul(np.ones((1, tile.shape[-2]), tile.dtype), tile)
        line = line if by_col else np.matmul(line, np.ones((tile.shape[-1], 1), tile.dtype))
        total = self._common_total("bias", visit, (len(tile), height, width), tile.dtype)
        total[:, rows if by_row else _ALL, _relative(cols, self._task.cols) if by_col else _ALL] += line

    def add_slopes(self, visit: Visit, shares: np.ndarray) -> None:
        """A share of dslopes, float64 (stack,)."""
        total = self._common_total("alibi_slopes", visit, shares.shape, shares.dtype)
        total += shares

    def _common_total(self, name: str, visit: Visit, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        key = (name, visit.inner, visit.head)
        if key not in self._common:
            self._common[key] = (visit.q_index, np.zeros(shape, dtype))
        return self._common[key][1]

    def close(self, inner: tuple[int, ...]) -> None:
        """Member ``inner`` of the unit has given all its shares of this task's dk, dv and dbias."""
        for name, pending in self._own.items():
            cols = self._task.cols
            pending.close(inner, (_ALL, cols) if name == "bias" else (cols, _ALL))

    def commit(self) -> None:
        """All shares are given: let the next task go on, and add what all tasks share when it is this one's turn."""
        sums, task, order = self._sums, self._task, self._sums.order
        if task.column:
            order.wait(task.before, END)
            order.forget(task.before)
        if task.last:
            sums.finish_units(task)
        else:
            order.advance(task.key, END)
        if not sums.totals:
            return
        order.wait("totals", task.number)
        for (name, *_), (index, tiles) in self._common.items():
            for s, tile in enumerate(tiles):
                one = tuple(i if isinstance(i, int) else int(i[s]) for i in index)
                cuts = (_ALL, task.cols) if name == "bias" else ()
                sums.totals[name].add(one, cuts, tile[None])
        order.advance("totals", task.number + 1)


class _Pending:
    """Tiles of one gradient that wait for the last member that shares them; then they are added, rounded once."""

    def __init__(self, sums: GradientSums, name: str) -> None:
        self._view = sums.views[name]
        self._own = tuple(size > 1 for size in self._view.shape[: len(sums.inner_shape)])
        self._visits = math.prod(n for n, own in zip(sums.inner_shape, self._own) if not own)
        self._left: dict[Any, int] = {}
        self._tiles: dict[Any, dict[int, tuple[Index, np.ndarray]]] = {}

    def get(
        self, inner: tuple[int, ...], head: int, index: Index, shape: tuple[int, ...], dtype: Any
    ) -> np.ndarray:
        heads = self._tiles.setdefault(self._key(inner), {})
        if head not in heads:
            heads[head] = (index, np.zeros(shape, dtype))
        return heads[head][1]

    def close(self, inner: tuple[int, ...], cuts: tuple[slice, ...]) -> None:
        key = self._key(inner)
        self._left[key] = self._left.get(key, self._visits) - 1
        if self._left[key] == 0:
            for index, tile in self._tiles.pop(key, {}).values():
                self._view.add(index, cuts, tile)

    def _key(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i if own else 0 for i, own in zip(inner, self._own))


def _relative(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _size(cut: slice) -> int:
    return cut.stop - cut.start
