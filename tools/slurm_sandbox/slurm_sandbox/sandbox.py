"""`SlurmSandbox`: a real multi-node Slurm on this machine, as a Python object."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from . import client, faults, lifecycle, nfs, releases, requirements
from .commands import Completed, run
from .config import LOGIN, SandboxConfig, check_name, node_name
from .daemons import init_of
from .errors import NotUpError, SandboxError
from .lifecycle import Report, Status
from .state import DEFAULT_ROOT, State, load, locked


def _quiet(line: str) -> None:
    """Report nothing."""


def _with_release(config: SandboxConfig) -> SandboxConfig:
    """Return the settings with "" for the release that the machine has."""
    same = config.slurm and config.slurm == releases.system_release()
    return replace(config, slurm="") if same else config


class SlurmSandbox:
    """A sandbox that is up; get one from `up` or `attach`.

    It keeps no state of its own: every call reads the sandbox's state file, so several objects and
    the command line may act on one sandbox. Nodes are given as ``2``, ``"2"`` or ``"node2"``; all
    methods that take one raise ValueError for a node that is not there.

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
        report: Report = _quiet,
    ) -> SlurmSandbox:
        """Bring a sandbox up, or take the one that is up with these settings.

        Args:
            config: The settings; None for the default ones.
            root: The directory of all sandboxes.
            report: Is given lines that tell a person what is going on.

        Raises:
            MissingPackagesError: Install what it names.
            ReleaseError: The release of Slurm that is asked for can not be had.
            SandboxError: Not root, a daemon does not start, or it is up with other settings.
        """
        config = _with_release(config or SandboxConfig())
        requirements.check(config.accounting, slurm=config.slurm, nfs=bool(config.nfs))
        if config.slurm:
            releases.ensure(config.slurm, root, report)
        with locked(config.name, root):
            lifecycle.up(config, root, report)
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
            state = load(self.name, self.root)
            if state is not None:
                lifecycle.down(state)

    def status(self) -> Status:
        """Return how the sandbox is, up or not."""
        return lifecycle.status(self.name, self.root)

    @property
    def config(self) -> SandboxConfig:
        """The settings that it is up with."""
        return self._state().config

    @property
    def env(self) -> dict[str, str]:
        """The variables that point Slurm's commands at it, to be merged into os.environ."""
        return client.environment(self._state())

    @property
    def home(self) -> Path:
        """The home of the ordinary user, in whose name `as_user` runs commands."""
        return self._state().layout.home

    def as_user(self, argv: Sequence[str]) -> list[str]:
        """Return the command that does as an ordinary user what `argv` does as root."""
        login = self._state().layout.slurm_conf.with_name("login.sh")
        return ["unshare", "--mount", "sh", str(login), *argv]

    def on_login(self, argv: Sequence[str]) -> list[str]:
        """Return the command that does on the login node what `argv` does on this machine.

        They differ where a folder is shared as by NFS: the login node sees it by its own client.
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
        return client.node_states(self._state())

    def run(self, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0) -> Completed:
        """Run a Slurm command against the sandbox.

        Raises:
            CommandError: It failed and `check` is set.
            SandboxTimeoutError: It did not end in time.
        """
        return client.ask(self._state(), argv, check=check, timeout_s=timeout_s)

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
        init = init_of(state, name)
        if init is None:
            raise SandboxError(f"{name} is dead: start it first")
        enter = ["nsenter", f"--target={init.pid}", "--net", "--uts", "--mount", "--pid"]
        env = {**os.environ, **client.environment(state)}
        last_with_us = ["setpriv", "--pdeathsig", "KILL"]
        command = [*enter, *last_with_us, "env", f"--chdir={Path.cwd()}", *argv]
        return run(command, env=env, check=check, timeout_s=timeout_s)

    def kill_node(self, node: str | int) -> None:
        """End a node at once with every process on it, as a power cut."""
        self._act(faults.kill_node, node)

    def start_node(self, node: str | int) -> None:
        """Start a dead node and wait until Slurm has it back."""
        self._act(faults.start_node, node)

    def pause_node(self, node: str | int) -> None:
        """Stop every process of a node, as a machine that hangs."""
        self._act(faults.pause_node, node)

    def resume_node(self, node: str | int) -> None:
        """Let a paused node go on."""
        self._act(faults.resume_node, node)

    def partition(self, node: str | int) -> None:
        """Cut a node off from the network; its processes go on."""
        self._act(faults.partition, node)

    def heal(self, node: str | int) -> None:
        """Give a node its network back; `wait_idle` tells when Slurm has noticed."""
        self._act(faults.heal, node)

    def make_read_only(self, node: str | int, *, spool: bool = False) -> None:
        """Let a node see files read-only, as after a disk's error; what is open stays writable.

        Args:
            node: Which node.
            spool: Whether that is Slurm's spool only, so that Slurm holds a task that starts there
                (``launch failed requeued held``). Otherwise all but Slurm's files is read-only: a
                task whose output file is there fails (``JobLaunchFailure``).
        """
        self._act(functools.partial(faults.make_read_only, spool=spool), node)

    def make_writable(self, node: str | int) -> None:
        """Undo `make_read_only`."""
        self._act(faults.make_writable, node)

    def seen_by(self, client: str | int, path: Path) -> Path:
        """Return where this machine sees a path of the shared folder as a client of it does.

        Args:
            client: A node, or ``login``.
            path: A path in the folder.
        """
        state = self._nfs_state()
        return nfs.view(state, self._client(client), path)

    def file_operations(self, client: str | int) -> dict[str, int]:
        """Return what a client has asked the file server for since the sandbox is up.

        Args:
            client: A node, or ``login``.

        Returns:
            How often, by the names of `nfs.OPERATIONS`; and ``read_bytes`` and ``written_bytes``.
        """
        return nfs.operations(self._nfs_state().layout, self._client(client))

    def trace_files(self, on: bool = True) -> None:
        """Begin to write down what all clients ask the file server for, anew; or end that."""
        with self._locked_nfs() as state:
            nfs.trace(state, on)

    def file_trace(self, client: str | int) -> list[tuple[str, str]]:
        """Return what a client has asked for while that was written down, in order.

        Returns:
            Names of `nfs.OPERATIONS`, each with the path below the folder.
        """
        return nfs.traced(self._nfs_state().layout, self._client(client))

    def stop_server(self, client: str | int | None = None) -> None:
        """Let no operation on the shared folder end, of one client or of all."""
        with self._locked_nfs() as state:
            nfs.stop(state, nfs.ALL if client is None else self._client(client))

    def start_server(self) -> None:
        """Let the file server answer again."""
        with self._locked_nfs() as state:
            nfs.go_on(state)

    def restart_server(self) -> None:
        """Restart the file server: open files are ESTALE, what was not sent to it is lost."""
        with self._locked_nfs() as state:
            nfs.restart(state)

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
            error: Name of the error: ``EIO``, ``ENOSPC``, ``EDQUOT``, ``EROFS``, ...; ``LOST``
                means that the deed is done, its reply is lost, and the client tries again;
                ``REPLACES`` that a link takes the place of a name that is there.
            client: Whose operations: a node or ``login``; None for all.
            pattern: Shell pattern of paths below the folder; ``*`` matches slashes, too.
            operations: Which, by the names of `nfs.OPERATIONS`. By default ``write``, for EROFS all
                that change something, for LOST and REPLACES ``link``.
            times: How often; 0 for always.

        Raises:
            ValueError: No such error or operation.
        """
        with self._locked_nfs() as state:
            name = nfs.ALL if client is None else self._client(client)
            nfs.fail(state, error, client=name, pattern=pattern, operations=operations, times=times)

    def heal_server(self) -> None:
        """Undo all faults of the file server."""
        with self._locked_nfs() as state:
            nfs.heal(state)

    def preempt(self, nodes: Sequence[str | int], for_s: float = 30.0) -> str:
        """Take nodes away for a job of the `high` partition, and return that job's id."""
        state = self._state()
        return faults.preempt(state, [node_name(node, state.config) for node in nodes], for_s)

    def wait_idle(self, timeout_s: float = faults.NODE_TIMEOUT_S) -> None:
        """Wait until every node is idle.

        Raises:
            SandboxTimeoutError: Some are not.
        """
        state = self._state()
        client.wait_nodes(state, state.config.node_names, client.is_idle, timeout_s)

    def stop_controller(self) -> None:
        """End slurmctld in an orderly way; jobs go on, and nobody answers."""
        with self._locked_state() as state:
            faults.stop_controller(state)

    def start_controller(self) -> None:
        """Start slurmctld again, if it does not run, and wait until it answers."""
        with self._locked_state() as state:
            faults.start_controller(state)

    def bring_back(self) -> None:
        """Undo every fault and wait until Slurm has all nodes back; jobs are left alone."""
        with self._locked_state() as state:
            faults.bring_back(state)

    def heal_all(self) -> None:
        """Undo every fault, cancel all jobs, and wait until every node is idle."""
        with self._locked_state() as state:
            faults.heal_all(state)

    def _act(self, fault: Callable[[State, str], object], node: str | int) -> None:
        with self._locked_state() as state:
            fault(state, node_name(node, state.config))

    def _client(self, client: str | int) -> str:
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
        state = load(self.name, self.root)
        if state is None or not state.ready:
            raise NotUpError(self.name)
        return state

    @contextlib.contextmanager
    def _locked_state(self) -> Iterator[State]:
        with locked(self.name, self.root):
            yield self._state()
