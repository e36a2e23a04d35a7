"""The directory that runs will lie in: what its file system can do, tried out on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.mount import Mount


@dataclass(frozen=True)
class Folder:
    """What was found of a directory.

    Attributes:
        path: Its absolute path.
        fs: Type of its file system, such as ``nfs4``; empty if unknown.
        options: The options of its mount that matter (`Mount.telling`).
        free_bytes: Free space for this user.
        free_files: Files that can still be made; None where the file system does not count them.
        problems: What does not work (``write``, ``link``, ``rename``, ``lock``), by name, and why;
            where it can not be written to, nothing else was tried.
        clock_offset_s: How far the file system's clock is ahead of this host's; None if unknown.
    """

    path: str
    fs: str
    free_bytes: int
    free_files: int | None
    problems: dict[str, str]
    clock_offset_s: float | None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def mount(self) -> Mount:
        """The mount that it lies on."""
        return Mount(self.fs, options=self.options)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Folder:
        """Return it from `to_json`."""
        return cls(**raw)


def look(path: Path) -> Folder:
    """Try a directory out, with files that are removed again.

    Args:
        path: An existing directory.
    """
    space, mount = os.statvfs(path), Mount.of(path)
    problems: dict[str, str] = {}
    offset = None
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".hpc-elastic-") as trial:
            problems = _try_all(Path(trial))
            offset = _clock_offset(Path(trial))
    except OSError as e:
        problems = {"write": e.strerror or str(e)}
    return Folder(
        path=str(path.absolute()),
        fs=mount.kind,
        free_bytes=space.f_bavail * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
        problems=problems,
        clock_offset_s=offset,
        options=mount.telling,
    )


def _try_all(trial: Path) -> dict[str, str]:
    """Return what fails, by name, and why."""
    trials: dict[str, Callable[[Path], None]] = {"link": _link, "rename": _rename, "lock": _lock}
    problems = {}
    for name, attempt in trials.items():
        try:
            attempt(trial)
        except OSError as e:
            problems[name] = e.strerror or str(e)
    return problems


def _link(trial: Path) -> None:
    """Make a hard link once, and see that a second one of its name is refused."""
    for name in ("first", "second"):
        (trial / name).touch()
    (trial / "link").hardlink_to(trial / "first")
    with contextlib.suppress(FileExistsError):
        (trial / "link").hardlink_to(trial / "second")
        raise OSError("a link replaced another one")


def _rename(trial: Path) -> None:
    (trial / "staged").write_text("new")
    (trial / "old").write_text("old")
    (trial / "staged").replace(trial / "old")
    if (trial / "old").read_text() != "new":
        raise OSError("the old content is still there")


def _lock(trial: Path) -> None:
    with (trial / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _clock_offset(trial: Path) -> float:
    """Return how far the clock that dates new files is ahead of ours; 0 within what is measured.

    The server of a network file system dates files by its own clock.
    """
    before = time.time()
    (trial / "dated").write_text("now")
    dated = (trial / "dated").stat().st_mtime
    after = time.time()
    return min(0.0, dated - before) if dated < before else max(0.0, dated - after)
