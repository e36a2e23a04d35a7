"""The rules of the rendezvous: events in, actions out. No clock, no socket, no log.

Theory of operation
-------------------
A run has one *leader*, and every agent (one a node) keeps one connection to it. Who leads, and
what a leader's decisions are worth, is settled in `record`; how a leader knows that somebody lives,
in `leadership`. Which decisions it makes about the group stands here.

The run is in one of four phases:

FORMING    agents join; the next round has not closed yet
RUNNING    a round has closed: its members have ranks and their workers run
DISBANDED  there were too few for too long: every node goes back to the queue
ENDED      the run has succeeded, failed or been closed; whoever asks is told so

FORMING -> RUNNING  A round *closes* once

  1. at least ``min_nodes`` agents have joined,
  2. every member of the last round has joined again, or is gone, and
  3. max nodes have joined; or every task that Slurm calls RUNNING has joined; or, where
     Slurm does not say, nobody has joined for ``last_call_s``.

A task that Slurm calls RUNNING and that does not come, and a member that was told to stop and
does not come back, hold the others up for ``start_timeout_s`` at most. A task whose agent was lost
is not waited for, whatever Slurm says: Slurm learns of a dead node late. A task that Slurm calls
ended or queued is gone at once, if its agent was last heard of before Slurm was asked.

FORMING -> DISBANDED  With fewer than ``min_nodes`` for ``min_wait_s`` (times 1 to 2, by chance) all
nodes go back to the queue, for a time that is random and doubles each time; so does the range of
the wait. Of two runs that hold half of the nodes each, one gives way.

FORMING -> ENDED    So many tasks have failed for good that the others are fewer than min nodes.

RUNNING -> FORMING  The round *breaks* when a member is lost or leaves, when a worker fails, when a
member asks to join anew, or when newcomers are admitted. Everybody else in the round is told to
stop its workers and to join again.

Growth. A newcomer parks. Whether it is worth a restart is weighed (`growth`); when, is ``grow``:
``now``; ``boundary``: the members are asked to hold at their next checkpoint (`boundary`), and the
round breaks when all are there, or, where the script has never announced one, ``grow_after_s``
after the newcomer came; ``never``: the newcomer is taken in when the round breaks for another
reason. One that is not wanted for ``min_wait_s`` goes back to the queue.

Restarts. A broken round is judged once every member has settled (joined again or gone). If it was
not a worker's failure that broke it, or somebody was lost, then workers' failures in that round are
consequences, and nothing is spent. Otherwise the workers failed on their own: that spends one of
the run's ``max_restarts``, and when none is left the run fails with that failure. It fails at once
when, in the very first round, the user's script can not even be imported: another try would not
change that.

RUNNING -> ENDED    All members are done, or restarts have run out, or somebody closes it.

Ranks. Members of the last round keep their order; newcomers follow in the order of their slots.

No event costs more than constant time, but for those that a round has once: a group of ten
thousand forms in ten thousand small steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from hpc_elastic.rendezvous import slurms_word
from hpc_elastic.rendezvous.actions import (
    Action,
    EndRun,
    GiveBack,
    Hold,
    Note,
    StartRound,
    StopRound,
)
from hpc_elastic.rendezvous.boundary import Boundaries
from hpc_elastic.rendezvous.failures import Failure, first_failure
from hpc_elastic.rendezvous.growth import Decision, Outlook, weigh
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.slurm.states import Phase as SlurmPhase
from hpc_elastic.slurm.states import TaskState

_LONGEST_AWAY_S = 3600.0


@dataclass(frozen=True)
class Rules:
    """The settings that the decisions go by; seconds throughout."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    start_timeout_s: float
    last_call_s: float
    grow: Literal["boundary", "now", "never"] = "boundary"
    grow_after_s: float = 60.0
    min_wait_s: float | None = None


class Phase(Enum):
    """Where the run stands."""

    FORMING = "forming"
    RUNNING = "running"
    DISBANDED = "disbanded"
    ENDED = "ended"


@dataclass
class Machine:
    """The leader's state. Each event method returns the actions to carry out, in order.

    Times are monotonic seconds of one clock, given by the caller.
    """

    rules: Rules
    rng: random.Random = field(default_factory=random.Random)
    round: int = 0
    """Rounds closed so far, over all epochs."""
    restarts: int = 0
    """Restarts spent so far, over all epochs."""
    members: tuple[Agent, ...] = ()
    """Members of the last round, in rank order."""
    phase: Phase = Phase.FORMING
    end: EndRun | None = None
    forming_since: float = 0.0
    not_before: float = 0.0
    """No round may close before this time (`leadership`)."""
    joined: dict[Agent, float] = field(default_factory=dict)
    """Agents that wait for a round, in the order in which they joined."""
    done: set[Agent] = field(default_factory=set)
    unsettled: set[Agent] = field(default_factory=set)
    """Members of the broken round that have neither joined again nor gone."""
    excused: bool = False
    """Whether failures in the broken round are consequences of what broke it."""
    failures: list[Failure] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost."""
    given_back: int = 0
    view: Mapping[str, TaskState] | None = None
    """What Slurm said last in this forming; None: nothing, or it did not answer."""
    awaited: set[str] = field(default_factory=set)
    """Tasks that Slurm calls RUNNING, that have not joined and were not lost."""
    boundaries: Boundaries = field(default_factory=Boundaries)
    outlook: Outlook = field(default_factory=Outlook)
    _ranks: dict[Agent, int] = field(default_factory=dict)
    _member_tasks: dict[str, Agent] = field(default_factory=dict)
    _last_join: dict[Agent, float] = field(default_factory=dict)
    _by_task: dict[str, Agent] = field(default_factory=dict)
    _holding: bool = False
    _num_holds: int = 0
    _noted: tuple[int, int] | None = None
    """The growth decision that was logged last: how many of how many are wanted."""
    _patience: float = 0.0
    _away_s: float = 0.0

    def __post_init__(self) -> None:
        self._patience = self.rng.uniform(1.0, 2.0 + self.given_back)
        self._index_members()

    @classmethod
    def resume(cls, record: Record, rules: Rules, now: float, rng: random.Random) -> Machine:
        """Go on from where the leader before has left off: its members are to join again."""
        machine = cls(
            rules, rng, round=record.round, restarts=record.restarts, members=record.members,
            lost=dict(record.lost), given_back=record.given_back, forming_since=now,
            excused=True,
        )  # fmt: skip
        machine.unsettled = {a for a in record.members if not machine._is_lost(a)}
        if record.ending is not None:
            machine.phase = Phase.ENDED
            ending = record.ending
            machine.end = EndRun(ending.status, ending.failure, ending.victims)
        return machine

    # ---- events -------------------------------------------------------------------------

    def join(self, agent: Agent, now: float) -> list[Action]:
        """An agent is ready for the next round."""
        if self.phase is Phase.ENDED:
            return [self._verdict()]
        if self.phase is Phase.DISBANDED:
            return [GiveBack((agent,), self._away_s, all=False)]
        actions: list[Action] = []
        if self.phase is Phase.RUNNING and agent in self._ranks:
            actions += self._break(now, f"{agent.host} joins anew")
        self._enter(agent, now)
        actions.append(Note("joined", {"task": agent.task, "host": agent.host}))
        return actions + self._advance(now)

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Action]:
        """Workers of a member failed; its other workers have been stopped."""
        if not self._is_at_work(agent):
            return []
        self.failures += failures
        actions = self._break(now, f"a worker failed on {agent.host}", excused=False)
        return actions + self._advance(now)

    def finished(self, agent: Agent, now: float) -> list[Action]:
        """All workers of a member have returned."""
        if self.phase is not Phase.RUNNING or agent not in self._ranks:
            return []
        self.done.add(agent)
        return self._end(EndRun("succeeded")) if len(self.done) == len(self.members) else []

    def boundary(self, agent: Agent, step: int, held: int, now: float) -> list[Action]:
        """All workers of a member have announced the checkpoint of ``step``.

        ``held`` is the number of the request to hold that some of them obey there, or 0.
        """
        if self.phase is not Phase.RUNNING or agent not in self._ranks:
            return []
        stays = self._holding and held == self._num_holds
        self.boundaries.announce(agent, step, stays, now)
        return self._advance(now)

    def gone(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent was lost (its connection broke, it fell silent), or left on its own."""
        if self.phase in (Phase.ENDED, Phase.DISBANDED):
            return []
        self.joined.pop(agent, None)
        self.lost[agent.task] = max(agent.attempt, self.lost.get(agent.task, agent.attempt))
        self.awaited.discard(agent.task)
        actions: list[Action] = [Note("gone", {"task": agent.task, "host": agent.host, "why": why})]
        if self._is_at_work(agent):
            actions += self._break(now, f"{agent.host} is gone: {why}")
            self.excused = True
        self.unsettled.discard(agent)
        return actions + self._advance(now)

    def slurm_says(
        self, view: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Action]:
        """Slurm answered how the tasks of the run are; None: it did not answer."""
        self.view = view
        self.awaited = {
            task
            for task, state in (view or {}).items()
            if state.phase is SlurmPhase.RUNNING
            and not slurms_word.is_lost(state, self.lost.get(task))
            and self._by_task.get(task) not in self.joined
        }
        actions: list[Action] = []
        for agent in self._ended_by_slurm(view or {}, asked_at):
            actions += self.gone(agent, "Slurm says that its task has ended", now)
        if self.phase is Phase.FORMING and (why := self._hopeless(view or {})):
            return actions + self._end(EndRun("failed", why))
        return actions + self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._advance(now)

    def slept(self, for_s: float, now: float) -> None:
        """The leader was not running for so long: nobody is late because of that."""
        self.forming_since = min(now, self.forming_since + for_s)
        self.joined = {agent: min(now, since + for_s) for agent, since in self.joined.items()}

    def close(self) -> list[Action]:
        """Somebody closes the rendezvous for good (torch's ``set_closed`` and ``shutdown``)."""
        return [] if self.phase is Phase.ENDED else self._end(EndRun("closed"))

    # ---- what others may ask ------------------------------------------------------------

    @property
    def wants_slurm(self) -> bool:
        """Whether an answer of Slurm could change anything now."""
        return self.phase is Phase.FORMING or (self.phase is Phase.RUNNING and bool(self.joined))

    def is_member(self, agent: Agent) -> bool:
        """Whether an agent has a rank in the last round."""
        return agent in self._ranks

    def missing(self) -> list[str]:
        """Name the tasks that a forming round waits for; below min nodes, all that are queued."""
        awaited = {a.task for a in self.unsettled} | self.awaited
        if len(self.joined) < self.rules.min_nodes:
            here = {a.task for a in self.joined}
            awaited |= {
                task
                for task, state in (self.view or {}).items()
                if task not in here and state.phase is not SlurmPhase.ENDED
            }
        return sorted(awaited)

    # ---- rules: a round -----------------------------------------------------------------

    def _is_at_work(self, agent: Agent) -> bool:
        running = self.phase is Phase.RUNNING and agent in self._ranks
        return running or (self.phase is Phase.FORMING and agent in self.unsettled)

    def _is_lost(self, agent: Agent) -> bool:
        return self.lost.get(agent.task, -1) >= agent.attempt

    def _enter(self, agent: Agent, now: float) -> None:
        for other in self._other_attempts(agent):
            self.joined.pop(other, None)
            self.unsettled.discard(other)
        self._by_task[agent.task] = agent
        self.joined.pop(agent, None)  # to come last in order
        self.joined[agent] = self._last_join[agent] = now
        self.lost.pop(agent.task, None)
        self.awaited.discard(agent.task)
        self.unsettled.discard(agent)

    def _other_attempts(self, agent: Agent) -> list[Agent]:
        known = {self._by_task.get(agent.task), self._member_tasks.get(agent.task)}
        return [a for a in known if a is not None and a != agent]

    def _break(self, now: float, reason: str, *, excused: bool = True) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.FORMING
        self.forming_since = now
        self.view = None
        self.awaited.clear()
        self.excused = excused
        self.unsettled = {a for a in self.members if not self._is_lost(a)}
        self.done.clear()
        self._holding, self._noted = False, None
        stopped = tuple(a for a in self.members if a in self.unsettled)
        return [StopRound(stopped, reason)] if stopped else []

    def _advance(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING:
            return self._consider_newcomers(now)
        if self.phase is not Phase.FORMING:
            return []
        actions = self._give_up_on_unsettled(now)
        if self.unsettled:
            return actions
        if self.failures:
            actions += self._judge()
        if self.phase is Phase.FORMING and self._may_close(now):
            actions += self._close_round()
        elif self.phase is Phase.FORMING and self._too_few_for_too_long(now):
            actions += self._disband()
        return actions

    def _give_up_on_unsettled(self, now: float) -> list[Action]:
        if not self.unsettled or not self._timed_out(now):
            return []
        late = sorted(self.unsettled, key=lambda a: a.slot)
        self.unsettled.clear()
        self.excused = True
        return [
            Note("gone", {"task": a.task, "host": a.host, "why": "did not join again in time"})
            for a in late
        ]

    def _judge(self) -> list[Action]:
        failures, self.failures = self.failures, []
        if self.excused:
            return [Note("victims", {"workers": len(failures)})]
        first, victims = first_failure(failures)
        never_ran = first.phase == "import" and self.round == 1
        if never_ran or self.restarts >= self.rules.max_restarts:
            return self._end(EndRun("failed", first, tuple(victims)))
        self.restarts += 1
        return [Note("restart", {"restarts": self.restarts, "failure": first.summary()})]

    def _may_close(self, now: float) -> bool:
        if len(self.joined) < self.rules.min_nodes or now < self.not_before:
            return False
        if len(self.joined) >= self.rules.max_nodes or self._timed_out(now):
            return True
        if self.view is None:
            return now - self.joined[next(reversed(self.joined))] >= self.rules.last_call_s
        return not self.awaited

    def _timed_out(self, now: float) -> bool:
        return now - self._waiting_since(now) >= self.rules.start_timeout_s

    def _waiting_since(self, now: float) -> float:
        return max(self.forming_since, next(iter(self.joined.values()), now))

    def _close_round(self) -> list[Action]:
        self.members = tuple(self._in_rank_order()[: self.rules.max_nodes])
        self._index_members()
        for agent in self.members:
            del self.joined[agent]
        self.round += 1
        self.phase = Phase.RUNNING
        self.given_back = 0
        self.boundaries.new_round()
        return [StartRound(self.round, self.members, self.restarts)]

    def _index_members(self) -> None:
        self._ranks = {a: rank for rank, a in enumerate(self.members)}
        self._member_tasks = {a.task: a for a in self.members}

    def _in_rank_order(self) -> list[Agent]:
        newest = len(self._ranks)
        return sorted(self.joined, key=lambda a: (self._ranks.get(a, newest), a.slot, a.task))

    def _hopeless(self, view: Mapping[str, TaskState]) -> Failure | None:
        here = {a.task for a in self.joined}
        return slurms_word.hopeless(view, here, self.rules.min_nodes, self.rules.max_nodes)

    def _ended_by_slurm(self, view: Mapping[str, TaskState], asked_at: float) -> list[Agent]:
        members = self.members if self.phase is Phase.RUNNING else self.unsettled
        known = dict.fromkeys((*self.joined, *sorted(members, key=lambda a: a.slot)))
        earlier = (a for a in known if self._last_join.get(a, 0.0) < asked_at)
        return [a for a in earlier if a.task in view and slurms_word.has_ended(a, view[a.task])]

    # ---- rules: nodes that wait ---------------------------------------------------------

    def _consider_newcomers(self, now: float) -> list[Action]:
        room = self.rules.max_nodes - len(self.members)
        if not self.joined:
            return self._hold(False)
        decision = self._weigh(room)
        actions: list[Action] = []
        if self._noted != (decision.admit, len(self.joined)):
            self._noted = (decision.admit, len(self.joined))
            actions.append(self._note_growth(decision))
        if not decision.admit or self.rules.grow == "never":
            return actions + self._hold(False) + self._send_back_parked(now)
        return actions + self._admit(now)

    def _weigh(self, room: int) -> Decision:
        if room <= 0:
            return Decision(0, "the group has its max nodes")
        waiting = list(self.joined)[:room]
        return weigh(len(self.members), [self._time_left(a) for a in waiting], self.outlook)

    def _time_left(self, agent: Agent) -> float | None:
        state = (self.view or {}).get(agent.task)
        return state.time_left_s if state is not None else None

    def _note_growth(self, decision: Decision) -> Note:
        waiting = [a.task for a in self.joined][:20]
        when = self.rules.grow if decision.admit else "not now"
        return Note("growth", {"waiting": waiting, "admit": when, "why": decision.why})

    def _admit(self, now: float) -> list[Action]:
        step = self.boundaries.reached(self.members, now)
        names = ", ".join(a.host for a in list(self.joined)[:5])
        if self.rules.grow == "now":
            return self._break(now, f"{names} joins")
        if step is not None:
            return self._break(now, f"{names} joins, at the checkpoint of step {step}")
        if not self.boundaries.seen and self._longest_wait(now) >= self.rules.grow_after_s:
            return self._break(now, f"{names} joins; the script announces no checkpoints")
        return self._hold(True)

    def _hold(self, on: bool) -> list[Action]:
        if on == self._holding:
            return []
        self._holding = on
        if not on:
            self.boundaries.let_go()
            return [Hold(self.members, 0)]
        self._num_holds += 1
        return [Hold(self.members, self._num_holds)]

    def _longest_wait(self, now: float) -> float:
        return now - next(iter(self.joined.values()), now)

    def _send_back_parked(self, now: float) -> list[Action]:
        wait = self.rules.min_wait_s
        if wait is None:
            return []
        late = tuple(a for a, since in self.joined.items() if now - since >= wait * self._patience)
        for agent in late:
            del self.joined[agent]
        return [GiveBack(late, self._time_away(), all=False)] if late else []

    def _too_few_for_too_long(self, now: float) -> bool:
        wait = self.rules.min_wait_s
        if wait is None or not self.joined or len(self.joined) >= self.rules.min_nodes:
            return False
        return now - self._waiting_since(now) >= wait * self._patience

    def _disband(self) -> list[Action]:
        self.phase = Phase.DISBANDED
        self._away_s = self._time_away()
        self.given_back += 1
        return [GiveBack(tuple(self.joined), self._away_s, all=True)]

    def _time_away(self) -> float:
        """Return a time that doubles with every time that the run has given its nodes back."""
        longest = min(_LONGEST_AWAY_S, (self.rules.min_wait_s or 0.0) * 2.0**self.given_back)
        return longest * self.rng.uniform(0.5, 1.5)

    # ---- the end ------------------------------------------------------------------------

    def _end(self, end: EndRun) -> list[Action]:
        self.phase = Phase.ENDED
        self.end = end
        return [end]

    def _verdict(self) -> EndRun:
        assert self.end is not None
        return self.end
