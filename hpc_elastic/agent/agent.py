"""torch's LocalElasticAgent, with the run's leader deciding on restarts.

torch's agent counts restarts for itself, on each node, and takes a collective that broke because a
peer died for a failure of its own worker. Here an agent reports what happened and waits for the
leader, who sees all nodes: he calls for another round, or ends the run.

Workers are made from spares (`hpc_elastic.agent.spares`) where there are any. torch makes every
worker's process in one function, which `_made_from` replaces for as long as a group is started.

All use of torch's private names is in this module: `_monitor_workers`, `_start_workers`,
`_stop_workers`, `_rendezvous`, `_shutdown`, `_exit_barrier`, `_assign_worker_ranks`,
`_remaining_restarts`; of a worker's process `multiprocessing.api.get_subprocess_handler` and
`SubprocessHandler._popen`, `_stdout`, `_stderr` (tests/unit/test_agent.py fails if torch changes
them).
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hpc_elastic import fence
from hpc_elastic.agent.boundaries import Boundaries
from hpc_elastic.agent.report import Place, WorkerFiles, describe, earliest
from hpc_elastic.agent.spares import Spares
from hpc_elastic.agent.worker import ROUND_VARIABLE
from hpc_elastic.control import ControlPage
from hpc_elastic.rendezvous.handler import SlurmRendezvousHandler
from hpc_elastic.rendezvous.session import Round, Verdict

_log = logging.getLogger(__name__)

_WARM_UP_AFTER_S = 10.0
"""Spares are started after the workers' first step, or after this long where none is reported."""
_MAKES_PROCESS = "get_subprocess_handler"
_CPUS_PER_SPARE = 8
"""While the workers train, one spare may import at a time for each so many CPUs."""


class RoundLogs(LogsSpecs):
    """Every worker's output in files of its own for each round, which nothing ever truncates."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

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
        return LogsDest(
            stdouts={local_rank: str(f.out) for local_rank, f in files.items()},
            stderrs={local_rank: str(f.err) for local_rank, f in files.items()},
            error_files={local_rank: str(f.error) for local_rank, f in files.items()},
        )


class _WorkerProcess(SubprocessHandler):
    """torch's handle on a worker's process, which may have been a spare."""

    def __init__(self, spares: Spares, *args: Any, **options: Any) -> None:
        self._spares = spares
        super().__init__(*args, **options)
        for file in (self._stdout, self._stderr):
            if file is not None:
                file.close()  # the worker has its own; torch leaves them open until the next round

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        outputs = [
            default if file is None else file.fileno()
            for file, default in ((self._stdout, 1), (self._stderr, 2))
        ]
        spare = self._spares.take(self.local_rank_id, args, env, outputs)
        return spare if spare is not None else super()._popen(args, env)


@contextmanager
def _made_from(spares: Spares) -> Iterator[None]:
    theirs = getattr(processes, _MAKES_PROCESS)
    setattr(processes, _MAKES_PROCESS, partial(_WorkerProcess, spares))
    try:
        yield
    finally:
        setattr(processes, _MAKES_PROCESS, theirs)


class RunAgent(LocalElasticAgent):
    """The agent of one node of a run."""

    def __init__(
        self,
        spec: WorkerSpec,
        handler: SlurmRendezvousHandler,
        *,
        place: Place,
        control: Path,
        records: Path,
        stop_timeout_s: int,
        spares: bool = False,
    ) -> None:
        super().__init__(spec, RoundLogs(place.logs), exit_barrier_timeout=0)
        self._handler = handler
        self._session = handler.session
        self._place = place
        self._control = control
        self._records = records
        self._boundaries: Boundaries | None = None
        self._stop_timeout_s = stop_timeout_s
        self._awaits_leader = False
        self._spares = _spares_of(spec, keep=spares)
        self._filled = False
        self._started_at = 0.0
        self.pages: dict[int, ControlPage] = {}
        """The control pages of the current workers, by global rank."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers of this node until the run has ended; no spare outlives the call."""
        try:
            return super().run(role)  # type: ignore[no-any-return]
        finally:
            self._spares.close()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for a round; spares are made meanwhile, since nothing trains beside them."""
        self._spares.fill(paced=False)
        super()._rendezvous(worker_group)

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
    def _round(self) -> Round:
        assert self._handler.round is not None
        return self._handler.round

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spent = self._round.restarts
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - spent)
        self._awaits_leader = False
        self.pages = {
            w.global_rank: ControlPage.create(self._control, w.local_rank)
            for w in worker_group.workers
        }
        self._boundaries = Boundaries(self._session, list(self.pages.values()))
        os.environ[ROUND_VARIABLE] = str(self._round.number)
        os.environ[fence.VARIABLE] = str(fence.record_path(self._records, self._round.record))
        self._filled, self._started_at = False, time.monotonic()
        with _made_from(self._spares):
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._stop_timeout_s)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report what became of the workers to the leader, once; torch hears the verdict."""
        verdict = self._session.verdict
        if verdict is not None:
            return self._as_result(verdict, worker_group)
        if not self._awaits_leader:
            self._look_at_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _look_at_workers(self, worker_group: WorkerGroup) -> None:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            self._keep_spares()
            if self._boundaries is not None:
                self._boundaries.look(time.monotonic())
            return
        self._awaits_leader = True
        if result.state is WorkerState.SUCCEEDED:
            self._session.finished()
        else:
            failed = result.failures.items()
            found = [describe(f, self._files(rank), self._place) for rank, f in failed]
            self._session.failed(earliest(found))

    def _keep_spares(self) -> None:
        """Make new spares once the workers train: before, they need the CPU themselves."""
        self._spares.tend()
        if self._filled:
            return
        train = any((page.read().step or 0) > 0 for page in self.pages.values())
        if train or time.monotonic() - self._started_at > _WARM_UP_AFTER_S:
            self._filled = True
            self._spares.fill(paced=True)

    def _files(self, rank: int) -> WorkerFiles:
        return WorkerFiles(self._place.logs, self._round.number, rank)

    def _as_result(self, verdict: Verdict, worker_group: WorkerGroup) -> RunResult:
        ranks = [w.global_rank for w in worker_group.workers]
        if verdict.status == "succeeded":
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """The leader's verdict is the barrier: it comes once every member is done."""


def _spares_of(spec: WorkerSpec, *, keep: bool) -> Spares:
    command = (str(spec.entrypoint), *(str(arg) for arg in spec.args))
    num_warming = max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_SPARE)
    return Spares(spec.local_world_size if keep else 0, command, num_warming=num_warming)
