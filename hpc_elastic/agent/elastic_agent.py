"""torch's LocalElasticAgent, with the run's leader deciding on restarts.

torch's agent counts restarts for itself, on each node, and takes a collective that broke because a
peer died for a failure of its own worker. Here an agent reports what happened and waits for the
leader, which sees all nodes: it starts another round, or ends the run.

While this node is under notice (`hpc_elastic.agent.preemption`) its workers go on, until the leader
stops the round at a checkpoint or there is no sense in waiting. Once they are stopped, nothing that
they have started lives on (`hpc_elastic.agent.process_cleanup`).

All use of torch's private names is in this module: `_monitor_workers`,
`_start_workers`, `_stop_workers`, `_rendezvous`, `_shutdown`, `_exit_barrier`,
`_assign_worker_ranks`, `_remaining_restarts` (tests/unit/test_agent.py fails if torch changes
them).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hpc_elastic.agent import process_cleanup
from hpc_elastic.agent.hang_watch import (
    HangWatch,
    LoneHangReporter,
    WatchedWorker,
    kill_stopped_workers,
)
from hpc_elastic.agent.metrics import RoundWorkers, WorkerObserver
from hpc_elastic.agent.output_times import OutputTimes
from hpc_elastic.agent.preemption import DrainController, PreemptionState, why_leave_now
from hpc_elastic.agent.replica import Replica
from hpc_elastic.agent.stacks import stacks_file
from hpc_elastic.agent.warm_workers import WarmWorkerPool, exit_text, is_training
from hpc_elastic.agent.worker_channel import WorkerChannel
from hpc_elastic.agent.worker_failures import (
    EndedWorker,
    NodeIdentity,
    ProcessFailure,
    WorkerFiles,
    describe,
    earliest,
    has_just_exited,
    has_stopped_short,
    has_succeeded,
    told_exit_code,
)
from hpc_elastic.agent.worker_main import STOP
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.rendezvous.effects import RoundInfo
from hpc_elastic.rendezvous.session import RunOutcome
from hpc_elastic.rendezvous.torch_handler import SlurmRendezvousHandler
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.worker.shared_page import ROUND_VARIABLE, ReadablePage, SharedPage, WorkerStatus

_log = logging.getLogger(__name__)

_WARM_UP_AFTER_S = 10.0
"""Spares are started after the workers' first step, or after this long where none is reported."""
_FIRST_RANK = 0
_LOOK_UP_S = 0.5
_NOTICE_MAY_COME_S = 1.0
"""Slurm signals the processes of a task one after another: a worker may end before its agent has
the signal."""
_LOOK_FOR_NOTICE_S = 0.05
_IMPORT_S = 20.0
"""A node that comes late joins after that, even if its warm workers still import."""


@dataclass(frozen=True)
class AgentContext:
    """What an agent works with.

    Attributes:
        place: Where it is, and where its workers' logs go.
        control: Folder of the control pages, in memory.
        run: The run's directory.
        stopped: Writes the event of workers that were stopped (`last_step_fields`).
        settings: The run's ``launcher.agent``.
        notices: Where a notice for this node is found.
        trains: Writes the event of its workers' first step in a round (`FirstStepLog`).
        events: Its task's events.
        saves_itself: Whether under notice there is sense in waiting for a script that does not
            report when it saves.
        replica: The node's, where its workers are one (``ft=true``).
        times: Writes down when the workers' output was written.
    """

    place: NodeIdentity
    control: Path
    run: RunDir
    stopped: Callable[..., None]
    settings: AgentSettings
    notices: PreemptionState
    trains: Callable[..., None]
    events: EventLog
    saves_itself: bool = True
    replica: Replica | None = None
    times: OutputTimes | None = None
    observer: WorkerObserver | None = None


class ElasticAgent(LocalElasticAgent):
    """The agent of one node of a run."""

    def __init__(
        self,
        spec: WorkerSpec,
        handler: SlurmRendezvousHandler,
        workplace: AgentContext,
        warm_workers: WarmWorkerPool,
    ) -> None:
        logs = RoundLogs(workplace.place.logs, workplace.times)
        super().__init__(spec, logs, exit_barrier_timeout=0)
        self._handler = handler
        self._session = handler.session
        self._workplace = workplace
        self._channel: WorkerChannel | None = None
        self._drain: DrainController | None = None
        self._beginning: FirstStepLog | None = None
        self._saves = CheckpointFailureLog(workplace.events.write_behind)
        self._hangs: HangWatch | None = None
        self._awaits_leader = False
        self._warm_workers = warm_workers
        self._filled = False
        self._started_at = 0.0
        self.pages: dict[int, SharedPage] = {}
        """The control pages of the current workers, by global rank."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers of this node until the run has ended, or the node is left.

        No warm worker outlives the call, nor anything that a worker has started.
        """
        process_cleanup.adopt_orphans()
        try:
            return super().run(role)  # type: ignore[no-any-return]
        finally:
            self._warm_workers.close()
            process_cleanup.kill_strays()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for a round; warm workers are started meanwhile, since nothing trains beside them.

        A group that trains would be stopped for this node at once, and stand still until it has
        imported what it needs: so it is joined after that.
        """
        if self._session.departed is None:
            self._warm_workers.fill(paced=False)
            if self._handler.round is None:
                self._import_beside_others()
        super()._rendezvous(worker_group)

    def _import_beside_others(self) -> None:
        deadline = time.monotonic() + _IMPORT_S
        while self._is_wanted and is_training(self._workplace.run.status):
            if time.monotonic() > deadline or self._warm_workers.await_imports(_LOOK_UP_S):
                break

    @property
    def _is_wanted(self) -> bool:
        """Whether this node is still to join."""
        session, notice = self._session, self._workplace.notices.current
        return notice is None and not (session.verdict or session.departed or session.requeued)

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Take the ranks that the leader gave: torch's way asks every other agent by the store."""
        round_ = self._round
        return [
            Worker(
                local_rank=local_rank,
                global_rank=round_.first_rank + local_rank,
                role_rank=round_.first_rank + local_rank,
                world_size=round_.world_size,
                role_world_size=round_.world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    @property
    def _round(self) -> RoundInfo:
        assert self._handler.round is not None
        return self._handler.round

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spent = self._round.restarts
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - spent)
        self._awaits_leader = False
        self.pages = {
            w.global_rank: SharedPage.create(self._workplace.control, w.local_rank)
            for w in worker_group.workers
        }
        self._filled, self._started_at = False, time.monotonic()
        self._listen(list(self.pages.values()))
        os.environ[ROUND_VARIABLE] = str(self._round.number)
        entry = fencing.entry_path(self._workplace.run.rdzv, self._round.index)
        os.environ[fencing.VARIABLE] = str(entry)
        if self._workplace.replica is not None:
            os.environ.update(self._workplace.replica.environment(self._round))
            self._workplace.replica.expect_workers()
        with made_from(self._warm_workers):
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _listen(self, pages: list[SharedPage]) -> None:
        """Start to pass on the messages between the workers of a round and their leader."""
        self._channel = WorkerChannel(self._session, pages)
        self._beginning = FirstStepLog(self._workplace.trains, self._round.number, pages)
        self._saves.watch(self.pages.get(_FIRST_RANK))
        replica, notices = self._workplace.replica, self._workplace.notices
        saves_itself = self._workplace.saves_itself
        by_its_script = partial(why_leave_now, since=self._started_at, saves_itself=saves_itself)
        why_leave = by_its_script if replica is None else replica.why_leave
        self._drain = DrainController(self._session, notices, pages, why_leave)
        self._hangs = self._watch_for_hangs()
        if self._workplace.observer is not None:
            self._workplace.observer.start_round(RoundWorkers(self.pages, self._pids_by_rank))

    def _pids_by_rank(self) -> dict[int, int]:
        return dict(self._pcontext.pids()) if self._pcontext is not None else {}

    def _watch_for_hangs(self) -> HangWatch:
        place, control = self._workplace.place, self._workplace.control
        first = self._round.first_rank
        workers = [
            WatchedWorker(rank - first, page, self._files(rank), stacks_file(control, rank - first))
            for rank, page in self.pages.items()
        ]
        replica, events = self._workplace.replica, self._workplace.events
        alone = LoneHangReporter(replica.me, events.write) if replica is not None else None
        after_s = self._workplace.settings.hang_timeout_s
        return HangWatch(self._session, workers, after_s=after_s, place=place, alone=alone)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._hangs = None
        self._saves.poll()
        self._report_before_stop()
        kill_stopped_workers(self._pids)
        self._shutdown(timeout=self._workplace.settings.stop_timeout_s)
        process_cleanup.kill_strays(self._warm_workers.pids)
        if self.pages and self._session.verdict is None:
            fields = last_step_fields(page.read() for page in self.pages.values())
            self._workplace.stopped(round=self._round.number, **fields)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report the outcome of the workers to the leader, once; torch receives the verdict."""
        self._saves.poll()
        verdict = self._session.verdict
        if verdict is not None:
            return self._as_result(verdict, worker_group)
        if self._channel is not None and self._drain is not None:
            now = time.monotonic()
            self._channel.poll(now)
            self._drain.poll(now)
            if self._hangs is not None:
                self._hangs.update(self._pids_by_rank(), now, done=self._awaits_leader)
        if self._beginning is not None and self._beginning.poll():
            self._beginning = None
        if not self._awaits_leader:
            self._look_at_workers(worker_group)
        process_cleanup.reap_orphan({*self._pids, *self._warm_workers.pids})
        return RunResult(state=WorkerState.HEALTHY)

    @property
    def _pids(self) -> list[int]:
        return list(self._pids_by_rank().values())

    def _look_at_workers(self, worker_group: WorkerGroup) -> None:
        """See whether workers have ended.

        An exit code of 0 is no success for torch's agent to see: the function must have returned.
        """
        result = super()._monitor_workers(worker_group)
        failures: dict[int, ProcessFailure] = {**self._early_exits(), **result.failures}
        if result.state is WorkerState.HEALTHY and not failures:
            self._maintain_warm_workers()
            return
        self._awaits_leader = True
        if result.state is WorkerState.SUCCEEDED and not failures:
            self._tell_of_return()
            return
        self._channel = self._drain = None
        self._shutdown(timeout=self._workplace.settings.stop_timeout_s)
        # those hold GPU memory, which the next worker needs
        process_cleanup.kill_strays(self._warm_workers.pids)
        self._report(failures)

    def _tell_of_return(self) -> None:
        """Report that all functions have returned; under notice, before the last step, they leave.

        A script may set a flag at SIGTERM, save, and return.
        """
        if any(has_stopped_short(page.read()) for page in self.pages.values()):
            self._await_notice()
            if self._workplace.notices.current is not None:
                _log.warning("the function has returned under notice, before its last step")
                self._session.leave_now()
                return
        self._session.report_finished()

    def _early_exits(self) -> dict[int, ProcessFailure]:
        """Return the workers that have ended with code 0 before their function returned."""
        ended = self._ended_by_themselves()
        return {rank: worker for rank, worker in ended.items() if worker.exitcode == 0}

    def _ended_by_themselves(self) -> dict[int, EndedWorker]:
        """Return the workers that have ended, not by this agent, and not as they should."""
        ended = {}
        for local_rank, code in ended_by_themselves(self._pcontext).items():
            rank = self._round.first_rank + local_rank
            if not has_succeeded(code, self.pages[rank].read()):
                ended[rank] = EndedWorker(local_rank, code)
        return ended

    def _report_before_stop(self) -> None:
        """Report the workers that have failed, but whose end was not seen yet.

        A worker's process group may be gone before its process is: its peers fail of that, and
        their agents report first.
        """
        if self._awaits_leader or self._session.verdict or self._workplace.replica is not None:
            return
        first_rank = self._round.first_rank
        told = {rank: told_exit_code(self._files(rank)) for rank in self.pages}
        failures: dict[int, ProcessFailure] = {
            rank: EndedWorker(rank - first_rank, code)
            for rank, code in told.items()
            if code is not None
        }
        failures |= self._ended_by_themselves()
        if failures:
            self._awaits_leader = True
            self._report(failures)

    def _report(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Report failed workers; those that end because of a notice have not failed.

        Such are all where the signals of a notice have come: Slurm may send them to each process.
        Under any notice a script may save, and end its process.
        """
        place = self._workplace.place
        found = [
            describe(failure, self._files(rank), place, self.pages[rank].read())
            for rank, failure in failures.items()
        ]
        have_exited = any(has_just_exited(failure) for failure in found)
        if have_exited:
            self._await_notice()
        notice = self._workplace.notices.current
        if notice is not None and (have_exited or notice.reason is Reason.SIGNAL):
            _log.warning("workers have ended under notice: %s", [f["message"] for f in found])
            self._session.leave_now()
            return
        self._session.report_failures(earliest(found))

    def _await_notice(self) -> None:
        deadline = time.monotonic() + _NOTICE_MAY_COME_S
        while self._workplace.notices.current is None and time.monotonic() < deadline:
            time.sleep(_LOOK_FOR_NOTICE_S)

    def _maintain_warm_workers(self) -> None:
        """Start new warm workers once the workers train: before, they need the CPU themselves."""
        self._report_dead(self._warm_workers.maintain())
        if self._filled:
            return
        train = any((page.read().step or 0) > 0 for page in self.pages.values())
        if train or time.monotonic() - self._started_at > _WARM_UP_AFTER_S:
            self._filled = True
            self._warm_workers.fill(paced=True)

    def _report_dead(self, exit_codes: Sequence[int]) -> None:
        """Report warm workers that ended by themselves; a preemption sends all of them SIGTERM."""
        found = [exit_text(code) for code in exit_codes if code != -signal.SIGTERM]
        if found:
            where = self._workplace
            where.events.write_behind("warm_worker_died", host=where.place.host, why=found[0])

    def _files(self, rank: int) -> WorkerFiles:
        return WorkerFiles(self._workplace.place.logs, self._round.number, rank)

    def _as_result(self, verdict: RunOutcome, worker_group: WorkerGroup) -> RunResult:
        ranks = [w.global_rank for w in worker_group.workers]
        if verdict.status == "succeeded":
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """The leader's verdict is the barrier: it comes once every member is done."""


# The workers' processes as torch's agent starts and ends them. torch makes each in one function,
# `multiprocessing.api.get_subprocess_handler`, which `made_from` replaces for as long as a group
# is started. Private names that are used here, with tests in tests/unit/test_agent.py: that
# function, `SubprocessContext.subprocess_handlers`, and `SubprocessHandler._popen`, `_stdout`,
# `_stderr`.


_MAKES_PROCESS = "get_subprocess_handler"


class RoundLogs(LogsSpecs):
    """Every worker's output in files of its own for each round, which nothing ever truncates."""

    def __init__(self, folder: Path, times: OutputTimes | None = None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._times = times

    @property
    def root_log_dir(self) -> str:
        """Return the folder of this attempt."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the workers about to start, by local rank."""
        number = int(os.environ[ROUND_VARIABLE])
        files = {
            local_rank: WorkerFiles(self._folder, number, int(env["RANK"]))
            for local_rank, env in envs.items()
        }
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = str(files[local_rank].error)
        if self._times is not None:
            self._times.new_round(path for f in files.values() for path in (f.out, f.err))
        return LogsDest(
            stdouts={local_rank: str(f.out) for local_rank, f in files.items()},
            stderrs={local_rank: str(f.err) for local_rank, f in files.items()},
            error_files={local_rank: str(f.error) for local_rank, f in files.items()},
        )


class WorkerProcess(SubprocessHandler):
    """torch's handle on a worker's process, which may have been a warm worker."""

    def __init__(self, warm_workers: WarmWorkerPool, *args: Any, **options: Any) -> None:
        self._warm_workers = warm_workers
        self._was_told_to_end = False
        super().__init__(*args, **options)
        for file in (self._stdout, self._stderr):
            if file is not None:
                file.close()  # the worker has its own; torch leaves them open until the next round

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the worker, and what is in its process group, a signal; `STOP` for SIGTERM."""
        self._was_told_to_end = self._was_told_to_end or self.proc.poll() is None
        super().close(STOP if death_sig in (None, signal.SIGTERM) else death_sig)

    @property
    def own_exit_code(self) -> int | None:
        """The exit code of a worker that has ended by itself; None if it has not."""
        return None if self._was_told_to_end else self.proc.poll()

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        outputs = [
            default if file is None else file.fileno()
            for file, default in ((self._stdout, 1), (self._stderr, 2))
        ]
        warm = self._warm_workers.take_worker(self.local_rank_id, args, env, outputs)
        return warm if warm is not None else super()._popen(args, env)


def ended_by_themselves(workers: PContext | None) -> dict[int, int]:
    """Return the exit codes of the workers that no signal of the agent has ended, by local rank.

    Args:
        workers: The processes of a round; None before the first.
    """
    handlers = workers.subprocess_handlers if isinstance(workers, SubprocessContext) else {}
    codes = {n: h.own_exit_code for n, h in handlers.items() if isinstance(h, WorkerProcess)}
    return {local_rank: code for local_rank, code in codes.items() if code is not None}


@contextmanager
def made_from(warm_workers: WarmWorkerPool) -> Iterator[None]:
    """Make workers from warm workers where there are any, for as long as the context lasts."""
    theirs = getattr(processes, _MAKES_PROCESS)
    setattr(processes, _MAKES_PROCESS, partial(WorkerProcess, warm_workers))
    try:
        yield
    finally:
        setattr(processes, _MAKES_PROCESS, theirs)


# ---- The event of the first step that the workers of a node make in a round
# Each agent writes that event for its own node, as it writes all that concerns its node alone.
# The leader could do it for all, but then each first step had to travel with the heartbeats, and
# be waited for by the leader of that time; one short append beside the log files that a node opens
# for each worker and round anyway costs a thousand nodes less, and no leader can lose it.


class FirstStepLog:
    """The beginning of one round on one node.

    Args:
        write: Writes the event, and does not wait for the file system: one that hangs does not
            concern those that watch workers.
        round_: The number of the round.
        pages: Its workers' control pages, just made.
    """

    def __init__(
        self, write: Callable[..., None], round_: int, pages: Sequence[ReadablePage]
    ) -> None:
        self._write = write
        self._round = round_
        self._pages = pages
        self._started = time.time()

    def poll(self) -> bool:
        """Return whether all workers have made a step; then, once, write the event."""
        workers = [page.read() for page in self._pages]
        if not workers or any(worker.first_step is None for worker in workers):
            return False
        self._write(round=self._round, **first_step_fields(workers, self._started))
        return True


def first_step_fields(workers: Sequence[WorkerStatus], started: float) -> dict[str, Any]:
    """Return the fields of the event for workers that have all made a step (pure).

    Args:
        workers: At least one.
        started: Unix seconds at which they were started.

    Returns:
        ``step``, the first that was made; ``restored``, the step of the checkpoint, None without
        one; ``restore_s`` and ``start_s``, of the slowest worker, from the start to the first step;
        ``counted``: the script does not report these steps; ``time`` of the slowest one's step.
    """
    at = max(worker.first_time or started for worker in workers)
    return {
        "step": min(worker.first_step or 0 for worker in workers),
        "restored": max((w.restored for w in workers if w.restored is not None), default=None),
        "restore_s": round(max(worker.restore_s or 0.0 for worker in workers), 3),
        "start_s": round(max(0.0, at - started), 3),
        "counted": any(worker.counted for worker in workers),
        "time": at,
    }


# ---- The event of a node's workers that were stopped before they were done (pure)
# Each agent writes it for its own node, so the cost of a restart is known even if the leader, and
# all that it had received, is lost.


def last_step_fields(workers: Iterable[WorkerStatus]) -> dict[str, Any]:
    """Return how far workers have come.

    Args:
        workers: What they last published; a script that asks at which step to save is believed
            before the count of its optimizers' steps, which begins anew with every start.

    Returns:
        ``step``, the last one that any of them has made, and ``step_time``, Unix seconds of the
        last step that was reported; each only if it is known.
    """
    seen = list(workers)
    asked = [w.passed for w in seen if w.passed is not None]
    steps = asked or [w.step for w in seen if w.step is not None]
    times = [w.step_time for w in seen if w.step_time is not None]
    return {
        **({"step": max(steps)} if steps else {}),
        **({"step_time": round(max(times), 3)} if times else {}),
    }


# ---- The events of checkpoints that do not reach their directory, and that do so again
# What writes them is the workers' `Checkpointer`, which never ends a training for it. The agent
# of the first rank writes the events for all: every rank learns if a part of a checkpoint
# could not be written. For as long as that agent has the first rank, an incident is written
# once, however many checkpoints and rounds it costs.


class SavingPage(ReadablePage, Protocol):
    """The part of a `hpc_elastic.worker.shared_page.SharedPage` that is used here."""

    def why_not_saved(self) -> str:
        """Return why the last checkpoint was not written."""


class CheckpointFailureLog:
    """The checkpoints of a run, as one agent sees them.

    Args:
        write: Writes an event, and does not wait for the file system: it may be what fails.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._page: SavingPage | None = None
        self._num_unsaved = 0
        self._failing = False

    def watch(self, page: SavingPage | None) -> None:
        """Begin another round.

        Args:
            page: The first rank's control page, just made; None: that is another node's.
        """
        self._page, self._num_unsaved = page, 0
        self._failing = self._failing and page is not None

    def poll(self) -> None:
        """Take note of what the worker has published; called several times a second."""
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
