"""Which checkpoints of a run a user may do without, and their removal. Needs no torch.

A checkpoint counts as good once all of its bytes were read and their checksums are right. The
newest ``keep_last`` good ones stay, and so does whatever is newer than the oldest of them, damaged
or not: what a run restores now is never older. Nodes' memory is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.checkpoint.store import STAGING, TRASH, Store, record_of, verify
from hpc_elastic.errors import CheckpointError


@dataclass(frozen=True)
class Item:
    """A folder that goes, or that could not be removed.

    Attributes:
        folder: Where it is.
        num_bytes: What its files take.
    """

    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class Cleaning:
    """What is to go from one directory of checkpoints.

    Attributes:
        directory: The directory.
        kept: The good steps that stay, newest first.
        damaged: What is wrong with those that were read and are not good, by step.
        going: What goes: old checkpoints first, then leftovers of aborted saves.
    """

    directory: Path
    kept: list[int]
    damaged: Mapping[int, str]
    going: list[Item]


def plan(directory: Path, *, keep_last: int, is_over: Callable[[str], bool]) -> Cleaning:
    """Return what may go; nothing is changed.

    Args:
        directory: Of the checkpoints.
        keep_last: So many of the newest good ones stay; 0: none.
        is_over: Tells whether the group with this token can not commit any more.

    Raises:
        CheckpointError: the directory can not be read.
    """
    store = Store(directory)
    try:
        steps = store.steps()
        kept, damaged = _newest_good(store, steps, keep_last)
        old = choose(steps, kept, keep_last)
        left = [directory / name for name in leftovers(_names(directory), is_over)]
        going = [Item(f, size(f)) for f in [*map(store.folder, old), *left]]
    except OSError as e:
        raise CheckpointError(f"{e.filename or directory}: {e.strerror or e}") from e
    return Cleaning(directory, kept, damaged, going)


def choose(steps: Iterable[int], kept: list[int], keep_last: int) -> list[int]:
    """Return the steps to remove, oldest first (pure).

    Args:
        steps: All that there are.
        kept: The newest good ones.
        keep_last: How many of these are to stay: where there are fewer, none is removed.
    """
    if len(kept) < keep_last:
        return []
    return sorted(step for step in steps if not kept or step < min(kept))


def leftovers(names: Iterable[str], is_over: Callable[[str], bool]) -> list[str]:
    """Return the folders that saves have left which will never be committed (pure)."""
    staged = ((name, STAGING.fullmatch(name)) for name in names)
    return sorted(
        name for name, m in staged if name.startswith(TRASH) or (m and is_over(m["token"]))
    )


def fenced_by(last_record: int, *, run_goes_on: bool) -> Callable[[str], bool]:
    """Return what tells whether a group of a run can not commit any more (pure).

    Args:
        last_record: The number of the run's last record.
        run_goes_on: Whether a task of the run may be there.
    """

    def is_over(token: str) -> bool:
        record = record_of(token)
        return not run_goes_on or (record is not None and record < last_record)

    return is_over


def remove(cleaning: Cleaning) -> list[Item]:
    """Remove what is to go, the oldest first; return what is left of it.

    A checkpoint is out of sight by one rename, before the first of its bytes goes.
    """
    store = Store(cleaning.directory)
    for item in cleaning.going:
        try:
            store.remove(item.folder)
        except OSError:
            continue  # found below
    gone = {item.folder.name.lstrip(".") for item in cleaning.going}
    return [
        Item(cleaning.directory / name, size(cleaning.directory / name))
        for name in sorted(_names(cleaning.directory))
        if name.lstrip(".") in gone or any(f"{TRASH}{g}-" in name for g in gone)
    ]


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder, as far as they are there."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many files
            except FileNotFoundError:
                continue
    return total


def _newest_good(store: Store, steps: list[int], num: int) -> tuple[list[int], dict[int, str]]:
    good: list[int] = []
    damaged: dict[int, str] = {}
    for step in steps:
        if len(good) == num:
            break
        problems = verify(store.folder(step))
        if problems:
            damaged[step] = problems[0]
        else:
            good.append(step)
    return good, damaged


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]
