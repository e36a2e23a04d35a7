"""Make the pictures of the pages: watch.png, watch-run.png and report.png, from made runs.

    pip install pillow                          # it makes the pictures small
    python docs/images/pages.py                 # the three pictures, beside this file
    python docs/images/pages.py --all FOLDER    # every page, wide and narrow, light and dark

The runs are synthetic: one that nothing disturbs, one of 500 faults, one of 64 nodes, and a sweep
of 200 runs. Chromium draws the pages, as in the tests of the pages.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "process"), str(HERE.parents[1] / "tests")]

import browser  # noqa: E402
import long_runs  # noqa: E402
from long_runs import LongRun, write  # noqa: E402

from hpc_elastic.report import page  # noqa: E402
from hpc_elastic.report.details import report_of  # noqa: E402
from hpc_elastic.report.run_view import read_view  # noqa: E402
from hpc_elastic.run.directory import RunDir, Submission  # noqa: E402
from hpc_elastic.slurm.local_queue import LocalEntry  # noqa: E402
from specs import set_launcher  # noqa: E402

DESKTOP, PHONE = 1280, 390
LAYERS, RATES = (12, 24), (3e-4, 6e-4, 1e-3, 3e-3)
TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 41, in main
    loss.backward()
RuntimeError: CUDA error: an illegal memory access was encountered"""


def sweep(folder: Path, num: int) -> Path:
    """Write a sweep whose runs train, wait, have succeeded or have failed; return its directory."""
    for number in range(num):
        draw = random.Random(number)
        rate, layers = RATES[number % 4], LAYERS[number // 4 % 2]
        days = draw.uniform(0.04, 0.09)
        ago_s = 0 if number % 11 in (0, 4) else draw.uniform(300, 40_000)
        run = now(ago_s, nodes=2, days=days, faults=draw.randrange(4), seed=number)
        worst = 1 + 0.3 * draw.random() + abs(RATES.index(rate) - 2) * 0.2 + 2 / layers
        for point in run.points:
            point |= {"loss": point.get("loss") and point["loss"] * worst, "total_steps": 2000}
        made = write(run, folder / f"made-{number}")
        files = RunDir(folder / str(number))
        made.rename(files.path)
        (folder / ".hpc_elastic").mkdir(exist_ok=True)
        spec = json.loads(files.spec.read_text())
        files.spec.write_text(json.dumps({**spec, "run_id": f"gpt-20260921-{number:03}"}))
        overrides = [f"lr={rate}", f"model.layers={layers}", f"seed={number // 8}", "data=web"]
        (files.hydra / "overrides.yaml").write_text(json.dumps(overrides))
        result = json.loads(files.result.read_text())
        match number % 11:
            case 0 | 4:
                goes_on(files, run)
            case 7:
                error = {"message": "CUDA error: out of memory", "rank": 1, "host": "node02"}
                result |= {"status": "failed", "failure": error}
                files.result.write_text(json.dumps(result))
            case _:
                (files.path / "results").mkdir(exist_ok=True)
                value = {"perplexity": round(worst * 8, 3)}
                (files.path / "results" / "rank-0.json").write_text(json.dumps(value))
                files.result.write_text(json.dumps({**result, "results": "results"}))
    return folder


def now(ago_s: float = 0.0, *, days: float, **values: int) -> LongRun:
    """Return a run of a number of days that ended ``ago_s`` seconds ago."""
    return LongRun(days=days, begin=time.time() - 86400 * days - ago_s, **values)


def goes_on(files: RunDir, run: LongRun, **more: object) -> None:
    """Make a run one that trains at this moment."""
    files.result.unlink()
    set_launcher(files, "local")
    entry = LocalEntry("RUNNING", 1, 1, None, "elsewhere", 1, 1)
    tasks = {
        f"{long_runs.JOB}_{s}": asdict(
            replace(entry, node=long_runs.host(s), restarts=run.attempt[s])
        )
        for s in run.members
    }
    Submission(Path(files.load().submission)).local_tasks.write_text(json.dumps(tasks))
    for file in files.event_logs.iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"kind": "end"' not in line))
    members = [{"task": f"{long_runs.JOB}_{s}", "host": long_runs.host(s), "nproc": 8}
               for s in run.members]  # fmt: skip
    files.status.write_text(json.dumps({
        **run.points[-1], "phase": "training", "updated": time.time(), "members": members, **more,
    }))  # fmt: skip


def single(folder: Path, **values: float) -> Path:
    """Write a run; a failure of its workers leaves a traceback."""
    run = LongRun(**values)  # type: ignore[arg-type]
    for event in run.events:
        if event["kind"] == "restart":
            event["traceback"] = TRACEBACK
    return write(run, folder)


@contextmanager
def watched(*args: str | Path) -> Iterator[str]:
    """Serve live pages; yield their URL."""
    argv = [sys.executable, "-m", "hpc_elastic", *LIVE, *map(str, args)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


LIVE = ("report", "--live")


def report_page(folder: Path, run: Path) -> str:
    """Write the page of a report; return its URL."""
    file = folder / f"{run.parent.name}.html"
    file.write_text(page.html(report_of(read_view(run)).to_json()))
    return file.as_uri()


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    everything = parser.parse_args().all
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if everything is None:
            in_docs(folder)
        else:
            everything.mkdir(parents=True, exist_ok=True)
            all_pages(folder, everything)


def in_docs(folder: Path) -> None:
    """Make the pictures of docs/."""
    chromium = browser.find(folder)
    long = single(folder / "long")
    with chromium.opened(report_page(folder, long), DESKTOP) as shown:
        shown.eventually("document.documentElement.dataset.drawn")
        shown.value(NAME_FOLDER)
        in_few_colours(shown, "report.png", height=2040)
    runs = sweep(folder / "sweep", 24)
    with watched(runs) as url, chromium.opened(url, DESKTOP) as shown:
        shown.eventually("document.querySelectorAll('.spark').length === 24")
        shown.eventually("document.documentElement.dataset.drawn")
        in_few_colours(shown, "watch.png")
    run = now(nodes=4, days=0.2, faults=6)
    files = RunDir(write(run, folder / "live"))
    goes_on(files, run)
    with watched(files.path, "--control") as url, chromium.opened(url, DESKTOP) as shown:
        shown.eventually("document.documentElement.dataset.version")
        shown.eventually("document.getElementById('node').textContent.includes('node02')")
        shown.value("document.getElementById('control').open = true; 1")
        shown.value(NAME_FOLDER)
        in_few_colours(shown, "watch-run.png")


NAME_FOLDER = """(() => {
  const named = document.querySelector("header p.dim");
  named.innerHTML = named.innerHTML.replace(/ in [/][^<]*/, " in /shared/runs/gpt-medium/0");
})()"""
"""The run directory in a picture is not that of the machine that made it."""


def in_few_colours(shown: browser.LivePage, name: str, *, height: int | None = None) -> None:
    """Make a picture of docs/, a quarter of the size that the browser gives it."""
    from PIL import Image

    shown.picture(HERE / name, height=height)
    with Image.open(HERE / name) as picture:
        full = picture.convert("RGB")
    few = full.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(HERE / name, optimize=True)


def all_pages(folder: Path, to: Path) -> None:
    """Make a picture of each page, at each width, in each theme."""
    chromium = browser.find(folder)
    runs = {
        "undisturbed": single(folder / "undisturbed", nodes=4, days=0.1, faults=0),
        "faults": single(folder / "faults", nodes=16, days=3, faults=500),
        "nodes": single(folder / "nodes", nodes=64, days=1, faults=60),
    }
    for name, run in runs.items():
        pictures(chromium, report_page(folder, run), to, f"report-{name}")
    many = sweep(folder / "sweep", 200)
    with watched(many) as url:
        ready = "document.querySelectorAll('.spark').length === 200"
        pictures(chromium, url, to, "watch-sweep", ready)
    run = now(nodes=8, days=0.2, faults=12)
    files = RunDir(write(run, folder / "live"))
    goes_on(files, run)
    with watched(files.path, "--control") as url:
        pictures(chromium, url, to, "watch-run")


def pictures(chromium: browser.Browser, url: str, to: Path, name: str, ready: str = "true") -> None:
    """Make the pictures of one page."""
    for theme in ("light", "dark"):
        with chromium.opened(url, DESKTOP, dark=theme == "dark") as shown:
            for width in (DESKTOP, PHONE):
                shown.resize(width)
                shown.eventually(f"{ready} && document.documentElement.dataset.drawn")
                time.sleep(1.0)  # charts are drawn again at this width
                shown.picture(to / f"{name}-{width}-{theme}.png", height=6000)
                wide = shown.value("document.documentElement.scrollWidth")
                print(f"{name} {width} {theme}: {wide} pixels wide, console {shown.console}")


if __name__ == "__main__":
    main()
