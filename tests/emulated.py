"""Small kernels of the tests' own on an emulated machine, and the library's calls there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from cupyflash.cuda import source
from cupyflash.cuda.emulate import missing
from cupyflash.cuda.emulate.build import build
from cupyflash.cuda.emulate.kernel import Function, Memory

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
KERNEL = "toy"


def assembled(text, *, emulate=True, folder="toy"):
    """The source string of an entry file with this text."""
    with tempfile.TemporaryDirectory() as root:
        for part in ("core", "attn"):
            (Path(root) / part).symlink_to(source.kernels_root() / part)
        (Path(root) / f"{folder}.cu").write_text(text)
        return source.assemble(
            f"{folder}.cu", "struct float16; struct bfloat16;", emulate=emulate, root=Path(root)
        )


def record(**fields):
    """A kernel's argument: a struct of 8-byte fields, addresses for arrays."""
    values = [x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x for x in fields.values()]
    return np.array([tuple(values)], [(name, "i8") for name in fields])[0]


def run(text, *, threads=64, blocks=1, shared=0, mode="checked", seed=0, workers=0, writes=(), **fields):
    """Execute `toy(const Record)` on arrays and integers; arrays are read-only but for those in ``writes``."""
    memory = [
        Memory(
            name,
            x.__array_interface__["data"][0],
            x.__array_interface__["data"][0] + x.nbytes,
            name in writes,
        )
        for name, x in fields.items()
        if isinstance(x, np.ndarray)
    ]
    library = build(assembled(text), KERNEL, mode)
    function = Function(
        KERNEL, library, checked=mode == "checked", seed=seed, workers=workers, memory=lambda values: memory
    )
    function((blocks,), (threads,), (record(**fields),), shared)


def vjp_on(machine):
    """`cupyflash.attention_vjp`, on an emulated machine."""

    def attention_vjp(q, k, v, *, return_lse, wrt, **options):
        assert return_lse
        out, lse = machine.attention(q, k, v, **options)

        def vjp(dout, dlse):
            return machine.attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **options)

        return (out, lse), vjp

    return attention_vjp
