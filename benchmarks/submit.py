#!/usr/bin/env python3
"""How long does it take to submit one sweep of 200 runs of 4 nodes each?

    pip install -e .[bench] and, as root: python benchmarks/submit.py --repeats 3

On a Slurm sandbox of its own, everything held, so that nothing starts while the clock runs:

- bare sbatch: one array of 800 one-node tasks; the floor, it knows nothing of runs;
- hpc_elastic: the whole command `python script.py -m +launcher=slurm ...`; one array of 800 tasks;
- hydra-submitit-launcher: likewise, one array of 200 jobs of 4 nodes, which is its idea of the same
  sweep. It would wait for the results, so it is ended at the point where it begins to.

Two times are told: the whole command, and the part of it inside the launcher. The rest is not the
launcher's: interpreter, imports, and Hydra's sweeper, which composes every config before it calls
the launcher (about 0.06 s each). The script itself imports nothing but Hydra.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_elastic.testing.slurm_sandbox import SandboxConfig, SlurmSandbox

TARGET_ABOVE_BARE_S = 2.0

SCRIPT = """
import os, time
from pathlib import Path

import hydra
from hydra.core.plugins import Plugins

instantiate_launcher = Plugins.instantiate_launcher


def instantiate_timed(self, **kwargs):
    launcher = instantiate_launcher(self, **kwargs)
    launch = launcher.launch

    def timed(*args, **kwargs):
        started = time.monotonic()
        try:
            return launch(*args, **kwargs)
        finally:
            Path(os.environ["LAUNCH_S"]).write_text(str(time.monotonic() - started))

    launcher.launch = timed
    return launcher


def stop_instead_of_waiting(self):
    raise SystemExit(0)


Plugins.instantiate_launcher = instantiate_timed
if "STOP_AT_RESULTS" in os.environ:
    import submitit

    submitit.Job.results = stop_instead_of_waiting


@hydra.main(version_base=None)
def main(cfg):
    pass


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Contestant:
    """One way of submitting the sweep, and what must then be in the queue."""

    name: str
    argv: list[str]
    num_entries: int
    nodes_per_entry: int
    stop_at_results: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one submission; ``launch_s`` is None where there is no launcher."""

    total_s: float
    launch_s: float | None


def contestants(num_runs: int, num_nodes: int) -> list[Contestant]:
    """Return the floor first, then the launchers."""
    hydra_script = [sys.executable, "script.py", "-m", f"+x=range({num_runs})"]
    bare = ["sbatch", "--hold", f"--array=0-{num_runs * num_nodes - 1}", "--wrap=true"]
    ours = ["+launcher=slurm", "launcher.wait=false", "launcher.sbatch={hold:true}"]
    peer = ["hydra/launcher=submitit_slurm", "+hydra.launcher.additional_parameters.hold=true"]
    found = [
        Contestant("bare sbatch --array", bare, num_runs * num_nodes, 1),
        Contestant(
            "hpc_elastic",
            [*hydra_script, *ours, f"nodes=1:{num_nodes}"],
            num_runs * num_nodes,
            1,
        ),
    ]
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
        argv = [*hydra_script, *peer, f"hydra.launcher.nodes={num_nodes}"]
        found.append(Contestant("hydra-submitit-launcher", argv, num_runs, num_nodes, True))
    return found


def submit(contestant: Contestant, sandbox: SlurmSandbox) -> Timing:
    """Submit once, check that the queue holds what it should, and empty it.

    Raises:
        RuntimeError: The submission failed, or is not the one that was to be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch_s = Path(folder, "launch_s")
        Path(folder, "script.py").write_text(SCRIPT)
        env = {**os.environ, **sandbox.env, "LAUNCH_S": str(launch_s)}
        if contestant.stop_at_results:
            env["STOP_AT_RESULTS"] = "1"
        started = time.monotonic()
        done = subprocess.run(contestant.argv, cwd=folder, env=env, text=True, capture_output=True)
        total_s = time.monotonic() - started
        try:
            if done.returncode:
                raise RuntimeError(f"{contestant.name} failed:\n{done.stdout}{done.stderr}")
            check_queue(contestant, sandbox)
        finally:
            empty_queue(sandbox)
        return Timing(total_s, float(launch_s.read_text()) if launch_s.exists() else None)


def check_queue(contestant: Contestant, sandbox: SlurmSandbox) -> None:
    """Refuse a measurement of something else than the sweep."""
    queued = sandbox.run(["squeue", "--array", "--noheader", "--format=%D"]).stdout.split()
    expected = [str(contestant.nodes_per_entry)] * contestant.num_entries
    if queued != expected:
        raise RuntimeError(
            f"{contestant.name}: {len(queued)} entries of {sorted(set(queued))} nodes are queued, "
            f"not {contestant.num_entries} of {contestant.nodes_per_entry}"
        )


def empty_queue(sandbox: SlurmSandbox) -> None:
    """Cancel every job of the sandbox and wait until they are gone."""
    squeue = ["squeue", "--noheader", "--format=%A"]
    while jobs := sorted(set(sandbox.run(squeue).stdout.split())):
        sandbox.run(["scancel", *jobs])
        time.sleep(0.5)


def report(timings: dict[str, list[Timing]], title: str) -> Table:
    """Return medians, and ranges in brackets, beside the floor, which comes first."""
    floor_s = statistics.median(t.total_s for t in next(iter(timings.values())))
    table = Table(title=title)
    table.add_column("")
    for column in ("whole command, s", "in the launcher, s", "command above bare, s"):
        table.add_column(column, justify="right")
    for name, rounds in timings.items():
        totals = [t.total_s for t in rounds]
        launches = [t.launch_s for t in rounds if t.launch_s is not None]
        above = f"{statistics.median(totals) - floor_s:+.2f}"
        table.add_row(name, spread(totals), spread(launches), above)
    return table


def spread(seconds: list[float]) -> str:
    """Return the median and the range; nothing for no measurement."""
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}-{max(seconds):.2f}]"


def verdict(timings: dict[str, list[Timing]]) -> str:
    """Hold both times of our launcher against the target."""
    bare, ours = list(timings.values())[:2]
    floor_s = statistics.median(t.total_s for t in bare)
    measured = {
        "in the launcher": [t.launch_s for t in ours if t.launch_s is not None],
        "whole command": [t.total_s for t in ours],
    }
    lines = [f"target: at most {TARGET_ABOVE_BARE_S:g} s above bare sbatch"]
    for what, seconds in measured.items():
        above_s = statistics.median(seconds) - floor_s
        word = "pass" if above_s <= TARGET_ABOVE_BARE_S else "MISS"
        lines.append(f"  {what}: {above_s:+.2f} s, {word}")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()

    num_tasks = options.runs * options.nodes
    sandbox = SlurmSandbox.up(SandboxConfig(name="bench", max_array_size=num_tasks + 1))
    try:
        field = contestants(options.runs, options.nodes)
        timings: dict[str, list[Timing]] = {contestant.name: [] for contestant in field}
        for _ in range(options.repeats):
            for contestant in field:
                timings[contestant.name].append(submit(contestant, sandbox))
    finally:
        sandbox.down()

    console = Console(highlight=False, width=110)
    console.print(report(timings, f"{options.runs} runs x {options.nodes} nodes"))
    if len(field) < 3:
        console.print("hydra-submitit-launcher is not installed: pip install -e .[bench]")
    console.print(verdict(timings))


if __name__ == "__main__":
    main()
