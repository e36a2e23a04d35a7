"""Files that others read while they are written: they see a whole file, or none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hpc_elastic.errors import DamagedFileError


def write_atomic(
    path: Path, content: str | bytes, *, mode: int = 0o644, staged_in: Path | None = None
) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: The file.
        content: What it is to hold.
        mode: Its permissions.
        staged_in: A folder of the same file system to write it in first; None: its own. If that
            folder is renamed meanwhile, the file is not replaced, and `FileNotFoundError` is
            raised.
    """
    staged = _stage(path, content, mode, staged_in or path.parent)
    try:
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def create_atomic(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Make a file that nobody else has made, in one step; False if somebody has."""
    staged = _stage(path, text, mode, path.parent)
    try:
        os.link(staged, path)
    except FileExistsError:
        return staged.stat().st_nlink == 2  # ours: the answer to a first link(2) was lost
    finally:
        staged.unlink(missing_ok=True)
    return True


def _stage(path: Path, content: str | bytes, mode: int, folder: Path) -> Path:
    """Write to a hidden file of a folder, beside the one that it is for as a rule."""
    fd, staged = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            os.fchmod(f.fileno(), mode)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
    return Path(staged)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file that is written atomically; None where there is none yet.

    Raises:
        DamagedFileError: it is no JSON.
        OSError: it may not be read.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as e:
        raise DamagedFileError(f"{path} is damaged: {e}") from e
    return value if isinstance(value, dict) else None
