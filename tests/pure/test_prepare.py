"""The files of a submission: written in full before anything is submitted, or not at all."""

from __future__ import annotations

import errno
import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, DamagedFileError, RunDirectoryError
from hpc_elastic.launcher.plan import Plan, RunRequest, make_plan
from hpc_elastic.launcher.submit import (
    lay_out,
    make_run_id,
    next_array,
    open_sweep,
    remove_rendered,
    terms_of,
    with_free_numbers,
    write,
    write_concurrently,
)
from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.run.directory import Entry, PoolTerms, RunDir, RunSpec, Submission
from hpc_elastic.slurm.parsing import Preemption
from specs import spec_of

ENTRY = Entry("function", "main", script="/code/train.py")


def plan_in(sweep_dir: Path, *, launcher: SlurmSettings | None = None, runs: int = 1):
    """Return a plan for runs in a sweep directory."""
    settings = RunSettings(NodeRange(1, 2), 1, launcher or SlurmSettings())
    planned = [RunRequest(sweep_dir / str(number), settings, ENTRY) for number in range(runs)]
    return make_plan(planned, sweep_dir / ".hpc_elastic", max_array_size=100)


def test_prepare_writes_all_that_a_task_needs(tmp_path):
    """A script that is never submitted by us finds everything in its place."""
    plan = plan_in(tmp_path, runs=2)
    write(plan, "train", provenance={"user": "me"})
    specs = [RunDir(tmp_path / n).load() for n in "01"]
    assert [spec.tasks for spec in specs] == [[(0, 0), (0, 2)], [(0, 1), (0, 3)]]
    assert specs[0].run_id != specs[1].run_id
    assert (specs[0].entry, specs[0].provenance) == (ENTRY, {"user": "me"})
    for private in ("secret", "run.json"):
        assert stat.S_IMODE((tmp_path / "0" / private).stat().st_mode) == 0o600
    array = json.loads((tmp_path / ".hpc_elastic" / "array-0.json").read_text())
    assert [run["slot"] for run in array["runs"]] == [0, 0, 1, 1]
    assert plan.scripts == [tmp_path / ".hpc_elastic" / "array-0.sbatch"]
    assert plan.scripts[0].is_file()
    assert (tmp_path / ".hpc_elastic" / "logs").is_dir()
    assert next_array(tmp_path / ".hpc_elastic") == 1


def test_what_the_agents_go_by_is_in_the_run_description(tmp_path):
    """launcher.scale_up and its like are frozen; a requeued task runs by the same."""
    launcher = SlurmSettings(
        scale_up="immediate", scale_up_timeout_s=5.0, below_min_timeout_s=None,
        interface="ib0", coallocate_min=True,
        signal_delay_s=60.0, preempt_signal="USR1", max_failed_rounds=5,
        max_requeues=7,
    )  # fmt: skip
    known = [Preemption(grace_s=60, kill_wait_s=30)]
    plan = plan_in(tmp_path, launcher=launcher)
    write(plan, "train", terms=[terms_of(plan.runs[0].settings, known)])
    spec = RunDir(tmp_path / "0").load()
    assert spec.settings == RunSettings(NodeRange(1, 2), 1, launcher)
    assert spec.terms == [PoolTerms(90, 30, whole_nodes=True)]
    rules = RoundRules.of(spec.settings, in_sweep=True)
    assert (rules.scale_up, rules.scale_up_timeout_s, rules.below_min_timeout_s) == (
        "immediate", 5.0, None,
    )  # fmt: skip
    assert (rules.max_failed_rounds, rules.max_requeues, rules.in_sweep) == (5, 7, True)
    assert spec.task_names({0: "7"}) == ["7.0"]
    assert spec.task_names({0: "7", 1: "8"}) == ["7.0", "8_0"]


def test_a_file_system_without_hard_links_is_noticed_at_submission(tmp_path, monkeypatch):
    """Not on the cluster, when the agents want to elect their leader."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(RunDirectoryError) as refused:
        write(plan_in(tmp_path), "train")
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / '.hpc_elastic'}: no hard links")
    assert message.count("hydra.sweep.dir") == 1
    assert [p.name for p in (tmp_path / ".hpc_elastic").iterdir()] == ["logs"]


def test_a_run_directory_is_used_once(tmp_path):
    """A second sweep into the same folder would take the first one's results for its own."""
    write(plan_in(tmp_path), "train")
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        write(plan_in(tmp_path), "train")


def test_what_a_dry_run_has_rendered_is_rendered_anew(tmp_path):
    """Into the same folder, again or for real; unless its script was submitted by hand."""
    submission = tmp_path / ".hpc_elastic"
    dirs = [tmp_path / "0", tmp_path / "1"]

    def render(**settings: bool) -> tuple[list[Path], list[RunSpec]]:
        remove_rendered(dirs, submission)
        plan = plan_in(tmp_path, launcher=SlurmSettings(**settings), runs=2)
        return plan.scripts, write(plan, "train")

    scripts, specs = render(dry_run=True)
    remove_rendered(dirs[:1], submission)
    assert RunDir(dirs[0]).spec.exists(), "an array stays where one of its runs does"
    scripts_again, specs_again = render(dry_run=True)
    assert scripts == scripts_again and specs != specs_again
    assert RunDir(dirs[1]).load() == specs_again[1]

    Submission(submission).array(0).submitted_as("7")  # a task of it has started
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        render()
    Submission(submission).array(0).job_id_file.unlink()
    render()
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        render()  # that one was no dry run


def test_submissions_at_the_same_moment_have_arrays_of_their_own(tmp_path):
    """As when all runs of a sweep are resumed at once: each number is taken once."""
    together = threading.Barrier(8)

    def submit(number: int) -> Plan:
        settings = RunSettings(NodeRange(1, 2), 1, SlurmSettings())
        run = RunRequest(tmp_path / str(number), settings, ENTRY)
        waits = [together]

        def prepare_again() -> Plan:
            first = next_array(tmp_path / ".hpc_elastic")
            for barrier in waits[:1]:
                barrier.wait(60)  # all have chosen the same number
            waits.clear()
            plan = make_plan(
                [run], tmp_path / ".hpc_elastic", max_array_size=100, first_array=first
            )
            write(plan, "train")
            return plan

        return with_free_numbers(prepare_again)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(submit, range(8)))
    for number, plan in enumerate(made):
        (array,) = plan.arrays
        tasks = json.loads((tmp_path / f".hpc_elastic/array-{array.number}.json").read_text())
        assert {task["dir"] for task in tasks["runs"]} == {str(tmp_path / str(number))}
        spec = RunDir(tmp_path / str(number)).load()
        assert spec.tasks == [(array.number, 0), (array.number, 1)]
    assert len({plan.arrays[0].number for plan in made}) == 8


def test_all_tasks_of_a_run_make_the_rest_of_its_directory_at_once(tmp_path):
    """They make the same; one that comes later changes nothing, such as the term of a leader."""
    plan, run = plan_in(tmp_path), RunDir(tmp_path / "0")
    files = {"config.yaml": ["a: 1\n", "b: 2\n"], "overrides.yaml": ["- a=1\n"]}
    request = replace(plan.runs[0], hydra_files=files)
    (spec,) = write(replace(plan, runs=(request,)), "train")
    waiting = sorted(path.name for path in run.path.iterdir())
    assert waiting == ["run.json", "secret"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: run.complete(run.load()), range(8)))
    made = {str(path.relative_to(run.path)) for path in run.path.rglob("*")}
    assert made == {
        *waiting, "events", "preempt", "results", "rdzv", "rdzv/term.0",
        ".hydra", ".hydra/config.yaml", ".hydra/overrides.yaml",
    }  # fmt: skip
    assert (run.hydra / "config.yaml").read_text() == "a: 1\nb: 2\n"
    assert stat.S_IMODE((run.hydra / "config.yaml").stat().st_mode) == 0o600
    run.first_term.rename(run.rdzv / "term.1")
    run.complete(spec)
    assert [path.name for path in run.rdzv.iterdir()] == ["term.1"]


def test_a_directory_that_was_used_before_has_the_files_of_the_new_run(tmp_path):
    """By Hydra's own launcher, or by a run whose run.json was removed: all is made at once."""
    plan, run = plan_in(tmp_path), RunDir(tmp_path / "0")
    run.hydra.mkdir(parents=True)
    run.first_term.mkdir(parents=True)
    (run.hydra / "config.yaml").write_text("old: 1\n")
    request = replace(plan.runs[0], hydra_files={"config.yaml": ["new: 1\n"]})
    write(replace(plan, runs=(request,)), "train")
    assert (run.hydra / "config.yaml").read_text() == "new: 1\n"
    assert run.event_logs.is_dir() and run.first_term.is_dir()


def test_pieces_of_a_config_that_are_missing_are_damage(tmp_path):
    """Whether the file of the shared pieces is away, or has too few."""
    plan, files = plan_in(tmp_path, runs=2), {"config.yaml": ["a: 1\n", "b: 2\n"]}
    write(replace(plan, runs=tuple(replace(r, hydra_files=files) for r in plan.runs)), "train")
    run = RunDir(tmp_path / "1")
    spec = run.load()
    assert run.hydra_text("config.yaml", spec) == "a: 1\nb: 2\n"
    assert stat.S_IMODE(spec.texts.stat().st_mode) == 0o600
    spec.texts.write_text("[]")
    with pytest.raises(DamagedFileError, match="is damaged"):
        run.hydra_text("config.yaml", spec)
    spec.texts.unlink()
    with pytest.raises(FileNotFoundError):
        run.complete(spec)


def test_of_two_that_submit_the_same_run_one_is_refused(tmp_path):
    """At the same moment: Hydra's default sweep directory is that of the second."""
    RunDir(tmp_path).create(spec_of("r", 1, 1, 1, 0, ENTRY, str(tmp_path), [(0, 0)]))
    secret = RunDir(tmp_path).secret.read_text()
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        RunDir(tmp_path).create(spec_of("s", 1, 1, 1, 0, ENTRY, str(tmp_path), [(0, 0)]))
    assert (RunDir(tmp_path).load().run_id, RunDir(tmp_path).secret.read_text()) == ("r", secret)


def test_a_sweep_directory_that_can_not_be_made_is_named(tmp_path):
    """The error has the path and the key that moves it elsewhere."""
    (tmp_path / "file").touch()
    for attempt in (
        lambda: open_sweep(tmp_path / "file" / "sweep"),
        lambda: write(plan_in(tmp_path / "file" / "sweep"), "train"),
    ):
        with pytest.raises(RunDirectoryError, match=r"file/sweep.*hydra\.sweep\.dir"):
            attempt()


def test_of_many_runs_the_one_that_can_not_be_written_is_named(tmp_path):
    """They are written several at once; all are, where none is in the way."""
    (tmp_path / "bad" / "7").parent.mkdir()
    (tmp_path / "bad" / "7").touch()
    with pytest.raises(RunDirectoryError, match=rf"{tmp_path}/bad/7.*hydra\.sweep\.dir"):
        write(plan_in(tmp_path / "bad", runs=40), "train")
    write(plan_in(tmp_path / "good", runs=40), "train")
    runs = [RunDir(tmp_path / "good" / str(number)) for number in range(40)]
    assert len({run.load().run_id for run in runs}) == 40
    assert all(run.load().settings.nodes == NodeRange(1, 2) for run in runs)


def requests(*dirs: str, **launcher) -> list[RunRequest]:
    """Return runs of up to five nodes on this machine."""
    settings = RunSettings(NodeRange(1, 5), 1, LocalSettings(**launcher))
    return [RunRequest(Path("/s", name), settings, ENTRY) for name in dirs]


def test_two_runs_with_one_directory_are_refused(tmp_path):
    """A hydra.sweep.subdir that does not depend on the job would mix two runs."""
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir='/s/a'"):
        lay_out(requests("a", "b", "a"), tmp_path)
    assert lay_out(requests("a", "b"), tmp_path).runs


def test_more_workers_than_samples_in_a_global_batch_are_refused(tmp_path):
    """At the submission, with what would fit."""
    assert lay_out(requests("a", global_batch=5), tmp_path).runs
    with pytest.raises(ConfigError, match=r"launcher\.global_batch=4: 5 nodes .* at least 5"):
        lay_out(requests("a", global_batch=4), tmp_path)


def test_run_ids_are_unique_and_readable():
    """Two runs that start in the same second differ."""
    assert len({make_run_id("train") for _ in range(100)}) == 100
    assert make_run_id("train").startswith("train-2")
    own = Path("runs", make_run_id("train"))
    assert make_run_id("train", own) == own.name != make_run_id("other", own)


@pytest.mark.parametrize(
    ("launcher", "time_s"),
    [
        ({"time": "1:30:00"}, 5400.0),
        ({"time": "60", "dry_run": True}, None),
        ({}, None),
    ],
)
def test_a_run_knows_its_time_limit_where_it_is_sure(tmp_path, launcher, time_s):
    """Then no task asks Slurm for it; a script that is submitted by hand may be given another."""
    write(plan_in(tmp_path, launcher=SlurmSettings(**launcher)), "train")
    (pool,) = RunDir(tmp_path / "0").load().pools
    assert pool.time_s == time_s


def test_files_of_several_runs_are_written_at_a_time_where_each_takes_long(monkeypatch):
    """A file server takes its time for each; a local disk is written to by this thread alone."""
    together = threading.Barrier(3)
    writers = []

    def write_one(number):
        writers.append(threading.current_thread())
        if number and slow_s < 0:
            together.wait(60)  # or it raises: the others do not come

    for slow_s in (-1.0, 60.0):
        monkeypatch.setattr("hpc_elastic.launcher.submit._SLOW_S", slow_s)
        writers.clear()
        write_concurrently(write_one, range(4))
        assert len(set(writers)) == (4 if slow_s < 0 else 1)
