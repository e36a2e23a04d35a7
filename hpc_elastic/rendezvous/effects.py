"""What the rendezvous machine decides: the actions that its events return (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry


@dataclass(frozen=True)
class StartRound:
    """Give every member its rank: its index in ``members``."""

    number: int
    members: tuple[Agent, ...]
    restarts: int
    placed: tuple[Agent, ...] | None = None
    """Only these get a place, each in a group of its own (`replica_state`); None: all, in one."""

    @property
    def told(self) -> tuple[Agent, ...]:
        """Those who get a place."""
        return self.members if self.placed is None else self.placed


StopCause = Literal["regroup", "node_lost", "failed", "agent_restarted", "at_max_nodes"]


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
class ProposeStep:
    """Propose to these members to save at a step; number 0 takes the last proposal back."""

    agents: tuple[Agent, ...]
    number: int
    step: int


@dataclass(frozen=True)
class ConfirmStep:
    """Tell these members that all ranks save at the step of a proposal."""

    agents: tuple[Agent, ...]
    number: int


@dataclass(frozen=True)
class AskStacks:
    """Ask these members what their workers are at (`hang_diagnosis`)."""

    agents: tuple[Agent, ...]
    number: int


@dataclass(frozen=True)
class Release:
    """Let these members leave the run: nobody waits for them any more, whoever leads."""

    agents: tuple[Agent, ...]


@dataclass(frozen=True)
class Depart:
    """This agent is no member any more; these still are (`replica_state`)."""

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
    | ProposeStep
    | ConfirmStep
    | AskStacks
    | Release
    | Depart
    | GiveBack
    | Exclude
    | ClearHolds
    | EndRun
    | Note
)


# ---- What a leadership wants done: the effects that its events return (pure)


Message = dict[str, Any]


@dataclass(frozen=True)
class Send:
    """Send a message to an agent."""

    agent: Agent
    message: Message


@dataclass(frozen=True)
class Drop:
    """Abandon the connection to an agent that has fallen silent, or has come back on another."""

    agent: Agent


@dataclass(frozen=True)
class Create:
    """Create this entry; then call `LeaderState.created`, or `refused` if its index is taken."""

    record: LogEntry


@dataclass(frozen=True)
class Announce:
    """Start the round's bootstrap store, and tell every member its place."""

    start: StartRound
    record: int
    asks: Mapping[Agent, int]
    """Which request of each member this is the answer to. It may have come back since the decision,
    and ask for another round than this one."""


@dataclass(frozen=True)
class PublishResult:
    """Write the run's result, and take its pending tasks out of the queue."""

    record: LogEntry


@dataclass(frozen=True)
class Postpone:
    """Let no queued task of the run start for a while."""

    delay_s: float


@dataclass(frozen=True)
class AskSlurm:
    """Ask how the tasks of the run are; then say `LeaderState.slurm_says`."""


@dataclass(frozen=True)
class AskSweep:
    """Ask whether the run waits in vain for nodes; then say `LeaderState.sweep_says`.

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


LeaderEffect = (
    Send
    | Drop
    | Create
    | Announce
    | PublishResult
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


# ---- What a following wants done: the effects that its events return (pure)


@dataclass(frozen=True)
class ReadLog:
    """Read the last record and its epoch's lease; then say `looked`, or `blind` if that fails."""


@dataclass(frozen=True)
class Connect:
    """Connect to this record's leader; then say `connected`, or `not_connected`."""

    record: LogEntry


@dataclass(frozen=True)
class SendToLeader:
    """Send a message to the leader."""

    message: Message


@dataclass(frozen=True)
class Disconnect:
    """Abandon the connection, or the attempt to make one."""


@dataclass(frozen=True)
class QuerySlurm:
    """Ask Slurm whether the leader's task runs; then say `slurm_says`."""

    task: str


@dataclass(frozen=True)
class Claim:
    """Try to create record ``number`` as the next leader; then say `claimed`.

    ``unseen``: nobody has seen the end of the leader before, who is only out of reach.
    """

    number: int
    before: LogEntry | None
    unseen: bool


@dataclass(frozen=True)
class Lead:
    """Lead: the record was created."""

    record: LogEntry


@dataclass(frozen=True)
class PublishIfMissing:
    """Write the result of a run that has ended, unless its leader has: it may have died first."""

    record: LogEntry


@dataclass(frozen=True)
class Deliver:
    """Tell the agent's own thread what the leader said, or what became of it.

    Types: ``round``, ``stop``, ``hold``, ``propose``, ``confirm``, ``end``, ``give back``,
    ``waiting`` (as `leader` sends them); ``noticed``: this node is under notice; ``leaving``: it
    has left the run because of that; ``news``: the reason why nothing has come yet.
    """

    message: Message


AgentEffect = (
    ReadLog
    | Connect
    | SendToLeader
    | Disconnect
    | QuerySlurm
    | Claim
    | Lead
    | PublishIfMissing
    | Deliver
)


# ---- What the members of a round are told of their places in it (pure)


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
