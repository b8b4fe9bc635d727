"""The emulation's words against NumPy: conversions bit for bit, functions within their accuracy, fragments."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated import needs_compiler, run

from cupyflash.cuda.emulate import EmulationError

pytestmark = needs_compiler

CONVERSIONS = """#include "core/numeric.cuh"
#include "core/block.cuh"
#include "core/ptx_sm80.cuh"
struct Record { const void* x; void* y; i64 count, which; };
template <class From, class To, class Function> void each(const Record& p, Function function) {
  const From* x = static_cast<const From*>(p.x);
  for (i64 n = thread_index(); n < p.count; n += 64) static_cast<To*>(p.y)[n] = function(x[n]);
}
extern "C" __global__ void toy(const Record p) {
  if (p.which == 0) each<u16, float>(p, [](u16 x) { return cvt_f32_f16(x); });
  if (p.which == 1) each<float, u16>(p, [](float x) { return cvt_rn_f16_f32(x); });
  if (p.which == 2) each<double, u16>(p, [](double x) { return cvt_rn_f16_f64(x); });
  if (p.which == 3) each<double, float>(p, [](double x) { return cvt_rz_f32_f64(x); });
  if (p.which == 4) each<float, u16>(p, [](float x) { return bfloat16_bits(x); });
  if (p.which == 5) each<double, u16>(p, [](double x) { return convert<bfloat16>(x).bits; });
  if (p.which == 6) each<float, u16>(p, [](float x) { return u16(cvt_rn_x2<bfloat16>(x, 0.0f)); });
  if (p.which == 7) each<float, float>(p, [](float x) { return exponential(x); });
  if (p.which == 8) each<float, float>(p, [](float x) { return logarithm(x); });
  if (p.which == 9) each<float, float>(p, [](float x) { return hyperbolic_tangent(x); });
  if (p.which == 10) each<float, float>(p, [](float x) { return ex2_approx_ftz(x); });
  if (p.which == 11) each<u32, u32>(p, [](u32 x) { return lop3<0xb2>(x, x << 7, x >> 9); });
}
"""


def converted(which, x, dtype):
    y = np.zeros(x.size, dtype)
    run(CONVERSIONS, mode="plain", writes=("y",), x=x, y=y, count=x.size, which=which)
    return y


def spread(dtype, seed=0):
    """Numbers of every size a half has and some beyond, ties and their neighbours, and what is no number."""
    rng = np.random.default_rng(seed)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves = halves[np.isfinite(halves)]
    ties = (halves[:-1] + halves[1:]) / 2
    beside = [np.nextafter(ties.astype(dtype), side) for side in (dtype(-np.inf), dtype(np.inf))]
    random = rng.standard_normal(20000) * 2.0 ** rng.integers(-40, 40, 20000)
    special = [0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, 3.3895e38, 3.4e38]
    with np.errstate(over="ignore"):
        return np.concatenate([x.astype(dtype) for x in (halves, ties, *beside, random, np.array(special))])


def test_halves_to_float():
    x = np.arange(1 << 16, dtype=np.uint16)
    y, expected = converted(0, x, np.float32), x.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(y.view(np.uint32)[~np.isnan(y)], expected.view(np.uint32)[~np.isnan(y)])


@pytest.mark.parametrize(("which", "dtype"), [(1, np.float32), (2, np.float64)])
def test_rounding_to_half(which, dtype):
    x = spread(dtype)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(converted(which, x, np.uint16), expected.view(np.uint16))
    assert converted(which, np.array([np.nan], dtype), np.uint16)[0] == 0x7FFF


@pytest.mark.parametrize("which", [4, 6])
def test_rounding_float_to_bfloat16(which):
    x = spread(np.float32)
    np.testing.assert_array_equal(
        converted(which, x, np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16)
    )
    assert np.isnan(converted(which, np.float32([np.nan, -np.nan]), np.uint16).view(ml_dtypes.bfloat16)).all()


def test_rounding_double_to_bfloat16_happens_once():
    # A tie of bfloat16 plus a little that float32 does not hold: rounding twice would go down to even.
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40])
    expected = np.array([1 + 2.0**-7, 1.0, 1 + 2.0**-7])
    np.testing.assert_array_equal(
        converted(5, x, np.uint16).view(ml_dtypes.bfloat16).astype(np.float64), expected
    )


def test_lop3_looks_its_bits_up():
    a = np.random.default_rng(0).integers(0, 1 << 32, 1000, dtype=np.uint32)
    b, c = a << np.uint32(7), a >> np.uint32(9)
    np.testing.assert_array_equal(converted(11, a, np.uint32), a & ~b | ~(a ^ b) & c)


def test_rounding_toward_zero():
    x = spread(np.float64)
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    inward = np.where(
        np.abs(nearest.astype(np.float64)) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest
    )
    small = np.abs(x) < 2.0**-126
    np.testing.assert_array_equal(converted(3, x, np.float32)[~small], inward[~small])


@pytest.mark.parametrize(
    ("which", "function", "low", "high", "places"),
    [
        (7, np.exp, -87, 88, 1),
        (8, np.log, 1e-30, 1e30, 1),
        (9, np.tanh, -9, 9, 2),
        (10, np.exp2, -125, 127, 1),
    ],
)
def test_functions_are_within_their_last_places(which, function, low, high, places):
    x = np.random.default_rng(0).uniform(low, high, 50000).astype(np.float32)
    exact = function(x.astype(np.float64))
    error = np.abs(converted(which, x, np.float32) - exact)
    assert (error <= (places + 0.5) * np.spacing(np.abs(exact).astype(np.float32))).all()


def test_exponentials_at_the_ends():
    x = np.float32([-np.inf, np.inf, np.nan, -200, 200, 0])
    np.testing.assert_array_equal(converted(7, x, np.float32), np.float32([0, np.inf, np.nan, 0, np.inf, 1]))
    np.testing.assert_array_equal(converted(10, x, np.float32), np.float32([0, np.inf, np.nan, 0, np.inf, 1]))
    np.testing.assert_array_equal(
        converted(10, np.float32([-126.5, -126]), np.float32), np.float32([0, 2.0**-126])
    )


def test_float32_results_below_the_normal_range_are_zero():
    text = """#include "core/block.cuh"
    struct Record { const float* x; float* y; };
    extern "C" __global__ void toy(const Record p) { p.y[thread_index()] = p.x[0] * 0.5f; }"""
    y = np.ones(32, np.float32)
    run(text, threads=32, writes=("y",), x=np.float32([2.0**-126]), y=y)
    np.testing.assert_array_equal(y, np.zeros(32, np.float32))


# One warp multiplies 16 x k by k x 8 (m8n8k4: 8 x 4 by 4 x 8), the operands spread over lanes as PTX says.
PRODUCTS = """#include "core/block.cuh"
#include "core/ptx_sm80.cuh"
struct Record { const u32 *a, *b; void* d; };
extern "C" __global__ void toy(const Record p) {
  const u32 l = lane_index();
  u32 a[4];
  for (int n = 0; n < 4; ++n) a[n] = p.a[4 * l + n];
  float* d = static_cast<float*>(p.d) + 4 * l;
  PRODUCT
}
"""
MMAS = [
    ("mma_m16n8k16<float16>", np.float16, 16),
    ("mma_m16n8k16<bfloat16>", ml_dtypes.bfloat16, 16),
    ("mma_m16n8k8_tf32", np.float32, 8),
]
M16N8 = "(d[0], d[1], d[2], d[3], a, p.b[2 * l], p.b[2 * l + 1]);"


def lane_grid(registers, pack):
    """(g, position along k) of every [lane, register, element] of an operand of m16n8."""
    lane, register, part = np.ogrid[:32, :registers, :pack]
    return lane // 4, pack * (lane % 4), register, part


def product(dtype, depth):
    """Arguments of PRODUCTS for random a, b and d; and d + a b, exact, as the lanes hold it."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, depth), (depth, 8)))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    pack = 4 // a.dtype.itemsize
    g, k, register, part = lane_grid(4, pack)
    a_lanes = np.ascontiguousarray(a[g + 8 * (register % 2), k + 4 * pack * (register // 2) + part])
    g, k, register, part = lane_grid(2, pack)
    b_lanes = np.ascontiguousarray(b[k + 4 * pack * register + part, g])
    lane, n = np.ogrid[:32, :4]
    d_place = lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2
    fields = {
        "a": a_lanes.view(np.uint32),
        "b": b_lanes.view(np.uint32),
        "d": np.ascontiguousarray(d[d_place]),
    }
    if dtype is np.float32:  # the last 13 bits do not count
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    return fields, (d.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64))[d_place]


@pytest.mark.parametrize(("word", "dtype", "depth"), MMAS)
def test_mma(word, dtype, depth):
    fields, expected = product(dtype, depth)
    run(PRODUCTS.replace("PRODUCT\n", word + M16N8), threads=32, writes=("d",), **fields)
    np.testing.assert_allclose(fields["d"], expected, rtol=2.0**-23, atol=2.0**-23)


@pytest.mark.parametrize(
    ("addends", "total"),
    [
        ([1, 1.9375 * 2.0**-24], 1),
        ([1, *[2.0**-25] * 4], 1 + 2.0**-23),
        ([1, *[2.0**-26] * 7], 1),
        ([1, -(2.0**-26)], 1),
        ([1, -1, 2.0**-25, 2.0**-30], 2.0**-25),
        ([-1, -1.5 * 2.0**-23], -1 - 2.0**-23),
        ([np.inf, -1], np.inf),
        ([0, 0], 0),
    ],
)
def test_sums_of_mma_are_cut_as_on_an_h200(addends, total):
    # Row 0 of a holds the addends, column 0 of b ones: lane l has a of row l / 4, column l % 4 (+ 4).
    a, b, d = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32), np.zeros((32, 4), np.float32)
    a[0, : len(addends)], b[:, 0] = addends, 1
    lane, n = np.ogrid[:32, :4]
    fields = {
        "a": a[lane // 4 + 8 * (n % 2), lane % 4 + 4 * (n // 2)],
        "b": b[lane % 4 + 4 * n[:, :2], lane // 4],
    }
    fields = {name: np.ascontiguousarray(x).view(np.uint32) for name, x in fields.items()}
    run(PRODUCTS.replace("PRODUCT\n", "mma_m16n8k8_tf32" + M16N8), threads=32, writes=("d",), **fields, d=d)
    assert d[0, 0] == total


def test_mma_of_doubles():
    rng = np.random.default_rng(0)
    a, b, d = rng.standard_normal((8, 4)), rng.standard_normal((4, 8)), rng.standard_normal((8, 8))
    text = (
        PRODUCTS.replace(
            "PRODUCT\n",
            "double* e = static_cast<double*>(p.d) + 2 * l;"
            "const double *a = reinterpret_cast<const double*>(p.a), *b = reinterpret_cast<const double*>(p.b);"
            "mma_m8n8k4_f64(e[0], e[1], a[l], b[l]);",
        )
        .replace("for (int n = 0; n < 4; ++n) a[n] = p.a[4 * l + n];", "")
        .replace("u32 a[4];", "")
    )
    found = d.copy()  # row-major is the order of lanes
    run(text, threads=32, writes=("d",), a=a, b=np.ascontiguousarray(b.T), d=found)
    np.testing.assert_allclose(found, d + a @ b, rtol=2.0**-50, atol=2.0**-50)


def test_tall_mma_of_doubles():
    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape) for shape in ((16, 8), (8, 8), (16, 8)))
    text = (
        PRODUCTS.replace(
            "PRODUCT\n",
            "double (&e)[4] = static_cast<double(*)[4]>(p.d)[l];"
            "const double *a = reinterpret_cast<const double*>(p.a) + l / 4 * 8 + l % 4;"
            "const double *b = reinterpret_cast<const double*>(p.b) + l / 4 * 8 + l % 4;"
            "mma_m16n8k8_f64(e, a[0], a[64], a[4], a[68], b[0], b[4]);",
        )
        .replace("for (int n = 0; n < 4; ++n) a[n] = p.a[4 * l + n];", "")
        .replace("u32 a[4];", "")
    )
    lane, n = np.ogrid[:32, :4]
    at = lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2
    found = np.ascontiguousarray(d[at])
    run(text, threads=32, writes=("d",), a=a, b=np.ascontiguousarray(b.T), d=found)
    np.testing.assert_allclose(found, (d + a @ b)[at], rtol=2.0**-50, atol=2.0**-50)


# Four 8 x 8 matrices in shared memory, rows 16 bytes apart; each lane names a row.
MATRICES = """#include "core/block.cuh"
#include "core/ptx_sm80.cuh"
#include "core/emulate/ptx_sm90.cuh"
struct Record { const u16* x; u32* y; };
struct SharedStorage { alignas(16) u16 x[4][8][8]; u16 copy[4][8][8]; };
extern "C" __global__ void toy(const Record p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const u32 l = lane_index();
  u16* row = smem.x[l / 8][l % 8];
  for (int j = 0; j < 8; ++j) row[j] = p.x[8 * l + j];
  warp_barrier();
  u32 r[4];
  STEP
  for (int n = 0; n < 4; ++n) p.y[4 * l + n] = r[n];
}
"""
STEPS = {
    "ldmatrix_x4": "ldmatrix_x4(r, shared_address(row));",
    "ldmatrix_x4_trans": "ldmatrix_x4_trans(r, shared_address(row));",
    "movmatrix_trans": "ldmatrix_x4(r, shared_address(row));"
    "for (int n = 0; n < 4; ++n) r[n] = movmatrix_trans(r[n]);",
    "stmatrix_x4": "ldmatrix_x4(r, shared_address(row));"
    "stmatrix_x4(shared_address(smem.copy[l / 8][l % 8]), r[0], r[1], r[2], r[3]); warp_barrier();"
    "ldmatrix_x4_trans(r, shared_address(smem.copy[l / 8][l % 8]));",
}


def moved(step, **options):
    x = np.random.default_rng(0).integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    y = np.zeros((32, 4), np.uint32)
    run(MATRICES.replace("STEP", step), threads=32, shared=1024, writes=("y",), x=x, y=y, **options)
    return x, y


@pytest.mark.parametrize("step", STEPS)
def test_matrices_reach_their_lanes(step):
    x, y = moved(STEPS[step])
    if step != "ldmatrix_x4":
        x = x.transpose(0, 2, 1)
    expected = np.ascontiguousarray(x).view(np.uint32).reshape(4, 32).T  # lane l: row l / 4, pair l % 4
    np.testing.assert_array_equal(y, expected)


def test_ldmatrix_of_a_row_out_of_line_is_named():
    with pytest.raises(
        EmulationError, match=r"ldmatrix_x4 \(toy\.cu:\d+\): a row at byte \d+, no multiple of 16"
    ):
        moved("ldmatrix_x4(r, shared_address(row + 1));")


def test_ldmatrix_of_rows_not_yet_written_is_a_race():
    text = MATRICES.replace("warp_barrier();", "", 1).replace(
        "STEP", STEPS["ldmatrix_x4"].replace("row)", "smem.x[0][l % 8])")
    )
    with pytest.raises(EmulationError, match=r"reads 16 bytes .* unordered with thread"):
        run(
            text,
            threads=32,
            shared=1024,
            writes=("y",),
            x=np.zeros((4, 8, 8), np.uint16),
            y=np.zeros((32, 4), np.uint32),
        )


def test_a_vote():
    text = """#include "core/block.cuh"
    #include "core/ptx_sm80.cuh"
    struct Record { i32* y; };
    extern "C" __global__ void toy(const Record p) { p.y[thread_index()] = vote_any(thread_index() == 40); }"""
    y = np.zeros(64, np.int32)
    run(text, writes=("y",), y=y)
    np.testing.assert_array_equal(y, [0] * 32 + [1] * 32)


# Two groups of copies: the first is waited for, then the second.
COPIES = """#include "core/block.cuh"
#include "core/ptx_sm80.cuh"
struct Record { const float* x; float* y; };
struct SharedStorage { alignas(16) float x[2][32][4]; };
extern "C" __global__ void toy(const Record p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const u32 l = lane_index();
  cp_async_16(shared_address(smem.x[0][l]), p.x + 4 * l, l == 31 ? 8 : 16);
  cp_async_commit_group();
  for (int n = 0; n < 4; ++n) cp_async_4(shared_address(&smem.x[1][l][n]), p.x + 4 * l + n, n == 3 ? 0 : 4);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  warp_barrier();
  for (int n = 0; n < 4; ++n) p.y[4 * l + n] = smem.x[0][31 - l][n];
  for (int n = 0; n < 4; ++n) p.y[128 + 4 * l + n] = smem.x[1][l][n];
  cp_async_wait_group<0>();
  for (int n = 0; n < 4; ++n) p.y[256 + 4 * l + n] = smem.x[1][l][n];
}
"""


def copied(text=COPIES, x=None):
    x = np.arange(1, 129, dtype=np.float32) if x is None else x
    y = np.zeros((3, 32, 4), np.float32)
    run(text, threads=32, shared=1024, writes=("y",), x=x, y=y)
    return x.reshape(32, 4), y


def test_copies_arrive_when_they_are_waited_for():
    x, y = copied()
    first, second = x.copy(), x.copy()
    first[31, 2:] = second[:, 3] = 0
    np.testing.assert_array_equal(y[0], first[::-1])
    assert np.isnan(y[1]).all()  # still on the way
    np.testing.assert_array_equal(y[2], second)


def test_reading_another_lanes_copy_without_a_barrier_is_a_race():
    with pytest.raises(EmulationError, match=r"unordered with thread \d+ at .*: a race"):
        copied(COPIES.replace("warp_barrier();", ""))


def test_a_copy_from_past_the_end_is_named():
    with pytest.raises(
        EmulationError, match="reads 16 bytes outside every array, 4 bytes beyond the end of x"
    ):
        copied(COPIES.replace("l == 31 ? 8 : 16", "16"), np.zeros(128, np.float32)[:-1])


def test_a_copy_to_a_misaligned_address_is_named():
    with pytest.raises(EmulationError, match=r"cp_async_16 \(toy\.cu:\d+\): .*not aligned"):
        copied(COPIES.replace("smem.x[0][l])", "&smem.x[0][l][1])"))


# A box of 8 rows of 64 elements of a tensor that has `rows` of them.
TMA = """#include "core/block.cuh"
#include "core/ptx_sm90.cuh"
struct Record { const u16* x; u16* y; i64 rows; };
extern "C" __global__ void toy(const Record p) {
  u64& bar = static_shared_storage<u64>();
  const TensorMap map{u64(p.x), {64, u64(p.rows), 1, 1, 1}, {128, 0, 0, 0}, {64, 8}, 2};
  const u32 tile = shared_tiles(), t = thread_index();
  if (t == 0) {
    mbarrier_init(bar, 1);
    mbarrier_arrive_expect_tx(shared_address(&bar), 8 * 128);
    cp_async_bulk_tensor_5d_load(tile, map, shared_address(&bar), 0, 0, 0, 0, 0);
  }
  block_barrier();
  mbarrier_try_wait_parity(shared_address(&bar), 0);
  for (u32 r = 0; r < 8; ++r) p.y[64 * r + t] = emulate::swizzled_at<u16>(tile + 128 * r + 2 * t);
}
"""


def test_tma_fills_up_with_zeros():
    x, y = np.arange(1, 5 * 64 + 1, dtype=np.uint16), np.zeros((8, 64), np.uint16)
    run(TMA, shared=5120, writes=("y",), x=x, y=y, rows=5)
    np.testing.assert_array_equal(y[:5].reshape(-1), x)
    assert not y[5:].any()


def test_tma_past_the_end_of_an_array_is_named():
    x, y = np.zeros(5 * 64 - 1, np.uint16), np.zeros((8, 64), np.uint16)
    with pytest.raises(
        EmulationError, match="reads 2 bytes outside every array, 2 bytes beyond the end of x"
    ):
        run(TMA, shared=5120, writes=("y",), x=x, y=y, rows=5)


def test_red_adds_every_threads_share():
    text = """#include "core/block.cuh"
    #include "core/emulate/ptx_sm80.cuh"
    struct Record { float* y; double* z; };
    extern "C" __global__ void toy(const Record p) { red_add(p.y, 1.0f); red_add(p.z + thread_index() % 2, 0.5); }"""
    y, z = np.zeros(1, np.float32), np.zeros(2)
    run(text, blocks=20, workers=4, writes=("y", "z"), y=y, z=z)
    assert y[0] == 20 * 64
    np.testing.assert_array_equal(z, [320, 320])
