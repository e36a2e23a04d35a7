"""Files of a folder that several machines share: how they are written, found and read.

Writers replace a file in one step, so a reader sees a whole file or none.

A client of a shared file system remembers names, also the names of files that were not there. NFS
asks the server again when a folder or a file is *opened*; `exists`, `stat`, and the search for a
path's last name are answered from memory, for up to a minute. So:

**Absence is never concluded from a path. The folder is listed first, and what the listing names is
opened.** `names_in`, `is_there` and `read_json` keep that rule; whatever waits for a file of a run
uses them. The same holds for the folder itself where others may rename or make it: list its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
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
    """Make a file that nobody else has made, in one step; False if somebody has.

    Where the reply to link(2) is lost, the file is there although the call failed. Only its content
    tells whose it is: a count of links may come from a cache, and inode numbers may change.

    Args:
        path: The file.
        text: What it is to hold: unlike what any other caller writes there.
        mode: Its permissions.

    Raises:
        OSError: it is not there, and could not be made.
    """
    staged = _stage(path, text, mode, path.parent)
    try:
        os.link(staged, path)
    except OSError:
        if not is_there(path):
            raise
        return path.read_bytes() == text.encode()
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()
    return True


def names_in(folder: Path) -> frozenset[str]:
    """Return what a folder holds, as its server says; nothing if the folder is not there.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except FileNotFoundError:
        return frozenset()


def is_there(path: Path) -> bool:
    """Tell whether a file or folder is there, as its server says.

    Raises:
        OSError: the file system does not answer.
    """
    return path.name in names_in(path.parent)


def _stage(path: Path, content: str | bytes, mode: int, folder: Path) -> Path:
    """Write to a hidden file of a folder, beside the one that it is for as a rule."""
    staged = folder / f".{path.name}.{secrets.token_hex(8)}"
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            if os.fstat(fd).st_mode & 0o777 != mode:  # the umask is stricter
                os.fchmod(fd, mode)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file that is written atomically; None where there is none yet.

    Raises:
        DamagedFileError: it is no JSON.
        OSError: it may not be read.
    """
    try:
        text = _read_listed(path)
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DamagedFileError(f"{path} is damaged: {e}") from e
    return value if isinstance(value, dict) else None


def _read_listed(path: Path) -> str | None:
    """Return the text of a file; None if it is not there."""
    try:
        return path.read_text()
    except FileNotFoundError:
        if not is_there(path):
            return None
    try:
        return path.read_text()
    except FileNotFoundError:  # it was removed since
        return None
