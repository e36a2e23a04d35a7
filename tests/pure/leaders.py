"""A leader in the states that tests begin with, and what its agents say to it."""

import random

from hpc_elastic.rendezvous.effects import Append, Effect, RenewLease, Send
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.messages import Heartbeat, Join, RunMessage

HERE = Endpoint("10.0.0.1", 4000, "7_9", 0)
LIVENESS = HeartbeatConfig(heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0)


def leading(entry: LogEntry | None = None, **rules) -> LeaderState:
    """A leader that has just claimed its term, at time 0."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "below_min_timeout_s": None,
        "scale_up": "immediate",
    }  # fmt: skip
    entry = entry or claim(1, None, HERE, 1000.0)
    settings = RoundRules(**{**defaults, **rules})
    return LeaderState(entry, settings, LIVENESS, 0.0, random.Random(1))


def after(*members: Agent, **rules) -> LeaderState:
    """A leader that took over, at time 0, from one whose last round had these members."""
    before = LogEntry(4, 2, Endpoint("10.0.0.7", 1, "7_7", 0), round=3, members=members)
    return leading(claim(5, before, HERE, 1000.0), **rules)


def say(leader: LeaderState, agent: Agent, message: RunMessage, now: float) -> list[Effect]:
    """Let an agent say something."""
    return leader.received(agent, message, now)


def join(leader: LeaderState, agent: Agent, now: float, request: int = 1) -> list[Effect]:
    """Let an agent connect, if it has not, and ask for a place."""
    return [*leader.connected(agent, now), *say(leader, agent, Join(request=request), now)]


def rejoin(leader: LeaderState, agent: Agent, now: float) -> list[Effect]:
    """Let an agent that is connected ask for another place."""
    return say(leader, agent, Join(request=2), now)


def of(effects: list[Effect], *types: type) -> list[Effect]:
    """The effects of these types."""
    return [e for e in effects if isinstance(e, types)]


def told(effects: list[Effect], kind: type[RunMessage]) -> list[Agent]:
    """Who is told something of a type."""
    sends = [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
    return [agent for send in sends for agent in send.agents]


def closing(*agents: Agent, **rules) -> tuple[LeaderState, LogEntry]:
    """A leader whose first round waits for its entry, and that entry."""
    leader = leading(max_nodes=len(agents), **rules)
    for agent in agents:
        effects = join(leader, agent, 1.0)
    (append,) = of(effects, Append)
    return leader, append.entry


def training(*agents: Agent, **rules) -> LeaderState:
    """A leader whose first round was announced at time 1."""
    leader, _ = closing(*agents, **rules)
    leader.appended()
    return leader


def meanwhile(leader: LeaderState, until: float, *alive: Agent, since: float = 1.0) -> list[Effect]:
    """Let time pass, with the beats of these agents; return all effects of it."""
    effects, now = tick(leader, since), since
    while now < until:
        now += 0.5
        for agent in alive:
            say(leader, agent, Heartbeat(progress={}), now)
        effects += tick(leader, now)
    return effects


def passed(leader: LeaderState, until: float, *alive: Agent, since: float = 1.0) -> list[Effect]:
    """Let time pass, with the beats of these agents; return the last tick's effects."""
    meanwhile(leader, until - 0.5, *alive, since=since)
    for agent in alive:
        say(leader, agent, Heartbeat(progress={}), until)
    return tick(leader, until)


def tick(leader: LeaderState, now: float) -> list[Effect]:
    """Let a leader look around; its file system answers at once."""
    effects = leader.tick(now)
    if of(effects, RenewLease):
        leader.renewed()
    return effects
