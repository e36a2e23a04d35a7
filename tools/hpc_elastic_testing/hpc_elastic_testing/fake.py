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

import hpc_elastic
from hpc_elastic.transport import interface as interface_module
from hpc_elastic_testing import jobs
from hpc_elastic_testing.config import (
    COMMANDS,
    CONFIG,
    SOCKET,
    FakeCommandError,
    FakeConfig,
    FakeSlurmError,
)

_POLL_S = 0.05
_WAIT_S = 180.0
"""Default of waits; programs import torch on a busy machine."""


@dataclass(frozen=True)
class Completed:
    """The output of a command, and its exit code."""

    stdout: str
    stderr: str
    returncode: int


class FakeSlurm:
    """A Slurm cluster of processes on this machine, for the duration of a ``with`` block.

    Its commands (sbatch, squeue, scontrol, scancel, srun, sinfo, sacct) are on the PATH of `env`.
    At the end of the block every process of every job is killed, and every program that `start`
    has started. The jobs' processes are killed even if this process dies.

    Args:
        nodes: Number of nodes.
        **settings: Other fields of `FakeConfig`, such as ``grace_s=10``.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(self, nodes: int = 4, **settings: Any) -> None:
        self.config = FakeConfig(nodes=nodes, **settings)
        self._host: ControllerProcess | None = None
        self._preempting: list[str] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start the cluster.

        Raises:
            FakeSlurmError: It does not start; the text has the controller's output.
        """
        self._host = ControllerProcess.start(self.config)
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
        """End the cluster and everything that runs on it; a second call does nothing."""
        while self._started:
            with self._started.pop() as program:
                program.kill()
        host, self._host = self._host, None
        if host is not None:
            host.stop()

    @property
    def folder(self) -> Path:
        """The cluster's directory, removed with it."""
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
        """Return the controller's output; empty without problems."""
        return (self.folder / "controller.log").read_text(errors="replace")

    def run(self, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0) -> Completed:
        """Run a command against the cluster.

        Raises:
            FakeCommandError: It failed and `check` is set.
            FakeSlurmError: It did not end in time.
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

        Its output goes where that of this process goes. It is killed at the end of the block, so
        that a failed test does not wait for it.

        Args:
            argv: The program and its arguments.
            cwd: Its working directory; by default that of this process.

        Raises:
            OSError: It cannot be started.
        """
        program = subprocess.Popen(
            list(map(str, argv)), cwd=cwd, env=self.env, stdin=subprocess.DEVNULL, text=True
        )
        self._started.append(program)
        return program

    def tasks(self, *states: str) -> list[str]:
        """Return the names of all jobs and array elements in some states, as squeue prints them.

        Args:
            *states: ``RUNNING`` and so on; by default all but those that have ended.
        """
        chosen = ["-t", ",".join(states)] if states else []
        return self.run(["squeue", "-h", "-r", *chosen, "-o", "%i"]).stdout.split()

    def node_states(self) -> dict[str, str]:
        """Return Slurm's state of each node, such as ``idle``, ``allocated`` or ``down*``."""
        shown = self.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"]).stdout
        return dict(line.split() for line in shown.splitlines())

    def preempt(self, nodes: str | int | Sequence[str | int], for_s: float = 3.0) -> str:
        """Preempt nodes by a job of higher priority.

        The jobs on them get SIGTERM, and ``grace_s`` seconds. The nodes are free again ``for_s``
        seconds after those jobs have ended.

        Args:
            nodes: One node or several, by name or number.
            for_s: How long the job keeps them.

        Returns:
            The id of that job; cancel it to free the nodes early.
        """
        wanted = [nodes] if isinstance(nodes, str | int) else nodes
        names = [self.config.node_name(node) for node in wanted]
        argv = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--job-name=preempt"]
        argv += ["--no-requeue", f"--nodes={len(names)}", f"--nodelist={','.join(names)}"]
        argv += ["--output=/dev/null", "--chdir=/", f"--wrap=sleep {for_s:g}"]
        self._preempting.append(self.run(argv).stdout.strip())
        return self._preempting[-1]

    def kill_node(self, node: str | int) -> None:
        """Kill every process of a node at once, as a power cut does.

        The controller marks it down after ``node_timeout_s`` seconds, and requeues its jobs then.
        """
        self._send_request("kill", node)

    def restore_node(self, node: str | int) -> None:
        """Put a killed or paused node back into service."""
        self._send_request("restore", node)

    def pause_node(self, node: str | int) -> None:
        """Stop every process of a node, as on a machine that hangs, until it is restored.

        The controller does not notice by itself.
        """
        self._send_request("pause", node)

    def hold_queue(self) -> None:
        """Start no job until the queue is released; running jobs go on."""
        self._open_partitions(is_open=False)

    def release_queue(self) -> None:
        """Start jobs again."""
        self._open_partitions(is_open=True)

    def _open_partitions(self, *, is_open: bool) -> None:
        for partition in self.config.partitions:
            state = "state=up" if is_open else "state=down"
            self.run(["scontrol", "update", f"partitionname={partition.name}", state])

    def wait_running(self, num_tasks: int, timeout_s: float = _WAIT_S) -> list[str]:
        """Wait until this number of tasks runs, without the jobs of `preempt`; return their names.

        Raises:
            FakeSlurmError: The wait timed out.
        """
        found: list[str] = []

        def are_running() -> bool:
            found[:] = [t for t in self.tasks("RUNNING") if t not in self._preempting]
            return len(found) == num_tasks

        self.wait_until(are_running, f"{num_tasks} tasks run", timeout_s=timeout_s)
        return found

    def wait_idle(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until every node is idle.

        Raises:
            FakeSlurmError: The wait timed out.
        """
        self.wait_until(
            lambda: set(self.node_states().values()) == {"idle"}, "all nodes are idle",
            timeout_s=timeout_s,
        )  # fmt: skip

    def wait_until(
        self, condition: Callable[[], object], what: str, *, timeout_s: float = _WAIT_S
    ) -> None:
        """Wait until a condition holds.

        Args:
            condition: Polled until it is true.
            what: Its meaning in words, for the error.
            timeout_s: Longest wait in seconds.

        Raises:
            FakeSlurmError: The wait timed out; the text shows the queue.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                queue = self.log()
                with contextlib.suppress(FakeSlurmError):
                    queue = self.run(["squeue", "-r", "-t", "all"]).stdout
                raise FakeSlurmError(f"not within {timeout_s:g} s: {what}\n{queue}")
            time.sleep(_POLL_S)

    def heal_all(self) -> None:
        """Cancel all jobs at once, restore all nodes, and wait until every node is idle."""
        self._send_request("heal")
        self.wait_idle()

    def _send_request(self, what: str, node: str | int | None = None) -> None:
        name = None if node is None else self.config.node_name(node)
        assert self.folder and self._host is not None
        self._host.send_request(what, name)


_START_S = 60.0
_STOP_S = 15.0
_MAX_SOCKET_PATH = 100
_CLIENT = Path(__file__).with_name("client.py")


class ControllerProcess:
    """The process of one controller, and its directory.

    It lives as long as its standard input is open.
    """

    def __init__(self, folder: Path, controller: subprocess.Popen[bytes]) -> None:
        self.folder, self._controller = folder, controller

    @classmethod
    def start(cls, config: FakeConfig) -> Self:
        """Start a controller, and wait until it answers.

        Raises FakeSlurmError, with the controller's output, if it does not.
        """
        try:  # the address of all nodes is this machine's own
            address = interface_module.choose("node1", None, interface_module.interfaces(), ())
        except ValueError:
            address = interface_module.LOOPBACK
        folder = _new_folder()
        settings = {"config": dataclasses.asdict(config), "address": address.address}
        (folder / CONFIG).write_text(json.dumps(settings))
        (folder / "slurm.conf").write_text("# A fake cluster: see hpc_elastic.testing.fake_slurm\n")
        (folder / "bin").mkdir()
        start = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(folder / SOCKET)])
        for command in COMMANDS:
            path = folder / "bin" / command
            path.write_text(f'#!/bin/sh\nexec {start} {command} "$@"\n')
            path.chmod(0o755)
        roots = [str(Path(str(file)).parents[1]) for file in (__file__, hpc_elastic.__file__)]
        modules = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / "controller.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_elastic_testing.controller", str(folder)],
                env={**os.environ, "PYTHONPATH": modules}, cwd="/", stdin=subprocess.PIPE,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        host = cls(folder, process)
        deadline = time.monotonic() + _START_S
        try:
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError):
                    host.send_request("ping")
                    return host
                time.sleep(_POLL_S)
            output = (folder / "controller.log").read_text(errors="replace")
            raise FakeSlurmError(f"the fake Slurm did not start within {_START_S:g} s: {output}")
        except BaseException:
            host.stop()
            raise

    def send_request(self, what: str, node: str | None = None) -> None:
        """Send the controller a request for which Slurm has no command.

        Raises FakeSlurmError if the request failed, or OSError if the controller is not running.
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
        """End the controller and all its processes, and remove its directory."""
        assert self._controller.stdin is not None
        self._controller.stdin.close()
        try:
            self._controller.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._controller.kill()
            self._controller.wait()
        jobs.kill_marked(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def _new_folder() -> Path:
    """Return a new directory whose path is short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="fake-slurm-"))
    if len(str(folder / SOCKET)) > _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fake-slurm-", dir="/tmp"))
    return folder.resolve()


@pytest.fixture
def fake_slurm() -> Iterator[FakeSlurm]:
    """Yield a fake cluster of four idle nodes; nothing of it is left after the test.

    Enable it in a conftest.py: ``pytest_plugins = ["hpc_elastic.testing.fake_slurm.fake"]``.
    """
    with FakeSlurm() as slurm:
        yield slurm
