"""A leader's term: the one place through which all that a leader does passes.

A leader decides (`leader_state`), and has duties beside that: it shows the run's status, passes
notices on, and readmits tasks. Both return effects. `Term` hands them on to what carries them out
(`leader` in a run, `simulation.cluster` in virtual time), for as long as the term lasts.
Once it is over, no event reaches the leadership and no effect comes out, whoever asks.

A term that its leader does not know to be over yet is fenced where its effects arrive: decisions by
`log_entry`, shared files by `term`, Slurm by a look at the last entry right before the call.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpc_elastic.errors import DamagedFileError
from hpc_elastic.rendezvous.effects import (
    Effect,
    Message,
    PublishResult,
    Readmit,
    Show,
    StepDown,
)
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import LogEntry, Steps
from hpc_elastic.rendezvous.run_status import NUMBERS, ProgressLog, line_of, status_of
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import (
    forget_absence,
    names_in,
    names_listed,
    read_json,
    read_listed,
    read_undelegated,
    remove_behind,
    write_atomic,
)


class Hands(Protocol):
    """What carries a leader's effects out."""

    def carry_out(self, effect: Effect) -> None:
        """Carry one effect out, or begin to."""

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """Write the run's result; hand the other effects to `Term.do` once that is done."""

    def let_go(self) -> None:
        """The term is over: let go of everybody, and drop what is not carried out yet."""


class Decider(Protocol):
    """What decides during a term."""

    fenced: bool


class Gate:
    """Lets effects out for as long as a term lasts."""

    def __init__(self, decider: Decider, hands: Hands) -> None:
        self._decider = decider
        self._hands = hands
        self._has_let_go = False

    @property
    def is_over(self) -> bool:
        """Whether this leader knows that it leads no more."""
        return self._decider.fenced

    def handle(self, event: Callable[..., list[Effect]], *args: Any) -> None:
        """Tell the leadership of an event, and carry out what it wants."""
        if not self.is_over:
            self.do(event(*args))

    def do(self, effects: Iterable[Effect]) -> None:
        """Carry effects out, in order."""
        remaining = iter(effects)
        for effect in remaining:
            if isinstance(effect, StepDown) or self.is_over:
                self.end()
                return
            if isinstance(effect, PublishResult):
                self._hands.publish(effect.entry, list(remaining))
            else:
                self._hands.carry_out(effect)

    def end(self) -> None:
        """Let nothing more come out. May be repeated."""
        self._decider.fenced = True
        if not self._has_let_go:
            self._has_let_go = True
            self._hands.let_go()


class Term(Gate):
    """The term of one leader, with its duties.

    Args:
        leadership: The leader.
        hands: What carries its effects out.
        show_s: So long a status is not shown again that differs in its numbers alone.
    """

    def __init__(self, leadership: LeaderState, hands: Hands, show_s: float = 0.0) -> None:
        super().__init__(leadership, hands)
        self._leadership = leadership
        self._series = ProgressLog()
        self._show_s = show_s
        self._shown: tuple[float, dict[str, Any]] = (0.0, {})
        """When a status was shown last, and what was in it beside its numbers."""
        self._lines: list[Message] = []
        """Lines of the progress that go with the next status."""

    def show(self, now: float) -> None:
        """Show how the run is, if that is due; ``now`` in Unix seconds."""
        status = status_of(self._leadership)
        self._lines += self._series.add_status(status, now, self._leadership.at.started)
        rest = {name: value for name, value in status.items() if name not in NUMBERS}
        shown, before = self._shown
        if rest == before and abs(now - shown) < self._show_s:
            return
        self._shown, lines, self._lines = (now, rest), tuple(self._lines), []
        self.do([Show({**status, **self._series.rates}, lines)])

    def readmit(self) -> None:
        """See whether tasks that are gone may start again on the nodes that they were lost with."""
        run = self._leadership.run
        if gone := run.recovery.awaited(run.participants.lost):
            self.do([Readmit(tuple(gone))])


# ---- How leaders, of whom one may not know yet that its term is over, write the same files (pure)
# Theory of operation
# -------------------
# A run has one *term folder*, ``rdzv/term.<term>``. Each new leader renames it to its own term.
# What a leader writes passes through the folder: ``status.json`` is staged there and renamed into
# its place, and a notice file is claimed by a rename into it. A rename has one outcome for all
# nodes. So once a leader has the folder, what an earlier leader wanted fails, however late it
# comes: it was queued in a thread, or the whole process was stopped in the middle of it.
#
# - The folder never goes back: its name is looked up first, and a later term's is left alone.
#   Where a stale cache shows an earlier name, the rename fails, and the look is repeated.
# - The first folder, ``term.0``, is made with the run. A leader makes none: a second folder would
#   fence nobody.
# - A claimed notice lies in the folder until its node has confirmed it. If the leader is deposed
#   before that, the notice moves on with the folder, and the next leader tells the node.
# - Lines of ``progress.jsonl`` are appended right after the status has passed. No rename guards
#   them: of a process that is stopped between the two, one append may come too late. Each line
#   has its term, and readers leave out one that follows a line of a later term
#   (`report.progress_log`).
#
# The procedures here are `log_entry`: threads of the leader carry them out on files (`term`), the
# simulator in virtual time.


_TRIES = 3
_ALL_EVERY = 10
"""Every so many looks for notices the term folder is listed, too."""


class TermOverError(Exception):
    """The term folder is a later leader's."""


class SharedFiles(Protocol):
    """The files that leaders share. Each call may block, and may raise `OSError`.

    Those that have a ``term`` raise `FileNotFoundError` if the folder is another term's.
    """

    def current_term(self) -> int:
        """Return the term whose the term folder is, from a fresh listing."""

    def take_over(self, before: int, term: int) -> None:
        """Rename the folder of one term to another's."""

    def status(self) -> Message | None:
        """Return what status.json holds; None where there is none."""

    def replace_status(self, term: int, status: Message) -> None:
        """Put another status.json in its place."""

    def append_progress(self, lines: Sequence[Message], *, maybe_torn: bool) -> None:
        """Append lines to progress.jsonl, whose last line may be one that was not finished."""

    def new_notices(self) -> list[str]:
        """Return the names of the notices that nobody has claimed."""

    def claim_notice(self, term: int, name: str) -> None:
        """Move a notice into the folder."""

    def forget_absence(self, name: str) -> None:
        """Drop the memory that a notice is absent; see `shared_files.forget_absence`."""

    def claimed_notices(self, term: int) -> Mapping[str, float]:
        """Return the notices in the folder, and the seconds that each leaves."""

    def remove_notice(self, term: int, name: str) -> None:
        """Begin to remove a notice from the folder; that may take long, and fail."""


class TermFolder:
    """What one leader does with the shared files.

    Args:
        term: The leader's.
        files: Where it does so.
    """

    def __init__(self, term: int, files: SharedFiles) -> None:
        self.term = term
        self._files = files
        self._has_shown = False
        self._maybe_torn = True
        """Whether the last line of the progress may be torn: it is not this leader's, or failed."""
        self._confirmed: set[str] = set()
        self._claimed: Mapping[str, float] | None = None
        """The notices in the folder; None: they have to be looked for."""
        self._looks = 0

    def enter(self) -> Steps[None]:
        """Make sure that the folder is this leader's.

        Raises:
            TermOverError: it is a later leader's.
            OSError: the file system does not answer, or there is no term folder.
        """
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

    def show(self, status: Message, lines: Sequence[Message]) -> Steps[None]:
        """Replace status.json, and append to the progress.

        The first time, the status that stands there is the last word of the leader before. It is
        kept as a line of the progress.

        Raises:
            TermOverError: another leads.
            OSError: it may be tried again.
        """
        yield from self.enter()
        if not self._has_shown:
            last = yield self._files.status
            lines = [*_last_word(last), *lines]
        yield partial(self._files.replace_status, self.term, status)
        self._has_shown = True
        if lines:
            maybe_torn, self._maybe_torn = self._maybe_torn, True
            yield partial(self._files.append_progress, lines, maybe_torn=maybe_torn)
            self._maybe_torn = False

    def confirm(self, name: str) -> None:
        """A notice is confirmed, or has named nobody for long: it is to be removed."""
        self._confirmed.add(name)

    def remove_confirmed(self) -> Steps[None]:
        """Begin to remove the notices that are confirmed.

        Raises:
            TermOverError: another leads, and has them.
            OSError: it may be tried again.
        """
        yield from self.enter()
        for name in tuple(self._confirmed):
            yield partial(self._files.remove_notice, self.term, name)

    def claim_notices(self) -> Steps[Mapping[str, float]]:
        """Remove what is confirmed, claim what is new; return what is left, with its seconds.

        What is confirmed is not returned, however long its removal takes. A notice of a name that
        is claimed already waits until that one is removed. Where nothing is new, as a rule nothing
        but the notices' own folder is looked at; now and then the term folder is, for what an
        earlier leader has moved there late.

        Raises:
            TermOverError: another leads.
            OSError: it may be tried again.
        """
        self._looks += 1
        if self._confirmed or self._claimed is None or self._looks % _ALL_EVERY == 0:
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


def _last_word(status: Message | None) -> list[Message]:
    """Return a status as a line of the progress; what is damaged is left out."""
    try:
        if status is not None:
            return [{"time": round(float(status["updated"]), 3), **line_of(status)}]
    except (ValueError, KeyError, TypeError):
        pass
    return []


# ---- The files of a run that its leaders share, on the file system
# Notices: somebody asks for a node of the run to be left, by a file in ``<run>/preempt/``. Its
# name is that of a task (``40_3``), of a host, or ``all``. Its content is the number of seconds
# that are left, or nothing for ten minutes.


_log = logging.getLogger(__name__)

DEFAULT_LEFT_S = 600.0
_TERM = re.compile(r"term\.(\d+)")
_NOTICE = "notice."
_REMOVED_IN_S = 1.0
_LONGEST_NAME = 255 - len(_NOTICE)


@dataclass(frozen=True)
class RunFiles:
    """The files of one run; see `term_folder.SharedFiles` for the calls, all of which may block."""

    run: RunDir

    def current_term(self) -> int:
        """Return the term of the term folder."""
        names = names_in(self.run.rdzv)
        terms = [int(m[1]) for name in names if (m := _TERM.fullmatch(name))]
        if not terms:
            raise FileNotFoundError(2, "there is no term folder", str(self.run.rdzv))
        return max(terms)

    def take_over(self, before: int, term: int) -> None:
        """Rename the folder; remove what the leader before has staged and not put in place."""
        mine = self._folder(term)
        self._folder(before).rename(mine)
        for left in names_listed(mine):
            if not left.startswith(_NOTICE):
                remove_behind(mine / left)

    def status(self) -> dict[str, Any] | None:
        """Return what status.json holds; None where it is damaged."""
        try:
            return read_json(self.run.status)
        except DamagedFileError as e:
            _log.info("it says nothing of the leader before: %s", e)
            return None

    def replace_status(self, term: int, status: dict[str, Any]) -> None:
        """Stage the status in the folder, and rename it."""
        text = json.dumps(status, indent=2) + "\n"
        write_atomic(self.run.status, text, staged_in=self._folder(term))

    def append_progress(self, lines: Sequence[dict[str, Any]], *, maybe_torn: bool) -> None:
        """Append, below the end of a line where that is missing.

        It is not opened for reading beside that: the next leader would wait for the delegation.
        """
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path = self.run.progress
        read_last = partial(read_undelegated, num_bytes=1)
        last = read_listed(path, read_last) if maybe_torn else None
        if last and last != "\n":
            text = f"\n{text}"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.write(fd, text.encode()) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(fd)

    # ---- notices --------------------------------------------------------------------------

    def new_notices(self) -> list[str]:
        """Return the files in ``preempt/``; none is the usual case.

        What is longer than any name, so that it cannot be claimed, keeps no other from that.
        """
        folder = self.run.notices
        names = (n for n in names_in(folder) if n[0] != "." and (folder / n).is_file())
        return sorted(n for n in names if len(os.fsencode(n)) <= _LONGEST_NAME)

    def claim_notice(self, term: int, name: str) -> None:
        """Rename it into the folder."""
        (self.run.notices / name).rename(self._notice(term, name))

    def forget_absence(self, name: str) -> None:
        """Make the client ask the server about the notice."""
        forget_absence(self.run.notices / name)

    def claimed_notices(self, term: int) -> dict[str, float]:
        """Read what is claimed."""
        folder = self._folder(term)
        found = sorted(name for name in names_listed(folder) if name.startswith(_NOTICE))
        return {name.removeprefix(_NOTICE): _left_s(folder / name) for name in found}

    def remove_notice(self, term: int, name: str) -> None:
        """Begin to remove it from the folder; usually it is gone when this returns."""
        remove_behind(self._notice(term, name), wait_s=_REMOVED_IN_S)

    def _folder(self, term: int) -> Path:
        return self.run.rdzv / f"term.{term}"

    def _notice(self, term: int, name: str) -> Path:
        return self._folder(term) / f"{_NOTICE}{name}"


def make_term_folder(run: RunDir, term: int = 0) -> None:
    """Give the folder to a term without a leader; make it if the run has none (login node)."""
    files = RunFiles(run)
    try:
        before = files.current_term()
    except FileNotFoundError:
        (run.rdzv / f"term.{term}").mkdir(exist_ok=True)
        return
    if before < term:
        files.take_over(before, term)


def _left_s(file: Path) -> float:
    try:
        text = read_undelegated(file).strip()
    except FileNotFoundError:
        return DEFAULT_LEFT_S
    except PermissionError:  # it asks all the same: who made it may write here
        text = "(unreadable)"
    try:
        left_s = float(text or DEFAULT_LEFT_S)
    except ValueError:
        left_s = math.nan
    if math.isfinite(left_s):
        return max(0.0, left_s)
    _log.warning("%s holds %r, which is no number of seconds; going by %g", file, text[:20],
                 DEFAULT_LEFT_S)  # fmt: skip
    return DEFAULT_LEFT_S
