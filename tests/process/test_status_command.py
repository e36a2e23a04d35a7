"""What `status` and `list` find out, and how they show it, from files alone."""

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from helps import not_in_help
from hpc_elastic._console import plain_table
from hpc_elastic._util import duration
from hpc_elastic.cli import status
from hpc_elastic.cli.main import main
from hpc_elastic.cli.status import NextStart, clock, line, listed, number, page, span, sparkline
from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.report.details import read_details
from hpc_elastic.report.run_view import read_view
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.run.events import EventLog
from hpc_elastic.site import StartTimes, next_start
from hpc_elastic.site.forecast import ExpectedStart
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import RESERVED, JobRun, Partition, Qos, QueuedJob
from hpc_elastic.slurm.scheduler import QueueSnapshot
from specs import spec_of, started_run

NOW = 1_900_000_000.0
FAILURE = {
    "task": "17_0", "host": "node1", "rank": 3, "local_rank": 1,
    "message": "CUDA out of memory\nat line 7",
    "exception": "torch.OutOfMemoryError", "exit_code": 1, "log": "/runs/7/rank-3.err",
}  # fmt: skip


def made(folder: Path, num_tasks: int = 2, **fields) -> RunDir:
    """A run directory of a Slurm array that was submitted as job 17."""
    submission = folder / ".hpc_elastic"
    submission.mkdir(parents=True)
    Submission(submission).array(0).submitted_as("17")
    spec = spec_of(
        "train-1", 1, num_tasks, 1, 3, Entry("hydra", "main"), str(submission),
        [(0, index) for index in range(num_tasks)], **fields,
    )  # fmt: skip
    run = RunDir(folder / "0")
    started_run(run, spec)
    return run


def slurm(*states: TaskState, silent: str | None = None):
    """What Slurm says."""
    return lambda specs: QueueSnapshot({state.task: state for state in states}, silent)


def training(run: RunDir, now: float, step: int = 400) -> None:
    """One node that trains since two minutes, a step a second, with a checkpoint at 390."""
    log = EventLog(run.events("17_0"), "17_0")
    at = now - 130
    log.write("task", attempt=1, host="node1", pid=1, started=at, time=at + 1)
    log.write("joined", host="node1", time=at + 2)
    member = {"task": "17_0", "attempt": 1, "slot": 0, "host": "node1", "nproc": 4}
    formed = {"number": 3, "index": 3, "term": 1, "nodes": 1, "world_size": 4, "restarts": 1}
    log.write("round", members=[member], **formed, time=at + 2)
    log.write(
        "first_step", attempt=1, round=3, step=step - 120, restored=None, restore_s=0, time=at + 10
    )
    group = {"phase": "training", "round": 3, "term": 1, "nodes": 1, "world_size": 4}
    told = {**group, "total_steps": 1000, "loss": 0.25, "blocked_s": 0.0, "checkpoint": 390}
    lines = [{"time": at + 10 + t, **told, "step": step - 120 + t} for t in range(0, 121, 5)]
    run.progress.write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    status = {**told, "step": step, "updated": now, "members": [member], "restarts": 1}
    run.status.write_text(json.dumps(status))


RUNS = TaskState("17_0", "RUNNING", node="node1", restarts=1, time_left_s=7200.0)
WAITS = TaskState("17_1", "PENDING", "Resources", restarts=0, starts_in_s=600.0)


def shown(details, width: int = 80) -> str:
    """The page as text."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(page(details, width))
    return console.export_text()


def test_a_run_that_trains_beside_a_task_that_waits(tmp_path):
    """Everything that can be known."""
    run = made(tmp_path)
    training(run, time.time())
    details = read_details(read_view(run.path, slurm(RUNS, WAITS)))
    told = json.loads(json.dumps(details.to_json()))
    entries = (told, told["tasks"][0], told["group"][0])
    assert not set().union(*(not_in_help("status", entry) for entry in entries))
    group = [told[key] for key in ("phase", "nodes", "world_size", "round")]
    assert group == ["training", 1, 4, 3]
    assert told["steps_per_s"] == pytest.approx(1.0, rel=0.05)
    assert told["remaining_s"] == pytest.approx(600, rel=0.05)
    assert told["goodput"] == pytest.approx(120 / 130, abs=0.02)
    runs, waits = told["tasks"]
    assert (runs["node"], runs["attempt"], runs["ranks"]) == ("node1", 1, [0, 3])
    assert (waits["state"], waits["reason"], waits["node"]) == ("PENDING", "Resources", None)
    for width in (80, 160):
        text = shown(details, width)
        assert max(map(len, text.splitlines())) <= width
        assert "400 of 1,000" in text and "PENDING (Resources) in 10 min" in text
        assert "2 h" in text and "0 to 3" in text and "1 of 1–2 nodes, 4 workers" in text
    assert line(details).startswith("training, 1 of 2 nodes, step 400 of 1,000, loss 0.25")


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        (WAITS, "next node expected in 10 min"),
        (replace(WAITS, starts_in_s=-1.0), "next node expected now"),
        (replace(WAITS, reason="BeginTime", starts_in_s=100.0), "next node not before"),
        (replace(WAITS, starts_in_s=None), "next node unknown: Slurm has planned no start"),
        (replace(WAITS, state="COMPLETED"), None),
    ],
)
def test_the_next_node_is_shown_while_a_task_waits(tmp_path, waits, words):
    """With its time, or why that is unknown; not once all tasks run or have ended."""
    run = made(tmp_path)
    training(run, time.time())
    details = read_details(read_view(run.path, slurm(RUNS, waits)))
    text = " ".join(shown(details).split())
    assert "next node" not in text if words is None else words in text
    found = details.to_json()["next_node"]
    assert (found is None) == (words is None)
    assert found is None or not not_in_help("status", found)


class Busy:
    """A client of a cluster of two nodes; n1 is free in 20 minutes, n2 has a reservation."""

    def __init__(self) -> None:
        now, self.calls = time.time(), list[object]()
        self.jobs = [
            QueuedJob("RUNNING", ("n1",), ends_at=now + 1200, limit_s=7200.0, job="3"),
            QueuedJob("PENDING", ("n1",), now + 1800, limit_s=7200.0, job="4"),
            QueuedJob("PENDING", ("n1",), now + 1200, limit_s=7200.0, job="17"),
            QueuedJob(RESERVED, ("n2",), now - 60, limit_s=7200.0),
        ]

    def all_partitions(self) -> list[Partition]:
        """One, the default."""
        return [Partition("gpu", is_default=True)]

    def queue(self) -> list[QueuedJob]:
        """The jobs."""
        return self.jobs

    def config(self) -> dict[str, str]:
        """As by default."""
        return {}

    def all_qos(self) -> list[Qos]:
        """One, whose jobs backfill takes for jobs of a minute."""
        return [Qos("gaps", frozenset({"NoReserve"}))]

    def each_node(self, partition: str) -> dict[str, str]:
        """Both."""
        self.calls.append(partition)
        return {"n1": "allocated", "n2": "idle"}

    def job_runs(self):
        """Six jobs of one user that have used a tenth of their limit, and job 3."""
        ended = [
            JobRun(str(i), "eve", "gpu", 720.0, 7200.0, time.time() - 600 * i) for i in range(6)
        ]
        return [*ended, JobRun("3", "eve", "gpu", 6000.0, 7200.0, None)], "sacct"


@pytest.mark.parametrize(
    ("settings", "in_min"),
    [
        ({"time_min": "5"}, 20),
        ({"time_min": "20"}, 120),  # behind the reservation
        ({"time_min": "20", "qos": "gaps"}, 20),
        ({"time_min": "5", "exclude": "n[0-1]"}, 120),
        ({}, None),
        ({"time_min": "5", "constraint": "a100"}, None),
    ],
)
def test_the_next_gap_is_one_for_the_least_time_limit(tmp_path, settings, in_min):
    """Before other jobs and reservations; the run's own plans are for another limit."""
    run, client = made(tmp_path, time="60", **settings), Busy()
    found = next_start(run.load(), ExpectedStart(), client)
    assert client.calls == ([] if "constraint" in settings else ["gpu"])
    if in_min is None:
        assert found.at is None
    else:
        assert found.at == pytest.approx(time.time() + 60 * in_min, abs=90)


def test_the_next_start_is_learned_from_jobs_that_ended(tmp_path):
    """A job whose user's jobs use a tenth of their limit ends soon, or at its limit in 20 min."""
    run, client, now = made(tmp_path, time="5", exclude="n2"), Busy(), time.time()
    del client.jobs[1]
    planned = ExpectedStart(now + 1200)
    found = next_start(run.load(), planned, client)
    assert found.learned_from == "learned from 6 ended jobs (sacct)" and found.at == planned.at
    assert now <= found.learned.p10 <= found.learned.p50 <= found.learned.p90 <= now + 1260
    client.job_runs = lambda: ([], "squeue")
    found = next_start(run.load(), planned, client)
    assert (found.at, found.learned) == (planned.at, None)
    assert found.learned_from == "by time limits: nothing is learned from 0 ended jobs (squeue)"


@pytest.mark.parametrize(
    ("settings", "in_min"),
    [({}, None), ({}, 110), ({}, 20.5), ({"time_min": "5"}, 110), ({"time": "8"}, 110)],
)
def test_a_shorter_time_limit_is_named_if_a_task_starts_sooner_with_it(tmp_path, settings, in_min):
    """Ten minutes fit before job 4; not for a task that starts then anyway, or fits already."""
    run, client, now = made(tmp_path, **{"time": "60", **settings}), Busy(), time.time()
    client.job_runs = lambda: ([], "squeue")
    planned = ExpectedStart(None if in_min is None else now + 60 * in_min)
    found = next_start(run.load(), planned, client)
    if settings or in_min == 20.5:
        assert (found.shorter_s, found.shorter_at) == (None, None)
    else:
        assert (found.shorter_s, found.shorter_at) == (600, pytest.approx(now + 1200, abs=5))
        details = read_details(read_view(run.path, slurm(RUNS, WAITS)))
        text = shown(replace(details, next_node=found))
        assert "with launcher.time=10 in 20 min" in " ".join(text.split())
        assert not not_in_help("status", {key: 1 for key in vars(found)})


def test_a_local_run_waits_for_no_job_of_slurm(tmp_path):
    """Its launcher starts a lost node again at a time that it knows."""
    local = resolve({"launcher": {"backend": "local"}})
    expected = ExpectedStart(time.time() + 5)
    assert next_start(replace(made(tmp_path).load(), settings=local), expected) is expected


@pytest.mark.parametrize(
    ("gap", "in_min"), [(300.0, 5), (1200.0, 10), (-5.0, 0), (None, 10), (OSError, 10)]
)
def test_the_next_node_comes_with_the_next_gap_if_that_is_sooner(
    tmp_path, monkeypatch, gap, in_min
):
    """Than Slurm's plan for it; Slurm is queried about gaps once a minute at most."""
    run, asked = made(tmp_path, time="60", time_min="5"), []

    def next_start(_, expected):
        asked.append(1)
        if gap is OSError:
            raise OSError("no")
        return expected if gap is None else replace(expected, at=time.time() + gap)

    monkeypatch.setattr("hpc_elastic.site.next_start", next_start)
    training(run, time.time())
    start = NextStart()
    for _ in range(3):
        details = start.added(read_details(read_view(run.path, slurm(RUNS, WAITS))))
    assert details.next_node.at == pytest.approx(time.time() + 60 * in_min, abs=20)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("minutes", "words"),
    [
        ((10, 20, 40), "in 10 to 40 min (8 of 10)"),
        ((10, 20, 90), "in 10 min to 1 h 30 min (8 of 10)"),
        ((0.5, 1, 12), "within 12 min (9 of 10)"),
        ((0, 0, 0.9), "now"),
    ],
)
def test_the_quantiles_of_a_start_in_words(minutes, words):
    """Eight of ten starts are between the first one and the last."""
    assert span(StartTimes(*(60.0 * each for each in minutes)), 0.0) == words


def announced(run: RunDir, *told: int | tuple[int, int] | None, begin: float) -> None:
    """Lines of the progress, ten seconds apart: of the checkpoint's step, and of the training's."""
    pairs = [t if isinstance(t, tuple) else (t, None) for t in told]
    lines = [
        {"time": begin + 10 * i, "checkpoint": saved, "step": step}
        for i, (saved, step) in enumerate(pairs)
    ]
    run.progress.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def saved(run: RunDir, step: int, at: float) -> None:
    """A checkpoint in the customary folder, committed then."""
    folder = run.path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    os.utime(folder, (at, at))


@pytest.mark.parametrize(
    ("told", "there", "step", "age_s", "kept"),
    [
        ([], {}, None, None, 0),
        ([], {5: 400, 10: 300}, 10, 300, 2),
        ([None, 10, 10, 20, 20], {}, 20, 170, 0),  # first told of 30 s after the first line
        ([10, 20, 20], {10: 195, 20: 191}, 20, 191, 2),  # told of a while after it was committed
        ([10, 20, None], {10: 195}, 20, 190, 1),  # in the nodes' memory, say
        ([10, 10], {10: 199, 20: 150}, 20, 150, 2),  # the leader has not heard of it yet
        ([(20, 25), (20, 29), (20, 12)], {10: 300}, 10, 300, 1),  # it died with its nodes
        ([(20, 25), (20, 12), (20, 21)], {10: 300}, 10, 300, 1),  # and does not come back
        ([(20, 25), (20, 12), (30, 31)], {10: 300}, 30, 180, 1),
        ([(20, 25), (20, 21)], {10: 300}, 20, 200, 1),  # nodes died, and it did not
    ],
)
def test_the_newest_checkpoint_is_told_with_its_age(tmp_path, told, there, step, age_s, kept):
    """Since it was committed; of one that lies elsewhere, since it was first told of."""
    run, now = made(tmp_path), time.time()
    announced(run, *told, begin=now - 200)
    for at_step, age in there.items():
        saved(run, at_step, now - age)
    details = read_details(read_view(run.path, slurm(RUNS, WAITS)))
    found = details.to_json()["checkpoint"]
    if step is None:
        assert found is None
        return
    assert (found["step"], found["kept"]) == (step, kept) and not not_in_help("status", found)
    assert found["age_s"] == pytest.approx(details.view.now - now + age_s, abs=1e-3)
    assert found["time"] == pytest.approx(now - age_s, abs=1e-3)
    assert f"step {step}, {duration(found['age_s'])} ago" in shown(details)
    assert (f"({kept} kept)" in shown(details)) == bool(kept)


def test_tasks_that_wait_alike_are_one_line(tmp_path):
    """A run of a thousand nodes fits on a screen; --json has all of them."""
    run = made(tmp_path, num_tasks=1000)
    training(run, time.time())
    waiting = [replace(WAITS, task=f"17_{i}") for i in range(1, 1000)]
    details = read_details(read_view(run.path, slurm(RUNS, *waiting)))
    text = shown(details)
    assert "17_1 to 999" in text and "999 PENDING" in text and len(text.splitlines()) < 30
    assert len(details.to_json()["tasks"]) == 1000


def test_slurm_that_does_not_answer_is_said(tmp_path):
    """The rest is shown as the leader last wrote it."""
    run = made(tmp_path)
    training(run, time.time())
    details = read_details(read_view(run.path, slurm(silent="squeue: timed out")))
    assert details.view.phase == "training" and "squeue: timed out" in details.notes[0]
    assert [(task.state, task.node) for task in details.tasks] == [(None, "node1"), (None, None)]
    told = shown(details)
    assert "Slurm does not answer" in told and "not in the queue" not in told
    assert "unknown (last known: running)" in told
    assert "unknown (last known: never started)" in told


def test_a_leader_that_is_silent_is_said(tmp_path):
    """As long as somebody has a node, the run may go on."""
    run = made(tmp_path)
    training(run, time.time() - 300)
    details = read_details(read_view(run.path, slurm(RUNS)))
    assert details.view.phase == "training" and "no leader has written" in details.notes[0]


def test_a_run_that_failed_shows_why(tmp_path):
    """The first failure, and where its log is; Slurm is not asked."""
    run = made(tmp_path)
    now = time.time()
    training(run, now - 60)
    result = {"status": "failed", "ended": now - 50, "restarts": 3, "failure": FAILURE}
    run.result.write_text(json.dumps(result))
    details = read_details(read_view(run.path, lambda specs: pytest.fail("nothing is to be asked")))
    why = "rank 3 (local rank 1) on node1, exit code 1: torch.OutOfMemoryError: CUDA out of memory"
    ended = details.view.ended
    assert ended is not None and (ended.status, ended.why) == ("failed", why)
    text = shown(details)
    assert why in " ".join(text.split()) and "/runs/7/rank-3.err" in text and "3 of 3 spent" in text
    assert details.account.node_s == pytest.approx(140, abs=1), "it does not go on after its end"


def test_a_run_whose_tasks_are_gone_is_lost(tmp_path):
    """It ended when it was last heard of."""
    run = made(tmp_path)
    training(run, time.time() - 300)
    details = read_details(read_view(run.path, slurm(replace(RUNS, state="CANCELLED"))))
    ended = details.view.ended
    assert details.view.phase == "lost" and ended is not None
    assert ended.why == "its tasks have ended without a result: 1 task CANCELLED"
    assert ended.time == pytest.approx(time.time() - 300, abs=5)


def test_what_is_left_of_a_run_is_shown(tmp_path):
    """Files may be missing or damaged; each is named."""
    run = made(tmp_path)
    training(run, time.time())
    run.spec.write_text("{")
    run.status.write_text("")
    run.progress.unlink()
    (tmp_path / "0" / "events" / "17_1.jsonl").write_text('{"no": "event"}\n')
    details = read_details(read_view(run.path, slurm()))
    assert len(details.notes) == 2 and "status.json" in details.notes[1]
    assert "unknown" in shown(details) and json.dumps(details.to_json())


def test_a_run_that_was_just_submitted(tmp_path):
    """Nothing is known yet but that it waits."""
    run = made(tmp_path)
    details = read_details(read_view(run.path, slurm(replace(WAITS, task="17_0"), WAITS)))
    assert details.view.phase == "queued" and details.nodes == (0, 1, 2) and details.notes == []
    assert "queued" in shown(details) and "goodput" not in shown(details)


def test_a_run_that_waits_for_nothing_any_more(tmp_path):
    """Cancelled before it began, and forgotten by Slurm; or only rendered, and never submitted."""
    run = made(tmp_path, provenance={"time": "2020-01-01T00:00:00+00:00"})
    assert read_details(read_view(run.path, slurm())).view.phase == "lost"
    Submission(tmp_path / ".hpc_elastic").array(0).job_id_file.unlink()
    assert read_details(read_view(run.path, slurm())).view.phase == "not submitted"


def test_what_is_no_run_is_refused(tmp_path, capsys):
    """With what to give instead."""
    with pytest.raises(RunDirectoryError, match="hpc-elastic list"):
        read_details(read_view(tmp_path))
    assert main(["status", str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err


def test_a_list_asks_once_for_all_that_go_on(tmp_path):
    """And what can not be read is listed with the reason."""
    runs = [made(tmp_path / str(i)) for i in range(4)]
    training(runs[0], time.time())
    runs[1].result.write_text(json.dumps({"status": "succeeded"}))
    runs[2].spec.write_text("{")
    asked = []

    def asks(specs):
        asked.append(len(specs))
        return QueueSnapshot({"17_0": RUNS, "17_1": WAITS})

    known = [registry.KnownRun(f"r{i}", run.path, time.time()) for i, run in enumerate(runs)]
    found = listed(known, asks)
    assert asked == [2]
    assert [run.state for run in found] == ["training", "succeeded", "unknown", "starting"]
    assert (found[0].nodes, found[0].step, found[0].total_steps) == (1, 400, 1000)
    assert found[2].problem is not None and "not a run directory" in found[2].problem


def test_overrides_are_listed_as_they_were_given(tmp_path, monkeypatch, capsys):
    """On a wide terminal, or into a pipe: rich takes brackets for its markup."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "250")
    run = made(tmp_path)
    run.hydra.mkdir()
    (run.hydra / "overrides.yaml").write_text("['layers=[conv,attn]', 'paths=[/a,/b]']")
    registry.add({"r0": run.path})
    assert main(["list"]) == 0
    assert "layers=[conv,attn] paths=[/a,/b]" in capsys.readouterr().out


def test_a_narrow_list_has_what_matters_first(tmp_path, monkeypatch, capsys):
    """On 80 columns a run's id is whole, and words are not broken."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    run = made(tmp_path / "multirun/2030-01-31/12-00-00")
    run.hydra.mkdir()
    (run.hydra / "overrides.yaml").write_text("['lr=0.001', 'model.width=1024', 'data=imagenet']")
    run.status.write_text('{"phase": "training", "step": 12345, "total_steps": 90000, "loss": 0.5}')
    run.result.write_text(json.dumps({"status": "succeeded"}))
    registry.add({"imagenet-20300131-120000-0123abcd": run.path})
    assert main(["list"]) == 0
    head, _, first, *more = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "nodes"]
    shown = ["imagenet-20300131-120000-0123abcd", "succeeded", "12,345", "of", "90,000", "0.5"]
    assert first.split() == shown and max(map(len, (first, *more))) <= 80
    words = " ".join(more).split()
    assert {"lr=0.001", "model.width=1024", "multirun/2030-01-31/12-00-00/0"} <= {*words}


def test_a_list_reads_no_more_runs_than_it_shows(tmp_path, monkeypatch, capsys):
    """The newest, of a thousand; and says that there are more."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = {f"r{i}": made(tmp_path / str(i)).path for i in range(30)}
    for name, path in runs.items():
        registry.add({name: path})
    read = []
    monkeypatch.setattr(RunDir, "load", lambda self: read.append(self.path) or _fails())
    assert main(["list", "--limit", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(read) == 3
    assert main(["list", "--limit", "3"]) == 0
    assert "the newest 3" in capsys.readouterr().out
    assert main(["list", "--all", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 30


@pytest.mark.parametrize("width", [12, 24, 80])
def test_joined_rows_of_a_list_look_like_single_ones(width):
    """Whether or not one of them is folded, and however many lines each cell has."""
    rows = [
        [Text("a\n  b", style="bold"), Text("left")],
        [Text("c"), Text("some words that are folded")],
        [Text("d"), Text("1\n2\n3")],
    ]
    shown = []
    for join in (status._joined, lambda rows, *_: rows):
        out, table = Console(width=width, file=io.StringIO()), plain_table()
        for name in ("run", "a longer name"):
            table.add_column(name, overflow="fold")
        for row in join(rows, table, out):
            table.add_row(*row)
        out.print(table)
        shown.append(out.file.getvalue())
    assert shown[0] == shown[1] and "folded" in shown[0]


def _fails() -> None:
    raise RunDirectoryError("not to be read")


def test_a_list_of_nothing_says_how_to_begin(tmp_path, monkeypatch, capsys):
    """No error: there is just nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["list"]) == 0
    assert "no runs yet" in capsys.readouterr().out


def test_times_and_numbers_as_a_person_reads_them():
    """Three digits; a day where it is not today."""
    assert [number(x) for x in (0, 0.00012, 0.123456, 3.14159, 187.4, 12_345.6)] == [
        "0", "1.20e-04", "0.123", "3.14", "187", "12,346",
    ]  # fmt: skip
    assert len(clock(NOW, NOW)) == 8 and " " in clock(NOW, NOW + 200_000)


def test_a_line_of_blocks_is_the_mean_over_time():
    """Nothing before the first change, half of four nodes after it."""
    changes = [(10.0, 4.0), (20.0, 2.0)]
    assert sparkline(changes, 0.0, 40.0, 4, 4.0) == " █▄▄"
    assert sparkline(changes, 5.0, 5.0, 4, 4.0) == ""
