"""Bringing a sandbox up and down, and telling how it is.

`up` records before it acts: the directory and the network are in the state file before the first
namespace exists, each daemon before it runs. So whatever an `up` that was killed has left, the
next `up` or `down` knows it and removes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

from . import accounting, daemons, network, nfs, releases
from .client import is_idle, node_states, wait_nodes
from .config import LOGIN, SandboxConfig
from .errors import SandboxError
from .faults import NODE_TIMEOUT_S, boot_node, bring_back, files_state, kill_node, process_state
from .layout import Layout
from .processes import end, is_alive
from .state import State, forget, load, locked, save

Report = Callable[[str], None]
_PLACES = "-places"  # no sandbox can have this name


class NodeStatus(TypedDict):
    """How one node is: its processes, its cable, its files, and what Slurm thinks of it."""

    name: str
    address: str
    processes: str
    link: str
    files: str
    slurm: str


class Status(TypedDict):
    """How a sandbox is; `up` means that its daemons run, whatever state its nodes are in.

    `nfs` is the folder that nodes see through NFS clients, "" if there is none.
    """

    name: str
    up: bool
    slurm_conf: str
    network: str
    nfs: str
    nodes: list[NodeStatus]


def up(config: SandboxConfig, root: Path, report: Report) -> State:
    """Bring a sandbox up, or return it if it is; a broken one is made new.

    The caller holds the lock. Jobs of a sandbox that is up go on; its dead nodes are started.

    Raises:
        SandboxError: It is up with other settings, or a daemon does not start.
    """
    found = load(config.name, root)
    if found is not None and is_up(found):
        _check_same(found.config, config)
        report(f"sandbox {config.name!r} is up already")
        return bring_back(found)
    if found is not None:
        report(f"removing what is left of sandbox {config.name!r}")
        down(found)
    return _start(_prepare(config, root), report)


def _check_same(found: SandboxConfig, asked: SandboxConfig) -> None:
    old, new = asdict(found), asdict(asked)
    differences = [f"{key} is {old[key]}, not {new[key]}" for key in old if old[key] != new[key]]
    if differences:
        raise SandboxError(
            f"sandbox {found.name!r} is up with other settings ({'; '.join(differences)}): "
            "take it down first, or choose another name"
        )


def _prepare(config: SandboxConfig, root: Path) -> State:
    """Choose the sandbox's place, record it, and build files and network there.

    Places are chosen one sandbox at a time: the next one sees the network of this one.
    """
    with locked(_PLACES, root):
        octet = network.choose_octet(config.name, network.networks_in_use())
        tree = releases.tree_of(config.slurm) if config.slurm else None
        layout = Layout(config.name, root / config.name, octet, network.choose_port(octet), tree)
        if layout.directory.exists():  # without a state file: killed before it had done anything
            shutil.rmtree(layout.directory)
        state = save(State(config, layout))
        network.remove(layout)
        network.build(config, layout)
    daemons.write_files(config, layout)
    return state


def _start(state: State, report: Report) -> State:
    """Start all daemons and wait until every node is idle."""
    names = state.config.node_names
    report(f"starting {len(names)} nodes on {state.layout.controller_address}/24")
    state = daemons.start_munged(state)
    if state.config.accounting:
        report("starting the accounting database")
        state = accounting.start(state)
    state = daemons.start_slurmctld(state)
    daemons.wait_for_controller(state)
    state = nfs.start_client(state, LOGIN)
    for node in names:
        state = boot_node(state, node)
    wait_nodes(state, names, is_idle, NODE_TIMEOUT_S)
    return save(State(state.config, state.layout, state.processes, ready=True))


def is_up(state: State) -> bool:
    """Tell whether `up` was completed and the daemons outside the nodes still run."""
    theirs = {*state.config.node_names, *map(nfs.process_name, state.config.node_names)}
    central = [process for name, process in state.processes.items() if name not in theirs]
    return state.ready and all(is_alive(process) for process in central)


def down(state: State) -> None:
    """End everything that the sandbox started and remove all that it made.

    Raises:
        SandboxError: A process does not end; the state is kept, so `down` can be called again.
    """
    nodes = [name for name in state.processes if name in state.config.node_names]
    for name in nodes:
        kill_node(state, name)
    for name in reversed([name for name in state.processes if name not in nodes]):
        if not end(state.processes[name]):
            raise SandboxError(f"{name} (pid {state.processes[name].pid}) does not end")
    nfs.remove(state)
    network.remove(state.layout)
    forget(state)


def status(name: str, root: Path) -> Status:
    """Return how a sandbox is; of one that is not there, only that."""
    state = load(name, root)
    if state is None:
        return Status(name=name, up=False, slurm_conf="", network="", nfs="", nodes=[])
    slurm = node_states(state) if is_up(state) else {}
    return Status(
        name=name,
        up=is_up(state),
        slurm_conf=str(state.layout.slurm_conf),
        network=f"10.{state.layout.octet}.0.0/24",
        nfs=state.config.nfs,
        nodes=[_node_status(state, node, slurm) for node in state.config.node_names],
    )


def _node_status(state: State, node: str, slurm: dict[str, str]) -> NodeStatus:
    return NodeStatus(
        name=node,
        address=state.layout.address(node),
        processes=process_state(state, node),
        link=network.link_state(state.layout, node),
        files=files_state(state, node),
        slurm=slurm.get(node, "unknown"),
    )
