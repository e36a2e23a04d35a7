"""Disks in memory (tmpfs) for tests and tools, which can be filled; needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_TIMEOUT_S = 20
_SETTLED_S = 0.5
_BLOCK_BYTES = 4096


def mount(*arguments: str | Path) -> bool:
    """Mount a file system; return whether it worked."""
    done = subprocess.run(["mount", *arguments], capture_output=True, timeout=_TIMEOUT_S)
    return done.returncode == 0


def mount_memory(folder: Path, size: str) -> bool:
    """Make a folder that is a disk of some size, such as ``8m``; return whether it worked."""
    folder.mkdir()
    return os.geteuid() == 0 and mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)


def unmount(folder: Path) -> None:
    """Unmount the disk; open files stay usable."""
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=_TIMEOUT_S)


@contextlib.contextmanager
def full(disk: Path, room: int = 0) -> Iterator[None]:
    """Fill a disk up to some bytes, including space that is freed in the next half second.

    Otherwise a file that is rewritten or replaced would find the space that it has just freed.
    """
    ballast, until = disk / "ballast", time.monotonic() + _SETTLED_S
    with ballast.open("wb", buffering=0) as f:
        while (free := _free(disk)) > room or time.monotonic() < until:
            if free > room:
                with contextlib.suppress(OSError):
                    f.write(bytes(_BLOCK_BYTES))
    try:
        yield
    finally:
        ballast.unlink()


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize
