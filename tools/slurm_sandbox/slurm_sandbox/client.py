"""Asking a sandbox's Slurm: what its nodes are doing, and which jobs it has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from .commands import Completed, run, search_path, wait_until
from .daemons import path
from .state import State

_WRITTEN_OFF = ("down", "drain", "fail")


def environment(state: State) -> dict[str, str]:
    """Return the variables that point Slurm's commands at the sandbox.

    PATH is among them unless it would find the sandbox's own release by itself.
    """
    conf = {"SLURM_CONF": str(state.layout.slurm_conf)}
    wanted, present = path(state.layout), search_path(os.environ)
    by_itself = state.layout.programs is None and set(wanted.split(":")) == set(present.split(":"))
    return conf if by_itself else {**conf, "PATH": wanted}


def ask(
    state: State, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0
) -> Completed:
    """Run a Slurm command against the sandbox and return what it wrote."""
    env = {**os.environ, **environment(state)}
    return run(argv, env=env, check=check, timeout_s=timeout_s)


def node_states(state: State) -> dict[str, str]:
    """Return Slurm's state of each node, such as ``idle`` or ``down*``; empty without an answer."""
    done = ask(state, ["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"], check=False)
    return dict(line.split() for line in done.stdout.splitlines())


def is_idle(node_state: str) -> bool:
    """Tell whether a node in that state is there and has nothing to do."""
    return node_state == "idle"


def is_there(node_state: str) -> bool:
    """Tell whether a node in that state answers Slurm and may run jobs; pure."""
    return "*" not in node_state and not node_state.startswith((*_WRITTEN_OFF, "unknown"))


def is_written_off(node_state: str) -> bool:
    """Tell whether Slurm gives a node in that state no jobs until it is resumed; pure."""
    return node_state.startswith(_WRITTEN_OFF)


def wait_nodes(
    state: State, nodes: Sequence[str], accept: Callable[[str], bool], timeout_s: float
) -> None:
    """Wait until Slurm reports an acceptable state for each of the nodes.

    Raises:
        SandboxTimeoutError: Names the nodes still in another state.
    """

    def others() -> list[str]:
        states = node_states(state)
        found = {node: states.get(node, "unknown") for node in nodes}
        return [f"{node} is {found[node]}" for node in nodes if not accept(found[node])]

    def what() -> str:
        return f"{accept.__name__}: {', '.join(others())}"

    log = state.layout.log("slurmctld")
    wait_until(what, lambda: not others(), timeout_s, log=log)


def job_ids(state: State) -> list[str]:
    """Return the ids of all jobs that are pending or running, one for each job array."""
    done = ask(state, ["squeue", "-h", "-a", "-o", "%A"])
    return list(dict.fromkeys(done.stdout.split()))


def cancel_all(state: State) -> None:
    """Cancel every job at once: SIGKILL first, so that none uses its KillWait."""
    ids = job_ids(state)
    if ids:
        ask(state, ["scancel", "--full", "--signal=KILL", *ids], check=False)
        ask(state, ["scancel", *ids], check=False)


def resume(state: State, nodes: Iterable[str]) -> None:
    """Put nodes that Slurm has written off back into service."""
    states = node_states(state)
    away = [node for node in nodes if is_written_off(states.get(node, ""))]
    if away:
        ask(
            state,
            ["scontrol", "update", f"nodename={','.join(away)}", "state=resume"],
            check=False,
        )
