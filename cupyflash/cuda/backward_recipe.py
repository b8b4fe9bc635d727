"""What a backward launches: see `recipe`."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Set
from typing import Any

import numpy as np

from ..arrays import score_dtype
from . import backward_rows, sm80, sm80_wide, sm90_backward, sm90_backward_q, sm90_wide_backward
from .configs import Config, in_one_kernel, unordered
from .params import ADDRESSES, Layout, build_record
from .recipe import Launch, Layouts, Recipe, Sizes, config_of
from .simt import ceil

BIAS_BLOCKS = 256  # a bias gradient summed by fewer owners than this is cut into parts
OWNERS_TOGETHER = 8  # kernels_cu/attn/bias_plan.cuh: owners that a block takes where each walks one tile
ALIGNMENT = 256  # of arrays inside the workspace

_LENGTHS = ("q_length", "kv_length", "query_offset")  # what every kernel reads
_SCORES: tuple[str, ...] = ("q", "k", "v", "lse", "mask", "bias", "sinks", "slopes", *_LENGTHS)
_SCORES += ("dropout_t", "dropout_seed", "dropout_offset")


@functools.lru_cache(maxsize=4096)
def backward_recipe(
    family: str, cc: int, sizes: Sizes, layouts: Layouts, wrt: frozenset[str], accumulate: bool
) -> Recipe:
    """The backward: delta, then the kernels that own the gradients in ``wrt``, then sums over rows."""
    kind = {"sm90": _HopperBackward, "sm90_wide": _BackwardOnPlanes}.get(family, _Backward)
    return kind(family, cc, sizes, dict(layouts), wrt, accumulate).recipe()


class _Backward:
    """The launches of one backward, collected in order."""

    def __init__(
        self,
        family: str,
        cc: int,
        sizes: Sizes,
        layouts: dict[str, Layout],
        wrt: frozenset[str],
        accumulate: bool,
    ):
        self.family, self.cc, self.sizes, self.layouts = family, cc, sizes, layouts
        self.wrt, self.accumulate = wrt, accumulate
        self.score_bytes = score_dtype(sizes.dtype).itemsize
        self.launches: list[Launch] = []
        self.workspace: list[tuple[str, int]] = []
        self.workspace_bytes = 0

    def recipe(self) -> Recipe:
        if self.sizes.rows == 0:
            return Recipe(())
        together = self._in_one_kernel()
        by_sums = together and self.family == "sm80"  # dq leaves that kernel as sums
        if {"bias", "sinks"} & self.wrt or not by_sums:
            self._reserve("row_delta", self.sizes.rows)
        if "slopes" in self.wrt:
            self._reserve("slope_rows", self.sizes.rows)
        if by_sums:
            self._all_three()
        elif together:
            self._reserve("turns", ceil(4 * (1 + self.sizes.rows), self.score_bytes))
            self._delta()
            self._all_in_turns()
        else:
            self._delta()
            self._keys_and_values()
            self._queries({"q", "slopes"} & self.wrt)
        if "bias" in self.wrt:
            self._bias()
        return self._finished()

    def _finished(self) -> Recipe:
        """The recipe, after the launches that sum over rows."""
        for name in ("sinks", "slopes"):
            if name in self.wrt:
                self._rows_of(name)
        return Recipe(tuple(self.launches), tuple(self.workspace), self.workspace_bytes)

    def _config(self, kernel: str) -> Any:
        return config_of(self.family, kernel, self.cc, self.sizes)

    def _reserve(self, name: str, elements: int) -> None:
        """An array of the workspace, of elements of the score dtype."""
        self.workspace.append((name, self.workspace_bytes))
        self.workspace_bytes += ceil(elements * self.score_bytes, ALIGNMENT) * ALIGNMENT

    def _record(self, names: Collection[str], owner: str | None = None, splits: int = 1) -> np.ndarray:
        layouts = {name: layout for name, layout in self.layouts.items() if name in names}
        return build_record(self.sizes, layouts, owner=owner, splits=splits, accumulate=self.accumulate)

    def _add(
        self, config: Config, grid: int, record: np.ndarray, hidden: Collection[str] = (), extras: Any = None
    ) -> None:
        if grid:
            indices = tuple(ADDRESSES.index(name) for name in hidden)
            self.launches.append(Launch(config, grid, record.tobytes(), indices, extras))

    def _delta(self) -> None:
        config = self._config("delta")
        dq = ("dq",) if "q" in self.wrt else ()
        record = self._record((*_LENGTHS, "out", "dout", "dlse", "delta", *dq))
        self._add(config, ceil(self.sizes.rows, config.threads // 32), record)

    def _all_in_turns(self) -> None:
        """All three from one kernel, dq summed in place: in turns, or (splits 0) as blocks come."""
        config = self._config("backward")
        turns = sm80_wide.heads_in_turns(self.sizes.heads_kv) if self.sizes.deterministic else 0
        record = self._record((*_SCORES, "dout", "dq", "dk", "dv"), owner="dk", splits=turns)
        self._add(config, config.geometry.blocks("backward", self.sizes, _own(record)), record)

    def _owners(self) -> list[list[str]]:
        """The gradients of keys and values that one launch can own, launch by launch."""
        wanted = [f"d{name}" for name in ("k", "v") if name in self.wrt]
        together = len(wanted) == 2 and self._broadcast_axes("k") == self._broadcast_axes("v")
        return [wanted] if together else [[name] for name in wanted]

    def _keys_and_values(self) -> None:
        for owners in self._owners():
            config = self._config("backward_kv")
            record = self._record((*_SCORES, "dout", *owners), owner=owners[0])
            grid = config.geometry.blocks("backward_kv", self.sizes, _own(record))
            self._add(config, grid, record, {"dk", "dv"}.difference(owners))

    def _in_one_kernel(self) -> bool:
        """Whether dq, dk and dv come from one kernel."""
        s = self.sizes
        if "slopes" in self.wrt or not {"q", "k", "v"} <= self.wrt or len(self._owners()) != 1:
            return False
        if self.family in ("sm80_wide", "simt") and any(self._broadcast_axes("q")):
            return False
        return in_one_kernel(self.family, s.dtype.name, max(s.head_dim, s.head_dim_v), s.options, self.cc)

    def _all_three(self) -> None:
        s, config = self.sizes, self._config("backward")
        if not s.deterministic:
            config = unordered(config)
        self._reserve_sums(config.geometry.head_dim)
        self._row_stats(config)
        if not s.deterministic:
            self._clear_sums(config)
        record = self._record((*_SCORES, "dout", "dk", "dv"), owner="dk", splits=sm80.heads_together(s))
        self._add(config, config.geometry.blocks("backward", s, _own(record)), record, {"dq"})
        self._finish_queries(config)

    def _reserve_sums(self, cols: int) -> None:
        for name, words in backward_rows.workspace(self.sizes, cols).items():
            self._reserve(name, words)

    def _row_stats(self, main: Any) -> None:
        config = self._config("row_stats")
        names = (*_LENGTHS, "out", "lse", "dout", "dlse", "delta")
        record = self._record(names, splits=main.geometry.block_q)
        self._add(config, backward_rows.padded_rows(self.sizes) // backward_rows.ROW_UNIT, record)

    def _clear_sums(self, main: Any) -> None:
        config = self._config("clear_sums")
        record = self._record(_LENGTHS, splits=main.geometry.head_dim)
        self._add(config, backward_rows.padded_rows(self.sizes) // backward_rows.ROW_BLOCK, record)

    def _finish_queries(self, main: Any) -> None:
        config = self._config("finish_queries")
        record = self._record((*_LENGTHS, "dq"), owner="dq", splits=main.geometry.head_dim)
        units = ceil(self.sizes.seqlen_q, backward_rows.ROW_UNIT)
        self._add(config, _own(record) * self.sizes.heads_q * units, record)

    def _broadcast_axes(self, name: str) -> list[bool]:
        shape = self.layouts[name].shape[:-3]
        missing = len(self.sizes.lead) - len(shape)
        return [
            axis < missing or (shape[axis - missing] == 1 < size) for axis, size in enumerate(self.sizes.lead)
        ]

    def _queries(self, wanted: Set[str]) -> None:
        if not wanted:
            return
        config = self._config("backward_q")
        owned = ["dq"] if "q" in wanted else []
        record = self._record((*_SCORES, "dout", *owned), owner=owned[0] if owned else None)
        grid = config.geometry.blocks("backward_q", self.sizes, _own(record))
        self._add(config, grid, record, {"dq"}.difference(owned))

    def _bias(self) -> None:
        if not (elements := math.prod(self.layouts["dbias"].shape)):
            return
        config = self._config("backward_bias")
        names, s = (*_SCORES, "dout", "dbias"), self.sizes
        record = self._record(names, owner="dbias")
        row_tiles = ceil(s.seqlen_q, config.geometry.block_q)
        col_tiles = ceil(s.seqlen_k, config.geometry.block_kv)
        tiles = (row_tiles if record["own_rows"] else 1) * (col_tiles if record["own_cols"] else 1)
        heads = s.heads_q if record["own_heads"] else 1
        owners = _own(record) * heads * tiles
        # Of the sizes of one item and head alone, so that the bits do not depend on the others beside them.
        walked = math.prod(record["loop"].tolist()) * (s.heads_q // heads) * (row_tiles * col_tiles // tiles)
        splits = max(1, min(walked, ceil(BIAS_BLOCKS, tiles)))
        if splits > 1:
            self._reserve("partials", splits * elements)
            record = self._record(names, owner="dbias", splits=splits)
        together = OWNERS_TOGETHER if splits == 1 and config.family != "simt" else 1
        self._add(config, ceil(owners * splits, max(1, together // max(1, walked))), record)
        if splits > 1:
            after = self._config("sum_partials")
            self._add(after, ceil(elements, after.threads), record)

    def _rows_of(self, name: str) -> None:
        config = self._config("sum_rows")
        record = self._record((*_LENGTHS, "sinks", "lse", f"d{name}"), owner=f"d{name}")
        grid = _own(record) * (self.sizes.heads_q if record["own_heads"] else 1)
        self._add(config, grid, record, ["dslopes" if name == "sinks" else "dsinks"])


class _HopperBackward(_Backward):
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
        if {"bias", "sinks", "slopes"} & self.wrt:
            self._reserve("row_delta", self.sizes.rows)
        if "slopes" in self.wrt:
            self._reserve("slope_rows", self.sizes.rows)
        self._row_stats(config)
        if ({"k", "v"} if wide else {"q", "k", "v"}) & self.wrt:
            self._main(kernel, config)
        if "q" in self.wrt and wide:
            self._wide_queries()
        elif "q" in self.wrt:
            self._finish_queries(config)
        self.family = "sm80"
        if "bias" in self.wrt and not self._writes_bias():
            self._bias()
        self._queries({"slopes"} & self.wrt)
        return self._finished()

    def _writes_bias(self) -> bool:
        """Whether the main kernel writes the gradient of the bias: kernels_cu/sm90/backward_bias.cuh."""
        owned = {"k", "v"} if sm90_backward.kernel_for(self.sizes) == "backward_kv" else {"q", "k", "v"}
        if "bias" not in self.wrt or not owned & self.wrt or self.accumulate or self.sizes.options[1]:
            return False
        if self.layouts["dbias"].dtype not in (self.sizes.dtype, np.dtype(np.float32)):
            return False
        record = self._record(("dbias",), owner="dbias")
        kept = record["own_heads"] and record["own_rows"] and record["own_cols"]
        return bool(kept) and math.prod(record["loop"].tolist()) == 1

    def _main(self, kernel: str, config: Any) -> None:
        order = sm90_backward.IN_TURN if self.sizes.deterministic else sm90_backward.IN_ANY_ORDER
        for number, owners in enumerate(self._owners() or [[]]):
            bias = {"dbias"} if self._writes_bias() and number == 0 else set()
            record = self._record((*_SCORES, "dout", *owners, *bias), owner=owners[0] if owners else None)
            owned = _own(record)
            summed = "q" in self.wrt and number == 0 and kernel == "backward"
            queries = order if summed else sm90_backward.NOT_WANTED
            extras = sm90_backward.Extras.of(config, self.sizes, record, owned, number, queries)
            grid = config.geometry.blocks(kernel, self.sizes, owned)
            self._add(config, grid, record, {"dk", "dv", "dbias"}.difference(owners, bias), extras)

    def _wide_queries(self) -> None:
        config, record = self._config("backward_q"), self._record((*_SCORES, "dout", "dq"), owner="dq")
        numbers = (_own(record), sm90_backward_q.TICKET, sm90_backward.NOT_WANTED)
        extras = sm90_backward.Extras.of(config, self.sizes, record, *numbers)
        self._add(config, config.geometry.blocks("backward_q", self.sizes, _own(record)), record, (), extras)


class _BackwardOnPlanes(_Backward):
    """The same for float32 on Hopper; without keys, and for slopes' gradient, with a kernel of sm80_wide."""

    def recipe(self) -> Recipe:
        if not self.sizes.seqlen_k:
            self.family = "sm80_wide"
        return super().recipe()

    def _queries(self, wanted: Set[str]) -> None:
        super()._queries({"q"} & wanted)
        own, self.family = self.family, "sm80_wide"
        super()._queries({"slopes"} & wanted)
        self.family = own

    def _delta(self) -> None:
        super()._delta()
        if self.family != "sm90_wide" or not {"q", "k", "v"} & self.wrt:
            return
        for name, (rows, cols) in sm90_wide_backward.planes(self.sizes).items():
            self._reserve(f"{name}_planes", rows * cols // 2)
        stats = backward_rows.padded_rows(self.sizes)
        self._reserve("row_stats", 2 * stats)
        config = self._config("split_all")
        record = self._record((*_LENGTHS, "q", "k", "v", "dout", "lse"))
        self._add(config, ceil(sm90_wide_backward.split_units(self.sizes, stats), config.threads), record)

    def _add(
        self, config: Config, grid: int, record: np.ndarray, hidden: Collection[str] = (), extras: Any = None
    ) -> None:
        if config.family == "sm90_wide":
            extras = sm90_wide_backward.Extras.of(self.sizes)
        super()._add(config, grid, record, hidden, extras)


def _own(record: np.ndarray) -> int:
    return math.prod(record["own"].tolist())
