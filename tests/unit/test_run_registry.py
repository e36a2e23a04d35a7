"""The list of the runs that this user has submitted."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from arrays import run_of

from hpc_elastic.cli.list import listed
from hpc_elastic.cli.options import find_run
from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings
from hpc_elastic.errors import RunDirectoryError, SubmissionError
from hpc_elastic.launcher import control
from hpc_elastic.launcher.plan import Plan, RunRequest, make_plan
from hpc_elastic.launcher.submit import write
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import resume_entry
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.slurm.scheduler import QueueSnapshot


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
    run_of(tmp_path, "8", [(1, 0), (1, 1)], "other")
    with pytest.raises(RunDirectoryError, match=r"holds 2 runs; .*: only, other"):
        find_run(str(tmp_path))


def test_a_run_that_cannot_be_read_hides_no_other(runs):
    """It is listed with the reason, and stays the last one: `cancel last` ends no other run."""
    assert [run.run_id for run in registry.newest_first()] == ["bad", "new", "old"]
    assert find_run("last") == runs["bad"].path
    known = list(registry.newest_first())
    found = {run.run_id: run for run in listed(known, lambda _: QueueSnapshot())}
    assert "Stale" in found["bad"].problem and found["new"].problem is None


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
    resumption = control.Resumption(run, run.load(), plan.runs[0].settings, plan, (), None)
    monkeypatch.setattr(registry, "newest_first", fail)
    assert control._record(resumption, SimpleNamespace(job_ids=["7"])).tasks == ("7_0",)


def test_of_two_who_resume_a_run_at_once_the_later_one_is_refused(tmp_path, monkeypatch):
    """Its look at the tasks was before the other had submitted any."""
    written_plan(tmp_path)
    run = RunDir(tmp_path / "0")
    read = control.read_settings

    def another_resumes(files):
        DecisionLog(run.rdzv, run.secret.read_bytes()).create(resume_entry(1, None, 1))
        return read(files)

    monkeypatch.setattr(control, "read_settings", another_resumes)
    monkeypatch.setattr(control.submit, "start", lambda *_: pytest.fail("it is submitted"))
    with pytest.raises(SubmissionError, match="is being resumed by another process"):
        control.resume(run.path, [])
