"""The log of a run's decisions: a numbered sequence of signed entries (pure).

Theory of operation
-------------------
The agents of a run agree on one small state: the term and its leader, the last closed round and its
members, the restarts and losses so far, and whether the run has ended. Each change of that state is
one `LogEntry`: a whole snapshot with an index. Exactly one agent can create entry ``n + 1``
(`decision_log`: link(2) on the shared file system), and it has read entry ``n`` before. So each
decision is made with knowledge of all earlier ones:

- An agent *claims* the next term by creating the next entry, with itself as the leader.
- The leader *closes a round*, *releases* members, notes that one has *departed*, *requeues all
  nodes*, notes that it *fails* itself, or *ends the run*, by creating the next entry of its own
  term.
- If another agent claims a term while the leader is paused or cut off, that leader finds its next
  index taken. It is *fenced*: it can make no decision any more.
- A user *resumes* a run that has stopped by creating the next entry, with the next generation and
  without a leader. So indices, fencing tokens, checkpoints and ledgers continue; agents of an
  earlier generation have no part in the run any more.

The index of a round's entry is its fencing token: a process that acts for that round (a
checkpoint's writer, `hpc_elastic.run.fencing`) may do so as long as no later entry exists.

A leader removes old entries, never the last one, so the last index only grows. Only the *first*
entry of an index is a decision: if a process that was stalled creates a removed index again, a
later entry exists all the time. So an entry counts once a listing that begins *behind* its link
shows no later one, and readers go by what is listed.

Reference: M. Herlihy, Wait-Free Synchronization (1991), on agreement by a chain of
compare-and-swap decisions; M. Burrows, The Chubby Lock Service (2006), on sequencers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Protocol

from hpc_elastic.config.schema import LauncherSettings, RunSettings
from hpc_elastic.data.batch import THROUGHPUT_UNIT
from hpc_elastic.shared_files import Steps, create_once
from hpc_elastic.transport.auth import is_signed, sign
from hpc_elastic.transport.messages import read_fields


@dataclass(frozen=True)
class Agent:
    """One node's agent, in one attempt of its task."""

    task: str
    attempt: int
    slot: int
    host: str
    nproc: int
    switches: str = ""
    """Network switches above its node, from the top, with dots between; empty if unknown."""
    throughput: int = THROUGHPUT_UNIT
    """How fast its workers are in relation to those of other nodes (``launcher.pools``)."""

    def __hash__(self) -> int:  # Python caches that of a string: agents are looked up often
        return hash(self.task)


@dataclass(frozen=True)
class Endpoint:
    """Where a leader listens, and the attempt of the task that it is."""

    address: str
    port: int
    task: str
    attempt: int


NOBODY = Endpoint("", 0, "", 0)  # no leader: the next agent that starts claims a term at once


@dataclass(frozen=True)
class RunEnding:
    """How a run ended."""

    status: str
    failure: Failure | None = None
    secondary_failures: tuple[Failure, ...] = ()
    results: str | None = None
    """Name of the folder with the return values of the workers; None: the last round's."""

    @property
    def summary(self) -> str | None:
        """The failure in one line."""
        return self.failure.summary() if self.failure is not None else None


@dataclass(frozen=True)
class LostNode:
    """A loss of an agent at work that nothing has announced."""

    host: str
    why: str  # Slurm's state and reason once they are known
    round: int
    is_first: bool  # whether it stands for the losses of its round that may be the script's fault
    is_suspect: bool = False  # whether its heartbeats stopped, and not those of many others


@dataclass
class FailureCounters:
    """The failures of the run so far, over all terms (`failure_policy.FailurePolicy`)."""

    progress: int | None = None  # step of the last announced checkpoint
    failures_without_progress: int = 0
    """Rounds in a row that broke by a failure of their own and made no checkpoint."""
    first_of_series: Failure | None = None
    losses: int = 0  # rounds in a row that lost nodes broke, without progress
    reached: int | None = None  # the furthest step of any round
    gone: Mapping[str, LostNode] = field(default_factory=dict)
    """Task -> its last loss that nothing has announced, until its next attempt joins."""
    strikes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Host -> times of its strikes."""
    exclusions: Mapping[str, float] = field(default_factory=dict)
    """Host -> the end of its exclusion."""
    failed_terms: tuple[Failure, ...] = ()
    """Of leaders, in a row, without progress; without tracebacks."""


@dataclass(frozen=True)
class LogEntry:
    """The state that all agents agree on, after one decision."""

    index: int
    term: int
    leader: Endpoint
    round: int = 0  # rounds closed so far
    restarts: int = 0  # restarts spent so far
    members: tuple[Agent, ...] = ()  # members of the last round, in rank order
    lost: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost; Slurm may still report it as RUNNING."""
    possibly_alive: Mapping[str, str] = field(default_factory=dict)
    """Task -> node where a lost attempt may still run: its end was not observed."""
    times_requeued: int = 0
    """How often the run has requeued all its nodes because they were fewer than min nodes."""
    started: float = 0.0  # Unix time at which the run was first led
    claimed: float = 0.0  # Unix time at which the leader has claimed its term, on its clock
    ending: RunEnding | None = None
    counters: FailureCounters = field(default_factory=FailureCounters)
    requeued: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that the run has requeued itself: that sets the time of its next start."""
    step_times: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step by number of nodes, as measured so far."""
    generation: int = 0
    """How often the run was resumed; agents of another generation have no part in it."""
    gave_up: bool = False  # whether the leader has failed, and decides nothing more in this term

    @property
    def is_vacant(self) -> bool:
        """Whether there is no leader: the run was resumed, and waits for its first agent."""
        return self.leader == NOBODY

    @property
    def attempts(self) -> dict[str, int]:
        """Task -> the newest attempt of it that this entry names."""
        newest = dict(self.lost)
        named: tuple[Endpoint | Agent, ...] = (self.leader, *self.members)
        for one in named:
            newest[one.task] = max(one.attempt, newest.get(one.task, 0))
        return newest

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
    """Return the entry that makes an agent the leader of the next term.

    It marks the leader before as lost, so that no round waits for it until it joins again.
    ``before`` is the newest entry that verifies; those in between are damaged, and may each have
    begun a term. ``possibly_alive``: the end of the leader before was not observed.
    """
    if before is None:
        return LogEntry(index=index, term=index, leader=leader, started=now, claimed=now)
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
        lost=lost, possibly_alive=may_run, started=before.started or now, claimed=now,
        gave_up=False,
    )  # fmt: skip


def has_no_leader(index: int, entry: LogEntry | None) -> bool:
    """Return whether no agent has led since the submission; ``entry``: the newest valid."""
    return index == 0 or (entry is not None and entry.index == index and entry.is_vacant)


def resume_entry(index: int, before: LogEntry | None, generation: int) -> LogEntry:
    """Return the entry that resumes a run that has stopped (login node).

    The count of rounds continues; restarts and losses start from none. ``before`` is the newest
    entry that verifies.
    """
    if before is None:
        return LogEntry(index=index, term=index, leader=NOBODY, generation=generation)
    return LogEntry(
        index, before.term + index - before.index, NOBODY, before.round, started=before.started,
        counters=FailureCounters(progress=before.counters.progress),
        step_times=before.step_times, generation=generation,
    )  # fmt: skip


def decode_signed(text: str, secret: bytes) -> LogEntry | None:
    """Return the entry in a file's text; None if it is truncated, or not signed by this run.

    Fields that a newer version has added are left out: a signed entry is never damage. A leader of
    this version goes on without them, so a new field may only add to a decision.
    """
    try:
        sealed = json.loads(text)
        body, mac = str(sealed["entry"]), str(sealed["mac"])
        if not is_signed(secret, f"entry|{body}", mac):
            return None
        return read_fields(LogEntry, json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class LogFiles(Protocol):
    """A run's entries and leases. Each call may block, and may raise `OSError`."""

    def indices(self) -> Collection[int]:
        """Return the indices of all entries that are left, from a fresh listing."""

    def read(self, index: int) -> LogEntry | None:
        """Open an entry anew and return it; None if it is damaged or not there."""

    def put(self, entry: LogEntry) -> None:
        """Link an entry at its index; `FileExistsError`: it is taken, or the reply was lost."""

    def lease(self, term: int) -> int | None:
        """Open a lease anew; return its counter, None if the leader of the term wrote none."""


class LogSteps:
    """The procedures on the entries of one run; OSError if the file system does not answer.

    - Exactly one agent creates each index (`create_once`): the content of an entry, with its leader
      and its decision, shows which.
    - The last entry is found in a listing, never by opening the next one's path: a client caches
      for a minute that a name is absent. An entry that cannot be read is damaged only if it is
      still the last one in another listing: otherwise it was removed meanwhile.
    - The file under the other name is removed *behind*: a removal may hang for as long as a dead
      node holds a delegation, and a decision does not wait for that.
    - A lease is a counter that the leader of a term increments as long as it is alive. Readers
      measure on their own clock when it changes: no two clocks are compared.
    """

    def __init__(self, files: LogFiles) -> None:
        self._files = files

    def last_index(self) -> Steps[int]:
        """Return the index of the last entry; 0 if there is none."""
        return max((yield self._files.indices), default=0)

    def last(self) -> Steps[tuple[int, LogEntry | None]]:
        """Return the index of the last entry, and the newest entry that verifies."""
        listed: Collection[int] = yield self._files.indices
        while True:
            last, entry = max(listed, default=0), None
            for index in sorted(listed, reverse=True):
                if (entry := (yield partial(self._files.read, index))) is not None:
                    break
            if entry is not None and entry.index == last:
                return last, entry
            listed = yield self._files.indices
            if max(listed, default=0) == last:
                return last, entry

    def last_with_lease(self) -> Steps[tuple[int, LogEntry | None, int | None]]:
        """Return the same as `last`, and the lease of that entry's term."""
        index, entry = yield from self.last()
        if entry is None:
            return index, None, None
        return index, entry, (yield partial(self._files.lease, entry.term))

    def create(self, entry: LogEntry) -> Steps[bool]:
        """Create an entry; False if there is one, or a later one. Retry after OSError."""
        put, read = partial(self._files.put, entry), partial(self._files.read, entry.index)
        is_made = yield from create_once(put, self._files.indices, entry.index, read, entry)
        return is_made and (yield from self.last_index()) <= entry.index


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
    function has been entered, and for what is certain to fail again before the first step;
    ``final`` for a training that is refused before its first step, and for what a setting makes the
    end of the run; else ``run``; ``start`` if a task ended before it had any worker; ``hang`` if
    the worker was ended because it made no step (`hang_diagnosis`); ``lead`` if it is the agent
    that failed, as the leader of the run. ``exit_code`` is None if a signal ended the worker, and
    ``signal`` its name. ``remedy`` is what to do, if that is known; ``round`` is the number of the
    worker's round.
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

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Failure:
        """Return a failure of result.json; what is missing there is None here."""
        found: Any = {each.name: raw.get(each.name) for each in fields(cls)}
        return cls(**{**found, "message": str(found["message"] or "")})

    @property
    def place(self) -> str:
        """Which worker failed, or which task without one."""
        if self.phase in ("start", "lead"):
            leads = "the leader, " if self.phase == "lead" else ""
            return f"{leads}task {self.task} on {self.host or 'an unknown node'}"
        rank = f"rank {self.rank} (local rank {self.local_rank})"
        return f"{'a worker' if self.rank is None else rank} on {self.host}"

    @property
    def cause(self) -> str:
        """How it has ended, apart from an error; empty if that is all."""
        if self.phase in ("start", "lead", "hang"):
            return "hung" if self.phase == "hang" else ""
        if self.exception is None and self.message.startswith(("exited with", "ended by")):
            return self.message
        if self.signal:
            return f"ended by {self.signal}"
        return "" if self.exit_code is None else f"exit code {self.exit_code}"

    def summary(self) -> str:
        """Return one line: which worker failed, and why."""
        if self.cause == self.message:
            return f"{self.place} {self.cause}"
        what = f"{self.exception}: {self.message}" if self.exception else self.message
        return ": ".join(filter(None, [", ".join(filter(None, [self.place, self.cause])), what]))


def is_secondary(failure: Failure) -> bool:
    """Return whether the failure is the effect of a lost *peer*."""
    is_killed = failure.signal in ("SIGTERM", "SIGHUP", "SIGKILL")
    return is_killed or bool(_PEER_LOST.search(failure.message))


def first_failure(failures: Iterable[Failure]) -> tuple[Failure, list[Failure]]:
    """Return the first failure, and the secondary ones in order of time.

    When one worker raises, its peers' collectives break, and the agents stop the others: many end
    with an error within milliseconds. The report must show the one that was the cause. So a worker
    that failed by itself comes before one that was killed, and that before one that lost a peer,
    whatever their times: a peer detects the end of a connection a moment before the agent detects
    the end of its worker.
    """

    def order(failure: Failure) -> tuple[int, float, int]:
        killed = 1 if failure.signal == "SIGKILL" else 2
        return killed if is_secondary(failure) else 0, failure.time, failure.rank

    ordered = sorted(failures, key=order)
    return ordered[0], ordered[1:]


@dataclass(frozen=True)
class RoundRules:
    """The settings of a leader's decisions, as the run was submitted; seconds throughout."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    straggler_timeout_s: float
    last_call_s: float
    scale_up: Literal["checkpoint", "immediate", "on_restart"] = LauncherSettings.scale_up
    scale_up_timeout_s: float = LauncherSettings.scale_up_timeout_s
    below_min_timeout_s: float | None = LauncherSettings.below_min_timeout_s
    in_sweep: bool = False
    """Whether runs that were submitted together with it may compete for the same nodes."""
    fits_time_limits: bool = False
    """Whether its waiting tasks get time limits that fit between other jobs."""
    give_way: str = "off"
    """Which nodes go back for jobs of others: ``off``, ``on`` (beyond the minimum) or ``all``."""
    noted_wait_s: float | None = None
    """Seconds without a group after which that is noted; None: it is not (``launcher.notify``)."""
    max_failed_rounds: int = LauncherSettings.max_failed_rounds
    max_requeues: int | None = LauncherSettings.max_requeues
    """How often a task may be requeued; None: no limit."""
    ft: bool = False  # whether each unit of nodes is a replica of its own (`replica_state`)
    min_efficiency: float | None = LauncherSettings.min_efficiency
    """The run grows while a further node adds this part of a node's share; None: up to its max."""
    unit_nodes: int = 1  # nodes that only work together: a round has a multiple of it
    node_counts: tuple[int, ...] = ()
    """The numbers of nodes that a round may have, min and max among them; empty: each multiple of
    ``unit_nodes`` from min to max."""

    @classmethod
    def of(
        cls, settings: RunSettings, *, in_sweep: bool = False, fits_time_limits: bool = False
    ) -> RoundRules:
        """Return the rules of a run with these settings."""
        nodes, launcher = settings.nodes, settings.launcher
        return cls(
            nodes.min, nodes.max, launcher.max_restarts,
            launcher.rendezvous.straggler_timeout_s, launcher.rendezvous.last_call_s,
            scale_up=launcher.scale_up, scale_up_timeout_s=launcher.scale_up_timeout_s,
            below_min_timeout_s=launcher.below_min_timeout_s,
            max_failed_rounds=launcher.max_failed_rounds,
            max_requeues=launcher.max_requeues, min_efficiency=launcher.min_efficiency,
            ft=settings.ft, unit_nodes=nodes.unit, node_counts=tuple(settings.node_counts),
            in_sweep=in_sweep, fits_time_limits=fits_time_limits,
            give_way=getattr(launcher, "give_way", "off"),
            noted_wait_s=launcher.notify.noted_wait_s,
        )  # fmt: skip

    def usable_nodes(self, num_nodes: int) -> int:
        """Return how many of these nodes can have a place in one round."""
        most = min(num_nodes, self.max_nodes)
        if self.node_counts:
            return max((count for count in self.node_counts if count <= most), default=0)
        return most - most % self.unit_nodes

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of nodes that a round may have."""
        return self.node_counts or range(self.min_nodes, self.max_nodes + 1, self.unit_nodes)
