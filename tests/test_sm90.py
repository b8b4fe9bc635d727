"""The Hopper family without a GPU: what its kernels compile to, and what its launches say."""

from __future__ import annotations

import itertools
import re
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from support import BFLOAT16, DTYPES

import cupyflash
from cupyflash.cuda import configs, counters, module, params, sm90, sm90_launch, tensormap

cupy = pytest.importorskip("cupy", reason="needs CuPy and NVRTC: pip install '.[test]'")
nvrtc = cupy.cuda.nvrtc

OPTIONS = list(itertools.product((False, True), repeat=len(configs.OPTION_BITS)))
HEAD_DIMS = [(row.head_dim, row.head_dim_v) for row in sm90.PLAIN]


def config(dims, options, dtype="bfloat16"):
    return configs.choose("sm90", "forward", dtype, *dims, options, 90)


def faults(config):
    """What would make a kernel slow without a word."""
    report = module.compile_offline(config, 90)
    found = re.findall(r".*C75\d\d.*", report.log)  # products in order of issue, or setmaxnreg ignored
    if report.spill_bytes or report.stack_bytes:
        found.append(f"spills {report.spill_bytes} bytes, stack frame {report.stack_bytes} bytes")
    return [f"{config}: {text}" for text in found]


@pytest.mark.parametrize(
    "config",
    [
        config((64, 64), OPTIONS[0]),
        config((128, 128), OPTIONS[0], "float16"),
        config((256, 256), OPTIONS[-1]),
    ],
    ids=str,
)
def test_kernels_compile_to_what_they_are_written_for(config):
    assert faults(config) == []


@pytest.mark.full_matrix
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_every_kernel_compiles_to_what_it_is_written_for(dims, dtype):
    assert [fault for options in OPTIONS for fault in faults(config(dims, options, dtype))] == []


def test_registers_move_to_the_consumers():
    chosen = config((64, 64), OPTIONS[0])
    program = nvrtc.createProgram(chosen.source(), "kernel.cu", (), ())
    nvrtc.compileProgram(program, (*module.OPTIONS, "-arch=compute_90a"))
    ptx = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    geometry = chosen.geometry
    assert sorted(re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", text)) == [
        ("dec", str(geometry.producer_registers)),
        ("inc", str(geometry.consumer_registers)),
    ]
    assert f"m64n{geometry.block_kv}k16.f32.bf16.bf16" in text
    assert f"m64n{geometry.head_dim_v}k16.f32.bf16.bf16" in text


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_pair_of_head_dims_has_the_smallest_row_that_holds_it(options):
    for d, e in itertools.product((1, 8, 64, 65, 96, 97, 128, 129, 192, 193, 256), repeat=2):
        row = config((d, e), options).geometry
        assert row.head_dim >= d
        assert row.head_dim_v >= e
        assert row.broken_rules("forward", 4) == []
        assert row.head_dim * row.head_dim_v == min(a * b for a, b in HEAD_DIMS if a >= d and b >= e), (
            f"{d}, {e} take {row}"
        )


def test_the_launch_record_is_the_cuda_struct_byte_for_byte():
    names = ["counter", "scale", "unit", "tiles", "query_tiles", "heads", "group", "out_by_tma", "cap"]
    names += ["cap_limit", "items"]
    offsets = [0, 8, 12, *range(16, 40, 4), 48, 52]
    lines = [f"static_assert(sizeof(Launch) == {sm90_launch.LAUNCH_BYTES});"]
    lines += [
        f'static_assert(__INTADDR__(&((Launch*)0)->{name}) == {offset}, "{name}");'
        for name, offset in zip(names, offsets)
    ]
    lines.append(f"static_assert(sizeof(TensorMaps) == {sm90_launch.MAPS_BYTES});")
    text = config((64, 64), OPTIONS[0]).source() + "\n".join(lines)
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*module.OPTIONS, "-arch=compute_90a"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:3000])
    finally:
        nvrtc.destroyProgram(program)


class Driver:
    """Stands in for cuTensorMapEncodeTiled: keeps what it was given and numbers the maps."""

    def __init__(self, error=0):
        self.calls, self.error = [], error

    def __call__(self, place, data_type, rank, address, sizes, strides, box, steps, *rest):
        self.calls.append(
            (data_type, rank, address.value, list(sizes), list(strides), list(box), list(steps), rest)
        )
        assert place.value % 64 == 0
        return self.error


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(tensormap, "_encoder", lambda: driver)
    return driver


def test_a_tensor_map_says_where_its_tensor_lies(driver):
    form = tensormap.Form("bfloat16", [40, 100, 4, 2], [1, 160, 40, 16000], (64, 128))
    assert len(form.map_of(4096)) == tensormap.MAP_BYTES
    [(data_type, rank, address, sizes, strides, box, steps, rest)] = driver.calls
    assert (data_type, rank, address) == (9, 5, 4096)  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert sizes == [40, 100, 4, 2, 1]
    assert strides == [320, 80, 32000, 0]  # bytes, of all axes but the contiguous one
    assert (box, steps) == ([64, 128, 1, 1, 1], [1] * 5)
    assert rest == (0, 3, 3, 0)  # no interleave, 128-byte swizzle, 256-byte promotion, zeros outside


def test_tensor_maps_are_kept_by_address_and_the_oldest_goes(driver):
    form = tensormap.Form("float16", [64, 8], [1, 64], (64, 64))
    first = form.map_of(0)
    assert form.map_of(0) is first
    assert len(driver.calls) == 1
    for address in range(16, 16 * 80, 16):
        form.map_of(address)
    assert len(driver.calls) == 80
    form.map_of(16 * 79)
    assert len(driver.calls) == 80
    form.map_of(0)
    assert len(driver.calls) == 81


def test_a_map_that_the_driver_refuses_is_named(driver):
    driver.error = 1
    with pytest.raises(
        RuntimeError, match=r"error 1 for sizes \[64, 8, 1, 1, 1\], strides \[128, 0.* bytes at 0x40"
    ):
        tensormap.Form("float16", [64, 8], [1, 64], (64, 64)).map_of(64)


@pytest.mark.parametrize(
    ("sizes", "strides", "taken"),
    [
        ((64, 10, 2), (1, 64, 640), True),
        ((64, 10, 2), (1, 0, 640), True),  # repeated rows
        ((64, 10, 2), (2, 128, 1280), False),  # every other column
        ((64, 10, 2), (1, -64, 640), False),  # reversed
        ((7, 10, 2), (1, 7, 70), False),  # rows of 14 bytes
        ((7, 1, 1), (1, 7, 70), True),  # one row
        ((64, 10, 2), (1, 64, 2**40), False),
        ((1, 10, 2), (5, 8, 80), True),  # one column
    ],
)
def test_layouts_that_tma_takes(sizes, strides, taken):
    assert tensormap.takes(sizes, strides, 2) is taken


def test_the_schedule_walks_heads_side_by_side_while_their_keys_fit_the_cache():
    def group(right, head_bytes, heads=64, items=1):
        extras = sm90_launch.Extras((None,) * 4, 3, heads, head_bytes, False, items)
        numbers = [0.0] * len(params.NUMBERS)
        numbers[params.NUMBERS.index("scale")] = 0.5
        numbers[params.NUMBERS.index("right")] = params.UNBOUNDED if right is None else right
        return struct.unpack("=Q2f5i20x", *extras.records([0] * 4, numbers, 8))

    assert group(None, 1e6)[6] == 1
    assert group(0, 1e6)[6] == 32  # 32 MB hold 32 heads of 1 MB
    assert group(0, 1e6, heads=5)[6] == 5
    assert group(0, 1e9)[6] == 1
    assert group(None, 1e6, items=4)[6] == 4  # which share a bias
    assert group(None, 1e6, items=64)[6] == 32
    counter, scale, unit, tiles, query_tiles, heads, *_, by_tma = group(None, 1e6)
    assert (counter, scale, tiles, query_tiles, heads, by_tma) == (8, 0.5, 192, 3, 64, 0)
    assert unit == np.float32(0.5) * np.float32(np.log2(np.e))


@pytest.mark.parametrize(
    ("scale", "plain"), [(1.0, True), (1e-12, True), (0.0, False), (-1.0, False), (1e30, False)]
)
def test_scales_that_a_mask_of_minus_infinity_would_not_survive_are_told_apart(scale, plain):
    assert sm90_launch.plain_scale(scale) is plain


ONE_OPTION = {
    "causal": {"causal": "bottom_right"},
    "window": {"window": (5, 3), "causal": "bottom_right"},
    "lengths": {"kv_lengths": [7, 0], "q_lengths": [3, 16]},
    "offset": {"query_offset": -3},
    "mask": {"mask": np.ones((1, 16, 24), bool)},
    "bias": {"bias": np.zeros((2, 1, 16, 24))},
    "alibi": {"alibi_slopes": np.ones(4, np.float32), "query_offset": 0},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    "negative scale": {"scale": -1.0},
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (7, 5), (100, 128), (192, 128), (256, 256)])
def test_every_option_and_pair_of_options_is_planned_here(dtype, d, e):
    q, k, v = (
        np.broadcast_to(dtype.type(0), (2, heads, n, c))
        for heads, n, c in ((4, 16, d), (2, 24, d), (2, 24, e))
    )
    for a, b in itertools.combinations_with_replacement(ONE_OPTION, 2):
        options = {**ONE_OPTION[a], **ONE_OPTION[b]}
        if "causal" in options:
            options.pop("query_offset", None)
        p = cupyflash.plan(q, k, v, arch=90, **options)
        assert (p.family, len(p.kernels)) == ("sm90", 1), f"{a} with {b}: {p}"


def test_one_query_of_many_keys_goes_where_keys_are_cut():
    q, k = (np.broadcast_to(np.float16(0), (1, 1, n, 64)) for n in (1, 8192))
    p = cupyflash.plan(q, k, k, arch=90)
    assert p.family != "sm90"
    assert dict(p.passed_over)["sm90"] == (
        "leaves few queries with many keys to the sm80 family, which cuts the keys into runs"
    )


def test_a_head_dim_beyond_the_rows_goes_elsewhere():
    x = np.broadcast_to(np.float16(0), (1, 1, 8, 257))
    p = cupyflash.plan(x, x, x, arch=90)
    assert p.family != "sm90"
    assert dict(p.passed_over)["sm90"] == "takes head dims up to 256, got 257 and 257"


def strided(shape, strides, dtype=np.float16):
    """A description of an array: strides in elements."""
    itemsize = np.dtype(dtype).itemsize
    return SimpleNamespace(
        shape=shape, strides=tuple(s * itemsize for s in strides), dtype=np.dtype(dtype), ndim=len(shape)
    )


def test_what_cannot_be_read_in_place_is_copied_with_padded_rows():
    whole = strided((2, 4, 10, 64), (2560, 640, 64, 1))
    odd = strided((2, 4, 10, 7), (280, 70, 7, 1))
    mask = strided((10, 9), (9, 1), bool)
    bias = strided((4, 10, 10), (100, 10, 1), np.float64)
    problem = SimpleNamespace(dtype=np.dtype(np.float16), q=whole, k=odd, v=whole, mask=mask, bias=bias)
    copies = sm90_launch.copies(problem)
    assert {name: copy.row for name, copy in copies.items()} == {"k": 8, "mask": 16, "bias": 12}
    assert copies["k"].layout.strides == (640, 160, 16, 2)
    assert copies["k"].nbytes == 2 * 4 * 10 * 8 * 2
    assert copies["mask"].nbytes == 160
    assert copies["bias"].layout.dtype == np.float32


@pytest.mark.parametrize(
    ("bias", "copied"),
    [
        (strided((4, 10, 16), (160, 16, 1)), False),
        (strided((4, 10, 10), (100, 10, 1)), True),  # rows at addresses that are no multiples of 16
        (strided((4, 10, 9), (160, 16, 1)), False),
        (strided((4, 10, 10), (100, 1, 10)), True),
        (strided((4, 10, 1), (10, 1, 1)), False),  # one column
        (strided((4, 10, 10), (10, 1, 0), np.float64), False),
        (strided((1, 1, 9), (9, 9, 1)), False),  # one row
        (strided((4, 10, 10), (100, 10, 1), BFLOAT16), True),  # neither the elements' dtype nor float32
        (strided((4, 10, 10), (100, 10, 1), np.float32), True),
        (strided((4, 10, 10), (120, 12, 1), np.float32), False),
    ],
)
def test_layouts_of_a_bias(bias, copied):
    whole = strided((2, 4, 10, 64), (2560, 640, 64, 1))
    problem = SimpleNamespace(dtype=np.dtype(np.float16), q=whole, k=whole, v=whole, mask=None, bias=bias)
    assert ("bias" in sm90_launch.copies(problem)) is copied


def test_counters_of_launches_that_may_overlap_are_apart():
    kept = SimpleNamespace(data=SimpleNamespace(ptr=1000))
    made = counters.Counters(lambda zeros: (kept, zeros.any() and pytest.fail("not zero"))[0])
    direct = [made.address(False) for _ in range(3)]
    graphs = [made.address(True) for _ in range(3)]
    assert len({*direct, *graphs}) == 6
    for _ in range(counters.SLOTS - 3):
        made.address(False)
    assert made.address(False) == direct[0]
    assert made.address(True) not in {*direct, *graphs}


def test_a_block_cannot_ask_for_more_registers_than_it_starts_with():
    row = sm90.PLAIN[-1]
    assert row.threads == 384
    broken = row._replace(producer_registers=32, consumer_registers=240).broken_rules("forward", 4)
    assert broken == ["the roles want 65536 registers, the block has 64512"]
