"""The tensor-core family of float32 and float64: geometry, the rules of its kernels, grids, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from .simt import ceil

if TYPE_CHECKING:
    from .recipe import Sizes

ALIGNMENT_BYTES = 128  # of swizzled tiles; dynamic shared memory is rounded up to it
FRAGMENT = 16  # rows and columns that a step of a product takes
LINE_BYTES = 128  # rows of tiles are whole lines
WORK_BYTES = 576  # what a block keeps of its work in shared memory
PRODUCTS = {"tf32x3": 3, "tf32": 1}  # of TF32 for one of float32


class Geometry(NamedTuple):
    """Threads of a block and the tiles they work on."""

    threads: int
    occupancy: int  # blocks that a multiprocessor is to hold
    block_q: int
    block_kv: int
    head_dim: int
    head_dim_v: int
    products: int = 3
    stages: int = 2  # of the backward by keys: tiles of queries that are in shared memory at once

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        precision = " tf32" if self.products == 1 else ""
        return f"{dims} q{self.block_q} kv{self.block_kv} t{self.threads}{precision}"

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kMinBlocks": self.occupancy,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kProducts": self.products,
            "kStages": self.stages,
            "kWorkBytes": WORK_BYTES,
        }

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        d, e, q, kv = self.head_dim, self.head_dim_v, self.block_q, self.block_kv
        if kernel == "forward":
            elements = q * d + 3 * kv * max(d, e)
        elif kernel in BY_QUERIES:
            elements = (q + 2 * kv) * (d + e) + 2 * q
        else:
            # Weights and dA; of doubles in one kernel weights lie where dA will, and d(c)/d(a) may lie beside.
            stages, in_one = self.stages, kernel == "backward"
            beside = in_one and score_bytes == 8 and stages == 2
            tiles = 1 if not in_one else 1 + stages if score_bytes == 4 else 4 if beside else 2
            elements = (kv + stages * q) * (d + e) + kv * q * tiles + 2 * stages * q
            elements += self.threads // 32 if beside else 0
        return score_bytes * elements + WORK_BYTES + ALIGNMENT_BYTES

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims; small ones share kernels."""
        if max(head_dim, head_dim_v) <= self.head_dim <= SMALL_HEAD_DIM:
            return self
        unit = self.head_dim % SMALL_HEAD_DIM or SMALL_HEAD_DIM
        return self._replace(head_dim=_padded(head_dim, unit), head_dim_v=_padded(head_dim_v, unit))

    def for_precision(self, precision: str) -> Geometry:
        """The row as it computes float32 in that precision."""
        return self._replace(products=PRODUCTS[precision])

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Blocks of a launch whose owners (batch items, or points that gradients keep) number as many."""
        if kernel in BY_KEYS:
            return owners * sizes.heads_kv * ceil(sizes.seqlen_k, self.block_kv)
        return owners * sizes.heads_q * ceil(sizes.seqlen_q, self.block_q)

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernels' assumptions does not hold."""
        warps = self.threads // 32
        on_keys = kernel in BY_KEYS
        rows, parts = (self.block_kv, warps // 2) if on_keys else (self.block_q, warps)
        stepped, name = (self.block_q, "block_q") if on_keys else (self.block_kv, "block_kv")
        rules = {
            f"threads = {self.threads} must be a multiple of 64": self.threads % 64 == 0,
            f"{rows} rows must be a multiple of {FRAGMENT} for each of {parts} parts": rows
            % (FRAGMENT * parts)
            == 0,
            f"{name} = {stepped} must be a multiple of {FRAGMENT}": stepped % FRAGMENT == 0,
            f"products = {self.products} must be 1 or 3": self.products in PRODUCTS.values(),
            f"stages = {self.stages} must be 2, or 1 in the one-kernel backward": self.stages == 2
            or (self.stages == 1 and kernel == "backward"),
        }
        unit = LINE_BYTES // score_bytes
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            rules[f"{name} = {size} must be a multiple of {unit}"] = size % unit == 0
        return [rule for rule, holds in rules.items() if not holds]


SMALL_HEAD_DIM = 64
BY_KEYS = ("backward", "backward_kv")  # whose blocks own keys
BY_QUERIES = ("backward_q", "backward_addends")


def _padded(head_dim: int, unit: int) -> int:
    return max(1, ceil(head_dim, unit)) * unit


def _row(threads: int, occupancy: int, block_q: int, block_kv: int, bucket: int, stages: int = 2) -> Geometry:
    return Geometry(threads, occupancy, block_q, block_kv, bucket, bucket, stages=stages)


# By kernel, bytes of the score type and options that a row is for (none, or any): the best first within a bucket of
# head dims. What no row holds (much shared memory on small GPUs, options that take too many registers) is left to
# simt. Rows for the same head dims give the same bits whatever the options, but for the forward of float64 from 10.0
# on.
PLAIN, ANY = "plain", "any"
_ROWS = {
    ("forward", 4, PLAIN): tuple(_row(128, 2, 64, 32, bucket) for bucket in (32, 64, 128)),
    ("backward", 4, PLAIN): (
        _row(256, 2, 64, 64, 32),
        _row(256, 1, 64, 64, 64),
        _row(256, 1, 32, 64, 64),
        _row(256, 1, 32, 64, 128),
    ),
    ("backward", 4, ANY): (
        _row(256, 1, 32, 64, 32),
        _row(256, 1, 32, 64, 64),
        _row(256, 1, 16, 64, 128),
    ),
    ("backward", 8, PLAIN): (
        _row(256, 1, 32, 64, 32),
        _row(256, 1, 64, 64, 64, stages=1),
        _row(256, 1, 32, 64, 64),
        _row(256, 1, 16, 64, 64),
        _row(256, 1, 32, 64, 128, stages=1),
    ),
    ("backward", 8, ANY): (
        _row(256, 1, 32, 64, 32),
        _row(256, 1, 32, 64, 64),
        _row(256, 1, 16, 64, 64),
        _row(256, 1, 16, 64, 128),
    ),
    ("backward_q", 4, PLAIN): (_row(128, 2, 64, 32, 64), _row(128, 2, 64, 16, 128)),
    ("backward_addends", 4, PLAIN): (_row(128, 2, 64, 32, 64), _row(128, 2, 64, 16, 128)),
    ("backward_kv", 4, PLAIN): (_row(128, 2, 16, 64, 64), _row(256, 1, 32, 64, 128)),
    ("backward_kv", 4, ANY): (_row(128, 2, 32, 32, 64), _row(256, 1, 16, 64, 128)),
    ("forward", 8, PLAIN): (
        _row(128, 2, 64, 32, 32),
        _row(128, 2, 64, 32, 64),
        _row(256, 1, 128, 32, 128),
        _row(128, 1, 64, 16, 128),
    ),
    ("backward_q", 8, PLAIN): (
        _row(128, 2, 64, 16, 64),
        _row(128, 1, 64, 16, 128),
        _row(64, 1, 32, 16, 128),
    ),
    ("backward_q", 8, ANY): (_row(128, 2, 64, 16, 64),),
    ("backward_addends", 8, PLAIN): (
        _row(256, 1, 128, 32, 64),
        _row(128, 2, 64, 16, 64),
        _row(128, 1, 64, 16, 128),
        _row(64, 1, 32, 16, 128),
    ),
    ("backward_kv", 8, ANY): (_row(128, 2, 16, 32, 64),),
    ("backward_kv", 8, PLAIN): (
        _row(128, 2, 16, 32, 64),
        _row(256, 1, 16, 64, 128),
        _row(128, 1, 16, 32, 128),
    ),
}


MOST_HEADS_IN_TURNS = 32  # of the one-kernel backward: more would share the L2 cache with too many


def heads_in_turns(heads_kv: int) -> int:
    """How many heads of keys the blocks of the one-kernel backward start on in turns: a divisor of all."""
    return max(n for n in range(1, min(heads_kv, MOST_HEADS_IN_TURNS) + 1) if heads_kv % n == 0)


KERNELS = ("forward", "backward", *BY_QUERIES, "backward_kv")


def _rows(kernel: str, score_bytes: int, options: tuple[bool, ...]) -> tuple[Geometry, ...]:
    """The rows of a kernel with these options."""
    group = ANY if any(options) and (kernel, score_bytes, ANY) in _ROWS else PLAIN
    return _ROWS[kernel, score_bytes, group]


# (kernel, bytes of the score type, options, and a compute capability where that matters) -> geometries
TABLE: dict[Any, tuple[Geometry, ...]] = {
    (kernel, score_bytes, options): _rows(kernel, score_bytes, options)
    for kernel in KERNELS
    for score_bytes in (4, 8)
    for options in itertools.product((False, True), repeat=3)
}
# Beside mask and bias, or dropout, alone float64 of 128 columns has registers for as many queries as without.
for _options in ((True, False, False), (False, False, True)):
    TABLE["backward", 8, _options] = (*_ROWS["backward", 8, ANY][:-1], _ROWS["backward", 8, PLAIN][-1])
# From 10.0 on the compiler takes more registers: options leave too few for tiles of 32 keys.
for _chosen in itertools.product((False, True), repeat=3):
    if any(_chosen):
        TABLE["forward", 8, _chosen, 100] = (
            _row(128, 2, 64, 32, 32),
            _row(128, 2, 64, 16 if _chosen[1] else 32, 64),
            _row(256, 1, 128, 16, 128),
            _row(128, 1, 64, 16, 128),
        )
