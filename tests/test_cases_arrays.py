"""Small inputs that broke other libraries: scalars, dtypes, threads, other libraries' arrays and imports (K).

Devices and graphs (K03, K06) are in test_gpu_calls.py, the compiler (K08, K11, K14, K16, K19) in test_cuda_*.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import BFLOAT16, assert_same, check, qkv, wide

import cupyflash
from cupyflash import reference


def test_K01_scalars_of_any_kind_are_the_same_number(xp):
    q, k, v = qkv(xp)
    kinds = (0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5), np.array(0.5, np.float32))
    results = [cupyflash.attention(q, k, v, scale=scale, softcap=scale) for scale in kinds]
    for result in results[1:]:
        assert_same(result, results[0])
    for scale in (2.0, np.int8(2), np.int64(2)):
        assert_same(cupyflash.attention(q, k, v, scale=2), cupyflash.attention(q, k, v, scale=scale))


def test_arrays_without_axes_are_numbers(xp):
    """Of NumPy, beside device arrays too."""
    q, k, v = qkv(xp, heads=2)
    numbers = {"bias": 0.5, "sinks": -0.25, "alibi_slopes": 0.125, "kv_lengths": 4, "window": (2, 1)}
    arrays = {name: x if name == "window" else np.array(x) for name, x in numbers.items()}
    assert_same(*(cupyflash.attention(q, k, v, **options) for options in (numbers, arrays)))


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, object, np.bool_])
def test_K02_other_dtypes_are_refused(xp, dtype):
    q, k, v = qkv(xp)
    if xp is not np and dtype is object:
        pytest.skip("CuPy has no object arrays")
    with pytest.raises(TypeError, match=r"v must have one of the dtypes .*, got"):
        cupyflash.attention(q, k, abs(v).astype(dtype))


def test_K02_mixed_dtypes_are_refused(xp):
    q, k, v = qkv(xp)
    with pytest.raises(
        TypeError, match=r"share one dtype: k is float32, q is float64.*k\.astype\(q\.dtype\)"
    ):
        cupyflash.attention(q.astype(np.float64), k, v)


def test_K04_threads(xp):
    q, k, v = qkv(xp, heads=2, m=150)
    results, failures = [None] * 4, []
    start = threading.Barrier(4)

    def run(index):
        try:
            start.wait()
            result, vjp = cupyflash.attention_vjp(q, k, v, causal=True, return_lse=True)
            results[index] = (*result, *vjp(q))
        except Exception as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for result in results[1:]:
        assert_same(result, results[0])
    np.testing.assert_allclose(
        wide(results[0][0]), wide(reference.attention(q, k, v, causal=True)), rtol=0, atol=1e-5
    )


class Foreign:
    """An array of another library: DLPack alone."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_K09_arrays_of_other_libraries(xp):
    q, k, v = qkv(xp)
    assert_same(cupyflash.attention(*map(Foreign, (q, k, v))), cupyflash.attention(q, k, v))


def test_K09_bfloat16(xp):
    out, lse, gradients = check(*qkv(xp, heads=2, m=33, dtype=BFLOAT16))
    assert out.dtype == gradients.q.dtype == BFLOAT16
    assert lse.dtype == np.float32


def test_K10_read_only_inputs(xp):
    if xp is not np:
        pytest.skip("CuPy has no read-only arrays")
    q, k, v = qkv(xp, m=20)
    expected = cupyflash.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    out, vjp = cupyflash.attention_vjp(q, k, v)
    assert_same(out, expected)
    out.flags.writeable = False
    assert np.isfinite(vjp(out).q).all()
    with pytest.raises(ValueError, match="out is read-only"):
        cupyflash.attention(q, k, v, out=out)


@pytest.mark.gpu
def test_K13_a_second_process_compiles_nothing(cupy, tmp_path):
    script = (
        "import cupy, cupyflash; x = cupy.ones((4, 8), 'f'); print(cupyflash.attention(x, x, x).get().sum())"
    )
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}

    def cached():
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    first = cached()
    assert first
    assert cached() == first


@pytest.mark.gpu
def test_K15_one_can_ask_what_is_compiled(cupy):
    q, k, v = qkv(cupy, d=200)  # a head dim that no other test compiles for
    assert not cupyflash.is_compiled(q, k, v, softcap=3.0, family="simt")
    cupyflash.compile_kernels(q, k, v, softcap=3.0, family="simt")
    assert cupyflash.is_compiled(q, k, v, softcap=3.0, family="simt")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_K17_import_creates_no_context_and_survives_a_fork():
    script = """
import os, sys, warnings
import numpy as np, cupyflash
assert "cupy" not in sys.modules
warnings.simplefilter("ignore")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
x = np.ones((3, 4))
assert (cupyflash.attention(x, x, x) == 1).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_K17_help_works_without_a_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cupyflash", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Usage:")
