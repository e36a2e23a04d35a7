"""The list of this user's runs: one small file for each submission.

The files are in ``$XDG_STATE_HOME/hpc_elastic/submissions`` (``~/.local/state`` if that is not
set). They hold paths only; the state of a run is in its run directory. A run whose directory was
deleted is not listed. A run that cannot be read at the moment is listed, so that ``last`` is not
another run. A home directory that cannot be written costs the list, never a submission.

A file's name begins with a number, by which the list is sorted: the time in milliseconds, but at
least one more than that of each submission before.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import COMMANDS, EventLog
from hpc_elastic.shared_files import is_there, make_folder, read_json, write_atomic

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownRun:
    """One run; ``submitted`` is in Unix seconds, ``cwd`` None in lists of earlier versions."""

    run_id: str
    path: Path
    submitted: float
    cwd: Path | None = None


def user() -> str:
    """Return the name of this account; its number if it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def folder() -> Path:
    """Return the folder of the list."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "hpc_elastic" / "submissions"


def add(runs: Mapping[str, Path]) -> None:
    """Add the runs of one submission, by run id."""
    now = time.time()
    paths = {run_id: str(path) for run_id, path in runs.items()}
    try:
        entry = {"submitted": now, "cwd": str(Path.cwd()), "runs": paths}
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        numbers = (file.name.partition("-")[0] for file in folder().glob("*.json"))
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        name = f"{max(int(now * 1000), last + 1):015d}-{os.urandom(4).hex()}.json"
        write_atomic(folder() / name, json.dumps(entry) + "\n")
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home directory
        _log.warning("hpc-elastic list will not show the runs of this submission: %s", e)


def newest_first() -> Iterator[KnownRun]:
    """Yield the runs whose directories exist, or cannot be read now."""
    try:
        files = sorted(folder().glob("*.json"), reverse=True)
    except (OSError, RuntimeError):
        return
    for file in files:
        try:
            entry = read_json(file) or {}
            at, runs = float(entry["submitted"]), entry["runs"].items()
            cwd = Path(entry["cwd"]) if "cwd" in entry else None
            found = [KnownRun(run_id, Path(path), at, cwd) for run_id, path in runs]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            _log.warning("%s is ignored: %s", file, e)
            continue
        for run in reversed(found):
            try:
                may_be_there = RunDir(run.path).spec.exists()
            except OSError:  # no permission, a stale handle, or a server that is away
                may_be_there = True
            if may_be_there:
                yield run


def mark_cancelled(run: RunDir, warn: Callable[[str], None]) -> None:
    """Write ``<run>/cancelled.json``, once: no task starts. RunDirectoryError if not ours."""
    if is_there(run.cancelled):
        return
    who = {"user": user(), "host": socket.gethostname(), "time": time.time()}
    try:
        write_atomic(run.cancelled, json.dumps(who) + "\n")
    except PermissionError as e:
        remedy = "only that user, or root, can cancel it"
        try:
            owner = run.path.owner()
        except (KeyError, OSError):
            owner = "another user"
        raise RunDirectoryError(f"{run.path} belongs to {owner}: {remedy}") from e
    except OSError as e:
        what = f"{run.cancelled} cannot be written ({e.strerror})"
        warn(f"{what}: the tasks are cancelled nevertheless; check later that none comes back")
        return
    with suppress(OSError):
        make_folder(run.event_logs)
    EventLog(run.events(COMMANDS), COMMANDS).write("cancel", user=who["user"], host=who["host"])
