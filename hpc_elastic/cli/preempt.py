"""``hpc-elastic preempt``: take a node from a run, with notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli import nodes, options

_MARGIN_S = 30.0
_EXAMPLES = """
\b
Examples:
  hpc-elastic preempt last local-1
  hpc-elastic preempt runs/7 node3 --grace-s 60
  hpc-elastic preempt last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   what was preempted; attempt: of the task
  grace_s     the time that it was given
  left        whether it was left in time
  after_s     after how many seconds
  step        the step that all ranks saved before; null: none
  comes_back  whether its task went back to the queue; null: it was not left
"""


@click.command(epilog=_EXAMPLES)
@options.run
@nodes.argument
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="The time that the node is given. [default: the run's launcher.grace_s]",
)  # fmt: skip
@nodes.wait_option
@options.as_json
def command(
    run: Path, node: str, grace_s: float | None, wait_s: float | None, as_json: bool
) -> int:
    """Take NODE from a run with notice, as a preemption does: it saves, leaves and comes back.

    NODE is a node's name (node3, local-1) or that of its task, as `hpc-elastic status` shows them.
    All ranks save at one step, the node's workers are stopped, the others go on, and the node's
    task goes back to the queue. It starts again as soon as a node is free. This needs no right but
    that to write into the run directory: a notice file tells the run's leader.

    The command returns when the node was left. The exit code is 1 if it was not in time; a notice
    that nobody has taken by then is withdrawn. A run that has ended is refused.
    """
    found = nodes.find_node(run, node)
    return preempt(found, found.spec.grace_s if grace_s is None else grace_s, wait_s, as_json)


def preempt(node: nodes.Node, grace_s: float, wait_s: float | None, as_json: bool) -> int:
    """Give a node notice, wait until it is left, and say what came of it.

    Returns:
        0 if it was left, or the run has ended meanwhile; else 1.
    """
    from hpc_elastic.files import write_atomic

    wait_s = grace_s + _MARGIN_S if wait_s is None else wait_s
    if not as_json:
        print(f"preempting {node}: it has {grace_s:g} s to save and to leave", flush=True)
    before = len(node.events("left"))
    num_stops = len(_stops(node))
    node.note("preempt", grace_s=grace_s)
    notice = node.run.notices / node.task
    node.run.notices.mkdir(exist_ok=True)
    write_atomic(notice, f"{grace_s:g}\n")
    after_s = nodes.wait_until(node, lambda: len(node.events("left")) > before, wait_s)
    left = node.events("left")[before:]
    told = {
        **node.json, "grace_s": grace_s, "left": bool(left),
        "after_s": None if after_s is None else round(after_s, 1),
        "step": next((s["step"] for s in _stops(node)[num_stops:] if s.get("step")), None),
        "comes_back": left[0].get("how") in ("requeue", "requeued", "replace") if left else None,
    }  # fmt: skip
    unread = after_s is None and _withdraw(notice)
    if as_json:
        print(json.dumps(told, indent=2))
    elif after_s is None:
        why = "no leader has taken the notice, which is withdrawn" if unread else "it was told to"
        click.echo(f"{node.host} was not left within {wait_s:g} s: {why}", err=True)
    else:
        print(_outcome(node, told))
    return 1 if after_s is None else 0


def _stops(node: nodes.Node) -> list[dict[str, Any]]:
    """Return when rounds of the run were stopped."""
    from hpc_elastic.events import read_events

    return [e for e in read_events(node.run.event_logs) if e["kind"] == "stop"]


def _withdraw(notice: Path) -> bool:
    """Take a notice back; return False if it was taken already."""
    try:
        notice.unlink()
    except FileNotFoundError:
        return False
    return True


def _outcome(node: nodes.Node, told: dict[str, Any]) -> str:
    if not told["left"]:
        return f"the run has ended; {node.host} is left with it"
    saved = "" if told["step"] is None else f"; all ranks saved step {told['step']}"
    back = "starts again as soon as a node is free" if told["comes_back"] else "does not come back"
    return f"{node.host} was left after {told['after_s']} s{saved}; its task {back}"
