"""The Manager: a training loop that outlives its peers, and whoever keeps the quorum.

    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=load, state_dict=save,
                      min_replica_size=1)
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, optimizer)

    while manager.current_step() < steps:
        optimizer.zero_grad()             # start_quorum: who is there for this step?
        loss(model(batch)).backward()     # allreduce: the mean over those who contribute
        optimizer.step()                  # should_commit: did it all go well? else it is skipped

Nothing that a peer does raises here: what goes wrong in a step is recorded, all members are told at
once, and the step is not committed. The next one begins with a new quorum, a new process group in
the same process, and, for who has missed something, with a state from a peer's memory.

A step in an unchanged quorum costs no message and no thread (`link`); a new quorum is entered on a
thread beside the forward pass (`membership`). `protocol` has the theory, `docs/ft.md` what differs
from torchft's Manager, whose names and meanings these are.
"""

from __future__ import annotations

from hpc_elastic.ft import early as early  # before torch

# isort: split
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hpc_elastic import preemption
from hpc_elastic.ft import devices
from hpc_elastic.ft.background import Background
from hpc_elastic.ft.checkpointing import CheckpointTransport, HTTPTransport
from hpc_elastic.ft.link import Link
from hpc_elastic.ft.membership import LeftQuorumError, Limits, Membership, Request, SaveFirstError
from hpc_elastic.ft.one_step import ExceptionWithTraceback, Step
from hpc_elastic.ft.participation import Progress, Share, WorldSizeMode, share
from hpc_elastic.ft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup
from hpc_elastic.ft.protocol import Placement
from hpc_elastic.ft.reducing import Reducing
from hpc_elastic.ft.saving import Saving
from hpc_elastic.ft.server import Wanted, find_server, group_of
from hpc_elastic.ft.states import States

__all__ = ["ExceptionWithTraceback", "LeftQuorumError", "Manager", "WorldSizeMode"]

_MINUTE = timedelta(seconds=60)
_log = logging.getLogger(__name__)


class Manager(Reducing):
    """Keeps one worker of one replica group in the training (every rank has one)."""

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta = _MINUTE,
        quorum_timeout: timedelta = _MINUTE,
        connect_timeout: timedelta = _MINUTE,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str = socket.gethostname(),
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: CheckpointTransport[dict[str, Any]] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
    ) -> None:
        """Join the replica group's server; the quorum is entered with the first `start_quorum`.

        Args:
            pg: The process group over all replica groups; it is configured anew as they change.
            load_state_dict: Takes a peer's state; with `state_dict` it is the part ``default``.
            state_dict: Gives the state; may return live tensors.
            min_replica_size: The fewest groups that a step is made with, at least 1.
            use_async_quorum: Enter a new quorum beside the forward pass, rather than before it.
            timeout: For collectives inside the group, healing and `wrap_future`. The time-out of
                the collectives between groups is the process group's own.
            quorum_timeout: For one try at a quorum. Live members are waited for, however long
                their steps are, so that it should be longer than a step.
            connect_timeout: For the connection to the group's server and store.
            rank: This worker's rank in its group; None: by RANK.
            world_size: Workers in the group; None: by WORLD_SIZE.
            world_size_mode: Whether all groups contribute, or `min_replica_size` of them.
            store_addr: Host of the group's TCPStore, which all groups must reach; None: by
                MASTER_ADDR.
            store_port: Its port; None: by MASTER_PORT.
            lighthouse_addr: ``host:port`` or ``http://host:port`` of a lighthouse; None: by
                TORCHFT_LIGHTHOUSE. Not needed in a run, where the run's leader keeps the quorum.
            replica_id: The group's name, for logs; it is made unique.
            port: Not used: there is no server in this process.
            hostname: Not used: addresses are found by the interface.
            heartbeat_interval: Not used: connections and heartbeats are the server's.
            checkpoint_transport: Moves states; None: an `HTTPTransport`.
            init_sync: Take the parameters of one group at step 0. With False all groups must have
                initialised them alike.
            max_retries: So many steps in a row may fail to commit; None: any number.
            quorum_retries: So often a quorum that was not found in time is asked for again.

        Raises:
            ConfigError: nobody keeps a quorum, or the group's place is unknown.
            GroupServerGoneError: the group's server does not answer.

        The environment comes first for TORCHFT_TIMEOUT_SEC, TORCHFT_QUORUM_TIMEOUT_SEC,
        TORCHFT_CONNECT_TIMEOUT_SEC and TORCHFT_QUORUM_RETRIES.
        """
        del port, hostname, heartbeat_interval
        connect_s = _seconds("TORCHFT_CONNECT_TIMEOUT_SEC", connect_timeout)
        self._limits = Limits(
            timeout_s=_seconds("TORCHFT_TIMEOUT_SEC", timeout),
            quorum_timeout_s=_seconds("TORCHFT_QUORUM_TIMEOUT_SEC", quorum_timeout),
            quorum_retries=int(os.environ.get("TORCHFT_QUORUM_RETRIES", quorum_retries)),
            min_replicas=min_replica_size,
        )
        self._pg = pg
        self._use_async_quorum = use_async_quorum
        self._mode = world_size_mode
        self._max_retries = max_retries
        self._progress = Progress.begun(init_sync)
        self._states = States(self._limits.timeout_s)
        if load_state_dict is not None and state_dict is not None:
            self._states.register("default", load_state_dict, state_dict)
        self._group = group_of(rank, world_size, store_addr, store_port)
        self._server = find_server(self._group, Wanted(lighthouse_addr, replica_id, connect_s))
        self._transport = checkpoint_transport or HTTPTransport(
            timedelta(seconds=self._limits.timeout_s), state_dict=self._manager_state_dict
        )
        self._membership = Membership(
            lambda on_broken: Link(
                self._server.path,
                self._group.rank,
                self._group.world_size,
                on_broken=on_broken,
                timeout_s=connect_s,
            ),
            pg, self._transport, self._states, self._limits, self._group,
        )  # fmt: skip
        self._link = self._membership.link
        self._placement: Placement | None = None
        self._all_are_new = False
        self._failed = False
        self._commit_failures = 0
        self._saving = Saving(
            self._link, self._group, self._limits.timeout_s, lambda: self._share.rank == 0
        )
        preemption.answer_by(self._saving.decide)

    # ---- the quorum -----------------------------------------------------------------------

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Begin a step, before its forward pass; `OptimizerWrapper.zero_grad` calls it.

        With ``use_async_quorum`` it returns at once, save at step 0: a replica that knows nothing
        yet has no use for a forward pass before it has the parameters.

        Args:
            allow_heal: Let members that are behind fetch the state; the same on all replicas.
            shrink_only: Let nobody join now.
            timeout: For the quorum; None: the Manager's ``quorum_timeout``.

        Raises:
            TimeoutError: no quorum in time (in sync mode; else `wait_quorum` raises it).
            LeftQuorumError: as `wait_quorum`.
        """
        self._end_last()
        step = self._this = Step(allow_heal, shrink_only)
        must_heal = allow_heal and self._placement is not None and not self._all_are_new
        if self._link.needs_quorum(failed=self._failed or must_heal):
            seconds = self._limits.quorum_timeout_s if timeout is None else timeout.total_seconds()
            self._enter_beside(step, seconds)
        elif self._placement is not None:
            self._share = self._share_of(self._placement, self._all_are_new)
            if self._group.world_size > 1 and self._link.broken is not None:
                step.fail(RuntimeError(f"the quorum is broken: {self._link.broken}"))

    def begin_step(self) -> None:
        """Call `start_quorum`, unless a step has been started and nothing was done in it yet."""
        if self._this is None or not self._this.is_fresh:
            self.start_quorum()

    def wait_quorum(self) -> None:
        """Wait until the quorum is known and its process group is formed.

        Raises:
            RuntimeError: `start_quorum` has not been called.
            TimeoutError: no quorum in time; says who was waited for.
            LeftQuorumError: this group has left, as announced. In a run nothing is raised: the
                worker waits to be stopped.
            GroupServerGoneError: the group's server is dead; start the worker again.
        """
        if self._this is None:
            raise RuntimeError("call start_quorum before wait_quorum")
        if self._entering is not None:
            self._entering.wait()
            self._entering = None

    def _end_last(self) -> None:
        """Leave nothing of the step before under way, nor a state that came in it unapplied."""
        entering, self._entering = self._entering, None
        if entering is not None:
            entering.finish()
        last = self._this
        if last is not None and not last.is_ended and not last.is_fresh:
            self._give_up(last, "a step was begun and not committed")
        self._apply_pending()

    def _enter_beside(self, step: Step, timeout_s: float) -> None:
        device = devices.current_index()
        request = self._request(step, timeout_s)
        is_eager = not self._use_async_quorum or (step.allow_heal and request.progress.step == 0)

        def enter() -> None:
            devices.use(device)
            self._enter(step, request)

        self._entering = Background(enter)
        if is_eager:
            self.wait_quorum()
            self._apply_pending()

    def _ready(self) -> Step:
        """Wait for the quorum; if it broke before this step began anything, enter another."""
        self.wait_quorum()
        step = self._this
        assert step is not None
        can_ask = step.is_fresh and not step.is_told and self._group.world_size == 1
        if can_ask and self._link.broken is not None:
            request = self._request(step, self._limits.quorum_timeout_s)
            self._enter(step, request, is_late=True)
        return step

    def _request(self, step: Step, timeout_s: float) -> Request:
        return Request(
            self._progress,
            self._commit_failures,
            step.allow_heal,
            step.shrink_only,
            timeout_s,
        )

    def _enter(self, step: Step, request: Request, *, is_late: bool = False) -> None:
        """Enter a quorum.

        Args:
            step: The step that it is for.
            request: What to ask with.
            is_late: The forward pass is over.
        """
        try:
            entered = self._membership.enter(request)
        except SaveFirstError as e:
            _log.warning("%s", e)
            self._share = Share(rank=0, size=1)
            step.fail(e)
            return
        placement = self._placement = entered.placement
        eager = step.allow_heal and (not self._use_async_quorum or placement.max_step == 0)
        self._share = self._share_of(placement, eager)
        self._all_are_new = placement.cohort_size == placement.replica_world_size
        self._failed = False
        self._pending = entered.healed
        if entered.error is not None:
            step.fail(entered.error)
        elif placement.heals and eager and is_late:
            self._break(step, RuntimeError("the state came after the forward pass"))
        elif not placement.heals:
            self._progress = replace(self._progress, lineage=placement.lineage)

    def _share_of(self, placement: Placement, everyone: bool) -> Any:
        is_fixed = self._mode is WorldSizeMode.FIXED_WITH_SPARES
        return share(placement, everyone, self._limits.min_replicas if is_fixed else None)

    def _apply_pending(self) -> None:
        pending = self._pending
        if pending is not None:
            self._states.apply(pending.user)
            self._pending, self._progress = None, pending.progress
            _log.info("healed: at step %d now", pending.progress.step)

    # ---- the end of a step ------------------------------------------------------------------

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Tell whether to step the optimizer; call it once a step, on all ranks of the group.

        All ranks of a group get the same answer; other groups may get another, and whoever has
        missed the step heals in the next one. A state that came in this step is applied first.

        Args:
            timeout: To hear from the other ranks; None: the Manager's.

        Raises:
            RuntimeError: more than ``max_retries`` steps in a row were not committed.
            TimeoutError, LeftQuorumError: as `wait_quorum`.
        """
        self.wait_quorum()
        step = self._this
        assert step is not None
        step.drain()
        self._look_at_group(step)
        self._apply_pending()
        enough = self._share.size >= self._limits.min_replicas
        is_well = enough and step.error is None
        if self._group.world_size > 1:
            seconds = self._limits.timeout_s if timeout is None else timeout.total_seconds()
            is_well = self._link.vote(is_well, seconds)
        self._transport.disallow_checkpoint()
        step.is_ended = True
        if is_well:
            self._commit(step)
        else:
            why = "too few contributors" if step.error is None else str(step.error)
            self._give_up(step, why if enough else "too few contributors")
            self._count_failure()
        return is_well

    def _look_at_group(self, step: Step) -> None:
        """Record what the process group knows and no collective has raised.

        A quorum that broke when all collectives of the step were done costs nothing; but that they
        are done is certain on the CPU only, and if nobody swallows their errors.
        """
        devices.synchronize()
        error = self._pg.errored()
        if error is None:
            return
        is_sure = not step.used_device and not isinstance(
            self._pg, ErrorSwallowingProcessGroupWrapper
        )
        if not (is_sure and self._link.broken is not None):
            self._break(step, error)

    def _commit(self, step: Step) -> None:
        self._progress = self._progress.after_step(self._link.quorum_id, self._share.size)
        self._commit_failures = 0
        self._all_are_new = self._all_are_new or step.allow_heal

    def _give_up(self, step: Step, why: str) -> None:
        """Have the next step begin with a new quorum, here and everywhere."""
        step.is_ended = True
        self._failed = True
        self._membership.report(self._link.quorum_id, f"a member did not commit a step: {why}")
        step.drain()

    def _count_failure(self) -> None:
        self._commit_failures += 1
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"{self._commit_failures} steps in a row were not committed, more than "
                f"max_retries={self._max_retries}; the last one: {self.errored()}"
            )

    # ---- the end ------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """Leave the quorum in peace, and release everything.

        Args:
            wait: Whether to return only after the transport's threads have ended.
        """
        preemption.answer_by(None)
        self._link.close()
        self._transport.shutdown(wait=wait)
        self._pg.shutdown()
        if self._server.attendant is not None:
            self._server.attendant.end()


def _seconds(variable: str, given: timedelta) -> float:
    text = os.environ.get(variable)
    return float(text) if text else given.total_seconds()
