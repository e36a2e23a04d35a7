"""A submitted run: `RunHandle` reads how it ended, and `read_handles` finds earlier ones.

The error of a failed run shows the first failure in full, and each worker that died afterwards in
one line.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hpc_elastic import shared_files
from hpc_elastic.errors import DamagedFileError, RunDirectoryError, WorkerGroupError
from hpc_elastic.report import run_view
from hpc_elastic.report.run_view import (
    CANCELLED,
    LOST,
    SUCCEEDED,
    RunEnd,
    end_with_result,
    label_of,
)
from hpc_elastic.run import queue_name
from hpc_elastic.run.directory import SUBMISSION, RunDir, Submission
from hpc_elastic.run.registry import user
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalQueue

_LONGEST_NAME = 200


class SubmittedJobs(Protocol):
    """The jobs of one submission: Slurm's, or processes of this machine."""

    @property
    def job_ids(self) -> Sequence[str]:
        """The job id of each array, in the plan's order."""

    @property
    def result_job(self) -> str | None:
        """The job that stands for the result of the runs, if there is one."""

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return the tasks that the scheduler still lists, by queue name; one call for all.

        A co-allocated job is one entry, by its job id (`scheduler.states_of` splits it). Raises
        SlurmError if the scheduler does not answer at the moment.
        """

    def cancel(self) -> None:
        """End all tasks that still wait or run."""

    def release(self) -> str:
        """Stop waiting for the jobs; return how to come back to the runs, or that they ended."""

    def close(self) -> None:
        """Release the resources of the submission, once all runs have ended."""


@dataclass(frozen=True)
class RunHandle:
    """One submitted run; ``tasks`` are names by slot, ``label`` is its overrides."""

    dir: Path
    label: str
    tasks: tuple[str, ...]
    submission: Path
    jobs: SubmittedJobs

    @property
    def paths(self) -> RunDir:
        """The run's files."""
        return RunDir(self.dir)

    @property
    def name(self) -> str:
        """Its directory relative to the sweep's; unique in the sweep."""
        sweep = self.submission.parent
        inside = self.dir != sweep and self.dir.is_relative_to(sweep)
        return str(self.dir.relative_to(sweep)) if inside else self.dir.name

    def read_end(self) -> RunEnd | None:
        """Return how the run ended, with its values or its error; None if it has no result.

        A run with damaged files has failed. OSError says nothing about the run: on NFS a server may
        be away for minutes. Read again.
        """
        try:
            result = shared_files.read_json(self.paths.result)
            if result is None:
                return None
            end = replace(end_with_result(result), restarts=int(result.get("restarts") or 0))
            if end.status == SUCCEEDED:
                folder = results_folder(self.paths, result)
                files = folder.glob("rank-*.json") if folder else ()
                values = dict[int, Any]()
                for file in sorted(files):
                    text = shared_files.read_text(file, shared_files.VALUE_BYTES)
                    rank = int(file.stem.removeprefix("rank-"))
                    values[rank] = shared_files.parse_json(text, file)
                return replace(end, values=values)
            return replace(end, status="failed", error=self._failure(result))
        except (ValueError, TypeError, AttributeError, OverflowError) as e:
            file = self.paths.result
            what = f"the run has ended, but {file}, or a file it names, is damaged: {e}"
            see = f"what happened: hpc-elastic events {self.dir}"
            return RunEnd("failed", 0.0, error=WorkerGroupError(f"{what}\n{see}"))

    def lost(self, last_seen: Mapping[str, str]) -> RunEnd:
        """Return the end of the run if its tasks, last seen in these states, left no result."""
        mark = self.paths.cancellation()
        if mark is not None:
            error = WorkerGroupError(f"the run was cancelled{mark.by_whom}: {self.dir}")
            return RunEnd(CANCELLED, mark.time, error=error)
        lines = [f"the run ended without a result: {self.dir}"]
        lines += [f"  task {task}: {last_seen.get(task, 'never seen')}" for task in self.tasks]
        lines += self.log_tails()
        return RunEnd(LOST, 0.0, error=WorkerGroupError("\n".join(lines)))

    def log_tails(self, num_files: int = 3) -> list[str]:
        """Return the last lines of the run's captured logs that are not empty, with their paths."""
        folder = Submission(self.submission).logs
        # a co-allocated job has a log of its batch script beside those of its tasks
        names = dict.fromkeys(n for task in self.tasks for n in (task, queue_name(task)))
        tails = {name: shared_files.read_tail(folder / f"{name}.log") for name in names}
        shown = list[str]()
        for name, text in [(name, text) for name, text in tails.items() if text][:num_files]:
            shown += [f"--- {folder / f'{name}.log'}", run_view.quoted_text(text)]
        return shown or [f"no task has written anything to {folder}"]

    def _failure(self, result: Mapping[str, Any]) -> WorkerGroupError:
        first, later = result.get("failure"), list(result.get("secondary_failures") or [])
        lines = [f"the run failed: {self.dir}", *run_view.failures_in_full(first, later)]
        lines += [f"logs: {self.dir / 'tasks'}", f"      {Submission(self.submission).logs}"]
        return WorkerGroupError("\n".join(lines), first, later)


def results_folder(run: RunDir, result: Mapping[str, Any]) -> Path | None:
    """Return the folder of return values, if there is one; DamagedFileError if it is outside."""
    name = result.get("results")
    if not name:
        return None
    folder = Path(str(name))
    is_inside = not folder.is_absolute() and ".." not in folder.parts
    if not is_inside or len(str(name)) > _LONGEST_NAME:
        raise DamagedFileError(f"{run.result} is damaged: its results are in {str(name)!r:.80}")
    return run.path / folder


def read_result_status(run: RunDir) -> str | None:
    """Return the status in result.json, or None; raise RunDirectoryError if unreadable."""
    try:
        result = shared_files.read_json(run.result)
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.result}: not readable: {e}") from e
    return None if result is None else str(result.get("status"))


# ---- runs that were submitted before


@dataclass(frozen=True)
class LocalView:
    """Read-only view of the tasks that another process has launched with launcher=local."""

    submission: Path
    job_ids: Sequence[str]
    result_job: None = None

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return the states of the launcher's tasks."""
        return LocalQueue(Submission(self.submission)).tasks(self.job_ids)

    def cancel(self) -> None:
        """Do nothing: the launcher ends its processes."""

    close = cancel

    def release(self) -> str:
        """Return the command that waits for the runs again."""
        sweep = shlex.quote(str(self.submission.parent))
        return f"The runs continue with their launcher.\n  wait: hpc-elastic wait {sweep}"


def find_submission(folder: Path) -> Path:
    """Return a sweep's (or its run's) ``.hpc_elastic``; raise RunDirectoryError if neither."""
    if (folder / SUBMISSION).is_dir():
        return folder / SUBMISSION
    if shared_files.is_there(RunDir(folder).spec):
        return Path(RunDir(folder).load().submission)
    remedy = "give the directory of a sweep, such as multirun/2030-01-31/12-00-00"
    raise RunDirectoryError(f"{folder} is not a sweep directory: {remedy}", remedy=remedy)


def read_handles(submission: Path, only: Path | None = None) -> list[RunHandle]:
    """Return the runs of a sweep that were submitted, or the one run in the directory ``only``.

    Runs whose directories were removed are left out, and named on standard error. Raises
    RunDirectoryError if none is left, or nothing was submitted from it.
    """
    job_ids = Submission(submission).job_ids()
    if not job_ids:
        arrays = Submission(submission).arrays()
        scripts = " ".join(shlex.quote(str(a.script)) for a in arrays if a.script.exists())
        remedy = f"; to submit it: sbatch {scripts}" if scripts else ""
        raise RunDirectoryError(f"{submission.parent} was never submitted{remedy}")
    dirs = [only] if only is not None else []
    if only is None:
        dirs = [path for k in job_ids for path in Submission(submission).array(k).run_dirs()]
    there = {path: shared_files.is_there(path) for path in dict.fromkeys(dirs)}
    removed = [path.name for path, is_there in there.items() if not is_there]
    if len(removed) == len(there):
        what = "has no runs left: their directories were removed"
        raise RunDirectoryError(f"{submission.parent} {what}")
    if removed:
        print(f"left out, as their directories were removed: {', '.join(removed)}", file=sys.stderr)
    specs = {path: RunDir(path).load() for path in there if there[path]}
    jobs: SubmittedJobs
    if next(iter(specs.values())).settings.backend == "local":
        jobs = LocalView(submission, list(job_ids.values()))
    else:
        from hpc_elastic.launcher.slurm import SlurmJobs
        from hpc_elastic.site import time_slots_of

        me, client, ids = user(), SlurmClient(), list(job_ids.values())
        is_own = all(spec.provenance.get("user", me) == me for spec in specs.values())
        slots = time_slots_of(specs.values(), client) if is_own else ()
        jobs = SlurmJobs(ids, submission.parent, client, slots)
    return [
        RunHandle(path, label_of(path, spec), tuple(spec.task_names(job_ids)), submission, jobs)
        for path, spec in specs.items()
    ]
