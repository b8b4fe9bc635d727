"""kernels_cu -> one CUDA source string: a typed config block, then the entry file with its includes expanded.

CuPy caches a cubin under the source string and the options; files pulled in by ``-I`` are not part of that key.
With the includes expanded here, an edit of any header changes the string, and nothing depends on where the
package is installed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

EMULATE = "CUPYFLASH_EMULATE"  # defined where a C++ compiler of the host reads the sources
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|else|elif|endif)\b\s*(.*?)\s*(?://.*)?$")


@functools.cache
def kernels_root() -> Path:
    """The folder of the CUDA sources: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for root in (package.parent / "kernels_cu", package / "kernels_cu"):
        if root.is_dir():
            return root
    raise FileNotFoundError(
        f"kernels_cu is neither beside nor inside {package}: the installation is incomplete; reinstall cupyflash"
    )


def assemble(entry: str, config_block: str, *, emulate: bool = False, root: Path | None = None) -> str:
    """The whole source of one kernel.

    Parameters
    ----------
    entry : str
        The `.cu` file, relative to ``kernels_cu``.
    config_block : str
        Typed constants and aliases; they stand before everything else.
    emulate : bool
        Take the branches of ``#ifdef CUPYFLASH_EMULATE`` when following includes.
    root : Path, optional
        Another source tree.

    Returns
    -------
    str
        Source text with ``#line`` markers, so that a compiler names the file and line of an error.
    """
    return f'#line 1 "config"\n{config_block}\n{_expand(entry, emulate, root or kernels_root())}'


@functools.lru_cache(maxsize=64)
def _expand(entry: str, emulate: bool, root: Path) -> str:
    return "".join(_Expansion(emulate, root).lines_of(entry, "the entry of a kernel"))


class _Expansion:
    """One pass over an entry and its includes; each file is taken once."""

    def __init__(self, emulate: bool, root: Path):
        self.emulate, self.root = emulate, root
        self.taken: set[str] = set()

    def lines_of(self, name: str, wanted_by: str) -> list[str]:
        path = self.root / name
        if not path.is_file():
            raise FileNotFoundError(f"{name}, wanted by {wanted_by}, is not in {self.root}")
        self.taken.add(name)
        lines = [f'#line 1 "{name}"\n']
        branches: list[bool | None] = []  # of the open conditions: taken, not taken, unknown here
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if condition := _CONDITION.match(line):
                _follow(branches, condition[1], condition[2], self.emulate)
            if not (include := _INCLUDE.match(line)):
                # Every file is taken once already, and compilers warn of the pragma in a main file.
                lines.append("\n" if line.strip() == "#pragma once" else line + "\n")
                continue
            if None in branches:
                raise ValueError(f"{name}:{number}: an include inside a condition other than {EMULATE}")
            if False not in branches and include[1] not in self.taken:
                lines += self.lines_of(include[1], f"{name}:{number}")
                lines.append(f'#line {number + 1} "{name}"\n')
            else:
                lines.append("\n")
        return lines


def _follow(branches: list[bool | None], word: str, argument: str, emulate: bool) -> None:
    """Keep the stack of open conditions; only those on the emulation macro are decided here."""
    if word in ("ifdef", "ifndef") and argument == EMULATE:
        branches.append(emulate == (word == "ifdef"))
    elif word in ("if", "ifdef", "ifndef"):
        branches.append(None)
    elif word == "endif":
        branches.pop()
    elif word == "else" and branches[-1] is not None:
        branches[-1] = not branches[-1]
