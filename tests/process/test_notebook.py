"""A run in a real notebook: its card, its progress, and a card that is updated in place."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from long_runs import LongRun, write

from hpc_elastic import Run
from hpc_elastic.report.progress_log import read_points
from hpc_elastic.run.directory import RunDir

NASTY = "<script>hacked</script><b>bold</b>"

ENDS = """
import shutil, threading, IPython.display as shown
class Counted(shown.DisplayHandle):
    updates = 0
    def update(self, *args, **options):
        Counted.updates += 1
        if Counted.updates == 2:
            shutil.copy({kept!r}, {result!r})
        super().update(*args, **options)
import IPython.core.display_functions as functions
functions.DisplayHandle = Counted
run.watch(0.1)
"""


@pytest.fixture
def going(tmp_path) -> Path:
    """A run of an hour that goes on, as far as its files say."""
    run = write(LongRun(nodes=2, days=0.04, faults=3), tmp_path)
    files = RunDir(run)
    files.result.rename(tmp_path / "result.json")
    spec = json.loads(files.spec.read_text())
    files.spec.write_text(json.dumps({**spec, "run_id": NASTY}))
    return run


def test_a_notebook_shows_a_run_and_follows_it_to_its_end(going, tmp_path):
    """One output changes in place; names are text in it; the frame has all points."""
    ends = ENDS.format(kept=str(tmp_path / "result.json"), result=str(going / "result.json"))
    cells = [
        f"from hpc_elastic import Run\nrun = Run({str(going)!r})\nrun",
        "frame = run.progress()\nprint(len(frame), frame.loss.min(), frame.index.tz)",
        ends,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
    (card,), (printed,), shown = (cell.outputs for cell in notebook.cells)
    html = card["data"]["text/html"]
    assert "&lt;script&gt;hacked" in html and "<script" not in html and "<b>bold" not in html
    assert "<polyline points=" in html and "Step" in html and card["data"]["text/plain"]
    points = read_points(going / "progress.jsonl")
    num, least, zone = printed["text"].split()
    assert (int(num), zone) == (len(points), "UTC")
    assert float(least) == pytest.approx(min(p.loss for p in points if p.loss is not None))
    assert len(shown) == 1 and "succeeded" in shown[0]["data"]["text/html"]


def test_outside_a_notebook_the_error_names_what_to_use(going):
    """No endless loop in a script; and a run that is gone is a card that says so."""
    code = f"from hpc_elastic import Run; Run({str(going)!r}).watch()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "hpc-elastic status --watch" in done.stderr
    run = Run(going)
    shutil.rmtree(going)
    assert "is not a run directory" in run._repr_html_()
