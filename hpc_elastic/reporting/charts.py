"""The charts of a report in Vega-Lite, from its JSON form (pure).

A chart holds its data and no colours: those come with the config of a theme (`colours.config`).
All charts over time have the same axis, from the run's beginning to its end. What is too small to
be seen is joined (`thin`), so that a run of days is as quickly drawn as one of minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpc_elastic.reporting import thin
from hpc_elastic.reporting.colours import QUEUE, SPENT_ON
from hpc_elastic.reporting.words import clock_ms, moment, number
from hpc_elastic.story.account import KINDS
from hpc_elastic.words import duration, node_time

Spec = dict[str, Any]
Values = Mapping[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is fetched
_COLUMNS = 800
"""Pixels of a wide chart: what is finer is not drawn."""
MOST_LANES = 150
"""Tasks that are drawn."""
_LANE = ((20, 20), (40, 13), (MOST_LANES, 7))
"""With so many lanes at most, each is so many pixels high."""
_UNSEEN_END = ("end",)
"""The end of the run is no end of a node that needs a mark."""
LOST = ("gone", "gave up", "silence", "hung", "taken")
"""How nodes end that had no time to save."""
_CROSS = "M-1,-1L1,1M1,-1L-1,1"


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: Of its place in the page.
        spec: In Vega-Lite, without size and colours.
        height: Pixels.
    """

    name: str
    spec: Spec
    height: int


def charts(report: Values) -> list[Chart]:
    """Return the charts of a report that have anything to show.

    Args:
        report: Its JSON form.
    """
    found = [_bar(report), _lanes(report), _group(report), _step(report), _loss(report)]
    return [chart for chart in found if chart is not None]


def begin_of(report: Values) -> float | None:
    """Return when the first thing happened that is drawn; None: nothing has."""
    begins = [node["begin"] for node in report["nodes"]]
    begins += [wait["begin"] for wait in report["queue"]]
    begins += [size["time"] for size in report["group"]]
    return min(begins, default=None)


def with_legend(chart: Chart) -> Chart:
    """Return a chart that explains its colours itself, for a picture."""
    encoding = chart.spec.get("encoding") or chart.spec["layer"][0]["encoding"]
    legend = {"orient": "bottom", "columns": len(SPENT_ON), "title": None}
    colour = {**encoding["color"], "legend": legend}
    if "encoding" in chart.spec:
        return replace(chart, spec={**chart.spec, "encoding": {**encoding, "color": colour}})
    first, *others = chart.spec["layer"]
    first = {**first, "encoding": {**encoding, "color": colour}}
    return replace(chart, spec={**chart.spec, "layer": [first, *others]})


# ---- where the time went ------------------------------------------------------------------


def _bar(report: Values) -> Chart | None:
    spent = report["spent"]
    total = spent["node_s"] + spent["queue_s"]
    if total <= 0:
        return None
    unit, unit_s = ("hours", 3600) if total >= 36_000 else ("minutes", 60)
    rows = [
        {"kind": kind, "at": place, "row": row, "time": round(s / unit_s, 4),
         "said": f"{node_time(s)} ({s / (whole or 1):.1%} of {row})"}
        for place, (kind, s, row, whole) in enumerate(_parts(spent)) if s > 0
    ]  # fmt: skip
    encoding = {
        "y": {"field": "row", "type": "nominal", "title": " ", "sort": ["on nodes", "in queue"],
              "axis": {"domain": False, "ticks": False}},
        "x": {"field": "time", "type": "quantitative", "title": f"node-{unit}",
              "scale": {"nice": False}, "axis": {"tickCount": {"expr": "max(3, width / 90)"}}},
        "order": {"field": "at", "type": "quantitative"},
        "color": _kinds(),
        "tooltip": [{"field": "kind"}, {"field": "said", "title": "time"}],
    }  # fmt: skip
    spec = {"data": {"values": rows}, "mark": {"type": "bar"}, "encoding": encoding}
    return Chart("bar", spec, 28 * len({row["row"] for row in rows}))


def _parts(spent: Values) -> Iterator[tuple[str, float, str, float]]:
    """Yield each kind with its seconds, its bar, and the seconds of that."""
    for kind in KINDS:
        yield kind, spent["by_kind"][kind], "on nodes", spent["node_s"]
    yield QUEUE, spent["queue_s"], "in queue", spent["queue_s"]


def _kinds() -> Spec:
    return {"field": "kind", "type": "nominal", "scale": {"domain": list(SPENT_ON)}, "legend": None}


# ---- the timeline of nodes ----------------------------------------------------------------


def lanes_of(report: Values) -> list[str]:
    """Return the tasks that are drawn, one lane each, in order of their names."""
    names = {node["task"] for node in report["nodes"]} | {w["task"] for w in report["queue"]}
    return sorted(names, key=_naturally)[:MOST_LANES]


def _labels(lanes: Sequence[str]) -> dict[str, str]:
    """Return what each lane is called: without the array's number, where all have the same."""
    parts = {name: name.rpartition("_") for name in lanes}
    if len({head for head, _, _ in parts.values()}) > 1:
        return {name: name for name in lanes}
    return {name: f"task {tail}" for name, (_, _, tail) in parts.items()}


def _naturally(name: str) -> tuple[Any, ...]:
    """Sort 7_2 before 7_10."""
    head, _, tail = name.rpartition("_")
    return (head, 0, int(tail)) if tail.isdecimal() else (name, 1, 0)


def _lanes(report: Values) -> Chart | None:
    lanes, begin = lanes_of(report), begin_of(report)
    if not lanes or begin is None:
        return None
    shortest_s = max(0.001, (report["about"]["until"] - begin) / _COLUMNS)
    height = next(high for most, high in _LANE if len(lanes) <= most)
    labels = _labels(lanes)
    y = {"field": "task", "type": "nominal", "title": " ",
         "scale": {"domain": list(labels.values())},
         "axis": {"labelOverlap": True, "labelLimit": 90, "ticks": False}}  # fmt: skip
    from_ms = clock_ms(begin)
    moments = [
        {"calculate": f"{from_ms} + 1000 * datum.{name}", "as": f"{name}_ms"}
        for name in ("begin", "end")
    ]
    # half a pixel more, under the next one: no background shows in between
    moments.append({"calculate": f"datum.end_ms + {500 * shortest_s}", "as": "drawn_ms"})
    told = {"calculate": "utcFormat(datum.begin_ms, '%b %d %H:%M:%S') + ' to '"
            " + utcFormat(datum.end_ms, '%H:%M:%S')", "as": "when"}  # fmt: skip
    time = {"data": _table(_rows(report, begin, shortest_s, labels)),
            "transform": [*moments, told],
            "mark": {"type": "bar", "height": {"band": 0.86}},
            "encoding": {"y": y, "x": _time("begin_ms"), "x2": {"field": "drawn_ms"},
                         "color": _kinds(),
                         "tooltip": [{"field": name} for name in ("task", "node", "kind", "when")],
                         }}  # fmt: skip
    ends = {"data": {"values": list(_ends(report, labels))},
            "mark": {"type": "point", "size": 3 * height},
            "encoding": {"y": y, "x": _axis(report, begin, "time"),
                         "shape": {"field": "lost", "type": "nominal", "legend": None,
                                   "scale": {"domain": ["announced", "lost"],
                                             "range": ["triangle-down", _CROSS]}},
                         "tooltip": [{"field": name} for name in
                                     ("task", "node", "attempt", "joined", "left", "why")],
                         }}  # fmt: skip
    spec = {"layer": [time, ends]}
    return Chart("lanes", spec, max(40, height * len(lanes)))


def _rows(
    report: Values, begin: float, shortest_s: float, labels: Mapping[str, str]
) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield what is drawn of each lane: task, node, kind, and seconds since the beginning."""
    for wait in report["queue"]:
        if wait["task"] in labels:
            ends = round(wait["begin"] - begin, 1), round(wait["end"] - begin, 1)
            yield labels[wait["task"]], "", QUEUE, *ends
    for node in report["nodes"]:
        if node["task"] not in labels:
            continue
        for i in thin.stretches(node["intervals"], shortest_s):
            ends = round(i["begin"] - begin, 1), round(i["end"] - begin, 1)
            yield labels[node["task"]], node["host"], i["kind"], *ends


def _ends(report: Values, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield how attempts ended, but with the run."""
    for node in report["nodes"]:
        why = node["ended_by"]
        if why is None or why in _UNSEEN_END or node["task"] not in labels:
            continue
        yield {
            "task": labels[node["task"]], "time": clock_ms(node["end"]), "node": node["host"],
            "attempt": node["attempt"], "joined": moment(node["begin"]),
            "left": moment(node["end"]), "why": why, "lost": "lost" if why in LOST else "announced",
        }  # fmt: skip


# ---- the group and its training -----------------------------------------------------------


def _group(report: Values) -> Chart | None:
    begin = begin_of(report)
    sizes = [(size["time"], size["nodes"]) for size in report["group"]]
    if not sizes or begin is None:
        return None
    until = max(report["about"]["until"], sizes[-1][0])
    sizes = [(begin, 0), *sizes, (until, sizes[-1][1])]
    stretches = [{"begin": b, "end": e, "kind": n} for (b, n), (e, _) in pairwise(sizes)]
    seen = thin.stretches(stretches, (until - begin) / _COLUMNS)
    drawn = [*((s["begin"], s["kind"]) for s in seen), (until, sizes[-1][1])]
    most = max(1, *(nodes for _, nodes in sizes))
    marks = list(range(0, most + 1, -(-most // 4)))
    spec = {
        "data": {"values": [{"time": clock_ms(t), "nodes": n} for t, n in drawn]},
        "mark": {"type": "area", "interpolate": "step-after"},
        "encoding": {
            "x": _axis(report, begin, "time"),
            "y": {"field": "nodes", "type": "quantitative", "title": "nodes in the group",
                  "scale": {"domain": [0, most]}, "axis": {"values": marks, "format": "d"}},
        },
    }  # fmt: skip
    return Chart("group", spec, 80)


def _step(report: Values) -> Chart | None:
    begin = begin_of(report)
    steps = [(p["time"], p["step"]) for p in report["progress"] if p["step"] is not None]
    if len(steps) < 2 or begin is None:
        return None
    return Chart("step", {"layer": [
        _faults(report),
        _line(report, begin, steps, "step"),
        _checkpoints(report),
    ]}, 180)  # fmt: skip


def _loss(report: Values) -> Chart | None:
    begin = begin_of(report)
    losses = [(p["time"], p["loss"]) for p in report["progress"] if p["loss"] is not None]
    if len(losses) < 2 or begin is None:
        return None
    low, high = min(y for _, y in losses), max(y for _, y in losses)
    is_wide = low > 0 and high / low > 30
    line = _line(report, begin, losses, "loss", logarithmic=is_wide)
    return Chart("loss", {"layer": [_faults(report), line]}, 150)


def _line(
    report: Values, begin: float, points: Sequence[tuple[float, float]], name: str, *,
    logarithmic: bool = False,
) -> Spec:  # fmt: skip
    kept = thin.series(points, _COLUMNS)
    title = f"{name} (logarithmic)" if logarithmic else name
    scale = {"type": "log", "nice": False} if logarithmic else {"zero": name == "step"}
    values = [(round(t - begin, 1), y) for t, y in kept]
    return {
        "data": _table(values, ("seconds", name)),
        "transform": [
            {"calculate": f"{clock_ms(begin)} + 1000 * datum.seconds", "as": "time"},
            {"calculate": "utcFormat(datum.time, '%b %d %H:%M:%S')", "as": "when"},
        ],
        "mark": {"type": "line", "tooltip": True},
        "encoding": {
            "x": _axis(report, begin, "time"),
            "y": {"field": name, "type": "quantitative", "title": title, "scale": scale,
                  "axis": {"format": ",d" if name == "step" else "~r", "tickCount": 5}},
            "tooltip": [{"field": name}, {"field": "when"}],
        },
    }  # fmt: skip


def _faults(report: Values) -> Spec:
    values = [
        {"time": clock_ms(c["time"]), "what": c["sentence"], "cost": node_time(c["node_s"])}
        for c in report["changes"] if c["fault"]
    ]  # fmt: skip
    return {
        "data": {"values": values},
        "mark": {"type": "rule", "opacity": max(0.12, min(0.5, 15 / (len(values) or 1)))},
        "encoding": {
            "x": _time("time"),
            "tooltip": [{"field": "what"}, {"field": "cost"}],
        },
    }


def _checkpoints(report: Values) -> Spec:
    announced = report["checkpoints"]["announced"]
    drawn = announced[:: -(-len(announced) // 200) or 1]
    values = [{"time": clock_ms(c["time"]), "step": c["step"],
               "checkpoint": f"of step {number(c['step'])}"} for c in drawn]  # fmt: skip
    return {
        "data": {"values": values},
        "mark": {"type": "circle", "size": 8 if len(values) > 50 else 16},
        "encoding": {
            "x": _time("time"),
            "y": {"field": "step", "type": "quantitative"},
            "tooltip": [{"field": "checkpoint"}],
        },
    }


# ---- shared -------------------------------------------------------------------------------


def _axis(report: Values, begin: float, name: str) -> Spec:
    """Return the axis of time, in the cluster's local time; one layer of a chart has it."""
    until = max(report["about"]["until"], begin + 1.0)
    # as plain numbers Vega-Lite would make dates of them, which its interpreter does not find
    domain = [{"expr": str(clock_ms(moment))} for moment in (begin, until)]
    return {
        "field": name, "type": "temporal", "title": None,
        "scale": {"type": "utc", "domain": domain, "nice": False},
        "axis": {"labelOverlap": "greedy", "tickCount": {"expr": "max(3, width / 110)"},
                 "labelFlush": True, "format": _clock_format(until - begin)},
    }  # fmt: skip


def _clock_format(length_s: float) -> str:
    """Return how moments are written on the axis: by a clock of 24 hours, as everywhere else."""
    if length_s > 18 * 3600:
        return "%b %d %H:%M"
    return "%H:%M" if length_s > 20 * 60 else "%H:%M:%S"


def _time(name: str) -> Spec:
    """Return the place on that axis of what another layer draws."""
    return {"field": name, "type": "temporal", "scale": {"type": "utc"}}


def _table(
    rows: Iterable[Sequence[object]],
    names: Sequence[str] = ("task", "node", "kind", "begin", "end"),
) -> Spec:
    """Return values as a table, a third of the size of objects; `expanded` makes these of it."""
    return {"table": {"names": list(names), "rows": [list(row) for row in rows]}}


def expanded(spec: Any) -> Any:
    """Return a chart with its tables as Vega-Lite knows them; page.js does the same."""
    if isinstance(spec, list):
        return [expanded(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if "table" in spec:
        names, rows = spec["table"]["names"], spec["table"]["rows"]
        return {"values": [dict(zip(names, row, strict=True)) for row in rows]}
    return {key: expanded(part) for key, part in spec.items()}


def described(report: Values) -> str:
    """Return the run in one line."""
    about = report["about"]
    begin = begin_of(report)
    took = duration(about["until"] - begin) if begin is not None else "not started"
    return f"{about['phase']}, {took}"


def schema() -> str:
    """Return the name of the language."""
    return _SCHEMA
