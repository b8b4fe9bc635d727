"""One fault at a time in the kernels' own sources: the emulation, or the comparison with the reference, names it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import check, normal, qkv

from cupyflash.cuda import configs, recipe
from cupyflash.cuda.emulate import EmulationError, Machine

pytestmark = needs_compiler

PORTABLE = 75
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
        "smem.k + lane_x() * kRow",
        "smem.k + (lane_x() + 1) * kRow",
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


# Barriers whose hazard others on the way close as well: (file, comment).
IDLE = {
    ("simt/forward.cu", "the weights before have been read"),
    ("simt/backward_q.cu", "what the warp's rows of ds held has been read"),
    ("simt/backward_bias.cu", "the addends before have been read"),
    ("simt/backward_bias.cu", "the addends have been read"),
    ("simt/backward_bias.cu", "column 0 is there"),
}


def barriers(kernel):
    """(file, line) of every barrier in a kernel's source but the idle ones."""
    config = configs.choose("simt", kernel, "float32", 64, 64, (True,) * 3, PORTABLE)
    found, file, line = [], "", 0
    for text in config.source(emulate=True).splitlines():
        if marker := re.match(r'#line (\d+) "(.*)"', text):
            line, file = int(marker[1]), marker[2]
            continue
        barrier = re.match(r"\s*(?:block|warp)_barrier\(\);\s*// (.*)", text)
        if barrier and file.startswith("simt/") and (file, barrier[1]) not in IDLE:
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


def run_all(machine, problems):
    for arrays, options in problems:
        out, lse = machine.attention(*arrays, **options)
        machine.attention_backward(out, *arrays, out, lse, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line"), sorted({place for kernel in KERNELS for place in barriers(kernel)})
)
def test_no_barrier_can_go(file, line, monkeypatch):
    """Without any one barrier there is a race: else the check would be blind, or the barrier idle."""
    monkeypatch.setattr(recipe, "BIAS_BLOCKS", 1)  # an owner of a bias gradient walks over all its tiles
    recipe.backward_recipe.cache_clear()
    machine = Machine(compute_capability=PORTABLE, edit=without_line(file, line))
    with pytest.raises(EmulationError, match="a race"):
        run_all(machine, barrier_problems())
    recipe.backward_recipe.cache_clear()
