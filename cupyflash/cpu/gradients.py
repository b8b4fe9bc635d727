"""Where gradients are summed: the tasks of the backward pass, what each owns, and the order of what they share.

A task is one tile of keys with every query that sees it. It owns those rows of dk and dv. Its shares of dq follow,
row tile by row tile, those of the task before it; its shares of what all tasks add to (dslopes, a dbias of one row
or one column) follow at its end. So every sum has one order, whatever the threads.

Where a wanted gradient sums over leading axes or heads (q, k or v broadcast against the others, an (m, n) bias
shared by heads), one task loops over all that share it. A *unit* is such a set of (batch item, kv head), mostly
one pair; its tasks are the tiles of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import empty_in_order
from ..problem import GRADIENT_NAMES, Gradients
from ..request import BackwardRequest
from .tiles import Index, Operand, Tiles, geometry_runs, matrix_index
from .workers import END, Order

_ALL = slice(None)


class Task(NamedTuple):
    """One tile of keys of consecutive units."""

    number: int
    units: range
    column: int
    cols: slice
    last: bool  # of its units

    @property
    def key(self) -> tuple[int, int]:
        """Its name in the order of shares."""
        return (self.units.start, self.column)

    @property
    def before(self) -> tuple[int, int]:
        """The name of the task whose shares of dq its own follow."""
        return (self.units.start, self.column - 1)


class Visit(NamedTuple):
    """One query head's (or stack of heads') tile row, inside a task."""

    inner: tuple[int, ...]
    head: int  # within the group
    q_index: Index
    kv_index: Index
    geometry: dict[str, Any]
    place: int  # in the order of dq's shares


class GradientSums:
    """The gradients of one call, and the tasks that add to them."""

    def __init__(self, request: BackwardRequest, tiles: Tiles) -> None:
        p = self._problem = request.problem
        self.request, self.order = request, Order()
        heads, kv_heads = (*p.lead, p.heads_q), (*p.lead, p.heads_kv)
        self._targets: dict[str, np.ndarray] = {}
        self.views: dict[str, Operand] = {}
        shapes = {
            "q": (*heads, *p.q.shape[-2:]),
            "k": (*kv_heads, *p.k.shape[-2:]),
            "v": (*kv_heads, *p.v.shape[-2:]),
            "bias": p.score_shape,
            "sinks": heads,
            "alibi_slopes": heads,
        }
        for name in request.wrt:
            argument = getattr(p, name)
            target = getattr(request.targets, name)
            if target is None:
                like = argument[0] if name in p.two_d else argument
                target = empty_in_order(np, like.shape, like.dtype, like)
            if not request.accumulate:
                target[...] = 0
            self._targets[name] = target
            self.views[name] = Operand(target, shapes[name])
        bias = self.views.get("bias")
        self.matrix_bias = bias is not None and min(bias.shape[-2:]) > 1
        # Shared by tasks, so summed in an array of the right dtype and rounded at the end.
        self.totals = {
            name: self._total(name, view, shapes[name])
            for name, view in self.views.items()
            if not self._owned(name)
        }
        self._shared = self._shared_axes()
        self.inner_shape = tuple(n if shared else 1 for n, shared in zip(kv_heads, self._shared))
        self._outer_shape = tuple(1 if shared else n for n, shared in zip(kv_heads, self._shared))
        self._tiles = tiles if set(self.inner_shape) == {1} else tiles._replace(stack=1)
        self._lengths = p.host_lengths()
        self.unit_sums: dict[int, dict[Any, tuple[Index, np.ndarray]]] = {}
        self._known_rows: dict[int, dict[Any, Any]] = {}

    def _owned(self, name: str) -> bool:
        return name in ("q", "k", "v") or (name == "bias" and self.matrix_bias)

    def _total(self, name: str, view: Operand, shape: tuple[int, ...]) -> Operand:
        # Slopes and sinks collect one number of every tile or row: in float64, which costs nothing.
        dtype = self._problem.score_dtype if name == "bias" else np.dtype(np.float64)
        return view if view.dtype == dtype else Operand(np.zeros(view.shape, dtype), shape)

    def _shared_axes(self) -> tuple[bool, ...]:
        """Which of the axes (*lead, heads_kv) an owned gradient sums over."""
        full = (*self._problem.lead, self._problem.heads_kv)
        owned = [self.views[name] for name in self.views if self._owned(name)]
        return tuple(n > 1 and any(x.shape[axis] == 1 for x in owned) for axis, n in enumerate(full))

    def tasks(self) -> Iterator[Task]:
        """Every tile of keys, unit by unit; stacked units share a geometry."""
        n, block = self._problem.seqlen_k, self._tiles.block_kv
        number = 0
        for units in self._units():
            for column, col in enumerate(range(0, n, block)):
                yield Task(number, units, column, slice(col, min(col + block, n)), col + block >= n)
                number += 1

    def _units(self) -> Iterator[range]:
        if self._tiles.stack == 1:
            for unit in range(math.prod(self._outer_shape)):
                yield range(unit, unit + 1)
            return
        heads = self._problem.heads_kv
        for first, stop, _ in geometry_runs(self._problem):
            for unit in range(first * heads, stop * heads, self._tiles.stack):
                yield range(unit, min(unit + self._tiles.stack, stop * heads))

    def kv_index(self, task: Task, inner: tuple[int, ...]) -> Index:
        """Subscripts over (*lead, heads_kv) of the unit's member ``inner``."""
        outer = matrix_index(task.units, self._outer_shape)
        return tuple(i if shared else u for i, u, shared in zip(inner, outer, self._shared))

    def geometry(self, kv_index: Index) -> dict[str, Any]:
        """Bounds and lengths as `masks` takes them."""
        lead = tuple(i if isinstance(i, int) else int(i[0]) for i in kv_index[:-1])
        q_length, kv_length, offset = (int(x[lead]) for x in self._lengths)
        p = self._problem
        return {
            "left": p.left,
            "right": p.right,
            "offset": offset,
            "q_length": q_length,
            "kv_length": kv_length,
        }

    def known_rows(self, task: Task) -> dict[Any, Any]:
        """What tasks of one unit tell each other of tiles of rows; dropped with the unit's last task."""
        return self._known_rows.setdefault(task.units.start, {})

    def finish_units(self, task: Task) -> None:
        """The last of the units' tasks is done."""
        self._known_rows.pop(task.units.start, None)
        for index, tile in self.unit_sums.pop(task.units.start, {}).values():
            self.views["q"].add(index, (_ALL, _ALL), tile)

    def result(self) -> Gradients:
        """The gradients, with what tasks shared rounded into them."""
        for name, total in self.totals.items():
            if total is not self.views[name]:
                target = self.views[name].array
                np.add(target, total.array, out=target, casting="unsafe")
        return Gradients(*(self._targets.get(name) for name in GRADIENT_NAMES))


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
        if key not in pending:
            pending[key] = (visit.q_index, np.zeros((len(tile), *view.shape[-2:]), tile.dtype))
        pending[key][1][:, rows] += tile

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

    def _add_bias_line(
        self, view: Operand, visit: Visit, rows: slice, cols: slice, tile: np.ndarray
    ) -> None:
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
            rows = () if name != "bias" else (_ALL,)
            cuts = (*rows, self._task.cols) if name == "bias" else (self._task.cols, _ALL)
            pending.close(inner, cuts)

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
