"""The counter-based random function Philox4x32, in array operations of NumPy or CuPy.

References
----------
Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: Any, key: Any, rounds: int = 7) -> tuple[Any, Any, Any, Any]:
    """The counter-based random function Philox4x32.

    Parameters
    ----------
    counter : four uint32 arrays
        They broadcast against each other; NumPy or CuPy.
    key : two uint32 arrays or ints
        Broadcast likewise.
    rounds : int
        10 in the paper's standard form; 7 pass its tests of randomness and are what the kernels use.

    Returns
    -------
    tuple of four uint32 arrays
        The random words, of the broadcast shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.philox import philox4x32
    >>> [f"{int(w[0]):08x}" for w in philox4x32([np.zeros(1, np.uint32)] * 4, (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = (low_word(word) for word in key)
    for _ in range(rounds):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (
            low_word(word.astype(np.uint64) + np.uint64(step)) for word, step in zip((k0, k1), _KEY_STEPS)
        )
    return c0, c1, c2, c3


def low_word(word: Any) -> Any:
    """The low 32 bits, kept as uint32; a Python int becomes a NumPy scalar."""
    if isinstance(word, int):
        return np.uint32(word & _LOW)
    return (word & np.uint64(_LOW)).astype(np.uint32)


def _multiply(x: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low word of a 32 by 32 bit product."""
    product = x.astype(np.uint64) * np.uint64(factor)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)
