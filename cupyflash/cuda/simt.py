"""The portable family's tiles: geometry, the rules its kernels rely on, grids, and the table of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .recipe import Sizes


BY_KEYS = ("backward", "backward_kv")  # whose blocks own keys
DESCRIPTION_BYTES = 304  # what a block keeps of its work in shared memory, beside four scores


class Geometry(NamedTuple):
    """Threads of a block and the tile they work on.

    Head dims beyond ``head_dim`` and ``head_dim_v`` are streamed through shared memory or split over blocks, so any
    row runs any head dims.
    """

    threads: int
    lanes_x: int  # threads along the tile's columns; the others are along its rows
    block_q: int
    block_kv: int
    chunk: int  # columns of the head dim that are in shared memory at once
    head_dim: int
    head_dim_v: int
    streamed: bool = False  # a head dim is wider than that: its chunks come anew for every tile
    ahead: bool = False  # of the forward: a chunk of keys is copied while the one before it is read

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        dims += " streamed" if self.streamed else " ahead" if self.ahead else ""
        return f"{dims} q{self.block_q} kv{self.block_kv} c{self.chunk} t{self.threads}/{self.lanes_x}"

    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernel's source."""
        return {
            "kThreads": self.threads,
            "kLanesX": self.lanes_x,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kChunk": self.chunk,
            "kHeadDim": self.head_dim,
            "kHeadDimV": self.head_dim_v,
            "kStreamed": self.streamed,
            "kAhead": self.ahead,
        }

    def shared_bytes(self, kernel: str, score_bytes: int) -> int:
        """Dynamic shared memory of a block; the kernel asserts that it uses as much."""
        pad = 16 // score_bytes
        row = self.chunk + pad
        d_parts, e_parts = self.head_dim // self.chunk, self.head_dim_v // self.chunk
        queries, keys = self.block_q * row, self.block_kv * row
        scores = self.block_q * (self.block_kv + pad)
        if kernel == "forward":
            places = 2 if self.ahead else 1
            elements = d_parts * queries + places * keys + self.block_kv * self.head_dim_v + scores
        elif kernel == "backward_q":
            elements = (d_parts + e_parts) * queries + (d_parts + 1) * keys + scores + 2 * self.block_q
        elif kernel in BY_KEYS:
            transposed = self.block_kv * (self.block_q + pad)
            elements = (d_parts + e_parts) * (queries + keys) + transposed + 2 * self.block_q
        else:
            elements = queries + keys + scores + 2 * self.block_q
        return score_bytes * elements + DESCRIPTION_BYTES + 4 * score_bytes

    def for_dims(self, kernel: str, head_dim: int, head_dim_v: int) -> Geometry:
        """The row as it runs these head dims."""
        if kernel == "backward_bias":  # always goes through the head dims by chunks
            return self
        wide = head_dim > self.head_dim or (kernel != "forward" and head_dim_v > self.head_dim_v)
        return self._replace(streamed=wide, ahead=self.ahead and not wide)

    def blocks(self, kernel: str, sizes: Sizes, owners: int) -> int:
        """Blocks of a launch whose owners (batch items, or points that gradients keep) number as many."""
        s = sizes
        row_tiles, col_tiles = ceil(s.seqlen_q, self.block_q), ceil(s.seqlen_k, self.block_kv)
        d_parts, e_parts = ceil(s.head_dim, self.head_dim), max(1, ceil(s.head_dim_v, self.head_dim_v))
        if kernel == "forward":
            return owners * s.heads_q * e_parts * row_tiles
        if kernel == "backward_q":
            return owners * s.heads_q * d_parts * row_tiles
        return owners * s.heads_kv * max(d_parts, e_parts) * col_tiles

    def broken_rules(self, kernel: str, score_bytes: int) -> list[str]:
        """What of the kernels' assumptions does not hold."""
        vector = 16 // score_bytes
        lanes_y = self.threads // self.lanes_x
        q_lanes, kv_lanes = (self.lanes_x, lanes_y) if kernel in BY_KEYS else (lanes_y, self.lanes_x)
        scores = self.block_q * self.block_kv // self.threads
        rules = {
            f"threads = {self.threads} must be a multiple of 32": self.threads % 32 == 0,
            f"lanes_x = {self.lanes_x} must be 8 or 16": self.lanes_x in (8, 16),
            f"block_q = {self.block_q} must be a multiple of {2 * q_lanes}": self.block_q % (2 * q_lanes)
            == 0,
            f"block_kv = {self.block_kv} must be a multiple of {4 * kv_lanes}": self.block_kv % (4 * kv_lanes)
            == 0,
            f"queries lie on {q_lanes} threads, which must be a multiple of 8": q_lanes % 8 == 0,
            f"keys lie on {kv_lanes} threads, which must be a multiple of 4": kv_lanes % 4 == 0,
            f"a thread has {scores} scores, at most 64": scores <= 64,
        }
        for name, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            unit = self.lanes_x * vector
            rules[f"{name} = {size} must be a multiple of chunk = {self.chunk}"] = size % self.chunk == 0
            rules[f"{name} = {size} must be a multiple of {unit}"] = size % unit == 0
        return [rule for rule, holds in rules.items() if not holds]


def _row(threads: int, lanes_x: int, block_q: int, block_kv: int, chunk: int, bucket: int) -> Geometry:
    return Geometry(threads, lanes_x, block_q, block_kv, chunk, bucket, bucket)


# (kernel, bytes of the score type) -> geometries, the best first within a bucket of head dims. The first of a bucket
# is made for two blocks on a multiprocessor with 227 KiB; those after it fit 99, 64 and 48 KiB.
TABLE: dict[tuple[Any, ...], tuple[Geometry, ...]] = {
    ("forward", 4): (
        _row(128, 8, 128, 64, 64, 64),
        _row(128, 8, 64, 64, 64, 64),
        _row(128, 8, 64, 32, 64, 64),
        _row(128, 16, 64, 64, 64, 128),
        _row(128, 8, 64, 32, 64, 128),
        _row(128, 8, 32, 32, 64, 128),
        _row(128, 8, 32, 32, 64, 256),
    ),
    ("backward_q", 4): (
        _row(128, 8, 128, 32, 64, 64),
        _row(128, 8, 64, 32, 64, 64),
        _row(128, 8, 32, 32, 64, 64),
        _row(128, 8, 64, 32, 64, 128),
        _row(128, 8, 32, 32, 64, 128),
        _row(128, 8, 32, 32, 64, 256),
    ),
    ("backward_kv", 4): (
        _row(128, 8, 32, 128, 64, 64),
        _row(128, 8, 32, 64, 64, 64),
        _row(64, 8, 32, 32, 64, 64),
        _row(128, 16, 32, 64, 64, 128),
        _row(128, 16, 32, 32, 64, 128),
        _row(128, 16, 32, 32, 64, 256),
    ),
    ("backward_bias", 4): (_row(128, 8, 64, 64, 64, 64), _row(128, 8, 64, 32, 64, 64)),
    ("forward", 8): (
        _row(128, 8, 64, 32, 64, 64),
        _row(128, 8, 32, 32, 64, 64),
        _row(64, 8, 16, 32, 64, 64),
        _row(128, 8, 32, 32, 64, 128),
        _row(128, 8, 32, 32, 64, 256),
    ),
    ("backward_q", 8): (
        _row(128, 8, 32, 32, 32, 32),
        _row(128, 8, 64, 32, 64, 64),
        _row(128, 8, 32, 32, 64, 64),
        _row(64, 8, 16, 32, 64, 64),
        _row(128, 8, 32, 32, 64, 128),
    ),
    ("backward_kv", 8): (
        _row(64, 8, 16, 32, 32, 32),
        _row(128, 8, 16, 64, 64, 64),
        _row(64, 8, 16, 32, 64, 64),
        _row(128, 16, 32, 32, 64, 128),
    ),
    ("backward_bias", 8): (_row(128, 8, 64, 32, 64, 64), _row(128, 8, 32, 32, 64, 64)),
}

# dq, dk and dv in one kernel: float32, beside options where they leave it its registers.
_in_one = (_row(128, 8, 32, 128, 64, 64), _row(128, 16, 32, 64, 64, 128))
TABLE["backward", 4, (False, False, False), 100] = _in_one[:1]
for _options, _cc in itertools.product(itertools.product((False, True), repeat=3), (80, 87, 90)):
    TABLE["backward", 4, _options, _cc] = _in_one

# Keys a chunk ahead, by cp.async. Hopper holds a block of twice as many queries.
_AHEAD, _AHEAD_128, _AHEAD_HOPPER = (
    _row(*numbers)._replace(ahead=True)
    for numbers in ((128, 8, 128, 64, 32, 64), (128, 16, 64, 64, 32, 128), (256, 16, 128, 64, 64, 128))
)
for _options, _cc in itertools.product(itertools.product((False, True), repeat=3), (80, 87, 90)):
    _wide = _AHEAD_HOPPER if _cc == 90 else _AHEAD_128
    TABLE["forward", 4, _options, _cc] = (_AHEAD, _wide, TABLE["forward", 4][-1])
FEW_BLOCKS = 256  # with fewer, blocks of half as many queries are faster


def halved(geometry: Geometry) -> Geometry:
    """The row for few blocks; it gives the same bits."""
    return _AHEAD_128 if geometry == _AHEAD_HOPPER else geometry


# Beside options the widest rows run out of registers: float64 anywhere, float32 on sm_100, 16 bits on sm_90.
for _options in itertools.product((False, True), repeat=3):
    if _options[1] and sum(_options) > 1:
        TABLE["forward", 8, _options] = TABLE["forward", 8][:-1]
    if any(_options):
        for _kernel in ("forward", "backward_kv"):
            TABLE[_kernel, 4, _options, 100] = TABLE[_kernel, 4][1:]
TABLE["backward_kv", 4, (False, True, False), 90] = TABLE["backward_kv", 4][1:]
TABLE["forward", 8, (True, False, True), 100] = TABLE["forward", 8][1:]


def ceil(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)
