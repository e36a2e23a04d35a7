"""Time-outs of futures, of a block of code and of a GPU's stream, as torchft's module of this name.

One thread for each time-out that is under way: they are few, a callback that blocks delays no
other, and no event loop has to be watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.futures import Future

__all__ = ["context_timeout", "future_timeout", "future_wait", "stream_timeout"]

T = TypeVar("T")


def make_future(*tensors: torch.Tensor) -> Future[Any]:
    """Return a future whose waiters' streams wait for the streams that compute its value.

    ``tensors`` are those of the value that may be on another GPU than the present one.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return Future(devices=sorted(devices, key=str))


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Return a future with the value or the error of another, or with a TimeoutError."""
    return _follow(fut, timeout, make_future())


def swallow_errors(
    fut: Future[T], default: T, timeout: timedelta, on_error: Callable[[Exception], None]
) -> Future[T]:
    """Return a future that completes within the time-out, and never with an error.

    If the other one fails or takes too long, the value is ``default``, and ``on_error`` is called
    with the error, on any thread.
    """

    def value_of(done: Future[T]) -> T:
        try:
            return done.value()
        except Exception as e:
            on_error(e)
            return default

    limited = make_future(*([default] if isinstance(default, torch.Tensor) else []))
    return _follow(fut, timeout, limited).then(value_of)


def _follow(fut: Future[T], timeout: timedelta, limited: Future[T]) -> Future[T]:
    is_open = threading.Lock()

    def give_up() -> None:
        if is_open.acquire(blocking=False):
            limited.set_exception(_timeout_error(timeout))  # type: ignore[arg-type]  # torch's stub

    def follow(done: Future[T]) -> None:
        timer.cancel()
        if not is_open.acquire(blocking=False):
            return
        try:
            limited.set_result(done.value())
        except Exception as e:
            limited.set_exception(e)  # type: ignore[arg-type]  # torch's stub

    timer = _start_timer(give_up, timeout)
    fut.add_done_callback(follow)
    return limited


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Wait for a future, and return its value; raise its error, or TimeoutError."""
    is_done = threading.Event()
    fut.add_done_callback(lambda _: is_done.set())
    if not is_done.wait(timeout.total_seconds()):
        raise _timeout_error(timeout)
    return fut.wait()


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Call a function, on another thread, if the block takes longer than the time-out."""
    timer = _start_timer(callback, timeout)
    try:
        yield
    finally:
        timer.cancel()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Call a function, on another thread, if the current accelerator stream takes longer."""
    queued = torch.Event()
    queued.record()
    _start_timer(lambda: None if queued.query() else callback(), timeout)


def _start_timer(callback: Callable[[], None], timeout: timedelta) -> threading.Timer:
    timer = threading.Timer(timeout.total_seconds(), callback)
    timer.daemon = True
    timer.start()
    return timer


def _timeout_error(timeout: timedelta) -> TimeoutError:
    return TimeoutError(f"the future did not complete within {timeout.total_seconds():g} s")
