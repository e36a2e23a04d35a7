"""What sbatch refuses, as an error that names the key, the value and the remedy (pure).

sbatch says what is wrong and not which flag it was. The table maps its words (stable since
Slurm 20.02, `slurm_strerror`) to the setting behind them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_elastic.config import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, SubmissionError, near_miss
from hpc_elastic.slurm.outputs import NodeKind, Partition
from hpc_elastic.slurm.site import time_limit_s
from hpc_elastic.submit.sbatch import has_whole_nodes
from hpc_elastic.words import counted, duration


def require_nodes(settings: RunSettings, partitions: Sequence[Partition]) -> None:
    """Refuse a run whose minimum of nodes its partitions do not have: sbatch takes it.

    Args:
        settings: Of the run.
        partitions: Those in which its tasks may run; none if that is not known.

    Raises:
        ConfigError: the run would hold all their nodes, and never train.
    """
    least, total = settings.nodes.min, sum(partition.num_nodes for partition in partitions)
    if not total or least <= total or not has_whole_nodes(settings.launcher):
        return
    names = ", ".join(partition.name for partition in partitions)
    what = f"the minimum is {least}, and partition {names} has {counted(total, 'node')} in all"
    remedy = f"give a minimum of {total} or less, or name another one (launcher.partition)"
    raise ConfigError("nodes", least, f"{what}: {remedy}")


def time_note(settings: SlurmSettings, partitions: Sequence[Partition]) -> str | None:
    """Return what to say of a time limit above that of all partitions; None if nothing.

    Slurm takes such tasks, and never starts them, unless a QOS permits longer ones.
    """
    limits = [partition.max_time_s for partition in partitions]
    if settings.time is None or not limits or None in limits:
        return None
    longest = max(limit for limit in limits if limit is not None)
    wanted_s = time_limit_s(settings.time)
    if wanted_s is not None and wanted_s <= longest:
        return None
    names = ", ".join(partition.name for partition in partitions)
    what = f"partition {names} allows {duration(longest)} at most"
    then = "unless a QOS permits more, no task will start (PartitionTimeLimit)"
    remedy = f"give launcher.time={longest // 60:.0f} or less, in minutes"
    return f"launcher.time={settings.time}: {what}; {then}: {remedy}"


@dataclass(frozen=True)
class _Rule:
    words: str
    key: str
    remedy: str


_RULES = (
    _Rule("invalid partition", "partition", "no such partition"),
    _Rule("no partition specified", "partition", "the cluster has no default partition: name one"),
    _Rule("invalid account", "account", "not an account of yours, or not in this partition"),
    _Rule("invalid qos", "qos", "not a QOS that you may use (`sacctmgr show qos`)"),
    _Rule("time limit", "time", "above the partition's limit (`sinfo -o '%P %l'`), or missing"),
    _Rule("invalid --time", "time", "not a time that Slurm understands"),
    _Rule("invalid feature", "constraint", "no node has such features (`sinfo -o '%N %f'`)"),
    _Rule("invalid generic resource", "gpus_per_node", "no such GPUs (`sinfo -o '%N %G'`)"),
    _Rule("gres", "gpus_per_node", "no such GPUs (`sinfo -o '%N %G'`)"),
    _Rule("memory specification", "mem", "no node has that much memory (`sinfo -o '%N %m'`)"),
    _Rule("invalid node name", "exclude", "no such node (`sinfo -N`)"),
    _Rule("cpu count", "cpus_per_node", "no node has that many CPUs (`sinfo -o '%N %c'`)"),
    _Rule(
        "reservation",
        "sbatch.reservation",
        "no such reservation, or not yours (`scontrol show res`)",
    ),
)

_GENERAL = (
    ("job array", "array tasks are numbered up to MaxArraySize - 1 (`scontrol show config`)"),
    ("qos policy", "your account's or QOS' limits allow no further jobs; fewer nodes, or later"),
    ("qosmax", "a limit of the QOS; fewer nodes or another launcher.qos"),
    ("unable to contact slurm controller", "slurmctld does not answer; is SLURM_CONF right?"),
    ("socket timed out", "slurmctld is overloaded; try again"),
)


_NO_SUCH_NODE = "node configuration is not available"
_SHARES = ("gpus_per_node", "cpus_per_node", "mem", "constraint")
"""What asks for nodes that have something."""
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def explain(
    stderr: str,
    settings: SlurmSettings,
    partitions: Iterable[str] = (),
    nodes: Sequence[NodeKind] = (),
) -> HpcElasticError:
    """Return the error to raise for a submission that sbatch refused.

    Args:
        stderr: What sbatch wrote.
        settings: The settings of the refused array.
        partitions: Names of the partitions that exist, as far as known.
        nodes: The kinds of nodes of those that were asked for, as far as known.
    """
    text = " ".join(line.removeprefix("sbatch: error: ") for line in stderr.strip().splitlines())
    if _NO_SUCH_NODE in text.lower() or "gres" in text.lower() or "generic res" in text.lower():
        error = _too_much(settings, nodes, text)
        if error is not None:
            return error
    for rule in _RULES:
        if rule.words in text.lower():
            return _config_error(rule, text, settings, list(partitions))
    for words, remedy in _GENERAL:
        if words in text.lower():
            return SubmissionError(f"sbatch refused the job: {text} ({remedy})")
    if _NO_SUCH_NODE in text.lower():
        asked = [
            f"launcher.{key}={value!r}" for key in _SHARES if (value := getattr(settings, key))
        ]
        which = f" ({', '.join(asked)}; `sinfo -o '%P %G %c %m %f'`)" if asked else ""
        return SubmissionError(f"no node has all that is asked for together{which} [{text}]")
    return SubmissionError(f"sbatch refused the job: {text}")


def _too_much(settings: SlurmSettings, nodes: Sequence[NodeKind], text: str) -> ConfigError | None:
    """Return an error for the first setting that no node has as much of; None: there is none."""
    where = f"of partition {settings.partition}" if settings.partition else "of this cluster"
    for key, wanted, most, unit in _compared(settings, nodes):
        if wanted > most:
            many = unit if unit == "MiB" else unit + "s"
            have = f"have at most {counted(most, unit, many)}" if most else f"have no {many}"
            remedy = "ask for less, or name another partition (launcher.partition)"
            why = f"the nodes {where} {have}: {remedy} [{text}]"
            return ConfigError(f"launcher.{key}", getattr(settings, key), why)
    return None


def _compared(
    settings: SlurmSettings, nodes: Sequence[NodeKind]
) -> Iterator[tuple[str, int, int, str]]:
    """Yield each setting with what it asks for, the most that a node has, and the unit."""
    if not nodes:
        return
    if settings.gpus_per_node is not None:
        kind, _, number = str(settings.gpus_per_node).rpartition(":")
        have = [node.gpus.get(kind, 0) if kind else sum(node.gpus.values()) for node in nodes]
        if number.isdecimal():
            yield "gpus_per_node", int(number), max(have), f"{kind} GPU".strip()
    if settings.cpus_per_node is not None:
        yield "cpus_per_node", settings.cpus_per_node, max(node.cpus for node in nodes), "CPU"
    m = re.fullmatch(r"(\d+)([KMGT]?)B?", str(settings.mem or "").upper())
    if m is not None:
        wanted = math.ceil(int(m[1]) * _MIB[m[2] or "M"])
        yield "mem", wanted, max(node.memory_mb for node in nodes), "MiB"


def _config_error(
    rule: _Rule, text: str, settings: SlurmSettings, partitions: list[str]
) -> ConfigError:
    group, _, flag = rule.key.partition(".")
    value = settings.sbatch.get(flag) if flag else getattr(settings, group)
    remedy = rule.remedy
    if rule.key == "partition" and partitions:
        remedy += f"{near_miss(str(value), partitions)}; there are {', '.join(sorted(partitions))}"
    return ConfigError(f"launcher.{rule.key}", value, f"{remedy} [{text}]")
