"""The Hopper family's forward on a CPU: options alone and in pairs, in steps with a maximum and without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import DTYPES, NEG_INF, check, normal, qkv

from cupyflash.cuda.emulate import Machine
from cupyflash.dropout import dropout_mask

pytestmark = needs_compiler

BFLOAT16 = DTYPES[1]
M, N = 150, 700
_RANDOM = np.random.default_rng(1)
MASK = _RANDOM.random((M, N)) < 0.7
BIAS = np.where(_RANDOM.random((2, M, N)) < 0.1, NEG_INF, _RANDOM.standard_normal((2, M, N)))
OPTIONS = {
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS.astype(BFLOAT16)},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": np.float32([0.3, 0.01]), "query_offset": 200},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    "sinks": {"sinks": np.float32([7, 5])},  # among the sums of 700 keys
}
PAIRS = [(), *itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)]


def run(d, *, edit=None, **options):
    q, k, v = qkv(np, 1, 2, M, N, d, dtype=BFLOAT16)
    if edit is not None:
        edit(q, k)
    machine = Machine("plain", compute_capability=90)
    check(q, k, v, via=vjp_on(machine), backward=False, **options)
    assert [config.family for config in machine.launched] == ["sm90"]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_options_and_pairs(names):
    run(64, **{key: value for name in names for key, value in OPTIONS[name].items()})


@pytest.mark.slow
@pytest.mark.parametrize("d", [128, 192, 256])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_options_and_pairs_of_wider_heads(d, names):
    run(d, **{key: value for name in names for key, value in OPTIONS[name].items()})


@pytest.mark.parametrize("slope", [2.0**-8, 0.25, 1.0, 3.0, -0.01, -0.7])
@pytest.mark.parametrize("offset", [-100, 0, 400, 900])
def test_alibi_rises_and_falls(slope, offset):
    run(64, alibi_slopes=np.float32([slope, slope / 2]), query_offset=offset)


def test_lse_of_rows_that_see_one_key_of_their_own_tile():
    """Most of their weight is in the tile before, whose columns are counted from its far end."""
    run(64, causal=True, alibi_slopes=np.float32([0.5, 1.0]), query_offset=512)


def test_rows_near_the_softcap():
    """In warps of their own: of the second the sums stay in range by the polynomial, which does not hold there."""

    def enlarge(q, k):
        q[:, :, 40] *= 30
        q[:, :, 70] *= 6

    run(64, softcap=30.0, edit=enlarge)
    run(64, softcap=50.0, scale=-0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_hidden_keys_may_be_anything(bad):
    hidden = np.random.default_rng(2).random(N) < 0.1
    mask = np.broadcast_to(~hidden, (M, N)).copy()

    def spoil(q, k):
        k[:, :, hidden] = bad

    run(64, mask=mask, edit=spoil)
    run(64, mask=mask, softcap=30.0, edit=spoil)
    run(64, bias=np.where(mask, 0.5, NEG_INF).astype(BFLOAT16), edit=spoil)
    run(64, bias=BIAS.astype(BFLOAT16), mask=mask, edit=spoil)


@pytest.mark.parametrize("p", [2.0**-16, 0.5, 0.5001, 0.9, 1.0])
def test_dropout_on_either_side_of_a_half(p):
    for origin in ((1, 16, 32), (0, 3, 0)):
        run(64, dropout_p=p, dropout_seed=7, dropout_origin=origin)


def test_masks_and_biases_that_repeat_and_other_dtypes():
    run(64, mask=MASK[:, :1])
    run(64, mask=np.where(MASK, 128, 0).astype(np.uint8).view(bool))
    run(64, mask=MASK[:1], scale=-0.2)
    run(64, bias=BIAS[:, :, :1].astype(BFLOAT16))
    single = normal(np, (2, M, N), np.float32, 5)
    run(64, bias=single)
    run(64, bias=single, mask=MASK, softcap=30.0)
    run(64, bias=single, **OPTIONS["alibi"])
    run(64, bias=single, **OPTIONS["dropout"])
    for byte in (128, 255):
        run(64, bias=BIAS.astype(BFLOAT16), mask=np.where(MASK, byte, 0).astype(np.uint8).view(bool))
    run(64, bias=BIAS.astype(BFLOAT16), mask=MASK[:, :1])


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_items_that_share_a_bias(causal):
    q, k, v = qkv(np, 3, 2, M, N, 64, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    check(q, k, v, via=vjp_on(machine), backward=False, bias=BIAS.astype(BFLOAT16), causal=causal)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))])
def test_pieces_of_few_keys_in_any_order_of_threads(d, seed):
    """Warps that run ahead free no place, and no slot, that others still wait for or read."""
    machine = Machine("checked", compute_capability=90, seed=seed)
    for m, n, options in (
        (300, 300, {"causal": "top_left"}),
        (400, 100, {"causal": "bottom_right"}),
        (130, 260, {}),
    ):
        q, k, v = qkv(np, 1, 3, m, n, d, dtype=BFLOAT16)
        check(q, k, v, via=vjp_on(machine), backward=False, **options)


@pytest.mark.parametrize(("d", "n"), [(64, 1), (64, 131), (128, 97), (128, 300), (192, 65), (256, 50)])
def test_masks_and_biases_of_any_width_in_any_order_of_threads(d, n):
    """A table's rows have boxes of 32, 64 and 128 bytes a row; places are loaded over when all have read them."""
    rng = np.random.default_rng(n)
    q, k, v = qkv(np, 2, 2, 140, n, d, dtype=BFLOAT16)
    mask = rng.random((2, 1, 140, n)) < 0.8
    bias = rng.standard_normal((2, 140, n))
    for options in (
        {"mask": mask},
        {"mask": mask, "bias": bias.astype(BFLOAT16)},
        {"mask": mask, "bias": bias.astype(np.float32)},
        {"mask": mask, "bias": bias.astype(BFLOAT16), "softcap": 30.0, "dropout_p": 0.3, "dropout_seed": 1},
    ):
        machine = Machine("checked", compute_capability=90, seed=n)
        check(q, k, v, via=vjp_on(machine), backward=False, **options)


@pytest.mark.parametrize(("d", "n"), [(64, 64), (128, 128), (256, 200)])
def test_bits_of_whole_groups_are_the_published_ones(d, n):
    """Equal weights and values of one-hot rows: what is not 0 has been kept. Two key tiles or more."""
    options = {"dropout_p": 0.2, "dropout_seed": 0xFEDCBA9876543210, "dropout_offset": 2**32 - 1}
    origin = (2**32 - 3, 2**31 - 160, 2**31 - 4096)
    machine = Machine("plain", compute_capability=90)
    q, k = (np.zeros((1, 2, length, d), BFLOAT16) for length in (130, 3 * n))
    for first in (0, n, 2 * n):
        v = np.zeros((1, 2, 3 * n, d), BFLOAT16)
        v[..., first : first + n, :n] = np.eye(n)
        out, _ = machine.attention(q, k, v, **options, dropout_origin=origin)
        part = (origin[0], origin[1], origin[2] + first)
        expected = dropout_mask((1, 2, 130, n), 0.2, options["dropout_seed"], 2**32 - 1, part)
        np.testing.assert_array_equal(out[..., :n] != 0, expected)
