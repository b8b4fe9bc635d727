"""The Hopper family's tiles: geometry, the rules its kernel relies on, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from .simt import ceil
from .wgmma import wrapper

if TYPE_CHECKING:
    from .recipe import Sizes

ALIGNMENT_BYTES = 1024  # of swizzled tiles; dynamic shared memory is rounded up to it
REGISTERS = 65536  # of a multiprocessor


def registers_suffice(roles: Any, consumers: int) -> dict[str, bool]:
    """The rule that a producer and consumers, which trade registers, hold no more than their block starts with."""
    wanted = 128 * (roles.producer_registers + consumers * roles.consumer_registers)
    held = REGISTERS // (8 * roles.threads) * 8 * roles.threads
    return {f"the roles want {wanted} registers, the block has {held}": wanted <= held}


class Geometry(NamedTuple):
    """A block's tile and pipeline."""

    head_dim: int
    head_dim_v: int
    block_q: int  # 64 queries a consumer warpgroup
    block_kv: int
    stages: int  # of the pipeline of keys
    stages_v: int  # of that of values
    ping_pong: bool  # consumers start products in turns
    q_stages: int  # query tiles in shared memory
    out_panels: int  # of 64 columns that results take at a time on their way out
    out_apart: bool  # there they have a place of their own; else they take that of their queries
    producer_registers: int
    consumer_registers: int
    bias_box: int = 0  # bytes of a row of the boxes in which biases of 16 bits come; 0: no mask or bias comes

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        words = [dims, f"q{self.block_q}", f"kv{self.block_kv}", f"s{self.stages}"]
        return " ".join(words + ["pp"] * self.ping_pong)

    @property
    def threads(self) -> int:
        """Threads of a block: a producer and the consumers."""
        return 128 * (1 + self.block_q // 64)

    @property
    def addend_boxes(self) -> dict[int, int]:
        """Bytes of a row of the boxes in which masks, biases of 16 bits and of float32 come; by itemsize."""
        return {1: 128 if self.block_kv > 64 else 64, 2: self.bias_box, 4: min(128, 2 * self.bias_box)}

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kStages": self.stages,
            "kStagesV": self.stages_v,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kPingPong": self.ping_pong,
            "kQStages": self.q_stages,
            "kOutPanels": self.out_panels,
            "kOutApart": self.out_apart,
            "kMaskBox": self.addend_boxes[1],
            "kBiasBox": self.addend_boxes[2] or 32,
            "kWideBox": self.addend_boxes[4] or 64,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
        }

    def wrappers(self, dtype: str) -> str:
        """The kernel's two products."""
        return wrapper("wgmma_scores", dtype, self.block_kv) + wrapper(
            "wgmma_output", dtype, self.head_dim_v, a_in_registers=True, b_by_rows=True
        )

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        row, row_v = 128 * ceil(self.head_dim, 64), 128 * ceil(self.head_dim_v, 64)
        keys_and_values = self.block_kv * (self.stages * row + self.stages_v * row_v)
        queries_and_results = self.block_q * (self.q_stages * row + 128 * self.out_panels * self.out_apart)
        addends = 0
        if self.bias_box:
            bias = self.bias_box * ceil(2 * self.block_kv, self.bias_box)
            addends = 2 * self.block_q * (self.addend_boxes[1] + bias)
        return ALIGNMENT_BYTES + queries_and_results + keys_and_values + addends

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims: TMA fills up with zeros."""
        return self

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
            f"out_panels = {self.out_panels} must divide the panels of a result": ceil(self.head_dim_v, 64)
            % self.out_panels
            == 0,
            **registers_suffice(self, consumers),
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


def _row(
    head_dim: int,
    head_dim_v: int,
    block_q: int,
    block_kv: int,
    *,
    ping_pong: bool = True,
    q_stages: int = 2,
    out_panels: int = 0,
    stages: int = 2,
    stages_v: int = 0,
    out_apart: bool = True,
) -> Geometry:
    registers = {128: (40, 232), 192: (32, 160), 256: (32, 112)}[block_q]
    out_panels = out_panels or ceil(head_dim_v, 64)
    return Geometry(
        head_dim,
        head_dim_v,
        block_q,
        block_kv,
        stages,
        stages_v or stages,
        ping_pong,
        q_stages,
        out_panels,
        out_apart,
        *registers,
    )


# By head dims, from small to large: the first row that holds both is taken. Plain scores first, then those that any
# option of `configs.OPTION_BITS` shapes.
PLAIN = (
    _row(64, 64, 256, 64, ping_pong=False, stages=6),
    _row(96, 96, 128, 128, stages=3, stages_v=2, out_apart=False),
    _row(128, 128, 128, 128, stages=3, stages_v=2, out_apart=False),
    _row(192, 128, 128, 112, ping_pong=False, q_stages=1),
    _row(192, 192, 128, 80, ping_pong=False, q_stages=1),
    _row(256, 256, 128, 64, ping_pong=False, q_stages=1, out_panels=2),
)
SHAPED = (
    _row(64, 64, 192, 128, ping_pong=False),
    _row(96, 96, 128, 128),
    _row(128, 128, 128, 128),
    _row(192, 128, 128, 96, ping_pong=False, q_stages=1),
    _row(192, 192, 128, 80, ping_pong=False, q_stages=1),
    _row(256, 256, 128, 64, ping_pong=False, q_stages=1, out_panels=2),
)
# Narrow heads with dropout: Philox hides better in longer tiles of two consumers that take turns than in three.
NARROW_DROPOUT = _row(64, 64, 128, 128, stages=3)
# Beside a mask and a bias, which want shared memory and registers: keys of a tile, and bytes of a row of a box of the
# bias; by head dim.
WITH_ADDENDS = {64: (128, 128), 96: (96, 64), 128: (96, 64), 192: (64, 128), 256: (48, 128)}


def _beside_addends(row: Geometry, shaped: bool, dropout: bool) -> Geometry:
    keys, box = WITH_ADDENDS[row.head_dim]
    if row.head_dim == 64:
        row = NARROW_DROPOUT._replace(stages=2, stages_v=2)
    if shaped and (dropout or row.head_dim == 96) and row.head_dim in (96, 128):  # more would spill
        keys, box = 80, 32
    turns = row.ping_pong and dropout  # without it they cost more than they give
    return row._replace(block_kv=keys, ping_pong=turns, q_stages=1, out_panels=1, bias_box=box)


def _rows(options: tuple[bool, ...]) -> tuple[Geometry, ...]:
    """The rows of a forward with these options."""
    addends, shaped, dropout = options
    if addends:
        return tuple(_beside_addends(row, shaped, dropout) for row in SHAPED)
    if dropout:
        return tuple(NARROW_DROPOUT if row.head_dim == 64 else row for row in SHAPED)
    return SHAPED if any(options) else PLAIN


# (kernel, bytes of the score type, options) -> geometries.
TABLE = {("forward", 4, options): _rows(options) for options in itertools.product((False, True), repeat=3)}
