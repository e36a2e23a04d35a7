"""Entering a quorum: request a place, form the process group, send or fetch the state.

`Manager` calls `QuorumClient.enter_quorum` on a thread beside the training, if a step needs a new
quorum. `on_abort` is called on the client's reading thread. One lock stands between the two, so a
quorum that is aborted aborts what is under way in it, and never what a later one has started.

A quorum that is aborted before its first collective costs no step: `enter_quorum` requests another.
Not so in a group of several ranks: they have to stay in step with each other, and one may be ahead.
"""

# ruff: noqa: D103  (some names say it all)

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft import messages
from hpc_elastic.ft.checkpointing.transport import (
    CheckpointTransport,
    HealError,
    UnusableStateError,
)
from hpc_elastic.ft.manager_client import GroupPlace, ManagerClient, QuorumAnswer
from hpc_elastic.ft.messages import NO_QUORUM, SOCKET_ENV, QuorumRequest, QuorumResult
from hpc_elastic.ft.process_group import MemberPlace, ProcessGroup
from hpc_elastic.ft.quorum import MAX_HEAL_FAILURES, CommittedProgress, random_version
from hpc_elastic.ft.reconfigurable import AbortableStore, CheckedWait, connect_store_ahead

_MAX_OWN_FAILURES = 3
"""Attempts to enter a quorum that fail for a reason of this member's own."""
_LASTING_ERRORS = UnusableStateError, TypeError, ValueError, LookupError, AttributeError
"""Errors of a state, such as a wrong type or a missing key, that another attempt does not cure."""
_RETRY_ABORT_S = 0.01
_log = logging.getLogger(__name__)

T = TypeVar("T")


class LeftQuorumError(HpcElasticError, RuntimeError):
    """This replica has left the quorum as announced: the script has to end.

    Raised only outside of a run; in a run, the worker waits until its agent stops it.
    """


class DamagedStateError(HpcElasticError, RuntimeError):
    """A state was received in place and only in part, or by some workers of this replica alone.

    No peer is left to heal from: start the script again from its last checkpoint.
    """


class QuorumAbortedError(HpcElasticError, RuntimeError):
    """The quorum cannot go on: a member was lost, or has reported an error."""


class CheckpointBeforeLeaveError(HpcElasticError):
    """There is no quorum for this step: the replica leaves once it has saved."""

    def __init__(self) -> None:
        super().__init__(
            "this replica leaves, and no replica that stays has its state: it can be saved at the "
            "end of this step, which is not committed"
        )


@dataclass(frozen=True)
class Limits:
    """Time-outs in seconds, attempts, and the fewest replicas of a step."""

    timeout_s: float
    quorum_timeout_s: float
    quorum_retries: int
    min_replicas: int


@dataclass(frozen=True)
class HealedState:
    """A state that a peer has sent, and that is not applied yet."""

    user: dict[str, Any]
    progress: CommittedProgress


@dataclass(frozen=True)
class Entered:
    """Result of entering a quorum: perhaps with a state, or with an error that fails the step."""

    result: QuorumResult
    healed: HealedState | None = None
    error: Exception | None = None


class QuorumClient:
    """Enters and aborts this worker's quorums.

    ``client`` has to call `on_abort`; ``get_state`` returns the state for peers, given the progress
    to send with it.

    Attributes:
        one_source: Heal from one peer, though the transport could use several; the same on all
            members.
        is_damaged: The parameters are of no step: a heal in place has failed, or the replica has
            not caught up yet.
    """

    def __init__(
        self,
        client: ManagerClient,
        pg: ProcessGroup,
        transport: CheckpointTransport[dict[str, Any]],
        get_state: Callable[[CommittedProgress], dict[str, Any]],
        limits: Limits,
        place: GroupPlace,
    ) -> None:
        self.one_source = False
        self._client = client
        self._pg = pg
        self._transport = transport
        self._get_state = get_state
        self._limits = limits
        self._place = place
        self._lock = threading.RLock()
        self._entering = NO_QUORUM
        self._configured = NO_QUORUM
        self._stream = torch.Stream() if torch.accelerator.is_available() else None
        self.is_damaged = False
        self._heal_failures = 0
        """Quorums in a row in which this replica could not heal."""

    # ---- abort ----------------------------------------------------------------------------

    def on_abort(self, quorum_id: int, reason: str) -> None:
        """Abort what is under way in a quorum that was aborted (the client's reading thread)."""
        _log.info("quorum %d is aborted: %s", quorum_id, reason)
        self._abort(quorum_id)

        def retry() -> None:
            while self._abort(quorum_id) and quorum_id == self._entering:
                time.sleep(_RETRY_ABORT_S)

        with self._lock:
            is_entering = quorum_id == self._entering
        if is_entering:  # what was about to start when it was aborted has started by now
            threading.Thread(target=retry, daemon=True).start()

    def report_abort(self, quorum_id: int, reason: str) -> None:
        """Abort the quorum for all members, and what is under way here."""
        if quorum_id != NO_QUORUM and self._client.steps.abort_reason is None:
            self._client.report_abort(quorum_id, reason)
            self._abort(quorum_id)

    def _abort(self, quorum_id: int) -> bool:
        with self._lock:
            if quorum_id not in (self._entering, self._configured) or quorum_id == NO_QUORUM:
                return False
            self._transport.abort()
            self._pg.abort()
            return True

    # ---- enter ----------------------------------------------------------------------------

    def enter_quorum(
        self,
        progress: CommittedProgress,
        timeout_s: float,
        *,
        commit_failures: int,
        allow_heal: bool,
        shrink_only: bool,
        catch_up: bool = False,
    ) -> Entered:
        """Request a quorum until one is entered, or the attempts are used up.

        ``progress`` is that of the worker's parameters as they are; ``timeout_s`` limits one
        request, and all attempts to enter.

        Raises:
            CheckpointBeforeLeaveError: There is none; the state has to be saved at the end of this
                step.
            TimeoutError: No quorum came; it names what is waited for.
            LeftQuorumError: This replica has left, as announced.
            ManagerServerLostError: The group's server has ended; start the worker again.
            UnusableStateError: The peers' state does not fit here, at the second attempt, be it for
                this rank or for another of the replica. Errors of Python's own for wrong types,
                values and keys are raised likewise. This replica has to end, so that the others go
                on without it.
        """
        client = self._client
        deadline = time.monotonic() + timeout_s
        own_failures = 0
        while True:
            requested_at = time.monotonic()
            request = QuorumRequest(
                quorum_step=client.steps.quorum_step,
                step=-1 if self.is_damaged else progress.step,
                state_version=random_version() if self.is_damaged else progress.state_version,
                quorum_id=client.steps.quorum_id,
                commit_failures=commit_failures,
                min_replicas=self._limits.min_replicas,
                shrink_only=shrink_only,
                store=self._place.store,
                metadata=(self._transport.metadata(),),
                is_saved=client.steps.is_saved,
                catch_up=catch_up,
                heal_failures=self._heal_failures,
            )
            result = self._request_result(request, progress, timeout_s)
            answered_at = time.monotonic()
            try:
                moves = allow_heal and not result.catch_up
                healed = self._join(result, progress if moves else None)
            except Exception as e:
                self.is_damaged |= result.heals and getattr(self._transport, "in_place", False)
                own_failures += client.steps.abort_reason is None
                self._count_heal_failure(result, e)
                if isinstance(e, QuorumAbortedError) or client.steps.abort_reason is not None:
                    _log.info("quorum %d was aborted while it was entered: %s", result.quorum_id, e)
                else:
                    _log.warning("quorum %d could not be entered", result.quorum_id, exc_info=e)
                reason = f"a member could not enter it: {e}"
                is_lasting = isinstance(e, _LASTING_ERRORS)
                client.report_abort(result.quorum_id, reason, is_lasting=is_lasting)
                lasting = [*client.steps.lasting_errors.values()]
                if len(lasting) > 1 and is_lasting:
                    raise
                if len(lasting) > 1:
                    text = f"another rank of this replica has failed: {lasting[-1]}"
                    raise UnusableStateError(text) from e
                is_late = time.monotonic() > deadline or own_failures >= _MAX_OWN_FAILURES
                if is_late or self._place.world_size > 1:
                    return Entered(result, error=e)
            else:
                _log.info(
                    "quorum %d: member %d of %d, step %d; requested %.3f s, entered in %.3f s",
                    result.quorum_id, result.replica_rank, result.replica_world_size,
                    result.max_step, answered_at - requested_at, time.monotonic() - answered_at,
                )  # fmt: skip
                self.is_damaged |= result.heals and result.catch_up
                client.steps.lasting_errors.clear()
                self._heal_failures = 0
                return Entered(result, healed)

    def _count_heal_failure(self, result: QuorumResult, error: Exception) -> None:
        self._heal_failures += result.heals
        if result.heals and self._heal_failures == MAX_HEAL_FAILURES:
            text = "this replica could not heal %d times in a row: the others go on without it: %s"
            _log.error(text, self._heal_failures, error)
            own = self._client.replica_id
            worker = f"{own} (host {socket.gethostname()}, rank {self._place.rank})"
            reason = f"{type(error).__name__}: {error}"
            self._client.report_event(messages.HealFailed(worker, reason))

    def _request_result(
        self, request: QuorumRequest, progress: CommittedProgress, timeout_s: float
    ) -> QuorumResult:
        if os.environ.get(SOCKET_ENV):  # in a run the wait is the leader's to end
            answer = self._client.request_quorum(request, None)
        else:
            answer = self._request_in_time(request, timeout_s)
        if isinstance(answer, messages.LeaveGranted):
            text = "this replica has left the quorum, as it was announced"
            if not os.environ.get(SOCKET_ENV):
                raise LeftQuorumError(f"{text}: end the script, or start it again to join again")
            _log.info("%s; waiting to be stopped", text)
            while True:
                threading.Event().wait()
        if isinstance(answer, messages.CheckpointBeforeLeave):
            raise CheckpointBeforeLeaveError
        if self.is_damaged and not answer.heals:
            self._client.report_abort(answer.quorum_id, "a member's state is damaged")
            raise DamagedStateError(
                "a peer was lost while this replica received its state in place, and no other has "
                "it: start again from a checkpoint (a heal cannot do this without in_place, and "
                "with catch_up_bytes=None)"
            )
        if self._place.world_size > 1 and not progress.is_part_of(answer):
            self._client.report_abort(answer.quorum_id, "a member's ranks have different states")
            raise DamagedStateError(
                f"a peer was lost when some ranks of this replica had received its state, and no "
                f"other has it: this rank is at step {progress.step}, another at step "
                f"{answer.max_step}: start again from a checkpoint"
            )
        return answer

    def _request_in_time(self, request: QuorumRequest, timeout_s: float) -> QuorumAnswer:
        retries = self._limits.quorum_retries
        if self._place.world_size > 1:
            # a request that is withdrawn may cross its answer, which the other ranks rely on
            timeout_s, retries = timeout_s * (1 + retries), 0
        for _ in range(retries):
            with suppress(TimeoutError):
                return self._client.request_quorum(request, timeout_s)
        return self._client.request_quorum(request, timeout_s)

    def _join(self, result: QuorumResult, moved: CommittedProgress | None) -> HealedState | None:
        """Form the group; send or fetch the state of this progress, if any."""
        quorum_id = result.quorum_id
        self._transport.resume()
        with self._lock:
            is_new = quorum_id != self._configured
            self._entering, self._configured = quorum_id, NO_QUORUM
        try:
            self._raise_if_aborted(quorum_id)
            if moved is None or self._transport.needs_group:
                self._configure(result, is_new=is_new)
                healed = None if moved is None else self._move_state(result, moved)
            else:
                # both at once, since the other members wait in `configure` for the healing ones
                moving = run_in_background(lambda: self._move_state(result, moved))
                try:
                    self._configure(result, is_new=is_new)
                except BaseException:
                    self._transport.abort()
                    with suppress(Exception):
                        moving.result()
                    raise
                healed = moving.result()
                self._await_healing(result)
            with self._lock:
                self._raise_if_aborted(quorum_id)
                self._configured = quorum_id
            return healed
        finally:
            with self._lock:
                self._entering = NO_QUORUM

    def _raise_if_aborted(self, quorum_id: int) -> None:
        reason = self._client.steps.abort_reason
        if reason is not None:
            raise QuorumAbortedError(f"quorum {quorum_id} was aborted: {reason}")

    def _configure(self, result: QuorumResult, *, is_new: bool) -> None:
        if not is_new:
            return
        rank, size = self._place.rank, self._place.world_size
        synchronize_device()
        self._pg.configure(
            f"{result.store}/hpc_elastic/{result.quorum_id}/{rank}", self._client.replica_id,
            result.replica_rank, result.replica_world_size, result.quorum_id, rank, size,
            [r * size + rank for r in range(result.replica_world_size)],
        )  # fmt: skip
        if result.next_store:
            connect_store_ahead(result.next_store)

    def _await_healing(self, result: QuorumResult) -> None:
        """Return once all members have the state, or one that cannot heal aborts."""
        num_healing = result.replica_world_size - result.cohort_size
        if not num_healing:
            return
        prefix = f"{result.store}/hpc_elastic/{result.quorum_id}/{self._place.rank}/healed"
        place = MemberPlace(
            prefix, self._client.replica_id, result.replica_rank, result.replica_world_size
        )
        wait = CheckedWait(lambda: self._raise_if_aborted(result.quorum_id))
        store = AbortableStore(place, wait)
        if result.heals and store.add("num", 1) == num_healing:
            store.set("all", b"1")
        store.wait(["all"])

    # ---- states ---------------------------------------------------------------------------

    def _move_state(self, result: QuorumResult, progress: CommittedProgress) -> HealedState | None:
        """Send this replica's state, or fetch a peer's, on a stream beside the training's."""
        use_all = self._transport.multi_source and not self.one_source
        timeout = timedelta(seconds=self._limits.timeout_s)
        healed = None
        synchronize_device()  # the last optimizer step may be under way on another stream
        with self._stream or nullcontext():
            destinations = result.source_of if use_all else result.first_source_of
            if destinations:
                sent = replace(progress, state_version=result.state_version)
                self._send_state(list(destinations), sent, timeout)
            if result.heals:
                best, step = result.sources[0], result.max_step
                all_metadata = json.dumps([source.metadata for source in result.sources])
                metadata = all_metadata if use_all else best.metadata
                state = self._transport.recv_checkpoint(best.replica_rank, metadata, step, timeout)
                fetched = CommittedProgress(**state["torchft"])
                if (fetched.step, fetched.state_version) != (step, result.state_version):
                    raise HealError(
                        f"a peer sent the state of step {fetched.step}, with another history than "
                        f"that of the quorum (step {step})"
                    )
                self.is_damaged = False
                healed = HealedState(state["user"], fetched)
        if self._stream is not None:
            self._stream.synchronize()
        return healed

    def _send_state(
        self, destinations: list[int], progress: CommittedProgress, timeout: timedelta
    ) -> None:
        """Send this replica's state; if it cannot be sent, abort the quorum for the others."""
        try:
            state = self._get_state(progress)
            self._transport.send_checkpoint(destinations, progress.step, state, timeout)
        except Exception as e:
            if self._transport.needs_group and not isinstance(e, _LASTING_ERRORS):
                raise  # it may be the group's
            _log.error("replicas %s cannot heal from this one: %s", destinations, e)
            if hasattr(self._transport, "refuse_checkpoint"):  # a user's may lack it
                reason = f"{type(e).__name__}: {e}"
                self._transport.refuse_checkpoint(destinations, progress.step, reason, timeout)


def run_at_once(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as e:
        future.set_exception(e)
    return future


def run_in_background(call: Callable[[], T]) -> Future[T]:
    """Call a function on a daemon thread, with this thread's device; return its outcome."""
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    future: Future[T] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="ft_quorum", daemon=True).start()
    return future


def synchronize_device() -> None:
    """Wait until the accelerator, if there is one, has finished its queue."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
