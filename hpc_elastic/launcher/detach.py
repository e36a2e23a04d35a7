"""Submission in the background: the launcher reports what it submitted, and the command returns.

`hpc-elastic submit` starts the user's script with the path of a report file in the environment. The
launcher appends a line to it for each submission, and a line at each stage before that, which
states what a killed launcher may have left (`launcher.submission_id`). Runs in Slurm outlive the
launcher. Runs of ``launcher=local`` end with it, so that launcher leaves the terminal: it continues
as a session of its own, with its output in the sweep directory. `hpc-elastic resume` uses
`in_background`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launcher.plan import Plan
from hpc_elastic.launcher.run_handle import SubmittedJobs
from hpc_elastic.run.directory import Submission

VARIABLE = "HPC_ELASTIC_REPORT"
"""Path of the file to which a launcher reports what it has submitted."""
ATTEMPT, PREPARING, STARTING, STARTED, ENDED = (
    "attempt", "preparing", "starting", "started", "ended",
)  # fmt: skip
"""Stages of a submission, in the order of its report; the command writes the first and the last."""


@cache
def report_file() -> Path | None:
    """Return the file to report to; None if this process was not started by `hpc-elastic submit`.

    The variable is removed from the environment, so that no task inherits it.
    """
    path = os.environ.pop(VARIABLE, None)
    return Path(path) if path else None


def report_submission(
    file: Path, plan: Plan, runs: Mapping[str, Path], jobs: SubmittedJobs
) -> None:
    """Report a submission, the first one only; a launcher of local runs leaves its terminal first.

    ``runs`` are the directories by run id. When a sweep's second batch is submitted, the command
    has returned.
    """
    log = None
    if plan.backend == "local":
        if _has_left():
            return
        log = log_of(plan)
        leave_terminal(log)
    entry = submission_of(
        plan.backend, str(plan.submission.parent), jobs.job_ids, jobs.result_job, runs,
        log=None if log is None else str(log), pid=None if log is None else os.getpid(),
    )  # fmt: skip
    append(file, entry)


def submission_of(
    launcher: str,
    sweep: str,
    job_ids: Sequence[str | None],
    result_job: str | None,
    runs: Mapping[str, Path],
    *,
    log: str | None,
    pid: int | None,
) -> dict[str, Any]:
    """Return a submission as `hpc-elastic submit --json` prints it."""
    return {
        "launcher": launcher,
        "sweep": sweep,
        "job_ids": list(job_ids),
        "result_job": result_job,
        "log": log,
        "pid": pid,
        "runs": [{"run_id": run_id, "run": str(path)} for run_id, path in runs.items()],
    }


def report_preparing(file: Path, sweep: Path) -> bool:
    """Report that files are written in a sweep directory; return whether they were before."""
    line = {"stage": PREPARING, "sweep": str(sweep)}
    if _has_left():
        return False
    is_known = line in read_lines(file)
    append(file, line)
    return is_known


def report_starting(file: Path, plan: Plan) -> None:
    """Report that a plan, whose files are written, is handed to Slurm or to this machine now."""
    if _has_left():
        return
    is_local = plan.backend == "local"
    line = {
        "stage": STARTING, "sweep": str(plan.submission.parent), "launcher": plan.backend,
        "arrays": [array.number for array in plan.arrays],
        "result_job": bool(getattr(plan.launcher, "result_job", False)),
        "log": str(log_of(plan)) if is_local else None, "pid": os.getpid() if is_local else None,
    }  # fmt: skip
    append(file, line)


def report_started(file: Path, plan: Plan) -> None:
    """Report that Slurm has a plan's jobs; local ones end with their launcher."""
    if plan.backend == "slurm":
        append(file, {"stage": STARTED})


def report_error(error: HpcElasticError) -> None:
    """Report the error with which the launcher ends."""
    file = report_file()
    if file is not None and not _has_left():
        append(file, {"error": error.to_json()})


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a report, also behind one that a killed process has left unfinished."""
    with file.open("ab+") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 1))
        separator = b"" if f.read() in (b"", b"\n") else b"\n"
        f.write(separator + json.dumps(line).encode() + b"\n")


def read_report(file: Path) -> list[dict[str, Any]]:
    """Return the submissions in a report file."""
    return [line for line in read_lines(file) if "runs" in line]


def read_error(file: Path) -> dict[str, str | None] | None:
    """Return the error of the last launcher in a report file; None if it has reported none."""
    found = None
    for line in read_lines(file):
        found = None if line.get("stage") == ATTEMPT else line.get("error", found)
    return found


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return all lines of a report file; one that is being written, or never was, is left out."""
    found = []
    for line in file.read_text().splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


def _has_left() -> bool:
    """Return whether this launcher has left its terminal: the command has its report."""
    return os.getsid(0) == os.getpid()


def log_of(plan: Plan) -> Path:
    """Return the output file of a launcher that has left its terminal."""
    return Submission(plan.submission).path / f"launcher-{plan.arrays[0].number}.log"


def leave_terminal(log: Path) -> None:
    """Continue as a session of its own, which outlives the terminal (main thread, once)."""
    os.setsid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.close(nothing)


def in_background(work: Callable[[Callable[[dict[str, Any]], None]], None]) -> dict[str, Any]:
    """Call a function in a process of its own, and return its report.

    ``work`` gets a function that sends the report, and may continue after that. The report is
    ``{"error": ...}`` if it failed before, and empty if it ended without one.
    """
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.close(reads)
        _run_and_exit(work, writes)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


def _run_and_exit(work: Callable[[Callable[[dict[str, Any]], None]], None], writes: int) -> None:
    is_open = True

    def send_once(report: dict[str, Any]) -> None:
        nonlocal is_open
        if is_open:
            os.write(writes, json.dumps(report).encode())
            os.close(writes)
        is_open = False

    code = 1
    try:
        work(send_once)
        code = 0
    except HpcElasticError as e:
        send_once({"error": e.to_json()})
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # its log is on a full disk
                stream.flush()
        os._exit(code)
