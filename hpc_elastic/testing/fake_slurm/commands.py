"""The commands that end at once: what each prints, and its exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.testing.fake_slurm import request
from hpc_elastic.testing.fake_slurm.cancelling import scancel
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.errors import Refusal
from hpc_elastic.testing.fake_slurm.options import directives, parse
from hpc_elastic.testing.fake_slurm.scontrol import scontrol
from hpc_elastic.testing.fake_slurm.scontrol_show import VERSION
from hpc_elastic.testing.fake_slurm.sinfo import sinfo
from hpc_elastic.testing.fake_slurm.squeue import squeue

_UNKNOWN_OPTION = {"sbatch": 255, "srun": 255}
"""Exit codes; 1 elsewhere."""


@dataclass(frozen=True)
class Call:
    """One call of a command.

    Attributes:
        command: Its name.
        argv: Its arguments.
        env: Its environment.
        cwd: Its directory.
        stdin: Reads its standard input.
        now: When it was called.
    """

    command: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: Callable[[], str]
    now: float


@dataclass(frozen=True)
class Answer:
    """What a command prints, and its exit code."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0


def answer(call: Call, cluster: Cluster, address: str) -> Answer:
    """Do what a command is asked."""
    if "--version" in call.argv[:1]:
        return Answer(f"slurm {VERSION} (FakeSlurm)\n")
    try:
        return Answer(_COMMANDS[call.command](call, cluster, address))
    except Refusal as e:
        return refused(call.command, e)


def refused(command: str, why: Refusal) -> Answer:
    """Return what a command prints that can not do what it was asked."""
    if why.stderr.startswith("FakeSlurm does not know"):
        return Answer(stderr=f"{command}: {why.stderr}\n", code=_UNKNOWN_OPTION.get(command, 1))
    prefix = f"{command}: error: " if command in ("sbatch", "srun", "scancel") else ""
    lines = [prefix + line for line in why.stderr.splitlines()]
    return Answer(stderr="".join(f"{line}\n" for line in lines), code=why.exit_code)


def _sbatch(call: Call, cluster: Cluster, _address: str) -> str:
    """Submit a job or an array: what stands on the command line goes before the script's lines."""
    given = parse(call.argv, request.SBATCH)
    name, script = _script(call, given.rest, given.get("wrap"))
    options = parse(directives(script), request.SBATCH)
    options.options.update(given.options)
    _latest_wins(options.options, given.options)
    origin = request.Origin(
        call.cwd, call.env, call.now, script, name, () if "wrap" in given else tuple(given.rest[1:])
    )
    wanted = request.read(options, origin, cluster.config)
    size = cluster.config.max_array_size
    number, _ = cluster.table.submit(wanted, options.get("array"), call.now, size)
    cluster.schedule(call.now)
    return f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n"


def _latest_wins(options: dict[str, str], given: Mapping[str, str]) -> None:
    """Of two options that contradict each other, keep the command line's."""
    for one, other in (("requeue", "no-requeue"), ("no-requeue", "requeue")):
        if one in given and other not in given:
            options.pop(other, None)


def _script(call: Call, rest: Sequence[str], wrapped: str | None) -> tuple[str, str]:
    if wrapped is not None:
        return "wrap", f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n"
    if not rest:
        return "sbatch", call.stdin()
    path = Path(call.cwd) / rest[0]
    try:
        return path.name, path.read_text()
    except OSError as e:
        raise Refusal(f"Unable to open file {rest[0]}: {e.strerror}") from e


def _sacct(_call: Call, _cluster: Cluster, _address: str) -> str:
    raise Refusal("Slurm accounting storage is disabled")


_COMMANDS: dict[str, Callable[[Call, Cluster, str], str]] = {
    "sbatch": _sbatch,
    "squeue": lambda call, cluster, _: squeue(call.argv, cluster.table, cluster.config, call.now),
    "scancel": lambda call, cluster, _: scancel(call.argv, cluster, call.now),
    "scontrol": lambda call, cluster, where: scontrol(call.argv, cluster, where, call.now),
    "sinfo": lambda call, cluster, _: sinfo(call.argv, cluster),
    "sacct": _sacct,
}
COMMANDS = (*_COMMANDS, "srun")
