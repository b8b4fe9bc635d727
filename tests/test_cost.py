"""cost, pairs and roofline: closed forms against counting, and against numbers that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import cost, pairs
from cupyflash.masks import Visibility
from cupyflash.problem import Problem
from cupyflash.roofline import GPUS, roofline

sizes = st.integers(0, 12)
bounds = st.none() | st.integers(0, 14) | st.just(10**30)


@st.composite
def visibilities(draw):
    return Visibility(draw(bounds), draw(bounds), draw(st.integers(-15, 15)), draw(sizes), draw(sizes))


def seen_keys(i, visible):
    """The keys that row i sees, by the words of the contract."""
    left, right, offset, _, kv_length = visible
    return {
        j
        for j in range(kv_length)
        if (left is None or i + offset - left <= j) and (right is None or j <= i + offset + right)
    }


def described(shape_q, shape_k=None, shape_v=None, dtype=np.float16, **options):
    """A Problem of arrays that hold one element of memory."""
    shape_k = shape_q if shape_k is None else shape_k
    shape_v = shape_k if shape_v is None else shape_v
    return Problem.create(*(np.broadcast_to(dtype(0), s) for s in (shape_q, shape_k, shape_v)), **options)


@given(visibilities(), st.integers(1, 5))
def test_keys_read_counts_the_union_of_each_tile(visible, block_q):
    counted = 0
    for start in range(0, visible.q_length, block_q):
        keys = [seen_keys(i, visible) for i in range(start, min(start + block_q, visible.q_length))]
        union = set().union(*keys)
        # An interval of keys that no single row sees (all beyond either end) cannot lie between two that do.
        assert union == set(range(min(union), max(union) + 1)) if union else True
        counted += len(union)
    assert pairs.keys_read(visible, block_q) == counted


def test_visible_pairs_are_exact_at_any_length():
    n = 10**12
    assert pairs.keys_read(Visibility(None, 0, 0, n, n)) == n * (n + 1) // 2
    assert pairs.keys_read(Visibility(4, 0, 0, n, n)) == 5 * n - 10
    assert pairs.keys_read(Visibility(None, 0, n - 1, 1, n)) == n


def test_the_score_matrix_of_the_usual_examples():
    assert cost.score_matrix_bytes(described((1, 1, 8192, 64)), matrices=1) == 128 * 2**20
    assert cost.score_matrix_bytes(described((1, 1, 100_000, 64)), matrices=1) == 20 * 10**9
    assert cost.score_matrix_bytes(described((2, 3, 100, 64), dtype=np.float32)) == 6 * 100 * 100 * 4


def test_flops_count_two_products_forward_and_five_backward():
    problem = described((2, 6, 50, 16), (2, 3, 70, 16), (2, 3, 70, 24))
    count = 2 * 6 * 50 * 70
    assert cost.flops(problem) == 2 * count * (16 + 24)
    assert cost.flops(problem, backward=True) == 2 * count * (16 + 24 + 24 + 16 + 16)
    square = described((1, 1, 64, 32))
    assert cost.flops(square, backward=True) == 2.5 * cost.flops(square)


def test_flops_follow_lengths_of_every_batch_item():
    problem = described(
        (3, 2, 8, 4), (3, 2, 10, 4), causal="bottom_right", q_lengths=[8, 3, 3], kv_lengths=[10, 7, 7]
    )
    # Bottom right: row i of item b sees i + 1 + (kv - q) keys.
    count = sum(i + 3 for i in range(8)) + 2 * sum(i + 5 for i in range(3))
    assert cost.total_pairs(problem) == 2 * count
    assert cost.flops(problem) == 2 * 2 * count * 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_tiled_counts_what_the_tiles_touch(causal, backward):
    batch, heads, heads_kv, length, d, e, block_q, block_kv = 2, 4, 2, 50, 8, 6, 16, 12
    problem = described(
        (batch, heads, length, d),
        (batch, heads_kv, length, d),
        (batch, heads_kv, length, e),
        causal=causal,
        dtype=np.float32,
    )
    keys = rows = 0
    for start in range(0, length, block_q):
        keys += min(start + block_q, length) if causal else length
    for start in range(0, length, block_kv):
        rows += length - start if causal else length
    q, out, statistic = (4 * batch * heads * length * x for x in (d, e, 1))
    kv = 4 * batch * heads_kv * length * (d + e)
    reread_keys = batch * heads * keys * (d + e) * 4
    if not backward:
        expected = q + reread_keys + out + statistic
    else:
        delta_kernel = out + out + statistic
        dkdv_kernel = kv + batch * heads * rows * (d + e + 2) * 4 + kv
        dq_kernel = q + out + 2 * statistic + reread_keys + q
        expected = delta_kernel + dkdv_kernel + dq_kernel
    assert cost.bytes_tiled(problem, block_q, block_kv, backward) == expected


def test_one_tile_moves_each_array_once():
    problem = described((1, 2, 64, 32), bias=np.zeros((64,), np.float32), sinks=np.zeros(2, np.float32))
    once = 2 * 64 * 32 * 2 * 4 + 2 * 64 * 4 + 64 * 4 + 2 * 4
    assert cost.bytes_once(problem) == once
    assert cost.bytes_tiled(problem, 64, 64) == once


def test_naive_passes_over_its_score_matrices():
    problem = described((1, 2, 64, 32))
    matrix = 2 * 64 * 64 * 2
    operand, lse = 2 * 64 * 32 * 2, 2 * 64 * 4
    assert cost.bytes_naive(problem) == 4 * operand + lse + 4 * matrix
    # q, k, v, dout twice, dq, dk, dv.
    assert cost.bytes_naive(problem, backward=True) == 8 * operand + 7 * matrix
    assert cost.peak_bytes_naive(problem) == 4 * operand + lse + matrix
    assert cost.peak_bytes_naive(problem, backward=True) == 8 * operand + lse + 2 * matrix
    assert cost.peak_bytes_tiled(problem, backward=True) == 8 * operand + 2 * lse
    assert cost.peak_bytes_tiled(problem, workspace_bytes=7) == 4 * operand + lse + 7


def test_broadcast_operands_count_once():
    broadcast = described((4, 2, 16, 8), (1, 2, 16, 8))
    full = described((4, 2, 16, 8))
    assert cost.bytes_once(full) - cost.bytes_once(broadcast) == 3 * 2 * (2 * 16 * 8 * 2)


def test_empty_problems_cost_nothing_but_their_arrays():
    empty = described((0, 2, 16, 8))
    assert cost.flops(empty) == cost.bytes_tiled(empty, 16, 16) == 0
    assert cost.flops(described((1, 2, 16, 8), (1, 2, 0, 8)), backward=True) == 0


def test_roofline_has_two_roofs_that_meet_at_the_ridge():
    below, above = roofline(10.0, 1.0, 1000.0, 10.0), roofline(1000.0, 1.0, 1000.0, 10.0)
    assert (below.limit, below.seconds, below.flops_per_second) == ("memory", 0.1, 100.0)
    assert (above.limit, above.seconds, above.flops_per_second) == ("compute", 1.0, 1000.0)
    assert below.ridge == 100.0
    assert roofline(100.0, 1.0, 1000.0, 10.0).seconds == 0.1


@pytest.mark.parametrize("name", GPUS)
def test_gpu_rows_hold_together(name):
    gpu = GPUS[name]
    assert gpu.source
    assert gpu.float16 > gpu.float32 >= gpu.float64 > 0
    # The least ratio of the table is the RTX 3090's 76 FLOP / byte; a slip of a unit would leave this range.
    assert 50 < gpu.peak_flops("float16") / gpu.peak_bytes < 500
    if gpu.tf32 is None:
        with pytest.raises(ValueError, match="no tf32 products"):
            gpu.peak_flops("tf32")
