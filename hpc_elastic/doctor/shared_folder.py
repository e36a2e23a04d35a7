"""What one node of the probe sees of what another one does to the folder.

The *doer* prepares a trial folder, and changes it when it is asked to (`probe_network` carries
what is asked). The *observer* has looked at it before, so that its client remembers what it was
like, and looks until it sees the changes. Each is in a folder of its own: looking for one refreshes
no other.

And both race for names by link(2), round after round, of which one may win each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.shared_files import names_in, refresh

NUM_ROUNDS = 50
DEEDS = {
    "created": "a new file",
    "renamed": "a renamed folder",
    "removed": "a removal",
    "replaced": "a replaced file",
    "appended": "appended text",
}
"""What the doer does, and what it is called."""
PATH = "path"
"""A new file that is looked for by its path alone: so long a client answers from memory."""
_PATH_S = 3.0
"""For so long it is looked for, where all else has been seen."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
_OLD, _MORE = "old", "and more"
_NEW = "new" * 100_000
"""Of many pages: a part of it is no file that was replaced in one step."""


@dataclass(frozen=True)
class Visibility:
    """How soon an observer has seen what was done.

    Attributes:
        times_s: By the names of `DEEDS`, and `PATH`; None: not within `waited_s`.
        waited_s: For how long it has looked.
        torn: Whether the replaced file had content that was neither the old nor the new one.
    """

    times_s: Mapping[str, float | None] = field(default_factory=dict)
    waited_s: float = 0.0
    torn: bool = False


@dataclass(frozen=True)
class Race:
    """How two nodes have raced for names.

    Attributes:
        rounds: How often.
        both: In how many rounds both were told that they had won.
        neither: In how many neither was.
        differ: In how many each read another winner's name afterwards.
    """

    rounds: int = 0
    both: int = 0
    neither: int = 0
    differ: int = 0


@dataclass(frozen=True)
class Trial:
    """The folder in which one observer's doer is watched.

    Attributes:
        path: Where it is; the doer makes it.
    """

    path: Path

    def prepare(self) -> None:
        """Make what will be changed (doer)."""
        self.path.mkdir()
        for name in (*DEEDS, PATH, "race"):
            (self.path / name).mkdir()
        (self.path / "renamed" / "old").mkdir()
        for name in ("removed", "replaced", "appended"):
            self._file(name).write_text(_OLD)

    def change(self) -> None:
        """Do all that the observer is to see (doer)."""
        for name in ("created", PATH):
            (self.path / name / "new").touch()
        (self.path / "renamed" / "old").rename(self.path / "renamed" / "new")
        self._file("removed").unlink()
        _append(self.path / "replaced" / "staged", _NEW)
        (self.path / "replaced" / "staged").replace(self._file("replaced"))
        _append(self._file("appended"), _MORE)

    def watch(self, change: Callable[[], object], patience_s: float) -> Visibility:
        """Look at the folder, have it changed, and wait until that is seen (observer).

        Args:
            change: Returns when the doer has changed it.
            patience_s: For how long to look.
        """
        start = time.monotonic()
        while not self._is_prepared():
            if time.monotonic() - start > patience_s:
                return Visibility(dict.fromkeys((*DEEDS, PATH)), patience_s)
            time.sleep(_LONGEST_PAUSE_S)
        unseen = self._looks()
        for look in unseen.values():
            look()
        change()
        start, waited_s, new, times = time.monotonic(), 0.0, "", dict[str, float | None]()
        while unseen and waited_s < patience_s and (waited_s < _PATH_S or unseen.keys() - {PATH}):
            for name, look in list(unseen.items()):
                if found := look():
                    times[name] = time.monotonic() - start
                    new = str(found) if name == "replaced" else new
                    del unseen[name]
            time.sleep(min(_LONGEST_PAUSE_S, max(_PAUSE_S, waited_s / 20)))
            waited_s = time.monotonic() - start
        return Visibility({**times, **dict.fromkeys(unseen)}, waited_s, torn=new not in ("", _NEW))

    def _looks(self) -> dict[str, Callable[[], object]]:
        """Return how each change is looked for: as a run looks, and `PATH` as it never does."""
        return {
            "created": lambda: self._names("created") == {"new"},
            "renamed": lambda: self._names("renamed") == {"new"},
            "removed": lambda: self._names("removed") == set(),
            "replaced": lambda: _read(self._file("replaced")).removeprefix(_OLD),
            "appended": lambda: _read(self._file("appended")) == _OLD + _MORE,
            PATH: (self.path / PATH / "new").exists,
        }

    def _is_prepared(self) -> bool:
        """Tell whether the observer sees what the doer has made."""
        files = (self._file(name) for name in ("removed", "replaced", "appended"))
        return self._names("renamed") == {"old"} and all(_read(file) == _OLD for file in files)

    def stage(self, who: str) -> None:
        """Make the files whose links will race, before any does (both)."""
        for number in range(NUM_ROUNDS):
            self._entry(number, who).write_text(who)

    def link(self, number: int, who: str) -> bool:
        """Try to be the one whose link has the name of a round; return whether it is (both).

        Raises:
            OSError: it can not be told.
        """
        try:
            os.link(self._entry(number, who), self._entry(number))
        except FileExistsError:  # or is the reply lost that it was made?
            return _read(self._entry(number)) == who
        return True

    def winners(self) -> list[str]:
        """Return who has the name of each round, as this node reads it; empty if it does not."""
        return [_read(self._entry(number)) for number in range(NUM_ROUNDS)]

    def _entry(self, number: int, who: str = "first") -> Path:
        return self.path / "race" / f"{number}.{who}"

    def _file(self, name: str) -> Path:
        return self.path / name / "file"

    def _names(self, name: str) -> set[str] | None:
        """Return what is in one of the folders; None where it is not to be listed."""
        try:
            return {*names_in(self.path / name)}
        except OSError:
            return None


def result_of(won: Sequence[tuple[bool, bool]], winners: Sequence[Sequence[str]]) -> Race:
    """Return how a race has ended (pure).

    Args:
        won: For each round whether one and the other were told that they had won.
        winners: For both nodes, who has the name of each round.
    """
    return Race(
        rounds=len(won),
        both=sum(all(pair) for pair in won),
        neither=sum(not any(pair) for pair in won),
        differ=sum("" not in pair and pair[0] != pair[1] for pair in zip(*winners, strict=True)),
    )


def _read(file: Path) -> str:
    """Return what a file holds; nothing where it is not to be read."""
    try:
        refresh(file)
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _append(file: Path, text: str) -> None:
    """Write to the end of a file, and have it last."""
    with file.open("a") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
