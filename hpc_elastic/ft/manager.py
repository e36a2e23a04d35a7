"""Manager: a training loop that outlives its peers and the coordinator of its quorum.

    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=load, state_dict=save,
                      min_replica_size=1)
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, optimizer)

    while manager.current_step() < steps:
        optimizer.zero_grad()             # start_quorum: which replicas take part in this step?
        loss(model(batch)).backward()     # allreduce: the mean over the participants
        optimizer.step()                  # should_commit: did it all succeed? else it is skipped

No failure of a peer raises here. An error in a step is recorded, all members are notified at once,
and the step is not committed. The next one starts with a new quorum, a new process group in the
same process, and, for a replica that has missed something, with a state from a peer's memory.

A step in an unchanged quorum costs no message and no thread (`manager_client`); a new quorum is
entered on a thread beside the forward pass (`quorum_client`). `messages` has the theory,
`docs/reference/torchft.md` the differences from torchft, which has the same names and meanings.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import math
import os
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import quorum_client, state_check
from hpc_elastic.ft.catch_up import CatchUp, SkipCopiesOntoItself
from hpc_elastic.ft.checkpointing import CheckpointTransport, HTTPTransport, UnusableStateError
from hpc_elastic.ft.checkpointing._layout import SMALL_BYTES
from hpc_elastic.ft.futures import swallow_errors
from hpc_elastic.ft.manager_client import ManagerClient, find_server, resolve_place
from hpc_elastic.ft.messages import QuorumResult, StateMismatch
from hpc_elastic.ft.process_group import (
    MAX_QUANTIZED,
    DummyWork,
    ErrorSwallowingProcessGroupWrapper,
    ManagedWork,
    ProcessGroup,
    sum_quantized,
)
from hpc_elastic.ft.quorum import CommittedProgress, random_version
from hpc_elastic.ft.quorum_client import HealedState, LeftQuorumError, run_in_background
from hpc_elastic.ft.state_check import CorruptedStateError, StateDigest, find_tensors
from hpc_elastic.worker import checkpoint_trigger, reporting

__all__ = ["ExceptionWithTraceback", "LeftQuorumError", "Manager", "WorldSizeMode"]

_MINUTE = timedelta(seconds=60)
_log = logging.getLogger(__name__)

T = TypeVar("T")


class ExceptionWithTraceback(Exception):  # noqa: N818  # torchft's name
    """An error of a step, with the stack where it was caught.

    Attributes:
        original_exception: The error.
        stack_trace: The stack, as text.
    """

    def __init__(self, e: Exception) -> None:
        self.original_exception = e
        self.stack_trace: str = "".join(traceback.format_exception(e))
        super().__init__(f"{e}\n{self.stack_trace}")


class WorldSizeMode(Enum):
    """The number of members that participate if there are more than ``min_replica_size``.

    Attributes:
        DYNAMIC: All of them.
        FIXED_WITH_SPARES: ``min_replica_size``; the others are spares that add zero.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class Manager:
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
        check_every: int | None = None,
        check_state: Callable[[], Any] | None = None,
        heal_corrupted: bool = True,
        catch_up_bytes: int | None = 256 << 20,
    ) -> None:
        """Connect to the group's server; the first `start_quorum` enters a quorum.

        Args:
            pg: The process group over all replica groups; it is reconfigured as they change.
            load_state_dict: Loads a peer's state; with `state_dict` it is the part ``default``.
            state_dict: Returns the state; may return live tensors.
            min_replica_size: The fewest groups of a step, at least 1.
            use_async_quorum: Enter a new quorum beside the forward pass, rather than before it.
            timeout: For collectives inside the group and `wrap_future`, and of a heal without any
                progress. The time-out of the collectives between groups is the process group's own.
            quorum_timeout: For one attempt at a quorum, outside of a run. Live members are waited
                for, up to 80 % of it, so it should be longer than a step. In a run there is no
                limit here: the run's leader ends the wait (``launcher.below_min_timeout_s``), and
                has the state saved first.
            connect_timeout: For the connection to the group's server and store.
            rank: This worker's rank in its group; None: RANK.
            world_size: Number of workers in the group; None: WORLD_SIZE.
            world_size_mode: Whether all groups participate, or `min_replica_size` of them.
            store_addr: Host of the group's TCPStore, which all groups must reach; None:
                MASTER_ADDR.
            store_port: Its port; None: MASTER_PORT.
            lighthouse_addr: ``host:port`` or ``http://host:port`` of a lighthouse; None:
                TORCHFT_LIGHTHOUSE. Not needed in a run, whose leader is the lighthouse.
            replica_id: The group's name, for logs; it is made unique.
            port: Not used: there is no server in this process.
            hostname: Not used: addresses are found by the interface.
            heartbeat_interval: Not used: connections and heartbeats are the server's.
            checkpoint_transport: Moves states; None: an `HTTPTransport`.
            init_sync: Take the parameters of one group at step 0. With False all groups must have
                initialised them alike.
            max_retries: Number of steps in a row that may fail to commit; None: any number.
            quorum_retries: Number of further attempts at a quorum that did not come in time.
            check_every: Number of steps between two comparisons of all groups' states, bit by bit,
                at least 1 and the same on all groups; None: never. What differs is logged with
                replica, host, rank, step and tensor (`state_check`).
            check_state: Returns what is compared, such as ``dict(model.named_parameters())``:
                tensors that are equal on all groups after the same steps; None: the whole state.
                Running means of batch norm and the states of random generators are not equal.
            heal_corrupted: Let a group heal whose state differs from that of most others: it does
                not commit that step. With two groups neither does, as it is unknown which is right.
            catch_up_bytes: The smallest state, in bytes of one worker, that a newcomer takes over
                beside the training, over several steps, for which the others do not wait; None:
                none.
                Needs an `OptimizerWrapper` and the default transport, on all groups. Until it has
                the state, a newcomer computes without meaning, so its losses are not to be read.

        Raises:
            ConfigError: There is no lighthouse, the group's place is unknown, or an argument is out
                of range.
            ManagerServerLostError: The group's server does not answer.

        The environment takes precedence for TORCHFT_TIMEOUT_SEC, TORCHFT_QUORUM_TIMEOUT_SEC,
        TORCHFT_CONNECT_TIMEOUT_SEC and TORCHFT_QUORUM_RETRIES.
        """
        del port, hostname, heartbeat_interval
        if check_every is not None and check_every < 1:
            raise ConfigError("check_every", check_every, "give a number of steps, or None")

        def seconds(name: str, given: timedelta) -> float:
            return float(os.environ.get(f"TORCHFT_{name}_SEC") or given.total_seconds())

        connect_s = seconds("CONNECT_TIMEOUT", connect_timeout)
        self._limits = quorum_client.Limits(
            timeout_s=seconds("TIMEOUT", timeout),
            quorum_timeout_s=seconds("QUORUM_TIMEOUT", quorum_timeout),
            quorum_retries=int(os.environ.get("TORCHFT_QUORUM_RETRIES", quorum_retries)),
            min_replicas=min_replica_size,
        )
        self._pg = pg
        self._use_async_quorum = use_async_quorum
        is_fixed = world_size_mode is WorldSizeMode.FIXED_WITH_SPARES
        self._max_participants = min_replica_size if is_fixed else None
        self._max_retries = max_retries
        self._check_every, self._check_state = check_every, check_state
        self._heal_corrupted = heal_corrupted
        self._progress = CommittedProgress.initial(init_sync=init_sync)
        self._step = StepState(is_over=True, is_started=False)
        self._loads: dict[str, Callable[[Any], None]] = {}
        self._saves: dict[str, Callable[[], Any]] = {}
        self._reading = threading.Lock()
        """Held while peers may not read the state, and by the thread that reads it for them."""
        self._may_read = True
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._place = resolve_place(rank, world_size, store_addr, store_port)
        self._server = find_server(
            self._place,
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            connect_timeout_s=connect_s,
        )
        self._transport = checkpoint_transport or HTTPTransport(
            timedelta(seconds=self._limits.timeout_s)
        )
        if getattr(self._transport, "state_dict", None) is None:
            self._transport.state_dict = self._manager_state_dict
        self._client = ManagerClient(
            self._server.path,
            self._place.rank,
            self._place.world_size,
            on_abort=lambda quorum_id, reason: self._quorum.on_abort(quorum_id, reason),
            timeout_s=connect_s,
        )
        self._quorum = quorum_client.QuorumClient(
            self._client, pg, self._transport, self._peer_state, self._limits, self._place
        )
        self._catch_up_bytes = catch_up_bytes
        self._catch_up: CatchUp | None = None
        """This replica catches up with the others."""
        self._optimizers: list[torch.optim.Optimizer] = []
        self._save_agreement: SaveAgreement | None = None
        checkpoint_trigger.set_checkpoint_policy(self._should_checkpoint)

    # ---- a step: quorum, collectives, commit ----------------------------------------------

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Start a step, before its forward pass; `OptimizerWrapper.zero_grad` calls it.

        With ``use_async_quorum`` it returns at once, except at step 0: a replica without any
        committed state has no use for a forward pass before it has the parameters.

        Args:
            allow_heal: Let members that are behind fetch the state; the same on all replicas.
            shrink_only: Let no group join now.
            timeout: For the quorum, outside of a run; None: the Manager's ``quorum_timeout``.

        Raises:
            TimeoutError: There was no quorum in time (in sync mode; else `wait_quorum` raises it).
            LeftQuorumError: As `wait_quorum`.
        """
        last = self._step
        self._close_step(last)
        step = self._step = last.next_step(allow_heal=allow_heal, shrink_only=shrink_only)
        is_behind = step.quorum is not None and not (step.all_current or step.quorum.catch_up)
        must_heal = allow_heal and is_behind
        if self._client.start_step(last_failed=step.needs_quorum or must_heal):
            seconds = self._limits.quorum_timeout_s if timeout is None else timeout.total_seconds()
            progress = self._progress
            waits = not self._use_async_quorum or (allow_heal and self._progress.step == 0)
            if not waits:  # in a forward pass FSDP's modules have other parameters
                step.kept_state = self._keep_state()
            step.can_catch_up = allow_heal and self._can_catch_up(step.kept_state)
            enter = quorum_client.run_at_once if waits else run_in_background
            step.entering = enter(lambda: self._enter_quorum(step, progress, seconds))
            if waits:
                self.wait_quorum()
                self._apply_healed(step)
        elif step.quorum is not None:
            step.participation = find_participation(
                step.quorum, self._max_participants, all_current=step.all_current
            )
            reason = self._client.steps.abort_reason
            if self._place.world_size > 1 and reason is not None:
                step.fail(RuntimeError(f"the quorum is aborted: {reason}"))
            if allow_heal and step.quorum.catch_up:
                self._start_part(step, step.quorum)

    def begin_step(self) -> None:
        """Call `start_quorum`, unless a step has been started and nothing was done in it yet."""
        if not self._step.is_fresh:
            self.start_quorum()

    def wait_quorum(self) -> None:
        """Wait until the quorum is known and its process group is formed.

        Raises:
            RuntimeError: `start_quorum` has not been called.
            TimeoutError: There was no quorum in time; it names what was waited for.
            LeftQuorumError: This group has left, as announced. In a run nothing is raised: the
                worker waits to be stopped.
            ManagerServerLostError: The group's server has ended; start the worker again.
        """
        if not self._step.is_started:
            raise RuntimeError("call start_quorum before wait_quorum")
        if self._step.entering is not None:
            self._step.entering.result()
            self._step.entering = None

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor over all replica groups, in place.

        It is over the participants; other members add nothing. An error is recorded, never
        raised; after the first one this does nothing, and the tensor's content is undefined.

        Args:
            tensor: The same shape and type on all groups.
            should_quantize: Whether to send 8-bit integers (`block_int8`): each value is off by at
                most 1/254 of the largest in its block of 256, on each group. For means and sums of
                floating-point numbers over 2 to 7 groups; others are exact.
            reduce_op: AVG (floating point only), or another that the process group has.

        Returns:
            A Work whose future holds the tensor; neither raises errors of the collective.

        Raises:
            ValueError: The mean of integers was requested.
            RuntimeError, TimeoutError, LeftQuorumError: As `wait_quorum`.
        """
        is_mean = reduce_op == ReduceOp.AVG
        if is_mean and not torch.is_floating_point(tensor):
            raise ValueError(f"the mean of {tensor.dtype} is not defined: use ReduceOp.SUM")
        if self._step.error is not None:
            return DummyWork(tensor)
        self.wait_quorum()
        step = self._step
        may_retry = step.is_fresh and not step.is_participation_known
        is_aborted = self._client.steps.abort_reason is not None
        if may_retry and is_aborted and self._place.world_size == 1:
            # it was aborted before this step did anything
            timeout_s = self._limits.quorum_timeout_s
            self._enter_quorum(step, self._progress, timeout_s, is_late=True)
        if step.error is not None:
            return DummyWork(tensor)
        if step.participation.rank is None:
            fill_neutral(tensor, reduce_op)
        try:
            is_sum = torch.is_floating_point(tensor) and (is_mean or reduce_op == ReduceOp.SUM)
            if should_quantize and is_sum and 2 <= self._pg.size() <= MAX_QUANTIZED:
                work = ManagedWork.of(sum_quantized(self._pg, tensor))
            else:
                op = ReduceOp.SUM if is_mean else reduce_op
                work = ManagedWork.of(state_check.start_allreduce(self._pg, tensor, op))
        except Exception as e:
            self._fail_step(step, e)
            return DummyWork(tensor)
        divisor = step.participation.size if is_mean else 1
        step.works.append(work.manage(tensor, divisor, lambda e: self._fail_step(step, e)))
        step.used_device |= tensor.device.type != "cpu"
        return work

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return whether to step the optimizer; call it once a step, on all ranks of the group.

        All ranks of a group get the same answer; other groups may get another, and a group that
        has missed the step heals in the next one. A state that came in this step is applied first.
        Before the first `start_quorum` the answer is no.

        Args:
            timeout: For the answers of the other ranks; None: the Manager's.

        Raises:
            RuntimeError: More than ``max_retries`` steps in a row were not committed.
            TimeoutError, LeftQuorumError: As `wait_quorum`.
        """
        step = self._step
        if step.is_started:
            self.wait_quorum()
        step.wait_for_works()
        self._end_part(step)
        quorum_client.synchronize_device()
        group_error = self._pg.errored()
        # A quorum that was aborted after all collectives of the step costs nothing. But it is
        # certain that they are done only on the CPU, and if no wrapper swallows their errors.
        swallows = isinstance(self._pg, ErrorSwallowingProcessGroupWrapper)
        is_done = not step.used_device and not swallows
        costs_nothing = is_done and self._client.steps.abort_reason is not None
        if group_error is not None and not costs_nothing:
            self._fail_step(step, group_error)
        self._apply_healed(step)
        self._compare_state(step)
        is_too_small = step.participation.size < self._limits.min_replicas
        commit = step.error is None and not is_too_small
        if self._place.world_size > 1 and step.is_started:
            seconds = self._limits.timeout_s if timeout is None else timeout.total_seconds()
            commit = self._client.vote(commit, seconds)
        self._transport.disallow_checkpoint()
        if commit:
            for call in step.at_commit:
                call()
            step.is_over = True
            self._progress = self._progress.after_step(
                self._client.steps.quorum_id, step.participation.size
            )
            step.commit_failures = 0
            step.all_current |= step.allow_heal and not (step.quorum and step.quorum.catch_up)
            return True
        reason = "another rank of the group could not commit"
        if is_too_small:
            reason = "too few participants"
        elif step.error is not None:
            reason = str(step.error)
        self._abandon_step(step, reason)
        step.commit_failures += 1
        if self._max_retries is not None and step.commit_failures > self._max_retries:
            raise RuntimeError(
                f"{step.commit_failures} steps in a row were not committed, exceeding "
                f"max_retries={self._max_retries}; the last one: {step.error}"
            )
        return False

    def call_at_commit(self, call: Callable[[], None]) -> None:
        """Call something in `should_commit` if this step is committed, before that returns."""
        self._step.at_commit.append(call)

    def report_error(self, e: Exception) -> None:
        """Record an error of this step: it is not committed, here or in other groups.

        Args:
            e: The error. All members of the quorum are notified at once.
        """
        self._fail_step(self._step, e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step; None if there is none so far."""
        return self._step.error

    def wrap_future(
        self, fut: Future[T], default: T, timeout: timedelta | None = None
    ) -> Future[T]:
        """Return a future that holds a default if the other fails; the error is then recorded.

        Args:
            fut: The one to follow.
            default: Its value after an error, or when it takes too long.
            timeout: None: the Manager's.
        """
        step = self._step
        limit = timedelta(seconds=self._limits.timeout_s) if timeout is None else timeout
        return swallow_errors(fut, default, limit, lambda e: self._fail_step(step, e))

    # ---- queries --------------------------------------------------------------------------

    def current_step(self) -> int:
        """Return the number of committed steps; of a healed state, as soon as it has come."""
        return self._newest.step

    def batches_committed(self) -> int:
        """Return the contributions to all committed steps: 2 steps of 5 replicas are 10."""
        return self._newest.batches_committed

    def participating_rank(self) -> int | None:
        """Return this group's rank among the participants, the same on all its ranks.

        Waits for the quorum.

        Returns:
            None if it adds zero to this step, since it heals or is a spare; or without a quorum.
        """
        return self._known_participation().rank

    def num_participants(self) -> int:
        """Return the number of participating groups; 0 before the first `start_quorum`.

        Waits for the quorum.
        """
        return self._known_participation().size

    def is_participating(self) -> bool:
        """Return whether this group participates in this step, as far as is known now."""
        return self._step.participation.rank is not None

    def quorum_id(self) -> int:
        """Return the id of the last quorum entered; -1 before the first."""
        return self._client.steps.quorum_id

    def group_rank(self) -> int:
        """Return this worker's rank in its replica group."""
        return self._place.rank

    def group_world_size(self) -> int:
        """Return the number of workers of its replica group."""
        return self._place.world_size

    def replica_id(self) -> str:
        """Return this group's name among its peers."""
        return self._client.replica_id

    # ---- state ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return the Manager's part of a checkpoint: step and batches_committed."""
        newest = self._newest
        return {"step": newest.step, "batches_committed": newest.batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a checkpoint; all groups that load one must load the same.

        Args:
            state_dict: The value of `state_dict` when the parameters were saved.
        """
        self._progress = CommittedProgress.loaded(
            state_dict["step"], state_dict["batches_committed"]
        )

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Add a part to the state with which a replica heals.

        Args:
            key: Its name, the same on all replicas.
            load_state_dict: Loads the part of a peer; called on the main thread, in
                `start_quorum` or `should_commit`.
            state_dict: Returns it; may return live tensors. Called in `start_quorum`, on the main
                thread if that does not wait for the quorum, and in `allow_state_dict_read`.

        Raises:
            ValueError: The key is taken.
        """
        if key in self._loads:
            raise ValueError(f"key={key!r}: a state of that key is registered already")
        self._loads[key], self._saves[key] = load_state_dict, state_dict

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer whose steps change the state; `OptimizerWrapper` calls it.

        A replica can only catch up beside the training if all of them are known.
        """
        self._optimizers.append(optimizer)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Register a state without a key; prefer `register_state_dict_fn`."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Keep peers from reading the state until `allow_state_dict_read`: it is about to change.

        Returns once no peer reads it. Between `should_commit` and the next `start_quorum` no peer
        does, so this is needed for changes within a step only.
        """
        if self._may_read:
            self._may_read = False
            self._reading.acquire()
        self._transport.disallow_checkpoint()

    def allow_state_dict_read(self) -> None:
        """Let peers read the state again."""
        if not self._may_read:
            self._may_read = True
            step = self._step
            if step.kept_state and step.entering and not step.entering.done():
                step.kept_state = self._keep_state()
            self._reading.release()

    def heal_from_one_source(self) -> None:
        """Fetch a state from one peer alone; for algorithms whose replicas differ at a step.

        `LocalSGD` and `DiLoCo` call it: between two averages each replica has a state of its own,
        and the pieces of several make no model. Call it on all groups before the first quorum.

        Raises:
            ConfigError: The Manager is to compare states, and these differ.
        """
        if self._check_every is not None:
            remedy = "replicas differ between two averages: leave it out with LocalSGD and DiLoCo"
            raise ConfigError("check_every", self._check_every, remedy)
        self._quorum.one_source = True

    def shutdown(self, wait: bool = True) -> None:
        """Leave the quorum on purpose, and release everything.

        Args:
            wait: Whether to return only after the transport's threads have ended.
        """
        checkpoint_trigger.drop_checkpoint_policy(self._should_checkpoint)
        self._client.close(is_step_over=self._step.is_over)
        self._transport.shutdown(wait=wait)
        self._pg.shutdown()
        self._server.wait(is_last=self._place.world_size == 1)

    def _manager_state_dict(self) -> dict[str, Any]:
        """Return the state in the form in which peers send it (torchft's private name)."""
        return self._peer_state(self._progress)

    def _peer_state(self, progress: CommittedProgress) -> dict[str, Any]:
        """Return the live tensors of all parts, and their progress (on the quorum's thread).

        The parts are those of the last step boundary, whatever the main thread does. Raises
        TimeoutError if reading has been disallowed for longer than the Manager's time-out, and
        UnusableStateError if no state is registered.
        """
        self._require_state()
        timeout_s = self._limits.timeout_s
        if not self._reading.acquire(timeout=timeout_s):
            raise TimeoutError(
                f"a peer needs the state, and reading it has been disallowed for "
                f"{timeout_s:g} s: call allow_state_dict_read"
            )
        try:
            kept = self._step.kept_state
            user = self._read_parts() if kept is None else kept.result()
        finally:
            self._reading.release()
        return {"user": user, "torchft": asdict(progress)}

    def _keep_state(self) -> concurrent.futures.Future[dict[str, Any]]:
        """Return the parts of the state as they are now, or the error of one, for later.

        Large tensors, such as parameters, change only after `should_commit`. Small ones, such as
        running means, may change in the forward pass: they are copied.
        """
        kept: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        try:
            kept.set_result(copy_small_tensors(self._read_parts(), {}))
        except Exception as e:  # it matters only if a peer needs the state
            kept.set_exception(e)
        return kept

    def _read_parts(self) -> dict[str, Any]:
        parts = {}
        for key, save in self._saves.items():
            try:
                parts[key] = save()
            except Exception as e:
                text = f"state_dict of {key!r} has raised {type(e).__name__}: {e}"
                raise UnusableStateError(text) from e
        return parts

    def _require_state(self) -> None:
        if not self._loads:
            raise UnusableStateError(
                "a replica has to heal, but there is no state to send or to load: give the "
                "Manager load_state_dict and state_dict, or call register_state_dict_fn"
            )

    # ---- parts of a step ------------------------------------------------------------------

    @property
    def _newest(self) -> CommittedProgress:
        healed = self._step.healed
        return self._progress if healed is None else healed.progress

    def _known_participation(self) -> Participation:
        """Wait for the quorum; record that the script may choose its samples by the result."""
        if self._step.is_started:
            self.wait_quorum()
            self._step.is_participation_known = True
        return self._step.participation

    def _enter_quorum(
        self,
        step: StepState,
        progress: CommittedProgress,
        timeout_s: float,
        *,
        is_late: bool = False,
    ) -> None:
        """Enter a quorum for a step (``is_late``: its forward pass is over)."""
        try:
            entered = self._quorum.enter_quorum(
                progress,
                timeout_s,
                commit_failures=step.commit_failures,
                allow_heal=step.allow_heal,
                shrink_only=step.shrink_only,
                catch_up=step.can_catch_up,
            )
        except quorum_client.CheckpointBeforeLeaveError as e:
            _log.warning("%s", e)
            step.participation = Participation(rank=0, size=1)
            step.fail(e)
            return
        quorum = step.quorum = entered.result
        heals_beside = quorum.catch_up or (self._use_async_quorum and quorum.max_step > 0)
        heals_first = step.allow_heal and not heals_beside
        step.participation = find_participation(
            quorum, self._max_participants, all_current=heals_first
        )
        step.all_current = quorum.cohort_size == quorum.replica_world_size
        step.needs_quorum = False
        step.healed = entered.healed
        if not (quorum.heals and quorum.catch_up):
            self._catch_up = None
        if entered.error is not None:
            step.fail(entered.error)
        elif quorum.heals and quorum.catch_up:
            self._begin_catch_up(quorum)
        elif quorum.heals and heals_first and is_late:
            self._fail_step(step, RuntimeError("the state came after the forward pass"))
        elif not quorum.heals:
            self._progress = replace(self._progress, state_version=quorum.state_version)

    def _fail_step(self, step: StepState, error: Exception) -> None:
        """Record an error of a step, on any thread, and notify the other members."""
        if step.fail(error):
            _log.info("step %d failed: %s", self._newest.step, error)
            if step is self._step and step.entering is None:
                reason = f"a member has an error: {error}"
                self._quorum.report_abort(self._client.steps.quorum_id, reason)

    def _apply_healed(self, step: StepState) -> None:
        healed = step.healed
        if healed is None:
            return
        self._require_state()
        if missing := sorted(self._loads.keys() - healed.user.keys()):
            text = f"the peer's state has no {missing}: register the same keys on all"
            raise UnusableStateError(text)
        with SkipCopiesOntoItself() if self._catch_up else contextlib.nullcontext():
            for key, load in self._loads.items():
                load(healed.user[key])
        step.healed, self._progress = None, healed.progress
        _log.info("healed: now at step %d", healed.progress.step)

    # ---- catching up beside the training ---------------------------------------------------

    def _can_catch_up(self, kept: concurrent.futures.Future[dict[str, Any]] | None) -> bool:
        """Return whether the state can be given in parts, and is large enough for it."""
        is_able = isinstance(self._transport, HTTPTransport) and not self._quorum.one_source
        if self._catch_up_bytes is None or not is_able or not self._optimizers:
            return False
        kept = kept or self._keep_state()
        if kept.exception() is not None:
            return False
        return sum(t.nbytes for _, t in find_tensors(kept.result())) >= self._catch_up_bytes

    def _begin_catch_up(self, quorum: QuorumResult) -> None:
        """Take the progress of the others, unless what has come so far is of it already."""
        newest, own = (quorum.max_step, quorum.state_version), self._progress
        if self._catch_up is None or (own.step, own.state_version) != newest:
            timeout = timedelta(seconds=self._limits.timeout_s)
            transport = cast(HTTPTransport[Any], self._transport)
            self._catch_up = CatchUp(transport, self._optimizers, timeout)
            self._progress = replace(own, step=newest[0], state_version=newest[1])

    def _start_part(self, step: StepState, quorum: QuorumResult) -> None:
        """Begin to fetch a part of the state, or to offer it to those that catch up."""
        progress = self._progress
        transport = cast(HTTPTransport[Any], self._transport)
        timeout = timedelta(seconds=self._limits.timeout_s)
        if self._catch_up is not None:
            if not self._catch_up.is_complete:
                own = {"user": self._read_parts(), "torchft": asdict(progress)}
                sources = [source.metadata for source in quorum.sources]
                self._catch_up.start_step(sources, progress, lambda: own)
        elif quorum.source_of:
            step.kept_state = self._keep_state()

            def offer() -> None:
                try:
                    transport.offer_parts(progress.step, self._peer_state(progress), timeout)
                except Exception as e:
                    _log.error("replicas %s cannot catch up: %s", quorum.source_of, e)
                    reason = f"{type(e).__name__}: {e}"
                    transport.refuse_checkpoint([], progress.step, reason, timeout)

            step.offering = run_in_background(offer)

    def _end_part(self, step: StepState) -> None:
        """End a part's transfer, so that nothing writes into the state; take what to load."""
        if step.offering is not None:
            concurrent.futures.wait([step.offering])
            step.offering = None
        catch_up = self._catch_up
        if catch_up is None:
            return
        try:
            state = catch_up.end_step()
        except Exception as e:
            _log.warning("this replica heals while the others wait, as it cannot catch up: %r", e)
            self._catch_up, self._catch_up_bytes = None, None
            self._client.request_switch()
            return
        if state is not None:
            step.healed = HealedState(state["user"], CommittedProgress(**state["torchft"]))
        if catch_up.is_complete:
            self._quorum.is_damaged = False
            self._client.request_switch()

    def _compare_state(self, step: StepState) -> None:
        """Compare the state with the other groups', if that is due; record what differs."""
        quorum, every = step.quorum, self._check_every
        if every is None or quorum is None or quorum.replica_world_size == 1 or step.error:
            return
        number = quorum.max_step + self._client.steps.quorum_step  # the same on all members
        if quorum.catch_up or number % every:
            return
        place = quorum.replica_rank, quorum.replica_world_size
        own = f"{self.replica_id()} (host {socket.gethostname()}, rank {self._place.rank})"

        def log(found: state_check.Mismatch) -> None:
            _log.error("step %d: %s", number, found)

        try:
            state = StateDigest.of((self._check_state or self._read_parts)())
            on_device = step.used_device
            found = state_check.compare(self._pg, place, state, own, log, on_device=on_device)
        except Exception as e:
            self._fail_step(step, e)
            return
        if found is None or quorum.replica_rank not in found.suspects:
            return
        heals = self._heal_corrupted and found.is_certain
        self._client.report_event(StateMismatch(number, own, found.listed, heals))
        if heals:
            self._progress = replace(self._progress, state_version=random_version())
            self._fail_step(step, CorruptedStateError(str(found)))

    def _abandon_step(self, step: StepState, reason: str) -> None:
        """Let the next step start with a new quorum, here and on all other members."""
        step.is_over = step.needs_quorum = True
        self._quorum.report_abort(
            self._client.steps.quorum_id, f"a member did not commit a step: {reason}"
        )
        step.wait_for_works()

    def _close_step(self, step: StepState) -> None:
        """End all work of a step, and apply a state that came in it."""
        if step.entering is not None:
            if (error := step.entering.exception()) is not None:
                _log.warning("the quorum of the last step could not be entered: %s", error)
            step.entering = None
        self._end_part(step)
        if not step.is_over and not step.is_fresh:
            self._abandon_step(step, "a step was started and not committed")
        self._apply_healed(step)

    def _should_checkpoint(self, step: int, by_step: bool, by_time: bool) -> bool:
        """Return whether to save after this step, for `should_checkpoint`.

        One group saves for all, since all have the same parameters: the first of the participants.
        It saves when that is due, and in the last step before all leave; that save is urgent, since
        a group that has left can commit nothing. All ranks of the group answer the same; if a save
        is due ``by_time``, the clock of rank 0 counts, and the save is one step later.
        """
        if self._step.agreed_to_save is None:
            is_last = self._client.settle_next_step()
            is_saver = self._step.participation.rank == 0
            reporting.save_is_last(is_saver and is_last)
            by_group = is_last
            if is_saver and self._place.world_size > 1:
                if self._save_agreement is None:
                    store = self._place.connect_store(self._limits.timeout_s)
                    self._save_agreement = SaveAgreement(store, is_first=self._place.rank == 0)
                by_group = self._save_agreement.should_save(due=by_time) or is_last
            self._step.agreed_to_save = is_saver, by_group
        is_saver, by_group = self._step.agreed_to_save
        return is_saver and (by_step or by_group or (by_time and self._place.world_size == 1))


def fill_neutral(tensor: torch.Tensor, reduce_op: ReduceOp | ReduceOp.RedOpType) -> None:
    """Fill a tensor with what changes no result of an operation."""
    if reduce_op == ReduceOp.PRODUCT:
        tensor.fill_(1)
    elif reduce_op == ReduceOp.BAND:
        tensor.zero_().bitwise_not_()
    elif reduce_op in (ReduceOp.MAX, ReduceOp.MIN):
        if tensor.dtype == torch.bool:
            least, most = 0.0, 1.0
        elif torch.is_floating_point(tensor):
            least, most = -math.inf, math.inf
        else:
            least, most = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
        tensor.fill_(least if reduce_op == ReduceOp.MAX else most)
    else:
        tensor.zero_()


@dataclass(frozen=True)
class Participation:
    """One member's part in the mean of a step; its rank is None if it adds zero."""

    rank: int | None
    size: int


def find_participation(
    quorum: QuorumResult, max_participants: int | None, *, all_current: bool
) -> Participation:
    """Return a member's part; the size is the same on all members.

    Only members with the newest state participate. In the first step of a quorum, a member that
    heals computes with old parameters and adds zero. From the next step on all participate, and
    also in the first if healing ends before the forward pass (``all_current``): in sync mode, and
    at step 0, where no state is worth a forward pass.
    """
    rank, size = quorum.cohort_rank, quorum.cohort_size
    if all_current:
        rank, size = quorum.replica_rank, quorum.replica_world_size
    if max_participants is None:
        return Participation(rank, size)
    is_spare = rank is None or rank >= max_participants
    return Participation(None if is_spare else rank, min(size, max_participants))


@dataclass(eq=False)
class StepState:
    """State of one step, from `Manager.start_quorum` to `Manager.should_commit`.

    Attributes:
        is_started: False only before the first step.
        kept_state: The parts of the state at the beginning of the step, for peers, if the quorum is
            entered beside the forward pass.
        can_catch_up: The state may be given or taken in parts.
        is_participation_known: The script has read it, and may have chosen its samples by it.
        healed: A state that came in this step, and is not applied yet.
        used_device: One of the collectives was on an accelerator.
        needs_quorum: The next step needs a new quorum, since this one was abandoned.
        agreed_to_save: Whether this group saves for all, and whether all its ranks do so at the end
            of this step; None before the script asks.
    """

    allow_heal: bool = True
    shrink_only: bool = False
    is_started: bool = True
    entering: concurrent.futures.Future[None] | None = None
    kept_state: concurrent.futures.Future[dict[str, Any]] | None = None
    can_catch_up: bool = False
    offering: concurrent.futures.Future[None] | None = None
    quorum: QuorumResult | None = None
    all_current: bool = False
    participation: Participation = Participation(None, 0)
    is_participation_known: bool = False
    healed: HealedState | None = None
    works: list[ManagedWork] = field(default_factory=list)
    at_commit: list[Callable[[], None]] = field(default_factory=list)
    used_device: bool = False
    error: ExceptionWithTraceback | None = None
    is_over: bool = False
    needs_quorum: bool = False
    commit_failures: int = 0
    agreed_to_save: tuple[bool, bool] | None = None

    def next_step(self, *, allow_heal: bool, shrink_only: bool) -> StepState:
        """Return the state of the next step, which starts in the same quorum."""
        return StepState(
            allow_heal,
            shrink_only,
            quorum=self.quorum,
            all_current=self.all_current,
            participation=self.participation,
            needs_quorum=self.needs_quorum,
            commit_failures=self.commit_failures,
        )

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been done in it yet."""
        return not (self.is_over or self.works or self.error)

    def fail(self, error: Exception) -> bool:
        """Record an error; return whether it is the first."""
        if self.error is not None:
            return False
        self.error = ExceptionWithTraceback(error)
        return True

    def wait_for_works(self) -> None:
        """Wait for all collectives; their errors are recorded."""
        for work in self.works:
            work.wait()


def copy_small_tensors(tree: Any, copies: dict[object, torch.Tensor]) -> Any:
    """Return a state with copies of its small tensors; ``copies`` keeps tied tensors tied."""
    if isinstance(tree, dict):
        same_kind = copy.copy(tree)
        for key, value in tree.items():  # a Counter's `update` adds
            same_kind[key] = copy_small_tensors(value, copies)
        return same_kind
    if type(tree) in (list, tuple):
        return type(tree)(copy_small_tensors(v, copies) for v in tree)
    if type(tree) is not torch.Tensor or tree.layout != torch.strided or tree.is_meta:
        return tree
    if not tree.numel() or tree.nbytes > SMALL_BYTES:
        return tree
    memory = tree.data_ptr(), tree.dtype, tree.shape, tree.stride(), tree.device
    if memory not in copies:
        copies[memory] = tree.detach().clone()
    return copies[memory]


class SaveAgreement:
    """The same answer on all ranks of a group; each rank calls it once a step.

    Rank 0 announces the next step in the group's store, before any rank can have the decision on
    that step. Each rank reads the store once a step.
    """

    def __init__(self, store: Store, *, is_first: bool) -> None:
        self._store = store
        self._is_first = is_first
        self._num_asked = self._announced = 0
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"hpc_elastic/ft/save/{restarts}"

    def should_save(self, *, due: bool) -> bool:
        """Return whether to save after this step; only rank 0's ``due``, by its clock, counts."""
        self._num_asked += 1
        yes = bool(self._store.check([f"{self._prefix}/{self._num_asked}"]))
        if self._is_first and due and not yes and self._announced <= self._num_asked:
            if self._announced:  # all ranks have read it
                self._store.delete_key(f"{self._prefix}/{self._announced}")
            self._announced = self._num_asked + 1
            self._store.add(f"{self._prefix}/{self._announced}", 1)  # returns once it is stored
        return yes
