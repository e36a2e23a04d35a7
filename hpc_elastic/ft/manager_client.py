"""A worker's line to the server of its replica group: what the Manager asks and is told.

`messages` has the theory. A step that nobody disturbs costs one look at memory (`needs_quorum`);
all that the server says is read by a thread of this module's own, which also answers it. So the
worker's own threads may be anywhere, in a collective or in C++, when the quorum breaks.

    link = Link(path, group_rank, group_world_size, on_broken=abort, timeout_s=60)
    if link.needs_quorum(failed=last_step_failed):
        placement = link.ask(protocol.Ask(link.call, ..., link.quorum_id, ...), timeout_s=60)

In a group of several workers all must come to the same answer, or one would wait in a collective of
the group for another that waits for the quorum. There a quorum that broke is asked for anew only in
the step after the `vote` before which all of them had heard of it: the server sends every worker
the same messages in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_elastic.errors import ConfigError, HpcElasticError
from hpc_elastic.ft.early import LIGHTHOUSE_ENV
from hpc_elastic.ft.manager_server import Lines, to_line
from hpc_elastic.ft.manager_server_process import ManagerServerProcess, start_attendant
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    SOCKET_ENV,
    CancelRequest,
    CheckpointBeforeLeave,
    CommitDecision,
    CommitVote,
    ConfirmSwitch,
    Hello,
    LeaveGranted,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    QuorumWaiting,
    Shutdown,
    SwitchVote,
    Welcome,
)

_PROPOSAL_S = 30.0
"""The keeper takes back what is not confirmed within 5 s, and the next one settles what a dead one
has left; who waits for longer asks."""
_LAST_WORD_S = 5.0
"""After a vote in vain: how long the server has to say no."""
_READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class GroupServerGoneError(HpcElasticError, ConnectionError):
    """The server of this replica group can not be reached, or has ended: start the worker again."""


class ManagerClient:
    """One worker's connection; every method may be called from any thread.

    Attributes:
        replica_id: The group's name among its peers.
    """

    def __init__(
        self,
        path: Path,
        group_rank: int,
        group_world_size: int,
        *,
        on_broken: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        """Connect, and return once the server has said who the group is.

        Args:
            path: The server's Unix socket.
            group_rank: This worker's rank in its group, from 0.
            group_world_size: Workers of the group, at least 1.
            on_broken: Called with the present quorum's id and the reason when it breaks, once, on
                the thread that reads: the collectives that wait are to be aborted.
            timeout_s: For the server's first answer, in seconds.

        Raises:
            GroupServerGoneError: nobody answers there.
        """
        self._path = path
        self._on_broken = on_broken
        self._steps = QuorumSteps(alone=group_world_size == 1)
        self._changed = threading.Condition(threading.Lock())
        self._sending = threading.Lock()
        self._number = 0
        self._asking = False
        self._answer: QuorumResult | LeaveGranted | CheckpointBeforeLeave | None = None
        self._waiting = ""
        self._verdict: CommitDecision | None = None
        self._gone: str | None = None
        self._lines = Lines()
        self._early: list[Message] = []
        """What came in one piece with the welcome."""
        self._socket = _connected(path, timeout_s)
        _links.add(self)
        try:
            self._send(Hello(group_rank, group_world_size, os.getpid()))
            self.replica_id = self._welcomed()
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="ft-link", daemon=True)
        self._reader.start()

    # ---- steps --------------------------------------------------------------------------

    def needs_quorum(self, *, failed: bool) -> bool:
        """Begin a step; tell whether it needs a new quorum. Without one, this is all it costs.

        At a call that was proposed for a change of members, this waits until it is confirmed or
        taken back.

        Args:
            failed: The last step was not committed. In a group of several: the common verdict.
        """
        steps = self._steps
        with self._changed:
            steps.begin(time.monotonic())
            if steps.undecided and not failed:
                self._changed.wait_for(
                    lambda: not steps.undecided or self._gone is not None, _PROPOSAL_S
                )
            steps.settle(steps.call)
            return failed or steps.must_ask or steps.undecided

    def settle(self) -> bool:
        """Decide about the next step now, at the end of one; wait as `needs_quorum` would.

        Returns:
            Whether this group leaves in the next step, and nobody else has the state.
        """
        steps = self._steps
        with self._changed:
            if steps.undecided_next:
                self._changed.wait_for(
                    lambda: not steps.undecided_next or self._gone is not None, _PROPOSAL_S
                )
            steps.settle(steps.call + 1)
            return steps.is_last

    @property
    def call(self) -> int:
        """The number of the step begun last, in the present quorum."""
        return self._steps.call

    @property
    def quorum_id(self) -> int:
        """The present quorum's id; `protocol.NO_QUORUM` before the first."""
        return self._steps.quorum_id

    @property
    def broken(self) -> str | None:
        """Why the present quorum can not go on; None while it can."""
        return self._steps.broken

    @property
    def is_saved(self) -> bool:
        """Whether the script could save at the end of the step before as the last that may."""
        return self._steps.is_saved

    # ---- questions ----------------------------------------------------------------------

    def ask(
        self, ask: QuorumRequest, timeout_s: float
    ) -> QuorumResult | LeaveGranted | CheckpointBeforeLeave:
        """Ask for a place in the next quorum, and wait for it.

        Returns:
            The place; or `LeaveGranted`, where the group has left as it was announced; or
            `CheckpointBeforeLeave`, where it is to save before.

        Raises:
            TimeoutError: there was none in time; says who is waited for. Ask again, or give up.
            GroupServerGoneError: nobody is there to be asked.
        """
        with self._changed:
            self._answer = None
            self._asking = True
            self._waiting = "the server has not answered"
            self._number += 1
            numbered = replace(ask, number=self._number)
        self._send(numbered)
        with self._changed:
            self._changed.wait_for(lambda: self._answer or self._gone, timeout_s)
            self._asking = False
            if self._answer is not None:
                return self._answer
        if self._gone is not None:
            raise self._gone_error(self._gone)
        self._send(CancelRequest())
        raise TimeoutError(f"no quorum within {timeout_s:g} s: {self._waiting}")

    def vote(self, yes: bool, timeout_s: float) -> bool:
        """Tell whether this worker could commit its step; return whether all of the group could.

        Raises:
            GroupServerGoneError: nobody is there to count.
        """
        with self._changed:
            quorum_id, call = self._steps.quorum_id, self._steps.call
        self._send(CommitVote(quorum_id, call, yes))
        verdict = self._wait_for_verdict(quorum_id, call, timeout_s)
        if verdict is None and self._gone is None:  # one no decides, unless all have just said yes
            self._send(CommitVote(quorum_id, call, yes=False))
            verdict = self._wait_for_verdict(quorum_id, call, _LAST_WORD_S)
        if verdict is None:
            raise self._gone_error(self._gone or "it does not answer")
        return verdict.commit

    def _wait_for_verdict(
        self, quorum_id: int, call: int, timeout_s: float
    ) -> CommitDecision | None:
        def is_there() -> bool:
            verdict = self._verdict
            return verdict is not None and (verdict.quorum_id, verdict.call) == (quorum_id, call)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._gone, timeout_s)
            return self._verdict if is_there() else None

    def report_broken(self, quorum_id: int, why: str) -> None:
        """Tell everybody that this quorum can not go on; may be repeated, costs one message.

        A server that is gone is no error here: the next question will say so.
        """
        with self._changed:
            is_news = self._steps.found_broken(quorum_id, why)
        if is_news:
            with contextlib.suppress(GroupServerGoneError):
                self._send(QuorumAborted(quorum_id, why))

    def close(self) -> None:
        """Say that this worker is done, and leave. May be repeated."""
        with self._changed:
            if self._gone is None:
                self._gone = "the link was closed"
            self._changed.notify_all()
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(to_line(Shutdown()))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(to_line(message))
        except OSError as e:
            raise self._gone_error(self._gone or str(e)) from e

    def _gone_error(self, why: str) -> GroupServerGoneError:
        return GroupServerGoneError(
            f"the server of this replica group ({self._path}) is gone: {why}. Start the worker "
            "again"
        )

    # ---- the reading thread -------------------------------------------------------------

    def _welcomed(self) -> str:
        try:
            while not self._early:
                self._early = self._lines.feed(_some(self._socket))
            welcome = self._early.pop(0)
        except (OSError, ValueError) as e:
            raise self._gone_error(f"it did not answer: {e}") from e
        if not isinstance(welcome, Welcome):
            raise self._gone_error(f"it answered {welcome}")
        return welcome.replica_id

    def _read(self) -> None:
        try:
            for message in self._early:
                self._heard(message)
            while True:
                for message in self._lines.feed(_some(self._socket)):
                    self._heard(message)
        except (OSError, ValueError) as e:
            with self._changed:
                self._gone = self._gone or str(e)
                self._changed.notify_all()

    def _heard(self, message: Message) -> None:
        with self._changed:
            reply, broke = self._take(message)
            self._changed.notify_all()
        if reply is not None:
            self._send(reply)
        if broke is not None:
            try:
                self._on_broken(broke.quorum_id, broke.why)
            except Exception:
                _log.exception("the quorum broke, and what was to be done then failed")

    def _take(self, message: Message) -> tuple[Message | None, QuorumAborted | None]:
        """Return what to answer, and a quorum that has just been found broken."""
        match message:
            case QuorumResults():
                return self._placed(message), None
            case LeaveGranted():
                self._steps.enter(NO_QUORUM)
                self._answered(message)
            case CheckpointBeforeLeave():
                self._steps.save_first()
                self._answered(message)
            case QuorumWaiting():
                self._waiting = message.text
            case QuorumAborted():
                return None, message if self._steps.told_broken(message) else None
            case ProposeSwitch():
                return self._steps.proposed(message, time.monotonic()), None
            case ConfirmSwitch():
                self._steps.confirm(message)
            case CommitDecision():
                self._verdict = message
                self._steps.counted(message)
            case _:
                raise ValueError(f"not for a worker: {message}")
        return None, None

    def _placed(self, placements: QuorumResults) -> QuorumAborted | None:
        (placement,) = placements.ranks
        if self._asking and placements.number == self._number:
            self._steps.enter(placement.quorum_id)
            self._answered(placement)
            return None
        # it crossed our withdrawal, and others count on us
        return QuorumAborted(placement.quorum_id, "a worker had given up waiting for it")

    def _answered(self, answer: QuorumResult | LeaveGranted | CheckpointBeforeLeave) -> None:
        self._answer = answer
        self._asking = False


def _connected(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except OSError as e:
        connection.close()
        raise GroupServerGoneError(
            f"the server of this replica group can not be reached at {path}: {e}. Is its process "
            "alive, and on this node?"
        ) from e
    return connection


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(_READ_BYTES)
    if not data:
        raise ConnectionResetError("it closed the connection")
    return data


_links: weakref.WeakSet[ManagerClient] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child (a data loader): the connection is the parent's."""
    for link in list(_links):
        link._socket.close()


os.register_at_fork(after_in_child=_leave_to_parent)


# ---- What one worker knows of its quorum, and where in it it is (pure)
# `messages` has the rules: calls are counted from the one that asked for the quorum (0); whoever
# has been told of a change at a call waits there until it is confirmed or taken back. As long as
# it waits, it agrees to other proposals for the same call.


_SMOOTHING = 0.2


class QuorumSteps:
    """One worker's calls in its present quorum.

    Attributes:
        quorum_id: The quorum's; `NO_QUORUM`: none.
        call: The number of the step begun last.
        broken: Why the quorum can not go on.
        must_ask: A step that is begun now needs a new quorum.
        proposal: The change that this worker has agreed to.
        confirmed: Its confirmation.
        is_saved: It was the last moment to save when the step begun last was begun.
    """

    def __init__(self, *, alone: bool) -> None:
        """Begin outside of any quorum.

        Args:
            alone: The group has no other worker, so that this one may ask as soon as the quorum is
                broken; else all do after the same verdict.
        """
        self._alone = alone
        self._interval_s: float | None = None
        self._begun_at: float | None = None
        self.enter(NO_QUORUM)
        self.call = -1

    def enter(self, quorum_id: int) -> None:
        """Begin at call 0 of a quorum."""
        self.quorum_id = quorum_id
        self.call = 0
        self.broken: str | None = None
        self._told = False
        """All workers of the group have been told that it is broken, this one too."""
        self.must_ask = quorum_id == NO_QUORUM
        self.proposal: ProposeSwitch | None = None
        self.confirmed: ConfirmSwitch | None = None
        self._settled = 0
        """The call up to which nothing new may be agreed to."""
        self._must_save = False
        self.is_saved = False

    def begin(self, now: float) -> None:
        """Count a step."""
        self.is_saved = self.is_last
        self.call += 1
        if self._begun_at is not None:
            took = now - self._begun_at
            before = took if self._interval_s is None else self._interval_s
            self._interval_s = before + (took - before) * _SMOOTHING
        self._begun_at = now
        if self.confirmed is not None and self.proposal is not None:
            self.must_ask = self.must_ask or self.call >= self.proposal.call
        if not self.undecided:
            self.settle(self.call)

    @property
    def undecided(self) -> bool:
        """Whether the step begun is one at which all may have to ask."""
        return self._undecided_at(self.call)

    @property
    def undecided_next(self) -> bool:
        """Whether that can be said of the step after it."""
        return self._undecided_at(self.call + 1)

    @property
    def switches_next(self) -> bool:
        """Whether all members ask in the step after the one begun, as confirmed."""
        proposal = self.proposal
        return (
            self.confirmed is not None
            and proposal is not None
            and self.broken is None
            and self.call + 1 == proposal.call
        )

    @property
    def is_last(self) -> bool:
        """Whether the group goes in the step after the one begun, and the newest state with it."""
        confirmed = self.confirmed if self.switches_next else None
        goes_last = confirmed is not None and confirmed.leaves and confirmed.last
        return self._must_save or goes_last

    def save_first(self) -> None:
        """There is no quorum for the step begun: it is for saving."""
        self._must_save = self.must_ask = True

    def settle(self, call: int) -> None:
        """Agree to no more proposals for the steps up to this one: it goes on there, or asks."""
        self._settled = max(self._settled, call)

    def _undecided_at(self, call: int) -> bool:
        proposal = self.proposal
        return (
            proposal is not None
            and self.confirmed is None
            and not self.must_ask
            and call >= proposal.call
        )

    def rate(self, now: float) -> float:
        """Return the calls a second lately; 0 before the second."""
        if self._interval_s is None or self._begun_at is None:
            return 0.0
        return 1.0 / max(self._interval_s, now - self._begun_at, 1e-6)

    def proposed(self, propose: ProposeSwitch, now: float) -> SwitchVote | None:
        """Agree to a proposal, if it is ahead; return the answer. None: there is none."""
        if propose.quorum_id != self.quorum_id:
            return None
        if propose.number == 0:
            self.proposal = None if self.confirmed is None else self.proposal
            return None
        known = self.proposal
        if self.confirmed is not None and known is not None and propose.call != known.call:
            return None  # another keeper's, who has not heard yet what is confirmed: it will
        ok = self._settled < propose.call
        if propose.call > 0 and (ok or self.confirmed is None):
            self.proposal = propose if ok else None
        return SwitchVote(self.quorum_id, propose.number, ok, self._settled, self.rate(now))

    def confirm(self, confirm: ConfirmSwitch) -> None:
        """Make sure that the step at the proposed call asks."""
        proposal = self.proposal
        if proposal is None or confirm.quorum_id != self.quorum_id:
            return
        if confirm.number == proposal.number:
            self.confirmed = confirm
            self.must_ask = self.must_ask or self.call >= proposal.call

    def told_broken(self, broken: QuorumAborted) -> bool:
        """Take the keeper's word that a quorum is over; return whether it is this one, and news."""
        if broken.quorum_id != self.quorum_id:
            return False
        is_news = self.broken is None
        self.broken = self.broken or broken.why
        self._told = True
        self.must_ask = self.must_ask or self._alone
        return is_news

    def found_broken(self, quorum_id: int, why: str) -> bool:
        """Mark this quorum as broken by this worker; return whether it is news."""
        if quorum_id != self.quorum_id or self.broken is not None:
            return False
        self.broken = why
        self.must_ask = self.must_ask or self._alone
        return True

    def counted(self, verdict: CommitDecision) -> None:
        """Take the group's verdict on a step: all its workers know the same now."""
        if verdict.quorum_id == self.quorum_id and self._told:
            self.must_ask = True


# ---- Where the server of this worker's replica group is: the agent's, or an attendant of our own
# In a run the agent says it by the environment. Elsewhere the group's first rank starts an
# attendant (`manager_server_process`), and tells the others where by the group's store.


@dataclass(frozen=True)
class GroupPlace:
    """This worker's place in its replica group, and where the group's TCPStore is."""

    rank: int
    world_size: int
    store_addr: str
    store_port: int

    @property
    def store(self) -> str:
        """The store as ``host:port``, an IPv6 address in brackets."""
        host = f"[{self.store_addr}]" if ":" in self.store_addr else self.store_addr
        return f"{host}:{self.store_port}"


@dataclass(frozen=True)
class RunningServer:
    """A server that stands: its socket, and its process where this worker has started it."""

    path: Path
    attendant: ManagerServerProcess | None = None


@dataclass(frozen=True)
class ServerSettings:
    """What a script says about the server; see `Manager`."""

    lighthouse_addr: str | None
    replica_id: str | None
    connect_timeout_s: float


def group_of(
    rank: int | None, world_size: int | None, store_addr: str | None, store_port: int | None
) -> GroupPlace:
    """Return the place in the group: what is given, else what the environment says.

    Raises:
        ConfigError: neither says it.
    """
    env = os.environ
    return GroupPlace(
        rank=rank if rank is not None else int(_demand(env, "RANK", "rank")),
        world_size=world_size or int(_demand(env, "WORLD_SIZE", "world_size")),
        store_addr=store_addr or _demand(env, "MASTER_ADDR", "store_addr"),
        store_port=store_port or int(_demand(env, "MASTER_PORT", "store_port")),
    )


def _demand(env: Mapping[str, str], name: str, argument: str) -> str:
    if not env.get(name):
        raise ConfigError(
            argument, None, f"give it to the Manager, or set {name}, as torchrun and a run do"
        )
    return env[name]


def find_server(group: GroupPlace, wanted: ServerSettings) -> RunningServer:
    """Return the group's server; start one if this is rank 0, and no agent has.

    Raises:
        ConfigError: there is neither an agent nor a lighthouse; or the group's workers are on
            several hosts.
    """
    path = os.environ.get(SOCKET_ENV)
    if path:
        return RunningServer(Path(path))
    if group.rank > 0:
        return _told(group, wanted)
    lighthouse = wanted.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV)
    if not lighthouse:
        raise ConfigError(
            "lighthouse_addr",
            lighthouse,
            "nobody keeps the quorum: submit the script with launcher=slurm (or launcher=local) "
            f"ft=true; or start `hpc-elastic lighthouse` and give its address here or in "
            f"{LIGHTHOUSE_ENV}",
        )
    name = f"{wanted.replica_id}:{uuid.uuid4()}" if wanted.replica_id else str(uuid.uuid4())
    attendant = start_attendant(lighthouse, name, group.world_size)
    if group.world_size > 1:
        _tell(group, wanted, attendant.path)
    return RunningServer(attendant.path, attendant)


def _tell(group: GroupPlace, wanted: ServerSettings, path: Path) -> None:
    text = json.dumps({"path": str(path), "host": socket.gethostname()})
    open_store(group, wanted.connect_timeout_s).set(_key(), text)


def _told(group: GroupPlace, wanted: ServerSettings) -> RunningServer:
    said = json.loads(open_store(group, wanted.connect_timeout_s).get(_key()))
    here = socket.gethostname()
    if said["host"] != here:
        raise ConfigError(
            "world_size",
            group.world_size,
            f"the workers of a replica group must be on one host; rank 0 is on {said['host']}, "
            f"rank {group.rank} on {here}: make each host a replica group of its own",
        )
    return RunningServer(Path(said["path"]))


def _key() -> str:
    """Return the store's key; a restarted group must not read what the one before has written."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"hpc_elastic/ft/server/{attempt}"


def open_store(group: GroupPlace, timeout_s: float) -> TCPStore:
    """Return a connection to the group's store."""
    return TCPStore(
        group.store_addr,
        group.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
