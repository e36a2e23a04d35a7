"""What the mount under a folder says: its file system, and how old an answer may be there.

An NFS client answers from its caches for as long as its mount options allow. With close-to-open
consistency, the default, opening a file or a folder asks the server, so what is opened anew is as
the server has it. With ``nocto`` it may be as old as attributes may be: 60 s by default. Other file
systems are coherent by locks or tokens of their servers, or name a time in their manuals.

The kernel shows the options that differ from the defaults, so the defaults of nfs(5) are here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOCAL = frozenset(
    [
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "squashfs"),
        *("vfat", "f2fs", "bcachefs", "jfs", "reiserfs", "devtmpfs"),
    ]
)
"""File systems that belong to one machine, unless it exports them."""

SANDBOX = "fuse.hpc_elastic_nfs"
"""The sandbox's model of an NFS client, which shows its options in the place of its source."""

_NFS = frozenset(["nfs", "nfs4", SANDBOX])
_NFS_DEFAULTS_S = {"acregmin": 3.0, "acregmax": 60.0, "acdirmin": 30.0, "acdirmax": 60.0}
_BOUNDS_S = {
    **dict.fromkeys(("lustre", "gpfs", "ceph", "fuse.ceph", "fuse.ceph-fuse"), 0.0),
    **dict.fromkeys(("ocfs2", "gfs2"), 0.0),
    **dict.fromkeys(("beegfs", "fuse.glusterfs", "glusterfs", "virtiofs"), 1.0),
}
"""Of file systems that are not NFS: how old an answer may be with their default settings."""
_UNKNOWN_S = 60.0
"""Of all others, and of a mount that is not found: as on an NFS without close-to-open."""
_TELLING = (
    *("vers", "cto", "nocto", "noac", "acregmin", "acregmax", "acdirmin", "acdirmax"),
    *("lookupcache", "hard", "soft", "softerr", "timeo", "retrans", "sync"),
    *("local_lock", "nolock", "flock", "localflock", "noflock"),
)


@dataclass(frozen=True)
class Mount:
    """The mount that a path lies on.

    Attributes:
        kind: Type of the file system, such as ``nfs4``, as the kernel names it; empty if unknown.
        source: What is mounted, such as ``server:/export``.
        options: The options of the mount and of its file system, as far as the kernel shows them,
            by name; empty values where an option has none.
    """

    kind: str = ""
    source: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Mount:
        """Return the mount that a path lies on, or that its nearest folder that is there lies on.

        Nothing is raised: a mount of unknown kind is the answer where the kernel has none.
        """
        for place in (path, *path.absolute().parents):
            with contextlib.suppress(OSError, ValueError):
                number = _mount_id(place)
                return find(Path("/proc/self/mountinfo").read_text(errors="replace"), number)
        return cls()

    @property
    def is_local(self) -> bool:
        """Whether its operations ask no server."""
        return self.kind in LOCAL

    @property
    def is_nfs(self) -> bool:
        """Whether the options of nfs(5) hold for it."""
        return self.kind in _NFS

    @property
    def changes_by_time(self) -> bool:
        """Whether a change of a folder is known by its time alone, which has coarse ticks."""
        return self.kind == "nfs" and self.options.get("vers", "").startswith("3")

    @property
    def is_known(self) -> bool:
        """Whether it is known how old an answer may be on such a file system."""
        return self.is_nfs or self.is_local or self.kind in _BOUNDS_S

    @property
    def telling(self) -> dict[str, str]:
        """The options that matter to a run: how names, times, writes and locks behave."""
        return {name: self.options[name] for name in _TELLING if name in self.options}

    @property
    def opened_is_fresh(self) -> bool:
        """Whether a file or folder that is opened anew is as its server has it."""
        return self.stale_s == 0

    @property
    def stale_s(self) -> float:
        """How old the content of a file or folder may be that is opened anew, in seconds.

        An upper bound: what another node had written and closed so long before is seen. 0 where
        each opening asks the server.
        """
        if not self.is_nfs:
            return self._bound_s()
        if "nocto" not in self.options:
            return 0.0
        return max(self._nfs_s("acregmax"), self._nfs_s("acdirmax"))

    @property
    def refreshed_stale_s(self) -> float:
        """The same of one that is opened after `files.refresh`, which an NFS client obeys."""
        return 0.0 if self.is_nfs else self.stale_s

    @property
    def path_stale_s(self) -> float:
        """How long a path may be answered from memory, its absence too, if no folder is opened.

        An upper bound, in seconds: for the look-ups of a name, as by ``stat`` or ``exists``.
        """
        if not self.is_nfs:
            return self._bound_s()
        return 0.0 if self.options.get("lookupcache") == "none" else self._nfs_s("acdirmax")

    @property
    def keeps_writes(self) -> bool:
        """Whether a node may keep what it writes into an open file, unseen by others, for long."""
        return self.is_nfs or self._bound_s() > 0

    def _bound_s(self) -> float:
        return 0.0 if self.is_local else _BOUNDS_S.get(self.kind, _UNKNOWN_S)

    def _nfs_s(self, name: str) -> float:
        """Return the value of one of the four times for which NFS keeps attributes."""
        if "noac" in self.options:
            return 0.0
        return float(self.options.get(name, _NFS_DEFAULTS_S[name]))


def find(mountinfo: str, mount_id: int) -> Mount:
    """Return a mount of ``/proc/self/mountinfo`` by its number; of unknown kind if it has none.

    The kernel says for every open file which mount it is on, so bind mounts, mounts in mounts and
    mounts that others hide need no rules of ours.
    """
    for line in mountinfo.splitlines():
        words = line.split(" ")
        if words[0] != str(mount_id):
            continue
        kind, source, shown = (*words[words.index("-") + 1 :], "", "", "")[:3]
        given = [words[5], shown, source if kind == SANDBOX else ""]
        pairs = (option.partition("=") for part in given for option in part.split(",") if option)
        options = {name: _unescape(value) for name, _, value in pairs}
        return Mount(_unescape(kind), _unescape(source), options)
    return Mount()


def _mount_id(path: Path) -> int:
    """Return the number of the mount that a path lies on.

    Raises:
        OSError: the path cannot be looked up.
        ValueError: the kernel does not say.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return int(dict(line.split(":", 1) for line in lines)["mnt_id"])


def _unescape(text: str) -> str:
    r"""Return a word of the kernel's tables as it was: ``\040`` is a blank."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
