"""One fault at a time in the kernels' own sources: the emulation, or the comparison with the reference, names it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import check, normal, qkv

from cupyflash import dropout_mask
from cupyflash.cuda import backward_launches, backward_recipe, configs, source
from cupyflash.cuda.emulate import EmulationError, Machine

pytestmark = needs_compiler

PORTABLE = 75
WITH_COPIES = 80  # in the background
KERNELS = ("forward", "backward_q", "backward_kv", "backward_bias")


# What stands in the forward's source, what replaces it, and what then says so.
FAULTS = {
    "barrier removed": (
        "    block_barrier();                     // the tiles are there",
        "",
        EmulationError,
        r"kernel 'simt forward .*', block \d+, thread \d+: .* of shared memory at simt/\w+\.cuh?:\d+"
        r".*unordered with thread \d+ at simt/.*: a race",
    ),
    "lane left out of a shuffle": (
        "x = op(x, shuffle_xor(x, 4));",
        "if (lane_index() != 9) x = op(x, shuffle_xor(x, 4));",
        EmulationError,
        r"kernel 'simt forward .*', block \d+, thread \d+: calls shuffle_xor \(simt/lanes.cuh:\d+\) "
        r"while others wait: .* at shuffle_xor \(simt/lanes.cuh:\d+\)",
    ),
    "index moved by one": (
        "smem.k[0] + lane_x() * kRow",
        "smem.k[0] + (lane_x() + 1) * kRow",
        AssertionError,
        r"out of q \(1, 2, 33, 64\).*max error",
    ),
    "index moved past the end of an array": (
        "work.lse.at(row, 0)",
        "work.lse.at(row + 1, 0)",
        EmulationError,
        r"kernel 'simt forward .*: writes 4 bytes outside every array, 4 bytes beyond the end of lse, "
        r"at simt/forward.cu:\d+",
    ),
    "swizzles that do not match": (
        "load_tile<kBlockKV, kHeadDimV, kHeadDimV, Tile::Keys>(smem.v",
        "load_tile<kBlockKV, kHeadDimV, kHeadDimV, Tile::Queries>(smem.v",
        AssertionError,
        r"out of q \(1, 2, 33, 64\).*max error",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    old, new, error, text = FAULTS[name]
    sound = configs.choose("simt", "forward", "float32", 64, 64, (False,) * 3, PORTABLE).source(emulate=True)
    assert sound.count(old) == 1, f"{old!r} stands {sound.count(old)} times in the forward"
    machine = Machine(compute_capability=PORTABLE, edit=lambda source: source.replace(old, new))
    with pytest.raises(error, match=text):
        check(*qkv(np, 1, 2, 33, 130, 64, heads_kv=1), via=vjp_on(machine), backward=False)


def tile_of(kernel):
    """(block_q, block_kv) of the kernel that the comparisons below run."""
    geometry = configs.choose("simt", kernel, "float32", 64, 64, (False,) * 3, PORTABLE).geometry
    return geometry.block_q, geometry.block_kv


def turned():
    """One comparison of a shared header turned over: (header, what stands there, what it becomes, options, backward).

    Options put the edge of what is seen where the comparison decides.
    """
    (block_q, block_kv), (moved_q, kept_kv) = tile_of("forward"), tile_of("backward_kv")
    # The first row of a query tile, the last that key kept_kv - 1 has.
    next_tile = -(-kept_kv // moved_q) * moved_q
    within = {"query_offset": 0}
    blind = {"mask": np.arange(150)[:, None] != 3}
    rare = {"dropout_p": 1 - 1 / 65536}
    yield "mask", "x >= start && x < stop", "x > start && x < stop", within | {"window": (9, None)}, False
    yield "mask", "x >= start && x < stop", "x >= start && x <= stop", {"kv_lengths": 100}, False
    yield (
        "mask",
        "last + offset + right + 1,",
        "last + offset + right,",
        within | {"window": (None, 0)},
        False,
    )
    yield (
        "mask",
        "row_stop - 1 + offset",
        "row_stop - 2 + offset",
        within | {"window": (block_q - 2, None)},
        False,
    )
    yield (
        "mask",
        "row + offset + right + 1,",
        "row + offset + right + 2,",
        within | {"window": (None, block_kv - 2)},
        False,
    )
    yield (
        "mask",
        "last - offset + left + 1",
        "last - offset + left",
        within | {"window": (next_tile - kept_kv + 1, None)},
        True,
    )
    yield "dropout", ") < threshold) << (2 * n);", ") <= threshold) << (2 * n);", rare, False
    yield "dropout", ">> 16) < threshold", ">> 16) <= threshold", rare, False
    yield "softmax", "return m == -Limits", "return m != -Limits", blind, False
    yield (
        "softmax",
        "maximum(m[u], RowLanes::max(tile_max))",
        "RowLanes::max(tile_max)",
        {"scale": 30.0},
        False,
    )
    yield "softmax", "factor = sum == Score(0)", "factor = sum != Score(0)", {}, False
    yield "softmax", "lse = overflow ? top", "lse = !overflow ? top", {}, False
    yield "softmax", "return lse == -Limits", "return lse != -Limits", {}, True


@pytest.mark.slow
@pytest.mark.parametrize(("header", "old", "new", "options", "backward"), [*turned()])
def test_a_turned_comparison_of_a_shared_header_is_noticed(header, old, new, options, backward):
    assert (source.kernels_root() / f"attn/{header}.cuh").read_text().count(old) == 1
    machine = Machine(compute_capability=PORTABLE, edit=lambda text: text.replace(old, new))
    if "dropout_p" in options:
        options = options | {"dropout_seed": _seed_of_a_word(1)}
    with pytest.raises((AssertionError, EmulationError)):
        check(*qkv(np, 1, 1, 150, 150, 64), via=vjp_on(machine), backward=backward, **options)


def _seed_of_a_word(threshold):
    """A seed under which words of either half equal the threshold somewhere in the matrix."""
    for seed in range(1000):
        below, upto = (
            dropout_mask((1, 1, 150, 150), 1 - x / 65536, seed=seed)[0, 0] for x in (threshold, threshold + 1)
        )
        equal = upto & ~below
        if equal[:, ::2].any() and equal[:, 1::2].any():
            return seed
    raise AssertionError("no such seed")


# Barriers whose hazard others on the way close as well: (file, comment).
IDLE = {
    ("simt/forward.cu", "the weights before have been read"),
    ("simt/backward_q.cu", "what the warp's rows of ds held has been read"),
    ("simt/backward_bias.cu", "the addends have been read"),
    ("simt/backward_bias.cu", "column 0 is there"),
}
# Barriers between blocks, of kernels that sum dq in turns: races in global memory are not watched for.
BETWEEN_BLOCKS = {
    ("simt/backward_keys.cuh", "no lane adds before its turn"),
    ("simt/backward_keys.cuh", "all have added to the first tile"),
}


def barriers(kernel):
    """(file, line) of every barrier in a kernel's source that orders its block's shared memory."""
    config = configs.choose("simt", kernel, "float32", 64, 64, (True,) * 3, PORTABLE)
    found, file, line = [], "", 0
    for text in config.source(emulate=True).splitlines():
        if marker := re.match(r'#line (\d+) "(.*)"', text):
            line, file = int(marker[1]), marker[2]
            continue
        barrier = re.match(r"\s*(?:block|warp)_barrier\(\);\s*// (.*)", text)
        if barrier and file.startswith("simt/") and (file, barrier[1]) not in IDLE | BETWEEN_BLOCKS:
            found.append((file, line))
        line += 1
    return found


def without_line(file, number):
    def edit(text):
        lines, at = text.splitlines(), None
        for index, line in enumerate(lines):
            if marker := re.match(r'#line (\d+) "(.*)"', line):
                at = int(marker[1]) if marker[2] == file else None
                continue
            if at == number:
                lines[index] = "// " + line
                return "\n".join(lines)
            at = at + 1 if at is not None else None
        return text

    return edit


def barrier_problems():
    """Problems in which every barrier of the kernels has something to do."""
    q, k, v = qkv(np, 2, 2, 70, 130, 64, heads_kv=1)
    options = {"dropout_p": 0.1, "dropout_seed": 1, "softcap": 3.0}
    yield (q, k[0], v[0]), options | {"bias": normal(np, (70, 130))}  # owners walk over the batch
    yield (q[0], k, v), options | {"bias": normal(np, (1, 1))}  # and over tiles
    yield (q, k, v), options | {"bias": normal(np, (70, 1))}
    for d, e in ((150, 150), (150, 20)):  # head dims go by chunks
        yield qkv(np, 1, 1, 70, 70, d, e), options | {"bias": normal(np, (70, 70))}


def run_all(edit):
    machine = Machine(compute_capability=PORTABLE, edit=edit)
    for arrays, options in barrier_problems():
        out, lse = machine.attention(*arrays, **options)
        machine.attention_backward(out, *arrays, out, lse, **options)
    machine = Machine(compute_capability=WITH_COPIES, edit=edit)
    for d in (30, 70):  # one chunk of keys ahead, and several
        machine.attention(*qkv(np, 1, 1, 70, 200, d), precision="ieee")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line"), sorted({place for kernel in KERNELS for place in barriers(kernel)})
)
def test_no_barrier_can_go(file, line, monkeypatch):
    """Without any one barrier there is a race: else the check would be blind, or the barrier idle."""
    # An owner of a bias gradient walks over all its tiles.
    monkeypatch.setattr(backward_launches, "BIAS_BLOCKS", 1)
    backward_recipe.backward_recipe.cache_clear()
    with pytest.raises(EmulationError, match="a race"):
        run_all(without_line(file, line))
    backward_recipe.backward_recipe.cache_clear()
