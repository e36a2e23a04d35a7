"""``hpc-elastic report``: a report of a run, as a page, a picture or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.report.details import report_of
from hpc_elastic.report.report import Report
from hpc_elastic.report.run_view import read_view
from hpc_elastic.shared_files import write_atomic

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
    report = report_of(read_view(run))
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
        options.print_json(printed)
    else:
        print(f"wrote {output}: {len(text) / 1e6:.1f} MB", file=sys.stderr)
    return 0


def render(report: Report, form: str) -> bytes:
    """Return a report in a format; raise ReportLibraryError without the library of html and png."""
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
