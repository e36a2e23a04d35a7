"""A disk of its own for a test, which may be full or read-only for a while."""

import contextlib
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
    """Lay a read-only view of a disk over it: what is open for writing, as a lease is, stays so."""
    assert mount("--bind", disk, disk)
    try:
        assert mount("-o", "remount,bind,ro", disk)
        yield
    finally:
        unmount(disk)
