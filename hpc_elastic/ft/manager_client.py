"""A worker's connection to the manager server of its replica group.

`messages` has the theory. An undisturbed step only reads memory (`ManagerClient.start_step`). A
thread of this module reads everything that the server sends, and answers it. So the worker's own
threads may be anywhere, in a collective or in C++, when the quorum is aborted.

    client = ManagerClient(path, group_rank, group_world_size, on_abort=abort, timeout_s=60)
    if client.start_step(last_failed=last_failed):
        result = client.request_quorum(QuorumRequest(client.steps.quorum_step, ...), timeout_s=60)

In a group of several workers all must reach the same conclusion, or one would wait in a collective
of the group for another that waits for the quorum. So after an abort they request a new quorum only
in the step after the first `vote` before which all of them knew of it: the server sends every
worker the same messages in the same order.
"""

# ruff: noqa: D102  (some names say it all)

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from hpc_elastic.errors import ConfigError, HpcElasticError
from hpc_elastic.ft import messages
from hpc_elastic.ft.manager_server import (
    ManagerServerProcess,
    start_relay_process,
    start_server_process,
)
from hpc_elastic.transport.interface import own_address

_SWITCH_S = 30.0
"""Longest wait for a switch decision. The lighthouse withdraws a proposal that is not confirmed
within 5 s, and its successor settles what a dead one has left; after that the worker requests."""
_FINAL_VOTE_S = 5.0
"""After a vote without a decision: how long the server has to answer a no."""
_SMOOTHING = 0.2

_log = logging.getLogger(__name__)

QuorumAnswer = messages.QuorumResult | messages.LeaveGranted | messages.CheckpointBeforeLeave


class ManagerServerLostError(HpcElasticError, ConnectionError, RuntimeError):
    """The server of this replica group cannot be reached, or has ended: start the worker again."""


class ManagerClient:
    """One worker's connection; every method may be called from any thread.

    A method that waits raises ManagerServerLostError if the server has ended. Only this class
    changes ``steps``, the worker's steps in its present quorum; ``replica_id`` is the group's name
    among its peers.
    """

    def __init__(
        self,
        path: Path,
        group_rank: int,
        group_world_size: int,
        *,
        on_abort: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        """Connect to the server's Unix socket, and return once the server has answered.

        ``on_abort`` is called with the present quorum's id and the reason when it is aborted, once,
        on the reading thread: it has to abort the collectives that wait. Raises
        ManagerServerLostError if the server does not answer within ``timeout_s``.
        """
        self.replica_id = ""
        self._path = path
        self._on_abort = on_abort
        self.steps = QuorumSteps(is_single=group_world_size == 1)
        self._changed = threading.Condition(threading.Lock())
        self._sending = threading.Lock()
        self._number = 0
        self._is_requesting = False
        self._answer: QuorumAnswer | None = None
        self._waits_for = ""
        self._decision: messages.CommitDecision | None = None
        self._closed_reason: str | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as e:
            self._socket.close()
            text = f"the server of this replica group cannot be reached at {path}: {e}"
            raise ManagerServerLostError(f"{text}. Is its process alive, and on this node?") from e
        self._socket.settimeout(None)
        _clients.add(self)
        self._reader = threading.Thread(target=self._read, name="ft-client", daemon=True)
        self._reader.start()
        try:
            self._send(messages.Hello(group_rank, group_world_size, os.getpid()))
            with self._changed:
                self._changed.wait_for(lambda: self.replica_id or self._closed_reason, timeout_s)
            if not self.replica_id:
                raise self._lost_error(self._closed_reason or "it does not answer")
        except BaseException:
            self.close()
            raise

    # ---- steps --------------------------------------------------------------------------

    def start_step(self, *, last_failed: bool) -> bool:
        """Start a step; return whether it needs a new quorum. Without one, this is all it costs.

        At a quorum step that is proposed for a switch, this waits until the proposal is confirmed
        or withdrawn. ``last_failed``: the last step was not committed; in a group of several
        workers, by the common decision.
        """
        steps = self.steps
        with self._changed:
            steps.start_step(time.monotonic())
            if not last_failed:
                self._changed.wait_for(
                    lambda: not steps.is_undecided or self._closed_reason, _SWITCH_S
                )
            steps.settle_step(steps.quorum_step)
            return last_failed or steps.must_request or steps.is_undecided

    def settle_next_step(self) -> bool:
        """At the end of a step, decide about the next one; wait as `start_step` would.

        Returns whether the script has to save now: this group leaves in the next step, and no other
        group has its state.
        """
        steps = self.steps
        with self._changed:
            self._changed.wait_for(
                lambda: not steps.is_next_undecided or self._closed_reason, _SWITCH_S
            )
            steps.settle_step(steps.quorum_step + 1)
            return steps.must_save

    # ---- requests -----------------------------------------------------------------------

    def request_quorum(
        self, request: messages.QuorumRequest, timeout_s: float | None
    ) -> QuorumAnswer:
        """Request a place in the next quorum, and wait for the answer; None: without a limit.

        The answer is `LeaveGranted` if the group has left as announced, and `CheckpointBeforeLeave`
        if it has to save before it leaves. Raises TimeoutError, whose message names what is waited
        for, if there was no quorum in time: try again, or give up.
        """
        with self._changed:
            self._answer = None
            self._is_requesting = True
            self._waits_for = "the server has not answered"
            self._number += 1
            numbered = replace(request, number=self._number, timeout_s=timeout_s or 0.0)
        self._send(numbered)
        with self._changed:
            self._changed.wait_for(lambda: self._answer or self._closed_reason, timeout_s)
            self._is_requesting = False
            if self._answer is not None:
                return self._answer
        if self._closed_reason is not None:
            raise self._lost_error(self._closed_reason)
        self._send(messages.CancelRequest())
        raise TimeoutError(f"no quorum within {timeout_s:g} s: {self._waits_for}")

    def vote(self, commit: bool, timeout_s: float) -> bool:
        """Vote whether this worker can commit its step; return whether the whole group does."""
        with self._changed:
            quorum_id, quorum_step = self.steps.quorum_id, self.steps.quorum_step

        def decided() -> bool:
            d = self._decision
            return d is not None and (d.quorum_id, d.quorum_step) == (quorum_id, quorum_step)

        # without a decision, a no: it decides, unless all others have voted yes just now
        for vote, wait_s in ((commit, timeout_s), (False, _FINAL_VOTE_S)):
            self._send(messages.CommitVote(quorum_id, quorum_step, vote))
            with self._changed:
                self._changed.wait_for(lambda: decided() or self._closed_reason, wait_s)
                if decided() and self._decision is not None:
                    return self._decision.commit
            if self._closed_reason is not None:
                break
        raise self._lost_error(self._closed_reason or "it does not answer")

    def report_abort(self, quorum_id: int, reason: str, *, is_lasting: bool = False) -> None:
        """Report that this quorum cannot go on; may be repeated, and costs one message.

        An error that another attempt does not cure (``is_lasting``) is in
        `QuorumSteps.lasting_errors` of all ranks of the group before they enter another quorum.
        """
        with self._changed:
            is_news = self.steps.mark_aborted(quorum_id, reason)
            if is_lasting:
                self.steps.lasting_errors[quorum_id] = reason
        if is_news:
            self.report_event(messages.QuorumAborted(quorum_id, reason, is_lasting=is_lasting))

    def request_switch(self) -> None:
        """Request another quorum, at a step at which none has to fail; to be repeated each step."""
        self.report_event(messages.SwitchRequest(self.steps.quorum_id))

    def report_event(self, event: messages.Message) -> None:
        """Report what needs no answer; that the server has ended, the next request raises."""
        with contextlib.suppress(ManagerServerLostError):
            self._send(event)

    def close(self, *, is_step_over: bool = True) -> None:
        """Report that this worker is done, and disconnect. May be repeated.

        ``is_step_over``: its part in the step that it has started last is complete.
        """
        with self._changed:
            last_step = max(-1, self.steps.quorum_step - (not is_step_over))
            done = messages.Shutdown(self.steps.quorum_id, last_step)
            if self._closed_reason is None:
                self._closed_reason = "the connection was closed"
            self._changed.notify_all()
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(messages.to_line(done))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()

    def _send(self, message: messages.Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(messages.to_line(message))
        except OSError as e:
            raise self._lost_error(self._closed_reason or str(e)) from e

    def _lost_error(self, reason: str) -> ManagerServerLostError:
        return ManagerServerLostError(
            f"the server of this replica group ({self._path}) is gone: {reason}. Start the worker "
            "again"
        )

    # ---- the reading thread -------------------------------------------------------------

    def _read(self) -> None:
        lines = messages.LineReader()
        try:
            while data := self._socket.recv(messages.READ_BYTES):
                for message in lines.feed(data):
                    self._on_message(message)
            reason = "it closed the connection"
            if self._waits_for:
                reason += f" ({self._waits_for})"
        except (OSError, ValueError) as e:
            reason = str(e)
        with self._changed:
            quorum_id = self.steps.quorum_id
            # without the votes of the others no step can be committed, and no abort arrives
            aborts = self._closed_reason is None and not self.steps.is_single
            aborts = aborts and self.steps.mark_aborted(quorum_id, reason)
            self._closed_reason = self._closed_reason or reason
            self._changed.notify_all()
        if aborts:
            self._call_on_abort(quorum_id, f"the server of this replica group is gone: {reason}")

    def _on_message(self, message: messages.Message) -> None:
        reply: messages.Message | None = None
        aborted = None
        with self._changed:
            match message:
                case messages.Welcome():
                    self.replica_id = message.replica_id
                case messages.QuorumResults():
                    (result,) = message.ranks
                    if self._is_requesting and message.number == self._number:
                        self.steps.enter_quorum(result.quorum_id)
                        self._set_answer(result)
                    else:
                        # it crossed the cancellation, and the other members rely on this one
                        reason = "a worker had given up waiting for it"
                        reply = messages.QuorumAborted(result.quorum_id, reason)
                case messages.LeaveGranted():
                    self.steps.enter_quorum(messages.NO_QUORUM)
                    self._set_answer(message)
                case messages.CheckpointBeforeLeave():
                    self.steps.require_save()
                    self._set_answer(message)
                case messages.QuorumWaiting():
                    self._waits_for = message.text
                case messages.QuorumAborted():
                    aborted = message if self.steps.on_abort(message) else None
                case messages.ProposeSwitch():
                    reply = self.steps.on_proposal(message, time.monotonic())
                case messages.ConfirmSwitch():
                    self.steps.on_confirmation(message)
                case messages.CommitDecision():
                    self._decision = message
                    self.steps.on_commit_decision(message)
                case _:
                    raise ValueError(f"not for a worker: {message}")
            self._changed.notify_all()
        if reply is not None:
            self._send(reply)
        if aborted is not None:
            self._call_on_abort(aborted.quorum_id, aborted.reason)

    def _call_on_abort(self, quorum_id: int, reason: str) -> None:
        try:
            self._on_abort(quorum_id, reason)
        except Exception:
            _log.exception("quorum %d was aborted, and its handler failed", quorum_id)

    def _set_answer(self, answer: QuorumAnswer) -> None:
        self._answer = answer
        self._is_requesting = False
        self._waits_for = ""


_clients: weakref.WeakSet[ManagerClient] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked child (a data loader): the connection belongs to the parent."""
    for client in list(_clients):
        client._socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class QuorumSteps:
    """One worker's steps in its present quorum (pure); `messages` has the rules.

    A worker waits at the step of a proposed switch until it is confirmed or withdrawn; meanwhile it
    accepts other proposals for the same step. One that is alone in its group (``is_single``) may
    request as soon as the quorum is aborted; else all do after the same decision.

    Attributes:
        quorum_step: Number of the last step started, from 0: the one that requested the quorum.
        lasting_errors: Errors that another attempt does not cure, of any rank of the group, by the
            quorum that could not be entered; the worker clears it when it has entered one.
        must_request: A step that starts now needs a new quorum.
        is_saved: `must_save` was set when the last step started.
    """

    def __init__(self, *, is_single: bool) -> None:
        self.is_single = is_single
        self._interval_s: float | None = None
        self._started_at: float | None = None
        self.lasting_errors: dict[int, str] = {}
        self.enter_quorum(messages.NO_QUORUM)
        self.quorum_step = -1

    def enter_quorum(self, quorum_id: int) -> None:
        self.quorum_id = quorum_id
        self.quorum_step = 0
        self.abort_reason: str | None = None
        self._all_know_abort = False
        """The server has notified all workers of the group that the quorum is aborted."""
        self._decided = -1
        """The last step that the group has decided on, as all its workers know."""
        self.must_request = quorum_id == messages.NO_QUORUM
        self.proposal: messages.ProposeSwitch | None = None
        self.confirmation: messages.ConfirmSwitch | None = None
        self._settled = 0
        """The step up to which no proposal may be accepted any more."""
        self._must_save = False
        self.is_saved = False

    def start_step(self, now: float) -> None:
        self.is_saved = self.must_save
        self.quorum_step += 1
        if self._started_at is not None:
            took_s = now - self._started_at
            before_s = took_s if self._interval_s is None else self._interval_s
            self._interval_s = before_s + (took_s - before_s) * _SMOOTHING
        self._started_at = now
        self._request_at_switch()
        if not self.is_undecided:
            self.settle_step(self.quorum_step)

    @property
    def is_undecided(self) -> bool:
        """Whether the step started may be the one of a switch."""
        return self._is_undecided_at(self.quorum_step)

    @property
    def is_next_undecided(self) -> bool:
        """Whether the step after it may be."""
        return self._is_undecided_at(self.quorum_step + 1)

    @property
    def must_save(self) -> bool:
        """Whether the group leaves after the step started, and no other group has its state."""
        switch, confirmation = self.proposal, self.confirmation
        if switch is None or confirmation is None or self.abort_reason is not None:
            return self._must_save
        is_last = self.quorum_step + 1 == switch.quorum_step and confirmation.last
        return self._must_save or (is_last and confirmation.leaves)

    def require_save(self) -> None:
        """Record that there is no quorum for the step started: its end is for saving."""
        self._must_save = self.must_request = True

    def settle_step(self, quorum_step: int) -> None:
        """Accept no more proposals for the steps up to this one."""
        self._settled = max(self._settled, quorum_step)

    def _is_undecided_at(self, quorum_step: int) -> bool:
        if self.proposal is None or self.confirmation is not None or self.must_request:
            return False
        return quorum_step >= self.proposal.quorum_step

    def steps_per_s(self, now: float) -> float:
        """Return the steps per second lately; 0 before the second step."""
        if self._interval_s is None or self._started_at is None:
            return 0.0
        return 1.0 / max(self._interval_s, now - self._started_at, 1e-6)

    def on_proposal(
        self, proposal: messages.ProposeSwitch, now: float
    ) -> messages.SwitchVote | None:
        """Accept a proposal if its step has not started; return the answer, or None.

        The confirmed step is accepted also after its start: all ranks of the group request in it.
        """
        known, step, confirmed_step = self.proposal, proposal.quorum_step, 0
        if proposal.quorum_id != self.quorum_id:
            return None
        if known is not None and self.confirmation is not None:
            confirmed_step = known.quorum_step
        if proposal.number == 0:
            self.proposal = known if confirmed_step else None
            return None
        if confirmed_step and step not in (0, confirmed_step):
            return None  # of another lighthouse, which does not know yet what is confirmed
        ok = self._settled < step or 0 < step == confirmed_step
        if step > 0:
            self.proposal = proposal if ok else None
        confirmed_step = 0 if step else confirmed_step
        at, rate = (self.quorum_id, proposal.number), self.steps_per_s(now)
        return messages.SwitchVote(*at, ok, self._settled, rate, confirmed_step)

    def on_confirmation(self, confirmation: messages.ConfirmSwitch) -> None:
        """Request a new quorum in the proposed step."""
        number = None if self.proposal is None else self.proposal.number
        if (confirmation.quorum_id, confirmation.number) == (self.quorum_id, number):
            self.confirmation = confirmation
            self._request_at_switch()

    def _request_at_switch(self) -> None:
        if self.confirmation is not None and self.proposal is not None:
            self.must_request |= self.quorum_step >= self.proposal.quorum_step

    def on_abort(self, aborted: messages.QuorumAborted) -> bool:
        """Record the lighthouse's abort; return whether to abort what is under way.

        Not if it is no news or of another quorum, or this step may still be completed.
        """
        if aborted.quorum_id != self.quorum_id:
            return False
        if aborted.is_lasting:
            self.lasting_errors[aborted.quorum_id] = aborted.reason
        if self.confirmation is None:  # no decision about a switch comes any more
            self.proposal = None
        self._all_know_abort = True
        self.must_request |= self.is_single
        # all ranks of a group get this in the same place among the group's decisions
        known = self.quorum_step - 1 if self.is_single else self._decided
        if known < aborted.after_step:
            return False
        is_news = self.abort_reason is None
        self.abort_reason = self.abort_reason or aborted.reason
        return is_news

    def mark_aborted(self, quorum_id: int, reason: str) -> bool:
        """Record an abort by this worker; return whether it is news, and of this quorum."""
        if quorum_id != self.quorum_id or self.abort_reason is not None:
            return False
        self.abort_reason = reason
        self.must_request |= self.is_single
        return True

    def on_commit_decision(self, decision: messages.CommitDecision) -> None:
        """Record the group's decision on a step: all its workers know the same now."""
        if decision.quorum_id == self.quorum_id:
            self._decided = decision.quorum_step
            self.must_request |= self._all_know_abort


# ---- the worker's place in its group, and the group's server
# In a run the agent has started the server, and names its socket in the environment. Elsewhere the
# group's first rank starts one (`manager_server`), and publishes it in the group's store. On each
# other host of the group, the rank that comes first starts a relay, and publishes it likewise.


@dataclass(frozen=True)
class GroupPlace:
    """A worker's place in its replica group, and the address of the group's TCPStore."""

    rank: int
    world_size: int
    store_addr: str
    store_port: int

    @property
    def store(self) -> str:
        """The store as ``host:port``, an IPv6 address in brackets."""
        host = f"[{self.store_addr}]" if ":" in self.store_addr else self.store_addr
        return f"{host}:{self.store_port}"

    def connect_store(self, timeout_s: float) -> TCPStore:
        return TCPStore(
            self.store_addr, self.store_port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip


def resolve_place(
    rank: int | None, world_size: int | None, store_addr: str | None, store_port: int | None
) -> GroupPlace:
    """Return the worker's place, by arguments or else the environment; ConfigError if unset."""

    def require(name: str, argument: str) -> str:
        if not os.environ.get(name):
            remedy = f"give it to the Manager, or set {name}, as torchrun and a run do"
            raise ConfigError(argument, None, remedy)
        return os.environ[name]

    return GroupPlace(
        rank=rank if rank is not None else int(require("RANK", "rank")),
        world_size=world_size or int(require("WORLD_SIZE", "world_size")),
        store_addr=store_addr or require("MASTER_ADDR", "store_addr"),
        store_port=store_port or int(require("MASTER_PORT", "store_port")),
    )


def find_server(
    place: GroupPlace,
    *,
    lighthouse_addr: str | None,
    replica_id: str | None,
    connect_timeout_s: float,
) -> ManagerServerProcess:
    """Return the group's server; start one if this is rank 0 and there is no agent.

    None for the lighthouse or the group's name is the environment's. Raises ConfigError if there is
    neither an agent nor a lighthouse, and TimeoutError if the rank that starts the server, or the
    relay of this host, has not done so.
    """
    if path := os.environ.get(messages.SOCKET_ENV):
        return ManagerServerProcess(Path(path))
    # a restarted group must not read what the one before has written
    key = f"hpc_elastic/ft/server/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    host = socket.gethostname()
    if place.rank > 0:
        store = place.connect_store(connect_timeout_s)
        server = json.loads(_read(store, key, place, "rank 0"))
        if server["host"] == host:
            return ManagerServerProcess(Path(server["path"]))
        return _find_relay(place, store, f"{key}/{host}", server)
    lighthouse = lighthouse_addr or os.environ.get(messages.LIGHTHOUSE_ENV)
    if not lighthouse:
        remedy = (
            "there is no lighthouse: submit the script with launcher=slurm (or launcher=local) "
            "ft=true; or start `hpc-elastic lighthouse` and give its address here or in "
            f"{messages.LIGHTHOUSE_ENV}"
        )
        raise ConfigError("lighthouse_addr", lighthouse, remedy)
    name = f"{replica_id}:{uuid.uuid4()}" if replica_id else str(uuid.uuid4())
    is_on_one_host = os.environ.get("LOCAL_WORLD_SIZE", "1") == str(place.world_size)
    address = None if is_on_one_host else own_address(place.store_addr)
    started = start_server_process(lighthouse, name, place.world_size, relay_address=address)
    if place.world_size > 1:
        published = {"path": str(started.path), "host": host, "relay": [address, started.port]}
        place.connect_store(connect_timeout_s).set(key, json.dumps(published))
    return started


def _find_relay(
    place: GroupPlace, store: TCPStore, key: str, server: dict[str, Any]
) -> ManagerServerProcess:
    """Return the relay of this host to the group's server on another; start it if there is none."""
    if store.add(f"{key}/ranks", 1) > 1:
        path = _read(store, key, place, f"the first rank on {socket.gethostname()}")
        return ManagerServerProcess(Path(path))
    address, port = server["relay"]
    if address is None:
        remedy = (
            f"rank 0 on {server['host']} has LOCAL_WORLD_SIZE={place.world_size}, and rank "
            f"{place.rank} is on {socket.gethostname()}: set it to the number of ranks of a host"
        )
        raise ConfigError("world_size", place.world_size, remedy)
    started = start_relay_process(address, port, place.world_size)
    store.set(key, str(started.path))
    return started


def _read(store: TCPStore, key: str, place: GroupPlace, writer: str) -> str:
    """Return what another rank publishes in the group's store."""
    try:
        return bytes(store.get(key)).decode()
    except DistError as e:
        raise TimeoutError(
            f"rank {place.rank} waits for {writer} of its replica group, which has started no "
            f"manager server for it in time (in the store at {place.store}): {e}"
        ) from e
