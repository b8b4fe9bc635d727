"""The public functions that run attention or plan it: signatures and docstrings; `dispatch` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import dispatch
from .cost import Plan
from .problem import NO_DROPOUT, ORIGIN, Gradients


def attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    query_offset: Any = None,
    window: tuple[int | None, int | None] | None = None,
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
    return_lse: bool = False,
    out: Any = None,
    workspace: Any = None,
    backend: str | None = None,
) -> Any:
    """Exact softmax attention, tiled, without a score matrix in memory.

    A generalised ufunc ``(m,d),(n,d),(n,e)->(m,e)`` over arrays ``(..., heads, length, head_dim)``.
    NumPy arrays run on the CPU, CuPy arrays on their device and CuPy's current stream.

    Parameters
    ----------
    q : array_like, (..., heads_q, m, d)
        Queries. float16, bfloat16 (``ml_dtypes``), float32 or float64; q, k and v share one dtype. 16-bit and
        float32 compute scores and sums in float32, float64 in float64 (the *score dtype*). 2-D arrays are one
        head. Any strides; leading axes of q, k and v broadcast as in ``np.matmul``.
    k : array_like, (..., heads_kv, n, d)
        Keys. heads_q is a multiple of heads_kv; query head h reads kv head ``h // (heads_q // heads_kv)``.
    v : array_like, (..., heads_kv, n, e)
        Values; e may differ from d. A non-finite value inside the lengths may spread through a zero weight.
    scale : float, optional
        Multiplies ``q @ k^T``; any number that is finite in the score dtype. Default ``1 / sqrt(d)``.
    causal : bool or {"top_left", "bottom_right"}
        Query i sees key j only where ``j <= i + query_offset``. "top_left" sets the offset to 0,
        "bottom_right" to kv length - q length (per batch item where lengths are given).
    query_offset : int or integer array over the leading axes, optional
        Where query 0 stands among the keys. Needed when an option speaks of positions (``causal=True``, a window,
        ALiBi) and m != n.
    window : (left, right), optional
        With ``p = i + query_offset``: key j is seen where ``p - left <= j <= p + right``, both ends included.
        None is no bound, 0 a real one.
    mask : bool array, optional
        True = attend. Broadcasts to (..., heads_q, m, n).
    bias : float array, optional
        Added to the scores after the softcap. Broadcasts to (..., heads_q, m, n); -inf means not allowed.
    alibi_slopes : float array, optional
        Adds ``-slope * |i + query_offset - j|``. Broadcasts to (..., heads_q).
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; > 0.
    sinks : float array, optional
        A logit a head that takes probability and gives no value. Broadcasts to (..., heads_q).
    q_lengths, kv_lengths : int or integer array over the leading axes, optional
        Rows at or past ``q_lengths`` give 0 (lse -inf); keys at or past ``kv_lengths`` are never read. Host values
        are checked, device values are clamped by the kernels and never read by the host.
    dropout_p : float
        Probability of dropping a weight, in [0, 1]; honoured to 2**-16, kept weights are scaled so that the
        expectation is exact. Rows then no longer sum to 1; lse is that of the undropped row.
    dropout_seed : int or 0-d device array
        Required when dropout_p > 0; in [0, 2**64). The mask is `dropout_mask` of these arguments.
    dropout_offset : int or 0-d device array
        In [0, 2**32): another mask of the same seed.
    dropout_origin : (t0, i0, j0)
        What to add to the score matrix's, row's and column's numbers: a shard's place in a larger problem. t0 may be
        an integer array on the host that broadcasts to (..., heads_q).
    precision : {"ieee", "tf32x3", "tf32"}, optional
        For float32: FMA; three TF32 products (six of bfloat16 on Hopper, from 256 queries on), whose error is about
        that of FMA; one TF32 product. Default: "tf32x3" on tensor cores (compute capability 8.0 and newer, head dims
        up to 128), else "ieee". The CPU takes all and computes "ieee".
    deterministic : bool
        The same bits from run to run (default). False allows faster unordered sums.
    return_lse : bool
        Also return the log-sum-exp of each row of scores.
    out : array or (out, lse), optional
        Where to write (the pair with return_lse); float32 is allowed for 16-bit inputs.
    workspace : uint8 array, optional
        Device scratch of at least ``plan(...).workspace_bytes``; with it and ``out`` a call allocates nothing but the
        copies in ``plan(...).copied_bytes``. Captured in a CUDA graph without it, a call keeps its own scratch for
        good. The CPU backend does not need it.
    backend : {"cpu", "cuda"}, optional
        "cuda" with NumPy arrays copies there and back. Default: where the arrays are.

    Returns
    -------
    out : array, (..., heads_q, m, e)
        In q's dtype and memory order. Rows that see no key are 0.
    lse : array, (..., heads_q, m)
        With return_lse: natural logarithm, in the score dtype; -inf (or the sink) where no key is seen.

    Raises
    ------
    ValueError
        Shapes, ranges, devices, or an alignment that would have to be guessed.
    TypeError
        Dtypes and kinds of arguments.
    RuntimeError
        ``backend="cuda"`` without CuPy or a GPU; a kernel that does not compile.

    Notes
    -----
    ``s = softcap(scale * q @ k^T) + bias + alibi``, -inf where not allowed; ``lse = log(sum_j exp(s))`` (plus the
    sink's term); ``out = (r * exp(s - lse)) @ v`` with the dropout factor r. Nothing is approximated; only the
    order of the sums differs from the dense computation.

    References
    ----------
    T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q = k = v = np.eye(3, dtype=np.float32)
    >>> cupyflash.attention(q, k, v, causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.36 , 0.64 , 0.   ],
           [0.264, 0.264, 0.471]], dtype=float32)
    """
    options = {
        "scale": scale,
        "causal": causal,
        "query_offset": query_offset,
        "window": window,
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "softcap": softcap,
        "sinks": sinks,
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "dropout_offset": dropout_offset,
        "dropout_origin": dropout_origin,
        "precision": precision,
        "deterministic": deterministic,
        "backend": backend,
    }
    return dispatch.attention(q, k, v, options, return_lse=return_lse, out=out, workspace=workspace)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    wrt: Any = None,
    return_lse: bool = False,
    out: Any = None,
    workspace: Any = None,
    **options: Any,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and the function that pulls cotangents of its results back to its arguments.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`.
    wrt : sequence of str, optional
        Which gradients the vjp gives, among "q", "k", "v", "bias", "sinks", "alibi_slopes". Default: every
        one of them given as an array. What is not named costs nothing.
    return_lse, out, workspace
        As in `attention`.
    **options
        The options of `attention`.

    Returns
    -------
    out : array or (out, lse)
        As in `attention`.
    vjp : callable
        ``vjp(dout, dlse=None) -> Gradients``. dout has out's shape, dlse that of lse (score dtype). May be called
        repeatedly, and on any stream ordered after the forward.

    Raises
    ------
    ValueError, TypeError
        As `attention`; ValueError when ``wrt`` names an argument that is not given.

    Notes
    -----
    The vjp keeps references to q, k, v, the options and out, not copies: changing any of them in place before
    calling it changes the gradients. Scores are recomputed tile by tile from lse, so memory stays linear.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> x = np.ones((4, 2))
    >>> out, vjp = cupyflash.attention_vjp(x, x, x)
    >>> vjp(np.ones((4, 2))).v
    array([[1., 1.],
           [1., 1.],
           [1., 1.],
           [1., 1.]])
    """
    dispatch.check_names(options, "attention_vjp")
    return dispatch.attention_vjp(
        q, k, v, options, wrt=wrt, return_lse=return_lse, out=out, workspace=workspace
    )


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    /,
    *,
    dlse: Any = None,
    delta: Any = None,
    wrt: Any = None,
    grads_out: Gradients | None = None,
    accumulate: bool = False,
    workspace: Any = None,
    **options: Any,
) -> Gradients:
    """Gradients of attention from its stored results; stateless.

    Parameters
    ----------
    dout : array, (..., heads_q, m, e)
        Cotangent of out, in q's dtype (float32 is allowed for 16-bit inputs).
    q, k, v : array_like
        As in `attention`.
    out, lse : array
        Results of the forward. They may belong to a larger set of keys (see `merge`): the gradients are then
        exactly these keys' share, and the shares of dq add up. out may be None when delta is given.
    dlse : array, (..., heads_q, m), optional
        Cotangent of lse, in the score dtype.
    delta : array, (..., heads_q, m), optional
        ``sum_e dout * out`` in the score dtype, instead of forming it from out.
    wrt : sequence of str, optional
        As in `attention_vjp`; with grads_out the default is what grads_out has arrays for.
    grads_out : Gradients of arrays or None, optional
        Where to write, each in its argument's shape and dtype (float32 is allowed for 16-bit arguments).
    accumulate : bool
        Add to grads_out instead of overwriting it.
    workspace : uint8 array, optional
        As in `attention`.
    **options
        The options of `attention`.

    Returns
    -------
    Gradients
        Named tuple (q, k, v, bias, sinks, alibi_slopes); None where not asked for. Each has its argument's shape
        (broadcast axes summed) and dtype.

    Raises
    ------
    ValueError, TypeError
        As `attention_vjp`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q = k = v = np.eye(2)
    >>> out, lse = cupyflash.attention(q, k, v, return_lse=True)
    >>> cupyflash.attention_backward(np.ones((2, 2)), q, k, v, out, lse, wrt="v").v.round(3)
    array([[1., 1.],
           [1., 1.]])
    """
    dispatch.check_names(options, "attention_backward")
    request = {"dlse": dlse, "delta": delta, "wrt": wrt, "grads_out": grads_out, "accumulate": accumulate}
    return dispatch.attention_backward(dout, q, k, v, out, lse, options, request, workspace=workspace)


def plan(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    backward: bool = False,
    family: str | None = None,
    arch: int | None = None,
    **options: Any,
) -> Plan:
    """What a call would run and cost; nothing is allocated, compiled or launched.

    Parameters
    ----------
    q, k, v : array_like, or anything with ``shape`` and ``dtype``
        As in `attention`; without strides they count as C-contiguous.
    backward : bool
        Plan `attention_backward` instead of `attention`.
    family : str, optional
        A kernel family to plan for instead of the fastest that takes the call (CUDA).
    arch : int, optional
        A compute capability such as 90 to plan for instead of the current device's (CUDA).
    **options
        The options of `attention`.

    Returns
    -------
    Plan
        backend, family, config, tile sizes, kernels, FLOPs, bytes, workspace, and why faster families were
        passed over.

    Raises
    ------
    ValueError, TypeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> x = np.broadcast_to(np.float32(0), (1, 8, 4096, 64))
    >>> cupyflash.plan(x, x, x).flops
    34359738368
    """
    dispatch.check_names(options, "plan")
    return dispatch.plan(q, k, v, options, backward=backward, family=family, arch=arch)
