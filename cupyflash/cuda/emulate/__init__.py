"""The kernels on the CPU: the sources that NVRTC compiles for a GPU, compiled by g++ and executed thread by thread.

Source assembly, configs, recipes, records and launches are those of a GPU, unchanged. Small inputs only.
"""

from .build import MODES, BuildError, cache_folder, missing, sanitizer_environment
from .kernel import EmulationError
from .machine import Machine

__all__ = [
    "MODES",
    "BuildError",
    "EmulationError",
    "Machine",
    "cache_folder",
    "missing",
    "sanitizer_environment",
]
