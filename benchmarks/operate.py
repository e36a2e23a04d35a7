#!/usr/bin/env python3
"""How long do people wait who look after runs, and what does it cost the runs to be looked after?

    python benchmarks/operate.py --repeats 5

METHODS.md says what is measured. The run is made up by `operate/big_run.py`. As root, with Slurm's
programs, commands that ask Slurm ask a sandbox.
"""

from evidence import torchrun
from evidence.result import Peer, Result, Table, Target
from evidence.show import about, among, options, present
from operate import commands, hang, loop, preflight
from operate.big_run import Plan

PARTS = ("preflight", "commands", "hang", "loop")
ABOUT = about("Looking after runs")


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
