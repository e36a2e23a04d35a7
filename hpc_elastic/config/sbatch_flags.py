"""Flags of sbatch and srun that users may add, and those that are refused.

A flag that a settings key owns would contradict it, and a few flags would break a run. sbatch
checks whether the others exist, since each release of Slurm has more of them.
Source: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_elastic.config.parse import Given, parse_time, texts

Flags = dict[str, str | int | bool | None]

_NODES = "use the key nodes; every array task is one node"
_TASKS = "use the key nproc_per_node; every array task is one node with one agent"
_LOGS = "every attempt of every task has its own logs in the run directory"
_REQUEUE = "tasks are always requeued by Slurm; the run ends when its training has ended"
_HOSTS = "each one-node task would need all of them; use launcher.exclude or launcher.constraint"
_OUTPUT = "the launcher reads what sbatch prints"
_CLUSTERS = "the launcher queries its own cluster; submit from a login node of the other one"
_GPUS = "use launcher.gpus_per_node"
_CPUS = "use launcher.cpus_per_node"
_SURVIVES = "the loss of one node or agent must not end the others"

OWNED: dict[str, str] = {
    "array": "use the key nodes, and launcher.array_parallelism for the limit",
    "nodes": _NODES,
    "ntasks": _TASKS,
    "ntasks-per-node": _TASKS,
    "ntasks-per-core": _TASKS,
    "ntasks-per-socket": _TASKS,
    "ntasks-per-gpu": _TASKS,
    "output": _LOGS,
    "error": _LOGS,
    "open-mode": _LOGS,
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    "no-kill": f"{_SURVIVES}; launcher.coallocate_min sets it",
    "nodelist": _HOSTS,
    "nodefile": _HOSTS,
    "job-name": "use launcher.job_name",
    "partition": "use launcher.partition",
    "account": "use launcher.account",
    "qos": "use launcher.qos",
    "time": "use launcher.time",
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-task": _GPUS,
    "gpus-per-socket": _GPUS,
    "cpus-per-task": _CPUS,
    "mincpus": _CPUS,
    "mem": "use launcher.mem",
    "constraint": "use launcher.constraint",
    "exclude": "use launcher.exclude",
    "exclusive": "use launcher.exclusive",
    "container": "use launcher.container",
    "wrap": "use launcher.setup for shell lines before the task",
    "wait": "use launcher.wait",
    "test-only": "use launcher.dry_run",
    "parsable": _OUTPUT,
    "quiet": _OUTPUT,
    "verbose": _OUTPUT,
    "help": _OUTPUT,
    "usage": _OUTPUT,
    "version": _OUTPUT,
    "clusters": _CLUSTERS,
    "cluster-constraint": _CLUSTERS,
}
TIMES = frozenset(["time-min", "begin", "deadline", "delay-boot"])
"""Flags whose value may be a clock time, which YAML reads as a base-60 number."""

SRUN_OWNED = {
    **{name: OWNED[name] for name in ("nodes", "ntasks", "ntasks-per-node", "nodelist")},
    **{name: _LOGS for name in ("output", "error", "open-mode")},
    "label": _LOGS,
    "multi-prog": "every task starts the same agent",
    **{name: _SURVIVES for name in ("no-kill", "kill-on-bad-exit", "wait")},
}
_SHORT = {
    **{"N": "nodes", "n": "ntasks", "w": "nodelist", "o": "output", "e": "error", "l": "label"},
    **{"k": "no-kill", "K": "kill-on-bad-exit", "W": "wait"},
}


def sbatch_flags(given: Given) -> Flags:
    """Return further sbatch flags, each under its long name with dashes.

    Raises:
        ConfigError: Not a flag, given twice, owned by a key, or with a value that no flag has.
    """
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping of flags to values, such as {reservation: night}")
    flags: Flags = {}
    for written, value in given.value.items():
        entry = Given(f"{given.key}.{written}", value)
        name = _long_name(entry, str(written))
        if name in flags:
            raise entry.refuse(f"the flag --{name} is given twice")
        flags[name] = _flag_value(entry, name)
    return flags


def _long_name(entry: Given, written: str) -> str:
    name = written.lstrip("-").replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) == 1:
        raise entry.refuse("write the flag's long name, such as reservation or mail-type")
    if name in OWNED:
        raise entry.refuse(f"the flag --{name} cannot be given here: {OWNED[name]}")
    return name


def _flag_value(entry: Given, name: str) -> str | int | bool | None:
    value = entry.value
    if name in TIMES and isinstance(value, int):
        return parse_time(value, from_yaml=True, key=entry.key)
    if value is None or isinstance(value, bool | int):
        return value
    if not isinstance(value, str) or not value.isprintable():
        raise entry.refuse("allowed is a text of one line, a whole number, true, or null for unset")
    return value


def gpus_in_gres(gres: object) -> int | None:
    """Return the number of GPUs of a node in a value of --gres; None if it names none.

    GPUs of all types count together: ``lustre:1,gpu:a100:2,gpu:h100`` are three.
    Source: https://slurm.schedmd.com/sbatch.html#OPT_gres
    """
    requests = str(gres).replace("gres/", "").split(",")
    gpus = [request.split(":") for request in requests if re.match("gpu(:|$)", request)]
    counts = [int(words[-1]) if words[-1].isdecimal() else 1 for words in gpus]
    return sum(counts) if counts else None


def srun_args(given: Given) -> list[str]:
    """Return further arguments of srun.

    Raises:
        ConfigError: Not a list of texts, or a flag that contradicts how a task is started.
    """
    args = texts(given)
    for arg in args:
        name = _srun_flag(arg)
        if name in SRUN_OWNED:
            raise given.refuse(f"{arg!r} cannot be given here: {SRUN_OWNED[name]}")
    return args


def _srun_flag(arg: str) -> str:
    """Return the long name of an argument's flag; empty if it is a value."""
    if arg.startswith("--"):
        return arg[2:].partition("=")[0]
    return _SHORT.get(arg[1:2], "") if arg.startswith("-") else ""
