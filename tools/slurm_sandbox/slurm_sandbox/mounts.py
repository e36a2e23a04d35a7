"""Which folders a node may write to: its own view of the machine's files, and no other node's.

A node has a mount namespace. A folder turns read-only there by a read-only mount of the folder on
itself, which later look-ups of a path find; a file that was open before stays writable.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from .commands import run
from .layout import Layout
from .processes import Process

_OF_THE_KERNEL = ("dev", "proc", "run", "sys")
"""They stay writable on a machine whose disks or shared file systems do not."""


def job_folders() -> list[str]:
    """Return the top folders in which jobs find files, those of all file systems but the kernel's.

    Slurm's own files are not among them: a sandbox keeps those below ``/run``.
    """
    found = (entry for entry in Path("/").iterdir() if entry.name not in _OF_THE_KERNEL)
    return sorted(str(entry) for entry in found if entry.is_dir() and not entry.is_symlink())


def spool(layout: Layout, node: str) -> str:
    """Return the folder in which a node's slurmd keeps what it needs to start a job."""
    return str(layout.directory / "spool" / node)


def read_only(init: Process, folders: list[str]) -> list[str]:
    """Return those of the folders that the node may not write to, though the machine may."""
    view = f"/proc/{init.pid}/root"
    return [
        folder
        for folder in folders
        if not os.access(view + folder, os.W_OK) and os.access(folder, os.W_OK)
    ]


def make_read_only(init: Process, folders: list[str]) -> None:
    """Let the node see the folders, and all that is mounted below them, read-only."""
    already = read_only(init, folders)
    fresh = [folder for folder in folders if folder not in already]
    _in_node(init, [f"mount --rbind {quote(folder)} {quote(folder)}" for folder in fresh])
    _remount(init, fresh, "ro")


def make_writable(init: Process, folders: list[str]) -> None:
    """Undo `make_read_only`, also for a process whose working directory is in a folder."""
    hidden = read_only(init, folders)
    _remount(init, hidden, "rw")
    _in_node(init, [f"umount --lazy {quote(folder)}" for folder in hidden])


def _remount(init: Process, folders: list[str], access: str) -> None:
    points = {point for folder in folders for point in _mount_points(init, folder)}
    commands = [f"mount -o remount,bind,{access} {quote(point)}" for point in sorted(points)]
    _in_node(init, commands)


def _mount_points(init: Process, folder: str) -> list[str]:
    """Return where something is mounted at the folder or below it, as the node sees it."""
    lines = Path(f"/proc/{init.pid}/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if point == folder or point.startswith(f"{folder}/")]


def _in_node(init: Process, commands: list[str]) -> None:
    enter = ["nsenter", f"--target={init.pid}", "--mount", "--pid"]
    run([*enter, "sh", "-ec", "\n".join(commands)])
