"""The node that a task was lost with: it starts there again only when that is rid of it.

Slurm gives up a node that it does not hear (SlurmdTimeout), and requeues its tasks. Where the node
was only cut off, or stood still, their last attempts live on and are ended when it is back. But it
is given work in that same moment, and knows the job id still of a task that comes back too soon:
Slurm drains the node ("Duplicate jobid") then, and holds the task ("launch failed requeued held"),
however long the node was away (measured on 22.05 and 26.05). So a task whose end nobody has seen
avoids its last node, by ExcNodeList,

- until that has been up for ``RID_S``, as the run's leaders see it; or
- until its last attempt, which learns of its fate at last, leaves in good order.

    <run>/avoided/<task>@<node>   that is why the task avoids the node; in it, since when that is
                                  up again (Unix seconds)

What a task avoids for other reasons has no such file, and stays as it is. While it waits, other
tasks of its array that stand behind it do not start on the node either: of an array of which one
element can not start Slurm tries no other in that round (22.05 and 26.05).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.files import is_there, write_atomic
from hpc_elastic.rundir import RunDir
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import queue_name

_log = logging.getLogger(__name__)

RID_S = 60.0
"""How long what is left of a task may run on a node that is back.

Twice the KillWait that Slurm has by default: our processes end on its SIGTERM, others at the
SIGKILL that follows.
"""


def avoid(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Keep a task that waits away from its last node for now.

    Raises:
        SlurmCommandError: Slurm does not answer; the task may start there.
        OSError: the run's directory can not be written; likewise.
    """
    name = queue_name(task)
    if node in (client.excluded(name) or ()):
        return  # by this, or for good
    run.avoided.mkdir(exist_ok=True)
    _file(run, name, node).touch()
    client.exclude([name], [node])
    _log.warning("%s does not start on %s until that is rid of it", name, node)


def leave(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let this task, which ends here now and has been requeued meanwhile, come here again.

    For its agent, once it has told Slurm when the next attempt may start (`requeue.depart`).
    """
    try:
        if is_there(_file(run, queue_name(task), node)):
            _readmit(run, queue_name(task), node, client)
    except (SlurmCommandError, OSError) as e:
        _log.warning("%s may not start on %s for another minute: %s", task, node, e)


def readmit(run: RunDir, tasks: Iterable[str], client: SlurmClient, now: float) -> None:
    """Let tasks start on the nodes that they avoid for now, where these are rid of them (leader).

    To be called again and again: how long a node has been up counts from the first call that finds
    it so, whoever made that.

    Args:
        run: The run.
        tasks: Those of its tasks that are gone; others are seen to when they are.
        client: How to reach Slurm. It is asked about nodes that one of these tasks avoids.
        now: Unix time. The next leader's clock may differ by seconds, which do not matter here.

    Raises:
        SlurmCommandError: Slurm does not answer; to be tried again.
        OSError: the run's directory can not be read or written; likewise.
    """
    gone = set(map(queue_name, tasks))
    avoided = [(task, node) for task, node in _avoided(run) if task in gone]
    is_up = {node: client.is_up(node) for node in {node for _, node in avoided}}
    for task, node in avoided:
        file = _file(run, task, node)
        since = _up_since(file)
        if (since is not None) != is_up[node]:
            write_atomic(file, str(now) if is_up[node] else "")
        elif since is not None and now - since >= RID_S:
            _readmit(run, task, node, client)


def _readmit(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let a task that waits start on a node, unless the run has come to avoid that for good."""
    for_good = node in replacement.excluded(run)
    if for_good or client.readmit(task, node):
        _file(run, task, node).unlink(missing_ok=True)


def _avoided(run: RunDir) -> Iterator[tuple[str, str]]:
    try:
        names = [file.name for file in run.avoided.iterdir()]
    except FileNotFoundError:
        return
    for name in names:
        task, _, node = name.partition("@")
        yield task, node


def _up_since(file: Path) -> float | None:
    try:
        return float(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _file(run: RunDir, task: str, node: str) -> Path:
    return run.avoided / f"{task}@{node}"
