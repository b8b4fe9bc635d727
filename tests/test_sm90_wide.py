"""The Hopper family of float32 without a GPU: what its kernels compile to, and what its launches say."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import cupyflash
from cupyflash.cuda import (
    configs,
    families,
    module,
    params,
    sm90_launch,
    sm90_wide,
    sm90_wide_launch,
    tensormap,
)
from cupyflash.cuda.plan import planned
from cupyflash.problem import Problem

cupy = pytest.importorskip("cupy", reason="needs CuPy and NVRTC: pip install '.[test]'")
nvrtc = cupy.cuda.nvrtc


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    """Of few queries the family takes only calls that ask for it."""
    monkeypatch.setattr(families, "FORCED", "sm90_wide")


OPTIONS = list(itertools.product((False, True), repeat=len(configs.OPTION_BITS)))
STATIC_BYTES = 2048  # of shared memory before the tiles, and what the system keeps: less than this
MANY = 256  # queries: fewer go elsewhere


def config(dims, options=OPTIONS[0]):
    return configs.choose("sm90_wide", "forward", "float32", *dims, options, 90)


def faults(config):
    """What would make a kernel slow without a word."""
    report = module.compile_offline(config, 90)
    found = re.findall(r".*C75\d\d.*", report.log)
    if report.spill_bytes or report.stack_bytes:
        found.append(f"spills {report.spill_bytes} bytes, stack frame {report.stack_bytes} bytes")
    return [f"{config}: {text}" for text in found]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
def test_kernels_compile_to_what_they_are_written_for(dims, options):
    assert faults(config(dims, options)) == []


@pytest.mark.full_matrix
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_every_kernel_compiles_to_what_it_is_written_for(dims):
    assert [fault for options in OPTIONS for fault in faults(config(dims, options))] == []


@pytest.mark.parametrize("kernel", ["split", "split_all"])
def test_the_kernels_that_split_compile(kernel):
    split = configs.choose("sm90_wide", kernel, "float32", 64, 64, OPTIONS[0], 90)
    assert split in set(configs.all_configs(90))
    assert faults(split) == []


def backward_config(kernel, dims, options):
    return configs.choose("sm90_wide", kernel, "float32", *dims, options, 90)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("kernel", ["backward_q", "backward_kv"])
def test_kernels_of_the_backward_compile_to_what_they_are_written_for(kernel, options, dims):
    assert faults(backward_config(kernel, dims, options)) == []


@pytest.mark.full_matrix
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("kernel", ["backward_q", "backward_kv"])
def test_so_do_all_of_them(kernel, dims):
    assert [fault for options in OPTIONS for fault in faults(backward_config(kernel, dims, options))] == []


def test_rows_of_the_backward_follow_their_rules():
    for kernel, dims, options in itertools.product(
        ("backward_q", "backward_kv"), itertools.product((1, 64, 65, 128), repeat=2), OPTIONS
    ):
        row = backward_config(kernel, dims, options).geometry
        assert row.broken_rules(kernel, 4) == []
        assert row.shared_bytes(kernel, 4) + STATIC_BYTES <= configs.shared_limit(90)
    broken = row._replace(slots=5, producer_registers=40, consumer_registers=240).broken_rules(kernel, 4)
    assert len(broken) == 2, broken


def test_head_dims_are_filled_up_to_whole_panels():
    for d, e in itertools.product((1, 64, 65, 128), repeat=2):
        row = config((d, e)).geometry
        assert (row.head_dim, row.head_dim_v) == (64 if d <= 64 else 128, 64 if e <= 64 else 128)
        assert row.broken_rules("forward", 4) == []
        assert row.shared_bytes("forward", 4) <= configs.shared_limit(90)


def footprint(columns, panel_bytes, at, by_rows):
    """The bytes that a product reads of an operand from a descriptor on: 16 deep, swizzled by 128 bytes."""
    if by_rows:  # 16 rows of a panel, in every panel
        return {at + panel * panel_bytes + byte for panel in range(-(-columns // 64)) for byte in (0, 2047)}
    return {at + byte for byte in (0, columns * 128 - 1 - at % 128)}  # some columns of a row of each


@pytest.mark.parametrize("d", [64, 128])
def test_products_read_their_own_slot_alone(d):
    row = config((d, d)).geometry
    text = config((d, d)).source()
    scores, output = (
        re.search(rf"__ void {name}\(.*?\n}}", text, re.DOTALL)[0]
        for name in ("wgmma_scores", "wgmma_output")
    )
    assert re.search(r"p, 1, 1, 0, 0; }", scores), "queries and keys lie along the head dim"
    assert re.search(r"p, 1, 1, 1; }", output), "values lie by their rows"
    panel = 128 * row.block_kv
    slot = panel * d // 64
    keys = [step // 4 * panel + step % 4 * 32 for step in range(d // 16)]
    values = [step * 2048 for step in range(row.block_kv // 16)]
    read = [footprint(row.block_kv, panel, at, False) for at in keys]
    read += [footprint(d, panel, at, True) for at in values]
    assert max(map(max, read)) < slot
    end = sm90_wide.ALIGNMENT_BYTES + sm90_wide.PLANES * 128 * d // 64 * row.block_q + row.slots * slot
    assert end == row.shared_bytes("forward", 4)
    assert end + STATIC_BYTES < 2**18, "what a descriptor can name"


def test_the_launch_takes_the_maps_that_the_kernel_reads():
    text = config((64, 64)).source() + (
        f"static_assert(sizeof(Launch) == {sm90_launch.LAUNCH_BYTES});"
        f"static_assert(sizeof(TensorMaps) == {4 * tensormap.MAP_BYTES});"
        f"static_assert(__INTADDR__(&((TensorMaps*)0)->k) == {tensormap.MAP_BYTES});"
    )
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*module.OPTIONS, *module.CUPY_OPTIONS, "-arch=compute_90a"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:3000])
    finally:
        nvrtc.destroyProgram(program)


def test_columns_of_a_thread_that_splits():
    text = configs.choose("sm90_wide", "split", "float32", 64, 64, OPTIONS[0], 90).source()
    assert f"kColumns = {sm90_wide.SPLIT_COLUMNS};" in text
    assert f"kSplitThreads = {configs.PREPOST_THREADS};" in text
    assert f"kPlanes = {sm90_wide.PLANES};" in text


ONE_OPTION = {
    "causal": {"causal": "bottom_right"},
    "window": {"window": (5, 3), "causal": "bottom_right"},
    "lengths": {"kv_lengths": [7, 0], "q_lengths": [3, 16]},
    "offset": {"query_offset": -3},
    "mask": {"mask": np.ones((1, MANY, 24), bool)},
    "bias": {"bias": np.zeros((2, 1, MANY, 24))},
    "alibi": {"alibi_slopes": np.ones(4, np.float32), "query_offset": 0},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    "negative scale": {"scale": -1.0},
}


def shaped(*shape):
    return np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize(("d", "e"), [(64, 64), (7, 5), (100, 128), (128, 1)])
def test_every_option_and_pair_of_options_is_planned_here(d, e):
    q, k, v = shaped(2, 4, MANY, d), shaped(2, 2, 24, d), shaped(2, 2, 24, e)
    for a, b in itertools.combinations_with_replacement(ONE_OPTION, 2):
        options = {**ONE_OPTION[a], **ONE_OPTION[b]}
        if "causal" in options:
            options.pop("query_offset", None)
        p = cupyflash.plan(q, k, v, arch=90, **options)
        assert (p.family, p.kernels) == ("sm90_wide", ("split", "forward")), f"{a} with {b}: {p}"


def family(d=64, m=MANY, arch=90, **options):
    return cupyflash.plan(
        shaped(1, 1, m, d), shaped(1, 1, 8, d), shaped(1, 1, 8, d), arch=arch, **options
    ).family


def test_what_goes_here_and_what_goes_elsewhere(monkeypatch):
    assert family() == family(m=1) == "sm90_wide"
    assert family(backward=True) == "sm90_wide"
    for refused in ({"precision": "ieee"}, {"precision": "tf32"}, {"d": 129}, {"arch": 80}, {"arch": 100}):
        with pytest.raises(ValueError, match="'sm90_wide' was asked for but does not take this call"):
            family(**refused)
    monkeypatch.setattr(families, "FORCED", None)
    wanted = {"precision": "tf32x3"}
    assert family(**wanted) == "sm90_wide"
    others = [family(m=MANY - 1, **wanted), family(arch=80, **wanted), family(arch=100, **wanted)]
    others += [family(arch=120, **wanted), family(precision="tf32")]
    assert set(others) == {"sm80_wide"}
    assert family() == family(backward=True) == "sm90_wide"
    assert family(m=MANY - 1) == family(m=MANY - 1, backward=True) == "sm80_wide"
    assert family(precision="ieee") == "simt"


def test_every_backward_runs_here():
    q, k = np.zeros((2, 4, MANY, 64), np.float32), np.zeros((2, 2, 24, 64), np.float32)
    here = ("delta", "split_all", "backward_kv", "backward_q")
    calls = [((q, k, k), options) for options in ONE_OPTION.values()]
    calls += [(arrays, {}) for arrays in ((q, k[:1], k[:1]), (q[:1], k, k))]
    for arrays, options in calls:
        p = cupyflash.plan(*arrays, arch=90, backward=True, **options)
        assert (p.family, p.kernels[:4]) == ("sm90_wide", here), f"{options}: {p}"
        assert p.config.startswith("sm90_wide backward_q") or "bias" in options
    two = cupyflash.plan(q, k[:1], k, arch=90, backward=True)
    assert two.kernels == (*here[:3], *here[2:]), "keys and values have an owner each"
    slopes = cupyflash.plan(q, k, k, arch=90, backward=True, **ONE_OPTION["alibi"])
    assert slopes.kernels == (*here, "sum_rows")
    assert not {"split_all"} & set(
        cupyflash.plan(q, k[:, :, :0], k[:, :, :0], arch=90, backward=True).kernels
    )


def test_a_bias_of_another_dtype_is_copied_for_the_backward():
    q, k = np.zeros((2, 4, MANY, 64), np.float32), np.zeros((2, 2, 24, 64), np.float32)
    for shape in ((4, MANY, 24), (MANY, 1), ()):
        for dtype in (np.float16, np.float32, np.float64):
            bias = np.zeros(shape, dtype)
            p = cupyflash.plan(q, k, k, arch=90, backward=True, bias=bias)
            assert (p.copied_bytes > 0) == (dtype != np.float32), f"{shape} {dtype}"


def test_planes_of_the_backward_are_whole_tiles():
    q, k = np.zeros((2, 4, 300, 70), np.float32), np.zeros((2, 2, 100, 70), np.float32)
    recipe = planned(Problem.create(q, k, k[..., :30], backend="cuda"), True, None, 90)[0]
    queries, keys = 2 * 4 * 320, 2 * 2 * 128
    sizes = {"q": queries * 768, "k": keys * 768, "v": keys * 384, "dout": queries * 384}
    places = dict(recipe.workspace)
    assert places["k_planes"] - places["q_planes"] == sizes["q"]
    assert places["dout_planes"] - places["v_planes"] == sizes["v"]
    assert places["row_stats"] - places["dout_planes"] == sizes["dout"]
    units = (sum(sizes.values()) // 48) + 2 * 4 * 384
    assert recipe.launches[1].grid == -(-units // configs.PREPOST_THREADS)
    assert f"kColumns = {sm90_wide.SPLIT_COLUMNS};" in recipe.launches[1].config.source()


def planes(*axes, columns=70):
    """Planes of an array of zeros; axes in parentheses are broadcast."""
    own = [1 if isinstance(n, tuple) else n for n in axes]
    full = [n[0] if isinstance(n, tuple) else n for n in axes]
    layout = params.Layout.of(np.broadcast_to(np.zeros((*own, columns), np.float32), (*full, columns)))
    return sm90_wide_launch.planes_of(layout)


def test_planes_are_dense_and_hold_what_is_broadcast_once():
    found = planes(5, 4, 30)
    assert found.shape == (5, 4, 30, 3 * 128)
    assert found.strides == (4 * 30 * 768, 30 * 768, 768, 2)
    assert sm90_wide_launch.planes_bytes(found) == 5 * 4 * 30 * 768
    found = planes((5,), 4, 30, columns=64)
    assert found.shape == (5, 4, 30, 3 * 64)
    assert found.strides == (0, 30 * 384, 384, 2)
    assert sm90_wide_launch.planes_bytes(found) == 4 * 30 * 384
    assert sm90_wide_launch.planes_bytes(planes(5, (4,), 30)) == 5 * 30 * 768
    assert sm90_wide_launch.planes_bytes(planes(5, 4, 0)) == 0


def test_the_workspace_holds_both_and_one_launch_makes_them():
    q, k, v = (
        shaped(2, 4, MANY, 128),
        np.zeros((1, 2, 100, 128), np.float32),
        np.zeros((2, 2, 100, 30), np.float32),
    )
    recipe = planned(Problem.create(q, k, v, backend="cuda"), False, None, 90)[0]
    k_bytes, v_bytes = 2 * 100 * 768, 2 * 2 * 100 * 384
    assert recipe.workspace == (("k_planes", 0), ("v_planes", k_bytes))
    assert recipe.workspace_bytes == k_bytes + v_bytes
    split, forward = recipe.launches
    assert split.grid == -(-(2 * 100 * 16 + 2 * 2 * 100 * 8) // 256)
    assert split.record == forward.record
    assert split.extras is None


def test_maps_are_of_the_planes(monkeypatch):
    made = []
    monkeypatch.setattr(
        tensormap.Form, "map_of", lambda form, address: made.append((form, address)) or bytes(128)
    )
    q, k = shaped(3, 4, MANY, 128), np.zeros((3, 2, 100, 128), np.float32)
    extras = planned(Problem.create(q, k, k, backend="cuda"), False, None, 90)[0].launches[-1].extras
    row = [16 * n for n in range(len(params.ADDRESSES))]
    assert len(extras.maps(row)) == 4 * tensormap.MAP_BYTES
    assert [address for _, address in made] == [row[params.ADDRESSES.index(f"{x}_planes")] for x in "kv"]
    _, sizes, strides, box = [None, *(list(x) for x in made[0][0]._arguments[:3])]
    assert sizes == [384, 100, 2, 3, 1]
    assert strides == [768, 100 * 768, 2 * 100 * 768, 0]
    assert box[:2] == [64, 64]


def test_no_keys_leave_one_launch():
    q, k = shaped(1, 1, MANY, 64), shaped(1, 1, 0, 64)
    assert cupyflash.plan(q, k, k, arch=90).kernels == ("forward",)


def test_a_block_cannot_ask_for_more_registers_than_it_starts_with():
    row = sm90_wide.ROWS[-1]
    broken = row._replace(producer_registers=32, consumer_registers=240).broken_rules("forward", 4)
    assert broken == ["the roles want 65536 registers, the block has 64512"]
