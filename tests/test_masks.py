"""masks: the predicate against the contract's sentence, the intervals against the predicate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.masks import Visibility

HUGE = 10**30
bounds = st.none() | st.integers(0, 12) | st.sampled_from([2**31, 2**63, HUGE])
rules = st.fixed_dictionaries(
    {
        "left": bounds,
        "right": bounds,
        "offset": st.integers(-15, 15) | st.sampled_from([-HUGE, HUGE, 2**62, -(2**63)]),
        "q_length": st.integers(0, 12),
        "kv_length": st.integers(0, 12),
    }
)
spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


def sees(i, j, left, right, offset, q_length, kv_length):
    """Contract section 3, for one query and one key, in Python's integers."""
    p = i + offset
    return (
        i < q_length
        and j < kv_length
        and (left is None or p - left <= j)
        and (right is None or j <= p + right)
    )


@given(rules)
def test_allowed_is_the_rule(rule):
    expected = [[sees(i, j, **rule) for j in range(12)] for i in range(12)]
    np.testing.assert_array_equal(Visibility(**rule).allowed(range(12), range(12)), expected)


@given(rules, spans)
def test_keys_of_some_are_the_hull_of_what_some_row_sees(rule, span):
    start, stop = Visibility(**rule).keys_of_some(*span)
    seen = {j for i in range(*span) for j in range(12) if sees(i, j, **rule)}
    assert 0 <= start <= stop <= rule["kv_length"] or (start, stop) == (0, 0)
    assert set(range(start, stop)) == seen


@given(rules, spans)
def test_keys_of_all_are_what_every_row_sees(rule, span):
    start, stop = Visibility(**rule).keys_of_all(*span)
    rows = range(*span)
    seen = {j for j in range(12) if len(rows) and all(sees(i, j, **rule) for i in rows)}
    assert set(range(start, stop)) == seen


@given(rules, spans)
def test_rows_of_some_are_the_hull_of_the_rows_that_see_the_tile(rule, span):
    start, stop = Visibility(**rule).rows_of_some(*span)
    rows = {i for i in range(12) if any(sees(i, j, **rule) for j in range(*span))}
    assert 0 <= start <= stop <= rule["q_length"] or (start, stop) == (0, 0)
    assert set(range(start, stop)) == rows


def test_rows_and_columns_need_not_start_at_zero():
    visible = Visibility(left=3, right=2, offset=4, q_length=18, kv_length=29)
    whole, part = visible.allowed(range(20), range(30)), visible.allowed(np.arange(5, 19), range(7, 30))
    np.testing.assert_array_equal(part, whole[5:19, 7:30])
    assert part.any()
    assert not part.all()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (2, 1, ["110", "111", "111", "011"]),
        (0, 0, ["100", "010", "001", "000"]),
        (None, 0, ["100", "110", "111", "111"]),
        (0, None, ["111", "011", "001", "000"]),
    ],
)
def test_zero_is_a_bound_and_sizes_are_inclusive(left, right, expected):
    seen = Visibility(left, right, offset=0, q_length=4, kv_length=3).allowed(range(4), range(3))
    assert ["".join(str(int(x)) for x in row) for row in seen] == expected
