"""The decisions of a run, as a numbered sequence of signed entries (pure).

Theory of operation
-------------------
All that the agents of a run must agree on, whoever leads, is one small state: which term it is and
who leads it, which round was closed last and with whom, what has been spent and lost, and whether
the run has ended. Each change of that state is one `LogEntry`, a whole snapshot with a number, and
entry ``n + 1`` may be created by exactly one agent (`decision_log`: link(2) on the shared file
system). Whoever creates it has seen entry ``n``; so nobody can decide without knowing everything
that was decided before:

- An agent *claims* the next term by creating the next entry, with itself as the leader.
- The leader *closes a round*, *releases* members, notes that one has *departed*, *gives all nodes
  back*, or *ends the run*, by creating the next entry of its own term.
- A leader that was paused or cut off, while somebody else has claimed a term, finds its next
  number taken. It is *fenced*: nothing that it would still decide can come true.
- A user *resumes* a run that has stopped by creating the next entry, of the next generation and
  without a leader. So the numbers go on, and with them fences, checkpoints and ledgers; whoever
  comes back from an earlier generation finds that he has no part in the run any more.

The number of a round's entry is its fencing token: whoever acts for that round (a checkpoint's
writer, `hpc_elastic.run.fencing`) may do so as long as no later entry exists.

Reference: M. Herlihy, Wait-Free Synchronization (1991), on agreement by a chain of
compare-and-swap decisions; M. Burrows, The Chubby Lock Service (2006), on sequencers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from hpc_elastic.transport.auth import is_signed, sign


@dataclass(frozen=True)
class Agent:
    """One node's agent, in one attempt of its task."""

    task: str
    attempt: int
    slot: int
    host: str
    nproc: int

    def __hash__(self) -> int:
        """Return the task's: Python keeps that of a text, and an agent is looked up a lot."""
        return hash(self.task)


@dataclass(frozen=True)
class Endpoint:
    """Where a leader listens, and which attempt of which task it is."""

    address: str
    port: int
    task: str
    attempt: int


NOBODY = Endpoint("", 0, "", 0)
"""In place of a leader: the next agent that comes claims the term at once."""


@dataclass(frozen=True)
class RunEnding:
    """How a run ended."""

    status: str
    failure: Failure | None = None
    secondary_failures: tuple[Failure, ...] = ()
    results: str | None = None
    """Name of the folder with what the workers have returned; None: the last round's."""

    @property
    def message(self) -> dict[str, Any]:
        """What agents are told of it."""
        return {"type": "end", "status": self.status, "failure": self.summary}

    @property
    def summary(self) -> str | None:
        """The failure in one line; None if there was none."""
        return self.failure.summary() if self.failure is not None else None


@dataclass(frozen=True)
class FailureCounters:
    """What the run has suffered so far; see `failure_policy`."""

    progress: int | None = None
    """The last step of which a checkpoint was announced, as far as it was recorded."""
    failures_without_progress: int = 0
    first_of_series: Failure | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    """Hosts that the run's tasks are not to start on."""


@dataclass(frozen=True)
class LogEntry:
    """The state that all agents agree on, after one decision."""

    index: int
    term: int
    leader: Endpoint
    round: int = 0
    """Rounds closed so far."""
    restarts: int = 0
    """Restarts spent so far."""
    members: tuple[Agent, ...] = ()
    """Members of the last round, in rank order."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost; Slurm may call it RUNNING for a while yet."""
    possibly_alive: Mapping[str, str] = field(default_factory=dict)
    """Task -> the node where it may run still, for nobody has seen the end of what was lost."""
    times_requeued: int = 0
    """How often the run gave its nodes back because they were too few."""
    started: float = 0.0
    """Unix time at which the run was first led."""
    ending: RunEnding | None = None
    counters: FailureCounters = field(default_factory=FailureCounters)
    requeued: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that the run gave back itself: its next start has a time of its own."""
    generation: int = 0
    """How often the run was resumed; agents of another generation have no part in it."""

    @property
    def is_vacant(self) -> bool:
        """Whether nobody leads: the run was resumed, and waits for its first agent."""
        return self.leader == NOBODY

    def encode_signed(self, secret: bytes) -> str:
        """Return the text of the entry's file."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        return json.dumps({"entry": body, "mac": sign(secret, f"entry|{body}")})


def claim(
    index: int,
    before: LogEntry | None,
    leader: Endpoint,
    now: float,
    *,
    possibly_alive: bool = False,
) -> LogEntry:
    """Return the entry that makes somebody the leader of the next term.

    The leader before is noted as lost: it is not waited for until it joins anew.

    Args:
        index: The entry's index.
        before: The newest entry that verifies; None where there is none. Those in between are
            damaged, and may each have begun a term.
        leader: Who claims.
        now: Unix time.
        possibly_alive: Whether nobody has seen the end of the leader before.
    """
    if before is None:
        return LogEntry(index=index, term=index, leader=leader, started=now)
    gone, lost = before.leader, dict(before.lost)
    if not before.is_vacant:
        lost[gone.task] = max(gone.attempt, before.lost.get(gone.task, -1))
    if lost.get(leader.task, -1) >= leader.attempt:
        del lost[leader.task]
    may_run = {
        t: node for t, node in before.possibly_alive.items() if t not in (gone.task, leader.task)
    }
    if possibly_alive:
        may_run |= {m.task: m.host for m in before.members if m.task == gone.task != leader.task}
    return replace(
        before, index=index, term=before.term + index - before.index, leader=leader,
        lost=lost, possibly_alive=may_run, started=before.started or now,
    )  # fmt: skip


def has_no_leader(index: int, entry: LogEntry | None) -> bool:
    """Return whether nobody has led yet since the run was submitted, or resumed.

    Args:
        index: That of the last entry.
        entry: The newest one that verifies.
    """
    return index == 0 or (entry is not None and entry.index == index and entry.is_vacant)


def resume_entry(index: int, before: LogEntry | None, generation: int) -> LogEntry:
    """Return the entry by which a run that has stopped is resumed (login node).

    Its rounds go on to be counted; what it has spent and lost is forgotten.

    Args:
        index: The entry's index.
        before: The newest entry that verifies; None where there is none.
        generation: The new one.
    """
    if before is None:
        return LogEntry(index=index, term=index, leader=NOBODY, generation=generation)
    return LogEntry(
        index=index,
        term=before.term + index - before.index,
        leader=NOBODY,
        round=before.round,
        started=before.started,
        counters=FailureCounters(progress=before.counters.progress),
        generation=generation,
    )


def decode_signed(text: str, secret: bytes) -> LogEntry | None:
    """Return the entry in a file's text; None if it is cut short, or not signed by this run."""
    try:
        sealed = json.loads(text)
        body, mac = str(sealed["entry"]), str(sealed["mac"])
        if not is_signed(secret, f"entry|{body}", mac):
            return None
        raw = json.loads(body)
        raw["leader"] = Endpoint(**raw["leader"])
        raw["members"] = tuple(Agent(**m) for m in raw["members"])
        raw["ending"] = _ending(raw["ending"]) if raw["ending"] else None
        raw["counters"] = _counters(raw["counters"])
        return LogEntry(**raw)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ending(raw: dict[str, Any]) -> RunEnding:
    failure = Failure(**raw["failure"]) if raw["failure"] else None
    secondary_failures = tuple(Failure(**f) for f in raw["secondary_failures"])
    return RunEnding(raw["status"], failure, secondary_failures, raw.get("results"))


def _counters(raw: dict[str, Any]) -> FailureCounters:
    first = Failure(**raw["first_of_series"]) if raw["first_of_series"] else None
    return FailureCounters(**{**raw, "first_of_series": first, "excluded": tuple(raw["excluded"])})


# ---- How the run's entries are found and created, whatever a file system's caches say (pure)
# - An entry is made complete under another name and then linked to its own: link(2) fails if the
#   name exists, on NFS too, so that exactly one agent creates each number (`log_entry` says what
#   follows from that).
# - Where the reply to link(2) is lost, the entry that is there tells whose it is: it names its
#   leader, and what that one has decided. A count of links may come from a cache, and the numbers
#   of inodes may change.
# - The last entry is found by a listing, never by a look for the next one's path: a client
#   remembers for a minute that a name was not there.
# - The file under the other name is removed *behind*: a removal may hang for as long as a dead
#   node holds a delegation, and a decision that is made waits for nothing.
# - A lease is a counter that the leader of a term raises as long as it lives. Only whether it
#   changes matters, seen on the reader's own clock: no two clocks are ever compared.


class LogFiles(Protocol):
    """A run's entries and leases. Each call may block, and may raise `OSError`."""

    def indices(self) -> Collection[int]:
        """Return the indices of all entries, from a fresh listing."""

    def read(self, index: int) -> LogEntry | None:
        """Open an entry anew and return it; None if it is damaged or not there."""

    def put(self, entry: LogEntry) -> None:
        """Link an entry at its index; `FileExistsError`: that is taken, or the reply was lost."""

    def lease(self, term: int) -> int | None:
        """Open a lease anew; return what the leader wrote last, None if nothing of his is there."""


class LogSteps:
    """What is done with the entries of one run.

    Args:
        files: Where it is done.
    """

    def __init__(self, files: LogFiles) -> None:
        self._files = files

    def last_index(self) -> Steps[int]:
        """Return the index of the last entry; 0 if there is none.

        Raises:
            OSError: the file system does not answer.
        """
        return max((yield self._files.indices), default=0)

    def last(self) -> Steps[tuple[int, LogEntry | None]]:
        """Return the index of the last entry, and the newest entry that verifies.

        Raises:
            OSError: the file system does not answer.
        """
        last = yield from self.last_index()
        for index in range(last, 0, -1):
            entry: LogEntry | None = yield partial(self._files.read, index)
            if entry is not None:
                return last, entry
        return last, None

    def look(self) -> Steps[tuple[int, LogEntry | None, int | None]]:
        """Return the same, and the lease of that entry's term.

        Raises:
            OSError: the file system does not answer.
        """
        index, entry = yield from self.last()
        if entry is None:
            return index, None, None
        return index, entry, (yield partial(self._files.lease, entry.term))

    def create(self, entry: LogEntry) -> Steps[bool]:
        """Create an entry; False if its index is taken.

        Raises:
            OSError: it failed; the entry may be tried again.
        """
        try:
            yield partial(self._files.put, entry)
        except OSError:
            if entry.index not in (yield self._files.indices):
                raise
            found: LogEntry | None = yield partial(self._files.read, entry.index)
            return found == entry
        return True


# ---- Procedures on the shared file system, as generators (pure)
# A procedure yields one step on the file system after the other, and is sent what came of it. So
# the same procedure runs on real files, in a thread that may wait (`carried_out`), and in virtual
# time (`simulation.storage`), where another node may come between any two steps.


T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""Yields what is to be done on the file system, is sent the result, or thrown the `OSError`."""


def carried_out(steps: Steps[T]) -> T:
    """Carry a procedure out on real files, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except OSError as e:
                step = steps.throw(e)
            else:
                step = steps.send(result)
    except StopIteration as over:
        value: T = over.value
        return value


# ---- Which of several failed workers failed first, and which only followed (pure)
# When one worker raises, its peers' collectives break, the agents stop what is left, and many
# workers end with an error within milliseconds. The report must show the one that was the cause.


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
    ``hang`` where the worker was ended because it made no step (`hang_diagnosis`).
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
    """Return whether the failure is what a worker shows when a *peer* is gone."""
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


# ---- The settings that a leader's decisions go by (pure)


@dataclass(frozen=True)
class RoundRules:
    """What the run was submitted with; seconds throughout."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    straggler_timeout_s: float
    last_call_s: float
    scale_up: Literal["checkpoint", "immediate", "on_restart"] = "checkpoint"
    scale_up_timeout_s: float = 60.0
    below_min_timeout_s: float | None = None
    in_sweep: bool = False
    """Whether other runs may compete for the same nodes that were submitted together with it."""
    max_failed_rounds: int = 3
    max_requeues: int | None = None
    """How often a task may go back to the queue; None: as often as it has to."""
    ft: bool = False
    """Whether each node is a replica of its own (`replica_state`)."""
