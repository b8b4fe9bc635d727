"""NVRTC compiles the very strings that a GPU would get; no GPU or driver is needed."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from test_cuda_plan import ARCHS

import cupyflash
from cupyflash.cli import main
from cupyflash.cuda import configs, device, families, module, params, source

cupy = pytest.importorskip("cupy", reason="needs CuPy and NVRTC: pip install '.[test]'")
nvrtc = cupy.cuda.nvrtc

MOST_SECONDS = 5.0


def complaint(config, arch, most_seconds=None):
    """What is wrong with a kernel compiled for an architecture; None if nothing is."""
    start = time.thread_time()  # the compiler's own work, whatever else the machine does
    report = module.compile_offline(config, arch)
    seconds = time.thread_time() - start
    faults = []
    if report.spill_bytes or report.stack_bytes:
        faults.append(f"spills {report.spill_bytes} bytes, stack frame {report.stack_bytes} bytes")
    if report.shared_bytes > configs.shared_limit(arch):
        faults.append(f"{report.shared_bytes} bytes of shared memory, at most {configs.shared_limit(arch)}")
    if most_seconds is not None and seconds >= most_seconds:
        faults.append(f"{seconds:.1f} s to compile")
    return f"{config} on sm_{report.arch}: {'; '.join(faults)}" if faults else None


@pytest.mark.parametrize("config", configs.one_per_family(), ids=str)
def test_one_kernel_of_each_family_compiles_without_spills(config):
    assert complaint(config, families.family_of(config.family).least_cc) is None


def _matrix():
    """(arch, family, dtype, kernel) of all that can be chosen."""
    prepost = {}
    for arch, family in itertools.product(ARCHS, families.FAMILIES):
        if family.least_cc <= arch <= family.most_cc:
            for dtype, kernel in itertools.product(family.dtypes, configs.kernels_of(family.name)):
                yield arch, family.name, dtype, kernel
            for dtype, kernel in itertools.product(family.dtypes, configs.prepost_kernels_of(family.name)):
                prepost[arch, configs.PREPOST, dtype, kernel] = True
    yield from prepost


@pytest.mark.full_matrix
@pytest.mark.parametrize(("arch", "family", "dtype", "kernel"), [*_matrix()])
def test_every_kernel_that_can_be_chosen_compiles_without_spills(arch, family, dtype, kernel):
    chosen = [
        c for c in configs.all_configs(arch) if (c.family, c.dtype, c.kernel) == (family, dtype, kernel)
    ]
    assert chosen
    complaints = [found for config in chosen if (found := complaint(config, arch, MOST_SECONDS))]
    assert complaints == []


def test_the_record_is_the_cuda_struct_byte_for_byte():
    """Size and the offset of every field, asserted by the compiler itself."""
    lines = [f'static_assert(sizeof(Params) == {params.RECORD.itemsize}, "size");']
    for name, offset in _fields(params.RECORD):
        # __INTADDR__ is how NVRTC's front end writes offsetof as a constant.
        lines.append(f'static_assert(__INTADDR__(&((Params*)0)->{name}) == {offset}, "{name}");')
    assert len(lines) > 150
    text = source.assemble("attn/params.cuh", "") + "\n".join(lines)
    program = nvrtc.createProgram(text, "record.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", "-arch=sm_80"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:3000])
    finally:
        nvrtc.destroyProgram(program)


def _fields(dtype, prefix="", start=0):
    """(C++ name, offset) of every leaf field of a record."""
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        if field.names:
            yield from _fields(field, f"{prefix}{name}.", start + offset)
        else:
            yield f"{prefix}{name}", start + offset


@pytest.fixture
def broken(monkeypatch):
    """The forward's config with a source that does not compile."""
    config = configs.one_per_family()[-1]
    wrong = config.source().replace('extern "C" __global__', 'this_is_no_type x;\nextern "C" __global__', 1)
    monkeypatch.setattr(configs.Config, "source", lambda self, **_: wrong)
    return config


def test_K16_a_compile_error_names_the_kernel_the_file_and_the_line(broken):
    with pytest.raises(module.CompileError) as caught:
        module.compile_offline(broken, 80)
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert text.startswith(f"NVRTC could not compile the kernel '{broken}' for sm_80:\n")
    assert re.search(r"simt/forward\.cu\(\d+\): error: .*this_is_no_type", text)
    assert len(text.splitlines()) <= module.LOG_LINES + 2
    assert "this_is_no_type" in caught.value.log


def test_K19_an_architecture_that_nvrtc_lacks_is_named():
    with pytest.raises(RuntimeError, match=r"has no sm_37; it compiles for .*80"):
        module.compile_offline(configs.one_per_family()[-1], 37)


def test_K11_a_cache_that_cannot_be_written_names_the_variable():
    assert "CUPY_CACHE_DIR" in device.unwritable_cache(
        PermissionError(13, "Permission denied", "/home/x/.cupy")
    )


def test_K08_the_sources_need_no_toolkit_header():
    for config in configs.all_configs(80):
        assert not re.search(r"^\s*#\s*include\s*<", config.source(), re.MULTILINE), config


def test_compile_kernels_reports_each_kernel():
    x = np.broadcast_to(np.float16(0), (1, 1, 16, 64))
    [report] = cupyflash.compile_kernels(x, x, x, arch=80)
    assert report.arch == "80"
    assert 16 <= report.registers <= 255
    assert report.shared_bytes == report.config.shared_bytes
    assert "ptxas" in report.log


def test_the_command_line_compiles_for_an_architecture():
    arguments = "compile --arch 75 --head-dim 64 --dtype float16 --option softcap --json"
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.output)["kernels"]
    assert row["arch"] == "sm_75"
    assert row["kernel"].endswith("softcap|alibi")
    assert row["spill_bytes"] == 0


def test_the_command_line_says_what_does_not_compile(broken):
    result = CliRunner().invoke(main, ["compile", "--arch", "75", "--head-dim", "64"])
    assert result.exit_code == 1
    assert "this_is_no_type" in result.output


def test_the_command_line_refuses_bad_requests():
    for arguments, text in (
        ("--arch 37", "compute capability 6.0 or newer"),
        ("--arch 80 --family fast", "family must be one of"),
        ("--arch x", "is not a list of integers"),
    ):
        result = CliRunner().invoke(main, ["compile", *arguments.split()])
        assert result.exit_code == 2
        assert text in result.output


def test_all_configs_are_those_that_choose_returns():
    known = set(configs.all_configs())
    dims = (1, 16, 33, 64, 65, 96, 128, 129, 200, 256, 300, 1024)
    bits = list(itertools.product((False, True), repeat=3))
    for arch, dtype, d, e in itertools.product(ARCHS, configs.ELEMENTS, dims, (1, 64, 257)):
        options = bits[d % 8]
        for kernel in configs.kernels_of("simt"):
            if kernel == "backward" and not configs.in_one_kernel("simt", dtype, max(d, e), options, arch):
                continue
            assert configs.choose("simt", kernel, dtype, d, e, options, arch) in known


def test_threads_may_meet_while_cupy_is_imported():
    """An import that another thread has begun is awaited, as in a pool whose first calls compile kernels."""
    script = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np, cupyflash
x = np.broadcast_to(np.float32(0), (1, 1, 8, 64))
with ThreadPoolExecutor(8) as pool:
    found = pool.map(lambda _: cupyflash.compile_kernels(x, x, x, arch=75)[0].arch, range(8))
    print(*set(found))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["75"]), done.stderr
