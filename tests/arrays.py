"""Runs as they are after their submission, for tests that need the files only."""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.slurm.local_queue import start_ticks
from specs import spec_of, started_run

GONE = 2**22 + 1
"""No process has this pid."""
ME = {"pid": os.getpid(), "started": start_ticks(os.getpid())}
"""A process that lives."""


def write_table(submission: Submission, **tasks: dict[str, Any]) -> None:
    """Write what a local launcher would, which is this process if nothing else is said."""
    launcher = {"launcher": ME["pid"], "launcher_started": ME["started"]}
    entry = {"pid": None, "started": None, "exit_code": None, "host": socket.gethostname()}
    table = {name: {**entry, **launcher, **task} for name, task in tasks.items()}
    submission.local_tasks.write_text(json.dumps(table))


def run_of(
    folder: Path, job_id: str, tasks: Sequence[tuple[int, int]], name: str = "run", **fields: Any
) -> RunDir:
    """Return a run with these slots, whose arrays have this job id; more follow: 7, 8..."""
    submission = Submission(folder / ".hpc_elastic")
    submission.path.mkdir(parents=True, exist_ok=True)
    for number in dict.fromkeys(k for k, _ in tasks):
        submission.array(number).submitted_as(str(int(job_id) + number))
    run = RunDir(folder / name)
    entry = Entry("function", "f", "f.py")
    low, slots = min(2, len(tasks)), list(tasks)
    spec = spec_of("r", low, len(slots), 1, 0, entry, str(submission.path), slots, **fields)
    started_run(run, spec)
    return run
