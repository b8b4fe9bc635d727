"""The mma.sync family on a CPU: copies in the background, swizzled tiles and fragments, in every option."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import BFLOAT16, assert_same, check, qkv
from test_emulate import BATCH, HEADS, all_results, cases, check_case, edges, machines

from cupyflash.cuda.emulate import EmulationError, Machine

pytestmark = needs_compiler

SM80 = 80
HALVES = [np.dtype(np.float16), BFLOAT16]


@pytest.mark.parametrize("name", ["plain", "bottom right"])
def test_the_forward(name):
    m, n = edges(np.float16, "sm80", SM80)[0]
    machine = check_case(name, m, n, np.float16, SM80, backward=False)
    assert {config.family for config in machine.launched} == {"sm80"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", cases(2, 2, np.float32))
def test_every_option_at_every_edge(name, dtype):
    for m, n in edges(dtype, "sm80", SM80):
        check_case(name, m, n, dtype, SM80)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_same_bits_in_every_order(name):
    options = cases(70, 150, BFLOAT16)[name]
    first, *others = (
        all_results(machine, 70, 150, BFLOAT16, options) for machine in machines(compute_capability=SM80)
    )
    for other in others:
        assert_same(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("d_and_e", [(1, 1), (37, 61), (64, 0), (64, 64), (128, 80), (256, 200)], ids=str)
def test_head_dims(d_and_e):
    q, k, v = qkv(np, 1, HEADS, 35, 33, *d_and_e, heads_kv=1, dtype=BFLOAT16)
    check(q, k, v, via=vjp_on(Machine(compute_capability=SM80)), causal="bottom_right")


@pytest.mark.slow
@pytest.mark.parametrize(("m", "kernel"), [(1, "decode"), (3, "decode"), (9, "forward")])
def test_runs_of_keys_are_combined(m, kernel):
    q, k, v = qkv(np, BATCH, 4, m, 3000, 32, heads_kv=1, dtype=np.float16)
    machine = Machine(compute_capability=SM80)
    check(q, k, v, via=vjp_on(machine), backward=False, kv_lengths=np.array([3000, 900]))
    assert {config.kernel for config in machine.launched} == {kernel, "combine"}


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4, 70])
def test_H01_scores_of_1e11_leave_gradients_finite(length):
    x = np.full((1, 1, length, 64), 133120, BFLOAT16)
    (out, _), vjp = vjp_on(Machine(compute_capability=SM80))(x, x, x, return_lse=True, wrt=None)
    assert_same(out, x)
    assert all(np.isfinite(g.astype(np.float32)).all() for g in vjp(x, None)[:3])


FAULTS = {
    "copies that nobody waits for": (
        "    cp_async_wait_group<0>();\n    block_barrier();",
        "    block_barrier();",
        AssertionError,
        "NaN",
    ),
    "barrier removed": (
        "    block_barrier();        // everyone's copies are there",
        "    //",
        EmulationError,
        "a race",
    ),
    "swizzles that do not match": (
        "tile + T::place(own_row, own_chunk);",
        "tile + T::place(own_row, own_chunk ^ 1);",
        AssertionError,
        "out of q .*max error",
    ),
    "row of a matrix moved by one": (
        "ldmatrix_x4(right, read_b.block(b, b_row + 8 * n, 16 * k));",
        "ldmatrix_x4(right, read_b.block(b, b_row + 8 * n + 1, 16 * k));",
        AssertionError,
        "out of q .*max error",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    old, new, error, text = FAULTS[name]

    def edit(source):
        assert source.count(old) == 1
        return source.replace(old, new)

    q, k, v = qkv(np, 1, 2, 65, 200, 64, heads_kv=1, dtype=np.float16)
    machine = Machine(compute_capability=SM80, edit=edit)
    with pytest.raises(error, match=text):
        check(q, k, v, via=vjp_on(machine), backward=False)
