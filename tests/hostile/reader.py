"""Runs commands of hpc-elastic in real processes, each with a time limit, and measures them.

A process with the commands' modules waits for command lines, one JSON list a line on standard
input, and forks for each: a command takes a tenth of a second then, and not a second of imports.
It answers with one JSON object a line: ``code`` (minus the number of a signal), ``output``, and
``peak_mb``, the command's largest memory.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT_S = 30
"""A command that needs more time hangs."""
_MOST_BYTES = 4 << 30
_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    output: str
    peak_mb: float


class Reader:
    """The process that runs commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *argv: object) -> Done:
        """Run one command, to its end or its time limit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(map(str, argv))) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def reader() -> Iterator[Reader]:
    """Run a reader's process."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Reader(process)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    import yaml  # noqa: F401 - what commands import when they are called

    from hpc_elastic.cli import (  # noqa: F401
        check,
        checkpoints,
        control,
        logs,
        main,
        report,
        status,
        submit,
    )  # fmt: skip
    from hpc_elastic.launcher import wait  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                _run(json.loads(line), output.fileno(), main.main)
            _, status_, used = os.wait4(child, 0)
            output.seek(0)
            text = output.read(_OUTPUT_BYTES).decode(errors="replace")
        code = os.waitstatus_to_exitcode(status_)
        print(json.dumps({"code": code, "output": text, "peak_mb": used.ru_maxrss / 1024}))
        sys.stdout.flush()


def _run(argv: list[str], output: int, main) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    signal.alarm(LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 70
    try:
        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
