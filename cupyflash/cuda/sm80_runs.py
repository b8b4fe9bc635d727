"""Forwards of few queries in the mma.sync family: into how many runs their keys are cut, and by which kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .simt import ceil
from .sm80 import SMALL_HEAD_DIM, Geometry, rows_of_a_group

if TYPE_CHECKING:
    from .recipe import Sizes

MOST_DECODE_ROWS = 32
MOST_RUNS = 64
FEW_QUERIES = 8  # of a decode's tile, where it needs no more
# Of results that a warp with heads of its own holds twice: where they are few it gains 0.6 %, and spills on 10.0.
MOST_COLS_OF_HEADS = 128
BLOCKS_OF_HEADS = 128  # with fewer blocks, in each of which warps part heads, multiprocessors are left idle
COMBINED_COLS = 32  # of a warp that joins runs
KEYS_A_RUN, MANY_RUNS = 512, 8  # twice as many keys where they make so many runs
KEYS_A_QUERY = 8  # with fewer keys for each query there are query tiles enough
STEP_WITH_ADDENDS = 32  # at most: with more a multiprocessor holds one block
LONG_STEP = 64  # steps of more keys leave no registers for queries, which shorter ones on 9.0 do
HALF_SHARED = 113 * 1024  # shared memory of a block of which a multiprocessor with 227 KiB holds two


def runs_of_keys(sizes: Any) -> int:
    """Into how many runs a forward cuts its keys: a function of the lengths alone, so that bits do not vary."""
    m, n = sizes.seqlen_q, sizes.seqlen_k
    runs = min(ceil(n, KEYS_A_RUN), max(MANY_RUNS, ceil(n, 2 * KEYS_A_RUN)))
    return max(1, min(runs, MOST_RUNS, n // (KEYS_A_QUERY * max(m, 1))))


def cut(geometry: Geometry) -> Geometry:
    """A forward's row for few queries and keys in runs."""
    wide = max(geometry.head_dim, geometry.head_dim_v) > 128
    block_kv = min(geometry.block_kv, 32 if wide else 64)
    small = geometry._replace(
        threads=128,
        block_q=64,
        block_kv=block_kv,
        step=min(geometry.step, block_kv, STEP_WITH_ADDENDS if geometry.addends else block_kv),
        held=geometry.held or geometry.step > LONG_STEP,
        paired=False,
        split=True,
    )
    return small._replace(occupancy=2 if small.shared_bytes("forward", 4) <= HALF_SHARED else 1)


def decode_forms(geometry: Geometry, plain: bool) -> dict[tuple[bool, bool], Geometry]:
    """A decode's row by whether queries are few and heads many: all of them give the same bits."""
    few = geometry._replace(block_q=FEW_QUERIES)
    fits = SMALL_HEAD_DIM < max(geometry.head_dim, geometry.head_dim_v) <= MOST_COLS_OF_HEADS
    apart = few._replace(head_warps=geometry.threads // 32) if plain and fits else few
    return {(False, False): geometry, (False, True): geometry, (True, False): few, (True, True): apart}


def decode_form(geometry: Geometry, sizes: Sizes, runs: int) -> Geometry:
    """The form that a call takes."""
    few, warps = rows_of_a_group(sizes) <= FEW_QUERIES, geometry.threads // 32
    many = sizes.heads_kv % warps == 0 and sizes.batch * sizes.heads_kv // warps * runs >= BLOCKS_OF_HEADS
    return decode_forms(geometry, not any(sizes.options))[few, many]


def is_decode(sizes: Sizes) -> bool:
    """Whether the queries that share keys are so few that the time goes to reading the keys."""
    return sizes.seqlen_q == 1 or rows_of_a_group(sizes) <= MOST_DECODE_ROWS
