"""Error bounds relative to a plain computation of the same precision, the assertions on them, and random inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._dense import Arithmetic, attend, differentiate
from ._inputs import LAYOUTS, lay_out, random_inputs
from .arrays import is_device
from .problem import Gradients, Problem

__all__ = [
    "LAYOUTS",
    "Errors",
    "assert_close",
    "assert_lse_close",
    "error_bound",
    "errors",
    "lay_out",
    "plain",
    "plain_backward",
    "random_inputs",
]


def plain(q: Any, k: Any, v: Any, /, *, return_lse: bool = False, **options: Any) -> Any:
    """Attention with the score matrix in memory, in the kernels' precision: what error bounds refer to.

    Parameters
    ----------
    q, k, v, return_lse, **options
        As in `cupyflash.reference.attention`.

    Returns
    -------
    out : array, (..., heads_q, m, e)
        In q's dtype, rounded once.
    lse : array, (..., heads_q, m)
        With return_lse; in the score dtype.

    Raises
    ------
    ValueError, TypeError
        As `cupyflash.attention`.

    Notes
    -----
    Products, softmax and sums in the score dtype (float32; float64 for float64). For 16-bit inputs p is rounded to
    the input dtype before it multiplies v. Whole matrices, worked on in place: also the baseline for speed.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import testing
    >>> x = np.eye(2, dtype=np.float16)
    >>> testing.plain(x, x, x).dtype
    dtype('float16')
    """
    problem = Problem.create(q, k, v, **options)
    return attend(problem, _arithmetic(problem), return_lse)


def plain_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    /,
    out: Any = None,
    lse: Any = None,
    *,
    dlse: Any = None,
    delta: Any = None,
    wrt: Any = None,
    **options: Any,
) -> Gradients:
    """Gradients of `plain` by the same plain computation.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, delta, wrt, **options
        As in `cupyflash.reference.attention_backward`.

    Returns
    -------
    Gradients
        Each in its argument's shape and dtype, summed in the score dtype and rounded once.

    Raises
    ------
    ValueError, TypeError
        As `cupyflash.attention_backward`.

    Notes
    -----
    p is recomputed from lse as stored in the score dtype. For 16-bit inputs p and dS are rounded to the input dtype
    before their products.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import testing
    >>> x = np.eye(2, dtype=np.float32)
    >>> testing.plain_backward(np.ones_like(x), x, x, x, wrt="v").v.dtype
    dtype('float32')
    """
    problem = Problem.create(q, k, v, **options)
    return differentiate(problem, _arithmetic(problem), dout, out, lse, dlse, delta, wrt)


class Errors(NamedTuple):
    """The largest and the root mean square difference from a reference, or bounds on them."""

    max: float
    rms: float


def errors(actual: Any, reference: Any) -> Errors:
    """Differences from the reference where both are finite.

    Parameters
    ----------
    actual, reference : array
        Of one shape, any dtypes, NumPy or CuPy.

    Returns
    -------
    Errors
        (max, rms); zeros for empty arrays.

    Examples
    --------
    >>> from cupyflash.testing import errors
    >>> errors([1.0, 2.0], [1.0, 4.0]).max
    2.0
    """
    both = np.isfinite(_host(actual)) & np.isfinite(_host(reference))
    difference = _differences(actual, reference)[both]
    if difference.size == 0:
        return Errors(0.0, 0.0)
    return Errors(float(difference.max()), float(np.sqrt(np.mean(difference**2))))


def error_bound(plain: Any, reference: Any, dtype: Any = None) -> Errors:
    """What out or a gradient may differ from the reference.

    Parameters
    ----------
    plain, reference : array
        The plain computation's result and the float64 reference.
    dtype : dtype, optional
        Of the result under test; default plain's.

    Returns
    -------
    Errors
        Bounds on max and rms: twice plain's own plus one rounding unit (the spacing of dtype) at the largest
        reference value.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.testing import error_bound
    >>> error_bound(np.float16([1.0, 2.0]), [1.0, 2.0]).max == 2.0**-9
    True
    """
    plains = errors(plain, reference)
    values = np.abs(_host(reference))
    largest = float(values.max(initial=0.0, where=np.isfinite(values)))
    unit = _spacing(largest, np.dtype(dtype if dtype is not None else plain.dtype))
    return Errors(2 * plains.max + unit, 2 * plains.rms + unit)


def assert_close(actual: Any, plain: Any, reference: Any, what: str, dtype: Any = None) -> None:
    """Assert that out or a gradient is as exact as the plain computation (`error_bound`).

    Parameters
    ----------
    actual, plain, reference : array
        The result under test, that of `plain` or `plain_backward`, and the reference's; NumPy or CuPy.
    what : str
        A label for the failure's text: which result, of which case.
    dtype : dtype, optional
        Sets the rounding unit; default plain's.

    Raises
    ------
    AssertionError
        Shapes differ; NaN or infinities stand elsewhere than in the reference (checked first, also for ``plain``);
        or the bound is exceeded. The text has the worst index and the values there.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.testing import assert_close
    >>> x = np.float32([1.0, np.nan])
    >>> assert_close(x, x, x.astype(np.float64), "the same")
    """
    _assert_same_special(plain, reference, f"{what} (plain)")
    _assert_same_special(actual, reference, what)
    bound, found = error_bound(plain, reference, dtype), errors(actual, reference)
    # not <=, so that a NaN would fail
    if not (found.max <= bound.max and found.rms <= bound.rms):
        raise AssertionError(
            f"{what}: max error {found.max:.3e} (bound {bound.max:.3e}), rms {found.rms:.3e} "
            f"(bound {bound.rms:.3e}); {_worst(actual, plain, reference, _differences(actual, reference))}"
        )


def assert_lse_close(actual: Any, plain: Any, reference: Any, what: str) -> None:
    """Assert that lse is as exact as the plain computation's.

    Parameters
    ----------
    actual, plain, reference, what
        As in `assert_close`.

    Raises
    ------
    AssertionError
        As `assert_close`. The bound is, element by element, twice plain's largest error plus
        ``2**-22 max(1, |lse|)`` (float64: ``2**-50``).

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.testing import assert_lse_close
    >>> assert_lse_close(np.float32([1, -np.inf]), np.float32([1, -np.inf]), [1 + 1e-7, -np.inf], "lse")
    """
    _assert_same_special(plain, reference, f"{what} (plain)")
    _assert_same_special(actual, reference, what)
    values = np.abs(_host(reference))
    unit = 2.0**-50 if plain.dtype == np.float64 else 2.0**-22
    bound = 2 * errors(plain, reference).max + unit * np.maximum(
        1.0, np.where(np.isfinite(values), values, 0)
    )
    excess = _differences(actual, reference) - bound
    if not (excess <= 0).all():
        raise AssertionError(
            f"{what}: {int((excess > 0).sum())} of {excess.size} values of lse exceed 2 x plain's largest error + "
            f"{unit:.1e} max(1, |lse|); {_worst(actual, plain, reference, excess)}"
        )


def _arithmetic(problem: Problem) -> Arithmetic:
    narrow = problem.dtype if problem.dtype.itemsize == 2 else None
    return Arithmetic(score=problem.score_dtype, narrow=narrow, result=lambda dtype: dtype)


def _host(x: Any) -> np.ndarray:
    """float64 values on the host."""
    return np.asarray(x.get() if is_device(x) else x).astype(np.float64)


def _spacing(x: float, dtype: np.dtype) -> float:
    """The distance from x >= 0 to the next number of the dtype, bfloat16 included."""
    if dtype.name == "bfloat16":
        import ml_dtypes

        info: Any = ml_dtypes.finfo(dtype)
    else:
        info = np.finfo(dtype)
    exponent = int(np.frexp(x)[1]) - 1 if x > 0 else int(info.minexp)
    return float(np.ldexp(float(info.eps), max(exponent, int(info.minexp))))


def _assert_same_special(actual: Any, reference: Any, what: str) -> None:
    """NaN and infinities must stand where the reference has them."""
    x, y = _host(actual), _host(reference)
    if x.shape != y.shape:
        raise AssertionError(f"{what}: shape {x.shape}, expected {y.shape}")
    same = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.isfinite(x) & np.isfinite(y))
    if not same.all():
        index = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: NaN or infinities differ from the reference's at {int((~same).sum())} of {x.size} values; "
            f"first at {index}: {x[index]}, expected {y[index]}"
        )


def _differences(actual: Any, reference: Any) -> np.ndarray:
    """|actual - reference| where both are finite, else 0."""
    x, y = _host(actual), _host(reference)
    both = np.isfinite(x) & np.isfinite(y)
    return np.abs(np.where(both, x, 0) - np.where(both, y, 0))


def _worst(actual: Any, plain: Any, reference: Any, excess: np.ndarray) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
    x, p, y = (float(_host(values)[index]) for values in (actual, plain, reference))
    return f"worst at {index}: {x!r}, expected {y!r}, plain {p!r}"
