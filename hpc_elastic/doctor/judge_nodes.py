"""What the probe has shown of the nodes, each by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic.config import SlurmSettings
from hpc_elastic.doctor import judge_host
from hpc_elastic.doctor.evidence import Evidence
from hpc_elastic.doctor.findings import Finding, by_value, fail, ok, warn
from hpc_elastic.doctor.node import NodeFacts
from hpc_elastic.doctor.versions import MUST_AGREE
from hpc_elastic.slurm import reasons
from hpc_elastic.slurm.nodelist import compress
from hpc_elastic.submit.sbatch import gpus_asked
from hpc_elastic.words import counted

_SLOW_IMPORT_S = 30.0
_MOST_SILENT = 3
_UNMET = (
    "set launcher.gpus_per_node to what the partition's nodes have (`sinfo -o '%P %G'`); if that "
    "is wrong, Admin: GresTypes in slurm.conf, and the nodes' lines in gres.conf"
)

_MAY_PASS: tuple[tuple[str, str], ...] = (  # others: `slurm.reasons`
    ("Resources", "all nodes are busy: wait longer (--wait), or try another partition"),
    ("Priority", "others are before you in the queue: wait longer (--wait), or another partition"),
    ("ReqNodeNotAvail", "nodes are reserved or out of service (`sinfo -R`, `scontrol show res`)"),
    ("DOWN", "nodes are out of service: `sinfo -R` says why"),
    ("QOS", "a limit of the QOS: another launcher.qos, or wait (`sacctmgr show qos`)"),
    ("Assoc", "a limit of your account: another launcher.account, or wait"),
    ("Account", "the account may not run here: launcher.account"),
    ("Held", "`scontrol release`, or ask the admin who holds it"),
    ("Licenses", "licences are in use: wait"),
    ("Reservation", "the reservation has not begun, or is not yours"),
)


def judge(
    evidence: Evidence, asked: SlurmSettings, own: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Yield what is to be said of the nodes.

    Args:
        evidence: What the probe has shown.
        asked: The settings of a run.
        own: Versions of the login node.
    """
    yield from _start(evidence)
    facts = [report.facts for report in evidence.reports.values()]
    if not facts:
        return
    yield _versions(evidence, own)
    yield _torch(evidence)
    yield _slurm(facts, in_container=asked.container.runtime is not None)
    if evidence.outside:
        yield _outside(evidence)
    yield _gpus(evidence, facts, asked)
    yield _cpus(facts)
    yield from judge_host.limits("nodes", [f.host for f in facts])
    yield judge_host.clock("nodes", [f.host for f in facts])


def _start(evidence: Evidence) -> Iterator[Finding]:
    check, why = "nodes.start", "nothing can be said of a node that the probe did not run on"
    if evidence.problem:
        remedy = "run the doctor again once Slurm answers"
        yield fail(check, f"the probe was cut short: {evidence.problem}", why, remedy)
    for reason in sorted(set(evidence.waiting.values())):
        num = sum(r == reason for r in evidence.waiting.values())
        found = f"{counted(num, 'task')} of {evidence.num_asked} did not start: {reason}"
        verdict = warn if evidence.reports else fail
        yield verdict(check, found, why, _remedy_of(reason))
    yield from _silent(evidence)
    if evidence.reports:
        names = sorted({r.facts.name for r in evidence.reports.values()})
        yield ok("nodes.ran", f"the probe ran on {compress(names)}")


def _silent(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each task that has measured nothing, the first few of many."""
    left_out = len(evidence.silent) - _MOST_SILENT
    more = f" (and {counted(left_out, 'more task')} like it)" if left_out > 0 else ""
    for index, what in list(evidence.silent.items())[:_MOST_SILENT]:
        yield fail(
            "nodes.start",
            f"task {index} measured nothing: {what}{more}",
            "tasks of a run start in the same way",
            "see its last words; is the directory on all nodes, and Python at the same path? "
            "launcher.setup, launcher.python",
        )


def _remedy_of(reason: str) -> str:
    """Return what to do about a reason for which Slurm lets a task wait."""
    lasting = reasons.remedy(reason)
    if lasting is not None:
        return lasting
    for part, remedy in _MAY_PASS:
        if part.lower() in reason.lower():
            return remedy
    return "see squeue(1), JOB REASON CODES; wait longer with --wait"


def _versions(evidence: Evidence, own: Mapping[str, str | None]) -> Finding:
    check, why = "nodes.versions", "all processes of a run have to run the same code"
    others = []
    for report in evidence.reports.values():
        there = report.facts.versions
        others += [
            f"{name} {there.get(name) or 'missing'} on {report.facts.name}, {own.get(name)} here"
            for name in MUST_AGREE
            if there.get(name) != own.get(name)
        ]
    if others:
        remedy = "one environment on the shared file system; launcher.python, launcher.setup"
        return fail(check, "; ".join(others), why, remedy)
    same = ", ".join(f"{name} {own.get(name)}" for name in MUST_AGREE)
    return ok(check, f"the same everywhere: {same}", why)


def _torch(evidence: Evidence) -> Finding:
    check, why = "nodes.torch", "each worker imports torch when it starts"
    times, broken = {}, {}
    for report in evidence.reports.values():
        if report.hello is None or report.hello.import_s is None:
            broken[report.facts.name] = (report.hello and report.hello.problems.get("torch")) or "?"
        else:
            times[report.facts.name] = report.hello.import_s
    if broken:
        found = "; ".join(f"{name}: {why_not}" for name, why_not in broken.items())
        remedy = "try `srun -p PARTITION python -c 'import torch'`; see launcher.setup"
        return fail(check, f"torch could not be imported or used: {found}", why, remedy)
    found = f"imported within {max(times.values()):.1f} s on every node"
    if max(times.values()) > _SLOW_IMPORT_S:
        remedy = (
            "keep launcher.agent.spares; or an environment on a faster file system, or an image"
        )
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _slurm(facts: list[NodeFacts], *, in_container: bool) -> Finding:
    check, where = "nodes.slurm", "inside of the container" if in_container else "on the nodes"
    why = "the agents ask squeue who runs, and requeue themselves by scontrol"
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
    lost = "rounds close by time then, and a preempted task waits for Slurm to requeue it"
    return warn(check, "; ".join(problems), f"{why}; {lost}", remedy)


def _for_admin(problems: list[str]) -> str:
    if any("not found" in problem.lower() for problem in problems):
        return "have the admin install Slurm's commands on the nodes; or PATH in launcher.setup"
    return "does the node reach slurmctld? Its network, SLURM_CONF, munge: see network.reach"


def _outside(evidence: Evidence) -> Finding:
    check, why = "nodes.slurm_outside", "what fails here as well is not the container's fault"
    problems = [f"{name}: {what}" for name, what in evidence.outside.items() if what is not None]
    if problems:
        return warn(check, "; ".join(problems), why, _for_admin(problems))
    return ok(check, "squeue and scontrol answer outside of the container", why)


def _gpus(evidence: Evidence, facts: list[NodeFacts], asked: SlurmSettings) -> Finding:
    check, why = "nodes.gpus", "one worker runs on each GPU"
    num_asked = gpus_asked(asked)
    unmet = [f for f in facts if num_asked not in (None, f.gpus_given or 0)]
    wrong = [f for f in facts if f in unmet or (f.gpus_given or 0) != (f.gpus_seen or 0)]
    if num_asked is None and not any(f.gpus_given or f.gpus_seen for f in facts):
        return ok(check, "no GPUs are asked for, and there are none", why)
    if wrong:
        found = "; ".join(
            f"{f.name}: Slurm gives {_told(f.gpus_given)}, the driver shows {_told(f.gpus_seen)}"
            for f in wrong
        )
        if unmet:
            return fail(check, f"asked for {num_asked} on each node; {found}", why, _UNMET)
        if num_asked is None:
            remedy = "say how many a run is to have: launcher.gpus_per_node"
            return warn(check, f"none are asked for; {found}", why, remedy)
        if all((f.gpus_seen or 0) > (f.gpus_given or 0) for f in wrong):
            remedy = "Admin: ConstrainDevices=yes in cgroup.conf; CUDA_VISIBLE_DEVICES is honoured"
            return warn(check, found, why, remedy)
        remedy = "`nvidia-smi` on that node; in a container: --nv, or the NVIDIA runtime"
        return fail(check, found, why, remedy)
    return _torch_gpus(evidence, facts)


def _torch_gpus(evidence: Evidence, facts: list[NodeFacts]) -> Finding:
    """Judge whether torch sees the GPUs that the driver shows."""
    check, why = "nodes.gpus", "one worker runs on each GPU"
    blind = [
        r.facts.name
        for r in evidence.reports.values()
        if r.hello
        and r.hello.import_s is not None
        and r.hello.cuda_devices < (r.facts.gpus_seen or 0)
    ]
    if blind:
        remedy = "install a torch with CUDA that fits the driver (`nvidia-smi` shows which)"
        return fail(check, f"torch does not see the GPUs of {', '.join(blind)}", why, remedy)
    given = sorted({f.gpus_given or 0 for f in facts})
    return ok(check, f"{' to '.join(map(str, given))} on each node, seen by driver and torch", why)


def _told(number: int | None) -> str:
    return "none" if not number else str(number)


def _cpus(facts: list[NodeFacts]) -> Finding:
    check, why = "nodes.cpus", "workers and their loaders share them"
    bound = [f for f in facts if f.host.cpus == 1 and f.cpus_given > 1]
    sizes = by_value({f.name: _share(f) for f in facts})
    if bound:
        remedy = "set launcher.cpus_per_node; look for --cpu-bind in launcher.srun_args"
        return warn(check, f"bound to a single CPU. {sizes}", why, remedy)
    return ok(check, sizes, why)


def _share(facts: NodeFacts) -> str:
    usable, given = facts.host.cpus, facts.cpus_given
    cpus = counted(usable, "CPU") if usable == given else f"{usable} CPUs usable of {given} given"
    return f"{cpus}, {facts.host.memory_bytes >> 30} GiB in the machine,"
