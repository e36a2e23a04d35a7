"""What is frozen of a job at submission: config, entry, provenance, run directory."""

import errno
import json
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf, base

from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.launcher.hydra_compose import SharingLoader, SweepComposer
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.launcher.prepare import (
    Prepared,
    lay_out,
    make_run_id,
    next_array,
    remove_rendered,
    require_writable,
    with_free_numbers,
    write,
    write_concurrently,
)
from hpc_elastic.launcher.sweep import (
    SharedSections,
    cached_grammar,
    freeze,
    freeze_job,
    to_yaml,
)
from hpc_elastic.launcher.user_code import (
    entry_of,
    git_state,
    parse_git_status,
    provenance,
    search_path,
)
from hpc_elastic.run.directory import Entry, RunDir, RunSpec, Submission
from hpc_elastic.slurm.parsing import Preemption

ENTRY = Entry("function", "main", script="/code/train.py")


def frozen(text: str) -> dict:
    """Return a config as it would be frozen."""
    config = OmegaConf.create(text)
    return {key: freeze(config, key) for key in config}


def test_interpolations_are_resolved_once():
    """Every rank and every requeue sees the values of the submission."""
    assert frozen("{a: '${b.c}-${b.c}', b: {c: 1, d: '${.c}'}, e: ['${b}']}") == {
        "a": "1-1",
        "b": {"c": 1, "d": 1},
        "e": [{"c": 1, "d": 1}],
    }


def test_what_only_a_node_knows_stays_an_interpolation(monkeypatch):
    """The resolver fails on the login node; the worker resolves it, and what refers to it."""
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    text = "{a: '${oc.env:SLURM_PROCID}', b: 'rank-${a}'}"
    kept = frozen(text)
    assert kept == {"a": "${oc.env:SLURM_PROCID}", "b": "rank-${a}"}
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert OmegaConf.create(to_yaml(kept)).b == "rank-3"


def test_a_reference_to_a_missing_key_is_an_error_at_submission():
    """It can never work, so it must not wait for a node to fail; the key is named."""
    with pytest.raises(ConfigError, match=r"model\.width='\$\{modle\.depth\}'"):
        frozen("{model: {width: '${modle.depth}', depth: 3}}")


def test_references_into_hydra_are_resolved_for_the_user(sweep):
    """The frozen config stands alone: the worker has no ``hydra`` node beside it."""
    loader, master = sweep
    config = loader.load_sweep_config(master, ["+file=${hydra.runtime.output_dir}/x"])
    job = freeze_job(config, 3, ENTRY)
    assert job.task["file"] == f"{job.request.dir}/x"


def test_mandatory_values_stay_missing():
    """??? is for the user's code to complain about, when it asks."""
    assert frozen("{a: '???', b: '${a}'}") == {"a": "???", "b": "${a}"}


def test_texts_that_look_like_interpolations_stay_texts():
    """An escaped dollar in a resolved value is not resolved by the reader of the frozen file."""
    written = to_yaml(frozen(r"{a: '\${x}-${k}', k: 2}"))
    assert OmegaConf.create(written).a == "${x}-2"


def test_texts_are_parsed_once():
    """The same text has the same tree; its value is looked up anew."""
    parse = base.parse
    with cached_grammar():
        assert [frozen(f"{{a: '${{k}}-${{k}}', k: {n}}}")["a"] for n in (1, 2)] == ["1-1", "2-2"]
        assert base.parse.cache_info().hits == 1
    assert base.parse is parse


@pytest.mark.parametrize("value", ["1e3", "true", "null", "0x1f", "a: b", "ä", "multi\nline", "-"])
def test_yaml_reads_back_as_it_was(value):
    """The fast writer keeps OmegaConf's quoting: a text does not become a number."""
    assert OmegaConf.create(to_yaml({"a": value})).a == value


@pytest.fixture
def sweep(tmp_path):
    """Yield Hydra's loader and the master config of a small sweep."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("width: 8\n")
    (tmp_path / "model" / "large.yaml").write_text("width: 64\n")
    (tmp_path / "config.yaml").write_text(
        "defaults: [{model: small}, {override hydra/launcher: basic}, _self_]\n"
        "lr: 0.1\nname: '${hydra:job.num}-${now:%Y}-${lr}'\nnodes: '1:4'\n"
        "nproc_per_node: 2\nlauncher: {backend: slurm, max_restarts: 1}\nopt: {a: 1}\n"
    )
    setup_globals()
    with initialize_config_dir(str(tmp_path), version_base=None):
        hydra = GlobalHydra.instance().hydra
        master = hydra.compose_config("config", ["lr=1,2"], RunMode.MULTIRUN)
        yield hydra.config_loader, master


SWEEPS = [
    [["lr=1"], ["lr=2"], ["lr=3"], ["lr=4", "+new.key=5"]],
    [["model=large", "lr=1"], ["model=large", "lr=2"], ["model=small", "lr=2"]] * 2,
    [["opt={a: 2}"], ["~opt"], ["+opt.c=3"], ["lr=3"], ["~opt.a"]] * 2,
    [["hydra.job.name=x", "lr=2"], ["lr=2"], ["++lr=3"]] * 2,
    [["opt.a=2", f"lr={n}", "+launcher.poll_interval_s=2"] for n in (1, 2, 3, 3, 4)],
    [[f"opt.a={n}", "++opt.a=9", f"+opt.b={n}"] for n in range(4)],
    [[f"lr={lr}", f"opt.a={a}"] for lr in (1, 2, 3) for a in (1, 2, 3)],
    [["opt.a=1", "++opt.a=2"], ["++opt.a=2", "opt.a=1"]] * 3,
]


@pytest.mark.parametrize("jobs", SWEEPS)
def test_shared_composition_gives_what_hydra_gives(sweep, jobs):
    """Jobs that share the merge of their groups have the config that Hydra composes for each."""
    loader, master = sweep
    composer = SweepComposer(loader, master)
    for overrides in (*jobs, *jobs):  # the sweeper validates them, then the launcher asks again
        ours = OmegaConf.to_container(composer.compose(overrides))
        assert ours == OmegaConf.to_container(loader.load_sweep_config(master, overrides))


def test_wrong_overrides_fail_as_in_hydra(sweep):
    """The short way raises Hydra's own error for a key that does not exist."""
    loader, master = sweep
    shared = SharingLoader(loader)
    for lr in range(3):
        shared.load_sweep_config(master, [f"lr={lr}"])
    with pytest.raises(Exception, match="Could not override 'lrr'") as ours:
        shared.load_sweep_config(master, ["lrr=1"])
    with pytest.raises(type(ours.value)):
        loader.load_sweep_config(master, ["lrr=1"])


def test_alike_jobs_are_not_composed_again(sweep, monkeypatch):
    """Hydra composes two configs for a choice of groups, however long the sweep; one for a job."""
    loader, master = sweep
    composed = []
    full = loader.load_sweep_config
    monkeypatch.setattr(loader, "load_sweep_config", lambda *a: composed.append(a) or full(*a))
    composer = SweepComposer(loader, master)
    assert [composer.compose(["lr=0"]).lr for _ in range(2)] == [0, 0]
    assert len(composed) == 1
    for lr in (*range(20), *range(20)):
        assert composer.compose([f"lr={lr}"]).lr == lr
    assert len(composed) == 2


def test_a_job_is_frozen_with_what_hydras_launchers_set(sweep):
    """hydra.job.num, id and output_dir are those of the job, and resolved wherever used."""
    loader, master = sweep
    composer = SweepComposer(loader, master)
    for n in range(4):
        composer.compose([f"lr={n}"])
    jobs = [freeze_job(composer.compose([f"lr={n}"]), n, ENTRY) for n in range(4)]
    names = [job.task["name"].split("-") for job in jobs]
    assert [(first, last) for first, _, last in names] == [(str(n), str(n)) for n in range(4)]
    for number, job in enumerate(jobs):
        assert (job.hydra["job"]["num"], job.hydra["job"]["id"]) == (number, str(number))
        assert job.hydra["runtime"]["output_dir"] == str(job.request.dir)
        assert "${now" not in to_yaml(job.hydra["sweep"])
        hydra = OmegaConf.create(to_yaml({"hydra": job.hydra})).hydra
        assert hydra.job_logging.handlers.file.filename.startswith(f"{job.request.dir}/")
        assert job.request.overrides == (f"lr={number}",)
        assert job.request.settings.nodes == NodeRange(1, 4)
        assert job.task["launcher"]["max_restarts"] == 1


def test_hydra_files_are_those_of_hydra(sweep, tmp_path):
    """A worker finds config.yaml, hydra.yaml and overrides.yaml as after a run of Hydra's own."""
    loader, master = sweep
    config = SweepComposer(loader, master).compose([f"hydra.sweep.dir={tmp_path}/s", "lr=7"])
    job = freeze_job(config, 0, ENTRY)
    plan = make_plan([job.request], tmp_path / "s" / ".hpc_elastic", max_array_size=9)
    write(plan, "train")
    folder = RunDir(job.request.dir).hydra
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert OmegaConf.load(folder / "config.yaml").lr == 7
    assert OmegaConf.load(folder / "hydra.yaml").hydra.runtime.output_dir == f"{tmp_path}/s/0"
    assert OmegaConf.load(folder / "overrides.yaml") == ["lr=7"]


def test_sections_that_jobs_share_are_written_as_any_other(sweep, tmp_path):
    """What is remembered from job to job makes no difference to what is frozen and written."""
    loader, master = sweep
    composer, shared = SweepComposer(loader, master), SharedSections()
    for number in range(4):
        overrides = [f"hydra.sweep.dir={tmp_path}", f"lr={number}", "hydra.mode=MULTIRUN"][
            number % 3 :
        ]
        with cached_grammar():
            job = freeze_job(composer.compose(overrides), number, ENTRY, shared)
        alone = freeze_job(loader.load_sweep_config(master, overrides), number, ENTRY)
        assert (job.task, job.hydra) == (alone.task, alone.hydra)
        text = shared.yaml(job.hydra, top="hydra")
        assert text == to_yaml({"hydra": alone.hydra})
        assert shared.yaml(job.task) == to_yaml(alone.task)
        assert yaml.safe_load(text)["hydra"]["mode"] == "MULTIRUN"  # a text, no Python object


@pytest.mark.parametrize("top", ["", "hydra"])
def test_sections_that_only_look_equal_are_told_apart(top):
    """For Python 1, 1.0 and True are equal; an empty config is none without sections."""
    shared = SharedSections()
    configs = [{"a": {"x": x}, "b": 2} for x in (1, True, 1.0, "1", None, 1)]
    for config in [*configs, {"b": [2]}, {}, configs[0]]:
        assert shared.yaml(config, top=top) == to_yaml({top: config} if top else config)


def test_hydra_can_compose_after_the_sweep(sweep):
    """Freezing leaves no global state behind."""
    loader, master = sweep
    freeze_job(loader.load_sweep_config(master, ["lr=1"]), 0, ENTRY)
    assert compose("config").lr == 0.1


def test_entry_of_a_module_function():
    """A function of a module is found by its dotted name."""
    entry = entry_of(parse_git_status, "function", [1, "a"])
    assert (entry.module, entry.script) == ("hpc_elastic.launcher.user_code", None)
    assert (entry.qualname, entry.args) == ("parse_git_status", [1, "a"])


@pytest.mark.parametrize("as_module", [False, True])
def test_entry_of_a_main_function(tmp_path, as_module):
    """A function of the script is found by the file, or by the module that `python -m` ran."""
    (tmp_path / "package").mkdir()
    script = tmp_path / "package" / "train.py"
    script.write_text(
        "from hpc_elastic.launcher.user_code import entry_of\ndef main(): pass\n"
        "import json, dataclasses\nif __name__ == '__main__':\n"
        "    print(json.dumps(dataclasses.asdict(entry_of(main, 'hydra'))))\n"
    )
    argv = ["-m", "package.train"] if as_module else [str(script)]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    entry = Entry(**json.loads(done.stdout))
    expected = (None, "package.train") if as_module else (str(script), None)
    assert (entry.script, entry.module) == expected
    assert entry.sys_path[0] == str(tmp_path if as_module else script.parent)
    assert entry.cwd == str(tmp_path)


@pytest.mark.parametrize(
    ("last", "refused"),
    [
        ("main()", True),
        ("if True:\n    main()", True),
        ("if '__main__' == __name__:\n    main()", False),
        ("__name__ == '__main__' and main()", False),
    ],
)
def test_a_script_that_would_submit_itself_again_is_refused(tmp_path, last, refused):
    """A worker imports it. The message names the line, and what to write."""
    script = tmp_path / "train.py"
    script.write_text(
        "from hpc_elastic.launcher.user_code import entry_of\n"
        f"def main():\n    print(entry_of(main, 'hydra'))\n{last}\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == refused, done.stderr
    if refused:
        assert f"line {3 + last.count('main()') + last.count('if True')}" in done.stderr
        assert 'if __name__ == "__main__"' in done.stderr


def test_functions_without_a_name_are_refused():
    """Workers import the function by name: a nested one or a lambda has none."""

    def nested():
        pass

    for function in (nested, lambda: None):
        with pytest.raises(ConfigError, match="module level"):
            entry_of(function, "function")


def test_search_path_leaves_out_what_every_interpreter_has():
    """The worker's own standard library and site-packages are not shadowed by ours."""
    assert not [p for p in search_path() if p.endswith("site-packages")]


def test_only_named_variables_are_recorded(monkeypatch):
    """The environment holds tokens; none is written down."""
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = provenance(ENTRY)["environment"]
    assert found["VIRTUAL_ENV"] == "/venv" and "AWS_SECRET_ACCESS_KEY" not in found


def test_git_state_tells_commit_and_dirt(tmp_path):
    """A commit alone does not say what ran; changes and new files count as dirt."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    assert git_state(tmp_path) is None
    for args in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *args], check=True)
    clean = git_state(tmp_path)
    assert clean and len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "new.py").touch()
    assert git_state(tmp_path)["dirty"]


def test_git_may_be_absent(tmp_path, monkeypatch):
    """A login node without git is no reason not to submit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def plan_in(sweep_dir: Path, *, launcher: SlurmSettings | None = None, runs: int = 1):
    """Return a plan for runs in a sweep directory."""
    settings = RunSettings(NodeRange(1, 2), 1, launcher or SlurmSettings())
    planned = [RunRequest(sweep_dir / str(number), settings, ENTRY) for number in range(runs)]
    return make_plan(planned, sweep_dir / ".hpc_elastic", max_array_size=100)


def test_prepare_writes_all_that_a_task_needs(tmp_path):
    """A script that is never submitted by us finds everything in its place."""
    prepared = write(plan_in(tmp_path, runs=2), "train", provenance={"user": "me"})
    specs = [RunDir(tmp_path / n).load() for n in "01"]
    assert [spec.tasks for spec in specs] == [[(0, 0), (0, 2)], [(0, 1), (0, 3)]]
    assert specs[0].run_id != specs[1].run_id
    assert (specs[0].entry, specs[0].provenance) == (ENTRY, {"user": "me"})
    for private in ("secret", "run.json"):
        assert stat.S_IMODE((tmp_path / "0" / private).stat().st_mode) == 0o600
    array = json.loads((tmp_path / ".hpc_elastic" / "array-0.json").read_text())
    assert [run["slot"] for run in array["runs"]] == [0, 0, 1, 1]
    assert prepared.scripts == (tmp_path / ".hpc_elastic" / "array-0.sbatch",)
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
    write(plan_in(tmp_path, launcher=launcher), "train", preemptions=known)
    spec = RunDir(tmp_path / "0").load()
    assert (spec.signal_delay_s, spec.preempt_signal, spec.preempt_grace_s, spec.kill_wait_s) == (
        60.0, "USR1", 90, 30,
    )  # fmt: skip
    assert (spec.max_failed_rounds, spec.max_requeues) == (5, 7)
    found = (
        spec.scale_up,
        spec.scale_up_timeout_s,
        spec.below_min_timeout_s,
        spec.interface,
        spec.coallocate_min,
    )
    assert found == ("immediate", 5.0, None, "ib0", True)
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

    def render(**settings: bool) -> Prepared:
        remove_rendered(dirs, submission)
        plan = plan_in(tmp_path, launcher=SlurmSettings(**settings), runs=2)
        return write(plan, "train")

    before = render(dry_run=True)
    remove_rendered(dirs[:1], submission)
    assert RunDir(dirs[0]).spec.exists(), "an array stays where one of its runs does"
    again = render(dry_run=True)
    assert before.scripts == again.scripts and before.run_ids != again.run_ids
    assert RunDir(dirs[1]).load().run_id == again.run_ids[1]

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

    def submit(number: int) -> Prepared:
        settings = RunSettings(NodeRange(1, 2), 1, SlurmSettings())
        run = RunRequest(tmp_path / str(number), settings, ENTRY)
        waits = [together]

        def prepare_anew() -> Prepared:
            first = next_array(tmp_path / ".hpc_elastic")
            for barrier in waits[:1]:
                barrier.wait(60)  # all have chosen the same number
            waits.clear()
            plan = make_plan(
                [run], tmp_path / ".hpc_elastic", max_array_size=100, first_array=first
            )
            return write(plan, "train")

        return with_free_numbers(prepare_anew)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(submit, range(8)))
    for number, prepared in enumerate(made):
        (array,) = prepared.plan.arrays
        tasks = json.loads((tmp_path / f".hpc_elastic/array-{array.number}.json").read_text())
        assert {task["dir"] for task in tasks["runs"]} == {str(tmp_path / str(number))}
        spec = RunDir(tmp_path / str(number)).load()
        assert spec.tasks == [(array.number, 0), (array.number, 1)]
    assert len({prepared.plan.arrays[0].number for prepared in made}) == 8


def test_of_two_that_submit_the_same_run_one_is_refused(tmp_path):
    """At the same moment: Hydra's default sweep directory is that of the second."""
    RunDir(tmp_path).create(RunSpec("r", 1, 1, 1, 0, ENTRY, str(tmp_path), [(0, 0)]))
    secret = RunDir(tmp_path).secret.read_text()
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        RunDir(tmp_path).create(RunSpec("s", 1, 1, 1, 0, ENTRY, str(tmp_path), [(0, 0)]))
    assert (RunDir(tmp_path).load().run_id, RunDir(tmp_path).secret.read_text()) == ("r", secret)


def test_a_sweep_directory_that_can_not_be_made_is_named(tmp_path):
    """The error has the path and the key that moves it elsewhere."""
    (tmp_path / "file").touch()
    for attempt in (
        lambda: require_writable(tmp_path / "file" / "sweep"),
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
    assert all(run.settings.exists() for run in runs)


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


@pytest.mark.parametrize(
    ("launcher", "time_s"),
    [
        ({"time": "1:30:00"}, 5400.0),
        ({"time": 60, "sbatch": {"time": "2"}}, 120.0),
        ({"time": 60, "sbatch": {"time-min": "1"}}, None),
        ({"time": 60, "dry_run": True}, None),
        ({}, None),
    ],
)
def test_a_run_knows_its_time_limit_where_it_is_sure(tmp_path, launcher, time_s):
    """Then no task asks Slurm for it; a script that is submitted by hand may be given another."""
    write(plan_in(tmp_path, launcher=SlurmSettings(**launcher)), "train")
    assert RunDir(tmp_path / "0").load().time_s == time_s


def test_files_of_several_runs_are_written_at_a_time_where_each_takes_long(monkeypatch):
    """A file server takes its time for each; a local disk is written to by this thread alone."""
    together = threading.Barrier(3)
    writers = []

    def write_one(number):
        writers.append(threading.current_thread())
        if number and slow_s < 0:
            together.wait(60)  # or it raises: the others do not come

    for slow_s in (-1.0, 60.0):
        monkeypatch.setattr("hpc_elastic.launcher.prepare._SLOW_S", slow_s)
        writers.clear()
        write_concurrently(write_one, range(4))
        assert len(set(writers)) == (4 if slow_s < 0 else 1)
