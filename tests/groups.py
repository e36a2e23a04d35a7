"""Four agents, the rules of a run in the states that tests begin with, and effects in short."""

import random
from dataclasses import dataclass, replace
from typing import Any

from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    Effect,
    Note,
    Postpone,
    PublishResult,
    Send,
)
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Endpoint,
    Failure,
    LogEntry,
    RoundRules,
    RunEnding,
)
from hpc_elastic.rendezvous.messages import CheckpointRequested, End, Requeue, Stop
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.step_agreement import StepVote
from hpc_elastic.transport.messages import pack
from hpc_elastic.worker.shared_page import CheckpointRequest

A, B, C, D = (Agent(f"7_{slot}", 0, slot, f"node{slot + 1}", 1) for slot in range(4))
FIRST = LogEntry(1, 1, Endpoint("10.0.0.1", 4000, "7_9", 0))
"""The claim of a run's first leader."""


def machine(**changes) -> RoundState:
    """The rules of a run of one to four nodes with two restarts, that grows at once."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "below_min_timeout_s": None,
        "scale_up": "immediate",
    }  # fmt: skip
    return RoundState(FIRST, RoundRules(**{**defaults, **changes}), 0.0, random.Random(1))


def running(*agents: Agent, **others: str) -> dict[str, TaskState]:
    """Slurm's answer: these are RUNNING; other tasks, by slot (s2="PENDING"), in another state."""
    view = {a.task: TaskState(a.task, "RUNNING", restarts=a.attempt) for a in agents}
    named = {f"7_{slot[1:]}": word for slot, word in others.items()}
    return view | {task: TaskState(task, word, restarts=0) for task, word in named.items()}


def training(*agents: Agent, **changes) -> RoundState:
    """Rules under which the first round has closed with these agents."""
    m = machine(**changes)
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_answered(running(*agents), 0.0, 0.0)
    assert m.run.phase is RoundPhase.RUNNING and m.run.ranks.members == agents
    return m


# ---- effects in short ---------------------------------------------------------------------

Short = Effect | tuple[Any, ...]


def decisions(effects: list[Effect]) -> list[Short]:
    """The effects in short, without events for the log and unconfirmed requests."""
    is_all = any(isinstance(e, Postpone) for e in effects)
    shorts = [s for e in effects if (s := _short(e)) is not None]
    return [replace(s, all=is_all) if isinstance(s, SentBack) else s for s in shorts]


@dataclass(frozen=True)
class SentBack:
    """These nodes go back to the queue; ``all``: the run is left by everybody."""

    agents: tuple[Agent, ...]
    delay_s: float
    all: bool = False


def kind(short: Short) -> str:
    """Which kind of effect it is."""
    match short:
        case Send(_, message):
            return pack(message, 0.0)["type"]
        case tuple():
            return short[0]
        case Note(kind):
            return kind
    return type(short).__name__


def _short(effect: Effect) -> Short | None:
    match effect:
        case Announce(entry, requests, replicas):
            placed = None if replicas is None else tuple(requests)
            return closed(entry.round, entry.members, entry.restarts, placed)
        case PublishResult(entry):
            return ended(entry.ending.status, entry.ending.failure, entry.ending.secondary_failures,
                         entry.ending.results)  # fmt: skip
        case Note(kind) if kind not in ("members_released", "replica_left"):
            return None
        case Send(agents, Requeue(delay_s)):
            return SentBack(agents, delay_s)
        case Append() | Postpone() | Send(None, End()):
            return None
        case Send(_, CheckpointRequested(request)):
            return effect if request is not None and request.confirmed else None
    return effect


def closed(number, members, restarts, placed=None) -> Short:
    """A round has closed; as replicas, these are placed."""
    return ("round", number, members, restarts, placed)


def ended(status, failure=None, secondary_failures=(), results=None) -> Short:
    """The run is over."""
    return ("end", RunEnding(status, failure, secondary_failures, results))


def stop(agents, reason) -> Send:
    """These are to stop their workers."""
    return Send(agents, Stop(reason))


def request(agents, *args, **state) -> Send:
    """These get a checkpoint request; without arguments, the last one is withdrawn."""
    return Send(agents, CheckpointRequested(CheckpointRequest(*args, **state) if args else None))


def pause(agents, number, step=None, *, released=False) -> Send:
    """These are to stay at a step, or at their next checkpoint; or not any more."""
    return request(agents, number, step, confirmed=True, pause=True, released=released)


def released(agents) -> Note:
    """These members are not waited for."""
    return Note("members_released", {"tasks": [a.task for a in agents]})


def departed(agent, members) -> Note:
    """This agent is no member any more; these still are."""
    return Note("replica_left", {"task": agent.task, "host": agent.host, "nodes": len(members)})


def notes(effects: list[Effect], kind: str) -> list[Note]:
    """The events of a kind."""
    return [e for e in effects if isinstance(e, Note) and e.kind == kind]


def failure(agent: Agent, message="ValueError: boom", time=1.0, **fields) -> Failure:
    """One failed worker of an agent."""
    return Failure(agent.task, agent.host, agent.slot, 0, time, message, **fields)


def resumed(**fields) -> RoundState:
    """The rules of a leader that goes on from an entry."""
    entry = LogEntry(9, 3, Endpoint("10.0.0.1", 4000, "7_0", 0), **fields)
    rules = RoundRules(1, 4, 2, 60.0, 5.0, below_min_timeout_s=None)
    return RoundState(entry, rules, 100.0, random.Random(1))


def poll_none(m: RoundState, agents, number, now) -> list[Effect]:
    """These say that none of their workers polls steps; return what comes of the last one."""
    return [m.voted(agent, StepVote(number, True, None, 0.0), now) for agent in agents][-1]
