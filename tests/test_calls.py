"""The memo of calls: which calls are one, and which addresses it may take. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support import qkv

from cupyflash.cuda import calls, direct
from cupyflash.cuda.families import family_of
from cupyflash.cuda.operands import tensors
from cupyflash.cuda.params import ADDRESSES
from cupyflash.dispatch import OPTIONS
from cupyflash.problem import Problem


class Array:
    """What the memo asks of a CuPy array."""

    def __init__(self, x):
        self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
        self.data = SimpleNamespace(ptr=x.ctypes.data, device_id=0)


@pytest.fixture
def key_of(monkeypatch):
    """The key of a call with some options."""
    monkeypatch.setattr(calls, "loaded_cupy", lambda: SimpleNamespace(ndarray=Array))
    arrays = [Array(x) for x in qkv(np)]

    def key_of(choices=(False,), more=(), **options):
        return calls.recall((*arrays, *more), OPTIONS | options, choices)[0]

    return key_of


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"dropout_origin": (0, 0, 0)}, {"dropout_origin": (0, 0.0, 0)}),
        ({"dropout_origin": ((0,), 0, 0)}, {"dropout_origin": ((0.0,), 0, 0)}),
        ({"kv_lengths": (3,)}, {"kv_lengths": (3.0,)}),
        ({"query_offset": 1}, {"query_offset": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({"causal": True}, {"causal": 1}),
    ],
)
def test_equal_numbers_of_other_kinds_are_other_calls(key_of, options, wrong):
    """Of which one was accepted and the other is not."""
    assert key_of(**options) == key_of(**options) is not None
    assert key_of(**options) != key_of(**wrong)


def test_choices_and_cotangents_are_part_of_a_call(key_of):
    """Those of a backward: which gradients, whether they are added, what is read besides, and how it lies."""
    one, other = Array(np.zeros((5, 8))), Array(np.zeros((8, 5)).T)
    keys = {
        key_of(choices, more)
        for choices in ((("q",), False), (("q",), 0), (("q", "k"), False), ("q", False), (None, False))
        for more in ((one, None), (None, one), (other, None))
    }
    assert len(keys) == 15
    assert key_of((["q"], False)) is key_of(more=(np.zeros(1),)) is None


@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths", "query_offset", "window", "dropout_origin"])
def test_arrays_of_other_libraries_are_not_remembered(key_of, name):
    """They are hashable, and their addresses are not among those that a call fills in."""

    class Foreign:
        pass

    remembered = {"q_lengths": Array(np.zeros(1, int)), "window": (np.int8(1), None), "scale": np.float32(1)}
    assert calls._is_plain(key_of(**remembered, causal="top_left", softcap=3), Array)
    value = (Foreign(), 0, 0) if name == "dropout_origin" else Foreign()
    assert not calls._is_plain(key_of(**{name: value}), Array)


def test_every_address_is_held_to_its_dtype():
    q, k, v = qkv(np, m=4, dtype=np.float16)
    options = {"bias": np.zeros((4, 4)), "mask": np.ones((4, 4), bool), "sinks": np.zeros(1, np.float32)}
    arrays = tensors(Problem.create(q, k, v, backend="cuda", **options))
    found = {
        name: {ADDRESSES[place]: unit for place, unit in direct._units(arrays, family_of(name))}
        for name in ("sm80", "sm90")
    }
    assert found["sm80"] == {"q": 2, "k": 2, "v": 2, "bias": 8, "sinks": 4}
    assert found["sm90"] == {"q": 16, "k": 16, "v": 16, "mask": 2, "bias": 16, "sinks": 4}
