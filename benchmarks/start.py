"""How long from the command to the first line of the training function, with nodes to spare or not.

    as root: python benchmarks/start.py --repeats 3

METHODS.md says what is measured. Ours is ``python script.py +launcher=slurm nodes=1:4``; torchrun
is ``srun torchrun --nnodes=1:4`` in ``sbatch -N2``, which is what torch offers for a group that may
grow. Both start the same script with one worker a node, on the same nodes, in turn.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from evidence import torchrun as peer
from evidence.result import Column, Result, Table, Target, figure
from evidence.sandbox import sandbox_of
from evidence.show import about, options, present

from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.run.events import read_events
from slurm_sandbox import SandboxConfig

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
WARM = """
import os
from hpc_elastic.agent import signals, warm_workers
signals.set_up_worker()
warm_workers.wait_for_use(os.environ["HPC_ELASTIC_WARM_WORKER"], ["torch"])
"""
HELD = """
import os, sys, time
if "hpc_elastic.agent" in sys.orig_argv and os.environ["SLURMD_NODENAME"] == "local-1":
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
"""
"""Keeps the second agent of a run from its start."""
WAITS, LEADS = "MB (PSS): an agent that waits", "s: an agent, to the term that it leads"
JOINS = "s: a second agent, to the first line of both"
SOCKETS, IMPORTS = "MB (PSS): Python with asyncio", "s: import torch, torch._dynamo"
PATIENCE_S = 120.0
TARGET_S, TARGET_MB = 3.1, 45.0
OURS = "hpc_elastic"
ABOUT = about("From the command to the first line")


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
    return [sys.executable, str(folder / "script.py"), "+launcher=slurm", "nodes=1:4"]


def torchrun(folder: Path, conf: str) -> list[str]:
    run = [
        "srun", "--ntasks-per-node=1", str(peer.TORCHRUN), "--nnodes=1:4", "--nproc-per-node=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=$(scontrol show hostnames | head -n1):29400",
        "--rdzv-id=$SLURM_JOB_ID", *([f"--rdzv-conf={conf}"] if conf else []),
        str(folder / "script.py"),
    ]  # fmt: skip
    return ["sbatch", "-N2", "--exclusive", "-o", str(folder / "log"), "--wrap", " ".join(run)]


def measure(make: Callable[[Path], list[str]], repeats: int) -> list[float]:
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
            while len(subprocess.check_output(["squeue", "-h"], text=True).splitlines()) > 1:
                time.sleep(0.1)  # until only the job that keeps two nodes busy is left
    return taken


def warm(how: str, num: int) -> tuple[float, float, float]:
    """Return when warm workers are ready (s), and their CPU time (s) and memory (MB, PSS)."""
    pool, begin = WarmWorkerPool(num, [sys.executable, "-c", WARM], how), time.monotonic()
    pool.fill(paced=False)
    assert pool.await_imports(PATIENCE_S)
    ready_s, processes = time.monotonic() - begin, [psutil.Process(pid) for pid in pool.pids]
    cpu_s = sum(sum(process.cpu_times()[:2]) for process in processes)
    mb = sum(map(pss, pool.pids))
    pool.close()
    return ready_s, cpu_s, mb


def pss(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().pss / 1e6)


def agents() -> dict[str, float]:
    """Let an agent lead and wait on this machine until a second one comes, and beside it floors."""
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder, out, go = Path(name), Path(name, "first"), Path(name, "go")
        (folder / "script.py").write_text(SCRIPT)
        (folder / "sitecustomize.py").write_text(HELD)
        env = {**os.environ, "FIRST_LINE": str(out), "GO": str(go)}
        env["PYTHONPATH"] = f"{folder}{os.pathsep}{env.get('PYTHONPATH', '')}"
        run = ["+launcher=local", "nodes=2", f"hydra.sweep.dir={folder}"]
        command = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), "-m", *run], env=env, cwd=folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        kinds: dict[str, dict[str, Any]] = {}
        while "leader" not in kinds:
            time.sleep(0.02)
            events = folder / "0" / "events"
            kinds = {e["kind"]: e for e in (read_events(events) if events.is_dir() else ())}
        time.sleep(1.0)
        found = {WAITS: pss(kinds["task"]["pid"])}
        found[LEADS] = kinds["leader"]["time"] - kinds["task"]["started"]
        go.touch()
        found[JOINS] = first_line(out) - go.stat().st_mtime
        command.wait(PATIENCE_S)
    floor = [sys.executable, "-c", "import asyncio; print(1, flush=True); input()"]
    with subprocess.Popen(floor, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        found[SOCKETS] = pss(process.pid)
        process.kill()
    begin = time.time()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True)
    return {**found, IMPORTS: time.time() - begin}


def main() -> None:
    given = options(__doc__, repeats=3).parse_args()
    candidates = {
        OURS: ours,
        "torchrun c10d": lambda folder: torchrun(folder, ""),
        "torchrun c10d, last_call_timeout=1": lambda f: torchrun(f, "last_call_timeout=1"),
    }
    with sandbox_of(SandboxConfig(name="start", nodes=4), enter=True):
        busy = ["-N2", "--exclusive", "-o", "/dev/null", "--chdir=/", "--wrap", "sleep 3600"]
        subprocess.run(["sbatch", *busy], check=True, stdout=subprocess.DEVNULL)
        taken = {name: measure(make, given.repeats) for name, make in candidates.items()}
    kinds = [(how, num) for how in ("fork", "spawn") for num in (1, 8)]
    warmed = {kind: [warm(*kind) for _ in range(given.repeats)] for kind in kinds}
    names = ("ready after, s", "CPU, s", "PSS, MB")
    table = Table(
        "warm workers of a node, with torch and torch._dynamo",
        (Column(""), *(Column(name, ".3g") for name in names)),
        tuple((f"{how}, {n}", *map(figure, zip(*warmed[how, n], strict=True))) for how, n in kinds),
    )
    one, eight = (statistics.median(s for s, *_ in warmed["fork", n]) for n in (1, 8))
    alone = [agents() for _ in range(given.repeats)]
    rows = tuple((name, figure(seconds)) for name, seconds in taken.items())
    median = statistics.median(taken[OURS])
    result = Result(
        about=ABOUT,
        tables=(
            Table("command to first line", (Column(""), Column("s", ".1f")), rows),
            table,
            Table(
                "two agents on one machine",
                (Column(""), Column("", ".2f")),
                tuple((name, figure([each[name] for each in alone])) for name in alone[0]),
            ),
        ),
        targets=(
            Target(f"{OURS}: the first line", TARGET_S, median, "s"),
            Target("8 warm workers ready, of one", 1.3, eight / one, ""),
            Target(WAITS, TARGET_MB, statistics.median(each[WAITS] for each in alone), "MB"),
        ),
        peers=(peer.peer(),),
        repeats=given.repeats,
    )
    present(result, given)


if __name__ == "__main__":
    main()
