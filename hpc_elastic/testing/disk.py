"""A disk of its own for a test or a tool, a tmpfs, which can be full for a while; needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_TIMEOUT_S = 20


def mount(*arguments: str | Path) -> bool:
    """Mount a file system; tell whether it worked."""
    done = subprocess.run(["mount", *arguments], capture_output=True, timeout=_TIMEOUT_S)
    return done.returncode == 0


def mount_memory(folder: Path, size: str) -> bool:
    """Make a folder that is a disk of some size, such as ``8m``; tell whether it worked."""
    folder.mkdir()
    return os.geteuid() == 0 and mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)


def unmount(folder: Path) -> None:
    """Take the disk away; who has files open there keeps them."""
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=_TIMEOUT_S)


@contextlib.contextmanager
def full(disk: Path, room: int = 0) -> Iterator[None]:
    """Fill a disk but for some bytes."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as f:
        found = os.statvfs(disk)
        while found.f_bavail * found.f_frsize > room:
            f.write(bytes(found.f_frsize))
            found = os.statvfs(disk)
    try:
        yield
    finally:
        ballast.unlink()
