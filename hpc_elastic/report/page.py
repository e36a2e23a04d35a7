"""A report as one HTML file without a network, a server or other files; and as a picture.

All text goes through Jinja2 with autoescape, and all values for the charts as JSON in which ``<``
is escaped. By the content security policy the browser runs only the scripts of this file, which
carry its nonce, and opens no connection.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from hpc_elastic._util import counted, duration, node_time
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report import charts

SHOWN_AT_ONCE = 12
"""Length of lists that are shown unfolded."""

MEANINGS = {
    "useful": "steps that were not made before",
    "replayed": "steps that were made again after a node or worker was lost",
    "checkpoint": "the training waits for a checkpoint",
    "restore": "finding and loading a checkpoint",
    "import": "workers start and import, until their first step",
    "rendezvous": "the group forms",
    "start": "the agent of the node starts",
    "idle": "other nodes train, and this one does not",
    "queue": "tasks wait for a node; no node is held",
}


def html(report: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: The JSON form of `report.report.Report`.

    Raises:
        ReportLibraryError: The library that draws the charts is not installed.
    """
    drawn = charts.charts(report)
    faults = [change for change in report["changes"] if change["fault"]]
    costliest = sorted(faults, key=lambda change: -change["node_s"])[:SHOWN_AT_ONCE]
    environment = Environment(
        loader=PackageLoader("hpc_elastic.report", "."), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        r=report, counted=counted, duration=duration, node_time=node_time,
        UNKNOWN=charts.UNKNOWN, moment=charts.moment, number=charts.number, share=charts.share,
        zone=time.strftime("%Z") or "local time",
        about=report["about"], spent=report["spent"],
        begin=charts.begin_of(report), tiles=tiles(report),
        kinds=charts.SPENT_ON, meanings=MEANINGS,
        colours=charts.KIND, page=charts.PAGE,
        charts={chart.name: chart for chart in drawn},
        specs=[{"name": c.name, "spec": {"$schema": charts.SCHEMA, **c.spec, "width": "container",
                                         "height": c.height}} for c in drawn],
        configs={theme: charts.config(theme) for theme in charts.PAGE},
        undrawn=max(0, len({n["task"] for n in report["nodes"]}) - charts.MOST_LANES),
        lanes=charts.lanes_of(report), causes=by_cause(report["changes"]),
        costliest=sorted(costliest, key=lambda change: change["time"]), at_once=SHOWN_AT_ONCE,
        departures=Counter(n["ended_by"] for n in report["nodes"] if n["ended_by"]).most_common(),
        lost=charts.LOST, as_yaml=as_yaml,
        script=str(_library().javascript_bundle()) if drawn else "",
        nonce=secrets.token_urlsafe(16),
    )  # fmt: skip


def tiles(report: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    """Return the figures at the top: title, value, and remark."""
    about, spent, begin = report["about"], report["spent"], charts.begin_of(report)
    number, share = charts.number, charts.share
    faults = [change for change in report["changes"] if change["fault"]]
    lost = sum(change["lost_steps"] or 0 for change in faults)
    announced = report["checkpoints"]["announced"]
    of_total = f"of {number(about['total_steps'])}" if about["total_steps"] else ""
    left = f", {duration(about['remaining_s'])} to go" if about["remaining_s"] else ""
    took = duration(about["until"] - begin) if begin is not None else charts.UNKNOWN
    what = "useful share of node time" if spent["goodput"] is not None else "no step is known"
    return (
        ("Goodput", share(spent["goodput"]), what),
        ("Lasted", took, "so far" if about["ended"] is None else ""),
        ("Node time", node_time(spent["node_s"]),
         f"and {node_time(spent['queue_s'])} in the queue"),
        ("Step", number(about["step"]), of_total + left),
        ("Loss", number(about["loss"]), "the last that was reported"),
        ("Faults", number(len(faults)), f"{counted(lost, 'step')} lost"),
        ("Checkpoints", number(len(announced)),
         f"saved; {number(len(report['checkpoints']['kept']))} on disk now"),
        ("Restarts", number(about["restarts"]), f"of {about['max_restarts']} allowed"),
    )  # fmt: skip


# ---- lists and tables (pure)


Values = Mapping[str, Any]


def by_cause(changes: Iterable[Values]) -> list[dict[str, Any]]:
    """Return the sum of the costs of faults by their cause, the costliest first.

    Unknown costs count as 0.
    """
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        if not change["fault"]:
            continue
        row = found.setdefault(
            change["cause"],
            {"cause": change["cause"], "count": 0, "lost_steps": 0, "pause_s": 0.0, "node_s": 0.0},
        )
        row["count"] += 1
        for name in ("lost_steps", "pause_s", "node_s"):
            row[name] += change[name] or 0
    return sorted(found.values(), key=lambda row: -row["node_s"])


def as_yaml(value: Any) -> str:
    """Return values of a configuration as YAML."""
    if value is None:
        return "unknown"
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
    return text.removesuffix("...\n")


# ---- the picture: figures and charts, drawn without a browser


_WIDTH = 1000
_TITLES = {
    "bar": "Where every node-second went",
    "lanes": "Nodes (triangle: left after a notice; x: lost)",
    "group": "Group", "step": "Step (vertical lines: faults; dots: checkpoints)", "loss": "Loss",
}  # fmt: skip


def png(report: Mapping[str, Any]) -> bytes:
    """Return the picture.

    Args:
        report: The JSON form of `report.report.Report`.

    Raises:
        ReportLibraryError: The library that draws the charts is not installed.
    """
    chart = json.dumps(spec(report))
    return bytes(_library().vegalite_to_png(chart, scale=2.0, allowed_base_urls=[]))


def spec(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture in Vega-Lite (pure)."""
    about, begin = report["about"], charts.begin_of(report)
    took = duration(about["until"] - begin) if begin is not None else "not started"
    parts: list[Any] = []
    for chart in charts.charts(report):
        drawn = charts.expanded(chart.spec)
        if chart.name == "lanes":
            legend = {"orient": "bottom", "columns": len(charts.SPENT_ON), "title": None}
            drawn["layer"][0]["encoding"]["color"]["legend"] = legend
        title = {"text": _TITLES[chart.name], "fontSize": 13}
        parts.append({"title": title, **drawn, "width": _WIDTH, "height": chart.height})
    nothing = {
        "data": {"values": [{"text": "No task of this run has started."}]},
        "width": _WIDTH, "height": 60,
        "mark": {"type": "text", "fontSize": 14, "color": charts.PAGE["light"]["dim"]},
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }  # fmt: skip
    figures = [
        f"{name} {value}" + (f" ({more})" if more else "") for name, value, more in tiles(report)
    ]
    half = len(figures) // 2
    lines = [about["overrides"] or about["directory"],
             " · ".join(figures[:half]), " · ".join(figures[half:]),
             *report["notes"]]  # fmt: skip
    return {
        "$schema": charts.SCHEMA,
        "title": {"text": f"{about['run_id']}: {about['phase']}, {took}", "subtitle": lines,
                  "fontSize": 18, "subtitlePadding": 6, "offset": 16},
        "padding": 16,
        "vconcat": parts or [nothing],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "config": charts.config("light"),
    }  # fmt: skip


# ---- vl-convert: the script of Vega, Vega-Lite and their embedding for a page; and pictures


REMEDY = "pip install 'hpc_elastic[report]'"


class ReportLibraryError(HpcElasticError, ImportError):
    """The library that draws charts is not installed."""


def _library() -> ModuleType:
    try:
        import vl_convert
    except ImportError as e:
        raise ReportLibraryError(
            f"a page or a picture needs vl-convert ({e}): {REMEDY}; --format json does not"
        ) from e
    library: ModuleType = vl_convert
    return library
