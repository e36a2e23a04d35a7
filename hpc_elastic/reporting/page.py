"""A report as one HTML file that needs nothing else: no network, no server, no other file.

All text goes through Jinja2 with autoescape, and all values for the charts as JSON in which ``<``
is escaped. A content security policy has the browser refuse whatever else would run or be fetched:
only our own scripts, which carry a number drawn for this file, and no connection at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpc_elastic.reporting import colours, vega
from hpc_elastic.reporting.charts import (
    LOST,
    MOST_LANES,
    begin_of,
    charts,
    lanes_of,
    schema,
)
from hpc_elastic.reporting.texts import as_yaml, by_cause, costliest, departures
from hpc_elastic.reporting.words import UNKNOWN, moment, number, share, zone
from hpc_elastic.words import counted, duration, node_time

SHOWN_AT_ONCE = 12
"""Longer lists are folded."""

MEANINGS = {
    "useful": "steps that nobody had made before",
    "replayed": "steps made again, because they were lost with a node or a worker",
    "checkpoint": "the training stood still for a checkpoint",
    "restore": "looking for a checkpoint, and loading it",
    "import": "workers start, import and get ready, until their first step",
    "rendezvous": "the group is being formed",
    "start": "the node's agent starts",
    "idle": "others train, and this node does not",
    "queue": "tasks wait for a node; no node stands still for it",
}


def html(report: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: The JSON form of `story.report.Report`.

    Raises:
        ReportLibraryError: the library that draws the charts is not installed.
    """
    drawn = charts(report)
    return _environment().get_template("page.html.j2").render(
        r=report, counted=counted, UNKNOWN=UNKNOWN, moment=moment, number=number, share=share,
        zone=zone, duration=duration, node_time=node_time,
        about=report["about"], spent=report["spent"],
        begin=begin_of(report), tiles=tiles(report),
        kinds=colours.SPENT_ON, meanings=MEANINGS,
        colours=colours.KIND, page=colours.PAGE,
        charts={chart.name: chart for chart in drawn},
        specs=[{"name": c.name, "spec": {"$schema": schema(), **c.spec, "width": "container",
                                         "height": c.height}} for c in drawn],
        configs={theme: colours.config(theme) for theme in colours.PAGE},
        undrawn=max(0, len({n["task"] for n in report["nodes"]}) - MOST_LANES),
        lanes=lanes_of(report), causes=by_cause(report["changes"]),
        costliest=costliest(report["changes"], SHOWN_AT_ONCE), at_once=SHOWN_AT_ONCE,
        departures=departures(report["nodes"]), lost=LOST, as_yaml=as_yaml,
        script=vega.script() if drawn else "", nonce=secrets.token_urlsafe(16),
    )  # fmt: skip


def tiles(report: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    """Return the figures at the top: what, how much, and what else there is to it."""
    about, spent, begin = report["about"], report["spent"], begin_of(report)
    faults = [change for change in report["changes"] if change["fault"]]
    lost = sum(change["lost_steps"] or 0 for change in faults)
    announced = report["checkpoints"]["announced"]
    of_total = f"of {number(about['total_steps'])}" if about["total_steps"] else ""
    left = f", {duration(about['remaining_s'])} to go" if about["remaining_s"] else ""
    took = duration(about["until"] - begin) if begin is not None else UNKNOWN
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


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("hpc_elastic.reporting", "."), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
