"""The launches of a backward, collected in order: what all families share. `backward_recipe` has Hopper's."""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from typing import Any

import numpy as np

from ..arrays import score_dtype
from . import backward_rows, sm80, sm80_wide
from .configs import Config, in_one_kernel, unordered
from .params import ADDRESSES, Layout, build_record
from .recipe import Launch, Recipe, Sizes, config_of
from .simt import ceil

BIAS_BLOCKS = 256  # a bias gradient summed by fewer owners than this is cut into parts
OWNERS_TOGETHER = 8  # kernels_cu/attn/bias_plan.cuh: owners that a block takes where each walks one tile
ALIGNMENT = 256  # of arrays inside the workspace

LENGTHS = ("q_length", "kv_length", "query_offset")  # what every kernel reads
SCORES: tuple[str, ...] = ("q", "k", "v", "lse", "mask", "bias", "sinks", "slopes", *LENGTHS)
SCORES += ("dropout_t", "dropout_seed", "dropout_offset")


class Launches:
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
        """All of them, with their workspace."""
        if self.sizes.rows == 0:
            return Recipe(())
        together, beside = self._in_one_kernel(), self._beside_scores()
        by_sums = together and self.family == "sm80"  # dq leaves that kernel as sums
        self._reserve_rows(bool({"bias", "sinks"} & self.wrt) or not by_sums)
        owns_keys = together if self.family == "sm80_wide" else bool({"k", "v"} & self.wrt)
        has_all = together and self.family == "sm80_wide" and self.score_bytes == 8  # gradients of scores
        with_bias = "bias" in beside and owns_keys and (has_all or self._is_unshaped())
        by_queries = beside if self._queries_keep_scores() else set()
        if by_sums:
            self._all_three()
        elif together:
            self._reserve("turns", ceil(4 * (1 + self.sizes.rows), self.score_bytes))
            self._delta()
            self._all_in_turns(with_bias)
        else:
            self._delta()
            self._keys_and_values(with_bias)
            self._queries({"q", "slopes"} & self.wrt - beside, by_queries)
        done = ({"bias"} if with_bias else set()) | ({"slopes"} if has_all else set())
        self._addends(beside - by_queries - done)
        if "bias" in self.wrt - beside:
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

    def _reserve_rows(self, delta: bool) -> None:
        """What kernels leave of rows for those that sum over them."""
        if delta:
            self._reserve("row_delta", self.sizes.rows)
        if "slopes" in self.wrt:
            self._reserve("slope_rows", self.sizes.rows)

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
        record = self._record((*LENGTHS, "out", "dout", "dlse", "delta", *dq))
        self._add(config, ceil(self.sizes.rows, config.threads // 32), record)

    def _beside_scores(self) -> Set[str]:
        """The gradients that kernels write where they have scores, of what is added to these."""
        if self.family not in ("sm80_wide", "sm90_wide"):
            return frozenset()
        return {"slopes"} & self.wrt | ({"bias"} if self._keeps_bias() else set())

    def _keeps_bias(self) -> bool:
        """Whether the gradient of a bias is wanted that was not broadcast."""
        if "bias" not in self.wrt or self.accumulate:
            return False
        if self.layouts["dbias"].dtype not in (self.sizes.dtype, np.dtype(np.float32)):
            return False
        record = self._record(("dbias",), owner="dbias")
        kept = record["own_heads"] and record["own_rows"] and record["own_cols"]
        return bool(kept) and math.prod(record["loop"].tolist()) == 1

    def _queries_keep_scores(self) -> bool:
        """Whether the kernel of dq leaves the gradients of what is added to its scores."""
        return False

    def _is_unshaped(self) -> bool:
        """Whether gradients of scores are those of products, which the main kernels have."""
        return not self.sizes.options[1]

    def _addends(self, wanted: Set[str]) -> None:
        """The gradients of what is added to scores, from a kernel of scores alone."""
        if not wanted:
            return
        config, bias = self._config("backward_addends"), [f"d{name}" for name in {"bias"} & wanted]
        record = self._record((*SCORES, "dout", *bias))
        grid = config.geometry.blocks("backward_addends", self.sizes, own_of(record))
        self._add(config, grid, record, {"dbias"}.difference(bias))

    def _all_in_turns(self, with_bias: bool) -> None:
        """All three from one kernel, dq summed in place: in turns, or (splits 0) as blocks come."""
        config = self._config("backward")
        turns = sm80_wide.heads_in_turns(self.sizes.heads_kv) if self.sizes.deterministic else 0
        bias = ("dbias",) if with_bias else ()
        record = self._record((*SCORES, "dout", "dq", "dk", "dv", *bias), owner="dk", splits=turns)
        grid = config.geometry.blocks("backward", self.sizes, own_of(record))
        self._add(config, grid, record, {"dbias"}.difference(bias))

    def _owners(self) -> list[list[str]]:
        """The gradients of keys and values that one launch can own, launch by launch."""
        wanted = [f"d{name}" for name in ("k", "v") if name in self.wrt]
        together = len(wanted) == 2 and self._broadcast_axes("k") == self._broadcast_axes("v")
        return [wanted] if together else [[name] for name in wanted]

    def _keys_and_values(self, with_bias: bool) -> None:
        for number, owners in enumerate(self._owners()):
            config = self._config("backward_kv")
            bias = {"dbias"} if with_bias and number == 0 else set()
            record = self._record((*SCORES, "dout", *owners, *bias), owner=owners[0])
            grid = config.geometry.blocks("backward_kv", self.sizes, own_of(record))
            self._add(config, grid, record, {"dk", "dv", "dbias"}.difference(owners, bias))

    def _in_one_kernel(self) -> bool:
        """Whether dq, dk and dv come from one kernel."""
        s = self.sizes
        if not {"q", "k", "v"} <= self.wrt or len(self._owners()) != 1:
            return False
        if "slopes" in self.wrt and self.family != "sm80_wide":
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
        record = self._record((*SCORES, "dout", "dk", "dv"), owner="dk", splits=sm80.heads_together(s))
        self._add(config, config.geometry.blocks("backward", s, own_of(record)), record, {"dq"})
        self._finish_queries(config)

    def _reserve_sums(self, cols: int) -> None:
        for name, words in backward_rows.workspace(self.sizes, cols).items():
            self._reserve(name, words)

    def _row_stats(self, main: Any) -> None:
        config = self._config("row_stats")
        names = (*LENGTHS, "out", "lse", "dout", "dlse", "delta")
        record = self._record(names, splits=main.geometry.block_q)
        self._add(config, backward_rows.padded_rows(self.sizes) // backward_rows.ROW_UNIT, record)

    def _clear_sums(self, main: Any) -> None:
        config = self._config("clear_sums")
        record = self._record(LENGTHS, splits=main.geometry.head_dim)
        self._add(config, backward_rows.padded_rows(self.sizes) // backward_rows.ROW_BLOCK, record)

    def _finish_queries(self, main: Any) -> None:
        config = self._config("finish_queries")
        record = self._record((*LENGTHS, "dq"), owner="dq", splits=main.geometry.head_dim)
        units = ceil(self.sizes.seqlen_q, backward_rows.ROW_UNIT)
        self._add(config, own_of(record) * self.sizes.heads_q * units, record)

    def _broadcast_axes(self, name: str) -> list[bool]:
        shape = self.layouts[name].shape[:-3]
        missing = len(self.sizes.lead) - len(shape)
        return [
            axis < missing or (shape[axis - missing] == 1 < size) for axis, size in enumerate(self.sizes.lead)
        ]

    def _queries(self, wanted: Set[str], beside: Set[str] = frozenset()) -> None:
        if not wanted:
            return
        config = self._config("backward_q")
        owned = ["dq"] if "q" in wanted else []
        bias = ["dbias"] if "bias" in beside else []
        record = self._record((*SCORES, "dout", *owned, *bias), owner=owned[0] if owned else None)
        grid = config.geometry.blocks("backward_q", self.sizes, own_of(record))
        self._add(config, grid, record, {"dq", "dbias"}.difference(owned, bias))

    def _bias(self) -> None:
        if not (elements := math.prod(self.layouts["dbias"].shape)):
            return
        config = self._config("backward_bias")
        names, s = (*SCORES, "dout", "dbias"), self.sizes
        record = self._record(names, owner="dbias")
        row_tiles = ceil(s.seqlen_q, config.geometry.block_q)
        col_tiles = ceil(s.seqlen_k, config.geometry.block_kv)
        tiles = (row_tiles if record["own_rows"] else 1) * (col_tiles if record["own_cols"] else 1)
        heads = s.heads_q if record["own_heads"] else 1
        owners = own_of(record) * heads * tiles
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
        record = self._record((*LENGTHS, "sinks", "lse", f"d{name}"), owner=f"d{name}")
        grid = own_of(record) * (self.sizes.heads_q if record["own_heads"] else 1)
        self._add(config, grid, record, ["dslopes" if name == "sinks" else "dsinks"])


def own_of(record: np.ndarray) -> int:
    """How many items the gradient that a launch owns has along the leading axes."""
    return math.prod(record["own"].tolist())
