"""A disk of its own for a test, a tmpfs, which may be full or read-only for a while."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from group import eventually

BLOCK_BYTES = 4096


def mount(*arguments: str | Path) -> bool:
    """Mount a file system; tell whether it worked."""
    return subprocess.run(["mount", *arguments], capture_output=True, timeout=20).returncode == 0


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder that is a disk of some size, such as ``8m``; skip the test without root."""
    folder.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder):
        pytest.skip("only root may mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=20)


@contextlib.contextmanager
def full(disk: Path, room: int = 0) -> Iterator[None]:
    """Fill a disk but for some bytes."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as f:
        while os.statvfs(disk).f_bavail * BLOCK_BYTES > room:
            f.write(bytes(BLOCK_BYTES))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Remount a disk, which works only between two writes of others."""
    eventually(lambda: mount("-o", "remount,ro", disk))
    try:
        yield
    finally:
        assert mount("-o", "remount,rw", disk)
