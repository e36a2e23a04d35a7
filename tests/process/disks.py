"""A disk of its own for a test, which may be full or read-only for a while."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_sandbox.disk import full, mount, mount_memory, unmount

__all__ = ["full", "mounted", "read_only"]


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder that is a disk of some size, such as ``8m``; skip the test without root."""
    if not mount_memory(folder, size):
        pytest.skip("only root may mount a tmpfs")
    try:
        yield folder
    finally:
        unmount(folder)


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Lay a read-only view of a disk over it: what is open for writing, as a lease is, stays so.

    The view is made elsewhere first: the kernel makes none of a mount in which a file is open for
    writing, and processes may open one as soon as the mount is on the disk's folder.
    """
    with tempfile.TemporaryDirectory() as name:
        view = Path(name)
        assert mount("--bind", disk, view)
        try:
            assert mount("-o", "remount,bind,ro", view)
            assert mount("--bind", view, disk)  # as read-only as its source
        finally:
            unmount(view)
    try:
        yield
    finally:
        unmount(disk)
