"""One problem with its arrays, and the computations of it that commands compare."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import attention, attention_backward, testing
from ..arrays import is_device
from ..cuda import device
from ..cuda.emulate import Machine
from ..problem import Gradients, Problem
from ._files import dtype_of
from ._report import usage_errors


class Case:
    """A validated call and, once computed, its results.

    ``backend="cuda"`` among the options brings the arrays to the GPU, so that copies are not part of a measurement.
    """

    def __init__(self, arrays: Any, options: dict[str, Any]) -> None:
        with usage_errors():
            if options.get("backend") == "cuda":
                arrays, options = _to_device((arrays, options))
            self.problem = Problem.create(*arrays, **options)
        self.arrays: tuple[Any, Any, Any] = arrays
        self.options = options
        self.on_device = is_device(arrays[0])
        self.out: Any = None
        self.lse: Any = None
        self.dout: Any = None
        self.gradients: Gradients | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of out as the API returns it."""
        return self.problem.out_shape[1:] if self.problem.squeeze else self.problem.out_shape

    def set_dout(self, dout: np.ndarray) -> None:
        """Take the cotangent of out that the backward starts from."""
        self.dout = _to_device(dout) if self.on_device else dout

    def forward(self) -> tuple[Any, Any]:
        """(out, lse), kept for the backward."""
        self.out, self.lse = attention(*self.arrays, return_lse=True, **self.options)
        return self.out, self.lse

    def backward(self) -> Gradients:
        """Gradients, kept."""
        self.gradients = attention_backward(self.dout, *self.arrays, self.out, self.lse, **self.options)
        return self.gradients

    def plain(self) -> tuple[Any, Any]:
        """(out, lse) by the plain computation."""
        return testing.plain(*self.arrays, return_lse=True, **self.options)

    def plain_backward(self) -> Gradients:
        """Gradients by the plain computation, from the same out and lse as `backward`."""
        return testing.plain_backward(self.dout, *self.arrays, self.out, self.lse, **self.options)

    def with_heads(self, result: Any) -> Any:
        """Out, lse or dout with the heads axis that 2-D arrays lack."""
        return result[None] if self.problem.squeeze else result


class EmulatedCase(Case):
    """A case whose results come from the GPU's kernels, executed on the CPU."""

    def __init__(self, arrays: Any, options: dict[str, Any]) -> None:
        super().__init__(arrays, {name: value for name, value in options.items() if name != "backend"})
        with usage_errors():
            self.machine = Machine(compute_capability=_emulated_capability())

    def forward(self) -> tuple[Any, Any]:
        """(out, lse), kept for the backward."""
        self.out, self.lse = self.machine.attention(*self.arrays, **self.options)
        return self.out, self.lse

    def backward(self) -> Gradients:
        """Gradients, kept."""
        given = (self.dout, *self.arrays, self.out, self.lse)
        self.gradients = self.machine.attention_backward(*given, **self.options)
        return self.gradients


def _emulated_capability() -> int:
    """That of the GPU here, up to the last whose kernels use neither TMA nor wgmma; without one, of small tiles."""
    return 75 if device.missing() else min(device.compute_capability(0), 89)


def random_arrays(shapes: Any, dtype: str, seed: int) -> Any:
    """Normally distributed arrays of those shapes; 16-bit ones are rounded from float32."""
    rng = np.random.default_rng(seed)
    wanted = dtype_of(dtype)
    drawn = np.float64 if wanted == np.float64 else np.float32
    with usage_errors():
        arrays = (np.asarray(rng.standard_normal(shape, drawn)) for shape in shapes)
        return tuple(x.astype(wanted, copy=False) for x in arrays)


def _to_device(x: Any) -> Any:
    """The arrays of a nest of tuples and dicts on the GPU."""
    cupy = device.require_gpu()
    if isinstance(x, dict):
        return {name: _to_device(value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(_to_device, x))
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x
