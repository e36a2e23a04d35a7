"""The command hpc-elastic, and the programmatic launch."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_elastic
from arrays import GONE, run_of, write_table
from helps import command_names
from hpc_elastic.cli.main import main
from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings
from hpc_elastic.errors import (
    ConfigError,
    RunDirectoryError,
    SlurmCommandError,
    WorkerGroupError,
)
from hpc_elastic.launcher import local
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.launcher.run_handle import LocalView, find_submission, read_handles
from hpc_elastic.launcher.submit import write
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, RunDir, Submission

ROOT = Path(__file__).parents[2]
FAKE_TASK = Path(__file__).parent / "fake_task.py"
DRY_RUN = ("-m", "hpc_elastic", "submit", "--dry-run")


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the clone on its path."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


def words(text: str) -> set[str]:
    """The words of a text, such as a help that is to name keys."""
    return set(re.findall(r"\w+", text))


@pytest.fixture
def script(tmp_path):
    """Return a user's Hydra script that prints something of its own."""
    path = tmp_path / "train.py"
    path.write_text(
        "import hydra\n"
        "@hydra.main(version_base=None, config_path=None)\ndef main(cfg): pass\n"
        "print('noise of the user')\n"
        "if __name__ == '__main__': main()\n"
    )
    return path


@pytest.fixture
def no_slurm(tmp_path):
    """A PATH without Slurm: rendering needs none."""
    return {"PATH": str(tmp_path / "empty")}


HELPS = """
import os, sys
from hpc_elastic.cli.main import main
for name in sys.argv[1:]:
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main([*name.split(), "--help"])
        print(name, *sys.modules, sep=",", file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""
BASE = {
    "hpc_elastic", "hpc_elastic._util", "hpc_elastic.errors", "hpc_elastic.cli",
    "hpc_elastic.cli.main", "hpc_elastic.cli.options",
}  # fmt: skip
MORE = {
    "run": {"config", "config.schema"},
    **{name: {"_console", "report", "rich", "run"} for name in ("status", "list")},
    "logs": {"slurm", "slurm.nodelist"},
    "init": {
        "run", "shared_files", "slurm", "slurm.client", "slurm.environment",
        "slurm.job_state", "slurm.nodelist", "slurm.parsing",
    },
}  # fmt: skip
"""Modules of ours, and Rich, that the help of a command needs beside its own."""
HEAVY = {
    "asyncio", "hydra", "importlib.metadata", "jinja2", "msgspec", "numpy", "omegaconf", "psutil",
    "rich", "socket", "submitit", "torch", "yaml",
}  # fmt: skip
MOST_MODULES, WITH_RICH = 200, 270
"""Of all packages together; Python's own differ between its versions."""


def test_the_help_of_a_command_imports_what_it_shows(tmp_path):
    """A login node answers at once; what a command needs is imported when it runs."""
    names = list(command_names())
    done = python("-c", HELPS, "", *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split(",") for line in done.stderr.splitlines()]
    assert [name for name, *_ in lines] == ["", *names]
    for name, *modules in lines:
        ours = {module for module in modules if module.startswith("hpc_elastic")}
        more = {f"hpc_elastic.{module}" for module in MORE.get(name, set()) - {"rich"}}
        own = {module for module in ours if module.startswith("hpc_elastic.cli.")} - BASE - more
        assert ours == BASE | more | own and len(own) == bool(name), name
        assert not (HEAVY - (MORE.get(name, set()) & {"rich"})) & set(modules), name
        assert len(modules) <= (WITH_RICH if "rich" in modules else MOST_MODULES), name


def test_submission_imports_no_torch(script, tmp_path, no_slurm):
    """From the overrides to the batch script, torch is not touched."""
    run = ["train.py", "+launcher=slurm", "nodes=1:2", "launcher.dry_run=true"]
    done = python("-X", "importtime", *run, cwd=tmp_path, **no_slurm)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hpc_elastic.launcher.sweep" in names and done.returncode == 0
    assert "torch" not in names


def test_a_dry_run_prints_the_script_and_nothing_else(script, tmp_path, no_slurm):
    """Standard output can be piped to sbatch; notes, and the user's own prints, go elsewhere."""
    render = [*DRY_RUN, "train.py", "+launcher=slurm", "nodes=1:2"]
    done = python(*render, "hydra.sweep.dir=out", cwd=tmp_path, **no_slurm)
    assert done.returncode == 0
    assert done.stdout == (tmp_path / "out/.hpc_elastic/array-0.sbatch").read_text()
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH ")
    assert "noise of the user" in done.stderr
    assert (tmp_path / "out" / "0" / "run.json").exists()
    assert not list(tmp_path.rglob("*.jobid"))


def test_a_dry_run_of_several_arrays_needs_a_directory(script, tmp_path, no_slurm):
    """Runs with different resources are different scripts: -o takes them all."""
    render = [*DRY_RUN, "train.py", "+launcher=slurm", "nodes=1"]
    two = [*render, "launcher.partition=gpu,cpu"]
    refused = python(*two, cwd=tmp_path, **no_slurm)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "-o DIR" in refused.stderr
    written = python(*two, "hydra.sweep.dir=out", "-o", "scripts", cwd=tmp_path, **no_slurm)
    assert (written.returncode, written.stdout) == (0, "")
    names = sorted(path.name for path in (tmp_path / "scripts").iterdir())
    assert names == ["array-0.sbatch", "array-1.sbatch"]


def test_a_dry_run_tells_scripts_what_each_would_submit(script, tmp_path, no_slurm, capsys):
    """Several scripts need no directory then; where one is given, the copies are named."""
    render = [*DRY_RUN, "--json", "train.py", "+launcher=slurm", "nodes=1:3"]
    two = [*render, "hydra.sweep.dir=out", "launcher.partition=gpu,cpu"]
    told = json.loads(python(*two, cwd=tmp_path, **no_slurm).stdout)
    assert len(told) == 2
    for number, entry in enumerate(told):
        assert entry["script"] == str(tmp_path / f"out/.hpc_elastic/array-{number}.sbatch")
        assert (entry["sweep"], entry["tasks"]) == (str(tmp_path / "out"), 3)
        ((run_id, run),) = [run.values() for run in entry["runs"]]
        assert (
            run == str(tmp_path / "out" / str(number)) and RunDir(Path(run)).load().run_id == run_id
        )
    assert main(["submit", "--help"]) == 0
    assert {*told[0], *told[0]["runs"][0]} <= words(capsys.readouterr().out)
    copied = python(*render, "hydra.sweep.dir=2", "-o", "scripts", cwd=tmp_path, **no_slurm)
    (entry,) = json.loads(copied.stdout)
    assert entry["script"] == str(tmp_path / "scripts" / "array-0.sbatch")
    assert entry["runs"][0]["run"] == str(tmp_path / "2" / "0")


def test_a_dry_run_without_slurm_launcher_says_what_is_missing(script, tmp_path):
    """launcher=local has no batch script."""
    render = [*DRY_RUN, "train.py", "+launcher=local", "nodes=1"]
    done = python(*render, cwd=tmp_path)
    assert done.returncode == 1 and "launcher=slurm" in done.stderr


def test_a_dry_run_hands_on_the_failure_of_the_script(tmp_path):
    """The user's own error is shown, and how the script ended is named."""
    render = [*DRY_RUN, "--json", "train.py"]
    (tmp_path / "train.py").write_text("import hydra\nraise SystemExit(7)")
    done = python(*render, cwd=tmp_path)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (1, "script-error")
    assert "exit code 7" in error["message"]
    assert python(*render[:-2], "train.py", cwd=tmp_path).stdout == ""
    (tmp_path / "train.py").write_text("import hydra, os\nos.kill(os.getpid(), 9)")
    done = python(*render, cwd=tmp_path)
    assert done.returncode == 1 and "ended with signal 9" in done.stderr


def test_a_script_without_hydra_is_named_the_command_that_runs_it(tmp_path):
    """Before it is run: it would take no overrides, or train in the foreground."""
    (tmp_path / "plain.py").write_text("import argparse, torch\nopen('ran', 'w')")
    given = ["+launcher=slurm", "launcher.partition=gpu", "--lr", "0.1"]
    done = python("-m", "hpc_elastic", "submit", "plain.py", *given, cwd=tmp_path)
    typed = "hpc-elastic run --detach launcher=slurm launcher.partition=gpu -- python plain.py"
    assert done.returncode == 2 and f"{typed} --lr 0.1\n" in done.stderr
    assert not (tmp_path / "ran").exists()
    (tmp_path / "plain.py").write_text("import mine\nopen('ran', 'w')")
    (tmp_path / "mine.py").write_text("import hydra")
    assert python("-m", "hpc_elastic", "submit", "plain.py", cwd=tmp_path).returncode == 1
    assert (tmp_path / "ran").exists()


def test_a_script_of_an_installed_package_that_requires_hydra_is_run(tmp_path):
    """The script itself does not name Hydra: its package does, as installed."""
    (tmp_path / "train.py").write_text("import installed\nopen('ran', 'w')")
    site = tmp_path / "site-packages"
    (site / "installed").mkdir(parents=True)
    (site / "installed" / "__init__.py").touch()
    (site / "installed-1.dist-info").mkdir()
    needs = "Metadata-Version: 2.1\nName: installed\nVersion: 1\nRequires-Dist: hydra-core>=1.3\n"
    (site / "installed-1.dist-info" / "RECORD").write_text("installed/__init__.py,,\n")
    path = f"{ROOT}{os.pathsep}{site}"
    for ran, data in ((True, needs), (False, needs.replace(">=1.3", "; extra == 'all'"))):
        (tmp_path / "ran").unlink(missing_ok=True)
        (site / "installed-1.dist-info" / "METADATA").write_text(data)
        python("-m", "hpc_elastic", "submit", "train.py", cwd=tmp_path, PYTHONPATH=path)
        assert (tmp_path / "ran").exists() == ran


def test_wait_wants_a_sweep_directory(tmp_path, capsys):
    """A folder that is none, or from which nothing was submitted, is named."""
    assert main(["wait", str(tmp_path)]) == 1
    assert f"{tmp_path} is not a sweep directory" in capsys.readouterr().err
    (tmp_path / ".hpc_elastic").mkdir()
    assert main(["wait", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("was never submitted\n")
    script = tmp_path / ".hpc_elastic" / "array-0.sbatch"
    script.touch()
    assert main(["wait", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"was never submitted; to submit it: sbatch {script}\n")


@pytest.fixture
def sweep(tmp_path):
    """A local sweep of two runs that was submitted by another process."""
    settings = RunSettings(NodeRange(1, 2), 1, LocalSettings())
    entry = Entry("function", "main", module="x")
    planned = [RunRequest(tmp_path / name, settings, entry) for name in "01"]
    plan = make_plan(planned, tmp_path / ".hpc_elastic", max_array_size=1000)
    write(plan, "train")
    (tmp_path / ".hpc_elastic" / "array-0.jobid").write_text("7\n")
    return tmp_path


def test_wait_finds_the_runs_and_their_tasks(sweep):
    """All that is needed lies in the sweep directory."""
    (sweep / "0" / ".hydra").mkdir()
    (sweep / "0" / ".hydra" / "overrides.yaml").write_text("[launcher=local, lr=0.1]\n")
    runs = read_handles(sweep / ".hpc_elastic")
    assert isinstance(runs[0].jobs, LocalView)
    assert [(run.dir.name, run.label, run.tasks) for run in runs] == [
        ("0", "lr=0.1", ("7_0", "7_2")),
        ("1", "", ("7_1", "7_3")),
    ]


def test_a_run_directory_stands_for_its_sweep(sweep):
    """It is what people have at hand."""
    assert find_submission(sweep / "0") == find_submission(sweep) == sweep / ".hpc_elastic"


def test_wait_for_a_sweep_with_a_file_missing(sweep):
    """A half-deleted sweep directory is told as such."""
    (sweep / ".hpc_elastic" / "array-0.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"array-0\.json"):
        read_handles(sweep / ".hpc_elastic")


def test_wait_leaves_out_runs_that_were_removed(sweep, capsys):
    """The others can be waited for all the same; a sweep without any is told as such."""
    shutil.rmtree(sweep / "0")
    (sweep / "1" / "result.json").write_text('{"status": "succeeded"}')
    assert main(["wait", str(sweep)]) == 0
    assert "their directories were removed: 0" in capsys.readouterr().err
    shutil.rmtree(sweep / "1")
    assert main(["wait", str(sweep)]) == 1
    assert "has no runs left" in capsys.readouterr().err


def test_wait_shows_and_tells_how_runs_ended(sweep, capsys):
    """The exit code is 1 if a run failed, and its failure is printed."""
    (sweep / "0" / "result.json").write_text('{"status": "succeeded"}')
    failure = {"host": "n9", "exit_code": 3}
    (sweep / "1" / "result.json").write_text(json.dumps({"status": "failed", "failure": failure}))
    assert main(["wait", str(sweep)]) == 1
    assert "a worker on n9: exit code 3" in capsys.readouterr().out


def test_wait_tells_scripts_how_runs_ended(sweep, capsys):
    """Standard output has the outcomes, and nothing else; what people see goes to the other."""
    results = sweep / "0" / "results" / "round-1"
    results.mkdir(parents=True)
    for rank, value in enumerate(["0.5", '{"loss": NaN}']):
        (results / f"rank-{rank}.json").write_text(value)
    result = {"status": "succeeded", "restarts": 1, "results": "results/round-1"}
    (sweep / "0" / "result.json").write_text(json.dumps(result))
    failed = {"status": "failed", "failure": {"host": "n9", "exit_code": 3}}
    (sweep / "1" / "result.json").write_text(json.dumps(failed))
    assert main(["wait", "--json", str(sweep)]) == 1
    out, err = capsys.readouterr()
    good, bad = json.loads(out)
    assert good == {
        "run_id": RunDir(sweep / "0").load().run_id, "run": str(sweep / "0"),
        "status": "succeeded", "values": {"0": 0.5, "1": {"loss": None}}, "restarts": 1,
        "error": None,
    }  # fmt: skip
    assert (bad["status"], bad["values"], bad["restarts"]) == ("failed", {}, 0)
    assert "a worker on n9: exit code 3" in bad["error"] and "a worker on n9: exit code 3" in err
    assert "[0]: succeeded" in err and "runs in" in err
    assert main(["wait", "--help"]) == 0
    assert set(good) <= words(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["list"], 0),
        (["list", "--json"], 0),
        (["status", "nowhere"], 1),
        (["status", "nowhere", "--json"], 1),
        (["status"], 2),
        (["list", "--json", "--limit", "0"], 2),
        (["status", "last", "--jason"], 2),
        (["status", "last", "--jason", "--json"], 2),
        (["lst", "--json"], 2),
        (["list", "--limit", "0"], 2),
        ([], 2),
    ],
)
def test_exit_codes_are_as_the_help_says(argv, code, capsys):
    """Done, failed, wrong arguments; what fails with --json says so as JSON too."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code != 0)
    if code and "--json" in argv:
        (error,) = json.loads(out).values()
        assert error["code"] == {1: "run-directory-error", 2: "usage-error"}[code]
        assert error["message"] in err and error["remedy"] and error["key"] is None
    elif code == 1:
        assert out == ""
    main(["--help"])
    assert re.search(rf"^    {code}  +\w", capsys.readouterr().out, re.MULTILINE)


def test_an_interrupted_command_exits_with_130(monkeypatch, capsys):
    """As a shell would say of it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_elastic.run.registry.newest_first", interrupt)
    assert main(["list"]) == 130
    main(["--help"])
    assert re.search("^    130  interrupted", capsys.readouterr().out, re.MULTILINE)


def test_a_foreign_local_launch_is_looked_at_and_left_alone(sweep):
    """Waiting does not own the processes."""
    tasks = {
        "7_0": {"state": "RUNNING", "pid": 1, "started": 1, "host": "elsewhere"},
        "7_1": {"state": "ENDED", "pid": 2, "started": 1, "exit_code": 1},
    }
    write_table(Submission(sweep / ".hpc_elastic"), **tasks)
    view = LocalView(sweep / ".hpc_elastic", ["7"])
    assert {name: state.state for name, state in view.list_tasks().items()} == {
        "7_0": "RUNNING",
        "7_1": "FAILED",
    }
    assert "hpc-elastic wait" in view.release()


def test_wait_ends_though_the_launcher_was_killed(tmp_path, capsys):
    """With the exit code of a run that has no result, and its last words."""
    run = run_of(tmp_path, "17", [(0, 0)], launcher="local")
    submission = Submission(tmp_path / ".hpc_elastic")
    write_table(submission, **{"17_0": {"state": "RUNNING", "pid": GONE, "launcher": GONE}})
    submission.array(0).tasks.write_text(json.dumps({"runs": [{"dir": str(run.path)}]}))
    assert main(["wait", str(run.path), "--poll-interval-s", "0.2"]) == 1
    assert "the run ended without a result" in capsys.readouterr().out


def plan_of_a_function(value):
    """Stand for a user's function; the fake task never calls it."""


@pytest.fixture
def fake_agent(monkeypatch):
    """Start the stand-in in place of the agent."""
    monkeypatch.setattr(
        local, "task_command", lambda array_file: [sys.executable, str(FAKE_TASK), str(array_file)]
    )


QUICK = {"nodes": "1:2", "nproc_per_node": 1, "poll_interval_s": 0.05}


def test_launch_returns_results_by_global_rank(tmp_path, fake_agent):
    """As torch's elastic_launch does; the arguments are in run.json, as JSON."""
    result = hpc_elastic.launch(plan_of_a_function, {"lr": 0.1}, run_dir=tmp_path / "r", **QUICK)
    assert dict(result) == {0: 0.5, 1: 1.5}
    assert (result[0], len(result), result.restarts) == (0.5, 2, 1)
    entry = json.loads((result.run_dir / "run.json").read_text())["entry"]
    assert (entry["kind"], entry["args"]) == ("function", [{"lr": 0.1}])
    assert entry["qualname"] == "plan_of_a_function"


def test_launch_raises_the_first_failure(tmp_path, fake_agent):
    """The error has the record of the worker that failed first."""
    with pytest.raises(WorkerGroupError, match=r"rank 3 \(local rank 1\) on n3") as failed:
        hpc_elastic.launch(
            plan_of_a_function, 1, run_dir=tmp_path / "r", env={"PLOT": "fail"}, **QUICK
        )
    assert failed.value.failure["rank"] == 3


@pytest.mark.parametrize(
    ("args", "settings", "key"),
    [
        ([1, object()], {}, "args/1"),
        ([1], {"max_restart": 1}, "launcher.max_restart"),
        ([1], {"nodes": "4:1"}, "nodes"),
    ],
)
def test_launch_refuses_what_can_not_work(tmp_path, args, settings, key):
    """Before anything is written, and by the name of the argument."""
    with pytest.raises(ConfigError) as refused:
        hpc_elastic.launch(plan_of_a_function, *args, run_dir=tmp_path / "r", **settings)
    assert refused.value.key == key
    assert not (tmp_path / "r").exists()


def test_launch_refuses_a_lambda(tmp_path):
    """Workers could not import it."""
    with pytest.raises(ConfigError, match="module level"):
        hpc_elastic.launch(lambda: None, run_dir=tmp_path / "r")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["render", "train.py"],
            "no such command: render. Did you mean `hpc-elastic submit --dry-run`?",
        ),
        (["stauts"], "no such command: stauts. Did you mean `hpc-elastic status`?"),
        (["verify", "last"], "Did you mean `hpc-elastic checkpoints verify`?"),
        (["when", "train.py"], "Did you mean `hpc-elastic submit --test-only`?"),
        (["watch"], "Did you mean `hpc-elastic report --live`?"),
        (["node", "kil"], "no such command: kil. Did you mean `hpc-elastic node kill`?"),
        (["frobnicate"], "no such command: frobnicate\n"),
        (["status", "--wacth", "x"], "--watch"),
    ],
)
def test_a_misspelt_command_or_option_is_answered_with_the_near_one(argv, words, capsys):
    """As a wrong argument."""
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_run_is_answered_with_the_near_one(tmp_path, monkeypatch, capsys):
    """And with how to list them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    registry.add({"train-20300131-120000-abcd": run_of(tmp_path, "17", [(0, 0)]).path})
    assert main(["status", "train-20300131-120000-abce"]) == 1
    told = capsys.readouterr().err
    assert "(did you mean 'train-20300131-120000-abcd'?)" in told and "hpc-elastic list" in told
    assert main(["status", "lst"]) == 1
    assert "(did you mean 'last'?)" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["logs", str(tmp_path / "file")]) == 1
    assert "is not a directory; give a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "key", "remedy"),
    [
        (ConfigError("nodes", 0, "give one or more"), "config-error", "nodes", "give one or more"),
        (SlurmCommandError(["squeue"], 1, "down"), "slurm-command-error", None, "scontrol ping"),
        (FileNotFoundError(2, "none", "f"), "os-error", None, "check the path"),
    ],
)
def test_an_error_has_a_code_and_a_remedy_as_json(error, code, key, remedy, monkeypatch, capsys):
    """Its text is on standard error too."""

    def fail():
        raise error

    monkeypatch.setattr(registry, "newest_first", fail)
    assert main(["list", "--json"]) == 1
    out, err = capsys.readouterr()
    (told,) = json.loads(out).values()
    assert (told["code"], told["key"]) == (code, key) and remedy in told["remedy"]
    assert told["message"] in err


@pytest.mark.parametrize(
    "argv", [["checkpoints", "prune", "last", *more] for more in (["--keep-last", "0"], [])]
)
def test_nothing_is_asked_without_a_terminal(argv, tmp_path, monkeypatch):
    """The option that confirms it is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, "7", [(0, 0), (0, 1)], "mine")
    registry.add({"mine": run.path})
    done = subprocess.run(
        [sys.executable, "-m", "hpc_elastic", *argv], cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and ("--yes" in done.stderr or "--keep-last" in done.stderr)
    assert not run.cancelled.exists()
