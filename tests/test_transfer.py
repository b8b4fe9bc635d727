"""Host arrays with backend="cuda": what is checked before anything moves, and what comes back.

The GPU is the emulation; on a real one, test_gpu_calls.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulated import needs_compiler
from refusals import assert_refused
from support import assert_same, normal, qkv

import cupyflash
from cupyflash import Gradients
from cupyflash.cuda import launch, transfer
from cupyflash.cuda.emulate import Machine

pytestmark = needs_compiler


class OnDevice(np.ndarray):
    """An array that has to be fetched."""

    def get(self):
        return np.array(self)


@pytest.fixture
def moved(monkeypatch):
    """The arrays that go to a GPU, which is emulated."""
    arrays, machine = [], Machine("plain")

    def asarray(x):
        arrays.append(x)
        return np.array(x)

    def of_device_arrays(function):
        def run(*args, **options):
            results = function(*args, **options, machine=machine)
            fetchable = [None if x is None else x.view(OnDevice) for x in results]
            return Gradients(*fetchable) if isinstance(results, Gradients) else tuple(fetchable)

        return run

    cupy = SimpleNamespace(asarray=asarray, empty=machine.empty)
    functions = {name: of_device_arrays(getattr(launch, name)) for name in ("forward", "backward")}
    monkeypatch.setattr(transfer, "device", SimpleNamespace(require_gpu=lambda: cupy))
    monkeypatch.setattr(transfer, "launch", SimpleNamespace(**functions))
    return arrays


def attention(*arrays, **options):
    return cupyflash.attention(*arrays, backend="cuda", **options)


def test_lists_and_arrays_of_other_byte_orders_go_through_numpy(moved):
    q, k, v = qkv(np, m=5, d=4, dtype=np.float64)
    expected = attention(q, k, v, bias=np.zeros(5))
    assert_same(attention(q.tolist(), k.tolist(), v, bias=[0.0] * 5), expected)
    assert_same(attention(*(x.astype(">f8") for x in (q, k, v)), bias=np.zeros(5, ">f8")), expected)


def test_lengths_and_origins_may_be_arrays(moved):
    arrays = qkv(np, batch=2, heads=2, m=6, d=4)
    lengths, first = np.array([3, 6]), np.array([[7, 2], [0, 5]])
    options = {"dropout_p": 0.5, "dropout_seed": np.uint64(3), "kv_lengths": lengths}
    out = attention(*arrays, **options, dropout_origin=(first, 1, 2))
    np.testing.assert_allclose(
        out, cupyflash.attention(*arrays, **options, dropout_origin=(first, 1, 2)), rtol=1e-4, atol=1e-5
    )


REFUSED = {
    "a length": ({"kv_lengths": np.array([9])}, ValueError, "kv_lengths must lie in [0, 8] ... 9"),
    "a masked array": ({"bias": np.ma.masked_array(np.zeros(8))}, TypeError, "bias is a masked array"),
    "a dtype": ({"bias": np.zeros(8, object)}, TypeError, "bias must have one of the dtypes ... object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_moves_before_a_refusal(moved, name):
    options, error, text = REFUSED[name]
    assert_refused(lambda: attention(*qkv(np, m=8), **options), error, text)
    assert not moved


def test_out_and_grads_out_are_held_to_the_rules_of_host_arrays(moved):
    q, k, v = qkv(np, m=8)
    read_only = np.zeros_like(q)
    read_only.flags.writeable = False
    out, lse = attention(q, k, v, return_lse=True)
    moved.clear()
    for target, text in ((q, "shares memory"), (read_only, "read-only"), (q[..., :-1], "must have shape")):
        assert_refused(lambda target=target: attention(q, k, v, out=target), ValueError, text)
        given = Gradients(k=target)
        assert_refused(
            lambda given=given: cupyflash.attention_backward(
                out, q, k, v, out, lse, grads_out=given, backend="cuda"
            ),
            ValueError,
            f"grads_out.k ... {text}",
        )
    assert not moved


def test_results_come_back_in_the_callers_arrays_and_orders(moved):
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in qkv(np, heads=2, m=8))
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, backend="cuda")
    gradients = vjp(out, lse)
    assert [x.strides for x in (out, *gradients[:3])] == [x.strides for x in (q, q, k, v)]
    wide, statistic = np.zeros((1, 2, 8, 16), np.float32)[..., ::2], np.zeros_like(lse)
    assert attention(q, k, v, out=(wide, statistic), return_lse=True)[0] is wide
    assert_same((wide.copy(), statistic), (np.ascontiguousarray(out), lse))
    given = Gradients(q=np.ones_like(q), v=np.ones_like(v))
    added = cupyflash.attention_backward(
        out, q, k, v, out, lse, dlse=lse, grads_out=given, accumulate=True, backend="cuda"
    )
    assert added.q is given.q
    assert added.k is None
    np.testing.assert_allclose(given.q, 1 + gradients.q, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(given.v, 1 + gradients.v, rtol=1e-6, atol=1e-6)


def test_one_head_in_two_axes(moved):
    q, k, v = (np.asfortranarray(x[0, 0]) for x in qkv(np, m=8))
    out, vjp = cupyflash.attention_vjp(q, k, v, backend="cuda", bias=normal(np, (8, 8)))
    assert out.shape == q.shape
    assert vjp(out).q.strides == q.strides
