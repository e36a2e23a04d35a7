"""How soon a node sees what another changes in a folder, and whether link(2) is exclusive there.

One process, the *observer*, has looked at a folder before, so that its client has cached it.
Another one, the *doer*, on another node, changes the folder, and the observer polls until it sees
the changes, as a run looks. Each change is in a folder of its own, because a look for one must not
refresh another. Both also link their files to the same names at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.shared_files import names_in, refresh

OBSERVER, DOER = "observer", "doer"
NUM_ROUNDS = 400
"""Names that two nodes link at once."""
TOGETHER = 20
"""Of these, after each message: both nodes begin at the same time again."""
CHANGES = {
    "created": "a new file",
    "renamed": "a renamed folder",
    "removed": "a removal",
    "replaced": "a replaced file",
    "appended": "appended text",
}
"""The changes of the doer, with their names for people."""
PATH = "path"
"""A new file that is polled by its path alone: shows how long a client answers from its cache."""
_PATH_S = 3.0
"""How long it is polled after all else was seen."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
_OLD, _MORE = "old", "and more"
_NEW = "new" * 100_000
"""Many pages long, so that a partial read shows."""


@dataclass(frozen=True)
class Visibility:
    """How soon an observer has seen the changes.

    ``times_s`` has the names of `CHANGES`, and `PATH`; None if not within `waited_s`. ``torn``: the
    replaced file had content that was neither the old nor the new one.
    """

    times_s: Mapping[str, float | None] = field(default_factory=dict)
    waited_s: float = 0.0
    torn: bool = False


@dataclass(frozen=True)
class LinkRace:
    """Result of a race of two nodes for names by link(2).

    Rounds in which both found that they had won, or neither did; in which they read another winner.
    """

    rounds: int = 0
    both: int = 0
    neither: int = 0
    differ: int = 0


@dataclass(frozen=True)
class FolderTrial:
    """A folder that a doer creates and changes while an observer watches."""

    path: Path

    def make_files(self) -> None:
        """Create the files that will change (doer)."""
        self.path.mkdir()
        for name in (*CHANGES, PATH, "race"):
            (self.path / name).mkdir()
        (self.path / "renamed" / "old").mkdir()
        for name in ("removed", "replaced", "appended"):
            self._file(name).write_text(_OLD)

    def apply_changes(self) -> None:
        """Make all changes that the observer has to see (doer)."""
        for name in ("created", PATH):
            (self.path / name / "new").touch()
        (self.path / "renamed" / "old").rename(self.path / "renamed" / "new")
        self._file("removed").unlink()
        _append(self.path / "replaced" / "staged", _NEW)
        (self.path / "replaced" / "staged").replace(self._file("replaced"))
        _append(self._file("appended"), _MORE)

    def watch_changes(self, change: Callable[[], object], timeout_s: float) -> Visibility:
        """Look at the folder, have it changed, and wait until the changes are seen (observer).

        ``change`` returns when the doer has changed it.
        """
        start = time.monotonic()
        files = [self._file(name) for name in ("removed", "replaced", "appended")]
        while self._names("renamed") != {"old"} or any(read(file) != _OLD for file in files):
            if time.monotonic() - start > timeout_s:
                return Visibility(dict.fromkeys((*CHANGES, PATH)), timeout_s)
            time.sleep(_LONGEST_PAUSE_S)
        unseen: dict[str, Callable[[], object]] = {  # as a run looks, and `PATH` as it never does
            "created": lambda: self._names("created") == {"new"},
            "renamed": lambda: self._names("renamed") == {"new"},
            "removed": lambda: self._names("removed") == set(),
            "replaced": lambda: read(self._file("replaced")).removeprefix(_OLD),
            "appended": lambda: read(self._file("appended")) == _OLD + _MORE,
            PATH: (self.path / PATH / "new").exists,
        }
        for detect in unseen.values():
            detect()
        change()
        start, waited_s, new, times = time.monotonic(), 0.0, "", dict[str, float | None]()
        while unseen and waited_s < timeout_s and (waited_s < _PATH_S or unseen.keys() - {PATH}):
            for name, detect in list(unseen.items()):
                if found := detect():
                    times[name] = time.monotonic() - start
                    new = str(found) if name == "replaced" else new
                    del unseen[name]
            time.sleep(min(_LONGEST_PAUSE_S, max(_PAUSE_S, waited_s / 20)))
            waited_s = time.monotonic() - start
        return Visibility({**times, **dict.fromkeys(unseen)}, waited_s, torn=new not in ("", _NEW))

    def stage_link(self, who: str) -> None:
        """Create the file whose links will race (both)."""
        self._race(who).write_text(who)

    def race_links(self, first: int, who: str) -> list[bool]:
        """Try to link the names of some rounds; return which this node has won (both).

        A node that is behind finds names that exist, faster than it links: it catches up, and from
        there on both try to link the same name at once. Raises OSError if a result is unknown.
        """
        numbers = range(first, first + TOGETHER)
        won = [self._link(number, who) for number in numbers]
        # was the reply to a link of our own lost?
        return [w or read(self._race(n)) == who for n, w in zip(numbers, won, strict=True)]

    def _link(self, number: int, who: str) -> bool:
        try:
            os.link(self._race(who), self._race(number))
        except FileExistsError:
            return False
        return True

    def read_winners(self) -> list[str]:
        """Return the holder of each round's name, as this node reads it; empty if it cannot."""
        return [read(self._race(number)) for number in range(NUM_ROUNDS)]

    def _race(self, name: int | str) -> Path:
        return self.path / "race" / str(name)

    def _file(self, name: str) -> Path:
        return self.path / name / "file"

    def _names(self, name: str) -> set[str] | None:
        """Return the names in one of the folders; None if it cannot be listed."""
        try:
            return {*names_in(self.path / name)}
        except OSError:
            return None


def count_race(won: Sequence[tuple[bool, bool]], winners: Sequence[Sequence[str]]) -> LinkRace:
    """Return the result of a race: who found that it won, and what both nodes read later (pure)."""
    return LinkRace(
        rounds=len(won),
        both=sum(all(pair) for pair in won),
        neither=sum(not any(pair) for pair in won),
        differ=sum("" not in pair and pair[0] != pair[1] for pair in zip(*winners, strict=True)),
    )


def read(file: Path) -> str:
    """Return the present text of a file that others write; empty if it cannot be read."""
    try:
        refresh(file)
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _append(file: Path, text: str) -> None:
    with file.open("a") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
