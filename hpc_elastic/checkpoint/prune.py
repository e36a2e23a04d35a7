"""Which checkpoints go: by the rule of a run at each save, and when a user removes old ones.

The two rules differ in what they know. A run has verified the checkpoint that it commits, and keeps
a number of them from then on. A user's command finds any state of a directory, and reads it: a
checkpoint counts as good once all of its bytes were read and their checksums are right. The newest
``keep_last`` good ones stay, and so does whatever is newer than the oldest of them, damaged or not:
what a run restores now is never older. Nodes' memory is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.checkpoint import owner
from hpc_elastic.checkpoint.store import (
    STAGING,
    TRASH,
    Store,
    is_fenced,
    is_old,
    num_bytes_in,
    parse_token,
    verify_checkpoint,
)
from hpc_elastic.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: How many of the newest checkpoints, at least 1.
        keep_every: Checkpoints of steps that are a multiple of this stay for ever; None: none do.
    """

    keep_last: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for key in ("keep_last", "keep_every"):
            value = getattr(self, key)
            if (key, value) != ("keep_every", None) and (type(value) is not int or value < 1):
                raise ConfigError(key, value, "give a whole number of at least 1")

    def removable(
        self, steps: Collection[int], *, committed: int, damaged: Collection[int] = ()
    ) -> list[int]:
        """Return which of all steps to remove, oldest first (pure).

        ``committed`` was written just now, and stays. ``damaged`` ones do not count among the last,
        and go once there is a newer good one.
        """
        good = sorted(set(steps) - set(damaged) | {committed})
        kept = {committed, *good[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {step for step in good if step % self.keep_every == 0}
        return [s for s in sorted(steps) if s not in kept and (s in good or s < committed)]


@dataclass(frozen=True)
class RemovableFolder:
    """A folder that goes, or that could not be removed, and the bytes of its files."""

    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class Cleaning:
    """What is to go from one directory of checkpoints."""

    directory: Path
    kept: list[int]  # the good steps that stay, newest first
    damaged: Mapping[int, str]  # what is wrong with those that were read and are not good, by step
    going: list[RemovableFolder]  # old checkpoints first, then leftovers of aborted saves


def plan_cleaning(
    directory: Path, *, keep_last: int, run_id: str, last_index: int | None
) -> Cleaning:
    """Return what may go, or CheckpointError; nothing is changed.

    ``keep_last``: this many of the newest good ones stay; 0: none. ``last_index`` is that of the
    last log entry of the run that has saved there; None if no task of the run may be there.
    """
    store = Store(directory)
    kept: list[int] = []
    damaged: dict[int, str] = {}
    try:
        steps = store.steps()
        for step in steps:
            if len(kept) == keep_last:
                break
            problems = verify_checkpoint(store.stored(step))
            if problems:
                damaged[step] = problems[0]
            else:
                kept.append(step)
        old = [store.stored(step) for step in steps_to_clean(steps, kept, keep_last)]
        names = [path.name for path in directory.iterdir()]
        left = [directory / name for name in list_leftovers(names, run_id, last_index)]
        strange = [directory / name for name in names if STAGING.fullmatch(name)]
        left += [folder for folder in sorted(strange) if folder not in left and is_old(folder)]
        going = [RemovableFolder(folder, num_bytes_in(folder)) for folder in old + left]
    except OSError as e:
        raise CheckpointError(f"{e.filename or directory}: {e.strerror or e}") from e
    return Cleaning(directory, kept, damaged, going)


def steps_to_clean(steps: Iterable[int], kept: list[int], keep_last: int) -> list[int]:
    """Return the steps to remove, oldest first; none where fewer good ones are kept (pure)."""
    if len(kept) < keep_last:
        return []
    return sorted(step for step in steps if not kept or step < min(kept))


def list_leftovers(names: Iterable[str], run_id: str, last_index: int | None) -> list[str]:
    """Return a run's folders of saves that will never be committed (pure); see `plan_cleaning`."""
    run = owner.tag(run_id)

    def is_over(token: str) -> bool:
        if last_index is None:
            return parse_token(token)[0] == run
        return bool(is_fenced(token, run, last_index))

    staged = ((name, STAGING.fullmatch(name)) for name in names)
    return sorted(
        name for name, m in staged if name.startswith(TRASH) or (m and is_over(m["token"]))
    )


def remove_folders(cleaning: Cleaning) -> list[RemovableFolder]:
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
        RemovableFolder(path, num_bytes_in(path))
        for path in sorted(cleaning.directory.iterdir())
        if path.name.lstrip(".") in gone or any(f"{TRASH}{g}-" in path.name for g in gone)
    ]
