"""A copy of the user's code, taken at submission (``launcher.snapshot=true``).

Without it, a task that waits in the queue runs whatever the files say when it starts. The copy
holds what git tracks and what it does not ignore, once for a sweep; each run has a link to it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hpc_elastic import commands
from hpc_elastic.errors import SubmissionError
from hpc_elastic.rundir import SUBMISSION, Entry

_GIT_TIMEOUT_S = 60.0


def take_snapshot(entry: Entry, submission: Path) -> Entry:
    """Copy the checkout that the entry is in, and return the entry as it is in the copy.

    Args:
        entry: The user's function where it lies now.
        submission: The sweep's ``.hpc_elastic``; the copy is its folder ``code``.

    Raises:
        SubmissionError: the code is in no git checkout, or could not be copied.
    """
    folder = Path(entry.script).parent if entry.script else Path(entry.cwd)
    top = _toplevel(folder)
    code = submission / "code"
    try:
        for name in own_files(_listed(top)):
            _copy(top / name, code / name)
    except OSError as e:
        raise SubmissionError(f"launcher.snapshot: can not copy {top} to {code}: {e}") from e
    return remap(entry, top, code)


def link_snapshot(run: Path, submission: Path) -> None:
    """Give a run directory its link ``code`` to the copy."""
    link = run / "code"
    if not link.is_symlink():
        link.symlink_to(submission / "code", target_is_directory=True)


def own_files(listed: Iterable[str]) -> list[str]:
    """Return the files that are not the output of earlier sweeps (pure).

    A sweep directory lies in the checkout as a rule, and is often not ignored: what is in it
    would be copied into itself.
    """
    paths = [PurePosixPath(name) for name in listed]
    sweeps = {p for path in paths for p in _sweeps_above(path)}
    return [str(path) for path in paths if sweeps.isdisjoint(path.parents)]


def remap(entry: Entry, top: Path, code: Path) -> Entry:
    """Return the entry with every path below ``top`` moved below ``code`` (pure)."""

    def moved(path: str) -> str:
        inside = Path(path).is_relative_to(top)
        return str(code / Path(path).relative_to(top)) if inside else path

    return replace(
        entry,
        script=moved(entry.script) if entry.script else None,
        cwd=moved(entry.cwd),
        sys_path=[moved(path) for path in entry.sys_path],
    )


def _sweeps_above(path: PurePosixPath) -> list[PurePosixPath]:
    return [p.parent for p in path.parents if p.name == SUBMISSION]


def _toplevel(folder: Path) -> Path:
    return Path(_git(folder, "rev-parse", "--show-toplevel").removesuffix("\n"))


def _listed(top: Path) -> list[str]:
    """Return the files of a checkout, those of its submodules included."""
    names = _git(top, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    files: list[str] = []
    for name in dict.fromkeys(filter(None, names)):
        path = top / name
        if path.is_dir() and not path.is_symlink():
            submodule = (path / ".git").exists()
            files += [f"{name.rstrip('/')}/{inner}" for inner in _listed(path)] if submodule else []
        elif path.is_symlink() or path.exists():
            files.append(name)
    return files


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)


def _git(folder: Path, *args: str) -> str:
    argv = ["git", "-C", str(folder), *args]
    remedy = "`git init` there, or leave the setting off"
    try:
        done = commands.run(argv, timeout_s=_GIT_TIMEOUT_S, errors="surrogateescape")
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SubmissionError(f"launcher.snapshot needs git: {e}") from e
    if done.returncode != 0:
        why = done.stderr.strip()
        raise SubmissionError(f"launcher.snapshot copies a git checkout; {folder}: {why}. {remedy}")
    return done.stdout
