#!/usr/bin/env python3
"""How long from a fault to the next training step, ours beside torchrun?

    as root: python benchmarks/recovery.py --repeats 3

METHODS.md says what is measured, `recovery/faults.py` how each fault is made, `recovery/peers.py`
who runs the training, which is the same for all. A fault comes when the whole group has trained for
a while, so that our spares have imported torch; they do it slowly.

Of torchrun nothing is known between the fault and the start of the worker; of ours:

- detect: until the leader has heard of it (join: until the new node's agent has come to him);
- rendezvous: until the next round is closed, which the others' workers have been stopped for;
- to worker: until the process of the worker that was ready last begins, or takes over the script;
- start+import: until it has imported torch; of a spare only what was left to import;
- init: until all workers have joined the process group; then comes the first step.
"""

import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence import torchrun
from evidence.result import Cell, Column, Figure, Result, Table, Target, figure
from evidence.result import Peer as Named
from evidence.sandbox import sandbox_of
from evidence.show import about, among, options, present, say
from recovery.faults import (
    CASES,
    NEWCOMER,
    PATIENCE_S,
    Stage,
    occupy_newcomer,
    outcome,
    sweep_up,
    trained,
)
from recovery.peers import OURS, Peer, nvrx_version, peers
from recovery.trail import STAGES, Recovery

from slurm_sandbox import SandboxConfig, SlurmSandbox

PEERS = ["ours", "c10d", "c10d-tuned"]
TARGET_S = 5.0
TARGET_OWN_S = 1.0
_LOST = ("follower", "leader-agent", "leader-node")
ABOUT = about("Recovery from a fault")


@dataclass(frozen=True)
class Measurement:
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


def result(measured: Sequence[Measurement], repeats: int, other: Named) -> Result:
    columns = (
        Column("fault"), Column("", ""), Column("total", ".2f"), Column("pause", ".2f"),
        Column("steps repeated", ".0f"), Column("nodes", ""),
        *(Column(name, ".2f") for name in STAGES), Column("not start and import", ".2f"),
    )  # fmt: skip
    grouped = _grouped(measured)
    rows = tuple((case, peer, *_cells(group)) for (case, peer), group in grouped.items())
    ours = {case: group for (case, peer), group in grouped.items() if peer == OURS}
    others = any(peer.startswith("torchrun") for _, peer in grouped)
    return Result(
        about=ABOUT,
        tables=(Table("from the fault to the next training step, seconds", columns, rows),),
        targets=tuple(t for case in _LOST if case in ours for t in targets(case, ours[case])),
        peers=(*([torchrun.peer()] if others else []), other),
        repeats=repeats,
    )


def nvrx(program: str | None, measured: bool) -> Named:
    """Return NVIDIA's extension as a peer, or why it was not measured."""
    if program is None:
        how = "pip install nvidia-resiliency-ext in an environment of its own, and --nvrx"
        return Named("NVRx ft_launcher", why=f"it is not installed: {how}")
    if not measured:
        return Named("NVRx ft_launcher", why="it was not asked for")
    return Named("NVRx ft_launcher", nvrx_version(program) or "of an unknown version")


def _grouped(measured: Sequence[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    grouped: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        grouped.setdefault((m.case, m.peer), []).append(m)
    return dict(sorted(grouped.items(), key=lambda item: list(CASES).index(item[0][0])))


def _cells(group: Sequence[Measurement]) -> list[Cell]:
    found = [m.recovery for m in group if m.recovery is not None]
    lost = ", ".join(f"{m.outcome} ({m.ended_s:.0f} s)" for m in group if m.recovery is None)
    if not found:
        return [lost]
    total = figure([r.total_s for r in found])
    if lost:
        assert isinstance(total, Figure)
        total = f"{total.text('.2f')}, {lost}"
    stages = [[r.stages[name] for r in found if name in r.stages] for name in STAGES]
    return [
        total,
        figure([r.pause_s for r in found]),
        figure([r.repeated for r in found]),
        "/".join(str(size) for size in sorted({r.world_size for r in found})),
        *map(figure, stages),
        "" if group[0].case == "join" else figure([r.own_s for r in found]),
    ]


def targets(case: str, group: Sequence[Measurement]) -> list[Target]:
    """Hold the cases of a kind against the targets; one that did not recover misses them."""
    found = [m.recovery for m in group if m.recovery is not None]
    whats = (f"{case}: next step", f"{case}: of it neither process start nor import of torch")
    if len(found) < len(group):
        why = f"{len(group) - len(found)} of {len(group)} did not recover"
        bounds = (TARGET_S, TARGET_OWN_S)
        return [
            Target(what, bound, None, "s", why=why, failed=True)
            for what, bound in zip(whats, bounds, strict=True)
        ]
    total, own = ([r.total_s for r in found], [r.own_s for r in found])
    return [
        Target(whats[0], TARGET_S, statistics.median(total), "s"),
        Target(whats[1], TARGET_OWN_S, statistics.median(own), "s"),
    ]


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--cases", type=among(CASES), default=list(CASES), metavar="A,B")
    known = peers({}, "ft_launcher")
    parser.add_argument("--peers", type=among(known), metavar="A,B")
    parser.add_argument(
        "--nvrx", metavar="PROGRAM", default=shutil.which("ft_launcher"),
        help="ft_launcher of NVIDIA's Resiliency Extension; default: that of the PATH",
    )  # fmt: skip
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON",
        help='launcher settings of ours that are not the default: {"rendezvous": {...}}',
    )  # fmt: skip
    parser.add_argument("--train-s", type=float, default=30.0, help="from first step to fault")
    parser.add_argument(
        "--sandbox", default="recovery", help="its name; it is taken down at the end"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all details there")
    given = parser.parse_args()
    if "nvrx" in (given.peers or ()) and given.nvrx is None:
        parser.error("nvrx: there is no ft_launcher; say where it is: --nvrx PROGRAM")
    found = peers(given.settings, given.nvrx)
    names = given.peers or [*PEERS, *(["nvrx"] if given.nvrx else [])]
    field = {name: found[name] for name in names}
    measured: list[Measurement] = []
    config = SandboxConfig(name=given.sandbox, nodes=int(NEWCOMER.removeprefix("node")))
    try:
        with sandbox_of(config) as sandbox:
            turns = itertools.product(range(given.repeats), given.cases, field.values())
            for _, case, peer in turns:
                m = measure(case, peer, sandbox, given.train_s)
                measured.append(m)
                after_s = m.recovery.total_s if m.recovery else m.ended_s
                say(f"{case}, {peer.name}: {m.outcome} after {after_s:.2f} s")
    finally:
        if given.samples:
            given.samples.write_text(json.dumps([asdict(m) for m in measured], indent=1) + "\n")
        if measured:
            present(result(measured, given.repeats, nvrx(given.nvrx, "nvrx" in field)), given)


if __name__ == "__main__":
    main()
