"""The fake cluster, as a test has it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hpc_elastic.testing.fake_slurm import jobs
from hpc_elastic.testing.fake_slurm.config import FakeCommandError, FakeConfig, FakeSlurmError
from hpc_elastic.testing.fake_slurm.controller import CONFIG, SOCKET
from hpc_elastic.testing.fake_slurm.queries import COMMANDS
from hpc_elastic.transport import interface as interface_module

_POLL_S = 0.05
_PATIENCE_S = 180.0
"""How long is waited, unless one says; programs import torch on machines that have other work."""


@dataclass(frozen=True)
class Completed:
    """What a command wrote, and how it ended."""

    stdout: str
    stderr: str
    returncode: int


class FakeSlurm:
    """A Slurm cluster of processes on this machine, for the length of a ``with`` block.

    Its commands (sbatch, squeue, scontrol, scancel, srun, sinfo, sacct) are on the PATH of `env`.
    At the end of the block every process of every job is killed, whatever happened, and so are
    programs that `start` has started; with the jobs' that happens too if this process dies.

    Args:
        nodes: Number of nodes.
        **settings: Others of `FakeConfig`: ``grace_s=10``.

    Raises:
        ValueError: a setting makes no sense.
    """

    def __init__(self, nodes: int = 4, **settings: Any) -> None:
        self.config = FakeConfig(nodes=nodes, **settings)
        self._host: Host | None = None
        self._preempting: list[str] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start the cluster.

        Raises:
            FakeSlurmError: it does not start; says what its controller wrote.
        """
        self._host = Host.start(self.config)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the cluster, and everything that runs on it."""
        self.close()

    def close(self) -> None:
        """End the cluster, and everything that runs on it; may be repeated."""
        while self._started:
            with self._started.pop() as program:
                program.kill()
        host, self._host = self._host, None
        if host is not None:
            host.stop()

    @property
    def folder(self) -> Path:
        """The cluster's directory; it goes with it."""
        if self._host is None:
            raise FakeSlurmError("the fake Slurm is not up: use it in its `with` block")
        return self._host.folder

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, with the cluster's commands first on PATH."""
        path = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)])
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, ``node1`` first."""
        return self.config.node_names

    def log(self) -> str:
        """Return what the controller has written; nothing, if all went well."""
        return (self.folder / "controller.log").read_text(errors="replace")

    def run(self, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0) -> Completed:
        """Run a command against the cluster.

        Raises:
            FakeCommandError: it failed and `check` is set.
            FakeSlurmError: it did not end in time.
        """
        env = self.env
        words = list(map(str, argv))
        words[0] = shutil.which(words[0], path=env["PATH"]) or words[0]
        try:
            done = subprocess.run(
                words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise FakeSlurmError(f"{shlex.join(words)} did not end in {timeout_s:g} s") from e
        if check and done.returncode:
            raise FakeCommandError(list(argv), done.returncode, done.stderr or done.stdout)
        return Completed(done.stdout, done.stderr, done.returncode)

    def start(self, argv: Sequence[str], cwd: Path | str | None = None) -> subprocess.Popen[str]:
        """Start a program that uses the cluster: your script, which submits a run and waits for it.

        It writes where this process does. What runs still when the block ends is killed: a test
        that fails does not wait for it.

        Args:
            argv: The program, and its arguments.
            cwd: Where it works; by default where this process does.

        Raises:
            OSError: it can not be started.
        """
        program = subprocess.Popen(
            list(map(str, argv)), cwd=cwd, env=self.env, stdin=subprocess.DEVNULL, text=True
        )
        self._started.append(program)
        return program

    def tasks(self, *states: str) -> list[str]:
        """Return the names of all jobs and array elements in some states, as squeue prints them.

        Args:
            *states: ``RUNNING`` and so on; none: all that have not ended.
        """
        chosen = ["-t", ",".join(states)] if states else []
        return self.run(["squeue", "-h", "-r", *chosen, "-o", "%i"]).stdout.split()

    def node_states(self) -> dict[str, str]:
        """Return Slurm's state of each node, such as ``idle``, ``allocated`` or ``down*``."""
        shown = self.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"]).stdout
        return dict(line.split() for line in shown.splitlines())

    def preempt(self, nodes: str | int | Sequence[str | int], for_s: float = 3.0) -> str:
        """Take nodes from whoever has them, as a job of higher priority does.

        Their jobs get SIGTERM, and ``grace_s`` seconds; the nodes are free again ``for_s`` seconds
        after they have been left.

        Args:
            nodes: One node or several, by name or number.
            for_s: How long they are kept.

        Returns:
            The id of the job that takes them; cancel it to give them back early.
        """
        wanted = [nodes] if isinstance(nodes, str | int) else nodes
        names = [self.config.node_name(node) for node in wanted]
        argv = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--job-name=preempt"]
        argv += ["--no-requeue", f"--nodes={len(names)}", f"--nodelist={','.join(names)}"]
        argv += ["--output=/dev/null", "--chdir=/", f"--wrap=sleep {for_s:g}"]
        self._preempting.append(self.run(argv).stdout.strip())
        return self._preempting[-1]

    def kill_node(self, node: str | int) -> None:
        """End a node at once with every process on it, as a power cut.

        The controller says so after ``node_timeout_s`` seconds, and requeues its jobs then.
        """
        self._administer("kill", node)

    def restore_node(self, node: str | int) -> None:
        """Put a node back into service that was killed or paused."""
        self._administer("restore", node)

    def pause_node(self, node: str | int) -> None:
        """Stop every process of a node, as a machine that hangs, until it is restored.

        The controller does not find out by itself.
        """
        self._administer("pause", node)

    def hold_queue(self) -> None:
        """Let no job start until the queue is released; those that run go on."""
        self._set_partitions("down")

    def release_queue(self) -> None:
        """Let jobs start again."""
        self._set_partitions("up")

    def _set_partitions(self, state: str) -> None:
        for partition in self.config.partitions:
            name = f"partitionname={partition.name}"
            self.run(["scontrol", "update", name, f"state={state}"])

    def wait_running(self, num_tasks: int, timeout_s: float = _PATIENCE_S) -> list[str]:
        """Wait until so many tasks run, those of `preempt` not counted; return their names.

        Raises:
            FakeSlurmError: they do not in time.
        """
        found: list[str] = []

        def so_many_run() -> bool:
            found[:] = [t for t in self.tasks("RUNNING") if t not in self._preempting]
            return len(found) == num_tasks

        self.wait_until(so_many_run, f"{num_tasks} tasks run", timeout_s=timeout_s)
        return found

    def wait_idle(self, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until every node is idle.

        Raises:
            FakeSlurmError: some are not in time.
        """
        self.wait_until(
            lambda: set(self.node_states().values()) == {"idle"}, "all nodes are idle",
            timeout_s=timeout_s,
        )  # fmt: skip

    def wait_until(
        self, condition: Callable[[], object], what: str, *, timeout_s: float = _PATIENCE_S
    ) -> None:
        """Wait until a condition holds.

        Args:
            condition: What is asked again and again.
            what: What it says, for the error.
            timeout_s: How long to wait.

        Raises:
            FakeSlurmError: it does not hold in time; shows the queue.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                raise FakeSlurmError(f"not within {timeout_s:g} s: {what}\n{self._queue()}")
            time.sleep(_POLL_S)

    def _queue(self) -> str:
        with contextlib.suppress(FakeSlurmError):
            return self.run(["squeue", "-r", "-t", "all"]).stdout
        return self.log()

    def heal_all(self) -> None:
        """Cancel all jobs at once, restore all nodes, and wait until every node is idle."""
        self._administer("heal")
        self.wait_idle()

    def _administer(self, what: str, node: str | int | None = None) -> None:
        name = None if node is None else self.config.node_name(node)
        assert self.folder and self._host is not None
        self._host.administer(what, name)


# ---- The controller's process, as the test's process has it: started, asked, and surely ended


_START_S = 60.0
_STOP_S = 15.0
_MAX_SOCKET_PATH = 100
_CLIENT = Path(__file__).with_name("client.py")


class Host:
    """One controller and its directory.

    Args:
        folder: Its directory.
        controller: Its process, whose standard input keeps it alive.
    """

    def __init__(self, folder: Path, controller: subprocess.Popen[bytes]) -> None:
        self.folder, self._controller = folder, controller

    @classmethod
    def start(cls, config: FakeConfig) -> Self:
        """Start a controller, and wait until it answers.

        Raises:
            FakeSlurmError: it does not; says what it wrote.
        """
        folder = _new_folder()
        settings = {"config": dataclasses.asdict(config), "address": _address()}
        (folder / CONFIG).write_text(json.dumps(settings))
        (folder / "slurm.conf").write_text("# A fake cluster: see hpc_elastic.testing.fake_slurm\n")
        _write_commands(folder)
        host = cls(folder, _start(folder))
        try:
            host._wait()
        except BaseException:
            host.stop()
            raise
        return host

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._controller.poll() is None:
            with contextlib.suppress(OSError):
                return self.administer("ping")
            time.sleep(_POLL_S)
        log = (self.folder / "controller.log").read_text(errors="replace")
        raise FakeSlurmError(f"the fake Slurm did not start within {_START_S:g} s: {log}")

    def administer(self, what: str, node: str | None = None) -> None:
        """Ask the controller for what no command of Slurm's does.

        Raises:
            FakeSlurmError: it can not do it.
            OSError: it is not there.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_STOP_S)
            connection.connect(str(self.folder / SOCKET))
            connection.sendall(json.dumps({"admin": what, "node": node}).encode() + b"\n")
            with connection.makefile() as answers:
                reply = json.loads(answers.readline() or "{}")
        if reply.get("code"):
            raise FakeSlurmError(reply["stderr"])

    def stop(self) -> None:
        """End the controller and everything that it has started, and remove its directory."""
        assert self._controller.stdin is not None
        self._controller.stdin.close()
        try:
            self._controller.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._controller.kill()
            self._controller.wait()
        jobs.kill_marked(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "hpc_elastic.testing.fake_slurm", str(folder)]
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with (folder / "controller.log").open("wb") as log:
        return subprocess.Popen(
            argv, env={**os.environ, "PYTHONPATH": path}, cwd="/", stdin=subprocess.PIPE,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _new_folder() -> Path:
    """Return a new directory whose path is short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="fake-slurm-"))
    if len(str(folder / SOCKET)) > _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fake-slurm-", dir="/tmp"))
    return folder.resolve()


def _write_commands(folder: Path) -> None:
    (folder / "bin").mkdir()
    start = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(folder / SOCKET)])
    for command in COMMANDS:
        path = folder / "bin" / command
        path.write_text(f'#!/bin/sh\nexec {start} {command} "$@"\n')
        path.chmod(0o755)


def _address() -> str:
    """Return the address that all nodes have: this machine's own."""
    try:
        return interface_module.choose("node1", None, interface_module.interfaces(), ()).address
    except ValueError:
        return interface_module.LOOPBACK.address


# ---- The pytest fixture ``fake_slurm``
# A conftest.py asks for it by ``pytest_plugins = ["hpc_elastic.testing.fake_slurm.fake"]``.


@pytest.fixture
def fake_slurm() -> Iterator[FakeSlurm]:
    """Yield a fake cluster of four idle nodes, with nothing left of it after the test."""
    with FakeSlurm() as slurm:
        yield slurm
