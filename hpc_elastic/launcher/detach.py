"""Submission by `hpc-elastic submit`: the launcher reports to it, and a repeated call does nothing.

`hpc-elastic submit` starts the user's script with the path of a report file in the environment. The
launcher appends a line to it for each submission, and a line at each stage before that, which
states what a killed launcher may have left. Runs in Slurm outlive the launcher. Runs of
``launcher=local`` end with it, so that launcher leaves the terminal: it continues as a session of
its own, with its output in the sweep directory. `hpc-elastic resume` uses `in_background`.

With ``--id ID``, a call that is repeated submits nothing twice. Each id has two files in the user's
state folder:

    $XDG_STATE_HOME/hpc_elastic/ids/<ID>.json     the script, its overrides, and the host
    $XDG_STATE_HOME/hpc_elastic/ids/<ID>.report   the report: how far it has come

A call holds the id while it is at work: an abstract Unix socket, bound to a name that is made of
the record's path. The script inherits it. The kernel frees the name when both have ended, however
they end; no file system has to support locks for that. The name is known on one host only, so a
call on another host cannot know whether the first one is still at work, and is refused.

`decide` is the rule. If the launcher was killed between the start of a submission and its report,
`_adopt` looks for what it has left: job ids beside the batch scripts, and jobs of these scripts in
Slurm. If Slurm lists none, one may still follow. Its runs are marked as cancelled then, so that its
tasks end at their start, and the id is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hpc_elastic.errors import ConfigError, HpcElasticError, SubmissionError
from hpc_elastic.launcher.plan import Plan
from hpc_elastic.launcher.run_handle import SubmittedJobs
from hpc_elastic.run import registry
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, RunDir, Submission
from hpc_elastic.shared_files import create_atomic, make_folder, read_json, write_atomic
from hpc_elastic.slurm.client import SlurmClient

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


def report_preparing(sweep: Path) -> bool:
    """Report that files are written in a sweep directory; return whether they were before."""
    file, line = report_file(), {"stage": PREPARING, "sweep": str(sweep)}
    is_known = file is not None and not _has_left() and line in read_lines(file)
    _report(line)
    return is_known


def report_starting(plan: Plan) -> None:
    """Report that a plan, whose files are written, is handed to Slurm or to this machine now."""
    is_local = plan.backend == "local"
    _report({
        "stage": STARTING, "sweep": str(plan.submission.parent), "launcher": plan.backend,
        "arrays": [array.number for array in plan.arrays],
        "result_job": bool(getattr(plan.launcher, "result_job", False)),
        "log": str(log_of(plan)) if is_local else None, "pid": os.getpid() if is_local else None,
    })  # fmt: skip


def report_started(plan: Plan) -> None:
    """Report that Slurm has a plan's jobs; local ones end with their launcher."""
    if plan.backend == "slurm":
        _report({"stage": STARTED})


def report_submission(plan: Plan, runs: Mapping[str, Path], jobs: SubmittedJobs) -> None:
    """Report a submission, the first one only; a launcher of local runs leaves its terminal first.

    ``runs`` are the directories by run id. When a sweep's second batch is submitted, the command
    has returned.
    """
    file, log = report_file(), None
    if file is None:
        return
    if plan.backend == "local":
        if _has_left():
            return
        log = log_of(plan)
        leave_terminal(log)
    entry = _submission(
        plan.backend, str(plan.submission.parent), jobs.job_ids, jobs.result_job, runs,
        log=None if log is None else str(log), pid=None if log is None else os.getpid(),
    )  # fmt: skip
    append(file, entry)


def report_error(error: HpcElasticError) -> None:
    """Report the error with which the launcher ends."""
    _report({"error": error.to_json()})


def _report(line: Mapping[str, Any]) -> None:
    file = report_file()
    if file is not None and not _has_left():
        append(file, line)


def _has_left() -> bool:
    """Return whether this launcher has left its terminal: the command has its report."""
    return os.getsid(0) == os.getpid()


def _submission(
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
    for fd, opened in enumerate((nothing, output, output)):
        os.dup2(opened, fd)
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


# ---- a submission with an id

_FORM = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POLL_S = 0.1
_LOST_SBATCH_S = 120.0
"""Longest wait for a process with a batch script as its argument, which may be no sbatch."""
_INTERRUPTED = 130

Lines = list[dict[str, Any]]


class Next(Enum):
    """What a call does with its id."""

    SUBMIT = "nothing was submitted: run the script"
    REPEAT = "all was submitted: print it again"
    WAIT = "an earlier call is at work"
    ADOPT = "the launcher ended before its report: look for what it has submitted"
    REFUSE = "a part was submitted, or all"


def decide(report: Lines, *, is_over: bool) -> Next:
    """Return what a call does, by the report; ``is_over``: no earlier process is left (pure)."""
    begins = [at for at, line in enumerate(report) if line.get("stage") == ATTEMPT]
    lines = [line for line in report[begins[-1] + 1 :] if "error" not in line] if begins else []
    submitted = [line for line in lines if "runs" in line]
    end = lines.pop() if lines and lines[-1].get("stage") == ENDED else None
    code = None if end is None else end["exit_code"]
    if code == 0 and submitted:
        return Next.REPEAT
    if submitted and submitted[-1]["launcher"] == "local":  # it goes on, and holds the id
        return Next.REPEAT
    if not is_over:
        return Next.WAIT
    last = lines[-1] if lines else {}
    if submitted:
        return Next.REPEAT if code is None and last is submitted[-1] else Next.REFUSE
    has_failed = code is not None and code >= 0  # it has taken back what it had started
    if last.get("stage") == STARTED or (last.get("stage") == STARTING and not has_failed):
        return Next.ADOPT
    return Next.SUBMIT


@dataclass(frozen=True)
class _Id:
    """The files of an id."""

    name: str

    @property
    def record(self) -> Path:
        return registry.folder().parent / "ids" / f"{self.name}.json"

    @property
    def report(self) -> Path:
        return self.record.with_suffix(".report")

    def read_or_make(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the record; without one, make that of a first call."""
        known = read_json(self.record)
        if known is None:
            make_folder(self.record.parent, parents=True, mode=0o700)
            create_atomic(self.record, json.dumps(given) + "\n", mode=0o600)
            known = read_json(self.record) or given
        return known

    @contextmanager
    def held(self) -> Iterator[int | None]:
        """Hold the id, and yield a file that children inherit; None if it is held already."""
        name = hashlib.sha256(os.fsencode(self.record.resolve())).hexdigest()
        with socket.socket(socket.AF_UNIX) as held:
            is_ours = True
            try:
                held.bind(f"\0hpc_elastic-{os.getuid()}-{name[:32]}")
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
                is_ours = False
            yield held.fileno() if is_ours else None


def submit_once(
    name: str,
    script: str,
    overrides: Sequence[str],
    submit: Callable[[Path, int], tuple[int, Lines]],
) -> tuple[int, Lines]:
    """Submit a script under an id, unless it was submitted; return its exit code and submissions.

    ``submit`` gets the report file, and a file that the script inherits. Each submission gets the
    key ``repeated``. Raises ConfigError if the id is malformed, or that of another script or of
    other overrides, by which something may have been submitted; SubmissionError if it is unknown
    what was submitted.
    """
    if not _FORM.fullmatch(name):
        raise ConfigError("--id", name, "give 1 to 64 letters, digits, `.`, `_` or `-`")
    own, has_told = _Id(name), False
    what: dict[str, Any] = {"script": str(Path(script).resolve()), "overrides": list(overrides)}
    given = {**what, "host": socket.gethostname(), "token": secrets.token_hex(8)}
    while True:
        with own.held() as inherited:
            known = own.read_or_make(given)
            host = str(known["host"])
            own.report.touch(mode=0o600)
            report = read_lines(own.report)
            is_here = host == socket.gethostname()
            step = decide(report, is_over=inherited is not None and is_here)
            if any(known.get(key) != what[key] for key in what):
                if step is not Next.SUBMIT:
                    old, new = (shlex.join([c["script"], *c["overrides"]]) for c in (known, given))
                    remedy = f"it is the id of `{old}`, not of `{new}`: give another id for that"
                    raise ConfigError("--id", name, remedy)
                write_atomic(own.record, json.dumps(given) + "\n", mode=0o600)
            if step is Next.WAIT and not is_here:
                why = f"only {host} knows whether the call there is still at work"
                remedy = "repeat it there, or give another --id"
                raise SubmissionError(f"{name}: {why}: {remedy}", remedy=remedy)
            if step is Next.ADOPT:
                adopted = _adopt(name, report)
                step = Next.SUBMIT if adopted is None else Next.REPEAT
                if adopted is not None:
                    append(own.report, adopted)
            if step is Next.REFUSE:
                why = "its script ended early, after it had submitted runs, perhaps not all"
                raise _refusal(name, report, why)
            if step is Next.SUBMIT:
                assert inherited is not None
                append(own.report, {"stage": ATTEMPT})
                try:
                    code, submitted = submit(own.report, inherited)
                except KeyboardInterrupt:  # the script has taken back what it had started
                    append(own.report, {"stage": ENDED, "exit_code": _INTERRUPTED})
                    raise
                append(own.report, {"stage": ENDED, "exit_code": code})
                return code, [{**entry, "repeated": False} for entry in submitted]
            if step is Next.REPEAT:
                submitted = read_report(own.report)
                return 0, [{**entry, "repeated": True} for entry in submitted]
        if not has_told:
            print(f"{name}: an earlier call is at work: waiting for it", file=sys.stderr)
            has_told = True
        time.sleep(_POLL_S)


def _refusal(name: str, report: Lines, why: str) -> SubmissionError:
    sweep = next(line["sweep"] for line in reversed(report) if "sweep" in line)
    remedy = f"cancel what runs in {sweep} (hpc-elastic cancel), and submit with another --id"
    return SubmissionError(f"{name}: {why}: {remedy}", remedy=remedy)


def _adopt(name: str, report: Lines) -> dict[str, Any] | None:
    """Return what a killed launcher has submitted; SubmissionError if unknown or a part."""
    start = next(line for line in reversed(report) if line.get("stage") == STARTING)
    submission = Submission(Path(start["sweep"]) / SUBMISSION)
    arrays = [submission.array(number) for number in start["arrays"]]
    if not all(array.tasks.exists() for array in arrays):  # withdrawn: sbatch has refused it
        return None
    dirs = dict.fromkeys(path for array in arrays for path in array.run_dirs())
    runs = {RunDir(path).load().run_id: path for path in dirs}
    missing = next((array for array in arrays if array.job_id is None), None)
    if missing is not None and start["launcher"] == "local":
        return None
    if missing is not None and not _find_lost(missing):
        for path in dirs:
            registry.mark_cancelled(RunDir(path), lambda text: print(text, file=sys.stderr))
        why = f"it was killed while it submitted {missing.script}, and Slurm lists no job of it"
        ends = "its runs are marked as cancelled, so that a task of theirs that starts ends at once"
        raise _refusal(name, report, f"{why}; {ends}")
    job_ids = [array.job_id for array in arrays]
    if None in job_ids:
        raise _refusal(name, report, "only a part of its runs was submitted")
    result_job = None
    if start["launcher"] == "local":
        note = "its launcher has ended: `hpc-elastic resume RUN` continues a run without tasks"
        print(f"{name}: {note}", file=sys.stderr)
    elif start["result_job"]:
        script = submission.path / f"result-{arrays[0].number}.sbatch"
        result_job = SlurmClient(env=dict(os.environ)).find_job(script)
        if result_job is None:
            print(f"{name}: there is no job of launcher.result_job", file=sys.stderr)
    if unlisted := runs.keys() - {run.run_id for run in registry.newest_first()}:
        registry.add({run_id: path for run_id, path in runs.items() if run_id in unlisted})
    return _submission(
        start["launcher"], start["sweep"], job_ids, result_job, runs,
        log=start["log"], pid=start["pid"],
    )  # fmt: skip


def _find_lost(array: ArrayFiles) -> bool:
    """Look for the job of a batch script whose launcher was killed, and record it."""
    deadline = time.monotonic() + _LOST_SBATCH_S
    while _is_submitted_now(array.script) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    client = SlurmClient(env=dict(os.environ))
    from hpc_elastic.launcher.slurm import look_for

    job = look_for(array, client) or client.find_job(array.script)  # raises its error
    if job is not None:
        array.submitted_as(job)
    return job is not None


def _is_submitted_now(script: Path) -> bool:
    """Return whether a process of this host has a batch script as an argument, such as sbatch."""
    wanted = os.fsencode(script)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in process.read_bytes().split(b"\0"):
                return True
        except OSError:  # it has ended
            continue
    return False
