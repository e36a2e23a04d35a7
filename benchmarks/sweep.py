#!/usr/bin/env python3
"""How much sooner is a study of 64 unequal trials done if no trial waits for the slowest?

    as root: python benchmarks/sweep.py --repeats 3

METHODS.md says what is measured. Ours with a pruner is another study: it has less to do. The peer
needs Optuna 2 and SQLAlchemy 1, so it has an environment of its own in the user's cache, which is
made at the first use, and in which torch is that of this interpreter.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

from evidence.machine import load, package_version
from evidence.result import Column, Peer, Result, Table, Target, figure
from evidence.sandbox import sandbox_of
from evidence.show import about, among, options, present

from slurm_sandbox import SandboxConfig, SlurmSandbox

NUM_NODES = 4
SHORTEST_S, LONGEST_S = 4.0, 120.0
TARGET_RATIO = 1.5
PATIENCE_S = 1800.0
OURS, PEER, LAUNCHER = "hpc_elastic", "hydra-optuna-sweeper", "hydra-submitit-launcher"
PEER_PACKAGES = (
    "hydra-optuna-sweeper==1.2.0", "hydra-submitit-launcher==1.2.0", "hydra-core==1.3.*",
    "optuna<3", "sqlalchemy<2", "numpy<2", "setuptools<80",
)  # fmt: skip
ABOUT = about("A study of unequal trials")

SCRIPT = """
import json, socket, time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    job, started = HydraConfig.get().job, time.time()
    duration_s = json.loads(Path(cfg.folder, "durations.json").read_text())[job.num]
    num_steps = 40 if cfg.report else 1
    for step in range(1, num_steps + 1):
        time.sleep(duration_s / num_steps)
        if cfg.report:
            import hpc_elastic

            loss = abs(cfg.x - 3.0) + 1.0 / step
            hpc_elastic.report(step=step, loss=loss, total_steps=num_steps)
    done = {"started": started, "ended": time.time(), "node": socket.gethostname()}
    Path(cfg.folder, f"done-{job.num}.json").write_text(json.dumps(done))
    return (cfg.x - 3.0) ** 2


if __name__ == "__main__":
    main()
"""
CONFIG = "x: 1.0\nreport: false\nfolder: ???\n"


@dataclass(frozen=True)
class Contestant:
    name: str
    num_jobs: int
    is_ours: bool = True
    prunes: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, n_jobs={self.num_jobs}"

    def argv(self, python: Path, num_trials: int) -> list[str]:
        common = [
            "x=interval(0.0,10.0)", f"hydra.sweeper.n_trials={num_trials}",
            f"hydra.sweeper.n_jobs={self.num_jobs}", "hydra.sweep.dir=sweep",
        ]  # fmt: skip
        if not self.is_ours:
            node = ["hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1"]
            node += ["+hydra.launcher.additional_parameters.exclusive=true"]
            return [str(python), "script.py", "-m", "hydra/sweeper=optuna", *node, *common]
        # a worker that is kept ready for restarts would take CPU from the other nodes here
        ours = ["+launcher=slurm", "nodes=1", "nproc_per_node=1", "hydra/sweeper=elastic_optuna"]
        ours += ["launcher.agent.warm_workers=false"]
        ours += ["report=true", "hydra.sweeper.pruner=median"] if self.prunes else []
        return [sys.executable, "script.py", "-m", *ours, *common]


CONTESTANTS = {
    "ours-4": Contestant(OURS, 4),
    "peer-4": Contestant(PEER, 4, is_ours=False),
    "ours-8": Contestant(OURS, 8),
    "peer-8": Contestant(PEER, 8, is_ours=False),
    "peer-16": Contestant(PEER, 16, is_ours=False),
    "pruned-8": Contestant(f"{OURS} with a pruner", 8, prunes=True),
}


@dataclass(frozen=True)
class Timing:
    """One study; ``busy`` is the share of the nodes' time in which trials slept."""

    total_s: float
    busy: float
    num_done: int
    load: float


def durations(num: int) -> list[float]:
    drawn = random.Random(7)
    return [
        round(min(LONGEST_S, max(SHORTEST_S, drawn.lognormvariate(2.9, 1.2))), 2)
        for _ in range(num)
    ]


def peer_python() -> Path:
    """Return the interpreter of the peer's environment, which is made if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "hpc_elastic" / "benchmarks" / "optuna-sweeper-1.2.0"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
        subprocess.run(install, check=True)
        torch = find_spec("torch")
        assert torch is not None and torch.origin is not None
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n")  # after its own
        (folder / "complete").touch()
    return python


def run_study(
    contestant: Contestant, python: Path, num_trials: int, sandbox: SlurmSandbox
) -> Timing:
    """Run one study on a sandbox that is free, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "config.yaml").write_text(CONFIG.replace("???", name))
        (folder / "durations.json").write_text(json.dumps(durations(num_trials)))
        env = {**os.environ, **sandbox.env}
        if not contestant.is_ours:
            env.pop("PYTHONPATH", None)  # the peer's environment has Hydra plugins of its own
        started = time.monotonic()
        with (folder / "output.log").open("w") as log:
            done = subprocess.run(
                contestant.argv(python, num_trials), cwd=folder, stdout=log, stderr=log, env=env,
                timeout=PATIENCE_S,
            )  # fmt: skip
        total_s = time.monotonic() - started
        files = [folder / f"done-{n}.json" for n in range(num_trials)]
        ended = [json.loads(file.read_text()) for file in files if file.exists()]
        tail = (folder / "output.log").read_text()[-3000:]
    if done.returncode or (len(ended) != num_trials and not contestant.prunes):
        raise RuntimeError(f"{contestant.label}: {len(ended)} of {num_trials} trials\n{tail}")
    if len({each["node"] for each in ended}) > NUM_NODES:
        raise RuntimeError(f"{contestant.label}: more than {NUM_NODES} nodes")
    busy = sum(each["ended"] - each["started"] for each in ended) / (NUM_NODES * total_s)
    return Timing(total_s, busy, len(ended), load())


def result(timings: Mapping[str, list[Timing]], given: argparse.Namespace) -> Result:
    columns = (
        Column(""), Column("all done, s", ".0f"), Column("nodes busy, %", ".0f"),
        Column("trials to their end", ".0f"),
    )  # fmt: skip
    rows = tuple(
        (
            label,
            figure([t.total_s for t in measured]),
            figure([100 * t.busy for t in measured]),
            figure([float(t.num_done) for t in measured]),
        )
        for label, measured in timings.items()
        if measured
    )
    middle = {k: statistics.median(t.total_s for t in each) for k, each in timings.items() if each}
    targets = []
    for num in (4, 8):
        ours, theirs = Contestant(OURS, num).label, Contestant(PEER, num).label
        if ours in middle and theirs in middle:
            ratio = middle[theirs] / middle[ours]
            what = f"n_jobs={num}: times sooner than {PEER}"
            targets.append(Target(what, TARGET_RATIO, ratio, more_is_better=True))
    ideal_s = sum(durations(given.trials)) / NUM_NODES
    loads = [t.load for each in timings.values() for t in each]
    notes = (
        f"The sum of the times is {ideal_s:.0f} s for each of {NUM_NODES} nodes: no sweep can be "
        "faster. The longest is 120 s.",
        f"Studies at the same time: {given.at_a_time}, each on a Slurm sandbox of its own, on the "
        "same cores.",
        f"Load of the machine at the ends of the studies: {min(loads):.1f} to {max(loads):.1f}.",
    )
    versions = f"Optuna {package_version('optuna')} in ours, below 3 in the peer"
    return Result(
        about=ABOUT,
        tables=(Table(f"{given.trials} trials on {NUM_NODES} nodes", columns, rows),),
        targets=tuple(targets),
        peers=(Peer(PEER, "1.2.0", versions), Peer(LAUNCHER, "1.2.0")),
        notes=notes,
        repeats=given.repeats,
    )


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument(
        "--at-a-time", type=int, default=1, help="studies at the same time, each on its sandbox"
    )
    parser.add_argument("--only", type=among(CONTESTANTS), help="of these studies")
    given = parser.parse_args()
    chosen = [CONTESTANTS[name] for name in given.only or CONTESTANTS]
    python = peer_python()
    timings: dict[str, list[Timing]] = {contestant.label: [] for contestant in chosen}
    with contextlib.ExitStack() as stack:
        free: SimpleQueue[SlurmSandbox] = SimpleQueue()
        for number in range(given.at_a_time):
            config = SandboxConfig(name=f"study{number}", nodes=NUM_NODES)
            free.put(stack.enter_context(sandbox_of(config)))

        def run(contestant: Contestant) -> None:
            sandbox = free.get()
            try:
                timing = run_study(contestant, python, given.trials, sandbox)
            finally:
                free.put(sandbox)
            timings[contestant.label].append(timing)
            print(f"{contestant.label}: {timing}", flush=True)

        with ThreadPoolExecutor(given.at_a_time) as pool:
            for _ in pool.map(run, chosen * given.repeats):
                pass
    present(result(timings, given), given)


if __name__ == "__main__":
    main()
