"""Who saves: a group of ranks, and the run that owns the directory, whose restarts go on there.

    <directory>/owner.json    run, its directory, the keys of its state, since when

Two runs with one directory would remove each other's checkpoints, and a restart would go on from
the other's. So a run marks its directory when a script makes its `Checkpointer`, and every commit
looks at the mark again, right before its rename. A mark is replaced only on purpose
(``CheckpointOptions(take_over=...)`` names the owner that loses it), or where its run is over and
has left no checkpoint.

Outside of a run there is no identity, so that a script started by hand goes on from its own
checkpoints: all such scripts are one owner, `NO_RUN`. ``torchrun --rdzv-backend=slurm`` has an
identity, but the next submission of the same script has another. It is one of these owners, and the
last group that opens a directory has it: an earlier one that still lives commits nothing any more.
What is only read gets no mark.

Directories without a mark, of hpc_elastic 0.2.0, get the mark of the first run that opens them.
Nothing here imports torch before it sends something.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.config.parse import restored
from hpc_elastic.errors import CheckpointError, ConfigError, InexactError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import (
    NO_HARD_LINKS,
    create_atomic,
    is_there,
    parse_json,
    read_listed,
    write_atomic,
)
from hpc_elastic.worker import process_group

MARK = "owner.json"
NO_RUN = "no run"  # the id of all scripts that no run started


@dataclass(frozen=True)
class Owner:
    """The content of a mark."""

    run: str  # the run's id; `NO_RUN` outside of one
    path: str = ""  # the run directory; empty outside of a run
    restarts: bool = False  # whether the run keeps its id when it is started again
    boundary: bool = True  # see `CheckpointOptions`
    keys: list[str] = field(default_factory=list)
    host: str = ""
    created: float = 0.0
    nonce: str = ""  # makes the mark different from any other

    @classmethod
    def current(cls, keys: Iterable[str] = (), *, boundary: bool = True) -> Owner:
        """Return this process as an owner; RunDirectoryError or OSError if it cannot be read."""
        kind = {"boundary": boundary, "keys": sorted(keys)}
        at = {"host": socket.gethostname(), "created": time.time(), "nonce": os.urandom(8).hex()}
        path = fencing.own_run_dir()
        if path is None:
            return cls(NO_RUN, **kind, **at)  # type: ignore[arg-type]
        run = RunDir(path.absolute())
        restarts = is_there(run.spec)
        name = run.load().run_id if restarts else f"{run.path.name}-{tag(str(run.path))}"
        return cls(name, str(run.path), restarts, **kind, **at)  # type: ignore[arg-type]

    @property
    def in_run(self) -> bool:
        """Whether it is a run, or a job step of ``torchrun --rdzv-backend=slurm``."""
        return self.run != NO_RUN

    def is_over(self) -> bool:
        """Return whether its run has surely ended, or is removed."""
        if not self.restarts:
            return False
        run = RunDir(Path(self.path))
        with contextlib.suppress(OSError):
            return run.is_over or (run.path.parent.is_dir() and not is_there(run.path))
        return False

    def __str__(self) -> str:
        name = f"the run {self.run} ({self.path})" if self.in_run else "a script outside of a run"
        what = "" if self.boundary else ", whose saves there are not where it goes on (boundary)"
        keys = f", with the state {', '.join(self.keys)}" if self.keys else ""
        return f"{name}{what}{keys}"


@dataclass(frozen=True)
class OwnerVerdict:
    """Whether an owner marks a directory, or why it may not save there, and not be made at all."""

    marks: bool = False
    problem: ConfigError | None = None
    at_once: bool = False


def judge(
    directory: Path, mark: Owner | None, mine: Owner, take_over: str | None, *, is_empty: bool
) -> OwnerVerdict:
    """Decide whether an owner may save to a directory (pure).

    ``take_over`` is the id of the owner that is to be replaced. ``is_empty``: no checkpoint is
    lost, and the mark's owner, if any, is over.
    """
    if mark is None:
        return OwnerVerdict(marks=mine.in_run and (mine.boundary or is_empty))
    if take_over == mark.run and mark.run != mine.run:
        return OwnerVerdict(marks=True)
    is_mine = mark.run == mine.run
    if is_mine or not (mark.restarts or mine.restarts):
        if mark.boundary == mine.boundary:
            return OwnerVerdict(marks=mine.in_run and not is_mine)
        remedy = (
            f"it holds the checkpoints of {mark}; a Checkpointer whose saves are "
            f"{'boundaries' if mine.boundary else 'no boundaries'} would remove them: give it a "
            "directory of its own"
        )
        return OwnerVerdict(problem=InexactError("directory", str(directory), remedy))
    if is_empty and mine.in_run:
        return OwnerVerdict(marks=True)
    remedy = (
        f"it holds the checkpoints of {mark}: give another directory; or, to go on from them and "
        f"keep that one from saving there, options=CheckpointOptions(take_over={mark.run!r})"
    )
    problem = InexactError("directory", str(directory), remedy)
    return OwnerVerdict(problem=problem, at_once=mine.in_run and mine.boundary)


def claim(directory: Path, mine: Owner, take_over: str | None, *, has_steps: bool) -> OwnerVerdict:
    """Decide whether an owner may save to a directory that exists, and mark it if need be (rank 0).

    Raises ConfigError if the mark is damaged, OSError if it cannot be read or written.
    """
    while True:
        mark = read(directory)
        is_empty = not has_steps and (mark is None or mark.is_over())
        verdict = judge(directory, mark, mine, take_over, is_empty=is_empty)
        if not verdict.marks or write(directory, mine, replaces=mark is not None):
            return verdict


def require(directory: Path, mine: Owner) -> None:
    """Find a directory still an owner's before a commit, or CheckpointError; mark it if need be."""
    while (mark := read(directory)) is None:
        write(directory, mine, replaces=False)
    is_mine = mark.run == mine.run or not (mine.in_run or mark.restarts)
    if not is_mine or mark.boundary != mine.boundary:
        raise CheckpointError(
            f"{directory} belongs to {mark} now, so nothing else is saved there: stop one of the "
            "two, and give it another directory"
        )


def read(directory: Path) -> Owner | None:
    """Return whose a directory is; None if it has no mark, ConfigError if it is damaged."""
    path = directory / MARK
    try:
        text = read_listed(path)
        return None if text is None else _parse(text, path)
    except (IsADirectoryError, KeyError, TypeError, ValueError) as e:
        remedy = "the owner of the checkpoints is unknown: remove it if they are this run's"
        raise ConfigError("directory", str(path), remedy) from e


@functools.lru_cache(maxsize=8)
def _parse(text: str, path: Path) -> Owner:
    """Parse a mark once: the same file is read at each commit."""
    mark: Owner = restored(Owner, parse_json(text, path))
    return mark


def write(directory: Path, mine: Owner, *, replaces: bool) -> bool:
    """Mark a directory; return False if another owner was first."""
    text = json.dumps(asdict(mine), indent=2) + "\n"
    if not replaces:
        try:
            return create_atomic(directory / MARK, text)
        except OSError as e:
            if e.errno not in NO_HARD_LINKS:
                raise
    write_atomic(directory / MARK, text)
    return True


def tag(run: str) -> str:
    """Return the hexadecimal digits that stand for a run in the names of its unfinished saves."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that save and restore together; every method is for all of them (collective).

    The constructor of a `Checkpointer` and `load_latest` call them; a save needs none.
    """

    rank: int
    world_size: int
    token: str  # in the names of staging folders: letters and digits that no other group has
    run: str = NO_RUN  # rank 0's

    @classmethod
    def current(cls) -> RankGroup:
        """Return this process's group: the default process group, or itself alone."""
        size = process_group.size()
        if size is None and (num_workers := int(os.environ.get("WORLD_SIZE", "1"))) != 1:
            raise CheckpointError(
                f"WORLD_SIZE={num_workers}, but there is no process group: make "
                "the Checkpointer after torch.distributed.init_process_group()"
            )
        group = cls(0 if size is None else process_group.rank(), size or 1, "")
        run = Owner.current().run if group.rank == 0 else ""
        run, nonce = group.broadcast_json([run, uuid.uuid4().hex[:15]])
        token = fencing.fencing_token()
        token = f"p{nonce}" if token is None else f"{token}u{tag(run)}"
        return cls(group.rank, group.world_size, token, run)

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Return the value of one rank, which is plain JSON."""
        return value if self.world_size == 1 else process_group.broadcast_json(value, source)

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks vote yes."""
        return all(vote for (vote,) in self.gather([int(yes)]))

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return the row of every rank, by rank; all have the same length, and int64 numbers."""
        return [list(row)] if self.world_size == 1 else process_group.gather_rows(row)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank; they are plain JSON."""
        return [value] if self.world_size == 1 else process_group.gather_json(value)
