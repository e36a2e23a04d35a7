#!/usr/bin/env python3
"""How long from a fault to the next training step, ours beside torchrun?

    as root: python benchmarks/recovery.py --repeats 3

Four nodes of a Slurm sandbox of its own, one worker a node, everybody's settings the default ones
but where said; the same training (30 ms a step) for all:

- hpc_elastic: a run of one to four nodes;
- torchrun c10d: ``torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend=c10d``, each in its job;
- torchrun c10d, tuned: with the best settings found (`recovery/peers.py`);
- torchrun c10d, unshared (if asked for): with one of these, TORCH_DISABLE_SHARE_RDZV_TCP_STORE.

A fault comes when the whole group has trained for a while (so that our spares have imported torch;
they do it slowly). The time ends with the first step of a new group on a node that was not hit; a
node that joins counts from the start of its task, and until a step of the larger group.
`recovery/faults.py` says how each fault is made. A trainer that stands still for two minutes is
given up (``no step``).

Of torchrun nothing is known between the fault and the start of the worker; of ours:

- detect: until the leader has heard of it (join: until the new node's agent has come to him);
- rendezvous: until the next round is closed, which the others' workers have been stopped for;
- to worker: until the process of the worker that was ready last begins, or takes over the script;
- start+import: until it has imported torch; of a spare only what was left to import;
- init: until all workers have joined the process group; then comes the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recovery.faults import CASES, NEWCOMER, Stage, jobs, occupy_newcomer, sweep_up
from recovery.peers import OURS, Peer, peers
from recovery.trail import STAGES, Fault, Recovery, Worker, group_of, read_workers, recovery
from rich.console import Console
from rich.table import Table

from hpc_elastic.testing.slurm_sandbox import SandboxConfig, SlurmSandbox

PEERS = ["ours", "c10d", "c10d-tuned"]
BOUND_S = 120.0
"""Longer than any time-out that torchrun's rendezvous has by default, but for its join."""
PATIENCE_S = 150.0
TARGET_S = 5.0
TARGET_OWN_S = 1.0
_LOST = ("follower", "leader-agent", "leader-node")
_POLL_S = 0.2


@dataclass(frozen=True)
class Measurement:
    """One fault, and what came of it."""

    case: str
    peer: str
    outcome: str
    """``recovered``, ``all die``, ``no step``; ``no start`` if there was nothing to break."""
    ended_s: float
    """How long after the fault that was certain."""
    recovery: Recovery | None = None


def measure(case: str, peer: Peer, sandbox: SlurmSandbox, train_s: float) -> Measurement:
    """Start a training, do one thing to it, see what comes of it, and clear everything away."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        try:
            if case == "join":
                occupy_newcomer(sandbox)
            peer.start(sandbox, folder)
            group = trained(folder, 3 if case == "join" else 4, train_s)
            if not group:
                return Measurement(case, peer.name, "no start", PATIENCE_S)
            fault = CASES[case](Stage(sandbox, peer, folder, group))
            found = outcome(sandbox, peer, folder, fault)
            return Measurement(case, peer.name, found[0], time.time() - fault.at, found[1])
        finally:
            sweep_up(sandbox)


def trained(folder: Path, size: int, train_s: float) -> list[Worker]:
    """Wait until the whole group has trained for so long, and return its workers; none if never."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        group = group_of(read_workers(folder), size)
        spans = [w.steps[-1][0] - w.steps[0][0] for w in group if w.steps]
        if len(spans) == size and min(spans) >= train_s:
            return group
        time.sleep(_POLL_S)
    for log in sorted(folder.rglob("*.log")):
        print(f"--- {log}", *log.read_text().splitlines()[-12:], sep="\n", file=sys.stderr)
    return []


def outcome(
    sandbox: SlurmSandbox, peer: Peer, folder: Path, fault: Fault
) -> tuple[str, Recovery | None]:
    """Wait for the next step, or for the end of all who could make one."""
    for poll in itertools.count():
        if recovery(read_workers(folder), fault) is not None:
            time.sleep(_POLL_S)  # the others' first steps, and the leader's events
            return "recovered", recovery(read_workers(folder), fault, peer.notices(folder))
        if time.time() - fault.at > BOUND_S:
            return "no step", None
        if poll % 5 == 4 and not set(jobs(sandbox)) - {fault.host}:
            return "all die", None
        time.sleep(_POLL_S)
    raise AssertionError("unreachable")


def report(measured: Sequence[Measurement]) -> Table:
    """Return one line for each case and peer: medians, and the range of the total."""
    table = Table(title="from the fault to the next training step, seconds")
    table.add_column("fault")
    table.add_column("")
    columns = ("total", "pause", "steps repeated", "nodes", *STAGES, "not start and import")
    for column in columns:
        table.add_column(column, justify="right")
    for (case, peer), group in _grouped(measured).items():
        table.add_row(case, peer, *_cells(group), end_section=peer == measured[-1].peer)
    return table


def _grouped(measured: Sequence[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    grouped: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        grouped.setdefault((m.case, m.peer), []).append(m)
    return dict(sorted(grouped.items(), key=lambda item: list(CASES).index(item[0][0])))


def _cells(group: Sequence[Measurement]) -> list[str]:
    found = [m.recovery for m in group if m.recovery is not None]
    lost = [m for m in group if m.recovery is None]
    total = [_spread([r.total_s for r in found])] if found else []
    total += [f"{m.outcome} ({m.ended_s:.0f} s)" for m in lost]
    if not found:
        return ["\n".join(total)]
    stages = [[r.stages[name] for r in found if name in r.stages] for name in STAGES]
    return [
        "\n".join(total),
        _median([r.pause_s for r in found]),
        f"{statistics.median(r.repeated for r in found):.0f}",
        "/".join(str(size) for size in sorted({r.world_size for r in found})),
        *map(_median, stages),
        "" if group[0].case == "join" else _median([r.own_s for r in found]),
    ]


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}" if seconds else ""


def _spread(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return _median(seconds)
    return f"{_median(seconds)} [{min(seconds):.2f}-{max(seconds):.2f}]"


def verdict(measured: Sequence[Measurement]) -> str:
    """Hold ours against the targets."""
    lines = [
        f"targets, a follower or the leader lost: next step within {TARGET_S:g} s, "
        f"of it at most {TARGET_OWN_S:g} s that are neither process start nor import of torch"
    ]
    for (case, peer), group in _grouped(measured).items():
        if peer != OURS or case not in _LOST:
            continue
        found = [m.recovery for m in group if m.recovery is not None]
        total = statistics.median(r.total_s for r in found) if found else float("inf")
        own = statistics.median(r.own_s for r in found) if found else float("inf")
        met = len(found) == len(group) and total <= TARGET_S and own <= TARGET_OWN_S
        lines.append(f"  {case}: {total:.2f} s, {own:.2f} s: {'pass' if met else 'MISS'}")
    return "\n".join(lines)


@contextlib.contextmanager
def sandbox_of(name: str) -> Iterator[SlurmSandbox]:
    """Bring a sandbox up, and down again whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield SlurmSandbox.up(SandboxConfig(name=name, nodes=int(NEWCOMER.removeprefix("node"))))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        SlurmSandbox(name).down()


def main() -> None:
    """Measure, then print the table and the verdict."""
    options = parse()
    field = {name: peers(options.settings)[name] for name in options.peers}
    measured: list[Measurement] = []
    progress = Console(stderr=True, highlight=False)
    try:
        with sandbox_of(options.sandbox) as sandbox:
            turns = itertools.product(range(options.repeats), options.cases, field.values())
            for _, case, peer in turns:
                m = measure(case, peer, sandbox, options.train_s)
                measured.append(m)
                after_s = m.recovery.total_s if m.recovery else m.ended_s
                progress.print(f"{case}, {peer.name}: {m.outcome} after {after_s:.2f} s")
    finally:
        if options.json:
            options.json.write_text(json.dumps([asdict(m) for m in measured], indent=1) + "\n")
        if measured:
            console = Console(highlight=False, width=options.width)
            console.print(report(measured))
            if any(m.peer == OURS for m in measured):
                console.print(verdict(measured))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=_among(CASES), default=list(CASES), metavar="A,B")
    parser.add_argument("--peers", type=_among(peers({})), default=PEERS, metavar="A,B")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON",
        help='launcher settings of ours that are not the default: {"rendezvous": {...}}',
    )  # fmt: skip
    parser.add_argument("--train-s", type=float, default=30.0, help="from first step to fault")
    parser.add_argument(
        "--sandbox", default="recovery", help="its name; it is taken down at the end"
    )
    parser.add_argument("--width", type=int, default=190, help="of the table")
    parser.add_argument("--json", type=Path, help="write every measurement to this file as well")
    return parser.parse_args()


def _among(names: dict[str, object]):
    def chosen(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} in {', '.join(names)}")
        return text.split(",")

    return chosen


if __name__ == "__main__":
    main()
