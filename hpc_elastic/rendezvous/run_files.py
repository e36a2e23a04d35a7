"""The files of a run that its leaders share, on the file system; see `term_folder` for the rules.

Notices: somebody asks for a node of the run to be left, by a file in ``<run>/notice/``. Its name is
that of a task (``40_3``), of a host, or ``all``. Its content is the number of seconds that are
left, or nothing for ten minutes.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.errors import DamagedFileError
from hpc_elastic.files import (
    names_in,
    names_listed,
    read_json,
    read_listed,
    read_undelegated,
    remove_behind,
    write_atomic,
)
from hpc_elastic.rundir import RunDir

_log = logging.getLogger(__name__)

DEFAULT_LEFT_S = 600.0
_TERM = re.compile(r"term\.(\d+)")
_NOTICE = "notice."
_REMOVED_IN_S = 1.0
_LONGEST_NAME = 255 - len(_NOTICE)


@dataclass(frozen=True)
class RunFiles:
    """The files of one run; see `term_folder.SharedFiles` for the calls, all of which may block."""

    run: RunDir

    def term(self) -> int:
        """Return the epoch of the term folder."""
        names = names_in(self.run.rdzv)
        epochs = [int(m[1]) for name in names if (m := _TERM.fullmatch(name))]
        if not epochs:
            raise FileNotFoundError(2, "there is no term folder", str(self.run.rdzv))
        return max(epochs)

    def take_over(self, before: int, epoch: int) -> None:
        """Rename the folder; remove what the leader before has staged and not put in place."""
        mine = self._folder(epoch)
        self._folder(before).rename(mine)
        for left in names_listed(mine):
            if not left.startswith(_NOTICE):
                remove_behind(mine / left)

    def status(self) -> dict[str, Any] | None:
        """Return what status.json holds; None where it is damaged."""
        try:
            return read_json(self.run.status)
        except DamagedFileError as e:
            _log.info("it says nothing of the leader before: %s", e)
            return None

    def replace_status(self, epoch: int, status: dict[str, Any]) -> None:
        """Stage the status in the folder, and rename it."""
        text = json.dumps(status, indent=2) + "\n"
        write_atomic(self.run.status, text, staged_in=self._folder(epoch))

    def append_progress(self, lines: Sequence[dict[str, Any]], *, maybe_torn: bool) -> None:
        """Append, below the end of a line where that is missing.

        It is not opened for reading beside that: the next leader would wait for the delegation.
        """
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path = self.run.progress
        before = read_listed(path, read_undelegated) if maybe_torn else None
        if before and not before.endswith("\n"):
            text = f"\n{text}"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.write(fd, text.encode()) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(fd)

    # ---- notices --------------------------------------------------------------------------

    def new_notices(self) -> list[str]:
        """Return the files in ``notice/``; none is the usual case.

        What is longer than any name, so that it cannot be claimed, keeps no other from that.
        """
        folder = self.run.notices
        names = (n for n in names_in(folder) if n[0] != "." and (folder / n).is_file())
        return sorted(n for n in names if len(os.fsencode(n)) <= _LONGEST_NAME)

    def claim_notice(self, epoch: int, name: str) -> None:
        """Rename it into the folder."""
        (self.run.notices / name).rename(self._notice(epoch, name))

    def claimed_notices(self, epoch: int) -> dict[str, float]:
        """Read what is claimed."""
        folder = self._folder(epoch)
        found = sorted(name for name in names_listed(folder) if name.startswith(_NOTICE))
        return {name.removeprefix(_NOTICE): _left_s(folder / name) for name in found}

    def remove_notice(self, epoch: int, name: str) -> None:
        """Begin to remove it from the folder; usually it is gone when this returns."""
        remove_behind(self._notice(epoch, name), wait_s=_REMOVED_IN_S)

    def _folder(self, epoch: int) -> Path:
        return self.run.rdzv / f"term.{epoch}"

    def _notice(self, epoch: int, name: str) -> Path:
        return self._folder(epoch) / f"{_NOTICE}{name}"


def make_term_folder(run: RunDir, epoch: int = 0) -> None:
    """Give the folder to an epoch without a leader; make it if the run has none (login node)."""
    files = RunFiles(run)
    try:
        before = files.term()
    except FileNotFoundError:
        (run.rdzv / f"term.{epoch}").mkdir(exist_ok=True)
        return
    if before < epoch:
        files.take_over(before, epoch)


def _left_s(file: Path) -> float:
    try:
        text = read_undelegated(file).strip()
    except FileNotFoundError:
        return DEFAULT_LEFT_S
    except PermissionError:  # it asks all the same: who made it may write here
        text = "(unreadable)"
    try:
        left_s = float(text or DEFAULT_LEFT_S)
    except ValueError:
        left_s = math.nan
    if math.isfinite(left_s):
        return max(0.0, left_s)
    _log.warning("%s holds %r, which is no number of seconds; going by %g", file, text[:20],
                 DEFAULT_LEFT_S)  # fmt: skip
    return DEFAULT_LEFT_S
