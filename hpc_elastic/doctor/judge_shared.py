"""What the probe has shown of the directory that its nodes share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.doctor import judge_folder
from hpc_elastic.doctor.evidence import Evidence
from hpc_elastic.doctor.findings import Finding, Verdict, fail, ok, unknown, warn
from hpc_elastic.doctor.judge_folder import CHOOSE
from hpc_elastic.doctor.shared import DEEDS, PATH, Seen
from hpc_elastic.words import duration, short

_SLOW_S = 5.0
_REMEDY = "choose a directory that all nodes share: --dir here, hydra.sweep.dir for a run"
_DELAY_WHY = "saves, joins and elections wait for files of other nodes"
_DELAY_REMEDY = (
    "is it one file system, without a cache of its own in between? Admin: on NFS, mount without "
    f"nocto. Or {CHOOSE}"
)
_NOT_EXCLUSIVE = (
    f"no run on this file system: {CHOOSE}. NFS, Lustre, GPFS, BeeGFS and CephFS make links "
    "exclusively; object stores behind FUSE and some caches in between do not"
)


def judge(evidence: Evidence, rendezvous: RendezvousSettings) -> Iterator[Finding]:
    """Yield what is to be said of the directory.

    Args:
        evidence: What the probe has shown.
        rendezvous: ``launcher.rendezvous`` of a run.
    """
    if evidence.blind:
        yield _blind(evidence)
    if not evidence.reports:
        return
    yield from _nodes(evidence)
    mounts = {r.facts.name: r.facts.folder.mount for r in evidence.reports.values()}
    yield judge_folder.mounted("directory.node_mounts", mounts, rendezvous)
    why_not = _not_tried(evidence)
    yield _election(evidence, why_not)
    yield _delay(evidence, why_not)
    yield _content(evidence, why_not)


def _blind(evidence: Evidence) -> Finding:
    found = f"what is written here does not appear on {', '.join(sorted(evidence.blind.values()))}"
    return fail("directory.delay", found, _DELAY_WHY, _DELAY_REMEDY)


def _nodes(evidence: Evidence) -> Iterator[Finding]:
    """Yield what is wrong with the directory as each node sees it, or that nothing is."""
    bad: dict[tuple[str, str], list[str]] = {}
    for report in evidence.reports.values():
        for finding in judge_folder.tried(report.facts.folder):
            if finding.verdict is Verdict.FAIL:
                bad.setdefault((finding.check, finding.found), []).append(report.facts.name)
    why = "all nodes of a run meet in its directory"
    for (_, found), names in bad.items():
        yield fail("directory.nodes", f"on {', '.join(names)}: {found}", why, _REMEDY)
    if not bad:
        kinds = sorted({r.facts.folder.fs or "unknown" for r in evidence.reports.values()})
        found = f"seen by all nodes, as {' and '.join(kinds)}; hard links and renames work there"
        yield ok("directory.nodes", found, why)


def _not_tried(evidence: Evidence) -> str:
    """Return why nothing was tried between two nodes; empty if something was."""
    if any(report.meeting.seen for report in evidence.reports.values()):
        return ""
    names = {report.facts.name for report in evidence.reports.values()}
    if len(names) == 1:
        return f"all tasks were on {names.pop()}"
    problems = {r.facts.name: r.meeting.problem for r in evidence.reports.values()}
    said = "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
    return said or "the nodes do not reach each other"


def _election(evidence: Evidence, why_not: str) -> Finding:
    """Judge whether of two nodes that link one name, one wins."""
    check = "directory.election"
    why = "a run's leader is the node that makes its record; two would train against each other"
    if why_not:
        return unknown(check, f"not tried: {why_not}", why)
    races = [r.meeting.race for r in evidence.reports.values() if r.meeting.race]
    faults = {
        "both nodes were told that they had made": sum(race.both for race in races),
        "neither was told so of": sum(race.neither for race in races),
        "the nodes see different winners of": sum(race.differ for race in races),
    }
    raced = f"of {sum(race.rounds for race in races)} names that two nodes linked at once"
    said = ", ".join(f"{what} {number}" for what, number in faults.items() if number)
    if said:
        return fail(check, f"link(2) is not exclusive: {raced}, {said}", why, _NOT_EXCLUSIVE)
    return ok(check, f"{raced}, each had one winner", why)


def _delay(evidence: Evidence, why_not: str) -> Finding:
    """Judge how soon what one node does to the directory is seen on another one."""
    check, why = "directory.delay", _DELAY_WHY
    if why_not:
        return unknown(check, f"not measured: {why_not}", why)
    seen = {r.facts.name: r.meeting.seen for r in evidence.reports.values() if r.meeting.seen}
    late = [f"on {name} {said}" for name, one in seen.items() if (said := _unseen(one))]
    if late:
        return fail(check, f"of what another node did, {'; '.join(late)}", why, _DELAY_REMEDY)
    worst = {name: max(one.times_s[name] or 0.0 for one in seen.values()) for name in DEEDS}
    said = ", ".join(f"{what} after {short(worst[name])}" for name, what in DEEDS.items())
    found = f"a node sees of another one {said}{_by_path(evidence, seen.values())}"
    if max(worst.values()) > _SLOW_S:
        remedy = "runs work, with these waits; a save at a preemption may be too late. Admin: on "
        remedy += f"NFS, mount without nocto. Or {CHOOSE}"
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _unseen(seen: Seen) -> str:
    """Return what an observer has not seen; empty if it has seen all."""
    missing = [what for name, what in DEEDS.items() if seen.times_s[name] is None]
    if len(missing) == len(DEEDS):
        return f"nothing was seen within {duration(seen.waited_s)}"
    return f"{', '.join(missing)} was not seen within {duration(seen.waited_s)}" if missing else ""


def _by_path(evidence: Evidence, seen: Collection[Seen]) -> str:
    """Say how long a name stays absent for who asks for it by its path."""
    times = [one.times_s[PATH] for one in seen]
    if None not in times:
        return f"; by its path alone a new file after {short(max(t for t in times if t))}"
    waited_s = min(one.waited_s for one in seen if one.times_s[PATH] is None)
    up_to_s = max(r.facts.folder.mount.path_stale_s for r in evidence.reports.values())
    return (
        f"; by its path alone a new file was not seen within {duration(waited_s)}"
        f" (names are kept for up to {duration(up_to_s)}), so runs list folders"
    )


def _content(evidence: Evidence, why_not: str) -> Finding:
    """Judge whether what was synced and renamed is what another node reads."""
    check, why = "directory.content", "a checkpoint is complete once it has its name"
    if why_not:
        return unknown(check, f"not tried: {why_not}", why)
    torn = [
        r.facts.name for r in evidence.reports.values() if r.meeting.seen and r.meeting.seen.torn
    ]
    if torn:
        found = f"{', '.join(torn)} read a part of a file that was synced and then renamed"
        return fail(check, found, why, f"no run on this file system: {CHOOSE}")
    return ok(check, "what a node has synced and renamed, another reads whole", why)
