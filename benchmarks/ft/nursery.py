"""A process that has imported torch and one library, and forks workers that run its tasks.

    python nursery.py LIBRARY SOCKET MODULE

The module (such as `ft.worker`) says which: `preload` imports what they need, `TASKS` has them by
name. So a worker begins after its imports, which cost seconds and are the same for both libraries,
and has them frozen for both, as our worker entry does: else a look for garbage among them takes
0.1 s at moments that nobody chooses. It connects to the driver's socket itself, over which JSON
lines tell who it is, and its events; the connection ends when it dies.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


class Lines:
    """One end; `receive` blocks, `arrived` does not."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pending = b""

    def send(self, message: Any) -> None:
        """Send one message; a driver or worker that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any | None:
        """Return the next message; None: the other end is gone."""
        while b"\n" not in self._pending:
            if not self._read():
                return None
        return self._next()

    def arrived(self) -> tuple[list[Any], bool]:
        """Return what has come, after one read, and whether the other end lives."""
        lives = self._read()
        messages = []
        while b"\n" in self._pending:
            messages.append(self._next())
        return messages, lives

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> bool:
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            return False
        self._pending += data
        return bool(data)

    def _next(self) -> Any:
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)


def main() -> None:
    """Fork a worker for each line that comes, until the driver is gone."""
    library, path, module = sys.argv[1:]
    tasks = importlib.import_module(module)
    tasks.preload(library)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    driver = connect(path)
    driver.send({"name": f"nursery-{library}", "pid": os.getpid()})
    while (order := driver.receive()) is not None:
        if os.fork() == 0:
            driver.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(path, order, tasks.TASKS[order["task"]], library)


def run(path: str, order: dict[str, Any], task: Any, library: str) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    driver = connect(path)
    driver.send({"name": order["name"], "pid": os.getpid()})
    code = 0
    try:
        task(driver, library, **order["arguments"])
    except BaseException as e:
        traceback.print_exc()
        driver.send({"error": f"{type(e).__name__}: {e}"})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def connect(path: str) -> Lines:
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    return Lines(s)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
