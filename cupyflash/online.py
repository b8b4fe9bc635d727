"""Softmax-weighted sums block by block: the summary (m, l, u) and its algebra.

Take scores 1000, 1001, 999 with values 2, 4, 8. exp(1001) overflows, so nobody sums exponentials directly; and a
tiled kernel sees one block of keys at a time. It keeps, for each row, three numbers of what it has seen: the largest
score m, the sum of weights ``l = sum exp(s - m)`` and the weighted sum of values ``u = sum exp(s - m) v``.

>>> from cupyflash import online
>>> a = online.summarize([1000.0], [2.0])
>>> [round(float(x), 4) for x in a]
[1000.0, 1.0, 2.0]

The second key has a larger score: what was summed so far shrinks by exp(1000 - 1001) = 0.3679.

>>> ab = online.merge(a, online.summarize([1001.0], [4.0]))
>>> [round(float(x), 4) for x in ab]
[1001.0, 1.3679, 4.7358]

The third has a smaller score: its own weight shrinks, by exp(999 - 1001) = 0.1353.

>>> abc = online.merge(ab, online.summarize([999.0], [8.0]))
>>> [round(float(x), 4) for x in abc]
[1001.0, 1.5032, 5.8184]
>>> out, lse = online.finish(abc)
>>> round(float(out), 4), round(float(lse), 4)
(3.8707, 1001.4076)

All at once, or grouped the other way, it is the same up to rounding; and a block whose scores are all -inf changes
nothing, as its summary (-inf, 0, 0) is the identity.

>>> [round(float(x), 4) for x in online.finish(online.summarize([1000.0, 1001, 999], [2.0, 4, 8]))]
[3.8707, 1001.4076]
>>> late = online.merge(online.summarize([1001.0], [4.0]), online.summarize([999.0], [8.0]))
>>> [round(float(x), 4) for x in online.finish(online.merge(a, late))]
[3.8707, 1001.4076]
>>> hidden = online.summarize([float("-inf")], [5.0])
>>> online.merge(abc, hidden) == abc
True

References
----------
Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import array_module, as_operand, score_dtype


class Summary(NamedTuple):
    """What a row needs to remember of a block of keys; NumPy or CuPy arrays.

    Attributes
    ----------
    m : array, (...)
        The largest score; -inf for none.
    l : array, (...)
        ``sum_j exp(s_j - m)``.
    u : array, (..., e), or (...) for scalar values
        ``sum_j exp(s_j - m) v_j``.
    """

    m: Any
    l: Any
    u: Any


def summarize(scores: Any, values: Any) -> Summary:
    """The summary of one block of keys.

    Parameters
    ----------
    scores : array_like, (..., n)
        Scores of the block; -inf where a key is hidden. (n,) is one row.
    values : array_like, (..., n, e) or (n,)
        As the right operand of ``np.matmul``. Finite: a hidden key's weight is 0, and 0 * NaN is NaN.

    Returns
    -------
    Summary
        In the score dtype: float32 for 16-bit and float32 operands, else float64.

    Examples
    --------
    >>> from cupyflash.online import summarize
    >>> summarize([[0.0, 0.0], [1.0, 1.0]], [[1.0], [3.0]]).u
    array([[4.],
           [4.]])
    """
    scores, values = as_operand(scores, "scores"), as_operand(values, "values")
    dtype = np.result_type(*(score_dtype(x.dtype) for x in (scores, values)))
    xp = array_module(scores)
    s, v = scores.astype(dtype), values.astype(dtype)
    m = s.max(axis=-1) if s.shape[-1] else xp.full(s.shape[:-1], -np.inf, dtype)
    with np.errstate(all="ignore"):
        weights = xp.exp(s - shift_of(xp, m)[..., None])
        u = weights @ v
    rows = m.shape if v.ndim == 1 else u.shape[:-1]
    return Summary(xp.broadcast_to(m, rows), xp.broadcast_to(weights.sum(axis=-1), rows), u)


def merge(a: Summary, b: Summary) -> Summary:
    """The summary of two disjoint sets of keys from each one's summary.

    Parameters
    ----------
    a, b : Summary
        Of the same rows.

    Returns
    -------
    Summary
        Associative and commutative up to rounding; (-inf, 0, 0) is the identity, exactly.

    Examples
    --------
    >>> from cupyflash.online import merge, summarize
    >>> float(merge(summarize([0.0], [1.0]), summarize([0.0], [3.0])).u)
    4.0
    """
    xp = array_module(a.m)
    m = xp.maximum(a.m, b.m)
    with np.errstate(all="ignore"):
        shift = shift_of(xp, m)
        in_a, in_b = xp.exp(a.m - shift), xp.exp(b.m - shift)
        l = a.l * in_a + b.l * in_b
        u = a.u * _per_row(in_a, a.u) + b.u * _per_row(in_b, b.u)
    return Summary(m, l, u)


def finish(summary: Summary) -> tuple[Any, Any]:
    """The attention output and log-sum-exp of everything that was summarised.

    Parameters
    ----------
    summary : Summary
        Of all keys.

    Returns
    -------
    out : array, the shape of u
        ``u / l``; 0 where no key was seen. NaN where a score was +inf.
    lse : array, the shape of m
        ``m + log(l)``, natural logarithm; -inf where no key was seen, +inf where a score was +inf.

    Examples
    --------
    >>> from cupyflash.online import finish, summarize
    >>> [float(x) for x in finish(summarize([float("-inf")], [7.0]))]
    [0.0, -inf]
    """
    m, l, u = summary
    xp = array_module(m)
    with np.errstate(all="ignore"):
        out = u / _per_row(xp.where(l == 0, 1, l), u)
        lse = xp.where(m == np.inf, m, m + xp.log(l))
    return out, lse


def shift_of(xp: Any, m: Any) -> Any:
    """m, or 0 where it is -inf: -inf - -inf would be NaN."""
    return xp.where(m == -np.inf, 0, m)


def _per_row(x: Any, u: Any) -> Any:
    """A value a row, shaped to multiply u."""
    return x[..., None] if u.ndim > x.ndim else x
