"""Who has come for the next round, who is still to come, and who is lost (pure).

A member of a broken round is *unsettled* until it has joined again or is gone. A task that Slurm
calls RUNNING and that has not joined is *awaited*, unless it is the attempt that was lost: Slurm
learns of a dead node late. An attempt that has joined settles the earlier ones of its task.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpc_elastic.rendezvous import slurms_word
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.rendezvous.roster import Roster
from hpc_elastic.slurm.states import Phase, TaskState


@dataclass
class Muster:
    """What is known of the run's agents and tasks, but for the members of a round that runs."""

    joined: dict[Agent, float] = field(default_factory=dict)
    """Agents that wait for a round, in the order in which they joined."""
    unsettled: set[Agent] = field(default_factory=set)
    """Members of the broken round that have neither joined again nor gone."""
    lost: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost, or let go."""
    view: Mapping[str, TaskState] | None = None
    """What Slurm said last in this forming; None: nothing, or it did not answer."""
    awaited: set[str] = field(default_factory=set)
    """Tasks that Slurm calls RUNNING, that have not joined and were not lost."""
    _last_join: dict[Agent, float] = field(default_factory=dict)
    _by_task: dict[str, Agent] = field(default_factory=dict)

    # ---- agents -------------------------------------------------------------------------

    def enter(self, agent: Agent, roster: Roster, now: float) -> None:
        """An agent has joined; it may be a member, or another attempt of a member's task."""
        for other in (self._by_task.get(agent.task), roster.attempt_of(agent.task)):
            if other is not None and other != agent:
                self.joined.pop(other, None)
                self.unsettled.discard(other)
        self._by_task[agent.task] = agent
        self.joined.pop(agent, None)  # to come last in order
        self.joined[agent] = self._last_join[agent] = now
        self.lost.pop(agent.task, None)
        self.awaited.discard(agent.task)
        self.unsettled.discard(agent)

    def leave(self, agents: Iterable[Agent]) -> None:
        """Agents have got a place, or go back to the queue: they do not wait any more."""
        for agent in agents:
            self.joined.pop(agent, None)

    def lose(self, agent: Agent) -> None:
        """An agent is gone, or is let go."""
        self.joined.pop(agent, None)
        self.lost[agent.task] = max(agent.attempt, self.lost.get(agent.task, agent.attempt))
        self.awaited.discard(agent.task)

    def is_lost(self, agent: Agent) -> bool:
        """Tell whether an agent was lost, and has not come again."""
        return self.lost.get(agent.task, -1) >= agent.attempt

    def expect(self, members: Iterable[Agent]) -> None:
        """A round is broken: these are to join again, unless they were lost."""
        self.unsettled = {a for a in members if not self.is_lost(a)}
        self.view = None
        self.awaited.clear()

    def slept(self, for_s: float, now: float) -> None:
        """The leader was not running for so long: nobody is late because of that."""
        self.joined = {agent: min(now, since + for_s) for agent, since in self.joined.items()}

    @property
    def last_came(self) -> float:
        """When the last of those who wait has joined; there must be one."""
        return self.joined[next(reversed(self.joined))]

    # ---- Slurm's word -------------------------------------------------------------------

    def slurm_says(self, view: Mapping[str, TaskState] | None) -> None:
        """Slurm has answered; None: it has not."""
        self.view = view
        self.awaited = {
            task
            for task, state in (view or {}).items()
            if state.phase is Phase.RUNNING
            and not slurms_word.is_lost(state, self.lost.get(task))
            and self._by_task.get(task) not in self.joined
        }

    def ended(self, members: Iterable[Agent], asked_at: float) -> Iterator[Agent]:
        """Yield those who wait, and members, that Slurm knew to have ended when it was asked.

        One that was heard of after that may be another attempt than Slurm speaks of.
        """
        view = self.view or {}
        for agent in dict.fromkeys((*self.joined, *sorted(members, key=lambda a: a.slot))):
            earlier = self._last_join.get(agent, 0.0) < asked_at
            if earlier and agent.task in view and slurms_word.has_ended(agent, view[agent.task]):
                yield agent

    def missing(self, min_nodes: int) -> list[str]:
        """Name the tasks that a round waits for; below min nodes, all that are queued."""
        awaited = {a.task for a in self.unsettled} | self.awaited
        if len(self.joined) < min_nodes:
            here = {a.task for a in self.joined}
            view = (self.view or {}).items()
            awaited |= {t for t, s in view if t not in here and s.phase is not Phase.ENDED}
        return sorted(awaited)
