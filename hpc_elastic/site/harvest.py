"""What a site lets a run do beside other jobs (``launcher.harvest``, ``launcher.give_way``).

The choice is made once, at the submission, and stands in the settings of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hpc_elastic._util import duration
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.registry import user
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import Partition, Qos, preemptible_qos, selected

_LEAST_SLOT = "5"
"""``launcher.time_min`` where it is not given, in minutes."""


@dataclass(frozen=True)
class HarvestSite:
    """What a cluster offers to a run that fills gaps.

    ``qos`` are preemptible QOS with the flag NoReserve that this user may name: backfill takes
    their jobs for jobs of a minute, so they start in any gap, and planned jobs preempt them.
    """

    config: Mapping[str, str]
    partitions: Sequence[Partition] = ()
    qos: Sequence[Qos] = ()

    @classmethod
    def query(cls, client: SlurmClient, account: str | None) -> HarvestSite:
        """Query Slurm for runs of an account; gaps are filled without what it does not answer."""
        config: Mapping[str, str] = {}
        try:
            config = client.config()
            partitions = client.all_partitions()
            preemptible = preemptible_qos(client.all_qos(), config)
            names = user(), config.get("ClusterName"), account
            offered = client.offered_qos(*names) if preemptible else frozenset()
        except SlurmCommandError:  # no accounting, or it is private
            return cls(config)
        if not parsing.enforces_qos(config):
            offered |= {qos.name for qos in preemptible}
        found = (q for q in preemptible if "NoReserve" in q.flags and q.name in offered)
        return cls(config, partitions, [q for q in found if "REQUEUE" in q.mode(config)])


def harvest_terms(launcher: SlurmSettings, site: HarvestSite) -> tuple[SlurmSettings, str]:
    """Return the settings of a run or a pool without ``harvest=auto``, and the reason (pure)."""
    usual = min(_LEAST_SLOT, launcher.time or "", key=lambda time: time_limit_s(time) or math.inf)
    slots = replace(launcher, time_min=launcher.time_min or usual)
    shown = f"launcher.time_min={slots.time_min}"
    if launcher.harvest == "ladder":
        return slots, f"waiting tasks have limits of several lengths, from {shown} on"
    chosen = selected(site.partitions, launcher.partition)
    for qos in site.qos:
        if launcher.qos in (None, qos.name) and all(p.allows(qos.name) for p in chosen):
            what = f"tasks start in gaps of any length with QOS {qos.name}, which is preemptible"
            own = replace(launcher, qos=qos.name, time_min=None, harvest="off")
            longest = qos.max_time_s
            if launcher.time and longest and (time_limit_s(launcher.time) or math.inf) > longest:
                own = replace(own, time=f"{longest // 60:.0f}")
                what += f", for {duration(longest)} at most (its MaxWall)"
            return own, what
    if not parsing.has_backfill(site.config):
        what = f"no effect, {site.config['SchedulerType']} starts no task in a gap"
        return replace(launcher, harvest="off"), what
    if parsing.hides_jobs(site.config):
        what = "the site hides the plans for other jobs (PrivateData)"
        return replace(slots, harvest="ladder"), f"{what}, so limits vary from {shown} on"
    return replace(slots, harvest="off"), f"tasks start in gaps that are long enough for {shown}"


def give_way_terms(launcher: SlurmSettings, config: Mapping[str, str]) -> tuple[str, str | None]:
    """Return what ``launcher.give_way`` is at a site, and what there is to say about it (pure)."""
    given = launcher.give_way
    if not parsing.hides_jobs(config):
        what = "nodes beyond the minimum go back for waiting jobs"
        return ("on", f"launcher.give_way=auto: {what}") if given == "auto" else (given, None)
    why = "the site hides the jobs of other users (PrivateData)"
    if given == "auto":
        return "off", f"launcher.give_way=auto: no effect, {why}"
    what = "no node goes back before its time limit, and waiting tasks stand behind all other jobs"
    return given, f"launcher.give_way={given}: {why}: {what}"


def choose_terms(
    runs: Sequence[RunSettings], client: SlurmClient | None = None
) -> tuple[list[RunSettings], list[str]]:
    """Return settings without ``auto``, by what the cluster offers, and the reasons."""

    @cache
    def site(account: str | None) -> HarvestSite:
        return HarvestSite.query(client or SlurmClient(), account)

    notes: dict[str | None, None] = {}

    def chosen(launcher: SlurmSettings) -> SlurmSettings:
        if launcher.harvest == "off":
            return launcher
        needed = site(launcher.account) if launcher.harvest == "auto" else HarvestSite({})
        found, why = harvest_terms(launcher, needed)
        notes[f"launcher.harvest={launcher.harvest}: {why}"] = None
        return found

    found: list[RunSettings] = []
    for settings in runs:
        launcher: Any = settings.launcher
        own: list[Any] = [chosen(share) for _, share in settings.shares]  # type: ignore[arg-type]
        if launcher.pools:
            names = ("qos", "time", "time_min", "harvest")
            pools = [
                replace(pool, **{name: getattr(terms, name) for name in names})
                for pool, terms in zip(launcher.pools, own, strict=True)
            ]
            own = [replace(launcher, pools=pools, time_min=None)]  # each pool has its own
        if launcher.give_way != "off":
            gives_way, note = give_way_terms(launcher, site(launcher.account).config)
            notes[note] = None
            own[0] = replace(own[0], give_way=gives_way)
        found.append(replace(settings, launcher=own[0]))
    return found, [note for note in notes if note]
