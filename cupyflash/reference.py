"""The specification: direct attention in float64, forward and backward, with O(m n) memory.

Every option of `cupyflash.attention` is taken; results are float64 whatever the inputs. For float64 inputs the
arithmetic is NumPy's ``longdouble`` where that is wider (x86, most Linux platforms), so that the rounding errors of a
float64 computation can be told from the reference's own. That runs on the host, also for CuPy arrays, and without
BLAS: for small shapes. Everything else runs where its arrays are, in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ._dense import Arithmetic, attend, differentiate
from .arrays import array_module, is_device
from .problem import Gradients, Problem

_FLOAT64 = np.dtype(np.float64)
_LONG_IS_WIDER = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


def attention(q: Any, k: Any, v: Any, /, *, return_lse: bool = False, **options: Any) -> Any:
    """Direct attention in float64.

    Parameters
    ----------
    q, k, v : array_like
        As in `cupyflash.attention`; NumPy or CuPy.
    return_lse : bool
        Also return the log-sum-exp.
    **options
        As in `cupyflash.attention`, without out and workspace. precision and deterministic change nothing.

    Returns
    -------
    out : float64 array, (..., heads_q, m, e)
        Exact up to float64 rounding for the inputs as they are stored; bias, sinks and slopes as converted to the
        score dtype.
    lse : float64 array, (..., heads_q, m)
        With return_lse; natural logarithm.

    Raises
    ------
    ValueError, TypeError
        As `cupyflash.attention`.

    Notes
    -----
    ``s = softcap(scale * q @ k^T) + bias + alibi``, -inf where not allowed; ``lse = log(sum_j exp(s))`` with the
    sink's term; ``out = (r * exp(s - lse)) @ v`` with the dropout factor r.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reference
    >>> scores, values = np.array([[1000.0], [1001], [999]]), np.array([[2.0], [4], [8]])
    >>> reference.attention(np.ones((1, 1)), scores, values).round(4)
    array([[3.8707]])
    """
    problem = Problem.create(q, k, v, **options)
    arithmetic = _arithmetic(problem)
    if not _leaves_device(problem, arithmetic):
        return attend(problem, arithmetic, return_lse)
    xp = array_module(problem.q)
    result = attend(_on_host(problem), arithmetic, return_lse)
    return tuple(map(xp.asarray, result)) if return_lse else xp.asarray(result)


def attention_backward(
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
    """Gradients of `attention` in float64.

    Parameters
    ----------
    dout : array, (..., heads_q, m, e)
        Cotangent of out.
    q, k, v : array_like
        As in `attention`.
    out, lse : array, optional
        Results of the forward, possibly those of a larger key set; computed where None.
    dlse, delta : array, (..., heads_q, m), optional
        Cotangent of lse; ``sum_e dout * out`` instead of forming it from out.
    wrt : sequence of str, optional
        Names of the wanted gradients; default: of every differentiable argument given.
    **options
        As in `attention`.

    Returns
    -------
    Gradients
        float64, each in its argument's shape, broadcast axes summed; None where not wanted.

    Raises
    ------
    ValueError, TypeError
        As `cupyflash.attention_backward`.

    Notes
    -----
    ``dP = r * (dout @ v^T)``, ``dS = p * (dP - delta + dlse)``, ``dA = dS * (1 - (c / softcap)^2)``;
    ``dq = scale * dA @ k``, ``dk = scale * dA^T @ q``, ``dv = (r * p)^T @ dout``, ``dbias = dS``,
    ``dslope = -sum |i + offset - j| dS``, ``dsink = sum_i exp(sink - lse) (dlse - delta)``.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reference
    >>> x = np.eye(2)
    >>> reference.attention_backward(np.ones((2, 2)), x, x, x, wrt="v").v.round(3)
    array([[1., 1.],
           [1., 1.]])
    """
    problem = Problem.create(q, k, v, **options)
    arithmetic = _arithmetic(problem)
    if not _leaves_device(problem, arithmetic):
        return differentiate(problem, arithmetic, dout, out, lse, dlse, delta, wrt)
    xp = array_module(problem.q)
    dout, out, lse, dlse, delta = map(_host, (dout, out, lse, dlse, delta))
    grads = differentiate(_on_host(problem), arithmetic, dout, out, lse, dlse, delta, wrt)
    return Gradients(*(None if grad is None else xp.asarray(grad) for grad in grads))


def _arithmetic(problem: Problem) -> Arithmetic:
    wide = _LONG_IS_WIDER and problem.dtype == _FLOAT64
    return Arithmetic(
        score=np.dtype(np.longdouble) if wide else _FLOAT64, narrow=None, result=lambda _: _FLOAT64
    )


def _leaves_device(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Whether CuPy lacks the arithmetic's dtype."""
    return is_device(problem.q) and arithmetic.score != _FLOAT64


def _on_host(problem: Problem) -> Problem:
    names = ("q", "k", "v", "mask", "bias", "sinks", "alibi_slopes")
    return dataclasses.replace(problem, **{name: _host(getattr(problem, name)) for name in names})


def _host(x: Any) -> Any:
    return x.get() if is_device(x) else x
