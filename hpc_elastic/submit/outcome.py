"""How a run ended, in the words of result.json, of its log files, and of an exception.

The first failure is what the user must see in full; whoever died of it afterwards is one line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.agent.signals import name_of
from hpc_elastic.errors import WorkerGroupError
from hpc_elastic.files import is_there, read_json
from hpc_elastic.rundir import RunDir, Submission
from hpc_elastic.slurm.states import queue_name
from hpc_elastic.submit.backend import TrackedRun

TAIL_LINES = 20


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        run: The run.
        status: ``lost``: its tasks are gone, and it has left no result; ``cancelled``: for it was
            cancelled by `hpc-elastic cancel`.
        values: Return values of the workers, by global rank.
        restarts: How many restarts it spent.
        error: What to raise; None if it succeeded.
    """

    run: TrackedRun
    status: Literal["succeeded", "failed", "lost", "cancelled"]
    values: dict[int, Any]
    restarts: int
    error: WorkerGroupError | None

    @property
    def value(self) -> Any:
        """Return what rank 0 returned."""
        return self.values.get(0)


def read_outcome(run: TrackedRun) -> Outcome | None:
    """Return how a run ended; None if it has not. One whose files are damaged has failed.

    Raises:
        OSError: its files can not be read just now, so nobody knows.
    """
    try:
        result = read_json(run.paths.result)
        return None if result is None else _outcome(run, result)
    except (ValueError, TypeError, AttributeError) as e:
        told = f"the run has ended, but {run.paths.result}, or what it names, is damaged: {e}"
        see = f"what happened is told by: hpc-elastic events {run.dir}"
        return Outcome(run, "failed", {}, 0, WorkerGroupError(f"{told}\n{see}"))


def _outcome(run: TrackedRun, result: Mapping[str, Any]) -> Outcome:
    restarts = int(result.get("restarts") or 0)
    if result.get("status") == "succeeded":
        return Outcome(run, "succeeded", read_values(run.dir, result), restarts, None)
    return Outcome(run, "failed", {}, restarts, failure(run, result))


def read_values(run: Path, result: Mapping[str, Any]) -> dict[int, Any]:
    """Return what each worker returned in the last round, by global rank."""
    if not result.get("results"):
        return {}
    folder = run / str(result["results"])
    files = sorted(folder.glob("rank-*.json"))
    return {int(f.stem.removeprefix("rank-")): json.loads(f.read_text()) for f in files}


def failure(run: TrackedRun, result: Mapping[str, Any]) -> WorkerGroupError:
    """Return the error of a run whose workers failed."""
    first = result.get("failure")
    victims = list(result.get("victims") or [])
    lines = [f"the run failed: {run.dir}"]
    lines += [_in_full(first)] if first else ["no worker's failure was recorded"]
    lines += [f"  {_where(victim)}: {_how(victim)} ({_when(victim, first)})" for victim in victims]
    lines += [f"logs: {run.dir / 'tasks'}", f"      {Submission(run.submission).logs}"]
    return WorkerGroupError("\n".join(lines), first, victims)


def lost(run: TrackedRun, last_seen: Mapping[str, str]) -> Outcome:
    """Return the outcome of a run whose tasks are gone without a result.

    Args:
        run: The run.
        last_seen: What Slurm last said of each of its tasks.
    """
    mark = cancellation(run.paths)
    if mark is not None:
        error = WorkerGroupError(f"the run was cancelled{mark.by_whom}: {run.dir}")
        return Outcome(run, "cancelled", {}, 0, error)
    lines = [f"the run ended without a result: {run.dir}"]
    lines += [f"  task {task}: {last_seen.get(task, 'never seen')}" for task in run.tasks]
    lines += log_tails(run)
    return Outcome(run, "lost", {}, 0, WorkerGroupError("\n".join(lines)))


@dataclass(frozen=True)
class Cancellation:
    """What ``<run>/cancelled`` says.

    Attributes:
        user: Who cancelled the run.
        host: Where.
        time: Unix seconds; 0 if unknown.
    """

    user: str = ""
    host: str = ""
    time: float = 0.0

    @property
    def by_whom(self) -> str:
        """Return `` by USER on HOST at TIME``, as far as it is known."""
        parts = [("by", self.user), ("on", self.host)]
        at = time.strftime("%F %T", time.localtime(self.time)) if self.time else ""
        return "".join(f" {word} {value}" for word, value in [*parts, ("at", at)] if value)


def cancellation(run: RunDir) -> Cancellation | None:
    """Return who cancelled a run; None if nobody did."""
    try:
        if not is_there(run.cancelled):
            return None
        raw = read_json(run.cancelled) or {}
        return Cancellation(str(raw["user"]), str(raw["host"]), float(raw["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Cancellation()  # torn by a full disk: it was cancelled all the same


def log_tails(run: TrackedRun, num_files: int = 3) -> list[str]:
    """Return the last lines of the run's logs that say anything, and where they are."""
    folder = Submission(run.submission).logs
    said = [(f, text) for f in _logs(folder, run.tasks) if (text := tail(f))]
    shown = [line for file, text in said[:num_files] for line in (f"--- {file}", text)]
    return shown or [f"no task has written anything to {folder}"]


def tail(path: Path, num_lines: int = TAIL_LINES, at_most_bytes: int = 32_768) -> str:
    """Return the last lines of a file; nothing if it can not be read."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - at_most_bytes))
            text = f.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:]).strip()


def _logs(folder: Path, tasks: Sequence[str]) -> Iterable[Path]:
    """Return the logs of tasks, and for those of a gang that of its batch script as well."""
    names = dict.fromkeys(name for task in tasks for name in (task, queue_name(task)))
    return (folder / f"{name}.log" for name in names)


def _in_full(first: Mapping[str, Any]) -> str:
    lines = [f"first failure: {_where(first)}: {_how(first)}"]
    if first.get("traceback"):
        lines.append(str(first["traceback"]).rstrip())
    elif first.get("message") != _how(first) and (first.get("exception") or first.get("message")):
        lines.append(f"{first.get('exception') or 'error'}: {first.get('message') or ''}")
    if first.get("remedy"):
        lines.append(str(first["remedy"]))
    return "\n".join(lines)


def _when(victim: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Say how a failure follows the first one: of the same attempt, or of a later one."""
    round_ = victim.get("round")
    if first is None or round_ in (None, first.get("round")):
        return "died afterwards"
    return f"failed in a later attempt, round {round_}"


def _where(failed: Mapping[str, Any]) -> str:
    parts = [f"host {failed.get('host')}"]
    parts += [f"rank {failed['rank']}"] if failed.get("rank") is not None else []
    parts += [f"local rank {failed['local_rank']}"] if failed.get("local_rank") is not None else []
    parts += [f"task {failed['task']}"] if failed.get("task") else []
    return ", ".join(parts)


def _how(failed: Mapping[str, Any]) -> str:
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
