"""``hpc-elastic report``: a report of a run, as a page, a picture or JSON, or live in a browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import RunDirectoryError

if TYPE_CHECKING:
    from hpc_elastic.report.report import Report

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

The charts, and png, need `pip install 'hpc_elastic[report]'`. The file holds the configuration, and
only you can read it; `chmod a+r` makes it readable to others.

With --live, pages are served on 127.0.0.1 of this machine until Ctrl-C: a list of runs, the report
of each, kept up to date, and its logs, followed and searched. RUN is also the directory of a sweep,
whose new runs are added. From another machine, forward the port with the printed ssh command, and
open the printed URL there. It holds a token: without it all requests are refused, also those of
other users of this machine. The pages are read-only unless --control is given; nothing is read
while none is open. Needs `pip install 'hpc_elastic[watch]'`.

\b
--json prints one object about the written file, and needs -o FILE. (--format json is the report
as JSON.)
  run_id, run   the run's id and directory
  file          path of the report
  format        "html", "png" or "json"
  num_bytes     size of the file
With --live: url (with the token), port (of 127.0.0.1), forward (the ssh command)

\b
Examples:
  hpc-elastic report last -o report.html
  hpc-elastic report runs/7 -o report.png
  hpc-elastic report last --format json | jq '.changes[] | select(.fault)'
  hpc-elastic report --live last
  hpc-elastic report --live multirun/2030-01-31/12-00-00
  hpc-elastic report --live --all --port 9000
"""


@click.command(epilog=_HELP)
@click.argument("runs", type=options.SweepName(), nargs=-1, metavar="RUN...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE", help="File to write; - is standard output, the default of json.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(_FORMATS),
    help="Default: by the suffix of FILE, else html.",
)  # fmt: skip
@click.option("--live", is_flag=True, help="Show runs in a browser, as they are now.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="With --live: all runs of `hpc-elastic list`."
)
@click.option(
    "--control", is_flag=True,
    help="With --live: let the pages cancel and resume runs, and take nodes from them.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT",
    help="With --live: port of 127.0.0.1. [default: 8672, or the next that is free]",
)  # fmt: skip
@options.as_json
def report_command(
    runs: tuple[Path, ...],
    output: Path | None,
    form: str | None,
    live: bool,
    as_json: bool,
    **pages: Any,
) -> int:
    """Write a report of a run: use of its time, nodes, training, faults and checkpoints.

    The command reads the run directory, and queries Slurm once. The run may be running, have ended,
    or never have started. The exit code does not depend on how the run ended. With --live, the
    reports of one or more runs are shown in a browser, as they are now.
    """
    if live:
        if output is not None or form is not None:
            raise click.UsageError("--live writes no file: leave -o and --format out")
        return _serve(runs, as_json=as_json, **pages)
    if any(pages.values()):
        raise click.UsageError("--all, --control and --port need --live")
    if len(runs) != 1:
        raise click.UsageError("give one RUN; --live shows several")
    run = options.find_run(str(runs[0]))
    suffix = "" if output is None else output.suffix.lower().lstrip(".")
    if form is None and suffix not in ("", "htm", *_FORMATS):
        formats = ", ".join(_FORMATS)
        raise click.UsageError(f"{output}: formats are {formats}; give such a suffix, or --format")
    form = form or (suffix if suffix in _FORMATS else "html")
    to_file = output is not None and str(output) != _STANDARD_OUTPUT
    if (output is None and form != "json") or (as_json and not to_file):
        raise click.UsageError(f"-o FILE is missing, such as -o report.{form}")
    from hpc_elastic.report.details import report_of
    from hpc_elastic.report.run_view import read_view

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


def _serve(runs: Sequence[Path], **settings: Any) -> int:
    """Serve the live pages, which are a distribution of their own, until Ctrl-C."""
    try:
        from hpc_elastic_watch.serve import serve_pages
    except ImportError as e:
        remedy = "pip install 'hpc_elastic[watch]', or in a clone pip install "
        remedy += "./tools/hpc_elastic_watch"
        raise click.ClickException(f"--live needs hpc_elastic_watch ({e}): {remedy}") from e
    serve_pages(runs, **settings)
    return 0


def render(report: Report, form: str) -> bytes:
    """Return a report in a format; raise ReportLibraryError without the library of png."""
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
    from hpc_elastic.shared_files import write_atomic

    try:
        if output.exists() and not output.is_file():
            output.write_bytes(content)
            return
        write_atomic(output, content, mode=0o600)
    except OSError as e:
        raise RunDirectoryError(f"{output} cannot be written ({e}): give another file") from e
