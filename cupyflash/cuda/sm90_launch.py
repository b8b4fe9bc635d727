"""What a Hopper launch takes besides the record, and copies of what its kernels cannot read in place."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..arrays import array_module, is_device
from .params import ADDRESSES, NUMBERS, UNBOUNDED, Layout, c_strides
from .sm90 import Geometry
from .tensormap import ALIGNMENT, MAP_BYTES, Form, form_of, maps_of

if TYPE_CHECKING:
    from .configs import Config
    from .recipe import Sizes

# kernels_cu/sm90/work.cuh: counter, scale, unit, tiles, query_tiles, heads, group, out_by_tma, cap, cap_limit,
# items.
_LAUNCH = struct.Struct("=Q2f5i4fi")
LAUNCH_BYTES = _LAUNCH.size
MAPS_BYTES = 6 * MAP_BYTES
_OUT = 3  # q, k, v and out are the first addresses of the record
_MAPPED = tuple(map(ADDRESSES.index, ("q", "k", "v", "out", "bias", "mask")))
_SCALE, _SOFTCAP, _RIGHT = (NUMBERS.index(name) for name in ("scale", "softcap", "right"))
_LOG2E = np.float32(1.4426950408889634)
_HALF_OF_L2 = 32e6  # bytes: keys and values of the heads that are walked side by side
# tanh(x) is x (c0 + c1 u + c2 u^2), u = x^2 - _NEAR^2, within 2^-22 of itself up to _NEAR.
_NEAR, _NEAR_TANH = 0.2, (0.98687669, -0.32287357, 0.13015409)
_PLAIN_SCALES = (2.0**-60, 2.0**60)


def plain_scale(scale: float) -> bool:
    """Whether scores may stay raw products: -inf survives such a scale, and nothing leaves float32's range."""
    return _PLAIN_SCALES[0] <= scale <= _PLAIN_SCALES[1]


@functools.lru_cache
def cap_polynomial(scale: float, softcap: float) -> tuple[float, ...]:
    """(c0, c1, c2, limit): softcap * tanh(scale * s / softcap), in base 2, is s (c0 + c1 u + c2 u^2).

    u is s^2 - limit; it holds within 2^-22 of itself for u < 0, or nowhere if the limit is negative.
    """
    ratio, unit = scale / softcap if softcap > 0.0 else 0.0, scale * float(_LOG2E)
    square = ratio * ratio
    factors = tuple(c * unit * x for c, x in zip(_NEAR_TANH, (1.0, square, square * square)))
    limit = _NEAR**2 / square if square > 0.0 else math.inf
    in_range = all(abs(x) < 1e38 for x in (*factors, limit))  # of float32
    holds = in_range and abs(factors[2]) > 1e-33
    return (*factors, limit) if holds else (0.0, 0.0, 0.0, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Extras:
    """The second and third argument of a launch, but for what each call brings."""

    # Of q, k, v, out, bias and mask; None: no map (no keys; an out that TMA does not take).
    forms: tuple[Form | None, ...]
    query_tiles: int
    heads: int
    head_bytes: float  # keys and values for one query head
    natural: bool  # scores are kept in natural units
    items: int = 1  # walked side by side, for they share a bias
    stays: ClassVar[bool] = True  # blocks stay: a launch has no more than multiprocessors
    counts: ClassVar[bool] = True  # the launch record begins with the address of a counter

    @classmethod
    def of(cls, config: Config, sizes: Sizes, layouts: Mapping[str, Layout], record: np.ndarray) -> Extras:
        """For a launch with that record, which has at most two leading axes."""
        g, s = config.geometry, sizes
        assert g is not None
        tensors = {
            "q": (s.head_dim, s.seqlen_q, s.heads_q, g.block_q),
            "k": (s.head_dim, s.seqlen_k, s.heads_kv, g.block_kv),
            "v": (s.head_dim_v, s.seqlen_k, s.heads_kv, g.block_kv),
            "out": (s.head_dim_v, s.seqlen_q, s.heads_q, 16),
        }
        forms = [
            form_of(record, name, s.dtype.name, lengths, (64, box))
            if layouts[name].dtype == s.dtype
            else None
            for name, (*lengths, box) in tensors.items()
        ]
        forms += [_addend_form(config, s, layouts.get(name), record, name) for name in ("bias", "mask")]
        head_bytes = s.seqlen_k * (s.head_dim + s.head_dim_v) * s.dtype.itemsize * s.heads_kv / s.heads_q
        query_tiles = -(-s.seqlen_q // g.block_q)
        items = s.batch if _shared_by_items(layouts.get("bias"), s) else 1
        return cls(tuple(forms), query_tiles, s.batch * s.heads_q, head_bytes, any(s.options[:2]), items)

    def maps(self, addresses: Sequence[int]) -> bytes:
        """The maps, from the record's addresses."""
        return maps_of(self.forms, [addresses[place] for place in _MAPPED])

    def records(self, addresses: Sequence[int], numbers: Sequence[float], counter: int) -> tuple[bytes, ...]:
        """The launch record, from the record's addresses and numbers."""
        scale = np.float32(numbers[_SCALE])
        unit = _LOG2E if self.natural else scale * _LOG2E
        together = self.heads if numbers[_RIGHT] < UNBOUNDED else self.items  # query tiles of many lengths
        fit = 2 ** int(math.log2(max(1.0, _HALF_OF_L2 / max(1.0, self.head_bytes))))
        group = max(1, min(together, fit))
        by_tma = self.forms[_OUT] is not None and addresses[_OUT] % ALIGNMENT == 0
        counts = (self.query_tiles * self.heads, self.query_tiles, self.heads, group)
        cap = cap_polynomial(float(scale), numbers[_SOFTCAP])
        return (_LAUNCH.pack(counter, scale, unit, *counts, by_tma, *cap, self.items),)


def _addend_form(
    config: Config, s: Sizes, layout: Layout | None, record: np.ndarray, name: str
) -> Form | None:
    """The form of a bias or mask, seen as an array of 16-bit words; None where it is read as one column."""
    g, entry = config.geometry, record[name]
    assert isinstance(g, Geometry)
    if layout is None or not entry["col"]:
        return None
    size, lead = layout.dtype.itemsize, record["lead"][:-3:-1].tolist()
    sizes = [-(-s.seqlen_k * size // 2), s.seqlen_q, s.heads_q, *lead]
    steps = [int(entry["row"]), int(entry["head"]), *entry["lead"][:-3:-1].tolist()]
    box = (g.addend_boxes[size] // 2, 64)
    return None if 0 in sizes else Form("float16", sizes, [1, *(step * size // 2 for step in steps)], box)


def _shared_by_items(bias: Layout | None, sizes: Sizes) -> bool:
    """Whether all items have the same bias, and heads have their own."""
    if bias is None:
        return False
    *lead, head, _, _ = bias.broadcast((*sizes.lead, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k))
    return head != 0 and not any(lead)


class Copy(NamedTuple):
    """How an operand is copied: its layout then, and its rows' length with padding, in elements."""

    layout: Layout
    row: int

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return math.prod(self.layout.shape[:-1]) * self.row * self.layout.dtype.itemsize


def copies(problem: Any, dout: Any = None) -> dict[str, Copy]:
    """The operands that the kernel cannot read in place, and how they are copied: with rows padded to whole units.

    They are those of `_in_units` that lie otherwise or have another dtype. With dout, an array or its layout, those
    of a backward.
    """
    return {
        name: _copy(x, multiple, dtype)
        for name, (x, multiple, dtype) in _in_units(problem, dout).items()
        if x.dtype != dtype or not _whole(x, multiple)
    }


def address_units(problem: Any, dout: Any = None) -> dict[str, int]:
    """What addresses of operands must be multiples of, in bytes, if they are to be read in place."""
    return {
        name: multiple * dtype.itemsize for name, (_, multiple, dtype) in _in_units(problem, dout).items()
    }


def _in_units(problem: Any, dout: Any) -> dict[str, tuple[Any, int, np.dtype[Any]]]:
    """The operands that are read several elements at a time: how many, and of which dtype.

    They are q, k, v and dout of 16 bits, by TMA, and a mask or bias of more than one column, in pairs (beside q of 16
    bits: 16 bytes at a time), the bias in q's dtype or float32; in the backward of float32 only a bias of another
    dtype.
    """
    p, forward, single = problem, dout is None, np.dtype(np.float32)
    halves = p.dtype.itemsize == 2
    found: dict[str, tuple[Any, int, np.dtype[Any]]] = {}
    if halves:
        by_tma = {"q": p.q, "k": p.k, "v": p.v} | ({} if forward else {"dout": dout})
        found |= {name: (x, ALIGNMENT // p.dtype.itemsize, p.dtype) for name, x in by_tma.items()}
    if (forward or halves) and p.mask is not None and not _one_column(p.mask):
        found["mask"] = (p.mask, ALIGNMENT if halves else 2, p.mask.dtype)
    if (forward or halves) and p.bias is not None and not _one_column(p.bias):
        dtype = p.bias.dtype if p.bias.dtype in (p.dtype, single) else single
        found["bias"] = (p.bias, ALIGNMENT // dtype.itemsize if halves else 2, dtype)
    if not forward and p.bias is not None and p.dtype == single != p.bias.dtype:
        found["bias"] = (p.bias, 2, single)
    return found


def readable(problem: Any, dout: Any = None) -> dict[str, Any]:
    """The copies themselves, by name."""
    made = {}
    for name, ((shape, _, dtype), row) in copies(problem, dout).items():
        x = dout if name == "dout" else getattr(problem, name)
        made[name] = array_module(x).empty((*shape[:-1], row), dtype)[..., : shape[-1]]
        made[name][...] = x
    return made


def _one_column(x: Any) -> bool:
    """Whether all columns of a mask or bias are the same number: it is read as one."""
    return x.ndim == 0 or x.shape[-1] == 1 or Layout.of(x).strides[-1] == 0


def _whole(x: Any, multiple: int) -> bool:
    """Whether an array's last axis is contiguous and all else lies at multiples of so many elements."""
    layout, unit = Layout.of(x), multiple * x.dtype.itemsize
    outer = [s for n, s in zip(layout.shape[:-1], layout.strides[:-1]) if n > 1]
    address = x.data.ptr if is_device(x) else 0  # what is only planned has none
    contiguous = layout.shape[-1] <= 1 or layout.strides[-1] == x.dtype.itemsize
    return contiguous and all(s % unit == 0 and s >= 0 for s in outer) and address % unit == 0


def _copy(x: Any, multiple: int, dtype: np.dtype[Any]) -> Copy:
    *outer, cols = shape = tuple(x.shape) or (1,)
    row = -(-cols // multiple) * multiple
    return Copy(Layout(shape, c_strides((*outer, row), dtype.itemsize), dtype), row)
