"""How a run is: read from its directory, again and again."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.checkpoint.store import Store
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.causes import TimelineEntry
from hpc_elastic.report.timeline import episodes
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import Event, EventReader
from hpc_elastic.shared_files import read_json


class Watch:
    """What is known of a run.

    Args:
        run: Its directory.
        checkpoints: Where its training saves.
        num_nodes: How many nodes it has where it avoids none.
    """

    def __init__(self, run: RunDir, checkpoints: Path, num_nodes: int) -> None:
        self.run = run
        self._num_nodes = num_nodes
        self._term = 0
        self.problems: list[str] = []
        """What status.json has shown of a leader whose term was over."""
        self.store = Store(checkpoints)
        self._reader = EventReader(run.event_logs)
        self._events: list[Event] = []
        self._past = EventIndex([])
        self._story: list[TimelineEntry] | None = None

    def look(self) -> EventIndex:
        """Read what has come since the last look, and return all that has happened."""
        self._look_at_status()
        new = self._reader.new()
        if new:
            self._events += new
            self._past, self._story = EventIndex(self._events), None
        return self._past

    def _look_at_status(self) -> None:
        status = read_json(self.run.status) or {}
        term = int(status.get("epoch") or 0)
        if term < self._term:
            what = f"status.json is of epoch {term}, after one of epoch {self._term}"
            self.problems.append(f"{what}: {status.get('phase')}, nodes {status.get('nodes')}")
        self._term = max(term, self._term)

    @property
    def story(self) -> list[TimelineEntry]:
        """What `hpc-elastic events` tells, as of the last look."""
        if self._story is None:
            self._story = episodes(self._events)
        return self._story

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.run.result.exists()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return next(iter(self.store.steps()), 0)

    @property
    def num_usable(self) -> int:
        """How many nodes there are for the run: those that it does not avoid."""
        return self._num_nodes - len(read_json(self.run.excluded) or {})

    @property
    def hosts(self) -> list[str]:
        """The nodes of the last group, in rank order, as of the last look."""
        rounds = self._past.rounds
        return [life.host for life in self._past.members(rounds[-1])] if rounds else []

    @property
    def leader(self) -> str:
        """The node whose agent leads, as of the last look."""
        last = self._past.leaders[-1]
        return self._past.host_at(last["task"], float(last["time"]))

    def task_on(self, host: str) -> str:
        """Return the task of the last group that has a node."""
        task, _ = self.attempt_on(host) or ("", 0)
        assert task, f"no task of the last group has {host}"
        return task

    def attempt_on(self, host: str) -> tuple[str, int] | None:
        """Return the task of the last group that has a node, and its attempt; None if none has."""
        members = self._past.rounds[-1]["members"]
        return next(((m["task"], int(m["attempt"])) for m in members if m["host"] == host), None)

    def is_well(self, since: int) -> bool:
        """Tell whether the run trains on all nodes that it may have, and has saved since.

        Args:
            since: A step that it has to have saved beyond.
        """
        run = self.look()
        if not run.rounds:
            return False
        last = run.rounds[-1]
        number, members = int(last["number"]), run.members(last)
        stops = [
            e for e in run.of("round_stopped", after=float(last["time"])) if e["round"] == number
        ]
        if stops or len(members) < self.num_usable:
            return False
        if not all(number in life.trains for life in members):
            return False
        first = max(int(life.trains[number]["step"]) for life in members)
        return self.saved_step > max(since, first)
