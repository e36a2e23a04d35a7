"""The examination as a whole: facts of the login node, the probe, and what all of it means."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.config.schema import RunSettings
from hpc_elastic.doctor import cli_settings, cluster, cluster_checks, node_checks, probe_task
from hpc_elastic.doctor.cluster import Cluster
from hpc_elastic.doctor.findings import Finding, Verdict, fail
from hpc_elastic.doctor.probe_job import Evidence, Say
from hpc_elastic.doctor.versions import versions
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.slurm.client import SiteClient

_KILL_WAIT_S = 30.0
"""Slurm's default."""


@dataclass(frozen=True)
class Examination:
    """What was found, and by what.

    Attributes:
        findings: In the order of the table.
        versions: Of the login node.
        facts: What the findings were judged by, as JSON.
        cluster: What Slurm says.
    """

    findings: list[Finding]
    versions: dict[str, str | None]
    facts: dict[str, Any] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)


def login(settings: RunSettings, path: Path, client: SiteClient | None = None) -> Examination:
    """Examine the login node, Slurm and the directory; nothing is submitted.

    Args:
        settings: What a run would be submitted with.
        path: An existing directory, such as runs would lie in.
        client: How to reach Slurm.
    """
    client = client or SiteClient(env=dict(os.environ))
    launcher = cli_settings.launcher_of(settings)
    own_python = launcher.python is None and launcher.container.runtime is None
    here, shared = probe_task.look_at_host(), probe_task.look_at_folder(path)
    said = cluster.look(launcher, path.absolute(), client)
    findings = [
        *node_checks.judge_host(here, own_python=own_python),
        *cluster_checks.judge_cluster(said, settings),
        *cluster_checks.judge_folder(shared, launcher.rendezvous),
    ]
    facts = {
        "host": here.to_json(),
        "folder": shared.to_json(),
        "slurm": cluster.to_json(said),
    }
    known = {**versions(), "slurm": said.setting("SLURM_VERSION") or None}
    return Examination(findings, known, facts, said)


def probe(
    before: Examination,
    settings: RunSettings,
    path: Path,
    *,
    num_nodes: int,
    patience_s: float,
    say: Say,
) -> Examination:
    """Run the probe, and return what both examinations have found.

    Args:
        before: What `login` has found.
        settings: What a run would be submitted with.
        path: The directory.
        num_nodes: How many nodes to look at.
        patience_s: How long the probe may wait for its first node.
        say: Is told what is being done.
    """
    from hpc_elastic.doctor.probe_job import ProbeRun, submit

    launcher, said = cli_settings.launcher_of(settings), before.cluster
    if said.config is None:
        return before
    client = SiteClient(env=dict(os.environ))
    kill_wait_s = float(said.number("KillWait") or _KILL_WAIT_S)
    limits = [p.max_time_s for p in said.named(launcher.partition) if p.max_time_s is not None]
    try:
        job = submit(settings, num_nodes, path, client, longest_s=max(limits, default=None))
    except (HpcElasticError, OSError) as e:
        return _with(before, [_refused(e)], {})
    course = ProbeRun(job, notice=launcher.preempt_signal, kill_wait_s=kill_wait_s, say=say)
    evidence = course.run(patience_s)
    findings = [
        *node_checks.judge_nodes(evidence, launcher, before.versions),
        *node_checks.judge_shared(evidence, launcher.rendezvous),
        *node_checks.judge_network(evidence),
        *node_checks.judge_signals(evidence, kill_wait_s),
    ]
    return _with(before, findings, _facts(evidence))


def _refused(error: Exception) -> Finding:
    return fail(
        "nodes.start",
        f"the probe could not be submitted: {error}",
        "a run would not be, either",
        "see the findings on Slurm and the directory; then run the doctor again",
    )


def _with(before: Examination, findings: list[Finding], facts: dict[str, Any]) -> Examination:
    """Add findings; what the nodes have shown goes before what the login node could only fear."""
    shown = {f.check for f in findings if f.verdict is Verdict.OK}
    told = {(f.group, f.found) for f in findings}
    kept = [f for f in before.findings if not _settled(f, shown) and (f.group, f.found) not in told]
    together = {**before.facts, **({"probe": facts} if facts else {})}
    return Examination([*kept, *findings], before.versions, together, before.cluster)


_SETTLES = {
    "host.python": "nodes.versions",
    "directory.shared": "directory.nodes",
    "directory.mount": "directory.node_mounts",
    "slurm.processes": "signals.cancel_end",
    "slurm.requeue": "signals.requeue",
}
"""Warnings of the login node, and the check on the nodes that answers them."""


def _settled(finding: Finding, shown: set[str]) -> bool:
    return finding.verdict is Verdict.WARN and _SETTLES.get(finding.check) in shown


def _facts(evidence: Evidence) -> dict[str, Any]:
    return {
        "nodes_asked": evidence.num_asked,
        "waiting": {str(i): why for i, why in evidence.waiting.items()},
        "silent": {str(i): what for i, what in evidence.silent.items()},
        "blind": {str(i): node for i, node in evidence.blind.items()},
        "nodes": [report.to_json() for report in evidence.reports.values()],
        "notices": {str(i): times for i, times in evidence.notices.items()},
        "endings": [vars(ending) for ending in evidence.endings],
        "leftovers": evidence.leftovers,
    }
