"""The mma.sync family: what it takes, how it cuts keys, and its kernels in the emulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_emulate
from emulated import needs_compiler, vjp_on
from support import BFLOAT16, check, qkv

import cupyflash
from cupyflash.cuda import configs, sm80
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
    [(1, 8192, 16), (1, 131072, 64), (1, 512, 1), (64, 8192, 16), (4096, 4096, 1), (1, 0, 1)],
)
def test_keys_are_cut_by_the_lengths_alone(m, n, runs):
    for batch, heads in ((1, 1), (7, 3)):
        q, k, v = (np.broadcast_to(BFLOAT16.type(0), (batch, heads, rows, 128)) for rows in (m, n, n))
        assert sm80.runs_of_keys(Sizes.of(Problem.create(q, k, v))) == runs


def test_head_dims_up_to_64_share_a_kernel():
    dims = ((1, 64), (20, 3), (64, 64))
    assert len({configs.choose("sm80", "forward", "bfloat16", d, e, (False,) * 3, 80) for d, e in dims}) == 1


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
