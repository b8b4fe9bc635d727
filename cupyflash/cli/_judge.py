"""Errors against the float64 reference, beside the contract's bound: of whole results, and of a sample of rows.

With few values a single rounding can decide the error of the plain computation, and by luck it is none. So the
bound may be that of the plain computation in another order of summation: with the columns of head_dim rolled, a
given lse rounded another way, and by the host's products in place of the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import reference, testing
from ..problem import Gradients, Problem
from ._measure import to_host
from ._report import steps
from ._sample import Part, part_arguments

ORDERS = 8  # of summation, in which the plain computation may have its error


def judged(what: str, actual: Any, plain: Any, exact: Any) -> dict[str, Any]:
    """One line of a report: the error, that of the plain computation, the bound, and whether it holds."""
    is_lse = what == "lse"
    claim = testing.assert_lse_close if is_lse else testing.assert_close
    failure = None
    try:
        claim(actual, plain, exact, what)
    except AssertionError as error:
        failure = str(error)
    found, near = testing.errors(actual, exact).max, testing.errors(plain, exact).max
    line = {
        "result": what,
        "values": int(np.size(exact)),
        "max_error": found,
        "plain_error": near,
        "bound": _lse_bound(near, plain, exact) if is_lse else testing.error_bound(plain, exact).max,
        "passed": failure is None,
    }
    return line | ({} if failure is None else {"failure": failure})


def _lse_bound(plain_error: float, plain: Any, exact: Any) -> float:
    """The largest of the bounds that `testing.assert_lse_close` sets value by value."""
    sizes = np.abs(to_host(exact))
    largest = float(np.max(sizes, initial=1.0, where=np.isfinite(sizes)))
    return 2 * plain_error + (2.0**-50 if plain.dtype == np.float64 else 2.0**-22) * largest


def judge_forward(problem: Problem, out: Any, lse: Any, parts: list[Part]) -> list[dict[str, Any]]:
    """Judge out and lse at the sampled rows."""
    found = []
    for part in steps(parts, "checking rows"):
        arguments, options = part_arguments(problem, part)
        exact = reference.attention(*arguments, return_lse=True, **options)
        actual = {"out": part.of(out), "lse": part.of(lse)}
        plain = partial(_plain_forward, arguments, options)
        found.append(_Found(part, actual, plain, dict(zip(actual, exact))))
    return [_judged_together(name, name, found) for name in ("out", "lse")]


def judge_gradients(
    problem: Problem, dout: Any, out: Any, lse: Any, gradients: Gradients, rows: list[Part], cols: list[Part]
) -> list[dict[str, Any]]:
    """Judge dq at the sampled rows; dk and dv at the sampled columns, as functions of the out and lse given."""
    # A gradient summed over broadcast leading axes is not one item's alone.
    names = [name for name in "qkv" if tuple(getattr(problem, name).shape[:-3]) == problem.lead]
    full = {
        name: x[None] if name in problem.two_d else x
        for name, x in gradients._asdict().items()
        if name in names
    }
    found: dict[str, list[_Found]] = {name: [] for name in names}
    for part in steps(rows, "checking rows of dq") if "q" in names else ():
        arguments, options = part_arguments(problem, part)
        actual = {"q": part.of(full["q"])}
        found["q"].append(_with_both(part, actual, (part.of(dout), *arguments), options))
    wrt = [name for name in names if name != "q"]
    for part in steps(cols, "checking rows of dk and dv") if wrt else ():
        arguments, options = part_arguments(problem, part)
        head = part.heads.start // problem.group
        actual = {name: full[name][part.item][head : head + 1, part.cols] for name in wrt}
        given = (part.of(dout), *arguments, part.of(out), part.of(lse))
        both = _with_both(part, actual, given, options)
        for name in wrt:
            found[name].append(both)
    return [_judged_together(f"d{name}", name, parts) for name, parts in found.items() if parts]


def _with_both(part: Part, actual: dict[str, Any], given: tuple[Any, ...], options: dict[str, Any]) -> _Found:
    """The gradients of a part beside the two that they are judged by."""
    exact = reference.attention_backward(*given, wrt=list(actual), **options)._asdict()
    return _Found(part, actual, partial(_plain_backward, given, options, list(actual)), exact)


def _plain_forward(arguments: tuple[Any, ...], options: dict[str, Any], order: int) -> dict[str, Any]:
    arguments, options = _in_order(arguments, options, order)
    out, lse = testing.plain(*arguments, return_lse=True, **options)
    return {"out": _rolled_back(out, order), "lse": lse}


def _plain_backward(
    given: tuple[Any, ...], options: dict[str, Any], wrt: list[str], order: int
) -> dict[str, Any]:
    given, options = _in_order(given, options, order)
    found = testing.plain_backward(*given, wrt=wrt, **options)
    return {name: _rolled_back(getattr(found, name), order) for name in wrt}


def _in_order(
    arrays: tuple[Any, ...], options: dict[str, Any], order: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands (a given lse is the sixth) and options as the plain computation of that order takes them."""
    if order % 2:
        arrays, options = to_host(arrays), {name: to_host(x) for name, x in options.items()}
    rolled = (np.roll(x, order * x.shape[-1] // ORDERS, axis=-1) for x in arrays[:5])
    return (*rolled, *(_nudged(x, order) for x in arrays[5:])), options


def _nudged(lse: Any, order: int) -> Any:
    """Lse as it may have been rounded as well: a place up or down, but for the first order."""
    if order == 0:
        return lse
    return np.where(np.isfinite(lse), np.nextafter(lse, lse.dtype.type((-1) ** order * np.inf)), lse)


def _rolled_back(x: Any, order: int) -> Any:
    return np.roll(x, -(order * x.shape[-1] // ORDERS), axis=-1)


class _Found(NamedTuple):
    """Results of a part, by name: those to judge, the plain computation's in some order, and the reference's."""

    part: Part
    actual: dict[str, Any]
    plain: Callable[[int], dict[str, Any]]
    exact: dict[str, Any]


def _judged_together(what: str, name: str, found: list[_Found]) -> dict[str, Any]:
    """One line for the results of all parts; where it fails, with the part that is worst."""

    def flat(ways: list[Any]) -> Any:
        return np.concatenate([x.reshape(-1) for x in to_host(tuple(ways))])

    actual, exact = flat([x.actual[name] for x in found]), flat([x.exact[name] for x in found])
    for order in range(ORDERS):
        line = judged(what, actual, flat([x.plain(order)[name] for x in found]), exact)
        if line["passed"]:
            return line
    worst = max(found, key=lambda x: testing.errors(x.actual[name], x.exact[name]).max).part
    line["worst_part"] = (
        f"item {worst.item}, heads {worst.heads.start}:{worst.heads.stop}, "
        f"rows {worst.rows.start}:{worst.rows.stop}, keys {worst.cols.start}:{worst.cols.stop}"
    )
    return line
