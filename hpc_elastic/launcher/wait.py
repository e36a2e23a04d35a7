"""Wait for submitted runs: follow them, show their progress, and return how they ended."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hpc_elastic._util import sigterm_as_interrupt
from hpc_elastic.errors import (
    HpcElasticError,
    RunDirectoryError,
    SlurmError,
    UntrustedRunError,
)
from hpc_elastic.launcher.follow import RunFollower
from hpc_elastic.launcher.progress import (
    Progress,
    RunNews,
    console_for,
    location,
    results_table,
    row_of,
)
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs
from hpc_elastic.report.run_view import RunEnd, RunView, label_of
from hpc_elastic.run.directory import SUBMISSION, RunDir, RunSpec, Submission
from hpc_elastic.run.notify import Notifier
from hpc_elastic.run.ownership import require_own
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import is_there
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalQueue
from hpc_elastic.slurm.scheduler import QueueSnapshot

if TYPE_CHECKING:
    from rich.console import Console

UNREADABLE_S = 30.0
"""Seconds for which a run may be unreadable before a message is printed."""


def wait(
    runs: Sequence[RunHandle],
    *,
    poll_interval_s: float,
    out: TextIO | None = None,
    on_end: Callable[[RunHandle, RunEnd], None] = lambda run, end: None,
    timeout_s: float = math.inf,
) -> list[RunEnd]:
    """Show the progress of runs until all have ended (`wait_until`), then how each ended."""
    console = console_for(out or sys.stdout)
    views = wait_until(runs, "ended", console, poll_interval_s, timeout_s, on_end)
    where = location([run.dir for run in runs], runs[0].submission.parent)
    found = [view.ended for view in views if view.ended is not None]
    try:
        console.print()
        console.print(results_table(runs, found))
        console.print(where, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted: the runs had ended; {where}") from e
    return found


def wait_until(
    runs: Sequence[RunHandle],
    state: str,
    console: Console,
    poll_interval_s: float,
    timeout_s: float,
    on_end: Callable[[RunHandle, RunEnd], None] = lambda run, end: None,
) -> list[RunView]:
    """Show the progress of runs until each has been in a state (`is_reached`); return their views.

    What a leader has written counts once it has written again: the first that is read may be from
    before the loss of a node. ``on_end`` gets each run and its end as soon as it has ended. Raises
    HpcElasticError if a run ends before, or has not been in the state after ``timeout_s``, and
    SystemExit at Ctrl-C or SIGTERM: Slurm's runs continue, local runs are ended, and how to come
    back was printed.
    """
    jobs = runs[0].jobs
    first: dict[Path, float | None] = {}
    reached, ended = set[Path](), set[Path]()
    try:
        with sigterm_as_interrupt(), Progress(console) as progress:
            waiter = Waiter(runs, progress, poll_interval_s=poll_interval_s)
            for views in waiter.polls(time.monotonic() + timeout_s):
                for run, view in zip(runs, views, strict=True):
                    is_new = view.updated != first.setdefault(run.dir, view.updated)
                    if is_reached(view, state) and (is_new or not view.trains):
                        reached.add(run.dir)
                    if view.ended is not None and run.dir not in ended:
                        ended.add(run.dir)
                        on_end(run, view.ended)
                if len(reached | ended) == len(runs):
                    break
        if len(ended) == len(runs):
            jobs.close()
    except KeyboardInterrupt:
        console.print(jobs.release(), markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except BaseException:
        jobs.release()
        raise
    for run, view in zip(runs, views, strict=True):
        if run.dir not in reached:
            late = f" after {timeout_s:g} s" if view.ended is None else ""
            raise HpcElasticError(f"{run.dir} has not reached {state}{late}: {view.describe()}")
    return views


def is_reached(view: RunView, state: str) -> bool:
    """Return whether a run has ``ended``, is ``training``, has ``nodes=N`` or ``step=N`` (pure).

    With ``nodes=N`` it trains with a group of N nodes; with ``step=N`` it has made step N.
    """
    word, _, number = state.partition("=")
    if word == "ended":
        return view.ended is not None
    if word == "step":
        return view.status is not None and (view.status.step or 0) >= int(number)
    nodes = view.status.nodes if view.status is not None else 0
    return view.trains and (not number or nodes == int(number))


class Waiter:
    """Polls the runs of one submission, shows them, and reads how they ended.

    ``jobs`` are those of the submission; None: of the first run.
    """

    def __init__(
        self,
        runs: Sequence[RunHandle],
        display: Progress,
        *,
        poll_interval_s: float,
        jobs: SubmittedJobs | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runs: list[RunNews] = []
        self._jobs = runs[0].jobs if jobs is None else jobs
        self._display = display
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._follower = RunFollower((), self._list_tasks, clock=clock)
        self._list_error = ""
        self._without_group: dict[Path, float] = {}
        """Since when each run has had no group, as far as it was polled."""
        self._sent: set[tuple[object, ...]] = set()
        self._unreadable_since: dict[Path, float] = {}
        self._warned_unreadable = False
        self.watch(runs)

    def watch(self, runs: Sequence[RunHandle]) -> None:
        """Poll further runs of the same sweep from now on."""
        self._runs += map(RunNews, runs)
        self._follower.add([run.dir for run in runs])

    def drop(self, run: RunHandle) -> None:
        """Poll a run no longer."""
        self._runs = [each for each in self._runs if each.run is not run]
        self._follower.drop(run.dir)

    def polls(self, deadline: float = math.inf) -> Iterator[list[RunView]]:
        """Yield the views of each poll, until all runs have ended or the clock is at a time."""
        while True:
            views = self.poll_runs()
            yield views
            left_s = deadline - self._clock()
            if left_s <= 0 or all(view.ended is not None for view in views):
                return
            self._sleep(min(left_s, self._poll_interval_s))

    def poll_runs(self) -> list[RunView]:
        """Poll once; return what each run is doing, those that have ended with values or error."""
        for news, view in zip(self._runs, self._follower.poll(), strict=True):
            if news.view is None or news.view.ended is None:
                for text in news.messages(view):
                    self._display.print_message(text)
        views = [news.view for news in self._runs if news.view is not None]
        self._report_unreadable(views)
        for view in views:
            self._send_messages(view)
        rows = zip(self._runs, views, strict=True)
        self._display.show_rows([row_of(news.run, view) for news, view in rows])
        return views

    def _send_messages(self, view: RunView) -> None:
        """Send what a run cannot without a process: that it is lost, or waits in the queue."""
        spec, run, now = view.spec, view.run, self._clock()
        waited_s = now - self._without_group.setdefault(run.path, now)
        if view.trains or spec is None:
            del self._without_group[run.path]
            return
        longest_s = spec.settings.launcher.notify.noted_wait_s
        kind, facts = "", dict[str, object]()
        if view.ended is not None:
            kind, facts = view.ended.status, {"why": view.ended.why}
        elif longest_s is not None and waited_s >= longest_s:
            round_ = view.status.round if view.status is not None else 0
            kind, facts = "waits_long", {"round": round_, "waited_s": waited_s}
        what = (run.path, kind, facts.get("round"))
        send = Notifier(run, spec, self._report_message).prepare(kind, facts)
        if send is not None and what not in self._sent:
            self._sent.add(what)
            with suppress(UntrustedRunError):  # it would be the command of somebody else
                require_own(run.path, run.spec)
                send()

    def _report_message(self, kind: str, *, why: str | None, **fields: object) -> None:
        if why is not None:
            self._display.print_message(f"a message was not delivered: {why}")

    def _list_tasks(self, specs: Sequence[RunSpec]) -> QueueSnapshot | None:
        """Return the scheduler's list; None while it does not answer, which is reported once."""
        try:
            tasks = self._jobs.list_tasks()
        except (SlurmError, OSError) as e:
            is_slurm = isinstance(e, SlurmError)
            what = "Slurm does not answer" if is_slurm else "the tasks are unreadable"
            if not self._list_error:
                self._display.print_message(f"{what}, the runs are not affected: {e}")
            self._list_error = what
            return None
        if self._list_error:
            self._display.print_message("the tasks of the runs can be listed again")
        self._list_error = ""
        return QueueSnapshot(tasks)

    def _report_unreadable(self, views: Sequence[RunView]) -> None:
        """Report once that runs are unreadable for long, and once that all are readable again."""
        now, before = self._clock(), self._unreadable_since
        found = {view.run.path: view.unreadable for view in views if view.unreadable is not None}
        self._unreadable_since = {run: before.get(run, now) for run in found}
        late = [run for run, at in self._unreadable_since.items() if now - at >= UNREADABLE_S]
        if late and not self._warned_unreadable:
            what = f"{len(late)} of {len(views)} runs cannot be read, and may have ended"
            self._display.print_message(f"{what}; they are polled further: {found[late[0]]}")
            self._warned_unreadable = True
        elif self._warned_unreadable and not found:
            self._display.print_message("the runs can be read again")
            self._warned_unreadable = False


# ---- runs that were submitted before


@dataclass(frozen=True)
class LocalView:
    """Read-only view of the tasks that another process has launched with launcher=local."""

    submission: Path
    job_ids: Sequence[str]
    result_job: None = None

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return the states of the launcher's tasks."""
        return LocalQueue(Submission(self.submission)).tasks(self.job_ids)

    def cancel(self) -> None:
        """Do nothing: the launcher ends its processes."""

    def release(self) -> str:
        """Return the command that waits for the runs again."""
        sweep = shlex.quote(str(self.submission.parent))
        return f"The runs continue with their launcher.\n  wait: hpc-elastic wait {sweep}"

    def close(self) -> None:
        """Do nothing: the launcher ends its processes."""


def find_submission(folder: Path) -> Path:
    """Return a sweep's (or its run's) ``.hpc_elastic``; raise RunDirectoryError if neither."""
    if (folder / SUBMISSION).is_dir():
        return folder / SUBMISSION
    if is_there(RunDir(folder).spec):
        return Path(RunDir(folder).load().submission)
    remedy = "give the directory of a sweep, such as multirun/2030-01-31/12-00-00"
    raise RunDirectoryError(f"{folder} is not a sweep directory: {remedy}", remedy=remedy)


def read_handles(submission: Path, only: Path | None = None) -> list[RunHandle]:
    """Return the runs of a sweep that were submitted, or the one run in the directory ``only``.

    Runs whose directories were removed are left out, and named on standard error. Raises
    RunDirectoryError if a file of the sweep is missing, all its runs are, or nothing was submitted
    from it.
    """
    job_ids = Submission(submission).job_ids()
    if not job_ids:
        arrays = Submission(submission).arrays()
        scripts = " ".join(shlex.quote(str(a.script)) for a in arrays if a.script.exists())
        remedy = f"; to submit it: sbatch {scripts}" if scripts else ""
        raise RunDirectoryError(f"{submission.parent} was never submitted{remedy}")
    dirs = [only] if only is not None else []
    if only is None:
        dirs = [path for k in job_ids for path in Submission(submission).array(k).run_dirs()]
    there = {path: is_there(path) for path in dict.fromkeys(dirs)}
    removed = [path.name for path, is_there in there.items() if not is_there]
    if len(removed) == len(there):
        raise RunDirectoryError(
            f"{submission.parent} has no runs left: their directories were removed"
        )
    if removed:
        print(f"left out, as their directories were removed: {', '.join(removed)}", file=sys.stderr)
    specs = {path: RunDir(path).load() for path in there if there[path]}
    jobs: SubmittedJobs
    if next(iter(specs.values())).settings.backend == "local":
        jobs = LocalView(submission, list(job_ids.values()))
    else:
        from hpc_elastic.launcher.slurm import SlurmJobs
        from hpc_elastic.site import time_slots_of

        me, client, ids = user(), SlurmClient(), list(job_ids.values())
        is_own = all(spec.provenance.get("user", me) == me for spec in specs.values())
        slots = time_slots_of(specs.values(), client) if is_own else ()
        jobs = SlurmJobs(ids, submission.parent, client, slots)
    return [
        RunHandle(path, label_of(path, spec), tuple(spec.task_names(job_ids)), submission, jobs)
        for path, spec in specs.items()
    ]
