"""What a call launches: kernels, grids, argument records and workspace, from sizes and layouts alone.

A recipe is a pure function of its arguments and cached on them; addresses and numbers come with every call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from . import sm80_runs, sm90_backward, sm90_wide_backward
from .configs import Config, choose, for_few_blocks, in_runs
from .params import Layout, build_record
from .simt import FEW_BLOCKS, ceil
from .sm90_launch import Extras, plain_scale
from .sm90_wide_launch import PlaneExtras, add_planes, split_blocks

MOST_BLOCKS = 2**31 - 1

Layouts = tuple[tuple[str, Layout], ...]


class Sizes(NamedTuple):
    """The sizes of a problem and what else is fixed in its kernels and records."""

    lead: tuple[int, ...]
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    bottom_right: bool
    dtype: np.dtype[Any]
    options: tuple[bool, ...]  # configs.OPTION_BITS
    deterministic: bool = True
    precision: str | None = None

    @classmethod
    def of(cls, problem: Any) -> Sizes:
        """The sizes of a Problem."""
        p = problem
        options = (
            p.mask is not None or p.bias is not None,
            p.softcap is not None or p.alibi_slopes is not None or not plain_scale(p.scale),
            p.dropout is not None,
        )
        dims = (p.lead, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v)
        return cls(*dims, p.bottom_right, p.dtype, options, p.deterministic, p.precision)

    @property
    def batch(self) -> int:
        """Number of items over the leading axes."""
        return math.prod(self.lead)

    @property
    def rows(self) -> int:
        """Rows of scores in all."""
        return self.batch * self.heads_q * self.seqlen_q


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch: its record but for the call part, and the addresses (by index) that it is not to see."""

    config: Config
    grid: int
    record: bytes
    hidden: tuple[int, ...] = ()
    # What the kernel takes besides the record.
    extras: Extras | sm90_backward.Extras | sm90_wide_backward.Extras | None = None

    def __post_init__(self) -> None:
        if self.grid > MOST_BLOCKS:
            raise ValueError(
                f"the kernel '{self.config}' would need {self.grid} blocks; a GPU takes {MOST_BLOCKS}"
            )


@dataclass(frozen=True, eq=False)
class Recipe:
    """Launches in order, and the arrays of the workspace as (name, offset) pairs."""

    launches: tuple[Launch, ...]
    workspace: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int = 0
    runs: int = 1  # into which a forward cuts its keys

    @property
    def main(self) -> Config | None:
        """The config that describes the call: that of the last attention kernel proper."""
        configs = [launch.config for launch in self.launches if launch.config.geometry]
        return configs[-1] if configs else None


@functools.lru_cache(maxsize=4096)
def forward_recipe(family: str, cc: int, sizes: Sizes, layouts: Layouts) -> Recipe:
    """The forward: one kernel, no workspace; or keys in runs whose results are joined."""
    config: Any = config_of(family, "forward", cc, sizes)
    if family == "sm90_wide":
        return _forward_on_planes(config, cc, sizes, dict(layouts))
    if family == "sm80" and sizes.rows and (runs := sm80_runs.runs_of_keys(sizes)) > 1:
        return _forward_in_runs(config, cc, runs, sizes, layouts)
    grid = config.geometry.blocks("forward", sizes, sizes.batch)
    if family == "simt" and grid < FEW_BLOCKS:
        config = for_few_blocks(config)
        grid = config.geometry.blocks("forward", sizes, sizes.batch)
    record = build_record(sizes, dict(layouts))
    extras = Extras.of(config, sizes, dict(layouts), record) if config.family == "sm90" else None
    return Recipe((Launch(config, grid, record.tobytes(), extras=extras),) if grid else ())


def _forward_on_planes(config: Any, cc: int, sizes: Sizes, layouts: dict[str, Layout]) -> Recipe:
    """Keys and values are split into planes of bfloat16, in the workspace."""
    grid = config.geometry.blocks("forward", sizes, sizes.batch)
    if not grid:
        return Recipe(())
    workspace, workspace_bytes = add_planes(layouts, sizes)
    record = build_record(sizes, layouts)
    launches = (
        Launch(config_of(config.family, "split", cc, sizes), split_blocks(layouts), record.tobytes()),
        Launch(config, grid, record.tobytes(), extras=PlaneExtras.of(config, sizes, layouts, record)),
    )
    return Recipe(launches if sizes.seqlen_k else launches[1:], workspace, workspace_bytes)


def _forward_in_runs(config: Any, cc: int, runs: int, sizes: Sizes, layouts: Layouts) -> Recipe:
    decode = sm80_runs.is_decode(sizes)
    form: Any = config_of(config.family, "decode", cc, sizes) if decode else in_runs(config)
    if decode:
        form = replace(form, geometry=sm80_runs.decode_form(form.geometry, sizes, runs))
    after = config_of(config.family, "combine", cc, sizes)
    record = build_record(sizes, dict(layouts), splits=runs).tobytes()
    slices = sizes.heads_q * sizes.seqlen_q * max(1, ceil(sizes.head_dim_v, sm80_runs.COMBINED_COLS))
    launches = (
        Launch(form, form.geometry.blocks(form.kernel, sizes, sizes.batch) * runs, record),
        Launch(after, sizes.batch * ceil(slices, after.threads // 32), record),
    )
    return Recipe(launches, (("partials", 0),), 4 * runs * sizes.rows * (sizes.head_dim_v + 1), runs)


def config_of(family: str, kernel: str, cc: int, sizes: Sizes) -> Any:
    """The config of a kernel for these sizes."""
    s = sizes
    return choose(family, kernel, s.dtype.name, s.head_dim, s.head_dim_v, s.options, cc, s.precision)
