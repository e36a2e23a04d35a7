"""The sandbox's ordinary user, whom only the sandbox's own mount namespaces know.

There he stands in passwd and group, and there he reaches folders that he must: a Python below
root's home, say, of which everything else stays closed to him.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from .layout import Layout

USER = "hxsuser"
USER_ID = 61234  # of the user and of his group; nobody else's in Debian's scheme

_LOGIN = """#!/bin/sh
# login.sh COMMAND...: run COMMAND as the sandbox's ordinary user.
set -e
{mounts}
export HOME={home} USER={user} LOGNAME={user}
cd "$(pwd)"
exec setpriv --reuid={user} --regid={user} --init-groups "$@"
"""


def login_script(layout: Layout, mounts: str) -> str:
    """Return the text of login.sh, which runs a command in the user's name; pure."""
    home = shlex.quote(str(layout.home))
    return _LOGIN.format(mounts=mounts, home=home, user=USER)


def mount_lines(layout: Layout, opened: Iterable[str]) -> str:
    """Return the lines of shell that make the user known, and folders open to him; pure.

    Args:
        layout: Where the sandbox is.
        opened: The lines of `open_lines`.
    """
    etc = shlex.quote(str(layout.slurm_conf.parent))
    known = [f"mount --bind {etc}/{name} /etc/{name}" for name in ("passwd", "group")]
    return "\n".join([*known, *opened])


def open_lines(
    layout: Layout, paths: Iterable[str], is_open: Callable[[Path], bool] | None = None
) -> list[str]:
    """Return the lines that let everybody reach some folders, in one mount namespace.

    The folder above that is closed is hidden behind an empty one, in which they are put back.

    Args:
        layout: Where the sandbox is.
        paths: The folders; those that can be reached anyway need no line.
        is_open: Whether everybody may pass through a folder; looks at its mode by default.
    """
    passes = is_open or _is_open
    wanted: dict[Path, list[Path]] = {}
    for path in map(Path, paths):
        above = [folder for folder in reversed(path.parents) if not passes(folder)]
        if above:
            wanted.setdefault(above[0], []).append(path)
    lines: list[str] = []
    for number, (closed, below) in enumerate(wanted.items()):
        behind = layout.directory / "open" / str(number)
        lines += _shell("mkdir -p", behind) + _shell("mount --bind", closed, behind)
        lines += _shell("mount -t tmpfs -o mode=755 tmpfs", closed)
        for path in dict.fromkeys(below):
            lines += _shell("mkdir -p", path)
            lines += _shell("mount --bind", behind / path.relative_to(closed), path)
    return lines


def _shell(command: str, *paths: Path) -> list[str]:
    return [" ".join([command, *(shlex.quote(str(path)) for path in paths)])]


def _is_open(folder: Path) -> bool:
    return bool(folder.stat().st_mode & 0o001)


def with_user(machine_text: str, layout: Layout) -> str:
    """Return the text of passwd that the sandbox sees: the machine's users and one more; pure.

    Args:
        machine_text: The machine's own file.
        layout: Where the user's home is.
    """
    entry = f"{USER}:x:{USER_ID}:{USER_ID}:an ordinary user:{layout.home}:/bin/bash"
    return _with_line(machine_text, entry)


def with_group(machine_text: str) -> str:
    """Return the text of group that the sandbox sees: the machine's groups and one more; pure."""
    return _with_line(machine_text, f"{USER}:x:{USER_ID}:")


def _with_line(text: str, line: str) -> str:
    return "\n".join([*text.splitlines(), line, ""])
