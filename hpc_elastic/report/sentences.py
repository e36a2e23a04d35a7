"""The timeline of a run as plain sentences, one line each, the cause first (pure)."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from hpc_elastic._util import counted, duration
from hpc_elastic.report.timeline import Cause, TimelineEntry
from hpc_elastic.run.events import LossReason


def lines(entries: Iterable[TimelineEntry], day: str = "") -> Iterator[str]:
    """Yield a timeline as it is printed, with a line for each date after ``day``."""
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
    if entry.kind in _TEMPLATES:
        hosts = names(entry.facts.get("hosts") or ())
        facts = defaultdict(lambda: None, entry.facts, hosts=hosts, text=entry.text)
        found = _TEMPLATES[entry.kind].format_map(facts)
    elif (aside := _aside(entry)) is not None:
        found = aside
    else:
        parts = [because(entry.causes, entry.leader), *_outcome(entry)]
        found = "; ".join(part for part in parts if part)
    return " ".join(found.splitlines())  # one line, whatever the texts of the run contain


def _outcome(entry: TimelineEntry) -> Iterator[str]:
    cost = entry.cost
    if cost.saved_step is not None:
        yield f"all ranks saved step {cost.saved_step}"
    yield _size(entry)
    if entry.nodes_after == 0:
        back = [cause.comes_back for cause in entry.causes]
        if back and all(back):
            yield "the run waits in the queue until a node is free"
        else:
            unsure = None in back or any(back)
            yield "no node trains" if unsure else "no node comes back by itself"
    elif entry.is_open:
        yield "it is not over yet"
    elif entry.has_replicas and entry.nodes_before:
        ready_s = entry.facts.get("ready_s")
        if entry.kind == "shrank":
            yield f"the others train on{'; lost 0 steps' if cost.lost_steps == 0 else ''}"
        else:
            joins = "" if ready_s is None else f", together after {duration(ready_s)}"
            yield f"the others trained on{joins}"
    else:
        price = []
        if cost.lost_steps is not None:
            back_to = f" (from {cost.reached_step} back to {cost.resumed_step})"
            is_known = cost.lost_steps and cost.resumed_step is not None
            least = "at least " if cost.is_least else ""
            steps = counted(cost.lost_steps, "step")
            price.append(f"lost {least}{steps}{back_to if is_known else ''}")
        elif cost.resumed_step is not None:
            price.append(f"on from step {cost.resumed_step}")
        if cost.pause_s is not None:
            what = "trained again" if cost.trains else "formed again"
            price.append(f"{what} after {duration(cost.pause_s)}")
        yield ", ".join(price)


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


# ---- entries that change no group


_TEMPLATES = {
    "parked": "{hosts} waits, and does not join now: {text}",
    "nodes_given_back": "{hosts}: given back for job {job} of {user} (nodes: {needs})",
    "node_drained": "{host} is {state}: it is left at the next checkpoint",
    "host_failure": "a failure was counted against {host} ({strikes} of 2): {text}",
    "gpus_not_measured": "the GPUs of {host} cannot be measured: {why}",
    "notice_command_failed": "launcher.agent.notice_command fails on {host}: {why}",
    "warm_worker_died": "the warm worker of {host} ended by itself ({why}): the next restart takes "
                        "longer there",
    "checkpoint_recovered": "checkpoints are written again, from step {step} on",
    "heal_failed": "{worker} cannot take over the state, and is kept out for a time: {reason}",
    "state_unsaved": "{hosts} did not save in time: the steps since the last checkpoint are lost",
    "cancel": "{user} cancelled the run, on {host}",
    "started": "the run started: its first node is {host} (task {task})",
    "kill": "{user} killed the processes of {host}",
    "resume": "{user} resumed the run with nodes={nodes}",
}  # fmt: skip
"""Kind of entry -> its sentence, of its facts and its text."""


def _aside(entry: TimelineEntry) -> str | None:
    """Return the sentence of an entry that is no change of the group; None if it is one."""
    facts = entry.facts
    host, user = facts.get("host"), facts.get("user")
    match entry.kind:
        case "formed":
            size, workers = counted(entry.nodes_after or 0, "node"), entry.workers or 0
            leads = f"; {entry.leader} leads" if entry.leader else ""
            ready_s, hosts = facts.get("ready_s"), names(facts.get("hosts", ()))
            first = "" if ready_s is None else f"; first step after {duration(ready_s)}"
            return f"group of {size}, {counted(workers, 'worker')}, formed: {hosts}{leads}{first}"
        case "ended":
            how = {"succeeded": "the run succeeded", "failed": "the run failed"}
            what = how.get(str(facts.get("status")), "the run was closed")
            why = f": {entry.text}" if entry.text else ""
            groups = counted(int(facts.get("rounds") or 0), "group")
            restarts = counted(int(facts.get("restarts") or 0), "restart")
            took = duration(facts["lasted_s"])
            return f"{what}{why}; it took {took}, {groups} and {restarts} after failures"
        case "leader":
            return because(entry.causes, entry.leader)
        case "task_exited" | "agent_failed":
            return f"{because(entry.causes, None)}; it was not in the group"
        case "nodes_requeued":
            hosts = names(facts.get("hosts") or ())
            away = duration(float(facts.get("delay_s") or 0.0))
            if facts.get("all"):
                why = facts.get("why") or "too few nodes for too long"
                back = f"all go back to the queue for {away}, so that other runs can start"
                return f"{why}: {back}" + (f" ({hosts})" if hosts else "")
            what = hosts or counted(int(facts.get("nodes") or 0), "node")
            return f"{what} cannot be used now: back to the queue for {away}"
        case "growth_decision":
            size = counted(int(facts.get("nodes") or 0), "node")
            now = "may grow again" if facts.get("grows") else "grows no further"
            return f"the run has {size} and {now}: {entry.text}"
        case "sweep_decision":
            runs = facts.get("runs") or ()
            return f"run{'' if len(runs) == 1 else 's'} {names(runs)} {entry.text}"
        case "excluded":
            left = counted(int(facts.get("hosts_left") or 0), "other host")
            return f"{host} is not used for up to an hour: {entry.text}; {left} left"
        case "left_out":
            if not facts.get("hosts"):
                return "the nodes that were left out reach all others again"
            pairs = int(facts.get("pairs") or 0)
            more = f" and {pairs - len(facts['cut'])} more" if pairs > len(facts["cut"]) else ""
            cut = f"no connection {', '.join(facts['cut'])}{more}"
            return f"{names(facts['hosts'])} left out of the group ({cut}); tried again later"
        case "tasks_restarted":
            tasks, hosts = facts.get("tasks", ()), facts.get("hosts", ())
            what = f"task{'' if len(tasks) == 1 else 's'} {names(tasks)}"
            where = f", last on {names(hosts)}," if list(hosts) != list(tasks) else ""
            avoids = facts.get("avoids", ())
            but = f", but on {names(avoids)} only when nothing of it runs there" if avoids else ""
            may = f"may start again as soon as a node is free{but} (requested by the leader)"
            return f"{what}{where} {may}"
        case "preflight":
            if facts.get("fit"):
                return f"{host} joins although a check has failed: {facts.get('reason')}"
            avoided = "; it is not used any more" if facts.get("excluded") else ""
            return f"{host} failed its health check: {facts.get('reason')}{avoided}"
        case "start_failed":
            slurm = ", ".join(str(word) for word in (facts["state"], facts.get("reason")) if word)
            where = f" on {host}" if host else ""
            what = f"task {facts.get('task')} failed{where} before it joined (Slurm: {slurm})"
            if facts.get("again"):
                return f"{what}: it is tried on another node"
            hosts = names(facts.get("hosts") or ())
            return f"{what}: no further try{f', after {hosts}' if hosts else ''}"
        case "leader_failed":
            then = "another election follows" if facts.get("again") else "no further try"
            count = counted(int(facts.get("terms") or 1), "term")
            return f"the leader on {host} failed: {entry.text}; {count} in a row so far, {then}"
        case "preempt":
            return f"{user} preempted {host} ({float(facts.get('grace_s') or 0.0):g} s grace)"
        case "crash_loop":
            step, attempts = facts.get("checkpoint"), facts.get("attempts")
            beyond = f"without getting beyond step {step}"
            since = "without any checkpoint" if step is None else beyond
            return f"the workers failed {attempts} times in a row {since}: no further try"
        case "hang":
            ranks = [r for r in facts.get("ranks") or () if isinstance(r, dict)]
            who = ", ".join(f"rank {r.get('rank')} on {r.get('host')}" for r in ranks)
            places = sorted({str(r["at"]) for r in ranks if r.get("at")})
            where = f" ({', '.join(places)})" if places else ""
            others = f"; the others: {facts['others']}" if facts.get("others") else ""
            blocked = f"blocked by {who}" if who else "no single rank to blame"
            stalled = duration(float(facts.get("stalled_s") or 0.0))
            return f"no step for {stalled}: {blocked}{where}{others}"
        case "straggler":
            who = f"rank {facts.get('rank')} on {host}"
            if not facts.get("slow"):
                return f"{who} keeps up with the others again"
            ratio = facts.get("ratio")
            return f"{who} is slow: it needs {ratio} times as long for a step as the others"
        case "group_mismatch":
            sizes = {rank.get("group_size") for rank in facts.get("ranks") or ()}
            groups = " or ".join(f"a group of {n}" if n else "no process group" for n in sizes)
            of = counted(len(facts.get("ranks") or ()), "worker")
            all_ = facts.get("world_size")
            return f"{of} of {all_}, on {host}, did not train with the others: {groups}"
        case "bad_loss":
            first, *_ = facts.get("ranks") or [{}]
            return f"the loss was {first.get('loss')} at step {first.get('step')} on {host}"
        case "slow_exit":
            of = counted(len(facts.get("ranks") or ()), "worker")
            waited = duration(float(facts.get("waited_s") or 0.0))
            return f"a process of {of} on {host}, {waited} after the success: {facts.get('how')}"
        case "checkpoint_failed":
            what = entry.text or f"the checkpoint of step {facts.get('step')} was not written"
            return f"{what}; the training goes on"
        case "state_mismatch":
            what = f"step {facts.get('step')}: the state of {facts.get('worker')} differs from "
            what += f"that of its peers in {facts.get('tensors')}"
            then = "it heals" if facts.get("heals") else "it is left as it is"
            return f"{what}; {then}. Check this node's hardware"
        case _:
            return None


# ---- causes as the beginning of a sentence


_NAMED = 4


def names(hosts: Sequence[str]) -> str:
    """Return names as a list in a sentence; a long list is cut."""
    named = sorted((host or "a node" for host in hosts), key=naturally)
    if len(named) > _NAMED + 1:
        return f"{', '.join(named[:_NAMED])} and {len(named) - _NAMED} more"
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def naturally(name: str) -> list[tuple[int, str]]:
    """Sort node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def because(causes: Sequence[Cause], leader: str | None) -> str:
    """Return the causes of a change, and the new leader if it has changed."""
    parts = [_cause(cause) for cause in causes]
    if leader is not None and any(c.what not in ("arrived", "returned") for c in causes):
        parts.append(f"{leader} leads now")
    return ", ".join(parts)


_CAUSES = {
    "nodes_requeued": "{hosts} {was} requeued by the run",
    "excluded": "{hosts} {was} excluded ({detail})",
    "agent_failed": "the agent of {hosts} failed ({detail})",
    "agent_killed": "the agent of {hosts} was ended by {detail}",
    "leader_changed": "{hosts}, the leader, was unreachable for a while",
    "unreachable": "{hosts} {was} unreachable for a while",
    "arrived": "{hosts} joined",
}


def _cause(cause: Cause) -> str:
    hosts, is_one, detail = names(cause.hosts), len(cause.hosts) == 1, cause.detail
    was = "was" if is_one else "were"
    match cause.what:
        case "preempted":
            grace = None if cause.given_s is None else f"{duration(cause.given_s)} grace"
            how = ", ".join(part for part in (cause.signal, grace) if part)
            stays = ", and does not come back" if cause.comes_back is False else ""
            return f"{hosts} {was} preempted{f' ({how})' if how else ''}{stays}"
        case "signalled" | "requeued" | "cancelled" | "run_ended":
            # what was done to tasks, with Slurm's state of the node at that time
            ended = {
                "run_ended": "terminated, because the run had ended",
                "signalled": "terminated",
            }
            done = ended.get(cause.what, cause.what)
            tasks = "the task" if is_one else "the tasks"
            node = f", while Slurm had the node as {detail}" if detail else ""
            return f"{tasks} of {hosts} {was} {done} ({cause.signal or 'SIGTERM'}){node}"
        case "time_limit":
            left = "" if cause.given_s is None else f", {duration(cause.given_s)} before it"
            theirs = "their" if len(cause.hosts) > 1 else "its"
            return f"{hosts} left because of {theirs} time limit{left}"
        case "given_back":
            return f"{hosts} {was} given back for {detail}"
        case "asked" if detail and cause.signal is None:
            return f"{hosts} {was} preempted by {detail} (hpc-elastic node preempt)"
        case "asked":
            how = cause.signal or "a notice file, or the script"
            return f"{hosts} {was} asked to leave ({how})"
        case "node_lost" | "leader_lost":
            of_one, of_several = _LOSS_REASONS.get(detail, (detail, detail))
            who = f"{hosts} {was}" if cause.what == "node_lost" else f"{hosts}, the leader, was"
            return f"{who} lost ({of_one if is_one else of_several})"
        case "worker_failed":
            return f"a worker failed: {detail}" if detail else f"workers failed on {hosts}"
        case "agent_restarted":
            return detail or "an agent has restarted"
        case "returned":
            several = "up to " if len(cause.hosts) > 1 else ""
            away = "" if cause.away_s is None else f" after {several}{duration(cause.away_s)} away"
            return f"{hosts} came back{away}"
        case _:
            if template := _CAUSES.get(cause.what):
                return template.format(hosts=hosts, was=was, detail=detail)
            return f"{hosts} {detail}".strip()


_LOSS_REASONS: dict[str, tuple[str, str]] = {
    "": ("it did not answer any more", "they did not answer any more"),
    LossReason.CONNECTION_CLOSED:
        ("its agent or its node died", "their agents or their nodes died"),
    LossReason.SILENT: ("it sent no heartbeat any more", "they sent no heartbeat any more"),
    LossReason.LEADER_NOT_FOUND:
        ("it did not join the new leader", "they did not join the new leader"),
    LossReason.TASK_ENDED: ("the scheduler reports that its task has ended",
                            "the scheduler reports that their tasks have ended"),
    LossReason.NOT_REJOINED: ("it did not join again in time", "they did not join again in time"),
}  # fmt: skip
"""Why the leader lost a node -> text for one node, and for several."""
