"""The processes of the run on the sandbox's nodes: agents, workers, spares; and what is left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from hpc_elastic.worker.shared_page import SharedPage
from slurm_sandbox import SlurmSandbox
from slurm_sandbox.daemons import init_of
from slurm_sandbox.processes import namespace_members
from slurm_sandbox.state import load_state

_AGENT = "hpc_elastic.agent"
_WORKERS_OUTPUT = re.compile(r"/round-\d+\.rank-\d+\.out$")
_CONTROL_PAGE = re.compile(r"/worker-\d+$")
_NODES_OWN = ("node_init.py", "slurmd")


def agent_on(sandbox: SlurmSandbox, node: str) -> psutil.Process | None:
    """Return the agent on a node; None: there is none."""
    return next((p for p in _on(sandbox, node) if _runs_python(p) and _AGENT in _argv(p)), None)


def workers_on(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the workers on a node: what they print goes into a round's file."""
    return [p for p in _children(sandbox, node) if _is_worker(p)]


def spares_on(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the spares on a node."""
    return [p for p in _children(sandbox, node) if not _is_worker(p)]


def num_unsaved(worker: psutil.Process) -> int:
    """Return how many checkpoints of a worker could not be written, as it has told its agent."""
    try:
        paths = [m.path for m in worker.memory_maps() if _CONTROL_PAGE.search(m.path)]
        pages = [SharedPage(Path(f"/proc/{worker.pid}/root{path}")) for path in paths]
    except (psutil.Error, OSError):  # it has just ended
        return 0
    return sum(page.read().num_unsaved for page in pages)


def left_over(sandbox: SlurmSandbox, folder: Path) -> list[str]:
    """Return what lives of a run: all on the nodes but their own daemons, and what names a folder.

    Returns:
        A line for each process: where it is, its id and its command.
    """
    found = [(node, p) for node in sandbox.nodes for p in _on(sandbox, node) if not _is_nodes(p)]
    on_nodes = {p.pid for _, p in found}
    found += [
        ("this machine", p)
        for p in psutil.process_iter()
        if p.pid not in {os.getpid(), *on_nodes} and any(str(folder) in a for a in _argv(p))
    ]
    return [f"{where}: process {p.pid}, {' '.join(_argv(p))}" for where, p in found]


def _on(sandbox: SlurmSandbox, node: str) -> Iterator[psutil.Process]:
    state = load_state(sandbox.name, sandbox.root)
    init = init_of(state, node) if state is not None else None
    for process in namespace_members(init) if init is not None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid)
            if found.status() != psutil.STATUS_ZOMBIE:
                yield found


def _children(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the workers and spares of a node: each has a session of its own."""
    agent = agent_on(sandbox, node)
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for child in agent.children() if agent is not None else ():
            if _runs_python(child) and os.getsid(child.pid) == child.pid:
                found.append(child)
    return found


def _is_worker(process: psutil.Process) -> bool:
    try:
        return bool(_WORKERS_OUTPUT.search(str(Path(f"/proc/{process.pid}/fd/1").readlink())))
    except OSError:
        return False


def _is_nodes(process: psutil.Process) -> bool:
    return any(Path(part).name in _NODES_OWN for part in _argv(process))


def _runs_python(process: psutil.Process) -> bool:
    return Path(next(iter(_argv(process)), "")).name.startswith("python")


def _argv(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
