"""Runs as they are after their submission, for tests that need the files only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_elastic.rundir import Entry, RunDir, RunSpec, Submission


def run_of(
    folder: Path, job_id: str, tasks: Sequence[tuple[int, int]], name: str = "run", **fields: Any
) -> RunDir:
    """Return a run with these slots, whose arrays have this job id; more follow: 7, 8..."""
    submission = Submission(folder / ".hpc_elastic")
    submission.path.mkdir(exist_ok=True)
    for number in dict.fromkeys(k for k, _ in tasks):
        submission.array(number).submitted_as(str(int(job_id) + number))
    run = RunDir(folder / name)
    entry = Entry("function", "f", "f.py")
    run.create(
        RunSpec("r", 2, len(tasks), 1, 0, entry, str(submission.path), list(tasks), **fields)
    )
    return run
