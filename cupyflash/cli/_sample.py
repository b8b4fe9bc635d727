"""Parts of a problem that are problems of their own: a sample of its rows, or of its columns.

The same options with offsets, lengths, masks and dropout origin moved to where the part lies. So a result of any
length can be checked at the cost of a few rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem

# Rows are judged in blocks: the plain computation of one row alone is a matrix-vector product, which sums in
# another order and is closer to exact than the matrix product that the bound speaks of.
BLOCK = 16


class Part(NamedTuple):
    """Consecutive query heads of one kv head, rows and columns of one item of a problem."""

    item: tuple[int, ...]
    heads: slice
    rows: slice
    cols: slice

    def of(self, result: Any) -> Any:
        """The part of out, lse or dout (their heads axis and leading axes in full)."""
        return result[self.item][self.heads, self.rows]


def sampled_rows(problem: Problem, count: int, seed: int) -> list[Part]:
    """About that many rows, in blocks: the first, the last, and random ones in between."""
    spans = (problem.batch * problem.heads_q, problem.seqlen_q)
    parts = []
    for t, rows in _draw(spans, count, seed):
        *item, head = map(int, np.unravel_index(t, (*problem.lead, problem.heads_q)))
        parts.append(Part(tuple(item), slice(head, head + 1), rows, slice(0, problem.seqlen_k)))
    return parts


def sampled_columns(problem: Problem, count: int, seed: int) -> list[Part]:
    """About that many columns of scores, in blocks, each for all query heads of a kv head."""
    spans = (problem.batch * problem.heads_kv, problem.seqlen_k)
    parts = []
    for t, cols in _draw(spans, count, seed):
        *item, head = map(int, np.unravel_index(t, (*problem.lead, problem.heads_kv)))
        heads = slice(head * problem.group, (head + 1) * problem.group)
        parts.append(Part(tuple(item), heads, slice(0, problem.seqlen_q), cols))
    return parts


def _draw(spans: tuple[int, int], count: int, seed: int) -> list[tuple[int, slice]]:
    """Blocks of rows (or columns) of some score matrices: as many as hold ``count`` rows."""
    matrices, length = spans
    if 0 in (matrices, length, count):
        return []
    per_matrix = -(-length // BLOCK)
    last, wanted = matrices * per_matrix - 1, -(-count // BLOCK)
    inner = np.random.default_rng(seed).integers(last + 1, size=max(0, wanted - 2)).tolist()
    drawn = sorted({*[0, last][:wanted], *inner})
    starts = [(block // per_matrix, block % per_matrix * BLOCK) for block in drawn]
    return [(matrix, slice(start, min(start + BLOCK, length))) for matrix, start in starts]


def part_arguments(problem: Problem, part: Part) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """(q, k, v) and the options that compute the part by itself."""
    p, item, heads, rows, cols = problem, part.item, part.heads, part.rows, part.cols
    kv_head = heads.start // p.group
    q = part.of(p.full("q"))
    k, v = (p.full(name)[item][kv_head : kv_head + 1, cols] for name in ("k", "v"))
    q_length, kv_length, offset = (int(x[item]) for x in p.host_lengths())
    options: dict[str, Any] = {
        "scale": p.scale,
        "softcap": p.softcap,
        "causal": p.causal,
        "window": p.window,
        "query_offset": offset + rows.start - cols.start,
        "q_lengths": min(max(q_length - rows.start, 0), rows.stop - rows.start),
        "kv_lengths": min(max(kv_length - cols.start, 0), cols.stop - cols.start),
    }
    for name in ("sinks", "alibi_slopes"):
        if getattr(p, name) is not None:
            options[name] = p.full(name)[item][heads]
    for name in ("mask", "bias"):
        if getattr(p, name) is not None:
            options[name] = p.full(name)[item][heads, rows, cols]
    if p.dropout is not None:
        numbers = p.dropout.numbers((*p.lead, p.heads_q))[item][heads]
        options |= {
            "dropout_p": p.dropout.p,
            "dropout_seed": p.dropout.seed,
            "dropout_offset": p.dropout.offset,
            "dropout_origin": (
                numbers - np.arange(len(numbers)),
                p.dropout.origin_i + rows.start,
                p.dropout.origin_j + cols.start,
            ),
        }
    return (q, k, v), options
