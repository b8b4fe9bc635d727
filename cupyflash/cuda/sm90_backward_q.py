"""The second half of the Hopper backward of wide heads: geometry of its tiles and the rows. It owns queries."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from .backward_rows import TICKETS
from .simt import ceil
from .sm90 import ALIGNMENT_BYTES, registers_suffice
from .wgmma import wrapper

if TYPE_CHECKING:
    from .recipe import Sizes

TICKET = TICKETS - 1  # number of its ticket counter: the launches of the first half take those before
STATS_ROWS = 64  # rows that stand together in row_stats: the first half's query tiles


class Geometry(NamedTuple):
    """A block's tile and pipeline."""

    head_dim: int  # of queries, keys and values
    block_q: int
    block_kv: int
    stages: int  # of the pipeline of keys
    ping_pong: bool  # consumers start products in turns
    producer_registers: int = 24
    consumer_registers: int = 240
    addend_stages: int = 0  # tiles of a mask and of a bias in shared memory

    def __str__(self) -> str:
        words = [f"d{self.head_dim}", f"q{self.block_q}", f"kv{self.block_kv}", f"s{self.stages}"]
        return " ".join(words + ["pp"] * self.ping_pong)

    @property
    def head_dim_v(self) -> int:
        """The same as head_dim."""
        return self.head_dim

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
            "kStages": self.stages,
            "kHeadDim": self.head_dim,
            "kAddendStages": self.addend_stages,
            "kPingPong": self.ping_pong,
            "kStatsRows": STATS_ROWS,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """The kernel's products."""
        return "".join(
            (
                wrapper("wgmma_scores", dtype, self.block_kv),
                wrapper("wgmma_scores_first", dtype, self.block_kv, first=True),
                wrapper("wgmma_queries", dtype, self.head_dim, a_in_registers=True, b_by_rows=True),
            )
        )

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        row = 128 * ceil(self.head_dim, 64)
        # Rows are an odd number of 16 bytes apart.
        addend_row = 16 * (self.block_kv // 16 | 1) + 2 * self.block_kv + 16
        addends = self.addend_stages * self.block_q * addend_row
        return ALIGNMENT_BYTES + row * (2 * self.block_q + (self.stages + 1) * self.block_kv) + addends

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims: TMA fills up with zeros."""
        return self

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Query tiles of a launch."""
        return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernel's assumptions does not hold."""
        rules = {
            f"block_q = {self.block_q} must be 128: two consumers": self.block_q == 128,
            f"block_kv = {self.block_kv} must be a multiple of 16": self.block_kv % 16 == 0,
            **registers_suffice(self, 2),
        }
        return [rule for rule, holds in rules.items() if not holds]


# (kernel, bytes of the score type, options) -> geometries.
TABLE = {
    ("backward_q", 4, options): (
        Geometry(256, 128, 48 if options[0] else 64, 2, True, addend_stages=int(options[0])),
    )
    for options in itertools.product((False, True), repeat=3)
}
