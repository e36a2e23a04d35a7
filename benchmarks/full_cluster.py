#!/usr/bin/env python3
"""How much sooner is a training done on a full cluster if it takes the nodes that are left over?

    as root: python benchmarks/full_cluster.py

METHODS.md says what is measured. The training is submitted after some minutes, as a run of ours; as
one job, with a time limit that is long enough; by hydra-submitit-launcher, whose job is requeued at
its time limit; by torchrun in a chain of short jobs; and not at all, to see how long the other jobs
wait by themselves. It is node time that is to be spent (`full_cluster/work.py`), without torch. All
peers save each step, so that they lose nothing when a job ends.
"""

import argparse
import contextlib
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from evidence.machine import package_version
from evidence.result import Cell, Column, Figure, Peer, Result, Table, Target
from evidence.sandbox import sandbox_of
from evidence.show import about, among, options, present
from full_cluster import account
from full_cluster.background import OtherJob, other_jobs
from full_cluster.replay import Contestant, Player, Replay, chain, hydra_submitit, ours, rigid

from slurm_sandbox import SandboxConfig, SlurmSandbox

NUM_NODES = 16
LOADS = (0.7, 0.9, 1.1)
WORK_NODE_S = 1800.0
PASS_S = 10.0
OURS, NOBODY = "hpc_elastic, 1 to 16 nodes", "nobody"
AS_SOON, LONGER, OWN, USED, LOST = 0.9, 2.0, 1.15, 90.0, 1.0
ABOUT = about("A full cluster")
TERMS = {"nodes": "1:16", "time": "60", "harvest": "auto", "time_min": "1"}
CONTESTANTS = {
    "nobody": Contestant(NOBODY, None),
    "ours": Contestant(OURS, ours(TERMS)),
    **{
        f"gives-{what}": Contestant(f"{OURS}, give_way={what}", ours({**TERMS, "give_way": what}))
        for what in ("on", "all")
    },
    "rigid-4": Contestant("one job of 4 nodes", rigid(4, 9)),
    "rigid-8": Contestant("one job of 8 nodes", rigid(8, 5)),
    "submitit": Contestant("hydra-submitit-launcher, 4 nodes", hydra_submitit(4, 4)),
    "chain": Contestant("torchrun, chain of 4 nodes", chain(4, 4, 8)),
}


def config(name: str, ended: Path) -> SandboxConfig:
    """Return the settings of a sandbox, which notes the jobs that have ended in a file."""
    lines = (
        f"SchedulerParameters=batch_sched_delay=0,bf_interval={PASS_S:.0f},sched_interval=5",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={ended}",
    )
    return SandboxConfig(name=name, nodes=NUM_NODES, gpus_per_node=0, extra_lines=lines)


def replay(
    contestant: Contestant,
    jobs: Sequence[OtherJob],
    sandbox: SlurmSandbox,
    ended: Path,
    stop: threading.Event,
    minutes: float,
) -> Replay:
    seen = Replay(contestant.label)
    with tempfile.TemporaryDirectory(prefix="full-cluster-") as folder:
        Path(folder, "plan.json").write_text(json.dumps({"work": WORK_NODE_S}))
        player = Player(sandbox, jobs, Path(folder), ended, stop, seen)
        player.play(contestant.submit, 60 * minutes / 6, 60 * minutes)
    return seen


def rows(
    replays: Sequence[Replay], jobs: Sequence[OtherJob], length_s: float
) -> list[tuple[Cell, ...]]:
    submitted = [job.submitted_s for job in jobs]
    found: list[tuple[Cell, ...]] = []
    for seen in replays:
        waits = [
            Figure(of(seen, length_s, submitted))
            for of in (account.mean_wait_s, account.late_wait_s)
        ]
        if seen.contestant == NOBODY:
            soonest = account.soonest_s(seen, NUM_NODES, WORK_NODE_S)
            found.append((NOBODY, "", "", "", "", *waits))
            found.append(
                ("each idle node", "" if soonest is None else Figure(soonest), "", "", "", *waits)
            )
            continue
        took = account.took_s(seen)
        done = f"above {length_s - seen.submitted_s:.0f}" if took is None else Figure(took)
        used, share = account.used_node_s(seen), account.trained_share(seen)
        lost = Figure(100 * account.lost_at_slot_ends(seen))
        found.append((seen.contestant, done, Figure(used), Figure(100 * share), lost, *waits))
    return found


def targets(
    load: float, replays: Sequence[Replay], jobs: Sequence[OtherJob], length_s: float
) -> list[Target]:
    where, found = f"load {load:.0%}", list[Target]()
    by_name = {seen.contestant: seen for seen in replays}
    mine, nobody = by_name.get(OURS), by_name.get(NOBODY)
    if mine is not None:
        used, lost = account.used_share(mine), account.lost_at_slot_ends(mine)
        if used is not None:
            what = f"{where}: share of idle spans of 5 minutes and more that is used"
            found.append(Target(what, USED, 100 * used, "%", True))
        found.append(Target(f"{where}: node time that is lost at slot ends", LOST, 100 * lost, "%"))
    submitted = [job.submitted_s for job in jobs]
    for seen in replays:
        if not seen.contestant.startswith(OURS):
            continue
        terms, took = seen.contestant.removeprefix(OURS) or ", give_way=off", account.took_s(seen)
        soonest = nobody and account.soonest_s(nobody, NUM_NODES, WORK_NODE_S)
        if took is not None and soonest:
            what = f"{where}{terms}: as soon as with each idle node, for nothing"
            found.append(Target(what, AS_SOON, soonest / took, "", True))
        if seen is mine or nobody is None:
            continue
        for kind, of in (("mean wait", account.mean_wait_s), ("95 %", account.late_wait_s)):
            least, wait = (of(each, length_s, submitted) for each in (nobody, seen))
            what = f"{where}{terms}: others wait longer, {kind}"
            found.append(Target(what, LONGER, 100 * (wait / least - 1), "%"))
        usual = None if mine is None else account.took_s(mine)
        if took is not None and usual is not None:
            found.append(Target(f"{where}{terms}: own time, of give_way=off", OWN, took / usual))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--loads", type=lambda text: tuple(map(float, text.split(","))), default=LOADS
    )
    parser.add_argument("--only", type=among(CONTESTANTS), help="of these contestants")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="write all that was seen there"
    )
    parser.add_argument("--again", type=Path, metavar="FILE", help="evaluate such a file")
    given = parser.parse_args()
    chosen = [CONTESTANTS[name] for name in given.only or CONTESTANTS]
    tables, met = list[Table](), list[Target]()
    columns = (
        Column(""), Column("done, s", ".0f"), Column("node-seconds used", ".0f"),
        Column("of these trained, %", ".1f"), Column("lost at slot ends, %", ".2f"),
        Column("others wait, s", ".0f"), Column("95 %, s", ".0f"),
    )  # fmt: skip
    plays = [(load, contestant) for load in given.loads for contestant in chosen]
    jobs = {
        load: list(other_jobs(NUM_NODES, load, 60 * given.minutes, seed=1)) for load in given.loads
    }
    if given.again:
        every = [
            Replay(**{name: each[name] for name in asdict(Replay(""))})
            for each in json.loads(given.again.read_text())
        ]
    else:
        every = play(plays, jobs, given)
    for number, load in enumerate(given.loads):
        replays = every[number * len(chosen) : (number + 1) * len(chosen)]
        title = f"{len(jobs[load])} other jobs that ask for {load:.0%} of the nodes' time"
        tables.append(Table(title, columns, tuple(rows(replays, jobs[load], 60 * given.minutes))))
        met += targets(load, replays, jobs[load], 60 * given.minutes)
    peers = (
        Peer("hydra-submitit-launcher", package_version("hydra-submitit-launcher")),
        Peer("torchrun (torch)", package_version("torch")),
    )
    present(Result(ABOUT, tuple(tables), tuple(met), peers, repeats=1), given)


def play(
    plays: Sequence[tuple[float, Contestant]],
    jobs: Mapping[float, Sequence[OtherJob]],
    given: argparse.Namespace,
) -> list[Replay]:
    """Return what was seen of each load and contestant, all played at the same time."""
    with contextlib.ExitStack() as stack:
        # first in, last out: the sandboxes end after the replays
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="full-cluster-"))
        ended = [Path(folder, f"full{number}") for number in range(len(plays))]
        sandboxes = [stack.enter_context(sandbox_of(config(file.name, file))) for file in ended]
        pool = stack.enter_context(ThreadPoolExecutor(len(plays)))
        stop = threading.Event()
        stack.callback(stop.set)
        played = [
            pool.submit(replay, contestant, jobs[load], sandbox, file, stop, given.minutes)
            for (load, contestant), sandbox, file in zip(plays, sandboxes, ended, strict=True)
        ]
        wait(played)
    if given.samples:
        seen = [
            {"load": load, **asdict(each.result())}
            for (load, _), each in zip(plays, played, strict=True)
            if not each.exception()
        ]
        given.samples.write_text(json.dumps(seen) + "\n")
    return [each.result() for each in played]


if __name__ == "__main__":
    main()
