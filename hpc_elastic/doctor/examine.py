"""The whole examination: the login node, Slurm, the directory, and the probe on nodes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_elastic.config.schema import RunSettings
from hpc_elastic.doctor import cluster, node_checks, probe_job, probe_task
from hpc_elastic.doctor.cluster import ClusterFacts
from hpc_elastic.doctor.findings import Finding, Verdict, fail
from hpc_elastic.doctor.probe_job import Report
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.slurm.client import SlurmClient


@dataclass(frozen=True)
class Examination:
    """The findings in the order of the table, facts as JSON, and the login node's versions."""

    findings: list[Finding]
    versions: dict[str, str | None]
    facts: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterFacts = field(default_factory=ClusterFacts)


def examine_login_node(settings: RunSettings, path: Path) -> Examination:
    """Examine the login node, Slurm and a directory that exists; nothing is submitted."""
    client = SlurmClient(env=dict(os.environ))
    launcher = cluster.slurm_settings(settings)
    own_python = launcher.python is None and launcher.container.runtime is None
    here, shared = probe_task.collect_host_facts(), probe_task.collect_folder_facts(path)
    submission = path.absolute() / ".hpc_elastic"
    slurm = cluster.query_cluster(
        launcher, lambda: probe_job.render(launcher, submission, num_tasks=1), client
    )
    findings = [
        *node_checks.check_host(here, own_python=own_python),
        *cluster.check_cluster(slurm, settings),
        *node_checks.check_folder(shared, launcher.rendezvous),
    ]
    reported = {
        "config": slurm.config, "commands_version": slurm.version,
        "controllers": slurm.controllers, "partitions": [vars(p) for p in slurm.partitions],
        "nodes": slurm.nodes, "problems": slurm.problems,
        "qos": [q.name for q in slurm.qos], "offered_qos": sorted(slurm.offered_qos),
    }  # fmt: skip
    facts = {"host": asdict(here), "folder": asdict(shared), "slurm": reported}
    known = {**probe_task.versions(), "slurm": slurm.setting("SLURM_VERSION") or None}
    return Examination(findings, known, facts, slurm)


def examine_nodes(
    before: Examination,
    settings: RunSettings,
    path: Path,
    *,
    num_nodes: int,
    timeout_s: float,
    report: Report,
) -> Examination:
    """Return ``before`` with a probe's findings; ``timeout_s``: until the first node."""
    launcher, slurm = cluster.slurm_settings(settings), before.cluster
    if slurm.config is None:
        return before
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    try:
        probe = probe_job.submit_probe(settings, slurm, path, num_nodes, report)
    except (HpcElasticError, OSError) as e:
        refusal = fail(
            "nodes.start",
            f"the probe could not be submitted: {e}",
            "a run would not be, either",
            "see the findings on Slurm and the directory; then run the doctor again",
        )
        findings.append(refusal)
    else:
        evidence = probe.run(timeout_s)
        findings += [
            *node_checks.check_nodes(evidence, launcher, before.versions),
            *node_checks.check_shared_folder(evidence, launcher.rendezvous),
            *node_checks.check_network(evidence),
            *node_checks.check_signals(evidence, slurm.kill_wait_s),
        ]
        shown = {
            "nodes_asked": evidence.num_asked, "waiting": evidence.waiting,
            "silent": evidence.silent, "blind": evidence.blind,
            "nodes": [asdict(report) for report in evidence.reports.values()],
            "notices": evidence.notices, "endings": [vars(ending) for ending in evidence.endings],
            "leftovers": evidence.leftovers,
        }  # fmt: skip
        facts["probe"] = shown
    # without warnings of the login node that the probe settles, and what it finds again
    good = {f.check for f in findings if f.verdict is Verdict.OK}
    reported = {(f.group, f.found) for f in findings}
    kept = [
        f
        for f in before.findings
        if not (f.verdict is Verdict.WARN and _SETTLES.get(f.check) in good)
        and (f.group, f.found) not in reported
    ]
    return replace(before, findings=[*kept, *findings], facts={**before.facts, **facts})


_SETTLES = {
    "host.python": "nodes.versions",
    "directory.shared": "directory.nodes",
    "directory.mount": "directory.node_mounts",
    "slurm.processes": "signals.cancel_end",
    "slurm.requeue": "signals.requeue",
}
"""Warnings of the login node, and the check of the probe that settles each."""
