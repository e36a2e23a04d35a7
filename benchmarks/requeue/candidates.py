"""The ways to come back from a preemption that `benchmarks/requeue.py` compares, one node each.

Each runs the same loop, which writes down when it begins: Python, torch imported, one line.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from submitit import SlurmExecutor
from submitit.helpers import Checkpointable

LOOP = """
import signal, sys, time
import torch

signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as f:
    f.write(f"{time.time()}\\n")
time.sleep(86400)
"""

OURS = """
import os, time
import hydra
from hpc_elastic import mark_checkpoint, should_checkpoint

@hydra.main(version_base=None)
def main(cfg):
    with open(cfg.begun, "a") as f:
        f.write(f"{time.time()}\\n")
    for step in range(1, 1 << 30):
        time.sleep(0.02)
        if should_checkpoint(step):
            mark_checkpoint(step=step)

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Candidate:
    """A job that was submitted, and a line for each time that its loop began."""

    task: str
    begun: Path

    def moments(self) -> list[float]:
        lines = self.begun.read_text().split("\n")[:-1] if self.begun.exists() else []
        return [float(line) for line in lines]


class Loop(Checkpointable):
    """The loop as a job of submitit's that can be resumed."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __call__(self) -> None:
        import torch  # noqa: F401

        with self.begun.open("a") as f:
            f.write(f"{time.time()}\n")
        time.sleep(86400)


def hpc_elastic(folder: Path, node: str) -> Candidate:
    script, begun = folder / "ours.py", folder / "ours.begun"
    script.write_text(OURS)
    options = ["+launcher=slurm", "nodes=1", "launcher.wait=false", f"+begun={begun}"]
    nodes = subprocess.check_output(["sinfo", "-h", "-N", "-o", "%N"], text=True).split()
    others = ",".join(sorted(set(nodes) - {node}))
    options += [f"launcher.exclude='{others}'", f"hydra.sweep.dir={folder}/sweep"]
    subprocess.run(
        [sys.executable, str(script), *options], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    job = (folder / "sweep" / ".hpc_elastic" / "array-0.jobid").read_text().strip()
    return Candidate(f"{job}_0", begun)


def submitits_checkpoint(folder: Path, node: str) -> Candidate:
    """Start a job of submitit's, which calls checkpoint() and requeues itself.

    By default it would not at a preemption: that sends SIGTERM, and submitit waits for USR2.
    """
    begun = folder / "submitit.begun"
    executor = SlurmExecutor(folder / "submitit")
    importable = f"export PYTHONPATH={Path(__file__).parents[1]}"
    executor.update_parameters(
        time=24 * 60, exclusive=True, setup=["export SUBMITIT_PREEMPT_SIGNAL=TERM", importable],
        additional_parameters={"nodelist": node}, stderr_to_stdout=True,
    )  # fmt: skip
    return Candidate(str(executor.submit(Loop(begun)).job_id), begun)


def plain_requeue(folder: Path, node: str) -> Candidate:
    """Start a job with ``sbatch --requeue`` that waits out its grace.

    One that ends by SIGTERM within the grace is FAILED for Slurm, and never comes back.
    """
    script, begun = folder / "plain.py", folder / "plain.begun"
    script.write_text(LOOP)
    argv = ["sbatch", "--parsable", "--requeue", "--exclusive", f"--nodelist={node}"]
    argv += [f"--output={folder}/plain.out", f"--wrap=srun {sys.executable} {script} {begun}"]
    job = subprocess.run(argv, check=True, text=True, capture_output=True).stdout.strip()
    return Candidate(job, begun)
