"""A report as one HTML file without a network, a server or other files; and as a picture.

All text goes through Jinja2 with autoescape, and all values for the charts as JSON in which ``<``
is escaped. By the content security policy the browser runs only the scripts of this file, which
carry its nonce, and opens no connection.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from hpc_elastic._util import counted, duration, node_time
from hpc_elastic.config.schema import BACKENDS, NodeRange, RunSettings
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report import charts, grouped
from hpc_elastic.report.run_view import CANCELLED, LOST
from hpc_elastic.report.timeline import lost_steps

Values = Mapping[str, Any]

SHOWN_AT_ONCE = 12  # length of lists that are shown unfolded
_NUM_LAST = 3
_LINE = 120, 24


def html(report: Values) -> str:
    """Return the page of a report's JSON form; without charts if no library draws them."""
    try:
        script, lacks = charts_script(), ""
    except ReportLibraryError as e:
        script, lacks = "", str(e)
    drawn = charts.charts(report) if script else []
    return _template("page.html.j2").render(
        **_values(report, drawn), live=False, specs=_specs(drawn), configs=chart_configs(),
        script=script if drawn else "", lacks=lacks, nonce=secrets.token_urlsafe(16),
    )  # fmt: skip


def live_html(report: Values) -> tuple[str, list[dict[str, Any]]]:
    """Return what a live page shows: the page's content, and its charts in Vega-Lite."""
    drawn = charts.charts(report)
    return _template("page.html.j2").render(**_values(report, drawn), live=True), _specs(drawn)


def card_html(report: Values) -> str:
    """Return a run as a small card, for a notebook."""
    about = report["about"]
    losses = charts.values_of(report, "loss")
    now = next((size["nodes"] for size in reversed(report["group"])), 0)
    shown = [tile for tile in tiles(report) if tile[0] in ("Step", "Loss", "Goodput", "Lasted")]
    if about["ended"] is None:
        shown.append(("Nodes", f"{now} of {about['max_nodes'] or charts.UNKNOWN}", "in the group"))
    if about["steps_per_s"]:
        shown.append(("Pace", f"{charts.number(about['steps_per_s'])} steps/s", ""))
    if about["remaining_s"]:
        shown.append(("Left", duration(about["remaining_s"]), "at this pace"))
    return _template("card.html.j2").render(
        r=report, about=about, title=title_of(report), tiles=shown, line=_polyline(losses),
        moment=charts.moment,
        last=report["timeline"][-_NUM_LAST:],
    )  # fmt: skip


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    """Return the points of a line in SVG that fills a small picture; empty if there are too few."""
    if len(points) < 2:
        return ""
    (width, height), kept = _LINE, charts.series(points, _LINE[0])
    (left, *_, right), (low, *_, high) = (sorted(values) for values in zip(*kept, strict=True))
    x_scale, y_scale = width / (right - left or 1.0), (height - 2) / (high - low or 1.0)
    at = ((x_scale * (x - left), 1 + y_scale * (high - y)) for x, y in kept)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in at)


def live_problem(text: str) -> str:
    """Return what a live page shows if there is no report."""
    return str(Markup('<main><p class="problem">{}</p></main>').format(text))


def chart_configs() -> dict[str, dict[str, Any]]:
    """Return Vega-Lite's config of each theme."""
    return {theme: charts.config(theme) for theme in charts.PAGE}


def charts_script() -> str:
    """Return the script of Vega, Vega-Lite and their embedding; ReportLibraryError without it."""
    return str(_library().javascript_bundle())


def theme_css() -> str:
    """Return the style sheet of a page."""
    return _template("theme.css.j2").render(
        page=charts.PAGE, colours=charts.KIND, kinds=charts.SPENT_ON
    )


def _template(name: str) -> Template:
    return templates("hpc_elastic.report").get_template(name)


@functools.cache
def templates(package: str) -> Environment:
    """Return the templates that lie in a package."""
    return Environment(
        loader=PackageLoader(package, "."), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def _specs(drawn: Iterable[charts.Chart]) -> list[dict[str, Any]]:
    size = {"$schema": charts.SCHEMA, "width": "container"}
    return [{"name": c.name, "spec": {**size, **c.spec, "height": c.height}} for c in drawn]


def _values(report: Values, drawn: Iterable[charts.Chart]) -> dict[str, Any]:
    faults = [change for change in report["changes"] if change["fault"]]
    costliest = sorted(faults, key=lambda change: -change["node_s"])[:SHOWN_AT_ONCE]
    return dict(
        r=report, counted=counted, duration=duration, node_time=node_time, title=title_of(report),
        UNKNOWN=charts.UNKNOWN, moment=charts.moment, number=charts.number, share=charts.share,
        has_no_events=has_no_events(report), zone=time.strftime("%Z") or "local time",
        about=report["about"], spent=report["spent"], as_yaml=as_yaml,
        begin=charts.begin_of(report), tiles=tiles(report),
        kinds=charts.SPENT_ON, colours=charts.KIND, page=charts.PAGE,
        charts={chart.name: chart for chart in drawn},
        undrawn=max(0, len(set(charts.lanes_of(report).values())) - charts.MOST_LANES),
        causes=by_cause(report["changes"]), failures=alike(report["failures"]),
        settings=unusual(report["configuration"]["settings"]),
        costliest=sorted(costliest, key=lambda change: change["time"]), at_once=SHOWN_AT_ONCE,
        departures=Counter(n["ended_by"] for n in report["nodes"] if n["ended_by"]).most_common(),
        fullest=max((p["gpu_memory"] or 0.0 for p in report["progress"]), default=0.0),
    )  # fmt: skip


def title_of(report: Values) -> str:
    """Return the parameters by which people distinguish the run; without any, its id."""
    return str(report["about"]["overrides"] or report["about"]["run_id"])


def has_no_events(report: Values) -> bool:
    """Return whether the run has started, though no event of it is known."""
    ended = report["about"]["ended"]
    has_result = ended is not None and ended["status"] not in (LOST, CANCELLED)
    return not report["timeline"] and (bool(report["progress"]) or has_result)


def tiles(report: Values) -> Sequence[tuple[str, str, str]]:
    """Return the figures at the top: title, value, and remark."""
    about, spent, begin = report["about"], report["spent"], charts.begin_of(report)
    number, share = charts.number, charts.share
    faults = [change for change in report["changes"] if change["fault"]]
    saved, kept = len(report["checkpoints"]["announced"]), report["checkpoints"]["kept"]
    is_silent = report["timeline"] and not report["progress"]
    spends = node_time(spent["node_s"]), f"and {node_time(spent['queue_s'])} in the queue"
    lost = number(len(faults)), lost_steps(_losses(faults))
    if has_no_events(report):
        what, spends, lost = "no event is known", (charts.UNKNOWN, ""), (charts.UNKNOWN, "")
    of_total = f"of {number(about['total_steps'])}" if about["total_steps"] else ""
    left = f", {duration(about['remaining_s'])} to go" if about["remaining_s"] else ""
    took = duration(about["until"] - begin) if begin is not None else charts.UNKNOWN
    what = "useful share of node time" if spent["goodput"] is not None else "no step is known"
    given, nodes = spent["given_back"], counted(spent["given_back"]["nodes"], "node", "nodes")
    back = f"{nodes}, for {counted(given['jobs'], 'job', 'jobs')}; it cost "
    back += node_time(spent["return_node_s"])
    return (
        ("Goodput", share(spent["goodput"]), what),
        ("Lasted", took, "so far" if about["ended"] is None else ""),
        ("Node time", *spends),
        *([("Given back", node_time(given["node_s"]), back)] if given["nodes"] else []),
        ("Step", number(about["step"]), of_total + left),
        ("Loss", number(about["loss"]), "the last that was reported"),
        ("Faults", *lost),
        ("Checkpoints", number(None if is_silent and not saved else saved),
         f"saved; {number(None if kept is None else len(kept))} on disk now"),
        ("Restarts", number(about["restarts"]), f"of {number(about['max_restarts'])} allowed"),
    )  # fmt: skip


def _losses(changes: Iterable[Values]) -> Iterator[tuple[int | None, bool]]:
    return ((change["lost_steps"], change["is_least"]) for change in changes)


def by_cause(changes: Sequence[Values]) -> list[dict[str, Any]]:
    """Return the sums of the known costs of faults by cause, the costliest first."""
    faults = (change for change in changes if change["fault"])
    rows = [
        {"cause": cause, "count": len(same),
         "node_s": sum(fault["node_s"] for fault in same),
         "pause_s": sum(f["pause_s"] or 0.0 for f in same)
                    if any(f["pause_s"] is not None for f in same) else None,
         "lost": lost_steps(_losses(same)).removesuffix(" lost")}
        for cause, same in grouped(faults, lambda fault: fault["cause"]).items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["node_s"])


def alike(failures: Sequence[Values]) -> list[dict[str, Any]]:
    """Return failures of workers with the same error together, the one that ended the run first."""

    def error_of(f: Values) -> tuple[str, str | None]:
        where = rf"^(?:rank|task|the leader, task) .*? on {re.escape(f['host'])}[,:]? "
        return re.sub(where, "", f["error"]), f["traceback"]

    groups = [
        {"error": error, "failures": same, "hosts": Counter(f["host"] for f in same).most_common(),
         "ended_run": any(f["ended_run"] for f in same),
         "shown": next((f for f in reversed(same) if f["last_lines"]), same[-1]), "last": same[-1]}
        for (error, _), same in grouped(failures, error_of).items()
    ]  # fmt: skip
    return sorted(groups, key=lambda g: (not g["ended_run"], -len(g["failures"])))


def unusual(settings: Any) -> Any:
    """Return the settings that are not the defaults, with the nodes; None if unknown."""

    def differing(value: Any, usual: Any) -> Any:
        if not usual or not isinstance(usual, dict) or not isinstance(value, dict):
            return value
        return {k: differing(v, usual.get(k)) for k, v in value.items() if v != usual.get(k)}

    backend = BACKENDS[settings["launcher"]["backend"]] if settings else None
    return backend and differing(settings, RunSettings(NodeRange(0, 0), 0, backend()).as_config())


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


class ReportLibraryError(HpcElasticError, ImportError):
    """A library that shows runs is not installed."""


def png(report: Values) -> bytes:
    """Return the picture; raise ReportLibraryError without the library that draws the charts."""
    chart = json.dumps(spec(report))
    return bytes(_library().vegalite_to_png(chart, scale=2.0, allowed_base_urls=[]))


def _library() -> ModuleType:
    try:
        import vl_convert
    except ImportError as e:
        why = f"charts need vl-convert ({e}): pip install 'hpc_elastic[report]'"
        raise ReportLibraryError(why) from e
    library: ModuleType = vl_convert
    return library


def spec(report: Values) -> dict[str, Any]:
    """Return the picture in Vega-Lite (pure)."""
    about, begin = report["about"], charts.begin_of(report)
    took = duration(about["until"] - begin) if begin is not None else "not started"
    parts: list[Any] = []
    for chart in charts.charts(report):
        drawn = charts.expanded(chart.spec)
        if chart.name == "lanes":
            legend = {"orient": "bottom", "columns": len(charts.SPENT_ON), "title": None}
            drawn["layer"][0]["encoding"]["color"]["legend"] = legend
        title = {"text": _TITLES.get(chart.name, chart.title), "fontSize": 13}
        parts.append({"title": title, **drawn, "width": _WIDTH, "height": chart.height})
    nothing = {
        "data": {"values": [{"text": "No task of this run has started."}]},
        "width": _WIDTH, "height": 60,
        "mark": {"type": "text", "fontSize": 14, "color": charts.PAGE["light"]["dim"]},
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }  # fmt: skip
    figures = [
        f"{name} {value}{f' ({more})' if more else ''}" for name, value, more in tiles(report)
    ]
    half = len(figures) // 2
    lines = [f"{about['run_id']} in {about['directory']}",
             " · ".join(figures[:half]), " · ".join(figures[half:]),
             *report["notes"]]  # fmt: skip
    return {
        "$schema": charts.SCHEMA,
        "title": {"text": f"{title_of(report)}: {about['phase']}, {took}", "subtitle": lines,
                  "fontSize": 18, "limit": _WIDTH, "subtitlePadding": 6, "offset": 16},
        "padding": 16,
        "vconcat": parts or [nothing],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "config": charts.config("light"),
    }  # fmt: skip
