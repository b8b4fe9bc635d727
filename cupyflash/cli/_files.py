"""Arrays in and files out: nothing unpickled, nothing half written, nothing overwritten unasked."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np

from ._report import usage_errors


def load_npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, memory-mapped read-only."""
    with _unreadable(path):
        if zipfile.is_zipfile(path):
            raise click.UsageError(
                f"{path} is an .npz archive; expected one array in a .npy file (or use --npz)"
            )
        return np.lib.format.open_memmap(path, mode="r")


def load_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The named arrays of an ``.npz`` file."""
    with _unreadable(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise click.UsageError(
                f"{path} holds one array; expected an .npz archive with {', '.join(names)}"
            )
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise click.UsageError(
                f"{path} has no array named {', '.join(missing)}; it holds {', '.join(archive.files) or 'none'}"
            )
        return [archive[name] for name in names]


def as_dtype(array: np.ndarray, name: str | None) -> np.ndarray:
    """The array in the dtype of that name; None keeps it.

    NumPy saves bfloat16 as two nameless bytes: such an array is taken for the bfloat16 it was.
    """
    if array.dtype == np.dtype("V2"):
        array = array.view(dtype_of("bfloat16"))
    return array if name is None else array.astype(dtype_of(name), copy=False)


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name, ``bfloat16`` too."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise click.UsageError("bfloat16 arrays need ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def refuse_existing(path: Path, force: bool) -> None:
    """Refuse, before any work is done, a target that could not or should not be written."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise click.UsageError(f"{path} is not a regular file")
    if target.exists() and not force:
        raise click.UsageError(f"{path} exists: --force overwrites it")
    if not target.parent.is_dir():
        raise click.UsageError(f"{path}: there is no directory {target.parent}")


def write_whole(path: Path, write: Callable[[BinaryIO], Any], force: bool) -> None:
    """Write a file beside its target and put it in place in one step, so that it is there whole or not at all."""
    refuse_existing(path, force)
    target = path.resolve()
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)  # reading it means setting it
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)
        refuse_existing(path, force)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def _unreadable(path: Path) -> Any:
    """What NumPy raises for a file that is missing, damaged, or holds pickled objects, as a usage error."""
    return usage_errors(
        f"cannot read {path}: ",
        OSError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    )
