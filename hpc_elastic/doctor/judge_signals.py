"""What the probe has shown of signals, of the end of tasks, and of their return. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_elastic.doctor.evidence import Ending, Evidence
from hpc_elastic.doctor.findings import Finding, fail, ok, unknown, warn
from hpc_elastic.doctor.patient import AGENT, WORKER
from hpc_elastic.words import duration

_SHORT = 0.7
"""A grace is shorter than configured when it is below this share of it."""
_SLACK_S = 3.0


def judge(evidence: Evidence, kill_wait_s: float) -> Iterator[Finding]:
    """Yield what is to be said.

    Args:
        evidence: What the probe has shown.
        kill_wait_s: Slurm's KillWait, as configured.
    """
    if evidence.notices:
        yield _notice(evidence)
    for ending in evidence.endings:
        if not ending.refused:
            yield _grace(ending, kill_wait_s)
            yield _end(ending)
        if ending.how == "requeue":
            yield _requeue(ending)
    if evidence.leftovers:
        yield warn(
            "signals.leftovers",
            f"still there after being cancelled and killed: {', '.join(evidence.leftovers)}",
            "Slurm waits for a node that does not answer, or for processes that do not die",
            "they end by themselves within ten minutes; `squeue --me` shows them",
        )


def _notice(evidence: Evidence) -> Finding:
    check, name = "signals.notice", f"SIG{evidence.notice_name}"
    why = "`scancel --signal` asks a run to save and leave a node; --signal in launcher.sbatch, too"
    missed = [evidence.name(i) for i, t in evidence.notices.items() if t[AGENT] is None]
    if missed:
        remedy = "ask by a file instead: `touch RUN/notice/NODE`; is srun a wrapper of the site's?"
        return fail(check, f"{name} did not reach the task on {', '.join(missed)}", why, remedy)
    slowest = max(t for times in evidence.notices.values() if (t := times[AGENT]) is not None)
    alone = any(times[WORKER] is None for times in evidence.notices.values())
    workers = "not the workers" if alone else "the workers as well"
    found = f"{name} reached the task on every node within {slowest:.1f} s, and {workers}"
    return ok(check, found, why)


def _grace(ending: Ending, kill_wait_s: float) -> Finding:
    check, what = f"signals.{ending.how}_grace", f"a task that is {_done(ending)}"
    why = "in that time all ranks save at one step; a preemption adds the partition's GraceTime"
    asked, worker = ending.lived_s.get(AGENT), ending.lived_s.get(WORKER)
    if asked is None:
        remedy = "Admin: is SIGTERM sent at all (KillWait), and does srun hand it on?"
        found = f"{what} got no SIGTERM before its end on {ending.node}"
        return fail(check, found, why, remedy)
    least = min(asked, asked if worker is None else worker)
    at_least = "at least " if ending.capped else ""
    found = f"{what} got SIGTERM and lived for {at_least}{duration(round(least, 1))} more"
    found += f" on {ending.node}; KillWait is {duration(kill_wait_s)}"
    if not ending.capped and least < kill_wait_s * _SHORT:
        remedy = f"set launcher.grace_s={max(1, int(least))}: runs count on what is configured"
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _end(ending: Ending) -> Finding:
    check = f"signals.{ending.how}_end"
    why = "a worker that is left behind holds its GPU, and may write into the run"
    if ending.capped:
        return unknown(check, "not seen: Slurm's KillWait is longer than the probe waits", why)
    if ending.orphaned:
        remedy = "Admin: ProctrackType=proctrack/cgroup"
        found = f"a worker in a session of its own outlived its task on {ending.node}"
        return fail(check, found, why, remedy)
    return ok(check, f"nothing of a task that is {_done(ending)} was left on {ending.node}", why)


def _requeue(ending: Ending) -> Finding:
    check = "signals.requeue"
    why = "a task that is preempted, or out of time, has to come back by itself"
    if ending.refused:
        remedy = (
            "a run submits another task in its place (replacement); Admin: allow users to requeue "
            "their jobs (JobRequeue=1)"
        )
        return warn(check, f"Slurm refuses to requeue: {ending.refused}", why, remedy)
    if ending.waits:
        remedy = "nothing, if the cluster is busy; try again when nodes are free"
        found = f"requeued, and in the queue again ({ending.waits}); it was not seen to start"
        return unknown(check, found, why, remedy)
    if ending.back_on is None:
        remedy = "was the cluster busy? See `squeue --me` for its reason, and the epilog's time"
        return fail(
            check, f"the task of {ending.node} was requeued and did not return", why, remedy
        )
    back_s = "" if ending.back_s is None else f" after {duration(round(ending.back_s))}"
    found = f"really requeued: it came back on {ending.back_on}{back_s}, SLURM_RESTART_COUNT=1"
    return ok(check, found, why)


def _done(ending: Ending) -> str:
    return "requeued" if ending.how == "requeue" else "cancelled"
