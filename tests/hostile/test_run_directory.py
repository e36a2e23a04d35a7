"""A run directory that a stranger has made, or may write: nothing is done to what it names."""

import contextlib
import dataclasses
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from strangers import STRANGER

from ended import sleeping
from hpc_elastic.api import Run
from hpc_elastic.checkpoint.manifest import MANIFEST, Manifest
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.cli.main import main
from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import RunDirectoryError, UntrustedRunError
from hpc_elastic.launcher import batch_script, optuna_sweep
from hpc_elastic.run import ownership
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.shared_files import make_folder
from hpc_elastic.slurm.environment import as_array_task
from hpc_elastic.slurm.local_queue import start_ticks
from hpc_elastic.slurm.scheduler import Scheduler
from hpc_elastic.testing.fake_slurm import FakeSlurm
from specs import set_launcher, spec_of, started_run


def make_run(
    sweep: Path, *, job: str = "7", launcher: str = "local", script: str = "f.py"
) -> RunDir:
    """Make a run of one task."""
    submission = Submission(sweep / ".hpc_elastic")
    make_folder(submission.path, parents=True)
    array = submission.array(0)
    array.submitted_as(job)
    run = RunDir(sweep / "run")
    array.tasks.write_text(json.dumps({"runs": [{"dir": str(run.path), "slot": 0}]}))
    entry = Entry("function", "f", script)
    spec = spec_of("r", 1, 1, 1, 0, entry, str(submission.path), [(0, 0)], launcher=launcher)
    started_run(run, spec)
    return run


def give_away(folder: Path) -> None:
    """Give a folder and all in it to the stranger: he could have made it the same."""
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def name_process(run: RunDir, pid: int) -> None:
    """Let the table of a local launcher name a process as the run's task."""
    entry = {
        "state": "RUNNING", "pid": pid, "started": start_ticks(pid), "exit_code": None,
        "host": os.uname().nodename, "launcher": None, "launcher_started": None, "node": "local-0",
    }  # fmt: skip
    submission = Submission(run.path.parent / ".hpc_elastic")
    submission.local_tasks.write_text(json.dumps({"7_0": entry}))


def save_steps(directory: Path, *steps: int) -> None:
    """Write what counts as good checkpoints, without files."""
    for step in steps:
        folder = Store(directory).folder(step)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(Manifest(1, step, 1, 0.0, (), {}, {}, {}).to_json())


@pytest.fixture
def theirs(open_folder) -> RunDir:
    """A run of the stranger's."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    run = make_run(open_folder / "theirs")
    give_away(open_folder / "theirs")
    return run


@pytest.fixture
def mine(tmp_path) -> RunDir:
    """A run of the user's own, with no task left."""
    return make_run(tmp_path / "sweep")


COMMANDS = [
    ["cancel", "RUN", "--yes"], ["resume", "RUN"],
    ["checkpoints", "prune", "RUN", "--keep-last", "1"], ["node", "kill", "RUN", "local-0"],
    ["node", "preempt", "RUN", "local-0"],
]  # fmt: skip


def called(command: list[str], run: RunDir, *options: str) -> int:
    """Call a command on a run."""
    return main([str(run.path) if word == "RUN" else word for word in (*command, *options)])


# ---- whose it is


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_acts_on_a_strangers_run(command, theirs, capsys):
    """Root's neither: the message has the path, its owner and mode, and what to do."""
    before = sorted(theirs.path.rglob("*"))
    assert called(command, theirs) == 1
    text = capsys.readouterr().err
    assert f"{theirs.path} belongs to another user (owner {STRANGER}, mode 0755)" in text
    assert "--trust" in text and sorted(theirs.path.rglob("*")) == before
    called(command, theirs, "--trust")
    assert "belongs to another user" not in capsys.readouterr().err
    assert not ownership.is_trusting(), "for one command only"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_no_command_acts_on_a_run_that_others_may_write(command, mode, mine, capsys):
    """Whoever may write it could have put anything there; the remedy is named, and works."""
    mine.path.chmod(mode)
    assert called(command, mine) == 1
    text = capsys.readouterr().err
    assert f"mode {mode:04o}" in text and f"chmod -R go-w {mine.path}" in text
    subprocess.run(["chmod", "-R", "go-w", mine.path], check=True)
    called(command, mine)
    assert "may be written by others" not in capsys.readouterr().err


def test_python_programs_are_refused_the_same(theirs, monkeypatch):
    """And trust by the environment."""
    with pytest.raises(UntrustedRunError, match="HPC_ELASTIC_TRUST=1"):
        Run(theirs.path).cancel()
    with pytest.raises(UntrustedRunError):
        Run(theirs.path).resume()
    monkeypatch.setenv("HPC_ELASTIC_TRUST", "1")
    assert Run(theirs.path).cancel() is False


def test_the_submission_counts_as_well(mine, capsys):
    """It has the job ids and the pids."""
    (mine.path.parent / ".hpc_elastic").chmod(0o777)
    assert called(["cancel", "RUN", "--yes"], mine) == 1
    assert ".hpc_elastic may be written by others" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.json", "secret", "rdzv", "settings.json"])
def test_what_a_stranger_has_put_into_a_run_counts(name, mine, open_folder, capsys):
    """The directory was open once; a file that he owns he may change for ever."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    mine.settings.write_text("{}")
    os.chown(mine.path / name, STRANGER, STRANGER)
    assert called(["resume", "RUN"], mine) == 1
    assert f"{mine.path / name} belongs to another user" in capsys.readouterr().err


def test_a_strangers_hard_link_brings_nothing_into_his_run(theirs, stranger, open_folder, capsys):
    """The file is the user's, and the directory is not."""
    precious = open_folder / "precious.json"
    precious.write_text("{}")
    precious.chmod(0o666)
    link = "import os, sys; os.link(sys.argv[1], sys.argv[2])"
    done = stranger(link, precious, theirs.settings)
    assert not done.returncode, done.stderr
    assert called(["resume", "RUN"], theirs) == 1
    assert "belongs to another user" in capsys.readouterr().err
    assert precious.read_text() == "{}" and precious.stat().st_nlink == 2


def test_a_server_that_changes_owners_is_no_stranger(mine, monkeypatch):
    """root_squash, all_squash: what this process writes there has that owner, too."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    give_away(mine.path.parent)
    with pytest.raises(UntrustedRunError):
        ownership.load_own(mine)
    monkeypatch.setattr(ownership, "_own_uid_in", lambda *_: STRANGER)
    assert ownership.load_own(mine).run_id == "r"


# ---- pids and job ids


def test_a_strangers_table_ends_no_process(theirs, capsys):
    """Nor if he is trusted: the process is no agent of the run."""
    with sleeping() as process:
        name_process(theirs, process.pid)
        assert called(["cancel", "RUN", "--yes"], theirs) == 1
        assert called(["cancel", "RUN", "--yes"], theirs, "--trust") == 1
        assert f"names process {process.pid} as task 7_0, but it is" in capsys.readouterr().err
        assert called(["node", "kill", "RUN", "local-0"], theirs, "--trust") == 1
        assert process.poll() is None and not theirs.cancelled.exists()


def test_the_agent_of_another_run_is_no_task_of_this_one(mine, tmp_path):
    """Its start time is right, and it is an agent."""
    other = make_run(tmp_path / "other")
    with sleeping(Submission(tmp_path / "other/.hpc_elastic").array(0).tasks) as process:
        name_process(mine, process.pid)
        with pytest.raises(RunDirectoryError, match="nothing was ended"):
            Scheduler(mine, mine.load()).kill_task("7_0")
        assert process.poll() is None
        name_process(other, process.pid)
        Scheduler(other, other.load()).kill_task("7_0")
        process.wait(20)


@pytest.fixture
def slurm(monkeypatch):
    """A Slurm, for the commands called here."""
    with FakeSlurm(nodes=1) as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        yield slurm


def submit(slurm: FakeSlurm, script: Path, *lines: str, piped: bool = False) -> str:
    """Submit an array of one task that sleeps; return its job id."""
    script.write_text("\n".join(["#!/bin/bash", "#SBATCH --array=0", *lines, "sleep 600", ""]))
    options = ["--parsable", "-D", str(script.parent)]
    if piped:
        with script.open() as text:
            done = subprocess.run(
                ["sbatch", *options], stdin=text, env=slurm.env, capture_output=True, text=True
            )
        assert not done.returncode, done.stderr
        return done.stdout.strip()
    return slurm.run(["sbatch", *options, str(script)]).stdout.strip()


def test_a_strangers_jobid_file_cancels_no_job(slurm, theirs, tmp_path, capsys):
    """Nor if he is trusted, nor in a run of the user's own: the job is another one; it is named."""
    job = submit(slurm, tmp_path / "precious.sh", "#SBATCH --job-name=precious")
    own = make_run(tmp_path / "sweep", job=job, launcher="slurm")
    for run in theirs, own:
        set_launcher(run, "slurm")
        Submission(run.path.parent / ".hpc_elastic").array(0).job_id_file.write_text(job)
    assert called(["cancel", "RUN", "--yes"], theirs) == 1
    for run, options in (theirs, ["--trust"]), (own, []):
        assert called(["cancel", "RUN", "--yes"], run, *options) == 1
        text = capsys.readouterr().err
        assert f"names job {job}, which is `precious`" in text and f"scancel {job}" in text
    assert slurm.tasks("RUNNING", "PENDING") and not own.cancelled.exists()


@pytest.mark.parametrize("how", ["as written", "a copy", "from a pipe"])
def test_jobs_of_the_run_are_cancelled_however_they_were_submitted(slurm, mine, tmp_path, how):
    """By hand as well, see launcher.dry_run: a copy of the script runs the same array."""
    array = Submission(mine.path.parent / ".hpc_elastic").array(0)
    lines = [f"#SBATCH --job-name='r s'\n#SBATCH --chdir={array.stem.parent}", f": {array.tasks}"]
    if how == "a copy":
        job = submit(slurm, tmp_path / "copy.sbatch", *lines)
    else:
        job = submit(slurm, array.script, *lines, piped=how == "from a pipe")
    array.job_id_file.write_text(job)
    set_launcher(mine, "slurm")
    assert called(["cancel", "RUN", "--yes"], mine) == 0
    assert not slurm.tasks("RUNNING", "PENDING")


# ---- links


@pytest.fixture
def precious(tmp_path) -> Path:
    """Checkpoints of another run of the user's."""
    save_steps(tmp_path / "precious", 1, 2, 3)
    return tmp_path / "precious"


def prune(run: RunDir, *options: str) -> int:
    """Remove all checkpoints of a run but the newest."""
    return main(["checkpoints", "prune", str(run.path), "--keep-last", "1", *options])


def test_a_strangers_link_removes_no_checkpoint(theirs, precious, capsys):
    """Which leads from his run to another one of the user's."""
    theirs.checkpoints.symlink_to(precious)
    os.chown(theirs.checkpoints, STRANGER, STRANGER, follow_symlinks=False)
    assert prune(theirs) == 1 and Store(precious).steps() == [3, 2, 1]


def test_a_link_that_a_stranger_has_left_in_an_own_run_is_not_followed(mine, precious):
    """The directory was open, and is not any more."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    mine.checkpoints.symlink_to(precious)
    os.chown(mine.checkpoints, STRANGER, STRANGER, follow_symlinks=False)
    assert prune(mine) == 1 and Store(precious).steps() == [3, 2, 1]


def test_an_own_link_to_a_strangers_folder_is_not_followed(mine, precious, capsys):
    """He decides what is in it."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    os.chown(precious, STRANGER, STRANGER)
    mine.checkpoints.symlink_to(precious)
    assert prune(mine) == 1 and Store(precious).steps() == [3, 2, 1]
    assert f"{precious} belongs to another user" in capsys.readouterr().err
    assert prune(mine, "--trust") == 0 and Store(precious).steps() == [3]


def test_a_strangers_step_in_own_checkpoints_is_not_touched(mine, precious):
    """Of all that a command removes the owner is known."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    mine.checkpoints.symlink_to(precious)
    os.chown(Store(precious).folder(1), STRANGER, STRANGER)
    assert prune(mine) == 1 and Store(precious).steps() == [3, 2, 1]


def test_an_own_link_to_scratch_is_followed(mine, precious):
    """Users have their checkpoints on another file system."""
    mine.checkpoints.symlink_to(precious)
    assert prune(mine) == 0 and Store(precious).steps() == [3]
    assert main(["checkpoints", "verify", str(mine.path)]) == 0


def test_set_aside_links_are_not_emptied(tmp_path, precious):
    """A save deletes what was set aside; a link of such a name leads elsewhere."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".trash-1").symlink_to(Store(precious).folder(1))
    list(Store(tmp_path / "checkpoints").empty_trash())
    assert (Store(precious).folder(1) / MANIFEST).exists()


# ---- how folders are made


@contextlib.contextmanager
def umask(mask: int):
    """Have another umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_a_run_is_its_users_whatever_the_umask(mask, open_folder, stranger):
    """A stranger cannot replace its secret and its script."""
    with umask(mask):
        run = make_run(open_folder / "sweeps" / "1")
    folders = [path for path in (open_folder / "sweeps").rglob("*") if path.is_dir()]
    assert len(folders) > 5 and not any(path.stat().st_mode & 0o022 for path in folders)
    replace = "import os, sys; os.unlink(sys.argv[1]); open(sys.argv[1], 'w')"
    for file in run.secret, run.spec:
        assert "PermissionError" in stranger(replace, file).stderr and file.exists()
    assert ownership.load_own(run).run_id == "r"


def test_a_folder_that_was_made_before_is_taken_for_the_run(tmp_path):
    """By the user under another umask, or by Hydra; not if another user made it."""
    for name in "run", "run/rdzv":
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o2775)
    ownership.claim(tmp_path / "run", tmp_path / "run/rdzv", tmp_path / "run/missing")
    assert stat.S_IMODE((tmp_path / "run/rdzv").stat().st_mode) == 0o2755
    assert not (tmp_path / "run/missing").exists()
    if not os.geteuid():
        os.chown(tmp_path / "run", STRANGER, STRANGER)
        with pytest.raises(UntrustedRunError):
            ownership.claim(tmp_path / "run")
        with pytest.raises(UntrustedRunError), optuna_sweep._only_launcher(_strangers(tmp_path)):
            pass


def _strangers(folder: Path) -> Path:
    (folder / "study/.hpc_elastic").mkdir(parents=True)
    os.chown(folder / "study/.hpc_elastic", STRANGER, STRANGER)
    return folder / "study"


def test_folders_keep_the_group_of_the_folder_around_them(tmp_path):
    """As in a project's folder, where the group may read."""
    tmp_path.chmod(0o2775)
    with umask(0o002):
        make_folder(tmp_path / "a" / "b", parents=True)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o2755
    ownership.require_own(tmp_path / "a", tmp_path / "a" / "b")


def default_acl(folder: Path, uid: int) -> None:
    """Let another user write all that is made in a folder."""
    entries = [(1, 7, -1), (2, 7, uid), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_default", value)
    except OSError as e:
        pytest.skip(f"no ACL on this file system: {e}")


def test_an_acl_of_the_user_is_kept(open_folder, stranger):
    """The users in the ACL may write to the run, and the commands work."""
    default_acl(open_folder, STRANGER)
    run = make_run(open_folder / "sweep")
    write = "import sys; open(sys.argv[1], 'w')"
    assert not stranger(write, run.path / "note").returncode
    assert ownership.load_own(run).run_id == "r"
    run.path.chmod(0o777)
    with pytest.raises(UntrustedRunError, match="written by others"):
        ownership.load_own(run)


def test_a_strangers_acl_is_not_kept(open_folder, stranger):
    """A folder that the user makes in his would be his, too."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    (open_folder / "theirs").mkdir()
    default_acl(open_folder / "theirs", STRANGER)
    os.chown(open_folder / "theirs", STRANGER, STRANGER)
    run = make_run(open_folder / "theirs" / "sweep")
    write = "import sys; open(sys.argv[1], 'w')"
    for folder in run.path, run.rdzv:
        assert "PermissionError" in stranger(write, folder / "note").stderr


# ---- agents and workers


SCRIPT = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
def f():
    pass
"""


@pytest.fixture
def opened(tmp_path) -> RunDir:
    """A run that others may write; its script leaves a file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = make_run(tmp_path / "sweep", script=str(tmp_path / "script.py"))
    run.path.chmod(0o777)
    return run


def test_a_task_executes_nothing_that_others_may_write(opened, tmp_path):
    """Its log has the reason; it ends, and nothing starts it again."""
    array = Submission(tmp_path / "sweep/.hpc_elastic").array(0).tasks
    environment = {**os.environ, **as_array_task(7, 0, node_name="n", cpus=1)}
    argv = [sys.executable, "-m", "hpc_elastic.agent", str(array)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"{opened.path} may be written by others" in done.stderr
    assert not (tmp_path / "executed").exists() and not opened.tasks.exists()


def test_a_worker_executes_nothing_that_others_may_write(opened, tmp_path):
    """The directory may have been opened since its agent has started."""
    environment = {**os.environ, "RANK": "0", "HPC_ELASTIC_RESULTS": "r"}
    argv = [sys.executable, "-m", "hpc_elastic.agent.worker_main", str(opened.path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode and "may be written by others" in done.stderr
    assert not (tmp_path / "executed").exists()


def test_trust_reaches_the_tasks(opened, tmp_path):
    """Also where Slurm gives them no environment: by their command line."""
    script = batch_script.Script(SlurmSettings(), "n", 1, tmp_path, 0, "python", tmp_path)
    assert "--trust" not in batch_script.task_argv(script)
    trusted = batch_script.task_argv(dataclasses.replace(script, trusting=True))
    assert trusted[-2:] == ["--trust", str(script.array_file)]
    opened.result.write_text("{}")
    array = Submission(tmp_path / "sweep/.hpc_elastic").array(0).tasks
    environment = {**os.environ, **as_array_task(7, 0, node_name="n", cpus=1)}
    argv = [sys.executable, "-m", "hpc_elastic.agent", "--trust", str(array)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "the run has ended; nothing to do" in done.stdout


# ---- ordinary runs


TRAINING = """
import sys
import torch
from hpc_elastic import Checkpointer, launch

def train(fails):
    checkpointer = Checkpointer({"model": torch.nn.Linear(1, 1)})
    for step in range(1, 4):
        checkpointer.save(step)
    checkpointer.close()
    if fails:
        raise ValueError("as planned")

if __name__ == "__main__":
    launch(train, len(sys.argv) > 2, run_dir=sys.argv[1], nproc_per_node=1, max_restarts=0)
"""


@pytest.mark.long
@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_ordinary_runs_work_under_such_an_umask(mask, tmp_path, capsys):
    """With checkpoints on a file system of their own, and an existing folder: all commands."""
    (tmp_path / "train.py").write_text(TRAINING)
    with umask(mask):
        (tmp_path / "runs").mkdir()
        run = RunDir(tmp_path / "runs/7")
        run.path.mkdir()
        make_folder(tmp_path / "scratch")
        run.checkpoints.symlink_to(tmp_path / "scratch")
        argv = [sys.executable, "train.py", str(run.path), "fails"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "as planned" in done.stderr, done.stderr
        folders = [run.path, *(path for path in run.path.rglob("*") if path.is_dir())]
        assert not [path for path in folders if path.stat().st_mode & 0o022]
        files = [path for path in run.path.rglob("*") if path.is_file()]
        open_to_others = {path.suffix for path in files if path.stat().st_mode & 0o002}
        assert open_to_others <= {".log", ".out", ".err", ".lock"}, "the script's own output"
        assert main(["checkpoints", "verify", str(run.path)]) == 0
        assert main(["checkpoints", "export", str(run.path), "-o", str(tmp_path / "model.pt")]) == 0
        assert prune(run) == 0 and Store(tmp_path / "scratch").steps() == [3]
        assert main(["cancel", str(run.path)]) == 0
        assert main(["resume", str(run.path), "--json"]) == 0
        assert main(["wait", str(run.path)]) == 1  # it fails again
        assert "belongs to" not in capsys.readouterr().err
