"""The Hopper family's tiles: geometry, the rules its kernel relies on, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from .wgmma import wrapper

if TYPE_CHECKING:
    from .recipe import Sizes

SHORT_QUERIES = 1024
ALIGNMENT_BYTES = 1024  # of swizzled tiles; dynamic shared memory is rounded up to it
REGISTERS = 65536  # of a multiprocessor


class Geometry(NamedTuple):
    """A block's tile and pipeline."""

    head_dim: int
    head_dim_v: int
    block_q: int  # 64 queries a consumer warpgroup
    block_kv: int
    stages: int  # of the pipelines of keys and of values
    ping_pong: bool  # consumers start products in turns
    optimistic: bool  # steps without a maximum
    own_out: bool  # results have a buffer of their own, else they lie over the queries
    producer_registers: int
    consumer_registers: int

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        words = [dims, f"q{self.block_q}", f"kv{self.block_kv}", f"s{self.stages}"]
        flags = {"pp": self.ping_pong, "opt": self.optimistic, "own": self.own_out}
        return " ".join(words + [word for word, on in flags.items() if on])

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
            "kHeadDimV": self.head_dim_v,
            "kPingPong": self.ping_pong,
            "kOptimistic": self.optimistic,
            "kOwnOut": self.own_out,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """The kernel's two products."""
        return wrapper("wgmma_scores", dtype, self.block_kv, a_in_registers=False) + wrapper(
            "wgmma_output", dtype, self.head_dim_v, a_in_registers=True
        )

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        row, row_v = 128 * ceil(self.head_dim, 64), 128 * ceil(self.head_dim_v, 64)
        keys_and_values = self.stages * self.block_kv * (row + row_v)
        return ALIGNMENT_BYTES + self.block_q * (row + row_v * self.own_out) + keys_and_values

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims: TMA fills up with zeros."""
        return self

    def for_short(self) -> Geometry:
        """The row for at most SHORT_QUERIES queries."""
        return SHORT if self == PLAIN[0] else self

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Query tiles of a launch; a launch has no more blocks than multiprocessors."""
        return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernel's assumptions does not hold."""
        consumers = self.block_q // 64
        wanted = 128 * (self.producer_registers + consumers * self.consumer_registers)
        held = (
            REGISTERS // (8 * self.threads) * 8 * self.threads
        )  # a block starts with as many; warpgroups trade them
        rules = {
            f"block_q = {self.block_q} must be a multiple of 64": self.block_q % 64 == 0,
            f"block_kv = {self.block_kv} must be a multiple of 16 up to 256": self.block_kv % 16 == 0
            and self.block_kv <= 256,
            f"{consumers} consumers, of 1 to 3": 1 <= consumers <= 3,
            "without a buffer of their own results must fit over the queries": self.own_out
            or ceil(self.head_dim_v, 64) <= ceil(self.head_dim, 64),
            f"the roles want {wanted} registers, the block has {held}": wanted <= held,
            "turns need two consumers": consumers > 1 or not self.ping_pong,
        }
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            rules[f"{name} = {size} must be a multiple of 16 up to 256"] = size % 16 == 0 and size <= 256
        for name in ("producer_registers", "consumer_registers"):
            size = getattr(self, name)
            rules[f"{name} = {size} must be a multiple of 8 in 24 to 256"] = (
                size % 8 == 0 and 24 <= size <= 256
            )
        return [rule for rule, holds in rules.items() if not holds]


def ceil(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def _row(
    head_dim: int,
    head_dim_v: int,
    block_q: int,
    block_kv: int,
    *,
    ping_pong: bool = True,
    optimistic: bool = True,
    own_out: bool = True,
) -> Geometry:
    registers = {128: (40, 232), 192: (32, 160)}[block_q]
    return Geometry(head_dim, head_dim_v, block_q, block_kv, 2, ping_pong, optimistic, own_out, *registers)


# By head dims, from small to large: the first row that holds both is taken. Plain scores first, then those that any
# option of `configs.OPTION_BITS` shapes: they leave no registers for a second set of weights.
PLAIN = (
    _row(64, 64, 192, 96),
    _row(96, 96, 128, 128),
    _row(128, 128, 128, 128),
    _row(192, 128, 128, 112),
    _row(192, 192, 128, 80),
    _row(256, 256, 128, 64, ping_pong=False, optimistic=False, own_out=False),
)
# For 1024 queries 1.06 (full) and 1.13 (causal) times as fast as the first row, for 4096 0.94 (H200, 2026-11-29).
SHORT = _row(64, 64, 128, 128)
SHAPED = (
    _row(64, 64, 192, 80, optimistic=False),
    _row(96, 96, 128, 128, optimistic=False),
    _row(128, 128, 128, 128, optimistic=False),
    _row(192, 128, 128, 96, optimistic=False),
    _row(192, 192, 128, 80, optimistic=False),
    _row(256, 256, 128, 48, ping_pong=False, optimistic=False, own_out=False),
)


# (kernel, bytes of the score type, options) -> geometries.
TABLE = {
    ("forward", 4, options): SHAPED if any(options) else PLAIN
    for options in itertools.product((False, True), repeat=3)
}
