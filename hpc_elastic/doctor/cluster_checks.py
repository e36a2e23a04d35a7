"""Checks of Slurm's configuration and of the directory, by facts of the login node; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic._util import counted, duration
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.config.schema import RendezvousSettings, RunSettings
from hpc_elastic.doctor.cluster import ClusterFacts, has_accounting, slurm_settings
from hpc_elastic.doctor.findings import Finding, Verdict, by_value, fail, judge, ok, unknown, warn
from hpc_elastic.doctor.probe_task import FolderFacts
from hpc_elastic.errors import near_miss
from hpc_elastic.shared_files import LOCAL, SANDBOX, Mount
from hpc_elastic.site import NodeState
from hpc_elastic.slurm.parsing import Partition, Qos, enforces_qos, preemptible_qos

_SHORT_KILL_WAIT_S = 10
_SHORT_TIME_S = 600.0
_MIN_JOB_AGE_S = 60
_TESTED = (22, 5)


def check_cluster(cluster: ClusterFacts, settings: RunSettings) -> Iterator[Finding]:
    """Yield the findings on Slurm for a run with these settings."""
    if cluster.config is None:
        yield fail(
            "slurm.controller",
            f"Slurm does not answer: {cluster.problems.get('config', 'no reason is known')}",
            "nothing can be submitted, and running agents get no answer",
            "check SLURM_CONF and `scontrol ping`; ask the admin whether slurmctld runs",
        )
        return
    yield from _controller(cluster)
    partition = _partition(cluster, settings)
    yield partition
    if partitions := cluster.named(slurm_settings(settings).partition):
        yield _time(partitions, settings)
        yield _size(cluster, partitions, settings)
    if partition.verdict is not Verdict.FAIL:  # sbatch would report the same
        yield _submission(cluster)
    yield _array(cluster, settings)
    yield _requeue(cluster)
    yield from _preemption(cluster, settings)
    yield _standby(cluster)
    yield _process_tracking(cluster)
    yield _accounting(cluster)
    age = cluster.number("MinJobAge")
    if age is not None and age < _MIN_JOB_AGE_S:
        yield warn(
            "slurm.memory",
            f"MinJobAge {age} s: Slurm forgets ended jobs after that time",
            "squeue has to show how a task ended, because runs do not use accounting",
            "Admin: MinJobAge=300, which is the default",
        )


def _controller(cluster: ClusterFacts) -> Iterator[Finding]:
    server, here = cluster.setting("SLURM_VERSION"), cluster.version
    found = f"Slurm {server}" + (f", commands {here}" if here and here != server else "")
    numbers = server.split(".")[:2]
    is_known = len(numbers) == 2 and all(n.isdecimal() for n in numbers)
    yield judge(
        "slurm.version", "Slurm's commands and its controller must understand each other",
        (is_known and tuple(map(int, numbers)) < _TESTED, warn,
         f"{found}, older than what is tested",
         "22.05, 24.11 and 26.05 are tested; run `hpc-elastic doctor --probe`"),
        well=found,
    )  # fmt: skip
    if "DOWN" in cluster.controllers.upper():
        remedy = "inform the admin; runs go on while one of the controllers is up"
        yield warn("slurm.controller", cluster.controllers, "one controller is left", remedy)
    else:
        yield ok("slurm.controller", cluster.controllers or "the controller answers")


def _partition(cluster: ClusterFacts, settings: RunSettings) -> Finding:
    wanted = slurm_settings(settings).partition
    names = [p.name for p in cluster.partitions]
    found, there = cluster.named(wanted), f"there are {', '.join(sorted(names)) or 'none'}"
    missing = sorted(set((wanted or "").split(",")) - {p.name for p in found} - {""})
    closed = [f"{p.name} is {p.state}" for p in found if p.state != "UP"]
    if closed and not missing:
        remedy = "wait for the admin to open it, or choose another partition"
        return fail("slurm.partition", ", ".join(closed), "no task starts in it", remedy)
    hint = near_miss(missing[0], names) if missing else ""
    chosen = ", ".join(p.name for p in found) + ("" if wanted else " (the default one)")
    nodes = ", ".join(f"{n} {state}" for state, n in sorted(cluster.nodes.items())) or "no nodes"
    return judge(
        "slurm.partition", "it decides on nodes, time, and preemption",
        (missing, fail, f"there is no partition {', '.join(missing)}",
         f"launcher.partition=...{hint}; {there}"),
        (not found, fail, "none is named, and the cluster has no default one",
         f"name one: launcher.partition=...; {there}"),
        well=f"{chosen}; {nodes}",
    )  # fmt: skip


def _time(partitions: list[Partition], settings: RunSettings) -> Finding:
    check, asked = "slurm.time", slurm_settings(settings).time
    why = "a task that is out of time saves, goes back to the queue and comes again"
    limits = [p.max_time_s for p in partitions if p.max_time_s is not None]
    longest = None if len(limits) < len(partitions) else max(limits)
    limit = "no limit" if longest is None else f"at most {duration(longest)}"
    if asked is None:
        return ok(check, f"none is asked for, so the partition's default; {limit}", why)
    wanted_s = time_limit_s(asked)
    if longest is not None and (wanted_s is None or wanted_s > longest):
        remedy = f"launcher.time={longest // 60:.0f} or less: a run outlives its tasks' time limit"
        return fail(check, f"{asked} is asked for, {limit} allowed", "no task would start", remedy)
    if wanted_s is not None and wanted_s < _SHORT_TIME_S:
        remedy = "ask for more: every task starts Python, imports torch and restores a checkpoint"
        return warn(check, f"{asked} is asked for, {limit}", why, remedy)
    return ok(check, f"{asked} is asked for, {limit}", why)


def _size(cluster: ClusterFacts, partitions: list[Partition], settings: RunSettings) -> Finding:
    most, least = settings.nodes.max, settings.nodes.min
    total = sum(p.num_nodes for p in partitions)
    dead = sum(n for state, n in cluster.nodes.items() if NodeState.parse(state).is_lost)
    found = f"{counted(total, 'node')}, {dead} of them out of service; up to {most} are asked for"
    return judge(
        "slurm.nodes", "each node of a run is a task of its own; below the minimum a run waits",
        (total and total < least, fail, found,
         f"nodes={total} or a minimum below, or a larger partition"),
        (total and total - dead < least, warn, found,
         "wait, or ask the admin; `sinfo -R` lists why they are out of service"),
        (total and total < most, warn, found,
         f"nodes={least}:{total}; further tasks would stay pending, which does no harm"),
        well=found,
    )  # fmt: skip


def _submission(cluster: ClusterFacts) -> Finding:
    return judge(
        "slurm.submission", "account, QOS, limits and resources, as sbatch checks them",
        (cluster.refusal, fail, cluster.refusal,
         "set what it names; `sacctmgr show assoc user=$USER` lists accounts and QOS"),
        well=f"sbatch --test-only accepts it: {cluster.test}",
    )  # fmt: skip


def _array(cluster: ClusterFacts, settings: RunSettings) -> Finding:
    size, most = cluster.number("MaxArraySize"), settings.nodes.max
    found = f"MaxArraySize {size}, MaxJobCount {cluster.setting('MaxJobCount') or 'unknown'}"
    return judge(
        "slurm.array", "a run is a job array, one task a node",
        (size is None, unknown, "MaxArraySize is not known", ""),
        ((size or 0) < 2, fail, f"{found}: job arrays are switched off",
         "have the admin raise MaxArraySize in slurm.conf (the default is 1001)"),
        ((size or 0) < most, warn, f"{found}, {most} nodes are asked for",
         "nothing: a run takes several arrays; sweeps submit faster with a larger one"),
        well=found,
    )  # fmt: skip


def _requeue(cluster: ClusterFacts) -> Finding:
    value = cluster.setting("JobRequeue")
    return judge(
        "slurm.requeue", "a preempted task, or one lost with its node, has to be requeued",
        (value == "0", warn, "JobRequeue=0: jobs are not requeued unless they ask",
         "the scripts ask with --requeue, which overrides it; --probe tests whether that is "
         "allowed. Admin: JobRequeue=1"),
        well=f"JobRequeue={value or 'unknown'}, and the scripts ask with --requeue",
    )  # fmt: skip


def _preemption(cluster: ClusterFacts, settings: RunSettings) -> Iterator[Finding]:
    partitions = cluster.named(slurm_settings(settings).partition)
    by_partition = cluster.setting("PreemptType") == "preempt/partition_prio"
    here = partitions[0].preempt_mode if by_partition and partitions else ""
    mode = (here or cluster.setting("PreemptMode") or "OFF").upper()
    if cluster.setting("PreemptType") in ("", "preempt/none"):
        mode = "OFF"
    yield _mode(cluster, mode)
    yield _grace(cluster, partitions, mode, slurm_settings(settings).preempt_grace_s)
    if "OFF" not in mode.split(","):
        yield _user_signal(cluster)


def _mode(cluster: ClusterFacts, mode: str) -> Finding:
    found = f"PreemptMode {mode}, {cluster.setting('PreemptType') or 'no PreemptType'}"
    modes = mode.split(",")
    return judge(
        "slurm.preemption", "it decides what happens when another job needs the node",
        ("SUSPEND" in modes, warn, f"{found}: a task is stopped on its node, as if it hung",
         "Admin: PreemptMode=REQUEUE; a suspended task holds its memory and its GPUs' too"),
        ("CANCEL" in modes, warn, f"{found}: a task that is too slow to requeue itself is lost",
         "nothing: the task requeues itself. Admin: PreemptMode=REQUEUE is safer"),
        well=found + (": tasks here are not preempted" if "OFF" in modes else ""),
    )  # fmt: skip


def _grace(
    cluster: ClusterFacts, partitions: list[Partition], mode: str, given_s: float | None
) -> Finding:
    kill_wait_s = cluster.number("KillWait") or 0
    grace_s = min((p.grace_s for p in partitions), default=0)
    total = kill_wait_s + (0 if "OFF" in mode else grace_s)
    found = f"GraceTime {duration(grace_s)}, KillWait {duration(kill_wait_s)}"
    return judge(
        "slurm.grace", "between SIGTERM and SIGKILL all ranks save, and the task requeues",
        ((given_s or 0) > total, fail,
         f"{found}; launcher.preempt_grace_s={given_s or 0:g} is more than both",
         f"launcher.preempt_grace_s={total:g} or less, or leave it out: Slurm is queried"),
        (total < _SHORT_KILL_WAIT_S, warn, found,
         "make checkpoints faster (MemoryTier: save to memory first), and save often. "
         "Admin: GraceTime of the partition, KillWait of slurm.conf (the default is 30 s)"),
        well=found,
    )  # fmt: skip


def _user_signal(cluster: ClusterFacts) -> Finding:
    """Check send_user_signal: hpc_elastic acts on the steps' SIGTERM, others need the signal.

    In SlurmctldParameters it is called preempt_send_user_signal (22.05's manual).
    """
    check = "slurm.user_signal"
    places = ("PreemptParameters", "SlurmctldParameters")
    found = ", ".join(f"{p}={cluster.setting(p)}" for p in places if cluster.setting(p))
    why = "the agents act on the SIGTERM that a preempted step gets at once"
    if "send_user_signal" in found:
        return ok(check, f"{found}: --signal counts at a preemption as well", why)
    return ok(check, "send_user_signal is not set: --signal does not count at a preemption", why)


def _standby(cluster: ClusterFacts) -> Finding:
    """Report where a run may use nodes that other jobs leave idle, and gives them back."""
    check = "slurm.standby"
    why = "a preemptible run starts in gaps that are too short for other jobs"
    if "qos" in cluster.problems:
        return unknown(check, f"sacctmgr does not answer: {cluster.problems['qos']}", why)
    config = cluster.config or {}
    found = [f"QOS {_describe_qos(qos, cluster)}" for qos in preemptible_qos(cluster.qos, config)]
    if cluster.setting("PreemptType") == "preempt/partition_prio":
        modes = {p.name: p.preempt_mode.upper().split(",") for p in cluster.partitions}
        if names := [name for name, mode in modes.items() if "REQUEUE" in mode]:
            found.append(f"partitions whose preempted tasks are requeued: {', '.join(names)}")
    nothing = "no preemptible QOS or partition is known"
    nothing += " (docs/howto/cluster-admins.md has the lines)"
    return ok(check, "; ".join(found) or nothing, why)


def _describe_qos(qos: Qos, cluster: ClusterFacts) -> str:
    """Return a QOS in words: ``standby (NoReserve, REQUEUE, GraceTime 2 min)``."""
    config = cluster.config or {}
    flags = ["NoReserve"] if "NoReserve" in qos.flags else []
    words = ", ".join([*flags, qos.mode(config), f"GraceTime {duration(qos.grace_s)}"])
    is_refused = enforces_qos(config) and qos.name not in cluster.offered_qos
    return f"{qos.name} ({words})" + (", not offered to you" if is_refused else "")


def _process_tracking(cluster: ClusterFacts) -> Finding:
    value = cluster.setting("ProctrackType")
    return judge(
        "slurm.processes", "workers have sessions of their own, and must end with the task",
        (value == "proctrack/pgid", fail,
         f"{value}: Slurm loses processes that change their group",
         "Admin: ProctrackType=proctrack/cgroup"),
        (value == "proctrack/linuxproc", warn, f"{value}: processes are found by their parents",
         "nothing, if --probe finds that processes end; Admin: proctrack/cgroup is safer"),
        well=value or "ProctrackType is not known",
    )  # fmt: skip


def _accounting(cluster: ClusterFacts) -> Finding:
    kind, there = cluster.setting("AccountingStorageType"), has_accounting(cluster.config or {})
    return judge(
        "slurm.accounting",
        "hpc_elastic does not need it: squeue and scontrol answer all that a run needs",
        (there and cluster.accounting is not None, warn,
         f"{kind}, but sacct fails: {cluster.accounting}",
         "nothing for runs; inform the admin that slurmdbd does not answer"),
        well=f"{kind}, and sacct answers" if there else "there is none (sacct does not answer)",
    )  # fmt: skip


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
        "agents elect their leader by link(2): exactly one creator wins, also on NFS",
    ),
    "rename": ("renaming over a file", "checkpoints and records are committed by one rename"),
}


def check_folder(folder: FolderFacts, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield the findings on the directory, as the login node sees it."""
    if "write" in folder.problems:
        yield from check_operations(folder)
        return
    yield _shared(folder)
    yield check_mounts("directory.mount", {"": folder.mount}, rendezvous)
    yield from check_operations(folder)
    yield _lock(folder)
    yield _space(folder)
    yield _clock(folder)


def check_operations(folder: FolderFacts) -> Iterator[Finding]:
    """Yield the findings of a host that has tried file operations in the directory."""
    if "write" in folder.problems:
        why = "config, logs, checkpoints and the agents' agreement are written there"
        what = f"{folder.path} cannot be written to: {folder.problems['write']}"
        yield fail("directory.write", what, why, CHOOSE)
        return
    for name, (what, why) in _TRIALS.items():
        if name in folder.problems:
            yield fail(f"directory.{name}", f"{what}: {folder.problems[name]}", why, CHOOSE)
        else:
            works = "work" if what.endswith("s") else "works"
            yield ok(f"directory.{name}", f"{what} {works}", why)


def _shared(folder: FolderFacts) -> Finding:
    local = ", usually of one machine" if folder.fs in LOCAL else ""
    found = f"{folder.path} on {folder.fs or 'an unknown file system'}"
    return judge(
        "directory.shared", "all nodes of a run meet in its directory",
        (not folder.fs.startswith(SHARED_FS), warn, found + local,
         f"--probe tests whether the nodes see it; if not, {CHOOSE}"),
        well=found,
    )  # fmt: skip


def check_mounts(
    check: str, mounts: Mapping[str, Mount], rendezvous: RendezvousSettings
) -> Finding:
    """Check how the directory is mounted, by node; the login node's has an empty name."""
    texts = {node: _describe_mount(m, rendezvous) for node, m in mounts.items()}
    found = by_value(texts) if len({*texts.values()}) > 1 else next(iter(texts.values()))
    return judge(
        check,
        "agents, launcher and checkpoints meet in files; a lease there shows that a leader lives",
        (any({"soft", "softerr"} & m.options.keys() for m in mounts.values()), warn,
         f"{found}; with soft, a slow server makes writes fail, some of them without an error",
         f"Admin: mount with hard. Or {CHOOSE}"),
        (not all(m.is_known for m in mounts.values()), unknown, found,
         f"if --probe finds delays, {CHOOSE}"),
        well=found,
    )  # fmt: skip


def _describe_mount(mount: Mount, rendezvous: RendezvousSettings) -> str:
    """Return how the directory is mounted, and what that means for a run, in numbers."""
    options = ", ".join(
        f"{name}={value}" if value else name for name, value in mount.telling.items()
    )
    kind = (mount.kind or "an unknown file system") + (f" ({options})" if options else "")
    late_s, usual_s = mount.refreshed_stale_s, rendezvous.heartbeat_timeout_s
    meaning = "an opened file is fresh"
    if not mount.opened_is_fresh:
        unknown_one = "" if mount.is_known else " (unknown, so assumed as on NFS with nocto)"
        meaning = f"an opened file may be up to {duration(mount.stale_s)} old{unknown_one}"
        meaning += "" if late_s else ", so runs query the server first"
    noticed = f"after {duration(usual_s)}"
    if late_s:
        noticed = f"after up to {duration(usual_s + late_s)} instead of {duration(usual_s)}"
    meaning += f"; the loss of the leader's node is noticed {noticed}"
    if mount.is_nfs and mount.path_stale_s:
        names = f"names may be answered from memory for up to {duration(mount.path_stale_s)}"
        meaning += f"; {names}, so runs list folders"
    return f"{kind}: {meaning}"


def _lock(folder: FolderFacts) -> Finding:
    """Check locks; hpc_elastic uses none, but data sets and caches often do."""
    local = {"nolock", "localflock"} & folder.options.keys()
    if folder.options.get("local_lock", "none") not in ("none", "flock"):
        local.add(f"local_lock={folder.options['local_lock']}")
    where = f", but on one node only ({', '.join(sorted(local))})" if local else ""
    return judge(
        "directory.lock", "hpc_elastic uses no locks, but caches of data sets do",
        ("lock" in folder.problems, warn, f"locks (fcntl): {folder.problems.get('lock')}",
         "keep caches (HF_HOME, TORCH_HOME) on another file system, or mount with locks"),
        well=f"locks (fcntl) work{where}; hpc_elastic uses none",
    )  # fmt: skip


def _space(folder: FolderFacts) -> Finding:
    gib, num_files = folder.free_bytes / (1 << 30), folder.free_files
    files = "" if num_files is None else f", {num_files:,} files"
    found = f"{gib:,.1f} GiB{files} free (a quota may allow less)"
    few = num_files is not None and num_files < _LITTLE_FILES
    return judge(
        "directory.space", "a checkpoint that does not fit is not committed",
        (few or folder.free_bytes < _LITTLE_BYTES, warn, found,
         f"free some space (`hpc-elastic checkpoints prune RUN --keep-last 1`), or {CHOOSE}"),
        well=found,
    )  # fmt: skip


def _clock(folder: FolderFacts) -> Finding:
    offset_s = folder.clock_offset_s or 0.0
    ahead = "ahead of" if offset_s > 0 else "behind"
    return judge(
        "directory.clock", "files are dated by the file system's clock",
        (folder.clock_offset_s is None, unknown, "the file system's clock is not known", ""),
        (abs(offset_s) > _SKEW_S, warn,
         f"the file system's clock is {duration(abs(offset_s))} {ahead} ours",
         "have the admin keep the clocks of the file servers and of this host by NTP"),
        well="the file system's clock agrees with ours",
    )  # fmt: skip
