"""The CPU backend: tiled online softmax and its recomputing backward pass in NumPy alone.

No array has m x n elements. Tiles that no query may see are skipped; only tiles at a boundary are masked.
16-bit operands are converted to float32 tile by tile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import cost
from ..arrays import empty_in_order
from ..problem import Gradients, Problem
from ..request import BackwardRequest
from . import workers
from .backward_pass import BackwardWorker, add_sink_gradients
from .forward_pass import ForwardWorker, row_tiles
from .gradients import GradientSums
from .tiles import buffer_shapes, choose_tiles

# Below this many scores a second thread costs more than it brings.
_THREADS_FROM = 2**20


def forward(problem: Problem, out: Any = None, lse: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a problem in host memory.

    Parameters
    ----------
    problem : Problem
        The call.
    out : ndarray, (*lead, heads_q, m, e), optional
        Where to write; of any strides.
    lse : ndarray, (*lead, heads_q, m), optional
        Where to write, in the score dtype.

    Returns
    -------
    out, lse : ndarray
        Those given, or new ones: out in q's memory order, lse C-ordered; natural logarithm.

    Notes
    -----
    A row tile keeps the running maximum m, sum l and weighted values u of its scores, and divides once, at its
    end. Where the norms of q and k bound all its scores, 0 serves as m.

    References
    ----------
    T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import cpu
    >>> from cupyflash.problem import Problem
    >>> x = np.eye(2)[None]
    >>> out, lse = cpu.forward(Problem.create(x, x, x, scale=0.0))
    >>> out.tolist(), lse.round(4).tolist()
    ([[[0.5, 0.5], [0.5, 0.5]]], [[0.6931, 0.6931]])
    """
    p = problem
    if out is None:
        out = empty_in_order(np, p.out_shape, p.out_dtype, p.q)
    if lse is None:
        lse = np.empty(p.lse_shape, p.lse_dtype)
    tiles = choose_tiles(p, backward=False)
    workers.run(row_tiles(p, tiles), lambda: ForwardWorker(p, tiles, out, lse), workers.Order(), _is_small(p))
    return out, lse


def backward(request: BackwardRequest) -> Gradients:
    """Gradients of a problem in host memory.

    Parameters
    ----------
    request : BackwardRequest
        The call, its cotangents, and where the gradients go.

    Returns
    -------
    Gradients
        Those wanted, in the shapes and dtypes of their arguments; the others None.

    Notes
    -----
    Weights come back as ``exp(s - lse)`` from recomputed scores. One pass over tiles of keys gives all
    gradients; the order in which shares of one element are added does not depend on the threads.

    References
    ----------
    T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import cpu
    >>> from cupyflash.problem import Problem
    >>> from cupyflash.request import BackwardRequest
    >>> x = np.eye(2)[None]
    >>> problem = Problem.create(x, x, x, scale=0.0)
    >>> out, lse = cpu.forward(problem)
    >>> cpu.backward(BackwardRequest.create(problem, np.ones((1, 2, 2)), out, lse, wrt="v")).v.tolist()
    [[[1.0, 1.0], [1.0, 1.0]]]
    """
    p = request.problem
    tiles = choose_tiles(p, backward=True)
    sums = GradientSums(request, tiles)
    with np.errstate(all="ignore"):
        if "sinks" in request.wrt:
            add_sink_gradients(sums, tiles)
        if set(request.wrt) - {"sinks"}:
            workers.run(sums.tasks(), lambda: BackwardWorker(sums, tiles), sums.order, _is_small(p))
        return sums.result()


def plan(problem: Problem, backward: bool = False) -> cost.Plan:
    """What a call would compute, hold and move.

    Parameters
    ----------
    problem : Problem
        The call; its operands need only shapes and dtypes.
    backward : bool
        Plan the backward pass.

    Returns
    -------
    Plan
        ``workspace_bytes`` are the tile buffers of all worker threads, no more of them than there are tasks.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import cpu
    >>> from cupyflash.problem import Problem
    >>> x = np.broadcast_to(np.float32(0), (1, 8, 4096, 64))
    >>> plan = cpu.plan(Problem.create(x, x, x))
    >>> plan.config, plan.flops
    ('cpu fwd float32 d64 q1024 kv256', 34359738368)
    """
    p, tiles = problem, choose_tiles(problem, backward)
    heads, length, block = (
        (p.heads_kv, p.seqlen_k, tiles.block_kv) if backward else (p.heads_q, p.seqlen_q, tiles.block_q)
    )
    tasks = p.batch * heads * -(-length // block)
    threads = 1 if _is_small(p) else max(1, min(workers.thread_count(), tasks))
    elements = sum(math.prod(shape) for shape in buffer_shapes(p, tiles, backward).values())
    if backward:
        given = (getattr(p, name) for name in p.differentiable)
        results = sum(math.prod(x.shape) * x.dtype.itemsize for x in given)
    else:
        results = math.prod(p.out_shape) * p.out_dtype.itemsize
        results += math.prod(p.lse_shape) * p.lse_dtype.itemsize
    head_dims = f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}/{p.head_dim_v}"
    stack = f" s{tiles.stack}" if tiles.stack > 1 else ""
    name = "bwd" if backward else "fwd"
    return cost.Plan(
        backend="cpu",
        family="numpy",
        config=f"cpu {name} {p.dtype} {head_dims} q{tiles.block_q} kv{tiles.block_kv}{stack}",
        block_q=tiles.block_q,
        block_kv=tiles.block_kv,
        splits=1,
        kernels=("backward",) if backward else ("forward",),
        flops=cost.flops(p, backward),
        bytes_moved=cost.bytes_tiled(p, tiles.block_q, tiles.block_kv, backward),
        workspace_bytes=threads * elements * p.score_dtype.itemsize,
        copied_bytes=0,
        output_bytes=results,
    )


def _is_small(problem: Problem) -> bool:
    return math.prod(problem.score_shape) < _THREADS_FROM
