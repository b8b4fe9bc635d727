"""``cupyflash info``: what is installed, what is available and, for what is not, why."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import click
import numpy as np

from .. import __version__
from ..cuda import device
from ..cuda.families import FAMILIES, Family
from ._options import json_option
from ._report import emit

PACKAGES = (
    "numpy",
    "click",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "threadpoolctl",
    "matplotlib",
)


@click.command(
    short_help="Versions, devices, what is available.",
    epilog="""\b
Examples:
  cupyflash info
  cupyflash info --json
""",
)
@json_option
def command(as_json: bool) -> None:
    """Versions, devices, what is available and, for what is not, why."""
    reason = device.missing()
    report: dict[str, Any] = {
        "cupyflash": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _installed(name) or "not installed" for name in PACKAGES},
        "cpu_backend": {"available": True, "blas": _blas()},
        "cuda_backend": {"available": reason is None},
    }
    if reason is not None:
        report["cuda_backend"]["reason"] = reason
    report["cuda_backend"] |= _cuda()
    emit(report, as_json)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _blas() -> str:
    """The BLAS that NumPy was built with."""
    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _cuda() -> dict[str, Any]:
    """Versions and devices as far as CuPy, the compiler and the driver are there to ask."""
    try:
        cupy = device.require_cupy()
    except RuntimeError:
        return {}
    runtime = cupy.cuda.runtime
    found: dict[str, Any] = {"cupy": cupy.__version__, "cuda_runtime": _version(runtime.runtimeGetVersion())}
    try:
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except (RuntimeError, OSError) as error:  # CuPy finds the library when it is first used
        found["nvrtc"] = f"not usable: {error}"
    driver = runtime.driverGetVersion()
    found["driver"] = f"for CUDA {_version(driver)}" if driver else "none found"
    devices = range(runtime.getDeviceCount() if device.missing() is None else 0)
    if devices:
        found["devices"] = [_device(runtime, index) for index in devices]
    found["kernel_families"] = [_family(family, devices) for family in FAMILIES]
    return found


def _device(runtime: Any, index: int) -> dict[str, Any]:
    properties = runtime.getDeviceProperties(index)
    return {
        "device": index,
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
    }


def _family(family: Family, devices: range) -> dict[str, Any]:
    fitting = [x for x in devices if family.least_cc <= device.compute_capability(x) <= family.most_cc]
    return {
        "family": family.name,
        "least_compute_capability": family.least_cc / 10,
        "dtypes": family.dtypes,
        "runs_on_devices": fitting,
    }


def _version(number: int) -> str:
    """CUDA's 12090 as 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"
