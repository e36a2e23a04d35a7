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

A step in an unchanged quorum costs no message and no thread (`manager_client`); a new quorum is
entered on a thread beside the forward pass (`quorum_client`). `messages` has the theory,
`docs/reference/torchft.md` what differs from torchft's Manager, whose names and meanings these are.
"""

from __future__ import annotations

from hpc_elastic.ft import early as early  # before torch

# isort: split
import logging
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions, Store
from torch.futures import Future

from hpc_elastic.ft import quorum_client
from hpc_elastic.ft.checkpointing import CheckpointTransport, HTTPTransport
from hpc_elastic.ft.manager_client import (
    GroupPlace,
    ManagerClient,
    ServerSettings,
    find_server,
    group_of,
    open_store,
)
from hpc_elastic.ft.messages import QuorumResult
from hpc_elastic.ft.process_group import (
    DummyWork,
    ErrorSwallowingProcessGroupWrapper,
    ManagedWork,
    ProcessGroup,
    swallow_errors,
)
from hpc_elastic.ft.quorum_client import (
    NOBODY,
    BackgroundCall,
    CommittedProgress,
    EnterRequest,
    Healed,
    LeftQuorumError,
    Limits,
    Participation,
    QuorumClient,
    SaveFirstError,
    StateDictRegistry,
    WorldSizeMode,
    share,
)
from hpc_elastic.worker import checkpoint_trigger, reporting

__all__ = ["ExceptionWithTraceback", "LeftQuorumError", "Manager", "WorldSizeMode"]

_MINUTE = timedelta(seconds=60)
_log = logging.getLogger(__name__)


# ---- What a Manager tells of itself, and the user's state that it keeps: the quiet half of it


class Told:
    """The base of `Manager`: questions, and the functions for the state."""

    _group: GroupPlace
    _limits: Limits
    _pg: ProcessGroup
    _link: ManagerClient
    _membership: QuorumClient
    _states: StateDictRegistry
    _transport: CheckpointTransport[dict[str, Any]]
    _progress: CommittedProgress
    _pending: Healed | None = None
    _share: Participation = NOBODY
    _this: StepState | None = None

    def wait_quorum(self) -> None:
        """Wait until the quorum is known; see `Manager`."""
        raise NotImplementedError

    # ---- the step -------------------------------------------------------------------------

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step; None if all is well so far."""
        return None if self._this is None else self._this.error

    def current_step(self) -> int:
        """Return the steps committed; where a peer's state has come, that state's."""
        return self._newest.step

    def batches_committed(self) -> int:
        """Return the contributions in all steps committed: 2 steps of 5 replicas are 10."""
        return self._newest.batches_committed

    def participating_rank(self) -> int | None:
        """Return this group's place among the contributors to this step, the same on all its ranks.

        Waits for the quorum.

        Returns:
            None: it adds zero to this step, since it heals or is a spare; or no quorum was started.
        """
        self._tell()
        return self._share.rank

    def num_participants(self) -> int:
        """Return how many groups contribute to this step; 0 before the first `start_quorum`.

        Waits for the quorum.
        """
        self._tell()
        return self._share.size

    def is_participating(self) -> bool:
        """Tell whether this group contributes to this step, as far as is known now."""
        return self._share.rank is not None

    def quorum_id(self) -> int:
        """Return the id of the quorum that was entered last; -1 before the first."""
        return self._link.quorum_id

    def group_rank(self) -> int:
        """Return this worker's rank in its replica group."""
        return self._group.rank

    def group_world_size(self) -> int:
        """Return the number of workers of its replica group."""
        return self._group.world_size

    def replica_id(self) -> str:
        """Return this group's name among its peers."""
        return self._link.replica_id

    def _tell(self) -> None:
        if self._this is not None:
            self.wait_quorum()
            self._this.is_told = True

    @property
    def _newest(self) -> CommittedProgress:
        return self._progress if self._pending is None else self._pending.progress

    # ---- state ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint has to hold of the Manager: step and batches_committed."""
        newest = self._newest
        return {"step": newest.step, "batches_committed": newest.batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a checkpoint; all groups that load one must load the same.

        Args:
            state_dict: What `state_dict` returned when the parameters were saved.
        """
        self._progress = CommittedProgress.loaded(
            state_dict["step"], state_dict["batches_committed"]
        )

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Add a part to the state that a replica heals with.

        Args:
            key: Its name, the same on all replicas.
            load_state_dict: Takes the part of a peer; called on the main thread, in
                `start_quorum` or `should_commit`.
            state_dict: Gives it; called on another thread, see `disallow_state_dict_read`.

        Raises:
            ValueError: the key is taken.
        """
        self._states.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Register a state without a key; `register_state_dict_fn` is the better name."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Keep the state from being read until `allow_state_dict_read`: it is about to change.

        Returns once no peer reads it any more. Between `should_commit` and the next `start_quorum`
        nobody does, so that it is needed for changes within a step only.
        """
        self._states.disallow_reading()
        self._transport.disallow_checkpoint()

    def allow_state_dict_read(self) -> None:
        """Let peers read the state again."""
        self._states.allow_reading()

    def heal_from_one_source(self) -> None:
        """Take a state from one peer alone; for algorithms whose replicas differ at a step.

        `LocalSGD` and `DiLoCo` call it: between two averages each replica goes its own way, and the
        pieces of several would make no model. Call it on all groups before the first quorum.
        """
        self._membership.one_source = True

    def _manager_state_dict(self) -> dict[str, Any]:
        """Return the state in the form in which peers send it (torchft's private name)."""
        return {"user": self._states.collect(), "torchft": asdict(self._progress)}


# ---- A step's collectives over the replica groups, whose errors cost the step and nothing else


class Reducing(Told):
    """The part of `Manager` between `start_quorum` and `should_commit`."""

    _entering: BackgroundCall | None = None

    def _ready(self) -> StepState:
        """Wait for the quorum, and return the step that is under way; see `Manager`."""
        raise NotImplementedError

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor over all replica groups, in place.

        The mean is over those who contribute; others add zero. An error is recorded, never raised;
        after the first one this does nothing any more, and the tensor's content is of no use.

        Args:
            tensor: The same shape and type on all groups.
            should_quantize: Accepted, without effect.
            reduce_op: AVG (floating point only), or another that the process group has.

        Returns:
            Work whose future holds the tensor; neither holds errors.

        Raises:
            ValueError: the mean of integers was asked for.
            RuntimeError, TimeoutError, LeftQuorumError: as `wait_quorum`.
        """
        is_mean = reduce_op == ReduceOp.AVG
        if is_mean and not torch.is_floating_point(tensor):
            raise ValueError(f"the mean of {tensor.dtype} is not defined: use ReduceOp.SUM")
        step = self._ready()
        if step.error is not None:
            return DummyWork(tensor)
        if self._share.rank is None:
            tensor.zero_()
        try:
            options = AllreduceOptions()
            options.reduceOp = cast(ReduceOp, ReduceOp.SUM if is_mean else reduce_op)
            work = self._pg.allreduce([tensor], options)
        except Exception as e:
            self._break(step, e)
            return DummyWork(tensor)
        divisor = self._share.size if is_mean else 1
        managed = ManagedWork(work, tensor, divisor, lambda e: self._break(step, e))
        step.used_device |= tensor.device.type != "cpu"
        step.works.append(managed)
        return managed

    def report_error(self, e: Exception) -> None:
        """Say that this step's gradient is of no use: it is not committed, here or elsewhere.

        Args:
            e: Why. All members of the quorum are told at once.
        """
        if self._this is not None:
            self._break(self._this, e)

    def _break(self, step: StepState, error: Exception) -> None:
        """Record an error of a step, on any thread, and tell the other members."""
        if step.fail(error):
            _log.info("step %d failed: %s", self._newest.step, error)
            if step is self._this and self._entering is None:
                self._membership.report(self._link.quorum_id, f"a member met an error: {error}")

    def wrap_future(
        self, fut: Future[T], default: T, timeout: timedelta | None = None
    ) -> Future[T]:
        """Return a future that holds a default where the other fails, which is then reported.

        Args:
            fut: The one to follow.
            default: Its value after an error, or when it takes too long.
            timeout: None: the Manager's.
        """
        step = self._this
        seconds = self._limits.timeout_s if timeout is None else timeout.total_seconds()

        def failed(error: Exception) -> None:
            if step is not None:
                self._break(step, error)

        return swallow_errors(fut, default, seconds, failed)


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
        self._progress = CommittedProgress.begun(init_sync)
        self._states = StateDictRegistry(self._limits.timeout_s)
        if load_state_dict is not None and state_dict is not None:
            self._states.register("default", load_state_dict, state_dict)
        self._group = group_of(rank, world_size, store_addr, store_port)
        self._server = find_server(
            self._group, ServerSettings(lighthouse_addr, replica_id, connect_s)
        )
        self._transport = checkpoint_transport or HTTPTransport(
            timedelta(seconds=self._limits.timeout_s), state_dict=self._manager_state_dict
        )
        self._membership = QuorumClient(
            lambda on_broken: ManagerClient(
                self._server.path,
                self._group.rank,
                self._group.world_size,
                on_broken=on_broken,
                timeout_s=connect_s,
            ),
            pg, self._transport, self._states, self._limits, self._group,
        )  # fmt: skip
        self._link = self._membership.link
        self._placement: QuorumResult | None = None
        self._all_are_new = False
        self._failed = False
        self._commit_failures = 0
        self._saving = Saving(
            self._link, self._group, self._limits.timeout_s, lambda: self._share.rank == 0
        )
        checkpoint_trigger.answer_by(self._saving.decide)

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
        step = self._this = StepState(allow_heal, shrink_only)
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

    def _enter_beside(self, step: StepState, timeout_s: float) -> None:
        device = quorum_client.current_index()
        request = self._request(step, timeout_s)
        is_eager = not self._use_async_quorum or (step.allow_heal and request.progress.step == 0)

        def enter() -> None:
            quorum_client.use(device)
            self._enter(step, request)

        self._entering = BackgroundCall(enter)
        if is_eager:
            self.wait_quorum()
            self._apply_pending()

    def _ready(self) -> StepState:
        """Wait for the quorum; if it broke before this step began anything, enter another."""
        self.wait_quorum()
        step = self._this
        assert step is not None
        can_ask = step.is_fresh and not step.is_told and self._group.world_size == 1
        if can_ask and self._link.broken is not None:
            request = self._request(step, self._limits.quorum_timeout_s)
            self._enter(step, request, is_late=True)
        return step

    def _request(self, step: StepState, timeout_s: float) -> EnterRequest:
        return EnterRequest(
            self._progress,
            self._commit_failures,
            step.allow_heal,
            step.shrink_only,
            timeout_s,
        )

    def _enter(self, step: StepState, request: EnterRequest, *, is_late: bool = False) -> None:
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
            self._share = Participation(rank=0, size=1)
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

    def _share_of(self, placement: QuorumResult, everyone: bool) -> Any:
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

    def _look_at_group(self, step: StepState) -> None:
        """Record what the process group knows and no collective has raised.

        A quorum that broke when all collectives of the step were done costs nothing; but that they
        are done is certain on the CPU only, and if nobody swallows their errors.
        """
        quorum_client.synchronize()
        error = self._pg.errored()
        if error is None:
            return
        is_sure = not step.used_device and not isinstance(
            self._pg, ErrorSwallowingProcessGroupWrapper
        )
        if not (is_sure and self._link.broken is not None):
            self._break(step, error)

    def _commit(self, step: StepState) -> None:
        self._progress = self._progress.after_step(self._link.quorum_id, self._share.size)
        self._commit_failures = 0
        self._all_are_new = self._all_are_new or step.allow_heal

    def _give_up(self, step: StepState, why: str) -> None:
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
        checkpoint_trigger.answer_by(None)
        self._link.close()
        self._transport.shutdown(wait=wait)
        self._pg.shutdown()
        if self._server.attendant is not None:
            self._server.attendant.end()


def _seconds(variable: str, given: timedelta) -> float:
    text = os.environ.get(variable)
    return float(text) if text else given.total_seconds()


T = TypeVar("T")


# ---- What happens in one step, from `Manager.start_quorum` to `Manager.should_commit`


class ExceptionWithTraceback(Exception):  # noqa: N818  # torchft's name
    """An error of a step, with the stack that it was caught with.

    Attributes:
        original_exception: What was raised.
        stack_trace: Where, as text.
    """

    def __init__(self, e: Exception) -> None:
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))
        super().__init__(f"{e}\n{self.stack_trace}")


@dataclass(eq=False)
class StepState:
    """One try at a step.

    Attributes:
        allow_heal, shrink_only: As `Manager.start_quorum` was called.
        error: The first that it met.
        works: Collectives begun.
        is_told: The script has been told its rank or the number of contributors, and may have
            chosen its samples by them.
        is_ended: `Manager.should_commit` has been called.
        used_device: One of the collectives was on an accelerator.
    """

    allow_heal: bool = True
    shrink_only: bool = False
    error: ExceptionWithTraceback | None = None
    works: list[ManagedWork] = field(default_factory=list)
    is_told: bool = False
    is_ended: bool = False
    used_device: bool = False

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has come of it yet."""
        return not (self.is_ended or self.works or self.error)

    def fail(self, error: Exception) -> bool:
        """Record an error; return whether it is the first."""
        if self.error is not None:
            return False
        self.error = ExceptionWithTraceback(error)
        return True

    def drain(self) -> None:
        """Wait for all collectives; their errors are recorded."""
        for work in self.works:
            work.wait()


# ---- Whether this replica group saves after a step: `preemption.should_checkpoint` asks it
# One group saves for all, since all have the same parameters: the first of the contributors. It
# does so when it is due, and in the last step before everybody leaves; that save is urgent, for
# who has left may commit nothing. All ranks of the group answer the same; if the clock says that
# it is due, by the clock of the first rank, one step later.


_KEY = "hpc_elastic/ft/save"


class SaveAgreement:
    """The same answer on all ranks of a group, each of which asks once a step.

    Rank 0 announces the next step in the group's store; it has said so before any rank can have
    the verdict on that step. Costs each rank one look into the store a step.

    Args:
        store: The group's.
        is_first: This is rank 0.
    """

    def __init__(self, store: Store, *, is_first: bool) -> None:
        self._store = store
        self._is_first = is_first
        self._asked = 0
        self._announced = 0
        self._prefix = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def at_step(self, *, due: bool) -> bool:
        """Return whether to save now.

        Args:
            due: This rank's clock says that it is time; only rank 0's counts.
        """
        self._asked += 1
        yes = bool(self._store.check([f"{self._prefix}/{self._asked}"]))
        if self._is_first and due and not yes and self._announced <= self._asked:
            self._announced = self._asked + 1
            self._store.add(f"{self._prefix}/{self._announced}", 1)  # returns once it is there
        return yes


class Saving:
    """One worker's answers.

    Args:
        link: Knows what is going to happen at the next step.
        group: This worker's group.
        timeout_s: To connect to its store.
        is_saver: Tells whether this group is the one, by the present quorum.
    """

    def __init__(
        self, link: ManagerClient, group: GroupPlace, timeout_s: float, is_saver: Callable[[], bool]
    ) -> None:
        self._link = link
        self._group = group
        self._timeout_s = timeout_s
        self._is_saver = is_saver
        self._agreement: SaveAgreement | None = None

    def decide(self, step: int, by_step: bool, by_time: bool) -> bool:
        """Return whether to save now.

        Args:
            step: The script's.
            by_step: The count of steps says that it is due, on all ranks.
            by_time: This process's clock says so.
        """
        is_last = self._link.settle()
        is_saver = self._is_saver()
        reporting.save_is_last(is_saver and is_last)
        if not is_saver:
            return False
        if self._group.world_size > 1:
            by_time = self._agreed(by_time)
        return by_step or by_time or is_last

    def _agreed(self, due: bool) -> bool:
        if self._agreement is None:
            store = open_store(self._group, self._timeout_s)
            self._agreement = SaveAgreement(store, is_first=self._group.rank == 0)
        return self._agreement.at_step(due=due)
