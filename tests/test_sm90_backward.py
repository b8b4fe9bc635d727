"""The Hopper backward without a GPU: what its kernels compile to, who takes a call, and what its launches say."""

from __future__ import annotations

import itertools
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from support import DTYPES
from test_sm90 import ONE_OPTION, OPTIONS, faults, strided

import cupyflash
from cupyflash.cuda import backward_rows, configs, module, params, sm90_backward, sm90_backward_q, sm90_launch
from cupyflash.cuda.backward_recipe import backward_recipe
from cupyflash.cuda.operands import layouts, tensors
from cupyflash.cuda.params import Layout
from cupyflash.cuda.plan import planned
from cupyflash.cuda.recipe import Sizes
from cupyflash.problem import Problem

cupy = pytest.importorskip("cupy", reason="needs CuPy and NVRTC: pip install '.[test]'")
nvrtc = cupy.cuda.nvrtc

KERNELS = {64: ("backward",), 128: ("backward",), 256: ("backward_kv", "backward_q")}


def config(dim, options=OPTIONS[0], dtype="bfloat16", kernel=None):
    return configs.choose("sm90", kernel or KERNELS[dim][0], dtype, dim, dim, options, 90)


@pytest.mark.parametrize(
    "config",
    [config(64), config(128, OPTIONS[0], "float16"), config(256), config(256, kernel="backward_q")],
    ids=str,
)
def test_kernels_compile_to_what_they_are_written_for(config):
    assert faults(config) == []


@pytest.mark.full_matrix
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("dim", "kernel"), [(dim, kernel) for dim in KERNELS for kernel in KERNELS[dim]])
def test_every_kernel_compiles_to_what_it_is_written_for(dim, kernel, dtype):
    assert [fault for options in OPTIONS for fault in faults(config(dim, options, dtype, kernel))] == []


def test_the_launch_record_is_the_cuda_struct_byte_for_byte():
    names = [
        "scale",
        "unit",
        "tiles",
        "head_tiles",
        "heads",
        "side_by_side",
        "group",
        "ticket",
        "queries",
        "finish",
        "apart",
    ]
    lines = [f"static_assert(sizeof(Launch) == {sm90_backward.LAUNCH_BYTES});"]
    lines += [
        f'static_assert(__INTADDR__(&((Launch*)0)->{name}) == {4 * place}, "{name}");'
        for place, name in enumerate(names)
    ]
    constants = {"kRowUnit": "ROW_UNIT", "kRowBlock": "ROW_BLOCK", "kTickets": "TICKETS"}
    lines += [
        f"static_assert({name} == {getattr(backward_rows, value)});" for name, value in constants.items()
    ]
    program = nvrtc.createProgram(config(64).source() + "\n".join(lines), "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*module.OPTIONS, "-arch=compute_90a"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:3000])
    finally:
        nvrtc.destroyProgram(program)


def operands(dtype, d, e):
    return tuple(
        np.broadcast_to(dtype.type(0), (2, heads, n, c))
        for heads, n, c in ((4, 16, d), (2, 24, d), (2, 24, e))
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (7, 5), (100, 128), (192, 128), (256, 256)])
def test_every_option_and_pair_is_planned_here(dtype, d, e):
    q, k, v = operands(dtype, d, e)
    for a, b in itertools.combinations_with_replacement(ONE_OPTION, 2):
        options = {**ONE_OPTION[a], **ONE_OPTION[b]}
        if "causal" in options:
            options.pop("query_offset", None)
        p = cupyflash.plan(q, k, v, arch=90, backward=True, **options)
        main = ["backward"] if max(d, e) <= 128 else ["backward_kv", "backward_q"]
        bias, slopes = "bias" in options, "alibi_slopes" in options
        expected = ["row_stats", *main, *["backward_bias", "sum_partials"] * bias]
        expected += ["backward_q"] * slopes + ["sum_rows"] * slopes
        assert p.family == "sm90", f"{a} with {b}: {p}"
        assert list(p.kernels) == expected + ["sum_rows"] * ("sinks" in options), f"{a} with {b}: {p}"


def test_no_keys_and_wider_head_dims_go_elsewhere():
    def passed_over(d, n):
        q, k = (np.broadcast_to(np.float16(0), (1, 1, rows, d)) for rows in (8, n))
        return dict(cupyflash.plan(q, k, k, arch=90, backward=True).passed_over)["sm90"]

    assert passed_over(257, 8) == "takes head dims up to 256, got 257 and 257"
    assert passed_over(8, 0) == "has no backward without keys"


def launches(deterministic=True, **shapes):
    """The launches of a backward by kernel, with their own part of the arguments."""
    q, k, v = (np.broadcast_to(np.float16(0), shapes[name]) for name in "qkv")
    recipe = planned(Problem.create(q, k, v, deterministic=deterministic), True, None, 90)[0]
    return [(launch.config.kernel, launch) for launch in recipe.launches]


def test_keys_and_values_of_other_broadcasts_are_owned_by_launches_of_their_own():
    shape = (3, 4, 70, 64)
    found = launches(q=shape, k=(1, 4, 200, 64), v=(3, 4, 200, 64))
    assert [kernel for kernel, _ in found] == ["row_stats", "backward", "backward"]
    (keys, values) = (launch for kernel, launch in found if kernel == "backward")
    hidden = [{params.ADDRESSES[index] for index in launch.hidden} for launch in (keys, values)]
    assert hidden == [{"dv", "dbias"}, {"dk", "dbias"}]
    assert (keys.extras.heads, values.extras.heads) == (4, 12)
    assert (keys.extras.ticket, values.extras.ticket) == (0, 1)
    added = (keys.extras.queries, values.extras.queries)
    assert added == (sm90_backward.IN_TURN, sm90_backward.NOT_WANTED)  # dq is added once
    assert (keys.extras.finishes, values.extras.finishes) == (True, False)
    # Without dq no block waits for another.
    assert (keys.extras.side_by_side, values.extras.side_by_side) == ((128, 64), (128, 128))


def test_the_gradient_of_a_bias_leaves_the_main_kernel_where_nothing_is_summed():
    def kernels(shape, dtype=np.float16, accumulate=False, wrt=("q", "bias"), **options):
        q, bias = np.broadcast_to(np.float16(0), (2, 4, 70, 64)), np.broadcast_to(dtype(0), shape)
        problem = Problem.create(q, q, q, bias=bias, **options)
        found = layouts(tensors(problem)) | {
            "dout": Layout.of(q),
            "dq": Layout.of(q),
            "dbias": Layout.of(np.empty(shape, dtype)),
        }
        arguments = Sizes.of(problem), tuple(found.items()), frozenset(wrt), accumulate
        return backward_recipe("sm90", 90, *arguments).launches

    own = (2, 4, 70, 70)
    for dtype in (np.float16, np.float32):
        main = kernels(own, dtype)[1]
        assert [launch.config.kernel for launch in kernels(own, dtype)] == ["row_stats", "backward"]
        assert params.ADDRESSES.index("dbias") not in main.hidden
    others = [
        kernels((1, 4, 70, 70)),
        kernels((2, 1, 70, 70)),
        kernels((2, 4, 1, 70)),
        kernels((2, 4, 70, 1)),
        kernels(own, np.float64),
        kernels(own, accumulate=True),
        kernels(own, wrt=("bias",)),
        kernels(own, softcap=2.0),
    ]
    for launches in others:
        hidden = [x.hidden for x in launches if x.config.kernel == "backward"]
        assert "backward_bias" in [x.config.kernel for x in launches]
        assert all(params.ADDRESSES.index("dbias") in x for x in hidden)


def test_sums_of_several_items_or_into_another_array_are_finished_by_a_kernel_of_their_own():
    def kernels(q=(2, 4, 70, 64), dtype=np.float16, accumulate=False):
        q, k = np.broadcast_to(np.float16(0), q), np.broadcast_to(np.float16(0), (2, 4, 70, 64))
        problem = Problem.create(q, k, k)
        dq = Layout.of(np.empty(q.shape, dtype))
        found = layouts(tensors(problem)) | {"dout": Layout.of(k), "dq": dq}
        arguments = Sizes.of(problem), tuple(found.items()), frozenset("q"), accumulate
        return [launch.config.kernel for launch in backward_recipe("sm90", 90, *arguments).launches]

    assert kernels() == ["row_stats", "backward"]
    for others in (kernels(q=(1, 4, 70, 64)), kernels(dtype=np.float32), kernels(accumulate=True)):
        assert others == ["row_stats", "backward", "finish_queries"]


def test_sums_in_no_order_begin_with_the_first_share():
    x = np.broadcast_to(np.float16(0), (2, 4, 70, 64))
    recipe = planned(Problem.create(x, x, x, deterministic=False), True, None, 90)[0]
    kernels = [launch.config.kernel for launch in recipe.launches]
    assert kernels == ["row_stats", "backward"]
    assert recipe.launches[1].extras.queries == sm90_backward.IN_ANY_ORDER


@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads_share_no_sums(deterministic):
    x = np.broadcast_to(np.float16(0), (2, 4, 70, 256))
    recipe = planned(Problem.create(x, x, x, deterministic=deterministic), True, None, 90)[0]
    _, keys, queries = recipe.launches
    assert [keys.config.kernel, queries.config.kernel] == ["backward_kv", "backward_q"]
    assert "dq_sums" not in dict(recipe.workspace)
    assert (keys.extras.queries, queries.extras.queries) == (sm90_backward.NOT_WANTED,) * 2
    assert (keys.grid, queries.grid) == (2 * 4 * 2, 2 * 4 * 1)
    assert (keys.extras.ticket, queries.extras.ticket) == (0, backward_rows.TICKETS - 1)


@pytest.mark.parametrize(
    ("wrt", "kernels"),
    [("q", ["backward_q"]), ("k", ["backward_kv"]), (("q", "v"), ["backward_kv", "backward_q"])],
)
def test_wide_heads_launch_what_is_wanted(wrt, kernels):
    x = np.broadcast_to(np.float16(0), (2, 4, 70, 256))
    problem, wanted = Problem.create(x, x, x), frozenset(wrt)
    arrays = tensors(problem) | {f"d{name}": x for name in wanted} | {"out": x, "dout": x}
    arrays["lse"] = np.broadcast_to(np.float32(0), (2, 4, 70))
    recipe = backward_recipe("sm90", 90, Sizes.of(problem), tuple(layouts(arrays).items()), wanted, False)
    assert [launch.config.kernel for launch in recipe.launches] == ["row_stats", *kernels]


def test_the_launch_of_the_main_kernel():
    unit = np.float32(0.5) * np.float32(np.log2(np.e))
    assert packed(100, 8, 2) == (0.5, unit, 6, 3, 2, 2, 4, 0, 1, sm90_backward.DOWNWARD, 0)
    assert packed(100, 8, 2, right=0)[9] == sm90_backward.UPWARD
    bounded = {dim: [packed(n, 96, 96, 0, dim)[5] for n in (64, 4096, 2**20)] for dim in (64, 128)}
    assert bounded == {64: [64, 32, 32], 128: [64, 16, 16]}  # in turn blocks of one head wait for one another


@pytest.mark.parametrize(("right", "deterministic"), [(None, True), (None, False), (0, False)])
def test_else_as_many_heads_are_walked_side_by_side_as_fill_the_gpu(right, deterministic):
    # Key tiles of 128: a head has 8, 32 or 128 of them, and the GPU takes about 128 of head dim 128.
    right = params.UNBOUNDED if right is None else right
    for dim, heads in {128: [16, 4, 2], 64: [32, 8, 2]}.items():
        found = [packed(n, 96, 96, right, dim, n, deterministic) for n in (1024, 4096, 16384)]
        assert [record[5] for record in found] == heads


@pytest.mark.parametrize("kernel", KERNELS[256])
def test_wide_heads_are_walked_side_by_side_while_half_of_the_l2_cache_holds_them(kernel):
    found = [packed(4096, 96, 96, right, 256, 4096, kernel=kernel)[5] for right in (params.UNBOUNDED, 0)]
    head_bytes = 2 * 4096 * 256 * 2
    assert found == [int(32e6 / head_bytes), int(48e6 / head_bytes)]


def test_blocks_begin_apart_in_any_order_without_a_bound_to_the_right():
    calls = itertools.product((True, False), (0, params.UNBOUNDED))
    apart = [call for call in calls if packed(300, 2, 2, deterministic=call[0], right=call[1])[10]]
    assert apart == [(False, params.UNBOUNDED)]


def packed(
    rows, heads, heads_kv, right=params.UNBOUNDED, dim=64, keys=300, deterministic=True, kernel="backward"
):
    """The launch record of a call of that many queries."""
    shapes = {"q": (1, heads, rows, dim), "k": (1, heads_kv, keys, dim), "v": (1, heads_kv, keys, dim)}
    [launch] = [launch for name, launch in launches(deterministic, **shapes) if name == kernel]
    numbers = [0.0] * len(params.NUMBERS)
    numbers[params.NUMBERS.index("scale")] = 0.5
    numbers[params.NUMBERS.index("right")] = right
    (record,) = launch.extras.records([8] * len(params.ADDRESSES), numbers, 0)
    return struct.unpack("=2f9i", record)


@pytest.mark.parametrize(
    ("dout", "row"),
    [
        (strided((2, 4, 10, 64), (2560, 640, 64, 1)), None),
        (strided((2, 4, 10, 7), (280, 70, 7, 1)), 8),
        (strided((2, 4, 10, 64), (2560, 64, 256, 1)), None),  # (batch, length, heads, dim)
        (strided((2, 4, 10, 64), (-2560, 640, 64, 1)), 64),
    ],
)
def test_a_cotangent_that_tma_does_not_take_is_copied(dout, row):
    copies = sm90_launch.copies(call_of(mask=None, bias=None), dout)
    assert {name: copy.row for name, copy in copies.items()} == ({} if row is None else {"dout": row})


def call_of(**options):
    """What `copies` asks of a problem whose q, k and v are read in place."""
    x = strided((2, 4, 10, 64), (2560, 640, 64, 1))
    return SimpleNamespace(dtype=np.dtype(np.float16), q=x, k=x, v=x, **options)


def test_a_mask_and_a_bias_are_copied_to_whole_chunks_of_rows_or_read_as_one_column():
    def copied(mask, bias):
        problem = call_of(mask=mask, bias=bias)
        return {
            name: (copy.row, copy.layout.dtype.name)
            for name, copy in sm90_launch.copies(problem, problem.q).items()
        }

    half, single, double = np.float16, np.float32, np.float64
    whole = strided((4, 10, 16), (160, 16, 1), bool), strided((4, 10, 16), (160, 16, 1), half)
    assert copied(*whole) == {}
    odd = (4, 10, 9), (90, 9, 1)
    assert copied(strided(*odd, bool), strided(*odd, half)) == {"mask": (16, "bool"), "bias": (16, "float16")}
    assert copied(None, strided(*odd, single)) == {"bias": (12, "float32")}
    assert copied(None, strided(*odd, double)) == {"bias": (12, "float32")}
    column = strided((4, 10, 1), (10, 1, 1), double)
    assert copied(strided((4, 10, 9), (10, 1, 0), bool), column) == {}


def test_invalid_geometry_is_named():
    row = sm90_backward.TABLE["backward", 4, OPTIONS[0]][0]
    assert row.broken_rules("backward", 4) == []
    assert row._replace(head_dim=96, block_q=64).broken_rules("backward", 4) == [
        "head_dim = 96 must be 64, 128 or 256"
    ]
    assert row._replace(block_kv=64).broken_rules("backward", 4) == ["block_kv = 64 must be 128"]
    row = sm90_backward_q.TABLE["backward_q", 4, OPTIONS[0]][0]
    assert row.broken_rules("backward_q", 4) == []
    assert row._replace(block_q=64, block_kv=40).broken_rules("backward_q", 4) == [
        "block_q = 64 must be 128: two consumers",
        "block_kv = 40 must be a multiple of 16",
    ]
