"""How leaders, of whom one may not know yet that its term is over, write the same files (pure).

Theory of operation
-------------------
A run has one *term folder*, ``rdzv/term.<epoch>``. Each new leader renames it to its own epoch.
What a leader writes passes through the folder: ``status.json`` is staged there and renamed into
its place, and a notice file is claimed by a rename into it. A rename has one outcome for all
nodes. So once a leader has the folder, what an earlier leader wanted fails, however late it comes:
it was queued in a thread, or the whole process was stopped in the middle of it.

- The folder never goes back: its name is looked up first, and a later epoch's is left alone. Where
  a stale cache shows an earlier name, the rename fails, and the look is repeated.
- The first folder, ``term.0``, is made with the run. A leader makes none: a second folder would
  fence nobody.
- A claimed notice lies in the folder until its node has confirmed it. If the leader is deposed
  before that, the notice moves on with the folder, and the next leader tells the node.
- Lines of ``progress.jsonl`` are appended right after the status has passed. No rename guards
  them: of a process that is stopped between the two, one append may come too late. Each line has
  its epoch, and readers leave out one that follows a line of a later epoch (`story.points`).

The procedures here are `steps`: threads of the leader carry them out on files (`run_files`), the
simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from hpc_elastic.rendezvous.series import line_of
from hpc_elastic.rendezvous.steps import Steps

Message = dict[str, Any]

_TRIES = 3
_ALL_EVERY = 10
"""Every so many looks for notices the term folder is listed, too."""


class TermOverError(Exception):
    """The term folder is a later leader's."""


class SharedFiles(Protocol):
    """The files that leaders share. Each call may block, and may raise `OSError`.

    Those that have an ``epoch`` raise `FileNotFoundError` if the folder is another epoch's.
    """

    def term(self) -> int:
        """Return the epoch whose the term folder is, from a fresh listing."""

    def take_over(self, before: int, epoch: int) -> None:
        """Rename the folder of one epoch to another's."""

    def status(self) -> Message | None:
        """Return what status.json holds; None where there is none."""

    def replace_status(self, epoch: int, status: Message) -> None:
        """Put another status.json in its place."""

    def append_progress(self, lines: Sequence[Message], *, maybe_torn: bool) -> None:
        """Append lines to progress.jsonl, whose last line may be one that was not finished."""

    def new_notices(self) -> list[str]:
        """Return the names of the notices that nobody has claimed."""

    def claim_notice(self, epoch: int, name: str) -> None:
        """Move a notice into the folder."""

    def claimed_notices(self, epoch: int) -> Mapping[str, float]:
        """Return the notices in the folder, and the seconds that each leaves."""

    def remove_notice(self, epoch: int, name: str) -> None:
        """Begin to remove a notice from the folder; that may take long, and fail."""


class TermFolder:
    """What one leader does with the shared files.

    Args:
        epoch: The leader's.
        files: Where it does so.
    """

    def __init__(self, epoch: int, files: SharedFiles) -> None:
        self.epoch = epoch
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
            before = yield self._files.term
            if before == self.epoch:
                return
            if before > self.epoch:
                raise TermOverError(f"epoch {before} has the term folder, not {self.epoch}")
            try:
                yield partial(self._files.take_over, before, self.epoch)
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
        yield partial(self._files.replace_status, self.epoch, status)
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
            yield partial(self._files.remove_notice, self.epoch, name)

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
            self._claimed = yield partial(self._files.claimed_notices, self.epoch)
            self._confirmed.intersection_update(self._claimed)
        claimed: Mapping[str, float] = self._claimed
        new = [name for name in (yield self._files.new_notices) if name not in claimed]
        if new:
            self._claimed = None
            yield from self.enter()
        for name in new:
            try:
                yield partial(self._files.claim_notice, self.epoch, name)
            except FileNotFoundError:  # withdrawn meanwhile, or the folder is gone
                yield from self.enter()
        if new:
            self._claimed = claimed = yield partial(self._files.claimed_notices, self.epoch)
        return {name: left_s for name, left_s in claimed.items() if name not in self._confirmed}


def _last_word(status: Message | None) -> list[Message]:
    """Return a status as a line of the progress; what is damaged is left out."""
    try:
        if status is not None:
            return [{"time": round(float(status["updated"]), 3), **line_of(status)}]
    except (ValueError, KeyError, TypeError):
        pass
    return []
