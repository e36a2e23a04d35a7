"""The workers' processes as torch's agent makes and ends them: their logs, their spares, their end.

torch makes every worker's process in one function, `multiprocessing.api.get_subprocess_handler`,
which `made_from` replaces for as long as a group is started. Private names that are used here, with
tests in tests/unit/test_agent.py: that function, `SubprocessContext.subprocess_handlers`, and
`SubprocessHandler._popen`, `_stdout`, `_stderr`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hpc_elastic.agent.output_times import OutputTimes
from hpc_elastic.agent.report import WorkerFiles
from hpc_elastic.agent.spares import Spares
from hpc_elastic.agent.steadfast import STOP
from hpc_elastic.agent.worker import ROUND_VARIABLE

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
    """torch's handle on a worker's process, which may have been a spare."""

    def __init__(self, spares: Spares, *args: Any, **options: Any) -> None:
        self._spares = spares
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
        spare = self._spares.take(self.local_rank_id, args, env, outputs)
        return spare if spare is not None else super()._popen(args, env)


def ended_by_themselves(workers: PContext | None) -> dict[int, int]:
    """Return the exit codes of the workers that no signal of the agent has ended, by local rank.

    Args:
        workers: The processes of a round; None before the first.
    """
    handlers = workers.subprocess_handlers if isinstance(workers, SubprocessContext) else {}
    codes = {n: h.own_exit_code for n, h in handlers.items() if isinstance(h, WorkerProcess)}
    return {local_rank: code for local_rank, code in codes.items() if code is not None}


@contextmanager
def made_from(spares: Spares) -> Iterator[None]:
    """Make workers from spares where there are any, for as long as the context lasts."""
    theirs = getattr(processes, _MAKES_PROCESS)
    setattr(processes, _MAKES_PROCESS, partial(WorkerProcess, spares))
    try:
        yield
    finally:
        setattr(processes, _MAKES_PROCESS, theirs)
