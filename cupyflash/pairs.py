"""How many keys tiles of queries read, and so how many pairs are visible, in closed form.

Query i sees the keys of the interval [max(0, p - left), min(kv_length, p + right + 1)) with p = i + offset. Both ends
are a line clipped to [0, kv_length], and clipping keeps their order; so the number of visible pairs is a difference
of two sums of a clipped line, each a difference of two sums of max(0, line), and those are triangular numbers. A
tile of ``block_q`` queries reads the union of its rows' intervals, which is again one interval: the same sums over
lines of slope ``block_q``.

Everything is evaluated with Python's integers, so it is exact for any length.
"""

from __future__ import annotations

from .masks import Visibility


def keys_read(visible: Visibility, block_q: int = 1) -> int:
    """Keys that tiles of ``block_q`` queries read, summed over the tiles of one score matrix.

    Parameters
    ----------
    visible : Visibility
        Who sees whom.
    block_q : int
        Queries a tile; with 1 the sum is the number of visible pairs.

    Returns
    -------
    int
        The sum over tiles of the length of the union of their rows' key intervals.

    Examples
    --------
    >>> from cupyflash.masks import Visibility
    >>> from cupyflash.pairs import keys_read
    >>> causal = Visibility(left=None, right=0, offset=0, q_length=4, kv_length=4)
    >>> keys_read(causal), keys_read(causal, block_q=2)
    (10, 6)
    """
    left, right, offset, rows, keys = visible
    whole, rest = divmod(rows, block_q)
    total = 0
    # Tiles are whole ones, at rows 0, block_q, ..., and at most one shorter one at the end.
    for first, tiles, height in ((0, whole, block_q), (whole * block_q, int(rest > 0), rest)):
        stop = keys * tiles
        start = 0
        if right is not None:
            stop = _clipped_line(tiles, block_q, first + height - 1 + offset + right + 1, keys)
        if left is not None:
            start = _clipped_line(tiles, block_q, first + offset - left, keys)
        total += stop - start
    return total


def _clipped_line(count: int, step: int, start: int, high: int) -> int:
    """The sum of clip(start + step * t, 0, high) over t in [0, count)."""
    return _positive_line(count, step, start) - _positive_line(count, step, start - high)


def _positive_line(count: int, step: int, start: int) -> int:
    """The sum of max(0, start + step * t) over t in [0, count)."""
    first = min(count, max(0, -(start // step)))
    terms = count - first
    return terms * start + step * (terms * (first + count - 1) // 2)
