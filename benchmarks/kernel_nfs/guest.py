"""What runs in a machine of `machines`: does what it is told on its console.

Run as a file, with the console as standard input and output. A line in is a request, a line out its
answer; both are JSON. Each request has a thread of its own, so that one that waits holds up none.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import tty
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
_ONE_AT_A_TIME = threading.Lock()


def run(argv: list[str], env: dict[str, str], cwd: str, timeout_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            argv, env=os.environ | env, cwd=cwd, timeout=timeout_s, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"code": 124, "out": "", "err": f"not ended after {timeout_s:g} s"}
    return {"code": done.returncode, "out": done.stdout[-100000:], "err": done.stderr[-4000:]}


def start(argv: list[str], env: dict[str, str], cwd: str, log: str) -> int:
    """Start a command, and return its pid here; what it writes goes to the file `log`."""
    with Path(log).open("ab") as output:
        process = subprocess.Popen(
            argv, env=os.environ | env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
    _STARTED[process.pid] = process
    return process.pid


def ended(pid: int) -> int | None:
    """Return the exit code of what `start` has started, None while it runs."""
    return _STARTED[pid].poll()


_STARTED: dict[int, subprocess.Popen[bytes]] = {}


def _answer(request: dict[str, Any]) -> None:
    try:
        module = sys.modules[__name__] if request["module"] == "guest" else None
        module = module or importlib.import_module(request["module"])
        reply = {"value": getattr(module, request["function"])(*request["args"])}
    except BaseException as e:  # the machine's master has to hear of all
        reply = {"error": f"{type(e).__name__}: {e}"}
    line = json.dumps({"id": request["id"], **reply}) + "\n"
    with _ONE_AT_A_TIME:
        sys.stdout.write(line)
        sys.stdout.flush()


def main() -> int:
    """Answer until the console is closed."""
    for stream in (sys.stdin, sys.stdout):
        tty.setraw(stream.fileno())
    print(json.dumps({"id": 0, "value": "up"}), flush=True)
    for line in sys.stdin:
        threading.Thread(target=_answer, args=[json.loads(line)], daemon=True).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
