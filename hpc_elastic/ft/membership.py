"""Enters quorums: asks for a place, forms the process group, sends or fetches the state.

Who is here: `Manager` calls `Membership.enter` on a thread beside the training, where a new quorum
is needed, and `broken` is called on the link's reading thread. Between the two stands one lock: a
quorum that breaks aborts what is under way in it, and never what a later one has begun.

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft import devices, lineage, meeting
from hpc_elastic.ft.background import Background
from hpc_elastic.ft.participation import Progress
from hpc_elastic.ft.protocol import NO_QUORUM, SOCKET_ENV, Ask, Farewell, Placement, SaveFirst
from hpc_elastic.ft.server import Group
from hpc_elastic.ft.states import States

if TYPE_CHECKING:
    from hpc_elastic.ft.checkpointing.transport import CheckpointTransport
    from hpc_elastic.ft.link import Link
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
class Request:
    """What a worker asks for a quorum with.

    Attributes:
        progress: Of the parameters as they are.
        commit_failures: Steps in a row that were not committed.
        allow_heal: Whether states are sent and fetched.
        timeout_s: For one question, and for all tries of entering together.
    """

    progress: Progress
    commit_failures: int
    allow_heal: bool
    shrink_only: bool
    timeout_s: float


@dataclass(frozen=True)
class Healed:
    """A state that came from a peer, and is not applied yet."""

    user: dict[str, Any]
    progress: Progress


@dataclass(frozen=True)
class Entered:
    """How it went: a place in a quorum, and perhaps a state; or the error that costs the step."""

    placement: Placement
    healed: Healed | None = None
    error: Exception | None = None


class Membership:
    """This worker's part in the quorum.

    Args:
        link: Makes the link, given what it calls when the quorum breaks.
        pg: The process group over all members.
        transport: Moves states.
        states: The user's.
    """

    def __init__(
        self,
        link: Callable[[Callable[[int, str], None]], Link],
        pg: ProcessGroup,
        transport: CheckpointTransport[dict[str, Any]],
        states: States,
        limits: Limits,
        group: Group,
    ) -> None:  # fmt: skip
        self._pg = pg
        self._transport = transport
        self._states = states
        self._limits = limits
        self._group = group
        self._lock = threading.RLock()
        self._entering = NO_QUORUM
        self._configured = NO_QUORUM
        self._stream = devices.own_stream()
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

    def enter(self, request: Request, *, may_retry: bool = True) -> Entered:
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

    def _place(self, request: Request) -> Placement:
        answer = self._ask(request)
        if isinstance(answer, Farewell):
            stand_still("this replica has left the quorum, as it was announced")
        if isinstance(answer, SaveFirst):
            raise SaveFirstError
        if self._is_damaged and not answer.heals:
            self.link.report_broken(answer.quorum_id, "a member's state is damaged")
            raise DamagedStateError(
                "a peer was lost while this replica received its state in place, and nobody else "
                "has it: start again from a checkpoint (without in_place, a heal can not do this)"
            )
        return answer

    def _ask(self, request: Request) -> Placement | Farewell | SaveFirst:
        for _ in range(self._limits.quorum_retries):
            with suppress(TimeoutError):
                return self.link.ask(self._question(request), request.timeout_s)
        return self.link.ask(self._question(request), request.timeout_s)

    def _question(self, request: Request) -> Ask:
        progress = request.progress
        return Ask(
            call=self.link.call,
            step=-1 if self._is_damaged else progress.step,
            lineage=lineage.fresh() if self._is_damaged else progress.lineage,
            quorum_id=self.link.quorum_id,
            commit_failures=request.commit_failures,
            min_replicas=self._limits.min_replicas,
            shrink_only=request.shrink_only,
            store=self._group.store,
            metadata=(self._transport.metadata(),),
            is_saved=self.link.is_saved,
        )

    def _settle(self, placement: Placement, request: Request) -> Healed | None:
        with self._entered(placement.quorum_id) as is_new:
            if not request.allow_heal:
                self._configure(placement, is_new=is_new)
                return None
            if self._transport.needs_group:
                self._configure(placement, is_new=is_new)
                return self._move_state(placement, request.progress)
            return self._configure_and_move_state(placement, request.progress, is_new=is_new)

    def _configure_and_move_state(
        self, placement: Placement, progress: Progress, *, is_new: bool
    ) -> Healed | None:
        """Do both at once: the others stand until who heals has come."""
        device, moved = devices.current_index(), list[Healed | None]()

        def move() -> None:
            devices.use(device)
            moved.append(self._move_state(placement, progress))

        moving = Background(move)
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

    def _configure(self, placement: Placement, *, is_new: bool) -> None:
        if not is_new:
            return
        group = self._group
        devices.synchronize()
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
            meeting.connect_ahead(placement.next_store)

    # ---- states ---------------------------------------------------------------------------

    def _move_state(self, placement: Placement, progress: Progress) -> Healed | None:
        with devices.on(self._stream):
            healed = self._exchange(placement, progress)
        if self._stream is not None:
            self._stream.synchronize()
        return healed

    def _exchange(self, placement: Placement, progress: Progress) -> Healed | None:
        several = self._takes_several
        destinations = placement.serves if several else placement.first_of
        if destinations:
            self._send(list(destinations), replace(progress, lineage=placement.lineage))
        return self._fetch(placement) if placement.heals else None

    @property
    def _takes_several(self) -> bool:
        return self._transport.multi_source and not self.one_source

    def _send(self, destinations: list[int], progress: Progress) -> None:
        self._transport.send_checkpoint(
            destinations,
            progress.step,
            {"user": self._states.collect(), "torchft": asdict(progress)},
            timedelta(seconds=self._limits.timeout_s),
        )

    def _fetch(self, placement: Placement) -> Healed:
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
        progress = Progress(**state["torchft"])
        if (progress.step, progress.lineage) != (placement.max_step, placement.lineage):
            raise ValueError(
                f"a peer sent the state of step {progress.step}, with another history than "
                f"that of the quorum (step {placement.max_step})"
            )
        self._is_damaged = False
        return Healed(state["user"], progress)


def _tell(placement: Placement, ask_s: float, enter_s: float) -> None:
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
