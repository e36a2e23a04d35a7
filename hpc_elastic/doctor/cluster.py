"""What Slurm says of the cluster, as far as it answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import HpcElasticError, SlurmCommandError
from hpc_elastic.slurm.client import SiteClient
from hpc_elastic.slurm.parsing import Partition, is_nothing, parse_number

_T = TypeVar("_T")

SETTINGS = (
    *("SLURM_VERSION", "ClusterName", "MaxArraySize", "MaxJobCount", "MinJobAge", "JobRequeue"),
    *("PreemptType", "PreemptMode", "PreemptParameters", "PreemptExemptTime", "KillWait"),
    "SlurmctldParameters",
    *("ProctrackType", "AccountingStorageType", "AccountingStorageEnforce", "BatchStartTimeout"),
    *("EnforcePartLimits", "KillOnBadExit", "Epilog", "TaskPlugin", "SelectType", "SlurmdTimeout"),
    *("MessageTimeout", "RequeueExit", "RequeueExitHold", "SchedulerType", "UnkillableStepTimeout"),
)
"""The settings that matter to a run, or to whoever reads a bug report."""


@dataclass(frozen=True)
class Cluster:
    """What Slurm has said.

    Attributes:
        config: The settings in `SETTINGS`; None if slurmctld did not answer.
        partitions: All partitions.
        version: Version of the commands here; empty if they do not tell.
        controllers: scontrol's words on which controllers answer.
        nodes: Number of nodes of the wanted partition by state.
        accounting: What is wrong with sacct; None if it answers.
        test: When sbatch says that a task of the run would start; empty if it refuses.
        refusal: Why sbatch would refuse the run; empty if it does not.
        problems: Why a question was not answered, by its name.
    """

    config: dict[str, str] | None = None
    partitions: tuple[Partition, ...] = ()
    version: str = ""
    controllers: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    accounting: str | None = None
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
        """Return a setting; empty if it is not known, or Slurm has none."""
        value = (self.config or {}).get(name, "")
        return "" if is_nothing(value) else value

    def number(self, name: str) -> int | None:
        """Return a setting that begins with a number, such as ``30 sec``; None if unknown."""
        return parse_number(self.setting(name))


def look(settings: SlurmSettings, folder: Path, client: SiteClient) -> Cluster:
    """Ask Slurm all that concerns a run with these settings (login node).

    Args:
        settings: What the run would be submitted with.
        folder: A directory that sbatch's test script may name.
        client: How to reach Slurm.
    """
    problems: dict[str, str] = {}

    def ask(name: str, question: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return question()
        except SlurmCommandError as e:
            problems[name] = e.stderr.strip()[:300]
            return otherwise

    nothing: dict[str, str] = {}
    config = ask("config", client.config, nothing)
    if not config:
        return Cluster(problems=problems)
    test, refusal = _validate(settings, folder, client)
    return Cluster(
        config={name: config[name] for name in SETTINGS if name in config},
        partitions=tuple(ask("partitions", client.all_partitions, [])),
        version=ask("version", lambda: client.version("sbatch"), ""),
        controllers=ask("ping", client.ping, ""),
        nodes=ask("nodes", lambda: client.node_states(settings.partition), {}),
        accounting=_accounting(client),
        test=test,
        refusal=refusal,
        problems=problems,
    )


def _accounting(client: SiteClient) -> str | None:
    if shutil.which("sacct") is None:
        return "sacct is not installed here"
    try:
        client.accounting_answers()
    except SlurmCommandError as e:
        return e.stderr.strip()[:300]
    return None


def _validate(settings: SlurmSettings, folder: Path, client: SiteClient) -> tuple[str, str]:
    """Let sbatch look at the script of a run; return its words, and why it would refuse it."""
    from hpc_elastic.launcher.slurm import refusal

    try:
        with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as place:
            script = Path(place, "run.sbatch")
            script.write_text(test_script(settings, folder))
            return client.test_only(str(script)), ""
    except SlurmCommandError as e:
        if e.exit_code is None:
            return "", str(e)
        return "", str(refusal(e.stderr, settings, client))
    except HpcElasticError as e:
        return "", str(e)


def test_script(settings: SlurmSettings, folder: Path) -> str:
    """Return the batch script that a run of one node would have in this directory."""
    from hpc_elastic.doctor.probe_job import render

    return render(settings, folder / ".hpc_elastic", num_tasks=1)


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Return what of it belongs into a bug report."""
    return {
        "config": cluster.config,
        "commands_version": cluster.version,
        "controllers": cluster.controllers,
        "partitions": [vars(p) for p in cluster.partitions],
        "nodes": cluster.nodes,
        "problems": cluster.problems,
    }
