"""The mma.sync family: what it takes, how it cuts keys, and its kernels in the emulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_emulate
from emulated import needs_compiler, vjp_on
from support import BFLOAT16, assert_same, check, normal, qkv

import cupyflash
from cupyflash.cuda import configs, families, recipe, sm80_runs
from cupyflash.cuda.emulate import Machine
from cupyflash.cuda.recipe import Sizes
from cupyflash.problem import Problem

OPTIONS = {
    name: given for name, given in test_emulate.cases(64, 64, BFLOAT16).items() if name != "everything"
}
PAIRS = [(a, b) for a, b in itertools.combinations_with_replacement(OPTIONS, 2)]


def merged(a, b):
    """Both sets of options, or None where the calls contradict each other."""
    both = OPTIONS[a] | OPTIONS[b]
    if "causal" in both:
        both.pop("query_offset", None)
    return both


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_family_takes_every_option_and_every_pair_of_them(pair, dim, backward):
    q, k, v = qkv(np, 2, 2, 64, 64, dim, dim, heads_kv=1, dtype=BFLOAT16)
    for arch in (80, 89, 90, 120):
        plan = cupyflash.plan(q, k, v, backward=backward, family="sm80", arch=arch, **merged(*pair))
        assert plan.family == "sm80"


@pytest.mark.parametrize(
    ("m", "n", "runs"),
    [(1, 3000, 6), (1, 8192, 8), (1, 131072, 64), (1, 512, 1), (64, 8192, 8), (4096, 4096, 1), (1, 0, 1)],
)
def test_keys_are_cut_by_the_lengths_alone(m, n, runs):
    for batch, heads in ((1, 1), (7, 3)):
        q, k, v = (np.broadcast_to(BFLOAT16.type(0), (batch, heads, rows, 128)) for rows in (m, n, n))
        assert sm80_runs.runs_of_keys(Sizes.of(Problem.create(q, k, v))) == runs


def test_head_dims_up_to_64_share_a_kernel():
    dims = ((1, 64), (20, 3), (64, 64))
    assert len({configs.choose("sm80", "forward", "bfloat16", d, e, (False,) * 3, 80) for d, e in dims}) == 1


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dropout_leaves_the_tiles_of_the_backward_as_they_are(dim):
    """Its flags find room beside them, or in the place of V."""
    plain, dropping = (
        configs.choose("sm80", "backward", "bfloat16", dim, dim, (False, False, dropout), 90)
        for dropout in (False, True)
    )
    assert str(plain.geometry) == str(dropping.geometry)
    assert plain.shared_bytes <= dropping.shared_bytes <= configs.shared_limit(90)


@needs_compiler
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_the_kernels_in_the_emulation(name):
    case, machine = test_emulate.cases(70, 139, BFLOAT16)[name], Machine(compute_capability=80)
    check(*test_emulate.arrays(70, 139, BFLOAT16, case), via=vjp_on(machine), **case)
    assert {config.family for config in machine.launched} == {"sm80", "prepost"}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", test_emulate.cases(2, 2, np.float32))
def test_every_option_in_the_emulation(name):
    case, machine = test_emulate.cases(70, 139, BFLOAT16)[name], Machine(compute_capability=80)
    check(*test_emulate.arrays(70, 139, BFLOAT16, case), via=vjp_on(machine), **case)


@needs_compiler
@pytest.mark.parametrize("heads", [(4, 1), (2, 2)], ids=["a group", "a head"])
def test_runs_of_keys_in_the_emulation(heads):
    machine = Machine(compute_capability=80)
    check(
        *qkv(np, 2, heads[0], 1, 1100, 24, 40, heads_kv=heads[1], dtype=BFLOAT16),
        via=vjp_on(machine),
        sinks=0.5,
    )
    kernels = [config.kernel for config in machine.launched]
    assert kernels[:2] == ["decode", "combine"]


FORMS_OF_DECODE = {
    "a few rows": ((2, 8, 4, 1, 1300, 96, 80), {"sinks": 0.5}),
    "window": ((1, 8, 4, 1, 1300, 40, 128), {"window": (700, 100), "query_offset": 1150}),
    "lengths": ((1, 8, 4, 2, 1500, 24, 72), {"kv_lengths": np.array([70])}),
}


@needs_compiler
@pytest.mark.parametrize("name", FORMS_OF_DECODE)
def test_the_forms_of_a_decode_give_the_same_bits(name, monkeypatch):
    """Wide tiles or narrow ones, warps that part keys or heads: bits do not depend on what else is in the call."""
    (batch, heads, heads_kv, m, n, *dims), options = FORMS_OF_DECODE[name]
    q, k, v = qkv(np, batch, heads, m, n, *dims, heads_kv=heads_kv, dtype=BFLOAT16)
    results, launched = [], set()
    for few, many in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(
            sm80_runs,
            "decode_form",
            lambda row, *_, form=(few, many): sm80_runs.decode_forms(row, True)[form],
        )
        recipe.forward_recipe.cache_clear()
        machine = Machine(compute_capability=80)
        check(q, k, v, via=vjp_on(machine), backward=False, **options)
        results.append(machine.attention(q, k, v, **options))
        launched.add(machine.launched[0])
    recipe.forward_recipe.cache_clear()
    assert len(launched) == 3
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize(
    ("batch", "heads", "n", "form"),
    [(16, 32, 8192, (8, 4)), (1, 32, 8192, (8, 1)), (16, 80, 8192, (16, 1)), (1, 32, 131072, (8, 4))],
)
def test_warps_of_a_decode_part_heads_where_blocks_are_many(batch, heads, n, form):
    q, k, v = (
        np.broadcast_to(BFLOAT16.type(0), (batch, h, rows, 128)) for h, rows in ((heads, 1), (8, n), (8, n))
    )
    sizes = Sizes.of(Problem.create(q, k, v))
    row = configs.choose("sm80", "decode", "bfloat16", 128, 128, (False,) * 3, 90).geometry
    found = sm80_runs.decode_form(row, sizes, sm80_runs.runs_of_keys(sizes))
    assert (found.block_q, found.head_warps) == form


PAIRS_OF_WARPS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (70, 5), "query_offset": 0},
    "lengths": {"q_lengths": np.array([130]), "kv_lengths": np.array([33]), "sinks": 0.5},
    "large scores": {"causal": "top_left"},
}


@needs_compiler
@pytest.mark.parametrize("name", PAIRS_OF_WARPS)
def test_pairs_of_warps_that_share_rows(name, monkeypatch):
    monkeypatch.setattr(families, "FORCED", "sm80")
    q, k, v = qkv(np, 1, 1, 140, 200, 256, 128 if name == "causal" else 256, dtype=BFLOAT16)
    if name == "large scores":
        q = (q.astype(np.float32) * 100).astype(q.dtype)  # references are raised in every step
    machine = Machine(compute_capability=90)
    check(q, k, v, via=vjp_on(machine), backward=False, **PAIRS_OF_WARPS[name])
    assert machine.launched[0].geometry.paired


@needs_compiler
@pytest.mark.parametrize("name", PAIRS_OF_WARPS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_long_steps(dtype, name, monkeypatch):
    """Steps of 128 keys; where they must be taken again that is done in parts."""
    monkeypatch.setattr(families, "FORCED", "sm80")
    q, k, v = qkv(np, 1, 2, 140, 300, 64, 40 if name == "causal" else 64, dtype=dtype)
    if name == "large scores":
        q = (q.astype(np.float32) * 100).astype(q.dtype)
    machine = Machine(compute_capability=90)
    check(q, k, v, via=vjp_on(machine), backward=False, **PAIRS_OF_WARPS[name])
    assert machine.launched[0].geometry.step == 128


@needs_compiler
@pytest.mark.parametrize("hidden", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_that_are_no_numbers_under_a_mask_are_never_seen(dim, hidden, monkeypatch):
    """Sums of weights tell the forward that a score under an addend of -inf became NaN."""
    monkeypatch.setattr(families, "FORCED", "sm80")
    q, k, v = qkv(np, 1, 1, 40, 150, dim, dtype=BFLOAT16)
    k[..., 20:60, :] = hidden
    mask = np.ones((40, 150), bool)
    mask[:, 20:60] = False
    mask[7] = False
    bias = np.where(mask, 0.25, -np.inf).astype(np.float32)
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias, "softcap": 3.0}):
        check(q, k, v, via=vjp_on(Machine(compute_capability=90)), backward=False, **options)


def backward_of(m, n, *dims, seed=0, workers=0, heads=(2, 1), batch=1, **options):
    """The gradients of a call in the emulation, and the kernels that ran."""
    q, k, v = qkv(np, batch, heads[0], m, n, *dims, heads_kv=heads[1], dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=80, seed=seed, workers=workers)
    out, lse = machine.attention(q, k, v, **options)
    gradients = machine.attention_backward(q, q, k, v, out, lse, **options)
    return gradients, [config.kernel for config in machine.launched]


@needs_compiler
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right"}, {"window": (90, 40), "query_offset": 30}], ids=str
)
def test_dq_has_the_same_bits_in_whatever_order_blocks_run(options):
    first, kernels = backward_of(300, 520, 40, **options)
    assert "backward" in kernels
    for seed, workers in ((1, 1), (2, 3), (3, 2)):
        others, _ = backward_of(300, 520, 40, seed=seed, workers=workers, **options)
        assert_same(others, first, f"seed {seed}, {workers} workers")


@needs_compiler
def test_dq_added_in_no_order():
    machine = Machine(compute_capability=80)
    check(
        *qkv(np, 1, 2, 150, 300, 40, dtype=BFLOAT16),
        via=vjp_on(machine),
        causal="bottom_right",
        deterministic=False,
    )
    assert [c.kernel for c in machine.launched if c.family == "prepost"] == [
        "row_stats",
        "clear_sums",
        "finish_queries",
    ]


@needs_compiler
def test_an_item_beside_others_keeps_its_bits():
    batched, _ = backward_of(150, 300, 64, batch=3)
    alone, _ = backward_of(150, 300, 64, batch=1)
    for name, one, all_items in zip(cupyflash.Gradients._fields, alone, batched):
        if one is not None:
            assert_same(one, all_items[:1], name)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dims", [(20, 64), (80, 80), (96, 24), (128, 128)], ids=str)
def test_the_backward_in_one_kernel_at_other_head_dims(dims):
    machine = Machine(compute_capability=80)
    q, k, v = qkv(np, 2, 4, 150, 139, *dims, heads_kv=2, dtype=np.float16)
    check(q, k, v, via=vjp_on(machine), causal="bottom_right", q_lengths=np.array([150, 71]))
    assert "backward" in {config.kernel for config in machine.launched}


@needs_compiler
@pytest.mark.parametrize("shared", ["q", "k and v"])
def test_gradients_of_what_a_batch_shares(shared):
    q, k, v = qkv(np, 2, 2, 70, 139, 24, 40, heads_kv=1, dtype=BFLOAT16)
    arrays = (q[:1], k, v) if shared == "q" else (q, k[:1], v[:1])
    machine = Machine(compute_capability=80)
    check(*arrays, via=vjp_on(machine), causal="bottom_right")
    assert "backward" in {config.kernel for config in machine.launched}


RNG = np.random.default_rng(0)
FEW_QUERIES = {
    "mask": {"mask": RNG.random((2, 1, 2, 1200)) < 0.5},
    "bias": {"bias": normal(np, (4, 2, 1200), BFLOAT16, 3)},
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi_slopes": normal(np, (4,), np.float32, 4), "query_offset": 900},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5, "dropout_origin": (1, 3, 5)},
    "window": {"window": (700, 30), "query_offset": 900},
    "lengths": {"q_lengths": np.array([2, 1]), "kv_lengths": np.array([1200, 333])},
    "sinks": {"sinks": normal(np, (2, 4), np.float32, 6)},
}
FEW_QUERIES["all"] = {name: x for given in FEW_QUERIES.values() for name, x in given.items()}
FEW_QUERIES["negative scale"] = {"scale": -0.3}


@needs_compiler
@pytest.mark.parametrize("name", FEW_QUERIES)
def test_few_queries_with_every_option(name):
    machine = Machine(compute_capability=80)
    arrays = qkv(np, 2, 4, 2, 1200, 40, 24, heads_kv=2, dtype=BFLOAT16)
    check(*arrays, via=vjp_on(machine), backward=False, **FEW_QUERIES[name])
    assert [config.kernel for config in machine.launched] == ["decode", "combine"]


@needs_compiler
@pytest.mark.parametrize(
    "hidden", [{"mask": np.array([True, False])[:, None, None, None]}, {"kv_lengths": np.array([1200, 0])}]
)
def test_few_queries_of_which_some_see_nothing(hidden):
    arrays = qkv(np, 2, 4, 2, 1200, 40, 24, heads_kv=2, dtype=BFLOAT16)
    check(*arrays, via=vjp_on(Machine(compute_capability=80)), backward=False, **hidden)


@needs_compiler
@pytest.mark.parametrize("one_kernel", [True, False])
def test_what_lies_past_the_queries_reaches_no_gradient(one_kernel):
    q, k, v = qkv(np, 1, 2, 70, 90, 64, 64, dtype=np.float16)
    bias = normal(np, (2, 70, 90), np.float32, 3)
    bias[:, 40:] = np.nan
    given = {
        "bias": bias,
        "q_lengths": np.array([40]),
        "query_offset": 20,
        "alibi_slopes": np.array([0.5, 0.25], np.float32),
    }
    wrt = ("q", "k", "v", "bias") if one_kernel else ("q", "k", "v", "bias", "alibi_slopes")
    (out, _), vjp = vjp_on(Machine(compute_capability=80))(q, k, v, return_lse=True, wrt=wrt, **given)
    found = vjp(out, None)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found if x is not None)


BIASES = {
    "whole": ((2, 4, 140, 264), BFLOAT16),
    "over the batch": ((4, 140, 264), np.float32),
    "over heads": ((2, 1, 140, 264), np.float16),
    "keys alone": ((2, 1, 1, 264), BFLOAT16),
    "queries alone": ((4, 140, 1), np.float64),
    "a number a head": ((4, 1, 1), np.float32),
    "a number": ((1,), BFLOAT16),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "over the batch" else pytest.mark.slow) for x in BIASES]
)
@pytest.mark.parametrize("cc", [80, *(pytest.param(x, marks=pytest.mark.slow) for x in (89, 100))])
def test_the_gradient_of_a_bias_by_what_it_was_broadcast_over(name, cc):
    shape, dtype = BIASES[name]
    arrays = qkv(np, 2, 4, 140, 264, 80, 40, heads_kv=2, dtype=BFLOAT16)
    given = {"bias": normal(np, shape, dtype, 3), "kv_lengths": np.array([264, 131])}
    check(*arrays, via=vjp_on(Machine(compute_capability=cc)), causal="bottom_right", **given)


@needs_compiler
def test_the_gradient_of_a_bias_without_keys():
    arrays = qkv(np, 1, 2, 3, 0, 8, 8, dtype=BFLOAT16)
    check(*arrays, via=vjp_on(Machine(compute_capability=80)), bias=normal(np, (2, 3, 1), BFLOAT16, 3))
