"""Which files of past rounds a task keeps: four for each worker and round would be millions.

The agent of a task removes files of that task alone, those of its earlier attempts included, and
only of rounds that are over. It keeps

- a round in which a failure spent a restart, or for which stacks were dumped: reports name them;
- a round in which a worker of this node failed, until it is known that this spent no restart;
- of the others the first round of the task and the `NEWEST`. Of these a round that came to no step
  is removed as soon as a later round of the attempt has come to one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_elastic.shared_files import names_in

NEWEST = 20
"""Number of past rounds of a task whose files are kept, whatever happened in them."""

_ATTEMPT, _ROUND = re.compile(r"attempt-(\d+)"), re.compile(r"round-(\d+)\.")
_MARK = ".kept"
_NAMED = (_MARK, ".stack.txt")
"""Ends of names of files that only a round has which a report may name."""

PastRound = tuple[int, int]
"""Number of the attempt, and of the round."""


def superfluous(
    rounds: Iterable[PastRound], kept: Collection[PastRound], stepless: Collection[PastRound]
) -> set[PastRound]:
    """Return the past rounds of a task, of those with files, whose files are removed (pure).

    Reports name the ``kept`` ones; the ``stepless`` ones came to no step.
    """
    found = sorted(rounds)
    last = max((r for r in found if r not in stepless), default=(-1, -1))
    overtaken = {r for r in found if r in stepless and r < last}
    others = [r for r in found if r not in overtaken]
    return {*overtaken, *others[1:-NEWEST]}.difference(kept)


class LogRetention:
    """Removes the files of a task's past rounds, in threads of its own."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._attempt = attempt
        self._own = {attempt: folder}
        self._round: tuple[int, int] | None = None
        """Number of the present round, and restarts spent before it."""
        self._files: dict[PastRound, list[Path]] = {}
        self._stepless: set[PastRound] = set()
        self._lock = threading.Lock()

    def keep_round(self) -> None:
        """Keep the files of the present round: a worker has failed, and that may be reported."""
        if self._round is not None:
            with suppress(OSError):
                self._mark(self._round[0]).touch(0o644)

    def start_round(self, number: int, restarts: int, *, had_step: bool) -> None:
        """Remove what is not kept any more, since another round begins; returns at once.

        ``restarts`` are those that the run has spent before it. ``had_step``: all workers of this
        node came to a step in the round before.
        """
        before, self._round = self._round, (number, restarts)
        args = (before, self._round, had_step)
        with suppress(RuntimeError):  # no more threads
            threading.Thread(target=self._remove_files, args=args, daemon=True).start()

    def _remove_files(
        self, before: tuple[int, int] | None, now: tuple[int, int], had_step: bool
    ) -> None:
        with self._lock, suppress(OSError):
            if before is None:
                self._find_files(self._earlier_attempts())
            else:
                mark = self._mark(before[0])
                if now[1] == before[1]:
                    mark.unlink(missing_ok=True)
                else:
                    mark.touch(0o644)
                if not had_step:
                    self._stepless.add((self._attempt, before[0]))
            self._files = {r: paths for r, paths in self._files.items() if r[0] < self._attempt}
            self._find_files(self._own)
            past = [r for r in self._files if r < (self._attempt, now[0])]
            kept = [r for r in past if any(p.name.endswith(_NAMED) for p in self._files[r])]
            for round_ in superfluous(past, kept, self._stepless):
                for path in self._files.pop(round_):
                    path.unlink(missing_ok=True)
            self._stepless.intersection_update(self._files)

    def _earlier_attempts(self) -> dict[int, Path]:
        around = self._own[self._attempt].parent
        found = ((_ATTEMPT.fullmatch(name), around / name) for name in names_in(around))
        return {int(m[1]): path for m, path in found if m and int(m[1]) < self._attempt}

    def _find_files(self, folders: Mapping[int, Path]) -> None:
        for attempt, folder in folders.items():
            for name in names_in(folder):
                if found := _ROUND.match(name):
                    self._files.setdefault((attempt, int(found[1])), []).append(folder / name)

    def _mark(self, number: int) -> Path:
        return self._own[self._attempt] / f"round-{number}{_MARK}"
