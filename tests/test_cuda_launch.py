"""What `launch` allocates, checks and hands back, on the emulated machine: no GPU is needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulated import needs_compiler
from support import BFLOAT16, assert_same, normal, qkv, wide
from test_cuda_plan import many_axes

from cupyflash import Gradients, cpu, reference, testing
from cupyflash.checks import OFFSET_LIMIT
from cupyflash.cuda import families
from cupyflash.cuda.emulate import Machine
from cupyflash.cuda.launch import backward, forward
from cupyflash.problem import Problem
from cupyflash.request import BackwardRequest

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def machine():
    return Machine("plain")


def problem_of(q, k, v, **options):
    return Problem.create(q, k, v, backend="cuda", **options)


def request_of(machine, problem, *, grads_out=None, **options):
    out, lse = forward(problem, machine=machine)
    dout = normal(np, out.shape, out.dtype, 70)
    return BackwardRequest.create(problem, dout, out, lse, grads_out=grads_out, **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_results_go_into_arrays_of_any_strides(machine, dtype):
    problem = problem_of(*qkv(np, heads=2, m=19, d=12, dtype=dtype))
    out, lse = forward(problem, machine=machine)
    big_out, big_lse = np.full((1, 2, 19, 40), 7, np.float32), np.full((1, 2, 57), 7, np.float32)
    given = big_out[..., 1:37:3][..., ::-1], big_lse[..., ::3]
    result = forward(problem, *given, machine=machine)
    assert result[0] is given[0]
    assert result[1] is given[1]
    assert_same(given[0].astype(dtype), out)
    assert_same(given[1].copy(), lse)
    untouched = np.ones(40, bool)
    untouched[1:37:3] = False
    assert np.all(big_out[..., untouched] == 7)
    assert np.all(big_lse.reshape(1, 2, 19, 3)[..., 1:] == 7)


def test_lse_is_made_where_it_is_wanted_alone(machine):
    problem = problem_of(*qkv(np, m=9))
    out, lse = forward(problem, need_lse=False, machine=machine)
    assert lse is None
    assert_same(out, forward(problem, machine=machine)[0])


def test_results_have_the_memory_order_of_q(machine):
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in qkv(np, 2, 3, m=8, d=4))
    problem = problem_of(q, k, v)
    assert forward(problem, machine=machine)[0].strides == q.strides
    gradients = backward(request_of(machine, problem), machine=machine)
    assert [x.strides for x in gradients[:3]] == [x.strides for x in (q, k, v)]


def test_gradients_go_into_given_arrays_or_add_to_them(machine):
    q, k, v = qkv(np, heads=4, heads_kv=2, m=21, d=8, dtype=BFLOAT16)
    sinks = normal(np, (4,))
    problem = problem_of(q, k[0], v, sinks=sinks)
    fresh = backward(request_of(machine, problem), machine=machine)
    targets = Gradients(q=np.ones(q.shape, np.float32), v=np.ones_like(v), sinks=np.ones_like(sinks))
    for rounds in (1, 2):
        request = request_of(machine, problem, grads_out=targets, accumulate=True)
        result = backward(request, machine=machine)
        assert [x is y for x, y in zip(result, targets)] == [True] * 6
        assert result.k is None
        np.testing.assert_allclose(targets.q, 1 + rounds * wide(fresh.q), rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(targets.sinks, 1 + rounds * fresh.sinks, rtol=1e-5, atol=1e-5)
    written = backward(request_of(machine, problem, grads_out=targets), machine=machine)
    assert written.v is targets.v
    assert_same(targets.v, fresh.v)


def test_what_is_not_wanted_costs_nothing(machine):
    problem = problem_of(*qkv(np, m=20), bias=normal(np, (20, 20)))
    request = request_of(machine, problem, wrt="q")
    machine.launched.clear()
    gradients = backward(request, machine=machine)
    assert [config.kernel for config in machine.launched] == ["delta", "backward_q"]
    assert [x is None for x in gradients] == [False] + [True] * 5


def test_a_two_axis_argument_gets_a_two_axis_gradient(machine):
    q, k, v = qkv(np, batch=2, m=11, n=13)
    problem = problem_of(q, k[0, 0], v[0, 0])
    gradients = backward(request_of(machine, problem), machine=machine)
    assert [x.shape for x in gradients[:3]] == [(2, 1, 11, 8), (13, 8), (13, 8)]
    whole = problem_of(q, k[:1], v[:1])
    assert_same(gradients.k, backward(request_of(machine, whole), machine=machine).k[0, 0])


def test_the_workspace_is_what_the_plan_says_to_the_byte(machine):
    problem = problem_of(*qkv(np, heads=2, m=33), alibi_slopes=normal(np, (2,)))
    request = request_of(machine, problem)
    from cupyflash.cuda.plan import plan

    need = plan(problem, backward=True, arch=machine.compute_capability).workspace_bytes
    room = np.full(need + 32, 0xEE, np.uint8)
    start = -room.ctypes.data % 16
    expected = backward(request, machine=machine)
    assert_same(backward(request, workspace=room[start : start + need], machine=machine), expected)
    assert np.all(room[:start] == 0xEE)
    assert np.all(room[start + need :] == 0xEE)
    for wrong, error, text in (
        (room[start : start + need - 1], ValueError, f"this call needs {need}"),
        (room[start + 1 :], ValueError, "multiple of 16 bytes"),
        (np.empty(2 * need, np.uint8)[::2], ValueError, "contiguous"),
        (np.empty(need, np.int8), TypeError, "uint8"),
        (bytearray(need), TypeError, "bytearray"),
    ):
        with pytest.raises(error, match=text):
            backward(request, workspace=wrong, machine=machine)


def test_a_call_on_copies_works_in_the_workspace_too(machine):
    problem = problem_of(*many_axes(0, dtype=np.float32))
    request = request_of(machine, problem)
    from cupyflash.cuda.plan import plan

    need = plan(problem, backward=True, arch=machine.compute_capability).workspace_bytes
    room = np.full(need + 16, 0xEE, np.uint8)
    start = -room.ctypes.data % 16
    expected = backward(request, machine=machine)
    assert_same(backward(request, workspace=room[start : start + need], machine=machine), expected)
    assert not np.all(room == 0xEE)
    with pytest.raises(ValueError, match=f"this call needs {need}"):
        backward(request, workspace=room[start : start + need - 1], machine=machine)
    with pytest.raises(TypeError, match="uint8"):
        forward(problem, workspace=np.empty(need, np.int8), machine=machine)


def test_nothing_is_launched_before_every_kernel_is_there(machine, monkeypatch):
    """A compile error of the last kernel must not find an earlier one's results already written."""
    request = request_of(machine, problem_of(*qkv(np, m=10)))
    ran = []

    class Broken(Machine):
        def load(self, config):
            if config.kernel == "backward":
                raise RuntimeError("does not compile")
            loaded = super().load(config)
            return loaded._replace(function=lambda *_: ran.append(config))

    with pytest.raises(RuntimeError, match="does not compile"):
        backward(request, machine=Broken("plain"))
    assert ran == []


def test_more_leading_axes_than_a_record_holds(machine):
    """Five axes that do not merge go through copies, forward and backward, into given arrays too."""
    q, k, v = many_axes(1, dtype=np.float32)
    options = {
        "bias": normal(np, (3, 1, 1, 1, 4, 1, 6), seed=9),
        "kv_lengths": np.arange(1, 7).reshape(3, 1, 2, 1),
    }
    problem = problem_of(q, k, v, **options)
    out, lse = forward(problem, machine=machine)
    near, exact = (f(q, k, v, return_lse=True, **options) for f in (testing.plain, reference.attention))
    testing.assert_close(out, near[0], exact[0], "out")
    testing.assert_lse_close(lse, near[1], exact[1], "lse")
    given = np.full((*out.shape[:-1], 9), 7, np.float32)[..., ::2][..., :4], np.empty(lse.shape, np.float32)
    assert forward(problem, *given, machine=machine)[0] is given[0]
    assert_same(given[0].copy(), np.ascontiguousarray(out))
    request = request_of(machine, problem)
    for x, y in zip(backward(request, machine=machine), cpu.backward(request)):
        assert (x is None) == (y is None)
        if y is not None:
            assert x.strides == y.strides
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_strides_that_are_no_multiple_of_the_itemsize(machine):
    """Fields of a structured array: elements 6 bytes apart."""
    q, k, v = qkv(np, m=10, d=4)
    packed = np.zeros(k.shape, [("x", np.float32), ("y", np.int16)])
    packed["x"] = k
    odd = packed["x"]
    assert odd.strides[-1] == 6
    result = forward(problem_of(q, odd, v), machine=machine)
    assert_same(result, forward(problem_of(q, k, v), machine=machine))


def test_an_address_between_elements_is_refused(machine):
    q, k, v = qkv(np, m=4, d=4)
    raw = np.zeros(q.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.float32).reshape(q.shape)
    with pytest.raises(ValueError, match="q lies at an address that is no multiple of its itemsize 4"):
        forward(problem_of(shifted, k, v), machine=machine)


def test_empty_problems_give_empty_or_zero_results(machine):
    q, k, v = qkv(np, m=0, n=5)
    gradients = backward(request_of(machine, problem_of(q, k, v)), machine=machine)
    assert gradients.q.shape == (1, 1, 0, 8)
    assert not gradients.k.any()
    assert not gradients.v.any()
    q, k, v = qkv(np, m=3, n=0)
    sinks = np.float32([0.5])
    problem = problem_of(q, k, v, sinks=sinks)
    out, lse = forward(problem, machine=machine)
    assert not out.any()
    assert np.all(lse == 0.5)
    request = BackwardRequest.create(problem, out, out, lse, dlse=np.float32([[[1, 2, 3]]]))
    gradients = backward(request, machine=machine)
    assert not gradients.q.any()
    assert gradients.sinks == 6


def test_a_wider_dout_counts_as_rounded(machine):
    problem = problem_of(*qkv(np, m=12, dtype=np.float16))
    out, lse = forward(problem, machine=machine)
    wide_dout = normal(np, out.shape, np.float32, 70)
    results = [
        backward(BackwardRequest.create(problem, dout, out, lse), machine=machine)
        for dout in (wide_dout, wide_dout.astype(np.float16))
    ]
    assert_same(*results)


@pytest.mark.parametrize("sink", [None, 0.5])
def test_rows_without_a_key_beside_keys_in_runs(machine, sink):
    """None of the runs sees a key: the join has nothing to divide by."""
    q, k, v = qkv(np, batch=3, heads=2, m=2, n=700, d=16, dtype=np.float16)
    options = {} if sink is None else {"sinks": np.float32([sink, sink])}
    problem = problem_of(q, k, v, kv_lengths=[0, 700, 1], q_lengths=[2, 1, 2], **options)
    out, lse = forward(problem, machine=machine)
    assert machine.launched[-1].kernel == "combine"
    assert not out[0].any()
    assert np.all(lse[0] == (-np.inf if sink is None else sink))
    assert np.isfinite(out).all()
    near, exact = (
        function(q, k, v, kv_lengths=[0, 700, 1], q_lengths=[2, 1, 2], **options)
        for function in (testing.plain, reference.attention)
    )
    testing.assert_close(out, near, exact, "out")


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        (np.float16, "sm80"),
        (np.float16, "simt"),
        (np.float32, "simt"),
        (np.float64, "simt"),
        (np.float64, "sm80_wide"),
    ],
)
@pytest.mark.parametrize("slopes", [False, True], ids=["", "slopes"])
def test_addends_past_the_lengths_are_never_seen(machine, monkeypatch, dtype, family, slopes):
    """Rows there share tiles with rows that see every key; those of a broadcast q are live in another item."""
    monkeypatch.setattr(families, "FORCED", family)
    q, k, v = qkv(np, batch=2, m=150, d=8, dtype=dtype)
    bias, mask = normal(np, (2, 1, 150, 150)), np.ones((2, 1, 150, 150), bool)
    options = {"q_lengths": [70, 150], "kv_lengths": [150, 90]}
    if slopes:
        options["alibi_slopes"] = np.float32([0.1])
    results = []
    for garbage in (0, np.nan, np.inf):
        bias[0, :, 70:], bias[1, :, :, 90:] = garbage, garbage
        for own_q in (q, q[:1]):
            problem = problem_of(own_q, k, v, bias=bias, mask=mask, **options)
            gradients = backward(request_of(machine, problem), machine=machine)
            results.append((*forward(problem, machine=machine), *gradients))
    for index in (0, 1):
        assert_same(results[index + 2], results[index])
        assert_same(results[index + 4], results[index])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("offset", [OFFSET_LIMIT, 5 - OFFSET_LIMIT])
def test_the_farthest_offsets_meet_no_bound_that_is_not_there(machine, dtype, offset):
    q, k, v = qkv(np, heads=2, m=70, d=8, dtype=dtype)
    near = abs(offset)
    for options in ({"causal": True}, {"window": (None, 3)}, {"window": (near, 7)}, {"window": (7, near)}):
        given = {"query_offset": offset, **options}
        problem = problem_of(q, k, v, **given)
        on_cpu = cpu.forward(Problem.create(q, k, v, **given))
        for x, y in zip(forward(problem, machine=machine), on_cpu):
            np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-3)
        request = request_of(machine, problem)
        for x, y in zip(backward(request, machine=machine)[:3], cpu.backward(request)[:3]):
            np.testing.assert_allclose(x, y, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_lengths_that_nobody_checked_are_clamped(machine, dtype):
    """As those on a device: the kernels are the first to read them. So far as int64 holds them."""
    q, k, v = qkv(np, batch=2, m=9, n=12)
    info = np.iinfo(dtype)
    ends = np.array([max(info.min, -(2**63)), min(info.max, 2**63 - 1)], dtype)
    results = []
    for rows, keys in ((ends, ends[::-1]), ([0, 9], [12, 0])):
        problem = problem_of(q, k, v, q_lengths=[0, 9], kv_lengths=[12, 0], sinks=normal(np, (1,)))
        problem = dataclasses.replace(problem, q_lengths=np.asarray(rows), kv_lengths=np.asarray(keys))
        results.append(
            (*forward(problem, machine=machine), *backward(request_of(machine, problem), machine=machine))
        )
    assert_same(*results)


@pytest.mark.parametrize(("end", "window"), [(-(2**63), (3, None)), (2**63 - 1, (None, 3))])
def test_offsets_that_nobody_checked_are_clamped(machine, end, window):
    """So far out all keys are seen; a sum that overflowed would see none."""
    q, k, v = qkv(np, batch=2, m=9)
    problem = problem_of(q, k, v, query_offset=[0, 1], window=window)
    results = [
        forward(dataclasses.replace(problem, query_offset=np.array([1, offset])), machine=machine)
        for offset in (end, OFFSET_LIMIT if end > 0 else -OFFSET_LIMIT)
    ]
    assert_same(*results)
