"""A process that has imported torch and one library, and forks workers that run its tasks.

    python nursery.py LIBRARY SOCKET MODULE

The module (such as `ft.worker`) says which: `preload` imports what they need, `TASKS` has them by
name.

So a worker begins after its imports, which cost seconds and are the same for both libraries, and
has them frozen for both, as our worker entry does: else a look for garbage among them takes 0.1 s
at moments that nobody chooses. It
connects to the driver's socket itself: who it is, its events, and the end of its connection when
it dies.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ft.lines import Lines


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
    main()
