"""The Hopper backward: geometry of its tiles, the rules its kernels rely on, the rows, what a launch takes."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from .backward_rows import ROW_BLOCK
from .params import ADDRESSES, NUMBERS, UNBOUNDED
from .simt import ceil
from .sm90 import ALIGNMENT_BYTES
from .tensormap import Form, form_of, maps_of
from .wgmma import wrapper

if TYPE_CHECKING:
    from .configs import Config
    from .recipe import Sizes

# kernels_cu/sm90/backward_launch.cuh: scale, unit, tiles, head_tiles, heads, side_by_side, group, ticket, queries,
# finish, apart.
_LAUNCH = struct.Struct("=2f9i")
LAUNCH_BYTES = _LAUNCH.size
NOT_WANTED, IN_TURN, IN_ANY_ORDER = range(3)  # what a launch does about gradients of queries
FINISHED_LATER, DOWNWARD, UPWARD = range(3)  # and whether their sums become gradients there
_SCALE, _RIGHT = NUMBERS.index("scale"), NUMBERS.index("right")
_BY_TMA = tuple(map(ADDRESSES.index, ("q", "k", "v", "dout")))
_LOG2E = np.float32(1.4426950408889634)
_HALF_OF_L2 = 32e6  # bytes, for queries, their cotangents and sums of the heads that are walked side by side


class Geometry(NamedTuple):
    """A block's tile and pipeline."""

    head_dim: int  # of queries, keys and values
    block_q: int
    block_kv: int
    stages: int  # of the pipelines of queries and of their cotangents
    rounded_weights: bool  # gradients of scores from weights that are rounded already: fewer registers
    producer_registers: int = 24
    consumer_registers: int = 240
    addends: bool = False  # mask and bias have a place of their own in shared memory
    beside: bool = False  # sums of dq become gradients beside the products, from a place of their own

    def __str__(self) -> str:
        words = [f"d{self.head_dim}", f"q{self.block_q}", f"kv{self.block_kv}", f"s{self.stages}"]
        return " ".join(words + ["rw"] * self.rounded_weights)

    @property
    def head_dim_v(self) -> int:
        """The same as head_dim."""
        return self.head_dim

    @property
    def threads(self) -> int:
        """Threads of a block: a producer and two consumers."""
        return 384

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kStages": self.stages,
            "kHeadDim": self.head_dim,
            "kRoundedWeights": self.rounded_weights,
            "kBeside": self.beside,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """The kernel's products."""
        queries = {"a_by_rows": True, "b_by_rows": True}
        columns = self.head_dim if self.block_q == 128 else self.head_dim // 2
        texts = [
            wrapper("wgmma_scores", dtype, self.block_q),
            wrapper("wgmma_scores_first", dtype, self.block_q, first=True),
            wrapper("wgmma_gradient", dtype, self.head_dim, a_in_registers=True, b_by_rows=True),
        ]
        if self.head_dim <= 128:  # dq of wider heads is another kernel's
            texts.append(wrapper("wgmma_queries", dtype, columns, **queries))
            texts.append(wrapper("wgmma_queries_first", dtype, columns, first=True, **queries))
        return "".join(texts)

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        row = 128 * ceil(self.head_dim, 64)
        tiles = 2 * self.block_kv * row + 2 * self.stages * self.block_q * row
        gradients = (2 if self.head_dim <= 128 else 4) * self.block_kv * self.block_q * 2
        share = self.block_q * self.head_dim * 4 * (self.head_dim <= 128)
        sums = ROW_BLOCK * self.head_dim * 4 * self.beside
        addends = (5 if self.head_dim <= 64 else 4) * self.block_q * self.block_kv * self.addends
        return ALIGNMENT_BYTES + tiles + gradients + addends + share + sums

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims: TMA fills up with zeros."""
        return self

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Key tiles of a launch."""
        return owners * sizes.heads_kv * ceil(sizes.seqlen_k, self.block_kv)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernels' assumptions does not hold."""
        wide = self.head_dim > 128
        rules = {
            f"head_dim = {self.head_dim} must be 64, 128 or 256": self.head_dim in (64, 128, 256),
            f"block_q = {self.block_q} must be 64, or 128 at head dim 64": self.block_q == 64
            or (self.block_q, self.head_dim) == (128, 64),
            f"block_kv = {self.block_kv} must be {64 if wide else 128}": self.block_kv
            == (64 if wide else 128),
        }
        return [rule for rule, holds in rules.items() if not holds]


# By options that a row is for: none; dropout alone; softcap or ALiBi; mask or bias. Head dims above 128 have one row.
PLAIN = (Geometry(64, 128, 128, 2, False, beside=True), Geometry(128, 64, 128, 2, False, beside=True))
DROPOUT = (Geometry(64, 64, 128, 2, False, beside=True), Geometry(128, 64, 128, 2, False, beside=True))
SHAPED = (Geometry(64, 64, 128, 2, True, beside=True), Geometry(128, 64, 128, 2, True, beside=True))
WITH_ADDENDS = tuple(row._replace(addends=True, beside=row.head_dim <= 64) for row in SHAPED)
WIDE = (Geometry(256, 64, 64, 2, True, 40, 232),)


def _rows(options: tuple[bool, ...]) -> tuple[Geometry, ...]:
    """The rows of ``backward`` with these options."""
    addends, shaped, dropout = options
    return WITH_ADDENDS if addends else SHAPED if shaped else DROPOUT if dropout else PLAIN


# (kernel, bytes of the score type, options) -> geometries.
TABLE = {
    (kernel, 4, options): _rows(options) if kernel == "backward" else WIDE
    for kernel in ("backward", "backward_kv")
    for options in itertools.product((False, True), repeat=3)
}


def kernel_for(sizes: Sizes) -> str:
    """The kernel that takes these head dims."""
    return "backward" if max(sizes.head_dim, sizes.head_dim_v) <= 128 else "backward_kv"


def _side_by_side(
    kernel: str, queries: int, head_dim: int, head_tiles: int, head_bytes: float
) -> tuple[int, int]:
    """Heads walked together, without and with a bound to the right.

    They are few, so that the L2 cache holds what is read: of the main kernel as many as keep the GPU busy. In turn,
    with a bound, there are more of them, for then fewer blocks of a head run at once and wait for one another.
    """
    fitting = _HALF_OF_L2 / max(1.0, head_bytes)
    bounded = max(1, int(1.5 * fitting))
    if kernel != "backward":
        return max(1, int(fitting)), min(64, bounded)
    narrow = 128 // head_dim
    busy = max(2, 128 * narrow // max(1, head_tiles))
    return busy, min(64, max(16 * narrow, bounded)) if queries == IN_TURN else busy


@dataclasses.dataclass(frozen=True, eq=False)
class Extras:
    """The second and third argument of a launch, but for what each call brings."""

    forms: tuple[Form | None, ...]  # of q, k, v and dout; None where there are none
    head_tiles: int  # of keys, or in backward_q of queries, of one head
    heads: int
    side_by_side: tuple[int, int]  # heads that are walked together, without and with a bound to the right
    group: int
    ticket: int
    queries: int
    finishes: bool  # sums of queries
    natural: bool  # scores are kept in natural units
    stays: ClassVar[bool] = True  # blocks stay: a launch has no more than multiprocessors
    counts: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        config: Config,
        sizes: Sizes,
        record: np.ndarray,
        owners: int,
        ticket: int,
        queries: int,
        finishes: bool = False,
    ) -> Extras:
        """For a launch with that record, which has at most two leading axes."""
        g, s = config.geometry, sizes
        assert g is not None
        tensors = {
            "q": (s.head_dim, s.seqlen_q, s.heads_q, g.block_q),
            "k": (s.head_dim, s.seqlen_k, s.heads_kv, g.block_kv),
            "v": (s.head_dim_v, s.seqlen_k, s.heads_kv, g.block_kv),
            "dout": (s.head_dim_v, s.seqlen_q, s.heads_q, g.block_q),
        }
        forms = [
            form_of(record, name, s.dtype.name, lengths, (64, box))
            for name, (*lengths, box) in tensors.items()
        ]
        if config.kernel == "backward_q":
            head_tiles, heads = ceil(s.seqlen_q, g.block_q), owners * s.heads_q
            head_bytes = s.seqlen_k * g.head_dim * 4 * s.heads_kv / s.heads_q
        else:
            head_tiles, heads = ceil(s.seqlen_k, g.block_kv), owners * s.heads_kv
            column_bytes = 8 if config.kernel == "backward" else 4  # of q and dout, and there of their sums
            head_bytes = s.seqlen_q * g.head_dim * column_bytes * s.heads_q / s.heads_kv
        return cls(
            forms=tuple(forms),
            head_tiles=head_tiles,
            heads=heads,
            side_by_side=_side_by_side(config.kernel, queries, g.head_dim, head_tiles, head_bytes),
            group=s.heads_q // s.heads_kv,
            ticket=ticket,
            queries=queries,
            finishes=finishes,
            natural=any(s.options[:2]),
        )

    def maps(self, addresses: Sequence[int]) -> bytes:
        """The maps of q, k, v and dout, from the record's addresses."""
        return maps_of(self.forms, (addresses[index] for index in _BY_TMA))

    def records(self, addresses: Sequence[int], numbers: Sequence[float], counter: int) -> tuple[bytes, ...]:
        """The launch record, from the record's numbers."""
        scale = np.float32(numbers[_SCALE])
        unit = _LOG2E if self.natural else scale * _LOG2E
        bounded = bool(numbers[_RIGHT] < UNBOUNDED)
        launch = _LAUNCH.pack(
            scale,
            unit,
            self.head_tiles * self.heads,
            self.head_tiles,
            self.heads,
            min(self.heads, self.side_by_side[bounded]),
            self.group,
            self.ticket,
            self.queries,
            (UPWARD if bounded else DOWNWARD) if self.finishes else FINISHED_LATER,
            int(self.queries == IN_ANY_ORDER and not bounded),
        )
        return (launch,)
