"""Invariants of the leader's rules, whatever comes in whichever order.

The agents' side, the network and the file system are simulated elsewhere.
"""

import itertools
import random

from groups import failure, machine, running
from hpc_elastic.rendezvous.effects import Announce, Effect, PublishResult, Send
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.messages import Stop
from hpc_elastic.rendezvous.round_state import RoundPhase


class Schedule:
    """Random events for one machine; every action is checked as it comes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rules = {
            "min_nodes": self.rng.randint(1, 3), "max_nodes": self.rng.randint(3, 5),
            "scale_up": self.rng.choice(["immediate", "checkpoint", "on_restart"]),
        }  # fmt: skip
        self.m = machine(**self.rules)
        self.now, self.rounds, self.ended = 0.0, 0, False
        self.attempts = itertools.count(1)
        self.alive = [Agent(f"7_{s}", 0, s, f"n{s}", 1) for s in range(5)]
        self.ready = set(self.alive)
        """Whose workers are stopped, and who has not joined."""
        self.in_round: set[Agent] = set()

    def check(self, actions: list[Effect]) -> None:
        """Follow the actions, and check the invariants."""
        for action in actions:
            match action:
                case Send(agents, Stop()):
                    assert set(agents) <= self.in_round, "only members are stopped"
                    self.ready |= set(agents)
                    self.in_round -= set(agents)
                case Announce(entry):
                    self.check_round(entry)
                case PublishResult():
                    self.ended = True

    def check_round(self, start: LogEntry) -> None:
        """Check a round that closes."""
        members = start.members
        assert start.round == self.rounds + 1, "rounds are numbered without a gap"
        assert len(set(members)) == len(members), "nobody has two ranks"
        assert self.rules["min_nodes"] <= len(members) <= self.rules["max_nodes"]
        assert set(members) <= set(self.alive), "the dead have no ranks"
        assert not self.in_round, "nobody is in two rounds"
        assert start.restarts <= 2
        self.rounds, self.in_round = start.round, set(members)

    def join(self, agent: Agent) -> list[Effect]:
        """Let an agent join whose workers are stopped."""
        self.ready.discard(agent)
        return self.m.join(agent, self.now)

    def lose(self, agent: Agent) -> list[Effect]:
        """Let an agent be lost; its task runs again in its next attempt."""
        fresh = Agent(agent.task, next(self.attempts), agent.slot, agent.host, 1)
        self.alive[self.alive.index(agent)] = fresh
        self.ready = (self.ready - {agent}) | {fresh}
        self.in_round.discard(agent)
        return self.m.agent_lost(agent, "lost", self.now)

    def ask(self) -> list[Effect]:
        """Let Slurm answer, or not; it knows most of the tasks."""
        view = running(*(a for a in self.alive if self.rng.random() < 0.8))
        return self.m.slurm_answered(view if self.rng.random() < 0.8 else None, self.now, self.now)

    def step(self) -> None:
        """Let one random thing happen."""
        self.now += self.rng.random() * 3
        agent = self.rng.choice(self.alive)
        kind = self.rng.choice(
            ["join", "join", "join", "gone", "fail", "done", "boundary", "slurm", "tick"]
        )
        if kind == "join" and agent in self.ready:
            self.check(self.join(agent))
        elif kind == "gone":
            self.check(self.lose(agent))
        elif kind == "fail" and agent in self.in_round:
            self.check(self.m.worker_failed([failure(agent)], agent, self.now))
        elif kind == "done" and agent in self.in_round:
            self.check(self.m.finished(agent, self.now))
        elif kind == "boundary" and agent in self.in_round:
            self.check(self.m.checkpointed(agent, self.rounds, self.rng.randint(0, 2), self.now))
        elif kind == "slurm":
            self.check(self.ask())
        else:
            self.check(self.m.tick(self.now))

    def settle(self) -> None:
        """Let everybody come back, and Slurm say so: a round must close."""
        for _ in range(100):
            if not self.ready or self.ended:
                break
            self.check(self.join(min(self.ready, key=lambda a: a.slot)))
        self.check(self.m.slurm_answered(running(*self.alive), self.now, self.now))
        if self.m.run.phase is RoundPhase.FORMING:  # a member has not come back
            self.check(self.m.tick(self.now + 61))
        assert self.m.run.phase is not RoundPhase.FORMING, "a round closes in bounded time"


def test_invariants_hold_over_random_schedules():
    """1500 random histories of joins, losses, failures and answers keep every invariant."""
    for seed in range(1500):
        schedule = Schedule(seed)
        try:
            for _ in range(60):
                if not schedule.ended:
                    schedule.step()
            schedule.settle()
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
