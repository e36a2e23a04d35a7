"""What a run is doing, in half a sentence; and whether it has ended, and how.

A run has ended once it has left a result. One that was cancelled leaves none, nor does one whose
tasks are gone otherwise (scancel by hand, a time limit, a job that Slurm has purged): it has ended
once the scheduler has had no task of it for a while. Whoever follows a run asks `Ending`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_elastic.cli.options import quoted
from hpc_elastic.cli.queues import Queue, ask
from hpc_elastic.files import is_there, read_json
from hpc_elastic.rundir import RunDir, RunSpec
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.submit.cancel import bound_s
from hpc_elastic.submit.outcome import Cancellation, cancellation
from hpc_elastic.words import counted

SUCCEEDED = "succeeded"
NOT_SUBMITTED = (
    "it was not submitted yet, as far as is known (a script that is submitted by hand is known "
    "once its first task has started)"
)

_ASK_S = 5.0
"""Seconds between two questions to the scheduler."""
_GONE_S = 6.0
"""A result may be on its way through a network file system so long after the last task has gone."""

Asks = Callable[[Sequence[RunSpec]], Queue]


def doing(run: RunDir, asks: Asks = ask) -> str:
    """Return what a run is doing: ``it waits: 2 tasks PENDING (Resources)``.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    spec = run.load()
    result = how_it_ended(run)
    if result is not None:
        return result.sentence
    queue = asks([spec])
    states = queue.of(spec)
    if states is None:
        return f"it is not known what its tasks do: {queue.why_unknown(spec)}"
    if not current_names(spec):
        return NOT_SUBMITTED
    if all(state.phase is Phase.ENDED for state in states.values()):
        return gone(run, states.values()).sentence
    return what_tasks_do(states.values(), _status(run))


def what_tasks_do(states: Iterable[TaskState], status: Mapping[str, Any]) -> str:
    """Return the same from what is known of its tasks, and from status.json (pure)."""
    listed = list(states)
    if any(state.phase is Phase.RUNNING for state in listed):
        phase = str(status.get("phase") or "starting")
        return f"it is {phase}: {in_words(listed)}"
    if any(state.phase is not Phase.ENDED for state in listed):
        return f"it waits: {in_words(listed)}"
    found = in_words(listed)
    return f"none of its tasks is left, and it has left no result{': ' + found if found else ''}"


def in_words(states: Iterable[TaskState]) -> str:
    """Return so many tasks in this state, and so many in that (pure)."""
    counts = Counter(f"{s.state} ({s.reason})" if s.reason else s.state for s in states)
    return ", ".join(f"{counted(n, 'task')} {what}" for what, n in counts.items())


def _status(run: RunDir) -> dict[str, Any]:
    try:
        return read_json(run.status) or {}
    except (OSError, ValueError):
        return {}


# ---- how it ended --------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: ``succeeded``, ``failed``, ``cancelled``, ``lost`` (its tasks are gone), or
            ``unknown`` (its result can not be read).
        sentence: The same for a person, with what can be done about it.
    """

    status: str
    sentence: str

    @property
    def exit_code(self) -> int:
        """Return that of a command that has followed the run to its end."""
        return 0 if self.status == SUCCEEDED else 1


def how_it_ended(run: RunDir) -> End | None:
    """Return how a run ended that has left a result; None if it has left none."""
    try:
        result = read_json(run.result)
    except (OSError, ValueError) as e:
        return End("unknown", f"it has ended, but {run.result} can not be read: {e}")
    if result is None and not is_there(run.result):
        return None
    status = str((result or {}).get("status") or "unknown")
    return End(status, f"it has ended: {status}")


def gone(run: RunDir, states: Iterable[TaskState] = ()) -> End:
    """Return how a run ended that has no task any more, and has left no result.

    Args:
        run: The run.
        states: Its tasks, as far as the scheduler still lists them.
    """
    remedy = f"to go on from its last checkpoint: hpc-elastic resume {quoted(run.path)}"
    mark = cancellation(run)
    if mark is not None:
        return End("cancelled", f"it was cancelled{mark.by_whom}; {remedy}")
    return End("lost", f"it is lost: {what_tasks_do(states, {})}; {remedy}")


class Ending:
    """Tells when a run has ended, for whoever looks a few times a second.

    Args:
        run: The run.
        asks: Asks the scheduler.
        clock: Seconds, monotonic.
        warn: Is told once that the scheduler does not answer, and once that it does again.

    Raises:
        RunDirectoryError: it is no run directory.
    """

    def __init__(
        self,
        run: RunDir,
        asks: Asks = ask,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run = run
        self._spec = run.load()
        self._asks = asks
        self._clock = clock
        self._warn = warn
        self._is_silent = False
        self._ask_at = 0.0
        self._gone_since: float | None = None
        self._states: list[TaskState] = []

    def come(self) -> End | None:
        """Return how the run ended; None as long as it may go on."""
        ended = how_it_ended(self._run)
        if ended is not None:
            return ended
        now = self._clock()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_S
            self._ask(now)
        is_gone = self._gone_since is not None and now - self._gone_since > _GONE_S
        return gone(self._run, self._states) if is_gone else None

    def _ask(self, now: float) -> None:
        queue = self._asks([self._spec])
        states = queue.of(self._spec)
        self._note_silence(queue.why_unknown(self._spec))
        if states is None:
            if given_up(self._spec, cancellation(self._run), time.time()):
                self._gone_since = -math.inf
            return
        self._states = list(states.values())
        if not current_names(self._spec) or any(s.phase is not Phase.ENDED for s in self._states):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now

    def _note_silence(self, why: str | None) -> None:
        if why is not None and not self._is_silent:
            self._warn(f"it is not known whether the run goes on, but its files are read: {why}")
        if why is None and self._is_silent:
            self._warn("its tasks can be seen again")
        self._is_silent = why is not None


def given_up(spec: RunSpec, mark: Cancellation | None, now: float) -> bool:
    """Tell whether no task can be left, though the scheduler does not say so (pure).

    Args:
        spec: The run.
        mark: Who has cancelled it; None: nobody.
        now: Unix seconds.
    """
    return mark is not None and now - mark.time > bound_s(spec)
