"""The fast way of a known call launches what the slow way does, byte for byte. No GPU is needed: nothing runs."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from emulated import needs_compiler
from support import normal, qkv

from cupyflash.cuda import direct, launch
from cupyflash.cuda.emulate import Machine
from cupyflash.cuda.operands import tensors
from cupyflash.cuda.params import ADDRESSES
from cupyflash.cuda.plan import planned
from cupyflash.problem import GRADIENT_NAMES, Gradients, Problem
from cupyflash.request import BackwardRequest

pytestmark = needs_compiler


class Recorder(Machine):
    """A machine that writes launches down; its CuPy hands out the memory of given arrays, in order."""

    def __init__(self, cc, memory=()):
        super().__init__("plain", compute_capability=cc)
        self.device, self.launches, self.memory = 0, [], iter(memory)
        self.xp = SimpleNamespace(
            ndarray=lambda shape, dtype, memory, strides: SimpleNamespace(data=memory, strides=strides),
            cuda=SimpleNamespace(
                runtime=SimpleNamespace(getDevice=lambda: 0),
                alloc=lambda nbytes: self._allocated(nbytes),
                function=SimpleNamespace(CPointer=lambda address: address),
            ),
        )

    def _allocated(self, nbytes):
        x = next(self.memory)
        assert x.nbytes == nbytes  # and that in this order
        return SimpleNamespace(ptr=x.ctypes.data)

    def load(self, config):
        def function(grid, threads, args, shared_bytes):
            records = [x.tobytes() if isinstance(x, np.void) else x for x in args]
            self.launches.append((str(config), grid, threads, shared_bytes, records))

        return SimpleNamespace(function=function)


CALLS = {
    "float32 on 7.5": (75, np.float32, 9, {}),
    "float32 on 8.0": (80, np.float32, 9, {"bias": normal(np, (9, 40)), "sinks": normal(np, (4,))}),
    "float16 on 8.0": (80, np.float16, 9, {"causal": "bottom_right", "softcap": 3.0}),
    "keys in runs": (80, np.float16, 1, {}),
    "dropout": (80, np.float16, 9, {"dropout_p": 0.5, "dropout_seed": 2**63 + 1, "dropout_offset": 7}),
    "Hopper": (90, np.float16, 9, {"window": (3, 3), "query_offset": 0}),
    "float32 on Hopper": (90, np.float32, 256, {}),
}
BACKWARD = {name: call for name, call in CALLS.items() if name != "keys in runs"}
BACKWARD |= {
    "in any order": (80, np.float16, 9, {"deterministic": False}),
    "some": (90, np.float16, 9, {"wrt": ("v", "q")}),
    "values alone": (80, np.float32, 9, {"wrt": ("v",)}),
    "delta": (80, np.float32, 9, {"out": None}),
    "matrices": (80, np.float16, 9, {"squeeze": True}),
}
OF_THE_CALL = {"dropout_seed", "dropout_offset"}  # what is no part of a form


def of_form(options):
    """The options of another call of the same form."""
    return {name: 5 if name in OF_THE_CALL else x for name, x in options.items()}


def row_of(arrays):
    """The addresses of arrays in the order of the record."""
    return [arrays[name].ctypes.data if name in arrays else 0 for name in ADDRESSES]


def assert_same_launches(slow, fast):
    """The same kernels in the same order, with the same bytes behind their arguments."""
    assert len(slow.launches) == len(fast.launches) > 0
    for (*of_slow, records), (*of_fast, addresses) in zip(slow.launches, fast.launches):
        assert of_fast == of_slow
        pairs = zip(addresses, records, strict=True)
        found = [ctypes.string_at(address, len(record)) for address, record in pairs]
        if "forward" in of_slow[0]:
            found[2:], records[2:] = (
                [x[8:] for x in y[2:]] for y in (found, records)
            )  # each has its counter
        assert found == records


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_launches_the_same(name):
    cc, dtype, m, options = CALLS[name]
    q, k, v = qkv(np, batch=2, heads=4, heads_kv=2, m=m, n=40, d=64, dtype=dtype)
    if name == "keys in runs":
        k, v = (np.concatenate([x] * 100, axis=2) for x in (k, v))
    problem = Problem.create(q, k, v, backend="cuda", **options)
    out, lse = np.empty(problem.out_shape, dtype), np.empty(problem.lse_shape, problem.lse_dtype)
    workspace = np.empty(planned(problem, False, None, cc).recipe.workspace_bytes, np.uint8)
    slow, fast = Recorder(cc), Recorder(cc, [out, lse, workspace])
    random = [options.get("dropout_seed", 0), options.get("dropout_offset", 0)]
    with slow.current():
        launch.forward(problem, out, lse, workspace=workspace if workspace.size else None, machine=slow)
        known = Problem.create(q, k, v, backend="cuda", **of_form(options))
        call = direct.Call.of_forward(fast, known, return_lse=True)  # whose records stay while it does
        made = call(row_of(tensors(problem)), random)
    assert [x.strides for x in made] == [out.strides, lse.strides]
    assert_same_launches(slow, fast)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_known_backward_launches_the_same(name):
    cc, dtype, m, given = BACKWARD[name]
    options = {key: x for key, x in given.items() if key not in ("wrt", "out", "squeeze")}
    q, k, v = qkv(np, batch=2, heads=4, heads_kv=2, m=m, n=40, d=64, dtype=dtype)
    q, k, v = (x[0, 0] for x in (q, k, v)) if "squeeze" in given else (q, k, v)
    problem = Problem.create(q, k, v, backend="cuda", **options)
    shapes = [shape[1:] if "squeeze" in given else shape for shape in (problem.out_shape, problem.lse_shape)]
    out, lse = normal(np, shapes[0], dtype), normal(np, shapes[1], problem.lse_dtype, 1)
    kept = {"out": None, "delta": lse} if "out" in given else {"out": out}
    arguments = {
        "dout": normal(np, out.shape, dtype, 2),
        "lse": lse,
        "dlse": lse,
        "wrt": given.get("wrt"),
    } | kept
    wrt = given.get("wrt", problem.differentiable)
    targets = Gradients(**{x: np.empty(problem.shape_of(x), getattr(problem, x).dtype) for x in wrt})
    request = BackwardRequest.create(problem, **arguments, grads_out=targets)
    slow = Recorder(cc)
    workspace = slow.empty(2**24, np.uint8)
    with slow.current():
        gradients = launch.backward(request, workspace=workspace, machine=slow)
        known = BackwardRequest.create(
            Problem.create(q, k, v, backend="cuda", **of_form(options)), **arguments
        )
        sizes = direct.Call.of_backward(Recorder(cc), known).workspace_bytes
        memory = [x for x in targets if x is not None]
        fast = Recorder(cc, [*memory, workspace[:sizes]])
        call = direct.Call.of_backward(fast, known)
        arrays = tensors(problem) | launch.cotangents(request)
        made = call(row_of(arrays), [options.get("dropout_seed", 0), options.get("dropout_offset", 0)])
    for x, y, name in zip(made, gradients, GRADIENT_NAMES):
        assert (x is None) == (y is None) == (name not in wrt)
        assert x is None or (x.data.ptr, x.strides) == (y.ctypes.data, y.strides)
    assert_same_launches(slow, fast)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_known_call_holds_no_arrays(way):
    """It is kept when the arrays of the call that made it are gone."""
    q, k, v = qkv(np, m=9, n=40, d=64, dtype=np.float16)
    machine, problem = Recorder(80), Problem.create(q, k, v, backend="cuda")
    request = BackwardRequest.create(problem, q, q, np.zeros(q.shape[:-1], np.float32))
    call = (
        direct.Call.of_forward(machine, problem, return_lse=True)
        if way == "forward"
        else direct.Call.of_backward(machine, request)
    )
    held = [weakref.ref(x) for x in (problem, request, q, k, v)]
    del problem, request, q, k, v
    gc.collect()
    assert call is not None
    assert [ref() for ref in held] == [None] * len(held)


def test_launches_that_count_nothing_take_no_counter():
    """One that is captured in a graph would keep it for good."""

    class Uncounted(Recorder):
        def counter(self):
            raise AssertionError("a counter was taken")

    q, k, v = qkv(np, m=9, n=40, d=64, dtype=np.float16)
    machine = Uncounted(90)
    machine.attention_backward(q, q, k, v, q, np.zeros(q.shape[:-1], np.float32))
    assert [config.split()[:2] for config, *_ in machine.launches][1] == ["sm90", "backward"]
