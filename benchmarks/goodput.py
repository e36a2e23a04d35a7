#!/usr/bin/env python3
"""How much of what its nodes could do does a training keep, when they are taken and given back?

    as root: python benchmarks/goodput.py --minutes 10

Four nodes of a Slurm sandbox, one worker a node. Once all four have trained for a while, a fixed
trace (`goodput/trace.py`) takes nodes by jobs of higher priority and gives them back, all four at
once in the middle, with Slurm's grace of five seconds. Everybody trains the same network in steps
of the same length (`goodput/workload.py`), saves every 15 seconds, and saves when SIGTERM comes.
One after the other, twelve minutes each:

- hpc_elastic: a run of one to four nodes, with the default settings;
- submitit + torchrun, a job a node: torchrun --nnodes=1:4 in four tasks of an array;
- submitit + torchrun, one job: one job of four nodes, requeued whole;
- submitit + torchrun, hold cleared (if asked for): the first of the two, by a user who knows how to
  take Slurm's hold of two minutes from a task that he has requeued.

`goodput/account.py` says what is counted. Of the node-seconds that were available, the table shows
which went into steps that the last state contains (trained), steps that were made and lost (in
vain), waiting in the queue while the node had nobody else (queued), and all the rest: starting,
importing, joining, saving, leaving, waiting for others (restarting).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from goodput.account import Account, Window, account, last_state, read_groups, undisturbed
from goodput.peers import Peer, peers
from goodput.trace import NUM_NODES, TRACE, TRACE_S, play, read_held, scaled
from goodput.workload import GLOBAL_BATCH
from rich.console import Console
from rich.table import Table

from hpc_elastic.testing.slurm_sandbox import SandboxConfig, SlurmSandbox

PEERS = ["ours", "submitit", "submitit-one-job"]
PATIENCE_S = 180.0
TARGET = 0.9
_POLL_S = 1.0


@dataclass(frozen=True)
class Measurement:
    """One trace, and what one peer made of it."""

    peer: str
    undisturbed: float
    """Steps per node-second."""
    account: Account

    @property
    def goodput(self) -> float:
        """The share of the undisturbed rate."""
        return self.account.goodput(self.undisturbed)


def measure(peer: Peer, sandbox: SlurmSandbox, minutes: float, train_s: float) -> Measurement:
    """Start a training, play the trace to it, and clear everything away."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as name:
        folder = Path(name)
        record = folder / "takers"
        record.mkdir()
        try:
            with peer.training(sandbox, folder):
                wait_for_all(folder, train_s)
                start = time.time()
                rate = undisturbed(read_groups(folder), start - train_s / 2, start)
                trace = scaled(TRACE, minutes * 60)
                samples = play(trace, minutes * 60, sandbox, record, _POLL_S)
                window, saved = Window(start, time.time()), peer.saved(folder)
            groups, held = read_groups(folder), read_held(record)
            final = last_state(groups, window.end, saved)
            return Measurement(peer.name, rate, account(groups, held, samples, window, final))
        finally:
            sandbox.heal_all()


def wait_for_all(folder: Path, train_s: float) -> None:
    """Wait until all nodes have trained together for so long."""
    deadline = time.monotonic() + PATIENCE_S + train_s
    while time.monotonic() < deadline:
        whole = [g for g in read_groups(folder)[-1:] if g.world_size == NUM_NODES and g.steps]
        if whole and whole[0].steps[-1][0] - whole[0].steps[0][0] >= train_s:
            return
        time.sleep(_POLL_S)
    for log in sorted([*folder.rglob("*.log"), *folder.rglob("*.err"), *folder.rglob("*.out")]):
        print(f"--- {log}", *log.read_text().splitlines()[-12:], sep="\n", file=sys.stderr)
    raise SystemExit(f"the training does not start on {NUM_NODES} nodes")


def report(measured: Sequence[Measurement]) -> Table:
    """Return one line for each peer."""
    table = Table(title="useful samples per available node-second")
    table.add_column("", no_wrap=True)
    columns = ("of undisturbed", "undisturbed [1/s]", "available [s]", "groups", "steps lost")
    parts = measured[0].account.parts
    for column in (*columns, *parts):
        table.add_column(column, justify="right")
    for m in measured:
        a = m.account
        shares = [f"{seconds / a.available_node_s:.1%}" for seconds in a.parts.values()]
        table.add_row(
            m.peer, f"{m.goodput:.1%}", f"{m.undisturbed * GLOBAL_BATCH:.2f}",
            f"{a.available_node_s:.0f}", str(a.num_groups), str(a.lost_steps), *shares,
        )  # fmt: skip
    return table


def verdict(measured: Sequence[Measurement]) -> str:
    """Hold ours against the target."""
    lines = [
        f"target: at least {TARGET:.0%}: {'pass' if m.goodput >= TARGET else 'MISS'}"
        for m in measured
        if m.peer == peers({})["ours"].name
    ]
    return "\n".join(lines)


def as_json(measured: Sequence[Measurement]) -> str:
    """Return all that was measured."""
    return json.dumps([{"goodput": m.goodput, **asdict(m)} for m in measured], indent=1) + "\n"


@contextlib.contextmanager
def sandbox_of(name: str) -> Iterator[SlurmSandbox]:
    """Bring a sandbox up, and down again whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield SlurmSandbox.up(SandboxConfig(name=name, nodes=NUM_NODES))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        SlurmSandbox(name).down()


def measurements(field: Sequence[Peer], options: argparse.Namespace) -> Iterator[Measurement]:
    """Measure one peer after the other, or all at the same time, each on a Slurm of its own."""
    with contextlib.ExitStack() as stack:
        if not options.together:
            sandbox = stack.enter_context(sandbox_of(options.sandbox))
            for peer in field:
                yield measure(peer, sandbox, options.minutes, options.train_s)
            return
        names = [f"{options.sandbox}{number}" for number in range(len(field))]
        sandboxes = [stack.enter_context(sandbox_of(name)) for name in names]
        threads = stack.enter_context(ThreadPoolExecutor())
        minutes, train_s = options.minutes, options.train_s
        yield from threads.map(lambda p, s: measure(p, s, minutes, train_s), field, sandboxes)


def main() -> None:
    """Measure, then print the table and the verdict."""
    options = parse()
    field = {name: peers(options.settings)[name] for name in options.peers}
    measured: list[Measurement] = []
    progress = Console(stderr=True, highlight=False)
    try:
        for m in measurements(list(field.values()), options):
            measured.append(m)
            progress.print(f"{m.peer}: {m.goodput:.1%} of the undisturbed rate")
            if options.json:
                options.json.write_text(as_json(measured))
    finally:
        if measured:
            console = Console(highlight=False, width=options.width)
            console.print(report(measured))
            console.print(verdict(measured))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=TRACE_S / 60, help="the trace is stretched to this"
    )
    parser.add_argument("--peers", type=_peers, default=PEERS, metavar="A,B")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON",
        help="launcher settings of ours that are not the default",
    )  # fmt: skip
    parser.add_argument("--train-s", type=float, default=40.0, help="before the trace begins")
    parser.add_argument(
        "--sandbox", default="goodput", help="its name; it is taken down at the end"
    )
    parser.add_argument(
        "--together", action="store_true",
        help="all peers at the same time, under the same load of this machine",
    )  # fmt: skip
    parser.add_argument("--width", type=int, default=150, help="of the table")
    parser.add_argument("--json", type=Path, help="write every measurement to this file as well")
    return parser.parse_args()


def _peers(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in peers({})]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} in {', '.join(peers({}))}")
    return text.split(",")


if __name__ == "__main__":
    main()
