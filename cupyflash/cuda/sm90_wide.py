"""The Hopper family for float32: geometry, the rules its kernel relies on, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from .simt import ceil
from .sm90 import ALIGNMENT_BYTES, registers_suffice
from .wgmma import wrapper

if TYPE_CHECKING:
    from .recipe import Sizes

PLANES = 3  # of bfloat16, whose sum is a float32
PANEL = 64  # columns that TMA moves at a time
SPLIT_COLUMNS = 8  # of a thread that makes planes: kernels_cu/prepost/split.cuh


class Geometry(NamedTuple):
    """A block's tile and pipeline."""

    head_dim: int
    head_dim_v: int
    block_q: int  # 64 queries a consumer warpgroup
    block_kv: int
    slots: int  # planes of key and value tiles in shared memory
    producer_registers: int
    consumer_registers: int

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        return f"{dims} q{self.block_q} kv{self.block_kv} s{self.slots}"

    @property
    def threads(self) -> int:
        """Threads of a block: a producer and the consumers."""
        return 128 * (1 + self.block_q // 64)

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kSlots": self.slots,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kPingPong": False,  # what sm90's headers ask of a kernel: consumers walk alike
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """The kernel's two products."""
        return wrapper("wgmma_scores", "bfloat16", self.block_kv, a_in_registers=False) + wrapper(
            "wgmma_output", "bfloat16", self.head_dim_v, a_in_registers=True, b_by_rows=True
        )

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        row, row_v = 128 * ceil(self.head_dim, PANEL), 128 * ceil(self.head_dim_v, PANEL)
        return ALIGNMENT_BYTES + PLANES * self.block_q * row + self.slots * self.block_kv * max(row, row_v)

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims, in whole panels."""
        return self._replace(
            head_dim=PANEL * ceil(head_dim, PANEL), head_dim_v=PANEL * ceil(head_dim_v, PANEL)
        )

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Query tiles of a launch; a launch has no more blocks than multiprocessors."""
        return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernel's assumptions does not hold."""
        consumers = self.block_q // 64
        rules = {
            f"block_q = {self.block_q} must be a multiple of 64": self.block_q % 64 == 0,
            f"block_kv = {self.block_kv} must be a multiple of 16 up to 256": self.block_kv % 16 == 0
            and self.block_kv <= 256,
            f"{consumers} consumers, of 1 to 4": 1 <= consumers <= 4,
            f"slots = {self.slots} must hold a tile": self.slots >= PLANES,
            **registers_suffice(self, consumers),
        }
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            rules[f"{name} = {size} must be a multiple of {PANEL} up to 256"] = (
                size % PANEL == 0 and size <= 256
            )
        return [rule for rule, holds in rules.items() if not holds]


def _row(head_dim: int, block_q: int, block_kv: int, slots: int) -> Geometry:
    registers = {128: (40, 232), 192: (32, 160)}[block_q]
    return Geometry(head_dim, head_dim, block_q, block_kv, slots, *registers)


# By head dims, from small to large: the first row that holds both is taken.
ROWS = (
    _row(64, 192, 64, 16),
    _row(128, 128, 64, 8),
)
# (kernel, bytes of the score type, options) -> geometries.
TABLE = {("forward", 4, options): ROWS for options in itertools.product((False, True), repeat=3)}
