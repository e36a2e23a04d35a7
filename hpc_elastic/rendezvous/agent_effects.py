"""What a following wants done: the effects that its events return (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_elastic.rendezvous.record import Record

Message = dict[str, Any]


@dataclass(frozen=True)
class Look:
    """Read the last record and its epoch's lease; then say `looked`, or `blind` if that fails."""


@dataclass(frozen=True)
class Connect:
    """Connect to this record's leader; then say `connected`, or `not_connected`."""

    record: Record


@dataclass(frozen=True)
class Say:
    """Send a message to the leader."""

    message: Message


@dataclass(frozen=True)
class HangUp:
    """Abandon the connection, or the attempt to make one."""


@dataclass(frozen=True)
class Inquire:
    """Ask Slurm whether the leader's task runs; then say `slurm_says`."""

    task: str


@dataclass(frozen=True)
class Claim:
    """Try to create record ``number`` as the next leader; then say `claimed`.

    ``unseen``: nobody has seen the end of the leader before, who is only out of reach.
    """

    number: int
    before: Record | None
    unseen: bool


@dataclass(frozen=True)
class Lead:
    """Lead: the record was created."""

    record: Record


@dataclass(frozen=True)
class Publish:
    """Write the result of a run that has ended, unless its leader has: it may have died first."""

    record: Record


@dataclass(frozen=True)
class Tell:
    """Tell the agent's own thread what the leader said, or what became of it.

    Types: ``round``, ``stop``, ``hold``, ``propose``, ``confirm``, ``end``, ``give back``,
    ``waiting`` (as `leader` sends them); ``noticed``: this node is under notice; ``leaving``: it
    has left the run because of that; ``news``: the reason why nothing has come yet.
    """

    message: Message


Effect = Look | Connect | Say | HangUp | Inquire | Claim | Lead | Publish | Tell
