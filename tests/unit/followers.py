"""An agent without a leader, or with one, and the world that it searches."""

from dataclasses import replace

from groups import A, B, C, D

from hpc_elastic.rendezvous.agent_effects import Claim, Connect, Effect, Inquire, Look, Say, Tell
from hpc_elastic.rendezvous.attendance import Liveness
from hpc_elastic.rendezvous.following import Following
from hpc_elastic.rendezvous.record import Agent, Endpoint, Record

LIVENESS = Liveness(heartbeat_s=0.5, lost_after_s=3.0)
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)
RECORD = Record(5, 2, LEADER, round=2, members=(A, B, C, D))
"""The leader is the agent of A's node."""
MANY = replace(RECORD, members=tuple(Agent(f"8_{i}", 0, i, "n", 1) for i in range(5000)))
"""A run of five thousand nodes."""
REFUSED, UNREACHABLE = True, False


def agent(me: Agent = B, now: float = 0.0, liveness: Liveness = LIVENESS) -> Following:
    """An agent that wants a place and has not looked yet."""
    following = Following(me, liveness, now)
    assert following.join() == []
    return following


def following(me: Agent = B, now: float = 0.0, record: Record = RECORD) -> Following:
    """An agent that follows the leader of a record, and has a place in its round."""
    f = agent(me, now)
    assert f.tick(now) == [Look()]
    assert f.looked(record.number, record, 1, now) == [Connect(record)]
    placed = {"type": "round", "ask": asked(f.connected(now)), "record": record.number}
    assert f.received(placed, now) == [Tell(placed)]
    return f


def asked(effects: list[Effect]) -> int:
    """The number of the request for a place that is the only effect."""
    (say,) = effects
    assert isinstance(say, Say) and say.message["type"] == "join"
    return say.message["ask"]


def of(effects: list[Effect], *types: type) -> list[Effect]:
    """The effects of these types."""
    return [e for e in effects if isinstance(e, types)]


def told(effects: list[Effect], type_: str) -> list[dict]:
    """What the agent's own thread is told of a type."""
    return [e.message for e in effects if isinstance(e, Tell) and e.message["type"] == type_]


class Search:
    """An agent without a leader, in a world where nothing changes but what a test says."""

    def __init__(self, f: Following, now: float = 0.0, record: Record | None = RECORD) -> None:
        self.f, self.now, self.record = f, now, record
        self.number = record.number if record is not None else 0
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
                case Look():
                    lease = int(self.now / self.beats) if self.beats else self.lease
                    queue += self.f.looked(self.number, self.record, lease, self.now)
                case Connect():
                    queue += self.f.not_connected("no", self.now, refused=self.refused)
                case Inquire(task):
                    self.inquiries.append(task)
        return done
