"""Problem: one call of attention, validated and normalised once; every later stage trusts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsInt

import numpy as np

from . import checks
from .arrays import DTYPE_NAMES, array_module, as_operand, is_device, score_dtype
from .dropout import Dropout
from .masks import Visibility

# Defaults in more than one signature, one object in all: a remembered call leaves out what is its default.
NO_DROPOUT, ORIGIN = 0.0, (0, 0, 0)


class Gradients(NamedTuple):
    """Gradients by argument, each in its argument's shape and dtype; None where one was not asked for.

    Attributes
    ----------
    q : array, (..., heads_q, m, d)
    k : array, (..., heads_kv, n, d)
    v : array, (..., heads_kv, n, e)
    bias, sinks, alibi_slopes : array
        Axes along which the argument was broadcast are summed, in the score dtype, and rounded once.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    sinks: Any = None
    alibi_slopes: Any = None


GRADIENT_NAMES = Gradients._fields


@dataclass(frozen=True, eq=False)
class Problem:
    """One call: operands with a heads axis (not broadcast over the leading axes), sizes, dtypes, options."""

    backend: str
    q: Any
    k: Any
    v: Any
    two_d: tuple[str, ...]  # which of q, k, v came without a heads axis
    lead: tuple[int, ...]
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    product_dtype: np.dtype
    score_dtype: np.dtype
    out_dtype: np.dtype
    lse_dtype: np.dtype
    scale: float
    softcap: float | None
    causal: bool
    window: tuple[int | None, int | None]
    left: int | None  # key j is seen where p - left <= j <= p + right, p = i + offset; causal is in right
    right: int | None
    query_offset: Any
    bottom_right: bool  # then the offset is kv_length - q_length, item by item, and query_offset is 0
    q_lengths: Any
    kv_lengths: Any
    mask: Any
    bias: Any
    sinks: Any
    alibi_slopes: Any
    dropout: Dropout | None
    precision: str | None
    deterministic: bool
    differentiable: tuple[str, ...]  # the arguments given as arrays that have a gradient

    @classmethod
    def create(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        causal: bool | str = False,
        query_offset: Any = None,
        window: Any = None,
        mask: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        softcap: float | None = None,
        sinks: Any = None,
        q_lengths: Any = None,
        kv_lengths: Any = None,
        dropout_p: float = NO_DROPOUT,
        dropout_seed: Any = None,
        dropout_offset: Any = 0,
        dropout_origin: Any = ORIGIN,
        precision: str | None = None,
        deterministic: bool = True,
        backend: str | None = None,
    ) -> Problem:
        """Check every rule of the contract and return the normalised call."""
        differentiable = ("q", "k", "v") + tuple(
            name
            for name, x in (("bias", bias), ("sinks", sinks), ("alibi_slopes", alibi_slopes))
            if x is not None and not checks.is_number(x)
        )
        q, k, v, two_d = _operands(q, k, v)
        lead, dims = _shapes(q, k, v)
        m, n, d, heads_q = dims["seqlen_q"], dims["seqlen_k"], dims["head_dim"], dims["heads_q"]
        head_shape, score_shape = (*lead, heads_q), (*lead, heads_q, m, n)
        q_lengths = None if q_lengths is None else checks.integers(q_lengths, "q_lengths", lead, 0, m, q)
        kv_lengths = None if kv_lengths is None else checks.integers(kv_lengths, "kv_lengths", lead, 0, n, q)
        left, right = window = checks.window_bounds(window)
        offset, bottom_right = checks.alignment(causal, query_offset, window, alibi_slopes, (m, n), lead, q)
        if causal:
            right = 0 if right is None else min(right, 0)
        if mask is not None:
            mask = checks.bool_mask(mask, score_shape, q)
        if bias is not None:
            bias = checks.float_array(bias, "bias", score_shape, "(..., heads_q, m, n)", q)
        if sinks is not None:
            sinks = checks.float_array(sinks, "sinks", head_shape, "(..., heads_q)", q)
        if alibi_slopes is not None:
            alibi_slopes = checks.float_array(alibi_slopes, "alibi_slopes", head_shape, "(..., heads_q)", q)
        score = score_dtype(q.dtype)
        scale = 1.0 / math.sqrt(d) if scale is None else checks.number(scale, "scale")
        scale = checks.in_range(scale, "scale", score)
        if softcap is not None:
            softcap = checks.in_range(checks.number(softcap, "softcap"), "softcap", score)
            if score.type(softcap) <= 0:
                raise ValueError(f"softcap must be > 0 in {score} (None for no cap), got {softcap}")
        for name, x in (("dropout_seed", dropout_seed), ("dropout_offset", dropout_offset)):
            if is_device(x) and is_device(q):
                checks.same_place(x, name, q)
        backend = checks.backend(backend, q)
        return cls(
            backend=backend,
            q=q,
            k=k,
            v=v,
            two_d=two_d,
            lead=lead,
            **dims,
            dtype=q.dtype,
            product_dtype=score if backend == "cpu" else q.dtype,
            score_dtype=score,
            out_dtype=q.dtype,
            lse_dtype=score,
            scale=scale,
            softcap=softcap,
            causal=bool(causal),
            window=window,
            left=left,
            right=right,
            query_offset=offset,
            bottom_right=bottom_right,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            mask=mask,
            bias=bias,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            dropout=Dropout.create(dropout_p, dropout_seed, dropout_offset, dropout_origin, head_shape),
            precision=checks.precision(precision, q.dtype),
            deterministic=checks.flag(deterministic, "deterministic"),
            differentiable=differentiable,
        )

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads_q // self.heads_kv

    @property
    def batch(self) -> int:
        """Number of items over the leading axes."""
        return math.prod(self.lead)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """(*lead, heads_q, m, n)."""
        return (*self.lead, self.heads_q, self.seqlen_q, self.seqlen_k)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(*lead, heads_q, m, e)."""
        return (*self.lead, self.heads_q, self.seqlen_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(*lead, heads_q, m)."""
        return (*self.lead, self.heads_q, self.seqlen_q)

    @property
    def squeeze(self) -> bool:
        """Whether q, k and v were all 2-D, so that results have no heads axis."""
        return len(self.two_d) == 3

    def full(self, name: str) -> Any:
        """The operand broadcast over the leading axes (and the scores' axes), a view; None if absent."""
        x = getattr(self, name)
        if x is None:
            return None
        heads = (*self.lead, self.heads_q)
        shapes = {"mask": self.score_shape, "bias": self.score_shape, "sinks": heads, "alibi_slopes": heads}
        shape = shapes.get(name, (*self.lead, *x.shape[-3:]))
        return array_module(x).broadcast_to(x, shape)

    def inputs(self) -> list[Any]:
        """Every array the call reads."""
        names = (*GRADIENT_NAMES, "mask", "q_lengths", "kv_lengths", "query_offset")
        return [x for name in names if hasattr(x := getattr(self, name), "strides")]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape in which the caller gave the argument, and wants its gradient."""
        shape = tuple(getattr(self, name).shape)
        return shape[1:] if name in self.two_d else shape

    def host_lengths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(q_lengths, kv_lengths, offsets) as int64 arrays of the leading axes' shape, clamped and resolved."""

        def host(x: Any, default: int) -> np.ndarray:
            x = default if x is None else x.get() if is_device(x) else x
            return np.broadcast_to(np.asarray(x, np.int64), self.lead)

        q_lengths = np.clip(host(self.q_lengths, self.seqlen_q), 0, self.seqlen_q)
        kv_lengths = np.clip(host(self.kv_lengths, self.seqlen_k), 0, self.seqlen_k)
        offsets = kv_lengths - q_lengths if self.bottom_right else host(self.query_offset, 0)
        return q_lengths, kv_lengths, offsets

    def visibility(self, q_length: SupportsInt, kv_length: SupportsInt, offset: SupportsInt) -> Visibility:
        """Who sees whom in a batch item of these lengths and offset, as `host_lengths` gives them."""
        return Visibility(self.left, self.right, int(offset), int(q_length), int(kv_length))


def _operands(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, tuple[str, ...]]:
    """q, k, v as arrays of one place and dtype with a heads axis, and the names of those that lacked it."""
    given = {name: as_operand(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    two_d = []
    for name, x in given.items():
        if x.ndim < 2:
            raise ValueError(
                f"{name} must have shape (..., heads, length, head_dim) or (length, head_dim), got {tuple(x.shape)}"
            )
        if x.dtype.name not in DTYPE_NAMES:
            raise TypeError(f"{name} must have one of the dtypes {', '.join(DTYPE_NAMES)}, got {x.dtype}")
        if is_device(x) and not x.dtype.isnative:
            raise TypeError(f"{name} must have native byte order on the device, got {x.dtype}")
        x = given[name] = checks.same_place(x, name, given["q"])
        if x.dtype != given["q"].dtype:
            raise TypeError(
                f"q, k and v must share one dtype: {name} is {x.dtype}, q is {given['q'].dtype}; "
                f"convert with {name}.astype(q.dtype)"
            )
        if x.ndim == 2:
            two_d.append(name)
            x = x[None]
        given[name] = x
    return given["q"], given["k"], given["v"], tuple(two_d)


def _shapes(q: Any, k: Any, v: Any) -> tuple[tuple[int, ...], dict[str, int]]:
    """The result's leading axes, and the sizes by Problem's field names."""
    heads_q, m, d = q.shape[-3:]
    heads_kv, n, d_k = k.shape[-3:]
    if d == 0:
        raise ValueError(f"q must have head_dim d >= 1, got shape {tuple(q.shape)}")
    if d_k != d:
        raise ValueError(
            f"k must have q's head_dim d = {d}: expected (..., heads_kv, n, {d}), got {tuple(k.shape)}"
        )
    if v.shape[-2] != n or v.shape[-3] != heads_kv:
        raise ValueError(
            f"v must have k's heads and length: expected (..., {heads_kv}, {n}, e), got {tuple(v.shape)}"
        )
    if heads_kv == 0 or heads_q == 0 or heads_q % heads_kv:
        raise ValueError(
            f"heads_q must be a positive multiple of heads_kv (query head h reads kv head h // (heads_q // "
            f"heads_kv)): q has {heads_q} heads, k and v have {heads_kv}"
        )
    try:
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"the leading axes of q, k and v must broadcast as in np.matmul: got {tuple(q.shape[:-3])}, "
            f"{tuple(k.shape[:-3])} and {tuple(v.shape[:-3])}"
        ) from None
    sizes = {"heads_q": heads_q, "heads_kv": heads_kv, "seqlen_q": m, "seqlen_k": n}
    return lead, sizes | {"head_dim": d, "head_dim_v": v.shape[-1]}
