"""Configs: one for each kernel that can be compiled, and the choice among the rows of the families' tables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import (
    simt,
    sm80,
    sm80_runs,
    sm80_wide,
    sm90,
    sm90_backward,
    sm90_backward_q,
    sm90_wide,
    sm90_wide_backward,
    source,
)
from .families import FAMILIES, family_of

Geometry = (
    simt.Geometry
    | sm80.Geometry
    | sm80_wide.Geometry
    | sm90.Geometry
    | sm90_backward.Geometry
    | sm90_backward_q.Geometry
    | sm90_wide.Geometry
    | sm90_wide_backward.Geometry
)

# The options that are compile-time, as in Config.options: what changes the inner loop. Everything else (positions,
# lengths, sinks, the exact head dims, strides) is run-time.
OPTION_BITS = ("kMaskOrBias", "kSoftcapOrAlibi", "kDropout")
OPTION_WORDS = ("mask|bias", "softcap|alibi", "dropout")
ATTENTION_KERNELS = (
    "forward",
    "decode",
    "backward",
    "backward_q",
    "backward_kv",
    "backward_bias",
    "backward_addends",
)
PREPOST = "prepost"  # what stands before and after the attention kernels of any family
# Which of them run beside the kernels of any family, and beside whose.
_ANY = ("delta", "sum_partials", "sum_rows")
_ROWS = ("row_stats", "finish_queries")
_BESIDE = {
    "sm80": (*_ANY, "combine", *_ROWS, "clear_sums"),
    "sm90": (*_ANY, *_ROWS),
    "sm90_wide": (*_ANY, "split", "split_all"),
}
PREPOST_KERNELS = frozenset(itertools.chain(_ANY, *_BESIDE.values()))
PREPOST_THREADS = 256
ELEMENTS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
# By family -> geometries. Keys: (kernel, bytes of the score type), also with the options, also with the architecture.
TABLES: dict[str, dict[Any, tuple[Any, ...]]] = {
    "sm90": sm90.TABLE | sm90_backward.TABLE | sm90_backward_q.TABLE,
    "sm90_wide": sm90_wide.TABLE | sm90_wide_backward.TABLE,
    "sm80": sm80.TABLE,
    "sm80_wide": sm80_wide.TABLE,
    "simt": simt.TABLE,
}
_WITH_WGMMA = (
    sm90.Geometry
    | sm90_backward.Geometry
    | sm90_backward_q.Geometry
    | sm90_wide.Geometry
    | sm90_wide_backward.Geometry
)
_NEXT = {"sm90_wide": "sm80_wide", "sm80_wide": "simt"}
WIDER_THAN_ANY = 2**30  # a head dim beyond every bucket
# KiB of shared memory that a block may have, by the least compute capability it holds from.
SHARED_LIMITS = {60: 48, 70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Config:
    """One kernel: all that its source depends on. Its text is its name in tests, benches and logs."""

    family: str
    kernel: str
    dtype: str
    geometry: Geometry | None = None  # None before and after the attention kernels proper
    options: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.geometry is None:
            return
        broken = self.geometry.broken_rules(self.kernel, self.score_bytes)
        if len(self.options) != len(OPTION_BITS):
            broken.append(f"options = {self.options} must have {len(OPTION_BITS)} bits")
        if broken:
            raise ValueError(f"the config '{self}' is invalid: {'; '.join(broken)}")

    def __str__(self) -> str:
        words = [self.family, self.kernel, self.dtype]
        words += [str(self.geometry)] if self.geometry else []
        words += [word for word, on in zip(OPTION_WORDS, self.options) if on]
        return " ".join(words)

    @property
    def file(self) -> str:
        """The entry file, relative to ``kernels_cu``."""
        return f"{self.family}/{self.kernel}.cu"

    @property
    def entry_point(self) -> str:
        """The kernel's symbol."""
        return f"cupyflash_{self.kernel}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.geometry.threads if self.geometry else PREPOST_THREADS

    @property
    def score_bytes(self) -> int:
        """Size of the type that scores and sums have."""
        return 8 if self.dtype == "float64" else 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        if self.geometry:
            return self.geometry.shared_bytes(self.kernel, self.score_bytes)
        return PREPOST_THREADS // 32 * self.score_bytes if self.kernel == "sum_rows" else 0

    def arch(self, cc: int) -> str:
        """The architecture to compile for on a device of that compute capability."""
        return str(cc) if self.family == PREPOST else family_of(self.family).arch(cc)

    def block(self) -> str:
        """The typed constants that stand ahead of the source."""
        lines = [
            f"// {self}",
            "struct float16; struct bfloat16;",
            f"using Element = {ELEMENTS[self.dtype]};",
            f"using Score = {'double' if self.dtype == 'float64' else 'float'};",
        ]
        if self.geometry:
            constants = self.geometry.constants() | {"kSharedBytes": self.shared_bytes}
            constants |= dict(zip(OPTION_BITS, self.options))
            lines += [_constant(name, value) for name, value in constants.items()]
        if isinstance(self.geometry, _WITH_WGMMA):
            lines.append(self.geometry.wrappers(self.dtype))
        return "\n".join(lines)

    def source(self, *, emulate: bool = False) -> str:
        """The whole CUDA source."""
        return source.assemble(self.file, self.block(), emulate=emulate)


def _constant(name: str, value: int | bool) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"


def shared_limit(cc: int) -> int:
    """Bytes of shared memory that a block may have."""
    return 1024 * SHARED_LIMITS[_known(cc)]


def _known(cc: int) -> int:
    """The newest compute capability that we know and that is not newer."""
    return max(known for known in SHARED_LIMITS if known <= cc)


@functools.cache
def choose(
    family: str,
    kernel: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    options: tuple[bool, ...],
    cc: int,
    precision: str | None = None,
) -> Config:
    """The config that runs a kernel for these head dims on a device of that compute capability.

    Of the rows that fit its shared memory: the first in the smallest bucket that holds both head dims, else the first
    in the largest. What the rows of sm90_wide do not hold, sm80_wide runs, and what its rows do not hold, simt.
    """
    if kernel in PREPOST_KERNELS:
        return Config(PREPOST, kernel, dtype)
    if kernel == "decode":
        options = (any(options),) * len(options)  # its time goes to reading keys: one kernel has all of them
    fitting = _fitting(family, kernel, dtype, options, cc)
    widest = max((row.head_dim for row in fitting), default=0)
    if family in _NEXT and widest < max(head_dim, head_dim_v):
        return choose(_NEXT[family], kernel, dtype, head_dim, head_dim_v, options, cc, precision)
    need = min(max(head_dim, head_dim_v), widest)
    need_v = min(head_dim_v, need)
    row = next(row for row in fitting if row.head_dim >= need and row.head_dim_v >= need_v)
    geometry = row.for_dims(kernel, head_dim, head_dim_v)
    if precision is not None and isinstance(geometry, sm80_wide.Geometry):
        geometry = geometry.for_precision(precision)
    return Config(family, kernel, dtype, geometry, options)


def _fitting(family: str, kernel: str, dtype: str, options: tuple[bool, ...], cc: int) -> list[Any]:
    """The rows that fit the shared memory of a device, from small head dims to large."""
    key = (kernel, 8 if dtype == "float64" else 4)
    table = TABLES[family]
    rows = table.get((*key, options, _known(cc))) or table.get((*key, options)) or table.get(key, ())
    return [
        row
        for row in sorted(rows, key=lambda row: row.head_dim)
        if row.shared_bytes(*key) <= shared_limit(cc)
    ]


def in_one_kernel(family: str, dtype: str, head_dim: int, options: tuple[bool, ...], cc: int) -> bool:
    """Whether a family has a kernel for dq, dk and dv together at that head dim."""
    if family == "simt" and dtype != "float32":  # dq is summed where it stays, which would round 16 bits
        return False
    return any(row.head_dim >= head_dim for row in _fitting(family, "backward", dtype, options, cc))


def kernels_of(family: str) -> tuple[str, ...]:
    """The attention kernels that a family has."""
    return tuple(kernel for kernel in ATTENTION_KERNELS if any(key[0] == kernel for key in TABLES[family]))


def prepost_kernels_of(family: str) -> tuple[str, ...]:
    """The kernels that run before or after those of a family."""
    return _BESIDE.get(family, _ANY)


def in_runs(config: Config) -> Config:
    """The form of a forward whose keys are cut into runs."""
    if not isinstance(config.geometry, sm80.Geometry) or config.kernel != "forward":
        return config
    return replace(config, geometry=sm80_runs.cut(config.geometry))


def decode_forms(config: Config) -> tuple[Config, ...]:
    """The forms of a decode."""
    if not isinstance(config.geometry, sm80.Geometry) or config.kernel != "decode":
        return ()
    forms = sm80_runs.decode_forms(config.geometry, not any(config.options))
    return tuple(replace(config, geometry=form) for form in forms.values())


def for_few_blocks(config: Config) -> Config:
    """The form of a forward that would have few blocks."""
    if not isinstance(config.geometry, simt.Geometry) or config.kernel != "forward":
        return config
    return replace(config, geometry=simt.halved(config.geometry))


def unordered(config: Config) -> Config:
    """The form of a backward that adds to dq in no order."""
    if not isinstance(config.geometry, sm80.Geometry) or config.kernel != "backward":
        return config
    return replace(config, geometry=config.geometry._replace(ordered=False))


def all_configs(cc: int | None = None) -> Iterator[Config]:
    """Every config that `choose` can return, for one compute capability or for all."""
    ccs = sorted(SHARED_LIMITS) if cc is None else [cc]
    bits = list(itertools.product((False, True), repeat=len(OPTION_BITS)))
    seen: dict[Config, None] = {}
    for family, one in itertools.product(FAMILIES, ccs):
        if not family.least_cc <= one <= family.most_cc:
            continue
        buckets = {(row.head_dim, row.head_dim_v) for rows in TABLES[family.name].values() for row in rows}
        wider = [] if family.most_head_dim else [(WIDER_THAN_ANY, WIDER_THAN_ANY)]
        kernels = (*kernels_of(family.name), *prepost_kernels_of(family.name))
        dtypes = [dtype for dtype in family.dtypes if family.takes(dtype, one)]
        for dtype, kernel in itertools.product(dtypes, kernels):
            for dims, options in itertools.product([*sorted(buckets), *wider], bits):
                if kernel == "backward" and not in_one_kernel(family.name, dtype, max(dims), options, one):
                    continue
                config = choose(family.name, kernel, dtype, *dims, options, one)
                precisions = family.precisions if dtype == "float32" else ()
                forms = [choose(family.name, kernel, dtype, *dims, options, one, x) for x in precisions]
                forms += [in_runs(config), for_few_blocks(config), unordered(config), *decode_forms(config)]
                seen |= dict.fromkeys([config, *forms])
    yield from seen


def one_per_family() -> list[Config]:
    """One config of each family: the forward with every option."""
    options = (True,) * len(OPTION_BITS)
    return [choose(f.name, "forward", f.dtypes[0], 64, 64, options, f.least_cc) for f in FAMILIES]
