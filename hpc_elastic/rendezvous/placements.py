"""What the members of a round are told of their places in it (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_elastic.rendezvous.leader_effects import Announce, Message
from hpc_elastic.rendezvous.record import Agent


def placements(announce: Announce) -> Iterator[tuple[Agent, Message]]:
    """Yield what each member of a round is told, but for the store; constant size each."""
    start = announce.start
    world_size = sum(m.nproc for m in start.members)
    first_rank = 0
    for group_rank, agent in enumerate(start.members):
        yield agent, {
            "type": "round", "ask": announce.asks[agent], "record": announce.record,
            "number": start.number,
            "restarts": start.restarts, "group_rank": group_rank,
            "group_size": len(start.members), "first_rank": first_rank, "world_size": world_size,
        }  # fmt: skip
        first_rank += agent.nproc


def placements_alone(announce: Announce) -> Iterator[tuple[Agent, Message]]:
    """Yield what each node that is placed is told, but for the store: its workers are a group."""
    start = announce.start
    for agent in start.told:
        yield agent, {
            "type": "round", "ask": announce.asks[agent], "record": announce.record,
            "number": start.number, "restarts": start.restarts, "group_rank": 0,
            "group_size": 1, "first_rank": 0, "world_size": agent.nproc,
        }  # fmt: skip
