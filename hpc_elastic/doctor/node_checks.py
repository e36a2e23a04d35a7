"""Checks of hosts, and of what the probe has shown of nodes, network and signals; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpc_elastic._util import counted, duration, short
from hpc_elastic.config.schema import RendezvousSettings, SlurmSettings
from hpc_elastic.doctor import cluster_checks
from hpc_elastic.doctor.cluster_checks import CHOOSE
from hpc_elastic.doctor.findings import Finding, Verdict, by_value, fail, judge, ok, unknown, warn
from hpc_elastic.doctor.folder_trial import CHANGES, PATH, Visibility
from hpc_elastic.doctor.probe_job import Evidence, NodeEnding
from hpc_elastic.doctor.probe_task import MUST_AGREE, HostFacts, NodeFacts
from hpc_elastic.doctor.signal_recorder import AGENT, WORKER
from hpc_elastic.launcher.batch_script import gpus_asked
from hpc_elastic.shared_files import LOCAL
from hpc_elastic.slurm import job_state
from hpc_elastic.slurm.nodelist import compress


def check_host(host: HostFacts, *, own_python: bool = True) -> Iterator[Finding]:
    """Yield the findings on the login node; ``own_python``: the nodes use this interpreter."""
    if host.missing_commands:
        yield fail(
            "host.commands",
            f"not on PATH: {', '.join(host.missing_commands)}",
            "runs are submitted, watched and cancelled by them",
            "run the doctor on a login node, or `module load slurm`",
        )
    else:
        yield ok("host.commands", "Slurm's commands are installed")
    if own_python:
        found = f"{host.python} on {host.python_fs or 'an unknown file system'}"
        yield judge(
            "host.python", "the nodes start this very interpreter, by its path",
            (host.python_fs in LOCAL, warn, f"{found}, which is this machine's own",
             "harmless if the nodes have the same Python at the same path (--probe tests it); else "
             "create the environment on the shared file system, or set launcher.python"),
            well=found,
        )  # fmt: skip
    yield from check_limits("host", [host])
    yield check_clock("host", [host])


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


def check_limits(group: str, hosts: list[HostFacts]) -> Iterator[Finding]:
    """Yield one finding for each kind of limit, over all hosts."""
    matters = group != "host" and any(h.has_infiniband for h in hosts)
    for name, (least, why, remedy) in _LIMITS.items():
        is_hard = name == "nofile"  # the agent raises the soft one
        values = {h.name: h.limits.get(name, (None, None))[is_hard] for h in hosts}
        known = {host: n for host, n in values.items() if n is not None}
        low = {host: _size(name, n) for host, n in known.items() if n < least}
        check, what = f"{group}.{name}", f"{'hard ' if is_hard else ''}limit of {name}"
        if not low:
            yield ok(check, f"{what}: {_size(name, min(known.values(), default=None))}", why)
        elif name == "memlock" and not matters:
            found = f"{what}: {by_value(low)}; it matters only on nodes with InfiniBand"
            yield ok(check, found, why)
        else:
            yield warn(check, f"{what}: {by_value(low)}", why, remedy)
    limited = [h for h in hosts if h.limits.get("as", (None, None))[0] is not None]
    if limited:
        sizes = by_value({h.name: _size("as", h.limits["as"][0]) for h in limited})
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


def _size(name: str, number: int | None) -> str:
    if number is None:
        return "unlimited"
    if name in ("memlock", "as"):
        return f"{number / (1 << 20):,.0f} MiB"
    return f"{number:,}"


def check_clock(group: str, hosts: list[HostFacts]) -> Finding:
    """Check whether time services keep the clocks."""
    adrift = compress(sorted(h.name for h in hosts if h.clock_kept is False))
    return judge(
        f"{group}.clock",
        "logs and events of the nodes are ordered by their clocks; elections are not",
        (adrift, warn, f"no time service keeps the clock of {adrift}",
         "have the admin run chrony or systemd-timesyncd (in a container: on its host)"),
        (any(h.clock_kept is None for h in hosts), unknown,
         "the kernel does not report whether the clock is kept", ""),
        well="a time service keeps the clock",
    )  # fmt: skip


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
    (
        "Priority",
        "others are before you: wait longer (--wait-s), or try another partition",
    ),
    ("ReqNodeNotAvail", "nodes are reserved or out of service (`sinfo -R`, `scontrol show res`)"),
    ("DOWN", "nodes are out of service: `sinfo -R` lists why"),
    ("QOS", "a limit of the QOS: another launcher.qos, or wait (`sacctmgr show qos`)"),
    ("Assoc", "a limit of your account: another launcher.account, or wait"),
    ("Account", "the account may not run here: launcher.account"),
    ("Held", "`scontrol release`, or ask the admin who holds it"),
    ("Licenses", "licences are in use: wait"),
    ("Reservation", "the reservation has not begun, or is not yours"),
)


def check_nodes(
    evidence: Evidence, asked: SlurmSettings, own: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Yield the findings on the nodes; ``own`` are the versions on the login node."""
    yield from _start(evidence)
    if not evidence.reports:
        return
    facts = evidence.facts
    yield _versions(evidence, own)
    yield _torch(evidence)
    yield _slurm(facts, in_container=asked.container.runtime is not None)
    if evidence.outside:
        problems = [f"{name}: {what}" for name, what in evidence.outside.items() if what]
        yield judge(
            "nodes.slurm_outside", "what also fails here is not caused by the container",
            (problems, warn, "; ".join(problems), _for_admin(problems)),
            well="squeue and scontrol answer outside of the container",
        )  # fmt: skip
    yield _gpus(evidence, facts, asked)
    yield _cpus(facts)
    yield _shared_memory(facts)
    yield from check_limits("nodes", [f.host for f in facts])
    yield check_clock("nodes", [f.host for f in facts])


def _start(evidence: Evidence) -> Iterator[Finding]:
    check, why = "nodes.start", "a node that the probe did not run on cannot be checked"
    if evidence.problem:
        remedy = "run the doctor again once Slurm answers"
        yield fail(check, f"the probe was cut short: {evidence.problem}", why, remedy)
    for reason in sorted(set(evidence.waiting.values())):
        num = sum(r == reason for r in evidence.waiting.values())
        found = f"{counted(num, 'task')} of {evidence.num_asked} did not start: {reason}"
        verdict = warn if evidence.reports else fail
        yield verdict(check, found, why, _remedy_of(reason))
    left_out = len(evidence.silent) - _MOST_SILENT
    more = f" (and {counted(left_out, 'more task')} like it)" if left_out > 0 else ""
    for index, what in list(evidence.silent.items())[:_MOST_SILENT]:
        yield fail(
            "nodes.start",
            f"task {index} measured nothing: {what}{more}",
            "tasks of a run start in the same way",
            "see its last output; is the directory on all nodes, and Python at the same path? "
            "launcher.setup, launcher.python",
        )
    if evidence.reports:
        names = sorted({f.name for f in evidence.facts})
        yield ok("nodes.ran", f"the probe ran on {compress(names)}")


def _remedy_of(reason: str) -> str:
    lasting = job_state.remedy(reason)
    if lasting is not None:
        return lasting
    otherwise = "see squeue(1), JOB REASON CODES; wait longer with --wait-s"
    passing = (remedy for part, remedy in _MAY_PASS if part.lower() in reason.lower())
    return next(passing, otherwise)


def _versions(evidence: Evidence, own: Mapping[str, str | None]) -> Finding:
    others = [
        f"{name} {facts.versions.get(name) or 'missing'} on {facts.name}, {own.get(name)} here"
        for facts in evidence.facts
        for name in MUST_AGREE
        if facts.versions.get(name) != own.get(name)
    ]
    same = ", ".join(f"{name} {own.get(name)}" for name in MUST_AGREE)
    return judge(
        "nodes.versions", "all processes of a run have to run the same code",
        (others, fail, "; ".join(others),
         "one environment on the shared file system; launcher.python, launcher.setup"),
        well=f"the same everywhere: {same}",
    )  # fmt: skip


def _torch(evidence: Evidence) -> Finding:
    times, broken = {}, {}
    for report in evidence.reports.values():
        name, tried = report.facts.name, report.allreduce
        if tried is None or tried.import_s is None:
            broken[name] = (tried and tried.problems.get("torch")) or "?"
        else:
            times[name] = tried.import_s
    slowest_s = max(times.values(), default=0.0)
    found = f"imported within {slowest_s:.1f} s on every node"
    why_not = "; ".join(f"{name}: {problem}" for name, problem in broken.items())
    return judge(
        "nodes.torch", "each worker imports torch when it starts",
        (broken, fail, f"torch could not be imported or used: {why_not}",
         "try `srun -p PARTITION python -c 'import torch'`; see launcher.setup"),
        (slowest_s > _SLOW_IMPORT_S, warn, found,
         "keep launcher.agent.warm_workers; or install on a faster file system or in an image"),
        well=found,
    )  # fmt: skip


def _slurm(facts: list[NodeFacts], *, in_container: bool) -> Finding:
    check, where = "nodes.slurm", "inside of the container" if in_container else "on the nodes"
    why = "agents query squeue, and requeue themselves by scontrol"
    problems = [
        f"{command} on {f.name}: {problem}"
        for f in facts
        for command, problem in f.slurm.items()
        if problem is not None
    ]
    if not problems:
        return ok(check, f"squeue and scontrol answer {where}", why)
    mounts = (
        "mount Slurm's commands, /etc/slurm, and munge's socket (/run/munge) into the container: "
        "launcher.container.mounts"
    )
    remedy = mounts if in_container else _for_admin(problems)
    lost = "otherwise rounds close by time, and Slurm has to requeue a preempted task"
    return warn(check, "; ".join(problems), f"{why}; {lost}", remedy)


def _for_admin(problems: list[str]) -> str:
    if any("not found" in problem.lower() for problem in problems):
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
    blind = [  # torch does not see the GPUs that the driver shows
        r.facts.name
        for r in evidence.reports.values()
        if r.allreduce
        and r.allreduce.import_s is not None
        and r.allreduce.cuda_devices < (r.facts.gpus_seen or 0)
    ]
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
        (blind, fail, f"torch does not see the GPUs of {', '.join(blind)}",
         "install a torch with CUDA that fits the driver (`nvidia-smi` shows which)"),
        well=f"{' to '.join(map(str, given))} on each node, seen by driver and torch",
    )  # fmt: skip


def _cpus(facts: list[NodeFacts]) -> Finding:
    shares = {}
    for f in facts:
        usable, given = f.host.cpus, f.cpus_given
        cpus = f"{usable} CPUs usable of {given} given"
        cpus = counted(usable, "CPU") if usable == given else cpus
        shares[f.name] = f"{cpus}, {f.host.memory_bytes >> 30} GiB in the machine,"
    sizes = by_value(shares)
    return judge(
        "nodes.cpus", "workers and their loaders share them",
        (any(f.host.cpus == 1 and f.cpus_given > 1 for f in facts), warn,
         f"bound to a single CPU. {sizes}",
         "set launcher.cpus_per_node; look for --cpu-bind in launcher.srun_args"),
        (any(f.cpus_given < _CPUS_PER_GPU * (f.gpus_given or 0) for f in facts), warn,
         f"fewer than {_CPUS_PER_GPU} for each GPU. {sizes}",
         "set launcher.cpus_per_node, or leave launcher.gpus_per_node out for whole nodes"),
        well=sizes,
    )  # fmt: skip


def _shared_memory(facts: list[NodeFacts]) -> Finding:
    clearing = compress(sorted(f.name for f in facts if f.clears_shm))
    return judge(
        "nodes.shared_memory",
        "control pages, copies of checkpoints and what data loaders hand over are in /dev/shm",
        (clearing, warn,
         f"RemoveIPC: the end of your last ssh session clears /dev/shm on {clearing}",
         "have the admin set RemoveIPC=no in logind.conf, or give jobs a /dev/shm of their own "
         "(job_container/tmpfs); or run `loginctl enable-linger` on the nodes"),
        well="/dev/shm stays as it is when a session of yours ends",
    )  # fmt: skip


_SKEW_S = 1.0
_MOST_LINES = 8
_FEW = 4
"""The addresses are listed up to this number of nodes."""
_SLOW_ROUND_TRIP_S = 0.01


def check_network(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings on the network."""
    if not evidence.reports:
        return
    yield _interface(evidence)
    machines = {f.host.name for f in evidence.facts}
    if len(machines) < 2:
        found = f"only {machines.pop()} was tried, and nothing between nodes"
        remedy = "--probe --probe-nodes 2" + (
            ", with exclusive=true" if len(evidence.reports) > 1 else ""
        )
        yield unknown("network.reach", found, "a run of several nodes depends on it", remedy)
    else:
        yield _reach(evidence)
        yield _skew(evidence)
    yield from _allreduce(evidence)


def _interface(evidence: Evidence) -> Finding:
    bad = [f"{f.name}: {f.problem}" for f in evidence.facts if f.problem]
    few = len(evidence.reports) <= _FEW
    chosen = by_value({
        f.name: f"{f.interface} {f.address}" if few else f.interface for f in evidence.facts
    })  # fmt: skip
    names = {f.interface for f in evidence.facts}
    rest = {i for f in evidence.facts for i in f.addresses} - names
    return judge(
        "network.interface", "agents and process groups use it",
        (bad, fail, "; ".join(bad),
         "name it: launcher.interface=ib0, one of `ip -br address` on the nodes"),
        (len(names) > 1, warn, f"not the same on all nodes: {chosen}",
         "name one that all have: launcher.interface"),
        well=chosen + (f"; others there: {', '.join(sorted(rest))}" if rest else ""),
    )  # fmt: skip


def _reach(evidence: Evidence) -> Finding:
    lines, trips = [], []
    for report in evidence.reports.values():
        for sight in report.meeting.peers:
            if sight.problem:
                where = f" at {sight.address}" if sight.address else ""
                others = [address for address, reached in sight.others.items() if reached]
                detour = f" (but at {', '.join(others)})" if others else ""
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


def _skew(evidence: Evidence) -> Finding:
    sights = [s for r in evidence.reports.values() for s in r.meeting.peers]
    known = [(abs(s.clock_ahead_s), s.host) for s in sights if s.clock_ahead_s is not None]
    most, host = max(known, default=(0.0, ""))
    return judge(
        "network.clocks", "logs and events of the nodes are ordered by their clocks",
        (not known, unknown, "not measured: the nodes do not reach each other", ""),
        (most > _SKEW_S, warn, f"they differ by {duration(most)}, most at {host}",
         "have the admin keep the nodes' clocks by NTP"),
        well=f"they agree within {short(most)}",
    )  # fmt: skip


def _allreduce(evidence: Evidence) -> Iterator[Finding]:
    results = {
        r.facts.name: r.allreduce for r in evidence.reports.values() if r.allreduce is not None
    }
    backends = sorted(
        {b for h in results.values() for b in (*h.bandwidths, *h.problems)} - {"torch"}
    )
    for backend in backends:
        check, why = f"network.{backend}", "gradients are reduced over it"
        problems = [
            f"{n}: {h.problems[backend]}" for n, h in results.items() if backend in h.problems
        ]
        if problems:
            found = f"an all_reduce across the nodes failed: {'; '.join(problems)}"
            remedy = "see network.reach first; then launcher.interface, and NCCL_DEBUG=INFO"
            yield fail(check, found, why, remedy)
            continue
        speed = min(h.bandwidths[backend] for h in results.values() if backend in h.bandwidths)
        found = f"an all_reduce of 4 MiB across the nodes came back, {speed / 1e6:,.0f} MB/s"
        yield ok(check, found, why)


_SHORT = 0.7
"""A grace is shorter than configured when it is below this share of it."""


def check_signals(evidence: Evidence, kill_wait_s: float) -> Iterator[Finding]:
    """Yield the findings on signals; ``kill_wait_s`` is Slurm's KillWait, as configured."""
    if evidence.notices:
        yield _notice(evidence)
    for ending in evidence.endings:
        if not ending.refused:
            yield _grace(ending, kill_wait_s)
            yield _leftover(ending)
        if ending.how == "requeue":
            yield _requeue(ending)
    if evidence.leftovers:
        yield warn(
            "signals.leftovers",
            f"still there after being cancelled and killed: {', '.join(evidence.leftovers)}",
            "Slurm waits for a node that does not answer, or for processes that do not die",
            "they end by themselves within ten minutes; `squeue --me` lists them",
        )


def _notice(evidence: Evidence) -> Finding:
    name = f"SIG{evidence.notice_name}"
    missed = [evidence.name(i) for i, times in evidence.notices.items() if times[AGENT] is None]
    slowest_s = max(times[AGENT] or 0.0 for times in evidence.notices.values())
    alone = any(times[WORKER] is None for times in evidence.notices.values())
    workers = "not the workers" if alone else "the workers as well"
    return judge(
        "signals.notice",
        "`scancel --signal` and --signal in launcher.sbatch ask a run to save and leave a node",
        (missed, fail, f"{name} did not reach the task on {', '.join(missed)}",
         "use a file instead: `touch RUN/preempt/NODE`; is srun a wrapper of the site?"),
        well=f"{name} reached the task on every node within {slowest_s:.1f} s, and {workers}",
    )  # fmt: skip


def _grace(ending: NodeEnding, kill_wait_s: float) -> Finding:
    what, at_least = f"a task that is {_done(ending)}", "at least " if ending.capped else ""
    has_got_it = ending.lived_s.get(AGENT) is not None
    least_s = min((s for s in ending.lived_s.values() if s is not None), default=0.0)
    found = f"{what} got SIGTERM and lived for {at_least}{duration(round(least_s, 1))} more"
    found += f" on {ending.node}; KillWait is {duration(kill_wait_s)}"
    return judge(
        f"signals.{ending.how}_grace",
        "in that time all ranks save one step; a preemption adds the partition's GraceTime",
        (not has_got_it, fail, f"{what} got no SIGTERM before its end on {ending.node}",
         "Admin: is SIGTERM sent at all (KillWait), and does srun forward it?"),
        (not ending.capped and least_s < kill_wait_s * _SHORT, warn, found,
         f"set launcher.preempt_grace_s={max(1, int(least_s))}: runs count on what is configured"),
        well=found,
    )  # fmt: skip


def _leftover(ending: NodeEnding) -> Finding:
    return judge(
        f"signals.{ending.how}_end",
        "a worker that is left behind keeps its GPU, and may write into the run",
        (ending.capped, unknown,
         "not tested: Slurm's KillWait is longer than the probe waits", ""),
        (ending.orphaned, fail,
         f"a worker in a session of its own outlived its task on {ending.node}",
         "Admin: ProctrackType=proctrack/cgroup"),
        well=f"nothing of a task that is {_done(ending)} was left on {ending.node}",
    )  # fmt: skip


def _requeue(ending: NodeEnding) -> Finding:
    back_s = "" if ending.back_s is None else f" after {duration(round(ending.back_s))}"
    return judge(
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


def _done(ending: NodeEnding) -> str:
    return "requeued" if ending.how == "requeue" else "cancelled"


_SLOW_S = 5.0
_REMEDY = "choose a directory that all nodes share: --dir here, hydra.sweep.dir for a run"
_DELAY_WHY = "saves, joins and elections wait for files of other nodes"
_DELAY_REMEDY = (
    "is it one file system, without another cache in between? Admin: on NFS, mount without "
    f"nocto. Or {CHOOSE}"
)
_NOT_EXCLUSIVE = (
    f"no run on this file system: {CHOOSE}. NFS, Lustre, GPFS, BeeGFS and CephFS make links "
    "exclusively; object stores behind FUSE and some caches in between do not"
)


def check_shared_folder(evidence: Evidence, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield the findings on the shared directory."""
    if evidence.blind:
        names = ", ".join(sorted(evidence.blind.values()))
        found = f"what is written here does not appear on {names}"
        yield fail("directory.delay", found, _DELAY_WHY, _DELAY_REMEDY)
    if not evidence.reports:
        return
    yield from _nodes(evidence)
    mounts = {f.name: f.folder.mount for f in evidence.facts}
    yield cluster_checks.check_mounts("directory.node_mounts", mounts, rendezvous)
    why_not = _not_tried(evidence)
    yield _election(evidence, why_not)
    yield _delay(evidence, why_not)
    yield _content(evidence, why_not)


def _nodes(evidence: Evidence) -> Iterator[Finding]:
    """Yield what is wrong with the directory on each node, or one OK."""
    bad: dict[tuple[str, str], list[str]] = {}
    for facts in evidence.facts:
        for finding in cluster_checks.check_operations(facts.folder):
            if finding.verdict is Verdict.FAIL:
                bad.setdefault((finding.check, finding.found), []).append(facts.name)
    why = "all nodes of a run meet in its directory"
    for (_, found), names in bad.items():
        yield fail("directory.nodes", f"on {', '.join(names)}: {found}", why, _REMEDY)
    if not bad:
        kinds = sorted({f.folder.fs or "unknown" for f in evidence.facts})
        found = f"seen by all nodes, as {' and '.join(kinds)}; hard links and renames work there"
        yield ok("directory.nodes", found, why)


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


def _election(evidence: Evidence, why_not: str) -> Finding:
    """Check whether exactly one wins when two nodes link one name."""
    races = [r.meeting.race for r in evidence.reports.values() if r.meeting.race]
    faults = {
        "both nodes won": sum(race.both for race in races),
        "no node won": sum(race.neither for race in races),
        "the nodes read different winners of": sum(race.differ for race in races),
    }
    raced = f"of {sum(race.rounds for race in races)} names that two nodes linked at once"
    shown = ", ".join(f"{what} {number}" for what, number in faults.items() if number)
    return judge(
        "directory.election",
        "a run's leader is the node that creates its record; two leaders would damage the run",
        (why_not, unknown, f"not tried: {why_not}", ""),
        (shown, fail, f"link(2) is not exclusive: {raced}, {shown}", _NOT_EXCLUSIVE),
        well=f"{raced}, each had one winner",
    )  # fmt: skip


def _delay(evidence: Evidence, why_not: str) -> Finding:
    """Check how soon a node sees the changes of another in the directory."""
    check, why = "directory.delay", _DELAY_WHY
    if why_not:
        return unknown(check, f"not measured: {why_not}", why)
    seen = {r.facts.name: r.meeting.seen for r in evidence.reports.values() if r.meeting.seen}
    late = []
    for name, one in seen.items():
        missing = [what for change, what in CHANGES.items() if one.times_s[change] is None]
        if missing:
            unseen = "nothing" if len(missing) == len(CHANGES) else ", ".join(missing)
            not_seen = f"{unseen} was {'' if unseen == 'nothing' else 'not '}seen"
            late.append(f"on {name} {not_seen} within {duration(one.waited_s)}")
    if late:
        return fail(check, f"of what another node did, {'; '.join(late)}", why, _DELAY_REMEDY)
    worst = {name: max(one.times_s[name] or 0.0 for one in seen.values()) for name in CHANGES}
    shown = ", ".join(f"{what} after {short(worst[name])}" for name, what in CHANGES.items())
    found = f"a node sees of another one {shown}{_by_path(evidence, seen.values())}"
    if max(worst.values()) > _SLOW_S:
        remedy = "runs work, with these waits; a save at a preemption may be too late. Admin: on "
        remedy += f"NFS, mount without nocto. Or {CHOOSE}"
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _by_path(evidence: Evidence, seen: Collection[Visibility]) -> str:
    """Return how long a new file stays absent for a look-up by its path."""
    times = [one.times_s[PATH] for one in seen]
    if None not in times:
        return f"; by its path alone a new file after {short(max(t for t in times if t))}"
    waited_s = min(one.waited_s for one in seen if one.times_s[PATH] is None)
    up_to_s = max(f.folder.mount.path_stale_s for f in evidence.facts)
    return (
        f"; by its path alone a new file was not seen within {duration(waited_s)}"
        f" (names are kept for up to {duration(up_to_s)}), so runs list folders"
    )


def _content(evidence: Evidence, why_not: str) -> Finding:
    """Check whether another node reads whole what was synced and renamed."""
    torn = [
        r.facts.name for r in evidence.reports.values() if r.meeting.seen and r.meeting.seen.torn
    ]
    return judge(
        "directory.content", "a checkpoint is complete once it has its name",
        (why_not, unknown, f"not tried: {why_not}", ""),
        (torn, fail, f"{', '.join(torn)} read a part of a file that was synced and then renamed",
         f"no run on this file system: {CHOOSE}"),
        well="what a node has synced and renamed, another reads whole",
    )  # fmt: skip
