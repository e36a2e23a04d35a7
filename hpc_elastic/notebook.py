"""A run in a notebook: its progress as a frame of pandas, and a card that is updated in place.

`hpc_elastic.Run` has the methods. Neither pandas nor IPython is a dependency: a notebook has them.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launcher.follow import LIST_SHOWN_S, RunFollower
from hpc_elastic.report import page
from hpc_elastic.report.details import report_of
from hpc_elastic.report.page import ReportLibraryError
from hpc_elastic.report.progress_log import Point, read_points
from hpc_elastic.report.run_view import RunView, number, read_view
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import read_json

if TYPE_CHECKING:
    import pandas

_SHARE = 10  # at most a tenth of the time is spent on reading a run
_UNREADABLE_S = 12.0  # time after which a run that cannot be read is shown no further


def progress(run_dir: Path) -> pandas.DataFrame:
    """Return the progress of a run; see `Run.progress`."""
    try:
        import pandas
    except ImportError as e:
        raise ReportLibraryError(f"progress() needs pandas ({e}): pip install pandas") from e
    run = RunDir(run_dir)
    points = read_points(run.progress)
    status = read_json(run.status) or {}
    updated = number(status.get("updated"))
    if updated is not None:
        points.append(Point.of(status, updated))
    fields = [name for name in Point.__match_args__ if name != "metrics"]
    own = dict.fromkeys(name for point in points for name in point.metrics)
    rows = [{**point.metrics, **asdict(point)} for point in points]
    columns = [*fields, *(name for name in own if name not in fields)]
    frame = pandas.DataFrame(rows, columns=columns)
    frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True)
    numbers = [name for name in frame.columns if name not in ("time", "phase")]
    frame[numbers] = frame[numbers].apply(pandas.to_numeric)
    return frame.set_index("time")


def card(run_dir: Path) -> str:
    """Return a run as HTML; a run that cannot be read, as what is wrong with it."""
    return _card(read_view(run_dir))[0]


def _card(view: RunView) -> tuple[str, bool]:
    """Return the card of a run, and whether the run can be read."""
    try:
        return page.card_html(report_of(view).to_json()), True
    except (HpcElasticError, OSError) as e:
        return page.live_problem(str(e)), False


def watch(run_dir: Path, every_s: float) -> None:
    """Show a card, and update it until the run has ended; see `Run.watch`."""
    try:
        from IPython.display import HTML, display
    except ImportError as e:
        raise ReportLibraryError(f"watch() is for notebooks ({e}): {_INSTEAD}") from e
    follower, handle, readable_at = RunFollower([run_dir], list_s=LIST_SHOWN_S), None, math.inf
    try:
        while True:
            began = time.monotonic()
            (view,) = follower.poll()
            text, is_readable = _card(view)
            if handle is None:
                handle = display(HTML(text), display_id=True)
                if handle is None:
                    raise ReportLibraryError(f"watch() is for notebooks: {_INSTEAD}")
            else:
                handle.update(HTML(text))
            readable_at = began if is_readable else min(began, readable_at)
            if view.ended is not None or began - readable_at > _UNREADABLE_S:
                return
            time.sleep(max(every_s, _SHARE * (time.monotonic() - began)))
    except KeyboardInterrupt:
        return


_INSTEAD = "elsewhere use hpc-elastic status --watch"
