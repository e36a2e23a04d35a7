"""The report of a run as values (pure).

``hpc-elastic report --format json`` prints it, and the page and the picture are made of it alone.
The docstrings here describe the JSON form: docs/generate.py writes docs/reference/report.md.

The cost of a change of the group in node-seconds is all node time from the change to the next one
that was neither useful nor spent on checkpoints. So the costs of all changes and of the start add
up to all node time that was not useful, without that of checkpoints.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from hpc_elastic.report.node_time import Account, GivenBack, NodeTime, Size
from hpc_elastic.report.progress_log import TRAINING, Point
from hpc_elastic.report.sentences import sentence
from hpc_elastic.report.timeline import TimelineEntry

VERSION = 1  # it changes when a key changes its meaning or is removed, not when one is added

_CHANGES = ("grew", "shrank", "changed", "restarted", "stopped", "resumed")
_ALONE = ("task_exited", "agent_failed")  # nodes that were not in the group
_COMING = ("arrived", "returned")
_FEWEST_SAMPLES = 10  # measurements of the GPUs' use that are enough to judge it
_PAYS = ("useful", "checkpoint")  # node time that is no cost of a change


@dataclass(frozen=True)
class About:
    """The run as a whole; times in Unix seconds, None for unknown values."""

    run_id: str  # its id
    directory: str  # the run directory
    overrides: str = ""  # overrides of the command line
    launcher: str = "unknown"  # ``slurm``, ``local`` or ``unknown``
    ft: bool = False  # whether each node is a replica that is not stopped when others come and go
    phase: str = "unknown"  # what it is doing, as in `hpc-elastic status`
    submitted: float | None = None  # when it was submitted
    until: float = 0.0  # when it ended; if it goes on, when the report was made
    ended: Mapping[str, Any] | None = None
    """``status``, ``time``, ``why`` and ``failure``; None: it goes on."""
    min_nodes: int | None = None  # fewest nodes with which it trains
    max_nodes: int | None = None  # most nodes
    restarts: int | None = None  # restarts that failures of workers have spent
    max_restarts: int | None = None  # restarts that are allowed
    rounds: int = 0  # number of rounds
    step: int | None = None  # the last known step
    total_steps: int | None = None  # the last step of the training
    samples: int | None = None  # samples trained so far
    loss: float | None = None  # the last loss
    steps_per_s: float | None = None  # pace over the last minutes; None unless it trains now
    remaining_s: float | None = None  # seconds until ``total_steps``, at this pace


@dataclass(frozen=True)
class Spent:
    """The time of all nodes."""

    goodput: float | None  # the share of useful steps in ``node_s``; None: no step is known
    node_s: float  # node-seconds from the start of each attempt to its end
    queue_s: float  # seconds for which tasks waited for a node; not part of ``node_s``
    by_kind: Mapping[str, float]
    """Node-seconds by kind: ``useful``, ``replayed``, ``checkpoint``, ``restore``, ``import``,
    ``rendezvous``, ``start``, ``idle``; they add up to ``node_s``."""
    given_back: GivenBack = field(default_factory=GivenBack)  # what went back for jobs of others
    return_node_s: float = 0.0  # what these returns cost, in node-seconds; see `Change`


@dataclass(frozen=True)
class Change:
    """A change of the group, or a node that left without being in it."""

    time: float  # when it began, in Unix seconds
    kind: str  # as in ``events --json``; ``stopped`` includes the return of the group
    fault: bool  # whether it has another cause than the arrival of nodes
    cause: str  # its first cause, as in ``events --json``
    hosts: Sequence[str]  # the hosts that the causes concern
    sentence: str  # the change in words
    nodes_before: int | None  # size of the group before; None if there was none
    nodes_after: int | None  # size of the group after; None if there is none yet
    lost_steps: int | None  # steps that are made again because of it; None if unknown
    is_least: bool  # whether that is the least number (see ``events --json``)
    pause_s: float | None  # seconds without a step; None if nothing paused, or it is not over
    node_s: float
    """Its cost in node-seconds so far: all until the next change that were neither useful nor for
    checkpoints."""
    open: bool  # whether it goes on


@dataclass(frozen=True)
class WorkerFailure:
    """A failure of a worker that spent a restart, or ended the run."""

    time: float  # when it was judged, in Unix seconds
    error: str  # which worker failed, and why, in one line
    host: str  # its host
    rank: int | None = None  # its global rank; None if unknown
    round: int | None = None  # its round; None if unknown
    traceback: str | None = None  # its traceback; None if it left none
    log: str | None = None  # the file with its stderr; None if unknown
    last_lines: str = ""  # the last lines of that file; empty if they cannot be read
    ended_run: bool = False  # whether it ended the run


@dataclass(frozen=True)
class SavedCheckpoints:
    """The checkpoints."""

    announced: Sequence[Mapping[str, Any]] = ()
    """``time`` (when the leader first knew of it) and ``step`` of each checkpoint that the script
    announced."""
    kept: Sequence[Mapping[str, Any]] | None = ()
    """``step`` and ``time`` of those in the run's directories, newest first; None: unknown."""
    blocked_node_s: float = 0.0  # node-seconds for which they blocked the training


@dataclass(frozen=True)
class Configuration:
    """The submission; secrets are replaced by ``***``."""

    settings: Any = None  # the settings: nodes and ``launcher.*``; None if they cannot be read
    config: Any = None  # the frozen config of the user; for a function its arguments. None as above
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Python, command line, git commit, host, user and time of the submission."""


@dataclass(frozen=True)
class Report:
    """The report."""

    version: int  # version of this form
    made: float  # when the report was made, in Unix seconds
    about: About  # the run as a whole
    spent: Spent  # the time of all nodes
    nodes: Sequence[NodeTime]  # every attempt of every task, in order of time
    queue: Sequence[Mapping[str, Any]]
    """``task``, ``begin`` and ``end`` of each time that a task waited for a node."""
    group: Sequence[Size]  # the size of the group over time
    progress: Sequence[Point]  # step and loss over time, as leaders wrote them
    changes: Sequence[Change]  # faults and other changes of the group, with their cost
    first_node_s: float  # cost of the start in node-seconds, counted as for a change
    timeline: Sequence[Mapping[str, Any]]
    """``time`` and ``sentence`` of each entry of the timeline, as `hpc-elastic events`."""
    failures: Sequence[WorkerFailure]  # the failures of workers, in order of time
    checkpoints: SavedCheckpoints  # the checkpoints
    configuration: Configuration  # the submission
    hints: Sequence[str]  # what would save node time, in sentences
    notes: Sequence[str]  # what could not be found out, was left out, or needs attention

    def encoded(self) -> bytes:
        """Return it as JSON; NaN and infinities are null."""
        from msgspec.json import encode

        return encode(self)

    def to_json(self) -> dict[str, Any]:
        """Return the values of its JSON form."""
        from msgspec.json import decode

        values: dict[str, Any] = decode(self.encoded())
        return values


def report(
    about: About,
    spent: Account,
    points: Sequence[Point],
    timeline: Sequence[TimelineEntry],
    *,
    made: float,
    failures: Sequence[WorkerFailure] = (),
    kept: Sequence[Mapping[str, Any]] | None = (),
    configuration: Configuration | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Return the report of a run; ``kept`` are the checkpoints in its directories."""
    first_node_s, found = changes(timeline, spent.nodes)
    by_kind, cost_s = spent.seconds, sum(c.node_s for c in found if c.cause == "given_back")
    saved = (point for point in points if point.checkpoint is not None)
    firsts = (next(same) for _, same in groupby(saved, key=attrgetter("checkpoint")))
    announced = [{"time": point.time, "step": point.checkpoint} for point in firsts]
    stragglers = {
        (e.facts.get("rank"), e.facts.get("host")): e for e in timeline if e.kind == "straggler"
    }
    slow = [sentence(entry) for entry in stragglers.values() if entry.facts.get("slow")]
    return Report(
        VERSION, made, about,
        Spent(spent.goodput, spent.node_s, spent.queue_s, by_kind, spent.given_back, cost_s),
        spent.nodes,
        [{"task": task, "begin": i.begin, "end": i.end}
         for task, waited in spent.queued.items() for i in waited],
        spent.sizes, points, found, first_node_s,
        [{"time": e.time, "sentence": sentence(e)} for e in timeline],
        failures,
        SavedCheckpoints(announced, kept, by_kind["checkpoint"]),
        configuration or Configuration(),
        list(hints(by_kind, spent.node_s, points)),
        [*notes, *slow, *_doubts(points)],
    )  # fmt: skip


def changes(
    timeline: Sequence[TimelineEntry], nodes: Iterable[NodeTime]
) -> tuple[float, list[Change]]:  # fmt: skip
    """Return the cost of the start in node-seconds, and the changes with their cost."""
    at = [e for e in sorted(timeline, key=lambda e: e.time) if e.kind in (*_CHANGES, *_ALONE)]
    moments = [e.time for e in at if e.kind in _CHANGES]
    costs = [0.0] * (len(moments) + 1)  # before, between and after the moments
    for interval in (i for node in nodes for i in node.intervals if i.kind not in _PAYS):
        begin, index = interval.begin, bisect_right(moments, interval.begin)
        while index < len(moments) and moments[index] < interval.end:
            costs[index] += moments[index] - begin
            begin, index = moments[index], index + 1
        costs[index] += interval.end - begin
    of_changes = iter(costs[1:])
    found: list[Change] = []
    for entry in at:
        node_s = round(next(of_changes) if entry.kind in _CHANGES else 0.0, 3)
        causes = [c for c in entry.causes if c.what not in _COMING]
        named = causes or list(entry.causes)
        change = Change(
            entry.time, entry.kind, bool(causes), named[0].what if named else "other",
            sorted({host for cause in named for host in cause.hosts}), sentence(entry),
            entry.nodes_before, entry.nodes_after, entry.cost.lost_steps, entry.cost.is_least,
            entry.cost.pause_s, node_s, entry.is_open,
        )  # fmt: skip
        if change.kind == "resumed" and found and found[-1].kind == "stopped":
            stopped = found.pop()  # the loss of a whole group, together with its return
            change = replace(
                change, time=stopped.time, kind="stopped", fault=stopped.fault,
                cause=stopped.cause, hosts=stopped.hosts, nodes_before=stopped.nodes_before,
                sentence=f"{stopped.sentence}. {change.sentence}",
                node_s=round(stopped.node_s + node_s, 3),
            )  # fmt: skip
        found.append(change)
    return round(costs[0], 3), found


_SHORTEST_S = 600.0  # node-seconds from which shares of the time are worth a hint
_LOW_GPU_USE = 0.5
_REMEDIES = {
    "import": (0.1, "list the slow imports of the script in launcher.agent.warm_imports: warm "
               "workers import them before they are needed"),
    "replayed": (0.1, "save more often: save_if_due(step, every_s=...) costs little in the "
                 "background"),
    "checkpoint": (0.05, "save in the background (Checkpointer's default), less often, or to the "
                   "memory tier"),
    "restore": (0.05, "keep a copy in memory (the memory tier), so that a restart reads no file"),
    "rendezvous": (0.1, "the groups form slowly: `hpc-elastic events` shows what they waited for"),
    "idle": (0.2, "nodes wait beside the training: save more often, since they join at "
             "checkpoints, or lower the most nodes"),
}  # fmt: skip
"""Kind of node time -> share from which there is a hint, and the hint."""


def hints(by_kind: Mapping[str, float], node_s: float, points: Sequence[Point]) -> Iterator[str]:
    """Yield what would save node time; nothing for a run that is too short to judge."""
    if node_s < _SHORTEST_S:
        return
    for kind, (least, remedy) in _REMEDIES.items():
        if by_kind[kind] >= least * node_s:
            yield f"{by_kind[kind] / node_s:.0%} of the node time is {kind}: {remedy}"
    used = [p.gpu_use for p in points if p.gpu_use is not None and p.phase == TRAINING]
    if len(used) >= _FEWEST_SAMPLES and fmean(used) < _LOW_GPU_USE:
        yield (
            f"the GPUs are busy for {fmean(used):.0%} of the time while the group trains: more "
            "loader workers (DataLoader(num_workers=...)) or larger micro-batches may help"
        )


def _doubts(points: Sequence[Point]) -> Iterator[str]:
    odd = next((p for p in points if p.loss is not None and not math.isfinite(p.loss)), None)
    if odd is not None:
        where = "" if odd.step is None else f" at step {odd.step}"
        yield f"the loss was {odd.loss}{where}, perhaps again later: it is not drawn there"
    if points and all(p.step is None for p in points):
        yield "no step is known: the script reports none, and uses no optimizer of torch"
    elif points and all(p.loss is None for p in points):
        yield "the script reports no loss (`hpc_elastic.report(step, loss=...)`)"
