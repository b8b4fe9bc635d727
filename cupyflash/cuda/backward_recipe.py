"""What a backward launches: see `recipe`."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from . import backward_rows, sm90_backward, sm90_backward_q, sm90_wide_backward
from .backward_launches import LENGTHS, SCORES, Launches, own_of
from .configs import Config
from .recipe import Layouts, Recipe, Sizes
from .simt import ceil


@functools.lru_cache(maxsize=4096)
def backward_recipe(
    family: str, cc: int, sizes: Sizes, layouts: Layouts, wrt: frozenset[str], accumulate: bool
) -> Recipe:
    """The backward: delta, then the kernels that own the gradients in ``wrt``, then sums over rows."""
    kind = {"sm90": _HopperBackward, "sm90_wide": _BackwardOnPlanes}.get(family, Launches)
    return kind(family, cc, sizes, dict(layouts), wrt, accumulate).recipe()


class _HopperBackward(Launches):
    """The same on Hopper: one kernel owns keys and values, and hands the gradients of queries on as sums.

    Queries of wide heads have a kernel of their own. The gradient of a bias that was not broadcast may leave the
    kernel of keys and values. Other ones, and gradients of slopes, are left to kernels of sm80: slopes' do not bear
    weights that are rounded before they are summed up.
    """

    def recipe(self) -> Recipe:
        if self.sizes.rows == 0:
            return Recipe(())
        kernel = sm90_backward.kernel_for(self.sizes)
        config, wide = self._config(kernel), kernel == "backward_kv"
        self._reserve_sums(0 if wide else config.geometry.head_dim)
        # A plan's workspace is also for calls that add to the bias's gradient, or want it alone.
        self._reserve_rows(bool({"bias", "sinks", "slopes"} & self.wrt))
        self._row_stats(config)
        owned = ({"k", "v"} if wide else {"q", "k", "v"}) & self.wrt
        with_bias = bool(owned) and self._is_unshaped() and self._keeps_bias()
        if owned:
            self._main(kernel, config, with_bias)
        if "q" in self.wrt and wide:
            self._wide_queries()
        elif "q" in self.wrt and not self._finishes():
            self._finish_queries(config)
        self.family = "sm80"
        if "bias" in self.wrt and not with_bias:
            self._bias()
        self._queries({"slopes"} & self.wrt)
        return self._finished()

    def _finishes(self) -> bool:
        """Whether the main kernel turns sums into gradients of queries: each sum into one of q's dtype."""
        if self.accumulate or self.layouts["dq"].dtype != self.sizes.dtype:
            return False
        return not any(self._broadcast_axes("q"))

    def _main(self, kernel: str, config: Any, with_bias: bool) -> None:
        order = sm90_backward.IN_TURN if self.sizes.deterministic else sm90_backward.IN_ANY_ORDER
        for number, owners in enumerate(self._owners() or [[]]):
            bias = {"dbias"} if with_bias and number == 0 else set()
            summed = "q" in self.wrt and number == 0 and kernel == "backward"
            queries = {"dq"} if summed and self._finishes() else set()
            names = (*SCORES, "dout", *owners, *bias, *queries)
            record = self._record(names, owner=owners[0] if owners else None)
            owned = own_of(record)
            numbers = (owned, number, order if summed else sm90_backward.NOT_WANTED)
            extras = sm90_backward.Extras.of(config, self.sizes, record, *numbers, bool(queries))
            grid = config.geometry.blocks(kernel, self.sizes, owned)
            self._add(config, grid, record, {"dk", "dv", "dbias"}.difference(owners, bias), extras)

    def _wide_queries(self) -> None:
        config, record = self._config("backward_q"), self._record((*SCORES, "dout", "dq"), owner="dq")
        numbers = (own_of(record), sm90_backward_q.TICKET, sm90_backward.NOT_WANTED)
        extras = sm90_backward.Extras.of(config, self.sizes, record, *numbers)
        self._add(
            config, config.geometry.blocks("backward_q", self.sizes, own_of(record)), record, (), extras
        )


class _BackwardOnPlanes(Launches):
    """The same for float32 on Hopper; kernels of sm80_wide without keys, and for slopes' gradient without q's."""

    def recipe(self) -> Recipe:
        if not self.sizes.seqlen_k:
            self.family = "sm80_wide"
        return super().recipe()

    def _queries_keep_scores(self) -> bool:
        return self.family == "sm90_wide" and "q" in self.wrt and not self._is_unshaped()

    def _delta(self) -> None:
        super()._delta()
        if self.family != "sm90_wide" or not {"q", "k", "v"} & self.wrt:
            return
        for name, (rows, cols) in sm90_wide_backward.planes(self.sizes).items():
            self._reserve(f"{name}_planes", rows * cols // 2)
        stats = backward_rows.padded_rows(self.sizes)
        self._reserve("row_stats", 2 * stats)
        config = self._config("split_all")
        record = self._record((*LENGTHS, "q", "k", "v", "dout", "lse"))
        self._add(config, ceil(sm90_wide_backward.split_units(self.sizes, stats), config.threads), record)

    def _add(
        self, config: Config, grid: int, record: np.ndarray, hidden: Collection[str] = (), extras: Any = None
    ) -> None:
        if config.family == "sm90_wide":
            extras = sm90_wide_backward.Extras.of(self.sizes)
        super()._add(config, grid, record, hidden, extras)
