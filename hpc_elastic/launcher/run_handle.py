"""A submitted run: `RunHandle` polls its files, and reads how it ended.

The error of a failed run shows the first failure in full, and each worker that died afterwards in
one line. The mark ``<run>/cancelled`` shows that a run was cancelled: none of its tasks starts or
comes back.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hpc_elastic.agent.signals import name_of
from hpc_elastic.errors import DamagedFileError, RunDirectoryError, WorkerGroupError
from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.registry import user
from hpc_elastic.run.task_name import queue_name
from hpc_elastic.shared_files import (
    VALUE_BYTES,
    is_there,
    parse_json,
    read_json,
    read_tail,
    read_text,
    write_atomic,
)
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import states_of

_LONGEST_NAME = 200

COMMANDS = "command"
"""Name in place of a task, in events that a command writes."""


class SubmittedJobs(Protocol):
    """The jobs of one submission: Slurm's, or processes of this machine."""

    @property
    def job_ids(self) -> Sequence[str]:
        """The job id of each array, in the plan's order."""

    @property
    def result_job(self) -> str | None:
        """The job that stands for the result of the runs; None if there is none."""

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return all tasks that the scheduler still lists, by queue name; one call for all.

        A co-allocated job is one entry, by its job id (`scheduler.states_of` splits it).

        Raises:
            SlurmError: The scheduler does not answer at the moment.
        """

    def cancel(self) -> None:
        """End all tasks that still wait or run."""

    def release(self) -> str:
        """Stop waiting for the jobs; return how to come back to the runs, or that they ended."""

    def close(self) -> None:
        """Release the resources of the submission, once all runs have ended."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        run: The run.
        status: ``lost`` if its tasks are gone without a result; ``cancelled`` if it was cancelled
            by `hpc-elastic cancel`.
        values: Return values of the workers, by global rank.
        restarts: Number of restarts that it spent.
        error: The error to raise; None if it succeeded.
    """

    run: RunHandle
    status: Literal["succeeded", "failed", "lost", "cancelled"]
    values: dict[int, Any]
    restarts: int
    error: WorkerGroupError | None

    @property
    def value(self) -> Any:
        """Return value of rank 0."""
        return self.values.get(0)


@dataclass(frozen=True)
class RunPoll:
    """The state of a run at one moment.

    Attributes:
        outcome: How it ended; None if it has left no result.
        status: status.json, whose fields may be damaged; None if there is none, or unreadable.
        states: Its tasks as listed by the scheduler; None if that was not queried.
        error: Why its result cannot be read at the moment; None if it can.
    """

    outcome: Outcome | None
    status: Mapping[str, Any] | None
    states: Sequence[TaskState] | None
    error: OSError | None = None


@dataclass(frozen=True)
class RunHandle:
    """One submitted run.

    Attributes:
        dir: The run directory.
        label: Its overrides, as shown in tables.
        tasks: Names of its tasks, by slot.
        submission: The sweep's ``.hpc_elastic``.
        jobs: The submission that it is part of.
    """

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

    def poll(self, listed: Mapping[str, TaskState] | None) -> RunPoll:
        """Return the state of the run, from its files and the scheduler's list.

        A read that fails is no statement about the run: on NFS a file that is replaced every second
        may be stale before it is read, and a server may be away for minutes. Poll again.

        Args:
            listed: What `SubmittedJobs.list_tasks` returned; None if it was not called.
        """
        states = None if listed is None else list(states_of(self.tasks, listed).values())
        try:
            return RunPoll(self.read_outcome(), self._read_status(), states)
        except OSError as e:
            return RunPoll(None, self._read_status(), states, e)

    def read_outcome(self) -> Outcome | None:
        """Return how the run ended; None if it has not. A run with damaged files has failed.

        Raises:
            OSError: Its files cannot be read at the moment.
        """
        try:
            result = read_json(self.paths.result)
            if result is None:
                return None
            restarts = int(result.get("restarts") or 0)
            if result.get("status") == "succeeded":
                folder = results_folder(self.paths, result)
                files = folder.glob("rank-*.json") if folder else ()
                values = {
                    int(f.stem.removeprefix("rank-")): parse_json(read_text(f, VALUE_BYTES), f)
                    for f in sorted(files)
                }
                return Outcome(self, "succeeded", values, restarts, None)
            return Outcome(self, "failed", {}, restarts, self._failure(result))
        except (ValueError, TypeError, AttributeError, OverflowError) as e:
            file = self.paths.result
            what = f"the run has ended, but {file}, or a file it names, is damaged: {e}"
            see = f"what happened: hpc-elastic events {self.dir}"
            return Outcome(self, "failed", {}, 0, WorkerGroupError(f"{what}\n{see}"))

    def lost(self, last_seen: Mapping[str, str]) -> Outcome:
        """Return the outcome of the run if its tasks are gone without a result.

        Args:
            last_seen: The last state of each of its tasks.
        """
        mark = self.paths.cancellation()
        if mark is not None:
            error = WorkerGroupError(f"the run was cancelled{mark.by_whom}: {self.dir}")
            return Outcome(self, "cancelled", {}, 0, error)
        lines = [f"the run ended without a result: {self.dir}"]
        lines += [f"  task {task}: {last_seen.get(task, 'never seen')}" for task in self.tasks]
        lines += self.log_tails()
        return Outcome(self, "lost", {}, 0, WorkerGroupError("\n".join(lines)))

    def log_tails(self, num_files: int = 3) -> list[str]:
        """Return the last lines of the run's captured logs that are not empty, with their paths."""
        folder = Submission(self.submission).logs
        # a co-allocated job has a log of its batch script beside those of its tasks
        names = dict.fromkeys(n for task in self.tasks for n in (task, queue_name(task)))
        files = (folder / f"{name}.log" for name in names)
        written = [(file, text) for file in files if (text := read_tail(file))]
        shown = [
            line for file, text in written[:num_files] for line in (f"--- {file}", _quoted(text))
        ]
        return shown or [f"no task has written anything to {folder}"]

    def _read_status(self) -> dict[str, Any] | None:
        try:
            return read_json(self.paths.status)
        except (OSError, ValueError):
            return None

    def _failure(self, result: Mapping[str, Any]) -> WorkerGroupError:
        first, later = result.get("failure"), list(result.get("secondary_failures") or [])
        lines = [f"the run failed: {self.dir}"]
        lines += [_in_full(first)] if first else ["no worker's failure was recorded"]
        for failed in later:
            round_ = failed.get("round")
            when = "died afterwards"
            if first is not None and round_ not in (None, first.get("round")):
                when = f"failed in a later attempt, round {round_}"
            lines.append(f"  {_place(failed)}: {_cause(failed)} ({when})")
        lines += [f"logs: {self.dir / 'tasks'}", f"      {Submission(self.submission).logs}"]
        return WorkerGroupError("\n".join(lines), first, later)


def results_folder(run: RunDir, result: Mapping[str, Any]) -> Path | None:
    """Return the folder of return values that result.json names; None if it names none.

    Raises:
        DamagedFileError: It names one outside of the run.
    """
    name = result.get("results")
    if not name:
        return None
    folder = Path(str(name))
    is_inside = not folder.is_absolute() and ".." not in folder.parts
    if not is_inside or len(str(name)) > _LONGEST_NAME:
        raise DamagedFileError(f"{run.result} is damaged: its results are in {str(name)!r:.80}")
    return run.path / folder


def _in_full(first: Mapping[str, Any]) -> str:
    lines = [f"first failure: {_place(first)}: {_cause(first)}"]
    if first.get("traceback"):
        lines.append(_quoted(str(first["traceback"]).rstrip()))
    elif first.get("message") != _cause(first) and (first.get("exception") or first.get("message")):
        lines.append(_quoted(f"{first.get('exception') or 'error'}: {first.get('message') or ''}"))
    if first.get("remedy"):
        lines.append(str(first["remedy"]))
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text of the training's own so that it is not taken for ours."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _place(failed: Mapping[str, Any]) -> str:
    parts = [f"host {failed.get('host')}"]
    for key, word in (("rank", "rank"), ("local_rank", "local rank"), ("task", "task")):
        parts += [f"{word} {failed[key]}"] if failed.get(key) is not None else []
    return ", ".join(parts)


def _cause(failed: Mapping[str, Any]) -> str:
    if failed.get("phase") == "hang":
        return "hung"
    if failed.get("signal"):
        number = failed["signal"]
        return f"ended by {name_of(number) if isinstance(number, int) else number}"
    if failed.get("exit_code") is not None:
        if not failed.get("exception") and str(failed.get("message")).startswith("exited with"):
            return str(failed["message"])
        return f"exit code {failed['exit_code']}"
    return str(failed.get("exception") or failed.get("phase") or "failed")


def read_result_status(run: RunDir) -> str | None:
    """Return the status in result.json; None if the run has left none.

    Raises:
        RunDirectoryError: The file is damaged or unreadable.
    """
    try:
        result = read_json(run.result)
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.result}: not readable: {e}") from e
    return None if result is None else str(result.get("status"))


def mark_cancelled(run: RunDir, warn: Callable[[str], None]) -> None:
    """Mark a run as cancelled; an earlier mark stays.

    Raises:
        RunDirectoryError: The run belongs to another user.
    """
    if is_there(run.cancelled):
        return
    who = {"user": user(), "host": socket.gethostname(), "time": time.time()}
    try:
        write_atomic(run.cancelled, json.dumps(who) + "\n")
    except PermissionError as e:
        remedy = "only that user, or root, can cancel it"
        try:
            owner = run.path.owner()
        except (KeyError, OSError):
            owner = "another user"
        raise RunDirectoryError(f"{run.path} belongs to {owner}: {remedy}") from e
    except OSError as e:
        what = f"{run.cancelled} cannot be written ({e.strerror})"
        warn(f"{what}: the tasks are cancelled nevertheless; check later that none comes back")
        return
    EventLog(run.events(COMMANDS), COMMANDS).write("cancel", user=who["user"], host=who["host"])
