"""Kernel sources compiled by g++ into shared objects, kept in a cache folder under the hash of all that went in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..source import EMULATE, kernels_root

CACHE_VARIABLE = "CUPYFLASH_EMULATE_CACHE"
COMPILER = "g++"
# No contraction: a product and a sum are fused where the source says so, and nowhere else.
FLAGS = (
    *("-std=c++17", "-g1", "-gdwarf-4", "-fPIC", "-fvisibility=hidden", "-pthread", f"-D{EMULATE}"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
MODES = {
    "plain": ("-O1",),
    # Nothing of these sanitizers is linked: their calls end in core/emulate/checks.cpp. More of "undefined" would
    # double the time of a compile; "sanitized" has all of it.
    "checked": (
        *("-O1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
        *("-fsanitize=alignment,bounds", "-fno-sanitize-recover"),
    ),
    "sanitized": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
}
_ERROR_LINES = 40
# The runtime finds the kernel behind these two names.
_ENTRY = """#line 1 "entry"
extern "C" void cupyflash_emulate_entry(void* const* arguments) {{ emulate::call({0}, arguments); }}
extern "C" __attribute__((visibility("default"))) void cupyflash_emulate_parameters(unsigned* bytes) {{
  emulate::parameter_bytes({0}, bytes);
}}
"""


class BuildError(RuntimeError):
    """g++ refused a kernel; the text has its errors, with files and lines of kernels_cu."""


def missing() -> str | None:
    """Why kernels cannot be emulated here; None where they can."""
    if os.name != "posix":
        return "the emulation needs Linux, or another system with POSIX memory mappings"
    if not shutil.which(COMPILER):
        return f"the emulation needs {COMPILER}, which is not on the path"
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyflash" / "emulate"


def build(source: str, entry_point: str, mode: str) -> Path:
    """The shared object that executes a kernel, compiled unless the cache has it.

    Parameters
    ----------
    source : str
        As `Config.source(emulate=True)` gives it.
    entry_point : str
        The kernel's symbol.
    mode : {"plain", "checked", "sanitized"}
        What is compiled in: nothing, the checks of core/emulate/checks.cpp, or AddressSanitizer and
        UndefinedBehaviorSanitizer.
    """
    if reason := missing():
        raise RuntimeError(reason)
    text = f"{source}\n{_ENTRY.format(entry_point)}"
    flags = (*FLAGS, *_machine_flags(), *MODES[mode])
    runtime = _runtime()

    def make(target: Path) -> None:
        unit = target.with_suffix(".cpp")
        unit.write_text(text, encoding="utf-8")
        _compile(*flags, "-c", str(unit), "-o", f"{target}.o", what=entry_point)
        linked = MODES[mode] if mode == "sanitized" else ()
        _compile(*linked, "-shared", "-pthread", f"{target}.o", str(runtime), "-o", str(target))

    return _cached(f"{text}\n{flags}\n{runtime.name}", ".so", make)


@functools.cache
def _runtime() -> Path:
    """The object file that implements core/emulate/engine.cuh."""
    folder = kernels_root() / "core" / "emulate"
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp"), folder / "engine.cuh"])
    units = [str(file) for file in files if file.suffix == ".cpp"]
    flags = (*FLAGS, "-O2", "-Wall", "-Werror", f"-I{kernels_root()}")

    def make(target: Path) -> None:
        _compile(*flags, "-r", "-nostdlib", *units, "-o", str(target))

    contents = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return _cached(f"{contents}\n{FLAGS}", ".o", make)


def _cached(contents: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file that ``make`` makes from these contents; two processes do not make it twice."""
    key = hashlib.sha256(f"{_compiler_version()}\n{contents}".encode()).hexdigest()[:40]
    folder = cache_folder().resolve()
    path = folder / f"{key}{suffix}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{key}.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = Path(work) / f"made{suffix}"
                make(made)
                made.replace(path)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # where `missing` says None

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(*arguments: str, what: str = "the emulation") -> None:
    # From the root folder: the places that debug information names are then those of the #line markers.
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, cwd="/")
    if done.returncode:
        lines = done.stderr.strip().splitlines()[:_ERROR_LINES]
        raise BuildError("\n".join([f"{COMPILER} could not compile {what}:", *lines]))


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """-mfma where the CPU has it: the bits of the library's fma, many times as fast."""
    with contextlib.suppress(OSError):
        if platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text():
            return ("-mfma",)
    return ()


def sanitizer_environment() -> dict[str, str]:
    """What to set for a process that runs "sanitized" kernels: AddressSanitizer must be its first library."""
    done = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return {"LD_PRELOAD": done.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
