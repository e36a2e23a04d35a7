"""The nodes that the tasks of a run avoid: until a time, or until a lost task has ended there.

    <run>/excluded_nodes.json     nodes that all tasks avoid until a time, and why

A lost task starts on its last node again only after a time in which its processes end there. Slurm
gives up a node that does not answer (SlurmdTimeout), and requeues its tasks. Where the node was
only cut off, or stood still, their last attempts live on and are ended when it is back. But it is
given work in that same moment, and still has the job id of a task that comes back too soon: Slurm
drains the node ("Duplicate jobid") then, and holds the task ("launch failed requeued held"),
however long the node was away (measured on 22.05 and 26.05). So a task whose end was not observed
avoids its last node, by ExcNodeList,

- until that has been up for ``RID_S``, as the run's leaders observe it, or has no power; or
- until its last attempt, which notices its requeue late, exits in good order.

    <run>/avoided/<task>@<node>   that is why the task avoids the node; in it, since when that is
                                  up again (Unix seconds)

What a task avoids for other reasons has no such file, and stays as it is. While it waits, other
tasks of its array that stand behind it do not start on the node either: of an array in which one
element cannot start Slurm tries no other in that round (22.05 and 26.05).
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run import queue_name
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import is_there, make_folder, read_json, read_text, write_atomic
from hpc_elastic.slurm.client import SlurmClient

_log = logging.getLogger(__name__)

RID_S = 60.0
"""Seconds that what is left of a task may run on a node that is back.

Twice the KillWait that Slurm has by default: our processes end on its SIGTERM, others at the
SIGKILL that follows.
"""


@dataclass(frozen=True)
class Exclusion:
    """Why the run's tasks avoid a node, and until when (Unix seconds).

    One that is lifted stays known, once for each node: a task that ran then still avoids the node,
    until it is requeued.
    """

    why: str
    until: float
    is_lifted: bool = False


def excluded(run: RunDir) -> Mapping[str, Exclusion]:
    """Return the nodes that the run's tasks avoid; none if unreadable."""
    return {host: e for host, e in _known_excluded(run).items() if not e.is_lifted}


def _known_excluded(run: RunDir) -> Mapping[str, Exclusion]:
    known: dict[str, Exclusion] = {}
    try:
        for host, v in (read_json(run.excluded) or {}).items():
            if isinstance(v, dict):
                known[host] = Exclusion(str(v["why"]), float(v["until"]), bool(v.get("is_lifted")))
            else:  # of an earlier version: without an end
                known[host] = Exclusion(str(v), 0.0)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return known


def remember_excluded(run: RunDir, hosts: Iterable[str], why: str, until: float) -> None:
    """Record nodes that the run's tasks are to avoid until a time; other agents may do so too."""
    new = dict.fromkeys(hosts, Exclusion(why, until))
    for _ in range(5):
        known = _known_excluded(run).items()
        kept = {h: e for h, e in known if h not in new or (e.until >= until and not e.is_lifted)}
        _write_excluded(run, {**new, **kept})
        time.sleep(random.uniform(0.0, 0.2))
        if new.keys() <= excluded(run).keys():
            break


def forget_excluded(run: RunDir, now: float) -> None:
    """Record that the run's tasks may start again on nodes whose exclusion has ended."""
    known = _known_excluded(run).items()
    _write_excluded(run, {h: e if e.until > now else replace(e, is_lifted=True) for h, e in known})


def _write_excluded(run: RunDir, known: Mapping[str, Exclusion]) -> None:
    text = json.dumps({host: vars(exclusion) for host, exclusion in known.items()}, indent=1)
    write_atomic(run.excluded, text + "\n")


def avoided_nodes(run: RunDir, task: str) -> tuple[list[str], list[str]]:
    """Return the nodes that a task avoids from now on, and those whose exclusion has ended."""
    known, now = _known_excluded(run), time.time()
    hosts = [host for host, exclusion in known.items() if exclusion.until > now]
    quarantine = f"{queue_name(task)}@"
    over = [h for h in known if h not in hosts and not is_there(run.avoided / (quarantine + h))]
    return hosts, over


def quarantine_node(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let a task that waits avoid its last node for now; after an error it may start there."""
    name = queue_name(task)
    if node in (client.excluded(name) or ()) and node not in excluded(run):
        return  # by this, or because the user has excluded it
    make_folder(run.avoided)
    (run.avoided / f"{name}@{node}").touch(0o644)
    client.exclude([name], [node])
    _log.warning("%s avoids %s until its earlier attempt has ended there", name, node)


def lift_own_quarantine(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let this task, which ends here and has been requeued, start here again."""
    file = run.avoided / f"{queue_name(task)}@{node}"
    try:
        if is_there(file):
            _lift_quarantine(run, file, client)
    except (SlurmCommandError, OSError) as e:
        _log.warning("%s may not start on %s for another minute: %s", task, node, e)


def lift_quarantine(run: RunDir, tasks: Iterable[str], client: SlurmClient, now: float) -> None:
    """Let tasks that are gone start again on nodes that have been up for `RID_S`, or have no power.

    The time that a node has been up counts from the first call, of any leader, that finds it so.
    After a SlurmCommandError or OSError call it again.
    """
    gone = set(map(queue_name, tasks))
    try:
        avoided = [file for file in run.avoided.iterdir() if file.name.partition("@")[0] in gone]
    except FileNotFoundError:
        return
    nodes = {node: client.node(node) for node in {f.name.partition("@")[2] for f in avoided}}
    for file in avoided:
        node = nodes[file.name.partition("@")[2]]
        if node.is_off:  # a cloud's instance that was taken back: nothing is left on it
            _lift_quarantine(run, file, client)
            continue
        try:
            since = float(read_text(file))
        except (FileNotFoundError, ValueError):
            since = None
        if (since is not None) != node.is_up:
            write_atomic(file, str(now) if node.is_up else "")
        elif since is not None and now - since >= RID_S:
            _lift_quarantine(run, file, client)


def _lift_quarantine(run: RunDir, file: Path, client: SlurmClient) -> None:
    """Let a task that waits start on a node, unless the whole run avoids that node by now."""
    task, _, node = file.name.partition("@")
    if node in excluded(run) or client.readmit(task, node):
        file.unlink(missing_ok=True)
