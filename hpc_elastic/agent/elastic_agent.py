"""The agent of one node, which supervises its workers; the run's leader decides on restarts.

It is torch's elastic agent in what a worker sees: its environment, its process group, its signals.
torch's agent counts restarts for itself, on each node, and takes a collective that broke because a
peer died for a failure of its own worker. Here an agent reports what happened and waits for the
leader, which sees all nodes: it starts another round, or ends the run. Nothing here imports torch.

While this node is under notice (`hpc_elastic.agent.preemption`) its workers go on, until the leader
stops the round at a checkpoint or there is no sense in waiting. Once they are stopped, nothing that
they have started lives on (`hpc_elastic.agent.worker_process`).

Source of the environment: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_elastic._util import PASSING
from hpc_elastic.agent import hang_watch, preemption, worker_process
from hpc_elastic.agent.metrics import WorkerObserver, apart_workers
from hpc_elastic.agent.output_files import LogRetention, OutputTimes
from hpc_elastic.agent.signals import (
    KILL_WAIT_S,
    STOP,
    SignalError,
    adopt_orphans,
    name_of,
    raise_signals,
)
from hpc_elastic.agent.stacks import process_state, stacks_file, take_stacks
from hpc_elastic.agent.task import Task, worker_command
from hpc_elastic.agent.warm_workers import WarmWorkerPool, is_training
from hpc_elastic.agent.worker_channel import WorkerChannel
from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles, WorkerProcess
from hpc_elastic.checkpoint.node_memory import AgentFolder
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.data.batch import THROUGHPUTS_VARIABLE
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft.manager_server import STORE_KEY
from hpc_elastic.ft.messages import SOCKET_ENV, HealFailed, StateMismatch
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.messages import Failed, Finished, PreemptionNotice, RoundInfo
from hpc_elastic.rendezvous.replica_state import results_of
from hpc_elastic.rendezvous.round_stores import CONNECT_S, RoundStores
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.rendezvous.task_recovery import longest_join_s
from hpc_elastic.run import fencing
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.environment import as_worker, of_slot
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.worker.shared_page import (
    RESULTS_VARIABLE,
    ROUND_VARIABLE,
    SharedPage,
    WorkerStatus,
)

_log = logging.getLogger(__name__)

_WARM_UP_AFTER_S = 10.0
"""Spares are started after the workers' first step, or after this long where none is reported."""
_FIRST_RANK = 0
_LOOK_UP_S = 0.5
_NOTICE_MAY_COME_S = 1.0
"""Slurm signals the processes of a task one after another: a worker may end before its agent has
the signal."""
_LOOK_FOR_NOTICE_S = 0.05
_SLOW_EXIT_S = 10.0  # a process that has not ended this long after the success of its run is named
_LEAVES_IN_S = 5.0
_START_PAUSE_S, _LONGEST_START_PAUSE_S = 1.0, 30.0
_START_WITHIN_S = 300.0
"""A node that cannot start its workers for so long reports that as their failure."""
_REAP_EVERY_S = 2.0
_IMPORT_S = 20.0  # a node that comes late joins after that, even if its warm workers still import


@dataclass(frozen=True)
class AgentContext:
    """What an agent works with."""

    task: Task
    place: NodeIdentity
    nproc: int  # number of workers
    stores: RoundStores
    control: AgentFolder  # of the control pages, in memory
    settings: AgentSettings
    notices: preemption.PreemptionState
    events: EventLog
    is_command: bool  # the workers run a command, which succeeds by its exit code
    replica: Replica | None  # the node's, where its workers are one (``ft=true``)
    times: OutputTimes
    observer: WorkerObserver


@dataclass
class _RefusedStart:
    """A start of workers that the system refused: the first of a round, and the next one."""

    error: OSError
    since: float
    pause_s: float = _START_PAUSE_S
    again_at: float = 0.0


class ElasticAgent:
    """The agent of one node of a run."""

    def __init__(
        self, session: Session, context: AgentContext, warm_workers: WarmWorkerPool
    ) -> None:
        self._retention = LogRetention(context.place.logs, context.task.attempt)
        self._session = session
        self._agent_context = context
        self._placed: RoundInfo | None = None  # the last round with a place here
        self._server: tuple[str, int] | None = None  # of this node's replica, on another node
        self._processes: list[WorkerProcess] = []  # by local rank
        self._channel: WorkerChannel | None = None
        self._drain: preemption.DrainController | None = None
        self._saves = CheckpointFailureLog(context.events.write_behind)
        self._hangs: hang_watch.HangWatch | None = None
        self._training: TrainingWatch | None = None
        self._exits: ExitWatch | None = None  # from the success of the run on
        self._awaits_leader = False
        self._refused: _RefusedStart | None = None
        self._reap_at = 0.0
        self._warm_workers = warm_workers
        self._filled = False
        self._has_begun = True  # whether the event of the first step in the round is written
        self._longest_start_s: float | None = None  # to the first step
        self._started_at = self._started_time = 0.0
        """When the workers were started, in monotonic and in Unix seconds."""
        self.pages: dict[int, SharedPage] = {}  # by global rank

    def run(self) -> None:
        """Run the workers of this node until the run has ended, or the node is left.

        No warm worker outlives the call, nor anything that a worker has started. Raises SignalError
        if a signal has ended this agent; HpcElasticError, which names what is missing, if no round
        closed in time.
        """
        adopt_orphans()
        raise_signals()
        last = STOP
        try:
            while self._session.verdict is None and self._join_round():
                self._start_workers()
                while self._monitor_workers():
                    time.sleep(self._agent_context.settings.monitor_interval_s)
                self._stop_workers()
        except SignalError as e:
            last = e.signal
            raise
        finally:
            self._end_workers(last)
            self._warm_workers.close()
            worker_process.kill_strays()

    def _join_round(self) -> bool:
        """Wait for a place in a round; return False if there will be none for this node.

        Warm workers are started meanwhile, since nothing trains beside them. A node joins a group
        that trains once its imports are done: the group would be stopped for this node at once,
        and stand still until then.
        """
        session, context, self._refused = self._session, self._agent_context, None
        if session.departed is None:
            self._warm_workers.fill(paced=False)
            deadline = time.monotonic() + _IMPORT_S
            while (
                self._placed is None
                and context.notices.current is None
                and not (session.verdict or session.departed or session.requeued)
                and is_training(context.task.run.status)
                and time.monotonic() <= deadline
                and not self._warm_workers.await_imports(_LOOK_UP_S)
            ):
                pass
        launcher = context.task.spec.settings.launcher
        longest_s = longest_join_s(launcher.rendezvous.join_timeout_s, launcher.below_min_timeout_s)
        while True:
            store = ("", 0) if context.replica is None else context.stores.make()
            try:
                outcome = session.join(longest_s, store)
            except TimeoutError as e:
                raise HpcElasticError(str(e)) from e
            if not isinstance(outcome, RoundInfo):
                _log.info("no further round: %s", outcome)
                return False
            self._placed = outcome
            try:
                self._reach_store(outcome)
            except OSError as e:
                _log.warning("the store of round %d is gone: %s", outcome.number, e)
            else:
                return True

    def _reach_store(self, round_: RoundInfo) -> None:
        """Check that the host of a round's store lives, and find its replica's server there."""
        context, self._server = self._agent_context, None
        if context.replica is None or round_.group_rank == 0:
            socket.create_connection(round_.store, CONNECT_S).close()
        else:
            address, port = json.loads(context.stores.read(round_.store, STORE_KEY))
            self._server = str(address), int(port)

    @property
    def _round(self) -> RoundInfo:
        assert self._placed is not None
        return self._placed

    def _of_round(self) -> dict[str, int]:
        return {"attempt": self._agent_context.task.attempt, "round": self._round.number}

    def _start_workers(self) -> None:
        try:
            self._start_once()
        except OSError as e:
            # a run whose directory was removed ends within a minute, by its leader
            if e.errno not in PASSING | {errno.ENOENT}:
                raise
            now = time.monotonic()
            refused = self._refused = self._refused or _RefusedStart(e, now)
            refused.error, refused.again_at = e, now + refused.pause_s
            _log.error("workers not started, tried again in %g s: %s", refused.pause_s, e)
            refused.pause_s = min(2 * refused.pause_s, _LONGEST_START_PAUSE_S)
            self._processes, self.pages = [], {}
            worker_process.kill_strays(self._warm_workers.pids)  # those that were started
        else:
            self._refused = None

    def _start_again(self, refused: _RefusedStart) -> None:
        """Repeat a start that was refused; after a while, report that as the workers' failure."""
        now = time.monotonic()
        if self._awaits_leader or now < refused.again_at:
            return
        if self._agent_context.notices.current is not None:
            self._awaits_leader = True
            self._session.leave_now()
        elif now < refused.since + _START_WITHIN_S:
            self._start_workers()
        else:
            self._awaits_leader = True
            failure = worker_process.describe(1, self._files(self._round.first_rank))
            message = f"the workers of this node cannot be started: {refused.error}"
            exception = type(refused.error).__name__
            failure = replace(failure, message=message, exception=exception, exit_code=None)
            self._session.report(Failed([failure]))

    def _start_once(self) -> None:
        context, round_ = self._agent_context, self._round
        replica, notices = context.replica, context.notices
        self._retention.start_round(round_.number, round_.restarts, had_step=self._has_begun)
        self._awaits_leader = self._filled = self._has_begun = False
        context.control.restore()
        self.pages = {
            round_.first_rank + slot: SharedPage.create(context.control.path, slot)
            for slot in range(context.nproc)
        }
        self._started_at, self._started_time = time.monotonic(), time.time()
        pages = list(self.pages.values())
        self._channel = WorkerChannel(self._session, pages)
        self._saves.watch(self.pages.get(_FIRST_RANK))
        by_its_script = partial(
            preemption.why_leave_now,
            since=self._started_at,
            saves_itself=context.task.spec.settings.backend != "local",
        )
        why_leave = by_its_script if replica is None else replica.why_leave
        self._drain = preemption.DrainController(self._session, notices, pages, why_leave)
        outputs = [self._files(rank) for rank in self.pages]
        watched = [
            hang_watch.WatchedWorker(
                page, files, stacks_file(context.control.path, files.local_rank)
            )
            for page, files in zip(pages, outputs, strict=True)
        ]
        self._hangs = hang_watch.HangWatch(
            self._session, watched, context.settings, self._longest_start_s,
            alone=None if replica is None else (replica.me, context.events.write),
            gpus_fail=context.observer.gpus_fail,
        )  # fmt: skip
        world_size = None if replica is not None else round_.world_size
        self._training = TrainingWatch(world_size, context.place.host, context.events)
        context.observer.start_round(self.pages, self._pids, world_size)
        os.environ[ROUND_VARIABLE] = str(round_.number)
        os.environ[THROUGHPUTS_VARIABLE] = round_.throughputs
        os.environ[fencing.VARIABLE] = str(fencing.entry_path(context.task.run.rdzv, round_.index))
        if replica is not None:
            os.environ.update(replica.environment(round_))
            replica.expect_workers(round_, self._server)
        context.times.new_round(path for files in outputs for path in (files.out, files.err))
        command = worker_command(context.task)
        self._processes = [
            WorkerProcess(command, self._environment(files), files, self._warm_workers)
            for files in outputs
        ]

    def _environment(self, worker: WorkerFiles) -> dict[str, str]:
        context, round_ = self._agent_context, self._round
        spec = context.task.spec
        max_restarts = spec.settings.launcher.max_restarts
        numbers = {
            "RANK": worker.rank, "ROLE_RANK": worker.rank, "LOCAL_RANK": worker.local_rank,
            "GROUP_RANK": round_.group_rank, "GROUP_WORLD_SIZE": round_.group_size,
            "WORLD_SIZE": round_.world_size, "ROLE_WORLD_SIZE": round_.world_size,
            "LOCAL_WORLD_SIZE": context.nproc, "MASTER_PORT": round_.store[1],
            "TORCHELASTIC_RESTART_COUNT": min(round_.restarts, max_restarts),
            "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        }  # fmt: skip
        texts = {
            "ROLE_NAME": "default", "MASTER_ADDR": round_.store[0],
            "TORCHELASTIC_RUN_ID": spec.run_id,
            "TORCHELASTIC_ERROR_FILE": str(worker.error),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # a port of the workers' own might be taken
        }  # fmt: skip
        # made-up names of local nodes have no address
        is_local = spec.settings.backend == "local"
        hosts = ",".join(["localhost"] * round_.group_size) if is_local else round_.hosts
        env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **texts}
        env |= {name: str(number) for name, number in numbers.items()}
        return of_slot(as_worker(env, hosts, round_.workers), worker.local_rank, context.nproc)

    def _pids(self) -> dict[int, int]:
        return {process.local_rank: process.proc.pid for process in self._processes}

    def _end_workers(self, number: signal.Signals = STOP) -> None:
        for process in self._processes:
            process.send_signal(number)
        deadline = time.monotonic() + self._agent_context.settings.stop_timeout_s
        for process in self._processes:
            if not process.has_ended(deadline):
                _log.warning("process %d does not end by %s", process.proc.pid, number.name)
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.has_ended(time.monotonic() + KILL_WAIT_S)

    def _stop_workers(self) -> None:
        self._hangs = None
        self._saves.poll()
        self._report_before_stop()
        for process in self._processes:
            if process_state(process.proc.pid) == "T":  # by a signal: only SIGKILL ends it in time
                process.send_signal(signal.SIGKILL)
        self._end_workers()
        worker_process.kill_strays(self._warm_workers.pids)
        if self.pages and self._session.verdict is None:
            fields = last_step_fields(page.read() for page in self.pages.values())
            self._agent_context.events.write("workers_stopped", **self._of_round(), **fields)

    def _monitor_workers(self) -> bool:
        """Report the outcome of the workers to the leader, once; return whether they go on."""
        self._saves.poll()
        with suppress(OSError):  # tried again
            self._agent_context.control.restore()
        verdict = self._session.verdict
        if verdict is not None and verdict.status == "succeeded":
            self._exits = self._exits or ExitWatch(self._agent_context, time.monotonic())
            return not self._exits.is_over(self._processes_by_rank(), time.monotonic())
        if verdict is not None:
            return False
        if self._refused is not None:
            self._start_again(self._refused)
            return not self._session.stop_requested
        pids = self._pids()
        if self._channel is not None and self._drain is not None:
            now = time.monotonic()
            self._channel.poll(now)
            self._drain.poll(now)
            if self._hangs is not None:
                self._hangs.update(pids, now, done=self._awaits_leader)
        workers = {rank: page.read() for rank, page in self.pages.items()}
        if self._training is not None:
            self._training.update(workers)
        if not self._has_begun:
            fields = first_step_fields([*workers.values()], self._started_time)
            if fields is not None:
                self._has_begun = True
                self._longest_start_s = max(self._longest_start_s or 0.0, fields["start_s"])
                # a file system that hangs delays no watch
                self._agent_context.events.write_behind("first_step", **self._of_round(), **fields)
        if not self._awaits_leader:
            self._check_workers()
        if time.monotonic() >= self._reap_at:
            self._reap_at = time.monotonic() + _REAP_EVERY_S
            worker_process.reap_orphans({*pids.values(), *self._warm_workers.pids})
        return not self._session.stop_requested

    def _check_workers(self) -> None:
        """Check whether the function has returned in all workers, or some have ended before that.

        torch's agent would go by exit codes. An exit code of 0 is no success, and what a process
        does once its function has returned, until `exit_timeout_s`, is no failure.
        """
        failures = self._ended_by_themselves()
        workers = [page.read() for page in self.pages.values()]
        have_returned = all(worker.returned for worker in workers)
        if not have_returned and not failures:
            self._maintain_warm_workers()
            return
        # by os._exit, or of what a command has exec'ed
        is_clean = not any(failures.values())
        if failures and is_clean and self._agent_context.is_command:
            self._await_notice()  # by which a script's handler may have ended it
            if self._agent_context.notices.current is None:
                for rank in failures:
                    self.pages[rank].report_return()
                return
        self._awaits_leader = True
        if failures:
            self._channel = self._drain = None
            self._end_workers()
            # those hold GPU memory, which the next worker needs
            worker_process.kill_strays(self._warm_workers.pids)
            self._report(failures)
            return
        # A script may set a flag at SIGTERM, save, and return before its last step: it leaves.
        if any(w.step is not None and w.step < (w.total_steps or 0) for w in workers):
            self._await_notice()
            if self._agent_context.notices.current is not None:
                _log.warning("the function has returned under notice, before its last step")
                self._session.leave_now()
                return
        self._session.report(Finished())

    def _ended_by_themselves(self) -> dict[int, int]:
        """Return exit codes of workers that ended, not by this agent, before they had returned."""
        return {
            rank: code
            for rank, process in self._processes_by_rank().items()
            if (code := process.own_exit_code) is not None and not self.pages[rank].read().returned
        }

    def _processes_by_rank(self) -> dict[int, WorkerProcess]:
        return dict(zip(self.pages, self._processes, strict=False))

    def _report_before_stop(self) -> None:
        """Report the workers that have failed, but whose end was not seen yet.

        A worker's process group may be gone before its process is: its peers fail of that, and
        their agents report first.
        """
        if self._awaits_leader or self._session.verdict or self._agent_context.replica is not None:
            return
        recorded = {
            rank: code
            for rank in self.pages
            if (code := worker_process.recorded_exit_code(self._files(rank))) is not None
        }
        failures = recorded | self._ended_by_themselves()
        if failures:
            self._awaits_leader = True
            self._report(failures)

    def _report(self, failures: Mapping[int, int]) -> None:
        """Report failed workers, by their exit codes; those that end under notice have not failed.

        All of them end because of a notice where its signals have come: Slurm may send them to each
        process. Under any notice a script may save, and end its process.
        """
        found = [
            worker_process.describe(code, self._files(rank), self.pages[rank].read())
            for rank, code in failures.items()
        ]
        have_exited = any(f.signal is None and f.exception in (None, "SystemExit") for f in found)
        if have_exited:
            self._await_notice()
        notice = self._agent_context.notices.current
        if notice is not None and (have_exited or notice.reason is Reason.SIGNAL):
            _log.warning("workers have ended under notice: %s", [f.message for f in found])
            self._session.leave_now()
            return
        self._retention.keep_round()
        self._session.report(Failed(worker_process.earliest(found)))

    def _await_notice(self) -> None:
        deadline = time.monotonic() + _NOTICE_MAY_COME_S
        while self._agent_context.notices.current is None and time.monotonic() < deadline:
            time.sleep(_LOOK_FOR_NOTICE_S)

    def _maintain_warm_workers(self) -> None:
        """Start new warm workers once the workers train: before, they need the CPU themselves."""
        # a preemption ends them all by SIGTERM
        codes = [code for code in self._warm_workers.maintain() if code != -signal.SIGTERM]
        if codes:
            why = name_of(-codes[0]) if codes[0] < 0 else f"exit code {codes[0]}"
            where = self._agent_context
            where.events.write_behind("warm_worker_died", host=where.place.host, why=why)
        if self._filled:
            return
        train = any((page.read().step or 0) > 0 for page in self.pages.values())
        if train or time.monotonic() - self._started_at > _WARM_UP_AFTER_S:
            self._filled = True
            self._warm_workers.fill(paced=True)
            self._agent_context.stores.prepare()

    def _files(self, rank: int) -> WorkerFiles:
        round_, place = self._round, self._agent_context.place
        return WorkerFiles(place, round_.number, rank, rank - round_.first_rank)


class ExitWatch:
    """The processes of a node's workers after the run has succeeded.

    A tracker may send its files at exit, and threads and children are waited for. Nothing of that
    changes the outcome of the run; it has a limit, `launcher.agent.exit_timeout_s`, after which the
    processes are ended. Under notice it is over before the node is taken.
    """

    def __init__(self, context: AgentContext, now: float) -> None:
        self._agent_context = context
        self._since = now
        self._is_named = False

    def is_over(self, processes: Mapping[int, WorkerProcess], now: float) -> bool:
        """Return whether all processes (by global rank) have ended, or are to be ended now."""
        codes = {rank: process.own_exit_code for rank, process in processes.items()}
        alive = [rank for rank, code in codes.items() if code is None]
        if not alive:
            for rank, code in codes.items():
                if code:
                    how = f"by {name_of(-code)}" if code < 0 else f"with exit code {code}"
                    self._write([rank], now, f"it ended {how}; the run has succeeded")
            return True
        limit_s = self._agent_context.settings.exit_timeout_s
        notice = self._agent_context.notices.current
        until = self._since + limit_s
        if notice is not None:
            until = min(until, notice.by - _LEAVES_IN_S)
        if now >= until:
            why = "the node is left" if notice is not None else f"exit_timeout_s={limit_s:g}"
            self._write(alive, now, f"still running, and ended now: {why}")
            return True
        if not self._is_named and now >= self._since + _SLOW_EXIT_S:
            self._is_named = True
            process = processes[alive[0]]
            dump = stacks_file(self._agent_context.control.path, process.local_rank)
            text = take_stacks(process.proc.pid, dump)
            frames = hang_watch.parse_main_thread(text or "")
            at = f" at {hang_watch.describe_place(frames)}" if text else ""
            self._write(alive, now, f"still running{at}; ended after {limit_s:g} s at the latest")
        return False

    def _write(self, ranks: Sequence[int], now: float, how: str) -> None:
        context = self._agent_context
        context.events.write(
            "slow_exit", host=context.place.host, ranks=[{"rank": rank} for rank in ranks],
            waited_s=round(now - self._since, 1), how=how,
        )  # fmt: skip


# Each agent writes the events of its own workers: one short append beside the log files that a node
# opens for each worker and round costs a thousand nodes less than a leader that collects them, and
# no leader can lose them.
def first_step_fields(workers: Sequence[WorkerStatus], started: float) -> dict[str, Any] | None:
    """Return the fields of the event of the first step in a round; None before it (pure).

    ``started`` is when the node's workers were started, in Unix seconds. ``restore_s`` and
    ``start_s``, from the start to the first step, and ``time`` are those of the slowest worker.
    """
    steps = [worker.first_step for worker in workers if worker.first_step is not None]
    if not steps or len(steps) < len(workers):
        return None
    at = max(worker.first_time or started for worker in workers)
    return {
        "step": min(steps),
        "restored": max((w.restored for w in workers if w.restored is not None), default=None),
        "restore_s": round(max(worker.restore_s or 0.0 for worker in workers), 3),
        "start_s": round(max(0.0, at - started), 3),
        "counted": any(worker.counted for worker in workers),
        "time": at,
    }


def last_step_fields(workers: Iterable[WorkerStatus]) -> dict[str, Any]:
    """Return how far workers have come that were stopped before they were done (pure).

    Each field only if it is known. The steps that a script passes to `should_checkpoint` take
    precedence over the count of its optimizers' steps, which begins anew with every start.
    """
    seen = list(workers)
    asked = [w.passed for w in seen if w.passed is not None]
    steps = asked or [w.step for w in seen if w.step is not None]
    times = [w.step_time for w in seen if w.step_time is not None]
    return {
        **({"step": max(steps)} if steps else {}),
        **({"step_time": round(max(times), 3)} if times else {}),
    }


class TrainingWatch:
    """Events about a training that runs, but not as intended; each once in a round.

    ``world_size`` is None with ``ft=true``, where workers need no group.
    """

    def __init__(self, world_size: int | None, host: str, events: EventLog) -> None:
        self._world_size = world_size
        self._host = host
        self._write = events.write_behind
        self._named: set[str] = set()

    def update(self, workers: Mapping[int, WorkerStatus]) -> None:
        """Take note of what the workers have published, by global rank."""
        apart = apart_workers(workers, self._world_size)
        self._name("group_mismatch", [
            {"rank": rank, "group_size": size} for rank, size in apart.items()
        ], world_size=self._world_size)  # fmt: skip
        self._name("bad_loss", [
            {"rank": rank, "step": worker.bad_step, "loss": worker.bad_loss}
            for rank, worker in workers.items() if worker.bad_step is not None
        ])  # fmt: skip

    def _name(self, kind: str, ranks: Sequence[dict[str, Any]], **fields: Any) -> None:
        if ranks and kind not in self._named:
            self._named.add(kind)
            self._write(kind, host=self._host, ranks=ranks, **fields)


class CheckpointFailureLog:
    """The events of checkpoints that do not reach their directory, and that do so again.

    Such a failure never ends a training. Every rank learns if a part of a checkpoint could not be
    written, so the agent of the first rank writes the events for all: each incident once, for as
    long as that agent has the first rank. ``write`` may not wait for the file system: it may be
    what fails.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._page: SharedPage | None = None
        self._num_unsaved = 0
        self._failing = False

    def watch(self, page: SharedPage | None) -> None:
        """Begin another round, with the first rank's page; None: that is another node's."""
        self._page, self._num_unsaved = page, 0
        self._failing = self._failing and page is not None

    def poll(self) -> None:
        """Take note of what the worker has published."""
        if self._page is None:
            return
        now = self._page.read()
        if now.num_unsaved != self._num_unsaved:
            self._num_unsaved = now.num_unsaved
            if not self._failing:
                self._write("checkpoint_failed", step=now.unsaved, why=self._page.why_not_saved())
            self._failing = True
        if self._failing and now.stored is not None and now.stored >= (now.unsaved or 0):
            self._failing = False
            self._write("checkpoint_recovered", step=now.stored)


_REPORTS = {StateMismatch: "state_mismatch", HealFailed: "heal_failed"}


class Replica:
    """The workers of one node, which are of a replica of the model (``ft=true``).

    The session of the agent serves them, and connects them to the lighthouse, which lives with the
    run's leader. ``write`` may not wait for the file system.
    """

    def __init__(
        self,
        me: Agent,
        session: Session,
        socket: Path,
        max_replicas: int,
        write: Callable[..., None],
    ) -> None:
        assert session.replica is not None
        session.replica.on_report = lambda found: write(_REPORTS[type(found)], **vars(found))
        self.me = me
        self._session = session
        self._server = session.replica
        self._socket = socket
        self._max_replicas = max_replicas
        self._announced: float | None = None  # the end of the notice that was sent to the quorum

    def expect_workers(self, round_: RoundInfo, server: tuple[str, int] | None) -> None:
        """Forget the workers before; ``server`` is their replica's, if it is on another node."""
        self._announced = None
        self._session.expect_workers(round_, server)

    def why_leave(
        self, notice: PreemptionNotice, _: Sequence[WorkerStatus], now: float
    ) -> str | None:
        """Request release once; return why to wait for that no longer, None to wait."""
        if notice.by != self._announced:
            self._announced = notice.by
            self._session.run_in_loop(self._server.announce_leave, max(0.0, notice.by - now))
        if self._server.has_left:
            return "its replica has left the quorum"
        if now >= notice.by:
            return "its time is up"
        return None if self._server.was_in_quorum else "its workers are in no quorum yet"

    def environment(self, round_: RoundInfo) -> dict[str, str]:
        """Return what its workers find in their environment."""
        return {
            SOCKET_ENV: str(self._socket),
            fencing.REPLICA_VARIABLE: fencing.replica(
                self.me.task, self.me.attempt, round_.replica
            ),
            RESULTS_VARIABLE: results_of(round_.number, round_.replica),
            "REPLICA_GROUP_ID": str(round_.replica),  # for scripts; the names are torchft's
            "NUM_REPLICA_GROUPS": str(self._max_replicas),
        }
