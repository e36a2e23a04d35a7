"""What can be done to a sandbox's nodes: kill, pause, cut off, make read-only, and bring back.

Functions here act on a state that the caller has loaded, and return the state that holds after.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from . import mounts, network, nfs
from .client import ask, cancel_all, is_idle, is_there, is_written_off, resume, wait_nodes
from .commands import tail, wait_until
from .daemons import init_of, start_slurmctld, start_slurmd, wait_for_controller
from .errors import SandboxError
from .processes import continue_tree, end, is_alive, send, state_of, stop_tree
from .state import State

NODE_TIMEOUT_S = 60.0


def kill_node(state: State, node: str) -> None:
    """End a node at once, with every process on it; nothing is told to Slurm."""
    nfs.end_client(state, node)
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
        state = boot_node(state, node)
        wait_back(state, [node])
    return state


def boot_node(state: State, node: str) -> State:
    """Start a node's client of the shared folder, if there is one, and the node.

    Returns:
        The state with their processes.
    """
    return start_slurmd(nfs.start_client(state, node), node)


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


def make_read_only(state: State, node: str, *, spool: bool = False) -> None:
    """Let a node see every folder of jobs read-only, or Slurm's spool in place of them.

    Raises:
        SandboxError: The node is dead.
    """
    init = init_of(state, node)
    if init is None:
        raise SandboxError(f"{node} is dead: start it first")
    own_spool = mounts.spool(state.layout, node)
    mounts.make_read_only(init, [own_spool] if spool else mounts.job_folders())


def make_writable(state: State, node: str) -> None:
    """Undo `make_read_only`; no effect on any other node."""
    init = init_of(state, node)
    if init is not None:
        mounts.make_writable(init, [*mounts.job_folders(), mounts.spool(state.layout, node)])


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
    """Undo every fault; jobs are left alone.

    slurmctld and the file server answer, cables are in, paused nodes go on, read-only ones may
    write, dead ones start.

    Returns:
        The state with new processes of the nodes that were dead.
    """
    nfs.heal(state)
    state = start_controller(state)
    for node in state.config.node_names:
        heal(state, node)
        resume_node(state, node)
        make_writable(state, node)
        if init_of(state, node) is None:
            state = boot_node(state, node)
    wait_back(state, state.config.node_names)
    return state


def heal_all(state: State) -> State:
    """Undo every fault, cancel every job and wait until all nodes are idle."""
    state = bring_back(state)
    cancel_all(state)
    wait_nodes(state, state.config.node_names, is_idle, NODE_TIMEOUT_S)
    return state


def files_state(state: State, node: str) -> str:
    """Return ``writable`` or ``read-only`` for a node's files, ``unknown`` where nothing tells."""
    init = init_of(state, node)
    if init is None or not os.access(f"/proc/{init.pid}/root", os.R_OK):
        return "unknown"
    folders = [*mounts.job_folders(), mounts.spool(state.layout, node)]
    return "read-only" if mounts.read_only(init, folders) else "writable"


def process_state(state: State, node: str) -> str:
    """Return ``running``, ``paused`` or ``dead`` for a node's processes."""
    init = init_of(state, node)
    if init is None:
        return "dead"
    return "paused" if state_of(init) in ("T", "t") else "running"
