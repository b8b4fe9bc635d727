"""The Hopper forward of float32 on its GPU: its precision, every option, tiles' edges, layouts, what is no number."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_sm90_wide
from support import NEG_INF, assert_same, check, host, normal, qkv, wide

import cupyflash
from cupyflash import reference, testing
from cupyflash.cuda import calls, configs, families

pytestmark = pytest.mark.gpu

DIMS = (64, 128)
M, N = 260, 333
PAIRS = list(itertools.combinations_with_replacement(test_sm90_wide.ONE_OPTION, 2))


@pytest.fixture(autouse=True)
def hopper(cupy, monkeypatch):
    """Of few queries the family takes only calls that ask for it."""
    if cupyflash.cuda.device.compute_capability(cupy.cuda.runtime.getDevice()) != 90:
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setattr(families, "FORCED", "sm90_wide")
    calls.clear()
    yield
    calls.clear()


def row_of(d):
    return configs.choose("sm90_wide", "forward", "float32", d, d, (False,) * 3, 90).geometry


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("causal", [False, "top_left"], ids=str)
@pytest.mark.parametrize(
    ("q_size", "k_size", "v_size"),
    [
        (1, 1, 1),
        (12, 1, 1),
        (120, 1, 1),
        (1, 1, 1e4),
        (1, 1, 1e-4),
        (1, 1e4, 1),
        (1, 1e-4, 1),
        (1e5, 1e-5, 1),
    ],
)
def test_products_of_planes_are_as_exact_as_float32(cupy, monkeypatch, d, causal, q_size, k_size, v_size):
    monkeypatch.setattr(families, "FORCED", None)
    q, k, v = (
        x * np.float32(size)
        for x, size in zip(qkv(cupy, 1, 8, 512, 512, d), (q_size, k_size, v_size), strict=True)
    )
    exact = reference.attention(host(q), host(k), host(v), causal=causal, return_lse=True)
    found, ieee = (
        host(cupyflash.attention(q, k, v, causal=causal, return_lse=True, precision=precision))
        for precision in ("tf32x3", "ieee")
    )
    for name, x, y, z in zip(("out", "lse"), found, ieee, exact, strict=True):
        ours, bound, unit = (
            testing.errors(x, z),
            testing.errors(y, z),
            np.spacing(abs(z).max().astype(np.float32)),
        )
        assert ours.rms <= max(2 * bound.rms, unit / 8), f"{name}: rms {ours.rms}, of ieee {bound.rms}"
        assert ours.max <= max(2 * bound.max, unit), f"{name}: max {ours.max}, of ieee {bound.max}"


@pytest.mark.parametrize("d", DIMS)
def test_long_sums_of_values_of_one_sign_do_not_drift(cupy, d):
    q, k, v = qkv(cupy, 1, 1, 256, 20000, d)
    v = abs(v)
    exact = reference.attention(host(q), host(k), host(v))
    error = wide(cupyflash.attention(q, k, v)) - exact
    assert abs(error.mean()) < 3e-7
    assert abs(error).max() < 2e-6


@pytest.mark.parametrize("d", DIMS)
def test_a_lone_key_gives_its_value_bit_by_bit(cupy, d):
    q, k, v = qkv(cupy, 1, 2, M, N, d, size=100.0)
    v = v * np.exp2(normal(cupy, v.shape, size=10.0, seed=9))
    seen = np.arange(M) % N
    mask = cupy.asarray(np.arange(N) == seen[:, None])
    assert_same(host(cupyflash.attention(q, k, v, mask=mask)), host(v)[:, :, seen])


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_option_and_pair_of_options(cupy, d, pair):
    rng = np.random.default_rng(3)
    given = dict(test_sm90_wide.ONE_OPTION)
    given["lengths"] = {"kv_lengths": [N - 60, 0], "q_lengths": [30, M]}
    given["window"] = {"window": (90, 30), "causal": "bottom_right"}
    given["mask"] = {"mask": cupy.asarray(rng.random((1, M, N)) < 0.6)}
    given["bias"] = {"bias": normal(cupy, (2, 1, M, N), seed=4)}
    given["alibi"] = {"alibi_slopes": cupy.asarray([0.5, 0.1, -0.02, 0.0], np.float32), "query_offset": 20}
    given["softcap"] = {"softcap": 1.5}
    given["sinks"] = {"sinks": normal(cupy, (4,), seed=5)}
    options = given[pair[0]] | given[pair[1]]
    if "causal" in options:
        options.pop("query_offset", None)
    q, k, v = qkv(cupy, 2, 4, M, N, d, heads_kv=2)
    for item, length in enumerate(options.get("kv_lengths", ())):
        k[item, :, length:] = np.nan
        v[item, :, length:] = np.nan
    assert cupyflash.plan(q, k, v, **options).family == "sm90_wide"
    check(q, k, v, backward=False, **options)


@pytest.mark.parametrize("d", DIMS)
def test_lengths_around_the_edges_of_tiles(cupy, d):
    tile, rows = row_of(d).block_kv, row_of(d).block_q
    for n in sorted({n + step for n in (1, 16, tile, 2 * tile, 3 * tile) for step in (-1, 0, 1)} - {0}):
        check(*qkv(cupy, 1, 2, M, n, d, seed=n), causal="bottom_right", backward=False)
    for m in (2 * rows - 1, 2 * rows, 2 * rows + 1, 2 * rows + 64, 2 * rows + 65):
        check(*qkv(cupy, 1, 2, max(m, 256), 150, d, seed=m), backward=False)


@pytest.mark.parametrize("dims", [(1, 1), (7, 128), (64, 100), (65, 64), (127, 3), (96, 96)], ids=str)
def test_head_dims(cupy, dims):
    d, e = dims
    check(*qkv(cupy, 2, 2, M, 100, d, e, heads_kv=1), causal="bottom_right", backward=False)


@pytest.mark.parametrize(
    "form", [{}, {"causal": "bottom_right"}, {"window": (60, 20), "query_offset": 3}], ids=str
)
@pytest.mark.parametrize("d", DIMS)
def test_more_tiles_than_blocks_and_an_odd_number(cupy, d, form):
    check(*qkv(cupy, 3, 91, 257, 150, d, heads_kv=13), backward=False, **form)


def test_layouts(cupy):
    """The same bits wherever the numbers lie."""
    q, k, v = qkv(cupy, 3, 4, M, N, 100, 60, heads_kv=2)
    expected = host(cupyflash.attention(q, k, v, return_lse=True))
    odd = [cupy.concatenate([x, x[..., :1]], -1)[..., ::-1][..., 1:][..., ::-1] for x in (q, k, v)]
    turned = [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    columns = [cupy.asfortranarray(x) for x in (q, k, v)]
    backward = [cupy.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1] for x in (q, k, v)]
    for arrays in (odd, turned, columns, backward):
        assert_same(host(cupyflash.attention(*arrays, return_lse=True)), expected)


@pytest.mark.parametrize("shared", [(1, 1), (1, 4), (3, 1)], ids=str)
def test_keys_that_items_or_heads_share_are_split_once(cupy, shared):
    q, k, v = qkv(cupy, 3, 4, M, N, 64)
    few = k[: shared[0], : shared[1]], v[: shared[0], : shared[1]]
    full = [cupy.broadcast_to(x, (3, 4, N, 64)) for x in few]
    dense = [cupy.ascontiguousarray(x) for x in full]
    planes = -(-shared[0] * shared[1] * N * 64 * 6 // 256) * 256
    assert cupyflash.plan(q, *full).workspace_bytes == 2 * planes
    assert_same(host(cupyflash.attention(q, *full)), host(cupyflash.attention(q, *dense)))


def test_leading_axes(cupy):
    shape = (2, 3, 2)
    q, k, v = (normal(cupy, (*shape, rows, 64), seed=seed) for seed, rows in enumerate((M, N, N)))
    k, v = k[:, :1], v[:, :1]  # broadcast over the second axis
    check(q, k, v, backward=False, kv_lengths=cupy.asarray([[N, 5, 0], [100, N, 64]]))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_keys_that_are_no_numbers_reach_only_the_rows_that_see_them(cupy, d, value):
    q, k, v = qkv(cupy, 1, 2, M, N, d)
    clean = host(cupyflash.attention(q, k, v, causal="top_left", return_lse=True))
    k[:, :, 150] = value
    out, lse = host(cupyflash.attention(q, k, v, causal="top_left", return_lse=True))
    assert_same((out[:, :, :150], lse[:, :, :150]), (clean[0][:, :, :150], clean[1][:, :, :150]))
    assert not np.isfinite(lse[:, :, 150:]).any()


@pytest.mark.parametrize("d", DIMS)
def test_scores_beyond_the_largest_float_are_infinite(cupy, d):
    q, k, v = qkv(cupy, 1, 2, M, N, d)
    k = abs(k)
    clean = host(cupyflash.attention(q, k, v, return_lse=True))
    q[0, 0, 5], q[0, 0, 9] = 3e38, -3e38
    out, lse = host(cupyflash.attention(q, k, v, return_lse=True))
    assert lse[0, 0, 5] == np.inf
    assert np.isnan(out[0, 0, 5]).all()
    assert lse[0, 0, 9] == NEG_INF
    assert not out[0, 0, 9].any()
    others = np.delete(np.arange(M), [5, 9])
    assert_same((out[:, :, others], lse[:, :, others]), (clean[0][:, :, others], clean[1][:, :, others]))


def test_a_call_seen_before_gives_the_same_bits_and_takes_new_arrays(cupy):
    q, k, v = qkv(cupy, 2, 4, M, N, 64, heads_kv=2)
    calls.clear()
    first = host(cupyflash.attention(q, k, v, return_lse=True))
    assert_same(host(cupyflash.attention(q, k, v, return_lse=True)), first)
    again = qkv(cupy, 2, 4, M, N, 64, heads_kv=2, seed=5)
    calls_first = host(cupyflash.attention(*again, return_lse=True))
    calls.clear()
    assert_same(host(cupyflash.attention(*again, return_lse=True)), calls_first)


def test_workspace_of_the_caller(cupy):
    q, k, v = qkv(cupy, 2, 4, M, N, 128, heads_kv=2)
    expected = host(cupyflash.attention(q, k, v))
    workspace = cupy.full(cupyflash.plan(q, k, v).workspace_bytes, 255, cupy.uint8)
    assert_same(host(cupyflash.attention(q, k, v, workspace=workspace)), expected)
