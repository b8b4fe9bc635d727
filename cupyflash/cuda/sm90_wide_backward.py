"""The Hopper backward of float32: geometries, the rules its kernels rely on, planes, and what a launch takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from .params import ADDRESSES
from .simt import ceil
from .sm90 import ALIGNMENT_BYTES, registers_suffice
from .sm90_wide import PANEL, PLANES, SPLIT_COLUMNS
from .tensormap import Form, maps_of
from .wgmma import wrapper

if TYPE_CHECKING:
    from .recipe import Sizes

TILE_ROWS = 64
_BITS = 2  # bytes of a bfloat16
_ADDRESSES = tuple(ADDRESSES.index(f"{name}_planes") for name in ("q", "k", "v", "dout"))


class Geometry(NamedTuple):
    """A block's tiles and pipeline. What stands in shared memory are block_q queries or block_kv keys."""

    head_dim: int
    head_dim_v: int
    block_q: int
    block_kv: int
    slots: int  # planes of the tiles that stream
    consumers: int
    producer_registers: int
    consumer_registers: int
    handed_bytes: int = 0  # weights that one consumer hands to the other

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        return f"{dims} q{self.block_q} kv{self.block_kv} s{self.slots} c{self.consumers}"

    @property
    def threads(self) -> int:
        """Threads of a block: a producer and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def standing(self) -> int:
        """Tiles that stand: those of queries, or those of keys."""
        return max(self.block_q, self.block_kv) // TILE_ROWS

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kStandingTiles": self.standing,
            "kConsumers": self.consumers,
            "kHandedBytes": self.handed_bytes,
            "kSlots": self.slots,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """Products along head dims, and products of what is in registers with rows."""
        outer = sorted({self.head_dim, self.head_dim_v})
        return wrapper("wgmma_scores", "bfloat16", TILE_ROWS) + "".join(
            wrapper("wgmma_outer", "bfloat16", dim, a_in_registers=True, b_by_rows=True) for dim in outer
        )

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        plane = 128 * TILE_ROWS // PANEL
        standing = self.standing * PLANES * plane * (self.head_dim + self.head_dim_v)
        slots = self.slots * plane * max(self.head_dim, self.head_dim_v)
        return ALIGNMENT_BYTES + standing + slots + self.handed_bytes

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims, in whole panels."""
        return self._replace(
            head_dim=PANEL * ceil(head_dim, PANEL), head_dim_v=PANEL * ceil(head_dim_v, PANEL)
        )

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Tiles of a launch, a block each."""
        if kernel == "backward_q":
            return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)
        return owners * sizes.heads_kv * ceil(sizes.seqlen_k, self.block_kv)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernel's assumptions does not hold."""
        rules = {
            f"a consumer a tile that stands, or two for one; {self.consumers} for {self.standing}": self.consumers
            == self.standing
            or (self.consumers, self.standing) == (2, 1),
            f"slots = {self.slots} must hold a tile of each": self.slots >= 2 * PLANES,
            **registers_suffice(self, self.consumers),
        }
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            rules[f"{name} = {size} must be a multiple of {PANEL} up to 128"] = (
                size % PANEL == 0 and size <= 128
            )
        return [rule for rule, holds in rules.items() if not holds]


_EVEN = 40, 232  # registers of the producer, and of each of two consumers
_CONSUMERS = 24, 240  # as many as they can have
_HANDED = 4 * TILE_ROWS**2
_WIDE_QUERIES = Geometry(128, 128, 64, 64, 8, 2, *_CONSUMERS)
_WIDE_KEYS = Geometry(128, 128, 64, 64, 7, 2, *_CONSUMERS, handed_bytes=_HANDED)
_PLAIN = {
    "backward_q": (Geometry(64, 64, 192, 64, 8, 3, 32, 160), _WIDE_QUERIES),
    "backward_kv": (Geometry(64, 64, 64, 128, 16, 2, *_CONSUMERS), _WIDE_KEYS),
}
_SHAPED = {
    "backward_q": (Geometry(64, 64, 128, 64, 12, 2, *_EVEN), _WIDE_QUERIES),
    "backward_kv": (Geometry(64, 64, 64, 64, 16, 2, *_EVEN, handed_bytes=_HANDED), _WIDE_KEYS),
}
# (kernel, bytes of the score type, options) -> geometries; the same bits whatever the row.
TABLE = {
    (kernel, 4, options): rows
    for options in itertools.product((False, True), repeat=3)
    for kernel, rows in (_SHAPED if any(options) else _PLAIN).items()
}


def planes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Rows and columns of the planes of each tensor."""
    s = sizes
    queries = s.batch * s.heads_q * TILE_ROWS * ceil(s.seqlen_q, TILE_ROWS)
    keys = s.batch * s.heads_kv * TILE_ROWS * ceil(s.seqlen_k, TILE_ROWS)
    d, e = (PLANES * PANEL * ceil(dim, PANEL) for dim in (s.head_dim, s.head_dim_v))
    return {"q": (queries, d), "k": (keys, d), "v": (keys, e), "dout": (queries, e)}


def split_units(sizes: Sizes, stats_rows: int) -> int:
    """Threads of the launch that makes them, and the numbers of rows."""
    return sum(rows * cols // (PLANES * SPLIT_COLUMNS) for rows, cols in planes(sizes).values()) + stats_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Extras:
    """The second argument of a launch: maps of planes."""

    forms: tuple[Form, ...]
    stays: ClassVar[bool] = False  # blocks end with their tile
    counts: ClassVar[bool] = False

    @classmethod
    def of(cls, sizes: Sizes) -> Extras:
        """For these sizes."""
        shapes = planes(sizes).values()
        return cls(
            tuple(Form("bfloat16", (cols, rows), (1, cols), (PANEL, TILE_ROWS)) for rows, cols in shapes)
        )

    def maps(self, addresses: Sequence[int]) -> bytes:
        """The maps, from the record's addresses."""
        return maps_of(self.forms, (addresses[index] for index in _ADDRESSES))

    def records(self, addresses: Sequence[int], numbers: Sequence[float], counter: int) -> tuple[bytes, ...]:
        """There is none."""
        return ()
