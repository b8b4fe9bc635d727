"""The emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import needs_compiler

import cupyflash
from cupyflash.cuda.emulate import sanitizer_environment

pytestmark = needs_compiler


def run(code):
    """A Python process that can load sanitized kernels, beside the tests' modules."""
    paths = [Path(__file__).parent, Path(cupyflash.__file__).parents[1]]
    environment = os.environ | sanitizer_environment() | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


SMALL = """
import numpy as np
from test_emulate_engine import SUMS, sums
found, expected = sums(mode="sanitized")
np.testing.assert_array_equal(found, expected)
print("the same", flush=True)
sums(SUMS.replace({old!r}, {new!r}), mode="sanitized", workers=1)
"""


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("p.sums[block_index()] =", "p.sums[block_index() + 1] =", "heap-buffer-overflow"),
        pytest.param(
            *(
                "smem.turned[63 - t][0]",
                "smem.turned[64 - t][0]",
                "an array index out of bounds at toy.cu:10",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                "smem.sums[warp_index()] = x",
                "(&smem.turned[0][0])[129 + warp_index()] = x",
                "heap-buffer-overflow",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["past an array", "past a member", "past shared memory"],
)
def test_a_sound_kernel_passes_and_a_planted_fault_is_named(old, new, error):
    done = run(SMALL.format(old=old, new=new))
    assert done.stdout == "the same\n", done.stderr
    assert done.returncode != 0
    assert error in done.stderr
    assert "toy.cu:" in done.stderr
    assert "kernel" in done.stderr


ALL = """
import numpy as np
from emulated import vjp_on
from support import check
from test_emulate import PORTABLE, arrays, cases
from cupyflash.cuda.emulate import Machine
options = cases(33, 65, {dtype!r})[{name!r}]
check(*arrays(33, 65, {dtype!r}, options), via=vjp_on(Machine("sanitized", compute_capability=PORTABLE)), **options)
print("within the bound")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["bottom right", "everything"])
def test_the_portable_family_is_clean(name, dtype):
    done = run(ALL.format(name=name, dtype=dtype))
    assert done.stdout == "within the bound\n", done.stderr
