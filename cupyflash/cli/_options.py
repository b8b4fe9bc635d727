"""Options that several commands share, and how their values become arguments of the API."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..arrays import DTYPE_NAMES
from ..checks import PRECISIONS
from ._files import as_dtype, load_npy

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TARGET = click.Path(path_type=Path)
DTYPES = click.Choice(list(DTYPE_NAMES))
PRECISION = click.Choice(list(PRECISIONS))
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Integers(click.ParamType):
    """Integers with commas between them: ``3`` is an int, ``3,4`` a tuple."""

    name = "int[,int...]"

    def __init__(self, count: int | None = None, low: int | None = None) -> None:
        self.count = count
        self.low = low

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            numbers = tuple(int(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 2,8,1024,64", param, ctx)
        if self.low is not None and min(numbers) < self.low:
            self.fail(f"{value!r} has a number below {self.low}", param, ctx)
        if self.count is not None and len(numbers) != self.count:
            self.fail(f"{value!r} has {len(numbers)} numbers, expected {self.count}", param, ctx)
        return numbers[0] if len(numbers) == 1 and self.count is None else numbers


class Window(click.ParamType):
    """``LEFT,RIGHT``, where an empty word or ``none`` is no bound."""

    name = "left,right"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip().lower() for word in value.split(",")]
        try:
            bounds = tuple(None if word in ("", "none") else int(word) for word in words)
        except ValueError:
            bounds = ()
        if len(bounds) != 2:
            self.fail(f"{value!r} is not LEFT,RIGHT such as 128,0 or 128,none", param, ctx)
        return bounds


class Numbers(click.ParamType):
    """Real numbers with commas between them."""

    name = "float[,float...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(float(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1000,1001,999", param, ctx)


def _stack(*options: Decorator) -> Decorator:
    """One decorator for several options, shown in the order given."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(options), function)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
force_option = click.option("--force", is_flag=True, help="Overwrite an existing output file.")

position_options = _stack(
    click.option(
        "--causal",
        type=click.Choice(["true", "top_left", "bottom_right"]),
        is_flag=False,
        flag_value="true",
        help="No key after the query; with more keys than queries say which corner is aligned.",
    ),
    click.option("--window", type=Window(), help="Keys before and after the query, e.g. 128,0 or 128,none."),
    click.option("--query-offset", type=Integers(), help="Where query 0 stands among the keys."),
    click.option("--q-lengths", type=Integers(), help="Rows in use, one number or one a batch item."),
    click.option("--kv-lengths", type=Integers(), help="Keys in use, one number or one a batch item."),
)

dropout_options = _stack(
    click.option("--dropout-p", type=float, help="Probability of dropping a weight."),
    click.option("--dropout-seed", type=int, help="Seed of the dropout mask, required with --dropout-p."),
    click.option("--dropout-offset", type=int, help="Another mask of the same seed."),
    click.option("--dropout-origin", type=Integers(count=3), help="Matrix, row and column to count from."),
)

score_options = _stack(
    click.option("--scale", type=float, help="Multiplies q @ k^T.  [default: 1/sqrt(head_dim)]"),
    click.option("--softcap", type=float, help="Scores become softcap * tanh(score / softcap)."),
    click.option(
        "--alibi",
        is_flag=False,
        flag_value="geometric",
        metavar="[FILE]",
        help="ALiBi with the usual geometric slopes, or those of a .npy file.",
    ),
)

array_options = _stack(
    click.option("--mask", type=FILE, help=".npy of a bool mask, True = attend."),
    click.option("--bias", type=FILE, help=".npy of an additive bias."),
    click.option("--sinks", type=FILE, help=".npy of a sink logit a head."),
)

compute_options = _stack(
    click.option("--precision", type=PRECISION, help="Products of float32."),
    click.option(
        "--deterministic/--no-deterministic", default=None, help="Same bits from run to run.  [default: yes]"
    ),
    click.option("--backend", type=click.Choice(["cpu", "cuda"]), help="Where to run.  [default: cpu]"),
)

attention_options = _stack(position_options, score_options, dropout_options, compute_options)

shape_options = _stack(
    click.option("--seqlen-k", type=click.IntRange(min=0), help="Keys, where not as many as queries."),
    click.option("--heads-kv", type=click.IntRange(min=0), help="Key and value heads, where grouped."),
    click.option(
        "--head-dim-v", type=click.IntRange(min=0), help="Size of a value, where not that of a key."
    ),
)


def shapes(
    shape: tuple[int, ...] | int, seqlen_k: int | None, heads_kv: int | None, head_dim_v: int | None
) -> Any:
    """The shapes of q, k and v from ``--shape ...,heads,length,head_dim`` and `shape_options`."""
    if isinstance(shape, int) or len(shape) < 2:
        raise click.UsageError("--shape needs at least length,head_dim, such as 2,8,1024,64")
    *outer, m, d = shape
    if heads_kv is not None:
        if not outer:
            raise click.UsageError("--heads-kv needs a --shape with heads: heads,length,head_dim")
        outer = [*outer[:-1], heads_kv]
    n = m if seqlen_k is None else seqlen_k
    return tuple(shape), (*outer, n, d), (*outer, n, d if head_dim_v is None else head_dim_v)


def api_options(flags: dict[str, Any], heads: int) -> dict[str, Any]:
    """Keyword arguments of `cupyflash.attention` from the options of this module that were given."""
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("mask", "bias", "sinks"):
        if name in given:
            given[name] = as_dtype(load_npy(given[name]), None)
    if given.get("causal") == "true":
        given["causal"] = True
    if (slopes := given.pop("alibi", None)) is not None:
        given["alibi_slopes"] = _slopes(slopes, heads)
    return given


def _slopes(source: str, heads: int) -> Any:
    from .. import alibi_slopes

    if source != "geometric":
        return as_dtype(load_npy(Path(source)), None)
    return alibi_slopes(heads)


def described(options: dict[str, Any]) -> dict[str, Any]:
    """The options as a report shows them: arrays by shape and dtype."""
    return {
        name: f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else value
        for name, value in options.items()
    }
