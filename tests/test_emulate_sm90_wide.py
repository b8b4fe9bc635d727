"""The Hopper family of float32 on a CPU: TMA and wgmma too are executed there."""

from __future__ import annotations

import numpy as np
import pytest
import test_emulate
from emulated import needs_compiler, vjp_on
from support import assert_same, check, normal, qkv

import cupyflash
from cupyflash import reference
from cupyflash.cuda import families
from cupyflash.cuda.emulate import Machine
from cupyflash.cuda.emulate.kernel import EmulationError

pytestmark = needs_compiler

F32 = np.dtype(np.float32)
HOPPER = 90
FORWARD = {"split", "forward"}
BACKWARD = {"delta", "split_all", "backward_kv", "backward_q"}


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    """Of few queries the family takes only calls that ask for it."""
    monkeypatch.setattr(families, "FORCED", "sm90_wide")


def check_case(name, m=70, n=139):
    case, machine = test_emulate.cases(m, n, F32)[name], Machine(compute_capability=HOPPER)
    check(*test_emulate.arrays(m, n, F32, case), via=vjp_on(machine), **case)
    return machine.launched


@pytest.mark.parametrize("name", ["bottom right", "sinks"])
def test_plain_scores_forward_and_backward(name):
    launched = check_case(name)
    assert {config.kernel for config in launched} - {"sum_rows"} == FORWARD | BACKWARD
    assert {config.family for config in launched} == {"sm90_wide", "prepost"}


def test_no_keys():
    q, k, v = qkv(np, 1, 2, 70, 0, 64)
    machine = Machine(compute_capability=HOPPER)
    check(q, k, v, via=vjp_on(machine), sinks=np.array([0.5, -1], np.float32))
    assert not {config.kernel for config in machine.launched} & {"split", "split_all"}


def test_every_option_at_once():
    launched = check_case("everything")
    assert {config.kernel for config in launched if config.family == "sm90_wide"} == {
        "forward",
        "backward_kv",
        "backward_q",
    }


@pytest.mark.parametrize("d", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_mask_of_true_changes_no_bit(d):
    q, k, v = qkv(np, 1, 2, 70, 139, d)
    machine, results = Machine(compute_capability=HOPPER), []
    for mask in (None, np.ones((70, 139), bool)):
        out, lse = machine.attention(q, k, v, mask=mask)
        results.append((out, lse, *machine.attention_backward(q, q, k, v, out, lse, mask=mask)[:3]))
    assert_same(*results)


@pytest.mark.parametrize(
    "shared", ["k", pytest.param("kv", marks=pytest.mark.slow), pytest.param("q", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_block_walks_the_items_that_shared_an_argument(d, shared):
    q, k, v = (
        x[:1] if name in shared else x for name, x in zip("qkv", qkv(np, 3, 2, 70, 139, d, heads_kv=1))
    )
    lengths = np.array([139, 20, 0])
    check(q, k, v, via=vjp_on(Machine(compute_capability=HOPPER)), kv_lengths=lengths, softcap=2.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("shape", [(2, 70, 100), (70, 1), ()], ids=str)
def test_a_bias_of_another_dtype(dtype, shape):
    q, k, v = qkv(np, 1, 2, 70, 100, 20)
    bias = np.asarray(normal(np, shape, dtype, 4), dtype)
    check(q, k, v, via=vjp_on(Machine(compute_capability=HOPPER)), bias=bias)


@pytest.mark.parametrize("shared", ["", "k"])
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_gradient_of_a_bias_that_was_not_broadcast_leaves_the_main_kernel(d, shared):
    q, k, v = (
        x[:1] if name == shared else x for name, x in zip("qkv", qkv(np, 2, 4, 70, 150, d, heads_kv=2))
    )
    bias = normal(np, (2, 4, 150, 70), seed=6).swapaxes(2, 3)
    bias[:, :, 5:9, 60:] = -np.inf
    mask = normal(np, (70, 150), seed=7) > 0
    dropped = {"dropout_p": 0.3, "dropout_seed": 5}
    for options in (
        {"q_lengths": [70, 9], "kv_lengths": [150, 80]},
        {"causal": "top_left", "mask": mask, **dropped},
    ):
        machine = Machine(compute_capability=HOPPER)
        check(q, k, v, via=vjp_on(machine), bias=bias, **options)
        assert not {config.kernel for config in machine.launched} & {"backward_bias", "backward_addends"}


@pytest.mark.parametrize("shared", ["", "q"])
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_kernel_of_queries_leaves_gradients_of_what_shaped_scores_are_added_to(d, shared):
    q, k, v = (
        x[:1] if name == shared else x for name, x in zip("qkv", qkv(np, 2, 4, 150, 140, d, heads_kv=2))
    )
    bias = normal(np, (2, 4, 140, 150), seed=6).swapaxes(2, 3)
    bias[:, :, 60:, 5:9] = -np.inf
    slopes = np.array([0.5, 0.25, 0.0, -0.125], np.float32)
    for options in (
        {"bias": bias, "window": (9, 3), "query_offset": 20, "softcap": 2.0},
        {"bias": bias.copy(), "causal": "top_left", "alibi_slopes": slopes, "q_lengths": [150, 9]},
        {
            "alibi_slopes": slopes,
            "causal": "bottom_right",
            "kv_lengths": [0, 77],
            "softcap": 3.0,
            "dropout_p": 0.3,
            "dropout_seed": 5,
        },
    ):
        machine = Machine(compute_capability=HOPPER)
        check(q, k, v, via=vjp_on(machine), **options)
        assert not {config.kernel for config in machine.launched} & {"backward_bias", "backward_addends"}


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_what_it_is_in_the_plain_computation(value):
    q, k, v = qkv(np, 1, 1, 70, 60, 64)
    v[0, 0, 3, 5] = v[0, 0, 50, 7] = value
    v[0, 0, 51, 7] = -np.inf
    out, _ = Machine(compute_capability=HOPPER).attention(q, k, v, causal="top_left")
    with np.errstate(invalid="ignore"):
        exact = reference.attention(q, k, v, causal="top_left")
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(out), kind(exact))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_a_mask_hides_stays_hidden_beside_a_bias_of_one_column(value):
    q, k, v = qkv(np, 1, 2, 70, 60, 64)
    mask, bias = np.ones((70, 60), bool), np.zeros((70, 1), np.float32)
    mask[5], bias[5] = False, value
    check(q, k, v, via=vjp_on(Machine(compute_capability=HOPPER)), mask=mask, bias=bias, wrt=("q", "k", "v"))


def test_scores_that_overflow():
    """The second query sees nothing; the others have weights of 1 and 0."""
    q, k, v = qkv(np, 1, 1, 3, 3, 64)
    q[:, :, 1], k[...] = 1e30, -1e30
    machine = Machine(compute_capability=HOPPER)
    out, lse = machine.attention(q, k, v)
    assert lse[0, 0, 1] == -np.inf
    assert not out[0, 0, 1].any()
    gradients = machine.attention_backward(np.ones_like(q), q, k, v, out, lse)
    assert not gradients.q[0, 0, 1].any()
    assert all(np.isfinite(x).all() for x in gradients[1:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", test_emulate.cases(2, 2, F32))
def test_every_option_at_edges_of_tiles(name):
    for m, n in ((1, 1), (63, 65), (64, 128), (65, 127), (191, 64), (193, 200)):
        check_case(name, m, n)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (1, 128), (65, 64), (64, 100)], ids=str)
@pytest.mark.parametrize(
    "form", [{}, {"causal": "bottom_right"}, {"window": (60, 20), "query_offset": 3}], ids=str
)
def test_head_dims(dims, form):
    q, k, v = qkv(np, 2, 2, 130, 150, *dims, heads_kv=1)
    check(q, k, v, via=vjp_on(Machine(compute_capability=HOPPER)), **form)


@pytest.mark.parametrize("seed", [1, 16])
def test_planes_may_arrive_in_any_order(seed):
    """Who takes every other tile must not take what is on its way for what came the time before last."""
    q, k, v = (normal(np, (1, 1, m, 128), seed=n) for n, m in ((1, 256), (2, 320), (3, 320)))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)

    def dq(seed):
        machine = Machine("plain", compute_capability=HOPPER, seed=seed)
        return machine.attention_backward(q, q, k, v, out, lse, wrt=("q",)).q

    assert_same(dq(seed), dq(0))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_the_same_bits_in_every_order_and_layout(d):
    q, k, v = qkv(np, 2, 2, 130, 150, d)
    odd = [np.concatenate([x, x[..., :1]], -1)[..., ::-1][..., 1:][..., ::-1] for x in (q, k, v)]

    def results(seed, q, k, v):
        machine = Machine(compute_capability=HOPPER, seed=seed, workers=1 + seed)
        out, lse = machine.attention(q, k, v, causal="bottom_right")
        return out, lse, machine.attention_backward(out + 1, q, k, v, out, lse, causal="bottom_right")

    first = results(0, q, k, v)
    for other in (results(1, q, k, v), results(2, *odd), results(3, *map(np.asfortranarray, (q, k, v)))):
        assert_same(other, first)


@pytest.mark.parametrize("factor", [1e4, 3e30], ids=str)
def test_weights_of_large_scores_fit_to_lse(factor):
    """Every row sees one key alone: its weight is 1, whatever the score."""
    q, k, v = qkv(np, 1, 1, 65, 130, 64)
    k *= np.float32(factor)
    machine, dout = Machine(compute_capability=HOPPER), np.ones_like(q)
    mask = {"window": (0, 0), "query_offset": 60}
    out, lse = machine.attention(q, k, v, **mask)
    assert_same(out, v[:, :, 60:125])
    gradients = machine.attention_backward(dout, q, k, v, out, lse, **mask)
    assert_same(gradients.v[:, :, 60:125], dout)


@pytest.mark.parametrize("family", ["sm90_wide", "sm80_wide"])
@pytest.mark.parametrize("d", [1, 64])
def test_what_is_exact_stays_exact(d, family, monkeypatch):
    """Every row sees one key: sums of one term, or of whole numbers, leave no gradient of scores behind."""
    monkeypatch.setattr(families, "FORCED", family)
    one, rng = {"window": (0, 0), "scale": 1.0}, np.random.default_rng(0)
    q, k, v = (rng.integers(-9, 10, (1, 1, 65, d)).astype(np.float32) for _ in range(3))
    machine = Machine(compute_capability=HOPPER)
    out, lse = machine.attention(q, k, v, **one)
    np.testing.assert_array_equal(lse, (q * k).sum(-1))
    if d == 1:
        q, k, v = qkv(np, m=65, d=d)
        out, lse = machine.attention(q, k, v, **one)
    gradients = machine.attention_backward(np.ones_like(v), q, k, v, out, lse, **one)
    assert not gradients.q.any()
    assert not gradients.k.any()


def test_values_beyond_what_bfloat16_holds():
    q, k, v = qkv(np, 1, 1, 64, 80, 64)
    v[0, 0, 3] = np.finfo(np.float32).max
    check(q, k, v, via=vjp_on(Machine(compute_capability=HOPPER)), backward=False, kv_lengths=np.array([5]))


def test_a_product_that_reads_past_shared_memory_is_found():
    """What happened on a GPU when values were read as if they lay along the head dim."""
    machine = Machine(
        compute_capability=HOPPER,
        edit=lambda text: text.replace("emulate::wgmma<bfloat16, 0, 1>", "emulate::wgmma<bfloat16, 0, 0>"),
    )
    with pytest.raises(EmulationError, match="uses .* bytes of shared memory, the launch gives"):
        machine.attention(*qkv(np, 1, 1, 70, 200, 64))


@pytest.mark.parametrize("family", ["sm90_wide", "sm80_wide"])
def test_errors_of_cut_sums_have_no_direction(family, monkeypatch):
    """Tensor cores cut sums toward zero; what is expected to be lost is given back."""
    monkeypatch.setattr(families, "FORCED", family)
    q, k, v = qkv(np, 1, 2, 70, 139, 64)
    machine = Machine(compute_capability=HOPPER)
    out, lse = machine.attention(q, k, v)
    gradients = machine.attention_backward(q, q, k, v, out, lse)[:3]
    exact = [reference.attention(q, k, v), *reference.attention_backward(q, q, k, v)[:3]]
    for ours, right in zip((out, *gradients), exact, strict=True):
        assert abs(((ours - right) * right).sum() / (right * right).sum()) < 1e-7
