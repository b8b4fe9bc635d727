"""The Hopper backward on a CPU: options, lengths, groups, and queries that items share."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import DTYPES, NEG_INF, check, qkv

from cupyflash.cuda.emulate import Machine

pytestmark = needs_compiler

BFLOAT16 = DTYPES[1]
M, N = 150, 270
_RANDOM = np.random.default_rng(1)
MASK = _RANDOM.random((M, N)) < 0.7
BIAS = np.where(_RANDOM.random((2, M, N)) < 0.1, NEG_INF, _RANDOM.standard_normal((2, M, N)))
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (40, 20), "query_offset": 30},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS.astype(BFLOAT16)},
    "single bias": {"bias": BIAS.astype(np.float32)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": np.float32([0.3, 0.01]), "query_offset": 100},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3},
    "shard": {"dropout_p": 0.3, "dropout_seed": 3, "dropout_origin": (5, 3, 0)},
    "all": {"mask": MASK, "bias": BIAS, "softcap": 5.0, "dropout_p": 0.1, "dropout_seed": 3},
}


def run(q, k, v, *, mode="plain", **options):
    machine = Machine(mode, compute_capability=90)
    check(q, k, v, via=vjp_on(machine), **options)
    kernels = [config.kernel for config in machine.launched if config.family == "sm90"]
    assert kernels[:3] == ["forward", "backward_kv", "backward_q"]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    run(*qkv(np, 1, 2, M, N, 256, dtype=BFLOAT16), **OPTIONS[name])


def test_no_races():
    run(*qkv(np, 1, 2, 140, 200, 192, dtype=BFLOAT16), mode="checked")


def test_groups_and_lengths():
    q, k, v = qkv(np, 2, 4, 200, 260, 256, heads_kv=2, dtype=BFLOAT16)
    run(q, k, v, q_lengths=np.array([200, 77]), kv_lengths=np.array([150, 260]))


def test_rows_of_very_small_and_very_large_lse():
    q, k, v = qkv(np, 1, 2, 100, 130, 256, dtype=BFLOAT16)
    for level in (-3000.0, 3000.0):
        run(q, k, v, bias=np.full((1, 130), level, np.float32))


def test_queries_that_items_share():
    q, _, _ = qkv(np, 1, 2, 140, 1, 256, dtype=BFLOAT16)
    _, k, v = qkv(np, 3, 2, 1, 150, 256, dtype=BFLOAT16)
    run(q, k, v, kv_lengths=np.array([150, 0, 60]))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("p", [0.0, 0.6])
def test_narrow_heads_in_turn(d, p):
    """Blocks of several key tiles; dropout of more than half inverts its bits."""
    machine = Machine("plain", compute_capability=90)
    dropout = {"dropout_p": p, "dropout_seed": 7} if p else {}
    lengths = {"q_lengths": np.array([170, 30]), "kv_lengths": np.array([100, 200])}
    check(*qkv(np, 2, 2, 170, 200, d, heads_kv=1, dtype=BFLOAT16), via=vjp_on(machine), **lengths, **dropout)
    assert [config.kernel for config in machine.launched if config.family == "sm90"] == [
        "forward",
        "backward",
    ]
