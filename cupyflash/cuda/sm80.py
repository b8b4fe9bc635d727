"""The mma.sync family's tiles: geometry, the rules its kernels rely on, grids, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from .simt import ceil

if TYPE_CHECKING:
    from .recipe import Sizes

ALIGNMENT_BYTES = 128  # of swizzled tiles; dynamic shared memory is rounded up to it
FRAGMENT = 16  # rows and columns that an mma instruction takes
PAIR_FLAG_BYTES = 64
MOST_HELD_QUERIES = 2048  # numbers that a decode's warp keeps in registers
FLAG_BYTES = 4  # of a thread: what it knows of dropout in a step
PLACE_BYTES = 256  # of what the threads of a forward share besides tiles
Q_PASS_BYTES, PASS_BYTES = 256, 640  # of a backward_q, of a backward that owns keys
BIAS_SLICE, BIAS_WARP_ROWS = 64, 32  # columns of operands that a backward_bias takes at once, rows of a warp
BIAS_PLAN_BYTES = 1024
SMALL_HEAD_DIM = 64
PAIRED_COLS = 128  # of two warps that part columns by panels
HELD_BYTES = 2**25


class Geometry(NamedTuple):
    """Threads of a block and the tiles they work on."""

    threads: int
    occupancy: int  # blocks that a multiprocessor is to hold
    block_q: int
    block_kv: int
    step: int  # keys (queries in backward_kv) that a warp takes at once
    head_dim: int
    head_dim_v: int
    ahead: bool = False  # forward: the next step's products stand among this step's exponentials
    held: bool = False  # forward: a warp's queries stay in registers
    paired: bool = False  # forward: two warps share rows, and part keys and columns
    addends: bool = False  # a mask or a bias is staged in shared memory
    drops: bool = False  # backward: flags of dropout have a place of their own there
    split: bool = False  # forward: keys are cut into runs
    ordered: bool = True  # backward: adds to dq in a fixed order
    stages: int = 0  # decode, backward_bias: slices on their way, and the one that is read
    head_warps: int = 1  # decode: heads of keys that the warps of a block part; if 1 they part keys

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        words = [dims, f"q{self.block_q}", f"kv{self.block_kv}", f"s{self.step}", f"t{self.threads}"]
        flags = {
            "ahead": self.ahead,
            "held": self.held,
            "paired": self.paired,
            "split": self.split,
            "unordered": not self.ordered,
        }
        words += [f"stages{self.stages}"] if self.stages else []
        words += [f"heads{self.head_warps}"] if self.head_warps > 1 else []
        return " ".join(words + [word for word, on in flags.items() if on])

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kMinBlocks": self.occupancy,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kStep": self.step,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kAhead": self.ahead,
            "kHeld": self.held,
            "kPaired": self.paired,
            "kSplit": self.split,
            "kStages": self.stages,
            "kHeadWarps": self.head_warps,
            "kOrdered": self.ordered,
        }

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        d, e, q, kv = self.head_dim, self.head_dim_v, self.block_q, self.block_kv
        staged = self.addends * q * (self.step + 8) * score_bytes
        if kernel == "forward":
            used = _tile(q, max(d, e)) + 3 * _tile(kv, d) + 2 * _tile(kv, e) + staged + PLACE_BYTES
            if self.paired:
                used += 4 * q * self.step + self.threads // 32 * PAIR_FLAG_BYTES - _tile(kv, d)
        elif kernel == "decode":
            warps = self.threads // 32
            queries = 2 * q * d if q * d > MOST_HELD_QUERIES else 0
            used = warps * (
                self.stages * (_tile(FRAGMENT, d) + _tile(FRAGMENT, e)) + queries + 2 * q * score_bytes
            )
        elif kernel == "backward_q":
            used = _tile(q, d) + _tile(q, e) + 2 * (_tile(kv, d) + _tile(kv, e)) + staged + Q_PASS_BYTES
        elif kernel in ("backward", "backward_kv"):
            pairs = self.threads // 64
            stages = 1 if self.step == q else 2  # of weights
            weights, rows = stages * kv * self.step * 2, 4 * q * score_bytes
            staged = self.addends * pairs * self.step * (kv // pairs + 8) * score_bytes
            used = 2 * (_tile(kv, max(d, e)) + _tile(q, d) + _tile(q, e)) + weights + rows + staged
            used += stages * self.drops * self.threads * FLAG_BYTES
            used += PASS_BYTES + (3 * _tile(kv, q) if kernel == "backward" else 0)
        else:
            slices = self.stages * (_tile(q, BIAS_SLICE) + _tile(kv, BIAS_SLICE))
            addends = self.threads // 32 * BIAS_WARP_ROWS * (self.step + 8) * score_bytes
            used = slices + addends + BIAS_PLAN_BYTES
        return used + ALIGNMENT_BYTES

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims; small ones share kernels."""
        if max(head_dim, head_dim_v) <= SMALL_HEAD_DIM:
            head_dim = head_dim_v = SMALL_HEAD_DIM
        head_dim, head_dim_v = _padded(head_dim), _padded(head_dim_v)
        paired = self.paired and head_dim_v % PAIRED_COLS == 0
        return self._replace(head_dim=head_dim, head_dim_v=head_dim_v, paired=paired)

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Blocks of a launch whose owners (batch items, or points that gradients keep) number as many."""
        if kernel in ("backward", "backward_kv"):
            return owners * sizes.heads_kv * ceil(sizes.seqlen_k, self.block_kv)
        if kernel == "decode":
            return owners * sizes.heads_kv // self.head_warps * ceil(rows_of_a_group(sizes), self.block_q)
        return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernels' assumptions does not hold."""
        warps = self.threads // 32
        on_keys = kernel in ("backward", "backward_kv")
        rows, parts = (self.block_kv, warps // 2) if on_keys else (self.block_q, warps)
        if kernel == "backward_bias":
            parts = self.block_q // BIAS_WARP_ROWS
        if kernel == "decode":
            rows, parts = self.block_kv, warps // self.head_warps
        stepped = self.block_q if on_keys else self.block_kv
        rules = {
            f"threads = {self.threads} must be a multiple of 64": self.threads % 64 == 0,
            f"{rows} rows must be a multiple of {FRAGMENT} for each of {parts} parts": rows
            % (FRAGMENT * parts)
            == 0,
            f"step = {self.step} must be a multiple of {FRAGMENT}": self.step % FRAGMENT == 0,
            f"step = {self.step} must divide {stepped}": stepped % self.step == 0,
            f"2 x block_q = {2 * self.block_q} must be at most {self.threads} threads": not on_keys
            or 2 * self.block_q <= self.threads,
        }
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            held = size % FRAGMENT == 0 and size <= 256
            rules[f"{name} = {size} must be a multiple of {FRAGMENT} up to 256"] = held
        return [rule for rule, holds in rules.items() if not holds]


def _padded(head_dim: int) -> int:
    return max(FRAGMENT, ceil(head_dim, FRAGMENT) * FRAGMENT)


def _tile(rows: int, cols: int) -> int:
    """Bytes of a tile: panels of 64 columns."""
    return ceil(cols, 64) * rows * 128


def _row(threads: int, occupancy: int, block_q: int, block_kv: int, step: int, bucket: int) -> Geometry:
    return Geometry(threads, occupancy, block_q, block_kv, step, bucket, bucket)


# By kernel and options that a row is for (none; dropout alone; any): the best first within a bucket of head dims. The
# options take registers, so their steps are shorter.
PLAIN, DROPOUT, ANY = "plain", "dropout", "any"
_BACKWARD = (
    _row(256, 1, 128, 128, 64, 64),
    _row(256, 1, 64, 128, 64, 64),
    _row(256, 1, 64, 64, 32, 64),
    _row(256, 1, 64, 128, 64, 128),
    _row(256, 1, 64, 64, 32, 128),
    _row(256, 1, 64, 64, 64, 256),
)
_ROWS = {
    ("forward", PLAIN): (
        _row(128, 2, 128, 128, 64, 64),
        _row(128, 2, 128, 64, 64, 64),
        _row(128, 2, 128, 64, 64, 128),
        _row(128, 2, 128, 32, 32, 128),
        _row(256, 1, 128, 64, 64, 256)._replace(paired=True),
        _row(128, 2, 64, 32, 32, 256)._replace(ahead=True),
        _row(128, 1, 64, 16, 16, 256),
    ),
    ("forward", DROPOUT): (
        _row(128, 2, 128, 64, 64, 64)._replace(held=True),
        _row(128, 2, 128, 64, 64, 128),
        _row(128, 2, 128, 32, 32, 128),
        _row(128, 2, 64, 32, 16, 256),
        _row(128, 1, 64, 16, 16, 256),
    ),
    ("forward", ANY): (
        _row(128, 2, 128, 64, 32, 64),
        _row(128, 2, 64, 64, 32, 128),
        _row(128, 2, 64, 32, 16, 128),
        _row(256, 1, 128, 32, 16, 256),
        _row(128, 1, 64, 16, 16, 256),
    ),
    ("decode", PLAIN): (
        _row(128, 4, 16, 64, 16, 64)._replace(stages=3),
        _row(128, 2, 16, 64, 16, 128)._replace(stages=3),
        _row(128, 1, 16, 64, 16, 128)._replace(stages=2),
        _row(64, 2, 16, 32, 16, 256)._replace(stages=3),
        _row(64, 1, 16, 32, 16, 256)._replace(stages=2),
    ),
    ("decode", ANY): (
        _row(128, 2, 16, 64, 16, 64)._replace(stages=3),
        _row(128, 2, 16, 64, 16, 128)._replace(stages=3),
        _row(128, 1, 16, 64, 16, 128)._replace(stages=2),
        _row(64, 2, 16, 32, 16, 256)._replace(stages=3),
        _row(64, 1, 16, 32, 16, 256)._replace(stages=2),
    ),
    ("backward", PLAIN): _BACKWARD,
    ("backward", DROPOUT): _BACKWARD,
    ("backward", ANY): (
        _row(256, 1, 64, 128, 32, 64),
        _row(256, 1, 64, 64, 16, 64),
        _row(256, 1, 64, 128, 16, 128),
        _row(256, 1, 64, 64, 16, 128),
    ),
    ("backward_q", PLAIN): (
        _row(128, 2, 128, 64, 32, 64),
        _row(128, 2, 128, 32, 16, 128),
        _row(256, 1, 128, 32, 32, 256),
        _row(64, 1, 32, 16, 16, 256),
    ),
    ("backward_q", ANY): (
        _row(128, 2, 128, 64, 16, 64),
        _row(128, 2, 64, 32, 16, 128),
        _row(256, 1, 128, 32, 16, 256),
        _row(64, 1, 32, 16, 16, 256),
    ),
    ("backward_kv", PLAIN): (
        _row(256, 1, 64, 128, 64, 64),
        _row(256, 1, 64, 128, 32, 128),
        _row(256, 1, 32, 64, 32, 128),
        _row(256, 1, 64, 64, 64, 256),
        _row(256, 1, 32, 64, 32, 256),
        _row(128, 1, 16, 32, 16, 256),
    ),
    ("backward_kv", ANY): (
        _row(256, 1, 64, 128, 16, 64),
        _row(256, 1, 32, 64, 16, 128),
        _row(256, 1, 32, 64, 16, 256),
        _row(128, 1, 16, 32, 16, 256),
    ),
    ("backward_bias", ANY): (
        _row(128, 2, 64, 128, 64, 256)._replace(stages=3),
        _row(128, 1, 128, 64, 64, 256)._replace(stages=2),
    ),
}
KERNELS = ("forward", "decode", "backward", "backward_q", "backward_kv", "backward_bias")


def _rows(kernel: str, options: tuple[bool, ...]) -> tuple[Geometry, ...]:
    """The rows of a kernel with these options."""
    group = ANY if any(options[:2]) else DROPOUT if options[2] else PLAIN
    rows = _ROWS.get((kernel, group), _ROWS.get((kernel, ANY), ()))
    shaped = any(options[:2])
    return tuple(
        row._replace(addends=options[0], drops=options[2] and (shaped or row.head_dim > SMALL_HEAD_DIM))
        for row in rows
    )


# (kernel, bytes of the score type, options) -> geometries
TABLE: dict[Any, tuple[Geometry, ...]] = {
    (kernel, 4, options): _rows(kernel, options)
    for kernel in KERNELS
    for options in itertools.product((False, True), repeat=3)
}
# The same for one compute capability: on all but 9.0 the compiler finds no room for queries in registers, and on some
# none for steps of 64 at head dim 128. By kernel, and whether there is dropout.
_SHORTER_STEPS = {
    ("forward", False): (100,),
    ("forward", True): (80, 87, 90),
    ("backward", False): (100,),
    ("backward", True): (100,),
}
TABLE |= {
    (kernel, score_bytes, options, cc): tuple(
        row._replace(
            held=row.held and cc == 90,
            step=32 if row.head_dim == 128 and cc in _SHORTER_STEPS[kernel, options[2]] else row.step,
        )
        for row in rows
    )
    for (kernel, score_bytes, options), rows in list(TABLE.items())
    if kernel in ("forward", "backward") and not any(options[:2])
    for cc in ((80, 86, 87, 89, 90, 100, 120) if kernel == "forward" else (100,))
}
# By kernel and options: what is faster on 9.0 than the first of the rows above.
_ON_90 = {
    ("forward", (False, False, False)): (_row(128, 2, 128, 128, 128, 64),),
    ("forward", (False, True, False)): (_row(128, 2, 128, 64, 64, 64), _row(128, 2, 128, 64, 32, 128)),
    ("forward", (False, True, True)): (_row(128, 2, 128, 64, 64, 64), _row(128, 2, 128, 64, 32, 128)),
    ("backward", (True, False, False)): (_row(256, 1, 64, 128, 64, 64),),
    ("backward", (True, False, True)): (_row(256, 1, 64, 128, 64, 64),),
} | {
    ("forward", (True, *others)): (_row(256, 1, 128, 64, 64, 128),)
    for others in itertools.product((False, True), repeat=2)
}
TABLE |= {
    (kernel, 4, options, 90): (
        *(row._replace(addends=options[0], drops=options[0] and options[2]) for row in rows),
        *TABLE[kernel, 4, options],
    )
    for (kernel, options), rows in _ON_90.items()
}
# On these a multiprocessor holds one block of the bias gradient's first row: a larger one serves it better.
TABLE |= {
    ("backward_bias", 4, options, cc): (
        _row(256, 1, 128, 128, 64, 256)._replace(stages=2, addends=options[0]),
    )
    for options in itertools.product((False, True), repeat=3)
    for cc in (80, 87)
}


def heads_together(sizes: Sizes) -> int:
    """How many heads of keys the blocks of the one-kernel backward work on at once: what the L2 cache holds."""
    bytes_each = 8 * max(sizes.seqlen_q, 1) * max(sizes.head_dim, 1) * (sizes.heads_q // sizes.heads_kv)
    return max(1, HELD_BYTES // bytes_each)


def rows_of_a_group(sizes: Sizes) -> int:
    """Queries of all heads that share keys."""
    return sizes.heads_q // sizes.heads_kv * sizes.seqlen_q
