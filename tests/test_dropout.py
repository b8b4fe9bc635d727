"""dropout: Philox against its published vectors, the mask against the contract's formula written out in integers."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import dropout, philox

VECTORS = json.loads((Path(__file__).parent / "conformance" / "philox4x32_kat.json").read_text())


def philox_scalar(counter, key):
    """Philox4x32-7 in Python's integers."""
    word = 0xFFFFFFFF
    x, k = list(counter), list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & word, (a >> 32) ^ x[3] ^ k[1], a & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return x


def kept(i, j, t, seed, offset, p):
    """Contract section 5 for one element, origin already added."""
    I, a, g = i // 16, (i // 8) % 2, i % 8
    J, b, c, e = j // 16, (j // 8) % 2, (j % 8) // 2, j % 2
    w = philox_scalar((4 * J + c, 8 * I + g, t, offset), (seed & 0xFFFFFFFF, seed >> 32))
    u = (w[2 * a + b] >> (16 * e)) & 0xFFFF
    T = round(Fraction(1.0 - p) * 65536)  # Fraction rounds exactly, ties to even
    return u < max(T, 1 if p < 1 else 0)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['rounds']}-{v['key'][0]}")
def test_philox_vectors(vector):
    counter = [np.array([int(word, 16)], np.uint32) for word in vector["counter"]]
    key = [int(word, 16) for word in vector["key"]]
    words = philox.philox4x32(counter, key, vector["rounds"])
    assert [f"{int(word[0]):08x}" for word in words] == vector["expected"]
    if vector["rounds"] == 7:
        assert philox_scalar([int(x[0]) for x in counter], key) == [int(word[0]) for word in words]


@settings(max_examples=25)
@given(
    rows=st.integers(1, 35),
    cols=st.integers(1, 35),
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**32 - 1),
    origin=st.tuples(st.integers(0, 2**32 - 3), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)),
    p=st.floats(0.01, 0.99),
)
def test_mask_is_the_formula(rows, cols, seed, offset, origin, p):
    mask = dropout.dropout_mask((2, rows, cols), p, seed, offset, origin)
    t0, i0, j0 = origin
    for t, i, j in [(0, 0, 0), (1, rows - 1, cols - 1), (1, rows // 2, cols // 3), (0, rows - 1, 0)]:
        assert mask[t, i, j] == kept(i + i0, j + j0, t + t0, seed, offset, p)


def test_every_element_of_a_small_mask():
    mask = dropout.dropout_mask((2, 3, 19, 37), 0.4, 2**64 - 3, 5, (11, 7, 30))
    expected = [
        [
            [[kept(i + 7, j + 30, 11 + 3 * b + h, 2**64 - 3, 5, 0.4) for j in range(37)] for i in range(19)]
            for h in range(3)
        ]
        for b in range(2)
    ]
    np.testing.assert_array_equal(mask, expected)


@settings(max_examples=40)
@given(
    st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**31 - 1)
)
def test_tiles_are_cut_from_one_mask(i, height, j, width, base):
    whole = dropout.dropout_mask((1, 80, 80), 0.3, 42, 1, (9, base, 0))[0]
    rows, cols = slice(i, i + height), slice(j, j + width)
    arguments = dropout.Dropout.create(0.3, 42, 1, (9, base, 0), ())
    [tile] = arguments.keep_tiles(arguments.numbers((1,)), rows, cols)
    np.testing.assert_array_equal(tile, whole[rows, cols])


def test_large_masks_are_the_same_as_their_parts():
    whole = dropout.dropout_mask((40, 300, 2000), 0.5, 3)
    for t, i, j in [(0, 0, 0), (39, 299, 1999), (17, 160, 1000)]:
        assert whole[t, i, j] == kept(i, j, t, 3, 0, 0.5)
    part = dropout.dropout_mask((1, 140, 100), 0.5, 3, origin=(21, 150, 1900))
    np.testing.assert_array_equal(part[0], whole[21, 150:290, 1900:])


def test_origin_array_gives_shards_of_a_larger_problem():
    whole = dropout.dropout_mask((4, 6, 9, 10), 0.5, 1)
    t0 = np.array([[2 * 6 + 3], [3 * 6 + 3]]) - np.array([[0], [3]])  # batches 2, 3 and heads 3, 4, 5
    shard = dropout.dropout_mask((2, 3, 9, 10), 0.5, 1, origin=(t0, 0, 0))
    np.testing.assert_array_equal(shard, whole[2:, 3:])
    swapped = dropout.dropout_mask((2, 9, 10), 0.5, 1, origin=(np.array([1, -1]), 0, 0))
    np.testing.assert_array_equal(swapped, whole[0, [1, 0]])


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0, 65536),
        (1, 0),
        (0.5, 32768),
        (1e-6, 65536),
        (1 - 1e-12, 1),
        (0.99, 655),
        (1 - 2.5 / 65536, 2),
        (1 - 3.5 / 65536, 4),
    ],
)
def test_threshold(p, expected):
    assert dropout.threshold(p) == expected


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.9, 0.999])
def test_p_is_honoured_and_the_scale_is_exact(p):
    mask = dropout.dropout_mask((1, 1024, 1024), p, 11)
    applied = 1 - dropout.threshold(p) / 65536
    assert abs(applied - p) <= 2**-17
    sigma = math.sqrt(p * (1 - p) / mask.size)
    assert abs(1 - mask.mean() - applied) < 5 * sigma


def test_p_zero_keeps_all_and_one_drops_all():
    assert dropout.dropout_mask((3, 17), 0, None).all()
    assert not dropout.dropout_mask((3, 17), 1, 0).any()
    assert not dropout.dropout_mask((3, 17), 1.0, 0).any()


def test_seeds_and_offsets_give_independent_masks():
    masks = [
        dropout.dropout_mask((256, 256), 0.5, seed, offset)
        for seed, offset in [(0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**31)]
    ]
    for x in range(len(masks)):
        for y in range(x):
            assert abs((masks[x] == masks[y]).mean() - 0.5) < 5 * 0.5 / 256


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4, 5), (2, 0, 7)])
def test_empty_masks(shape):
    assert dropout.dropout_mask(shape, 0.5, 1).shape == shape


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"p": -1}, ValueError, r"p must lie in \[0, 1\]"),
        ({"p": 1.5}, ValueError, r"p must lie in \[0, 1\]"),
        ({"p": math.nan}, ValueError, "p must be finite"),
        ({"p": "0.1"}, TypeError, "p must be a real number"),
        ({"p": True}, TypeError, "p must be a real number"),
        ({"seed": None}, ValueError, "seed is required"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"seed": 2**64}, ValueError, "seed must be in"),
        ({"seed": 1.0}, TypeError, "seed must be an integer"),
        ({"seed": True}, TypeError, "seed must be an integer"),
        ({"offset": 2**32}, ValueError, "offset must be in"),
        ({"offset": -1}, ValueError, "offset must be in"),
        ({"origin": (0, 0)}, ValueError, "origin must be"),
        ({"origin": "000"}, ValueError, "origin must be"),
        ({"origin": (0, -1, 0)}, ValueError, r"origin\[1\]"),
        ({"origin": (0, 0, 2**31)}, ValueError, r"origin\[2\]"),
        ({"origin": (0.5, 0, 0)}, TypeError, r"origin\[0\]"),
        ({"origin": (-1, 0, 0)}, ValueError, "lead to -1"),
        ({"origin": (2**32 - 1, 0, 0)}, ValueError, "lead to 4294967295 .. 4294967296"),
        ({"origin": (np.array([0, 2**32 - 1]), 0, 0)}, ValueError, "lead to 0 .. 4294967296"),
        ({"origin": ([1, 2, 3], 0, 0)}, ValueError, "must broadcast"),
        ({"shape": (3,)}, ValueError, "shape must be"),
        ({"shape": 3}, TypeError, "shape must be"),
        ({"shape": (2, -1, 4)}, ValueError, r"shape\[1\]"),
    ],
)
def test_bad_arguments(arguments, error, words):
    good = {"shape": (2, 4, 4), "p": 0.5, "seed": 0, "offset": 0, "origin": (0, 0, 0)}
    with pytest.raises(error, match=words):
        dropout.dropout_mask(**{**good, **arguments})


def test_numbers_past_32_bits_are_refused_only_where_they_are_used():
    assert dropout.dropout_mask((2, 4, 4), 0.0, 0, origin=(2**32 - 1, 0, 0)).all()
    with pytest.raises(ValueError, match="lead to"):
        dropout.Dropout.create(0.5, 0, 0, (0, 0, 0), (2**17, 2**16))


def test_integer_kinds():
    expected = dropout.dropout_mask((20, 20), 0.5, 2**63 + 1, 3)
    same = dropout.dropout_mask((20, 20), np.float32(0.5), np.uint64(2**63 + 1), np.int32(3))
    np.testing.assert_array_equal(same, expected)


@pytest.mark.gpu
def test_device_masks_equal_host_masks(cupy):
    arguments = {"p": 0.3, "offset": 7, "origin": (5, 100, 3)}
    expected = dropout.dropout_mask((3, 200, 333), seed=2**64 - 5, **arguments)
    like = cupy.empty(0)
    seed = cupy.asarray(np.uint64(2**64 - 5))
    for given_seed in (2**64 - 5, seed):
        mask = dropout.dropout_mask((3, 200, 333), seed=given_seed, like=like, **arguments)
        assert isinstance(mask, cupy.ndarray)
        np.testing.assert_array_equal(mask.get(), expected)
    np.testing.assert_array_equal(dropout.dropout_mask((3, 200, 333), seed=seed, **arguments), expected)
    with pytest.raises(TypeError, match="0-d integer"):
        dropout.dropout_mask((2, 2), 0.5, cupy.zeros(2, np.uint64))
