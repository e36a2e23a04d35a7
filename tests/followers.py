"""A follower with or without a leader, and the environment that it searches."""

from dataclasses import replace
from typing import TypeVar

from groups import A, B, C, D
from hpc_elastic.rendezvous.effects import (
    Claim,
    Connect,
    Deliver,
    Effect,
    QuerySlurm,
    ReadLog,
    SendToLeader,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry
from hpc_elastic.rendezvous.messages import Join, RoundInfo

M = TypeVar("M")
LIVENESS = HeartbeatConfig(heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0)
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)
ENTRY = LogEntry(5, 2, LEADER, round=2, members=(A, B, C, D))
"""The leader is the agent of A's node."""
MANY = replace(ENTRY, members=tuple(Agent(f"8_{i}", 0, i, "n", 1) for i in range(5000)))
"""A run of five thousand nodes."""
REFUSED, UNREACHABLE = True, False


def agent(me: Agent = B, now: float = 0.0, heartbeat: HeartbeatConfig = LIVENESS) -> FollowerState:
    """An agent that requests a place and has not read the log yet."""
    following = FollowerState(me, heartbeat, now)
    assert following.join() == []
    return following


def following(me: Agent = B, now: float = 0.0, entry: LogEntry = ENTRY) -> FollowerState:
    """An agent that follows the leader of an entry, and has a place in its round."""
    f = agent(me, now)
    assert f.tick(now) == [ReadLog()]
    assert f.log_read(entry.index, entry, 1, now) == [Connect(entry)]
    placed = place(request_of(f.connected(now)), entry.index)
    assert f.received(placed, now) == [Deliver(placed)]
    return f


def place(request: int, index: int, number: int = 2) -> RoundInfo:
    """The answer to a request: a place in the round of an entry."""
    return RoundInfo(request, number, index, 0, 0, 1, 0, 1)


def request_of(effects: list[Effect]) -> int:
    """The number of the request for a place that is the only effect."""
    (send,) = effects
    assert isinstance(send, SendToLeader) and isinstance(send.message, Join)
    return send.message.request


def connecting(me: Agent = B) -> FollowerState:
    """An agent that connects to the leader of `ENTRY`."""
    f = agent(me)
    f.tick(0.0)
    assert f.log_read(5, ENTRY, 1, 0.0) == [Connect(ENTRY)]
    return f


def of(effects: list[Effect], *types: type) -> list[Effect]:
    """The effects of these types."""
    return [e for e in effects if isinstance(e, types)]


def delivered(effects: list[Effect], kind: type[M]) -> list[M]:
    """The messages of a type that the agent's own thread gets."""
    return [e.message for e in effects if isinstance(e, Deliver) and isinstance(e.message, kind)]


class Search:
    """An agent without a leader, and the answers that a test sets."""

    def __init__(
        self,
        f: FollowerState,
        now: float = 0.0,
        entry: LogEntry | None = ENTRY,
        *,
        lease: int | None = None,
        beats: float = 0.0,
        refused: bool = UNREACHABLE,
    ) -> None:
        self.f, self.now, self.entry = f, now, entry
        self.number = entry.index if entry is not None else 0
        self.lease = lease
        self.beats = beats
        """Seconds between two renewals of the lease; 0: it is not renewed."""
        self.refused = refused
        self.queries: list[str] = []
        self.pending: list[Effect] = []
        """Effects of an event that a test has sent to the agent."""

    def until_claim(self, limit_s: float) -> float | None:
        """Let time pass until the agent claims; return when, or None if it does not."""
        effects = [*self.pending, *self.f.tick(self.now)]
        self.pending = []
        until = self.now + limit_s
        while self.now < until:
            for effect in self._answers(effects):
                if isinstance(effect, Claim):
                    return self.now
            self.now = round(self.now + 0.05, 3)
            effects = self.f.tick(self.now)
        self.pending = effects
        return None

    def _answers(self, effects: list[Effect]) -> list[Effect]:
        """Answer all effects, and those that follow; return all."""
        done: list[Effect] = []
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            done.append(effect)
            match effect:
                case ReadLog():
                    lease = int(self.now / self.beats) if self.beats else self.lease
                    queue += self.f.log_read(self.number, self.entry, lease, self.now)
                case Connect():
                    queue += self.f.not_connected("no", self.now, refused=self.refused)
                case QuerySlurm(task):
                    self.queries.append(task)
        return done
