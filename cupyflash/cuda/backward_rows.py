"""Workspace of a backward that owns keys and hands gradients of queries on: kernels_cu/attn/backward_rows.cuh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .simt import ceil

if TYPE_CHECKING:
    from .recipe import Sizes

ROW_UNIT, ROW_BLOCK, TICKETS = 128, 64, 4


def padded_rows(sizes: Sizes) -> int:
    """Rows of all heads, each head's padded to whole units."""
    return sizes.batch * sizes.heads_q * ceil(sizes.seqlen_q, ROW_UNIT) * ROW_UNIT


def workspace(sizes: Sizes, cols: int) -> dict[str, int]:
    """Arrays of the workspace and their lengths in words of four bytes; sums have so many columns, if any."""
    rows = padded_rows(sizes)
    words = {"row_stats": 2 * rows, "dq_sums": rows * cols, "turns": TICKETS + rows // ROW_BLOCK}
    return {name: count for name, count in words.items() if count}
