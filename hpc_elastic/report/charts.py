"""The charts of a report in Vega-Lite, from its JSON form (pure).

A chart holds its data and no colours: these come with the config of a theme (`config`). All charts
over time have the same axis, from the start of the run to its end. Intervals that are too short to
be visible are joined, so that a run of days is drawn as fast as one of minutes.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from hpc_elastic._util import node_time
from hpc_elastic.report import KINDS, grouped
from hpc_elastic.report.progress_log import TRAINING
from hpc_elastic.report.sentences import naturally

Spec = dict[str, Any]
Values = Mapping[str, Any]
Points = Sequence[tuple[Any, ...]]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is fetched
_COLUMNS, _MARKS = 800, 200  # points of a line, marks beside each other: distinct to the eye
MOST_LANES = 150  # largest number of nodes that are drawn
_LANE = ((20, 20), (40, 13), (MOST_LANES, 7))  # up to that many lanes -> height of one in pixels
LOST = ("node_lost", "agent_failed", "silence")  # ends of attempts that had no time to save
_CROSS = "M-1,-1L1,1M1,-1L-1,1"
QUEUE = "queue"
SPENT_ON = {**KINDS, QUEUE: "tasks wait for a node; no node is held"}
"""Kinds of time with a colour of their own, in the order of the bars, and their meanings."""
_COLOUR = {"field": "kind", "type": "nominal", "scale": {"domain": list(SPENT_ON)}, "legend": None}
_TIME = {"field": "time", "type": "temporal", "scale": {"type": "utc"}}  # of a second layer


@dataclass(frozen=True)
class Chart:
    """One chart, as Vega-Lite without size and colours; ``name`` is its place in the page."""

    name: str
    spec: Spec
    height: int
    title: str = ""


def charts(report: Values) -> list[Chart]:
    """Return the charts that have data, of the JSON form of a report."""
    begin = begin_of(report)
    if begin is None:
        return []
    found = [
        _bar(report), _lanes(report, begin), _group(report, begin), *_of_training(report, begin)
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def begin_of(report: Values) -> float | None:
    """Return the earliest time that is drawn; None if there is none."""
    begins = [each["begin"] for each in (*report["nodes"], *report["queue"])]
    return min([*begins, *(size["time"] for size in report["group"])], default=None)


def _bar(report: Values) -> Chart | None:
    spent = report["spent"]
    total = spent["node_s"] + spent["queue_s"]
    if total <= 0:
        return None
    unit, unit_s = ("hours", 3600) if total >= 36_000 else ("minutes", 60)
    parts = [(kind, spent["by_kind"][kind], "on nodes", spent["node_s"]) for kind in KINDS]
    parts.append((QUEUE, spent["queue_s"], "in queue", spent["queue_s"]))
    rows = [
        {"kind": kind, "at": place, "row": row, "time": round(s / unit_s, 4),
         "said": f"{node_time(s)} ({s / (whole or 1):.1%} of {row})"}
        for place, (kind, s, row, whole) in enumerate(parts) if s > 0
    ]  # fmt: skip
    encoding = {
        "y": {"field": "row", "type": "nominal", "title": " ", "sort": ["on nodes", "in queue"],
              "axis": {"domain": False, "ticks": False}},
        "x": {"field": "time", "type": "quantitative", "title": f"node-{unit}",
              "scale": {"nice": False}, "axis": {"tickCount": {"expr": "max(3, width / 90)"}}},
        "order": {"field": "at", "type": "quantitative"},
        "color": _COLOUR,
        "tooltip": [{"field": "kind"}, {"field": "said", "title": "time"}],
    }  # fmt: skip
    spec = {"data": {"values": rows}, "mark": {"type": "bar"}, "encoding": encoding}
    return Chart("bar", spec, 28 * len({row["row"] for row in rows}))


Lanes = Mapping[tuple[str, str], str]  # host and task -> the name of its lane, in order


def lanes_of(report: Values) -> Lanes:
    """Return the lanes: of a node, or of each of several tasks that shared it at a time.

    A task that was on no node has a lane of its own, of host ``""``.
    """
    held = grouped(report["nodes"], lambda node: node["host"])  # in order of their beginning
    started = {node["task"] for node in report["nodes"]}
    pairs = {(node["host"], node["task"]) for node in report["nodes"]}
    pairs |= {("", wait["task"]) for wait in report["queue"] if wait["task"] not in started}
    alone = {
        host for host, nodes in held.items()
        if all(m["task"] == n["task"] or m["end"] <= n["begin"] for m, n in pairwise(nodes))
    }  # fmt: skip
    return {
        (host, task): host if host in alone else f"{host} task {task}".strip()
        for host, task in sorted(pairs, key=lambda p: (not p[0], *map(naturally, p)))
    }


def _lanes(report: Values, begin: float) -> Chart | None:
    of_pairs = lanes_of(report)
    lanes = list(dict.fromkeys(of_pairs.values()))[:MOST_LANES]
    if not lanes:
        return None
    names = {pair: lane for pair, lane in of_pairs.items() if lane in lanes}
    shortest_s = max(0.001, (report["about"]["until"] - begin) / _COLUMNS)
    height = next(high for most, high in _LANE if len(lanes) <= most)
    y = {"field": "node", "type": "nominal", "title": " ", "scale": {"domain": lanes},
         "axis": {"labelOverlap": True, "labelLimit": 90, "ticks": False}}  # fmt: skip
    from_ms = clock_ms(begin)
    moments = [
        {"calculate": f"{from_ms} + 1000 * datum.{name}", "as": f"{name}_ms"}
        for name in ("begin", "end")
    ]
    # half a pixel longer, below the next bar, so that no background is visible between them
    moments.append({"calculate": f"datum.end_ms + {500 * shortest_s}", "as": "drawn_ms"})
    told = {"calculate": "utcFormat(datum.begin_ms, '%b %d %H:%M:%S') + ' to '"
            " + utcFormat(datum.end_ms, '%H:%M:%S')", "as": "when"}  # fmt: skip
    time = {"data": _table(_rows(report, begin, shortest_s, names), _OF_A_BAR),
            "transform": [*moments, told],
            "mark": {"type": "bar", "height": {"band": 0.86}},
            "encoding": {"y": y, "x": {**_TIME, "field": "begin_ms"}, "x2": {"field": "drawn_ms"},
                         "color": _COLOUR,
                         "tooltip": [{"field": name} for name in ("node", "task", "kind", "when")],
                         }}  # fmt: skip
    ends = {"data": {"values": list(_ends(report, names))},
            "mark": {"type": "point", "size": 3 * height},
            "encoding": {"y": y, "x": _axis(report, begin),
                         "shape": {"field": "lost", "type": "nominal", "legend": None,
                                   "scale": {"domain": ["announced", "lost"],
                                             "range": ["triangle-down", _CROSS]}},
                         "tooltip": [{"field": name} for name in
                                     ("node", "task", "attempt", "joined", "left", "why")],
                         }}  # fmt: skip
    spec = {"layer": [time, ends]}
    return Chart("lanes", spec, max(40, height * len(lanes)))


_OF_A_BAR = ("node", "task", "kind", "begin", "end")


def _rows(
    report: Values, begin: float, shortest_s: float, lanes: Lanes
) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield the bars of all lanes: lane, task, kind, and seconds since the start."""
    held = grouped(report["nodes"], lambda node: node["task"])
    for wait in report["queue"]:  # below the other bars of the task's last node, or of its first
        of_task = held.get(wait["task"], [])
        at = max(0, bisect_right(of_task, wait["begin"], key=lambda node: node["begin"]) - 1)
        lane = lanes.get((of_task[at]["host"] if of_task else "", wait["task"]))
        if lane is not None:
            ends = round(wait["begin"] - begin, 1), round(wait["end"] - begin, 1)
            yield lane, wait["task"], QUEUE, *ends
    for node in report["nodes"]:
        lane = lanes.get((node["host"], node["task"]))
        if lane is None:
            continue
        for i in thinned_stretches(node["intervals"], shortest_s):
            ends = round(i["begin"] - begin, 1), round(i["end"] - begin, 1)
            yield lane, node["task"], i["kind"], *ends


def _ends(report: Values, lanes: Lanes) -> Iterator[dict[str, Any]]:
    """Yield the marks of all lanes; the first of alike ones that would cover each other."""
    shown = [n for n in report["nodes"] if n["ended_by"] not in (None, "end")]
    by_place = {
        (lanes.get((n["host"], n["task"])), n["ended_by"] in LOST, column): n
        for column, nodes in _by_column(report, shown, "end") for n in reversed(nodes)
    }  # fmt: skip
    for (lane, is_lost, _), node in by_place.items():
        if lane is None:
            continue
        yield {
            "node": lane, "time": clock_ms(node["end"]), "task": node["task"],
            "attempt": node["attempt"], "joined": moment(node["begin"]),
            "left": moment(node["end"]), "why": node["ended_by"],
            "lost": "lost" if is_lost else "announced",
        }  # fmt: skip


def _group(report: Values, begin: float) -> Chart | None:
    sizes = [(size["time"], size["nodes"]) for size in report["group"]]
    if not sizes:
        return None
    until = max(report["about"]["until"], sizes[-1][0])
    sizes = [(begin, 0), *sizes, (until, sizes[-1][1])]
    stretches = [{"begin": b, "end": e, "kind": n} for (b, n), (e, _) in pairwise(sizes)]
    seen = thinned_stretches(stretches, (until - begin) / _COLUMNS)
    drawn = [*((s["begin"], s["kind"]) for s in seen), (until, sizes[-1][1])]
    most = max(1, *(nodes for _, nodes in sizes))
    marks = list(range(0, most + 1, -(-most // 4)))
    spec = {
        "data": {"values": [{"time": clock_ms(t), "nodes": n} for t, n in drawn]},
        "mark": {"type": "area", "interpolate": "step-after"},
        "encoding": {
            "x": _axis(report, begin),
            "y": {"field": "nodes", "type": "quantitative", "title": "nodes in the group",
                  "scale": {"domain": [0, most]}, "axis": {"values": marks, "format": "d"}},
        },
    }  # fmt: skip
    return Chart("group", spec, 80)


def _of_training(report: Values, begin: float) -> Iterator[Chart]:

    def drawn(
        name: str,
        values: Points,
        title: str,
        scale: Spec,
        height: int = 90,
        more: Sequence[Spec] = (),
    ) -> Iterator[Chart]:
        if len(values) > 1:
            field = name if name in ("step", "loss") else "value"
            line = _line(report, begin, values, field, title, scale)
            heading = title if field == "value" else ""
            yield Chart(name, {"layer": [_faults(report), line, *more]}, height, heading)

    saved = [_checkpoints(report)] if report["checkpoints"]["announced"] else []
    # without any, Vega warns of a scale without values
    yield from drawn("step", values_of(report, "step"), "step", {"zero": True}, 180, saved)
    losses = values_of(report, "loss")
    low, high = (end((y for _, y in losses), default=0.0) for end in (min, max))
    is_wide = low > 0 and high / low > 30
    scale: Spec = {"type": "log", "nice": False} if is_wide else {"zero": False}
    yield from drawn("loss", losses, "loss (logarithmic)" if is_wide else "loss", scale, 150)
    for key, title in (("samples_per_s", "samples/s"), ("steps_per_s", "steps/s")):
        values = values_of(report, key)
        if any(value for _, value in values):  # steps where the script reports no samples
            yield from drawn("throughput", values, title, {"zero": True})
            break
    yield from drawn("gpus", values_of(report, "gpu_use"), "GPU use", {"zero": True})
    progress = report["progress"]
    for number, name in enumerate(dict.fromkeys(name for p in progress for name in p["metrics"])):
        known = [(p["time"], p["metrics"][name]) for p in progress if name in p["metrics"]]
        yield from drawn(f"metric-{number}", known, name, {"zero": False})


def values_of(report: Values, key: str) -> list[tuple[float, float]]:
    """Return the known values of a field of the progress over time."""
    return [(p["time"], p[key]) for p in report["progress"] if p[key] is not None]


def _line(report: Values, begin: float, points: Points, name: str, title: str, scale: Spec) -> Spec:
    if name == "step":  # the line falls where the training resumed from an earlier step
        falls = [(t, before) for (_, before), (t, step) in pairwise(points) if step < before]
        drawn = series(sorted([*falls, *points], key=itemgetter(0)), _COLUMNS)
    else:
        drawn = _with_gaps(report, points)
    values = [(round(t - begin, 1), y) for t, y in drawn]
    return {
        "data": _table(values, ("seconds", name)),
        "transform": [
            {"calculate": f"{clock_ms(begin)} + 1000 * datum.seconds", "as": "time"},
            {"calculate": "utcFormat(datum.time, '%b %d %H:%M:%S')", "as": "when"},
        ],
        "mark": {"type": "line", "tooltip": True},
        "encoding": {
            "x": _axis(report, begin),
            "y": {"field": name, "type": "quantitative", "title": title, "scale": scale,
                  "axis": {"format": ",d" if name == "step" else "~r", "tickCount": 5}},
            "tooltip": [{"field": name, "title": title}, {"field": "when"}],
        },
    }  # fmt: skip


def _with_gaps(report: Values, points: Points) -> list[tuple[Any, ...]]:
    """Return a line with visible gaps, by a point without a value, where nothing was trained."""
    progress, times = report["progress"], [t for t, _ in points]
    counts = any(p["step"] is not None for p in progress)
    pauses = (p for p in progress if p["phase"] != TRAINING or (counts and p["step"] is None))
    shortest_s = (times[-1] - times[0]) / _COLUMNS
    inside = (p["time"] for p in pauses if times[0] < p["time"] < times[-1])
    after = {bisect_right(times, t): t for t in inside}
    gaps = {i: t for i, t in after.items() if times[i] - times[i - 1] > shortest_s}
    edges = [point for i in gaps for point in points[i - 1 : i + 1]]
    drawn = {*series(points, _COLUMNS), *edges, *((t, None) for t in gaps.values())}
    return sorted(drawn, key=lambda point: float(point[0]))


def _faults(report: Values) -> Spec:
    values = []
    faults = [change for change in report["changes"] if change["fault"]]
    for _, near in _by_column(report, faults, "time"):
        worst = max(near, key=lambda change: change["node_s"])
        more = f"; and {len(near) - 1} more" if len(near) > 1 else ""
        values.append({"time": clock_ms(worst["time"]), "what": worst["sentence"] + more,
                       "cost": node_time(sum(change["node_s"] for change in near))})  # fmt: skip
    return {
        "data": {"values": values},
        "mark": {"type": "rule", "opacity": max(0.12, min(0.5, 15 / (len(values) or 1)))},
        "encoding": {"x": _TIME, "tooltip": [{"field": "what"}, {"field": "cost"}]},
    }


def _by_column(
    report: Values, items: Iterable[Values], key: str
) -> Iterable[tuple[int, list[Values]]]:
    begin = begin_of(report) or 0.0
    width_s = max(0.001, (report["about"]["until"] - begin) / _MARKS)
    return grouped(items, lambda i: min(_MARKS - 1, int((i[key] - begin) / width_s))).items()


def _checkpoints(report: Values) -> Spec:
    announced = report["checkpoints"]["announced"]
    drawn = announced[:: -(-len(announced) // _MARKS) or 1]
    values = [{"time": clock_ms(c["time"]), "step": c["step"],
               "checkpoint": f"of step {number(c['step'])}"} for c in drawn]  # fmt: skip
    place = {"x": _TIME, "y": {"field": "step", "type": "quantitative"}}
    return {
        "data": {"values": values},
        "mark": {"type": "circle", "size": 8 if len(values) > 50 else 16},
        "encoding": {**place, "tooltip": [{"field": "checkpoint"}]},
    }


def _axis(report: Values, begin: float) -> Spec:
    """Return the time axis, in the local time of the cluster; one layer of a chart has it."""
    until = max(report["about"]["until"], begin + 1.0)
    # Vega-Lite makes dates of plain numbers, which its interpreter does not find
    domain = [{"expr": str(clock_ms(moment))} for moment in (begin, until)]
    length_s = until - begin
    clock = "%H:%M" if length_s > 20 * 60 else "%H:%M:%S"
    return {
        "field": "time", "type": "temporal", "title": None,
        "scale": {"type": "utc", "domain": domain, "nice": False},
        "axis": {"labelOverlap": "greedy", "tickCount": {"expr": "max(3, width / 110)"},
                 "labelFlush": True, "format": "%b %d %H:%M" if length_s > 18 * 3600 else clock},
    }  # fmt: skip


def _table(rows: Iterable[Sequence[object]], names: Sequence[str]) -> Spec:
    """Return rows as a table, a third of the size of objects; `expanded` makes objects of it."""
    return {"table": {"names": list(names), "rows": [list(row) for row in rows]}}


def expanded(spec: Any) -> Any:
    """Return a chart whose tables are lists of objects, for Vega-Lite; page.js does the same."""
    if isinstance(spec, list):
        return [expanded(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if "table" in spec:
        names, rows = spec["table"]["names"], spec["table"]["rows"]
        return {"values": [dict(zip(names, row, strict=True)) for row in rows]}
    return {key: expanded(part) for key, part in spec.items()}


# ---- colours of the page and its charts, light and dark
# Those of node time are by Okabe and Ito, distinguishable with any kind of colour vision
# (https://jfly.uni-koeln.de/color/).


_BOTH = {
    "useful": "#009e73", "replayed": "#d55e00", "checkpoint": "#0072b2", "restore": "#cc79a7",
    "import": "#e69f00", "rendezvous": "#56b4e9",
}  # fmt: skip
KIND: Mapping[str, Mapping[str, str]] = {
    "light": {**_BOTH, "start": "#f0e442", "idle": "#8c8c8c", "queue": "#d9d9d9"},
    "dark": {**_BOTH, "start": "#f0e442", "idle": "#9a9a9a", "queue": "#4a4f57"},
}
"""Theme -> colour of each of `SPENT_ON`."""

PAGE: Mapping[str, Mapping[str, str]] = {
    "light": {"back": "#ffffff", "card": "#f6f7f9", "text": "#1c2430", "dim": "#5b6675",
              "line": "#d8dde4", "accent": "#0b63ce", "bad": "#b3261e", "good": "#0b7a4d"},
    "dark": {"back": "#12161c", "card": "#1b2129", "text": "#e6eaf0", "dim": "#a0abb9",
             "line": "#333c48", "accent": "#6fb1ff", "bad": "#ff8a80", "good": "#63d3a4"},
}  # fmt: skip
"""Theme -> colours of the page."""


def config(theme: str) -> dict[str, Any]:
    """Return Vega-Lite's config of a theme."""
    page = PAGE[theme]
    return {
        "background": page["back"], "font": "system-ui, sans-serif",
        "view": {"stroke": page["line"]},
        "range": {"category": [KIND[theme][kind] for kind in SPENT_ON]},
        "axis": {
            "labelColor": page["text"], "titleColor": page["dim"], "gridColor": page["line"],
            "domainColor": page["line"], "tickColor": page["line"], "titleFontWeight": "normal",
            "labelFontSize": 11, "titleFontSize": 11,
        },
        "axisY": {"minExtent": 50},
        "legend": {"labelColor": page["text"], "titleColor": page["dim"]},
        "title": {"color": page["text"], "subtitleColor": page["dim"], "anchor": "start"},
        "line": {"color": page["accent"], "strokeWidth": 1.5},
        "area": {"color": page["accent"], "opacity": 0.55},
        "rule": {"color": page["bad"], "strokeWidth": 1},
        "circle": {"color": page["text"], "opacity": 0.9},
        "point": {"color": page["text"], "filled": False, "opacity": 1, "strokeWidth": 1.5},
    }  # fmt: skip


# ---- thinning of long histories, without a visible change


def thinned_stretches(intervals: Iterable[Values], shortest_s: float) -> list[Values]:
    """Return intervals (in order, without gaps), those that are too short to be visible joined.

    Short neighbours become one interval of the kind that fills most of it. Neighbours of one kind
    become one. An interval has ``begin``, ``end`` and ``kind``.
    """
    groups: list[list[Values]] = []
    length_s = math.inf  # of the last group
    for interval in intervals:
        is_long = interval["end"] - interval["begin"] >= shortest_s
        if is_long or length_s >= shortest_s:
            groups.append([])
        groups[-1].append(interval)
        length_s = interval["end"] - groups[-1][0]["begin"]
    found: list[Values] = []
    for group in groups:
        filled = dict.fromkeys((interval["kind"] for interval in group), 0.0)
        for interval in group:
            filled[interval["kind"]] += interval["end"] - interval["begin"]
        found.append(
            {**group[0], "end": group[-1]["end"], "kind": max(filled, key=filled.__getitem__)}
        )
    alike = (list(same) for _, same in groupby(found, key=itemgetter("kind")))
    return [{**same[0], "end": same[-1]["end"]} for same in alike]


def series(points: Points, columns: int) -> list[tuple[Any, ...]]:
    """Return fewer points of a line, (x, y) and perhaps more, that look the same at a width.

    The first, last, lowest and highest point of each column are kept (Jugel et al., "M4: A
    Visualization-Oriented Time Series Data Aggregation", VLDB 2014).
    """
    if len(points) <= 4 * columns:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / columns or 1.0
    kept: set[int] = set()
    column_of = [min(columns - 1, int((x - begin) / width)) for x, *_ in points]
    for indexes in grouped(range(len(points)), column_of.__getitem__).values():
        heights = [points[i][1] for i in indexes]
        low, high = heights.index(min(heights)), heights.index(max(heights))
        kept |= {indexes[0], indexes[-1], indexes[low], indexes[high]}
    return [points[i] for i in sorted(kept)]


# ---- text of numbers and times


UNKNOWN = "–"


def clock_ms(seconds: float) -> int:
    """Return a time in ms since 1970 of a clock that shows the cluster's local time as UTC."""
    offset = datetime.fromtimestamp(seconds).astimezone().utcoffset()
    return round(1000 * (seconds + (offset.total_seconds() if offset else 0.0)))


def moment(seconds: float | None) -> str:
    """Return a date and a time."""
    if seconds is None:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def share(part: float | None) -> str:
    """Return a share in percent; a small share is not shown as 0."""
    if part is None:
        return UNKNOWN
    if 0 < part < 0.0005:
        return "< 0.1 %"
    # a small loss must not be rounded away
    return f"{math.floor(1000 * part) / 10:.1f} %" if part > 0.9 else f"{100 * part:.1f} %"


def number(value: Any) -> str:
    """Return a number with separators, and at most four significant digits."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
