"""One try to build something together with others, which can be given up at any time.

To build a process group needs every member; any of them may be dead or stopped, and torch's
constructors can not be interrupted. So it is built on a thread of its own, and who waits for it is
released at once by `give_up`, or when its time is over. What is built too late is discarded by that
thread. It is no daemon, since one that comes back from C++ while Python ends would crash the
process; whatever is built must therefore end by itself within seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hpc_elastic.ft.broken import CollectiveTimeoutError

T = TypeVar("T")


class Attempt(Generic[T]):
    """One try; its `result` can be waited for once.

    Attributes:
        waits_for: What it waits for at present, for the error of a time-out. Set by ``build``.
    """

    def __init__(
        self,
        build: Callable[[Attempt[T]], T],
        *,
        discard: Callable[[T], None],
        timeout_s: float,
        name: str,
    ) -> None:
        """Describe the try; `start` begins it.

        Args:
            build: Makes the result on the thread; calls `check` or `pause` while it waits.
            discard: Gets rid of a result that nobody wants any more.
            timeout_s: From now; over 0.
            name: What is built, for errors.
        """
        self.waits_for = "its store"
        self._build = build
        self._discard = discard
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._name = name
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin to build."""
        threading.Thread(target=self._run, name="hpc-elastic-ft-build").start()

    def result(self) -> T:
        """Wait for what is built.

        Raises:
            CollectiveTimeoutError: the time was over; it names what was waited for.
            Exception: what ``build`` raised, or what it was given up with.
        """
        if not self._over.wait(max(self.left_s, 0.0)):
            self.give_up(self._too_late())
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def give_up(self, error: Exception) -> bool:
        """Let `result` raise this at once (any thread); False if it is over already."""
        return self._end(None, error)

    def check(self) -> None:
        """Raise if nobody waits for the result any more (the building thread)."""
        if self._over.is_set():
            raise self._error or RuntimeError("given up")
        if self.left_s <= 0:
            raise self._too_late()

    def pause(self, seconds: float) -> None:
        """Wait a moment, or until it is given up; then `check`."""
        self._over.wait(min(seconds, max(self.left_s, 0.0)))
        self.check()

    @property
    def left_s(self) -> float:
        """Seconds left; negative when it is late."""
        return self._until - time.monotonic()

    def _run(self) -> None:
        try:
            built = self._build(self)
        except BaseException as e:
            self._end(None, e)
            return
        if not self._end(built, None):
            self._discard(built)

    def _end(self, result: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._over.is_set():
                return False
            self._result, self._error = result, error
            self._over.set()
            return True

    def _too_late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._name} was not ready within {self._timeout_s:g} s: "
            f"it waits for {self.waits_for}"
        )
