"""The rules of the rendezvous: events in, actions out. No clock, no socket, no log.

Theory of operation
-------------------
A run has one *leader*, and every agent (one a node) keeps one connection to it. All decisions
are the leader's, taken here; `leader` carries them out.

The run is in one of three phases:

FORMING   agents join; the next round has not closed yet
RUNNING   a round has closed: its members have ranks and their workers run
ENDED     the run has succeeded, failed or been closed; whoever asks is told so

FORMING -> RUNNING  A round *closes* once

  1. at least ``min_nodes`` agents have joined,
  2. every member of the last round has joined again, or is gone, and
  3. max nodes have joined; or every task that Slurm calls RUNNING has joined; or, where
     Slurm does not say, nobody has joined for ``last_call_s``.

A task that Slurm calls RUNNING and that does not come, and a member that was told to stop and
does not come back, hold the others up for ``start_timeout_s`` at most. A task whose agent was lost
is not waited for, whatever Slurm says: Slurm learns of a dead node late.

RUNNING -> FORMING  The round *breaks* when a member is lost or leaves, when a worker fails, when a
member asks to join anew, or when a newcomer joins and there is room for it. Everybody else in the
round is told to stop its workers and to join again.

Restarts. A broken round is judged once every member has settled (joined again or gone). If somebody
was lost, workers' failures in that round are its consequences, and nothing is spent. Otherwise the
workers failed on their own: that spends one of the run's ``max_restarts``, and when none is left
the run fails with that failure. It fails at once when, in the very first round, the user's script
can not even be imported: another try would not change that.

RUNNING -> ENDED    All members are done, or restarts have run out, or somebody closes it.

Ranks. Members of the last round keep their order; newcomers follow in the order of their slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from hpc_elastic.rendezvous.failures import Failure, first_failure


@dataclass(frozen=True)
class Agent:
    """One node's agent, in one attempt of its task."""

    task: str
    attempt: int
    slot: int
    host: str
    nproc: int


@dataclass(frozen=True)
class Rules:
    """The settings that the decisions go by; seconds throughout."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    start_timeout_s: float
    last_call_s: float


class Phase(Enum):
    """Where the run stands."""

    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class StartRound:
    """Give every member its rank: its index in ``members``."""

    number: int
    members: tuple[Agent, ...]
    restarts: int


@dataclass(frozen=True)
class StopRound:
    """Tell these agents to stop their workers and to join again."""

    agents: tuple[Agent, ...]
    reason: str


@dataclass(frozen=True)
class EndRun:
    """The run is over; tell everybody."""

    status: str
    failure: Failure | None = None
    victims: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Note:
    """Something worth a line in the event log."""

    kind: str
    fields: dict[str, object]


Action = StartRound | StopRound | EndRun | Note


@dataclass
class Machine:
    """The leader's state. Each event method returns the actions to carry out, in order.

    Times are monotonic seconds of one clock, given by the caller.
    """

    rules: Rules
    round: int = 0
    """Rounds closed so far, over all epochs."""
    restarts: int = 0
    """Restarts spent so far, over all epochs."""
    members: tuple[Agent, ...] = ()
    """Members of the last round, in rank order."""
    phase: Phase = Phase.FORMING
    end: EndRun | None = None
    forming_since: float = 0.0
    joined: dict[Agent, float] = field(default_factory=dict)
    done: set[Agent] = field(default_factory=set)
    unsettled: set[Agent] = field(default_factory=set)
    """Members of the broken round that have neither joined again nor gone."""
    broken_by_loss: bool = False
    failures: list[Failure] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost."""
    running: frozenset[str] | None = None
    """Tasks that Slurm calls RUNNING, asked since this forming began; None: not known."""

    # ---- events -------------------------------------------------------------------------

    def join(self, agent: Agent, now: float) -> list[Action]:
        """An agent is ready for the next round."""
        if self.phase is Phase.ENDED:
            return [self._verdict()]
        actions: list[Action] = []
        if self.phase is Phase.RUNNING:
            if agent in self.members:
                actions += self._break(now, f"{agent.host} joins anew")
            elif len(self.members) < self.rules.max_nodes:
                actions += self._break(now, f"{agent.host} joins")
        self.lost.pop(agent.task, None)
        self._forget_other_attempts(agent)
        self.joined[agent] = now
        self.unsettled.discard(agent)
        actions.append(Note("joined", {"task": agent.task, "host": agent.host}))
        return actions + self._advance(now)

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Action]:
        """Workers of a member failed; its other workers have been stopped."""
        if self.phase is Phase.ENDED or agent not in self.members:
            return []
        self.failures += failures
        actions = self._break(now, f"a worker failed on {agent.host}")
        return actions + self._advance(now)

    def finished(self, agent: Agent, now: float) -> list[Action]:
        """All workers of a member have returned."""
        if self.phase is not Phase.RUNNING or agent not in self.members:
            return []
        self.done.add(agent)
        return self._end(EndRun("succeeded")) if self.done >= set(self.members) else []

    def gone(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent was lost (its connection broke, it fell silent), or left on its own."""
        if self.phase is Phase.ENDED:
            return []
        self.joined.pop(agent, None)
        self.lost[agent.task] = agent.attempt
        actions: list[Action] = [Note("gone", {"task": agent.task, "host": agent.host, "why": why})]
        if agent in self.members and (self.phase is Phase.RUNNING or agent in self.unsettled):
            actions += self._break(now, f"{agent.host} is gone: {why}")
            self.broken_by_loss = True
        self.unsettled.discard(agent)
        return actions + self._advance(now)

    def slurm_says(self, running: frozenset[str] | None, now: float) -> list[Action]:
        """Slurm answered which tasks of the run are RUNNING; None: it did not answer."""
        self.running = running
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._advance(now)

    def close(self) -> list[Action]:
        """Somebody closes the rendezvous for good (torch's ``set_closed`` and ``shutdown``)."""
        return [] if self.phase is Phase.ENDED else self._end(EndRun("closed"))

    # ---- what others may ask ------------------------------------------------------------

    @property
    def wants_slurm(self) -> bool:
        """Whether an answer of Slurm could close the round now."""
        return self.phase is Phase.FORMING and bool(self.joined) and not self.unsettled

    def missing(self) -> list[str]:
        """Name the tasks that a forming round waits for."""
        awaited = {a.task for a in self.unsettled} | self._awaited_tasks()
        return sorted(awaited)

    # ---- rules --------------------------------------------------------------------------

    def _break(self, now: float, reason: str) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.FORMING
        self.forming_since = now
        self.running = None
        self.broken_by_loss = False
        self.unsettled = {a for a in self.members if a.task not in self.lost}
        self.done.clear()
        stopped = tuple(a for a in self.members if a in self.unsettled)
        return [StopRound(stopped, reason)] if stopped else []

    def _advance(self, now: float) -> list[Action]:
        if self.phase is not Phase.FORMING:
            return []
        actions = self._give_up_on_unsettled(now)
        if self.unsettled:
            return actions
        if self.failures:
            actions += self._judge()
        if self.phase is Phase.FORMING and self._may_close(now):
            actions += self._close_round()
        return actions

    def _give_up_on_unsettled(self, now: float) -> list[Action]:
        if not self.unsettled or not self._timed_out(now):
            return []
        late = sorted(self.unsettled, key=lambda a: a.slot)
        self.unsettled.clear()
        return [
            Note("gone", {"task": a.task, "host": a.host, "why": "did not join again in time"})
            for a in late
        ]

    def _judge(self) -> list[Action]:
        failures, self.failures = self.failures, []
        if self.broken_by_loss:
            return [Note("victims", {"workers": len(failures)})]
        first, victims = first_failure(failures)
        never_ran = first.phase == "import" and self.round == 1
        if never_ran or self.restarts >= self.rules.max_restarts:
            return self._end(EndRun("failed", first, tuple(victims)))
        self.restarts += 1
        return [Note("restart", {"restarts": self.restarts, "failure": first.summary()})]

    def _may_close(self, now: float) -> bool:
        if len(self.joined) < self.rules.min_nodes:
            return False
        if len(self.joined) >= self.rules.max_nodes or self._timed_out(now):
            return True
        if self.running is None:
            return now - max(self.joined.values()) >= self.rules.last_call_s
        return not self._awaited_tasks()

    def _awaited_tasks(self) -> set[str]:
        running = self.running or frozenset()
        return {t for t in running if t not in self.lost} - {a.task for a in self.joined}

    def _timed_out(self, now: float) -> bool:
        since = max(self.forming_since, min(self.joined.values(), default=now))
        return now - since >= self.rules.start_timeout_s

    def _close_round(self) -> list[Action]:
        self.members = tuple(self._in_rank_order()[: self.rules.max_nodes])
        for agent in self.members:
            del self.joined[agent]
        self.round += 1
        self.phase = Phase.RUNNING
        return [StartRound(self.round, self.members, self.restarts)]

    def _in_rank_order(self) -> list[Agent]:
        last = {a: rank for rank, a in enumerate(self.members)}
        return sorted(self.joined, key=lambda a: (last.get(a, len(last)), a.slot, a.task))

    def _forget_other_attempts(self, agent: Agent) -> None:
        for other in [a for a in self.joined if a.task == agent.task and a != agent]:
            del self.joined[other]

    def _end(self, end: EndRun) -> list[Action]:
        self.phase = Phase.ENDED
        self.end = end
        return [end]

    def _verdict(self) -> EndRun:
        assert self.end is not None
        return self.end
