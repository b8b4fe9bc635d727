"""The package: examples in docstrings, and what an import costs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash
from cupyflash.cuda.emulate import missing

FOLDER = Path(cupyflash.__file__).parent
WITH_EXAMPLES = [path for path in sorted(FOLDER.rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_examples_in_docstrings(path):
    if path.parent.name == "emulate" and missing():
        pytest.skip(missing())
    if path.stem == "warmup":
        pytest.importorskip("cupy", reason="needs CuPy and NVRTC: pip install '.[test]'")
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0


def test_every_public_function_has_an_example():
    for name in cupyflash.__all__:
        x = getattr(cupyflash, name)
        if inspect.isfunction(x):
            assert ">>>" in x.__doc__, name
            for section in ("Parameters", "Returns"):
                assert f"{section}\n" in x.__doc__ or not inspect.signature(x).parameters, (
                    f"{name}: {section}"
                )


def test_import_is_quick_and_brings_neither_cupy_nor_torch():
    script = """
import sys, time
import numpy, click
start = time.process_time()  # of this process alone: other work on the machine does not count
import cupyflash
print(time.process_time() - start)
print(sorted({"cupy", "torch", "ml_dtypes", "matplotlib"} & set(sys.modules)))
"""
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(7)  # the least of many: caches are shared with other work
    ]
    times, modules = zip(*(run.stdout.splitlines() for run in runs))
    assert set(modules) == {"[]"}
    assert min(map(float, times)) < 0.1
