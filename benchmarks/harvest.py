#!/usr/bin/env python3
"""How much of the idle time of a busy machine can a training use, and how soon is it done?

    python benchmarks/harvest.py
    python benchmarks/harvest.py --holes holes.npz --picture harvest.svg

METHODS.md says what is measured. ``--holes`` names the log of a real machine, with arrays
``start_s`` and ``length_s``. `harvest.ours` has the list of what of hpc_elastic is real. torchrun
with its defaults, torchrun tuned, and NVRx's ft_launcher stop all nodes at every change for as long
as was measured; a chain of rigid jobs waits until all its nodes are idle for the whole length of a
job (`harvest.peers`). Steps are linear in the number of nodes.
"""

import os
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from evidence.result import Cell, Column, Figure, Peer, Result, Table, Target, figure
from evidence.show import about, among, numbers, options, present
from harvest import holes, picture
from harvest.account import Account, before
from harvest.ours import Costs, ElasticRun, Script, rules
from harvest.peers import NVRX, RESTARTING, TORCHRUN, TORCHRUN_TUNED, Chain
from harvest.slots import SHAPES, Shape, Slot, fill

SIZES = (16, 64, 256)
SMALL_AIM, LARGE_AIM = 98.0, 95.0
WORK_H = 10.0
WORK_AIMS_H = {16: 11.5, 64: 15.0}
LONGEST_H = 80.0
"""A training that takes longer is given up."""
RESTORE_S = 20.0
HEALING = 3.0
"""Time until a newcomer takes part with ``ft=true``, as a multiple of the time that its state takes
("ft-joins": 2 GB at 200 MB/s, 30 s); and what the others wait meanwhile."""
HEAL_STALL_S = 3.5
CHAIN_S = 3600.0
OURS, OURS_FT = "hpc_elastic", "hpc_elastic, ft=true"
CHAIN = "a chain of one-hour jobs"
SHAPES_OF = "the shape of the requests, at most 64 nodes, small model: share that trains"
SHAPE_NAMES: dict[Shape, str] = {
    "qos": "a preemptible QOS", "time_min": "launcher.time_min=2", "ladder": "fixed lengths",
}  # fmt: skip
PARTS = ("shares", "work", "shapes")
ABOUT = about("Filling the holes of a busy machine, in virtual time")


@dataclass(frozen=True)
class Log:
    """The log to use: a file, or None for the one that is made."""

    path: Path | None

    @cache  # noqa: B019 - of two logs at most
    def read(self) -> holes.Holes:
        return holes.make() if self.path is None else holes.read(self.path)

    def slots(self, hour: float, nodes: int, shape: Shape, duration_s: float) -> list[Slot]:
        found = self.read().from_hour(hour, duration_s)
        return before(fill(found, nodes, shape, random.Random(hour)), duration_s)


class Share(NamedTuple):
    """Node-seconds of one run."""

    trained_s: float
    held_s: float
    num_queries: int = 0
    """Commands to Slurm."""


Shares = dict[str, Share]


def large(nodes: int) -> Costs:
    """Return what acts take with a state whose restore takes `RESTORE_S`.

    All ranks share the writing of a state, and each reads the whole of it.
    """
    save_s = max(Costs.save_s, RESTORE_S / nodes)
    heal_s = HEALING * RESTORE_S
    return Costs(restore_s=RESTORE_S, save_s=save_s, heal_s=heal_s, heal_stall_s=HEAL_STALL_S)


def shares(log: Log, nodes: int, duration_s: float, hour: float) -> dict[str, Shares]:
    slots = log.slots(hour, nodes, "qos", duration_s)
    restoring = large(nodes)
    ours: dict[str, dict[str, tuple[Costs, bool]]] = {
        "small": {OURS: (Costs(), False), OURS_FT: (Costs(), True)},
        "large": {OURS: (restoring, False), OURS_FT: (restoring, True)},
    }
    found: dict[str, Shares] = {}
    for model, contestants in ours.items():
        found[model] = {}
        for name, (costs, ft) in contestants.items():
            run = ElasticRun(slots, rules(nodes, ft=ft), costs, Script(), seed=1)
            found[model][name] = share(run.run(duration_s), slots, duration_s)
        restore_s = RESTORE_S if model == "large" else 0.0
        for peer in RESTARTING:
            account = peer.run(slots, duration_s, restore_s=restore_s)
            found[model][peer.name] = share(account, slots, duration_s)
    return found


def share(account: Account, slots: Sequence[Slot], duration_s: float) -> Share:
    return Share(account.trained_s, account.held(slots, duration_s), account.num_queries)


def work(log: Log, nodes: int, hour: float) -> dict[str, float]:
    """Return the hours until the work is done, by contestant; `LONGEST_H` if it is not."""
    duration_s, enough_s = 3600 * LONGEST_H, nodes * 3600 * WORK_H
    slots = log.slots(hour, nodes, "qos", duration_s)
    accounts = {peer.name: peer.run(slots, duration_s) for peer in (TORCHRUN_TUNED, NVRX, TORCHRUN)}
    run = ElasticRun(slots, rules(nodes), Costs(), Script(), seed=1)
    accounts[OURS] = run.run(duration_s, enough_s=enough_s)
    ahead = log.read().from_hour(hour, duration_s)
    accounts[CHAIN] = Chain(nodes, CHAIN_S).run(ahead, jobs=2 * int(WORK_H))
    done = {name: account.done_at(enough_s) for name, account in accounts.items()}
    return {name: LONGEST_H if at is None else at / 3600 for name, at in done.items()}


def shapes(log: Log, nodes: int, duration_s: float, hour: float) -> dict[str, Shares]:
    found: dict[str, Shares] = {}
    for shape in SHAPES:
        slots = log.slots(hour, nodes, shape, duration_s)
        ours = ElasticRun(slots, rules(nodes), Costs(), Script(), seed=1).run(duration_s)
        tuned = TORCHRUN_TUNED.run(slots, duration_s)
        found[SHAPE_NAMES[shape]] = {
            OURS: share(ours, slots, duration_s),
            TORCHRUN_TUNED.name: share(tuned, slots, duration_s),
        }
    return found


# ---- The result


def together(samples: Iterable[Share]) -> float:
    samples = list(samples)
    return 100 * sum(s.trained_s for s in samples) / max(1.0, sum(s.held_s for s in samples))


def spread(samples: Iterable[Share]) -> Cell:
    """Return the shares of the single runs, in per cent; those that held nothing do not count."""
    return figure([100 * s.trained_s / s.held_s for s in samples if s.held_s])


def share_tables(found: Mapping[int, Sequence[Mapping[str, Shares]]]) -> list[Table]:
    """Return a table for each model: all runs together, and the single ones."""
    tables = []
    for model, restore in (("small", "small model"), ("large", "a restore takes 20 s")):
        columns = [Column("")]
        for nodes in found:
            columns += [Column(f"{nodes} nodes", ".1f"), Column("single runs", ".1f")]
        names = next(iter(found.values()))[0][model]
        rows = []
        for name in names:
            cells: list[Cell] = [name]
            for runs in found.values():
                samples = [run[model][name] for run in runs]
                cells += [Figure(together(samples)), spread(samples)]
            rows.append(tuple(cells))
        caption = (
            f"share of the held node-time that trains, {restore}, by the largest number of nodes, %"
        )
        tables.append(Table(caption, tuple(columns), tuple(rows)))
    return tables


def share_targets(found: Mapping[int, Sequence[Mapping[str, Shares]]]) -> list[Target]:
    targets = []
    aims = (("small", OURS, SMALL_AIM), ("large", OURS_FT, LARGE_AIM), ("large", OURS, LARGE_AIM))
    for model, name, aim in aims:
        for nodes, runs in found.items():
            value = together(run[model][name] for run in runs)
            restore = ", a restore of 20 s" if model == "large" else ""
            what = f"{name}{restore}, at most {nodes} nodes: share that trains"
            targets.append(Target(what, aim, value, "%", more_is_better=True))
    return targets


def query_target(found: Mapping[int, Sequence[Mapping[str, Shares]]], hours: float) -> Target:
    per_minute = max(
        sum(run[model][OURS].num_queries for run in runs) / len(runs) / (60 * hours)
        for runs in found.values()
        for model in ("small", "large")
    )
    return Target("queries of Slurm a minute, mean, of the size with most", 4.0, per_minute)


def work_table(found: Mapping[int, Sequence[Mapping[str, float]]]) -> Table:
    names = (OURS, TORCHRUN_TUNED.name, NVRX.name, TORCHRUN.name, CHAIN)
    columns = [Column("")]
    for nodes in found:
        columns += [Column(f"{nodes} nodes x {WORK_H:.0f} h", ".1f"), Column("not done")]
    rows = []
    for name in names:
        cells: list[Cell] = [name]
        for runs in found.values():
            hours = [run[name] for run in runs]
            unfinished = sum(h >= LONGEST_H for h in hours)
            cells += [figure(hours), f"{unfinished} of {len(hours)}" if unfinished else ""]
        rows.append(tuple(cells))
    caption = f"hours until a training is done, at most {LONGEST_H:.0f}; small model"
    return Table(caption, tuple(columns), tuple(rows))


def work_targets(found: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Target]:
    return [
        Target(
            f"{nodes} nodes x 10 h of work, median", WORK_AIMS_H[nodes],
            statistics.median(run[OURS] for run in runs), "h",
        )
        for nodes, runs in found.items()
    ]  # fmt: skip


def plain_table(caption: str, found: Sequence[Mapping[str, Shares]]) -> Table:
    contestants = list(next(iter(found[0].values())))
    columns = [Column("")]
    for name in contestants:
        columns += [Column(f"{name}, %", ".1f"), Column("single runs", ".1f")]
    columns.append(Column("nodes that train, of the first row", ".2f"))
    first = sum(run[next(iter(found[0]))][contestants[0]].trained_s for run in found)
    rows = []
    for case in found[0]:
        cells: list[Cell] = [case]
        for name in contestants:
            samples = [run[case][name] for run in found]
            cells += [Figure(together(samples)), spread(samples)]
        trained_s = sum(run[case][contestants[0]].trained_s for run in found)
        rows.append((*cells, Figure(trained_s / max(1.0, first))))
    return Table(caption, tuple(columns), tuple(rows))


def log_table(used: holes.Holes) -> Table:
    columns = (
        Column("log"), Column("spans: median, min", ".1f"), Column("mean", ".1f"),
        Column("90 %", ".0f"), Column("99 %", ".0f"),
        Column("time in spans below 30 min, %", ".0f"),
        Column("become idle at once", ".0f"), Column("are taken at once", ".0f"),
        Column("idle nodes: quartiles"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, of in (("that was used", holes.figures(used)), ("of the real machine", holes.REAL)):
        numbers = (
            of.median_min, of.mean_min, of.p90_min, of.p99_min, 100 * of.short_time,
            of.group_begin, of.group_end,
        )  # fmt: skip
        quartiles = ", ".join(f"{number:.0f}" for number in of.idle_quartiles)
        rows.append((name, *map(Figure, numbers), quartiles))
    return Table("the holes", columns, tuple(rows))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--holes", type=Path, help="log of a real machine; default: a made one")
    parser.add_argument("--starts", type=int, default=100, help="random hours")
    parser.add_argument("--hours", type=float, default=1.0, help="time from each, for shares")
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="most nodes of a run: 16,64")
    parser.add_argument("--parts", type=among(PARTS), default=list(PARTS))
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--picture", type=Path, help="draw a run of at most 64 nodes there (SVG)")
    given = parser.parse_args()
    log = Log(given.holes)
    end_h = log.read().duration_s / 3600
    drawn = random.Random(given.seed)
    hours = [drawn.uniform(0.0, end_h) for _ in range(given.starts)]
    window_s = 3600 * given.hours
    tables, targets = [log_table(log.read())], []
    with ProcessPoolExecutor(given.processes) as pool:

        def of_all(what: Callable[[float], Any], share_of_hours: float = 1.0) -> list[Any]:
            num = max(1, round(share_of_hours * len(hours)))
            return list(pool.map(what, hours[:num]))

        if "shares" in given.parts:
            found = {n: of_all(partial(shares, log, n, window_s)) for n in given.sizes}
            tables += share_tables(found)
            targets += [*share_targets(found), query_target(found, given.hours)]
        if "work" in given.parts:
            sizes_h = [n for n in given.sizes if n in WORK_AIMS_H]
            worked = {n: of_all(partial(work, log, n), 0.5) for n in sizes_h}
            tables.append(work_table(worked))
            targets += work_targets(worked)
        if "shapes" in given.parts:
            tables.append(plain_table(SHAPES_OF, of_all(partial(shapes, log, 64, window_s), 0.25)))
    if given.picture:
        slots, ahead = log.slots(hours[0], 64, "qos", 3600 * WORK_H), log.read()
        account = ElasticRun(slots, rules(64), Costs(), Script(), seed=1).run(3600 * WORK_H)
        shown = ahead.from_hour(hours[0], 3600 * WORK_H)
        given.picture.write_text(picture.draw(shown, account, 64, WORK_H))
    notes = (
        f"{given.starts} random hours, {given.hours:g} h from each for shares; half of them for "
        "the hours until a training is done, a quarter for the last table. The log begins "
        "again at its end. A share without brackets is of all runs together.",
        "Tasks of a preemptible QOS (NoReserve) unless a table has other shapes: a slot is all "
        "that is left of a hole, and the run has 30 s of grace at its end.",
        "torchrun's defaults and NVRx: 45 and 48 s for each change, 33 s until a newcomer is "
        "ready; tuned: 8 s for a loss, 6 s for a join, 3 s. torchrun's defaults also lose half of "
        "the time between two checkpoints five minutes apart; the other two lose no step.",
        "A chain knows when all its nodes will be idle for the whole job, saves at the very end, "
        "and waits for nothing in between.",
    )
    about = ABOUT
    if given.holes:
        about = replace(ABOUT, title=f"{ABOUT.title}: a real machine")
    result = Result(
        about=about, tables=tuple(tables), targets=tuple(targets), notes=notes,
        peers=(
            Peer("torchrun (torch)", "2.13.0+cpu", "a model; costs as measured in *Recovery*"),
            Peer("NVRx ft_launcher", "0.4.1", "a model; costs as measured in *Recovery*"),
        ),
    )  # fmt: skip
    present(result, given)


if __name__ == "__main__":
    main()
