#!/usr/bin/env python3
"""Does the rendezvous keep its promises, whatever goes wrong? Random schedules in virtual time.

    python benchmarks/simulate.py --schedules 1000000
    python benchmarks/simulate.py --seed 4711 --trace
    python benchmarks/simulate.py --ft --schedules 50000
    python benchmarks/simulate.py --submissions --schedules 100000
    python benchmarks/simulate.py --neighbours --schedules 100000

The first runs so many schedules, prints what was in them, and ends with 1 if an invariant did not
hold in one; the second shows one schedule whole. With ``--ft`` it is the quorum of fault tolerance
instead of the rendezvous, with ``--submissions`` what is submitted to a Slurm whose answers are
lost, with ``--neighbours`` runs that give nodes back for jobs of others. No torch, no Slurm, no
network is needed.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from evidence.result import About, Column, Figure, Result, Table, Target
from evidence.show import options, present

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import simulation
from simulation import ft, neighbours, submission

SHOWN_FAILURES = 5
_DOES_NOT_SHOW = (
    "Speed: all time is virtual, and the schedules per second tell only what a simulation costs.",
    "Faults that the simulator does not know, and mistakes in the effects around the decisions: "
    "sockets, files and processes are the tests' business.",
    "Proof: random schedules find what is likely enough to be met.",
)
ABOUT = About(
    title="The rendezvous in virtual time",
    measured="Random schedules of what the rendezvous decides, through crashes, pauses, "
    "partitions, preemptions, files that fail and a Slurm that does not answer; the invariants are "
    "checked again and again. 2,000 schedules are part of the tests.",
    does_not_show=_DOES_NOT_SHOW,
)
ABOUT_FT = About(
    title="The quorum of fault tolerance in virtual time",
    measured="Random schedules of the quorum of `ft=true`, its keepers and its members, likewise: "
    "replicas of one to three nodes with their relays and spares, and flipped bits.",
    does_not_show=_DOES_NOT_SHOW,
)
ABOUT_SUBMISSIONS = About(
    title="Submissions whose answers are lost",
    measured="Random schedules of what submits, replaces and cancels jobs, the real code with its "
    "files: each call of Slurm is carried out, is not, or comes later, and its answer is true, an "
    "error, lost or old; processes die. Never two jobs of one run, none without a record.",
    does_not_show=_DOES_NOT_SHOW,
)

ABOUT_NEIGHBOURS = About(
    title="Runs that give way, in virtual time",
    measured="Random schedules of two to eight runs with `launcher.give_way`, the real decisions, "
    "beside jobs of others in a model of Slurm's scheduler: no job waits for nodes that may go "
    "back, none again and again for a job that cannot start, and the minimum stays.",
    does_not_show=(
        *_DOES_NOT_SHOW,
        "Slurm: priorities, backfill and its plans are a model, of whole nodes.",
        "Jobs that need nodes of several runs at once: they get none.",
    ),
)

Simulator = (
    type[simulation.Simulator]
    | type[ft.Simulator]
    | type[submission.SubmissionSimulator]
    | type[neighbours.NeighbourSimulator]
)
Total = simulation.Outcome | ft.Outcome | submission.Outcome | neighbours.Outcome


def main() -> int:
    """Run the schedules; return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    kinds = parser.add_mutually_exclusive_group()
    for name, simulator, what in (
        ("--ft", ft.Simulator, "the quorum, not the rendezvous"),
        ("--submissions", submission.SubmissionSimulator, "sbatch and what follows, likewise"),
        ("--neighbours", neighbours.NeighbourSimulator, "runs that give way, likewise"),
    ):
        kinds.add_argument(
            name, dest="simulator", action="store_const", const=simulator,
            default=simulation.Simulator, help=what,
        )  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="show one schedule, event by event")
    given = parser.parse_args()
    simulator: Simulator = given.simulator
    if given.trace:
        return show(simulator, given.seed)
    started = time.monotonic()
    total: Total = simulation.run_in_parallel(
        simulator, given.seed, given.schedules, given.processes, progress(given.schedules)
    )
    present(result(total, time.monotonic() - started, given.processes), given)
    for failure in list(total.failures.values())[:SHOWN_FAILURES]:
        print(f"\n{failure}")
    return 1 if total.failures else 0


def show(simulator: Simulator, seed: int) -> int:
    sim = simulator(seed, whole_trace=True)
    complaints = [text.splitlines()[0] for text in simulation.play(sim).failures.values()]
    print(sim.scenario, simulation.format_trace(sim), *complaints or ["everything held"], sep="\n")
    return len(complaints)


def progress(schedules: int) -> Callable[[Total], None]:
    """Return what says every now and then, on a terminal or in a log, how far it is."""
    told = time.monotonic()

    def tell(total: Total) -> None:
        nonlocal told
        if time.monotonic() - told >= 30:
            told = time.monotonic()
            print(total.schedules, "of", schedules, len(total.failures), "failed", file=sys.stderr)

    return tell


def result(total: Total, wall_s: float, processes: int) -> Result:
    """Return the totals, and whether every invariant held."""
    match total:
        case ft.Outcome():
            about, counted = ABOUT_FT, of_quorums(total)
        case submission.Outcome():
            texts = {f"the user reads: {kind}": num for kind, num in sorted(total.texts.items())}
            counted = {"schedules": total.schedules, "calls of Slurm": total.events, **texts}
            about, counted["submissions checked"] = ABOUT_SUBMISSIONS, total.checks
        case neighbours.Outcome():
            about, counted = ABOUT_NEIGHBOURS, of_neighbours(total)
        case _:
            about, counted = ABOUT, of_rounds(total)
    faults = {f"fault: {kind}": num for kind, num in sorted(total.faults.items())}
    seeds = ", ".join(map(str, sorted(total.failures)[:10]))
    rows = (
        *((what, Figure(num)) for what, num in (*counted.items(), *faults.items())),
        ("schedules/s", f"{total.schedules / wall_s:.0f} on {processes} processes"),
        ("processor ms per schedule", f"{1e3 * total.cpu_s / total.schedules:.2f}"),
        ("seeds of failures", seeds or "-"),
    )
    return Result(
        about=about,
        tables=(Table("", (Column("what"), Column("how many", ",.10g")), rows),),
        targets=(Target("schedules in which an invariant did not hold", 0, len(total.failures)),),
    )


def of_rounds(total: simulation.Outcome) -> dict[str, float]:
    return {
        "schedules": total.schedules,
        "virtual hours": round(total.virtual_s / 3600, 1),
        "events": total.events,
        "rounds closed": total.rounds,
        "elections": total.elections,
        "leaders fenced": total.fenced,
        "checkpoints agreed on": total.agreements,
        "rounds broken at a checkpoint": total.growths,
        "rounds broken so that nodes leave": total.departures,
        "runs ended": total.endings,
        "statuses shown": total.shown,
        "notice files obeyed": total.notices,
        "leaders taken for dead by their lease alone": total.silent,
        "appends to the progress that came too late": total.late_appends,
        "statuses that came too late, by the folder's old name": total.late_statuses,
        **{f"files: {what}": num for what, num in sorted(total.storage.items())},
        "rounds stood when all was calm": total.stood_after.total(),
        "after so many virtual seconds, median": percentile(total.stood_after, 0.5),
        "after so many virtual seconds, 99 %": percentile(total.stood_after, 0.99),
        "after so many virtual seconds, longest": percentile(total.stood_after, 1.0),
        "invariant checks": total.checks,
    }


def of_quorums(total: ft.Outcome) -> dict[str, float]:
    return {
        "schedules": total.schedules,
        "virtual hours": round(total.virtual_s / 3600, 1),
        "events": total.events,
        "quorums": total.quorums,
        "keepers": total.keepers,
        "steps committed, by each replica": total.commits,
        "steps that failed": total.failed_steps,
        "states healed": total.heals,
        "corrupted states found": total.corrupted,
        "the same, as their servers know": total.named,
        "schedules with replicas of several nodes": total.relayed,
        "spares that completed a replica": total.completed,
        "proposals of a switch": total.proposals,
        "replicas that left as announced": total.leaves_granted,
        "statuses shown": total.shown,
        "notice files obeyed": total.notices,
        "quorums that left a live member behind": total.dropped,
        "all in one quorum when all was calm": total.stood,
        "invariant checks": total.checks,
    }


def of_neighbours(total: neighbours.Outcome) -> dict[str, float]:
    return {
        "schedules": total.schedules,
        "virtual hours": round(total.virtual_s / 3600, 1),
        "jobs of others": total.jobs,
        "returns": total.releases,
        "nodes that went back": total.given,
        "of these, for a job that did not start": total.in_vain,
        "mean wait of others, s": round(total.waited_s / max(1, total.compared), 1),
        "the same without the runs, s": round(total.alone_s / max(1, total.compared), 1),
        "invariant checks": total.checks,
    }


def percentile(seconds: Counter[int], share: float) -> int:
    """Return the seconds within which this share of the schedules was well; 0 if there is none."""
    ordered = sorted(seconds.elements())
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0


if __name__ == "__main__":
    sys.exit(main())
