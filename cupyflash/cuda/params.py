"""The kernels' argument record: a NumPy structured dtype that mirrors ``kernels_cu/attn/params.cuh`` byte for byte.

A record has two parts. ``build_record`` fills what a plan fixes (strides, sizes, kinds) once; ``pack_call``
makes the bytes of what every call brings anew (addresses and numbers), which are then written over the first
``CALL_BYTES`` of a copy of the record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .recipe import Sizes

LEAD_AXES = 4
UNBOUNDED = 2**61  # kernels_cu/attn/mask.cuh: twice the farthest offset
MOST = 2**31 - 2**12  # of anything counted in 32 bits, so that a tile's end is too
KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}

ADDRESSES = (
    *("q", "k", "v", "out", "lse", "mask", "bias", "sinks", "slopes"),
    *("q_length", "kv_length", "query_offset", "dropout_t", "dropout_seed", "dropout_offset"),
    *("dout", "dlse", "delta", "row_delta", "slope_rows", "partials"),
    *("row_stats", "dq_sums", "turns"),
    *("q_planes", "k_planes", "v_planes", "dout_planes"),
    *("dq", "dk", "dv", "dbias", "dsinks", "dslopes"),
)
_NUMBERS = (
    *(("scale", "d"), ("softcap", "d")),
    *((f"{name}_value", "q") for name in ("q_length", "kv_length", "query_offset", "dropout_t")),
    *(("dropout_seed_value", "Q"), ("dropout_offset_value", "Q"), ("left", "q"), ("right", "q")),
    *((f"dropout_{name}", "q") for name in ("origin_i", "origin_j", "threshold")),
)
NUMBERS = tuple(name for name, _ in _NUMBERS)
_CALL = struct.Struct(f"={len(ADDRESSES)}Q" + "".join(code for _, code in _NUMBERS))
CALL_BYTES = _CALL.size

MATRICES = (
    *("q", "k", "v", "out", "lse", "mask", "bias", "dout", "dlse", "delta", "dq", "dk", "dv", "dbias"),
    *("k_planes", "v_planes"),
)
VECTORS = ("sinks", "slopes", "dsinks", "dslopes")
INTEGERS = ("q_length", "kv_length", "query_offset", "dropout_t", "dropout_seed", "dropout_offset")
_KINDS = ("out", "bias", "sinks", "slopes", "dq", "dk", "dv", "dbias", "dsinks", "dslopes")
_ROWS = frozenset({"lse", "dlse", "delta"})  # (*lead, heads, rows)

_STRIDES = np.dtype([("lead", "i8", LEAD_AXES), ("head", "i8"), ("row", "i8"), ("col", "i8")])
_INTEGER = np.dtype([("lead", "i8", LEAD_AXES), ("head", "i8"), ("bytes", "i8")])
_CALL_DTYPE = np.dtype(
    [(name, "u8") for name in ADDRESSES]
    + [(name, {"d": "f8", "q": "i8", "Q": "u8"}[c]) for name, c in _NUMBERS]
)
RECORD = np.dtype(
    [("call", _CALL_DTYPE)]
    + [(name, _STRIDES) for name in (*MATRICES, *VECTORS)]
    + [(name, _INTEGER) for name in INTEGERS]
    + [(name, "i4", LEAD_AXES) for name in ("lead", "own", "loop")]
    + [(name, "i4") for name in ("heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")]
    + [(name, "i4") for name in ("own_heads", "own_rows", "own_cols", "splits", "bottom_right", "accumulate")]
    + [(f"{name}_kind", "i4") for name in _KINDS]
)


class Layout(NamedTuple):
    """Shape, strides in bytes, and dtype of an array in its own shape, before any broadcasting."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: Any) -> Layout:
        """Layout of an array; C order where it has no strides of its own."""
        dtype = np.dtype(array.dtype)
        strides = getattr(array, "strides", None)
        return cls(
            tuple(array.shape), tuple(strides) if strides else c_strides(array.shape, dtype.itemsize), dtype
        )

    def expressible(self) -> bool:
        """Whether every stride is a whole number of elements, as the record needs."""
        return all(
            s % self.dtype.itemsize == 0 for n, s in zip(self.shape, self.strides, strict=True) if n > 1
        )

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides in elements of this array broadcast to `shape`: 0 on axes that it lacks or repeats."""
        missing = len(shape) - len(self.shape)
        own = [
            0 if n == 1 else s // self.dtype.itemsize for n, s in zip(self.shape, self.strides, strict=True)
        ]
        return (*(0,) * missing, *own)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-ordered array."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def collapse(lead: Sequence[int], columns: Iterable[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge adjacent leading axes that every tensor steps through as one.

    `columns` are the tensors' strides over `lead`. Axes of length 1 go. Returns the sizes and the strides by axis.
    """
    table = list(columns)
    sizes: list[int] = []
    rows: list[list[int]] = []
    for axis, size in enumerate(lead):
        if size == 1:
            continue
        row = [column[axis] for column in table]
        if sizes and all(outer == inner * size for outer, inner in zip(rows[-1], row, strict=True)):
            sizes[-1] *= size
            rows[-1] = row
        else:
            sizes.append(size)
            rows.append(row)
    return sizes, rows


def _tail(name: str, sizes: Sizes) -> tuple[int, ...]:
    """Lengths of the axes behind the leading ones of a tensor in full form."""
    if name in INTEGERS:
        return (sizes.heads_q,) if name == "dropout_t" else ()
    if name in VECTORS:
        return (sizes.heads_q,)
    m, n, d, e = sizes.seqlen_q, sizes.seqlen_k, sizes.head_dim, sizes.head_dim_v
    tails = {"q": (m, d), "dq": (m, d), "k": (n, d), "dk": (n, d), "v": (n, e), "dv": (n, e)}
    tails |= {"out": (m, e), "dout": (m, e)}
    heads = sizes.heads_kv if name in {"k", "dk", "v", "dv", "k_planes", "v_planes"} else sizes.heads_q
    return (heads, m) if name in _ROWS else (heads, *tails.get(name, (m, n)))


def lead_axes(sizes: Sizes, layouts: Mapping[str, Layout]) -> int:
    """How many leading axes a record of these tensors needs; more than `LEAD_AXES` need copies."""
    full = [layout.broadcast((*sizes.lead, *_tail(name, sizes))) for name, layout in layouts.items()]
    return len(collapse(sizes.lead, full)[0])


def build_record(
    sizes: Sizes,
    layouts: Mapping[str, Layout],
    *,
    owner: str | None = None,
    splits: int = 1,
    accumulate: bool = False,
) -> np.ndarray:
    """Record (0-d array of dtype `RECORD`) of one launch, without its call part.

    Parameters
    ----------
    sizes : Sizes
        The sizes of the problem.
    layouts : mapping of str to Layout
        The tensors that the launch reads or writes, under the record's names, in their own shapes.
    owner : str, optional
        The gradient whose broadcast axes a block walks: dq, dk, dv, dbias, dsinks or dslopes. None: none is walked.
    splits : int
        A number of the launch's own: parts into which keys or the sums of a bias gradient are cut, heads that take
        turns at dq, rows of a query tile, or columns of dq's sums.
    accumulate : bool
        Whether gradients are added to what their arrays hold.
    """
    names = list(layouts)
    full = {name: layouts[name].broadcast((*sizes.lead, *_tail(name, sizes))) for name in names}
    lead, rows = collapse(sizes.lead, [full[name] for name in names])
    if len(lead) > LEAD_AXES:
        raise ValueError(f"{len(lead)} leading axes do not collapse to {LEAD_AXES}")
    pad = LEAD_AXES - len(lead)
    record = np.zeros((), RECORD)
    record["lead"] = record["own"] = [1] * pad + [_size(size, "a leading axis") for size in lead]
    record["loop"] = 1
    for column, name in enumerate(names):
        entry = record[name]
        tail = full[name][len(sizes.lead) :]
        entry["lead"] = [0] * pad + [row[column] for row in rows]
        for field, stride in zip(("head", "row", "col"), tail, strict=False):
            entry[field] = stride
        dtype = layouts[name].dtype
        if name in INTEGERS:
            entry["bytes"] = -dtype.itemsize if dtype.kind == "u" else dtype.itemsize
        elif name in _KINDS:
            record[f"{name}_kind"] = KINDS[dtype.name]
    if owner is not None:
        _set_owner(record, sizes, full[owner][len(sizes.lead) :], record[owner]["lead"])
    for field in ("heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        record[field] = _size(getattr(sizes, field), field)
    record["splits"], record["accumulate"], record["bottom_right"] = splits, accumulate, sizes.bottom_right
    return record


def _size(size: int, name: str) -> int:
    if size > MOST:
        raise ValueError(f"{name} = {size} is more than the {MOST} that a kernel counts to: give parts of it")
    return size


def _set_owner(record: np.ndarray, sizes: Sizes, tail: tuple[int, ...], lead_strides: np.ndarray) -> None:
    """Part the axes into those that a gradient keeps and those it is summed over."""
    lead = record["lead"].copy()
    record["own"] = np.where(lead_strides == 0, 1, lead)
    record["loop"] = np.where(lead_strides == 0, lead, 1)
    lengths = (sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k)
    for field, length, stride in zip(("own_heads", "own_rows", "own_cols"), lengths, tail, strict=False):
        record[field] = stride != 0 or length == 1


def pack_call(addresses: Sequence[int], numbers: Sequence[float]) -> bytes:
    """Bytes of the call part, from values in the order of `ADDRESSES` and of `NUMBERS`."""
    return _CALL.pack(*addresses, *numbers)
