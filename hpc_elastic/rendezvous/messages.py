"""The messages between the agents of a run and its leader (pure).

A message is a frame of an authenticated connection (`transport.connection`), a JSON object as
`transport.messages` describes it. Clocks of nodes may differ, so a time in a failure or in the
state of a rank is sent as its age, ``age_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from hpc_elastic.ft import messages as ft_messages
from hpc_elastic.rendezvous.log_entry import Failure, RunEnding
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.step_agreement import StepVote
from hpc_elastic.transport.messages import (
    LEFT_OUT,
    Json,
    JsonMessage,
    json_form,
    pack,
    read_fields,
    table_of,
)
from hpc_elastic.worker.shared_page import CheckpointRequest

T = TypeVar("T")
Address = tuple[str, int]  # of a port: an IP address, and the number


@dataclass(frozen=True)
class RunMessage(JsonMessage):
    """A message of this protocol, or one within an agent."""


def _ages(items: Iterable[Any], now: float) -> list[Json]:
    packed = [asdict(item) for item in items]
    for item in packed:
        item["age_s"] = now - item.pop("time")
    return packed


def _of_ages(kind: type[T]) -> Callable[[Any, float], tuple[T, ...]]:
    return lambda raw, now: tuple(
        read_fields(kind, {**item, "time": now - float(item["age_s"])}) for item in raw
    )


@dataclass(frozen=True)
class RankState:
    """The state in which a rank was found.

    Attributes:
        state: ``stands``: its stack did not change; ``moves``: it did; ``busy``, ``done``: see
            `hang_diagnosis`; ``stopped``: by a signal, as SIGSTOP; ``silent``: it cannot be
            inspected.
        place: Its innermost frame of the user's own code, ``file:line in function``; a few words if
            the process has none or is out of reach.
        waits_in: The collective, or similar call, that it is in; None if none is known.
        stack: Path of the file with its stacks.
        time: Unix seconds of its last sign of life.
        collectives: The last one that it has enqueued in each group of NCCL, by the group's name:
            its number, its name, and whether it is done.
    """

    rank: int
    local_rank: int
    state: str
    place: str
    waits_in: str | None = None
    stack: str | None = None
    time: float = 0.0
    collectives: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    gpus_fail: bool = False

    @property
    def awaited(self) -> dict[str, int]:
        """The number of the collective that it waits for, by group."""
        return {group: n for group, (n, _, is_done) in self.collectives.items() if not is_done}

    @property
    def where(self) -> str:
        """Its place as text."""
        at = f"in {self.waits_in} ({self.place})" if self.waits_in else f"at {self.place}"
        if self.gpus_fail:
            at += ", and nvidia-smi fails on its node"
        for group in self.awaited:
            number, name, _ = self.collectives[group]
            return f"{at}, where {name} {number} of group {group} is not done"
        return at


# ---- in both directions


@dataclass(frozen=True)
class Heartbeat(RunMessage, type_name="heartbeat"):
    """The sender is alive; an agent adds the progress of its workers."""

    progress: Json | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class QuorumMessage(RunMessage, type_name="ft"):
    """A message between a replica and the lighthouse (`hpc_elastic.ft.messages`)."""

    message: ft_messages.Message = field(
        metadata=json_form(lambda raw, now: ft_messages.unpack(raw), pack)
    )


# ---- from an agent to the leader


@dataclass(frozen=True)
class Join(RunMessage, type_name="join"):
    """A request for a place in the next round.

    Attributes:
        request: Its number: an agent may join again before it is answered.
        store: Address and port of a fresh store, for the case that the agent is the first of a
            replica.
        waited_s: How long it has waited already, under earlier leaders or without one.
        probes: Where it accepts the probes of others (`reachability`).
    """

    request: int
    store: Address = ("", 0)
    waited_s: float = 0.0
    probes: Sequence[Address] = field(default=(), metadata=LEFT_OUT)
    versions: str = field(default="", metadata=LEFT_OUT)


@dataclass(frozen=True)
class Reattach(RunMessage, type_name="reattach"):
    """Its workers go on in the replica that an earlier leader's entry ``index`` has placed."""

    index: int
    number: int
    replica: int
    probes: Sequence[Address] = field(default=(), metadata=LEFT_OUT)
    versions: str = field(default="", metadata=LEFT_OUT)


@dataclass(frozen=True)
class Leave(RunMessage, type_name="leave"):
    """It leaves the run by itself."""

    why: str


@dataclass(frozen=True)
class Notice(RunMessage, type_name="notice"):
    """Its node is to be left within ``left_s``."""

    reason: str
    left_s: float


@dataclass(frozen=True)
class NoticeConfirmed(RunMessage, type_name="noticed"):
    """It has taken in the leader's `NoticeRequest`."""


@dataclass(frozen=True)
class Probed(RunMessage, type_name="probed"):
    """The answer to a `Probe`: the tasks that it does not reach."""

    number: int
    failed: Sequence[str]


@dataclass(frozen=True)
class MemberReport(RunMessage):
    """A report about the round whose entry has this index."""

    index: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Close(MemberReport, type_name="close"):
    """End the run for all agents."""


@dataclass(frozen=True)
class Finished(MemberReport, type_name="finished"):
    """All workers of the agent have returned."""


@dataclass(frozen=True)
class Failed(MemberReport, type_name="failed"):
    """Workers of the agent have failed; it has stopped the others."""

    failures: Sequence[Failure] = field(metadata=json_form(_of_ages(Failure), _ages))


@dataclass(frozen=True)
class CheckpointAnnounced(MemberReport, type_name="checkpoint"):
    """All workers of the agent have announced the checkpoint of a step.

    ``paused`` is the number of the request for which some workers pause there; 0 if none does.
    """

    step: int
    paused: int


@dataclass(frozen=True)
class CheckpointWanted(MemberReport, type_name="request_checkpoint"):
    """A worker requests that all ranks save at one step soon."""


@dataclass(frozen=True)
class Vote(StepVote, MemberReport, type_name="step_vote"):
    """A vote on a request, and another one when all workers have passed a confirmed step.

    Attributes:
        passed: In the second vote the smallest step that a worker has published.
            None: no worker has called `should_checkpoint` yet.
        rate: Steps per second, at least 0.
    """


@dataclass(frozen=True)
class Stall(MemberReport, type_name="stalled"):
    """Workers have made no step for ``stalled_s``, which exceeds ``limit_s``.

    The limit is ``assumed`` if it is neither set nor measured (`agent.hang_watch`).
    """

    stalled_s: float
    limit_s: float
    assumed: bool = False


@dataclass(frozen=True)
class Stacks(MemberReport, type_name="stacks"):
    """The answer to a `StacksRequest`: the states of the agent's ranks."""

    number: int
    ranks: Sequence[RankState] = field(metadata=json_form(_of_ages(RankState), _ages))


# ---- from the leader to an agent


@dataclass(frozen=True)
class RoundInfo(RunMessage, type_name="round"):
    """One member's place in a closed round, in a message of the same size in any group."""

    request: int  # the number of the request that this answers
    number: int
    index: int  # the index of the entry that closed it: the group's fencing token
    restarts: int
    group_rank: int
    group_size: int  # nodes
    first_rank: int  # global rank of this node's first worker
    world_size: int
    store: Address = ("", 0)  # of the group
    replica: int = 0
    """Number of the replica that the group is, below the most that the run may have."""
    throughputs: str = ""
    """Of the workers, if they differ (`data.batch.encode_throughputs`): one part for each pool."""
    hosts: str = ""  # the nodes by group rank, as Slurm's node list
    workers: str = ""  # the number of workers on each, as in SLURM_TASKS_PER_NODE


@dataclass(frozen=True)
class Stop(RunMessage, type_name="stop"):
    """Stop the workers, and join again."""

    reason: str


@dataclass(frozen=True)
class CheckpointRequested(RunMessage, type_name="checkpoint_request"):
    """The present request to all workers of the round; None: there is none any more."""

    request: CheckpointRequest | None = field(
        metadata=json_form(write=lambda request, now: request and asdict(request))
    )


@dataclass(frozen=True)
class StacksRequest(RunMessage, type_name="stacks"):
    """Send the stacks of the workers (`hang_diagnosis`)."""

    number: int


@dataclass(frozen=True)
class Probe(RunMessage, type_name="probe"):
    """Connect to all these ports of other agents, by task; answer with `Probed`."""

    number: int
    peers: Mapping[str, Sequence[Address]]


@dataclass(frozen=True)
class NoticeRequest(RunMessage, type_name="notice"):
    """Leave the node within ``left_s``: a user or an operator asks for it."""

    left_s: float


@dataclass(frozen=True)
class End(RunMessage, type_name="end"):
    """The run has ended."""

    status: str
    failure: str | None

    @classmethod
    def of(cls, ending: RunEnding) -> End:
        """Return the message about an ending."""
        return cls(ending.status, ending.summary)


OLDER_ATTEMPT = End("superseded", "its task has started again")
"""To an agent of a task whose next attempt has joined."""


@dataclass(frozen=True)
class Requeue(RunMessage, type_name="requeue"):
    """Go back to the queue, and do not start again for ``delay_s``."""

    delay_s: float


@dataclass(frozen=True)
class Waiting(RunMessage, type_name="waiting"):
    """What the next round waits for, for people."""

    text: str


# ---- within an agent


@dataclass(frozen=True)
class Departed(RunMessage):
    """This node has left the run because of its notice; the agent must still stop its workers."""

    reason: Reason


@dataclass(frozen=True)
class PreemptionNotice(RunMessage):
    """This node is to be left; between agent and leader it is `Notice` and `NoticeRequest`.

    ``by`` is when, in monotonic seconds; ``signal`` has announced it, unless it was something else;
    ``given_s`` is how much time was given, from the announcement on, if known.
    """

    reason: Reason
    by: float
    signal: str | None = field(default=None, compare=False)
    given_s: float | None = field(default=None, compare=False)

    def for_leader(self, now: float) -> Notice:
        """Return the report of this notice; ``now`` is in monotonic seconds."""
        return Notice(self.reason.value, max(0.0, self.by - now))


TO_LEADER = table_of(
    Join, Reattach, Failed, Finished, CheckpointAnnounced, CheckpointWanted, Vote, Stall, Stacks,
    Notice, NoticeConfirmed, Leave, Close, Probed, QuorumMessage, Heartbeat,
)  # fmt: skip
TO_AGENT = table_of(
    RoundInfo, Stop, CheckpointRequested, StacksRequest, NoticeRequest, End, Requeue, Waiting,
    Probe, QuorumMessage, Heartbeat,
)  # fmt: skip
