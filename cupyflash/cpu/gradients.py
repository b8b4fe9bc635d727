"""Where gradients are summed: the tasks of the backward pass, what each owns, and what they share.

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
from ..masks import Visibility
from ..problem import GRADIENT_NAMES, Gradients
from ..request import BackwardRequest
from .tiles import Index, Operand, Tiles, matrix_index, visibility_runs
from .workers import Order

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
        """Every tile of keys, unit by unit; stacked units share a `Visibility`."""
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
        for first, stop, _ in visibility_runs(self._problem):
            for unit in range(first * heads, stop * heads, self._tiles.stack):
                yield range(unit, min(unit + self._tiles.stack, stop * heads))

    def kv_index(self, task: Task, inner: tuple[int, ...]) -> Index:
        """Subscripts over (*lead, heads_kv) of the unit's member ``inner``."""
        outer = matrix_index(task.units, self._outer_shape)
        return tuple(i if shared else u for i, u, shared in zip(inner, outer, self._shared))

    def visibility(self, kv_index: Index) -> Visibility:
        """Who sees whom in that batch item; all of a stack are alike."""
        lead = tuple(i if isinstance(i, int) else int(i[0]) for i in kv_index[:-1])
        q_length, kv_length, offset = (x[lead] for x in self._lengths)
        return self._problem.visibility(q_length, kv_length, offset)

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
