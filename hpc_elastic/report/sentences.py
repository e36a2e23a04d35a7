"""The timeline of a run as plain sentences, one line each, the cause first (pure)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpc_elastic._util import counted, duration
from hpc_elastic.report.timeline import Cause, Cost, TimelineEntry


def lines(entries: Iterable[TimelineEntry], day: str = "") -> Iterator[str]:
    """Yield a timeline as it is printed, with a line for each new date.

    Args:
        entries: In order of time.
        day: The date that was printed last.
    """
    for entry in entries:
        today = day_of(entry)
        if today != day:
            yield f"{today}:"
            day = today
        clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
        yield f"{clock} {sentence(entry)}"


def day_of(entry: TimelineEntry) -> str:
    """Return the local date of an entry."""
    return time.strftime("%Y-%m-%d", time.localtime(entry.time))


def sentence(entry: TimelineEntry) -> str:
    """Return an entry as a sentence that needs no knowledge of the run."""
    special = _SPECIAL.get(entry.kind)
    if special is not None:
        return special(entry)
    parts = [because(entry.causes, entry.leader), *_outcome(entry)]
    return "; ".join(part for part in parts if part)


# ---- the group ----------------------------------------------------------------------------


def _outcome(entry: TimelineEntry) -> Iterator[str]:
    if entry.cost.saved_step is not None:
        yield f"all ranks saved step {entry.cost.saved_step}"
    yield _size(entry)
    if entry.nodes_after == 0:
        yield _where_to(entry.causes)
    elif entry.is_open:
        yield "it is not over yet"
    elif entry.has_replicas and entry.nodes_before:
        yield _of_replicas(entry)
    else:
        yield _price(entry.cost)


def _size(entry: TimelineEntry) -> str:
    before, after = entry.nodes_before or 0, entry.nodes_after
    group, what = ("", "replica") if entry.has_replicas else ("group ", "node")
    if after == 0:
        return f"no node is left of {before}"
    if after is None:
        return f"{group}of {counted(before, what)} changes"
    workers = ""
    if entry.workers not in (None, after):
        workers = f" ({counted(entry.workers or 0, 'worker')})"
    if before == 0:
        return f"again {f'a {group}of ' if group else ''}{counted(after, what)}{workers}"
    if before == after:
        return f"{group}still {counted(after, what)}{workers}"
    return f"{group}{before} -> {counted(after, what)}{workers}"


def _where_to(causes: Sequence[Cause]) -> str:
    back = [cause.comes_back for cause in causes]
    if back and all(back):
        return "the run waits in the queue until a node is free"
    return "no node trains" if None in back or any(back) else "no node comes back by itself"


def _of_replicas(entry: TimelineEntry) -> str:
    if entry.kind == "shrank":
        lost = "; lost 0 steps" if entry.cost.lost_steps == 0 else ""
        return f"the others train on{lost}"
    ready_s = entry.facts.get("ready_s")
    joins = "" if ready_s is None else f", together after {duration(ready_s)}"
    return f"the others trained on{joins}"


def _price(cost: Cost) -> str:
    """Return the lost steps, and the time without a step."""
    lost = None
    if cost.lost_steps is not None:
        lost = f"lost {counted(cost.lost_steps, 'step')}"
        if cost.lost_steps and cost.resumed_step is not None:
            lost += f" (from {cost.reached_step} back to {cost.resumed_step})"
    elif cost.resumed_step is not None:
        lost = f"on from step {cost.resumed_step}"
    pause = None
    if cost.pause_s is not None:
        what = "trained again" if cost.trains else "formed again"
        pause = f"{what} after {duration(cost.pause_s)}"
    return ", ".join(part for part in (lost, pause) if part)


def _formed(entry: TimelineEntry) -> str:
    facts, workers = entry.facts, entry.workers
    size = counted(entry.nodes_after or 0, "node")
    what = f"group of {size}, {counted(workers or 0, 'worker')}, formed"
    leads = f"; {entry.leader} leads" if entry.leader else ""
    ready_s = facts.get("ready_s")
    first = "" if ready_s is None else f"; first step after {duration(ready_s)}"
    return f"{what}: {names(facts.get('hosts', ()))}{leads}{first}"


# ---- entries that change no group ----------------------------------------------------------------


def _started(entry: TimelineEntry) -> str:
    facts = entry.facts
    return f"the run started: its first node is {facts.get('host')} (task {facts.get('task')})"


def _ended(entry: TimelineEntry) -> str:
    facts = entry.facts
    how = {"succeeded": "the run succeeded", "failed": "the run failed"}
    what = how.get(str(facts.get("status")), "the run was closed")
    if entry.text:
        what += f": {entry.text}"
    groups = counted(int(facts.get("rounds") or 0), "group")
    restarts = counted(int(facts.get("restarts") or 0), "restart")
    return f"{what}; it took {duration(facts['lasted_s'])}, {groups} and {restarts} after failures"


def _nodes_requeued(entry: TimelineEntry) -> str:
    facts = entry.facts
    hosts, away = names(facts.get("hosts") or ()), duration(float(facts.get("delay_s") or 0.0))
    if facts.get("all"):
        why = facts.get("why") or "too few nodes for too long"
        back = f"all go back to the queue for {away}, so that other runs can start"
        return f"{why}: {back}" + (f" ({hosts})" if hosts else "")
    who = hosts or counted(int(facts.get("nodes") or 0), "node")
    return f"{who} cannot be used now: back to the queue for {away}"


def _parked(entry: TimelineEntry) -> str:
    return f"{names(entry.facts.get('hosts', ()))} waits, and does not join now: {entry.text}"


def _excluded(entry: TimelineEntry) -> str:
    facts = entry.facts
    left = counted(int(facts.get("hosts_left") or 0), "other host")
    return f"{facts.get('host')} is not used any more: {entry.text}; {left} left"


def _host_failure(entry: TimelineEntry) -> str:
    facts = entry.facts
    so_far = facts.get("strikes")
    return f"a failure was counted against {facts.get('host')} ({so_far} of 2): {entry.text}"


def _crash_loop(entry: TimelineEntry) -> str:
    facts = entry.facts
    step = facts.get("checkpoint")
    since = "without any checkpoint" if step is None else f"without getting beyond step {step}"
    return f"the workers failed {facts.get('attempts')} times in a row {since}: no further try"


def _tasks_restarted(entry: TimelineEntry) -> str:
    tasks, hosts = entry.facts.get("tasks", ()), entry.facts.get("hosts", ())
    what = f"task{'' if len(tasks) == 1 else 's'} {names(tasks)}"
    where = f", last on {names(hosts)}," if list(hosts) != list(tasks) else ""
    avoids = entry.facts.get("avoids", ())
    but = f", but on {names(avoids)} only when nothing of it runs there" if avoids else ""
    return f"{what}{where} may start again as soon as a node is free{but} (requested by the leader)"


def _hang(entry: TimelineEntry) -> str:
    facts = entry.facts
    ranks = [r for r in facts.get("ranks") or () if isinstance(r, dict)]
    who = ", ".join(f"rank {r.get('rank')} on {r.get('host')}" for r in ranks)
    places = sorted({str(r["at"]) for r in ranks if r.get("at")})
    where = f" ({', '.join(places)})" if places else ""
    others = f"; the others: {facts['others']}" if facts.get("others") else ""
    stalled_s = duration(float(facts.get("stalled_s") or 0.0))
    blocked = f"blocked by {who}" if who else "no single rank to blame"
    return f"no step for {stalled_s}: {blocked}{where}{others}"


def _straggler(entry: TimelineEntry) -> str:
    facts = entry.facts
    who = f"rank {facts.get('rank')} on {facts.get('host')}"
    if not facts.get("slow"):
        return f"{who} keeps up with the others again"
    return f"{who} is slow: it needs {facts.get('ratio')} times as long for a step as the others"


def _preflight(entry: TimelineEntry) -> str:
    facts = entry.facts
    if facts.get("fit"):
        return f"{facts.get('host')} joins although a check has failed: {facts.get('reason')}"
    avoided = "; it is not used any more" if facts.get("excluded") else ""
    return f"{facts.get('host')} failed its health check: {facts.get('reason')}{avoided}"


def _start_failed(entry: TimelineEntry) -> str:
    facts = entry.facts
    slurm = ", ".join(str(word) for word in (facts["state"], facts.get("reason")) if word)
    where = f" on {facts['host']}" if facts.get("host") else ""
    what = f"task {facts.get('task')} failed{where} before it joined (Slurm: {slurm})"
    if facts.get("again"):
        return f"{what}: it is tried on another node"
    hosts = names(facts.get("hosts") or ())
    return f"{what}: no further try{f', after {hosts}' if hosts else ''}"


def _warm_worker_died(entry: TimelineEntry) -> str:
    facts = entry.facts
    what = f"the warm worker of {facts.get('host')} ended by itself ({facts.get('why')})"
    return f"{what}: the next restart takes longer there"


def _checkpoint_failed(entry: TimelineEntry) -> str:
    what = entry.text or f"the checkpoint of step {entry.facts.get('step')} was not written"
    return f"{what}; the training goes on"


def _checkpoint_recovered(entry: TimelineEntry) -> str:
    return f"checkpoints are written again, from step {entry.facts.get('step')} on"


def _cancel(entry: TimelineEntry) -> str:
    return f"{entry.facts.get('user')} cancelled the run, on {entry.facts.get('host')}"


def _preempt(entry: TimelineEntry) -> str:
    facts = entry.facts
    grace_s = float(facts.get("grace_s") or 0.0)
    return f"{facts.get('user')} preempted {facts.get('host')} ({grace_s:g} s grace)"


def _kill(entry: TimelineEntry) -> str:
    facts = entry.facts
    return f"{facts.get('user')} killed the processes of {facts.get('host')}"


def _resume(entry: TimelineEntry) -> str:
    facts = entry.facts
    return f"{facts.get('user')} resumed the run with nodes={facts.get('nodes')}"


def _never_member(entry: TimelineEntry) -> str:
    return f"{because(entry.causes, None)}; it was not in the group"


# ---- Causes as the beginning of a sentence (pure)


_NAMED = 4


def names(hosts: Sequence[str]) -> str:
    """Return names as a list in a sentence; a long list is cut."""
    named = sorted((host or "a node" for host in hosts), key=_naturally)
    if len(named) > _NAMED + 1:
        return f"{', '.join(named[:_NAMED])} and {len(named) - _NAMED} more"
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _naturally(name: str) -> list[tuple[int, str]]:
    """Sort node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def because(causes: Sequence[Cause], leader: str | None) -> str:
    """Return the causes of a change, and the new leader if it has changed."""
    parts = [_CAUSES.get(cause.what, _other)(cause) for cause in causes]
    if leader is not None and any(c.what not in ("arrived", "returned") for c in causes):
        parts.append(f"{leader} leads now")
    return ", ".join(parts)


def _other(cause: Cause) -> str:
    return f"{names(cause.hosts)} {cause.detail}".strip()


_DIED = "its agent or its node died", "their agents or their nodes died"
_SILENT = "it did not answer any more", "they did not answer any more"
LOSS_REASONS = {
    "": _SILENT,
    "its connection closed": _DIED,
    "silent": ("it sent no heartbeat any more", "they sent no heartbeat any more"),
    "has not found the new leader": (
        "it did not join the new leader", "they did not join the new leader",
    ),
    "the scheduler says that its task has ended": (
        "the scheduler says that its task has ended",
        "the scheduler says that their tasks have ended",
    ),
    "did not join again in time": (
        "it did not join again in time", "they did not join again in time",
    ),
}  # fmt: skip
"""Why the leader lost a node -> text for one node, and for several."""


def _was(cause: Cause, what: str) -> str:
    return f"{names(cause.hosts)} {'was' if len(cause.hosts) == 1 else 'were'} {what}"


def _announced(what: str) -> Callable[[Cause], str]:
    def text(cause: Cause) -> str:
        grace = None if cause.given_s is None else f"{duration(cause.given_s)} grace"
        how = ", ".join(part for part in (cause.signal, grace) if part)
        stays = ", and does not come back" if cause.comes_back is False else ""
        return _was(cause, what + (f" ({how})" if how else "")) + stays

    return text


def _of_task(what: str) -> Callable[[Cause], str]:
    """Return the text for what was done to tasks, with Slurm's state of the node at that time."""

    def text(cause: Cause) -> str:
        tasks = "the task" if len(cause.hosts) == 1 else "the tasks"
        was = "was" if len(cause.hosts) == 1 else "were"
        node = f", while Slurm had the node as {cause.detail}" if cause.detail else ""
        return f"{tasks} of {names(cause.hosts)} {was} {what} ({cause.signal or 'SIGTERM'}){node}"

    return text


def _time_limit(cause: Cause) -> str:
    left = "" if cause.given_s is None else f", {duration(cause.given_s)} before it"
    several = len(cause.hosts) > 1
    return f"{names(cause.hosts)} left because of {'their' if several else 'its'} time limit{left}"


def _asked(cause: Cause) -> str:
    by = cause.signal or "a notice file, or the script"
    return _was(cause, f"asked to leave ({by})")


def _seen(cause: Cause) -> str:
    of_one, of_several = LOSS_REASONS.get(cause.detail, (cause.detail, cause.detail))
    return of_one if len(cause.hosts) == 1 else of_several


def _lost(cause: Cause) -> str:
    return f"{_was(cause, 'lost')} ({_seen(cause)})"


def _leader_lost(cause: Cause) -> str:
    return f"{names(cause.hosts)}, the leader, was lost ({_seen(cause)})"


def _leader_changed(cause: Cause) -> str:
    return f"{names(cause.hosts)}, the leader, was unreachable for a while"


def _worker_failed(cause: Cause) -> str:
    return (
        f"a worker failed: {cause.detail}"
        if cause.detail
        else f"workers failed on {names(cause.hosts)}"
    )


def _returned(cause: Cause) -> str:
    several = "up to " if len(cause.hosts) > 1 else ""
    away = "" if cause.away_s is None else f" after {several}{duration(cause.away_s)} away"
    return f"{names(cause.hosts)} came back{away}"


_CAUSES: dict[str, Callable[[Cause], str]] = {
    "preempted": _announced("preempted"),
    "signalled": _of_task("terminated"),
    "requeued": _of_task("requeued"),
    "cancelled": _of_task("cancelled"),
    "run_ended": _of_task("terminated, because the run had ended"),
    "time_limit": _time_limit,
    "asked": _asked,
    "nodes_requeued": lambda c: _was(c, "requeued by the run"),
    "excluded": lambda c: f"{_was(c, 'excluded')} ({c.detail})",
    "agent_failed": lambda c: f"the agent of {names(c.hosts)} failed ({c.detail})",
    "agent_killed": lambda c: f"the agent of {names(c.hosts)} was ended by {c.detail}",
    "node_lost": _lost,
    "leader_lost": _leader_lost,
    "leader_changed": _leader_changed,
    "unreachable": lambda c: _was(c, "unreachable for a while"),
    "worker_failed": _worker_failed,
    "agent_restarted": lambda c: c.detail or "an agent has restarted",
    "arrived": lambda c: f"{names(c.hosts)} joined",
    "returned": _returned,
}


_SPECIAL: dict[str, Callable[[TimelineEntry], str]] = {
    "started": _started,
    "formed": _formed,
    "ended": _ended,
    "nodes_requeued": _nodes_requeued,
    "parked": _parked,
    "excluded": _excluded,
    "host_failure": _host_failure,
    "crash_loop": _crash_loop,
    "tasks_restarted": _tasks_restarted,
    "hang": _hang,
    "straggler": _straggler,
    "preflight": _preflight,
    "start_failed": _start_failed,
    "warm_worker_died": _warm_worker_died,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_recovered": _checkpoint_recovered,
    "cancel": _cancel,
    "preempt": _preempt,
    "kill": _kill,
    "resume": _resume,
    "task_exited": _never_member,
    "agent_failed": _never_member,
    "leader": lambda entry: because(entry.causes, entry.leader),
}
