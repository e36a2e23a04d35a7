"""How long a node stays idle, or waits, between the end of a preemption and the preempted task.

    as root: python benchmarks/requeue.py --repeats 5

METHODS.md says what is measured, from the last command of the preempting job on:

- hpc_elastic: ``python script.py launcher=slurm nodes=1``, the real launcher. The whole run is
  taken, so nobody helps from outside;
- submitit's checkpoint(): its own requeue, with SUBMITIT_PREEMPT_SIGNAL=TERM, so that it takes
  notice of a preemption at all;
- plain ``sbatch --requeue``: Slurm's.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence.machine import package_version
from evidence.result import Column, Peer, Result, Table, Target, figure
from evidence.sandbox import sandbox_of
from evidence.show import about, options, present, say
from requeue.candidates import Candidate, hpc_elastic, plain_requeue, submitits_checkpoint

from hpc_elastic.run import job_of
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase
from slurm_sandbox import SandboxConfig
from slurm_sandbox.processes import wait_until

OURS = "hpc_elastic"
CANDIDATES: dict[str, Callable[[Path, str], Candidate]] = {
    OURS: hpc_elastic,
    "submitit checkpoint()": submitits_checkpoint,
    "sbatch --requeue": plain_requeue,
}
TARGET_S = 5.0
PATIENCE_S = 240.0
ABOUT = about("Preempted tasks run again")


@dataclass(frozen=True)
class Back:
    """When a task was back, in seconds after the preempting job's end."""

    runs_s: float
    begins_s: float


def preempt(
    jobs: Mapping[str, Candidate], folder: Path, nodes: list[str], for_s: float
) -> dict[str, Back]:
    """Take all nodes from their jobs, and return when each was back."""
    before = {name: len(job.moments()) for name, job in jobs.items()}
    ended = _take_nodes(folder, nodes, for_s)
    runs = _running_since(jobs)
    again = lambda: all(len(job.moments()) > before[name] for name, job in jobs.items())  # noqa: E731
    wait_until("all jobs begin again", again, PATIENCE_S)
    begun = {name: job.moments()[before[name]] for name, job in jobs.items()}
    return {name: Back(runs[name] - ended, begun[name] - ended) for name in jobs}


def _take_nodes(folder: Path, nodes: list[str], for_s: float) -> float:
    """Let a job take nodes for a while; return when it was done, by its own clock."""
    done = folder / f"done-{time.time_ns()}"
    argv = ["sbatch", "--partition=high", "--exclusive", "--no-requeue", "--output=/dev/null"]
    argv += [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    work = f"--wrap=sleep {for_s}; date +%s.%N > {done}"
    subprocess.run([*argv, work], check=True, stdout=subprocess.DEVNULL)
    time.sleep(for_s)
    is_done = lambda: done.exists() and bool(done.read_text())  # noqa: E731
    wait_until("the preempting job ends", is_done, PATIENCE_S)
    return float(done.read_text())


def _running_since(jobs: Mapping[str, Candidate]) -> dict[str, float]:
    """Wait until all jobs run; return since when each does, to a tenth of a second."""
    client = SlurmClient()
    since: dict[str, float] = {}

    def all_run() -> bool:
        states = client.tasks(job_of(job.task) for job in jobs.values())
        now = time.time()
        for name, job in jobs.items():
            if states[job.task].phase is Phase.RUNNING:
                since.setdefault(name, now)
        return len(since) == len(jobs)

    wait_until("all jobs run again", all_run, PATIENCE_S)
    return since


def measure(repeats: int, for_s: float) -> dict[str, list[Back]]:
    nodes = [f"node{n}" for n in range(1, len(CANDIDATES) + 1)]
    backs: dict[str, list[Back]] = {name: [] for name in CANDIDATES}
    with tempfile.TemporaryDirectory(prefix="requeue-") as name:
        folder = Path(name)
        jobs = {
            name: start(folder, node)
            for (name, start), node in zip(CANDIDATES.items(), nodes, strict=True)
        }
        try:
            begun = lambda: all(job.moments() for job in jobs.values())  # noqa: E731
            wait_until("all jobs begin", begun, PATIENCE_S)
            for _ in range(repeats):
                for name, back in preempt(jobs, folder, nodes, for_s).items():
                    backs[name].append(back)
                    say(f"{name}: runs {back.runs_s:.1f} s, begins {back.begins_s:.1f} s")
        finally:
            subprocess.run(["scancel", *(job.task for job in jobs.values())], check=False)
    return backs


def result(backs: Mapping[str, list[Back]], for_s: float, repeats: int) -> Result:
    columns = (Column(""), Column("runs, s", ".1f"), Column("begins, s", ".1f"))
    rows = tuple(
        (name, figure([b.runs_s for b in measured]), figure([b.begins_s for b in measured]))
        for name, measured in backs.items()
    )
    runs_s = statistics.median(b.runs_s for b in backs[OURS])
    return Result(
        about=ABOUT,
        tables=(Table(f"after a preemption of {for_s:g} s", columns, rows),),
        targets=(Target(f"{OURS} runs again", TARGET_S, runs_s, "s"),),
        peers=(Peer("submitit", package_version("submitit")),),
        repeats=repeats,
    )


def main() -> None:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--for-s", type=float, default=20.0, help="how long the nodes are taken")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write the single figures")
    given = parser.parse_args()
    with sandbox_of(SandboxConfig(name="requeue", nodes=len(CANDIDATES)), enter=True):
        backs = measure(given.repeats, given.for_s)
    if given.samples:
        figures = {name: [vars(back) for back in each] for name, each in backs.items()}
        given.samples.write_text(json.dumps(figures, indent=1) + "\n")
    present(result(backs, given.for_s, given.repeats), given)


if __name__ == "__main__":
    main()
