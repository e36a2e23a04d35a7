"""A worker's line to the server of its replica group: what the Manager asks and is told.

`protocol` has the theory. A step that nobody disturbs costs one look at memory (`needs_quorum`);
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
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft.lines import Lines, to_line
from hpc_elastic.ft.protocol import (
    NO_QUORUM,
    Ask,
    Broken,
    Bye,
    Confirm,
    Farewell,
    Hello,
    Message,
    Placement,
    Placements,
    Propose,
    SaveFirst,
    Verdict,
    Vote,
    Waiting,
    Welcome,
    Withdraw,
)
from hpc_elastic.ft.steps import Steps

_PROPOSAL_S = 30.0
"""The keeper takes back what is not confirmed within 5 s, and the next one settles what a dead one
has left; who waits for longer asks."""
_LAST_WORD_S = 5.0
"""After a vote in vain: how long the server has to say no."""
_READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class GroupServerGoneError(HpcElasticError, ConnectionError):
    """The server of this replica group can not be reached, or has ended: start the worker again."""


class Link:
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
        self._steps = Steps(alone=group_world_size == 1)
        self._changed = threading.Condition(threading.Lock())
        self._sending = threading.Lock()
        self._number = 0
        self._asking = False
        self._answer: Placement | Farewell | SaveFirst | None = None
        self._waiting = ""
        self._verdict: Verdict | None = None
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

    def ask(self, ask: Ask, timeout_s: float) -> Placement | Farewell | SaveFirst:
        """Ask for a place in the next quorum, and wait for it.

        Returns:
            The place; or `Farewell`, where the group has left as it was announced; or `SaveFirst`,
            where it is to save before.

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
        self._send(Withdraw())
        raise TimeoutError(f"no quorum within {timeout_s:g} s: {self._waiting}")

    def vote(self, yes: bool, timeout_s: float) -> bool:
        """Tell whether this worker could commit its step; return whether all of the group could.

        Raises:
            GroupServerGoneError: nobody is there to count.
        """
        with self._changed:
            quorum_id, call = self._steps.quorum_id, self._steps.call
        self._send(Vote(quorum_id, call, yes))
        verdict = self._wait_for_verdict(quorum_id, call, timeout_s)
        if verdict is None and self._gone is None:  # one no decides, unless all have just said yes
            self._send(Vote(quorum_id, call, yes=False))
            verdict = self._wait_for_verdict(quorum_id, call, _LAST_WORD_S)
        if verdict is None:
            raise self._gone_error(self._gone or "it does not answer")
        return verdict.commit

    def _wait_for_verdict(self, quorum_id: int, call: int, timeout_s: float) -> Verdict | None:
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
                self._send(Broken(quorum_id, why))

    def close(self) -> None:
        """Say that this worker is done, and leave. May be repeated."""
        with self._changed:
            if self._gone is None:
                self._gone = "the link was closed"
            self._changed.notify_all()
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(to_line(Bye()))
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

    def _take(self, message: Message) -> tuple[Message | None, Broken | None]:
        """Return what to answer, and a quorum that has just been found broken."""
        match message:
            case Placements():
                return self._placed(message), None
            case Farewell():
                self._steps.enter(NO_QUORUM)
                self._answered(message)
            case SaveFirst():
                self._steps.save_first()
                self._answered(message)
            case Waiting():
                self._waiting = message.text
            case Broken():
                return None, message if self._steps.told_broken(message) else None
            case Propose():
                return self._steps.proposed(message, time.monotonic()), None
            case Confirm():
                self._steps.confirm(message)
            case Verdict():
                self._verdict = message
                self._steps.counted(message)
            case _:
                raise ValueError(f"not for a worker: {message}")
        return None, None

    def _placed(self, placements: Placements) -> Broken | None:
        (placement,) = placements.ranks
        if self._asking and placements.number == self._number:
            self._steps.enter(placement.quorum_id)
            self._answered(placement)
            return None
        # it crossed our withdrawal, and others count on us
        return Broken(placement.quorum_id, "a worker had given up waiting for it")

    def _answered(self, answer: Placement | Farewell | SaveFirst) -> None:
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


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child (a data loader): the connection is the parent's."""
    for link in list(_links):
        link._socket.close()


os.register_at_fork(after_in_child=_leave_to_parent)
