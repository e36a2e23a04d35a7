"""What a leadership wants done: the effects that its events return (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_elastic.rendezvous.actions import ClearHolds, Exclude, Note, StartRound
from hpc_elastic.rendezvous.record import Agent, Record

Message = dict[str, Any]


@dataclass(frozen=True)
class Tell:
    """Send a message to an agent."""

    agent: Agent
    message: Message


@dataclass(frozen=True)
class Drop:
    """Abandon the connection to an agent that has fallen silent, or has come back on another."""

    agent: Agent


@dataclass(frozen=True)
class Create:
    """Create this record; then say `Leadership.created`, or `Leadership.refused` if it is taken."""

    record: Record


@dataclass(frozen=True)
class Announce:
    """Start the round's bootstrap store, and tell every member its place (see `placements`)."""

    start: StartRound
    record: int
    asks: Mapping[Agent, int]
    """Which request of each member this is the answer to. It may have come back since the decision,
    and ask for another round than this one."""


@dataclass(frozen=True)
class Publish:
    """Write the run's result, and take its pending tasks out of the queue."""

    record: Record


@dataclass(frozen=True)
class Postpone:
    """Let no queued task of the run start for a while."""

    delay_s: float


@dataclass(frozen=True)
class AskSlurm:
    """Ask how the tasks of the run are; then say `Leadership.slurm_says`."""


@dataclass(frozen=True)
class AskSweep:
    """Ask whether the run waits in vain for nodes; then say `Leadership.sweep_says`.

    ``lost``: its tasks that were lost, each with its attempt; Slurm learns of that late.
    """

    lost: Mapping[str, int]


@dataclass(frozen=True)
class LetOthersStart:
    """Let other runs of the sweep start that stay away, if there are idle nodes for them.

    ``lost``: tasks of this run that were lost, and come back by other rules.
    """

    lost: tuple[str, ...]


@dataclass(frozen=True)
class RenewLease:
    """Show on the shared file system that the leader of this epoch lives."""


@dataclass(frozen=True)
class Show:
    """Replace the run's status, and append lines to its progress."""

    status: Message
    lines: tuple[Message, ...]


@dataclass(frozen=True)
class RemoveNotice:
    """Remove a claimed notice, which is confirmed, or (``in_vain``) names nobody."""

    name: str
    in_vain: bool = False


@dataclass(frozen=True)
class Readmit:
    """Let these tasks, which are gone, start on the nodes that they avoid, where those are back."""

    tasks: tuple[str, ...]


@dataclass(frozen=True)
class StepDown:
    """Let go of everybody: another agent leads."""


Effect = (
    Tell
    | Drop
    | Create
    | Announce
    | Publish
    | Postpone
    | Exclude
    | ClearHolds
    | AskSlurm
    | AskSweep
    | LetOthersStart
    | RenewLease
    | Show
    | RemoveNotice
    | Readmit
    | StepDown
    | Note
)
