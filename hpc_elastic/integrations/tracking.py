"""One tracker run for one training run: what the integrations of experiment trackers share.

A worker that starts again, on any node and with any world size, continues the tracker's run. That
run is found by the run's id, which exists before the first worker does, so a restart before the
first checkpoint finds it too.

After a restart from the checkpoint of step S the steps after S are trained again. What was logged
of them must be neither logged twice nor lost. Only the tracker's own store shows how much of it
arrived: a tracker buffers in memory, and is killed together with the worker. So each integration

- has the tracker write everything to its store at once, or nearly so, since a checkpoint may be
  complete right after;
- reads from that store, when it starts, the last step of each key, and drops values up to it.

The last step is kept by key since keys advance separately: a validation may be logged long after
the loss of the same step, or against the number of the epoch.

If the node of rank 0 dies, the shared file system may lack what that node had not yet written to
it. Steps that are trained again are logged then; earlier ones are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.progress_log import read_points
from hpc_elastic.report.sentences import lines
from hpc_elastic.report.timeline import build_timeline
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, RunDir
from hpc_elastic.run.events import read_events, valid_events

EVENTS = "hpc_elastic/events"
"""Key of the run's events."""


@dataclass(frozen=True)
class OwnRun:
    """The run of this worker; ``run_id`` is the same for all restarts and resumptions."""

    run_id: str
    path: Path

    def describe_events(self) -> str:
        """Return what has happened to the run so far, a line each; empty if unreadable."""
        try:
            events = valid_events(read_events(RunDir(self.path).event_logs))
            points = read_points(RunDir(self.path).progress)
        except OSError:
            return ""
        return "\n".join(lines(build_timeline(EventIndex(events, points))))


def own_run() -> OwnRun | None:
    """Return the run of this worker; None outside of a run."""
    path = os.environ.get(RUN_DIR_VARIABLE)
    return None if not path else OwnRun(RunDir(Path(path)).load().run_id, Path(path))


def is_logger() -> bool:
    """Return whether this worker logs: rank 0, with ``ft=true`` that of the first replica."""
    replica = os.environ.get(fencing.REPLICA_VARIABLE, "0").rpartition(":")[2]
    return os.environ.get("RANK", "0") == "0" and replica == "0"


class LastSteps:
    """The last step of each key that the tracker's store had when this worker started.

    ``annotate`` is called once, with the first step that is new, to add the run's events there.
    """

    def __init__(self, last: Mapping[str, int], annotate: Callable[[int], None]) -> None:
        self._last = last
        self._annotate: Callable[[int], None] | None = annotate

    def is_new(self, key: str, step: int) -> bool:
        """Return whether to log a value: its step was not there when this worker started."""
        if step <= self._last.get(key, -1):
            return False
        if (annotate := self._annotate) is not None:
            self._annotate = None
            annotate(step)
        return True
