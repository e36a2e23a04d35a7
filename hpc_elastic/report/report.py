"""The report of a run: everything that its page shows, as values (pure).

``hpc-elastic report --format json`` prints just this, and the page and the picture are made of it
and of nothing else. The docstrings here are the description of the JSON form: docs/report.md takes
it from them (docs/generate.py).

What a change of the group has cost in node-seconds is all that nodes spent, from the change to the
next one, on anything but useful steps and checkpoints. So the costs of all changes, with that of
the beginning, add up to what is missing in the goodput but for the checkpoints.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc_elastic.report.causes import TimelineEntry
from hpc_elastic.report.node_time import Account, Interval, NodeTime, Size
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.sentences import sentence

VERSION = 1
"""It changes when a key changes its meaning or goes, not when one is added."""

_CHANGES = ("grew", "shrank", "changed", "restarted", "stopped", "resumed")
_ALONE = ("task_exited", "agent_failed")
"""Nodes that were in no group."""
_COMING = ("arrived", "returned")
_PAYS = ("useful", "checkpoint")
"""What is no cost of a change."""


@dataclass(frozen=True)
class About:
    """What is said of the run as a whole; times in Unix seconds, None where nothing is known.

    Attributes:
        run_id: Its id.
        directory: The run directory.
        overrides: What was overridden on the command line.
        launcher: ``slurm``, ``local`` or ``unknown``.
        ft: Whether each node is a replica that lives on when others come and go.
        phase: What it is doing, as `hpc-elastic status` says.
        submitted: When it was submitted.
        until: When it ended; of one that goes on, when the report was made.
        ended: ``status``, ``time``, ``why`` and ``failure``; None: it goes on.
        min_nodes: The fewest that it trains with.
        max_nodes: The most.
        restarts: Restarts that failures of workers have cost.
        max_restarts: How many they may.
        rounds: How many groups there were.
        step: The furthest that is known.
        total_steps: Where the training is done.
        samples: Seen so far.
        loss: The last.
        steps_per_s: Over the last minutes; None unless it trains now.
        remaining_s: At this pace.
    """

    run_id: str
    directory: str
    overrides: str = ""
    launcher: str = "unknown"
    ft: bool = False
    phase: str = "unknown"
    submitted: float | None = None
    until: float = 0.0
    ended: Mapping[str, Any] | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    restarts: int = 0
    max_restarts: int = 0
    rounds: int = 0
    step: int | None = None
    total_steps: int | None = None
    samples: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    remaining_s: float | None = None


@dataclass(frozen=True)
class Spent:
    """Where the time of all nodes went.

    Attributes:
        goodput: The share of useful steps in ``node_s``; None: no step is known.
        node_s: Node-seconds from each task's start to its end.
        queue_s: Seconds for which tasks waited for a node, added up; not part of ``node_s``.
        by_kind: Node-seconds by kind: ``useful``, ``replayed``, ``checkpoint``, ``restore``,
            ``import``, ``rendezvous``, ``start``, ``idle``; they add up to ``node_s``.
    """

    goodput: float | None
    node_s: float
    queue_s: float
    by_kind: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """A change of the group, or a node that left without being in it.

    Attributes:
        time: When, in Unix seconds.
        kind: As in ``events --json``; ``stopped`` includes that the group came back.
        fault: Whether anything but the arrival of nodes brought it about.
        cause: What did, as in ``events --json``; the first, if there were several.
        hosts: Of those whom the causes name.
        sentence: All that is known, in words.
        nodes_before: Size of the group; None: there was none.
        nodes_after: Size of the group; None: there is none yet.
        lost_steps: Steps that are made again because of it; None: it can not be told.
        pause_s: Seconds without a step; None: nobody paused, or it is not over.
        node_s: Node-seconds that it has cost so far: all until the next change that were neither
            useful nor for checkpoints.
        open: Whether it goes on still.
    """

    time: float
    kind: str
    fault: bool
    cause: str
    hosts: Sequence[str]
    sentence: str
    nodes_before: int | None
    nodes_after: int | None
    lost_steps: int | None
    pause_s: float | None
    node_s: float
    open: bool


@dataclass(frozen=True)
class SavedCheckpoints:
    """The checkpoints.

    Attributes:
        announced: ``time`` (when it was first seen) and ``step`` of each that the script announced.
        kept: ``step`` and ``time`` of those that lie in the run's directory, the newest first.
        blocked_node_s: Node-seconds for which they held up the training.
    """

    announced: Sequence[Mapping[str, Any]] = ()
    kept: Sequence[Mapping[str, Any]] = ()
    blocked_node_s: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """What was submitted; secrets are replaced by ``***``.

    Attributes:
        settings: What was asked for: nodes and ``launcher.*``; None: it can not be read.
        config: The user's config, as it was frozen; for a function its arguments. None: as above.
        provenance: Python, command line, git commit, host, user and time of the submission.
    """

    settings: Any = None
    config: Any = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        version: Of this form.
        made: When the report was made, in Unix seconds.
        about: The run as a whole.
        spent: Where the time of all nodes went.
        nodes: Every attempt of every task, in order of their beginning.
        queue: ``task``, ``begin`` and ``end`` of each time that a task waited for a node.
        group: How the size of the group changed.
        progress: Step and loss over time, as the leader saw them.
        changes: Faults and other changes of the group, with their cost.
        first_node_s: Node-seconds that it took to get going, counted as for a change.
        story: ``time`` and ``sentence`` of everything that happened, as `hpc-elastic events`.
        checkpoints: The checkpoints.
        configuration: What was submitted.
        notes: What could not be found out, was left out, or should not be overlooked.
    """

    version: int
    made: float
    about: About
    spent: Spent
    nodes: Sequence[NodeTime]
    queue: Sequence[Mapping[str, Any]]
    group: Sequence[Size]
    progress: Sequence[Point]
    changes: Sequence[Change]
    first_node_s: float
    story: Sequence[Mapping[str, Any]]
    checkpoints: SavedCheckpoints
    configuration: Configuration
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; numbers that are none (NaN) are null."""
        return {key: _finite(value) for key, value in asdict(self).items()}


def report(
    about: About,
    spent: Account,
    points: Sequence[Point],
    told: Sequence[TimelineEntry],
    *,
    made: float,
    kept: Sequence[Mapping[str, Any]] = (),
    configuration: Configuration | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Put a report together.

    Args:
        about: The run as a whole.
        spent: Where its time went.
        points: Its progress, in order of time.
        told: Its episodes, in order of time.
        made: Unix seconds.
        kept: The checkpoints in its directory.
        configuration: What was submitted.
        notes: What could not be found out.
    """
    first_node_s, found = changes(told, spent.nodes)
    by_kind = spent.seconds
    return Report(
        VERSION, made, about,
        Spent(spent.goodput, spent.node_s, spent.queue_s, by_kind),
        spent.nodes,
        [{"task": task, "begin": i.begin, "end": i.end}
         for task, waited in spent.queued.items() for i in waited],
        spent.sizes, points, found, first_node_s,
        [{"time": e.time, "sentence": sentence(e)} for e in told],
        SavedCheckpoints(list(_announced(points)), kept, by_kind["checkpoint"]),
        configuration or Configuration(),
        [*notes, *_slow(told), *_doubts(points)],
    )  # fmt: skip


# ---- what changes have cost ---------------------------------------------------------------


def changes(
    told: Sequence[TimelineEntry], nodes: Iterable[NodeTime]
) -> tuple[float, list[Change]]:  # fmt: skip
    """Return what the beginning has cost in node-seconds, and the changes with their cost."""
    at = [e for e in sorted(told, key=lambda e: e.time) if e.kind in (*_CHANGES, *_ALONE)]
    moments = [e.time for e in at if e.kind in _CHANGES]
    costs = _costs(moments, nodes)
    of_changes = iter(costs[1:])
    found: list[Change] = []
    for episode in at:
        node_s = next(of_changes) if episode.kind in _CHANGES else 0.0
        change = _change(episode, round(node_s, 3))
        if change.kind == "resumed" and found and found[-1].kind == "stopped":
            change = _with_return(found.pop(), change)
        found.append(change)
    return round(costs[0], 3), found


def _costs(moments: Sequence[float], nodes: Iterable[NodeTime]) -> list[float]:
    """Return the node-seconds that were spent before, between and after some moments."""
    costs = [0.0] * (len(moments) + 1)
    for interval in (i for node in nodes for i in node.intervals if i.kind not in _PAYS):
        for index, length_s in _between(interval, moments):
            costs[index] += length_s
    return costs


def _between(interval: Interval, moments: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the parts of an interval, each with how many of the moments lie before it."""
    at, index = interval.begin, bisect_right(moments, interval.begin)
    while index < len(moments) and moments[index] < interval.end:
        yield index, moments[index] - at
        at, index = moments[index], index + 1
    yield index, interval.end - at


def _change(episode: TimelineEntry, node_s: float) -> Change:
    causes = [c for c in episode.causes if c.what not in _COMING]
    named = causes or list(episode.causes)
    cost = episode.cost
    return Change(
        episode.time, episode.kind, bool(causes), named[0].what if named else "other",
        sorted({host for cause in named for host in cause.hosts}), sentence(episode),
        episode.nodes_before, episode.nodes_after, cost.lost_steps, cost.pause_s, node_s,
        episode.is_open,
    )  # fmt: skip


def _with_return(stopped: Change, resumed: Change) -> Change:
    """Return the loss of a whole group with its coming back: that is what it has cost."""
    return replace(
        stopped, sentence=f"{stopped.sentence}. {resumed.sentence}", open=resumed.open,
        nodes_after=resumed.nodes_after, lost_steps=resumed.lost_steps, pause_s=resumed.pause_s,
        node_s=round(stopped.node_s + resumed.node_s, 3),
    )  # fmt: skip


# ---- checkpoints, and what is doubtful ----------------------------------------------------


def _announced(points: Iterable[Point]) -> Iterator[dict[str, Any]]:
    last = None
    for point in points:
        if point.checkpoint is not None and point.checkpoint != last:
            last = point.checkpoint
            yield {"time": point.time, "step": last}


def _slow(told: Iterable[TimelineEntry]) -> list[str]:
    """Return which ranks hold the others up, as was last said of each."""
    last = {(e.facts.get("rank"), e.facts.get("host")): e for e in told if e.kind == "straggler"}
    return [sentence(episode) for episode in last.values() if episode.facts.get("slow")]


def _doubts(points: Sequence[Point]) -> Iterator[str]:
    """Yield what a reader would miss."""
    odd = next((p for p in points if p.loss is not None and not math.isfinite(p.loss)), None)
    if odd is not None:
        where = "" if odd.step is None else f" at step {odd.step}"
        yield f"the loss was {odd.loss}{where}, perhaps again later: it is not drawn there"
    if points and all(p.step is None for p in points):
        yield "no step is known: the script reports none, and uses no optimizer of torch"
    elif points and all(p.loss is None for p in points):
        yield "the script reports no loss (`hpc_elastic.report(step, loss=...)`)"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---- Takes secrets out of what a report shows of a configuration (pure)
# A report is made to be handed around; what it was made of lies in files that nobody else may
# read, for there are tokens in them. Hidden are all values below a key ``env``, those whose key
# sounds like a secret, and passwords in URLs. A secret under a harmless name can not be
# recognised.


HIDDEN = "***"
"""What stands for a secret."""

_SECRET = re.compile(
    r"token$|secret|passw|passphrase|credential|(api|access|private|auth|signing)[_-]?key|^env$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+@")
_OVERRIDE = re.compile(r"([+~]*[\w./@-]+)=(.*)", re.DOTALL)


def redact(value: Any, *, hide: bool = False) -> Any:
    """Return JSON values without their secrets.

    Args:
        value: Any; keys of objects say what is secret.
        hide: It is one: what has a value loses it, and the keys stay.
    """
    if isinstance(value, dict):
        return {k: redact(v, hide=hide or is_secret(str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, hide=hide) for item in value]
    if hide:
        return value if value is None or value == "" else HIDDEN
    return _IN_URL.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def redact_argument(text: str) -> str:
    """Return an argument of the command line; the value of an override may be a secret."""
    override = _OVERRIDE.fullmatch(text)
    if override is None:
        return str(redact(text))
    key, value = override.groups()
    hide = any(is_secret(part) for part in re.split(r"[./@]", key.lstrip("+~")))
    return f"{key}={redact(value, hide=hide)}"


def is_secret(key: str) -> bool:
    """Tell whether a key sounds like that of a secret."""
    return _SECRET.search(key) is not None
