"""What gloo's and NCCL's groups have in common: to be configured, aborted and configured again.

Theory of operation
-------------------
A reconfigurable group has at most one *live* group of torch's, and at most one `Attempt` to make
the next. `configure` takes leave of the live one, begins an attempt and adopts its result. `abort`
may come from any thread at any time: it takes away both under a lock, then gives up the attempt and
breaks the live group's connections, and remembers why until the next `configure`. An attempt whose
result comes later discards it itself.

Who uses the group meanwhile finds no live group, and is told why.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import ProcessGroup as TorchProcessGroup

from hpc_elastic.ft.attempt import Attempt
from hpc_elastic.ft.broken import AbortedError, NotConfiguredError
from hpc_elastic.ft.pg_wrapper import DEFAULT_TIMEOUT, ProcessGroupWrapper

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """One member's place in a group, as `ProcessGroup.configure` is told."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    global_ranks: list[int] | None = None

    def __str__(self) -> str:
        quorum = "" if self.quorum_id is None else f" of quorum {self.quorum_id}"
        who = f"rank {self.rank} of {self.world_size}, {self.replica_id}"
        return f"the process group{quorum} ({who}) at {self.store_addr}"


class Live(Protocol):
    """A group of torch's, with what it takes to end it."""

    place: Place

    @property
    def pg(self) -> TorchProcessGroup:
        """What does the operations."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""

    def end(self, error: Exception, *, peacefully: bool) -> None:
        """Let everything pending fail now with an error; what was sent still arrives.

        Nothing is written to any tensor after it has returned.

        Args:
            error: What pending operations raise, unless torch had another one before.
            peacefully: Operations that have begun here may complete first, if they can.
        """


class ReconfigurableProcessGroup(ProcessGroupWrapper):
    """A group of its own, made anew by each `configure`."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Have no members yet.

        Args:
            timeout: Of each operation, and of `configure`; over 0.
        """
        super().__init__(timeout)
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._attempt: Attempt[Live] | None = None
        self._error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Meet the members of a new quorum; see `ProcessGroup.configure`."""
        place = Place(*args, **kwargs)
        attempt = Attempt[Live](
            lambda a: self._build(a, place),
            discard=lambda live: live.end(AbortedError(f"{place} came too late"), peacefully=False),
            timeout_s=self._timeout.total_seconds(),
            name=str(place),
        )
        self._begin(attempt)
        try:
            live = attempt.result()
        except BaseException as e:
            self._failed(attempt, e)
            raise
        if not self._adopt(attempt, live):
            error = self._error or AbortedError(f"{place} was aborted")
            live.end(error, peacefully=False)
            raise error

    def abort(self, errored: bool = True, *, why: str = "it was aborted") -> None:
        """Give up everything that is pending, `configure` too (any thread, at any time).

        Pending operations raise on this process within milliseconds. When this has returned, no
        byte is written into a tensor any more.

        Args:
            errored: Whether it is an error, which `errored` tells until the next `configure`.
            why: What the error says.
        """
        with self._lock:
            live, attempt = self._live, self._attempt
            self._live = self._attempt = None
            place = str(live.place) if live else "the process group"
            error = AbortedError(f"{place} can not go on: {why}")
            if errored and self._error is None:
                self._error = error
        if attempt is not None:
            attempt.give_up(error)
        if live is not None:
            _log.info("%s", error)
            live.end(error, peacefully=False)

    def shutdown(self) -> None:
        """Leave the group in peace; `configure` may still be called."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.end(NotConfiguredError(f"{live.place} was shut down"), peacefully=True)

    def errored(self) -> Exception | None:
        """Return why it was aborted, or could not be configured; None once it is configured."""
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each later operation, and each `configure`, take at most so long."""
        self._timeout = timeout
        live = self._live
        if live is not None:
            live.set_timeout(timeout)

    @property
    def parent(self) -> TorchProcessGroup:
        """torch's group of the present members.

        Raises:
            NotConfiguredError: it was never configured, or has been shut down.
            Exception: why it was aborted.
        """
        live = self._live
        if live is not None:
            return live.pg
        if self._error is not None:
            raise self._error
        raise NotConfiguredError(f"{type(self).__name__} has no members: call configure() first")

    def __repr__(self) -> str:
        live = self._live
        return f"{type(self).__name__}({live.place if live else 'no members'})"

    def _build(self, attempt: Attempt[Live], place: Place) -> Live:
        """Make a group, on the attempt's thread."""
        raise NotImplementedError

    def _begin(self, attempt: Attempt[Live]) -> None:
        with self._lock:
            old, self._live = self._live, None
            earlier, self._attempt = self._attempt, attempt
            self._error = None
        if earlier is not None:
            earlier.give_up(AbortedError("configure() was called again"))
        attempt.start()
        if old is not None:
            old.end(AbortedError(f"{old.place} has been followed by another"), peacefully=True)

    def _failed(self, attempt: Attempt[Live], error: BaseException) -> None:
        if not attempt.give_up(AbortedError("interrupted")):
            _log.debug("%s", error)
        with self._lock:
            if self._attempt is attempt:
                self._attempt = None
                self._error = error if isinstance(error, Exception) else None

    def _adopt(self, attempt: Attempt[Live], live: Live) -> bool:
        with self._lock:
            if self._attempt is not attempt:  # aborted in this very moment
                return False
            self._attempt, self._live = None, live
            return True
