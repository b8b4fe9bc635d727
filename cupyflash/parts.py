"""Attention over parts of the keys, joined: `cupyflash.merge` and its vjp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import DTYPE_NAMES, array_module, as_operand, native, score_dtype
from .online import shift_of


def merge(*parts: tuple[Any, Any]) -> tuple[Any, Any]:
    """Attention over the union of disjoint key sets from each set's own (out, lse).

    Parameters
    ----------
    *parts : (out, lse)
        out (..., m, e) and lse (..., m) of each key set, NumPy or CuPy, of equal shapes. Sinks go to one part only.

    Returns
    -------
    out, lse : array
        As if all keys had been given at once, up to rounding. Rows of a part with lse -inf are not read; a row
        with one part left comes back bit for bit.

    Raises
    ------
    ValueError, TypeError
        No part; shapes or dtypes that differ.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 6, 4))
    >>> halves = [cupyflash.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 3), slice(3, 6))]
    >>> bool(np.allclose(cupyflash.merge(*halves)[0], cupyflash.attention(q, k, v)))
    True
    """
    outs, lses = _checked(parts)
    xp, score = array_module(outs[0]), lses[0].dtype
    present = [lse != -np.inf for lse in lses]
    alone = sum(rows.astype(np.int64) for rows in present) == 1
    top = lses[0]
    for lse in lses[1:]:
        top = xp.maximum(top, lse)
    with np.errstate(all="ignore"):
        weights = [xp.exp(lse - shift_of(xp, top)) for lse in lses]
        total = sum(weights)
        merged_lse = xp.where(top == np.inf, top, top + xp.log(total))
        merged = xp.zeros(outs[0].shape, score)
        for out, weight, rows in zip(outs, weights, present):
            share = (weight / total)[..., None]
            merged += xp.where(rows[..., None], share * out.astype(score), 0)
        result = merged.astype(outs[0].dtype)
    for out, lse, rows in zip(outs, lses, present):
        xp.copyto(result, out, where=(rows & alone)[..., None])
        xp.copyto(merged_lse, lse, where=rows & alone)
    return result, merged_lse


def merge_vjp(
    parts: Sequence[tuple[Any, Any]], /
) -> tuple[tuple[Any, Any], Callable[..., list[tuple[Any, Any]]]]:
    """`merge`, and the function that gives each part's cotangents.

    Parameters
    ----------
    parts : sequence of (out, lse)
        As in `merge`.

    Returns
    -------
    (out, lse) : tuple of arrays
        As `merge`.
    vjp : callable
        ``vjp(dout, dlse=None) -> [(dout_s, dlse_s), ...]``, one pair a part.

    Raises
    ------
    ValueError, TypeError
        As `merge`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> part = (np.ones((2, 3)), np.zeros(2))
    >>> (out, lse), vjp = cupyflash.merge_vjp([part, part])
    >>> vjp(np.ones((2, 3)))[0][0]
    array([[0.5, 0.5, 0.5],
           [0.5, 0.5, 0.5]])
    """
    outs, lses = _checked(parts)
    merged, merged_lse = merge(*parts)
    xp, score = array_module(merged), merged_lse.dtype

    def vjp(dout: Any, dlse: Any = None) -> list[tuple[Any, Any]]:
        given = _cotangent(dout, "dout", merged).astype(score)
        change = 0 if dlse is None else _cotangent(dlse, "dlse", merged_lse).astype(score)
        grads = []
        with np.errstate(all="ignore"):
            for out, lse in zip(outs, lses):
                rows = lse != -np.inf
                weight = xp.where(rows, xp.exp(lse - merged_lse), 0)
                away = (given * (out.astype(score) - merged.astype(score))).sum(axis=-1)
                grads.append(
                    (
                        xp.where(rows[..., None], weight[..., None] * given, 0).astype(out.dtype),
                        xp.where(rows, weight * (away + change), 0),
                    )
                )
        return grads

    return (merged, merged_lse), vjp


def _checked(parts: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """The parts' outs and lses as arrays of one library, shape and dtype."""
    if len(parts) == 0:
        raise ValueError("merge needs at least one part (out, lse), got none")
    outs: list[Any] = []
    lses: list[Any] = []
    for number, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise TypeError(f"part {number} must be a pair (out, lse), got {type(part).__name__}")
        out = native(as_operand(part[0], f"part {number}'s out"))
        lse = native(as_operand(part[1], f"part {number}'s lse"))
        first = outs[0] if outs else out
        if out.dtype.name not in DTYPE_NAMES or out.dtype != first.dtype:
            expected = first.dtype if outs else ", ".join(DTYPE_NAMES)
            raise TypeError(f"part {number}'s out must have dtype {expected}, got {out.dtype}")
        if lse.dtype != score_dtype(out.dtype):
            raise TypeError(
                f"part {number}'s lse must have dtype {score_dtype(out.dtype)} (the score dtype of "
                f"{out.dtype}), got {lse.dtype}"
            )
        if out.ndim < 1 or out.shape != first.shape:
            expected = first.shape if outs else "(..., m, e)"
            raise ValueError(f"part {number}'s out must have shape {expected}, got {out.shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"part {number}'s lse must have shape {out.shape[:-1]}, got {lse.shape}")
        if array_module(out) is not array_module(first) or array_module(lse) is not array_module(first):
            raise TypeError(f"part {number} must be {array_module(first).__name__} arrays as part 0's out is")
        outs.append(out)
        lses.append(lse)
    return outs, lses


def _cotangent(x: Any, name: str, like: Any) -> Any:
    x = native(as_operand(x, name))
    if x.dtype.name not in DTYPE_NAMES:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(DTYPE_NAMES)}, got {x.dtype}")
    if x.shape != like.shape:
        raise ValueError(f"{name} must have shape {like.shape}, got {tuple(x.shape)}")
    return x
