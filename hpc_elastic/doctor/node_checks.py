"""Checks of hosts and the directory, and of what the probe has shown; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic._util import counted, duration, short
from hpc_elastic.config.schema import RendezvousSettings, SlurmSettings
from hpc_elastic.doctor.findings import Finding, Verdict, by_value, fail, judge, ok, unknown, warn
from hpc_elastic.doctor.probe_files import AGENT, WORKER
from hpc_elastic.doctor.probe_job import Evidence, NodeEnding
from hpc_elastic.doctor.probe_network import CHANGES, PATH
from hpc_elastic.doctor.probe_task import MUST_AGREE, FolderFacts, HostFacts, NodeFacts
from hpc_elastic.launcher.batch_script import gpus_asked
from hpc_elastic.shared_files import LOCAL, SANDBOX, Mount
from hpc_elastic.slurm import job_state
from hpc_elastic.slurm.nodelist import compress

_LIMITS = {
    "nofile": (
        4096, "open files: the leading agent holds a connection for each node, loaders several "
        "each", "raise the hard limit (limits.conf; PropagateResourceLimits in slurm.conf)",
    ),
    "nproc": (
        4096, "processes and threads: each worker has many, and as many loaders as it is set to",
        "raise it (`ulimit -u`, limits.conf), or use fewer loaders",
    ),
    "memlock": (
        1 << 30, "locked memory: NCCL over InfiniBand fails without it; TCP does not need it",
        "have the admin set it to unlimited (LimitMEMLOCK of slurmd; limits.conf)",
    ),
}  # fmt: skip
"""Name of a limit -> the smallest sufficient value, why it matters, and what to do."""


def check_host(host: HostFacts, *, own_python: bool = True) -> Iterator[Finding]:
    """Yield the findings on the login node; ``own_python``: the nodes use this interpreter."""
    missing = ", ".join(host.missing_commands)
    yield judge(
        "host.commands", "runs are submitted, watched and cancelled by them" if missing else "",
        (missing, fail, f"not on PATH: {missing}",
         "run the doctor on a login node, or `module load slurm`"),
        well="Slurm's commands are installed",
    )  # fmt: skip
    if own_python:
        found = f"{host.python} on {host.python_fs or 'an unknown file system'}"
        yield judge(
            "host.python", "the nodes start this very interpreter, by its path",
            (host.python_fs in LOCAL, warn, f"{found}, which is this machine's own",
             "harmless if the nodes have the same Python at the same path (--probe tests it); else "
             "create the environment on the shared file system, or set launcher.python"),
            well=found,
        )  # fmt: skip
    yield from check_process_environment("host", [host])


def check_process_environment(group: str, hosts: list[HostFacts]) -> Iterator[Finding]:
    """Yield one finding for each kind of limit, and one on the clocks, over all hosts."""
    matters = group != "host" and any(h.has_infiniband for h in hosts)
    for name, (least, why, remedy) in _LIMITS.items():
        is_hard = name == "nofile"  # the agent raises the soft one
        values = {h.name: h.limits.get(name, (None, None))[is_hard] for h in hosts}
        known = {host: n for host, n in values.items() if n is not None}
        low = by_value({host: _size(name, n) for host, n in known.items() if n < least})
        what = f"{'hard ' if is_hard else ''}limit of {name}"
        lowest = _size(name, min(known.values(), default=None))
        is_harmless = low and name == "memlock" and not matters
        harmless = f"{low}; it matters only on nodes with InfiniBand"
        yield judge(
            f"{group}.{name}", why,
            (low and not is_harmless, warn, f"{what}: {low}", remedy),
            well=f"{what}: {harmless if is_harmless else lowest}",
        )  # fmt: skip
    spaces = {h.name: h.limits.get("as", (None, None))[0] for h in hosts}
    if sizes := by_value({host: _size("as", n) for host, n in spaces.items() if n is not None}):
        why = "CUDA and torch reserve far more addresses than they use memory"
        remedy = "`ulimit -v unlimited` in launcher.setup; limits.conf"
        yield warn(f"{group}.address_space", f"limited to {sizes}", why, remedy)
    hard = {h.name: f"{h.limits['cpu'][1]} s" for h in hosts if h.limits.get("cpu", (0, None))[1]}
    yield judge(
        f"{group}.cpu_time",
        "a process that has used it is ended by SIGXCPU; Slurm hands the submitting shell's on",
        (hard, warn, f"hard limit of CPU time: {by_value(hard)}",
         "have the admin raise the hard limit (limits.conf); submit from another node"),
        well="no hard limit of CPU time; the agent raises the soft one",
    )  # fmt: skip
    adrift = compress(sorted(h.name for h in hosts if h.clock_kept is False))
    yield judge(
        f"{group}.clock",
        "logs and events of the nodes are ordered by their clocks; elections are not",
        (adrift, warn, f"no time service keeps the clock of {adrift}",
         "have the admin run chrony or systemd-timesyncd (in a container: on its host)"),
        (any(h.clock_kept is None for h in hosts), unknown,
         "the kernel does not report whether the clock is kept", ""),
        well="a time service keeps the clock",
    )  # fmt: skip


def _size(name: str, number: int | None) -> str:
    if number is None:
        return "unlimited"
    return f"{number / (1 << 20):,.0f} MiB" if name in ("memlock", "as") else f"{number:,}"


SHARED_FS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs", "panfs"),
    *("orangefs", "wekafs", "9p", "cifs", "smb", "afs", "fuse.ceph", "pvfs", "vast", "ocfs2"),
    *("gfs2", "virtiofs", SANDBOX),
)
"""Beginnings of the names of file systems that several machines see."""

_LITTLE_BYTES = 10 << 30
_LITTLE_FILES = 10_000
_SKEW_S = 1.0
_CHOOSE = "choose another directory: --dir here, hydra.sweep.dir=... for a run"
_TRIALS = {
    "link": (
        "hard links", "work",
        "agents elect their leader by link(2): exactly one creator wins, also on NFS",
    ),
    "rename": (
        "renaming over a file", "works", "checkpoints and records are committed by one rename",
    ),
}  # fmt: skip


def check_folder(folder: FolderFacts, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield the findings on the directory, as the login node sees it."""
    if "write" in folder.problems:
        yield from _check_operations(folder)
        return
    local = ", usually of one machine" if folder.fs in LOCAL else ""
    found = f"{folder.path} on {folder.fs or 'an unknown file system'}"
    yield judge(
        "directory.shared", "all nodes of a run meet in its directory",
        (not folder.fs.startswith(SHARED_FS), warn, found + local,
         f"--probe tests whether the nodes see it; if not, {_CHOOSE}"),
        well=found,
    )  # fmt: skip
    yield _check_mounts("directory.mount", {"": folder.mount}, rendezvous)
    yield from _check_operations(folder)
    local_locks = {"nolock", "localflock"} & folder.options.keys()
    if folder.options.get("local_lock", "none") not in ("none", "flock"):
        local_locks.add(f"local_lock={folder.options['local_lock']}")
    where = f", but on one node only ({', '.join(sorted(local_locks))})" if local_locks else ""
    yield judge(
        "directory.lock", "hpc_elastic uses no locks, but caches of data sets do",
        ("lock" in folder.problems, warn, f"locks (fcntl): {folder.problems.get('lock')}",
         "keep caches (HF_HOME, TORCH_HOME) on another file system, or mount with locks"),
        well=f"locks (fcntl) work{where}; hpc_elastic uses none",
    )  # fmt: skip
    gib, num_files = folder.free_bytes / (1 << 30), folder.free_files
    files = "" if num_files is None else f", {num_files:,} files"
    found = f"{gib:,.1f} GiB{files} free (a quota may allow less)"
    few = num_files is not None and num_files < _LITTLE_FILES
    yield judge(
        "directory.space", "a checkpoint that does not fit is not committed",
        (few or folder.free_bytes < _LITTLE_BYTES, warn, found,
         f"free some space (`hpc-elastic checkpoints prune RUN --keep-last 1`), or {_CHOOSE}"),
        well=found,
    )  # fmt: skip
    offset_s = folder.clock_offset_s or 0.0
    ahead = "ahead of" if offset_s > 0 else "behind"
    yield judge(
        "directory.clock", "files are dated by the file system's clock",
        (folder.clock_offset_s is None, unknown, "the file system's clock is not known", ""),
        (abs(offset_s) > _SKEW_S, warn,
         f"the file system's clock is {duration(abs(offset_s))} {ahead} ours",
         "have the admin keep the clocks of the file servers and of this host by NTP"),
        well="the file system's clock agrees with ours",
    )  # fmt: skip


def _check_operations(folder: FolderFacts) -> Iterator[Finding]:
    """Yield the findings of a host that has tried file operations in the directory."""
    if "write" in folder.problems:
        why = "config, logs, checkpoints and the agents' agreement are written there"
        what = f"{folder.path} cannot be written to: {folder.problems['write']}"
        yield fail("directory.write", what, why, _CHOOSE)
        return
    for name, (what, works, why) in _TRIALS.items():
        yield judge(
            f"directory.{name}", why,
            (name in folder.problems, fail, f"{what}: {folder.problems.get(name)}", _CHOOSE),
            well=f"{what} {works}",
        )  # fmt: skip


def _check_mounts(
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
         f"Admin: mount with hard. Or {_CHOOSE}"),
        (not all(m.is_known for m in mounts.values()), unknown, found,
         f"if --probe finds delays, {_CHOOSE}"),
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


_SLOW_IMPORT_S = 30.0
_CPUS_PER_GPU = 4
"""A worker and its loaders; fewer leave the GPU waiting."""
_MOST_SILENT = 3
_UNMET = (
    "set launcher.gpus_per_node to what the partition's nodes have (`sinfo -o '%P %G'`); if that "
    "is wrong, Admin: GresTypes in slurm.conf, and the nodes' lines in gres.conf"
)

_MAY_PASS: tuple[tuple[str, str], ...] = (  # others: `slurm.job_state`
    ("Resources", "all nodes are busy: wait longer (--wait-s), or try another partition"),
    ("Priority", "others are before you: wait longer (--wait-s), or try another partition"),
    ("ReqNodeNotAvail", "nodes are reserved or out of service (`sinfo -R`, `scontrol show res`)"),
    ("DOWN", "nodes are out of service: `sinfo -R` lists why"),
    ("QOS", "a limit of the QOS: another launcher.qos, or wait (`sacctmgr show qos`)"),
    ("Assoc", "a limit of your account: another launcher.account, or wait"),
    ("Account", "the account may not run here: launcher.account"),
    ("Held", "`scontrol release`, or ask the admin who holds it"),
    ("Licenses", "licences are in use: wait"),
    ("Reservation", "the reservation has not begun, or is not yours"),
    ("", "see squeue(1), JOB REASON CODES; wait longer with --wait-s"),
)


def check_nodes(
    evidence: Evidence, asked: SlurmSettings, own: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Yield the findings on the nodes; ``own`` are the versions on the login node."""
    yield from _start(evidence)
    if not evidence.reports:
        return
    facts, in_container = evidence.facts, asked.container.runtime is not None
    others = "; ".join(
        f"{name} {f.versions.get(name) or 'missing'} on {f.name}, {own.get(name)} here"
        for f in facts
        for name in MUST_AGREE
        if f.versions.get(name) != own.get(name)
    )
    yield judge(
        "nodes.versions", "all processes of a run have to run the same code",
        (others, fail, others,
         "one environment on the shared file system; launcher.python, launcher.setup"),
        well=f"the same everywhere: {', '.join(f'{name} {own.get(name)}' for name in MUST_AGREE)}",
    )  # fmt: skip
    tried = [(r.facts.name, r.allreduce) for r in evidence.reports.values()]  # a node has several
    times = [t.import_s for _, t in tried if t and t.import_s is not None]
    failed = {
        name: (t and t.problems.get("torch")) or "?"
        for name, t in tried
        if t is None or t.import_s is None
    }
    broken = "; ".join(f"{name}: {why}" for name, why in failed.items())
    slowest_s = max(times, default=0.0)
    found = f"imported within {slowest_s:.1f} s on every node"
    yield judge(
        "nodes.torch", "each worker imports torch when it starts",
        (broken, fail, f"torch could not be imported or used: {broken}",
         "try `srun -p PARTITION python -c 'import torch'`; see launcher.setup"),
        (slowest_s > _SLOW_IMPORT_S, warn, found,
         "keep launcher.agent.warm_workers; or install on a faster file system or in an image"),
        well=found,
    )  # fmt: skip
    why = "agents query squeue, and requeue themselves by scontrol"
    lost = "otherwise rounds close by time, and Slurm has to requeue a preempted task"
    problems = "; ".join(
        f"{command} on {f.name}: {problem}"
        for f in facts
        for command, problem in f.slurm.items()
        if problem is not None
    )
    mounts = "mount Slurm's commands, /etc/slurm, and munge's socket (/run/munge) into the "
    mounts += "container: launcher.container.mounts"
    yield judge(
        "nodes.slurm", f"{why}; {lost}" if problems else why,
        (problems, warn, problems, mounts if in_container else _for_admin(problems)),
        well="squeue and scontrol answer "
        f"{'inside of the container' if in_container else 'on the nodes'}",
    )  # fmt: skip
    if evidence.outside:
        outside = "; ".join(f"{name}: {what}" for name, what in evidence.outside.items() if what)
        yield judge(
            "nodes.slurm_outside", "what also fails here is not caused by the container",
            (outside, warn, outside, _for_admin(outside)),
            well="squeue and scontrol answer outside of the container",
        )  # fmt: skip
    yield _gpus(evidence, facts, asked)
    shares = {}
    for f in facts:
        usable, given = f.host.cpus, f.cpus_given
        cpus = f"{usable} CPUs usable of {given} given"
        cpus = counted(usable, "CPU") if usable == given else cpus
        shares[f.name] = f"{cpus}, {f.host.memory_bytes >> 30} GiB in the machine,"
    sizes = by_value(shares)
    yield judge(
        "nodes.cpus", "workers and their loaders share them",
        (any(f.host.cpus == 1 and f.cpus_given > 1 for f in facts), warn,
         f"bound to a single CPU. {sizes}",
         "set launcher.cpus_per_node; look for --cpu-bind in launcher.srun_args"),
        (any(f.cpus_given < _CPUS_PER_GPU * (f.gpus_given or 0) for f in facts), warn,
         f"fewer than {_CPUS_PER_GPU} for each GPU. {sizes}",
         "set launcher.cpus_per_node, or leave launcher.gpus_per_node out for whole nodes"),
        well=sizes,
    )  # fmt: skip
    clearing = compress(sorted(f.name for f in facts if f.clears_shm))
    yield judge(
        "nodes.shared_memory",
        "control pages, copies of checkpoints and what data loaders hand over are in /dev/shm",
        (clearing, warn,
         f"RemoveIPC: the end of your last ssh session clears /dev/shm on {clearing}",
         "have the admin set RemoveIPC=no in logind.conf, or give jobs a /dev/shm of their own "
         "(job_container/tmpfs); or run `loginctl enable-linger` on the nodes"),
        well="/dev/shm stays as it is when a session of yours ends",
    )  # fmt: skip
    yield from check_process_environment("nodes", [f.host for f in facts])


def _start(evidence: Evidence) -> Iterator[Finding]:
    check, why = "nodes.start", "a node that the probe did not run on cannot be checked"
    if evidence.problem:
        remedy = "run the doctor again once Slurm answers"
        yield fail(check, f"the probe was cut short: {evidence.problem}", why, remedy)
    reasons = list(evidence.waiting.values())
    for reason in sorted(set(reasons)):
        tasks = counted(reasons.count(reason), "task")
        found = f"{tasks} of {evidence.num_asked} did not start: {reason}"
        passing = next(text for part, text in _MAY_PASS if part.lower() in reason.lower())
        lasting = job_state.remedy(reason)
        verdict = warn if evidence.reports else fail
        yield verdict(check, found, why, passing if lasting is None else lasting)
    left_out = len(evidence.silent) - _MOST_SILENT
    more = f" (and {counted(left_out, 'more task')} like it)" if left_out > 0 else ""
    for index, what in list(evidence.silent.items())[:_MOST_SILENT]:
        remedy = "see its last output; is the directory on all nodes, and Python at the same path? "
        remedy += "launcher.setup, launcher.python"
        found = f"task {index} measured nothing: {what}{more}"
        yield fail(check, found, "tasks of a run start in the same way", remedy)
    if evidence.reports:
        names = sorted({f.name for f in evidence.facts})
        yield ok("nodes.ran", f"the probe ran on {compress(names)}")


def _for_admin(problems: str) -> str:
    if "not found" in problems.lower():
        return "have the admin install Slurm's commands on the nodes; or PATH in launcher.setup"
    return "does the node reach slurmctld? Its network, SLURM_CONF, munge: see network.reach"


def _gpus(evidence: Evidence, facts: list[NodeFacts], asked: SlurmSettings) -> Finding:
    check, why = "nodes.gpus", "one worker runs on each GPU"
    num_asked = gpus_asked(asked)
    if num_asked is None and not any(f.gpus_given or f.gpus_seen for f in facts):
        there = min((f.gpus_there for f in facts), default=0)
        return judge(
            check, why,
            (there, warn, f"none are granted, and each node of the partition has {there}",
             "set launcher.gpus_per_node; nproc_per_node=1 for a training on CPUs"),
            well="no GPUs are asked for, and there are none",
        )  # fmt: skip
    unmet = [f for f in facts if num_asked not in (None, f.gpus_given or 0)]
    wrong = [f for f in facts if f in unmet or (f.gpus_given or 0) != (f.gpus_seen or 0)]
    found = "; ".join(
        f"{f.name}: Slurm gives {f.gpus_given or 'none'}, the driver shows {f.gpus_seen or 'none'}"
        for f in wrong
    )
    blind = ", ".join(  # torch does not see the GPUs that the driver shows
        r.facts.name
        for r in evidence.reports.values()
        if r.allreduce
        and r.allreduce.import_s is not None
        and r.allreduce.cuda_devices < (r.facts.gpus_seen or 0)
    )
    given = sorted({f.gpus_given or 0 for f in facts})
    return judge(
        check, why,
        (unmet, fail, f"asked for {num_asked} on each node; {found}", _UNMET),
        (wrong and num_asked is None, warn, f"none are asked for; {found}",
         "set launcher.gpus_per_node to the number for a run"),
        (wrong and all((f.gpus_seen or 0) > (f.gpus_given or 0) for f in wrong), warn, found,
         "Admin: ConstrainDevices=yes in cgroup.conf; CUDA_VISIBLE_DEVICES is honoured"),
        (wrong, fail, found,
         "`nvidia-smi` on that node; in a container: --nv, or the NVIDIA runtime"),
        (blind, fail, f"torch does not see the GPUs of {blind}",
         "install a torch with CUDA that fits the driver (`nvidia-smi` shows which)"),
        well=f"{' to '.join(map(str, given))} on each node, seen by driver and torch",
    )  # fmt: skip


_MOST_LINES = 8
_FEW = 4
"""The addresses are listed up to this number of nodes."""
_SLOW_ROUND_TRIP_S = 0.01


def check_network(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings on the network."""
    facts, reports = evidence.facts, evidence.reports.values()
    if not reports:
        return
    bad = "; ".join(f"{f.name}: {f.problem}" for f in facts if f.problem)
    few = len(reports) <= _FEW
    chosen = {f.name: f"{f.interface} {f.address}" if few else f.interface for f in facts}
    names = {f.interface for f in facts}
    rest = ", ".join(sorted({i for f in facts for i in f.addresses} - names))
    yield judge(
        "network.interface", "agents and process groups use it",
        (bad, fail, bad, "name it: launcher.interface=ib0, one of `ip -br address` on the nodes"),
        (len(names) > 1, warn, f"not the same on all nodes: {by_value(chosen)}",
         "name one that all have: launcher.interface"),
        well=by_value(chosen) + (f"; others there: {rest}" if rest else ""),
    )  # fmt: skip
    machines = {f.host.name for f in facts}
    if len(machines) < 2:
        found = f"only {machines.pop()} was tried, and nothing between nodes"
        remedy = "--probe --probe-nodes 2" + (", with exclusive=true" if len(reports) > 1 else "")
        yield unknown("network.reach", found, "a run of several nodes depends on it", remedy)
    else:
        yield _reach(evidence)
        sights = [s for r in reports for s in r.meeting.peers]
        known = [(abs(s.clock_ahead_s), s.host) for s in sights if s.clock_ahead_s is not None]
        most, host = max(known, default=(0.0, ""))
        yield judge(
            "network.clocks", "logs and events of the nodes are ordered by their clocks",
            (not known, unknown, "not measured: the nodes do not reach each other", ""),
            (most > _SKEW_S, warn, f"they differ by {duration(most)}, most at {host}",
             "have the admin keep the nodes' clocks by NTP"),
            well=f"they agree within {short(most)}",
        )  # fmt: skip
    results = {r.facts.name: r.allreduce for r in reports if r.allreduce is not None}
    tried = {b for found in results.values() for b in (*found.bandwidths, *found.problems)}
    for backend in sorted(tried - {"torch"}):
        failed = {n: h.problems[backend] for n, h in results.items() if backend in h.problems}
        speeds = [h.bandwidths[backend] for h in results.values() if backend in h.bandwidths]
        speed = min(speeds, default=0.0) / 1e6
        shown = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        yield judge(
            f"network.{backend}", "gradients are reduced over it",
            (failed, fail, f"an all_reduce across the nodes failed: {shown}",
             "see network.reach first; then launcher.interface, and NCCL_DEBUG=INFO"),
            well=f"an all_reduce of 4 MiB across the nodes came back, {speed:,.0f} MB/s",
        )  # fmt: skip


def _reach(evidence: Evidence) -> Finding:
    lines, trips = [], []
    for report in evidence.reports.values():
        for sight in report.meeting.peers:
            if sight.problem:
                where = f" at {sight.address}" if sight.address else ""
                others = ", ".join(a for a, reached in sight.others.items() if reached)
                detour = f" (but at {others})" if others else ""
                lines.append(
                    f"{report.facts.name} cannot reach {sight.host}{where}: {sight.problem}{detour}"
                )
            elif sight.round_trip_s is not None:
                trips.append(sight.round_trip_s)
        for number in report.meeting.absent:
            lines.append(f"{report.facts.name} found no file of {evidence.name(number)}")
    more = f"; and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    slowest_s = max(trips, default=0.0)
    found = f"every node reaches a free port of every other, round trip {short(slowest_s)}"
    return judge(
        "network.reach", "every agent connects to the leader, every worker to every other",
        (lines, fail, "; ".join(lines[:_MOST_LINES]) + more,
         "is that node's network up, a firewall between the nodes? Any free port has to be "
         "open among them; another interface: launcher.interface"),
        (not trips, unknown, "the nodes did not try to reach each other", ""),
        (slowest_s > _SLOW_ROUND_TRIP_S, warn, found,
         "nothing if the nodes were busy; else another launcher.interface"),
        well=found,
    )  # fmt: skip


_SHORT = 0.7
"""A grace is shorter than configured when it is below this share of it."""


def check_signals(evidence: Evidence, kill_wait_s: float) -> Iterator[Finding]:
    """Yield the findings on signals; ``kill_wait_s`` is Slurm's KillWait, as configured."""
    if notices := evidence.notices:
        name = f"SIG{evidence.notice_name}"
        missed = ", ".join(evidence.name(i) for i, times in notices.items() if times[AGENT] is None)
        slowest_s = max(times[AGENT] or 0.0 for times in notices.values())
        alone = any(times[WORKER] is None for times in notices.values())
        workers = "not the workers" if alone else "the workers as well"
        yield judge(
            "signals.notice",
            "`scancel --signal` and --signal in launcher.sbatch ask a run to save and leave a node",
            (missed, fail, f"{name} did not reach the task on {missed}",
             "use a file instead: `touch RUN/preempt/NODE`; is srun a wrapper of the site?"),
            well=f"{name} reached the task on every node within {slowest_s:.1f} s, and {workers}",
        )  # fmt: skip
    for ending in evidence.endings:
        yield from _check_ending(ending, kill_wait_s)
    if evidence.leftovers:
        yield warn(
            "signals.leftovers",
            f"still there after being cancelled and killed: {', '.join(evidence.leftovers)}",
            "Slurm waits for a node that does not answer, or for processes that do not die",
            "they end by themselves within ten minutes; `squeue --me` lists them",
        )


def _check_ending(ending: NodeEnding, kill_wait_s: float) -> Iterator[Finding]:
    what = f"a task that is {'requeued' if ending.how == 'requeue' else 'cancelled'}"
    if not ending.refused:
        least_s = min((s for s in ending.lived_s.values() if s is not None), default=0.0)
        lived = f"{'at least ' if ending.capped else ''}{duration(round(least_s, 1))} more"
        found = f"{what} got SIGTERM and lived for {lived} on {ending.node}"
        found += f"; KillWait is {duration(kill_wait_s)}"
        yield judge(
            f"signals.{ending.how}_grace",
            "in that time all ranks save one step; a preemption adds the partition's GraceTime",
            (ending.lived_s.get(AGENT) is None, fail,
             f"{what} got no SIGTERM before its end on {ending.node}",
             "Admin: is SIGTERM sent at all (KillWait), and does srun forward it?"),
            (not ending.capped and least_s < kill_wait_s * _SHORT, warn, found,
             f"set launcher.preempt_grace_s={max(1, int(least_s))}: runs count on what is "
             "configured"),
            well=found,
        )  # fmt: skip
        yield judge(
            f"signals.{ending.how}_end",
            "a worker that is left behind keeps its GPU, and may write into the run",
            (ending.capped, unknown,
             "not tested: Slurm's KillWait is longer than the probe waits", ""),
            (ending.orphaned, fail,
             f"a worker in a session of its own outlived its task on {ending.node}",
             "Admin: ProctrackType=proctrack/cgroup"),
            well=f"nothing of {what} was left on {ending.node}",
        )  # fmt: skip
    if ending.how == "requeue":
        back_s = "" if ending.back_s is None else f" after {duration(round(ending.back_s))}"
        yield judge(
            "signals.requeue", "a task that is preempted, or out of time, has to be requeued",
            (ending.refused, warn, f"Slurm refuses to requeue: {ending.refused}",
             "a run submits another task in its place; Admin: allow users to requeue their jobs "
             "(JobRequeue=1)"),
            (ending.waits, unknown,
             f"requeued, and in the queue again ({ending.waits}); it has not started yet",
             "nothing, if the cluster is busy; try again when nodes are free"),
            (ending.back_on is None, fail,
             f"the task of {ending.node} was requeued and did not return",
             "was the cluster busy? See `squeue --me` for its reason, and the epilog's time"),
            well=f"requeued: it came back on {ending.back_on}{back_s}, SLURM_RESTART_COUNT=1",
        )  # fmt: skip


_SLOW_S = 5.0
_DELAY_WHY = "saves, joins and elections wait for files of other nodes"
_DELAY_REMEDY = (
    "is it one file system, without another cache in between? Admin: on NFS, mount without "
    f"nocto. Or {_CHOOSE}"
)


def check_shared_folder(evidence: Evidence, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield the findings on the shared directory."""
    if evidence.blind:
        names = ", ".join(sorted(evidence.blind.values()))
        found = f"what is written here does not appear on {names}"
        yield fail("directory.delay", found, _DELAY_WHY, _DELAY_REMEDY)
    if not evidence.reports:
        return
    yield from _operations(evidence.facts)
    mounts = {f.name: f.folder.mount for f in evidence.facts}
    yield _check_mounts("directory.node_mounts", mounts, rendezvous)
    why_not = _not_tried(evidence)
    meetings = [(r.facts.name, r.meeting) for r in evidence.reports.values()]
    races = [met.race for _, met in meetings if met.race]
    faults = {
        "both nodes won": sum(race.both for race in races),
        "no node won": sum(race.neither for race in races),
        "the nodes read different winners of": sum(race.differ for race in races),
    }
    raced = f"of {sum(race.rounds for race in races)} names that two nodes linked at once"
    shown = ", ".join(f"{what} {number}" for what, number in faults.items() if number)
    yield judge(
        "directory.election",
        "a run's leader is the node that creates its record; two leaders would damage the run",
        (why_not, unknown, f"not tried: {why_not}", ""),
        (shown, fail, f"link(2) is not exclusive: {raced}, {shown}",
         f"no run on this file system: {_CHOOSE}. NFS, Lustre, GPFS, BeeGFS and CephFS make links "
         "exclusively; object stores behind FUSE and some caches in between do not"),
        well=f"{raced}, each had one winner",
    )  # fmt: skip
    yield _delay(evidence, why_not)
    torn = ", ".join(name for name, met in meetings if met.seen and met.seen.torn)
    yield judge(
        "directory.content", "a checkpoint is complete once it has its name",
        (why_not, unknown, f"not tried: {why_not}", ""),
        (torn, fail, f"{torn} read a part of a file that was synced and then renamed",
         f"no run on this file system: {_CHOOSE}"),
        well="what a node has synced and renamed, another reads whole",
    )  # fmt: skip


def _operations(nodes: list[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong with the directory on each node, or one OK."""
    check, why = "directory.nodes", "all nodes of a run meet in its directory"
    bad: dict[tuple[str, str], list[str]] = {}
    for facts in nodes:
        for finding in _check_operations(facts.folder):
            if finding.verdict is Verdict.FAIL:
                bad.setdefault((finding.check, finding.found), []).append(facts.name)
    remedy = "choose a directory that all nodes share: --dir here, hydra.sweep.dir for a run"
    for (_, found), names in bad.items():
        yield fail(check, f"on {', '.join(names)}: {found}", why, remedy)
    if not bad:
        kinds = " and ".join(sorted({f.folder.fs or "unknown" for f in nodes}))
        yield ok(check, f"seen by all nodes, as {kinds}; hard links and renames work there", why)


def _not_tried(evidence: Evidence) -> str:
    """Return why nothing was tested between two nodes; empty if it was."""
    if any(report.meeting.seen for report in evidence.reports.values()):
        return ""
    names = {f.name for f in evidence.facts}
    if len(names) == 1:
        return f"all tasks were on {names.pop()}"
    problems = {r.facts.name: r.meeting.problem for r in evidence.reports.values()}
    shown = "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
    return shown or "the nodes do not reach each other"


def _delay(evidence: Evidence, why_not: str) -> Finding:
    """Check how soon a node sees the changes of another in the directory."""
    seen = {r.facts.name: r.meeting.seen for r in evidence.reports.values() if r.meeting.seen}
    late = []
    for name, one in seen.items():
        missing = [what for change, what in CHANGES.items() if one.times_s[change] is None]
        if missing:
            is_all = len(missing) == len(CHANGES)
            not_seen = "nothing was seen" if is_all else f"{', '.join(missing)} was not seen"
            late.append(f"on {name} {not_seen} within {duration(one.waited_s)}")
    worst = {c: max((s.times_s[c] or 0.0 for s in seen.values()), default=0.0) for c in CHANGES}
    shown = ", ".join(f"{what} after {short(worst[name])}" for name, what in CHANGES.items())
    # how long a new file stays absent for a look-up by its path
    waits = [one.waited_s for one in seen.values() if one.times_s[PATH] is None]
    up_to_s = max(f.folder.mount.path_stale_s for f in evidence.facts)
    by_path = (
        f"was not seen within {duration(min(waits))}"
        f" (names are kept for up to {duration(up_to_s)}), so runs list folders"
        if waits
        else f"after {short(max((s.times_s[PATH] or 0.0 for s in seen.values()), default=0.0))}"
    )
    found = f"a node sees of another one {shown}; by its path alone a new file {by_path}"
    return judge(
        "directory.delay", _DELAY_WHY,
        (why_not, unknown, f"not measured: {why_not}", ""),
        (late, fail, f"of what another node did, {'; '.join(late)}", _DELAY_REMEDY),
        (max(worst.values()) > _SLOW_S, warn, found,
         "runs work, with these waits; a save at a preemption may be too late. Admin: on "
         f"NFS, mount without nocto. Or {_CHOOSE}"),
        well=found,
    )  # fmt: skip
