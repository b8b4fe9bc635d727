"""How many pairs (query, key) position and lengths allow, and how many keys tiles read, in closed form.

Query i sees the keys of the interval [max(0, p - left), min(kv_length, p + right + 1)) with p = i + offset. Both ends
are a line clipped to [0, kv_length], and clipping keeps their order; so the number of visible pairs is a difference
of two sums of a clipped line, each a difference of two sums of max(0, line), and those are triangular numbers. A
tile of ``block_q`` queries reads the union of its rows' intervals, which is again one interval: the same sums over
lines of slope ``block_q``.

Everything is evaluated with Python's integers, so it is exact for any length.
"""

from __future__ import annotations


def keys_read(
    seqlen_q: int,
    seqlen_k: int,
    *,
    block_q: int = 1,
    left: int | None = None,
    right: int | None = None,
    offset: int = 0,
    q_length: int | None = None,
    kv_length: int | None = None,
) -> int:
    """Keys that tiles of ``block_q`` queries read, summed over the tiles of one score matrix.

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        m and n.
    block_q : int
        Queries per tile.
    left, right : int or None
        Key j is visible where p - left <= j <= p + right, p = i + offset; None is no bound.
        Causal is ``right=0``.
    offset : int
        The query offset.
    q_length, kv_length : int or None
        Lengths in use; None is all.

    Returns
    -------
    int
        The sum over tiles of the length of the union of their rows' key intervals.

    Examples
    --------
    >>> from cupyflash.pairs import keys_read
    >>> keys_read(4, 4, right=0), keys_read(4, 4, right=0, block_q=2), keys_read(4, 4)
    (10, 6, 16)
    """
    rows = seqlen_q if q_length is None else q_length
    keys = seqlen_k if kv_length is None else kv_length
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


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
    offset: int = 0,
    q_length: int | None = None,
    kv_length: int | None = None,
) -> int:
    """Pairs (query, key) of one score matrix that position and lengths allow; parameters as `keys_read`.

    Examples
    --------
    >>> from cupyflash.pairs import visible_pairs
    >>> visible_pairs(100_000, 100_000, right=0)
    5000050000
    """
    return keys_read(
        seqlen_q, seqlen_k, left=left, right=right, offset=offset, q_length=q_length, kv_length=kv_length
    )


def _clipped_line(count: int, step: int, start: int, high: int) -> int:
    """The sum of clip(start + step * t, 0, high) over t in [0, count)."""
    return _positive_line(count, step, start) - _positive_line(count, step, start - high)


def _positive_line(count: int, step: int, start: int) -> int:
    """The sum of max(0, start + step * t) over t in [0, count)."""
    first = min(count, max(0, -(start // step)))
    terms = count - first
    return terms * start + step * (terms * (first + count - 1) // 2)
