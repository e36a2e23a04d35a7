"""What can be done to a sandbox's nodes: kill, pause, cut off, take away, and bring back.

Functions here act on a state that the caller has loaded, and return the state that holds after.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from . import network
from .client import ask, cancel_all, is_idle, is_there, is_written_off, resume, wait_nodes
from .commands import tail, wait_until
from .daemons import init_of, start_slurmctld, start_slurmd, wait_for_controller
from .errors import SandboxError
from .processes import continue_tree, end, is_alive, send, state_of, stop_tree
from .state import State

NODE_TIMEOUT_S = 60.0


def kill_node(state: State, node: str) -> None:
    """End a node at once, with every process on it; nothing is told to Slurm."""
    init = init_of(state, node)
    if init is not None and not end(init):
        raise SandboxError(f"{node} (pid {init.pid}) does not end")
    outer = state.processes.get(node)
    if outer is not None and not end(outer):
        raise SandboxError(f"{node} (pid {outer.pid}) does not end")


def start_node(state: State, node: str) -> State:
    """Start a dead node and wait until Slurm has it back; a living one is left alone.

    Returns:
        The state with the node's new process.
    """
    if init_of(state, node) is None:
        state = start_slurmd(state, node)
        wait_back(state, [node])
    return state


def wait_back(state: State, nodes: Sequence[str], timeout_s: float = NODE_TIMEOUT_S) -> None:
    """Wait until Slurm uses the nodes again, clearing what it holds against them."""

    def back(node_state: str) -> bool:
        if is_written_off(node_state):
            resume(state, nodes)
        return is_there(node_state)

    wait_nodes(state, nodes, back, timeout_s)


def pause_node(state: State, node: str) -> None:
    """Stop every process of a node, as a machine that hangs.

    Raises:
        SandboxError: The node is dead, or some process would not stand still.
    """
    init = init_of(state, node)
    if init is None:
        raise SandboxError(f"{node} is dead: there is nothing to pause")
    if not stop_tree(init):
        raise SandboxError(f"not all processes of {node} stopped\n{tail(state.layout.log(node))}")


def resume_node(state: State, node: str) -> None:
    """Let a paused node go on; no effect on any other."""
    init = init_of(state, node)
    if init is not None:
        continue_tree(init)


def partition(state: State, node: str) -> None:
    """Cut a node off from the network; its processes go on."""
    network.set_link(state.layout, node, up=False)


def heal(state: State, node: str) -> None:
    """Give a node its network back."""
    network.set_link(state.layout, node, up=True)


def stop_controller(state: State) -> None:
    """End slurmctld with SIGTERM, so that it saves its state; no effect if it does not run."""
    process = state.processes["slurmctld"]
    send(process, signal.SIGTERM)
    wait_until("the end of slurmctld", lambda: not is_alive(process), NODE_TIMEOUT_S)


def start_controller(state: State) -> State:
    """Start slurmctld if it does not run, and wait until it answers.

    Returns:
        The state with its process.
    """
    if not is_alive(state.processes["slurmctld"]):
        state = start_slurmctld(state)
        wait_for_controller(state)
    return state


def preempt(state: State, nodes: Sequence[str], for_s: float) -> str:
    """Submit a job of the `high` partition that takes whole nodes from whoever has them.

    Args:
        state: The sandbox.
        nodes: Which nodes.
        for_s: How long it keeps them, counted from its start.

    Returns:
        The id of that job; cancel it to give the nodes back early.
    """
    argv = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--job-name=preempt"]
    argv += ["--no-requeue", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    argv += ["--output=/dev/null", "--chdir=/", f"--wrap=sleep {for_s:g}"]
    return ask(state, argv).stdout.strip()


def bring_back(state: State) -> State:
    """Undo every fault: slurmctld runs, cables in, paused nodes go on, dead ones are started.

    Jobs are left alone.

    Returns:
        The state with new processes of the nodes that were dead.
    """
    state = start_controller(state)
    for node in state.config.node_names:
        heal(state, node)
        resume_node(state, node)
        if init_of(state, node) is None:
            state = start_slurmd(state, node)
    wait_back(state, state.config.node_names)
    return state


def heal_all(state: State) -> State:
    """Undo every fault, cancel every job and wait until all nodes are idle."""
    state = bring_back(state)
    cancel_all(state)
    wait_nodes(state, state.config.node_names, is_idle, NODE_TIMEOUT_S)
    return state


def process_state(state: State, node: str) -> str:
    """Return ``running``, ``paused`` or ``dead`` for a node's processes."""
    init = init_of(state, node)
    if init is None:
        return "dead"
    return "paused" if state_of(init) in ("T", "t") else "running"
