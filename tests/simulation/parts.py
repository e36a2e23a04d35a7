"""The parts under test, as one value: so that a test can plant a bug in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_elastic.agent.worker_channel import Rule, can_save_at
from hpc_elastic.agent.worker_failures import has_succeeded
from hpc_elastic.rendezvous.effects import Announce, RoundInfo, places
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, LogSteps
from hpc_elastic.rendezvous.term import Term, TermFolder
from hpc_elastic.worker.shared_page import WorkerStatus
from simulation.scenario import Scenario, draw

if TYPE_CHECKING:
    from simulation.register import NodeRegister


@dataclass(frozen=True)
class Parts:
    """The protocol's classes, and what its adapters must take care of."""

    draw: Callable[[random.Random], Scenario] = draw
    """Draws what a schedule is made of."""
    leadership: type[LeaderState] = LeaderState
    following: Callable[[Agent, HeartbeatConfig, float], FollowerState] = FollowerState
    can_save_at: Rule = can_save_at
    """How an agent answers a proposal."""
    places: Callable[[Announce], Iterator[tuple[Agent, RoundInfo]]] = places
    term: type[Term] = Term
    folder: type[TermFolder] = TermFolder
    records: Callable[[NodeRegister], LogSteps] = LogSteps
    """How a node finds and creates records."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    has_succeeded: Callable[[int, WorkerStatus], bool] = has_succeeded
    """How an agent judges a worker that has ended with an exit code."""
    exclusive_create: bool = True
    """Whether a record that exists can not be created again."""


SOUND = Parts()
"""The product."""
