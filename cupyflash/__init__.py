"""Exact attention for NumPy and CuPy: tiled, with memory linear in length, forward and backward."""

from typing import TYPE_CHECKING, Any

from . import online, reference, testing
from .alibi import alibi_slopes
from .api import attention, attention_backward, attention_vjp, plan
from .cost import Plan
from .dropout import dropout_mask
from .parts import merge, merge_vjp
from .problem import Gradients

if TYPE_CHECKING:
    from .cuda import available_backends, compile_kernels, is_compiled

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "Plan",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_vjp",
    "available_backends",
    "compile_kernels",
    "dropout_mask",
    "is_compiled",
    "merge",
    "merge_vjp",
    "online",
    "plan",
    "reference",
    "testing",
]


def __getattr__(name: str) -> Any:
    """The functions of the CUDA backend, which is imported when they are first used."""
    if name not in ("available_backends", "compile_kernels", "is_compiled"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import cuda

    return getattr(cuda, name)
