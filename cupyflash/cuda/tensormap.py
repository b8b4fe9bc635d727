"""TMA descriptors (tensor maps) through the driver: one form a tensor's layout, one map an address.

A map is 128 bytes that the driver encodes from an address, sizes, strides and the box that one instruction moves.
Encoding needs libcuda but no context; what it is given is prepared once a form, and maps are kept by address.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MAP_BYTES = 128
RANK = 5
ALIGNMENT = 16  # of addresses and strides, in bytes
MOST_STRIDE = 2**40
# What encodes instead of the driver, with the arguments of its function.
ENCODER: contextvars.ContextVar[Any] = contextvars.ContextVar("encoder", default=None)
_MOST_MAPS = 64  # addresses a form remembers
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_ITEMSIZES = {6: 2, 7: 4, 9: 2}
_NO_INTERLEAVE, _PROMOTE_TO_256_BYTES, _FILL_WITH_ZEROS = 0, 3, 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a box's row


def takes(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA can address an array: sizes and strides (elements) from the contiguous axis outward.

    The address must be a multiple of 16 bytes besides.
    """
    steps = [stride * itemsize for size, stride in zip(sizes[1:], strides[1:]) if size > 1]
    contiguous = sizes[0] <= 1 or strides[0] == 1
    return contiguous and all(step % ALIGNMENT == 0 and 0 <= step < MOST_STRIDE for step in steps)


class Form:
    """All of a map but the address.

    Parameters
    ----------
    dtype : str
        float16, bfloat16 or float32.
    sizes, strides : sequence of int
        Of up to five axes from the contiguous one outward; strides in elements, that of the first is not used.
    box : sequence of int
        Elements along the first two axes that one instruction moves; 32, 64 or 128 bytes along the first.
    """

    def __init__(self, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: tuple[int, int]):
        itemsize = _ITEMSIZES[_DATA_TYPES[dtype]]
        missing = RANK - len(sizes)
        steps = [0 if n == 1 else s * itemsize for n, s in zip(sizes[1:], strides[1:])]
        self._maps: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
        self._place = -(-ctypes.addressof(self._buffer) // 64) * 64  # the driver wants 64-byte alignment
        self._arguments: tuple[Any, ...] = (
            (ctypes.c_uint64 * RANK)(*sizes, *(1,) * missing),
            (ctypes.c_uint64 * (RANK - 1))(*steps, *(0,) * missing),
            (ctypes.c_uint32 * RANK)(*box, *(1,) * (RANK - 2)),
            (ctypes.c_uint32 * RANK)(*(1,) * RANK),
            *(_NO_INTERLEAVE, _SWIZZLES[box[0] * itemsize], _PROMOTE_TO_256_BYTES, _FILL_WITH_ZEROS),
        )
        self._data_type = _DATA_TYPES[dtype]

    def map_of(self, address: int) -> bytes:
        """The map of an array at that address."""
        found = self._maps.get(address)
        return self._encode(address) if found is None else found

    def _encode(self, address: int) -> bytes:
        with self._lock:
            error = (ENCODER.get() or _encoder())(
                ctypes.c_void_p(self._place),
                self._data_type,
                RANK,
                ctypes.c_void_p(address),
                *self._arguments,
            )
            found = ctypes.string_at(self._place, MAP_BYTES)
            if error:
                sizes, strides = list(self._arguments[0]), list(self._arguments[1])
                raise RuntimeError(
                    f"cuTensorMapEncodeTiled gave error {error} for sizes {sizes}, "
                    f"strides {strides} bytes at {address:#x}"
                )
            if len(self._maps) >= _MOST_MAPS:
                del self._maps[next(iter(self._maps))]  # the oldest
            self._maps[address] = found
            return found


def form_of(
    record: np.ndarray, name: str, dtype: str, lengths: Sequence[int], box: tuple[int, int]
) -> Form | None:
    """The form of a record's tensor, which has at most two leading axes; None if it is empty or TMA does not take it.

    ``lengths`` are its columns, rows and heads.
    """
    entry = record[name]
    sizes = [*lengths, *record["lead"][:-3:-1].tolist()]
    strides = [int(entry[field]) for field in ("col", "row", "head")] + entry["lead"][:-3:-1].tolist()
    fine = 0 not in sizes and takes(sizes, strides, _ITEMSIZES[_DATA_TYPES[dtype]])
    return Form(dtype, sizes, strides, box) if fine else None


def maps_of(forms: Iterable[Form | None], addresses: Iterable[int]) -> bytes:
    """The maps of tensors at these addresses; zeros where there is no form, or an address that TMA does not take."""
    return b"".join(
        [
            bytes(MAP_BYTES) if form is None or address % ALIGNMENT else form.map_of(address)
            for form, address in zip(forms, addresses)
        ]
    )


def plain_map(
    place: ctypes.c_void_p,
    data_type: int,
    rank: int,
    address: ctypes.c_void_p,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *_: Any,
) -> int:
    """The map that kernels executed on the CPU read: address, sizes, strides, box and itemsize as they are."""
    itemsize = _ITEMSIZES[data_type]
    numbers = struct.pack("=10Q3I", address.value, *sizes, *strides, *list(box)[:2], itemsize)
    ctypes.memmove(place, numbers, len(numbers))
    return 0


@functools.cache
def _encoder() -> Any:
    """The driver's function."""
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
