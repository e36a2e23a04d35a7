"""``hpc-elastic kill``: let a run lose a node without notice."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpc_elastic.cli import nodes, options
from hpc_elastic.slurm.states import LAUNCHER_ENDED

_WAIT_S = 60.0
_EXAMPLES = """
\b
Examples:
  hpc-elastic kill last local-1
  hpc-elastic kill runs/7 node3
  hpc-elastic kill last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   what was killed; attempt: of the task
  gone     whether nothing of it runs any more
  after_s  after how many seconds
"""


@click.command(epilog=_EXAMPLES)
@options.run
@nodes.argument
@nodes.wait_option
@options.as_json
def command(run: Path, node: str, wait_s: float | None, as_json: bool) -> int:
    """Kill the agent and the workers of NODE, as if it had died: to see what a run makes of that.

    NODE is a node's name (node3, local-1) or that of its task, as `hpc-elastic status` shows them.
    SIGKILL ends its processes at once and nothing is saved: what was done since the last checkpoint
    is done again. The node's task goes back to the queue, as that of a lost node does. The machine
    itself is left alone, and so are other jobs on it.

    The nodes of a gang's job can not be killed one by one, and are refused; so is a run that has
    ended. The exit code is 1 if the node is still there after the time.
    """
    return kill(nodes.find_node(run, node), _WAIT_S if wait_s is None else wait_s, as_json)


def kill(node: nodes.Node, wait_s: float, as_json: bool) -> int:
    """Kill a node's processes, wait until they are gone, and say what came of it.

    Returns:
        0 if they are, else 1.
    """
    from hpc_elastic.submit.living import kill_node, require_killable

    require_killable(node.task)
    if not as_json:
        print(f"killing {node}: nothing is saved", flush=True)
    node.note("kill")
    kill_node(node.spec, node.task)
    after_s = nodes.wait_until(node, lambda: nodes.is_lost(node, nodes.state_now(node)), wait_s)
    if after_s is not None:
        _bring_back(node)
    if as_json:
        gone = after_s is not None
        print(json.dumps({**node.json, "gone": gone, "after_s": after_s}, indent=2))
    elif after_s is None:
        click.echo(f"{node.host} is still there after {wait_s:g} s", err=True)
    else:
        print(f"{node.host} is gone after {after_s:.1f} s; {_what_next(node)}")
    return 1 if after_s is None else 0


def _what_next(node: nodes.Node) -> str:
    """Say whether the task of a node that is gone starts again."""
    if node.run.is_over:
        return "its task does not come back: the run has ended"
    left = node.spec.requeues_left(node.attempt)
    if left is not None and left <= 0:
        return f"its task does not come back, by launcher.max_requeues={node.spec.max_requeues}"
    state = nodes.state_now(node)
    if state is not None and state.reason == LAUNCHER_ENDED:
        return f"its task does not come back: {LAUNCHER_ENDED}"
    return "its task starts again as soon as a node is free"


def _bring_back(node: nodes.Node) -> None:
    """Let the tasks of a run without any node come back: no leader is left to see to it.

    The last one may have been killed by another command at the same time.
    """
    from hpc_elastic.agent.tasks import tasks_of

    gone = nodes.left_alone(node)
    if gone:
        tasks_of(node.spec).bring_back(node.run, gone)
