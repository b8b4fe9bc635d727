"""The command line, ``cupyflash``: one file a command.

A module of this package whose name has no leading underscore is the command of that name; it holds a
`click.Command` called ``command`` and imports CuPy, matplotlib and the like where it uses them.

Exit codes: 0, or 1 where a check failed, or 2 for bad usage, which includes what the API refuses.
"""

from __future__ import annotations

import errno
import pkgutil
from importlib import import_module
from typing import Any

import click

from .. import __version__


class _Commands(click.Group):
    """The group whose commands are this package's modules, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return import_module(f"{__name__}.{name}").command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemoryError as error:
            raise click.UsageError(f"not enough memory: {error}") from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output went away: click ends quietly
                raise
            raise click.UsageError(str(error)) from error


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"cupyflash {__version__}")
        ctx.exit()


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def main() -> None:
    """Exact attention for NumPy and CuPy arrays: run it, check it, and see what it costs."""
