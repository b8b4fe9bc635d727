"""Keys and values as planes of bfloat16, in the workspace of a float32 forward on Hopper, and the launch on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .configs import PREPOST_THREADS, Config
from .params import ADDRESSES, Layout
from .simt import ceil
from .sm90_launch import Extras
from .sm90_wide import PANEL, PLANES, SPLIT_COLUMNS
from .tensormap import form_of, maps_of

if TYPE_CHECKING:
    from .recipe import Sizes

_NAMES = ("k_planes", "v_planes")
_ADDRESSES = tuple(map(ADDRESSES.index, _NAMES))
_BITS = np.dtype(np.uint16)  # of a bfloat16
_ALIGNMENT = 256  # of planes in the workspace


def planes_of(layout: Layout, lead: tuple[int, ...] | None = None) -> Layout:
    """The planes of a tensor: rows of hi | mid | lo, dense, those of broadcast axes once.

    With ``lead`` every item has planes of its own, because items differ in length.
    """
    *outer, heads, rows, columns = layout.shape
    shape = (*(outer if lead is None else lead), heads, rows, PLANES * PANEL * ceil(columns, PANEL))
    own = [stride != 0 for stride in layout.strides[:-3]] if lead is None else [True] * len(lead)
    own += [layout.strides[-3] != 0, True, True]  # rows and columns are never shared
    kept = [n if mine else 1 for n, mine in zip(shape, own)]
    strides = (_BITS.itemsize * math.prod(kept[axis + 1 :]) if mine else 0 for axis, mine in enumerate(own))
    return Layout(shape, tuple(strides), _BITS)


def planes_bytes(layout: Layout) -> int:
    """How large such planes are."""
    return _BITS.itemsize * math.prod(n for n, stride in zip(layout.shape, layout.strides) if stride)


def add_planes(layouts: dict[str, Layout], sizes: Sizes) -> tuple[tuple[tuple[str, int], ...], int]:
    """Where the planes lie in the workspace, and how large that is; their layouts join the others."""
    workspace: list[tuple[str, int]] = []
    end = 0
    for name, source in zip(_NAMES, ("k", "v")):
        layouts[name] = planes_of(layouts[source], sizes.lead if "kv_length" in layouts else None)
        workspace.append((name, end))
        end += ceil(planes_bytes(layouts[name]), _ALIGNMENT) * _ALIGNMENT
    return tuple(workspace), end


def split_blocks(layouts: Mapping[str, Layout]) -> int:
    """Of the launch that makes the planes."""
    elements = sum(planes_bytes(layouts[name]) for name in _NAMES) // _BITS.itemsize
    return ceil(elements, PLANES * SPLIT_COLUMNS * PREPOST_THREADS)


@dataclasses.dataclass(frozen=True, eq=False)
class PlaneExtras(Extras):
    """The second and third argument of a launch on planes: maps of keys and values alone."""

    @classmethod
    def of(
        cls, config: Config, sizes: Sizes, layouts: Mapping[str, Layout], record: np.ndarray
    ) -> PlaneExtras:
        """For a launch with that record."""
        g, s = config.geometry, sizes
        assert g is not None
        columns = [layouts[name].shape[-1] for name in _NAMES]
        forms = [
            form_of(record, name, "bfloat16", (cols, s.seqlen_k, s.heads_kv), (PANEL, g.block_kv))
            for name, cols in zip(_NAMES, columns)
        ]
        head_bytes = _BITS.itemsize * s.seqlen_k * sum(columns) * s.heads_kv / s.heads_q
        query_tiles = ceil(s.seqlen_q, g.block_q)
        return cls((None, *forms, None), query_tiles, s.batch * s.heads_q, head_bytes, any(s.options[:2]))

    def maps(self, addresses: Sequence[int]) -> bytes:
        """The maps, from the record's addresses."""
        k, v = (addresses[index] for index in _ADDRESSES)
        return maps_of(self.forms, [0, k, v, 0])
