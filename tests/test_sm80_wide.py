"""The tensor-core family of float32 and float64: what it takes, its exponential, and its kernels in the emulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_emulate
from emulated import needs_compiler, run, vjp_on
from support import NEG_INF, assert_same, check, normal, qkv, wide

import cupyflash
from cupyflash import reference, testing
from cupyflash.cuda import configs, families
from cupyflash.cuda.emulate import Machine

SM90 = 90
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
OPTIONS = {
    name: given for name, given in test_emulate.cases(64, 64, np.float32).items() if name != "everything"
}
PAIRS = list(itertools.combinations_with_replacement(OPTIONS, 2))


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """This family, on Hopper too."""
    monkeypatch.setattr(families, "FORCED", "sm80_wide")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_family_takes_every_option_and_every_pair_of_them(pair, dtype, backward):
    options = OPTIONS[pair[0]] | OPTIONS[pair[1]]
    if "causal" in options:
        options.pop("query_offset", None)
    for dim, arch in itertools.product((64, 128), (80, 90)):
        q, k, v = qkv(np, 2, 2, 64, 64, dim, dim, heads_kv=1, dtype=dtype)
        plan = cupyflash.plan(q, k, v, backward=backward, arch=arch, **options)
        assert plan.family == "sm80_wide"


def plan_of(dtype=np.float32, d=64, arch=SM90, **options):
    return cupyflash.plan(*qkv(np, m=8, d=d, dtype=dtype), arch=arch, **options)


def test_which_family_runs_what(monkeypatch):
    monkeypatch.setattr(families, "FORCED", None)
    assert plan_of(precision="ieee").family == plan_of(arch=75).family == plan_of(d=129).family == "simt"
    for arch in (80, 86, 90, 120):
        assert plan_of(arch=arch).family == plan_of(precision="tf32x3", arch=arch).family == "sm80_wide"
        doubles = "sm80_wide" if arch in (80, 90) else "simt"
        assert plan_of(np.float64, arch=arch).family == doubles
    assert "tf32" in plan_of(precision="tf32").config.split()
    assert "tf32" not in plan_of(precision="tf32x3").config.split()
    for precision, refused in (("tf32", {"arch": 75}), ("tf32x3", {"d": 129})):
        with pytest.raises(ValueError, match=f"not {precision}"):
            plan_of(precision=precision, **refused)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_doubles_go_where_tensor_cores_are_fast_at_them(arch):
    if arch in (80, 90, 100):
        assert plan_of(np.float64, arch=arch).family == "sm80_wide"
    else:
        with pytest.raises(ValueError, match="takes float64 where tensor cores are fast at it"):
            plan_of(np.float64, arch=arch)


FUNCTION = """#include "attn/tangent.cuh"
struct Record {{ const double* x; double* y; i64 count; }};
extern "C" __global__ void toy(const Record p) {{
  for (i64 n = thread_index(); n < p.count; n += 64) p.y[n] = {name}(p.x[n]);
}}
"""


def of_doubles(name, x):
    y = np.full_like(x, 7)
    run(FUNCTION.format(name=name), mode="plain", writes=("y",), x=x, y=y, count=x.size)
    return y


def decay(x):
    return of_doubles("decay", x)


def tangent(x):
    return of_doubles("tangent", x)


@needs_compiler
def test_the_exponential_of_doubles_is_right_to_one_last_place():
    rng = np.random.default_rng(0)
    x = np.concatenate([-rng.uniform(0, span, 200_000) for span in (1e-9, 0.4, 1, 40, 706)])
    near_halves = -np.log(2) * (np.arange(1000) + 0.5)
    x = np.concatenate([x, near_halves, np.nextafter(near_halves, 0), [0.0, -0.0, -706.0]])
    exact = np.exp(x.astype(np.longdouble))
    error = np.abs(decay(x) - exact) / np.spacing(exact.astype(np.float64))
    assert error.max() < 1


@needs_compiler
def test_the_exponential_of_doubles_at_the_ends():
    assert_same(decay(np.array([0.0, -800.0, -1e300, NEG_INF])), np.array([1.0, 0, 0, 0]))
    assert np.isnan(decay(np.array([np.nan]))).all()


@needs_compiler
def test_the_tangent_of_doubles_is_right_to_three_last_places():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-span, span, 200_000) for span in (1e-9, 0.3, 1, 2, 20, 400)])
    near_halves = np.log(2) * (np.arange(60) + 0.5) / 2
    x = np.concatenate([x, near_halves, np.nextafter(near_halves, 0), [1e-300, -1e-300]])
    exact = np.tanh(x.astype(np.longdouble))
    error = np.abs(tangent(x) - exact) / np.spacing(np.abs(exact.astype(np.float64)))
    assert error.max() < 3


@needs_compiler
def test_the_tangent_of_doubles_at_the_ends():
    x = np.array([0.0, -0.0, 400.0, -1e300, NEG_INF, -NEG_INF])
    assert_same(tangent(x), np.array([0.0, -0.0, 1, -1, -1, 1]))
    assert np.isnan(tangent(np.array([np.nan]))).all()


def check_case(name, dtype, m=70, n=139, compute_capability=SM90, **options):
    case, machine = (
        test_emulate.cases(m, n, dtype)[name] | options,
        Machine(compute_capability=compute_capability),
    )
    check(*test_emulate.arrays(m, n, dtype, case), via=vjp_on(machine), **case)
    return machine


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_the_kernels_in_the_emulation(name, dtype):
    assert {config.family for config in check_case(name, dtype).launched} == {"sm80_wide", "prepost"}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", test_emulate.cases(2, 2, np.float32))
def test_every_option_at_every_edge(name, dtype):
    for m, n in test_emulate.edges(dtype, "sm80_wide", SM90):
        check_case(name, dtype, m, n)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d_and_e", [(1, 1), (37, 61), (64, 0), (128, 80), (100, 128)], ids=str)
def test_head_dims(d_and_e, dtype):
    q, k, v = qkv(np, 1, 2, 35, 33, *d_and_e, heads_kv=1, dtype=dtype)
    check(q, k, v, via=vjp_on(Machine(compute_capability=SM90)), causal="bottom_right")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option_of_wide_heads(dtype):
    options = test_emulate.cases(70, 150, dtype)["everything"]
    del options["alibi_slopes"]  # whose gradient needs two kernels
    q, k, v = (np.concatenate([x] * 3, -1) for x in test_emulate.arrays(70, 150, dtype, options))
    machine = Machine(compute_capability=SM90)
    check(q, k, v, via=vjp_on(machine), **options)
    assert [config.family for config in machine.launched if config.kernel == "backward"] == ["sm80_wide"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_no_bit(dtype):
    q, k, v = qkv(np, 1, 2, 70, 90, 64, dtype=dtype)
    machine = Machine(compute_capability=SM90)
    dense = machine.attention(q, k, v)
    odd = [np.concatenate([x, x[..., :1]], -1)[..., ::-1][..., 1:][..., ::-1] for x in (q, k, v)]
    assert_same(machine.attention(*odd), dense)
    assert_same(machine.attention(*(np.asfortranarray(x) for x in (q, k, v))), dense)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_same_bits_in_every_order(name, dtype):
    options = test_emulate.cases(70, 150, dtype)[name]
    first, *others = (
        test_emulate.all_results(machine, 70, 150, dtype, options)
        for machine in test_emulate.machines(compute_capability=SM90)
    )
    for other in others:
        assert_same(first, other)


@needs_compiler
@pytest.mark.parametrize("size", [1, 12, 120], ids=["ordinary", "scores of 50", "scores of 500"])
def test_three_products_of_tf32_are_as_exact_as_float32(size, monkeypatch):
    monkeypatch.setattr(families, "FORCED", None)
    q, k, v = qkv(np, 1, 1, 64, 512, 64)
    q = q * np.float32(size)
    exact, plain = reference.attention(q, k, v), testing.plain(q, k, v)
    found = {
        precision: testing.errors(
            Machine(compute_capability=SM90).attention(q, k, v, precision=precision)[0], exact
        )
        for precision in ("ieee", "tf32x3", "tf32")
    }
    assert found["tf32x3"].rms < 2 * found["ieee"].rms
    assert found["tf32x3"].max < 2 * found["ieee"].max
    assert found["tf32x3"].rms < 2 * testing.errors(plain, exact).rms
    assert found["tf32"].rms > 20 * found["tf32x3"].rms


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_large_scores_fit_to_lse(dtype):
    """Scores of 10^5, of which the backward makes the very sums and roundings that the forward made."""
    q, k, v = qkv(np, 1, 2, 70, 150, 128, dtype=dtype)
    check(q, k * dtype.type(1e4), v, via=vjp_on(Machine(compute_capability=SM90)))


def kernels_of(dtype=np.float32, d=64, arch=SM90, **options):
    return cupyflash.plan(*qkv(np, m=8, d=d, dtype=dtype), arch=arch, backward=True, **options).kernels


def test_gradients_come_from_one_kernel_where_it_has_room():
    for dtype, d in itertools.product(DTYPES, (8, 64, 128)):
        assert kernels_of(dtype, d) == kernels_of(dtype, d, softcap=2.0) == ("delta", "backward")
    two = ("delta", "backward_kv", "backward_q")
    assert kernels_of(np.float32, 128, 86) == kernels_of(np.float64, 128, 80) == two
    slopes = {"alibi_slopes": np.ones(1, np.float32)}
    assert kernels_of(**slopes) == ("delta", "backward", "backward_addends", "sum_rows")
    assert kernels_of(np.float64, **slopes) == ("delta", "backward", "sum_rows")
    assert kernels_of(arch=86, d=128, **slopes) == (*two, "backward_addends", "sum_rows")
    q, k, v = qkv(np, 2, 1, 8, 8, 64)
    assert cupyflash.plan(q[:1], k, v, arch=SM90, backward=True).kernels == two


def beside(dtype):
    """The kernel of gradients of shaped scores: the backward of doubles in one kernel has them itself."""
    return set() if dtype == np.float64 else {"backward_addends"}


def launched(machine):
    return {config.kernel for config in machine.launched} & {"backward", "backward_addends", "backward_bias"}


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_the_gradient_of_a_bias_that_was_not_broadcast_leaves_a_kernel_that_has_scores(d, dtype):
    q, k, v = qkv(np, 2, 4, 70, 150, d, heads_kv=2, dtype=dtype)
    bias = normal(np, (2, 4, 150, 70), dtype, 6).swapaxes(2, 3)
    bias[:, :, 5:9, 60:] = NEG_INF
    mask = normal(np, (70, 150), seed=7) > 0
    lengths = {"q_lengths": [70, 9], "kv_lengths": [150, 80]}
    for options, kernels in (
        (lengths, {"backward"}),
        ({"causal": "top_left", "mask": mask, "dropout_p": 0.3, "dropout_seed": 5}, {"backward"}),
        ({"softcap": 2.0, **lengths}, {"backward"} | beside(dtype)),
    ):
        machine = Machine(compute_capability=SM90)
        check(q, k, v, via=vjp_on(machine), bias=bias, **options)
        assert launched(machine) == kernels


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_what_is_added_to_scores_have_a_kernel_of_their_own(d, dtype):
    q, k, v = qkv(np, 2, 4, 70, 150, d, heads_kv=2, dtype=dtype)
    bias, slopes = normal(np, (2, 4, 70, 150), dtype, 6), normal(np, (4,), np.float32, 8)
    alone = {"bias": bias, "wrt": ("q", "bias")}
    shaped = {"causal": "bottom_right", "softcap": 2.0, "alibi_slopes": slopes, "bias": bias}
    for options, kernels in (
        (alone, {"backward_addends"}),
        (shaped | {"dropout_p": 0.3, "dropout_seed": 5}, {"backward"} | beside(dtype)),
        ({"bias": bias[:1]}, {"backward", "backward_bias"}),
    ):
        machine = Machine(compute_capability=SM90)
        check(q, k, v, via=vjp_on(machine), **options)
        assert launched(machine) == kernels


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped"])
def test_sums_in_any_order_are_within_the_bound(shaped, dtype):
    q, k, v = qkv(np, 2, 4, 70, 150, 64, heads_kv=2, dtype=dtype)
    options = {"softcap": 2.0, "alibi_slopes": normal(np, (4,), np.float32, 8)} if shaped else {}
    options |= {"deterministic": False, "causal": "bottom_right"}
    check(q, k, v, via=vjp_on(Machine(compute_capability=SM90)), **options)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_nan_reaches_only_who_may_see_it(name, dtype):
    machine = Machine(compute_capability=SM90)
    arrays = dict(zip("qkv", qkv(np, m=40, d=64, dtype=dtype)))
    clean = machine.attention(*arrays.values(), causal=True)
    arrays[name][0, 0, 17, 3] = np.nan
    out, lse = machine.attention(*arrays.values(), causal=True)
    reached = np.arange(40) == 17 if name == "q" else np.arange(40) >= 17
    assert np.isnan(out[0, 0, reached]).all()
    assert np.isnan(lse[0, 0, reached]).all()
    assert_same(
        (out[..., ~reached, :], lse[..., ~reached]), (clean[0][..., ~reached, :], clean[1][..., ~reached])
    )


@needs_compiler
@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_every_nan_stays_one(precision):
    q, k, v = qkv(np, m=4)
    q.view(np.uint32)[0, 0, 1, 2] = 0x7FFFFFFF
    out, _ = Machine(compute_capability=SM90).attention(q, k, v, precision=precision)
    assert np.isnan(out).all(-1).tolist() == [[[False, True, False, False]]]


@needs_compiler
def test_scores_beyond_the_largest_float_are_infinite():
    q, k, v = qkv(np, m=3)
    q[:, :, 1], k[...] = 1e30, -1e30
    (out, lse), vjp = vjp_on(Machine(compute_capability=SM90))(q, k, v, return_lse=True, wrt=None)
    assert lse[0, 0, 1] == NEG_INF
    assert not wide(out)[0, 0, 1].any()
    assert not vjp(np.ones_like(q), None).q[0, 0, 1].any()


@needs_compiler
@pytest.mark.parametrize("length", [1, 4, 70])
def test_H01_scores_of_1e11_leave_gradients_finite(length):
    x = np.full((1, 1, length, 64), 133120, np.float32)
    (out, _), vjp = vjp_on(Machine(compute_capability=SM90))(x, x, x, return_lse=True, wrt=None)
    assert_same(out, x)
    assert all(np.isfinite(g).all() for g in vjp(x, None)[:3])


def test_small_head_dims_share_kernels():
    dims = ((1, 64), (33, 3), (64, 64))
    assert (
        len({configs.choose("sm80_wide", "forward", "float32", d, e, (False,) * 3, SM90) for d, e in dims})
        == 1
    )
