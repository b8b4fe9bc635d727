"""Worker threads for tiles: who computes, in which order shares are summed, and BLAS kept out of the way."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

END = 2**62  # a position after every other one


class Order:
    """Positions that tasks have reached, so that shares of one sum are added in one order by any workers.

    A task may wait only for tasks handed out before it; then the earliest task in flight never waits.
    """

    def __init__(self) -> None:
        self._reached: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._failed = False

    def advance(self, key: Hashable, position: int) -> None:
        """Say that ``key`` has reached ``position``."""
        with self._changed:
            self._reached[key] = position
            self._changed.notify_all()

    def wait(self, key: Hashable, position: int) -> None:
        """Return once ``key`` has reached ``position``."""
        if self._reached.get(key, 0) >= position:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._reached.get(key, 0) >= position)
            if self._failed:
                raise _Stopped

    def forget(self, key: Hashable) -> None:
        """Drop a key that nobody will wait for again."""
        with self._changed:
            self._reached.pop(key, None)

    def fail(self) -> None:
        """Wake all who wait: what they wait for will not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class _Stopped(Exception):
    """Another worker failed; its exception is the one to report."""


class _Queue:
    """Tasks handed out in order to any number of threads, and the first exception of any of them."""

    def __init__(self, tasks: Iterable[Any], order: Order) -> None:
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._order = order
        self.error: BaseException | None = None

    def drain(self, new_worker: Callable[[], Callable[[Any], None]]) -> None:
        """Make a worker for this thread and give it tasks until there are none, or one has failed."""
        worker = None
        try:
            # The state of floating-point warnings belongs to a thread.
            with np.errstate(all="ignore"), _one_thread_each():
                while self.error is None and (task := self._next()) is not None:
                    worker = worker or new_worker()
                    worker(task)
        except BaseException as error:
            if self.error is None and not isinstance(error, _Stopped):
                self.error = error
            self._order.fail()

    def _next(self) -> Any:
        with self._lock:
            return next(self._tasks, None)


def run(
    tasks: Iterable[Any], new_worker: Callable[[], Callable[[Any], None]], order: Order, alone: bool
) -> None:
    """Every task by some worker; ``new_worker`` makes one worker (with its buffers) for each thread used.

    ``alone``: the work is too small to be worth a second thread.
    """
    queue = _Queue(tasks, order)
    with _blas as threads:
        if alone or threads == 1:
            queue.drain(new_worker)
        else:
            with ThreadPoolExecutor(threads - 1, thread_name_prefix="cupyflash") as pool:
                for _ in range(threads - 1):
                    pool.submit(queue.drain, new_worker)
                queue.drain(new_worker)
    if queue.error is not None:
        raise queue.error


def thread_count() -> int:
    """How many workers a large call has: the threads of BLAS where threadpoolctl is installed, else 1."""
    return _blas.threads()


class _Blas:
    """While any call is in its tiles, BLAS runs one thread, and the threads it would have used are our workers.

    BLAS on tile-sized products gains less from its threads than whole tiles do, and two of its callers at once
    wait for each other. Without threadpoolctl BLAS keeps its threads and there is one worker. The limit is the
    process's: it is set when the first of concurrent calls begins and lifted when the last one ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._threads = 1
        self._limits: Any = None

    def threads(self) -> int:
        """The threads that BLAS has while no call is in its tiles."""
        with self._lock:
            return self._find_threads()

    def _find_threads(self) -> int:
        if self._calls == 0 and (controllers := _controllers()) is not None:
            libraries = [x for controller in controllers for x in controller.lib_controllers]
            self._threads = max((library.num_threads for library in libraries), default=1)
        return self._threads

    def __enter__(self) -> int:
        with self._lock:
            threads = self._find_threads()
            if self._calls == 0 and (controllers := _controllers()) is not None:
                _take_control(controllers[0])
                self._limits = controllers[0].limit(limits=1)
            self._calls += 1
            return threads

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and (controllers := _controllers()) is not None:
                _take_control(controllers[0])
                self._limits.restore_original_limits()
                _take_control(controllers[0])


_blas = _Blas()


@functools.cache
def _controllers() -> tuple[Any, Any] | None:
    """Threadpoolctl's controllers of BLAS libraries with one limit for the process, and with one for each thread."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    blas = ThreadpoolController().select(user_api="blas")
    by_thread = [getattr(x, "threading_layer", None) == "openmp" for x in blas.lib_controllers]
    paths: tuple[list[str], list[str]] = ([], [])
    for library, one_each in zip(blas.lib_controllers, by_thread):
        paths[one_each].append(library.filepath)
    return blas.select(filepath=paths[0]), blas.select(filepath=paths[1])


def _take_control(controller: Any) -> None:
    """Let this thread set limits: threadpoolctl 3.7 and later reserve that to the first thread that did."""
    for library in controller.lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


def _one_thread_each() -> Any:
    """The limit that a thread must set for itself, where BLAS keeps one for each."""
    controllers = _controllers()
    if controllers is None or not controllers[1].lib_controllers:
        return contextlib.nullcontext()
    return controllers[1].limit(limits=1)
