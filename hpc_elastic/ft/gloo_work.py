"""A gloo operation that ends when its group is aborted, even if gloo forgets it.

A send that fails in gloo's own loop is lost: nobody is told, and the operation hangs until its
time-out, with no connection left that could be broken. It is rare, and happens when a connection
breaks just as the peer announces that it is ready. So who waits looks now and then whether the
group has ended, and futures are handed on through one that the group can fail itself.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpc_elastic.ft.broken import CollectiveTimeoutError
from hpc_elastic.ft.named_work import Group, NamedWork, named

STUCK_S = (
    0.25  # gloo's threads come to rest within 60 ms of a broken connection, on a busy node too
)
_LOOK = timedelta(seconds=0.1)


class GroupWithFutures(Group, Protocol):
    """A group that can fail the futures of its operations.

    Attributes:
        futures: Of those that are pending.
        at_rest: It has ended, and what has not failed yet is stuck.
    """

    futures: set[Handed]
    at_rest: bool


class GlooWork(NamedWork):
    """A collective on gloo's own threads."""

    _group: GroupWithFutures

    def __init__(self, work: Work, operation: str, group: GroupWithFutures) -> None:
        super().__init__(work, operation, group)
        self._handed: Handed | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation; see `NamedWork.wait`.

        Args:
            timeout: None, and 0 as in torch's C++ code (``kNoTimeout``): the group's.
        """
        timeout = timeout or None
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            if self._group.at_rest and self._group.over and not self._work.is_completed():
                raise self._group.over
            try:
                return self._work.wait(_LOOK if until is None else _shorter(until))
            except RuntimeError as e:
                if self._work.is_completed():
                    return super().wait()
                if self._group.at_rest and self._group.over is not None:
                    raise self._group.over from e
            if timeout is not None and until is not None and time.monotonic() >= until:
                raise CollectiveTimeoutError(
                    f"{self._operation} timed out after {timeout.total_seconds():g} s "
                    f"in {self._group.place}"
                )

    def get_future(self) -> Any:
        """Return a future of its tensors."""
        if self._handed is None:
            self._handed = Handed(self._work, self._operation, self._group)
        return self._handed.future


class Handed:
    """A future that ends with gloo's, or when the group fails it.

    Attributes:
        future: For the user.
    """

    def __init__(self, work: Work, operation: str, group: GroupWithFutures) -> None:
        self.future: Future[Any] = Future()
        self._operation = operation
        self._group = group
        self._lock = threading.Lock()
        self._ended = False
        group.futures.add(self)
        work.get_future().add_done_callback(self._hand_on)

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if self._first():
            self.future.set_exception(error)

    def _hand_on(self, done: Future[Any]) -> None:
        try:
            value = done.value()
        except RuntimeError as e:
            self.fail(named(e, self._operation, self._group))
            return
        if self._first():
            self.future.set_result(value)

    def _first(self) -> bool:
        self._group.futures.discard(self)
        with self._lock:
            first, self._ended = not self._ended, True
        return first


def _shorter(until: float) -> timedelta:
    return max(timedelta(milliseconds=1), min(_LOOK, timedelta(seconds=until - time.monotonic())))
