"""A form of call on CuPy arrays that is ready to launch: all of its recipe and records but what each call brings."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..problem import Gradients, Problem
from ..request import BackwardRequest
from . import sm90_launch
from .backward_recipe import backward_recipe
from .families import Family, choose_family
from .launch import cotangents, fits
from .machine import Gpu
from .operands import GRADIENTS, gradient_layouts, layout_bytes, layouts, numbers, result_layouts, tensors
from .params import ADDRESSES, CALL_BYTES, NUMBERS, Layout, pack_call
from .recipe import Launch, Recipe, Sizes, forward_recipe
from .tensormap import MAP_BYTES

_ADDRESSES = struct.Struct(f"={len(ADDRESSES)}Q")
_ADDRESS = struct.Struct("=Q")
_RANDOM = struct.Struct("=2Q")
_RANDOM_AT = 8 * (len(ADDRESSES) + NUMBERS.index("dropout_seed_value"))


class _Prepared(NamedTuple):
    """One launch."""

    function: Any
    grid: tuple[int]
    threads: tuple[int]
    shared_bytes: int
    record: bytes  # but for addresses
    hidden: tuple[int, ...]
    extras: Any
    behind: bytes  # the last argument, behind the record and the maps

    @classmethod
    def of(cls, launch: Launch, machine: Gpu, problem: Problem) -> _Prepared:
        config, extras, values = launch.config, launch.extras, numbers(problem)
        none = [0] * len(ADDRESSES)
        stays = extras is not None and extras.stays
        return cls(
            function=machine.load(config).function,
            grid=(min(launch.grid, machine.multiprocessors) if stays else launch.grid,),
            threads=(config.threads,),
            shared_bytes=config.shared_bytes,
            record=pack_call(none, values) + launch.record[CALL_BYTES:],
            hidden=launch.hidden,
            extras=extras,
            behind=b"" if extras is None else b"".join(extras.records(none, values, 0)),
        )

    def ready(self, pointer: type) -> tuple[Any, ...]:
        """What one launch at a time takes, with memory of its own for record, maps and what is behind them."""
        maps = bytes(0 if self.extras is None else MAP_BYTES * len(self.extras.forms))
        memory = [bytearray(x) for x in (self.record, maps, self.behind)]
        args = tuple(pointer(np.frombuffer(x, np.uint8).ctypes.data) for x in memory if x)
        launch = (self.function, self.grid, self.threads, args, self.shared_bytes)
        record, *behind = (memoryview(x) for x in memory)
        return (*launch, record, self.hidden, self.extras, *behind)


@dataclass(slots=True, eq=False)
class Call:
    """One form of call: its kernels and their grids, and their records but for what each call brings."""

    machine: Gpu
    launches: tuple[_Prepared, ...]
    results: tuple[tuple[Any, ...], ...]  # what `_made` gives
    given: Callable[[list[Any]], Any]  # from the results to what the caller gets
    lasting: slice  # of the results: what a vjp may be all that holds
    workspace: tuple[tuple[int, int], ...]  # index of an address in the record, offset of the array there
    workspace_bytes: int
    dropout: bool
    units: tuple[tuple[int, int], ...]  # index of an address in the record, and what it must be a multiple of
    get_device: Callable[[], int]
    ndarray: type
    allocate: Callable[[int], Any]
    pointer: type
    free: list[Any] = field(default_factory=list)  # launches whose memory no thread is using

    @classmethod
    def of_forward(cls, machine: Gpu, problem: Problem, return_lse: bool) -> Call | None:
        """The call of a problem; None where it takes copies of its arrays."""
        p, arrays, skip = problem, tensors(problem), 1 if problem.squeeze else 0
        results = result_layouts(p)
        if not return_lse:
            del results["lse"]
        family, _ = choose_family(p, machine.compute_capability)
        found = layouts(arrays) | results
        if not _as_they_are(machine, p, family, arrays, found):
            return None
        recipe = forward_recipe(family.name, machine.compute_capability, Sizes.of(p), tuple(found.items()))
        made = tuple(_made(name, x, skip) for name, x in results.items())
        given = itemgetter(0, 1) if return_lse else itemgetter(0)
        return cls._of(machine, p, recipe, made, given, slice(1, 2), _units(arrays, family, p))

    @classmethod
    def of_backward(cls, machine: Gpu, request: BackwardRequest) -> Call | None:
        """The call of a request without arrays to write to; None where it takes copies of its arrays."""
        p, wrt = request.problem, request.wrt
        if request.dout.dtype != p.dtype:
            return None  # before anything is copied: a graph would record it
        arrays = tensors(p) | cotangents(request)
        results = gradient_layouts(p, wrt)
        family, _ = choose_family(p, machine.compute_capability, backward=True)
        found = layouts(arrays) | results
        if not _as_they_are(machine, p, family, arrays, found, request.dout):
            return None
        recipe = backward_recipe(
            family.name,
            machine.compute_capability,
            Sizes.of(p),
            tuple(found.items()),
            frozenset(name[1:] for name in results),
            False,
        )
        made = tuple(_made(GRADIENTS[name], results[GRADIENTS[name]], name in p.two_d) for name in wrt)

        def given(gradients: list[Any]) -> Gradients:  # which must not hold the request's arrays
            return Gradients(**dict(zip(wrt, gradients)))

        return cls._of(machine, p, recipe, made, given, slice(0), _units(arrays, family, p, request.dout))

    @classmethod
    def _of(
        cls,
        machine: Gpu,
        problem: Problem,
        recipe: Recipe,
        results: tuple[tuple[Any, ...], ...],
        given: Callable[[list[Any]], Any],
        lasting: slice,
        units: tuple[tuple[int, int], ...],
    ) -> Call | None:
        if not recipe.launches:
            return None
        cuda = machine.xp.cuda
        return cls(
            machine=machine,
            launches=tuple(_Prepared.of(launch, machine, problem) for launch in recipe.launches),
            results=results,
            given=given,
            lasting=lasting,
            workspace=tuple((ADDRESSES.index(name), offset) for name, offset in recipe.workspace),
            workspace_bytes=recipe.workspace_bytes,
            dropout=problem.dropout is not None,
            units=units,
            get_device=cuda.runtime.getDevice,
            ndarray=machine.xp.ndarray,
            allocate=cuda.alloc,
            pointer=cuda.function.CPointer,
        )

    def __call__(self, row: list[int], random: list[int]) -> Any:
        """What the caller gets for the arrays at the addresses in ``row``; None where one is misaligned.

        ``row`` has the addresses of the record, 0 for what is made here and what is absent; it is changed.
        ``random`` has dropout's seed and offset, 0 where they are on the device.
        """
        if self.get_device() != self.machine.device:
            with self.machine.current():
                return self(row, random)
        for place, unit in self.units:
            if row[place] % unit:
                return None
        results: list[Any] = []
        for place, shape, dtype, nbytes, strides in self.results:
            memory = self.allocate(nbytes)
            row[place] = memory.ptr
            results.append(self.ndarray(shape, dtype, memory, strides))
        lasting = results[self.lasting]
        if self.workspace:
            memory = self.allocate(self.workspace_bytes)
            lasting.append(memory)  # if only until the launches are on their way
            for place, offset in self.workspace:
                row[place] = memory.ptr + offset
        if lasting:
            self.machine.keep_for_graph(*lasting)
        try:
            slot = self.free.pop()
        except IndexError:
            slot = [launch.ready(self.pointer) for launch in self.launches]
        addresses = _ADDRESSES.pack(*row)
        for function, grid, threads, args, shared_bytes, record, hidden, extras, maps, behind in slot:
            record[: _ADDRESSES.size] = addresses
            for place in hidden:
                _ADDRESS.pack_into(record, _ADDRESS.size * place, 0)
            if self.dropout:
                _RANDOM.pack_into(record, _RANDOM_AT, *random)
            if extras is not None:
                maps[:] = extras.maps(row)
                if extras.counts:
                    _ADDRESS.pack_into(behind, 0, self.machine.counter())
            function(grid, threads, args, shared_bytes)
        self.free.append(slot)  # the driver has copied the records
        return self.given(results)


def _as_they_are(
    machine: Gpu,
    problem: Problem,
    family: Family,
    arrays: dict[str, Any],
    found: dict[str, Layout],
    dout: Any = None,
) -> bool:
    """Whether a call's kernels read its arrays in place; with dout those of a backward."""
    return (
        fits(Sizes.of(problem), found, family.lead_axes)
        and all(map(machine.owns, arrays.values()))
        and not (family.arch_suffix and sm90_launch.copies(problem, dout))
    )


def _units(
    arrays: dict[str, Any], family: Family, problem: Problem, dout: Any = None
) -> tuple[tuple[int, int], ...]:
    """For each array whose address can be too odd: its index in the record, and what the address must divide by."""
    units = {name: x.dtype.itemsize for name, x in arrays.items()}
    if family.arch_suffix:
        units |= sm90_launch.address_units(problem, dout)
    return tuple((ADDRESSES.index(name), unit) for name, unit in units.items() if unit > 1)


def _made(name: str, layout: Layout, skip: int) -> tuple[Any, ...]:
    """An array to make, without its first axes: index in the record, shape, dtype, bytes and strides."""
    index = ADDRESSES.index(name)
    return index, layout.shape[skip:], layout.dtype, layout_bytes(layout), layout.strides[skip:]
