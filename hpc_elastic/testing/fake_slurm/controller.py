"""The controller: one process that is slurmctld and every slurmd of a fake cluster.

It serves the commands on a Unix socket, a JSON line each, and lets time pass for the cluster. It
is started by `FakeSlurm`, and lives as long as that: when the other end of its standard input is
closed, however that came about, it kills everything that it has started, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from hpc_elastic._util import readable
from hpc_elastic.testing.fake_slurm import jobs, srun, submit_options
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.config import FakeConfig, Refusal
from hpc_elastic.testing.fake_slurm.queries import Answer, Call, answer
from hpc_elastic.testing.fake_slurm.submit_options import parse

SOCKET = "controller"
CONFIG = "config.json"
_TICK_S = 0.03
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_MAX_FDS = 3


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = json.loads((folder / CONFIG).read_text())
    cluster = Cluster(FakeConfig(**settings["config"]), folder)
    controller = Controller(cluster, settings["address"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET))
        listener.listen(128)
        threading.Thread(target=controller.serve, args=(listener,), daemon=True).start()
        try:
            controller.pass_time()
        finally:
            controller.close()
            shutil.rmtree(folder, ignore_errors=True)


class Controller:
    """The cluster behind its one lock, and who asks it."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self._cluster, self._address = cluster, address
        self._lock = threading.Lock()

    def pass_time(self) -> None:
        """Let time pass until standard input ends (main thread)."""
        while True:
            ready = readable(0, timeout_s=_TICK_S)
            if ready and not os.read(0, 1):
                return
            with self._lock:
                self._cluster.tick(time.time())

    def close(self) -> None:
        """Kill everything, and let nothing new begin."""
        self._lock.acquire()  # for good
        self._cluster.kill_all()
        jobs.kill_descendants()

    def serve(self, listener: socket.socket) -> None:
        """Give each connection a thread (a thread of its own)."""
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as e:  # no descriptor, or no thread, is left for now
                if listener.fileno() < 0:
                    return
                print(f"a command has to wait: {e}", file=sys.stderr, flush=True)
                time.sleep(_TICK_S)

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, srun.Gone):
            line, fds = _receive(connection)
            try:
                message = json.loads(line)
                if "admin" in message:
                    reply = self._administer(message["admin"], message.get("node"))
                else:
                    reply = dataclasses.asdict(self._command(message, fds, connection))
            except (OSError, srun.Gone):
                raise
            except Exception:  # whatever it is, the caller must see it
                print(traceback.format_exc(), file=sys.stderr, flush=True)
                reply = dataclasses.asdict(Answer("", f"FakeSlurm: {traceback.format_exc()}", 1))
            finally:
                for fd in fds:
                    os.close(fd)
            connection.sendall(json.dumps(reply).encode() + b"\n")

    def _command(
        self, message: dict[str, Any], fds: list[int], connection: socket.socket
    ) -> Answer:
        def stdin() -> str:
            with os.fdopen(os.dup(fds[0])) as f:
                return f.read()

        name, argv = message["command"], message["argv"]
        call = Call(name, argv, message["env"], message["cwd"], stdin, time.time())
        if name == "srun" and argv[:1] != ["--version"]:
            signals = _Signals(connection)
            return srun.Session(
                call, output=fds[1], error=fds[2], signals=signals,
                cluster=self._cluster, lock=self._lock,
            ).run()  # fmt: skip
        if name == "sbatch":
            text = stdin() if _reads_stdin(argv) else ""
            call = dataclasses.replace(call, stdin=lambda: text)
        with self._lock:
            return answer(call, self._cluster, self._address)

    def _administer(self, what: str, node: str | None) -> dict[str, Any]:
        """Do to a node, or tell, what no command of Slurm's does."""
        with self._lock:
            now = time.time()
            if what == "kill" and node is not None:
                self._cluster.kill_node(node, now)
            elif what == "restore" and node is not None:
                self._cluster.restore_node(node, now)
            elif what == "pause" and node is not None:
                self._cluster.pause_node(node)
            elif what == "heal":
                self._cluster.heal(now)
        return {}


class _Signals:
    """What a client hands on, one JSON line for each signal."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def __call__(self) -> list[int]:
        """Return what came since the last time.

        Raises:
            Gone: the client has.
        """
        while readable(self._connection, timeout_s=0):
            received = self._connection.recv(4096)
            if not received:
                raise srun.Gone
            self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        return [int(json.loads(line)["signal"]) for line in lines]


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one line, and the files that came with it."""
    received, fds, _, _ = socket.recv_fds(connection, 65536, _MAX_FDS)
    while received and not received.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            break
        received += part
    if not received.endswith(b"\n"):
        for fd in fds:
            os.close(fd)
        raise ConnectionError("a client has gone")
    return received, fds


def _reads_stdin(argv: list[str]) -> bool:
    try:
        given = parse(argv, submit_options.SBATCH)
    except Refusal:
        return False
    return not given.rest and "wrap" not in given
