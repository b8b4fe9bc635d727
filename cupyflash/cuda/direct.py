"""A form of call on CuPy arrays that is ready to launch: all of its recipe and records but what each call brings."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..problem import Problem
from . import sm90_launch
from .families import Family, choose_family
from .launch import fits
from .machine import Gpu
from .operands import layout_bytes, layout_in_order, layouts, numbers, tensors
from .params import ADDRESSES, CALL_BYTES, NUMBERS, Layout, pack_call
from .recipe import Sizes, forward_recipe
from .sm90_launch import Extras
from .tensormap import ALIGNMENT

# Addresses of a forward's arguments and results: the record's first.
GIVEN = ADDRESSES.index("dropout_offset") + 1
_ADDRESSES = struct.Struct(f"={GIVEN}Q")
_ADDRESS = struct.Struct("=Q")
_COUNTER = struct.Struct("=Q")  # the head of the launch record
_RANDOM = struct.Struct("=2Q")
_RANDOM_AT = 8 * (len(ADDRESSES) + NUMBERS.index("dropout_seed_value"))


@dataclass(slots=True, eq=False)
class Call:
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
    def of(cls, machine: Gpu, problem: Problem, return_lse: bool) -> Call | None:
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
        """The results for the arrays at the addresses in ``row``; None where one is misaligned.

        ``row`` has the first `GIVEN` addresses of the record, 0 for results and absent arrays; it is changed.
        ``random`` has dropout's seed and offset, 0 where they are on the device.
        """
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
            row.extend([0] * (len(ADDRESSES) - GIVEN))
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
    """What `Call._empty` takes."""
    return layout.shape[skip:], layout.dtype, layout_bytes(layout), layout.strides[skip:]
