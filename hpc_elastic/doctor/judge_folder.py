"""What the facts of the directory mean. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_elastic.doctor.findings import Finding, fail, ok, unknown, warn
from hpc_elastic.doctor.folder import Folder
from hpc_elastic.mount import LOCAL
from hpc_elastic.words import duration

SHARED_FS = (
    *(
        "nfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
        "fuse.glusterfs",
        "panfs",
        "orangefs",
    ),
    *(
        "wekafs",
        "9p",
        "cifs",
        "smb",
        "afs",
        "fuse.ceph",
        "pvfs",
        "vast",
        "ocfs2",
        "gfs2",
        "virtiofs",
    ),
)
"""Beginnings of the names of file systems that several machines see."""

_LITTLE_BYTES = 10 << 30
_LITTLE_FILES = 10_000
_SKEW_S = 1.0
_CHOOSE = "choose another directory: --dir here, hydra.sweep.dir=... for a run"
_TRIALS = {
    "link": (
        "hard links",
        "the agents elect their leader by link(2): one creator wins, on NFS too",
    ),
    "rename": ("renaming over a file", "checkpoints and records are committed by one rename"),
}


def judge(folder: Folder) -> Iterator[Finding]:
    """Yield what is to be said of the directory, as the login node sees it."""
    if "write" in folder.problems:
        why = "config, logs, checkpoints and the agents' agreement are written there"
        what = f"{folder.path} can not be written to: {folder.problems['write']}"
        yield fail("directory.write", what, why, _CHOOSE)
        return
    yield _shared(folder)
    for name, (what, why) in _TRIALS.items():
        yield _trial(folder, name, what, why)
    yield _lock(folder)
    yield _space(folder)
    yield _clock(folder)


def _shared(folder: Folder) -> Finding:
    check, why = "directory.shared", "all nodes of a run meet in its directory"
    if folder.fs.startswith(SHARED_FS):
        return ok(check, f"{folder.path} on {folder.fs}", why)
    found = f"{folder.path} on {folder.fs or 'an unknown file system'}"
    if folder.fs in LOCAL:
        found += ", usually of one machine"
    remedy = f"--probe finds out whether the nodes see it; if not, {_CHOOSE}"
    return warn(check, found, why, remedy)


def _trial(folder: Folder, name: str, what: str, why: str) -> Finding:
    check = f"directory.{name}"
    if name in folder.problems:
        return fail(check, f"{what}: {folder.problems[name]}", why, _CHOOSE)
    return ok(check, f"{what} work" if what.endswith("s") else f"{what} works", why)


def _lock(folder: Folder) -> Finding:
    """Judge locks, which hpc_elastic does without; data sets and caches often do not."""
    check, why = "directory.lock", "hpc_elastic needs no locks, but caches of data sets use them"
    if "lock" in folder.problems:
        remedy = "keep caches (HF_HOME, TORCH_HOME) on another file system, or mount with locks"
        return warn(check, f"locks (fcntl): {folder.problems['lock']}", why, remedy)
    return ok(check, "locks (fcntl) work", why)


def _space(folder: Folder) -> Finding:
    check, why = "directory.space", "a checkpoint that does not fit is not committed"
    gib = folder.free_bytes / (1 << 30)
    files = "" if folder.free_files is None else f", {folder.free_files:,} files"
    found = f"{gib:,.1f} GiB{files} free (a quota may allow less)"
    few = folder.free_files is not None and folder.free_files < _LITTLE_FILES
    if folder.free_bytes < _LITTLE_BYTES or few:
        remedy = f"free some space (`hpc-elastic clean RUN --keep-last 1`), or {_CHOOSE}"
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _clock(folder: Folder) -> Finding:
    check, why = "directory.clock", "files are dated by the file system's clock"
    if folder.clock_offset_s is None:
        return unknown(check, "the file system's clock is not known", why)
    if abs(folder.clock_offset_s) > _SKEW_S:
        ahead = "ahead of" if folder.clock_offset_s > 0 else "behind"
        found = f"the file system's clock is {duration(abs(folder.clock_offset_s))} {ahead} ours"
        remedy = "have the admin keep the clocks of the file servers and of this host by NTP"
        return warn(check, found, why, remedy)
    return ok(check, "the file system's clock agrees with ours", why)
