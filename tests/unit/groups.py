"""Four agents, and the machine of a leader in the states that tests begin with."""

import random

from hpc_elastic.rendezvous.effects import Action, Note, ProposeStep
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, Failure, LogEntry, RoundRules
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import RequeueBackoff
from hpc_elastic.slurm.job_state import TaskState

A, B, C, D = (Agent(f"7_{slot}", 0, slot, f"node{slot + 1}", 1) for slot in range(4))


def machine(**changes) -> RoundState:
    """A machine for one to four nodes with two restarts, that grows at once."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "scale_up": "immediate",
    }  # fmt: skip
    rules = RoundRules(**{**defaults, **changes})
    return RoundState(rules, RequeueBackoff(rules, random.Random(1)))


def running(*agents: Agent, **others: str) -> dict[str, TaskState]:
    """Slurm's answer: these are RUNNING; other tasks, by slot (s2="PENDING"), in another state."""
    view = {a.task: TaskState(a.task, "RUNNING", restarts=a.attempt) for a in agents}
    named = {f"7_{slot[1:]}": word for slot, word in others.items()}
    return view | {task: TaskState(task, word, restarts=0) for task, word in named.items()}


def training(*agents: Agent, **changes) -> RoundState:
    """A machine whose first round has closed with these agents."""
    m = machine(**changes)
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_says(running(*agents), 0.0, 0.0)
    assert m.phase is RoundPhase.RUNNING and m.members == agents
    return m


def decisions(actions: list[Action]) -> list[Action]:
    """What is left of the actions without the notes for the log, and what is asked of members."""
    return [a for a in actions if not isinstance(a, (Note, ProposeStep))]


def notes(actions: list[Action], kind: str) -> list[Note]:
    """The notes of a kind."""
    return [a for a in actions if isinstance(a, Note) and a.kind == kind]


def failure(agent: Agent, message="ValueError: boom", time=1.0, **fields) -> Failure:
    """One failed worker of an agent."""
    return Failure(agent.task, agent.host, agent.slot, 0, time, message, **fields)


def resumed(**fields) -> RoundState:
    """The machine of a leader that goes on from a record."""
    record = LogEntry(9, 3, Endpoint("10.0.0.1", 4000, "7_0", 0), **fields)
    rules = RoundRules(1, 4, 2, 60.0, 5.0)
    return RoundState.resume(record, rules, 100.0, random.Random(1))
