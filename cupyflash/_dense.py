"""Attention with whole score matrices, written once for any arithmetic.

`reference` runs it in float64 or better, `testing.plain` in the precision of the kernels. Memory is O(m n); whole
score arrays are worked on in place. NumPy and CuPy.

A group of query heads that share one kv head is one matrix of ``group * m`` rows: the products need no copies of
k and v, and ``dS^T q`` sums over the group by itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import array_module, as_operand
from .problem import Gradients, Problem
from .request import wanted_gradients


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes of one dense computation."""

    score: np.dtype  # products, softmax and sums
    narrow: np.dtype | None  # what p and dS are rounded to before their products; None = not rounded
    result: Callable[[np.dtype], np.dtype]  # the dtype of a result whose argument has the dtype given


def attend(problem: Problem, arithmetic: Arithmetic, return_lse: bool) -> Any:
    """``out``, or ``(out, lse)``, as the caller of a public function gets them."""
    with np.errstate(all="ignore"):
        out, lse = _Dense(problem, arithmetic).forward()
        out = out.astype(arithmetic.result(problem.out_dtype))
        lse = lse.astype(arithmetic.result(problem.lse_dtype))
    if problem.squeeze:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def differentiate(
    problem: Problem, arithmetic: Arithmetic, dout: Any, out: Any, lse: Any, dlse: Any, delta: Any, wrt: Any
) -> Gradients:
    """Gradients in the shapes of the arguments; ``out`` and ``lse`` are computed where None."""
    wanted = wanted_gradients(problem, wrt)
    dense = _Dense(problem, arithmetic)
    dout = _cotangent(problem, dout, "dout", problem.out_shape)
    out = _cotangent(problem, out, "out", problem.out_shape)
    rows = {"lse": lse, "dlse": dlse, "delta": delta}
    lse, dlse, delta = (_cotangent(problem, x, name, problem.lse_shape) for name, x in rows.items())
    with np.errstate(all="ignore"):
        if lse is None or (out is None and delta is None):
            own_out, own_lse = dense.forward()
            if arithmetic.narrow is not None:
                own_out = own_out.astype(problem.out_dtype)
            out, lse = own_out if out is None else out, own_lse if lse is None else lse
        grads = dense.backward(dout, out, lse, dlse, delta, wanted)
        for name, grad in grads.items():
            argument = getattr(problem, name)
            summed = _sum_to(grad, argument.shape).reshape(problem.shape_of(name))
            grads[name] = summed.astype(arithmetic.result(argument.dtype))
    return Gradients(**grads)


def _cotangent(problem: Problem, x: Any, name: str, shape: tuple[int, ...]) -> Any:
    """An array shaped like a result of the forward, given the heads axis that 2-D results lack; None stays."""
    if x is None:
        return None
    x = as_operand(x, name)
    expected = shape[1:] if problem.squeeze else shape
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
    return x[None] if problem.squeeze else x


def _sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """The sum of ``x`` over the axes along which an array of ``shape`` was broadcast."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1 and x.shape[axis] != 1)
    return (x.sum(axis=axes, keepdims=True) if axes else x).reshape(shape)


class _Dense:
    """Operands of one call in the score dtype, what may not be read set to 0, and the two passes over them."""

    def __init__(self, problem: Problem, arithmetic: Arithmetic) -> None:
        self.problem = problem
        self.arithmetic = arithmetic
        self.xp = array_module(problem.q)
        self.q_lengths, self.kv_lengths, self.offsets = problem.host_lengths()
        self.rows_read = self._below(self.q_lengths, problem.seqlen_q, problem.q_lengths)
        self.keys_read = self._below(self.kv_lengths, problem.seqlen_k, problem.kv_lengths)
        self.scaled_q = self._fold(self._operand(problem.q, self.rows_read) * problem.scale)
        self.k = self._operand(problem.k, self.keys_read)
        self.v = self._operand(problem.v, self.keys_read)
        self.bias = self._option("bias")
        self.slopes = self._option("alibi_slopes", (..., None, None))

    def forward(self) -> tuple[Any, Any]:
        """(out, lse) in the score dtype."""
        xp = self.xp
        p, _ = self._scores()
        if self.hidden is not None:
            xp.copyto(p, -np.inf, where=self.hidden)
        top = p.max(axis=-1, keepdims=True) if p.shape[-1] else xp.full((*p.shape[:-1], 1), -np.inf, p.dtype)
        empty = top == -np.inf
        if self.sinks is not None:
            top = xp.maximum(top, self.sinks)
        shift = xp.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
        p -= shift
        xp.exp(p, out=p)
        total = p.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total += xp.exp(self.sinks - shift)
        lse = shift + xp.log(total)
        xp.copyto(lse, np.inf, where=top == np.inf)
        total = xp.where(total == 0, 1, total)
        if self.arithmetic.narrow is not None:
            p /= total
        out = self._unfold(self._fold(self._weights(p)) @ self.v)
        if self.arithmetic.narrow is None:  # the same quotient on fewer elements
            out /= total
        xp.copyto(out, 0, where=empty)
        return out, lse[..., 0]

    def backward(
        self, dout: Any, out: Any, lse: Any, dlse: Any, delta: Any, wanted: tuple[str, ...]
    ) -> dict[str, Any]:
        """The wanted gradients in the score dtype, broadcast axes not yet summed."""
        xp = self.xp
        dout = self._read(self._cast(dout), self.rows_read)
        lse = self._rows(lse, -np.inf)
        if delta is None:
            delta = (dout * self._read(self._cast(out), self.rows_read)).sum(axis=-1)
        change = -self._rows(delta, 0)
        if dlse is not None:
            change = change + self._rows(dlse, 0)
        # A row that saw no key: exp(s - inf) = 0 for its every score, also for -inf.
        normaliser = xp.where(lse == -np.inf, np.inf, lse)
        grads = {}
        if "sinks" in wanted:
            grads["sinks"] = (xp.exp(self.sinks - normaliser) * change).sum(axis=(-2, -1))
        if wanted == ("sinks",) or not wanted:
            return grads
        p, slope = self._scores()
        p -= normaliser
        xp.exp(p, out=p)
        if self.hidden is not None:
            xp.copyto(p, 0, where=self.hidden)
        dout = self._fold(dout)
        if "v" in wanted:
            weights = self._fold(self._weights(p))
            grads["v"] = self._read(weights.swapaxes(-1, -2) @ dout, self.keys_read)
        ds = self._unfold(dout @ self.v.swapaxes(-1, -2))
        if self.keep is not None:
            self._drop(ds)
        ds += change
        ds *= p
        if self.hidden is not None:
            xp.copyto(ds, 0, where=self.hidden)
        rounded = self._round(ds)
        if "bias" in wanted:
            grads["bias"] = rounded
        if "alibi_slopes" in wanted:
            grads["alibi_slopes"] = -(rounded * self.distance).sum(axis=(-2, -1))
        da = self._fold(rounded if slope is None else self._round(ds * slope))
        if "q" in wanted:
            dq = self._unfold(da @ self.k)
            dq *= self.problem.scale
            xp.copyto(dq, 0, where=lse == -np.inf)
            grads["q"] = dq
        if "k" in wanted:
            grads["k"] = self._read(da.swapaxes(-1, -2) @ self.scaled_q, self.keys_read)
        return grads

    def _scores(self) -> tuple[Any, Any]:
        """Scores before anything is hidden, and the softcap's derivative (None without one)."""
        s = self._unfold(self.scaled_q @ self.k.swapaxes(-1, -2))
        slope = None
        if self.problem.softcap is not None:
            s /= self.problem.softcap
            self.xp.tanh(s, out=s)
            slope = 1 - s * s
            s *= self.problem.softcap
        if self.bias is not None:
            s += self.bias
        if self.slopes is not None:
            s -= self.slopes * self.distance
        return s, slope

    def _weights(self, p: Any) -> Any:
        """What multiplies v: p after dropout, rounded."""
        return self._round(p if self.keep is None else self._drop(p.copy()))

    def _drop(self, x: Any) -> Any:
        """``x`` times the dropout factor, in place."""
        x *= self.problem.dropout.scale  # type: ignore[union-attr]
        self.xp.copyto(x, 0, where=~self.keep)
        return x

    def _round(self, x: Any) -> Any:
        narrow = self.arithmetic.narrow
        return x if narrow is None else x.astype(narrow).astype(self.arithmetic.score)

    @cached_property
    def hidden(self) -> Any:
        """True where a key may not be seen, broadcastable to the scores; None where all are."""
        problem = self.problem
        parts = [] if problem.mask is None else [~problem.mask]
        if self.bias is not None:
            parts.append(self.bias == -np.inf)
        bounds = (problem.left, problem.right, self.rows_read, self.keys_read)
        if any(x is not None for x in bounds):
            parts.append(~self._positions())
        return functools.reduce(operator.or_, parts) if parts else None

    def _positions(self) -> Any:
        """What position allows in every batch item, (*lead, 1, m, n) or (m, n) where all items are alike."""
        problem = self.problem
        rows, cols = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
        items = np.stack([x.reshape(-1) for x in (self.q_lengths, self.kv_lengths, self.offsets)], axis=1)
        kinds, index = np.unique(items, axis=0, return_inverse=True)
        masks = [problem.visibility(*kind).allowed(rows, cols) for kind in kinds]
        if len(masks) == 1:
            return self.xp.asarray(masks[0])
        shape = (*problem.lead, 1, len(rows), len(cols))
        each = np.stack(masks)[index.reshape(-1)] if masks else np.empty(shape, bool)
        return self.xp.asarray(each.reshape(shape))

    @cached_property
    def distance(self) -> Any:
        """|i + offset - j| for ALiBi, (*lead, 1, m, n)."""
        offsets = self.offsets.reshape(*self.offsets.shape, 1, 1, 1)
        relative = np.arange(self.problem.seqlen_q)[:, None] - np.arange(self.problem.seqlen_k)
        return self.xp.asarray(np.abs(offsets + relative).astype(self.arithmetic.score))

    @cached_property
    def keep(self) -> Any:
        """The dropout mask, or None."""
        *heads, m, n = self.problem.score_shape
        dropout = self.problem.dropout
        return None if dropout is None else dropout.keep_matrices(tuple(heads), m, n, self.xp)

    @cached_property
    def sinks(self) -> Any:
        """(..., heads_q, m, 1), -inf at rows that do not exist; None without sinks."""
        sinks = self._option("sinks", (..., None, None))
        if sinks is None or self.rows_read is None:
            return sinks
        return self.xp.where(self.rows_read, sinks, -np.inf)

    def _option(self, name: str, index: Any = ...) -> Any:
        """bias, sinks or slopes: by way of the call's score dtype, to which the contract converts them."""
        x = getattr(self.problem, name)
        if x is None:
            return None
        with np.errstate(over="ignore"):
            return self._cast(x.astype(self.problem.score_dtype, copy=False))[index]

    def _cast(self, x: Any) -> Any:
        return x.astype(self.arithmetic.score, copy=False)

    def _below(self, lengths: np.ndarray, size: int, given: Any) -> Any:
        """True at positions below the length, (*lead, 1, size, 1); None where no lengths were given."""
        if given is None:
            return None
        return self.xp.asarray(np.arange(size)[:, None] < lengths.reshape(*lengths.shape, 1, 1, 1))

    def _read(self, x: Any, read: Any) -> Any:
        """``x`` with 0 wherever it does not exist."""
        return x if read is None else self.xp.where(read, x, 0)

    def _rows(self, x: Any, fill: float) -> Any:
        """A value a row as (..., m, 1) in the score dtype, ``fill`` at rows that do not exist."""
        x = self._cast(x)[..., None]
        return x if self.rows_read is None else self.xp.where(self.rows_read, x, fill)

    def _operand(self, x: Any, read: Any) -> Any:
        x = self._read(self._cast(x), read)
        return self.xp.broadcast_to(x, (*self.problem.lead, *x.shape[-3:]))

    def _fold(self, x: Any) -> Any:
        """(..., heads_q, m, w) as (..., heads_kv, group * m, w)."""
        rows = self.problem.group * self.problem.seqlen_q
        return x.reshape(*self.problem.lead, self.problem.heads_kv, rows, x.shape[-1])

    def _unfold(self, x: Any) -> Any:
        return x.reshape(*self.problem.lead, self.problem.heads_q, self.problem.seqlen_q, x.shape[-1])
