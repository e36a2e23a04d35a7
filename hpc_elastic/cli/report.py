"""``hpc-elastic report``: a report of a run, as a page, a picture or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from hpc_elastic._util import cleaned
from hpc_elastic.checkpoint.store import Store, directories_of
from hpc_elastic.cli import options
from hpc_elastic.cli.run_details import RunDetails, read_details
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.launcher.run_view import Query, overrides_label, overrides_of
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.report import (
    About,
    Configuration,
    Report,
    WorkerFailure,
    redact,
    redact_argument,
    report,
)
from hpc_elastic.report.timeline import build_timeline
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import read_json, read_tail, read_yaml, write_atomic
from hpc_elastic.slurm.scheduler import take_snapshot

_FORMATS = ("html", "png", "json")
_STANDARD_OUTPUT = "-"

_HELP = """
\b
Content:
  node time by use, and the goodput
  when each node joined and left, and why
  over time, with faults and checkpoints: step, loss, throughput, the script's metrics, GPU use
  each fault with its cost: lost steps, time without a step, node time
  failures of workers, with their tracebacks and the last lines of their logs
  what happened, in sentences; hints where node time is wasted
  checkpoints, and the configuration without its secrets (***)

\b
Formats:
  html  one file without links to others; it follows the light or dark mode of the browser
  png   the figures and charts as a picture
  json  all values; docs/reference/report.md describes the keys

html and png need `pip install 'hpc_elastic[report]'`. The file holds the configuration, and only
you can read it; `chmod a+r` makes it readable to others.

\b
--json prints one object about the written file, and needs -o FILE. (--format json is the report
as JSON.)
  run_id, run   the run's id and directory
  file          path of the report
  format        "html", "png" or "json"
  num_bytes     size of the file

\b
Examples:
  hpc-elastic report last -o report.html
  hpc-elastic report runs/7 -o report.png
  hpc-elastic report last --format json | jq '.changes[] | select(.fault)'
"""


@click.command(epilog=_HELP)
@options.run
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE", help="File to write; - is standard output, the default of json.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(_FORMATS),
    help="Default: by the suffix of FILE, else html.",
)  # fmt: skip
@options.as_json
def report_command(run: Path, output: Path | None, form: str | None, as_json: bool) -> int:
    """Write a report of a run: use of its time, nodes, training, faults and checkpoints.

    The command reads the run directory, and queries Slurm once. The run may be running, have ended,
    or never have started. The exit code does not depend on how the run ended.
    """
    suffix = "" if output is None else output.suffix.lower().lstrip(".")
    if form is None and suffix not in ("", "htm", *_FORMATS):
        formats = ", ".join(_FORMATS)
        raise click.UsageError(f"{output}: formats are {formats}; give such a suffix, or --format")
    form = form or (suffix if suffix in _FORMATS else "html")
    to_file = output is not None and str(output) != _STANDARD_OUTPUT
    if (output is None and form != "json") or (as_json and not to_file):
        raise click.UsageError(f"-o FILE is missing, such as -o report.{form}")
    report = report_of(run)
    text = render(report, form)
    if output is None or not to_file:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return 0
    _write(output, text)
    if as_json:
        printed = {
            "run_id": report.about.run_id, "run": str(run),
            "file": str(output.absolute()), "format": form, "num_bytes": len(text),
        }  # fmt: skip
        print(json.dumps(printed, indent=2))
    else:
        print(f"wrote {output}: {len(text) / 1e6:.1f} MB", file=sys.stderr)
    return 0


def render(report: Report, form: str) -> bytes:
    """Return a report in one of its formats.

    Raises:
        ReportLibraryError: A library that html and png need is not installed.
    """
    values = report.to_json()
    if form == "json":
        return (json.dumps(values) + "\n").encode()
    if form == "png":
        from hpc_elastic.report.page import png

        return png(values)
    from hpc_elastic.report.page import html

    return html(values).encode(errors="replace")


def _write(output: Path, content: bytes) -> None:
    """Replace a file atomically by one that only its owner can read; write into a device."""
    try:
        if output.exists() and not output.is_file():
            output.write_bytes(content)
            return
        write_atomic(output, content, mode=0o600)
    except OSError as e:
        raise RunDirectoryError(f"{output} cannot be written ({e}): give another file") from e


# ---- collecting


def report_of(run: Path, query: Query = take_snapshot) -> Report:
    """Return the report of a run, from its files and its scheduler.

    Args:
        run: The run directory.
        query: Queries the scheduler.

    Raises:
        RunDirectoryError: This is no run directory, nor what is left of one.
    """
    details = read_details(run, query)
    notes = list(details.notes)
    timeline = build_timeline(details.history)
    return report(
        _about(details), details.account, details.points, timeline, made=time.time(),
        failures=_failures(details), kept=_kept(run, notes),
        configuration=_configuration(details, notes), notes=notes,
    )  # fmt: skip


def _about(details: RunDetails) -> About:
    view, spec = details.view, details.view.spec
    status, ended = details.status or Point(view.now), view.ended
    overrides = [redact_argument(line) for line in overrides_of(view.run.path)]
    return About(
        run_id=details.run_id, directory=str(view.run.path), overrides=overrides_label(overrides),
        launcher=details.launcher, ft=spec is not None and spec.ft, phase=view.phase,
        submitted=view.submitted, until=view.now if ended is None else ended.time,
        ended=None if ended is None else asdict(ended),
        min_nodes=details.nodes and details.nodes[1], max_nodes=details.nodes and details.nodes[2],
        restarts=view.restarts[0], max_restarts=view.restarts[1],
        rounds=details.round, step=status.step, total_steps=status.total_steps,
        samples=status.samples, loss=status.loss,
        steps_per_s=details.pace.steps_per_s, remaining_s=details.pace.remaining_s,
    )  # fmt: skip


def _failures(details: RunDetails) -> Sequence[WorkerFailure]:
    run, ended = details.view.run.path.resolve(), details.view.ended
    found = [
        WorkerFailure(
            event["time"], event["failure"], event["host"], event.get("rank"), event.get("round"),
            event.get("traceback"), event.get("log"),
        )
        for event in details.history.of("restart")
    ]  # fmt: skip
    if ended is not None and ended.failure is not None:
        last = ended.failure
        found.append(WorkerFailure(
            ended.time, ended.why or str(last.get("message")), str(last.get("host")),
            last.get("rank"), last.get("round"), last.get("traceback"), last.get("log"),
            ended_run=True,
        ))  # fmt: skip
    for number, failure in enumerate(found):
        log, text = failure.log, ""
        # a forged event may name a private file of the reader's, outside of the run
        if log and Path(log).resolve().is_relative_to(run):
            text = "\n".join(
                cleaned(line, colours=False) for line in read_tail(Path(log)).splitlines()
            )
        found[number] = replace(
            failure, traceback=redact(failure.traceback), last_lines=redact(text)
        )
    return found


def _kept(run: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        stores = [Store(directory) for directory in directories_of(RunDir(run))]
        return [
            {"step": step, "time": store.folder(step).stat().st_mtime}
            for store in stores
            for step in store.steps()
        ]
    except OSError as e:
        notes.append(f"the checkpoints cannot be listed: {e}")
        return []


def _configuration(details: RunDetails, notes: list[str]) -> Configuration:
    files, spec = RunDir(details.view.run.path), details.view.spec
    config = _read(files.hydra / "config.yaml", read_yaml, notes)
    if config is None and spec is not None:
        config = {"args": spec.entry.args} if spec.entry.kind == "function" else None
    if isinstance(config, dict):
        config.pop("launcher", None)  # part of the settings
    provenance = dict(spec.provenance) if spec is not None else {}
    provenance.pop("environment", None)
    if isinstance(provenance.get("argv"), list):
        provenance["argv"] = [redact_argument(str(word)) for word in provenance["argv"]]
    return Configuration(
        redact(_read(files.settings, read_json, notes)), redact(config), redact(provenance)
    )  # fmt: skip


def _read(file: Path, read: Callable[[Path], Any], notes: list[str]) -> Any:
    """Return the values of a YAML or JSON file; None if there is none."""
    try:
        return read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        notes.append(f"{file.name} cannot be read: {e}")
        return None
