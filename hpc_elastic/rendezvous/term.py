"""A leader's term: all effects of a leader, and all files that it writes, pass through it.

A leader makes decisions (`leader_state`), shows the run's status, sends notices to agents, and
readmits tasks. Each returns effects. `Term` passes them to the executor (`leader` in a run,
`simulation.cluster` in virtual time) for as long as the term lasts. Once it is over, it passes no
event to the leader's state, and no effect to the executor.

If the term is over and its leader does not know that yet, its effects are fenced where they arrive:
decisions by `log_entry`, shared files by `TermFolder`, and calls of Slurm by a check of the last
log entry right before. The agents decide by the entries, not by what `StatusWriter` writes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpc_elastic import shared_files
from hpc_elastic.errors import DamagedFileError
from hpc_elastic.rendezvous.effects import Effect, PublishResult, Readmit, Show, StepDown
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import LogEntry
from hpc_elastic.rendezvous.messages import Heartbeat
from hpc_elastic.rendezvous.run_status import NUMBERS, ProgressLog, line_of, status_of
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import Steps, write_atomic
from hpc_elastic.transport.messages import Json

_log = logging.getLogger(__name__)

_STIMULI = 1000  # events of a term that are kept, to be written down if the leader fails


class Executor(Protocol):
    """Carries a leader's effects out."""

    def carry_out(self, effect: Effect) -> None:
        """Carry one effect out, or begin to."""

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """Write the run's result; pass the other effects to `Term.do` once that is done."""

    def disconnect_all(self) -> None:
        """The term is over: disconnect all agents, and drop the effects not carried out yet."""


class Decider(Protocol):
    """Makes the decisions of a term."""

    fenced: bool


class Gate:
    """Passes effects for as long as a term lasts."""

    def __init__(self, decider: Decider, executor: Executor) -> None:
        self._decider = decider
        self._executor = executor
        self._has_ended = False
        self._stimuli = deque[tuple[Callable[..., list[Effect]], tuple[Any, ...]]](maxlen=_STIMULI)

    @property
    def story(self) -> str:
        """The last events of the term, one in each line; heartbeats of agents are left out."""
        return "\n".join(f"{event.__name__}{args}" for event, args in self._stimuli)

    @property
    def is_over(self) -> bool:
        """Whether this leader has detected that its term is over."""
        return self._decider.fenced

    def handle(self, event: Callable[..., list[Effect]], *args: Any) -> None:
        """Pass an event to the leader's state, and carry out the effects."""
        if not self.is_over:
            if not (len(args) > 1 and isinstance(args[1], Heartbeat)):
                self._stimuli.append((event, args))
            self.do(event(*args))

    def do(self, effects: Iterable[Effect]) -> None:
        """Carry effects out, in order."""
        remaining = iter(effects)
        for effect in remaining:
            if isinstance(effect, StepDown) or self.is_over:
                self.end_term()
                return
            if isinstance(effect, PublishResult):
                self._executor.publish(effect.entry, list(remaining))
            else:
                self._executor.carry_out(effect)

    def end_term(self) -> None:
        """Pass no more effects; may be repeated."""
        self._decider.fenced = True
        if not self._has_ended:
            self._has_ended = True
            self._executor.disconnect_all()


class Term(Gate):
    """The term of one leader: its decisions, the run's status, and tasks to readmit.

    ``show_s`` is the shortest interval between two statuses that differ in their numbers only.
    """

    def __init__(self, leader_state: LeaderState, executor: Executor, show_s: float = 0.0) -> None:
        super().__init__(leader_state, executor)
        self._leader_state = leader_state
        self._series = ProgressLog()
        self._show_s = show_s
        self._last_shown: tuple[float, dict[str, Any]] = (0.0, {})
        """When a status was shown last, and its content without the numbers."""
        self._lines: list[Json] = []  # lines of the progress that are written with the next status

    def show(self, now: float) -> None:
        """Show the run's status, if that is due; ``now`` in Unix seconds.

        What is not appended yet is not shown: if this leader fails, it does not come about.
        """
        if self._leader_state.is_deciding:
            return
        status = status_of(self._leader_state)
        self._lines += self._series.add_status(status, now, self._leader_state.at.started)
        rest = {name: value for name, value in status.items() if name not in NUMBERS}
        shown, before = self._last_shown
        if rest == before and abs(now - shown) < self._show_s:
            return
        self._last_shown, lines, self._lines = (now, rest), tuple(self._lines), []
        self.do([Show({**status, **self._series.rates}, lines)])

    def readmit(self) -> None:
        """Let tasks start again on nodes that are back, or not excluded any more."""
        run = self._leader_state.run
        self.do([Readmit(run.recovery.awaited_tasks(run.participants.lost))])


_TRIES = 3
_ALL_EVERY = 10  # interval, in searches for notices, in which the term folder is listed too


class TermOverError(Exception):
    """The term folder is a later leader's."""


class TermFolder:
    """The shared files in the term of one leader.

    A run has one *term folder*, ``rdzv/term.<term>``. Each new leader renames it to its own term.
    All files that a leader writes pass through the folder: ``status.json`` is staged there and
    renamed into its place, and a notice file is claimed by a rename into the folder. A rename has
    one outcome for all nodes. So once a leader has the folder, all writes of earlier leaders fail,
    however late they come: from a queue of a thread, or from a process that was stopped meanwhile.

    - The folder never returns to an earlier term: a leader reads its name first, and leaves it
      alone if it has a later term. If a stale cache shows an earlier name, the rename fails, and
      the leader reads the name again.
    - The first folder, ``term.0``, is made with the run. A leader makes none: a second folder would
      fence no leader.
    - A claimed notice stays in the folder until its node has confirmed it. If the leader is deposed
      before that, the notice moves with the folder, and the next leader sends it to the node.
    - Lines of ``progress.jsonl`` are appended right after the status was replaced. No rename fences
      them: if a process is stopped between the two, one append may come too late. Each line has its
      term, and readers ignore a line that follows one of a later term (`report.progress_log`).

    The procedures are generators (`log_entry`): threads of the leader carry them out on files
    (`RunFiles`), and the simulator in virtual time.

    Methods raise TermOverError if another agent leads. After an OSError they may be called again.
    """

    def __init__(self, term: int, files: RunFiles) -> None:
        self.term = term
        self._files = files
        self._has_shown = False
        self._maybe_torn = True  # whether the last line of the progress may be incomplete
        self._confirmed: set[str] = set()
        self._claimed: Mapping[str, float] | None = None
        """The notices in the folder; None: it has to be listed."""
        self._num_searches = 0

    def enter(self) -> Steps[None]:
        """Make sure that the folder is this leader's; OSError also if there is no term folder."""
        for tries_left in reversed(range(_TRIES)):
            before = yield self._files.current_term
            if before == self.term:
                return
            if before > self.term:
                raise TermOverError(f"term {before} has the term folder, not {self.term}")
            try:
                yield partial(self._files.take_over, before, self.term)
                return
            except FileNotFoundError:
                if not tries_left:
                    raise

    def show(self, status: Json, lines: Sequence[Json]) -> Steps[None]:
        """Replace status.json, and append to the progress.

        The first time, the existing status is the last one of the leader before: it is kept as a
        line of the progress.
        """
        yield from self.enter()
        if not self._has_shown:
            last = yield self._files.status
            lines = [*_as_line(last), *lines]
        yield partial(self._files.replace_status, self.term, status)
        self._has_shown = True
        if lines:
            maybe_torn, self._maybe_torn = self._maybe_torn, True
            yield partial(self._files.append_progress, lines, maybe_torn=maybe_torn)
            self._maybe_torn = False

    def confirm(self, name: str) -> None:
        """A notice is confirmed, or has matched no agent for long: remove it."""
        self._confirmed.add(name)

    def remove_confirmed(self) -> Steps[None]:
        """Begin to remove the confirmed notices."""
        yield from self.enter()
        for name in tuple(self._confirmed):
            yield partial(self._files.remove_notice, self.term, name)

    def claim_notices(self) -> Steps[Mapping[str, float]]:
        """Remove the confirmed notices, claim new ones; return all that are open.

        A notice with the name of a claimed one waits until that one is removed. If there is no new
        notice, only the notices' own folder is listed, and at every tenth call the term folder too,
        for notices that an earlier leader has moved there late.
        """
        self._num_searches += 1
        if self._confirmed or self._claimed is None or self._num_searches % _ALL_EVERY == 0:
            yield from self.remove_confirmed()
            self._claimed = yield partial(self._files.claimed_notices, self.term)
            self._confirmed.intersection_update(self._claimed)
        claimed: Mapping[str, float] = self._claimed
        new = [name for name in (yield self._files.new_notices) if name not in claimed]
        if new:
            self._claimed = None
            yield from self.enter()
        for name in new:
            try:
                yield from self._claim(name)
            except FileNotFoundError:  # withdrawn meanwhile, or the folder is gone
                yield from self.enter()
        if new:
            self._claimed = claimed = yield partial(self._files.claimed_notices, self.term)
        return {name: left_s for name, left_s in claimed.items() if name not in self._confirmed}

    def _claim(self, name: str) -> Steps[None]:
        """Claim a notice that a listing has shown, though this client may remember it as absent."""
        claim = partial(self._files.claim_notice, self.term, name)
        try:
            yield claim
        except FileNotFoundError:
            yield partial(self._files.forget_absence, name)
            yield claim


def _as_line(status: Json | None) -> list[Json]:
    """Return a status as a line of the progress; none if it is damaged."""
    try:
        if status is not None:
            return [{"time": round(float(status["updated"]), 3), **line_of(status)}]
    except (ValueError, KeyError, TypeError):
        pass
    return []


DEFAULT_LEFT_S = 600.0
_TERM = re.compile(r"term\.(\d+)")
_NOTICE = "notice."
_REMOVED_IN_S = 1.0
_LONGEST_NAME = 255 - len(_NOTICE)


@dataclass
class RunFiles:
    """The files of a run that its leaders share. Each call may block, and may raise `OSError`.

    Those that have a ``term`` raise `FileNotFoundError` if the folder is another term's.

    A notice is a file in ``<run>/preempt/`` with the name of a task (``40_3``), of a host, or
    ``all``: the run leaves these nodes. Its content is the number of seconds until the deadline;
    empty: ten minutes.
    """

    run: RunDir

    def current_term(self) -> int:
        """Return the term of the term folder, from a fresh listing."""
        names = shared_files.names_in(self.run.rdzv)
        terms = [int(m[1]) for name in names if (m := _TERM.fullmatch(name))]
        if not terms:
            raise FileNotFoundError(2, "there is no term folder", str(self.run.rdzv))
        return max(terms)

    def take_over(self, before: int, term: int) -> None:
        """Rename the folder; remove files that the leader before has only staged."""
        mine = self._folder(term)
        self._folder(before).rename(mine)
        for left in shared_files.names_listed(mine):
            if not left.startswith(_NOTICE):
                shared_files.remove_behind(mine / left)

    def status(self) -> Json | None:
        """Return the content of status.json; None if there is none, or it is damaged."""
        try:
            return shared_files.read_json(self.run.status)
        except DamagedFileError as e:
            _log.info("the last status of the leader before is lost: %s", e)
            return None

    def replace_status(self, term: int, status: Json) -> None:
        """Stage the status in the folder, and rename it."""
        text = json.dumps(status, indent=2) + "\n"
        write_atomic(self.run.status, text, staged_in=self._folder(term))

    def append_progress(self, lines: Sequence[Json], *, maybe_torn: bool) -> None:
        """Append lines to progress.jsonl, after a line feed if the last line is incomplete.

        The file is not opened for reading at the same time: the next leader would wait until the
        server has recalled this node's delegation.
        """
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path = self.run.progress
        read_last = partial(shared_files.read_undelegated, num_bytes=1)
        last = shared_files.read_listed(path, read_last) if maybe_torn else None
        if last and last != "\n":
            text = f"\n{text}"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.write(fd, text.encode()) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(fd)

    def new_notices(self) -> list[str]:
        """Return the notices that no leader has claimed, but those with too long names."""
        folder = self.run.notices
        names = shared_files.names_in(folder)
        files = (n for n in names if n[0] != "." and (folder / n).is_file())
        return sorted(n for n in files if len(os.fsencode(n)) <= _LONGEST_NAME)

    def claim_notice(self, term: int, name: str) -> None:
        """Move a notice into the folder."""
        (self.run.notices / name).rename(self._notice(term, name))

    def forget_absence(self, name: str) -> None:
        """Make the client ask the server about a notice; see `shared_files.forget_absence`."""
        shared_files.forget_absence(self.run.notices / name)

    def claimed_notices(self, term: int) -> Mapping[str, float]:
        """Return the notices in the folder, each with the seconds until its deadline."""
        folder = self._folder(term)
        names = shared_files.names_listed(folder)
        found = sorted(name for name in names if name.startswith(_NOTICE))
        return {name.removeprefix(_NOTICE): _left_s(folder / name) for name in found}

    def remove_notice(self, term: int, name: str) -> None:
        """Begin to remove a notice; usually it is gone when this returns. It may fail."""
        shared_files.remove_behind(self._notice(term, name), wait_s=_REMOVED_IN_S)

    def _folder(self, term: int) -> Path:
        return self.run.rdzv / f"term.{term}"

    def _notice(self, term: int, name: str) -> Path:
        return self._folder(term) / f"{_NOTICE}{name}"


def make_term_folder(run: RunDir, term: int = 0) -> None:
    """Rename the folder to a term without a leader; make it if the run has none (login node)."""
    files = RunFiles(run)
    try:
        before = files.current_term()
    except FileNotFoundError:
        shared_files.make_folder(run.rdzv / f"term.{term}")
        return
    if before < term:
        files.take_over(before, term)


def _left_s(file: Path) -> float:
    text = "(unreadable)"
    try:
        text = shared_files.read_undelegated(file).strip()
        left_s = float(text or DEFAULT_LEFT_S)
    except FileNotFoundError:
        return DEFAULT_LEFT_S
    except (PermissionError, DamagedFileError, ValueError):
        left_s = math.nan  # it counts: its owner may write to the folder
    if math.isfinite(left_s):
        return max(0.0, left_s)
    _log.warning("%s contains %r, which is no number of seconds; using %g", file, text[:20],
                 DEFAULT_LEFT_S)  # fmt: skip
    return DEFAULT_LEFT_S


_RETRY_S = 1.0


class StatusWriter:
    """The events, the status, the progress and the result that a leader writes for readers.

    One thread does all writes, so a slow shared file system delays the files and never the
    heartbeats. Items that arrive during a write are written together after it, and of several
    statuses only the newest. So at most one write precedes the result, for which every node waits.
    With ``term`` 0, for no leader, it writes no status.
    """

    def __init__(self, run: RunDir, run_id: str, events: EventLog, term: int) -> None:
        self.is_over = False  # whether a write has found that a later leader writes the status
        self._run = run
        self._run_id = run_id
        self._event_log = events
        self._term = TermFolder(term, RunFiles(run))
        self._events: list[str] = []
        self._status: Json | None = None
        self._progress: list[Json] = []
        self._is_scheduled = False
        self._lock = threading.Lock()  # guards the four fields above: what is not written yet
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append an event, in the background."""
        line = self._event_log.line(kind, **fields)
        with self._lock:
            self._events.append(line)
            self._schedule_write()

    def write_status(self, status: Json, lines: Sequence[Json]) -> None:
        """Replace status.json and append lines to progress.jsonl, in the background."""
        with self._lock:
            self._status = {**status, "updated": time.time()}
            self._progress += lines
            self._schedule_write()

    async def publish_result(self, entry: LogEntry) -> None:
        """Write result.json unless it is there; announce the end of the run after this returns."""
        ending = entry.ending
        assert ending is not None
        folder = f"results/{ending.results or f'round-{entry.round}'}"
        values = asdict(ending)
        result = {
            "run_id": self._run_id, "status": ending.status, "started": entry.started,
            "ended": time.time(), "rounds": entry.round, "restarts": entry.restarts,
            "failure": values["failure"], "secondary_failures": values["secondary_failures"],
            "results": folder if ending.status == "succeeded" else None,
        }  # fmt: skip
        text = json.dumps(result, indent=2) + "\n"
        loop = asyncio.get_running_loop()
        while not await loop.run_in_executor(self._thread, self._try_publish, text, entry.index):
            await asyncio.sleep(_RETRY_S)
        self.append_event(
            "end", status=ending.status, rounds=entry.round, restarts=entry.restarts,
            failure=ending.summary,
        )  # fmt: skip

    async def close(self) -> None:
        """Write everything that is not written yet, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    def _schedule_write(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._thread.submit(self._write)

    def _write(self) -> None:  # on the thread
        with self._lock:
            events, status, lines = self._events, self._status, self._progress
            self._events, self._status, self._progress = [], None, []
            self._is_scheduled = False
        if events:
            self._event_log.append(events)
        if status is None or self.is_over:
            return
        try:
            shared_files.carried_out(self._term.show(status, lines))
        except TermOverError as e:
            _log.warning("%s is not written: %s", self._run.status, e)
            self.is_over = True
        except OSError as e:
            _log.error("%s: not written: %s", e.filename2 or e.filename or self._run.status, e)

    def _try_publish(self, result: str, index: int) -> bool:
        try:
            if fencing.last_index(self._run.rdzv) > index:
                return True  # the run was resumed since: the result is out of date
        except FileNotFoundError:
            pass  # no entries are kept
        except OSError as e:
            _log.error("%s: not read: %s", self._run.rdzv, e)
            return False
        try:
            if not shared_files.is_there(self._run.result):
                write_atomic(self._run.result, result)
        except OSError as e:
            _log.error("%s: not written: %s", self._run.result, e)
            return False
        return True
