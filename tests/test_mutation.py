"""The tests bite: one comparison turned over in a copy of the package makes a named test fail.

The two bounds of the mask; dropout's "kept below the threshold"; in the softmax of the CPU backend the row that has
seen nothing, and the tile whose maxima are larger than those before. `MUTATIONS` names the test that notices each.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (file of cupyflash/, what stands there once, what it becomes, the test that then fails)
MUTATIONS = [
    (
        "masks.py",
        "seen &= j <= i + ",
        "seen &= j < i + ",
        "test_cases_lengths.py::test_D07_window_sizes_are_inclusive",
    ),
    (
        "masks.py",
        "seen &= j >= i + ",
        "seen &= j > i + ",
        "test_cases_lengths.py::test_D05_zero_is_a_real_bound",
    ),
    (
        "dropout.py",
        '"<u2") < self.threshold',
        '"<u2") <= self.threshold',
        "test_cases_numbers.py::test_I10_kept_is_strictly_below_the_threshold",
    ),
    (
        "cpu/forward_pass.py",
        "\n    shift = np.where(top == -np.inf",
        "\n    shift = np.where(top != -np.inf",
        "test_cases_empty.py::test_A08_rows_before_the_first_key",
    ),
    (
        "cpu/forward_pass.py",
        "if not np.array_equal(top, m)",
        "if np.array_equal(top, m)",
        "test_cases_empty.py::test_A04_a_band_whose_first_tiles_are_empty",
    ),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package and its tests, in which the named tests pass."""
    folder = tmp_path_factory.mktemp("mutated")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("cupyflash", "tests", "kernels_cu"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    done = run(folder, *(test for *_, test in MUTATIONS))
    assert done.returncode == 0, done.stdout
    return folder


def run(folder, *tests):
    """pytest on the copy, NumPy alone."""
    names = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *names]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("file", "old", "new", "test"), MUTATIONS, ids=[f"{m[0]} {m[2].strip()}" for m in MUTATIONS]
)
def test_a_turned_comparison_is_noticed(package, file, old, new, test):
    path = package / "cupyflash" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} no longer holds {old!r} once: name its new form here"
    path.write_text(text.replace(old, new))
    try:
        done = run(package, test)
    finally:
        path.write_text(text)
    assert done.returncode == 1, done.stdout
    assert f"FAILED tests/{test}" in done.stdout
