"""Fixtures of the whole suite: the same tests run on NumPy arrays and, where there is a GPU, on CuPy arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest
from gpu_kernels import compile_small_kernels
from hypothesis import HealthCheck, settings
from support import normal, qkv

from cupyflash.cuda import device

# The same examples in every run; HYPOTHESIS_PROFILE=explore draws new and more ones.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("explore", settings.get_profile("default"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _cupy():
    if reason := device.missing():
        pytest.skip(f"needs a GPU: {reason}")
    return device.require_cupy()


@pytest.fixture(scope="session")
def device_cupy():
    """CuPy with the kernels of small problems compiled."""
    cupy = _cupy()
    compile_small_kernels(cupy.cuda.runtime.getDevice())
    return cupy


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array module under test: numpy runs the CPU backend, cupy the GPU's."""
    return np if request.param == "numpy" else request.getfixturevalue("device_cupy")


@pytest.fixture
def cupy(device_cupy):
    """CuPy, for tests that only a GPU can run."""
    return device_cupy


@pytest.fixture
def poisoned_pool(cupy):
    """CuPy with a memory pool whose free blocks hold NaN bits, so that reading fresh memory shows."""
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    blocks = [cupy.full(size, 0xFF, cupy.uint8) for size in (*[1 << 9] * 64, *[1 << 16] * 16, *[1 << 24] * 4)]
    cupy.cuda.runtime.deviceSynchronize()
    del blocks
    return cupy


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with the input files that the examples of the command line name; q, k, v."""
    monkeypatch.chdir(tmp_path)
    q, k, v = qkv(np, 2, 4, 24, d=8, heads_kv=2)
    np.savez("qkv.npz", q=q, k=k, v=v)
    for name, x in {"q": q, "k": k, "v": v, "bias": normal(np, (24, 24), seed=5)}.items():
        np.save(f"{name}.npy", x)
    return q, k, v
