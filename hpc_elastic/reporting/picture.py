"""A report as one picture: its figures and charts, drawn without a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_elastic.reporting import colours, vega
from hpc_elastic.reporting.charts import charts, described, expanded, schema, with_legend
from hpc_elastic.reporting.page import tiles

_WIDTH = 1000
_TITLES = {
    "bar": "Where every node-second went",
    "lanes": "Nodes (triangle: left after a notice; x: lost)",
    "group": "Group", "step": "Step (vertical lines: faults; dots: checkpoints)", "loss": "Loss",
}  # fmt: skip


def png(report: Mapping[str, Any]) -> bytes:
    """Return the picture.

    Args:
        report: The JSON form of `story.report.Report`.

    Raises:
        ReportLibraryError: the library that draws the charts is not installed.
    """
    return vega.png(spec(report))


def spec(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture in Vega-Lite (pure)."""
    about = report["about"]
    drawn = [with_legend(c) if c.name == "lanes" else c for c in charts(report)]
    parts = [
        {"title": {"text": _TITLES[c.name], "fontSize": 13}, **expanded(c.spec),
         "width": _WIDTH, "height": c.height}
        for c in drawn
    ]  # fmt: skip
    figures = [
        f"{name} {value}" + (f" ({more})" if more else "") for name, value, more in tiles(report)
    ]
    half = len(figures) // 2
    lines = [about["overrides"] or about["directory"],
             " · ".join(figures[:half]), " · ".join(figures[half:]),
             *report["notes"]]  # fmt: skip
    return {
        "$schema": schema(),
        "title": {"text": f"{about['run_id']}: {described(report)}", "subtitle": lines,
                  "fontSize": 18, "subtitlePadding": 6, "offset": 16},
        "padding": 16,
        "vconcat": parts or [_nothing()],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "config": colours.config("light"),
    }  # fmt: skip


def _nothing() -> dict[str, Any]:
    text = "No task of this run has started."
    return {
        "data": {"values": [{"text": text}]},
        "width": _WIDTH,
        "height": 60,
        "mark": {"type": "text", "fontSize": 14, "color": colours.PAGE["light"]["dim"]},
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }
