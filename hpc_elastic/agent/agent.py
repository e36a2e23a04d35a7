"""torch's LocalElasticAgent, with the run's leader deciding on restarts.

torch's agent counts restarts for itself, on each node, and takes a collective that broke because a
peer died for a failure of its own worker. Here an agent reports what happened and waits for the
leader, who sees all nodes: he calls for another round, or ends the run.

All use of torch's private names is in this module: `_monitor_workers`, `_start_workers`,
`_stop_workers`, `_shutdown`, `_exit_barrier`, `_assign_worker_ranks`, `_remaining_restarts`
(tests/unit/test_agent.py fails if torch changes them).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from hpc_elastic.agent.report import Place, WorkerFiles, describe, earliest
from hpc_elastic.agent.worker import ROUND_VARIABLE
from hpc_elastic.control import ControlPage
from hpc_elastic.rendezvous.handler import SlurmRendezvousHandler
from hpc_elastic.rendezvous.session import Round, Verdict

_log = logging.getLogger(__name__)


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


class RunAgent(LocalElasticAgent):
    """The agent of one node of a run."""

    def __init__(
        self,
        spec: WorkerSpec,
        handler: SlurmRendezvousHandler,
        *,
        place: Place,
        control: Path,
        stop_timeout_s: int,
    ) -> None:
        super().__init__(spec, RoundLogs(place.logs), exit_barrier_timeout=0)
        self._handler = handler
        self._session = handler.session
        self._place = place
        self._control = control
        self._stop_timeout_s = stop_timeout_s
        self._awaits_leader = False
        self.pages: dict[int, ControlPage] = {}
        """The control pages of the current workers, by global rank."""

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
        os.environ[ROUND_VARIABLE] = str(self._round.number)
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
            return
        self._awaits_leader = True
        if result.state is WorkerState.SUCCEEDED:
            self._session.finished()
        else:
            failed = result.failures.items()
            found = [describe(f, self._files(rank), self._place) for rank, f in failed]
            self._session.failed(earliest(found))

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
