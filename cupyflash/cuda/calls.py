"""The fast way of calls on CuPy arrays: those of a form seen before skip all but the launches.

The key of a call holds everything that `Problem` checks or that a launch depends on, except the addresses of arrays,
the values in device arrays and the dropout seed and offset: those are filled in anew. Only calls that went all the
way once are remembered, so nothing is accepted here that was not accepted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from operator import itemgetter
from typing import Any

import numpy as np

from ..arrays import loaded_cupy
from ..problem import Problem
from ..request import BackwardRequest
from .direct import Call
from .machine import Gpu, gpu
from .params import ADDRESSES

MOST_CALLS = 1024
# Options that may be device arrays, with the name of their address. A number for one of the first four becomes an
# array on its way: such calls are not remembered. The last two may be numbers below a limit, which are filled in.
_ARRAYS = {"mask": "mask", "bias": "bias", "sinks": "sinks", "alibi_slopes": "slopes"}
_ARRAYS |= {"q_lengths": "q_length", "kv_lengths": "kv_length", "query_offset": "query_offset"}
_ARRAYS |= {"dropout_seed": "dropout_seed", "dropout_offset": "dropout_offset"}
_NUMBERS_ON_DEVICE = 4
_SEED, _COUNTER_LIMITS = 7, (2**64, 2**32)
_PLACES = tuple(map(ADDRESSES.index, _ARRAYS.values()))
_OTHERS = [name for name in signature(Problem.create).parameters if name not in ("q", "k", "v", *_ARRAYS)]
_NAMES = (*_ARRAYS, *_OTHERS)
_values = itemgetter(*_NAMES)
_P = _NAMES.index("dropout_p")
# Where a value may be a tuple, and the types that are no array's.
_TUPLES = tuple(map(_NAMES.index, ("q_lengths", "kv_lengths", "query_offset", "window", "dropout_origin")))
_PLAIN = {type(None), bool, int, float, str, tuple}
_NO_ARRAYS = (None,) * _NUMBERS_ON_DEVICE
_GIVEN = tuple(map(ADDRESSES.index, ("q", "k", "v", "out", "lse", "dout", "dlse", "delta")))

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
    form: list[Any] = []
    for x, place in zip(arrays, _GIVEN):
        if type(x) is ndarray:
            at = x.data
            row[place] = at.ptr
            form += (x.shape, x.strides, x.dtype, at.device_id)
        elif x is None:
            form.append(None)
        else:
            return None, None
    values = _values(options)
    kinds = _kinds((*values, *choices), _TUPLES)
    key, holds, call = (*form, choices, values, kinds), False, None
    # With dropout the seed and the offset are no part of a key.
    if type(values[_P]) is float and values[_P] == 0.0:
        holds, call = _look_up(key)
    if holds and values[:_NUMBERS_ON_DEVICE] != _NO_ARRAYS:
        return None, None
    if not holds:
        described = _described(values, ndarray, row, random)
        if described is None:
            return None, None
        key = (*form, choices, described, kinds)
        holds, call = _look_up(key)
        if not holds:  # a list or a host array
            return None, None
    return key, None if call is None else call(row, random)


def _look_up(key: tuple[Any, ...]) -> tuple[bool, Call | None]:
    """(whether it can be a key, the call known under it): no key holds an array or a list."""
    try:
        return True, _known.get(key)
    except TypeError:
        return False, None


def _kinds(values: tuple[Any, ...], places: Iterable[int]) -> tuple[Any, ...]:
    """The types of values and, at these places, inside tuples: 1, 1.0 and True are equal and do not mean the same."""
    kinds = tuple(map(type, values))
    for place in places:
        if isinstance(value := values[place], tuple):
            kinds += _kinds(value, range(len(value)))
    return kinds


def _described(
    values: tuple[Any, ...], ndarray: Any, row: list[int], random: list[int]
) -> tuple[Any, ...] | None:
    """The options without what each call fills in, which goes to ``row`` and ``random``; None if not to remember."""
    described = list(values)
    for index, place in enumerate(_PLACES):
        value = values[index]
        if type(value) is ndarray:
            pointer = value.data
            row[place] = pointer.ptr
            described[index] = (value.shape, value.strides, value.dtype, pointer.device_id)
        elif index >= _SEED and value is not None:
            if type(value) is not int or not 0 <= value < _COUNTER_LIMITS[index - _SEED]:
                return None
            random[index - _SEED] = value
            described[index] = None
        elif value is not None and index < _NUMBERS_ON_DEVICE:
            return None
    return tuple(described)


def keep_forward(key: Any, problem: Problem, return_lse: bool) -> None:
    """Remember a forward that ran, under the key that `recall` gave."""
    _keep(key, problem, lambda machine: Call.of_forward(machine, problem, return_lse))


def keep_backward(key: Any, request: BackwardRequest) -> None:
    """The same of a backward."""
    _keep(key, request.problem, lambda machine: Call.of_backward(machine, request))


def _keep(key: Any, problem: Problem, call_on: Callable[[Gpu], Call | None]) -> None:
    """Remember a call, but not one with objects of unknown types.

    They may be arrays of other libraries, whose addresses a row does not get.
    """
    if key is None or not _is_plain(key, type(problem.q)):
        return
    machine = gpu(problem.q.device.id)
    with machine.current():
        call = call_on(machine)
    if call is not None:
        if len(_known) >= MOST_CALLS:
            _known.clear()
        _known[key] = call


def _is_plain(key: tuple[Any, ...], ndarray: type) -> bool:
    """Whether the options of a key are numbers, words and CuPy arrays."""
    return all(kind in _PLAIN or kind is ndarray or issubclass(kind, np.generic) for kind in key[-1])


def clear() -> None:
    """Forget all calls."""
    _known.clear()
