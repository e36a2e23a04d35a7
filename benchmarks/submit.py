#!/usr/bin/env python3
"""How long does it take to submit one sweep of 200 runs of 4 nodes each?

    pip install -e .[bench] and, as root: python benchmarks/submit.py --repeats 3

METHODS.md says what is measured; a large sweep: ``--runs 2000 --nodes 1``. What is submitted stays
on the disk until all is measured, since ext4 makes files slowly after deletions: let it rest
before.
"""

import importlib.util
import os
import resource
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evidence.machine import package_version
from evidence.result import Cell, Column, Peer, Result, Table, Target, figure
from evidence.sandbox import sandbox_of
from evidence.show import about, options, present

from hpc_elastic.cli import main as cli
from slurm_sandbox import SandboxConfig, SlurmSandbox

TARGET_ABOVE_BARE_S = 1.5
OURS, PEER = "hpc_elastic", "hydra-submitit-launcher"
ABOUT = about("Submission of a sweep")

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

Plugins.instantiate_launcher = instantiate_timed
if "STOP_AT_RESULTS" in os.environ:
    import submitit

    submitit.Job.results = lambda self: exit()

@hydra.main(version_base=None)
def main(cfg):
    pass

if __name__ == "__main__":
    main()
"""


OTHER = """
import sys
from pathlib import Path
import hydra, hydra_plugins

if sys.argv.pop() == "without":
    paths = hydra_plugins.__path__
    hydra_plugins.__path__ = [p for p in paths if not Path(p, "hpc_elastic_launcher").exists()]

hydra.main(version_base=None)(lambda cfg: None)()
"""
"""A Hydra script that does not use the package, with its plugin or without."""
MOST_OF_PLUGIN_MS, MOST_OF_HELP_MS = 15.0, 150.0


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
    """One submission: ``launch_s`` is None without a launcher; the rest is that of each run."""

    total_s: float
    launch_s: float | None
    cpu_ms: float = 0.0
    num_files: float = 0.0
    num_kb: float = 0.0


def contestants(num_runs: int, num_nodes: int) -> list[Contestant]:
    hydra_script = [sys.executable, "script.py", "-m", f"+x=range({num_runs})"]
    bare = ["sbatch", "--hold", f"--array=0-{num_runs * num_nodes - 1}", "--wrap=true"]
    ours = ["+launcher=slurm", "launcher.wait=false", "launcher.sbatch={hold:true}"]
    peer = ["hydra/launcher=submitit_slurm", "+hydra.launcher.additional_parameters.hold=true"]
    found = [
        Contestant("bare sbatch --array", bare, num_runs * num_nodes, 1),
        Contestant(OURS, [*hydra_script, *ours, f"nodes=1:{num_nodes}"], num_runs * num_nodes, 1),
    ]
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
        argv = [*hydra_script, *peer, f"hydra.launcher.nodes={num_nodes}"]
        found.append(Contestant(PEER, argv, num_runs, num_nodes, True))
    return found


def submit(contestant: Contestant, sandbox: SlurmSandbox, folder: Path, runs: int) -> Timing:
    """Submit once from an empty folder, check that the queue holds what it should, and empty it."""
    launch_s = folder / "launch_s"
    (folder / "script.py").write_text(SCRIPT)
    env = {**os.environ, **sandbox.env, "LAUNCH_S": str(launch_s)}
    if contestant.stop_at_results:
        env["STOP_AT_RESULTS"] = "1"
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(contestant.argv, cwd=folder, env=env, text=True, capture_output=True)
    total_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        if done.returncode:
            raise RuntimeError(f"{contestant.name} failed:\n{done.stdout}{done.stderr}")
        check_queue(contestant, sandbox)
    finally:
        empty_queue(sandbox)
    cpu_ms = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3
    made = [path.lstat() for path in folder.rglob("*")]
    num_kb = sum(status.st_size for status in made if stat.S_ISREG(status.st_mode)) / 1e3
    launched_s = float(launch_s.read_text()) if launch_s.exists() else None
    return Timing(total_s, launched_s, *(each / runs for each in (cpu_ms, len(made), num_kb)))


def check_queue(contestant: Contestant, sandbox: SlurmSandbox) -> None:
    queued = sandbox.run(["squeue", "--array", "--noheader", "--format=%D"]).stdout.split()
    expected = [str(contestant.nodes_per_entry)] * contestant.num_entries
    if queued != expected:
        raise RuntimeError(
            f"{contestant.name}: {len(queued)} entries of {sorted(set(queued))} nodes are queued, "
            f"not {contestant.num_entries} of {contestant.nodes_per_entry}"
        )


def empty_queue(sandbox: SlurmSandbox) -> None:
    squeue = ["squeue", "--noheader", "--format=%A"]
    while jobs := sorted(set(sandbox.run(squeue).stdout.split())):
        sandbox.run(["scancel", *jobs])
        time.sleep(0.5)


def idle_costs(repeats: int) -> dict[str, list[float]]:
    """Return milliseconds of CPU of commands that submit nothing, measured in turn."""
    helps = [name for section in cli._SECTIONS.values() for name in section]
    script, ours = [sys.executable, "-c", OTHER], [sys.executable, "-m", "hpc_elastic"]
    argvs = {
        "Hydra, without the plugin": [*script, "without"],
        "Hydra, with the plugin": [*script, "with"],
        "python -c 'import click'": [sys.executable, "-c", "import click"],
        **{f"{name} --help": [*ours, name, "--help"] for name in helps},
    }
    found: dict[str, list[float]] = {name: [] for name in argvs}
    with tempfile.TemporaryDirectory() as folder:
        for name in list(argvs) * (1 + 5 * repeats):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(argvs[name], cwd=folder, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[name].append(1e3 * cpu_s)
    return {name: values[1:] for name, values in found.items()}  # the first writes byte code


def result(
    timings: dict[str, list[Timing]], idle: dict[str, list[float]], title: str, repeats: int
) -> Result:
    """Return both times beside the floor, which comes first, and hold ours against the target."""
    floor_s = statistics.median(t.total_s for t in next(iter(timings.values())))
    columns = (
        Column(""), Column("whole command, s", ".2f"), Column("in the launcher, s", ".2f"),
        Column("command above bare, s", "+.2f"), Column("CPU a run, ms", ".2f"),
        Column("files and folders a run", ".1f"), Column("KB a run", ".1f"),
    )  # fmt: skip
    rows = tuple((name, *_cells(rounds, floor_s)) for name, rounds in timings.items())
    ours = timings[OURS]
    measured = {
        "in the launcher": [t.launch_s for t in ours if t.launch_s is not None],
        "whole command": [t.total_s for t in ours],
    }
    version = package_version(PEER)
    why = "" if version else "not installed: pip install -c constraints.txt -e '.[bench]'"
    return Result(
        about=ABOUT,
        tables=(
            Table(title, columns, rows),
            Table("CPU of a process that submits nothing", (Column(""), Column("ms", ".0f")),
                  tuple((name, figure(values)) for name, values in idle.items())),
        ),
        targets=(*(
            Target(
                f"{what}, above bare sbatch", TARGET_ABOVE_BARE_S,
                statistics.median(seconds) - floor_s, "s",
            )
            for what, seconds in measured.items()
        ), *idle_targets(idle)),
        peers=(Peer(PEER, version, why), Peer("submitit", package_version("submitit"))),
        repeats=repeats,
    )  # fmt: skip


def idle_targets(idle: dict[str, list[float]]) -> Iterator[Target]:
    without, with_, _, *helps = map(statistics.median, idle.values())
    what = "the plugin in a Hydra script that does not use it, CPU"
    yield Target(what, MOST_OF_PLUGIN_MS, with_ - without, "ms")
    yield Target("the slowest --help of a command, CPU", MOST_OF_HELP_MS, max(helps), "ms")


def _cells(rounds: list[Timing], floor_s: float) -> list[Cell]:
    totals = [t.total_s for t in rounds]
    launches = [t.launch_s for t in rounds if t.launch_s is not None]
    each = zip(*((t.cpu_ms, t.num_files, t.num_kb) for t in rounds), strict=True)
    above_s = [statistics.median(totals) - floor_s]
    return [figure(totals), figure(launches), figure(above_s), *(figure([*of]) for of in each)]


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    num_tasks = given.runs * given.nodes
    config = SandboxConfig(name="bench", max_array_size=num_tasks + 1)
    with sandbox_of(config) as sandbox, tempfile.TemporaryDirectory() as kept:
        field = contestants(given.runs, given.nodes)
        timings: dict[str, list[Timing]] = {contestant.name: [] for contestant in field}
        for _ in range(given.repeats):
            for contestant in field:
                folder = Path(tempfile.mkdtemp(dir=kept))
                timings[contestant.name].append(submit(contestant, sandbox, folder, given.runs))
    title = f"{given.runs} runs x {given.nodes} nodes"
    present(result(timings, idle_costs(given.repeats), title, given.repeats), given)


if __name__ == "__main__":
    main()
