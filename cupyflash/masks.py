"""Which key a query may see: one rule, as a predicate and as intervals of tiles.

With ``p = i + offset``, query ``i < q_length`` sees key ``j < kv_length`` where ``p - left <= j <= p + right``
(a causal call has ``right = 0``; None is no bound). Each row sees one interval of keys, and the interval moves by
one key from row to row; so what some row of a tile sees, and what every row of it sees, are again intervals.

The interval functions use Python's integers alone, so no window or offset is too large for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# No difference of two positions is as large: a bound beyond it says no more, and i + _FAR still fits int64.
_FAR = 2**62


def allowed(
    rows: Any,
    cols: Any,
    *,
    left: int | None,
    right: int | None,
    offset: int,
    q_length: int,
    kv_length: int,
) -> np.ndarray:
    """The rule element by element.

    Parameters
    ----------
    rows, cols : sequence of int
        Query and key numbers, >= 0.
    left, right : int or None
        How many keys before and after its own position a query sees; None = no bound.
    offset : int
        Where query 0 stands among the keys; may be negative.
    q_length, kv_length : int
        Rows and keys at or past these do not exist.

    Returns
    -------
    ndarray of bool, (len(rows), len(cols))
        True where the query may see the key.

    Examples
    --------
    >>> from cupyflash.masks import allowed
    >>> allowed(range(3), range(4), left=1, right=0, offset=0, q_length=3, kv_length=4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0]])
    """
    i = np.asarray(rows, np.int64)[:, None]
    j = np.asarray(cols, np.int64)[None, :]
    seen = (i < q_length) & (j < kv_length)
    if left is not None:
        seen &= j >= i + _clip(offset - left, -_FAR, _FAR)
    if right is not None:
        seen &= j <= i + _clip(offset + right, -_FAR, _FAR)
    return seen


def key_interval(
    row_start: int,
    row_stop: int,
    *,
    left: int | None,
    right: int | None,
    offset: int,
    q_length: int,
    kv_length: int,
) -> tuple[int, int]:
    """The keys that some row of a tile sees: what the tile must visit.

    Parameters
    ----------
    row_start, row_stop : int
        The tile's rows, a half-open range.
    left, right, offset, q_length, kv_length
        As in `allowed`.

    Returns
    -------
    (start, stop) : tuple of int
        ``0 <= start <= stop <= kv_length``; equal where no row sees a key.

    Examples
    --------
    >>> from cupyflash.masks import key_interval
    >>> key_interval(64, 128, left=None, right=0, offset=0, q_length=128, kv_length=500)
    (0, 128)
    """
    row_stop = min(row_stop, q_length)
    if row_start >= row_stop:
        return (0, 0)
    start = 0 if left is None else row_start + offset - left
    stop = kv_length if right is None else row_stop + offset + right
    return _within(start, stop, kv_length)


def full_interval(
    row_start: int,
    row_stop: int,
    *,
    left: int | None,
    right: int | None,
    offset: int,
    q_length: int,
    kv_length: int,
) -> tuple[int, int]:
    """The keys that every row of a tile sees: there the tile needs no mask.

    Parameters
    ----------
    row_start, row_stop : int
        The tile's rows, a half-open range. A row at or past ``q_length`` sees nothing, so it empties the interval.
    left, right, offset, q_length, kv_length
        As in `allowed`.

    Returns
    -------
    (start, stop) : tuple of int
        ``0 <= start <= stop <= kv_length``.

    Examples
    --------
    >>> from cupyflash.masks import full_interval
    >>> full_interval(64, 128, left=None, right=0, offset=0, q_length=128, kv_length=500)
    (0, 65)
    """
    if row_start >= row_stop or row_stop > q_length:
        return (0, 0)
    start = 0 if left is None else row_stop - 1 + offset - left
    stop = kv_length if right is None else row_start + offset + right + 1
    return _within(start, stop, kv_length)


def query_interval(
    col_start: int,
    col_stop: int,
    *,
    left: int | None,
    right: int | None,
    offset: int,
    q_length: int,
    kv_length: int,
) -> tuple[int, int]:
    """The rows that see some key of a tile: what a tile of keys must visit in the backward pass.

    Parameters
    ----------
    col_start, col_stop : int
        The tile's keys, a half-open range.
    left, right, offset, q_length, kv_length
        As in `allowed`.

    Returns
    -------
    (start, stop) : tuple of int
        ``0 <= start <= stop <= q_length``; equal where no row sees a key of the tile.

    Examples
    --------
    >>> from cupyflash.masks import query_interval
    >>> query_interval(64, 128, left=32, right=0, offset=0, q_length=500, kv_length=500)
    (64, 160)
    """
    col_stop = min(col_stop, kv_length)
    if col_start >= col_stop:
        return (0, 0)
    start = 0 if right is None else col_start - right - offset
    stop = q_length if left is None else col_stop + left - offset
    return _within(start, stop, q_length)


def _within(start: int, stop: int, length: int) -> tuple[int, int]:
    """The part of [start, stop) inside [0, length)."""
    start = _clip(start, 0, length)
    return (start, _clip(stop, start, length))


def _clip(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))
