"""The fast way of `cupyflash.attention` on CuPy arrays: calls of a form seen before skip all but the launch.

The key of a call holds everything that `Problem` checks or that a launch depends on, except the addresses of arrays,
the values in device arrays and the dropout seed and offset: those are filled in anew. Only calls that went all the
way once are remembered, so nothing is accepted here that was not accepted there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import signature
from operator import itemgetter
from typing import Any

import numpy as np

from ..arrays import loaded_cupy
from ..problem import Problem
from . import sm90_launch
from .families import Family, choose_family
from .launch import fits
from .machine import Gpu, gpu
from .operands import layout_bytes, layout_in_order, layouts, numbers, tensors
from .params import ADDRESSES, CALL_BYTES, NUMBERS, Layout, pack_call
from .recipe import Sizes, forward_recipe
from .sm90_launch import Extras
from .tensormap import ALIGNMENT

MOST_CALLS = 1024
_WRITTEN = ADDRESSES.index("dropout_offset") + 1  # the forward's addresses are the first of the record
_ADDRESSES = struct.Struct(f"={_WRITTEN}Q")
_RANDOM = struct.Struct("=2Q")
_COUNTER = struct.Struct("=Q")  # the head of the launch record
_RANDOM_AT = 8 * (len(ADDRESSES) + NUMBERS.index("dropout_seed_value"))
_ADDRESS = struct.Struct("=Q")
# Options that may be device arrays, with the name of their address. A number for one of the first four becomes an
# array on its way: such calls are not remembered. The last two may be numbers below a limit, which are filled in.
_ARRAYS = {"mask": "mask", "bias": "bias", "sinks": "sinks", "alibi_slopes": "slopes"}
_ARRAYS |= {"q_lengths": "q_length", "kv_lengths": "kv_length", "query_offset": "query_offset"}
_ARRAYS |= {"dropout_seed": "dropout_seed", "dropout_offset": "dropout_offset"}
_NUMBERS_ON_DEVICE = 4
_SEED, _COUNTER_LIMITS = 7, (2**64, 2**32)
_PLACES = tuple(map(ADDRESSES.index, _ARRAYS.values()))
_OTHERS = [name for name in signature(Problem.create).parameters if name not in ("q", "k", "v", *_ARRAYS)]
_P = len(_ARRAYS) + _OTHERS.index("dropout_p")
_PLAIN = {type(None), bool, int, float, str, tuple}
_TUPLES = tuple(
    (*_ARRAYS, *_OTHERS).index(name)
    for name in ("q_lengths", "kv_lengths", "query_offset", "window", "dropout_origin")
)
_values = itemgetter(*_ARRAYS, *_OTHERS)
_NOT_GIVEN, _NO_ARRAYS = (0,) * (_WRITTEN - 3), (None,) * _NUMBERS_ON_DEVICE

_known: dict[tuple[Any, ...], _Call] = {}


def recall(q: Any, k: Any, v: Any, options: dict[str, Any], return_lse: bool) -> tuple[Any, Any]:
    """(key, result) of a call without ``out=``: no key where it cannot be remembered, no result where it is new.

    ``options`` are all keywords of `Problem.create`.
    """
    cupy = loaded_cupy()
    if cupy is None or not (type(q) is type(k) is type(v) is cupy.ndarray):
        return None, None
    values, random = _values(options), [0, 0]
    at_q, at_k, at_v = q.data, k.data, v.data
    row = [at_q.ptr, at_k.ptr, at_v.ptr, *_NOT_GIVEN]
    arrays = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
    devices = (at_q.device_id, at_k.device_id, at_v.device_id)
    kinds = _kinds(values, _TUPLES)
    key = (arrays, devices, return_lse, type(return_lse), values, kinds)
    try:
        if type(values[_P]) is not float or values[_P] != 0.0:
            raise TypeError
        call = _known.get(key)
        if values[:_NUMBERS_ON_DEVICE] != _NO_ARRAYS:
            return None, None
    except TypeError:  # an array, which no key can hold, or dropout
        described = _described(values, cupy.ndarray, row, random)
        if described is None:
            return None, None
        key = (*key[:-2], described, kinds)
        try:
            call = _known.get(key)
        except TypeError:  # a list or a host array
            return None, None
    return key, None if call is None else call(row, random)


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


def keep(key: Any, problem: Problem, return_lse: bool) -> None:
    """Remember a call that ran, under the key that `recall` gave.

    Not one with objects of unknown types: they may be arrays of other libraries, whose addresses a row does not get.
    """
    if key is None or not _is_plain(key, type(problem.q)):
        return
    machine = gpu(problem.q.device.id)
    with machine.current():
        call = _Call.of(machine, problem, return_lse)
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


@dataclass(slots=True, eq=False)
class _Call:
    """One form of call: its kernels and their grids, and the record but for what each call brings."""

    machine: Gpu
    launches: tuple[tuple[Any, ...], ...]  # function, grid, threads, bytes of shared memory, arguments
    record: bytes
    workspace: tuple[tuple[int, int], ...]  # index of an address in the record, offset of the array there
    workspace_bytes: int
    out: tuple[Any, ...]  # what `_empty` takes
    lse: tuple[Any, ...] | None
    dropout: bool
    extras: Extras | None
    behind: tuple[bytes, ...]  # the arguments behind the record, but for maps and counter
    units: tuple[tuple[int, int], ...]  # index of an address in the record, and what it must be a multiple of
    get_device: Callable[[], int]
    ndarray: type
    allocate: Callable[[int], Any]
    pointer: type
    free: list[tuple[Any, Any, Any]] = field(default_factory=list)  # records that no thread is launching with

    @classmethod
    def of(cls, machine: Gpu, problem: Problem, return_lse: bool) -> _Call | None:
        """The call of a problem; None where it takes several records, or copies of its arrays."""
        p, arrays, sizes = problem, tensors(problem), Sizes.of(problem)
        results = {"out": layout_in_order(p.out_shape, p.out_dtype, p.q)}
        if return_lse:
            results["lse"] = layout_in_order(p.lse_shape, p.lse_dtype, None)
        found = layouts(arrays) | results
        family, _ = choose_family(p, machine.compute_capability)
        if not fits(sizes, found, family.lead_axes) or not all(map(machine.owns, arrays.values())):
            return None
        if family.arch_suffix and sm90_launch.copies(p):
            return None
        recipe = forward_recipe(family.name, machine.compute_capability, sizes, tuple(found.items()))
        if not recipe.launches or any(x.record != recipe.launches[0].record for x in recipe.launches):
            return None
        launch, skip = recipe.launches[-1], 1 if p.squeeze else 0
        extras: Any = launch.extras  # a forward's
        cuda = machine.xp.cuda
        behind: tuple[bytes, ...] = ()
        if extras is not None:
            behind = (bytes(sm90_launch.MAPS_BYTES), extras.launch([0] * 4, numbers(p), 0))
        return cls(
            machine=machine,
            launches=tuple(
                (
                    machine.load(x.config).function,
                    (min(x.grid, machine.multiprocessors) if x.extras else x.grid,),
                    (x.config.threads,),
                    x.config.shared_bytes,
                    1 if x.extras is None else 3,
                )
                for x in recipe.launches
            ),
            workspace=tuple((ADDRESSES.index(name), offset) for name, offset in recipe.workspace),
            workspace_bytes=recipe.workspace_bytes,
            record=pack_call([0] * len(ADDRESSES), numbers(p)) + launch.record[CALL_BYTES:],
            out=_made(results["out"], skip),
            lse=_made(results["lse"], skip) if return_lse else None,
            dropout=p.dropout is not None,
            extras=extras,
            behind=behind,
            units=_units(arrays, family),
            get_device=cuda.runtime.getDevice,
            ndarray=machine.xp.ndarray,
            allocate=cuda.alloc,
            pointer=cuda.function.CPointer,
        )

    def __call__(self, row: list[int], random: list[int]) -> Any:
        """The results for the arrays at the addresses in ``row``; None where one is misaligned."""
        if self.get_device() != self.machine.device:
            with self.machine.current():
                return self(row, random)
        for place, unit in self.units:
            if row[place] % unit:
                return None
        result = out = self._empty(*self.out)
        row[3] = out.data.ptr
        if self.lse is not None:
            lse = self._empty(*self.lse)
            row[4] = lse.data.ptr
            result = (out, lse)
        try:
            slot = self.free.pop()
        except IndexError:
            slot = self._slot()
        buffer, args, behind = slot
        _ADDRESSES.pack_into(buffer, 0, *row)
        if self.workspace:
            memory = self.allocate(self.workspace_bytes)  # kept until the launches are on their way
            self.machine.keep_for_graph(memory)
            row.extend([0] * (len(ADDRESSES) - _WRITTEN))
            for index, offset in self.workspace:
                row[index] = memory.ptr + offset
                _ADDRESS.pack_into(buffer, 8 * index, row[index])
        if self.dropout:
            _RANDOM.pack_into(buffer, _RANDOM_AT, *random)
        if self.extras is not None:
            maps, launch = behind
            maps[:] = self.extras.maps(row)
            _COUNTER.pack_into(launch, 0, self.machine.counter())
        for function, grid, threads, shared_bytes, count in self.launches:
            function(grid, threads, args[:count], shared_bytes)
        self.free.append(slot)  # the driver has copied the record
        return result

    def _empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, strides: tuple[int, ...]
    ) -> Any:
        return self.ndarray(shape, dtype, self.allocate(nbytes), strides)

    def _slot(self) -> tuple[np.ndarray, tuple[Any, ...], tuple[memoryview, ...]]:
        """Records of its own for a thread that is launching, and the launch's arguments, which point to them."""
        bare = [bytearray(x) for x in (self.record, *self.behind)]
        buffers = [np.frombuffer(x, np.uint8) for x in bare]
        args = tuple(self.pointer(buffer.ctypes.data) for buffer in buffers)
        return buffers[0], args, tuple(map(memoryview, bare[1:]))


def _units(arrays: dict[str, Any], family: Family) -> tuple[tuple[int, int], ...]:
    """For each array whose address can be too odd: its index in the record, and what the address must divide by."""
    units = {name: x.dtype.itemsize for name, x in arrays.items()}
    if family.arch_suffix:
        read_in_pairs = {name: 2 * units[name] for name in ("mask", "bias") if name in units}
        by_tma = ("q", "k", "v") if units["q"] == 2 else ()
        units |= dict.fromkeys(by_tma, ALIGNMENT) | read_in_pairs
    return tuple((ADDRESSES.index(name), unit) for name, unit in units.items() if unit > 1)


def _made(layout: Layout, skip: int) -> tuple[Any, ...]:
    """What `_Call._empty` takes."""
    return layout.shape[skip:], layout.dtype, layout_bytes(layout), layout.strides[skip:]
