"""Faults of a sandbox's nodes and of its controller, and how each is undone.

Every function acts on a state that the caller has loaded and locked; one that starts a process
returns the state with it.

A node has a mount namespace, so a folder can turn read-only on one node: a read-only bind mount of
the folder on itself, which later look-ups of a path find. A file that was open stays writable.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from . import network, nfs
from .daemons import (
    cancel_jobs,
    init_of,
    is_available,
    is_idle,
    needs_resume,
    resume_nodes,
    run_slurm,
    start_slurmctld,
    start_slurmd,
    wait_for_controller,
    wait_for_nodes,
)
from .processes import (
    Process,
    SandboxError,
    continue_tree,
    is_alive,
    kill_process,
    log_tail,
    run_command,
    send_signal,
    state_letter,
    stop_tree,
    wait_until,
)
from .state import State

NODE_TIMEOUT_S = 60.0
_OF_THE_KERNEL = ("dev", "proc", "run", "sys")
"""They stay writable on a machine whose disks or shared file systems do not."""


def kill_node(state: State, node: str) -> None:
    """Kill every process of a node at once, without notice to Slurm."""
    nfs.kill_client(state, node)
    for process in (init_of(state, node), state.processes.get(node)):
        if process is not None and not kill_process(process):
            raise SandboxError(f"{node} (pid {process.pid}) does not end")


def start_node(state: State, node: str) -> State:
    """Start a dead node and wait until Slurm uses it; a living one is left alone."""
    if init_of(state, node) is None:
        state = boot_node(state, node)
        wait_for_return(state, [node])
    return state


def boot_node(state: State, node: str) -> State:
    """Start a node's client of the shared folder, if there is one, and the node."""
    return start_slurmd(nfs.start_client(state, node), node)


def wait_for_return(state: State, nodes: Sequence[str]) -> None:
    """Wait until Slurm uses the nodes again, and resume those that it has marked down."""

    def is_back(node_state: str) -> bool:
        if needs_resume(node_state):
            resume_nodes(state, nodes)
        return is_available(node_state)

    wait_for_nodes(state, nodes, is_back, NODE_TIMEOUT_S)


def pause_node(state: State, node: str) -> None:
    """Stop every process of a node, as on a machine that hangs.

    Raises:
        SandboxError: The node is dead, or some process does not stop.
    """
    if not stop_tree(_living_init(state, node)):
        raise SandboxError(
            f"not all processes of {node} stopped\n{log_tail(state.layout.log(node))}"
        )


def resume_node(state: State, node: str) -> None:
    """Continue a paused node; no effect on any other."""
    init = init_of(state, node)
    if init is not None:
        continue_tree(init)


def cut_node(state: State, node: str) -> None:
    """Disconnect a node from the network; its processes go on."""
    network.set_link(state.layout, node, up=False)


def reconnect_node(state: State, node: str) -> None:
    """Connect a node to the network again, and let all its packets through."""
    network.set_link(state.layout, node, up=True)
    network.impair(state.layout, node)


def make_read_only(state: State, node: str, *, spool: bool = False) -> None:
    """Make every folder of jobs read-only on a node, or instead Slurm's spool.

    Raises:
        SandboxError: The node is dead.
    """
    init = _living_init(state, node)
    folders = [_spool(state, node)] if spool else _job_folders()
    already = _read_only_folders(init, folders)
    fresh = [folder for folder in folders if folder not in already]
    _run_in_mounts(init, [f"mount --rbind {quote(folder)} {quote(folder)}" for folder in fresh])
    _remount(init, fresh, "ro")


def make_writable(state: State, node: str) -> None:
    """Undo `make_read_only`; no effect on any other node."""
    init = init_of(state, node)
    if init is not None:
        hidden = _read_only_folders(init, [*_job_folders(), _spool(state, node)])
        _remount(init, hidden, "rw")  # a process may have its working directory there
        _run_in_mounts(init, [f"umount --lazy {quote(folder)}" for folder in hidden])


def stop_controller(state: State) -> None:
    """End slurmctld with SIGTERM, so that it saves its state; no effect if it does not run."""
    process = state.processes["slurmctld"]
    send_signal(process, signal.SIGTERM)
    wait_until("the end of slurmctld", lambda: not is_alive(process), NODE_TIMEOUT_S)


def start_controller(state: State) -> State:
    """Start slurmctld if it does not run, and wait until it answers."""
    if not is_alive(state.processes["slurmctld"]):
        state = start_slurmctld(state)
        wait_for_controller(state)
    return state


def preempt_nodes(state: State, nodes: Sequence[str], for_s: float) -> str:
    """Submit a job of the `high` partition that takes whole nodes.

    Args:
        state: The sandbox.
        nodes: Names of the nodes.
        for_s: How long the job keeps them, counted from its start.

    Returns:
        The id of that job; cancel it to free the nodes early.
    """
    argv = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--job-name=preempt"]
    argv += ["--no-requeue", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    argv += ["--output=/dev/null", "--chdir=/", f"--wrap=sleep {for_s:g}"]
    return run_slurm(state, argv).stdout.strip()


def undo_faults(state: State) -> State:
    """Undo every fault of nodes, controller and file server; jobs are left alone."""
    nfs.heal_server(state)
    state = start_controller(state)
    for node in state.config.node_names:
        reconnect_node(state, node)
        resume_node(state, node)
        make_writable(state, node)
        if init_of(state, node) is None:
            state = boot_node(state, node)
    wait_for_return(state, state.config.node_names)
    return state


def heal_all(state: State) -> State:
    """Undo every fault, cancel every job and wait until all nodes are idle."""
    state = undo_faults(state)
    cancel_jobs(state)
    wait_for_nodes(state, state.config.node_names, is_idle, NODE_TIMEOUT_S)
    return state


def files_state(state: State, node: str) -> str:
    """Return ``writable`` or ``read-only`` for a node's files; ``unknown`` if it is dead."""
    init = init_of(state, node)
    if init is None or not os.access(f"/proc/{init.pid}/root", os.R_OK):
        return "unknown"
    read_only = _read_only_folders(init, [*_job_folders(), _spool(state, node)])
    return "read-only" if read_only else "writable"


def process_state(state: State, node: str) -> str:
    """Return ``running``, ``paused`` or ``dead`` for a node's processes."""
    init = init_of(state, node)
    if init is None:
        return "dead"
    return "paused" if state_letter(init) in ("T", "t") else "running"


def _living_init(state: State, node: str) -> Process:
    init = init_of(state, node)
    if init is None:
        raise SandboxError(f"{node} is dead: start it first")
    return init


def _job_folders() -> list[str]:
    """Return the top folders that jobs use: those of all file systems but the kernel's.

    Slurm's own files are not among them: a sandbox keeps those below ``/run``.
    """
    found = (entry for entry in Path("/").iterdir() if entry.name not in _OF_THE_KERNEL)
    return sorted(str(entry) for entry in found if entry.is_dir() and not entry.is_symlink())


def _spool(state: State, node: str) -> str:
    """Return the folder in which a node's slurmd keeps what it needs to start a job."""
    return str(state.layout.directory / "spool" / node)


def _read_only_folders(init: Process, folders: list[str]) -> list[str]:
    """Return the folders that are read-only on the node, but not on the machine."""
    view = f"/proc/{init.pid}/root"
    return [
        folder
        for folder in folders
        if not os.access(view + folder, os.W_OK) and os.access(folder, os.W_OK)
    ]


def _remount(init: Process, folders: list[str], access: str) -> None:
    points = {point for folder in folders for point in _mount_points(init, folder)}
    commands = [f"mount -o remount,bind,{access} {quote(point)}" for point in sorted(points)]
    _run_in_mounts(init, commands)


def _mount_points(init: Process, folder: str) -> list[str]:
    """Return the mount points at the folder or below it, as the node sees it."""
    lines = Path(f"/proc/{init.pid}/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if point == folder or point.startswith(f"{folder}/")]


def _run_in_mounts(init: Process, commands: list[str]) -> None:
    """Run lines of shell in a node's mount namespace."""
    enter = ["nsenter", f"--target={init.pid}", "--mount", "--pid"]
    run_command([*enter, "sh", "-ec", "\n".join(commands)])
