"""The memo of calls: which calls are one, and which addresses it may take. No GPU is needed."""

from __future__ import annotations

import dataclasses
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
from cupyflash.request import BackwardRequest


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
    assert key_of(**remembered, causal="top_left", softcap=3) is not None
    value = (Foreign(), 0, 0) if name == "dropout_origin" else Foreign()
    assert key_of(**{name: value}) is None


def units(family, problem, dout=None):
    """What addresses must be multiples of, by name."""
    arrays = tensors(problem) | ({} if dout is None else {"dout": dout})
    found = direct._units(arrays, family_of(family), problem, dout)
    return {ADDRESSES[place]: unit for place, unit in found}


def test_every_address_is_held_to_what_kernels_read_at_once():
    """Its dtype, and on Hopper 16 bytes or pairs: elsewhere the array would be copied."""
    q, k, v = qkv(np, m=4, dtype=np.float16)
    options = {"mask": np.ones((4, 4), bool), "sinks": np.zeros(1, np.float32), "backend": "cuda"}
    half = Problem.create(q, k, v, bias=np.zeros((4, 4), np.float16), **options)
    single = Problem.create(q, k, v, bias=np.zeros((4, 4), np.float32), **options)
    columns = Problem.create(
        q, k, v, mask=np.ones((4, 1), bool), bias=np.zeros(1, np.float32), backend="cuda"
    )
    wide = Problem.create(*qkv(np, m=4), bias=np.zeros((4, 4), np.float32), **options)
    by_tma = {"q": 16, "k": 16, "v": 16}
    assert units("sm80", half) == {"q": 2, "k": 2, "v": 2, "bias": 2, "sinks": 4}
    assert units("sm90", half) == by_tma | {"mask": 16, "bias": 16, "sinks": 4}
    assert units("sm90", half, q) == units("sm90", half) | {"dout": 16}
    assert units("sm90", single) == units("sm90", half)
    assert units("sm90", single, q) == units("sm90", half, q)
    assert units("sm90", columns, q) == by_tma | {"bias": 4, "dout": 16}
    assert units("sm90_wide", wide) == {"q": 4, "k": 4, "v": 4, "mask": 2, "bias": 8, "sinks": 4}


def test_a_dout_of_another_dtype_is_not_copied_to_be_remembered():
    """While a graph is captured the copy would be part of it, in memory that is another's when it runs."""

    class NotCopied(np.ndarray):
        def astype(self, *args, **kwargs):
            raise AssertionError("copied")

    q, k, v = qkv(np, dtype=np.float16)
    request = BackwardRequest.create(
        Problem.create(q, k, v, backend="cuda"), q.astype(np.float32), q, np.zeros(q.shape[:-1], np.float32)
    )
    request = dataclasses.replace(request, dout=request.dout.view(NotCopied))
    assert direct.Call.of_backward(None, request) is None
