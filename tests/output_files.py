"""Files of output for tests: with the times at which they grew, and as a run directory has them."""

import json
import os
from pathlib import Path

from hpc_elastic.report.log_files import LogSource
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.run.log_index import IndexWriter
from specs import spec_of, started_run

EPOCH = 1_700_000_000.0


class Output:
    """A worker's file with its index."""

    def __init__(self, path, rank=0) -> None:
        self.path = path
        self.source = LogSource(path, "out", "7_0", 0, 1, rank, "n1")
        self._index = IndexWriter(path)

    def write(self, text: str, at: float) -> None:
        """Append, and let the agent see it then."""
        with self.path.open("a") as f:
            f.write(text)
        self._index.append(self.path.stat().st_size, EPOCH + at)
        os.utime(self.path, (EPOCH + at, EPOCH + at))


def make_run(folder: Path) -> RunDir:
    """Return a run directory with two tasks, of which the second was requeued, to another node."""
    submission = folder / ".hpc_elastic"
    (submission / "logs").mkdir(parents=True)
    (submission / "array-0.jobid").write_text("7\n")
    found = RunDir(folder / "run")
    entry = Entry("function", "train", module="m")
    spec = spec_of("id", 1, 2, 1, 0, entry, str(submission), [(0, 0), (0, 1)])
    started_run(found, spec)
    for task, attempt, host in [("7_0", 0, "n1"), ("7_1", 0, "n2"), ("7_1", 1, "n3")]:
        logs = found.attempt(task, attempt)
        logs.mkdir(parents=True)
        (logs / "agent.log").write_text("agent\n")
        event = {"time": 1.0, "kind": "task", "task": task, "attempt": attempt, "host": host}
        with found.events(task).open("a") as f:
            f.write(json.dumps(event) + "\n")
        for stream in ("out", "err"):
            (logs / f"round-{attempt + 1}.rank-{task[-1]}.{stream}").write_text(f"{stream}\n")
    (submission / "logs" / "7_1.log").write_text("slurm\n")
    (submission / "logs" / "8_0.log").write_text("another run's\n")
    return found
