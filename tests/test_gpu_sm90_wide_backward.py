"""The Hopper backward of float32 on its GPU: precision, options, tiles' edges, bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import assert_same, check, host, normal, qkv
from test_gpu_sm90_wide import DIMS, M, N, hopper  # noqa: F401

import cupyflash
from cupyflash import reference, testing
from cupyflash.cuda import families

pytestmark = pytest.mark.gpu

PLAIN = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (90, 30), "query_offset": N - M},
    "lengths": {"kv_lengths": [N - 60, 0], "q_lengths": [30, M]},
    "offset": {"window": (None, 2), "query_offset": -20},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": np.array([0.5, -1, 0, 2], np.float32)},
}
PAIRS = list(itertools.combinations_with_replacement(PLAIN, 2))


def gradients(q, k, v, dout, **options):
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return cupyflash.attention_backward(dout, q, k, v, out, lse, **options)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_option_and_pair_of_options(cupy, d, pair):
    options = PLAIN[pair[0]] | PLAIN[pair[1]]
    if "causal" in options:
        options.pop("query_offset", None)
    if "sinks" in options:
        options["sinks"] = cupy.asarray(options["sinks"])
    q, k, v = qkv(cupy, 2, 4, M, N, d, heads_kv=2)
    for b, length in enumerate(options.get("kv_lengths", ())):
        k[b, :, length:] = v[b, :, length:] = np.nan
    for b, length in enumerate(options.get("q_lengths", ())):
        q[b, :, length:] = np.nan
    assert "split_all" in cupyflash.plan(q, k, v, backward=True, **options).kernels
    check(q, k, v, **options)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("causal", [False, "top_left"], ids=str)
@pytest.mark.parametrize(
    ("q_size", "k_size", "v_size"),
    [(1, 1, 1), (12, 1, 1), (120, 1, 1), (1, 1e-4, 1), (1, 1, 1e4), (1, 1, 1e-4)],
)
def test_gradients_are_as_exact_as_float32(cupy, monkeypatch, d, causal, q_size, k_size, v_size):
    monkeypatch.setattr(families, "FORCED", None)
    sizes = (q_size, k_size, v_size)
    q, k, v = (x * np.float32(size) for x, size in zip(qkv(cupy, 1, 4, 512, 512, d), sizes, strict=True))
    dout = normal(cupy, q.shape, seed=90)
    exact = reference.attention_backward(*map(host, (dout, q, k, v)), causal=causal)
    ours, ieee = (
        host(gradients(q, k, v, dout, causal=causal, precision=precision)) for precision in ("tf32x3", "ieee")
    )
    for name, x, y, z in zip("qkv", ours, ieee, exact):
        found, bound = testing.errors(x, z), testing.errors(y, z)
        unit = np.spacing(abs(z).max().astype(np.float32))
        assert found.rms <= max(2 * bound.rms, unit / 8), f"d{name}: rms {found.rms}, of ieee {bound.rms}"
        assert found.max <= max(2 * bound.max, unit), f"d{name}: max {found.max}, of ieee {bound.max}"


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_the_gradient_of_a_bias_that_was_not_broadcast_leaves_a_kernel_that_has_scores(
    cupy, monkeypatch, dtype, d
):
    monkeypatch.setattr(families, "FORCED", None)
    q, k, v = qkv(cupy, 2, 4, M, N, d, heads_kv=2, dtype=dtype)
    bias, mask = normal(cupy, (2, 4, M, N), dtype, 6), normal(cupy, (M, N), seed=7) > 0
    bias[:, :, 5:9, 60:] = -np.inf
    dropped = {"dropout_p": 0.3, "dropout_seed": 5}
    lengths = {"q_lengths": [M, 9], "kv_lengths": [N - 70, N]}
    shaped = {"softcap": 2.0, "alibi_slopes": normal(cupy, (4,), seed=8), "query_offset": N - M}
    for options in (lengths, {"causal": "top_left", "mask": mask, **dropped}, shaped):
        assert "backward_bias" not in cupyflash.plan(q, k, v, backward=True, bias=bias, **options).kernels
        check(q, k, v, bias=bias, **options)
        check(q, k, v, bias=bias.swapaxes(2, 3).copy().swapaxes(2, 3), **options)


@pytest.mark.parametrize("d", DIMS)
def test_lengths_around_the_edges_of_tiles(cupy, d):
    for n in sorted({n + step for n in (1, 64, 128, 192) for step in (-1, 0, 1)} - {0}):
        check(*qkv(cupy, 1, 2, M, n, d, seed=n), causal="bottom_right")
        check(*qkv(cupy, 1, 2, n, M, d, seed=n), causal="top_left")


@pytest.mark.parametrize("dims", [(1, 1), (7, 128), (64, 100), (65, 64), (127, 3), (96, 96)], ids=str)
def test_head_dims(cupy, dims):
    check(*qkv(cupy, 2, 2, M, 100, *dims, heads_kv=1), causal="bottom_right")


@pytest.mark.parametrize("d", DIMS)
def test_bits_depend_on_values_alone(cupy, d):
    """Not on the run, the layout, or the batch beside them."""
    q, k, v = qkv(cupy, 3, 4, M, N, d, heads_kv=2)
    dout = normal(cupy, q.shape, seed=90)
    first = host(gradients(q, k, v, dout))
    for _ in range(10):
        assert_same(host(gradients(q, k, v, dout)), first)
    turned = [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, dout)]
    assert_same(host(gradients(*turned)), first)
    alone = host(gradients(*(x[1:2] for x in (q, k, v, dout))))
    for x, y in zip(alone[:3], first[:3]):
        assert_same(x, y[1:2])


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v")], ids="".join)
def test_some_of_the_gradients(cupy, wrt):
    q, k, v = qkv(cupy, 2, 4, M, N, 128, heads_kv=2)
    dout = normal(cupy, q.shape, seed=90)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    every = host(cupyflash.attention_backward(dout, q, k, v, out, lse))
    some = host(cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt))
    for name in "qkv":
        found = getattr(some, name)
        assert (found is None) == (name not in wrt)
        if found is not None:
            assert_same(found, getattr(every, name))


def test_gradients_are_added_to_arrays_of_the_caller(cupy):
    q, k, v = qkv(cupy, 2, 2, M, N, 64)
    dout = normal(cupy, q.shape, seed=90)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    plain = cupyflash.attention_backward(dout, q, k, v, out, lse)
    into = [cupy.ones_like(x) for x in (q, k, v)]
    targets = cupyflash.Gradients(*into, None, None, None)
    cupyflash.attention_backward(dout, q, k, v, out, lse, grads_out=targets, accumulate=True)
    for name, x, y in zip("qkv", into, plain[:3]):
        assert_same(host(x), host(y + 1), f"d{name}")


def test_what_the_kernels_do_not_take_runs_elsewhere(cupy):
    q, k, v = qkv(cupy, 2, 4, M, N, 64)
    check(q, k[:1], v)
    check(q, k, v, softcap=2.0)
    check(q, k, v, bias=normal(cupy, (4, M, N), seed=4))
