"""The fast way of calls on CuPy arrays: those of a form seen before skip all but the launches.

The key of a call holds everything that `Problem` checks or that a launch depends on, except the addresses of arrays,
the values in device arrays and the dropout seed and offset: those are filled in anew. Only calls that went all the
way once are remembered, so nothing is accepted here that was not accepted there.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np

from ..arrays import loaded_cupy
from ..problem import Problem
from ..request import BackwardRequest
from .direct import Call
from .machine import Gpu, gpu
from .params import ADDRESSES

MOST_CALLS = 1024
# Options that may be device arrays, by the name of their address in a record.
_ARRAYS = {"mask": "mask", "bias": "bias", "sinks": "sinks", "alibi_slopes": "slopes"}
_ARRAYS |= {"q_lengths": "q_length", "kv_lengths": "kv_length", "query_offset": "query_offset"}
_ARRAYS |= {"dropout_seed": "dropout_seed", "dropout_offset": "dropout_offset"}
_PLACES = {name: ADDRESSES.index(address) for name, address in _ARRAYS.items()}
# A number for one of these becomes an array on its way: such calls are not remembered.
_ONLY_ARRAYS = ("mask", "bias", "sinks", "alibi_slopes")
# Numbers below these limits are filled in anew, at these indices.
_COUNTERS = {"dropout_seed": (0, 2**64), "dropout_offset": (1, 2**32)}
_GIVEN = tuple(map(ADDRESSES.index, ("q", "k", "v", "out", "lse", "dout", "dlse", "delta")))
_PLAIN = {type(None), bool, int, float, str}

_DEFAULTS = {name: x.default for name, x in signature(Problem.create).parameters.items() if name not in "qkv"}
_known: dict[tuple[Any, ...], Call] = {}


def recall(arrays: tuple[Any, ...], options: dict[str, Any], choices: tuple[Any, ...]) -> tuple[Any, Any]:
    """(key, result) of a call: no key where it cannot be remembered, no result where it is new.

    ``arrays`` are q, k and v, for a backward then out, lse, dout, dlse and delta; ``options`` all keywords of
    `Problem.create`, ``choices`` those of the function itself.
    """
    cupy = loaded_cupy()
    if cupy is None:
        return None, None
    ndarray, row, random = cupy.ndarray, [0] * len(ADDRESSES), [0, 0]
    form: list[Any] = [choices, *map(type, choices)]
    for x, place in zip(arrays, _GIVEN):
        if type(x) is ndarray:
            at = x.data
            row[place] = at.ptr
            form += (x.shape, x.strides, x.dtype, at.device_id)
        elif x is None:
            form.append(None)
        else:
            return None, None
    for name, value in options.items():
        if value is _DEFAULTS[name]:
            continue
        form.append(name)
        if type(value) is ndarray and name in _PLACES:
            at = value.data
            row[_PLACES[name]] = at.ptr
            form += (value.shape, value.strides, value.dtype, at.device_id)
        elif name in _COUNTERS:
            index, limit = _COUNTERS[name]
            if type(value) is not int or not 0 <= value < limit:
                return None, None
            random[index] = value
        elif name in _ONLY_ARRAYS or not _is_plain(value):
            return None, None
        else:
            form += (value, _kinds(value))
    key = tuple(form)
    try:
        call = _known.get(key)
    except TypeError:  # a choice that is a list
        return None, None
    return key, None if call is None else call(row, random)


def _is_plain(value: Any) -> bool:
    """Whether an option is a number or a word, or a tuple of such: others may be arrays of other libraries."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.generic)


def _kinds(value: Any) -> Any:
    """The type of a value, or those inside a tuple: 1, 1.0 and True are equal and do not mean the same."""
    return tuple(map(_kinds, value)) if type(value) is tuple else type(value)


def keep_forward(key: Any, problem: Problem, return_lse: bool) -> None:
    """Remember a forward that ran, under the key that `recall` gave."""
    _keep(key, problem, lambda machine: Call.of_forward(machine, problem, return_lse))


def keep_backward(key: Any, request: BackwardRequest) -> None:
    """The same of a backward."""
    _keep(key, request.problem, lambda machine: Call.of_backward(machine, request))


def _keep(key: Any, problem: Problem, call_on: Callable[[Gpu], Call | None]) -> None:
    if key is None:
        return
    machine = gpu(problem.q.device.id)
    with machine.current():
        call = call_on(machine)
    if call is not None:
        if len(_known) >= MOST_CALLS:
            _known.clear()
        _known[key] = call


def clear() -> None:
    """Forget all calls."""
    _known.clear()
