"""The controller's process, as the test's process has it: started, asked, and surely ended."""

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
from pathlib import Path
from typing import Self

from hpc_elastic.rendezvous import address
from hpc_elastic.testing.fake_slurm import processes
from hpc_elastic.testing.fake_slurm.commands import COMMANDS
from hpc_elastic.testing.fake_slurm.config import FakeConfig
from hpc_elastic.testing.fake_slurm.controller import CONFIG, SOCKET
from hpc_elastic.testing.fake_slurm.errors import FakeSlurmError

_START_S = 60.0
_STOP_S = 15.0
_POLL_S = 0.05
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
        processes.kill_marked(self.folder)
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
        return address.choose("node1", None, address.interfaces(), ()).address
    except ValueError:
        return address.LOOPBACK.address
