"""The emulation's engine on small kernels: collectives give what they should, and each planted fault is named."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
from emulated import KERNEL, assembled, needs_compiler, run

from cupyflash.cuda.emulate import BuildError, EmulationError, Machine
from cupyflash.cuda.emulate.build import build

pytestmark = needs_compiler

# Sums 64 numbers a block: a turned copy through shared memory, then shuffles, then the two warps' sums.
SUMS = """#include "core/block.cuh"
#include "core/warp.cuh"
struct Record { const float* x; float* sums; };
struct SharedStorage { float turned[64][2]; float sums[2]; };
extern "C" __global__ void __launch_bounds__(64) toy(const Record p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const u32 t = thread_index();
  smem.turned[t][0] = p.x[block_index() * 64 + t];
  block_barrier();                       // first
  float x = smem.turned[63 - t][0];
  for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  if (lane_index() == 0) smem.sums[warp_index()] = x;
  block_barrier();                       // second
  if (t == 0) p.sums[block_index()] = smem.sums[0] + smem.sums[1];
}
"""
SHARED = 64 * 2 * 4 + 2 * 4


def sums(text=SUMS, blocks=3, spare=0, shared=SHARED, **options):
    x = np.random.default_rng(0).integers(-99, 99, 64 * blocks).astype(np.float32)
    found = np.full(blocks, np.nan, np.float32)
    run(text, blocks=blocks, shared=shared, writes=("sums",), x=x[: x.size - spare], sums=found, **options)
    return found, x.reshape(blocks, 64).sum(axis=1)


@pytest.mark.parametrize("mode", ["plain", "checked"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_sums_come_out_in_every_order(mode, seed, workers):
    found, expected = sums(mode=mode, seed=seed, workers=workers)
    np.testing.assert_array_equal(found, expected)


FAULTS = {
    "first barrier removed": (
        ("block_barrier();                       // first", ""),
        r"thread \d+: (reads|writes) 4 bytes at byte \d+ of shared memory at toy\.cu:\d+, unordered with thread"
        r" \d+ at toy\.cu:\d+: a race",
    ),
    "second barrier removed": (
        ("block_barrier();                       // second", ""),
        r"thread \d+: (reads|writes) 4 bytes at byte 51[26] of shared memory at toy\.cu:\d+, unordered .*: a race",
    ),
    "barrier that one thread leaves before": (
        ("block_barrier();                       // first", "if (t == 40) return; block_barrier();"),
        r"deadlock: threads 0-39, 41-63 at block_barrier \(toy\.cu:9\); threads 40 returned",
    ),
    "lane left out of a shuffle": (
        ("x += shuffle_xor(x, mask);", "if (t != 5) x += shuffle_xor(x, mask);"),
        r"deadlock: threads 0-4, 6-31 at shuffle_xor \(toy\.cu:11\); "
        r"threads 5, 32-63 at block_barrier \(toy\.cu:13\)",
    ),
    "two shuffles in one warp": (
        (
            "x += shuffle_xor(x, mask);",
            "if (t % 2)\nx += shuffle_xor(x, mask);\nelse\nx += shuffle_xor(x, mask);",
        ),
        r"thread \d+: calls shuffle_xor \(toy\.cu:1[24]\) while others wait: .* at shuffle_xor \(toy\.cu:1[24]\)",
    ),
    "index one too far, inside shared memory": (
        ("smem.turned[63 - t][0]", "smem.turned[64 - t][0]"),
        r"thread 0: an array index out of bounds at toy\.cu:10:",
    ),
    "index past the shared memory": (
        ("smem.sums[warp_index()] = x", "(&smem.turned[0][0])[129 + warp_index()] = x"),
        r"thread 32: writes 4 bytes .*outside every array.*, at toy\.cu:12",  # near an array or far from all
    ),
    "write to an input": (
        ("p.sums[block_index()] =", "const_cast<float*>(p.x)[block_index()] ="),
        r"thread 0: writes to x, which is an input, at toy\.cu:14",
    ),
    "output index too far": (
        ("p.sums[block_index()] =", "p.sums[block_index() + 3] ="),
        r"thread 0: writes 4 bytes outside every array, 12 bytes beyond the end of sums, at toy\.cu:14",
    ),
    "misaligned vector": (
        ("p.x[block_index() * 64 + t]", "reinterpret_cast<const Packed<float, 2>*>(p.x + t + 1)->value[0]"),
        r"thread \d+: a misaligned or null address 0x[0-9a-f]+ at toy\.cu:8",
    ),
    "null pointer": (
        ("p.x[block_index() * 64 + t]", "static_cast<const float*>(nullptr)[t - t]"),
        r"thread \d+: reads 4 bytes at address 0, outside every array, at toy\.cu:8",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    (old, new), text = FAULTS[name]
    assert SUMS.count(old) == 1
    with pytest.raises(EmulationError, match=f"kernel 'toy', block 0, ({text})"):
        sums(SUMS.replace(old, new), blocks=1)


def test_reading_past_an_array_is_named():
    with pytest.raises(
        EmulationError, match="block 2, thread 63: reads 4 bytes .*, 4 bytes beyond the end of x, at toy.cu:8"
    ):
        sums(spare=1, workers=1)


def test_too_little_shared_memory_is_named():
    with pytest.raises(EmulationError, match="uses 520 bytes of shared memory, the launch gives 512"):
        sums(shared=512)


def test_collectives_are_watched_in_plain_mode_too():
    (old, new), text = FAULTS["lane left out of a shuffle"]
    with pytest.raises(EmulationError, match=text):
        sums(SUMS.replace(old, new), blocks=1, mode="plain")
    skipped = SUMS.replace("block_barrier();                       // first", "if (t < 32) block_barrier();")
    text = (
        r"calls block_barrier \(toy\.cu:13\) while others wait: threads 0-31 at block_barrier \(toy\.cu:9\)"
    )
    with pytest.raises(EmulationError, match=text):
        sums(skipped, blocks=1, mode="plain")


def test_shared_memory_that_nobody_wrote_is_nan():
    text = SUMS.replace("smem.turned[t][0] =", "if (t != 7) smem.turned[t][0] =")
    found, expected = sums(text)
    assert np.isnan(found).all()
    assert np.isfinite(expected).all()


def test_an_order_dependent_sum_depends_on_the_seed():
    """The random orders are orders: what a barrier should forbid shows in plain mode."""
    text = SUMS.replace("block_barrier();                       // second", "")
    natural, expected = sums(text, blocks=64, mode="plain")
    shuffled, _ = sums(text, blocks=64, mode="plain", seed=1)
    np.testing.assert_array_equal(
        natural, expected
    )  # warp 1 comes first, after the barrier that its last thread opened
    assert np.isnan(shuffled).any()


def test_compile_errors_name_the_line():
    with pytest.raises(BuildError, match=r"could not compile toy:\ntoy\.cu.*\n.*toy\.cu:8:"):
        sums(SUMS.replace("p.x[", "p.y["))


# One warp hands numbers to its neighbour lane through shared memory; warp_barrier is what orders them.
HANDED = """#include "core/block.cuh"
#include "core/warp.cuh"
#include "core/emulate/ptx_sm90.cuh"
struct Record { float* y; };
struct SharedStorage { float x[128]; unsigned char bytes[128]; u64 bar; };
extern "C" __global__ void toy(const Record p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const u32 t = thread_index();
  %s
}
"""
RACES = {
    "warp barrier": ("smem.x[t] = t; warp_barrier(); p.y[t] = smem.x[t ^ 1];", None),
    "warp barrier for another warp": ("smem.x[t] = t; warp_barrier(); p.y[t] = smem.x[t ^ 32];", "a race"),
    "a shuffle does not order": ("smem.x[t] = t; shuffle_xor(1.0f, 1); p.y[t] = smem.x[t ^ 1];", "a race"),
    "written again after it was read": (
        "smem.x[t] = t; block_barrier(); p.y[t] = smem.x[t ^ 1]; smem.x[t] = 0;",
        "(writes|reads) 4 bytes .*, unordered with thread .*: a race",
    ),
    "all read one word": ("if (t == 3) smem.x[0] = 3; block_barrier(); p.y[t] = smem.x[0];", None),
    "bytes of one word": ("smem.bytes[t] = t; p.y[t] = smem.bytes[t];", None),
    "the word of a neighbour's byte": (
        "smem.bytes[t] = t; p.y[t] = reinterpret_cast<u32*>(smem.bytes)[t / 4];",
        "a race",
    ),
    "named barrier": (
        "if (t >= 64) { smem.x[t] = t; bar_arrive(1, 128); } else { bar_sync(1, 128); p.y[t] = smem.x[t + 64]; }",
        None,
    ),
    "named barrier, the wrong way": (
        "if (t < 64) { smem.x[t] = t; bar_sync(1, 128); } else { bar_arrive(1, 128); p.y[t] = smem.x[t - 64]; }",
        "a race",
    ),
    "named barriers of two counts": (
        "bar_sync(1, t < 64 ? 128 : 64);",
        r"bar_sync \(toy\.cu:9\): barrier 1 waits for (128|64) threads, this call says (128|64)",
    ),
    "named barrier short of threads": (
        "if (t < 64) bar_sync(1, 128);",
        r"deadlock: threads 0-63 at bar_sync \(toy\.cu:9\); threads 64-127 returned",
    ),
    "mbarrier": (
        "if (t == 0) mbarrier_init(smem.bar, 64); block_barrier(); const u32 bar = shared_address(&smem.bar);"
        "if (t >= 64) { smem.x[t] = t; mbarrier_arrive(bar); }"
        "else { mbarrier_try_wait_parity(bar, 0); p.y[t] = smem.x[t + 64]; }",
        None,
    ),
    "mbarrier, next phase": (
        "if (t == 0) mbarrier_init(smem.bar, 64); block_barrier(); const u32 bar = shared_address(&smem.bar);"
        "if (t >= 64) mbarrier_arrive(bar);"
        "else { mbarrier_try_wait_parity(bar, 0); mbarrier_try_wait_parity(bar, 1); }",
        r"deadlock: threads 0-63 at mbarrier_try_wait_parity \(toy\.cu:9\); threads 64-127 returned",
    ),
    "mbarrier that too many reach": (
        "if (t == 0) mbarrier_init(smem.bar, 0); block_barrier(); mbarrier_arrive(shared_address(&smem.bar));",
        "mbarrier_arrive .*: more threads arrive than the barrier counts",
    ),
}


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("seed", [0, 1])
def test_only_unordered_accesses_are_races(name, seed):
    body, fault = RACES[name]
    y = np.full(128, np.nan, np.float32)

    def launch():
        run(HANDED % body, threads=128, shared=768, seed=seed, writes=("y",), y=y)

    if fault is None:
        launch()
        assert np.isfinite(y[:64]).all()
    else:
        with pytest.raises(EmulationError, match=fault):
            launch()


def test_arguments_of_the_wrong_size_are_refused():
    with pytest.raises(TypeError, match="parameters of .16. bytes, got arguments of .24."):
        run(SUMS, x=np.zeros(64), sums=np.zeros(1), more=np.zeros(1))


def test_a_block_that_is_not_of_whole_warps_is_refused():
    with pytest.raises(ValueError, match="only whole warps"):
        sums(threads=48)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of plain, checked, sanitized, got 'fast'"):
        Machine("fast")


TURNS = """#include "core/block.cuh"
#include "core/ptx_sm80.cuh"
#include "core/warp.cuh"
struct Record { u32* counts; float* sums; };
extern "C" __global__ void toy(const Record p) {
  const u32 me = u32(shuffle(thread_index() == 0 ? float(increment(p.counts)) : 0.0f, 0));
  if (thread_index() == 0) wait_for_count(p.counts + 1, me);
  warp_barrier();
  float* to = p.sums + 4 * thread_index();
  if (me == 0) st_global_x4(to, 1.0f, 2.0f, 3.0f, 4.0f);
  else red_add_x4(to, float(me), 0.0f, 0.0f, load_relaxed(p.counts + 1) == me ? 1.0f : 0.0f);
  warp_barrier();
  if (thread_index() == 0) red_release_increment(p.counts + 1);
}
"""


@pytest.mark.parametrize(("seed", "workers"), [(0, 1), (1, 1), (2, 3), (3, 8)])
def test_blocks_take_turns(seed, workers):
    counts, sums = np.zeros(2, np.uint32), np.full((32, 4), np.nan, np.float32)
    run(
        TURNS,
        threads=32,
        blocks=7,
        seed=seed,
        workers=workers,
        writes=("counts", "sums"),
        counts=counts,
        sums=sums,
    )
    assert counts.tolist() == [7, 7]
    np.testing.assert_array_equal(sums, np.tile(np.float32([1 + 21, 2, 3, 4 + 6]), (32, 1)))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, which comes with g++ mostly")
def test_any_number_of_kernels_may_be_loaded():
    """None takes from the process's static thread-local storage, which some two hundred would use up."""
    dynamic = subprocess.run(
        ["readelf", "-d", str(build(assembled(SUMS), KERNEL, "plain"))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "SONAME" in dynamic or "NEEDED" in dynamic
    assert "STATIC_TLS" not in dynamic
