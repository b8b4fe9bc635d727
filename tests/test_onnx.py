"""Published vectors through the public API: the ONNX Attention node tests and literals of other projects."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest
from support import wide

import cupyflash

FOLDER = pathlib.Path(__file__).parent / "conformance"
sys.path.insert(0, str(FOLDER))

onnx = pytest.importorskip("onnx", minversion="1.22", reason="needs onnx >= 1.22 for its node tests")
onnx_attention = pytest.importorskip("onnx_attention")

CASES = list(onnx_attention.cases())
LITERALS = json.loads((FOLDER / "attention_literals.json").read_text())
# What the mapping covers: scripts with fixed seeds in 1.23, files in 1.22.
COVERED = {"1.22": 74, "1.23": 103}


def on(xp, x):
    return xp.asarray(x) if isinstance(x, np.ndarray) else x


def assert_within(actual, expected, rtol, atol):
    """Within tolerance, infinities and NaN in the same places."""
    np.testing.assert_allclose(wide(actual), np.asarray(expected).astype(np.float64), rtol=rtol, atol=atol)


def test_all_cases_of_this_onnx_are_covered():
    version = ".".join(onnx.__version__.split(".")[:2])
    if version not in COVERED:
        pytest.skip(f"the number of cases in onnx {version} is not known")
    assert len(CASES) == COVERED[version]


@pytest.mark.parametrize(("name", "inputs", "expected"), CASES, ids=[name for name, _, _ in CASES])
def test_onnx(xp, name, inputs, expected):
    inputs = {key: on(xp, x) for key, x in inputs.items()}
    dtype = inputs["q"].dtype.name
    operands = [inputs.pop(key) for key in "qkv"]
    out = cupyflash.attention(*operands, **inputs)
    assert out.dtype.name == dtype
    assert_within(out, expected["out"], *onnx_attention.TOLERANCES[dtype])


@pytest.mark.parametrize("literal", LITERALS, ids=[literal["name"] for literal in LITERALS])
def test_literals(xp, literal):
    literal = dict(literal)
    atol, expected = literal.pop("atol"), literal.pop("out")
    operands = [xp.asarray(literal.pop(key), np.float64) for key in "qkv"]
    options = {key: x for key, x in literal.items() if key not in ("name", "source")}
    if "mask" in options:
        options["mask"] = xp.asarray(options["mask"])
    assert_within(cupyflash.attention(*operands, **options), expected, 0, atol)
