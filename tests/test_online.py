"""online: the worked example, and the algebra of summaries."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import online

INF = math.inf
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def direct(scores, values):
    """Weighted mean and log-sum-exp of one row, by Python's exact sums."""
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    return math.fsum(w * v for w, v in zip(weights, values)) / total, top + math.log(total)


def test_worked_example_block_by_block():
    whole = online.summarize([1000.0, 1001, 999], [2.0, 4, 8])
    expected = (2 * math.exp(-1) + 4 + 8 * math.exp(-2)) / (1 + math.exp(-1) + math.exp(-2))
    assert expected == pytest.approx(3.8707, abs=5e-5)
    out, lse = online.finish(whole)
    assert float(out) == pytest.approx(expected, rel=1e-15)
    assert float(lse) == pytest.approx(1001 + math.log(1 + math.exp(-1) + math.exp(-2)), rel=1e-15)


rows = st.lists(
    st.tuples(st.floats(-1000, 1000) | st.just(-INF), st.floats(-10, 10)), min_size=1, max_size=12
)


@given(rows, st.data())
def test_any_bracketing_gives_the_direct_result(pairs, data):
    summaries = [online.summarize([s], [v]) for s, v in pairs]
    while len(summaries) > 1:
        at = data.draw(st.integers(0, len(summaries) - 2))
        summaries[at : at + 2] = [online.merge(summaries[at], summaries[at + 1])]
    out, lse = online.finish(summaries[0])
    finite = [(s, v) for s, v in pairs if s > -INF]
    if not finite:
        assert (float(out), float(lse)) == (0.0, -INF)
        return
    expected_out, expected_lse = direct(*zip(*finite))
    assert float(out) == pytest.approx(expected_out, abs=1e-12)
    assert float(lse) == pytest.approx(expected_lse, abs=1e-12)


def test_merge_is_commutative_bit_for_bit_and_hidden_blocks_are_the_identity():
    rng = np.random.default_rng(0)
    a, b = (online.summarize(rng.normal(size=(5, 7)), rng.normal(size=(7, 3))) for _ in range(2))
    hidden = online.summarize(np.full((5, 4), -INF), np.ones((4, 3)))
    assert np.isneginf(hidden.m).all()
    assert not np.any(hidden.l)
    for x, y in zip(online.merge(a, b), online.merge(b, a)):
        np.testing.assert_array_equal(x, y)
    for merged in (online.merge(a, hidden), online.merge(hidden, a)):
        for x, y in zip(merged, a):
            np.testing.assert_array_equal(x, y)


def test_summaries_of_batches_and_their_dtypes():
    rng = np.random.default_rng(1)
    scores, values = rng.normal(size=(2, 4, 6)), rng.normal(size=(2, 6, 3))
    out, lse = online.finish(online.summarize(scores, values))
    for b in range(2):
        for i in range(4):
            for e in range(3):
                expected = direct(scores[b, i], values[b, :, e])
                assert (out[b, i, e], lse[b, i]) == pytest.approx(expected)
    for dtype in (np.float16, BFLOAT16, np.float32):
        summary = online.summarize(scores.astype(dtype), values.astype(dtype))
        assert {x.dtype for x in summary} == {np.dtype(np.float32)}
    assert online.summarize(np.zeros((3, 0)), np.zeros((0, 2))).u.shape == (3, 2)


def test_a_score_of_plus_infinity():
    a = online.summarize([[INF, 0.0], [1.0, 2.0]], [[1.0], [1.0]])
    out, lse = online.finish(online.merge(a, online.summarize([[3.0], [3.0]], [[1.0]])))
    assert np.isnan(out[0, 0])
    assert lse[0] == INF
    assert out[1, 0] == pytest.approx(1.0)


@pytest.mark.gpu
def test_summaries_on_the_device(cupy):
    summary = online.summarize(cupy.asarray([[1000.0, 1001, 999]]), cupy.asarray([[2.0], [4], [8]]))
    assert float(online.finish(online.merge(summary, summary))[0][0, 0]) == pytest.approx(3.8707, abs=5e-5)
