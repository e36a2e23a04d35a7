"""Submission that returns at once: what `hpc-elastic submit` and a launcher say to each other.

The command starts the user's script with a file's path in its environment, and the launcher, which
alone knows what was submitted, appends to that file a line for each submission: see `prepare`.
Slurm's runs go on by themselves. Those of ``launcher=local`` end with their launcher, so that one
leaves the terminal: it goes on as a session of its own, with its output in the sweep directory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hpc_elastic.launcher.plan import Plan
from hpc_elastic.launcher.prepare import Prepared
from hpc_elastic.run.directory import Submission

VARIABLE = "HPC_ELASTIC_REPORT"
"""Path of the file in which a launcher tells what it has submitted."""


@cache
def report_file() -> Path | None:
    """Return where this process is to tell what it submits; None: it is to wait as usual.

    The variable is taken out of the environment: no task is to see it.
    """
    path = os.environ.pop(VARIABLE, None)
    return Path(path) if path else None


def entry(prepared: Prepared, job_ids: list[str], *, log: Path | None = None) -> dict[str, Any]:
    """Return what is told of a submission.

    Args:
        prepared: What was submitted.
        job_ids: The job ids of its arrays.
        log: Where the launcher's output goes; None: it does not go on.
    """
    plan = prepared.plan
    runs = [
        {"run_id": run_id, "run": str(run.dir)}
        for run_id, run in zip(prepared.run_ids, plan.runs, strict=True)
    ]
    return {
        "launcher": plan.backend,
        "sweep": str(plan.submission.parent),
        "job_ids": job_ids,
        "log": None if log is None else str(log),
        "pid": os.getpid() if log is not None else None,
        "runs": runs,
    }


def tell(file: Path, submitted: Mapping[str, Any]) -> None:
    """Append what was submitted."""
    with file.open("a") as f:
        f.write(json.dumps(submitted) + "\n")


def told(file: Path) -> list[dict[str, Any]]:
    """Return what launchers have told so far; a line that is being written is left out."""
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def log_of(plan: Plan) -> Path:
    """Return where a launcher that has left its terminal writes."""
    return Submission(plan.submission).path / f"launcher-{plan.arrays[0].number}.log"


def has_left_terminal() -> bool:
    """Return whether this process is a session of its own: no launcher is from its start."""
    return os.getsid(0) == os.getpid()


def leave_terminal(log: Path) -> None:
    """Go on as a session of its own, which outlives the terminal (main thread, once)."""
    os.setsid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.close(nothing)


def in_background(work: Callable[[Callable[[dict[str, Any]], None]], None]) -> dict[str, Any]:
    """Call a function in a process of its own, and return what it tells first.

    Args:
        work: Called there with a function to tell by, once; it may go on after that.

    Returns:
        What it told; ``{"error": ...}`` if it failed before; nothing if it just ended.
    """
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.close(reads)
        _call(work, writes)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


def _call(work: Callable[[Callable[[dict[str, Any]], None]], None], writes: int) -> None:
    """Do the work and end this process, whatever happens."""
    from hpc_elastic.errors import HpcElasticError

    open_ = True

    def tell_once(what: dict[str, Any]) -> None:
        nonlocal open_
        if open_:
            os.write(writes, json.dumps(what).encode())
            os.close(writes)
        open_ = False

    code = 1
    try:
        work(tell_once)
        code = 0
    except HpcElasticError as e:
        tell_once({"error": str(e)})
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # its log is on a full disk
                stream.flush()
        os._exit(code)
