"""Flags of sbatch and srun that users may add, and those that are refused.

A flag that a settings key owns would contradict it, and a few flags would break a run. sbatch
checks whether the others exist, since each release of Slurm has more of them.
Source: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_elastic.config.parse import Given, parse_time, texts

_LOGS = "every attempt of every task has its own logs in the run directory"
_SURVIVES = "the loss of one node or agent must not end the others"
_REMEDIES = {
    "use the key nodes, and launcher.array_parallelism for the limit": "array",
    "use the key nodes; every array task is one node": "nodes",
    "use the key nproc_per_node; every array task is one node with one agent": "ntasks"
    " ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu",
    _LOGS: "output error open-mode",
    "tasks are always requeued by Slurm; the run ends when its training has ended": "requeue"
    " no-requeue",
    f"{_SURVIVES}; launcher.coallocate_min sets it": "no-kill",
    "each one-node task would need all of them; use launcher.exclude or launcher.constraint": (
        "nodelist nodefile"
    ),
    "use launcher.gpus_per_node": "gpus gpus-per-node gpus-per-task gpus-per-socket",
    "use launcher.cpus_per_node": "cpus-per-task mincpus",
    "use launcher.setup for shell lines before the task": "wrap",
    "use launcher.dry_run": "test-only",
    "the launcher reads what sbatch prints": "parsable quiet verbose help usage version",
    "the launcher queries its own cluster; submit from a login node of the other one": "clusters"
    " cluster-constraint",
}
_KEYS = (
    "job-name partition account qos time time-min mem constraint exclude exclusive container wait"
)
_OWNED = {
    **{flag: remedy for remedy, flags in _REMEDIES.items() for flag in flags.split()},
    **{flag: f"use launcher.{flag.replace('-', '_')}" for flag in _KEYS.split()},
}
"""Flags that cannot be given, each with the remedy."""
_TIMES = frozenset(["begin", "deadline", "delay-boot"])
"""Flags whose value may be a clock time, which YAML reads as a base-60 number."""

_DASHED = (
    "acctg-freq container-id core-spec cores-per-socket cpu-freq cpus-per-gpu delay-boot "
    "export-file extra-node-info get-user-env gpu-bind gpu-freq ignore-pbs kill-on-invalid-dep "
    "mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu oom-kill-step "
    "sockets-per-node spread-job thread-spec threads-per-core tres-bind tres-per-task "
    "use-min-nodes wait-all-nodes"
)
"""Flags of Slurm that may be written with underscores; options of a site (SPANK) have some."""

_SRUN_OWNED = {
    **{name: _OWNED[name] for name in ("nodes", "ntasks", "ntasks-per-node", "nodelist")},
    **{name: _LOGS for name in ("output", "error", "open-mode")},
    "label": _LOGS,
    "multi-prog": "every task starts the same agent",
    **{name: _SURVIVES for name in ("no-kill", "kill-on-bad-exit", "wait")},
}
_SHORT = {
    **{"N": "nodes", "n": "ntasks", "w": "nodelist", "o": "output", "e": "error", "l": "label"},
    **{"k": "no-kill", "K": "kill-on-bad-exit", "W": "wait"},
}


def sbatch_flags(given: Given) -> dict[str, str | int | bool | None]:
    """Return further sbatch flags, each under its long name with dashes."""
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping of flags to values, such as {reservation: night}")
    flags: dict[str, str | int | bool | None] = {}
    for written, value in given.value.items():
        entry = Given(f"{given.key}.{written}", value)
        name = str(written).lstrip("-")
        dashed = name.replace("_", "-")
        if dashed in _OWNED or dashed in _DASHED.split():
            name = dashed
        if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or len(name) == 1:
            raise entry.refuse("write the flag's long name, such as reservation or mail-type")
        if name in _OWNED:
            raise entry.refuse(f"the flag --{name} cannot be given here: {_OWNED[name]}")
        if name in flags:
            raise entry.refuse(f"the flag --{name} is given twice")
        if name in _TIMES and isinstance(value, int):
            value = parse_time(value, from_yaml=True, key=entry.key)
        is_text = isinstance(value, str) and value.isprintable()
        if not is_text and not (value is None or isinstance(value, bool | int)):
            allowed = "a text of one line, a whole number, true, or null for unset"
            raise entry.refuse(f"allowed is {allowed}")
        flags[name] = value
    return flags


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
    """Return further arguments of srun; no flag contradicts how a task is started."""
    args = texts(given)
    for arg in args:
        name = ""  # of a value
        if arg.startswith("--"):
            name = arg[2:].partition("=")[0]
        elif arg.startswith("-"):
            name = _SHORT.get(arg[1:2], "")
        if name in _SRUN_OWNED:
            raise given.refuse(f"{arg!r} cannot be given here: {_SRUN_OWNED[name]}")
    return args
