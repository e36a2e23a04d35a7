"""Which of several failed workers failed first, and which only followed (pure).

When one worker raises, its peers' collectives break, the agents stop what is left, and many
workers end with an error within milliseconds. The report must show the one that was the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed"
    r"|remote process (has )?exited|remote error|NCCL communicator was aborted"
    r"|ncclRemoteError|ncclSystemError|Timed out waiting|wait timeout|DistNetworkError"
    r"|failed to recv|Connection was (likely )?closed|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """One failed worker, as result.json shows it.

    ``time`` is Unix seconds on the leader's clock. ``phase`` is ``import`` until the user's
    function has been entered, then ``run``; ``start`` where a task ended before it had any worker;
    ``hang`` where the worker was ended because it made no step (`hang`).
    ``exit_code`` is None where a signal ended the worker, and ``signal`` its name. ``remedy`` says
    what to do, where that is known; ``round`` is the number of the worker's round.
    """

    task: str
    host: str
    rank: int
    local_rank: int
    time: float
    message: str
    exception: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    phase: str = "run"
    log: str | None = None
    remedy: str | None = None
    round: int | None = None

    def summary(self) -> str:
        """Return one line: who failed, and of what."""
        if self.phase == "start":
            return f"task {self.task}{f' on {self.host}' if self.host else ''}: {self.message}"
        if self.phase == "hang":
            where = f"rank {self.rank} (local rank {self.local_rank}) on {self.host}"
            return f"{where}, hung: {self.message}"
        where = f"rank {self.rank} (local rank {self.local_rank}) on {self.host}"
        if self.exception is None and self.message.startswith(("exited with", "ended by")):
            return f"{where} {self.message}"
        how = self.signal or f"exit code {self.exit_code}"
        what = f"{self.exception}: {self.message}" if self.exception else self.message
        return f"{where}, {how}: {what}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def looks_like_victim(failure: Failure) -> bool:
    """Tell whether the failure is what a worker shows when a *peer* is gone."""
    if failure.signal in ("SIGTERM", "SIGHUP", "SIGKILL"):
        return True
    return bool(_PEER_LOST.search(failure.message))


def first_failure(failures: Iterable[Failure]) -> tuple[Failure, list[Failure]]:
    """Return the first cause, and the others as its victims, in order of time.

    A worker that failed by itself comes before one that was killed, and that before one that lost
    a peer, whatever their clocks say: a peer sees that a connection ends a moment before the agent
    sees that its worker has.
    """
    ordered = sorted(failures, key=lambda f: (_doubt(f), f.time, f.rank))
    return ordered[0], ordered[1:]


def _doubt(failure: Failure) -> int:
    """Return how likely it is that something else came before a failure."""
    if not looks_like_victim(failure):
        return 0
    return 1 if failure.signal == "SIGKILL" else 2
