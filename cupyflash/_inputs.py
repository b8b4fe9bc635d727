"""Random operands in many memory layouts, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import array_module, is_device

LAYOUTS = ("contiguous", "heads_inside", "transposed", "sliced", "stepped", "reversed", "offset", "read_only")


def random_inputs(
    rng: np.random.Generator,
    *,
    lead: tuple[int, ...] = (),
    heads_q: int = 1,
    heads_kv: int | None = None,
    seqlen_q: int = 8,
    seqlen_k: int | None = None,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    dtype: Any = "float32",
    spread: float = 1.0,
    layouts: str | Sequence[str] = "contiguous",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Normally distributed q, k, v and dout.

    Parameters
    ----------
    rng : numpy.random.Generator
        Where the numbers come from.
    lead : tuple of int
        Leading axes of all four.
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v : int
        Sizes; those of k and v default to q's.
    dtype : dtype or str
        "bfloat16" needs ``ml_dtypes``.
    spread : float
        Standard deviation of q and k; the scores' is its square.
    layouts : str or four of them
        How the arrays lie in memory, see `lay_out`.

    Returns
    -------
    q, k, v, dout : ndarray
        (*lead, heads_q, m, d), (*lead, heads_kv, n, d), (*lead, heads_kv, n, e), (*lead, heads_q, m, e).

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.testing import random_inputs
    >>> [x.shape for x in random_inputs(np.random.default_rng(0), heads_q=4, heads_kv=2, seqlen_k=5)]
    [(4, 8, 8), (2, 5, 8), (2, 5, 8), (4, 8, 8)]
    """
    heads_kv = heads_q if heads_kv is None else heads_kv
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    shapes = (
        (heads_q, seqlen_q, head_dim),
        (heads_kv, seqlen_k, head_dim),
        (heads_kv, seqlen_k, head_dim_v),
        (heads_q, seqlen_q, head_dim_v),
    )
    names = (layouts,) * 4 if isinstance(layouts, str) else tuple(layouts)
    q, k, v, dout = (
        lay_out((scale * rng.standard_normal((*lead, *shape))).astype(dtype), layout)
        for shape, scale, layout in zip(shapes, (spread, spread, 1.0, 1.0), names, strict=True)
    )
    return q, k, v, dout


def lay_out(x: Any, layout: str) -> Any:
    """The same values in another memory layout; memory that is not part of the array holds NaN.

    Parameters
    ----------
    x : array, (..., length, head_dim), two or more axes
        Floating point; NumPy or CuPy.
    layout : str
        One of `LAYOUTS`: "contiguous"; "heads_inside" (the last axis but two moved inside the length, as
        (batch, length, heads, head_dim) arrays have it); "transposed" (length innermost); "sliced" (the middle of
        a wider and longer buffer); "stepped" (every second element of both axes); "reversed" (negative strides in
        both axes); "offset" (starts one element into its memory); "read_only" (NumPy alone can be).

    Returns
    -------
    array
        Equal to x.

    Raises
    ------
    ValueError
        An unknown layout.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.testing import lay_out
    >>> lay_out(np.zeros((2, 3, 4), np.float32), "heads_inside").strides
    (16, 32, 4)
    """
    xp = array_module(x)
    *lead, rows, cols = x.shape
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "heads_inside" and x.ndim > 2:
        view = xp.empty((*lead[:-1], rows, lead[-1], cols), x.dtype).swapaxes(-2, -3)
    elif layout == "transposed":
        view = xp.empty((*lead, cols, rows), x.dtype).swapaxes(-1, -2)
    elif layout == "sliced":
        view = xp.full((*lead, rows + 3, cols + 5), np.nan, x.dtype)[..., 1 : rows + 1, 2 : cols + 2]
    elif layout == "stepped":
        view = xp.full((*lead, 2 * rows, 2 * cols), np.nan, x.dtype)[..., ::2, ::2]
    elif layout == "reversed":
        view = xp.empty(x.shape, x.dtype)[..., ::-1, ::-1]
    elif layout == "offset":
        view = xp.full(x.size + 1, np.nan, x.dtype)[1:].reshape(x.shape)
    else:
        view = xp.empty(x.shape, x.dtype)
    view[...] = x
    if layout == "read_only" and not is_device(view):
        view.flags.writeable = False
    return view
