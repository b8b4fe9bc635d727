"""The machine of a launch that has NumPy arrays and executes kernels on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...dispatch import OPTIONS
from ...problem import Gradients, Problem
from ...request import BackwardRequest
from .. import tensormap
from ..configs import Config, shared_limit
from ..launch import backward, forward
from ..params import ADDRESSES, RECORD
from .build import MODES, build, missing
from .kernel import Function, Memory

_MOST_ARRAYS = 256
_STATIC_BYTES = 3072  # of shared memory, for kernels of Hopper: kernels_cu/core/emulate/ptx_sm90.cuh
# What kernels may write, by name; all those of a backward may write the same.
_WRITTEN = {
    "forward": ("out", "lse", "partials"),
    "decode": ("partials",),
    "combine": ("out", "lse"),
    "split": ("k_planes", "v_planes"),
    "split_all": ("q_planes", "k_planes", "v_planes", "dout_planes", "row_stats"),
}
_WRITTEN_BACKWARD = (
    *("row_delta", "slope_rows", "partials", "row_stats", "dq_sums", "turns"),
    *("dq", "dk", "dv", "dbias", "dsinks", "dslopes"),
)


class _Loaded(NamedTuple):
    function: Function


class Machine:
    """A GPU made of CPU threads: `cupyflash.cuda.machine.Gpu` with NumPy arrays.

    Parameters
    ----------
    mode : {"checked", "plain", "sanitized"}
        "checked": races on shared memory, accesses outside the arrays of the launch, writes to inputs, misaligned
        accesses and indices out of bounds raise EmulationError. "plain": faster; collectives that not every thread
        reaches, and deadlocks, still raise. "sanitized": AddressSanitizer and UndefinedBehaviorSanitizer look on, in
        a process with `sanitizer_environment`.
    seed : int
        0: blocks, warps and lanes in their natural order; else in the random order of that seed. Results must not
        depend on it.
    workers : int
        CPU threads that execute blocks; 0 is one a core.
    compute_capability : int
        Of the GPU that it stands for: it decides families and tile sizes.
    edit : callable, optional
        Changes the source of every kernel before it is compiled, to see that a fault is found.

    Attributes
    ----------
    launched : list of Config
        The kernels that ran, in order.

    Raises
    ------
    RuntimeError
        There is no g++.

    Notes
    -----
    What it is not: it has no timing, and of the GPU's memory model only the race check on shared memory.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.cuda.emulate import Machine
    >>> x = np.eye(2, dtype=np.float32)
    >>> Machine().attention(x, x, x)[0].round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]], dtype=float32)
    """

    def __init__(
        self,
        mode: str = "checked",
        *,
        seed: int = 0,
        workers: int = 0,
        compute_capability: int = 80,
        edit: Callable[[str], str] | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if reason := missing():
            raise RuntimeError(reason)
        self.mode, self.seed, self.workers, self.edit = mode, seed, workers, edit
        self.compute_capability = compute_capability
        self.launched: list[Config] = []
        self._functions: dict[Config, Function] = {}
        self._counter = np.zeros(2, np.uint32)
        # Memory whose addresses were taken: its begin and end, the latest last.
        self._arrays: dict[int, int] = {}

    def attention(self, q: Any, k: Any, v: Any, /, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of NumPy arrays; options as `cupyflash.attention`."""
        problem = Problem.create(q, k, v, backend="cuda", **options)
        out, lse = forward(problem, machine=self)
        return (out[0], lse[0]) if problem.squeeze else (out, lse)

    def attention_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        /,
        **options: Any,
    ) -> Gradients:
        """Gradients of NumPy arrays; arguments as `cupyflash.attention_backward`."""
        given = {name: options.pop(name) for name in options.keys() - OPTIONS}
        problem = Problem.create(q, k, v, backend="cuda", **options)
        request = BackwardRequest.create(problem, dout, out, lse, **given)
        return backward(request, machine=self)

    # What `launch` asks of a machine.

    @contextmanager
    def current(self) -> Iterator[None]:
        """There is but one; tensor maps are made for it."""
        before = tensormap.ENCODER.set(tensormap.plain_map)
        try:
            yield
        finally:
            tensormap.ENCODER.reset(before)

    @property
    def multiprocessors(self) -> int:
        """Blocks of a launch whose blocks stay: few, so that each has several pieces of work."""
        return 3

    def counter(self) -> int:
        """The address of two zeros, left as zeros."""
        return self._counter.__array_interface__["data"][0]

    def load(self, config: Config) -> _Loaded:
        """The kernel, compiled if the cache has not got it yet."""
        self.launched.append(config)
        if config not in self._functions:
            if config.shared_bytes > (limit := shared_limit(self.compute_capability)):
                raise ValueError(
                    f"the kernel '{config}' needs {config.shared_bytes} bytes of shared memory of {limit}"
                )
            source = config.source(emulate=True)
            written = _WRITTEN.get(config.kernel, _WRITTEN_BACKWARD)
            self._functions[config] = Function(
                str(config),
                build(source if self.edit is None else self.edit(source), config.entry_point, self.mode),
                checked=self.mode == "checked",
                seed=self.seed,
                workers=self.workers,
                flush_subnormals=config.score_bytes == 4,
                static_bytes=_STATIC_BYTES if config.family.startswith("sm90") else 0,
                memory=lambda values: self._memory(values, written),
            )
        return _Loaded(self._functions[config])

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """A new array of NaN bits: what nobody wrote shows."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def captures(self) -> bool:
        """There are no graphs."""
        return False

    def keep_for_graph(self, *memory: Any) -> None:
        """Nothing to keep."""

    def owns(self, x: Any) -> bool:
        """Whether an array lies here."""
        return isinstance(x, np.ndarray)

    def address(self, x: np.ndarray) -> int:
        """Where an array's first element lies; the memory that it belongs to may be touched from now on."""
        owner: Any = x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        steps = [(size - 1) * step for size, step in zip(owner.shape, owner.strides)] if owner.size else []
        first = owner.__array_interface__["data"][0]
        begin = first + sum(step for step in steps if step < 0)
        end = first + sum(step for step in steps if step > 0) + (owner.itemsize if owner.size else 0)
        self._arrays.pop(begin, None)
        self._arrays[begin] = end
        while len(self._arrays) > _MOST_ARRAYS:
            del self._arrays[next(iter(self._arrays))]
        return x.__array_interface__["data"][0]

    def upload(self, x: Any) -> np.ndarray:
        """A copy of a host array."""
        return np.array(x)

    def _memory(self, values: Sequence[bytes], written: Sequence[str]) -> list[Memory]:
        """The arrays behind the addresses in the record."""
        call = np.frombuffer(values[0], RECORD)[0]["call"]
        begin = self.counter()
        found = [Memory("counter", begin, begin + self._counter.nbytes, True)]
        for name in ADDRESSES:
            if address := int(call[name]):
                around = (
                    (b, e) for b, e in reversed(self._arrays.items()) if b <= address < e or address == b
                )
                found += [Memory(name, *bounds, name in written) for bounds in itertools.islice(around, 1)]
        return found
