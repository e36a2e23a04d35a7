"""Which checkpoints of a framework count: those that were complete when they got their name.

A framework writes its checkpoints in a format and in an order of its own, and dies in between like
any other program. So what it has written is flushed to the disk, and gets the name, or the mark, by
which `newest_step` finds it only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def by_step(paths: Iterable[Path]) -> list[Path]:
    """Return those whose names end with a step (``checkpoint-120``, ``step-120.ckpt``), in order.

    By the number, not by the name: 100 comes after 99.
    """
    numbered = [(int(m[1]), path) for path in paths if (m := re.search(r"-(\d+)$", path.stem))]
    return [path for _, path in sorted(numbered)]
