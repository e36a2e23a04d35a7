"""What the probe has shown of what lies between the nodes: network and groups. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_elastic.doctor.evidence import Evidence
from hpc_elastic.doctor.findings import Finding, by_value, fail, ok, unknown, warn
from hpc_elastic.doctor.peers import Sight
from hpc_elastic.words import duration, short

_SKEW_S = 1.0
_MOST_LINES = 8
_FEW = 4
"""Of so many nodes the addresses are listed."""
_SLOW_ROUND_TRIP_S = 0.01


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Yield what is to be said of the network."""
    if not evidence.reports:
        return
    yield _interface(evidence)
    machines = {r.facts.host.name for r in evidence.reports.values()}
    if len(machines) < 2:
        yield _one_machine(machines.pop(), len(evidence.reports))
    else:
        yield _reach(evidence)
        yield _skew(evidence)
    yield from _hello(evidence)


def _one_machine(name: str, num_tasks: int) -> Finding:
    found = f"only {name} was tried, and nothing that lies between nodes"
    remedy = "--probe --nodes 2" + (", with exclusive=true" if num_tasks > 1 else "")
    return unknown("network.reach", found, "a run of several nodes lives by it", remedy)


def _interface(evidence: Evidence) -> Finding:
    check, why = "network.interface", "agents and process groups talk over it"
    bad = [
        f"{r.facts.name}: {r.facts.problem}" for r in evidence.reports.values() if r.facts.problem
    ]
    if bad:
        remedy = "name it: launcher.interface=ib0, one of `ip -br address` on the nodes"
        return fail(check, "; ".join(bad), why, remedy)
    few = len(evidence.reports) <= _FEW
    chosen = by_value(
        {
            r.facts.name: f"{r.facts.interface} {r.facts.address}" if few else r.facts.interface
            for r in evidence.reports.values()
        }
    )
    names = {r.facts.interface for r in evidence.reports.values()}
    rest = {i for r in evidence.reports.values() for i in r.facts.addresses} - names
    more = f"; others there: {', '.join(sorted(rest))}" if rest else ""
    if len(names) > 1:
        remedy = "name one that all have: launcher.interface"
        return warn(check, f"not the same on all nodes: {chosen}", why, remedy)
    return ok(check, chosen + more, why)


def _reach(evidence: Evidence) -> Finding:
    """Judge whether each task reaches a free port of each other one."""
    check, why = "network.reach", "every agent connects to the leader, every worker to every other"
    lines, trips = [], []
    for report in evidence.reports.values():
        for sight in report.meeting.sights:
            if sight.problem:
                lines.append(f"{report.facts.name} can not reach {_problem(sight)}")
            elif sight.round_trip_s is not None:
                trips.append(sight.round_trip_s)
        for number in report.meeting.absent:
            lines.append(f"{report.facts.name} found no file of {evidence.name(number)}")
    if lines:
        remedy = (
            "is that node's network up, a firewall between the nodes? Any free port has to be "
            "open among them; another interface: launcher.interface"
        )
        more = f"; and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
        return fail(check, "; ".join(lines[:_MOST_LINES]) + more, why, remedy)
    if not trips:
        return unknown(check, "the nodes did not try to reach each other", why)
    found = f"every node reaches a free port of every other, round trip {short(max(trips))}"
    if max(trips) > _SLOW_ROUND_TRIP_S:
        remedy = "nothing if the nodes were busy; else another launcher.interface"
        return warn(check, found, why, remedy)
    return ok(check, found, why)


def _problem(sight: Sight) -> str:
    where = f" at {sight.address}" if sight.address else ""
    return f"{sight.host}{where}: {sight.problem}{_detour(sight.others)}"


def _detour(others: dict[str, bool]) -> str:
    open_ones = [address for address, reached in others.items() if reached]
    return f" (but at {', '.join(open_ones)})" if open_ones else ""


def _skew(evidence: Evidence) -> Finding:
    check, why = "network.clocks", "logs and events of the nodes are put in order by their clocks"
    sights = [s for r in evidence.reports.values() for s in r.meeting.sights]
    known = [(abs(s.clock_ahead_s), s.host) for s in sights if s.clock_ahead_s is not None]
    if not known:
        return unknown(check, "not measured: the nodes do not reach each other", why)
    most, host = max(known)
    if most > _SKEW_S:
        remedy = "have the admin keep the nodes' clocks by NTP"
        return warn(check, f"they differ by {duration(most)}, most at {host}", why, remedy)
    return ok(check, f"they agree within {short(most)}", why)


def _hello(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for each backend that was tried."""
    said = {r.facts.name: r.hello for r in evidence.reports.values() if r.hello is not None}
    backends = sorted({b for h in said.values() for b in (*h.bandwidths, *h.problems)} - {"torch"})
    for backend in backends:
        problems = {n: h.problems[backend] for n, h in said.items() if backend in h.problems}
        yield _of_backend(
            backend,
            problems,
            [h.bandwidths[backend] for h in said.values() if backend in h.bandwidths],
        )


def _of_backend(backend: str, problems: dict[str, str], bandwidths: list[float]) -> Finding:
    check, why = f"network.{backend}", "gradients are reduced over it"
    if problems:
        found = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        remedy = "see network.reach first; then launcher.interface, and NCCL_DEBUG=INFO"
        return fail(check, f"an all_reduce across the nodes failed: {found}", why, remedy)
    speed = min(bandwidths) / 1e6
    return ok(check, f"an all_reduce of 4 MiB across the nodes came back, {speed:,.0f} MB/s", why)
