"""The list of the runs that this user has submitted."""

import errno
import io
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from arrays import run_of
from hpc_elastic.cli.main import main
from hpc_elastic.cli.options import find_run
from hpc_elastic.cli.status import listed
from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings
from hpc_elastic.errors import RunDirectoryError, SubmissionError
from hpc_elastic.launcher import control
from hpc_elastic.launcher.plan import Plan, RunRequest, make_plan
from hpc_elastic.launcher.submit import write
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import resume_entry
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import QueueSnapshot

EVENTS_ARE_INCOMPLETE = True
"""They are written by the tests, which need only some of their fields."""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Four known runs, the newest last; one is deleted, and one cannot be read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = {name: run_of(tmp_path, "7", [(0, 0), (0, 1)], name) for name in ("old", "new", "bad")}
    registry.add({name: tmp_path / name for name in ("old", "deleted", "new", "bad")})

    def stale(method):
        def fail(path, *args, **options):
            if made["bad"].path in Path(path).parents:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return method(path, *args, **options)

        return fail

    for name in ("stat", "read_text", "read_bytes", "open"):
        monkeypatch.setattr(Path, name, stale(getattr(Path, name)))
    monkeypatch.setattr(os, "open", stale(os.open))
    return made


def test_a_sweep_stands_for_its_only_run(tmp_path):
    """One without any says so, and of several one has to be given."""
    (tmp_path / ".hpc_elastic").mkdir()
    with pytest.raises(RunDirectoryError, match="is a sweep directory without a run: give"):
        find_run(str(tmp_path))
    only = run_of(tmp_path, "7", [(0, 0), (0, 1)], "only")
    assert find_run(str(tmp_path)) == only.path
    run_of(tmp_path, "8", [(1, 0), (1, 1)], "model=a/lr=1")  # a nested hydra.sweep.subdir
    with pytest.raises(RunDirectoryError, match=r"holds 2 runs; .*: model=a/lr=1, only"):
        find_run(str(tmp_path))


def test_a_run_that_cannot_be_read_hides_no_other(runs):
    """It is listed with the reason, and stays the last one: `cancel last` ends no other run."""
    assert [run.run_id for run in registry.newest_first()] == ["bad", "new", "old"]
    assert find_run("last") == runs["bad"].path
    known = list(registry.newest_first())
    found = {run.run_id: run for run in listed(known, lambda _: QueueSnapshot())}
    assert "Stale" in found["bad"].problem and found["new"].problem is None


@pytest.mark.parametrize("forward_s", [0.0, -3600.0])
def test_last_is_the_last_submission_whatever_the_clock_says(tmp_path, monkeypatch, forward_s):
    """Of several in one millisecond, too, and after the clock was set back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    names = [f"run-{number}" for number in range(8)]
    for number, name in enumerate(names):
        now = 1_900_000_000.0 + number * forward_s
        monkeypatch.setattr(registry.time, "time", lambda now=now: now)
        registry.add({name: run_of(tmp_path, str(number), [(0, 0)], name).path})
    assert [run.run_id for run in registry.newest_first()] == names[::-1]


@pytest.fixture
def projects(tmp_path, monkeypatch):
    """Runs of two projects, the newest last; the present directory is that of the first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, folder in (("train-1-aa", "a"), ("train-1-ab", "a/sub"), ("other-2", "b")):
        run_of(tmp_path, "7", [(0, 0), (0, 1)], name)
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        registry.add({name: tmp_path / name})
    monkeypatch.chdir(tmp_path / "a")
    return tmp_path


def test_what_changes_a_run_takes_the_last_one_of_this_directory_tree(projects, monkeypatch):
    """A run of another project, submitted later, is not ended by `cancel last`."""
    assert find_run("last", here=True) == projects / "train-1-ab"
    assert find_run("last") == projects / "other-2"
    monkeypatch.chdir(projects / "state")
    with pytest.raises(RunDirectoryError, match=r"no run was submitted from here.*other-2"):
        find_run("last", here=True)


def test_a_list_of_earlier_versions_has_runs_of_no_directory(projects, monkeypatch):
    """Whether they are of this tree is unknown: they need their ids."""
    monkeypatch.setattr(Path, "cwd", lambda: Path("/"))
    for file in registry.folder().glob("*.json"):
        entry = json.loads(file.read_text())
        del entry["cwd"]
        file.write_text(json.dumps(entry))
    with pytest.raises(RunDirectoryError, match="no run was submitted from here"):
        find_run("last", here=True)
    assert find_run("last") == projects / "other-2"


def test_a_prefix_that_one_id_has_names_its_run(projects):
    """Of several, those are named."""
    assert find_run("other") == projects / "other-2"
    with pytest.raises(RunDirectoryError, match="2 runs begin so: train-1-ab, train-1-aa"):
        find_run("train-1")
    run_of(projects, "7", [(0, 0), (0, 1)], "other")
    registry.add({"other": projects / "other"})
    assert find_run("other") == projects / "other"


def test_the_last_run_is_not_cancelled_without_a_question(projects, monkeypatch, capsys):
    """Without a terminal it needs --yes, or the run's id."""
    run = RunDir(projects / "train-1-ab")
    left = {"7_0": TaskState("7_0", "RUNNING", node="n1")}
    target = control.CancelTarget(run, run.load(), None, left)
    monkeypatch.setattr(control.CancelTarget, "read", lambda path: target)
    monkeypatch.setattr(control, "cancel", lambda target, **_: [])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["cancel", "last"]) == 2
    assert f"add --yes, or give the run's id ({target.spec.run_id})" in capsys.readouterr().err
    assert main(["cancel", "last", "--yes"]) == 0
    assert main(["cancel", "train-1-ab"]) == 0


def test_an_account_without_a_home_directory_costs_the_list_only(monkeypatch):
    """In a container, under a user id that nobody knows."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    registry.add({"r": Path("/r")})
    assert list(registry.newest_first()) == []


def written_plan(sweep: Path) -> Plan:
    """Return the plan of a local run whose files are written."""
    settings = RunSettings(NodeRange(1, 1), 1, LocalSettings())
    request = RunRequest(sweep / "0", settings, Entry("function", "main", module="x"))
    plan = make_plan([request], sweep / ".hpc_elastic", max_array_size=9)
    write(plan, "train")
    return plan


def test_a_resumption_is_told_also_where_the_list_can_not_be_read(tmp_path, monkeypatch):
    """Its tasks are in the queue by then."""

    def fail():
        raise OSError(errno.ESTALE, "Stale file handle")

    plan = written_plan(tmp_path)
    run = RunDir(tmp_path / "0")
    resumption = control.Resumption(run, run.load(), plan, None)
    monkeypatch.setattr(registry, "newest_first", fail)
    assert control._record(resumption, SimpleNamespace(job_ids=["7"])).tasks == ("7_0",)


def test_of_two_who_resume_a_run_at_once_the_later_one_is_refused(tmp_path, monkeypatch):
    """Its look at the tasks was before the other had submitted any."""
    written_plan(tmp_path)
    run = RunDir(tmp_path / "0")
    change = control.change_settings

    def another_resumes(*args):
        DecisionLog(run.rdzv, run.secret.read_bytes()).create(resume_entry(1, None, 1))
        return change(*args)

    monkeypatch.setattr(control, "change_settings", another_resumes)
    monkeypatch.setattr(control.submit, "start", lambda *_: pytest.fail("it is submitted"))
    with pytest.raises(SubmissionError, match="is being resumed by another process"):
        control.resume(run.path, [])


@pytest.mark.parametrize("ended_ago_s", [0.0, 7200.0])
def test_jobs_that_slurm_ends_for_hours_do_not_forbid_a_resume(tmp_path, monkeypatch, ended_ago_s):
    """The epilog, or a stage-out, may hang; right after the end an agent may still run."""
    written_plan(tmp_path)
    run = RunDir(tmp_path / "0")
    run.complete(run.load())
    ended = {"status": "failed", "ended": time.time() - ended_ago_s}
    run.result.write_text(json.dumps(ended))
    left = {"7_0": TaskState("7_0", "COMPLETING"), "7_1": TaskState("7_1", "STAGE_OUT")}
    monkeypatch.setattr(control.Scheduler, "list_live_tasks", lambda self: left)
    if ended_ago_s:
        control.require_stopped(run, run.load())
    else:
        with pytest.raises(RunDirectoryError, match="still has tasks"):
            control.require_stopped(run, run.load())
