"""What the facts of the directory mean. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.doctor.findings import Finding, by_value, fail, ok, unknown, warn
from hpc_elastic.doctor.folder import Folder
from hpc_elastic.mount import LOCAL, SANDBOX, Mount
from hpc_elastic.words import duration

SHARED_FS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs", "panfs"),
    *("orangefs", "wekafs", "9p", "cifs", "smb", "afs", "fuse.ceph", "pvfs", "vast", "ocfs2"),
    *("gfs2", "virtiofs", SANDBOX),
)
"""Beginnings of the names of file systems that several machines see."""

_LITTLE_BYTES = 10 << 30
_LITTLE_FILES = 10_000
_SKEW_S = 1.0
CHOOSE = "choose another directory: --dir here, hydra.sweep.dir=... for a run"
_TRIALS = {
    "link": (
        "hard links",
        "the agents elect their leader by link(2): one creator wins, on NFS too",
    ),
    "rename": ("renaming over a file", "checkpoints and records are committed by one rename"),
}


def judge(folder: Folder, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield what is to be said of the directory, as the login node sees it.

    Args:
        folder: Its facts.
        rendezvous: ``launcher.rendezvous`` of a run.
    """
    if "write" in folder.problems:
        yield from tried(folder)
        return
    yield _shared(folder)
    yield mounted("directory.mount", {"": folder.mount}, rendezvous)
    yield from tried(folder)
    yield _lock(folder)
    yield _space(folder)
    yield _clock(folder)


def tried(folder: Folder) -> Iterator[Finding]:
    """Yield what a host, login node or node, has found when it tried the directory out."""
    if "write" in folder.problems:
        why = "config, logs, checkpoints and the agents' agreement are written there"
        what = f"{folder.path} can not be written to: {folder.problems['write']}"
        yield fail("directory.write", what, why, CHOOSE)
        return
    for name, (what, why) in _TRIALS.items():
        yield _trial(folder, name, what, why)


def _shared(folder: Folder) -> Finding:
    check, why = "directory.shared", "all nodes of a run meet in its directory"
    if folder.fs.startswith(SHARED_FS):
        return ok(check, f"{folder.path} on {folder.fs}", why)
    found = f"{folder.path} on {folder.fs or 'an unknown file system'}"
    if folder.fs in LOCAL:
        found += ", usually of one machine"
    remedy = f"--probe finds out whether the nodes see it; if not, {CHOOSE}"
    return warn(check, found, why, remedy)


def mounted(check: str, mounts: Mapping[str, Mount], rendezvous: RendezvousSettings) -> Finding:
    """Judge how the directory is mounted, and say what that means for a run.

    Args:
        check: Name of the check.
        mounts: The mount of each node; of one, without a name, for the login node.
        rendezvous: ``launcher.rendezvous`` of a run.
    """
    why = "agents, launcher and checkpoints meet in files; a lease there shows that a leader lives"
    found = _by_node({node: _mount(m) + _meaning(m, rendezvous) for node, m in mounts.items()})
    if any({"soft", "softerr"} & m.options.keys() for m in mounts.values()):
        found += "; with soft, a slow server makes writes fail, some of them without an error"
        return warn(check, found, why, f"Admin: mount with hard. Or {CHOOSE}")
    if not all(m.is_known for m in mounts.values()):
        return unknown(check, found, why, f"if --probe finds delays, {CHOOSE}")
    return ok(check, found, why)


def _by_node(texts: Mapping[str, str]) -> str:
    """Return what holds of all nodes once, else what holds of which."""
    return next(iter(texts.values())) if len(set(texts.values())) == 1 else by_value(texts)


def _mount(mount: Mount) -> str:
    options = ", ".join(
        f"{name}={value}" if value else name for name, value in mount.telling.items()
    )
    return (mount.kind or "an unknown file system") + (f" ({options})" if options else "")


def _meaning(mount: Mount, rendezvous: RendezvousSettings) -> str:
    """Return what a mount means for a run, in figures."""
    late_s, usual_s = mount.refreshed_stale_s, rendezvous.lost_after_s
    said = "an opened file is fresh"
    if not mount.opened_is_fresh:
        unknown_one = "" if mount.is_known else " (unknown, so assumed as on NFS with nocto)"
        said = f"an opened file may be up to {duration(mount.stale_s)} old{unknown_one}"
        said += "" if late_s else ", so runs ask the server first"
    noticed = f"after {duration(usual_s)}"
    if late_s:
        noticed = f"after up to {duration(usual_s + late_s)} instead of {duration(usual_s)}"
    said += f"; the loss of the leader's node is noticed {noticed}"
    if mount.is_nfs and mount.path_stale_s:
        names = f"names may be answered from memory for up to {duration(mount.path_stale_s)}"
        said += f"; {names}, so runs list folders"
    return f": {said}"


def _trial(folder: Folder, name: str, what: str, why: str) -> Finding:
    check = f"directory.{name}"
    if name in folder.problems:
        return fail(check, f"{what}: {folder.problems[name]}", why, CHOOSE)
    return ok(check, f"{what} work" if what.endswith("s") else f"{what} works", why)


def _lock(folder: Folder) -> Finding:
    """Judge locks, which hpc_elastic does without; data sets and caches often do not."""
    check, why = "directory.lock", "hpc_elastic uses no locks, but caches of data sets do"
    if "lock" in folder.problems:
        remedy = "keep caches (HF_HOME, TORCH_HOME) on another file system, or mount with locks"
        return warn(check, f"locks (fcntl): {folder.problems['lock']}", why, remedy)
    local = {"nolock", "localflock"} & folder.options.keys()
    if folder.options.get("local_lock", "none") not in ("none", "flock"):
        local.add(f"local_lock={folder.options['local_lock']}")
    where = f", but on one node only ({', '.join(sorted(local))})" if local else ""
    return ok(check, f"locks (fcntl) work{where}; hpc_elastic uses none", why)


def _space(folder: Folder) -> Finding:
    check, why = "directory.space", "a checkpoint that does not fit is not committed"
    gib = folder.free_bytes / (1 << 30)
    files = "" if folder.free_files is None else f", {folder.free_files:,} files"
    found = f"{gib:,.1f} GiB{files} free (a quota may allow less)"
    few = folder.free_files is not None and folder.free_files < _LITTLE_FILES
    if folder.free_bytes < _LITTLE_BYTES or few:
        remedy = f"free some space (`hpc-elastic clean RUN --keep-last 1`), or {CHOOSE}"
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
