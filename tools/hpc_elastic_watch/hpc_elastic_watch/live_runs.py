"""The runs that `hpc-elastic report --live` shows, read by one thread for all open pages.

A shared file server, and Slurm, are asked seldom:

- Nothing is read while no page is open; a hidden page counts as closed. The page of one run has
  that run read alone.
- Of a run that trains, and of one that waits, `status.json` alone is read: every two seconds, of
  many runs in turn. The rest is read when that file shows a change, or is not written any more.
- Slurm is queried once for all runs that need it, at most every ten seconds.
- Events and progress of a run are read for its own page, at most a tenth of the time, and for the
  list of runs in turn, one run after the other.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launcher.follow import LIST_SETTLED_S, LIST_SHOWN_S, EndDecision
from hpc_elastic.launcher.run_handle import results_folder
from hpc_elastic.report import charts, page
from hpc_elastic.report.details import RunDetails, read_details, report_of
from hpc_elastic.report.progress_log import TRAINING, Point
from hpc_elastic.report.run_view import (
    RunView,
    members_of,
    number,
    overrides_label,
    overrides_of,
    read_view,
    read_views,
    unescaped,
)
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.redaction import is_secret, redact, redact_argument
from hpc_elastic.shared_files import VALUE_BYTES, parse_json, read_json, read_text
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

_log = logging.getLogger(__name__)

EVERY_S = 2.0  # interval of reads
_STATUSES_A_TICK = 50
"""Reads of status.json at a time: 200 runs in 8 s, in which a leader writes it on a file server."""
_VIEWS_A_TICK, _FIRST_VIEWS = 20, 200
"""Whole views at a time; the second of runs that were not read yet."""
_VIEW_S, _SETTLED_VIEW_S = LIST_SHOWN_S, LIST_SETTLED_S
"""Interval of whole views of a run; the longer while it trains, and once it has ended. With more
than `_VIEWS_A_TICK` runs it is as many times longer. The first is that of queries of Slurm, too."""
_FRESH_S = 20.0  # age of status.json up to which a group trains, without a look at its tasks
_DETAILS_S = 60.0
_PAGE_S = 4.0
_SHARE = 10  # at most a tenth of the time is spent on one page
_FIND_S = 30.0
_CLOSE_S = 1.0
_CURVE_COLUMNS = 30
_LONGEST_TEXT = 200
_LARGEST = 1e300  # numbers beyond it, and those that are none, are shown as text

Row = dict[str, Any]  # the JSON form of a run in the list; see `row_of`


@dataclass(frozen=True)
class Page:
    """The content of a run's page (`page.live_html`); ``version`` grows with each change."""

    version: int
    html: str
    charts: Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class LiveRun:
    """One run, and what was read of it; times are monotonic.

    ``number`` names it in pages of this process. ``row`` is None before it was read, ``page``
    unless it was asked for.
    """

    number: int
    path: Path
    row: Row | None = None
    page: Page | None = None
    version: int = 0  # version of `row`
    curve: Sequence[Sequence[float | None]] = ()
    curve_version: int = 0
    num_viewers: int = 0
    _view: RunView | None = None
    _end: EndDecision = field(default_factory=lambda: EndDecision(-math.inf))
    _queue: QueueSnapshot = field(default_factory=QueueSnapshot)
    _viewed_at: float = -math.inf
    _status_at: float = -math.inf
    _details_at: float = -math.inf
    _page_due: float = -math.inf
    _page_of: RunView | None = None
    _hosts: Mapping[str, str] = field(default_factory=dict)
    """Task -> its node, of the members of the group."""
    _about: Row = field(default_factory=dict)  # what does not change while it goes on
    _found: Row = field(default_factory=dict)  # what its events and its result show

    # ---- what is due

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self._view is None or self._view.ended is None

    @property
    def is_local(self) -> bool:
        """Whether its tasks are known without Slurm."""
        spec = None if self._view is None else self._view.spec
        return spec is not None and spec.settings.backend == "local"

    def view_due(self, num_runs: int) -> float:
        """Return when its whole view is to be read again."""
        view = self._view
        if view is None:
            return self._viewed_at
        is_settled = not self.goes_on or (view.phase == TRAINING and _age_s(view) < _FRESH_S)
        slower = 1.0 if self.num_viewers else max(1.0, num_runs / _VIEWS_A_TICK)
        interval_s = _SETTLED_VIEW_S if is_settled else EVERY_S if self.is_local else _VIEW_S
        return self._viewed_at + slower * interval_s

    def details_due(self) -> float:
        """Return when its events are to be read for the list; never again once it has ended."""
        if self._view is None or (not self.goes_on and self._details_at > -math.inf):
            return math.inf
        return self._details_at + _DETAILS_S

    def page_due(self) -> float:
        """Return when its page is to be made again; never if nothing has changed."""
        view, shown = self._view, self._page_of
        if not self.num_viewers or view is None or view is shown:
            return math.inf
        if shown is not None and shown.ended is not None and shown.ended == view.ended:
            return math.inf
        return self._page_due

    # ---- reads

    def read_status(self) -> None:
        """Read status.json; a change of more than numbers makes the whole view due."""
        self._status_at, view = time.monotonic(), self._view
        try:
            status = read_json(RunDir(self.path).status)
        except (OSError, ValueError):
            status = None
        self._hosts = self._hosts if status is None else hosts_of(status)
        updated = number((status or {}).get("updated"))
        if view is None or status is None or updated is None or updated == view.updated:
            return
        before = view.status
        point = with_known(Point.of(status, updated), before)
        if before is None or (point.phase, point.round) != (before.phase, before.round):
            self._viewed_at = -math.inf
        is_shown = view.phase in (TRAINING, "waiting", "starting", "queued", "requeued")
        goes_on = point.phase in (TRAINING, "waiting", "requeued")
        self._view = replace(
            view, status=point, updated=updated, members=members_of(status), now=time.time(),
            phase=point.phase if is_shown and goes_on else view.phase,
        )  # fmt: skip

    def set_view(self, view: RunView, queue: QueueSnapshot) -> None:
        """Take a view that was read."""
        before, self._queue, self._viewed_at = self._view, queue, time.monotonic()
        if before is not None and view.status is not None:
            view = replace(view, status=with_known(view.status, before.status))
        if view.ended is not None or not view.has_no_task_left:  # else squeue may be older
            self._end.judge(view, self._viewed_at)
        self._view = self._end.apply(view)
        if before is not None and view.ended is not None and self._view.ended is None:
            self._view = replace(self._view, phase=before.phase)
            self._viewed_at -= _SETTLED_VIEW_S  # a second look decides
        if before is None or before.phase != self._view.phase:
            self._details_at = min(self._details_at, time.monotonic() - _DETAILS_S)
            if self._view.ended is not None:
                self._details_at = -math.inf
        if not self._about and view.spec is not None:
            self._about = {"params": params_of(self.path, view.spec)}

    def read_details(self) -> None:
        """Read its events and progress for its row."""
        self._details_at = time.monotonic()
        try:
            details = read_details(self._read_view())
            self._found = found_in(details)
            curve = curve_of(details.points)
        except (HpcElasticError, OSError, ValueError) as e:
            self._found = {**self._found, "problem": str(e)}
            return
        if curve != self.curve:
            self.curve, self.curve_version = curve, -1

    def read_page(self) -> None:
        """Make its page."""
        began, self._page_of = time.monotonic(), self._view
        try:
            html, specs = page.live_html(report_of(self._read_view()).to_json())
        except (HpcElasticError, OSError, ValueError) as e:
            html, specs = page.live_problem(str(e)), []
        if self.page is None or (self.page.html, self.page.charts) != (html, specs):
            self.page = Page(-1, html, specs)
        took_s = time.monotonic() - began
        self._page_due = time.monotonic() + max(_PAGE_S, _SHARE * took_s)

    def _read_view(self) -> RunView:
        return read_view(self.path, lambda specs: self._queue)

    def new_row(self) -> Row:
        """Return its row."""
        assert self._view is not None
        row = {"id": self.path.name, "hosts": self._hosts, **row_of(self._view)}
        return {**row, **self._about, **self._found}


class LiveRuns:
    """Some runs, kept up to date by a thread while pages are open; a context.

    ``find`` is called again now and then, since a sweep may grow.
    """

    def __init__(self, find: Callable[[], Sequence[Path]]) -> None:
        self._find = find
        self._runs: list[LiveRun] = []
        self._by_path: dict[Path, LiveRun] = {}
        self._changed = threading.Condition()
        self._wakes: dict[object, Callable[[], None]] = {}
        self._version = self._num_lists = 0
        self._found_at = self._queried_at = -math.inf
        self._is_closed = False
        self._thread = threading.Thread(target=self._read_on, name="hpc_elastic-watch", daemon=True)

    def __enter__(self) -> LiveRuns:
        """Start the thread."""
        self.find()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self.close()
        self._thread.join(_CLOSE_S)

    def close(self) -> None:
        """End all streams of news, and the thread as soon as it does not read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._wake_viewers()

    @property
    def is_closed(self) -> bool:
        """Whether no more news will come."""
        return self._is_closed

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._runs)

    def get(self, number: int) -> LiveRun | None:
        """Return the run of a number; None if there is none."""
        return self._runs[number] if 0 <= number < len(self._runs) else None

    @contextmanager
    def viewer(self, run: LiveRun | None, wake: Callable[[], None]) -> Iterator[None]:
        """Keep the runs up to date while a page is open; ``run`` is None for the list.

        The thread calls ``wake`` when there is news.
        """
        key = object()
        with self._changed:
            self._wakes[key] = wake
            if run is None:
                self._num_lists += 1
            else:
                run.num_viewers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._wakes[key]
                if run is None:
                    self._num_lists -= 1
                else:
                    run.num_viewers -= 1

    def news(self, seen: int, run: LiveRun | None) -> tuple[int, dict[str, Any]]:
        """Return what is new since a version (0: all), and the present version.

        ``run`` as of `viewer`. The JSON object has ``rows`` and ``curves`` by number of the run,
        and ``page``, the version of the run's page.
        """
        with self._changed:
            shown = self._runs if run is None else [run]
            rows = {r.number: r.row for r in shown if r.row is not None and r.version > seen}
            found: dict[str, Any] = {"now": time.time(), "num_runs": len(self._runs), "rows": rows}
            if run is None:
                found["curves"] = {r.number: r.curve for r in shown if r.curve_version > seen}
            elif run.page is not None and run.page.version > seen:
                found["page"] = run.page.version
            return self._version, found

    def find(self) -> None:
        """Look for runs that are not known yet."""
        self._found_at = time.monotonic()
        for path in self._find():
            if path not in self._by_path:
                self._by_path[path] = LiveRun(len(self._runs), path)
                self._runs.append(self._by_path[path])

    # ---- the thread

    def _read_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wakes or self._is_closed)
                if self._is_closed:
                    return
                known = set(self._wakes)
            try:
                is_behind = self._read()
            except Exception:
                _log.exception("the runs cannot be read now; again in %g s", _FIND_S)
                is_behind, pause_s = False, _FIND_S
            else:
                pause_s = EVERY_S
            with self._changed:
                if self._is_closed:
                    return
                if not is_behind:  # a new page does not wait
                    self._changed.wait_for(partial(self._is_changed, known), pause_s)

    def _is_changed(self, known: set[object]) -> bool:
        return self._is_closed or not known.issuperset(self._wakes)

    def _read(self) -> bool:
        """Read what is due; return whether something was left for the next time."""
        now = time.monotonic()
        if now - self._found_at > _FIND_S:
            self.find()
        with self._changed:
            shown = [r for r in self._runs if self._num_lists or r.num_viewers]
        self._read_views(self._views_due(shown, now))
        going = sorted((r for r in shown if r.goes_on), key=lambda r: r._status_at)
        for run in going[:_STATUSES_A_TICK]:
            run.read_status()
        self._publish()
        for run in shown:
            if run.page_due() <= now:
                run.read_page()
                self._publish()
        if any(run.row is None for run in shown):
            return True
        behind = sorted((r for r in shown if r.details_due() <= now), key=LiveRun.details_due)
        first = [r for r in behind if r.details_due() == -math.inf]
        began = time.monotonic()
        for run in first or behind[:1]:
            run.read_details()
            if time.monotonic() - began > EVERY_S / 4:
                break
        self._publish()
        return any(r.details_due() == -math.inf for r in shown)

    def _views_due(self, shown: Sequence[LiveRun], now: float) -> list[LiveRun]:
        unseen = [run for run in shown if run.row is None]
        if unseen:
            return unseen[:_FIRST_VIEWS]
        may_ask, num = now - self._queried_at >= _VIEW_S, len(shown)
        due = [r for r in shown if r.view_due(num) <= now and (may_ask or r.is_local)]
        due.sort(key=lambda r: (not r.num_viewers, r.view_due(num)))
        return due[:_VIEWS_A_TICK]

    def _read_views(self, runs: Sequence[LiveRun]) -> None:
        asked: list[QueueSnapshot] = []

        def query(specs: Sequence[RunSpec]) -> QueueSnapshot:
            if any(spec.settings.backend == "slurm" for spec in specs):
                self._queried_at = time.monotonic()
            asked.append(take_snapshot(specs))
            return asked[0]

        if runs:
            views = read_views([run.path for run in runs], query)
            for run, view in zip(runs, views, strict=True):
                run.set_view(view, asked[0] if asked else QueueSnapshot())

    def _publish(self) -> None:
        rows = {run: run.new_row() for run in self._runs if run._view is not None}
        with self._changed:
            version = self._version + 1
            for run, row in rows.items():
                if row != run.row:
                    run.row, run.version, self._version = row, version, version
                if run.curve_version < 0:
                    run.curve_version = self._version = version
                if run.page is not None and run.page.version < 0:
                    run.page, self._version = replace(run.page, version=version), version
            is_news = self._version == version
        if is_news:
            self._wake_viewers()

    def _wake_viewers(self) -> None:
        with self._changed:
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()


# ---- rows (pure)


def with_known(point: Point, before: Point | None) -> Point:
    """Return a point with the last known step and loss: those of a new group are unknown."""
    if before is None:
        return point
    names = ("step", "total_steps", "loss", "samples")
    known = {name: getattr(before, name) for name in names if getattr(point, name) is None}
    return replace(point, **known)


def hosts_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the nodes of the members in status.json by their tasks; none if it is damaged."""
    try:
        return {str(m["task"]): str(m["host"]) for m in status.get("members") or ()}
    except (TypeError, KeyError):
        return {}


def row_of(view: RunView) -> Row:
    """Return what a view shows of a run; unknown values are None.

    ``phase``, ``nodes`` (in the group now), ``min_nodes``, ``max_nodes``, ``step``,
    ``total_steps``, ``loss``, ``steps_per_s``, ``samples_per_s``, ``samples``, ``remaining_s``,
    ``restarts``, ``submitted`` and ``ended`` (Unix seconds), ``why`` (it ended, or is unknown),
    ``members`` (tasks of the group) and ``directory``.
    """
    spec, status, ended = view.spec, view.status or Point(view.now, "unknown"), view.ended
    pace = status.steps_per_s if view.trains else None
    left_s = None
    if pace and status.step is not None and status.total_steps is not None:
        left_s = max(0, status.total_steps - status.step) / pace
    is_known = ended is None and view.phase != "unknown"
    problem = None if spec is not None or not view.notes else view.notes[0]
    row = {
        "directory": str(view.run.path), "phase": view.phase,
        "nodes": status.nodes if view.trains else 0 if is_known else None,
        "min_nodes": spec and spec.settings.nodes.min,
        "max_nodes": spec and spec.settings.nodes.max,
        "step": status.step, "total_steps": status.total_steps, "loss": _finite(status.loss),
        "steps_per_s": pace, "samples_per_s": status.samples_per_s if view.trains else None,
        "samples": status.samples, "remaining_s": left_s, "restarts": view.restarts[0],
        "submitted": view.submitted, "ended": None if ended is None else ended.time,
        "why": problem if ended is None else ended.why,
        "members": [task for task, _ in view.members] if view.trains else [],
    }  # fmt: skip
    return row if spec is None else {**row, "id": spec.run_id}


def found_in(details: RunDetails) -> Row:
    """Return what events and progress add to a row: ``goodput``, and ``results`` once it ended."""
    found: Row = {"goodput": details.account.goodput, "problem": None}
    status = details.status
    if details.view.ended is not None and status is not None:
        found |= {"step": status.step, "loss": _finite(status.loss)}
        found["total_steps"] = status.total_steps
    if details.view.phase == "succeeded":
        found["results"] = results_of(RunDir(details.view.run.path))
    return found


def results_of(run: RunDir) -> dict[str, Any]:
    """Return the return value of rank 0: its items if it is an object, else ``result``."""
    try:
        folder = results_folder(run, read_json(run.result) or {})
        file = None if folder is None else folder / "rank-0.json"
        value = None if file is None else parse_json(read_text(file, VALUE_BYTES), file)
    except (OSError, ValueError):
        return {}
    if value is None:
        return {}
    items = value if isinstance(value, dict) else {"result": value}
    return {str(key): _shown(redact(item, hide=is_secret(str(key)))) for key, item in items.items()}


def params_of(run: Path, spec: RunSpec) -> dict[str, Any]:
    """Return the parameters by which the runs of a sweep differ, without secrets."""
    lines = [redact_argument(line) for line in overrides_of(run, spec)]
    found = {}
    for line in filter(overrides_label, ([line] for line in lines)):
        key, _, value = unescaped(line[0]).lstrip("+").partition("=")
        found[key] = _shown(value)
    if not lines and spec.entry.kind == "function":
        found = {f"argument {i + 1}": _shown(arg) for i, arg in enumerate(redact(spec.entry.args))}
    return found


def curve_of(points: Sequence[Point]) -> list[list[float | None]]:
    """Return step, loss, time and samples of a few points that look the same in a small picture."""
    known = [
        (float(p.step), p.loss, round(p.time), p.samples) for p in points
        if p.step is not None and p.loss is not None and math.isfinite(p.loss)
    ]  # fmt: skip
    kept = charts.series(sorted(known, key=lambda point: point[0]), _CURVE_COLUMNS)
    return [[step, float(f"{loss:.4g}"), *more] for step, loss, *more in kept]


def _shown(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and abs(value) < _LARGEST):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _age_s(view: RunView) -> float:
    return math.inf if view.updated is None else time.time() - view.updated
