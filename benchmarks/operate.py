#!/usr/bin/env python3
"""How long do people wait who look after runs, and what does it cost the runs to be looked after?

    python benchmarks/operate.py --repeats 5

`ABOUT` says what is measured. The run is made up by `operate/big_run.py`. As root, with Slurm's
programs, commands that ask Slurm ask a sandbox.
"""

from evidence import torchrun
from evidence.result import About, Peer, Result, Table, Target
from evidence.show import among, options, present
from operate import commands, hang, loop, preflight
from operate.big_run import Plan

PARTS = ("preflight", "commands", "hang", "loop")
ABOUT = About(
    title="Looking after runs",
    measured="(1) A node's check before it joins: from the start of a fresh process to its "
    "verdict, alone and with torch imported beside it, as in a task; the slowest is held against "
    "the target. (2) Commands on the directory of a run of 16 nodes, 3 days and 200 faults, each "
    "a process of its own, beside Python's bare start and the import of torch, which no command "
    "may need. (3) Two ranks in all_reduce, one of which gets stuck: until all stacks are written, "
    "the rank is named, and the restarted group has made a step. (4) A step of a network that is "
    "nearly free: under torchrun, unchanged under `hpc-elastic run`, and with the README's loop.",
    does_not_show=(
        "A shared file system: the run's directory and Python's packages are on a local disk, in "
        "the page cache. On NFS each of the run's thousands of files costs round trips.",
        "GPUs: their check runs in a process of its own and takes what importing torch and "
        "starting CUDA take there.",
        "A busy slurmctld: the sandbox's queue is empty.",
        "How long a hang takes by default: `hang_timeout_s` is ten times the median step and at "
        "least 60 s, so that what is added to the limit is what this shows.",
        "What torchrun does with a hang: it has no watch; the time-out of torch's collectives is "
        "read off torch, not waited for.",
        "The run is made up: its logs are short, and all rounds write alike.",
        "What NVIDIA's Resiliency Extension does with a hang: its ft_launcher goes by heartbeats "
        "or sections that a script reports through its client, and this script knows no client.",
    ),
)


def main() -> None:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--parts", type=among(PARTS), default=list(PARTS), metavar="A,B")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--torchx", metavar="PROGRAM", help="default: torchx of the PATH")
    given = parser.parse_args()
    plan = Plan(given.nodes, given.days, given.faults)
    tables: list[Table] = []
    targets: list[Target] = []
    peers: list[Peer] = [torchrun.peer()] if {"hang", "loop"} & set(given.parts) else []
    if "preflight" in given.parts:
        table, aims = preflight.measure(given.repeats)
        tables.append(table)
        targets += aims
    if "commands" in given.parts:
        table, aims, found = commands.measure(plan, given.repeats, given.torchx)
        tables.append(table)
        targets += aims
        peers += found
    if "hang" in given.parts:
        tables.append(hang.measure(given.repeats))
    if "loop" in given.parts:
        table, aims = loop.measure(given.repeats)
        tables.append(table)
        targets += aims
    result = Result(ABOUT, tuple(tables), tuple(targets), tuple(peers), repeats=given.repeats)
    present(result, given)


if __name__ == "__main__":
    main()
