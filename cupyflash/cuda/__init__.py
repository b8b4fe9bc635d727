"""The CUDA backend. Importing it needs neither CuPy nor a GPU; launching needs both."""

from . import transfer
from .calls import keep_backward, keep_forward, recall
from .device import available_backends
from .launch import backward, forward
from .plan import plan
from .warmup import compile_kernels, is_compiled

__all__ = [
    "available_backends",
    "backward",
    "compile_kernels",
    "forward",
    "is_compiled",
    "keep_backward",
    "keep_forward",
    "plan",
    "recall",
    "transfer",
]
