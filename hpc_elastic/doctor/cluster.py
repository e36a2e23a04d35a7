"""The settings on the doctor's command line, and what Slurm reports on the cluster."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.config.resolve import put, read_setting, resolve
from hpc_elastic.config.schema import TOP_LEVEL, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, SlurmCommandError
from hpc_elastic.launcher.slurm import with_shell_defaults
from hpc_elastic.run.registry import user
from hpc_elastic.site import NodeState
from hpc_elastic.slurm.client import SiteClient
from hpc_elastic.slurm.parsing import Partition, Qos, is_nothing, parse_number

_T = TypeVar("_T")
_SHOWN = (
    *("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_node", "mem"),
    *("constraint", "exclude", "exclusive", "coallocate_min", "interface"),
    *("preempt_grace_s", "preempt_signal"),
)

SETTINGS = (
    *("SLURM_VERSION", "ClusterName", "MaxArraySize", "MaxJobCount", "MinJobAge", "JobRequeue"),
    *("PreemptType", "PreemptMode", "PreemptParameters", "PreemptExemptTime", "KillWait"),
    "SlurmctldParameters",
    *("ProctrackType", "AccountingStorageType", "AccountingStorageEnforce", "BatchStartTimeout"),
    *("EnforcePartLimits", "KillOnBadExit", "Epilog", "TaskPlugin", "SelectType", "SlurmdTimeout"),
    *("MessageTimeout", "RequeueExit", "RequeueExitHold", "SchedulerType", "UnkillableStepTimeout"),
)
"""The settings of Slurm that matter to a run or in a bug report."""


def parse_settings(words: Sequence[str]) -> RunSettings:
    """Parse and check the settings on the command line, such as ``nodes=1:16``.

    ``partition=gpu`` stands for ``launcher.partition=gpu``. Raises ConfigError if a setting is
    wrong, or names another launcher than slurm.
    """
    config: dict[str, Any] = {"launcher": {"backend": "slurm"}}
    overrides = []
    for word in words:
        short, value = read_setting(word.removeprefix("launcher."))
        is_full = short in (*TOP_LEVEL, "launcher") or short.startswith("launcher.")
        key = short if is_full else f"launcher.{short}"
        overrides.append(f"{key}={word.partition('=')[2]}")
        if key != "launcher":
            put(config, key, value)
        elif value != "slurm":
            remedy = "the doctor checks only slurm; give the keys of your own group one by one"
            raise ConfigError(key, value, remedy)
    found = resolve(config, overrides=overrides)
    return replace(found, launcher=with_shell_defaults(slurm_settings(found), os.environ))


def slurm_settings(settings: RunSettings) -> SlurmSettings:
    """Return the settings of Slurm; `parse_settings` allows no others."""
    assert isinstance(settings.launcher, SlurmSettings)
    return settings.launcher


def settings_json(settings: RunSettings) -> dict[str, Any]:
    """Return the settings for a bug report, without those that may hold a secret."""
    launcher = slurm_settings(settings)
    container = launcher.container
    return {
        "nodes": asdict(settings.nodes),
        "nproc_per_node": settings.nproc_per_node,
        **{name: getattr(launcher, name) for name in _SHOWN},
        "container": {"runtime": container.runtime, "image": container.image},
    }


@dataclass(frozen=True)
class ClusterFacts:
    """What Slurm has reported; ``version`` is that of the commands here, empty if unknown.

    Attributes:
        config: The settings in `SETTINGS`; None if slurmctld did not answer.
        nodes: Number of nodes of the wanted partition by state.
        accounting: Problem of sacct; None if it answers.
        qos: Every QOS; empty without accounting.
        offered_qos: Names of the QOS that this user may name.
        test: Output of ``sbatch --test-only``; empty if it refuses.
        refusal: Why sbatch would refuse the run; empty if it would not.
        problems: Why a query failed, by name.
    """

    config: dict[str, str] | None = None
    partitions: tuple[Partition, ...] = ()
    version: str = ""
    controllers: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    accounting: str | None = None
    qos: tuple[Qos, ...] = ()
    offered_qos: frozenset[str] = frozenset()
    test: str = ""
    refusal: str = ""
    problems: dict[str, str] = field(default_factory=dict)

    def named(self, wanted: str | None) -> list[Partition]:
        """Return the partitions of a name, of several with commas, or the default one."""
        if wanted is None:
            return [p for p in self.partitions if p.is_default]
        names = wanted.split(",")
        return [p for p in self.partitions if p.name in names]

    def setting(self, name: str) -> str:
        """Return a setting; empty if unknown or unset."""
        value = (self.config or {}).get(name, "")
        return "" if is_nothing(value) else value

    def number(self, name: str) -> int | None:
        """Return a setting that begins with a number, such as ``30 sec``; None if unknown."""
        return parse_number(self.setting(name))


def has_accounting(config: Mapping[str, str]) -> bool:
    """Return whether a cluster has accounting, by its settings."""
    kind = config.get("AccountingStorageType", "")
    return not is_nothing(kind) and kind != "accounting_storage/none"


def query_cluster(
    settings: SlurmSettings, render_script: Callable[[], str], client: SiteClient
) -> ClusterFacts:
    """Query Slurm about all that concerns a run; ``render_script`` returns that of one node."""
    problems: dict[str, str] = {}

    def query(name: str, question: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return question()
        except SlurmCommandError as e:
            problems[name] = e.stderr.strip()[:300]
            return otherwise

    nothing: dict[str, str] = {}
    config = query("config", client.config, nothing)
    if not config:
        return ClusterFacts(problems=problems)
    from hpc_elastic.launcher.slurm import refusal

    accounting, test, refused = None, "", ""
    if shutil.which("sacct") is None:
        accounting = "sacct is not installed here"
    else:
        try:
            client.accounting_answers()
        except SlurmCommandError as e:
            accounting = e.stderr.strip()[:300]
    qos: list[Qos] = []
    offered = frozenset[str]()
    if has_accounting(config) and accounting is None:
        qos = query("qos", client.all_qos, qos)
        names = user(), config.get("ClusterName"), settings.account
        offered = query("qos", lambda: client.offered_qos(*names), offered)
    try:
        with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as place:
            script = Path(place, "run.sbatch")
            script.write_text(render_script())
            test = client.test_only(str(script))
    except SlurmCommandError as e:
        refused = str(e if e.exit_code is None else refusal(e, settings, client))
    except HpcElasticError as e:
        refused = str(e)
    return ClusterFacts(
        config={name: config[name] for name in SETTINGS if name in config},
        partitions=tuple(query("partitions", client.all_partitions, [])),
        version=query("version", lambda: client.version("sbatch"), ""),
        controllers=query("ping", client.ping, ""),
        nodes=query("nodes", lambda: _count_nodes(client, settings.partition), {}),
        accounting=accounting,
        qos=tuple(qos),
        offered_qos=offered,
        test=test,
        refusal=refused,
        problems=problems,
    )


def _count_nodes(client: SiteClient, partition: str | None) -> dict[str, int]:
    """Return the number of nodes by state, without the marks that keep no task away."""
    states = map(NodeState.parse, client.each_node(partition).values())
    return dict(Counter(state.name for state in states))
