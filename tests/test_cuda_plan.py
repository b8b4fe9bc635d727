"""Plans, recipes and the memo's ground, without a GPU: a compute capability is enough."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_kernels import MOST_KERNELS, small_kernels
from support import BFLOAT16, DTYPE_IDS, DTYPES, assert_same, normal, qkv

import cupyflash
from cupyflash import cpu
from cupyflash.cuda import configs, families, flatten, launch, module, operands, params, recipe
from cupyflash.cuda.backward_recipe import backward_recipe
from cupyflash.cuda.params import ADDRESSES, RECORD
from cupyflash.problem import GRADIENT_NAMES, Problem
from cupyflash.request import BackwardRequest

ARCHS = (60, 70, 75, 80, 86, 89, 90, 100, 120)
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (5, 5)},
    "mask": {"mask": np.ones((1, 1), bool)},
    "bias": {"bias": np.zeros((1, 1), np.float32)},
    "alibi": {"alibi_slopes": np.ones(1, np.float32)},
    "softcap": {"softcap": 1.0},
    "sinks": {"sinks": np.ones(1, np.float32)},
    "lengths": {"kv_lengths": 1, "q_lengths": 1},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 0},
}


def shape(*sizes, dtype=np.float16):
    return SimpleNamespace(shape=sizes, dtype=np.dtype(dtype))


def plan(*sizes, dtype=np.float16, arch=90, **options):
    x = shape(*sizes, dtype=dtype)
    return cupyflash.plan(x, x, x, arch=arch, **options)


def recipe_of(problem, arch=90, backward=True):
    from cupyflash.cuda.plan import planned

    return planned(problem, backward, None, arch)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_needs_an_architecture_alone(dtype, backward, arch):
    p = plan(2, 4, 1000, 80, dtype=dtype, arch=arch, backward=backward)
    family = "sm80" if arch >= 80 else "simt"
    if dtype.itemsize > 2 and arch >= 80:
        family = "sm80_wide" if dtype == np.float32 or arch in (80, 90, 100) else "simt"
    if arch == 90 and dtype.itemsize < 8:
        family = {"sm80": "sm90", "sm80_wide": "sm90_wide"}[family]
    assert (p.backend, p.family, p.registers, p.shared_bytes) == ("cuda", family, None, None)
    assert p.config.startswith(f"{family} ")
    assert dtype.name in p.config
    assert p.block_q > 1 < p.block_kv
    joined = configs.in_one_kernel(family, dtype.name, 80, (False,) * 3, arch)
    one_kernel = family == "sm90" or (family == "sm80" and joined)
    score = 8 if dtype == np.float64 else 4
    in_turns = family == "sm80_wide" and joined
    one = ("row_stats", "backward") + ("finish_queries",) * (family == "sm80")
    kernels = one if one_kernel else ("delta", "backward_kv", "backward_q")
    kernels = ("delta", "backward") if in_turns else kernels
    kernels = kernels if backward else ("forward",)
    if family == "sm90_wide":
        kernels = ("delta", "split_all", *kernels[1:]) if backward else ("split", *kernels)
    assert p.kernels == kernels
    results = 2 * 4 * 1000 * 80 * dtype.itemsize
    assert p.output_bytes == (3 * results if backward else results + 2 * 4 * 1000 * score)
    assert p.copied_bytes == 0
    columns = 128 if family == "sm90" else 82  # sums for dq are as wide as the kernel's head dim
    a_row = score * (columns + 2 if one_kernel else 1) + 4 * in_turns
    padded = 2 * 4 * (1024 if one_kernel else 1000)
    rows = 1024 + padded * a_row if backward else 0
    planes = 0
    if family == "sm90_wide":  # q, k, v and dout of whole tiles with two numbers a row, or k and v
        planes = 2 * 4 * (1024 * (4 * 768 + 2 * score) if backward else 1000 * 2 * 768)
    assert p.workspace_bytes <= rows + planes


def test_without_a_gpu_an_architecture_is_asked_for():
    if cupyflash.available_backends() != ("cpu",):
        pytest.skip("needs a machine without a GPU")
    x = shape(1, 1, 8, 8)
    with pytest.raises(RuntimeError, match="arch="):
        cupyflash.plan(x, x, x, backend="cuda")
    with pytest.raises(RuntimeError, match="backend='cuda' is not available"):
        cupyflash.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), backend="cuda")
    with pytest.raises(RuntimeError, match="not available"):
        cupyflash.is_compiled(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))


def test_planning_imports_no_cupy():
    code = (
        "import sys, numpy as np, cupyflash\n"
        "x = np.ones((1, 1, 8, 8), np.float32)\n"
        "print(cupyflash.plan(x, x, x, arch=80, backward=True).family, 'cupy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sm80_wide", "False"]


def test_the_workspace_is_exact_in_64_bits():
    """E15: 64 x 128 heads x 65536 rows: sums of 64 columns, lse and delta, and a count for every 64 rows."""
    rows = 64 * 128 * 65536
    counts = -(-4 * (rows // 64 + 4) // 256) * 256
    assert plan(64, 128, 65536, 64, backward=True).workspace_bytes == 4 * rows * (64 + 2) + counts


def test_a_grid_beyond_the_hardware_is_refused():
    with pytest.raises(ValueError, match="blocks"):
        plan(2**20, 2**12, 1, 8)


def test_sizes_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"seqlen_k = 2147483648 is more than"):
        cupyflash.plan(shape(1, 5, 8), *[shape(1, 2**31, 8)] * 2, arch=90)
    with pytest.raises(ValueError, match="a leading axis = 3000000000 is more than"):
        cupyflash.plan(*[shape(3 * 10**9, 1, 0, 8)] * 3, arch=90)


def test_a_forced_family_is_taken_or_refused():
    x = shape(1, 1, 8, 8, dtype=np.float32)
    assert cupyflash.plan(x, x, x, arch=90, family="simt").family == "simt"
    with pytest.raises(ValueError, match="family must be one of"):
        cupyflash.plan(x, x, x, arch=90, family="fast")
    with pytest.raises(
        ValueError, match=r"'simt' was asked for but does not take this call.*compute capability"
    ):
        cupyflash.plan(x, x, x, arch=52, family="simt")
    with pytest.raises(ValueError, match="no kernel family.*not tf32"):
        cupyflash.plan(x, x, x, arch=75, precision="tf32")


def test_a_family_asked_for_passes_the_others_over(monkeypatch):
    fast = families.Family("fast", 90, 90, "a", ("float16",), 256, ())
    monkeypatch.setattr(families, "FAMILIES", (fast, families.family_of("simt")))
    half, single = (Problem.create(*qkv(np, dtype=dtype)) for dtype in (np.float16, np.float32))
    assert families.choose_family(half, 90)[0] is fast
    assert families.choose_family(half, 90, "simt")[1] == (("fast", "simt was asked for"),)
    for problem, cc, reason in (
        (half, 100, "compute capability"),
        (single, 90, "takes float16, not float32"),
    ):
        chosen, passed_over = families.choose_family(problem, cc)
        assert chosen.name == "simt"
        assert passed_over[0][0] == "fast"
        assert reason in passed_over[0][1]


def test_at_most_64_kernels_for_each_dtype_precision_bucket_and_family():
    for arch in ARCHS:
        counts = {}
        for config in configs.all_configs(arch):
            g = config.geometry
            bucket = (g.head_dim, g.head_dim_v) if g else None
            key = (config.family, config.dtype, getattr(g, "products", None), bucket)
            counts[key] = counts.get(key, 0) + 1
        assert max(counts.values()) <= 64, max(counts, key=counts.get)


def test_the_small_problems_of_the_suite_need_few_kernels():
    for arch in ARCHS:
        kernels = small_kernels(arch)
        assert len(kernels) <= MOST_KERNELS
        assert set(kernels) <= set(configs.all_configs(arch))


def test_every_config_fits_its_device_and_is_named_once():
    for arch in ARCHS:
        found = list(configs.all_configs(arch))
        assert len({str(config) for config in found}) == len(found)
        for config in found:
            assert config.shared_bytes <= configs.shared_limit(arch), f"{config} on sm_{arch}"


def test_an_invalid_config_does_not_come_to_exist():
    good = next(config for config in configs.all_configs(90) if config.geometry)
    with pytest.raises(ValueError, match=r"block_q = 3 must be a multiple of"):
        configs.Config(good.family, good.kernel, good.dtype, good.geometry._replace(block_q=3), good.options)
    with pytest.raises(ValueError, match="options"):
        configs.Config(good.family, good.kernel, good.dtype, good.geometry, ())


@pytest.mark.parametrize("name", OPTIONS)
def test_options_ask_for_the_kernels_that_have_them(name):
    plain = recipe_of(Problem.create(*qkv(np)), backward=False).main
    given = recipe_of(Problem.create(*qkv(np), **OPTIONS[name]), backward=False).main
    bits = {"mask": 0, "bias": 0, "alibi": 1, "softcap": 1, "dropout": 2}
    expected = tuple(bits.get(name) == bit for bit in range(3))
    assert given.options == expected
    assert (given == plain) == (name not in bits)


def test_the_backward_launches_what_is_wanted():
    q, k, v = qkv(np, batch=2, heads=4, m=100, n=90, d=16)
    extras = {
        "bias": normal(np, (1, 1, 1, 90)),
        "sinks": normal(np, (4,)),
        "alibi_slopes": normal(np, (4,)),
        "causal": "top_left",
    }
    full = recipe_of(Problem.create(q, k, v, **extras))
    kernels = [launch.config.kernel for launch in full.launches]
    assert kernels == [
        *("delta", "backward", "backward_addends", "backward_bias", "sum_partials"),
        *("sum_rows", "sum_rows"),
    ]
    hidden = [{ADDRESSES[index] for index in launch.hidden} for launch in full.launches]
    assert hidden == [set(), {"dbias"}, {"dbias"}, set(), set(), {"dslopes"}, {"dsinks"}]
    assert [name for name, _ in full.workspace] == ["row_delta", "slope_rows", "turns", "partials"]


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize(
    "names", [("bias",), ("bias", "sinks"), ("alibi_slopes",), ("bias", "alibi_slopes")], ids="+".join
)
def test_the_planned_workspace_is_enough_for_fewer_gradients_and_to_add_them(arch, dtype, d, names):
    extras = {"bias": np.zeros((2, 4, 300, 90)), "sinks": np.zeros(4), "alibi_slopes": np.zeros(4)}
    options = {name: extras[name].astype(dtype) for name in names}
    problem = Problem.create(*qkv(np, 2, 4, 300, 90, d, dtype=dtype), causal="top_left", **options)
    family, _ = families.choose_family(problem, arch, backward=True)
    lse = np.zeros(problem.lse_shape, np.float32)
    request = BackwardRequest.create(problem, problem.q, problem.q, lse)
    found = operands.layouts(operands.tensors(problem) | launch.cotangents(request))
    most = cupyflash.plan(
        problem.q, problem.k, problem.v, backward=True, arch=arch, causal="top_left", **options
    ).workspace_bytes
    subsets = [x for n in range(6) for x in itertools.combinations(problem.differentiable, n)]
    for wanted, accumulate in itertools.product(subsets, (False, True)):
        results = {operands.GRADIENTS[name]: params.Layout.of(getattr(problem, name)) for name in wanted}
        wrt, given = frozenset(name[1:] for name in results), tuple((found | results).items())
        need = backward_recipe(family.name, arch, recipe.Sizes.of(problem), given, wrt, accumulate)
        assert need.workspace_bytes <= most, (wanted, accumulate)


def test_a_number_among_the_options_has_no_gradient_to_plan():
    x = shape(1, 2, 100, 64)
    numbers = {"bias": 0.5, "sinks": np.float32(1)}
    arrays = {"bias": np.zeros((100, 100)), "sinks": np.zeros(2)}
    planned = [cupyflash.plan(x, x, x, backward=True, arch=90, **given) for given in ({}, numbers, arrays)]
    bare, beside_numbers, beside_arrays = ((p.kernels, p.output_bytes) for p in planned)
    assert beside_numbers == bare
    assert {"backward_bias", "sum_rows"} <= set(beside_arrays[0])
    given = qkv(np)
    on_cpu = [cupyflash.plan(*given, backward=True, **options) for options in ({}, numbers)]
    assert on_cpu[0].output_bytes == on_cpu[1].output_bytes


def test_k_and_v_with_other_leading_axes_take_two_launches():
    q, k, v = qkv(np, batch=3, heads=2, m=40, d=8)
    kernels = recipe_of(Problem.create(q, k[:1], v)).launches
    alone = [launch for launch in kernels if launch.config.kernel == "backward_kv"]
    assert [{ADDRESSES[index] for index in launch.hidden} for launch in alone] == [
        {"dv", "dbias"},
        {"dk", "dbias"},
    ]
    records = [np.frombuffer(launch.record, RECORD)[0] for launch in alone]
    assert [int(record["own"].prod()) for record in records] == [1, 3]
    assert [int(record["loop"].prod()) for record in records] == [3, 1]
    assert alone[1].grid == 3 * alone[0].grid


def test_splits_of_a_bias_gradient_do_not_depend_on_the_batch():
    splits = set()
    for batch, heads in ((1, 1), (1, 8), (5, 3)):
        q, k, v = qkv(np, batch=batch, heads=heads, m=4096, n=64, d=8)
        launches = recipe_of(Problem.create(q, k, v, bias=normal(np, (batch, heads, 1, 64)))).launches
        [bias] = [launch for launch in launches if launch.config.kernel == "backward_bias"]
        splits.add(int(np.frombuffer(bias.record, RECORD)[0]["splits"]))
    assert len(splits) == 1
    assert splits.pop() > 1


def test_recipes_are_cached_on_their_static_key():
    a, b = (
        Problem.create(*qkv(np, seed=seed), kv_lengths=3, scale=scale) for seed, scale in ((0, 1.0), (1, 2.0))
    )
    assert recipe_of(a) is recipe_of(b)
    assert recipe_of(a) is not recipe_of(Problem.create(*qkv(np), causal="bottom_right"))


def test_empty_problems_launch_nothing():
    for sizes in ((0, 2, 5, 8), (2, 2, 0, 8)):
        p = plan(*sizes, backward=True)
        assert p.kernels == ()
        assert p.workspace_bytes == 0
        assert plan(*sizes).kernels == ()
    x, empty = shape(1, 1, 5, 8), shape(1, 1, 0, 8)
    assert cupyflash.plan(x, empty, empty, arch=90).kernels == ("forward",)


def many_axes(seed, *, dtype=np.float64):
    """q, k, v with five leading axes that do not merge, k and v broadcast over some of them."""
    lead = (2, 3, 2, 2, 2)
    q = normal(np, (*lead[::-1], 4, 7, 5), dtype, seed).transpose(4, 3, 2, 1, 0, 5, 6, 7)
    k = normal(np, (2, 1, 2, 1, 2, 2, 6, 5), dtype, seed + 1)
    v = normal(np, (3, 1, 2, 1, 2, 6, 4), dtype, seed + 2)
    return q, k, v


def test_more_leading_axes_than_a_record_holds_are_copied():
    q, k, v = many_axes(0)
    problem = Problem.create(q, k, v, causal="top_left")
    p = cupyflash.plan(q, k, v, arch=90, causal="top_left")
    flat = flatten.flat_problem(problem)
    copies = sum(getattr(flat, name).nbytes for name in ("q", "k", "v"))
    assert p.copied_bytes == copies > p.output_bytes  # what is copied back is copied when these are gone
    assert p.kernels == ("forward",)


def test_a_plan_makes_no_copies():
    """Which would be of terabytes."""
    q, k = shape(8, 6, 8, 6, 8, 8, 65536, 64), shape(8, 1, 8, 1, 8, 8, 65536, 64)
    for backward in (False, True):
        p = cupyflash.plan(q, k, k, arch=90, backward=backward, kv_lengths=np.ones((1, 6, 1, 1, 8), int))
        assert p.copied_bytes > 2**41


@pytest.mark.parametrize(("axes", "copies"), [((1, 0, 2), True), ((0, 1, 2), False)])
def test_copies_keep_their_leading_axes_where_these_fit(axes, copies):
    """Then bits are those of a contiguous call: broadcast k are summed up by the kernel in both."""
    q = normal(np, (2, 3, 2, 1, 8, 4), np.float16).transpose(*axes, 3, 4, 5)
    k = normal(np, (1, 1, 2, 1, 8, 4), np.float16)
    problem = Problem.create(q, k, k, backend="cuda")
    family = families.family_of("sm90")
    assert launch.fits_copied(problem, family) is not copies
    form = flatten.copied_problem(problem, lambda p: launch.fits_copied(p, family))
    assert form.lead == problem.lead
    assert form.k.shape == k.shape


@pytest.mark.parametrize("fits", [lambda p: True, lambda p: False], ids=["copied", "merged"])
def test_a_flattened_result_is_rounded_once_to_what_was_asked_for(fits):
    q, k, v = many_axes(3, dtype=np.float16)
    problem = Problem.create(q, k, v)
    wide, exact = np.empty(problem.out_shape, np.float32), np.empty(problem.out_shape, np.float32)
    cpu.forward(problem, exact)
    result, _ = flatten.flat_forward(problem, wide, None, fits, cpu.forward)
    assert result is wide
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-6)


def test_results_that_need_more_leading_axes_than_their_operands_are_copied(monkeypatch):
    """Heads and rows of this q lie between its leading axes, and so they do in out."""
    shape, steps = (2, 2, 2, 2, 2, 8), (256, 128, 64, 96, 160, 1)
    memory = normal(np, (4096,), np.float16)
    q = np.lib.stride_tricks.as_strided(memory, shape, [2 * step for step in steps])
    k, v = (normal(np, shape, np.float16, seed) for seed in (1, 2))
    flat = []
    monkeypatch.setattr(launch, "flat_forward", lambda *args: flat.append(args) or (None, None))
    machine = SimpleNamespace(
        current=nullcontext, owns=lambda x: True, captures=lambda: False, compute_capability=90
    )
    launch.forward(Problem.create(q, k, v, backend="cuda"), machine=machine)
    assert flat


@pytest.mark.parametrize("fits", [lambda p: True, lambda p: False], ids=["copied", "merged"])
def test_the_flattened_call_is_the_same_call(fits):
    """Run on the CPU backend: the copies and the sums after them are NumPy or CuPy alike."""
    q, k, v = many_axes(3)
    options = {
        "bias": normal(np, (3, 1, 1, 1, 4, 1, 6), np.float64, 9),
        "sinks": normal(np, (2, 1, 1, 2, 2, 4), np.float64, 10),
        "kv_lengths": np.arange(1, 7).reshape(3, 1, 2, 1),
        "query_offset": 1,
        "dropout_p": 0.25,
        "dropout_seed": 5,
        "window": (3, 4),
    }
    problem = Problem.create(q, k, v, **options)
    out, lse = cpu.forward(problem)
    flat_out, flat_lse = flatten.flat_forward(problem, None, None, fits, cpu.forward)
    np.testing.assert_allclose(flat_out, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(flat_lse, lse, rtol=1e-12)
    assert flat_out.strides == out.strides
    request = BackwardRequest.create(problem, normal(np, out.shape, np.float64, 20), out, lse)
    expected, actual = cpu.backward(request), flatten.flat_backward(request, fits, cpu.backward)
    for name, x, y in zip(GRADIENT_NAMES, actual, expected):
        assert (x is None) == (y is None), name
        if y is not None:
            assert x.strides == y.strides, name
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("fits", [lambda p: True, lambda p: False], ids=["copied", "merged"])
def test_flattened_gradients_add_to_what_is_there(fits):
    q, k, v = many_axes(3)
    problem = Problem.create(q, k, v)
    out, lse = cpu.forward(problem)
    dout = normal(np, out.shape, np.float64, 20)
    first = flatten.flat_backward(BackwardRequest.create(problem, dout, out, lse), fits, cpu.backward)
    request = BackwardRequest.create(
        problem,
        dout,
        out,
        lse,
        grads_out=cupyflash.Gradients(*(None if x is None else x.copy() for x in first)),
        accumulate=True,
    )
    twice = flatten.flat_backward(request, fits, cpu.backward)
    assert twice.k is request.targets.k
    for x, y in zip(first[:3], twice[:3]):
        np.testing.assert_allclose(2 * x, y, rtol=1e-12, atol=1e-12)


def test_a_report_of_the_compiler_is_read_by_its_words():
    log = "ptxas info : 0 bytes gmem\n 24 bytes stack frame, 40 bytes spill stores\nUsed 255 registers"
    assert module._figure(log, r"Used (\d+) registers") == 255
    assert module._figure(log, r"(\d+) bytes smem", absent=0) == 0
    with pytest.raises(ValueError, match="no line like"):
        module._figure(log, r"(\d+) bytes smem")


def test_bfloat16_is_planned_like_float16():
    a, b = plan(1, 2, 300, 64, dtype=BFLOAT16), plan(1, 2, 300, 64)
    assert a.config.replace("bfloat16", "float16") == b.config
    assert a.workspace_bytes == b.workspace_bytes


def test_the_same_problem_gives_the_same_record():
    records = []
    for _ in range(2):
        recipe.forward_recipe.cache_clear()
        records.append(recipe_of(Problem.create(*qkv(np)), backward=False).launches[0].record)
    assert_same(np.frombuffer(records[0], np.uint8), np.frombuffer(records[1], np.uint8))
