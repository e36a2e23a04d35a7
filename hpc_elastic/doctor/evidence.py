"""What a probe has left behind, read: the facts that the judges go by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.doctor.hello import Hello
from hpc_elastic.doctor.node import NodeFacts
from hpc_elastic.doctor.patient import AGENT, ORPHANED, WORKER
from hpc_elastic.doctor.peers import Meeting
from hpc_elastic.doctor.place import Place
from hpc_elastic.files import is_there, refresh

WHO = (AGENT, WORKER)


@dataclass(frozen=True)
class Report:
    """What one task has measured.

    Attributes:
        facts: Its node.
        meeting: What it found of the others.
        hello: What came of torch's process group; None if it took no part.
    """

    facts: NodeFacts
    meeting: Meeting
    hello: Hello | None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Report:
        """Return it from what `probe` has written."""
        hello = None if raw["hello"] is None else Hello.from_json(raw["hello"])
        facts, meeting = NodeFacts.from_json(raw["facts"]), Meeting.from_json(raw["meeting"])
        return cls(facts, meeting, hello)

    def to_json(self) -> dict[str, Any]:
        """Return it as `probe` writes it."""
        hello = None if self.hello is None else self.hello.to_json()
        return {
            "facts": self.facts.to_json(),
            "meeting": self.meeting.to_json(),
            "hello": hello,
        }


@dataclass(frozen=True)
class Ending:
    """How a task was ended, and how its processes saw it.

    Attributes:
        how: ``requeue`` or ``cancel``.
        node: Its node.
        lived_s: How long a process lived after its SIGTERM, by who; None: it got none.
        orphaned: Whether the worker outlived the task's own process.
        capped: Whether it was let go before Slurm's SIGKILL: it lives that long at least.
        refused: Why Slurm would not; empty if it did.
        back_on: The node that it came back to, restarted; None if it did not.
        back_s: Seconds from the command until then.
        waits: Why it waits in the queue, requeued, and has not come back; empty if it does not.
    """

    how: Literal["requeue", "cancel"]
    node: str
    lived_s: dict[str, float | None] = field(default_factory=dict)
    orphaned: bool = False
    capped: bool = False
    refused: str = ""
    back_on: str | None = None
    back_s: float | None = None
    waits: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that a probe has shown.

    Attributes:
        num_asked: How many nodes it was to look at.
        waiting: Why a task did not start, by index.
        reports: What the tasks have measured, by index.
        silent: What a task that has measured nothing came to, by index.
        blind: The nodes of tasks that run, and have said so by a file, but do not see what was
            written since, by index.
        outside: What is wrong with Slurm's commands outside of the container, by node; None: they
            answer. Empty where there is no container.
        notice_name: The signal that was sent as a notice.
        notices: Seconds until a process had it, by task and who; None: it did not come.
        endings: How tasks were ended.
        leftovers: Tasks that did not end.
        problem: Why it was cut short; empty if it was not.
    """

    num_asked: int
    waiting: dict[int, str] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    blind: dict[int, str] = field(default_factory=dict)
    outside: dict[str, str | None] = field(default_factory=dict)
    notice_name: str = "USR2"
    notices: dict[int, dict[str, float | None]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    problem: str = ""

    def name(self, index: int) -> str:
        """Return the node of a task; its number where that is not known."""
        report = self.reports.get(index)
        return report.facts.name if report else f"task {index}"


def read_reports(place: Place, indices: list[int]) -> tuple[dict[int, Report], dict[int, str]]:
    """Return what tasks have measured, as far as they have, and why a report can not be read."""
    found, unreadable = dict[int, Report](), dict[int, str]()
    for index in indices:
        if is_there(place.node(index)):
            raw = json.loads(place.node(index).read_text())
            try:
                found[index] = Report.from_json(raw)
            except (TypeError, KeyError, AttributeError):
                unreadable[index] = _of_another_version(raw)
    return found, unreadable


def _of_another_version(raw: Any) -> str:
    """Say which hpc_elastic has measured something that this one does not know."""
    try:
        theirs = raw["facts"]["versions"]["hpc_elastic"]
    except (TypeError, KeyError):
        theirs = "of unknown version"
    return f"measured by hpc_elastic {theirs}, which is not the one that reads it here"


def received(place: Place, who: str, index: int, name: str, attempt: int = 0) -> float | None:
    """Return when a process received a signal first, by its own clock; None if it did not."""
    for line in _lines(place.signals(who, index, attempt)):
        if line["signal"] == name:
            return float(line["time"])
    return None


def lived(place: Place, index: int, attempt: int = 0) -> dict[str, float | None]:
    """Return how long the processes of a task lived after their first SIGTERM."""
    times: dict[str, float | None] = {}
    for who in WHO:
        asked = received(place, who, index, "SIGTERM", attempt)
        last = last_beat(place.beat(who, index, attempt))
        times[who] = None if asked is None or last is None else max(0.0, last - asked)
    return times


def last_beat(file: Path) -> float | None:
    """Return the time in a heartbeat file; None if there is none."""
    try:
        refresh(file)
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def was_orphaned(place: Place, index: int, attempt: int = 0) -> bool:
    """Return whether a worker outlived its parent by a heartbeat or more."""
    return received(place, WORKER, index, ORPHANED, attempt) is not None


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        refresh(file)
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return []
