"""The portable family on a CPU: every kernel, dtype and option against the reference, in several execution orders."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import BFLOAT16, DTYPE_IDS, DTYPES, assert_same, check, eye_values, normal, qkv

import cupyflash
from cupyflash import testing
from cupyflash.cuda import configs, recipe
from cupyflash.cuda.emulate import Machine

pytestmark = needs_compiler

PORTABLE = 75  # a compute capability that no other family runs on
HEADS, HEADS_KV, BATCH, D, E = 2, 1, 2, 24, 40


def edges(dtype, family="simt", compute_capability=PORTABLE):
    """(m, n) just below, at and just over the tiles of each kernel."""
    pairs = set()
    for kernel in ("forward", "backward_q", "backward_kv"):
        name = np.dtype(dtype).name
        tile = configs.choose(family, kernel, name, D, E, (False,) * 3, compute_capability).geometry
        pairs |= {(tile.block_q + step, tile.block_kv + step) for step in (-1, 0, 1)}
    return sorted(pairs)


def cases(m, n, dtype, seed=7):
    """Options by name; the first ones need no kernel but the plain one."""
    rng = np.random.default_rng(seed)
    q_lengths, kv_lengths = np.array([m, m // 2]), np.array([n // 3, n])
    mask = rng.random((BATCH, 1, m, n)) < 0.7
    mask[0, 0, m // 2] = False  # a row that sees nothing
    bias = normal(np, (HEADS, m, n), dtype, seed)
    bias[:, 0, : n // 2] = -np.inf
    slopes, sinks = normal(np, (HEADS,), np.float32, seed + 1), normal(np, (BATCH, HEADS), dtype, seed + 2)
    dropout = {"dropout_p": 0.3, "dropout_seed": 2**63 + 11, "dropout_offset": 5}
    return {
        "plain": {},
        "causal": {"causal": "top_left"},
        "bottom right": {"causal": "bottom_right", "kv_lengths": kv_lengths},
        "window": {"window": (9, 4), "query_offset": n - m},
        "offsets": {"window": (None, 2), "query_offset": np.array([-4, n // 2])},
        "lengths": {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "scale": -0.3},
        "sinks": {"sinks": sinks, "kv_lengths": np.array([0, n])},
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": slopes, "query_offset": 3},
        "dropout": dropout,
        "dropout of a shard": dropout | {"dropout_origin": (np.array([[4], [9]]), 3, 17)},
        "everything": {
            **dropout,
            "dropout_origin": (0, 16, 32),
            "causal": "bottom_right",
            "window": (n, None),
            "mask": mask,
            "bias": bias,
            "softcap": 2.0,
            "alibi_slopes": slopes,
            "sinks": sinks,
            "q_lengths": q_lengths,
            "kv_lengths": kv_lengths,
        },
    }


def arrays(m, n, dtype, options):
    """q, k, v, with NaN wherever nobody may look."""
    q, k, v = qkv(np, BATCH, HEADS, m, n, D, E, heads_kv=HEADS_KV, dtype=dtype)
    for b in range(BATCH):
        for x in (k, v):
            x[b, :, options.get("kv_lengths", [n] * BATCH)[b] :] = np.nan
        q[b, :, options.get("q_lengths", [m] * BATCH)[b] :] = np.nan
    return q, k, v


def check_case(name, m, n, dtype, compute_capability=PORTABLE, backward=True):
    case = cases(m, n, dtype)[name]
    machine = Machine(compute_capability=compute_capability)
    check(*arrays(m, n, dtype, case), via=vjp_on(machine), backward=backward, **case)
    return machine


PLAIN_CASES = ("plain", "causal", "bottom right", "window", "offsets", "lengths", "sinks")


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_positions_and_lengths(name):
    for m, n in edges(np.float32)[::4]:
        check_case(name, m, n, np.float32)


@pytest.mark.parametrize("deterministic", [True, False], ids=["in order", "in any order"])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_all_gradients_of_plain_float32_come_from_one_kernel(head_dim, deterministic):
    machine = Machine(compute_capability=90)
    q, k, v = qkv(np, 2, 4, 70, 300, head_dim, heads_kv=2, dtype=np.float32)
    options = {"causal": "bottom_right", "precision": "ieee", "deterministic": deterministic}
    check(q, k, v, via=vjp_on(machine), **options)
    assert [config.kernel for config in dict.fromkeys(machine.launched)] == ["forward", "delta", "backward"]


def test_everything_at_once():
    for m, n in edges(np.float32)[1::3]:
        machine = check_case("everything", m, n, np.float32)
    kernels = {*configs.kernels_of("simt"), "delta", "sum_rows"} - {"backward"}  # which is for plain calls
    assert {config.kernel for config in machine.launched} >= kernels


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float64)], ids=str)
def test_other_dtypes(dtype):
    check_case("everything", *edges(dtype)[-1], dtype, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", cases(2, 2, np.float32))
def test_every_option_at_every_edge(name, dtype):
    for m, n in edges(dtype):
        check_case(name, m, n, dtype)


def machines(**options):
    """Three execution orders, and the largest number of blocks at a time."""
    return [Machine(seed=seed, workers=workers, **options) for seed, workers in ((0, 1), (1, 2), (2, 4))]


def all_results(machine, m, n, dtype, options):
    q, k, v = arrays(m, n, dtype, options)
    out, lse = machine.attention(q, k, v, **options)
    dout, dlse = normal(np, out.shape, out.dtype, 90), normal(np, lse.shape, lse.dtype, 91)
    return out, lse, machine.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_same_bits_in_every_order(name, dtype):
    m, n = edges(dtype)[-1]
    first, *others = (
        all_results(machine, m, n, dtype, cases(m, n, dtype)[name])
        for machine in machines(compute_capability=PORTABLE)
    )
    for other in others:
        assert_same(first, other)


@pytest.mark.parametrize("origin", [(0, 0, 0), (7, 5, 1000)])
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)], ids=["float32", "float64"]
)
def test_dropout_bits_are_those_of_dropout_mask(dtype, origin):
    """One-hot values show the weights that were kept: forward through out, backward through dv."""
    m, n = 67, 40
    options = {"dropout_p": 0.4, "dropout_seed": 99, "dropout_offset": 3, "dropout_origin": origin}
    q, k, _ = qkv(np, BATCH, HEADS, m, n, D, dtype=dtype)
    v, dout = eye_values(np, n, dtype, BATCH, HEADS), eye_values(np, m, dtype, BATCH, HEADS)[..., :n]
    kept = cupyflash.dropout_mask((BATCH, HEADS, m, n), 0.4, 99, 3, origin)
    machine = Machine(compute_capability=PORTABLE)
    out, lse = machine.attention(q, k, v, **options)
    np.testing.assert_array_equal(out != 0, kept)
    dv = machine.attention_backward(dout, q, k, v, out, lse, wrt="v", **options).v  # (key, query) of r p
    np.testing.assert_array_equal(dv != 0, kept[..., :n, :].swapaxes(-1, -2))


def test_rows_that_see_nothing_are_empty():
    q, k, v = qkv(np, BATCH, HEADS, 5, 7, D, E)
    machine = Machine(compute_capability=PORTABLE)
    for options in (
        {"kv_lengths": 0},
        {"mask": np.zeros((5, 7), bool)},
        {"causal": True, "query_offset": -5},
    ):
        out, lse = machine.attention(q, k, v, **options)
        np.testing.assert_array_equal(out, np.zeros_like(out))
        np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("d_and_e", [(1, 1), (37, 61), (64, 0), (64, 64), (150, 130), (20, 300)], ids=str)
def test_head_dims(d_and_e, dtype):
    d, e = d_and_e
    q, k, v = qkv(np, 1, HEADS, 35, 33, d, e, heads_kv=HEADS_KV, dtype=dtype)
    check(q, k, v, via=vjp_on(Machine(compute_capability=PORTABLE)), causal="bottom_right")


@pytest.mark.slow
@pytest.mark.parametrize("compute_capability", [60, 70, 80, 90])
def test_tiles_of_other_gpus(compute_capability):
    q, k, v = qkv(np, 1, HEADS, 130, 65, 64, heads_kv=HEADS_KV, dtype=np.float32)
    machine = Machine(compute_capability=compute_capability)
    check(q, k, v, via=vjp_on(machine), causal="bottom_right", precision="ieee")
    assert {config.family for config in machine.launched} == {"simt", "prepost"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_strides(layout, dtype):
    m, n = 37, 43
    options = cases(m, n, dtype)["everything"]
    plain = all_results(Machine(compute_capability=PORTABLE), m, n, dtype, options)
    q, k, v = (testing.lay_out(x, layout) for x in arrays(m, n, dtype, options))
    options |= {name: testing.lay_out(options[name], layout) for name in ("mask", "bias")}
    machine = Machine(compute_capability=PORTABLE)
    out, lse = machine.attention(q, k, v, **options)
    dout, dlse = (normal(np, x.shape, x.dtype, seed) for x, seed in ((out, 90), (lse, 91)))
    gradients = machine.attention_backward(
        testing.lay_out(dout, layout), q, k, v, out, lse, dlse=dlse, **options
    )
    assert_same((out, lse, gradients), plain)


@pytest.mark.parametrize("compute_capability", [PORTABLE, 80])
def test_results_that_vanish_have_the_same_sign_in_every_layout(compute_capability):
    q, k, v = qkv(np, 1, 1, 20, 20, 40, dtype=BFLOAT16)
    k, v = (x * BFLOAT16.type(1e-19) for x in (k, v))
    options = {"sinks": np.asarray([86.0], np.float32), "query_offset": 0}

    def results(layout, wrt):
        machine = Machine(compute_capability=compute_capability)
        laid_out = [testing.lay_out(x, layout) for x in (q, k, v)]
        out, lse = machine.attention(*laid_out, **options)
        dout = testing.lay_out(normal(np, out.shape, BFLOAT16), layout)
        return out, machine.attention_backward(dout, *laid_out, out, lse * 0, wrt=wrt, **options)

    for wrt in (["q"], ["q", "k", "v"]):
        plain = results("contiguous", wrt)
        assert all((np.signbit(x) & (x == 0)).any() for x in (plain[0], plain[1].q))
        assert_same(results("transposed", wrt), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (33,),
        (34, 1),
        (1, 33),
        (HEADS, 34, 33),
        (3, 1, 34, 33),
        (1, 1, 1, 33),
        (3, HEADS, 1, 1),
        (3, HEADS, 34, 33),
    ],
)
def test_gradients_of_broadcast_biases(shape):
    """Each axis of a bias is kept or summed; every argument that is broadcast over the batch is summed too."""
    q, _, _ = qkv(np, 3, HEADS, 34, 33, D)
    k, v = (x[0, :HEADS_KV] for x in qkv(np, 1, HEADS, 33, 33, D, seed=1)[1:])
    check(q, k, v, via=vjp_on(Machine(compute_capability=PORTABLE)), bias=normal(np, shape, np.float32, 5))


@pytest.mark.slow
def test_leading_axes():
    q = normal(np, (2, 1, 3, HEADS, 20, D), seed=0)
    k, v = normal(np, (2, 1, HEADS_KV, 21, D), seed=1), normal(np, (3, HEADS_KV, 21, E), seed=2)
    options = {
        "mask": np.random.default_rng(0).random((2, 1, 1, 1, 20, 21)) < 0.8,
        "dropout_p": 0.2,
        "dropout_seed": 1,
    }
    check(q, k, v, via=vjp_on(Machine(compute_capability=PORTABLE)), **options)


@pytest.mark.slow
def test_gradients_are_added_to_what_is_there():
    q, k, v = qkv(np, BATCH, HEADS, 20, 21, D, E, heads_kv=HEADS_KV)
    machine = Machine(compute_capability=PORTABLE)
    out, lse = machine.attention(q, k, v)
    dout = normal(np, out.shape, seed=9)
    alone = machine.attention_backward(dout, q, k, v, out, lse)
    there = cupyflash.Gradients(q=np.ones_like(q), k=np.ones_like(k), v=np.ones_like(v))
    given = machine.attention_backward(dout, q, k, v, out, lse, grads_out=there, accumulate=True)
    for name in "qkv":
        assert getattr(given, name) is getattr(there, name)
        np.testing.assert_allclose(getattr(there, name), getattr(alone, name) + 1, rtol=1e-6, atol=1e-6)
    delta = np.einsum("...e,...e->...", dout, out)
    assert_same(machine.attention_backward(dout, q, k, v, None, lse, delta=delta, wrt="v").v, alone.v)


def test_long_sums_are_rounded_once_a_tile():
    """Of equal weights: gradients of values are sums of dout, rounded 2048 times one by one, 64 times by tiles."""
    q, k = np.zeros((1, 2048, 1), np.float32), np.zeros((1, 2, 1), np.float32)
    dout = np.random.default_rng(3).random((1, 2048, 8), np.float32)
    machine, v = Machine(compute_capability=PORTABLE), dout[:, :2]
    out, lse = machine.attention(q, k, v)
    dv = machine.attention_backward(dout, q, k, v, out, lse, wrt=("v",)).v
    worst = np.abs(dv / (dout.sum(axis=1, dtype=np.float64)[:, None] / 2) - 1).max()
    assert worst < 2**-22, f"{worst:.1e}"


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_few_and_many_blocks_give_the_same_bits(causal, monkeypatch):
    q, k, v = qkv(np, 1, 2, 150, 140, 100)
    machine, results = Machine(compute_capability=90), []
    for few in (0, 1000):
        monkeypatch.setattr(recipe, "FEW_BLOCKS", few)
        recipe.forward_recipe.cache_clear()
        results.append(machine.attention(q, k, v, precision="ieee", causal=causal))
    recipe.forward_recipe.cache_clear()
    assert [config.geometry.block_q for config in machine.launched] == [128, 64]
    assert_same(*results)


@pytest.mark.parametrize("d", [20, 64, 100])
def test_keys_that_come_a_chunk_ahead(d):
    q, k, v = qkv(np, 2, 2, 70, 140, d)
    mask = normal(np, (70, 140), seed=7) > 0
    for options in ({"q_lengths": [70, 9], "kv_lengths": [130, 0]}, {"causal": "bottom_right", "mask": mask}):
        machine = Machine(compute_capability=90)
        check(q, k, v, via=vjp_on(machine), precision="ieee", **options)
        assert next(c for c in machine.launched if c.kernel == "forward").geometry.ahead
