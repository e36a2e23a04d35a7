"""`hpc-elastic report --live`: who may see its pages, and what they show in a real browser."""

import contextlib
import csv
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import browser
import pytest
from group import eventually
from local_runs import LocalRun
from long_runs import LongRun, write
from starlette.testclient import TestClient

from hpc_elastic.cli.main import main
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report.run_view import RunEnd, read_view
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.log_index import IndexWriter
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import QueueSnapshot
from hpc_elastic_watch.live_pages import application, command_line
from hpc_elastic_watch.live_runs import LiveRun, LiveRuns
from hpc_elastic_watch.serve import listen
from specs import set_launcher

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))
LAPTOP, PHONE = 1366, 390
TOKEN = "t" * 43
HERE = "http://127.0.0.1:8672"
PATHS = (
    "/", "/runs/0", "/news", "/runs/0/news", "/runs/0/report", "/runs/0/logs", "/runs/0/logs/new",
    "/assets/live.js", "/assets/live.css", "/nothing",
)  # fmt: skip
NASTY = "</script><script>window.hacked=1</script><b>bold</b><img src=x onerror='hacked=1'>{{7*7}}"


@contextlib.contextmanager
def watching(*args: str | Path) -> Iterator[str]:
    """Run the command; yield the URL that it prints. It ends quietly at Ctrl-C."""
    argv, pipe = [COMMAND, "report", "--live", *args], subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            url, forward = (process.stdout.readline() for _ in range(2))
            assert forward.startswith("from another machine, first: ssh -L ")
            yield url.strip()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, output, errors) == (0, "", "")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A sweep of 200 runs that train, are over, or have failed; one is called something nasty."""
    folder = tmp_path_factory.mktemp("sweep")
    made = write(LongRun(nodes=2, days=0.03, faults=3), folder)
    first = json.loads((made / "run.json").read_text())
    for number in range(200):
        run = RunDir(folder / str(number))
        if number:
            shutil.copytree(made, run.path, ignore=shutil.ignore_patterns("rdzv"))
        spec = {**first, "run_id": NASTY if number == 7 else f"digits-{number:03}"}
        run.spec.write_text(json.dumps(spec))
        text = NASTY if number == 7 else "plain"
        overrides = [f"lr={0.1 / (1 + number % 10)}", f"note={text}", "epochs=3", "launcher=slurm"]
        (run.hydra / "overrides.yaml").write_text(json.dumps(overrides))
        (run.path / "results").mkdir(exist_ok=True)
        (run.path / "results" / "rank-0.json").write_text(json.dumps({"accuracy": number / 200}))
        result = json.loads(run.result.read_text())
        run.result.write_text(json.dumps({**result, "results": "results"}))
    for number in range(20):
        run = RunDir(folder / str(number))
        run.result.unlink()
        run.status.write_text(json.dumps(going(number)))
    return folder


def going(step: int) -> dict:
    """What the leader of a run that trains writes."""
    return {
        "phase": "training", "updated": time.time(), "round": 3, "nodes": 2, "world_size": 16,
        "step": step, "total_steps": 1000, "loss": 0.5, "steps_per_s": 2.0,
    }  # fmt: skip


@pytest.fixture
def chromium(tmp_path) -> browser.Browser:
    """A browser."""
    return browser.find(tmp_path)


# ---- who may see the pages


@pytest.fixture
def live(sweep) -> Iterator[LiveRuns]:
    """Three of the runs."""
    with LiveRuns(lambda: [sweep / "0", sweep / "7", sweep / "100"]) as runs:
        yield runs


ROOT_PATH = "/" + hashlib.sha256(TOKEN.encode()).hexdigest()[:16]


def client(live: LiveRuns, *, control: bool = False, host: str = HERE) -> TestClient:
    """A browser without cookies; its paths are below that of the pages."""
    app = application(live, TOKEN, control=control)
    return TestClient(app, base_url=host + ROOT_PATH, follow_redirects=False)


def test_nothing_is_shown_without_the_token(live):
    """A page, a stream and a file are refused alike; a guess is, too, and says no more."""
    visitor = client(live)
    for path in PATHS:
        for url in (path, f"{path}?token=", f"{path}?token={TOKEN[:-1]}x"):
            answer = visitor.get(url)
            assert (answer.status_code, "token" in answer.text) == (403, True), url
            assert "set-cookie" not in answer.headers
        answer = visitor.get(path, headers={"cookie": f"hpc_elastic_watch_0={TOKEN}"})
        assert answer.status_code == 403
    assert visitor.post("/runs/0/control", json={"command": "cancel"}).status_code == 403


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(live):
    """The address that the browser goes on to has no token; all answers have a strict policy."""
    visitor = client(live)
    answer = visitor.get(f"/runs/0?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{ROOT_PATH}/runs/0")
    attributes = answer.headers["set-cookie"].lower()
    assert "httponly" in attributes and "samesite=strict" in attributes
    assert f"path={ROOT_PATH};" in f"{attributes};"
    page = visitor.get("/runs/0")
    assert page.status_code == 200 and TOKEN not in page.text
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-frame-options"] == "DENY"
    assert visitor.get("/assets/live.js").headers["content-type"].startswith("text/javascript")


def test_a_foreign_name_of_this_machine_is_refused(live):
    """So no page elsewhere reads these by a name that it lets resolve to 127.0.0.1."""
    for host in ("http://evil.org", "http://127.0.0.1.evil.org:8672", "http://localhost.evil:1"):
        answer = client(live, host=host).get(f"/?token={TOKEN}")
        assert answer.status_code == 403 and "set-cookie" not in answer.headers
    for host in ("http://localhost:1234", "http://127.0.0.1", "http://[::1]:80"):
        assert client(live, host=host).get(f"/?token={TOKEN}").status_code == 303


def test_commands_are_taken_from_own_pages_and_with_control_alone(live):
    """A form of another site, which the browser sends with the cookie, has another Origin."""
    for control in (False, True):
        visitor = client(live, control=control)
        visitor.get(f"/?token={TOKEN}")
        url, body = "/runs/0/control", {"command": "nothing"}
        for origin in ({}, {"origin": "http://evil.org"}, {"origin": "null"}):
            assert visitor.post(url, json=body, headers=origin).status_code == 403
        own = {"origin": HERE}
        answer = visitor.post(url, json=body, headers=own)
        assert answer.status_code == (400 if control else 403)
        assert visitor.post("/runs/99/control", json=body, headers=own).status_code == 404
        assert visitor.get(url).status_code == 405
        assert ('id="control"' in visitor.get("/runs/0").text) == control


def test_a_page_can_ask_for_four_commands_and_no_option():
    """Nothing of what it sends becomes an option or another run."""
    run = "/runs/7"
    assert command_line(run, {"command": "cancel"}) == ["cancel", run, "--yes"]
    assert command_line(run, {"command": "resume", "nodes": ""}) == ["resume", run]
    assert command_line(run, {"command": "resume", "nodes": "2:4"}) == ["resume", run, "nodes=2:4"]
    assert command_line(run, {"command": "kill", "node": "n1"}) == ["node", "kill", run, "n1"]
    for wrong in (
        {}, {"command": "prune"}, {"command": "preempt"}, {"command": "kill", "node": "--help"},
        {"command": "resume", "nodes": "4 launcher.env=x"}, {"command": "kill", "node": ["n1"]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="cancel, resume"):
            command_line(run, wrong)


def test_pages_name_no_file(live):
    """Runs have numbers, and scripts are of a list."""
    visitor = client(live)
    visitor.get(f"/?token={TOKEN}")
    for path in (
        "/assets/page.py", "/assets/..%2f..%2fapi.py", "/assets/../cli/main.py", "/runs/3",
        "/runs/-1", "/runs/..%2f0", "/runs/0/logs/..%2f..%2fsecret", "/runs/4/logs/new",
    ):  # fmt: skip
        assert visitor.get(path).status_code == 404, path


def test_a_port_that_is_taken_is_left_or_named(sweep, capsys):
    """Without --port the next one is taken; with it the error names it; and a run is needed."""
    with listen(None) as first, listen(None) as second:
        ports = [s.getsockname() for s in (first, second)]
        assert ports[0][0] == ports[1][0] == "127.0.0.1" and ports[0][1] < ports[1][1]
        with pytest.raises(HpcElasticError, match=f"--port {ports[0][1]}: .*give another port"):
            listen(ports[0][1])
    assert main(["report", "--live"]) == main(["report", "--live", str(sweep), "--all"]) == 2
    assert "give RUN, or --all" in capsys.readouterr().err


# ---- what is read


@contextlib.contextmanager
def viewed(live: LiveRuns, number: int | None = None) -> Iterator[None]:
    """A page is open."""
    with live.viewer(None if number is None else live.get(number), lambda: None):
        yield


def test_a_run_is_followed_and_its_end_is_told(sweep, tmp_path):
    """A status shows new numbers; the result ends it; its directory may even vanish."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(sweep / "3", run.path)
    set_launcher(run, "local")

    def row() -> dict:
        return live.get(0).row or {}

    with LiveRuns(lambda: [run.path]) as live:
        assert live.get(0).row is None
        with viewed(live, 0):
            eventually(lambda: row().get("step") == 3)
            assert row()["params"]["lr"] == "0.025" and "launcher" not in row()["params"]
            run.status.write_text(json.dumps(going(500)))
            eventually(lambda: row()["step"] == 500)
            assert (row()["nodes"], row()["remaining_s"], row()["phase"]) == (2, 250.0, "training")
            eventually(lambda: live.get(0).page is not None)
            assert "digits-003" in live.get(0).page.html
            version, news = live.news(-1, live.get(0))
            assert list(news["rows"]) == [0] and live.news(version, live.get(0))[1]["rows"] == {}
            shutil.copy(sweep / "100" / "result.json", run.result)
            run.status.write_text(json.dumps({**going(600), "phase": "succeeded"}))
            eventually(lambda: row()["phase"] == "succeeded")
            eventually(lambda: row().get("results") == {"accuracy": 0.015})
            assert live.get(0).goes_on is False
        shutil.rmtree(run.path)
        live.get(0)._viewed_at = -1e9  # as after a minute
        with viewed(live):
            eventually(lambda: "is not a run directory" in (row()["why"] or ""))


def test_an_unread_run_is_due_and_a_page_without_viewers_never(sweep):
    """Many runs are looked at more rarely; one that a page shows is not."""
    with LiveRuns(lambda: [sweep / "0"]) as live:
        run = live.get(0)
        assert run.view_due(1) == run.view_due(200) < time.monotonic() < run.page_due()
        with viewed(live):
            eventually(lambda: run.row is not None)
        assert run.view_due(200) > run.view_due(1) + 60
        run.num_viewers = 1
        assert run.view_due(200) == run.view_due(1)


def test_a_second_look_decides_that_a_run_is_lost(sweep, monkeypatch):
    """One that is being requeued is in no list for a moment; one that was not read yet is lost."""
    monkeypatch.setattr("hpc_elastic.launcher.follow.GONE_S", 0.0)
    view = read_view(sweep / "3", lambda specs: QueueSnapshot())
    trains = replace(view, tasks={"1_0": TaskState("1_0", "RUNNING")}, is_submitted=True)
    lost = replace(trains, tasks={}, phase="lost", ended=RunEnd("lost", 1.0))
    run, unread = (LiveRun(number, sweep / "3") for number in range(2))
    unread.set_view(lost, QueueSnapshot())
    assert not unread.goes_on
    run.set_view(trains, QueueSnapshot())
    run.set_view(lost, QueueSnapshot())
    assert run.goes_on and run.new_row()["phase"] == "training"
    assert run.view_due(1) < time.monotonic()
    run.set_view(lost, QueueSnapshot())
    assert not run.goes_on and run.new_row()["phase"] == "lost"


def test_logs_are_paged_and_searched(sweep, tmp_path):
    """Page by page back to the first line: each line of all files once, in order of time."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(sweep / "3", run.path)
    folder, written = run.attempt("4711_0", 0), []
    folder.mkdir(parents=True)
    for rank in range(2):
        file = folder / f"round-1.rank-{rank}.out"
        index = IndexWriter(file)
        with file.open("a") as f:
            for number in range(700):
                at = 1e9 + number // 40 + 0.5 * rank  # many lines have the same time
                f.write(f"step {number} of rank {rank} <b>\n")
                f.flush()
                index.append(f.tell(), at)
                written.append((at, rank, number))
        index.close()
    with LiveRuns(lambda: [run.path]) as live:
        visitor = client(live)
        visitor.get(f"/?token={TOKEN}")
        pages, asked, more = [], {}, True
        while more:
            page = visitor.get("/runs/0/logs", params=asked).json()
            pages, more = [*page["lines"], *pages], page["more"]
            seen = sum(line[0] == pages[0][0] for line in pages)
            asked = {"before": pages[0][0], "seen": seen}
        assert [line[4] for line in pages] == [
            f"step {number} of rank {rank} <b>" for _, rank, number in sorted(written)
        ]
        one = {"rank": "1", "text": "STEP 69", "lines": "x"}
        found = visitor.get("/runs/0/logs", params=one).json()
        assert [line[4] for line in found["lines"]] == [
            f"step {number} of rank 1 <b>" for number in (69, *range(690, 700))
        ]
        assert (
            visitor.get("/runs/0/logs", params={"before": "nan", "seen": "-1"}).status_code == 200
        )


# ---- what a browser shows


@pytest.mark.long
def test_200_runs_stand_side_by_side(sweep, chromium):
    """Sorted, filtered, on a phone; and a nasty name is text."""
    with watching(sweep) as url, chromium.opened(url, LAPTOP, dark=True) as page:
        page.eventually("document.documentElement.dataset.runs === '200'")
        assert "token" not in page.value("location.href")
        page.eventually("document.querySelectorAll('.spark').length === 200")
        head = page.value("[...document.querySelectorAll('#runs th')].map((e) => e.innerText)")
        assert head[:2] == ["run", "state"] and head[-3:] == ["lr", "note", "result.accuracy"]
        assert "epochs=3" in page.value("document.getElementById('common').innerText")
        page.value("document.querySelector('#runs th:last-child button').click()")
        page.value("document.querySelector('#runs th:last-child button').click()")
        first = "document.querySelector('#runs tbody tr').innerText"
        assert "digits-199" in page.value(first)
        page.value("(f => { f.value = 'training lr=0.05'; f.oninput(); })"
                   "(document.getElementById('filter'))")  # fmt: skip
        assert page.value("document.getElementById('count').innerText") == "2 of 200 runs"
        (sweep / "1" / "status.json").write_text(json.dumps(going(777)))
        page.eventually("document.querySelector('#runs').innerText.includes('777')")
        page.resize(PHONE)
        assert page.value("document.documentElement.scrollWidth") <= PHONE
        page.go_to(page.value("location.href") + "runs/7")
        page.eventually("document.documentElement.dataset.version")
        assert f"note={NASTY} epochs=3" in page.value("document.getElementById('title').innerText")
        assert page.value("document.getElementById('title').title") == NASTY
        assert page.value("document.querySelectorAll('img, #report b, script:not([src])').length "
                          "- 1") == 0  # fmt: skip
        assert page.value("'hacked' in window") is False
        assert page.value("document.documentElement.dataset.drawn") == "dark"
        assert page.console == []


def choose(page: browser.LivePage, name: str, value: str) -> None:
    """Choose a value of one of the controls."""
    chosen = f"((e) => {{ e.value = {value!r}; e.oninput(); }})"
    page.value(f"{chosen}(document.getElementById({name!r}))")


DRAWN = "document.documentElement.dataset.drawn"
KEEP_VIEW = """Object.defineProperty(window, "vegaEmbed", {
  set(embed) { this.embed = async (...args) => (this.shown = await embed(...args)); },
  get() { return this.embed; },
});"""
"""It keeps what was drawn last as ``window.shown``."""
VIEW, SPEC, DATA = "window.shown.view", "window.shown.spec", "window.shown.view.data('curves')"


@pytest.mark.long
def test_runs_are_compared(sweep, tmp_path, chromium):
    """Each in its colour, by what one likes; a row and its curve light up together."""
    runs = [sweep / str(number) for number in (3, 8, 9, 30, 31, 38)]
    marks = "[...document.querySelectorAll('.mark')].map((e) => e.style.backgroundColor)"
    with watching(*runs) as url, chromium.opened(url, LAPTOP) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=KEEP_VIEW)
        page.go_to(page.value("location.href"))
        page.eventually(f"new Set({marks}).size === 6 && {DRAWN}")
        # the last point of a curve is that of its row, which is newer
        (sweep / "3" / "status.json").write_text(json.dumps({**going(60_000), "loss": 0.25}))
        page.eventually("document.querySelector('#runs').innerText.includes('60,000')")
        page.eventually(f"{DATA}.filter((p) => p.run === 0).at(-1).x === 60000")
        # a row lights its curve, and a curve its row
        row = "document.querySelectorAll('#runs tbody tr')"
        page.value(f"{row}[1].onpointerenter(); 1")
        page.eventually(f"{VIEW}.signal('lit') === 1 && {row}[1].classList.contains('lit')")
        page.value(f"{row}[1].onpointerleave(); 1")
        page.eventually(f"{VIEW}.signal('lit') === -1")
        x, y = page.value(f"""(() => {{
            const last = {DATA}.filter((p) => p.run === 0).at(-1), [left, top] = {VIEW}.origin();
            const frame = {VIEW}.container().getBoundingClientRect();
            return [frame.left + left + {VIEW}.scale('x')(last.x),
                    frame.top + top + {VIEW}.scale('y')(last.y)];
        }})()""")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.eventually(f"{row}[0].classList.contains('lit') && {VIEW}.signal('lit') === 0")
        told = page.value("document.getElementById('lit').innerText")
        assert told.startswith("digits-003 lr=0.025") and told.endswith("step 60,000, loss 0.25")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
        # what is on the axes
        for name in ("hours", "samples", "step"):
            choose(page, "x", name)
            page.eventually(f"{SPEC}.encoding.x.title === {name!r}")
        choose(page, "y", "log")
        page.eventually(f"{SPEC}.encoding.y.scale.type === 'log'")
        first = f"{DATA}.filter((p) => p.run === 3).map((p) => p.y)"
        rough = page.value(first)
        choose(page, "smooth", "0.9")
        page.eventually(f"{first}[1] !== {rough[1]}")
        smooth = page.value(first)
        assert max(smooth) - min(smooth) < max(rough) - min(rough) and smooth[0] == rough[0]
        # by a parameter: one colour for each of its values, in a legend
        choose(page, "colour", "lr")
        page.eventually(f"{SPEC}.encoding.color.legend.title === 'lr'")
        values = page.value(f"{SPEC}.encoding.color.scale.domain")
        assert values == sorted(values, key=float) and len(values) == 5
        # some of them alone
        for number in (1, 3):
            page.value(f"document.querySelectorAll('.mark')[{number}].click()")
        page.eventually(f"[...new Set({DATA}.map((p) => p.run))].join() === '1,3'")
        page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.value("document.getElementById('csv').click()")
        page.value("document.getElementById('png').click()")
        eventually(lambda: {f.name for f in tmp_path.glob("runs.*")} == {"runs.csv", "runs.png"})
        with (tmp_path / "runs.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert {line["run"] for line in lines} == {"digits-008", "digits-030"}
        assert lines[0].keys() >= {"lr", "note", "step", "time", "samples", "loss"}
        assert page.console == []


@pytest.mark.long
def test_an_ended_run_has_nothing_left(sweep, chromium):
    """It says when it ended; a value that is no object is the result; a failure is red."""
    (sweep / "40" / "results" / "rank-0.json").write_text("0.25")
    failed = RunDir(sweep / "41")
    failure = {"message": "boom", "rank": 1, "host": "n2"}
    failed.result.write_text(json.dumps({"status": "failed", "ended": 9.0, "failure": failure}))
    runs = [sweep / str(number) for number in (4, 40, 41)]
    with watching(*runs) as url, chromium.opened(url, LAPTOP) as page:
        page.eventually("document.querySelector('#runs').innerText.includes('0.25')")
        head = page.value("[...document.querySelectorAll('#runs th')].map((e) => e.innerText)")
        assert head[-1] == "result" and "result.result" not in head
        cells = (
            "[...document.querySelectorAll('#runs tbody tr')].map((tr) => tr.cells[{}].innerText)"
        )
        left, ended = (page.value(cells.format(head.index(name))) for name in ("left", "ended"))
        assert left[0] and not ended[0] and left[1:] == ["", ""]
        assert all(text.endswith(" d ago") for text in ended[1:])
        red = "getComputedStyle(document.querySelector('{}')).color"
        colours = [page.value(red.format(at)) for at in (".badge.failed", "tr.failed small")]
        assert colours == ["rgb(179, 38, 30)"] * 2 and page.console == []


@pytest.mark.long
def test_a_run_is_watched_through_a_preemption(tmp_path, chromium):
    """The page shows two nodes, takes one away, and shows it come back, without being loaded."""
    hurry = tmp_path / "hurry"
    text = (ROOT / "train.py").read_text()
    pause = "time.sleep(cfg.pause_s)"
    assert pause in text
    slow = text.replace(pause, f"time.sleep(0 if os.path.exists({str(hurry)!r}) else 0.1)")
    (tmp_path / "train.py").write_text(slow)
    shutil.copy(ROOT / "train.yaml", tmp_path)
    numbers = "document.getElementById('numbers').innerText"
    report = "document.getElementById('report').innerText"
    with contextlib.ExitStack() as started:
        run = started.enter_context(LocalRun(
            tmp_path / "train.py", tmp_path, "launcher=local", "nodes=1:2", "nproc_per_node=1",
            "epochs=40", "save_every_s=1",
        ))  # fmt: skip
        run.eventually(lambda: run.events("first_step"), "it trains")
        url = started.enter_context(watching(run.path, "--control"))
        page = started.enter_context(chromium.opened(url, LAPTOP))
        page.eventually(f"{numbers}.includes('2 of 2 nodes')")
        page.eventually("document.documentElement.dataset.drawn")
        page.value("window.isSame = true; window.confirm = (asked) => { window.asked = asked; "
                   "return true; }; location.hash = '#logs'; 1")  # fmt: skip
        page.eventually("document.querySelectorAll('#lines li').length > 0")
        page.value("location.hash = '#report'; document.getElementById('control').open = true; 1")
        page.value("document.querySelector('[data-command=preempt]').click()")
        asked = page.value("window.asked")
        assert asked.startswith("Preempt local-0 (") and "gets notice" in asked
        texts = page.value("[...document.querySelectorAll('#control button')].map((e) => "
                           "e.innerText)")  # fmt: skip
        assert {"Preempt with notice", "Kill without notice"} <= set(texts)
        page.eventually("document.getElementById('answer').innerText.includes(' left after ')")
        page.eventually(f"{report}.includes('came back after') && {report}.includes('Faults (1)')")
        page.eventually(f"{numbers}.includes('2 of 2 nodes')")
        rounds = [e["nodes"] for e in run.events("round")]
        assert rounds[-1] == 2 and 1 in rounds
        hurry.touch()
        page.eventually("document.getElementById('phase').innerText === 'succeeded'")
        page.eventually(f"/ended \\d/.test({report})")
        assert page.value("window.isSame") and page.console == []
        assert run.wait() == 0


@pytest.mark.long
def test_a_run_of_a_week_is_shown(tmp_path, chromium):
    """Its page fits a phone, and it is made again at most a tenth of the time."""
    run = write(LongRun(nodes=16, days=7, faults=400), tmp_path)
    RunDir(run).result.unlink()
    RunDir(run).status.write_text(json.dumps(going(900_000)))
    with watching(run) as url, chromium.opened(url, PHONE) as page:
        page.eventually("document.documentElement.dataset.version")
        assert page.value("document.documentElement.scrollWidth") <= PHONE
        assert "Faults (400)" in page.value("document.body.innerText")
        RunDir(run).status.write_text(json.dumps(going(900_001)))
        page.eventually("document.getElementById('numbers').innerText.includes('900,001')")
        assert "900,001" in page.value("document.querySelector('#report .tiles').innerText")
        assert page.console == []
