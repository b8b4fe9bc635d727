"""The kernels that the suite's small problems use, compiled side by side before the first of them runs."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupyflash.cuda import configs, families
from cupyflash.cuda.machine import gpu

MOST_KERNELS = 200
SMALL_HEAD_DIM = 20  # the widest of test_properties


def small_kernels(cc):
    """Every config that head dims up to SMALL_HEAD_DIM can need on a device of that compute capability."""
    bits = list(itertools.product((False, True), repeat=len(configs.OPTION_BITS)))
    found, covered = {}, set()
    for family in families.FAMILIES:
        if not family.least_cc <= cc <= family.most_cc or family.least_queries:
            continue
        dtypes = [dtype for dtype in family.dtypes if family.takes(dtype, cc)]
        for dtype, kernel in itertools.product(
            dtypes, (*configs.kernels_of(family.name), *configs.prepost_kernels_of(family.name))
        ):
            if (dtype, kernel) in covered:  # by a faster family
                continue
            if kernel in ("row_stats", "finish_queries") and family.name != "sm90":
                continue
            covered.add((dtype, kernel))
            # simt has it for plain calls alone, and sm90 has the others for wide head dims.
            if kernel == "backward" and family.name != "simt":
                covered |= {(dtype, "backward_q"), (dtype, "backward_kv")}
            for options in bits:
                dim = SMALL_HEAD_DIM
                if kernel == "backward" and not configs.in_one_kernel(family.name, dtype, dim, options, cc):
                    continue
                found[configs.choose(family.name, kernel, dtype, dim, dim, options, cc)] = True
    return list(found)


def compile_small_kernels(device):
    """Load them all on a device; NVRTC compiles outside the interpreter lock.

    One process of the suite at a time: the first compiles, the others find its results in CuPy's cache.
    """
    machine = gpu(device)

    def load(config):
        with machine.current():
            machine.load(config)

    lock = Path(tempfile.gettempdir(), f"cupyflash-tests-{os.getuid()}.lock")
    with lock.open("w") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        list(pool.map(load, small_kernels(machine.compute_capability)))
