"""`SlurmSandbox`: a real multi-node Slurm on this machine, as a Python object.

`up` records before it acts: the directory and the network are in the state file before the first
namespace exists, each daemon before it runs. So the next `up` or `down` knows what an `up` that was
killed has left, and removes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypedDict

from . import daemons, faults, network, nfs, releases
from .config import LOGIN, Layout, SandboxConfig, check_name, node_name
from .processes import Completed, SandboxError, is_alive, kill_process, run_command
from .releases import Report
from .state import DEFAULT_ROOT, NotUpError, State, load_state, locked, remove_directory, save_state

_LAYOUT_LOCK = "-places"  # no sandbox can have this name


class NodeStatus(TypedDict):
    """State of one node: its processes, its link, its files, and Slurm's state of it."""

    name: str
    address: str
    processes: str
    link: str
    files: str
    slurm: str


class SandboxStatus(TypedDict):
    """State of a sandbox; `up` means that its daemons run, whatever state its nodes are in.

    `nfs` is the folder that nodes see through NFS clients, "" if there is none.
    """

    name: str
    up: bool
    slurm_conf: str
    network: str
    nfs: str
    nodes: list[NodeStatus]


def _discard(line: str) -> None:
    """Report nothing."""


class SlurmSandbox:
    """A sandbox that is up; get one from `up` or `attach`.

    It holds no state of its own: every call reads the sandbox's state file, so several objects and
    the command line may act on one sandbox. Nodes are given as ``2``, ``"2"`` or ``"node2"``; all
    methods that take one raise ValueError for an unknown node.

    Attributes:
        name: The sandbox's name.
        root: The directory of all sandboxes.
    """

    def __init__(self, name: str = "default", root: Path = DEFAULT_ROOT) -> None:
        check_name(name)
        self.name = name
        self.root = root

    @classmethod
    def up(
        cls,
        config: SandboxConfig | None = None,
        *,
        root: Path = DEFAULT_ROOT,
        report: Report = _discard,
    ) -> SlurmSandbox:
        """Bring a sandbox up, or attach to the one that is up with these settings.

        Jobs of a sandbox that is up go on; its dead nodes are started. A broken one is made new.

        Args:
            config: The settings; None for the default ones.
            root: The directory of all sandboxes.
            report: Receives lines for people on what is being done.

        Raises:
            MissingPackagesError: Install what it names.
            ReleaseError: The release of Slurm is not available.
            SandboxError: Not root, a daemon does not start, or it is up with other settings.
        """
        config = config or SandboxConfig()
        if config.slurm == releases.system_release():
            config = replace(config, slurm="")
        releases.check_requirements(config.accounting, slurm=config.slurm, nfs=bool(config.nfs))
        if config.slurm:
            releases.ensure_release(config.slurm, root, report)
        with locked(config.name, root):
            _bring_up(config, root, report)
        return cls(config.name, root)

    @classmethod
    def attach(cls, name: str = "default", *, root: Path = DEFAULT_ROOT) -> SlurmSandbox:
        """Return the sandbox of that name.

        Raises:
            NotUpError: It is not up.
        """
        sandbox = cls(name, root)
        sandbox._state()
        return sandbox

    def down(self) -> None:
        """End and remove the sandbox, or what is left of it; no effect if there is none."""
        with locked(self.name, self.root):
            state = load_state(self.name, self.root)
            if state is not None:
                _take_down(state)

    def status(self) -> SandboxStatus:
        """Return the state of the sandbox, up or not."""
        state = load_state(self.name, self.root)
        if state is None:
            return SandboxStatus(
                name=self.name, up=False, slurm_conf="", network="", nfs="", nodes=[]
            )
        slurm = daemons.node_states(state) if is_up(state) else {}
        return SandboxStatus(
            name=self.name,
            up=is_up(state),
            slurm_conf=str(state.layout.slurm_conf),
            network=f"10.{state.layout.octet}.0.0/24",
            nfs=state.config.nfs,
            nodes=[
                NodeStatus(
                    name=node,
                    address=state.layout.address(node),
                    processes=faults.process_state(state, node),
                    link=network.link_state(state.layout, node),
                    files=faults.files_state(state, node),
                    slurm=slurm.get(node, "unknown"),
                )
                for node in state.config.node_names
            ],
        )

    @property
    def config(self) -> SandboxConfig:
        """The settings that it is up with."""
        return self._state().config

    @property
    def env(self) -> dict[str, str]:
        """The variables that point Slurm's commands at it, to be merged into os.environ."""
        return daemons.slurm_env(self._state())

    @property
    def home(self) -> Path:
        """The home of the ordinary user of `as_user`."""
        return self._state().layout.home

    def as_user(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` as an ordinary user."""
        login = self._state().layout.slurm_conf.with_name("login.sh")
        return ["unshare", "--mount", "sh", str(login), *argv]

    def on_login(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on the login node.

        It differs from `argv` if a folder is shared as by NFS: the login node has a client of its
        own.
        """
        state = self._state()
        if not state.config.nfs:
            return list(argv)
        script = state.layout.slurm_conf.with_name("on_login.sh")
        return ["unshare", "--mount", "sh", str(script), *argv]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, ``node1`` first."""
        return self.config.node_names

    def address(self, node: str | int) -> str:
        """Return a node's address."""
        state = self._state()
        return state.layout.address(node_name(node, state.config))

    def node_states(self) -> dict[str, str]:
        """Return Slurm's state of each node, such as ``idle``, ``mixed`` or ``down*``."""
        return daemons.node_states(self._state())

    def run(self, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0) -> Completed:
        """Run a Slurm command against the sandbox.

        Raises:
            CommandError: It failed and `check` is set.
            SandboxTimeoutError: It did not end in time.
        """
        return daemons.run_slurm(self._state(), argv, check=check, timeout_s=timeout_s)

    def exec_on(
        self, node: str | int, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command on a node, outside any job, in the present directory.

        Raises:
            CommandError: It failed and `check` is set.
            SandboxError: The node is dead.
            SandboxTimeoutError: It did not end in time.
        """
        state = self._state()
        name = node_name(node, state.config)
        init = daemons.init_of(state, name)
        if init is None:
            raise SandboxError(f"{name} is dead: start it first")
        enter = ["nsenter", f"--target={init.pid}", "--net", "--uts", "--mount", "--pid"]
        env = {**os.environ, **daemons.slurm_env(state)}
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
        command = [*enter, *dies_with_us, "env", f"--chdir={Path.cwd()}", *argv]
        return run_command(command, env=env, check=check, timeout_s=timeout_s)

    def kill_node(self, node: str | int) -> None:
        """Kill every process of a node at once, as a power cut does."""
        self._apply(faults.kill_node, node)

    def start_node(self, node: str | int) -> None:
        """Start a dead node and wait until Slurm uses it."""
        self._apply(faults.start_node, node)

    def pause_node(self, node: str | int) -> None:
        """Stop every process of a node, as on a machine that hangs."""
        self._apply(faults.pause_node, node)

    def resume_node(self, node: str | int) -> None:
        """Continue a paused node."""
        self._apply(faults.resume_node, node)

    def partition(self, node: str | int) -> None:
        """Disconnect a node from the network; its processes go on."""
        self._apply(faults.cut_node, node)

    def heal(self, node: str | int) -> None:
        """Connect a node to the network again; `wait_idle` waits until Slurm has noticed."""
        self._apply(faults.reconnect_node, node)

    def impair(self, node: str | int, *, cut: Sequence[str | int] = (), loss: float = 0.0) -> None:
        """Drop packets that a node sends; without arguments it sends all again.

        Args:
            node: The node.
            cut: Nodes that none of its packets reach, while it reaches all others. They still
                send to it, but no connection comes up without its answers.
            loss: Share of all its packets that are lost, at random.
        """
        with self._locked_state() as state:
            others = [node_name(other, state.config) for other in cut]
            network.impair(state.layout, node_name(node, state.config), cut=others, loss=loss)

    def make_read_only(self, node: str | int, *, spool: bool = False) -> None:
        """Make files read-only on a node, as after a disk's error; open files stay writable.

        Args:
            node: The node.
            spool: Whether only Slurm's spool is read-only: Slurm then holds a task that starts
                there (``launch failed requeued held``). Otherwise all but Slurm's files is
                read-only: a task whose output file is there fails (``JobLaunchFailure``).
        """
        self._apply(functools.partial(faults.make_read_only, spool=spool), node)

    def make_writable(self, node: str | int) -> None:
        """Undo `make_read_only`."""
        self._apply(faults.make_writable, node)

    def preempt(self, nodes: Sequence[str | int], for_s: float = 30.0) -> str:
        """Preempt nodes by a job of the `high` partition, and return that job's id."""
        state = self._state()
        return faults.preempt_nodes(state, [node_name(n, state.config) for n in nodes], for_s)

    def wait_idle(self, timeout_s: float = faults.NODE_TIMEOUT_S) -> None:
        """Wait until every node is idle.

        Raises:
            SandboxTimeoutError: Some are not.
        """
        state = self._state()
        daemons.wait_for_nodes(state, state.config.node_names, daemons.is_idle, timeout_s)

    def stop_controller(self) -> None:
        """End slurmctld in an orderly way; jobs go on, and Slurm's commands get no answer."""
        with self._locked_state() as state:
            faults.stop_controller(state)

    def start_controller(self) -> None:
        """Start slurmctld if it does not run, and wait until it answers."""
        with self._locked_state() as state:
            faults.start_controller(state)

    def bring_back(self) -> None:
        """Undo every fault and wait until Slurm uses all nodes; jobs are left alone."""
        with self._locked_state() as state:
            faults.undo_faults(state)

    def heal_all(self) -> None:
        """Undo every fault, cancel all jobs, and wait until every node is idle."""
        with self._locked_state() as state:
            faults.heal_all(state)

    def seen_by(self, client: str | int, path: Path) -> Path:
        """Return the path at which this machine sees the shared folder as a client does.

        Args:
            client: A node, or ``login``.
            path: A path in the folder.
        """
        return nfs.path_of_client(self._nfs_state(), self._client(client), path)

    def file_operations(self, client: str | int) -> dict[str, int]:
        """Return a client's counters of operations on the file server, since `up`.

        Args:
            client: A node, or ``login``.

        Returns:
            Counts by the names of `nfs.OPERATIONS`; and ``read_bytes`` and ``written_bytes``.
        """
        return nfs.count_operations(self._nfs_state().layout, self._client(client))

    def trace_files(self, on: bool = True) -> None:
        """Start to record the operations of all clients, from nothing; or stop."""
        with self._locked_nfs() as state:
            nfs.trace_operations(state, on)

    def file_trace(self, client: str | int) -> list[tuple[str, str]]:
        """Return the recorded operations of a client, in order.

        Returns:
            Names of `nfs.OPERATIONS`, each with the path below the folder.
        """
        return nfs.read_trace(self._nfs_state().layout, self._client(client))

    def stop_server(self, client: str | int | None = None) -> None:
        """Let no operation on the shared folder end, of one client or of all."""
        with self._locked_nfs() as state:
            nfs.stop_server(state, self._client(client))

    def start_server(self) -> None:
        """Let the file server answer again."""
        with self._locked_nfs() as state:
            nfs.start_server(state)

    def restart_server(self) -> None:
        """Restart the file server: open files are ESTALE, data that was not sent is lost."""
        with self._locked_nfs() as state:
            nfs.restart_server(state)

    def fail_files(
        self,
        error: str,
        *,
        client: str | int | None = None,
        pattern: str = nfs.ALL,
        operations: Sequence[str] = (),
        times: int = 0,
    ) -> None:
        """Let operations of the file server fail, until `heal_server`.

        Args:
            error: Name of the error: ``EIO``, ``ENOSPC``, ``EDQUOT``, ``EROFS``, ...; ``LOST``: the
                operation is done, its reply is lost, and the client tries again; ``REPLACES``: a
                link replaces an existing name without an error.
            client: A node or ``login``; None for all.
            pattern: Shell pattern of paths below the folder; ``*`` matches slashes, too.
            operations: Names of `nfs.OPERATIONS`. By default ``write``; for EROFS all that change
                something; for LOST and REPLACES ``link``.
            times: Number of operations that fail; 0 for all.

        Raises:
            ValueError: No such error or operation.
        """
        with self._locked_nfs() as state:
            name = self._client(client)
            nfs.fail_operations(
                state, error, client=name, pattern=pattern, operations=operations, times=times
            )

    def heal_server(self) -> None:
        """Undo all faults of the file server."""
        with self._locked_nfs() as state:
            nfs.heal_server(state)

    def _apply(self, fault: Callable[[State, str], object], node: str | int) -> None:
        with self._locked_state() as state:
            fault(state, node_name(node, state.config))

    def _client(self, client: str | int | None) -> str:
        if client is None:
            return nfs.ALL
        return LOGIN if client == LOGIN else node_name(client, self.config)

    def _nfs_state(self) -> State:
        state = self._state()
        if not state.config.nfs:
            raise SandboxError(f"sandbox {self.name!r} shares no folder: bring it up with --nfs")
        return state

    @contextlib.contextmanager
    def _locked_nfs(self) -> Iterator[State]:
        with locked(self.name, self.root):
            yield self._nfs_state()

    def _state(self) -> State:
        state = load_state(self.name, self.root)
        if state is None or not state.ready:
            raise NotUpError(self.name)
        return state

    @contextlib.contextmanager
    def _locked_state(self) -> Iterator[State]:
        with locked(self.name, self.root):
            yield self._state()


def is_up(state: State) -> bool:
    """Return whether `up` was completed and the daemons outside the nodes still run."""
    nodes = state.config.node_names
    inside = {*nodes, *map(nfs.process_name, nodes)}
    outside = [process for name, process in state.processes.items() if name not in inside]
    return state.ready and all(map(is_alive, outside))


def _bring_up(config: SandboxConfig, root: Path, report: Report) -> None:
    found = load_state(config.name, root)
    if found is not None and is_up(found):
        _check_same(found.config, config)
        report(f"sandbox {config.name!r} is up already")
        faults.undo_faults(found)
        return
    if found is not None:
        report(f"removing what is left of sandbox {config.name!r}")
        _take_down(found)
    _start_daemons(_lay_out(config, root), report)


def _check_same(found: SandboxConfig, asked: SandboxConfig) -> None:
    old, new = asdict(found), asdict(asked)
    differences = [f"{key} is {old[key]}, not {new[key]}" for key in old if old[key] != new[key]]
    if differences:
        raise SandboxError(
            f"sandbox {found.name!r} is up with other settings ({'; '.join(differences)}): "
            "take it down first, or choose another name"
        )


def _lay_out(config: SandboxConfig, root: Path) -> State:
    """Choose the sandbox's layout, record it, and build network and files.

    One sandbox at a time chooses: the next one sees the network of this one.
    """
    with locked(_LAYOUT_LOCK, root):
        octet = network.choose_octet(config.name, network.networks_in_use())
        tree = releases.tree_of(config.slurm) if config.slurm else None
        layout = Layout(config.name, root / config.name, octet, network.choose_port(octet), tree)
        if layout.directory.exists():  # without a state file: killed before it had done anything
            shutil.rmtree(layout.directory)
        state = save_state(State(config, layout))
        network.remove_network(layout)
        network.build_network(config, layout)
    daemons.write_files(config, layout)
    return state


def _start_daemons(state: State, report: Report) -> None:
    """Start all daemons and wait until every node is idle."""
    names = state.config.node_names
    report(f"starting {len(names)} nodes on {state.layout.controller_address}/24")
    state = daemons.start_munged(state)
    if state.config.accounting:
        report("starting the accounting database")
        state = daemons.start_accounting(state)
    state = daemons.start_slurmctld(state)
    daemons.wait_for_controller(state)
    state = nfs.start_client(state, LOGIN)
    for node in names:
        state = faults.boot_node(state, node)
    daemons.wait_for_nodes(state, names, daemons.is_idle, faults.NODE_TIMEOUT_S)
    save_state(replace(state, ready=True))


def _take_down(state: State) -> None:
    """End all processes of the sandbox and remove all that it made.

    Raises:
        SandboxError: A process does not end; the state is kept, so it can be tried again.
    """
    nodes = [name for name in state.processes if name in state.config.node_names]
    for name in nodes:
        faults.kill_node(state, name)
    for name in reversed([name for name in state.processes if name not in nodes]):
        if not kill_process(state.processes[name]):
            raise SandboxError(f"{name} (pid {state.processes[name].pid}) does not end")
    if state.config.constrain_devices:
        daemons.remove_cgroups(state.config)
    nfs.remove_clients(state)
    network.remove_network(state.layout)
    remove_directory(state)
