"""How long from the command to the first line of the training function, with nodes to spare or not.

Four nodes, two of them busy; a run of one to four nodes starts on the two that are free:

- ours: ``python script.py +launcher=slurm nodes=1:4``
- torchrun: ``sbatch -N2``, in it ``srun torchrun --nnodes=1:4 --rdzv-backend=c10d``, which is what
  torch offers for a group that may grow. It waits out its last call (30 s by default), since it
  does not know that nobody else will come; ``last_call_timeout=1`` is its best setting.

Both start the same script with one worker a node, on the same nodes, in turn. Needs the sandbox:

    eval "$(scripts/slurm_sandbox.py up | tail -n 1)"
    python benchmarks/start.py --repeats 3
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPT = """
import os, sys, time
import hydra

def first_line():
    with open(os.environ["FIRST_LINE"], "a") as f:
        f.write(f"{time.time()} {os.environ['WORLD_SIZE']}\\n")

@hydra.main(version_base=None)
def main(cfg):
    first_line()

if __name__ == "__main__":
    first_line() if "RANK" in os.environ else main()
"""
PATIENCE_S = 120.0
BIN = Path(sys.executable).parent


def first_line(out: Path) -> float:
    """Wait for the second worker to begin; return when it did (Unix seconds)."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        lines = out.read_text().split("\n")[:-1] if out.exists() else []
        if len(lines) >= 2:
            assert all(line.endswith(" 2") for line in lines), lines
            return max(float(line.split()[0]) for line in lines)
        time.sleep(0.02)
    raise TimeoutError("the script did not start")


def ours(folder: Path) -> list[str]:
    """Return our command."""
    return [sys.executable, str(folder / "script.py"), "+launcher=slurm", "nodes=1:4"]


def torchrun(folder: Path, conf: str) -> list[str]:
    """Return torchrun's command."""
    run = [
        "srun", "--ntasks-per-node=1", str(BIN / "torchrun"), "--nnodes=1:4", "--nproc-per-node=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=$(scontrol show hostnames | head -n1):29400",
        "--rdzv-id=$SLURM_JOB_ID", *([f"--rdzv-conf={conf}"] if conf else []),
        str(folder / "script.py"),
    ]  # fmt: skip
    return ["sbatch", "-N2", "--exclusive", "-o", str(folder / "log"), "--wrap", " ".join(run)]


def measure(make, repeats: int) -> list[float]:
    """Return the seconds of each repeat."""
    taken = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="start-") as name:
            folder, out = Path(name), Path(name, "first")
            (folder / "script.py").write_text(SCRIPT)
            env = {**os.environ, "FIRST_LINE": str(out)}
            begin = time.time()
            command = subprocess.Popen(
                make(folder), env=env, cwd=folder,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            taken.append(first_line(out) - begin)
            command.wait(PATIENCE_S)
            idle()
    return taken


def idle() -> None:
    """Wait until only the job that keeps two nodes busy is left."""
    while len(subprocess.check_output(["squeue", "-h"], text=True).splitlines()) > 1:
        time.sleep(0.1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    busy = subprocess.check_output(
        ["sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3600"],
        text=True,
    ).strip()
    candidates = {
        "hpc_elastic": ours,
        "torchrun c10d": lambda folder: torchrun(folder, ""),
        "torchrun c10d, last_call_timeout=1": lambda f: torchrun(f, "last_call_timeout=1"),
    }
    table = Table("", "median, s", "lowest, s", "highest, s", title="command to first line")
    try:
        for name, make in candidates.items():
            taken = measure(make, repeats)
            middle = statistics.median(taken)
            table.add_row(name, f"{middle:.1f}", f"{min(taken):.1f}", f"{max(taken):.1f}")
    finally:
        subprocess.run(["scancel", busy], check=False)
    Console().print(table)
    Console().print("target: hpc_elastic starts within 15 s")


if __name__ == "__main__":
    main()
