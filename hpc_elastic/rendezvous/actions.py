"""What the rendezvous machine decides: the actions that its events return (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.record import Agent


@dataclass(frozen=True)
class StartRound:
    """Give every member its rank: its index in ``members``."""

    number: int
    members: tuple[Agent, ...]
    restarts: int
    placed: tuple[Agent, ...] | None = None
    """Only these get a place, and each is a group of its own (`replicas`); None: all, in one."""

    @property
    def told(self) -> tuple[Agent, ...]:
        """Those who get a place."""
        return self.members if self.placed is None else self.placed


StopCause = Literal["regroup", "gone", "failed", "anew", "full"]


@dataclass(frozen=True)
class StopRound:
    """Tell these agents to stop their workers and to join again."""

    agents: tuple[Agent, ...]
    reason: str
    cause: StopCause = field(default="regroup", compare=False)
    """The reason's kind, for the event log: what follows from it is the same."""
    step: int | None = field(default=None, compare=False)
    """The step whose checkpoint all of them have announced; None: they stop as they are."""


@dataclass(frozen=True)
class Hold:
    """Ask these members to hold at their next checkpoint boundary, or (0) not to any more.

    Requests are numbered, so that one who obeyed an earlier one is not taken to hold still.
    """

    agents: tuple[Agent, ...]
    number: int


@dataclass(frozen=True)
class Propose:
    """Propose to these members to save at a step; number 0 takes the last proposal back."""

    agents: tuple[Agent, ...]
    number: int
    step: int


@dataclass(frozen=True)
class Confirm:
    """Tell these members that all ranks save at the step of a proposal."""

    agents: tuple[Agent, ...]
    number: int


@dataclass(frozen=True)
class AskStacks:
    """Ask these members what their workers are at (`hang`)."""

    agents: tuple[Agent, ...]
    number: int


@dataclass(frozen=True)
class Release:
    """Let these members leave the run: nobody waits for them any more, whoever leads."""

    agents: tuple[Agent, ...]


@dataclass(frozen=True)
class Depart:
    """This agent is no member any more; these still are (`replicas`)."""

    agent: Agent
    members: tuple[Agent, ...]


@dataclass(frozen=True)
class GiveBack:
    """Send these nodes back to the queue for a while.

    ``all``: the run is to be left by everybody, and what is queued of it is to wait as well.
    """

    agents: tuple[Agent, ...]
    delay_s: float
    all: bool
    why: str = field(default="", compare=False)
    """Why, if not because nodes have waited for too long; for the event log."""


@dataclass(frozen=True)
class Exclude:
    """Let no queued task of the run start on these hosts, nor on those that were named before."""

    hosts: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class ClearHolds:
    """Let these tasks, which Slurm holds after a requeue or has ended, start soon.

    ``unseen``: those of them whose end nobody has seen, each with the node where it may run still.
    ``failed_on``: those that failed before they joined, each with the hosts where they did.
    """

    tasks: tuple[str, ...]
    unseen: Mapping[str, str] = field(default_factory=dict)
    failed_on: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class EndRun:
    """The run is over; tell everybody."""

    status: str
    failure: Failure | None = None
    victims: tuple[Failure, ...] = ()
    results: str | None = None
    """Name of the folder with what the workers return; None: the last round's."""


@dataclass(frozen=True)
class Note:
    """Something worth a line in the event log."""

    kind: str
    fields: dict[str, object]


Action = (
    StartRound
    | StopRound
    | Hold
    | Propose
    | Confirm
    | AskStacks
    | Release
    | Depart
    | GiveBack
    | Exclude
    | ClearHolds
    | EndRun
    | Note
)
