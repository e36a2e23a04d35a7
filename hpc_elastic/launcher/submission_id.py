"""A submission with an id: a call that is repeated submits nothing twice.

``hpc-elastic submit --id ID`` keeps two files of each id in the user's state folder:

    $XDG_STATE_HOME/hpc_elastic/ids/<ID>.json     the script, its overrides, and the host
    $XDG_STATE_HOME/hpc_elastic/ids/<ID>.report   how far it has come, see `launcher.detach`

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.launcher import detach, slurm
from hpc_elastic.launcher.run_handle import mark_cancelled
from hpc_elastic.run import registry
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, RunDir, Submission
from hpc_elastic.shared_files import create_atomic, make_folder, read_json, write_atomic
from hpc_elastic.slurm.client import SlurmClient

_FORM = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POLL_S = 0.1
_LOST_SBATCH_S = 120.0
"""Longest wait for a process with a batch script as its argument, which may be no sbatch."""
_INTERRUPTED = 130

Report = list[dict[str, Any]]


class Next(Enum):
    """What a call does with its id."""

    SUBMIT = "nothing was submitted: run the script"
    REPEAT = "all was submitted: print it again"
    WAIT = "an earlier call is at work"
    ADOPT = "the launcher ended before its report: look for what it has submitted"
    REFUSE = "a part was submitted, or all"


def decide(report: Report, *, is_over: bool) -> Next:
    """Return what a call does, by the report of the calls before it (pure).

    ``is_over``: no process of these calls is left.
    """
    begins = [at for at, line in enumerate(report) if line.get("stage") == detach.ATTEMPT]
    lines = [line for line in report[begins[-1] + 1 :] if "error" not in line] if begins else []
    submitted = [line for line in lines if "runs" in line]
    end = lines.pop() if lines and lines[-1].get("stage") == detach.ENDED else None
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
    if last.get("stage") == detach.STARTED or (
        last.get("stage") == detach.STARTING and not has_failed
    ):
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
    submit: Callable[[Path, int], tuple[int, Report]],
) -> tuple[int, Report]:
    """Submit a script under an id, unless it was submitted; return its exit code and submissions.

    ``submit`` runs the script: it gets the report file, and a file that the script inherits. Each
    submission gets the key ``repeated``. Raises ConfigError if the id is malformed, or that of
    another script or of other overrides, by which something may have been submitted;
    SubmissionError if it is unknown what was submitted.
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
            report = detach.read_lines(own.report)
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
                    detach.append(own.report, adopted)
            if step is Next.REFUSE:
                why = "its script ended early, after it had submitted runs, perhaps not all"
                raise _refusal(name, report, why)
            if step is Next.SUBMIT:
                assert inherited is not None
                detach.append(own.report, {"stage": detach.ATTEMPT})
                try:
                    code, submitted = submit(own.report, inherited)
                except KeyboardInterrupt:  # the script has taken back what it had started
                    detach.append(own.report, {"stage": detach.ENDED, "exit_code": _INTERRUPTED})
                    raise
                detach.append(own.report, {"stage": detach.ENDED, "exit_code": code})
                return code, [{**entry, "repeated": False} for entry in submitted]
            if step is Next.REPEAT:
                submitted = detach.read_report(own.report)
                return 0, [{**entry, "repeated": True} for entry in submitted]
        if not has_told:
            print(f"{name}: an earlier call is at work: waiting for it", file=sys.stderr)
            has_told = True
        time.sleep(_POLL_S)


def _refusal(name: str, report: Report, why: str) -> SubmissionError:
    sweep = next(line["sweep"] for line in reversed(report) if "sweep" in line)
    remedy = f"cancel what runs in {sweep} (hpc-elastic cancel), and submit with another --id"
    return SubmissionError(f"{name}: {why}: {remedy}", remedy=remedy)


def _adopt(name: str, report: Report) -> dict[str, Any] | None:
    """Return the submission of a launcher that was killed before its report; None: there is none.

    Raises SubmissionError if that is unknown, or it is one in part.
    """
    start = next(line for line in reversed(report) if line.get("stage") == detach.STARTING)
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
            mark_cancelled(RunDir(path), lambda text: print(text, file=sys.stderr))
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
    return detach.submission_of(
        start["launcher"], start["sweep"], job_ids, result_job, runs,
        log=start["log"], pid=start["pid"],
    )  # fmt: skip


def _find_lost(array: ArrayFiles) -> bool:
    """Look for the job of a batch script whose launcher was killed, and record it."""
    deadline = time.monotonic() + _LOST_SBATCH_S
    while _is_submitted_now(array.script) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    client = SlurmClient(env=dict(os.environ))
    job = slurm.look_for(array, client) or client.find_job(array.script)  # raises its error
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
