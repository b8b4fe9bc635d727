"""The usual slopes of ALiBi."""

from __future__ import annotations

import numpy as np

from . import checks


def alibi_slopes(heads: int) -> np.ndarray:
    """The usual geometric ALiBi slopes.

    Parameters
    ----------
    heads : int
        Number of query heads, >= 1.

    Returns
    -------
    ndarray, (heads,), float32
        ``2**(-8 (h + 1) / heads)`` for a power of two; otherwise those of the next lower power of two, followed
        by every second one of twice that power.

    Raises
    ------
    ValueError, TypeError
        heads is not an int >= 1.

    References
    ----------
    O. Press, N. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases" (2022), section 3.

    Examples
    --------
    >>> import cupyflash
    >>> cupyflash.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    heads = checks.integer(heads, "heads", low=1)
    power = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> np.ndarray:
        return np.exp2(-8.0 * np.arange(1, count + 1) / count)

    slopes = np.concatenate([geometric(power), geometric(2 * power)[::2][: heads - power]])
    return slopes.astype(np.float32)
