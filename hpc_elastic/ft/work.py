"""Collectives that never raise: what went wrong is told to the Manager, and the step is skipped."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

T = TypeVar("T")


class DummyWork(Work):
    """Work that is done: where there is nothing to do any more."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Future[object]:
        """Return a future that holds the result."""
        return self._future


class ManagedWork(Work):
    """One collective on one tensor, whose result is finished (divided) exactly once.

    What is called first decides where: `wait` finishes it on the calling thread, `get_future` on
    the thread that completes the collective, so that several may be under way.

    Args:
        work: The collective.
        tensor: Its tensor.
        divisor: What the sum is divided by; 1: it stays as it is.
        failed: Called with the error, if there is one.
    """

    def __init__(
        self,
        work: Work,
        tensor: torch.Tensor,
        divisor: int,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor
        self._divisor = divisor
        self._failed = failed
        self._done: bool | None = None
        self._future: Future[torch.Tensor] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Args:
            timeout: None: the process group's.

        Returns:
            False: it failed, and the tensor holds nothing of use.
        """
        if self._future is not None:
            self._future.wait()
        elif self._done is None:
            try:
                self._work.wait(*(() if timeout is None else (timeout,)))
                self._finish()
            except Exception as e:
                self._fail(e)
        return bool(self._done)

    def get_future(self) -> Future[torch.Tensor]:
        """Return a future of the tensor; it holds no error, whatever happens."""
        if self._future is None:
            if self._done is None:
                self._future = self._work.get_future().then(self._completed)
            else:
                self._future = Future()
                self._future.set_result(self._tensor)
        return self._future

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._done is not None or bool(self._work.is_completed())

    def synchronize(self) -> None:
        """Wait; a device's stream waits instead of this thread where the group works so."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for the result."""
        self.wait()

    def _completed(self, future: Future[Any]) -> torch.Tensor:
        try:
            future.value()
            self._finish()
        except Exception as e:
            self._fail(e)
        return self._tensor

    def _finish(self) -> None:
        if self._divisor != 1:
            with torch.no_grad():
                self._tensor.div_(self._divisor)
        self._done = True

    def _fail(self, error: Exception) -> None:
        self._done = False
        self._failed(error)


class _Timers:
    """Calls functions later, on one thread that is made with the first of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it after so many seconds; it must not block."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._count), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft_timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while True:
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(left_s)


_timers = _Timers()


class _Swallowing:
    """Completes a future with another one's value, or with a default after an error or a while."""

    def __init__(self, default: Any, failed: Callable[[Exception], None]) -> None:
        self.future: Future[Any] = Future()
        self._default = default
        self._failed = failed
        self._is_open = True
        self._lock = threading.Lock()

    def ended(self, future: Future[Any]) -> None:
        """Take over the other future's end."""
        try:
            self._complete(None, future.value())
        except Exception as e:
            self._complete(e, self._default)

    def late(self, timeout_s: float) -> None:
        """Do not wait any longer."""
        e = TimeoutError(f"a future was not completed within {timeout_s:g} s")
        self._complete(e, self._default)

    def _complete(self, error: Exception | None, value: Any) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            if error is not None:
                self._failed(error)
            self.future.set_result(value)


def swallow_errors(
    future: Future[T], default: T, timeout_s: float, failed: Callable[[Exception], None]
) -> Future[T]:
    """Return a future that completes within the time-out, and never with an error.

    Args:
        future: The one to follow.
        default: Its value where that fails or takes too long.
        timeout_s: Seconds, above 0.
        failed: Called with the error then, on any thread.
    """
    swallowing = _Swallowing(default, failed)
    _timers.after(timeout_s, lambda: swallowing.late(timeout_s))
    future.add_done_callback(swallowing.ended)
    return swallowing.future
