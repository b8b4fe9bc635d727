"""What one call costs: FLOPs, bytes moved, peak memory, in closed form.

FLOPs. A product of an (m, k) and a (k, n) matrix is 2 m k n. Forward: q k^T and p v. Backward: q k^T again,
dout v^T, p^T dout, dS k and dS^T q. Pairs that no query may see cost nothing; exp, max and sums are not
counted, nor is what ``mask`` and ``bias`` exclude (tiles are skipped by position alone).

Bytes, naive. The algorithm that stores its matrices (FlashAttention, Algorithm 0 and its backward): S is
written, read, P written, read: four passes over the score matrix; backward seven (P twice, dP written and
read, dS written and read twice). Matrices are in the dtype of q, as an array library stores them.

Bytes, tiled. Each query tile reads its q once and its visible keys and values once; nothing of size m x n
moves. The backward reads out and dout for delta, then walks the tiles twice: key tiles for dk and dv, query
tiles for dq. This is traffic between the tile memory (shared memory, a CPU's cache) and all that lies behind
it: a last-level cache serves part of it, down to ``bytes_once``, where each array passes once.

References
----------
T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness" (2022), arXiv:2205.14135, algorithm 0 and section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arrays import is_device
from .masks import Visibility
from .pairs import keys_read

if TYPE_CHECKING:
    from .problem import Problem


@dataclass(frozen=True)
class Plan:
    """What a call would do, without doing it.

    Attributes
    ----------
    backend, family, config : str
        Where it runs, by which kernel family, and the configuration's printed form.
    block_q, block_kv : int
        Rows and columns of a tile of scores.
    splits : int
        Into how many parts the keys of one tile row are divided.
    kernels : tuple of str
        What is launched, in order.
    flops : int
        Of the products over pairs that position and lengths allow: 2 (d + e) a pair, in the backward 2 (3 d + 2 e).
    bytes_moved : int
        Between the tiles (shared memory, a CPU's cache) and all memory behind them.
    workspace_bytes : int
        Scratch that the call allocates, or takes from ``workspace=``.
    copied_bytes : int
        Inputs copied because the kernel refuses their layout.
    output_bytes : int
        Results that the call allocates without ``out=``.
    registers, shared_bytes : int or None
        Per thread and per block; None until compiled, and on the CPU.
    passed_over : tuple of (str, str)
        Families that were not taken, each with the reason.
    """

    backend: str
    family: str
    config: str
    block_q: int
    block_kv: int
    splits: int
    kernels: tuple[str, ...]
    flops: int
    bytes_moved: int
    workspace_bytes: int
    copied_bytes: int
    output_bytes: int
    registers: int | None = None
    shared_bytes: int | None = None
    passed_over: tuple[tuple[str, str], ...] = ()


def total_pairs(problem: Problem) -> int:
    """Pairs of query and key that position and lengths allow, over all score matrices of a call.

    Parameters
    ----------
    problem : Problem
        The call. Lengths and offsets on a device are not read and count as full.

    Returns
    -------
    int
    """
    return problem.heads_q * _over_items(problem, 1)


def flops(problem: Problem, backward: bool = False) -> int:
    """Floating-point operations of the products over visible pairs.

    Parameters
    ----------
    problem : Problem
        The call.
    backward : bool
        The five products of the backward instead of the forward's two.

    Returns
    -------
    int
    """
    d, e = problem.head_dim, problem.head_dim_v
    return total_pairs(problem) * 2 * (3 * d + 2 * e if backward else d + e)


def score_matrix_bytes(problem: Problem, matrices: int | None = None) -> int:
    """Bytes of m x n matrices in the dtype of q.

    Parameters
    ----------
    problem : Problem
        The call.
    matrices : int, optional
        How many; default one for each batch item and query head.

    Returns
    -------
    int

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import cost
    >>> from cupyflash.problem import Problem
    >>> x = np.broadcast_to(np.float16(0), (1, 1, 8192, 64))
    >>> cost.score_matrix_bytes(Problem.create(x, x, x)) // 2**20
    128
    """
    count = problem.batch * problem.heads_q if matrices is None else matrices
    return count * problem.seqlen_q * problem.seqlen_k * problem.dtype.itemsize


def bytes_once(problem: Problem, backward: bool = False) -> int:
    """Bytes moved if each input is read and each result written once; broadcast axes count once.

    Parameters
    ----------
    problem, backward
        As in `flops`.

    Returns
    -------
    int
    """
    return _inputs(problem, backward) + _outputs(problem, backward)


def bytes_naive(problem: Problem, backward: bool = False) -> int:
    """Bytes moved by the algorithm that stores its score matrices.

    Parameters
    ----------
    problem, backward
        As in `flops`.

    Returns
    -------
    int
    """
    # Its backward reads dout twice, for dv and for dP, and neither out nor lse: delta is rowsum(P * dP).
    operands = bytes_once(problem, backward) - (_statistic(problem) if backward else 0)
    return operands + (7 if backward else 4) * score_matrix_bytes(problem)


def bytes_tiled(problem: Problem, block_q: int, block_kv: int, backward: bool = False) -> int:
    """Bytes moved by the tiled algorithm, no cache behind its tiles.

    Parameters
    ----------
    problem : Problem
        The call.
    block_q, block_kv : int
        Rows and columns of a tile of scores.
    backward : bool
        As in `flops`.

    Returns
    -------
    int
    """
    p = problem
    row_bytes = (p.head_dim + p.head_dim_v) * p.dtype.itemsize  # of q and dout, or of k and v
    keys = p.heads_q * _over_items(p, block_q) * row_bytes
    if not backward:
        return bytes_once(p) - _stored(p, "k") - _stored(p, "v") + keys
    rows = p.heads_q * _over_items(p, block_kv, transposed=True) * (row_bytes + 2 * p.score_dtype.itemsize)
    delta = 2 * _statistic(p) + _out(p)  # written and read; dout read for it
    # bytes_once holds one reading of every operand: the dq pass's q and dout, the dk and dv pass's k and v.
    return bytes_once(p, backward=True) + delta + keys + rows


def peak_bytes_naive(problem: Problem, backward: bool = False) -> int:
    """Bytes alive at once, inputs and results included, where score matrices are stored.

    Parameters
    ----------
    problem, backward
        As in `flops`.

    Returns
    -------
    int
        With one matrix (softmax in place), in the backward two (P beside dP): the least that storing allows.
    """
    return bytes_once(problem, backward) + (2 if backward else 1) * score_matrix_bytes(problem)


def peak_bytes_tiled(problem: Problem, backward: bool = False, workspace_bytes: int = 0) -> int:
    """Bytes alive at once, inputs and results included, with the tiled algorithm.

    Parameters
    ----------
    problem, backward
        As in `flops`.
    workspace_bytes : int
        Scratch of the kernels, if they need any.

    Returns
    -------
    int
        In the backward with delta, one number a row.
    """
    return bytes_once(problem, backward) + (_statistic(problem) if backward else 0) + workspace_bytes


def _over_items(problem: Problem, block: int, transposed: bool = False) -> int:
    """`keys_read` summed over the leading axes; transposed: rows read by tiles of keys."""
    items = _items(problem)
    return sum(n * keys_read(x.transposed() if transposed else x, block) for x, n in items)


def _items(problem: Problem) -> list[tuple[Visibility, int]]:
    """Who sees whom in batch items, each kind with their number; device values, unread, count as full."""
    p = problem
    if any(is_device(x) for x in (p.q_lengths, p.kv_lengths, p.query_offset)):
        full = p.visibility(p.seqlen_q, p.seqlen_k, p.seqlen_k - p.seqlen_q if p.bottom_right else 0)
        return [(full._replace(left=None, right=None) if is_device(p.query_offset) else full, p.batch)]
    rows = np.stack([x.reshape(-1) for x in p.host_lengths()], axis=1)
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    return [(p.visibility(*row), int(count)) for row, count in zip(distinct, counts)]


def _stored(problem: Problem, name: str) -> int:
    """Bytes of an operand as given (broadcast axes counted once); 0 if absent."""
    x = getattr(problem, name)
    return 0 if x is None else math.prod(x.shape) * x.dtype.itemsize


def _out(problem: Problem) -> int:
    return math.prod(problem.out_shape) * problem.out_dtype.itemsize


def _statistic(problem: Problem) -> int:
    """Bytes of lse or delta."""
    return math.prod(problem.lse_shape) * problem.lse_dtype.itemsize


def _inputs(problem: Problem, backward: bool) -> int:
    operands = sum(
        _stored(problem, name) for name in ("q", "k", "v", "mask", "bias", "sinks", "alibi_slopes")
    )
    return operands + (2 * _out(problem) + _statistic(problem) if backward else 0)  # out, dout, lse


def _outputs(problem: Problem, backward: bool) -> int:
    if backward:
        return sum(_stored(problem, name) for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes"))
    return _out(problem) + _statistic(problem)
