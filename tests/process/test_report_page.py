"""The page of `hpc-elastic report`, opened in a real browser."""

import json
import re
import struct

import browser
import pytest
from long_runs import LongRun, write

from hpc_elastic.cli.main import main
from hpc_elastic.cli.report import render
from hpc_elastic.report.charts import QUEUE, SPENT_ON, charts
from hpc_elastic.report.details import report_of
from hpc_elastic.report.run_view import read_view

LAPTOP, PHONE = 1366, 390
MOST_BYTES = 3_000_000
NASTY = "</script><script>window.hacked=1</script><b>bold</b><img src=x onerror='hacked=1'>{{7*7}}"


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The directory of a synthetic run: 16 nodes, three days, 200 faults."""
    return write(LongRun(), tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def long_page(long_run) -> str:
    """Its page."""
    return render(report_of(read_view(long_run)), "html").decode()


@pytest.fixture
def chromium(tmp_path) -> browser.Browser:
    """A browser."""
    return browser.find(tmp_path)


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_run_of_days_is_drawn_at_any_width(long_page, chromium, width, theme):
    """All charts have something in them, nothing is wider than the page, the console is silent."""
    seen = chromium.look(long_page, width, dark=theme == "dark")
    assert seen.console == []
    told = seen.told
    assert (told["drawn"], told["canvases"], told["blank"]) == (theme, 6, [])
    assert told["width"] == width and told["scroll_width"] <= width and told["wide"] == []
    light, dark = "rgb(255, 255, 255)", "rgb(18, 22, 28)"
    assert told["background"] == (dark if theme == "dark" else light)


def test_a_page_asks_nobody(long_page):
    """No address in it is fetched: the policy forbids it, and all that loads is in the file."""
    assert len(long_page.encode()) < MOST_BYTES
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', long_page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]
    markup = re.sub(r"<script.*?</script>", "", long_page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!data:)', markup) == []


def test_what_a_run_is_called_can_not_run(tmp_path, chromium):
    """Neither a name nor a config value, an error, a host or an override becomes markup."""
    run = LongRun(nodes=2, days=0.05, faults=3)
    for event in run.events:
        for key in ("host", "failure", "why"):
            if isinstance(event.get(key), str):
                event[key] = NASTY
        for member in event.get("members", ()):
            member["host"] = NASTY
    folder = write(run, tmp_path / "run")
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([f"name={NASTY}"]))
    (folder / ".hydra" / "config.yaml").write_text(json.dumps({"name": NASTY, NASTY: 1}))
    spec = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**spec, "run_id": NASTY}))
    page = render(report_of(read_view(folder)), "html").decode()
    assert "&lt;script&gt;window.hacked" in page and "\\u003c/script\\u003e" in page
    seen = chromium.look(page, PHONE)
    told = seen.told
    assert (told["hacked"], told["alien"], seen.console) == (False, 0, [])
    assert told["title"].startswith(f"name={NASTY}") and told["drawn"] == "light"
    assert told["scroll_width"] <= PHONE and told["wide"] == []
    assert render(report_of(read_view(folder)), "png").startswith(b"\x89PNG")


def test_a_run_that_never_started_has_a_page(tmp_path, chromium):
    """It says so, and draws nothing."""
    run = write(LongRun(nodes=2, days=0.02, faults=0), tmp_path / "run")
    for file in [*(run / "events").iterdir(), run / "progress.jsonl", run / "result.json"]:
        file.unlink()
    page = render(report_of(read_view(run)), "html").decode()
    assert "No task of this run has started" in page and "vegaEmbed" not in page
    assert render(report_of(read_view(run)), "png").startswith(b"\x89PNG")
    seen = chromium.look(page, PHONE)
    assert (seen.told["drawn"], seen.told["canvases"], seen.console) == ("nothing", 0, [])


def test_the_report_of_a_long_run_adds_up(long_run, tmp_path, capsys):
    """Every node-second is in one kind, and the costs of all changes are what is not useful."""
    out = tmp_path / "report.json"
    assert main(["report", str(long_run), "-o", str(out)]) == 0
    assert "wrote" in capsys.readouterr().err and out.stat().st_mode & 0o777 == 0o600
    report = json.loads(out.read_text())
    spent, kinds = report["spent"], report["spent"]["by_kind"]
    assert sum(kinds.values()) == pytest.approx(spent["node_s"], rel=1e-6)
    drawn = sum(i["end"] - i["begin"] for n in report["nodes"] for i in n["intervals"])
    assert drawn == pytest.approx(spent["node_s"], rel=1e-6)
    cost = report["first_node_s"] + sum(change["node_s"] for change in report["changes"])
    lost = spent["node_s"] - kinds["useful"] - kinds["checkpoint"]
    assert cost == pytest.approx(lost, rel=1e-4)
    faults = [change for change in report["changes"] if change["fault"]]
    assert len(faults) == 200 and all(change["node_s"] > 0 for change in faults)
    assert report["notes"] == [] and 0.5 < spent["goodput"] < 1
    ends = {node["ended_by"] for node in report["nodes"]}
    assert ends == {"preempted", "time_limit", "node_lost", "end"}


def test_the_bar_shows_where_all_of_the_time_went(long_run):
    """A part for every kind that took any, and together all of it; so does the picture."""
    report = report_of(read_view(long_run))
    values = report.to_json()
    (bar,) = (chart for chart in charts(values) if chart.name == "bar")
    rows, spent = bar.spec["data"]["values"], values["spent"]
    took = {kind for kind, s in spent["by_kind"].items() if s > 0}
    assert [row["kind"] for row in rows] == [kind for kind in SPENT_ON if kind in took | {QUEUE}]
    assert len(rows) > 7 and bar.spec["encoding"]["x"]["title"] == "node-hours"
    node_s = 3600 * sum(row["time"] for row in rows)
    assert node_s == pytest.approx(spent["node_s"] + spent["queue_s"], rel=1e-4)
    picture = render(report, "png")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > LAPTOP and height > LAPTOP and len(picture) > 50_000
