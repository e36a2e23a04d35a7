#!/usr/bin/env python3
"""How much of what its nodes could do does a training keep, when they are taken and given back?

    as root: python benchmarks/goodput.py --minutes 10

METHODS.md says what is measured. The trace (`goodput/trace.py`) begins once all four nodes have
trained for a while. Everybody trains the same network in steps of the same length
(`goodput/workload.py`), saves every 15 seconds, and saves when SIGTERM comes:

- hpc_elastic: a run of one to four nodes, with the default settings;
- submitit + torchrun, a job a node: torchrun --nnodes=1:4 in four tasks of an array;
- submitit + torchrun, one job: one job of four nodes, requeued whole;
- submitit + torchrun, hold cleared (if asked for): the first of the two, by a user who knows how to
  take Slurm's hold of two minutes from a task that he has requeued.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evidence import torchrun
from evidence.machine import package_version
from evidence.result import Column, Figure, Result, Table, Target
from evidence.result import Peer as Named
from evidence.sandbox import sandbox_of
from evidence.show import about, among, options, present, say
from evidence.trails import show_ends
from goodput.account import Account, Window, account, last_state, read_groups, undisturbed
from goodput.peers import Peer, peers
from goodput.trace import NUM_NODES, TRACE, TRACE_S, play, read_held, scaled
from goodput.workload import GLOBAL_BATCH

from slurm_sandbox import SandboxConfig, SlurmSandbox

PEERS = ["ours", "submitit", "submitit-one-job"]
PATIENCE_S = 180.0
TARGET = 90.0
"""Per cent."""
_POLL_S = 1.0
ABOUT = about("Goodput under preemption")
ABOUT_TOGETHER = replace(
    ABOUT,
    title="Goodput under preemption, all at once",
    measured="The same for all peers at the same time, each on four nodes of its own, so that "
    "twelve nodes share the machine's cores: all have the same load, and a start costs more.",
)


@dataclass(frozen=True)
class Measurement:
    peer: str
    undisturbed: float
    """Steps per node-second."""
    account: Account

    @property
    def goodput(self) -> float:
        return self.account.goodput(self.undisturbed)


def measure(peer: Peer, sandbox: SlurmSandbox, minutes: float, train_s: float) -> Measurement:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(new_folder())
        nfs = sandbox.config.nfs
        shared = stack.enter_context(new_folder(nfs)) if nfs else folder
        record = folder / "takers"
        record.mkdir()
        try:
            with peer.training(sandbox, folder, shared):
                wait_for_all(folder, train_s)
                start = time.time()
                rate = undisturbed(read_groups(folder), start - train_s / 2, start)
                trace = scaled(TRACE, minutes * 60)
                samples = play(trace, minutes * 60, sandbox, record, _POLL_S)
                window, saved = Window(start, time.time()), peer.saved(shared)
            groups, held = read_groups(folder), read_held(record)
            final = last_state(groups, window.end, saved)
            return Measurement(peer.name, rate, account(groups, held, samples, window, final))
        finally:
            sandbox.heal_all()


@contextlib.contextmanager
def new_folder(parent: str | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="goodput-", dir=parent) as name:
        yield Path(name)


def wait_for_all(folder: Path, train_s: float) -> None:
    deadline = time.monotonic() + PATIENCE_S + train_s
    while time.monotonic() < deadline:
        whole = [g for g in read_groups(folder)[-1:] if g.world_size == NUM_NODES and g.steps]
        if whole and whole[0].steps[-1][0] - whole[0].steps[0][0] >= train_s:
            return
        time.sleep(_POLL_S)
    show_ends(log for kind in ("log", "err", "out") for log in folder.rglob(f"*.{kind}"))
    raise SystemExit(f"the training does not start on {NUM_NODES} nodes")


def result(measured: Sequence[Measurement], *, together: bool) -> Result:
    parts = tuple(Column(name, ".1%") for name in measured[0].account.parts)
    columns = (
        Column(""), Column("of undisturbed", ".1%"), Column("undisturbed, samples/s", ".2f"),
        Column("available, node-s", ".0f"), Column("groups", "g"), Column("steps lost", "g"),
    )  # fmt: skip
    ours = [m for m in measured if m.peer == peers({})["ours"].name]
    others = len(measured) > len(ours)
    return Result(
        about=ABOUT_TOGETHER if together else ABOUT,
        tables=(Table("", (*columns, *parts), tuple(map(_row, measured))),),
        targets=tuple(
            Target("goodput, of the undisturbed rate", TARGET, 100 * m.goodput, "%", True)
            for m in ours
        ),
        peers=(Named("submitit", package_version("submitit")), torchrun.peer()) if others else (),
        repeats=1,
    )


def _row(m: Measurement) -> tuple[str | Figure, ...]:
    a = m.account
    values = (m.goodput, m.undisturbed * GLOBAL_BATCH, a.available_node_s, a.num_groups)
    shares = [seconds / a.available_node_s for seconds in a.parts.values()]
    return m.peer, *map(Figure, (*values, a.lost_steps, *shares))


def measurements(field: Sequence[Peer], given: argparse.Namespace) -> Iterator[Measurement]:
    """Measure one peer after the other, or all at the same time, each on a Slurm of its own."""
    with contextlib.ExitStack() as stack:
        if not given.together:
            nfs = str(stack.enter_context(new_folder()).resolve()) if given.nfs else ""
            config = SandboxConfig(name=given.sandbox, nodes=NUM_NODES, nfs=nfs)
            sandbox = stack.enter_context(sandbox_of(config))
            for peer in field:
                yield measure(peer, sandbox, given.minutes, given.train_s)
            return
        # First in, last out: threads that are waited for end because their sandboxes have gone.
        threads = stack.enter_context(ThreadPoolExecutor())
        names = [f"{given.sandbox}{number}" for number in range(len(field))]
        configs = [SandboxConfig(name=name, nodes=NUM_NODES) for name in names]
        sandboxes = [stack.enter_context(sandbox_of(config)) for config in configs]
        minutes, train_s = given.minutes, given.train_s
        yield from threads.map(lambda p, s: measure(p, s, minutes, train_s), field, sandboxes)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=TRACE_S / 60, help="the trace is stretched to this"
    )
    parser.add_argument("--peers", type=among(peers({})), default=PEERS, metavar="A,B")
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
    parser.add_argument(
        "--nfs", action="store_true",
        help="each node sees the run's folder by an NFS client of its own; for ours only",
    )  # fmt: skip
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all details there")
    given = parser.parse_args()
    if given.nfs and (given.peers != ["ours"] or given.together):
        parser.error("--nfs goes with --peers ours, and without --together")
    field = {name: peers(given.settings)[name] for name in given.peers}
    measured: list[Measurement] = []
    try:
        for m in measurements(list(field.values()), given):
            measured.append(m)
            say(f"{m.peer}: {m.goodput:.1%} of the undisturbed rate")
            if given.samples:
                found = [{"goodput": m.goodput, **asdict(m)} for m in measured]
                given.samples.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        if measured:
            present(result(measured, together=given.together), given)


if __name__ == "__main__":
    main()
