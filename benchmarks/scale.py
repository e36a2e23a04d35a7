#!/usr/bin/env python3
"""How do commands and files grow with runs, rounds, events, nodes, ranks, days and sweeps?

    python benchmarks/scale.py --rows events,runs

METHODS.md says what is measured. The runs are made up by `operate/big_run.py`; a sweep is submitted
to a fake Slurm, which holds it.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path

from evidence.result import Cell, Column, Figure, Result, Table, Target, figure
from evidence.show import about, among, options, present
from operate import big_run
from operate.big_run import Plan

from hpc_elastic.testing import FakeSlurm

ABOUT = about("What grows")
MOST = 1.05
"""Largest exponent."""
FLOORS = 0.05, 16.0
"""Seconds or files, and MB: a difference between two sizes that is smaller counts as this."""
_READERS = (("events",), ("status",), ("report", "--format", "json", "-o", "-"))
_LIST = ("list", "--all")
_CLI = (sys.executable, "-m", "hpc_elastic")
SWEEP, SWEEPS = "sweep", (200, 600, 2000)
"""Runs of a sweep, of four nodes each."""
SCRIPT = """
import hydra

@hydra.main(version_base=None)
def main(cfg):
    pass

if __name__ == "__main__":
    main()
"""
_SUBMIT = ("+launcher=slurm", "launcher.wait=false", "launcher.sbatch={hold:true}", "nodes=1:4")

Make = Callable[[Path], Path]
"""Writes what a command reads into a folder; returns its RUN."""


def _run(plan: Plan, folder: Path, *, output: bool = False) -> Path:
    big_run.write(folder, plan, time.time(), output=output)
    return folder / "run"


def _runs(num: int, folder: Path) -> Path:
    for number in range(num):
        big_run.write(folder / str(number), Plan(1, 0.001, 0), time.time(), output=False)
    return folder


ROWS: dict[str, tuple[Sequence[tuple[str, ...]], dict[int, Make]]] = {
    "events": (_READERS, {
        12_201: partial(_run, Plan(16, 3.0, 200)), 40_146: partial(_run, Plan(16, 10.0, 660)),
        121_551: partial(_run, Plan(16, 30.0, 2000)),
    }),
    "rounds": (_READERS, {n: partial(_run, Plan(64, 30, n * 4 // 7)) for n in (1000, 3000, 10000)}),
    "nodes": (_READERS, {n: partial(_run, Plan(n, 3.0, 200)) for n in (16, 64, 256)}),
    "ranks": (_READERS, {
        n: partial(_run, Plan(16, 3.0, 6, n), output=True) for n in (2, 4, 8)
    }),
    "days": (_READERS, {n: partial(_run, Plan(16, n, 200)) for n in (3, 10, 30)}),
    "runs": ((_LIST,), {n: partial(_runs, n) for n in (100, 300, 1000)}),
}  # fmt: skip
"""Row -> the commands that read it, and what makes each of its sizes."""


def main() -> None:
    parser = options(__doc__, repeats=3)
    names = [*ROWS, SWEEP]
    parser.add_argument("--rows", type=among(names), default=names, metavar="A,B")
    given = parser.parse_args()
    found = [
        row for name in given.rows
        for row in (_sweeps(given.repeats) if name == SWEEP else _measured(name, given.repeats))
    ]  # fmt: skip
    sizes = ("smallest", "middle", "largest")
    columns = [Column("command"), *(Column(f"{size}: s, or files", ".2f") for size in sizes)]
    columns += [Column("exponent"), Column("largest: MB"), Column("exponent of MB")]
    table = Table("CPU time and memory, and files", tuple(columns), tuple(r for r, _ in found))
    targets = tuple(target for _, target in found)
    present(Result(ABOUT, (table,), targets, (), repeats=given.repeats), given)


def _measured(name: str, repeats: int) -> list[tuple[tuple[Cell, ...], Target]]:
    """Return a row and its target for each command, and the files, on the sizes of what grows."""
    commands, sizes = ROWS[name]
    with tempfile.TemporaryDirectory(prefix="scale-") as temporary:
        made: dict[int, tuple[Path, Path]] = {}
        for size, make in sizes.items():
            state, folder = Path(temporary, f"state-{size}"), Path(temporary, str(size))
            os.environ["XDG_STATE_HOME"] = str(state)
            with ProcessPoolExecutor(1) as other:  # its memory would count as the commands'
                made[size] = state, other.submit(make, folder).result()
        costs = {"files": {size: [used_by(run)] for size, (_, run) in made.items()}}
        for command in commands:
            taken = costs[command[0]] = {size: [] for size in made}
            for _ in range(repeats):
                for size, (state, run) in made.items():
                    argv = command if command is _LIST else (command[0], str(run), *command[1:])
                    env = {**os.environ, "XDG_STATE_HOME": str(state)}
                    taken[size].append(cost([*_CLI, *argv], env))
    return _all_fitted(name, costs)


def _sweeps(repeats: int) -> list[tuple[tuple[Cell, ...], Target]]:
    """Return a row and its target for the submission of a sweep, and for its files."""
    costs: dict[str, dict[int, list[tuple[float, float]]]]
    costs = {what: {size: [] for size in SWEEPS} for what in ("files", "submission")}
    with (
        tempfile.TemporaryDirectory(prefix="scale-") as temporary,
        FakeSlurm(1, max_array_size=4 * max(SWEEPS) + 1) as slurm,
    ):
        for number, size in enumerate(SWEEPS * repeats):
            folder = Path(temporary, str(number))
            folder.mkdir()
            (folder / "script.py").write_text(SCRIPT)
            argv = [sys.executable, "script.py", "-m", f"+x=range({size})", *_SUBMIT]
            env = {**slurm.env, "XDG_STATE_HOME": str(folder / "state")}
            costs["submission"][size].append(cost(["env", f"--chdir={folder}", *argv], env))
            costs["files"][size].append(used_by(folder))
    return _all_fitted(SWEEP, costs)


def _all_fitted(
    name: str, costs: Mapping[str, dict[int, list[tuple[float, float]]]]
) -> list[tuple[tuple[Cell, ...], Target]]:
    return [
        _fitted(f"{what}, {name} {', '.join(f'{size:,}' for size in taken)}", taken)
        for what, taken in costs.items()
    ]


def _fitted(
    label: str, taken: dict[int, list[tuple[float, float]]]
) -> tuple[tuple[Cell, ...], Target]:
    by_first, by_mb = (
        exponent(taken, FLOORS[at], [statistics.median(c[at] for c in cs) for cs in taken.values()])
        for at in (0, 1)
    )
    first = [figure([cost for cost, _ in costs]) for costs in taken.values()]
    largest = figure([mb for _, mb in taken[max(taken)]])
    row = (label, *first, Figure(by_first), largest, Figure(by_mb))
    return row, Target(f"{label}: larger exponent", MOST, max(by_first, by_mb))


def used_by(folder: Path) -> tuple[float, float]:
    """Return the number of files in a folder, and their MB."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes) / 1e6


def cost(argv: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Return the CPU seconds and the largest memory in MB of a command."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawnp(argv[0], argv, env, file_actions=quiet)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(argv)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def exponent(sizes: Iterable[float], floor: float, costs: Iterable[float]) -> float:
    """Return the exponent by which costs grow over three sizes, whatever the start costs."""
    (n1, n2), (c1, c2) = (
        (after - before for before, after in pairwise(each)) for each in (sizes, costs)
    )
    return log(max(c2, floor) / max(c1, floor)) / log(n2 / n1)


if __name__ == "__main__":
    main()
