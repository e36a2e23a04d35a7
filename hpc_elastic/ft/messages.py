"""What the workers, their replica groups and the keeper of the quorum tell each other (pure).

Theory of operation
-------------------
A *replica group* is the workers of one array task: one copy of the model. Each group has a *server*
(`manager_server`), outside of the training processes: the agent of a run, or a small process of its
own (`manager_server_process`). It speaks for its workers to the *keeper* (`lighthouse_state`),
which decides about the quorum (`quorum`): it lives with the leader of a run, or in a
`coordination.LighthouseServer`.

    worker  --Unix socket-->  server of its group  --signed connection-->  keeper

A step that nobody disturbs costs no message. A worker counts its *calls*, the steps that it has
begun in the present quorum: call 0 is the one that asked for it. As long as all members only count,
they stay in lockstep, since each step's collectives need all of them. A worker asks again when

- its last step was not committed, or the quorum is *broken*: the keeper has told every member that
  one of them was lost or could not go on, and their collectives have been aborted;
- the *switch* has come: where somebody joins or leaves as announced, the keeper proposes a call
  that is ahead of everybody (`ProposeSwitch`), each worker answers whether it can still ask there
  (`SwitchVote`), and the keeper confirms it (`ConfirmSwitch`). A worker that comes to the proposed
  call before that waits for it, so that all ask at the same call, and no step fails.

Quorum ids are ``epoch << EPOCH_SHIFT | count``: they rise for ever, whoever keeps the quorum.

*Lineage*. A committed step makes a new token out of the last one and the quorum that it was made in
(`quorum`). Groups whose steps and tokens are equal have the same parameters; equal steps alone say
nothing. Those that are at another step, or at the same with another token, heal.

Every message is a JSON object: the dataclass's fields, and its name as ``type``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hpc_elastic.errors import ConfigError

EPOCH_SHIFT = 20
NO_QUORUM = -1
SOCKET_ENV = "HPC_ELASTIC_FT_SOCKET"
"""Path of the socket on which the agent of a run serves its workers."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Hello:
    """Worker to server, first: who I am."""

    group_rank: int
    group_world_size: int
    pid: int


@dataclass(frozen=True)
class Welcome:
    """Server to worker, in answer: who your group is."""

    replica_id: str


@dataclass(frozen=True)
class QuorumRequest:
    """One worker, or (with the metadata of all its ranks) one group, wants to be in the quorum.

    Attributes:
        call: Steps begun in the quorum ``quorum_id``, this one included.
        step: Steps committed.
        lineage: The token of the state at that step.
        quorum_id: The last quorum it was in; `NO_QUORUM`: none.
        commit_failures: Steps in a row that were not committed.
        min_replicas: The fewest members that it works with.
        shrink_only: Nobody may join now.
        store: ``host:port`` of the group's TCPStore, for the members' process group.
        metadata: What a peer needs to fetch the state, by group rank (one worker: its own alone).
        number: Counts the asks of a group; the same when one is sent again.
        is_saved: The script could save this state as one that nobody else has.
    """

    call: int
    step: int
    lineage: str
    quorum_id: int
    commit_failures: int
    min_replicas: int
    shrink_only: bool
    store: str
    metadata: tuple[str, ...]
    number: int = 0
    is_saved: bool = False


@dataclass(frozen=True)
class CancelRequest:
    """Up to the keeper: it does not wait any more."""


@dataclass(frozen=True)
class QuorumAborted:
    """Up: this quorum can not go on, because of me. Down: it is over for everybody."""

    quorum_id: int
    why: str


@dataclass(frozen=True)
class ProposeSwitch:
    """Down: all may have to ask at this call of the quorum.

    Call 0 only asks how far everybody is; number 0 takes back what was proposed.
    """

    quorum_id: int
    number: int
    call: int


@dataclass(frozen=True)
class SwitchVote:
    """Up, to a proposal: whether it was seen in time (``call`` is not past it), and how far I am.

    Attributes:
        number: The proposal's.
        ok: No worker of the group has begun the proposed call.
        call: The furthest call that one of them has begun.
        rate: Calls a second lately, at least 0.
    """

    quorum_id: int
    number: int
    ok: bool
    call: int
    rate: float


@dataclass(frozen=True)
class ConfirmSwitch:
    """Down: all ask at the proposed call.

    Attributes:
        leaves: This group does not come back from there: it is to leave.
        last: All members leave there, and nobody else holds the state: save it before.
    """

    quorum_id: int
    number: int
    leaves: bool = False
    last: bool = False


@dataclass(frozen=True)
class HealSource:
    """A member with the newest state, by its place in the quorum."""

    replica_rank: int
    metadata: str


@dataclass(frozen=True)
class QuorumResult:
    """Down, in answer to `QuorumRequest`: one worker's place in a new quorum.

    Attributes:
        quorum_id: The quorum's.
        replica_rank: The group's place among all members, from 0.
        replica_world_size: Members.
        store: ``host:port`` of the primary's store, where the new process group meets.
        max_step: The newest step; who heals will be there.
        lineage: The token of the newest state.
        cohort_rank: The group's place among those that have it; None: it heals.
        cohort_size: How many have it; at least 1.
        sources: From whom this worker fetches the state, the best first; empty unless it heals.
        first_of: Replica ranks of those whose first source it is.
        serves: Replica ranks of all those that have it among their sources.
        next_store: Where the group will probably meet if the primary is lost. To connect can take
            seconds where names are slow, so it is done beforehand.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    store: str
    max_step: int
    lineage: str
    cohort_rank: int | None
    cohort_size: int
    sources: tuple[HealSource, ...] = ()
    first_of: tuple[int, ...] = ()
    serves: tuple[int, ...] = ()
    next_store: str = ""

    @property
    def heals(self) -> bool:
        """Whether this worker has to fetch the state."""
        return self.cohort_rank is None


@dataclass(frozen=True)
class QuorumResults:
    """Keeper to group: the placement of each of its workers, by group rank.

    Attributes:
        ranks: By group rank.
        number: The ask's that it answers: asks and answers may cross.
    """

    ranks: tuple[QuorumResult, ...] = field(default=())
    number: int = 0


@dataclass(frozen=True)
class LeaveGranted:
    """Down, in answer to `QuorumRequest`: the group has left the quorum as announced."""


@dataclass(frozen=True)
class CheckpointBeforeLeave:
    """Down, in answer to `QuorumRequest`: it may go once it has saved; nobody else has its state.

    There is no quorum for the step that it was asked for: it fails, and its end is the moment.
    """


@dataclass(frozen=True)
class QuorumWaiting:
    """Down: whom a quorum is waited for with; for the error of who waits for too long."""

    text: str


@dataclass(frozen=True)
class CommitVote:
    """Worker to server: whether this worker could commit the step of a call.

    Only where the group has several.
    """

    quorum_id: int
    call: int
    yes: bool


@dataclass(frozen=True)
class CommitDecision:
    """Server to its workers: all of them could, or not."""

    quorum_id: int
    call: int
    commit: bool


@dataclass(frozen=True)
class LeaveNotice:
    """Up: this group's node is to be left within so many seconds: let it go at the next switch."""

    left_s: float


@dataclass(frozen=True)
class WorkersLost:
    """Up: workers of this group are dead, or stopped for longer than a moment."""

    why: str


@dataclass(frozen=True)
class Shutdown:
    """Worker to server, and up: it is done, and leaves in peace."""


@dataclass(frozen=True)
class ReplicaStatus:
    """Group to a new keeper, first: the quorum that it is in.

    Attributes:
        quorum_id: `NO_QUORUM`: none.
        replica_rank, replica_world_size: Its place in it.
        call: The furthest call begun.
        broken: It has been told, or found, that it is broken.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    call: int
    broken: bool


Message = (
    Hello
    | Welcome
    | QuorumRequest
    | CancelRequest
    | QuorumAborted
    | ProposeSwitch
    | SwitchVote
    | ConfirmSwitch
    | QuorumResult
    | QuorumResults
    | LeaveGranted
    | CheckpointBeforeLeave
    | QuorumWaiting
    | CommitVote
    | CommitDecision
    | LeaveNotice
    | WorkersLost
    | Shutdown
    | ReplicaStatus
)

M = TypeVar("M")

_TYPES: dict[str, Any] = {
    t.__name__.lower(): t
    for t in (
        Hello,
        Welcome,
        QuorumRequest,
        CancelRequest,
        QuorumAborted,
        ProposeSwitch,
        SwitchVote,
        ConfirmSwitch,
        QuorumResult,
        QuorumResults,
        LeaveGranted,
        CheckpointBeforeLeave,
        QuorumWaiting,
        CommitVote,
        CommitDecision,
        LeaveNotice,
        WorkersLost,
        Shutdown,
        ReplicaStatus,
    )
}

_NESTED: dict[Any, dict[str, Any]] = {
    QuorumResult: {"sources": HealSource},
    QuorumResults: {"ranks": QuorumResult},
}
_NAMES = {t: name for name, t in _TYPES.items()}
_FIELDS = {t: tuple(f.name for f in fields(t)) for t in (*_TYPES.values(), HealSource)}


def pack(message: Message) -> Json:
    """Return a message as a JSON object."""
    return {"type": _NAMES[type(message)], **_plain(message)}


def _plain(item: Any) -> Json:
    """Return the fields (`dataclasses.asdict` would copy deeply, for longer than a signature)."""
    plain = dict(vars(item))
    for name in _NESTED.get(type(item), ()):
        plain[name] = tuple(_plain(part) for part in plain[name])
    return plain


def unpack(raw: Json) -> Message:
    """Return the message in a JSON object.

    Raises:
        ValueError: it is none of ours.
    """
    type_ = _TYPES.get(str(raw.get("type")))
    if type_ is None:
        raise ValueError(f"no message of fault tolerance: {raw.get('type')!r}")
    try:
        message: Message = _build(type_, raw)
    except (TypeError, KeyError) as e:
        raise ValueError(f"a damaged message {raw['type']!r}: {e}") from e
    return message


def _build(type_: type[M], raw: Json) -> M:
    nested = _NESTED.get(type_, {})
    given = {}
    for name in _FIELDS[type_]:
        if name in raw:
            value = raw[name]
            if isinstance(value, (list, tuple)):
                part = nested.get(name)
                value = tuple(_build(part, p) for p in value) if part else tuple(value)
            given[name] = value
    return type_(**given)


# ---- What a lighthouse and an attendant tell each other, and how it is addressed (pure)
# Both ends sign what they say (`transport.auth`) with a secret derived from the user's key
# (`transport.auth`). Frames: ``terms`` (lighthouse to attendant, first: ``silence_s``, after
# which each side gives up the other), ``beat`` (it is answered) and ``ft``, which carries a
# ``message`` of these.


PURPOSE = "lighthouse"
"""Of the secret that both ends derive from the user's key."""
SESSION_EPOCH = 0
"""An attendant can not know the lighthouse's epoch before it has connected."""


def frame(message: Message) -> dict[str, Any]:
    """Return what carries a message between a replica and its keeper."""
    return {"type": "ft", "message": pack(message)}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``http://host:port`` or ``host:port``.

    Raises:
        ConfigError: it is neither.
    """
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
