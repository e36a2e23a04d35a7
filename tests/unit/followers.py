"""An agent without a leader, or with one, and the world that it searches."""

from dataclasses import replace

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

LIVENESS = HeartbeatConfig(heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0)
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)
ENTRY = LogEntry(5, 2, LEADER, round=2, members=(A, B, C, D))
"""The leader is the agent of A's node."""
MANY = replace(ENTRY, members=tuple(Agent(f"8_{i}", 0, i, "n", 1) for i in range(5000)))
"""A run of five thousand nodes."""
REFUSED, UNREACHABLE = True, False


def agent(me: Agent = B, now: float = 0.0, liveness: HeartbeatConfig = LIVENESS) -> FollowerState:
    """An agent that wants a place and has not looked yet."""
    following = FollowerState(me, liveness, now)
    assert following.join() == []
    return following


def following(me: Agent = B, now: float = 0.0, entry: LogEntry = ENTRY) -> FollowerState:
    """An agent that follows the leader of an entry, and has a place in its round."""
    f = agent(me, now)
    assert f.tick(now) == [ReadLog()]
    assert f.log_read(entry.index, entry, 1, now) == [Connect(entry)]
    placed = {"type": "round", "request": asked(f.connected(now)), "index": entry.index}
    assert f.received(placed, now) == [Deliver(placed)]
    return f


def asked(effects: list[Effect]) -> int:
    """The number of the request for a place that is the only effect."""
    (say,) = effects
    assert isinstance(say, SendToLeader) and say.message["type"] == "join"
    return say.message["request"]


def of(effects: list[Effect], *types: type) -> list[Effect]:
    """The effects of these types."""
    return [e for e in effects if isinstance(e, types)]


def told(effects: list[Effect], type_: str) -> list[dict]:
    """What the agent's own thread is told of a type."""
    return [e.message for e in effects if isinstance(e, Deliver) and e.message["type"] == type_]


class Search:
    """An agent without a leader, in a world where nothing changes but what a test says."""

    def __init__(self, f: FollowerState, now: float = 0.0, entry: LogEntry | None = ENTRY) -> None:
        self.f, self.now, self.entry = f, now, entry
        self.number = entry.index if entry is not None else 0
        self.lease: int | None = None
        self.beats = 0.0
        """Seconds between two renewals of the lease; 0: it is not renewed."""
        self.refused = UNREACHABLE
        self.inquiries: list[str] = []
        self.pending: list[Effect] = []
        """Effects of what a test has said to the agent."""

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
                    self.inquiries.append(task)
        return done
