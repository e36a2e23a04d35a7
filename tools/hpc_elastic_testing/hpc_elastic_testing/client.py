"""The commands on PATH: ``client.py SOCKET COMMAND ARGUMENTS...``.

A client sends its arguments, environment, directory and three standard files to the controller,
prints the answer, and exits with its code. Signals to an srun are forwarded.

Standard library only: it runs without site-packages, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)


def main() -> None:
    """Run one command; does not return."""
    path, command, *argv = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        if command == "srun":
            _forward_signals(connection)
        _send_request(connection, {"command": command, "argv": argv})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        answer = _receive_answer(connection)
    except OSError as e:
        print(
            f"{command}: error: Unable to contact slurm controller (connect failure): {e}",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    sys.stdout.flush()
    sys.exit(answer["code"])


def _send_request(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps({**message, "env": dict(os.environ), "cwd": str(Path.cwd())}).encode() + b"\n"
    with Path(os.devnull).open("r+b") as nothing:
        fds = [0, 1, 2]
        for fd in (0, 1, 2):
            try:
                os.fstat(fd)
            except OSError:  # it is closed
                fds[fd] = nothing.fileno()
        sent = socket.send_fds(connection, [body], fds)
    if body[sent:]:  # sending nothing would fail if the other end is closed
        connection.sendall(body[sent:])


def _receive_answer(connection: socket.socket) -> dict[str, Any]:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    answer: dict[str, Any] = json.loads(received)
    return answer


def _forward_signals(connection: socket.socket) -> None:
    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"signal": number}).encode() + b"\n")

    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until the request has been sent
    for number in _FORWARDED:
        signal.signal(number, forward)


if __name__ == "__main__":
    main()
