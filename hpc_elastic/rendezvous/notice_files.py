"""Notice files: somebody asks for a node of the run to be left, by a file in ``<run>/notice/``.

The file's name is that of a task (``40_3``), of a host, or ``all``; its content is the number of
seconds that are left, or nothing for ten minutes. The leader looks for them about once a second,
and removes each once it was passed on.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)

DEFAULT_LEFT_S = 600.0
_PATIENCE = 30
"""A file that names nobody who is there is removed after so many looks."""


@dataclass
class NoticeFiles:
    """The notice files of one run. All calls may block for as long as the file system likes."""

    path: Path
    _looks: dict[str, int] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        """Return who is asked to leave, and within how many seconds; nothing is the usual case.

        Raises:
            OSError: the file system does not answer.
        """
        try:
            with os.scandir(self.path) as entries:
                names = [e.name for e in entries if e.is_file() and not e.name.startswith(".")]
        except FileNotFoundError:
            return {}
        return {name: _left_s(self.path / name) for name in sorted(names)}

    def passed_on(self, name: str, *, to_anybody: bool) -> None:
        """Remove a file that somebody was told of, or that has named nobody for long.

        Raises:
            OSError: the file system does not answer.
        """
        self._looks[name] = self._looks.get(name, 0) + 1
        if not to_anybody and self._looks[name] < _PATIENCE:
            return
        if not to_anybody:
            _log.warning("nobody is asked by the notice %s: no task or host of the run", name)
        del self._looks[name]
        (self.path / name).unlink(missing_ok=True)


def _left_s(file: Path) -> float:
    try:
        text = file.read_text(errors="replace").strip()
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
