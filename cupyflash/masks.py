"""Which key a query may see: one rule, as a predicate and as intervals of tiles.

With ``p = i + offset``, query ``i < q_length`` sees key ``j < kv_length`` where ``p - left <= j <= p + right``
(a causal call has ``right = 0``; None is no bound). Each row sees one interval of keys, and the interval moves by
one key from row to row; so what some row of a tile sees, and what every row of it sees, are again intervals.

kernels_cu/attn/mask.cuh is the same on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# No difference of two positions is as large: a bound beyond it says no more, and i + _FAR still fits int64.
_FAR = 2**62


class Visibility(NamedTuple):
    """The pairs of one batch item that position and lengths allow.

    Intervals are half-open and computed with Python's integers alone, so no bound or offset is too large for them.

    Attributes
    ----------
    left, right : int or None
        How many keys before and after its own position a query sees; None = no bound.
    offset : int
        Where query 0 stands among the keys; may be negative.
    q_length, kv_length : int
        Rows and keys at or past these do not exist.
    """

    left: int | None
    right: int | None
    offset: int
    q_length: int
    kv_length: int

    def allowed(self, rows: Any, cols: Any) -> np.ndarray:
        """The rule element by element.

        Parameters
        ----------
        rows, cols : sequence of int
            Query and key numbers, >= 0.

        Returns
        -------
        ndarray of bool, (len(rows), len(cols))
            True where the query may see the key.

        Examples
        --------
        >>> from cupyflash.masks import Visibility
        >>> Visibility(left=1, right=0, offset=0, q_length=3, kv_length=4).allowed(range(3), range(4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0]])
        """
        i = np.asarray(rows, np.int64)[:, None]
        j = np.asarray(cols, np.int64)[None, :]
        seen = (i < self.q_length) & (j < self.kv_length)
        if self.left is not None:
            seen &= j >= i + _clip(self.offset - self.left, -_FAR, _FAR)
        if self.right is not None:
            seen &= j <= i + _clip(self.offset + self.right, -_FAR, _FAR)
        return seen

    def keys_of_some(self, row_start: int, row_stop: int) -> tuple[int, int]:
        """The keys that some row of a tile sees: what the tile must visit.

        Examples
        --------
        >>> from cupyflash.masks import Visibility
        >>> Visibility(left=None, right=0, offset=0, q_length=128, kv_length=500).keys_of_some(64, 128)
        (0, 128)
        """
        row_stop = min(row_stop, self.q_length)
        if row_start >= row_stop:
            return (0, 0)
        start = 0 if self.left is None else row_start + self.offset - self.left
        stop = self.kv_length if self.right is None else row_stop + self.offset + self.right
        return _within(start, stop, self.kv_length)

    def keys_of_all(self, row_start: int, row_stop: int) -> tuple[int, int]:
        """The keys that every row of a tile sees: there the tile needs no mask.

        A row at or past ``q_length`` sees nothing, so it empties the interval.

        Examples
        --------
        >>> from cupyflash.masks import Visibility
        >>> Visibility(left=None, right=0, offset=0, q_length=128, kv_length=500).keys_of_all(64, 128)
        (0, 65)
        """
        if row_start >= row_stop or row_stop > self.q_length:
            return (0, 0)
        start = 0 if self.left is None else row_stop - 1 + self.offset - self.left
        stop = self.kv_length if self.right is None else row_start + self.offset + self.right + 1
        return _within(start, stop, self.kv_length)

    def rows_of_some(self, col_start: int, col_stop: int) -> tuple[int, int]:
        """The rows that see some key of a tile: what a tile of keys must visit in the backward pass.

        Examples
        --------
        >>> from cupyflash.masks import Visibility
        >>> Visibility(left=32, right=0, offset=0, q_length=500, kv_length=500).rows_of_some(64, 128)
        (64, 160)
        """
        return self.transposed().keys_of_some(col_start, col_stop)

    def transposed(self) -> Visibility:
        """Who sees whom with keys and queries in each other's place."""
        return Visibility(self.right, self.left, -self.offset, self.kv_length, self.q_length)


def _within(start: int, stop: int, length: int) -> tuple[int, int]:
    """The part of [start, stop) inside [0, length)."""
    start = _clip(start, 0, length)
    return (start, _clip(stop, start, length))


def _clip(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))
