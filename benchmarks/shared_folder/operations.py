"""How often a run asks the file server for something, and how many files it leaves.

Counted by the NFS clients of the sandbox: what they answer from their caches is not among it.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from evidence.result import Cell, Column, Figure, Table, Target

from shared_folder.place import NEVER, NFS, PATIENCE_S, Training, place_of, training
from slurm_sandbox.processes import wait_until
from soak.inject import workers_on

LEADER_A_SECOND, FOLLOWER_A_MINUTE = 3.0, 4.0
FILES_AT, NUM_CHECKPOINTS = 16, 100
LOGIN = "login"
STEADY_S = 60.0
_SETTLED_S = 15.0
_AFTER_S = 5.0
"""What an event is followed by: removals, statuses."""
_PAUSE_S = 0.2
_AWAY_S = 3.0
_SPARE_MEMORY = 0.85
"""The share of the free memory that a run may need."""
_NODE_BYTES = {False: 400 << 20, True: 240 << 20}
"""Of a node with an agent and a worker, and with a worker without torch."""
_LIGHT_FROM = 32
"""From so many agents on the workers are without torch: else 64 need 24 GiB."""
_OWN = frozenset({"tasks", "logs", "ledger"})
_SHOWN = 8
BOUNDS = (
    "What bounds the files of a run. Checkpoints: two files a rank and a manifest, of the newest "
    "`keep_last` (2) checkpoints, so that their number does not count. Each round leaves a file of "
    "output, one of errors (with an index of times where something was printed) and one of the "
    "ledger for each rank, and a record or two; nothing removes these, so they grow with the "
    "number of rounds. Each attempt of a task leaves its agent's log with its times, and what "
    "Slurm captured; each task one file of events and one of metrics.",
)
SETTINGS = {"agent": {"warm_workers": False}, "max_restarts": 100, "scale_up_timeout_s": 5.0}


@dataclass(frozen=True)
class Window:
    """What all clients asked for in a while: how often, by operation and path below the run."""

    seconds: float
    asked: Mapping[str, Counter[tuple[str, str]]]
    new_files: int = 0

    def rate(self, client: str, *, own: bool | None = None) -> float:
        """Return a client's operations a minute; ``own``: on its own logs and ledger, or others."""
        return self.num(client, own=own) * 60 / self.seconds

    def num(self, client: str, *, own: bool | None = None) -> int:
        """Return a client's operations; see `rate`."""
        return sum(
            times
            for (_, path), times in self.asked[client].items()
            if own is None or own == (not _OWN.isdisjoint(path.split("/")))
        )


@dataclass
class Size:
    """What was counted in a run of one size.

    ``leader``: in the steady windows, in which the launcher watches; ``watched``: the same with
    `hpc-elastic status --watch` beside it. ``files``: at the end, by folder, with `NUM_CHECKPOINTS`
    made.
    """

    agents: int
    leader: str
    steady: Window
    watched: Window
    events: dict[str, Window] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    @property
    def followers(self) -> list[str]:
        return [client for client in self.steady.asked if client not in (self.leader, LOGIN)]


@dataclass
class Found:
    """All sizes, and why others were left out."""

    sizes: list[Size] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure(agents: int, sandbox: str, folder: Path, found: Found) -> None:
    """Count what a run of that size asks for, if the memory is there for it."""
    light = agents >= _LIGHT_FROM
    need, free = agents * _NODE_BYTES[light], psutil.virtual_memory().available
    if need > _SPARE_MEMORY * free:
        gib = f"they need {need / (1 << 30):.1f} GiB, and {free / (1 << 30):.1f} GiB are free"
        found.skipped.append(f"{agents} agents were not measured: {gib}.")
        return
    options = {"nodes": f"1:{agents}", "settings": SETTINGS, "light": light}
    with (
        place_of(NFS, sandbox, folder, agents) as place,
        training(place, every_steps=NEVER, pause_s=_PAUSE_S, **options) as run,
    ):
        found.sizes.append(_size(agents, run, light=light))


def _size(agents: int, run: Training, *, light: bool) -> Size:
    patience_s = PATIENCE_S + 10 * agents

    def all_train(since: float) -> None:
        run.wait_for_group(agents, since, patience_s)

    all_train(0.0)
    time.sleep(_SETTLED_S)
    leader = run.leader()
    steady = _window(run, lambda: time.sleep(STEADY_S))
    with _watching(run):
        time.sleep(_SETTLED_S)
        watched = _window(run, lambda: time.sleep(STEADY_S))
    size = Size(agents, leader, steady, watched)
    follower = size.followers[-1]

    def restart() -> None:
        at = time.time()
        workers_on(run.place.sandbox, follower)[0].kill()
        all_train(at + _AFTER_S)

    def preempt() -> None:
        run.place.sandbox.preempt([follower], for_s=_AWAY_S)
        began = run.local / f"began-{follower}"
        before = began.read_text()
        wait_until("the node is back", lambda: began.read_text() not in ("", before), patience_s)
        since = float(began.read_text())
        all_train(since)

    for name, event in {
        **({} if light else {"a save": run.save}),
        "a worker dies: a round": restart,
        "a follower is preempted and comes back: a save, two rounds": preempt,
    }.items():
        size.events[name] = _window(run, lambda event=event: (event(), time.sleep(_AFTER_S)))
    if agents == FILES_AT:
        while run.num_saves < NUM_CHECKPOINTS:
            run.save()
        time.sleep(_AFTER_S)
        size.files = _files(run)
    return size


def _window(run: Training, happens: Callable[[], object]) -> Window:
    sandbox, before, begin = run.place.sandbox, sum(_files(run).values()), time.monotonic()
    sandbox.trace_files()
    happens()
    sandbox.trace_files(False)
    seconds = time.monotonic() - begin
    clients = (LOGIN, *sandbox.nodes)
    asked = {client: Counter(map(_kind, sandbox.file_trace(client))) for client in clients}
    return Window(seconds, asked, sum(_files(run).values()) - before)


def _kind(asked: tuple[str, str]) -> tuple[str, str]:
    """Return an operation with its path below the sweep, where numbers are one sort."""
    operation, path = asked
    below = re.sub(r"\.(\w+\.json)\.\w+ \(deleted\)$", r"\1", path.partition("/")[2] or ".")
    return operation, re.sub(r"\.(json|prom)\.\w+$", r".\1.new", re.sub(r"\d+", "N", below))


@contextlib.contextmanager
def _watching(run: Training) -> Iterator[None]:
    """Let `hpc-elastic status --watch` look at a run on the login node."""
    program = str(Path(sys.executable).with_name("hpc-elastic"))
    sandbox = run.place.sandbox
    process = subprocess.Popen(
        sandbox.on_login([program, "status", str(run.run), "--watch"]),
        env={**os.environ, **sandbox.env}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
        assert process.poll() is None, "status --watch has ended"
    finally:
        process.terminate()
        process.wait()


def _files(run: Training) -> dict[str, int]:
    """Return how many files there are, by folder: as the server has them."""
    found: Counter[str] = Counter()
    for folder, _, names in os.walk(run.run.parent):
        parts = Path(folder).relative_to(run.run.parent).parts
        inside = parts[1:] if parts[:1] == ("run",) else parts
        found["/".join(inside[:1]) or "the run's own"] += len(names)
    return dict(sorted(found.items()))


def tables(found: Found) -> list[Table]:
    made = [_steady(found), _events(found)]
    for size in found.sizes:
        if size.files:
            made.append(_of_files(size))
    return [*made, *([_most(found.sizes[-1])] if found.sizes else [])]


def _steady(found: Found) -> Table:
    columns = (
        Column("agents"), Column("leader", ".0f"), Column("a follower (median)", ".1f"),
        Column("a follower (most)", ".1f"), Column("a follower's own log and ledger", ".1f"),
        Column("the launcher", ".0f"), Column("status --watch", ".0f"),
    )  # fmt: skip
    rows = []
    for size in found.sizes:
        others = [size.steady.rate(node, own=False) for node in size.followers]
        own = [size.steady.rate(node, own=True) for node in size.followers]
        launcher = size.steady.rate(LOGIN)
        values = (
            size.steady.rate(size.leader), statistics.median(others), max(others),
            statistics.median(own), launcher, size.watched.rate(LOGIN) - launcher,
        )  # fmt: skip
        rows.append((str(size.agents), *map(Figure, values)))
    return Table("operations of the file server a minute, in steady training", columns, tuple(rows))


def _events(found: Found) -> Table:
    columns = (
        Column(""), Column("agents"), Column("seconds", ".0f"), Column("leader", ".0f"),
        Column("a follower (mean)", ".0f"), Column("all nodes", ".0f"),
        Column("the launcher", ".0f"), Column("new files", ".0f"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name in dict.fromkeys(name for size in found.sizes for name in size.events):
        for size in [size for size in found.sizes if name in size.events]:
            window = size.events[name]
            more = {
                client: window.num(client) - size.steady.rate(client) * window.seconds / 60
                for client in window.asked
            }
            followers = [more[node] for node in size.followers]
            values = (
                window.seconds, more[size.leader], statistics.mean(followers),
                sum(followers) + more[size.leader], more[LOGIN], window.new_files,
            )  # fmt: skip
            rows.append((name, str(size.agents), *map(Figure, values)))
    caption = "operations for an event, beyond those of steady training in the same time"
    return Table(caption, columns, tuple(rows))


def _of_files(size: Size) -> Table:
    rows = tuple((folder, Figure(num)) for folder, num in size.files.items())
    rows = (*rows, ("all", Figure(sum(size.files.values()))))
    caption = f"files of a run of {size.agents} nodes after {NUM_CHECKPOINTS} checkpoints, 4 rounds"
    return Table(caption, (Column("folder"), Column("files", ".0f")), rows)


def _most(size: Size) -> Table:
    launcher = size.steady.asked[LOGIN]
    asked = {
        "the leader": size.steady.asked[size.leader],
        "the launcher": launcher,
        "status --watch": size.watched.asked[LOGIN] - launcher,
    }
    rows = tuple(
        (who, f"{operation} {path}", Figure(times * 60 / size.steady.seconds))
        for who, kinds in asked.items()
        for (operation, path), times in kinds.most_common(_SHOWN)
    )
    caption = f"what is asked for most often in a run of {size.agents}, a minute"
    return Table(caption, (Column(""), Column("operation and path"), Column("", ".0f")), rows)


def targets(found: Found) -> list[Target]:
    """Hold leaders and followers in steady training against the aims."""
    aims = []
    for size in found.sizes:
        leader = size.steady.rate(size.leader) / 60
        follower = statistics.median(size.steady.rate(n, own=False) for n in size.followers)
        name = f"steady training of {size.agents}"
        aims += [
            Target(f"{name}: the leader's operations a second", LEADER_A_SECOND, leader),
            Target(f"{name}: a follower's a minute", FOLLOWER_A_MINUTE, follower),
        ]
    return aims
