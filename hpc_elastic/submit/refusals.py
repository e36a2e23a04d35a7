"""What sbatch refuses, as an error that names the key, the value and the remedy (pure).

sbatch says what is wrong and not which flag it was. The table maps its words (stable since
Slurm 20.02, `slurm_strerror`) to the setting behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_elastic.config import SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, SubmissionError, near_miss


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
    ("node configuration is not available", "no node has all that is asked for together"),
    ("unable to contact slurm controller", "slurmctld does not answer; is SLURM_CONF right?"),
    ("socket timed out", "slurmctld is overloaded; try again"),
)


def explain(
    stderr: str, settings: SlurmSettings, partitions: Iterable[str] = ()
) -> HpcElasticError:
    """Return the error to raise for a submission that sbatch refused.

    Args:
        stderr: What sbatch wrote.
        settings: The settings of the refused array.
        partitions: Names of the partitions that exist, as far as known.
    """
    text = " ".join(line.removeprefix("sbatch: error: ") for line in stderr.strip().splitlines())
    for rule in _RULES:
        if rule.words in text.lower():
            return _config_error(rule, text, settings, list(partitions))
    for words, remedy in _GENERAL:
        if words in text.lower():
            return SubmissionError(f"sbatch refused the job: {text} ({remedy})")
    return SubmissionError(f"sbatch refused the job: {text}")


def _config_error(
    rule: _Rule, text: str, settings: SlurmSettings, partitions: list[str]
) -> ConfigError:
    group, _, flag = rule.key.partition(".")
    value = settings.sbatch.get(flag) if flag else getattr(settings, group)
    remedy = rule.remedy
    if rule.key == "partition" and partitions:
        remedy += f"{near_miss(str(value), partitions)}; there are {', '.join(sorted(partitions))}"
    return ConfigError(f"launcher.{rule.key}", value, f"{remedy} [{text}]")
