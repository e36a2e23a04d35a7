"""Messages between workers, the servers of their replica groups and the lighthouse (pure).

Theory of operation
-------------------
A *replica group* is the set of workers of one array task: one copy of the model. Each group has a
*manager server* (`manager_server`) outside of its training processes. It represents its workers at
the *lighthouse* (`lighthouse_state`), which decides about the quorum (`quorum`), and is part of a
run's leader, or stands alone (`coordination.LighthouseServer`).

    worker  --Unix socket-->  manager server  --signed connection-->  lighthouse

An undisturbed step costs no message. A worker counts its *quorum steps*, the steps that it has
started in the present quorum; quorum step 0 is the one that requested the quorum. As long as all
members only count, they stay in lockstep, since the collectives of each step need all of them. A
worker requests another quorum when

- its last step was not committed, or the quorum is *aborted*: a member was lost or cannot go on.
  The lighthouse has notified every member, and their collectives have been aborted. A member that
  is done (`Shutdown`) costs no step that has its part: the others complete that one first;
- the *switch* is reached: where a group joins, has caught up (`SwitchRequest`), or leaves as
  announced, the lighthouse proposes a quorum step ahead of all members (`ProposeSwitch`). Each
  worker answers whether it can still request a quorum there (`SwitchVote`), and the lighthouse
  confirms it (`ConfirmSwitch`). A worker that reaches the proposed step earlier waits for the
  confirmation, so all members request at the same step and no step fails.

Quorum ids are ``term << TERM_SHIFT | count``: they always rise, also from one lighthouse to the
next.

*State version*. A committed step makes a new version out of the last one and the quorum in which it
was made (`quorum`). Groups with equal step and version have the same parameters; equal steps alone
prove nothing. Groups at another step, or at the same step with another version, heal.

*Catching up*. A state that takes long to fetch is not waited for: in a quorum with ``catch_up`` the
members that heal add zero to every step, and fetch a part of the state in each (`catch_up`). One
that has all of it requests a switch, and is a full member of the next quorum.

Every message is a JSON object: the fields of its dataclass, and its class name as ``type``. Between
a worker and its server, which are on one node, it is one line of text. Those lines are not signed:
the socket is in a folder that only its owner can enter, and the server learns from the kernel which
process has connected. A manager server process and a lighthouse sign their frames
(`transport.auth`) with a secret derived from the user's key: ``terms`` (from the lighthouse, first:
``silence_s``, after which each side gives up the other), ``beat`` (which is answered) and ``ft``,
whose ``message`` is one of these.

This module needs only the standard library: a manager server process starts without site-packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.transport import messages
from hpc_elastic.transport.auth import text_of
from hpc_elastic.transport.messages import Json, json_form, pack, read_values, table_of

TERM_SHIFT = 20
NO_QUORUM = -1
SOCKET_ENV = "HPC_ELASTIC_FT_SOCKET"
"""Environment variable: the socket on which the agent of a run serves its workers."""
LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
"""Environment variable: the address of a standalone lighthouse."""
LIGHTHOUSE_PURPOSE = "lighthouse"
"""Purpose of the secret that both ends derive from the user's key."""
LIGHTHOUSE_SESSION = 0
"""Session term of every lighthouse: its clients cannot know its term before they connect."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20


class Message(messages.JsonMessage):
    """Base of the messages of this module."""


@dataclass(frozen=True)
class Hello(Message):
    """Worker to server, first."""

    group_rank: int
    group_world_size: int
    pid: int


@dataclass(frozen=True)
class Welcome(Message):
    """Server to worker, in answer to `Hello`."""

    replica_id: str


@dataclass(frozen=True)
class QuorumRequest(Message):
    """Up: a worker, or (with the metadata of all its ranks) a group, requests a quorum.

    Attributes:
        quorum_step: Steps started in the quorum ``quorum_id``, this one included.
        step: Steps committed.
        state_version: Version of the state at that step.
        commit_failures: Steps in a row that were not committed.
        store: ``host:port`` of the group's TCPStore, for the members' process group.
        metadata: What a peer needs to fetch the state, by group rank (of a worker: its own alone).
        number: Counts the requests of a group; the same when one is repeated.
        is_saved: The script had the chance to save this state as the only one that has it.
        catch_up: It can fetch a state in parts, or give one, and the state is large enough for it.
        timeout_s: How long it waits for the answer, in seconds; 0: without a limit.
        heal_failures: Quorums in a row in which it could not heal.
    """

    quorum_step: int
    step: int
    state_version: str
    quorum_id: int
    commit_failures: int
    min_replicas: int
    shrink_only: bool
    store: str
    metadata: tuple[str, ...]
    number: int = 0
    is_saved: bool = False
    catch_up: bool = False
    timeout_s: float = 0.0
    heal_failures: int = 0


@dataclass(frozen=True)
class CancelRequest(Message):
    """Up: the last `QuorumRequest` is void."""


@dataclass(frozen=True)
class QuorumAborted(Message):
    """Up: the sender cannot go on in this quorum. Down: it is over for all members.

    Attributes:
        after_step: Members may complete the quorum steps up to this one, since a member that is
            done has sent all of its part in them; -1: none.
        is_lasting: Another attempt does not cure the error; the ranks of one group count these
            together. Never set in a lighthouse's message.
    """

    quorum_id: int
    reason: str
    after_step: int = -1
    is_lasting: bool = False


@dataclass(frozen=True)
class ProposeSwitch(Message):
    """Down: all members may have to request the next quorum at this quorum step.

    Step 0 only asks how far the members are; number 0 withdraws the last proposal.
    """

    quorum_id: int
    number: int
    quorum_step: int


@dataclass(frozen=True)
class SwitchVote(Message):
    """Up, in answer to a proposal.

    Attributes:
        ok: No worker of the group has started the proposed quorum step, or it is confirmed.
        quorum_step: The furthest quorum step that a worker has started.
        rate: Steps per second lately, at least 0.
        confirmed_step: In answer to a question: the step at which it requests, as an earlier
            lighthouse has confirmed; 0 if none has.
    """

    quorum_id: int
    number: int
    ok: bool
    quorum_step: int
    rate: float
    confirmed_step: int = 0


@dataclass(frozen=True)
class SwitchRequest(Message):
    """Up: a member that catches up needs another quorum, since it has the whole state, or cannot.

    No step has to fail for it: the lighthouse starts a switch.
    """

    quorum_id: int


@dataclass(frozen=True)
class ConfirmSwitch(Message):
    """Down: all members request the next quorum at the proposed step.

    Attributes:
        leaves: This group leaves there.
        last: All members leave there, and no other group has the state: it is to be saved before.
    """

    quorum_id: int
    number: int
    leaves: bool = False
    last: bool = False


@dataclass(frozen=True)
class HealSource:
    """A member with the newest state, by its rank in the quorum."""

    replica_rank: int
    metadata: str


def _write_sources(sources: Iterable[HealSource], now: float) -> list[Json]:
    return [vars(source) for source in sources]


@dataclass(frozen=True)
class QuorumResult(Message):
    """Down, in answer to `QuorumRequest`: one worker's place in a new quorum.

    Attributes:
        store: ``host:port`` of the store where the members form the new process group.
        max_step: The newest step; a member that heals will be there.
        cohort_rank: The group's rank among the members with that state; None if it heals.
        cohort_size: Number of members with that state, at least 1.
        sources: Members to fetch the state from, the best first; empty unless the worker heals.
        first_source_of: Replica ranks of the members whose first source it is.
        source_of: Replica ranks of all members that have it among their sources.
        next_store: Where the members will probably meet if the one with ``store`` is lost. Workers
            connect ahead, since that can take seconds where name servers are slow.
        catch_up: The members that heal do so beside the training, a part in each step.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    store: str
    max_step: int
    state_version: str
    cohort_rank: int | None
    cohort_size: int
    sources: tuple[HealSource, ...] = field(default=(), metadata=json_form(write=_write_sources))
    first_source_of: tuple[int, ...] = ()
    source_of: tuple[int, ...] = ()
    next_store: str = ""
    catch_up: bool = False

    @property
    def heals(self) -> bool:
        """Whether this worker has to fetch the state."""
        return self.cohort_rank is None


def _read_ranks(raw: Any, now: float) -> tuple[QuorumResult, ...]:
    first = read_values(QuorumResult, raw[0]) if raw else {}
    return tuple(QuorumResult(**{**first, **read_values(QuorumResult, rank)}) for rank in raw)


def _write_ranks(ranks: Iterable[QuorumResult], now: float) -> list[Json]:
    """Write the first rank in whole, and of each other one what differs, which is little."""
    plain = [{**vars(rank), "sources": _write_sources(rank.sources, now)} for rank in ranks]
    return plain[:1] + [
        {name: value for name, value in rank.items() if value != plain[0][name]}
        for rank in plain[1:]
    ]


@dataclass(frozen=True)
class QuorumResults(Message):
    """Down: the results of a group's workers, by group rank, for the request of this number."""

    ranks: tuple[QuorumResult, ...] = field(
        default=(), metadata=json_form(_read_ranks, _write_ranks)
    )
    number: int = 0


@dataclass(frozen=True)
class LeaveGranted(Message):
    """Down, in answer to `QuorumRequest`: the group has left the quorum as announced."""

    number: int = 0


@dataclass(frozen=True)
class CheckpointBeforeLeave(Message):
    """Down, in answer to `QuorumRequest`: the group leaves once it has saved its state.

    No other group has that state. There is no quorum for the step that requested one: it fails, and
    the script can save at its end.
    """

    number: int = 0


@dataclass(frozen=True)
class QuorumWaiting(Message):
    """Down: which groups the quorum waits for; the text of a worker's time-out error."""

    text: str


@dataclass(frozen=True)
class CommitVote(Message):
    """Worker to server, in groups of several workers: whether this worker can commit the step."""

    quorum_id: int
    quorum_step: int
    commit: bool


@dataclass(frozen=True)
class CommitDecision(Message):
    """Server to its workers: whether the group commits the step."""

    quorum_id: int
    quorum_step: int
    commit: bool


@dataclass(frozen=True)
class LeaveNotice(Message):
    """Up: the group's node is lost in ``left_s`` seconds; it is to leave at the next switch."""

    left_s: float


@dataclass(frozen=True)
class WorkersLost(Message):
    """Up: workers of this group are dead, or stopped for longer than a moment."""

    reason: str


@dataclass(frozen=True)
class StateMismatch(Message):
    """Worker to server: its state differs from its counterparts' in the other groups.

    Attributes:
        worker: Replica id, host and rank of the worker.
        tensors: Paths of tensors that differ, for users.
        heals: It is certain that this state is the wrong one, and it heals.
    """

    step: int
    worker: str
    tensors: str
    heals: bool


@dataclass(frozen=True)
class HealFailed(Message):
    """Worker to server: its healing keeps failing, so the others go on without it for a time."""

    worker: str
    reason: str


RunReport = StateMismatch | HealFailed
"""What a worker reports for the run's events."""


@dataclass(frozen=True)
class Shutdown(Message):
    """Worker to server, and up: it is done, after this step of its last quorum, and leaves."""

    quorum_id: int = NO_QUORUM
    quorum_step: int = -1


@dataclass(frozen=True)
class ReplicaStatus(Message):
    """Group to lighthouse, first on each connection: its quorum, and its furthest step there."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    quorum_step: int
    is_aborted: bool


_TYPES = table_of(*Message.__subclasses__())


def unpack(raw: Json) -> Message:
    """Return the message in a JSON object; raise ValueError if it is none of this module's."""
    message = messages.unpack(raw, _TYPES)
    if message is None:
        raise ValueError(f"unknown message type {raw.get('type')!r}")
    return message


def to_frame(message: Message) -> Json:
    """Return the frame that carries a message between a manager server and a lighthouse."""
    return {"type": "ft", "message": pack(message)}


def to_line(message: Message) -> bytes:
    """Return the line that carries a message between a worker and its server."""
    return text_of(pack(message)) + b"\n"


class LineReader:
    """Parser of the lines read from a socket."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete; raise ValueError if a line is none."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            raise ValueError(f"a line longer than {MAX_LINE_BYTES} bytes")
        read = [json.loads(line) for line in lines]
        if not all(isinstance(raw, dict) for raw in read):
            raise ValueError("not a JSON object")
        return [unpack(raw) for raw in read]


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``http://host:port`` or ``host:port``; else raise ConfigError."""
    from urllib.parse import urlsplit

    remedy = "give it as host:port or http://host:port"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError("lighthouse_addr", text, f"{remedy} ({e})") from e
    if not host or port is None:
        raise ConfigError("lighthouse_addr", text, remedy)
    return host, port
