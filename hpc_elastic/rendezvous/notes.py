"""What the event log says of a leader's actions (pure); the kinds stand in `hpc_elastic.story`."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_elastic.rendezvous.actions import Depart, GiveBack, Note, StartRound, StopRound
from hpc_elastic.rendezvous.record import Agent

_NAMED = 20
"""So many nodes are named: a line is to stay short in a run of thousands."""


def stop(action: StopRound, round_: int) -> Note:
    """Return the note of a round, or of a replica's workers, that is stopped."""
    fields: dict[str, object] = {"reason": action.reason, "cause": action.cause, "round": round_}
    if action.step is not None:
        fields["step"] = action.step
    return Note("stop", {**fields, "nodes": len(action.agents), "hosts": _hosts(action.agents)})


def departed(action: Depart) -> Note:
    """Return the note of a replica that is none any more."""
    agent = action.agent
    return Note("departed", {"task": agent.task, "host": agent.host, "nodes": len(action.members)})


def given_back(action: GiveBack) -> Note:
    """Return the note of nodes that are sent back to the queue."""
    delay_s, agents = round(action.delay_s, 1), action.agents
    fields = {"nodes": len(agents), "hosts": _hosts(agents), "all": action.all}
    why = {"why": action.why} if action.why else {}
    return Note("given back", {**fields, "delay_s": delay_s, **why})


def round_(start: StartRound, *, record: int, epoch: int) -> Note:
    """Return the note of a round that has closed."""
    members = start.members
    fields: dict[str, object] = {
        "number": start.number, "record": record, "epoch": epoch, "nodes": len(members),
        "world_size": sum(m.nproc for m in members), "members": [vars(m) for m in members],
        "restarts": start.restarts,
    }  # fmt: skip
    if start.placed is not None:
        fields["placed"] = [a.task for a in start.placed]
    return Note("round", fields)


def _hosts(agents: Iterable[Agent]) -> list[str]:
    return [a.host for a in agents][:_NAMED]
