"""Enters quorums: asks for a place, forms the process group, sends or fetches the state.

Who is here: `Manager` calls `QuorumClient.enter` on a thread beside the training, where a new
quorum is needed, and `process_group` is called on the link's reading thread. Between the two stands
one
lock: a quorum that breaks aborts what is under way in it, and never what a later one has begun.

A quorum that breaks before its first collective costs no step: `enter` asks again. Not so in a
group of several ranks: they have to stay in step with each other, and one may have gone further.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft import quorum, reconfigurable
from hpc_elastic.ft.manager_client import GroupPlace
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    SOCKET_ENV,
    CheckpointBeforeLeave,
    LeaveGranted,
    QuorumRequest,
    QuorumResult,
)

if TYPE_CHECKING:
    from hpc_elastic.ft.checkpointing.transport import CheckpointTransport
    from hpc_elastic.ft.manager_client import ManagerClient
    from hpc_elastic.ft.process_group import ProcessGroup


_OWN_FAILURES = 3
"""So often a replica tries again where it could not enter for a reason of its own."""
_INSIST_S = 0.01
_log = logging.getLogger(__name__)


class LeftQuorumError(HpcElasticError):
    """This replica has left the quorum, as it was announced: the script is to end.

    Only where no agent stops the script: in a run, the worker waits to be stopped.
    """


class DamagedStateError(HpcElasticError):
    """A state that was received in place came in part only, and no peer is there to heal from.

    Start the script again from its last checkpoint.
    """


class QuorumBrokenError(HpcElasticError):
    """The quorum could not go on: a member was lost, or has reported an error."""


class SaveFirstError(HpcElasticError):
    """This replica is let go when it has saved: there is no quorum for the step."""

    def __init__(self) -> None:
        super().__init__(
            "this replica leaves, and nobody who stays has its state: it can be saved at the end "
            "of this step, which is not committed"
        )


@dataclass(frozen=True)
class Limits:
    """How long things may take, and how often they are tried, in seconds."""

    timeout_s: float
    quorum_timeout_s: float
    quorum_retries: int
    min_replicas: int


@dataclass(frozen=True)
class EnterRequest:
    """What a worker asks for a quorum with.

    Attributes:
        progress: Of the parameters as they are.
        commit_failures: Steps in a row that were not committed.
        allow_heal: Whether states are sent and fetched.
        timeout_s: For one question, and for all tries of entering together.
    """

    progress: CommittedProgress
    commit_failures: int
    allow_heal: bool
    shrink_only: bool
    timeout_s: float


@dataclass(frozen=True)
class Healed:
    """A state that came from a peer, and is not applied yet."""

    user: dict[str, Any]
    progress: CommittedProgress


@dataclass(frozen=True)
class Entered:
    """How it went: a place in a quorum, and perhaps a state; or the error that costs the step."""

    placement: QuorumResult
    healed: Healed | None = None
    error: Exception | None = None


class QuorumClient:
    """This worker's part in the quorum.

    Args:
        link: Makes the link, given what it calls when the quorum breaks.
        pg: The process group over all members.
        transport: Moves states.
        states: The user's.
    """

    def __init__(
        self,
        link: Callable[[Callable[[int, str], None]], ManagerClient],
        pg: ProcessGroup,
        transport: CheckpointTransport[dict[str, Any]],
        states: StateDictRegistry,
        limits: Limits,
        group: GroupPlace,
    ) -> None:  # fmt: skip
        self._pg = pg
        self._transport = transport
        self._states = states
        self._limits = limits
        self._group = group
        self._lock = threading.RLock()
        self._entering = NO_QUORUM
        self._configured = NO_QUORUM
        self._stream = own_stream()
        self.link = link(self.broken)
        self._is_damaged = False
        """A heal in place has failed: the parameters are of no step."""
        self.one_source = False
        """Heal from one peer, though the transport could take from several; the same on all."""

    @property
    def quorum_id(self) -> int:
        """The quorum whose process group stands; `NO_QUORUM`: none."""
        return self._configured

    # ---- breaking -------------------------------------------------------------------------

    def broken(self, quorum_id: int, why: str) -> None:
        """Abort what is under way in that quorum (the link's reading thread)."""
        _log.info("quorum %d is broken: %s", quorum_id, why)
        self._abort(quorum_id)
        with self._lock:
            is_entering = quorum_id == self._entering
        if is_entering:  # what was about to begin when it was aborted has begun now
            threading.Thread(target=self._insist, args=(quorum_id,), daemon=True).start()

    def report(self, quorum_id: int, why: str) -> None:
        """Break the quorum: tell all members, and abort what is under way here."""
        if quorum_id != NO_QUORUM and self.link.broken is None:
            self.link.report_broken(quorum_id, why)
            self._abort(quorum_id)

    def _insist(self, quorum_id: int) -> None:
        while self._abort(quorum_id) and quorum_id == self._entering:
            time.sleep(_INSIST_S)

    def _abort(self, quorum_id: int) -> bool:
        with self._lock:
            if quorum_id not in (self._entering, self._configured) or quorum_id == NO_QUORUM:
                return False
            self._transport.abort()
            self._pg.abort()
            return True

    # ---- entering -------------------------------------------------------------------------

    def enter(self, request: EnterRequest, *, may_retry: bool = True) -> Entered:
        """Ask until a quorum has been entered.

        Args:
            request: What to ask with.
            may_retry: Whether a quorum that breaks at once is followed by another question.

        Raises:
            SaveFirstError: there is none, and at the end of this step the state is to be saved.
            TimeoutError: no quorum came; names who is waited for.
            LeftQuorumError: it has left, as announced.
            GroupServerGoneError: the group's server is dead; start the worker anew.
        """
        deadline = time.monotonic() + request.timeout_s
        own_failures = 0
        while True:
            asked = time.monotonic()
            placement = self._place(request)
            answered = time.monotonic()
            try:
                entered = Entered(placement, self._settle(placement, request))
                _tell(placement, answered - asked, time.monotonic() - answered)
                return entered
            except Exception as e:
                error = e
            self._is_damaged |= placement.heals and getattr(self._transport, "in_place", False)
            own_failures += self.link.broken is None
            self._give_up(placement.quorum_id, error)
            is_late = time.monotonic() > deadline or own_failures >= _OWN_FAILURES
            if is_late or not may_retry or self._group.world_size > 1:
                return Entered(placement, error=error)

    def _give_up(self, quorum_id: int, error: Exception) -> None:
        if isinstance(error, QuorumBrokenError) or self.link.broken is not None:
            _log.info("quorum %d broke while it was entered: %s", quorum_id, error)
        else:
            _log.warning("quorum %d could not be entered", quorum_id, exc_info=error)
        self.link.report_broken(quorum_id, f"a member could not enter it: {error}")

    def _place(self, request: EnterRequest) -> QuorumResult:
        answer = self._ask(request)
        if isinstance(answer, LeaveGranted):
            stand_still("this replica has left the quorum, as it was announced")
        if isinstance(answer, CheckpointBeforeLeave):
            raise SaveFirstError
        if self._is_damaged and not answer.heals:
            self.link.report_broken(answer.quorum_id, "a member's state is damaged")
            raise DamagedStateError(
                "a peer was lost while this replica received its state in place, and nobody else "
                "has it: start again from a checkpoint (without in_place, a heal can not do this)"
            )
        return answer

    def _ask(self, request: EnterRequest) -> QuorumResult | LeaveGranted | CheckpointBeforeLeave:
        for _ in range(self._limits.quorum_retries):
            with suppress(TimeoutError):
                return self.link.ask(self._question(request), request.timeout_s)
        return self.link.ask(self._question(request), request.timeout_s)

    def _question(self, request: EnterRequest) -> QuorumRequest:
        progress = request.progress
        return QuorumRequest(
            call=self.link.call,
            step=-1 if self._is_damaged else progress.step,
            lineage=quorum.fresh() if self._is_damaged else progress.lineage,
            quorum_id=self.link.quorum_id,
            commit_failures=request.commit_failures,
            min_replicas=self._limits.min_replicas,
            shrink_only=request.shrink_only,
            store=self._group.store,
            metadata=(self._transport.metadata(),),
            is_saved=self.link.is_saved,
        )

    def _settle(self, placement: QuorumResult, request: EnterRequest) -> Healed | None:
        with self._entered(placement.quorum_id) as is_new:
            if not request.allow_heal:
                self._configure(placement, is_new=is_new)
                return None
            if self._transport.needs_group:
                self._configure(placement, is_new=is_new)
                return self._move_state(placement, request.progress)
            return self._configure_and_move_state(placement, request.progress, is_new=is_new)

    def _configure_and_move_state(
        self, placement: QuorumResult, progress: CommittedProgress, *, is_new: bool
    ) -> Healed | None:
        """Do both at once: the others stand until who heals has come."""
        device, moved = current_index(), list[Healed | None]()

        def move() -> None:
            use(device)
            moved.append(self._move_state(placement, progress))

        moving = BackgroundCall(move)
        try:
            self._configure(placement, is_new=is_new)
        except BaseException:
            self._transport.abort()
            with suppress(Exception):
                moving.wait()
            raise
        moving.wait()
        return moved[0]

    @contextmanager
    def _entered(self, quorum_id: int) -> Iterator[bool]:
        """Let the quorum's breaking abort the body; yield whether its group has to be formed."""
        self._transport.resume()
        with self._lock:
            is_new = quorum_id != self._configured
            self._entering, self._configured = quorum_id, NO_QUORUM
        try:
            self._refuse_broken(quorum_id)
            yield is_new
            with self._lock:
                self._refuse_broken(quorum_id)
                self._configured = quorum_id
        finally:
            with self._lock:
                self._entering = NO_QUORUM

    def _refuse_broken(self, quorum_id: int) -> None:
        why = self.link.broken
        if why is not None:
            raise QuorumBrokenError(f"quorum {quorum_id} broke: {why}")

    def _configure(self, placement: QuorumResult, *, is_new: bool) -> None:
        if not is_new:
            return
        group = self._group
        synchronize()
        self._pg.configure(
            f"{placement.store}/hpc_elastic/{placement.quorum_id}/{group.rank}",
            self.link.replica_id,
            placement.replica_rank,
            placement.replica_world_size,
            placement.quorum_id,
            group.rank,
            group.world_size,
            [r * group.world_size + group.rank for r in range(placement.replica_world_size)],
        )
        if placement.next_store:
            reconfigurable.connect_ahead(placement.next_store)

    # ---- states ---------------------------------------------------------------------------

    def _move_state(self, placement: QuorumResult, progress: CommittedProgress) -> Healed | None:
        with on(self._stream):
            healed = self._exchange(placement, progress)
        if self._stream is not None:
            self._stream.synchronize()
        return healed

    def _exchange(self, placement: QuorumResult, progress: CommittedProgress) -> Healed | None:
        several = self._takes_several
        destinations = placement.serves if several else placement.first_of
        if destinations:
            self._send(list(destinations), replace(progress, lineage=placement.lineage))
        return self._fetch(placement) if placement.heals else None

    @property
    def _takes_several(self) -> bool:
        return self._transport.multi_source and not self.one_source

    def _send(self, destinations: list[int], progress: CommittedProgress) -> None:
        self._transport.send_checkpoint(
            destinations,
            progress.step,
            {"user": self._states.collect(), "torchft": asdict(progress)},
            timedelta(seconds=self._limits.timeout_s),
        )

    def _fetch(self, placement: QuorumResult) -> Healed:
        best = placement.sources[0]
        metadata = best.metadata
        if self._takes_several:
            metadata = json.dumps([source.metadata for source in placement.sources])
        state = self._transport.recv_checkpoint(
            best.replica_rank,
            metadata,
            placement.max_step,
            timedelta(seconds=self._limits.timeout_s),
        )
        progress = CommittedProgress(**state["torchft"])
        if (progress.step, progress.lineage) != (placement.max_step, placement.lineage):
            raise ValueError(
                f"a peer sent the state of step {progress.step}, with another history than "
                f"that of the quorum (step {placement.max_step})"
            )
        self._is_damaged = False
        return Healed(state["user"], progress)


def _tell(placement: QuorumResult, ask_s: float, enter_s: float) -> None:
    _log.info(
        "quorum %d: member %d of %d, step %d; asked %.3f s, entered in %.3f s",
        placement.quorum_id,
        placement.replica_rank,
        placement.replica_world_size,
        placement.max_step,
        ask_s,
        enter_s,
    )


def stand_still(why: str) -> NoReturn:
    """Wait to be stopped by the agent of the run.

    Raises:
        LeftQuorumError: there is none.
    """
    if not os.environ.get(SOCKET_ENV):
        raise LeftQuorumError(f"{why}: end the script, or start it again to join anew")
    _log.info("%s; waiting to be stopped", why)
    while True:
        threading.Event().wait()


# ---- One function on a thread of its own, whose end others wait for


class BackgroundCall:
    """Runs it at once, as a daemon: a script that ends is not kept alive by it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._was_raised = False
        self._thread = threading.Thread(target=self._run, name="ft_quorum", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it has ended; raise what it has raised, each time."""
        self._thread.join()
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def finish(self) -> None:
        """Return when it has ended; raise what it has raised if nobody has been told yet."""
        self._thread.join()
        if not self._was_raised:
            self.wait()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as e:
            self._error = e


# ---- The user's state: the functions that give and take it, and who may call them when


Load = Callable[[Any], None]
Save = Callable[[], Any]


class StateDictRegistry:
    """Functions by key, and a lock that keeps the state from being read while it changes.

    They are read on the Manager's quorum thread, and written on the main thread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loads: dict[str, Load] = {}
        self._saves: dict[str, Save] = {}
        self._lock = threading.Lock()
        self._allowed = True

    def register(self, key: str, load: Load, save: Save) -> None:
        """Add a part of the state.

        Raises:
            ValueError: there is one of that key.
        """
        if key in self._loads:
            raise ValueError(f"key={key!r}: a state of that key is registered already")
        self._loads[key], self._saves[key] = load, save

    def disallow_reading(self) -> None:
        """Wait until nobody reads, and let nobody begin; the second call in a row does nothing."""
        if self._allowed:
            self._allowed = False
            self._lock.acquire()

    def allow_reading(self) -> None:
        """Let the state be read again."""
        if not self._allowed:
            self._allowed = True
            self._lock.release()

    def collect(self) -> dict[str, Any]:
        """Return the state by key, with the live tensors.

        Raises:
            TimeoutError: reading has been disallowed for longer than the Manager's time-out.
            RuntimeError: nothing is registered.
        """
        self._demand()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise TimeoutError(
                f"a peer needs the state, which has not been allowed to be read for "
                f"{self._timeout_s:g} s: call allow_state_dict_read"
            )
        try:
            return {key: save() for key, save in self._saves.items()}
        finally:
            self._lock.release()

    def apply(self, user: dict[str, Any]) -> None:
        """Give each part that came from a peer to its function.

        Raises:
            RuntimeError: nothing is registered, or the peer has registered other keys.
        """
        self._demand()
        missing = sorted(self._loads.keys() - user.keys())
        if missing:
            raise RuntimeError(f"the peer's state has no {missing}: register the same keys on all")
        for key, load in self._loads.items():
            load(user[key])

    def _demand(self) -> None:
        if not self._loads:
            raise RuntimeError(
                "a replica has to heal, but there is no state to send or to take: give the "
                "Manager load_state_dict and state_dict, or call register_state_dict_fn"
            )


# ---- Who contributes to the mean of a step (pure)
# Only members that hold the newest state contribute. In the first step of a quorum (its *call 0*)
# a member that heals computes with old parameters, and adds zero; from the next step on, and
# where everybody has healed before the forward pass, all do. At step 0 nobody holds anything that
# is worth a forward pass, so all wait for the state there, whatever the mode.


class WorldSizeMode(Enum):
    """How many members contribute where there are more than ``min_replica_size``.

    Attributes:
        DYNAMIC: All of them.
        FIXED_WITH_SPARES: ``min_replica_size``; the others are spares that add zero.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class Participation:
    """One member's part in the mean.

    Attributes:
        rank: Its place among the contributors; None: it adds zero.
        size: Contributors, at least 1 in a quorum.
    """

    rank: int | None
    size: int


NOBODY = Participation(None, 0)
"""Before the first quorum."""


def share(placement: QuorumResult, everyone: bool, most: int | None) -> Participation:
    """Return a member's part, the same sizes on all members.

    Args:
        placement: Its place in the quorum.
        everyone: All members hold the newest state, those that had to heal included.
        most: So many contribute at most; None: no limit.
    """
    rank, size = placement.cohort_rank, placement.cohort_size
    if everyone:
        rank, size = placement.replica_rank, placement.replica_world_size
    if most is None:
        return Participation(rank, size)
    return Participation(rank if rank is not None and rank < most else None, min(size, most))


@dataclass(frozen=True)
class CommittedProgress:
    """What one replica's parameters have gone through.

    Attributes:
        step: Steps committed.
        batches_committed: Contributions in them, those of all members.
        lineage: The token of this history.
    """

    step: int
    batches_committed: int
    lineage: str

    @staticmethod
    def begun(init_sync: bool) -> CommittedProgress:
        """Return the progress of parameters as a script makes them; see `Manager`'s init_sync."""
        return CommittedProgress(0, 0, quorum.fresh() if init_sync else quorum.known(0, 0))

    @staticmethod
    def loaded(step: int, batches_committed: int) -> CommittedProgress:
        """Return the progress of a checkpoint that all groups load alike."""
        return CommittedProgress(step, batches_committed, quorum.known(step, batches_committed))

    def after_step(self, quorum_id: int, contributors: int) -> CommittedProgress:
        """Return the progress after one more step."""
        return replace(
            self,
            step=self.step + 1,
            batches_committed=self.batches_committed + contributors,
            lineage=quorum.after_step(self.lineage, quorum_id, contributors),
        )


# ---- What the Manager has to know about accelerators; on a machine without one all of it is free


def current_index() -> int | None:
    """Return the index of this thread's device; None: there is none."""
    return torch.accelerator.current_device_index() if has_one() else None


def use(index: int | None) -> None:
    """Make it this thread's device, as it is the main thread's."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def has_one() -> bool:
    """Tell whether torch sees an accelerator."""
    return torch.accelerator.is_available()


def own_stream() -> torch.Stream | None:
    """Return a stream beside the main thread's for healing; None without a device."""
    return torch.Stream() if has_one() else None


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return the context in which work goes to that stream."""
    return nullcontext() if stream is None else stream


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if has_one():
        torch.accelerator.synchronize()
