"""A torch Work whose errors say what failed, in which group, and after how many seconds."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Work

from hpc_elastic.ft.broken import CollectiveTimeoutError, ProcessGroupError

_TIMED_OUT = re.compile(r"timed out(?: waiting (\d+)ms)?|timeout", re.IGNORECASE)


class Group(Protocol):
    """The group of an operation.

    Attributes:
        place: For messages.
        over: Why it has ended; None as long as it has not.
    """

    place: Any
    over: Exception | None


class NamedWork(Work):
    """Hand everything on to a Work; translate what its `wait` raises.

    The future is torch's own: an error in it has torch's text.
    """

    def __init__(self, work: Work, operation: str, group: Group) -> None:
        super().__init__()
        self._work = work
        self._operation = operation
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation.

        Raises:
            CollectiveTimeoutError: it took too long. It may still write into its tensors, until
                the group is aborted.
            AbortedError: the group was aborted.
            ProcessGroupError: a peer's connection broke, or something else that torch tells.
        """
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as e:
            raise named(e, self._operation, self._group) from e

    def get_future(self) -> Any:
        """Return torch's own future."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return why it failed; None if it did not."""
        return self._work.exception()

    def result(self) -> Any:
        """Return its tensors."""
        return self._work.result()

    def source_rank(self) -> int:
        """Return whom a recv_anysource received from."""
        return self._work.source_rank()

    def synchronize(self) -> None:
        """Let the current stream wait for it."""
        self._work.synchronize()


def named(error: RuntimeError, operation: str, group: Group) -> Exception:
    """Return torch's error as one of ours, which names the operation and the group."""
    if isinstance(error, ProcessGroupError):
        return error
    if group.over is not None:
        return group.over
    text, match = str(error), _TIMED_OUT.search(str(error))
    if match is None:
        return ProcessGroupError(f"{operation} failed in {group.place}: {text}")
    seconds = f" after {int(match[1]) / 1000:g} s" if match[1] else ""
    return CollectiveTimeoutError(f"{operation} timed out{seconds} in {group.place}: {text}")
