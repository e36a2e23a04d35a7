"""Whole runs on the sandbox, as tests start and watch them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.timeline import TimelineEntry, build_timeline
from hpc_elastic.run.events import problems, read_events

ROOT = Path(__file__).parents[2]
PATIENCE_S = float(os.environ.get("HPC_ELASTIC_PATIENCE_S", "240"))
SLOWLY = ("epochs=8", "pause_s=0.25")  # a minute, unless the test lets it hurry
_PAUSE = "time.sleep(cfg.pause_s)"
_IMPORT = "import time\n"
_HURRIES = f"""{_IMPORT}
from pathlib import Path

def hurries(folder, seen=[]):
    if not seen:  # listed: what a client of NFS answers for a path may be old
        seen += [path for path in Path(folder).iterdir() if path.name == "hurry"]
    return bool(seen)

"""


def unhurried(text: str, folder: Path) -> str:
    """Let an example's script make its pauses only until `Sweep.hurry` is called."""
    assert _PAUSE in text and _IMPORT in text
    pause = f"time.sleep(0 if hurries({str(folder)!r}) else cfg.pause_s)"
    return text.replace(_PAUSE, pause).replace(_IMPORT, _HURRIES)


def train_without_end(folder: Path) -> Path:
    """Return a copy of train.py that is `unhurried`, and does not tell when it will be done.

    Whether a late node is worth the restart would depend on how fast this machine is.
    """
    script = folder / "train.py"
    told = ", total_steps=sampler.total_steps"
    text = (ROOT / "train.py").read_text()
    assert told in text
    script.write_text(unhurried(text.replace(told, ""), folder))
    shutil.copy(ROOT / "train.yaml", folder)
    return script


def quoted(path: Path) -> str:
    """Return a path as Hydra's grammar of overrides reads it: as it is, if it can be."""
    text = str(path)
    if re.fullmatch(r"[\w/.-]+", text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


class Sweep:
    """One `python train.py -m launcher=slurm ...`, as a user's own process."""

    def __init__(
        self,
        folder: Path,
        env: dict[str, str],
        script: Path,
        *overrides: str,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder / "sweep"
        self.prefix = prefix
        argv = [
            *prefix, sys.executable, str(script), "-m", "launcher=slurm",
            f"hydra.sweep.dir={quoted(self.folder)}", *overrides,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            argv, env={**os.environ, **env}, cwd=folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def audit(self) -> subprocess.CompletedProcess[str]:
        """Let the audit of a run prove that every sample was trained exactly once an epoch."""
        argv = [*self.prefix, sys.executable, "-m", "hpc_elastic", "audit", str(self.run())]
        return subprocess.run(argv, text=True, capture_output=True)

    def run(self, number: int = 0) -> Path:
        """The directory of one run of the sweep."""
        return self.folder / str(number)

    def events(self, kind: str, number: int = 0) -> list[dict[str, Any]]:
        """The events of a kind of one run."""
        folder = self.run(number) / "events"
        return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []

    def group_sizes(self, number: int = 0) -> list[int]:
        """How many nodes each round of a run had."""
        return [e["nodes"] for e in self.events("round", number)]

    def result(self, number: int = 0) -> dict[str, Any]:
        """How a run ended."""
        return json.loads((self.run(number) / "result.json").read_text())

    def value(self, number: int = 0) -> Any:
        """What rank 0 of a run returned."""
        results = self.run(number) / self.result(number)["results"]
        return json.loads((results / "rank-0.json").read_text())

    def timeline(self, number: int = 0) -> list[TimelineEntry]:
        """The timeline of a run, as of `hpc-elastic events`."""
        return build_timeline(EventIndex(read_events(self.run(number) / "events")))

    def event_problems(self) -> list[str]:
        """What is wrong with the events that its runs have written."""
        events = (e for folder in self.folder.glob("*/events") for e in read_events(folder))
        return sorted({problem for event in events for problem in problems(event)})

    def hurry(self) -> None:
        """Let an `unhurried` script come to its end without further pauses."""
        (self.folder.parent / "hurry").touch()

    def output(self) -> str:
        """Wait for the launcher, and return all that it printed; the script is to hurry."""
        self.hurry()
        try:
            return self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the launcher did not return: {self.process.communicate()[0]}")


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


def hosts(sweep: Sweep) -> list[str]:
    """The nodes of the last round, in rank order."""
    return [m["host"] for m in sweep.events("round")[-1]["members"]]


def leader_host(sweep: Sweep) -> str:
    """The node whose agent leads."""
    last = sweep.events("leader")[-1]
    return next(e["host"] for e in sweep.events("task") if e["task"] == last["task"])


def busy(slurm, num_nodes: int) -> str:
    """Take nodes away for a while; return the job's id."""
    size = [f"-N{num_nodes}", "--exclusive"]
    sleeper = ["sbatch", "--parsable", *size, "-o", "/dev/null", "--wrap", "sleep 300"]
    job = slurm.run(sleeper).stdout.strip()
    running = ["squeue", "-h", "-j", job, "-t", "RUNNING", "-o", "%i"]
    eventually(lambda: slurm.run(running).stdout.strip() == job, "the other job runs")
    return job


def pending(slurm) -> list[str]:
    """Return the ids of all tasks that wait in the queue."""
    return slurm.run(["squeue", "-h", "-r", "-t", "PENDING", "-o", "%i"]).stdout.split()
