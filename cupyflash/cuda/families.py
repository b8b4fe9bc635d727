"""Kernel families: one row each, fastest first, and the choice among them.

A later family is one more row here, a folder in ``kernels_cu`` and rows in `configs`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .device import too_old_for_suffixes
from .params import LEAD_AXES
from .sm80_runs import runs_of_keys

if TYPE_CHECKING:
    from ..problem import Problem

# A family to use instead of the fastest that takes the call; read once, when the backend is first used.
FORCED = os.environ.get("CUPYFLASH_FAMILY") or None


@dataclass(frozen=True)
class Family:
    """What a family runs on and takes.

    Attributes
    ----------
    name : str
        Also the folder of its sources.
    least_cc, most_cc : int
        Compute capabilities that it runs on, both included (most_cc 999: any later one).
    arch_suffix : str
        "a" where it needs instructions of that architecture alone.
    dtypes : tuple of str
        Element types of q, k and v.
    most_head_dim : int
        The largest d or e; 0 is any.
    precisions : tuple of str
        For float32: what it computes, its default first.
    float64_on : tuple of int
        The compute capabilities on which it takes float64; empty is all that it runs on.
    lead_axes : int
        How many leading axes that do not merge it takes in place.
    least_queries : int
        With fewer it takes only calls that ask for it by its name.
    """

    name: str
    least_cc: int
    most_cc: int
    arch_suffix: str
    dtypes: tuple[str, ...]
    most_head_dim: int
    precisions: tuple[str, ...]
    float64_on: tuple[int, ...] = ()
    lead_axes: int = LEAD_AXES
    least_queries: int = 0

    def arch(self, cc: int) -> str:
        """The architecture to compile for, as in sm_<arch>."""
        return f"{cc}{self.arch_suffix}"

    def takes(self, dtype: str, cc: int) -> bool:
        """Whether it takes that dtype on a device of that compute capability, if it runs there."""
        return dtype in self.dtypes and not (
            dtype == "float64" and self.float64_on and cc not in self.float64_on
        )

    def refusal(self, problem: Problem, cc: int, backward: bool = False) -> str | None:
        """Why it does not take a problem on a device of that compute capability; None where it does."""
        if not self.least_cc <= cc <= self.most_cc:
            return f"needs compute capability {_span(self.least_cc, self.most_cc)}, the device has {cc / 10}"
        if problem.dtype.name not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {problem.dtype.name}"
        if not self.takes(problem.dtype.name, cc):
            return f"takes float64 where tensor cores are fast at it, which {cc / 10} is not"
        if self.most_head_dim and max(problem.head_dim, problem.head_dim_v) > self.most_head_dim:
            return (
                f"takes head dims up to {self.most_head_dim}, got {problem.head_dim} and {problem.head_dim_v}"
            )
        if self.arch_suffix and problem.head_dim_v == 0:
            return "takes no values of no columns"
        if self.arch_suffix and (reason := too_old_for_suffixes()):
            return reason
        if self.name == "sm90" and backward and problem.seqlen_k == 0:
            return "has no backward without keys"
        if problem.precision not in (None, *self.precisions):
            return f"computes float32 as {' or '.join(self.precisions)}, not {problem.precision}"
        return None


FAMILIES = (
    Family(
        name="sm90",
        least_cc=90,
        most_cc=90,
        arch_suffix="a",
        dtypes=("float16", "bfloat16"),
        most_head_dim=256,
        precisions=(),
        lead_axes=2,
    ),
    Family(
        name="sm90_wide",
        least_cc=90,
        most_cc=90,
        arch_suffix="a",
        dtypes=("float32",),
        most_head_dim=128,
        precisions=("tf32x3",),
        lead_axes=2,
        least_queries=256,
    ),
    Family(
        name="sm80",
        least_cc=80,
        most_cc=999,
        arch_suffix="",
        dtypes=("float16", "bfloat16"),
        most_head_dim=256,
        precisions=(),
    ),
    Family(
        name="sm80_wide",
        least_cc=80,
        most_cc=999,
        arch_suffix="",
        dtypes=("float32", "float64"),
        most_head_dim=128,
        precisions=("tf32x3", "tf32"),
        float64_on=(80, 90, 100),
    ),
    Family(
        name="simt",
        least_cc=60,
        most_cc=999,
        arch_suffix="",
        dtypes=("float16", "bfloat16", "float32", "float64"),
        most_head_dim=0,
        precisions=("ieee",),
    ),
)


def family_of(name: str) -> Family:
    """The family of that name."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(f"family must be one of {', '.join(f.name for f in FAMILIES)}, got {name!r}")


def choose_family(
    problem: Problem, cc: int, forced: str | None = None, *, backward: bool = False
) -> tuple[Family, tuple[tuple[str, str], ...]]:
    """The family that runs a problem, and those passed over, each with its reason.

    ``forced`` (or the environment's CUPYFLASH_FAMILY) is an explicit request: if that family does not take the
    problem, this raises.
    """
    if wanted := forced or FORCED:
        family = family_of(wanted)
        if reason := family.refusal(problem, cc, backward):
            raise ValueError(f"the family {wanted!r} was asked for but does not take this call: it {reason}")
        return family, tuple(
            (other.name, f"{wanted} was asked for") for other in FAMILIES if other is not family
        )
    passed_over: list[tuple[str, str]] = []
    for family in FAMILIES:
        reason = family.refusal(problem, cc, backward)
        if reason is None and problem.seqlen_q < family.least_queries:
            reason = f"leaves fewer than {family.least_queries} queries to families that prepare less"
        if reason is None and family.name == "sm90" and runs_of_keys(problem) > 1:
            reason = "leaves few queries with many keys to the sm80 family, which cuts the keys into runs"
        if reason is None:
            return family, tuple(passed_over)
        passed_over.append((family.name, reason))
    raise ValueError(
        "no kernel family takes this call: " + "; ".join(f"{name} {reason}" for name, reason in passed_over)
    )


def _span(least: int, most: int) -> str:
    return f"{least / 10} or newer" if most == 999 else f"{least / 10} to {most / 10}"
