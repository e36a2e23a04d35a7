"""Runs of this machine that are submitted, cancelled, resumed and cleaned from outside."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from disks import full, mounted
from group import eventually

from helps import not_in_help
from hpc_elastic.checkpoint.owner import tag
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import read_events
from hpc_elastic.slurm.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))
PAUSE = "time.sleep(cfg.pause_s)"
NOBODY = 65534


FOLLOWING = (
    ("logs", "last", "--follow"), ("events", "last", "--follow"),
    ("status", "last", "--watch"), ("wait", "last"),
)  # fmt: skip
"""What goes on until the run has ended; no result is written when it is cancelled."""
AS_NOBODY = f"""
import os, sys
import hpc_elastic.cli.checkpoints, hpc_elastic.cli.control
import hpc_elastic.checkpoint.store, hpc_elastic.launcher.control
import hpc_elastic.launcher.detach
from hpc_elastic.cli.main import main
os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main(sys.argv[1:]))
"""
"""All is imported before: another user may not read this user's Python."""


def as_nobody(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Call the command as a user who may do next to nothing; it has to fail."""
    argv = [sys.executable, "-c", AS_NOBODY, *map(str, args)]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done


class Runs:
    """A folder with train.py, which makes pauses until it is told to hurry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (ROOT / "train.py").read_text()
        assert PAUSE in text
        hurry = f"os.path.exists({str(folder / 'hurry')!r})"
        (folder / "train.py").write_text(text.replace(PAUSE, f"time.sleep(0 if {hurry} else 0.1)"))
        shutil.copy(ROOT / "train.yaml", folder)
        self.run = folder / "sweep" / "0"
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}

    def call(self, *args: str | Path, code: int = 0, **options) -> subprocess.CompletedProcess[str]:
        """Call the command; it has to return this exit code."""
        done = subprocess.run(
            [COMMAND, *args], cwd=self.folder, env=self.env, text=True, capture_output=True,
            timeout=180, stdin=subprocess.DEVNULL, **options,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Call the command, and let it run."""
        return subprocess.Popen(
            [COMMAND, *args], cwd=self.folder, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def submit(self, *overrides: str) -> dict:
        """Submit a sweep; return what is told of it."""
        argv = ["submit", "--json", "train.py", f"hydra.sweep.dir={self.folder / 'sweep'}"]
        (told,) = json.loads(self.call(*argv, "save_every_s=1", *overrides).stdout)
        return told

    def events(self, kind: str) -> list[dict]:
        """The events of a kind of the first run."""
        folder = self.run / "events"
        return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []

    def steps(self) -> list[int]:
        """The steps of the checkpoints that there are, oldest first."""
        return sorted(int(f.name[5:]) for f in (self.run / "checkpoints").glob("step-*"))

    def ends(self) -> dict:
        """Let the run come to its end, its processes too, and return its result."""
        (self.folder / "hurry").touch()
        eventually((self.run / "result.json").exists, within_s=120)
        run = RunDir(self.run)
        eventually(lambda: not Scheduler(run, run.load()).list_live_tasks(), within_s=60)
        return json.loads((self.run / "result.json").read_text())


@pytest.fixture
def runs(tmp_path):
    """Runs of train.py in a fresh folder; no process of theirs outlives the test."""
    made = Runs(tmp_path)
    yield made
    for process in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def processes_of(folder: Path) -> list[int]:
    """The processes that have a folder's name in their command line."""
    listed = psutil.process_iter(["cmdline"])
    return [p.pid for p in listed if any(str(folder) in a for a in p.info["cmdline"] or ())]


def test_a_run_is_cancelled_resumed_cleaned_and_ends_without_a_sample_lost(runs):
    """On two nodes, then on one; meanwhile old checkpoints go, and the one that it needs stays."""
    told = runs.submit("nodes=2", "epochs=10")
    run_id = told["runs"][0]["run_id"]
    eventually(lambda: len(runs.steps()) > 1, within_s=120)
    assert (
        "goes on"
        in runs.call("checkpoints", "prune", run_id, "--keep-last", "0", "--yes", code=1).stderr
    )
    assert "still has tasks" in runs.call("resume", run_id, code=1).stderr
    watchers = [runs.start(*argv) for argv in FOLLOWING]
    text = runs.call("cancel", run_id).stdout
    assert "2 running" in text and "hpc-elastic resume" in text
    for watcher in watchers:
        said = watcher.communicate(timeout=120)[0]
        assert watcher.returncode == 1 and "cancelled by" in said, said
    eventually(lambda: not psutil.pid_exists(told["pid"]), within_s=60)
    assert not processes_of(runs.folder)
    assert "was cancelled already by" in runs.call("cancel", "last").stdout
    verified = json.loads(runs.call("checkpoints", "verify", run_id, "--json").stdout)
    saved = max(v["step"] for v in verified)

    refused = runs.call("resume", run_id, "lr=1", code=1).stderr
    assert refused.startswith("hpc-elastic: lr=1: the config of a run is frozen")
    resumed = json.loads(runs.call("resume", run_id, "nodes=1", "--json").stdout)
    assert resumed["generation"] == 1 and Path(resumed["log"]).exists()
    assert not not_in_help("resume", resumed)
    eventually(lambda: max(runs.steps()) > saved, within_s=120)
    cleaned = json.loads(
        runs.call("checkpoints", "prune", run_id, "--keep-last", "1", "--json").stdout
    )
    assert cleaned["left"] == [] and cleaned["freed_bytes"] > 0 and len(cleaned["kept"]) == 1
    assert not not_in_help("checkpoints prune", cleaned)
    assert runs.ends()["status"] == "succeeded"
    assert [e["kind"] for e in runs.events("cancel") + runs.events("resume")] == [
        "cancel",
        "resume",
    ]
    assert [e["nodes"] for e in runs.events("round")] == [2, 1]
    proof = json.loads(runs.call("audit", run_id, "--json").stdout)
    assert all(p["holds"] and p["replayed_steps"] == 0 for p in proof.values())
    assert "has ended already: it succeeded" in runs.call("cancel", run_id).stdout
    assert "has succeeded" in runs.call("resume", run_id, code=1).stderr


@pytest.mark.long
def test_a_run_whose_processes_were_all_killed_is_resumed(runs):
    """The launcher, the agents and the workers: what was not saved is made again, once."""
    told = runs.submit("nodes=2", "epochs=4")
    eventually(lambda: runs.steps(), within_s=120)
    for pid in (told["pid"], *processes_of(runs.folder)):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes_of(runs.folder), within_s=30)
    assert "no task that runs or waits" in runs.call("cancel", "last").stdout
    runs.call("resume", "last")
    assert runs.ends()["status"] == "succeeded"
    assert all(p["holds"] for p in json.loads(runs.call("audit", "last", "--json").stdout).values())


@pytest.mark.long
def test_checkpoints_are_kept_by_what_is_in_them(runs):
    """A damaged one is never kept in place of a good one; leftovers go with the old ones."""
    runs.submit("nodes=1", "epochs=2")
    runs.ends()
    checkpoints = runs.run / "checkpoints"
    newest = runs.steps()[-1]
    for step in (newest + 1, newest + 2):
        shutil.copytree(checkpoints / f"step-{newest:08d}", checkpoints / f"step-{step:08d}")
    staging = checkpoints / f".staging-step-9-r1u{tag(RunDir(runs.run).load().run_id)}-0"
    staging.mkdir()
    (staging / "part").write_bytes(bytes(1000))
    argv = ["checkpoints", "prune", "last", "--keep-last", "1", "--json"]
    told = json.loads(runs.call(*argv, "--dry-run").stdout)
    assert told["kept"] == [newest] and set(told["damaged"]) == {str(newest + 1), str(newest + 2)}
    assert newest in runs.steps() and staging.exists()
    done = json.loads(runs.call(*argv).stdout)
    assert [r["folder"] for r in done["removed"]] == [r["folder"] for r in told["removed"]]
    assert runs.steps() == [newest, newest + 1, newest + 2]
    assert not list(checkpoints.glob(".staging*")) and not list(checkpoints.glob(".trash*"))
    assert "--yes" in runs.call("checkpoints", "prune", "last", "--keep-last", "0", code=2).stderr
    runs.call("checkpoints", "prune", "last", "--keep-last", "0", "--yes")
    assert runs.steps() == []


def test_a_script_that_fails_is_named_with_its_exit_code(runs):
    """Nothing is submitted; for scripts the error is on standard output, and nothing else."""
    (runs.folder / "broken.py").write_text("import hydra, sys\nprint('noise')\nsys.exit(7)\n")
    done = runs.call("submit", "--json", "broken.py", code=1)
    assert json.loads(done.stdout)["error"]["code"] == "script-error"
    assert "noise" in done.stderr and "broken.py ended with exit code 7" in done.stderr
    (runs.folder / "nothing.py").write_text("import hydra\nprint('done')\n")
    assert "without submitting a run" in runs.call("submit", "nothing.py", code=1).stderr
    wrong = runs.call("submit", "train.py", "nodes=0", code=1)
    assert "nodes" in wrong.stderr and "Traceback" not in wrong.stderr
    assert "does not exist" in runs.call("submit", "missing.py", code=2).stderr


@pytest.mark.long
def test_a_run_of_somebody_else_is_refused_and_left_alone(runs):
    """Another user is told whose it is; the folder of a sweep of several runs names them."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    runs.submit("nodes=1", "epochs=2", "lr=0.1,0.05")
    eventually(lambda: runs.events("round"), within_s=120)
    for folder in (runs.folder, *runs.folder.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    for argv in (["cancel"], ["resume"], ["checkpoints", "prune", "--keep-last", "1"]):
        done = as_nobody(*argv, runs.run)
        assert done.stderr.startswith("hpc-elastic: ") and "Permission denied" in done.stderr
        assert "Traceback" not in done.stderr
        several = runs.call(*argv, runs.folder / "sweep", code=1)
        assert "holds 2 runs" in several.stderr
    assert not (runs.run / "cancelled.json").exists()
    runs.call("cancel", runs.run, "--yes")
    runs.call("cancel", runs.folder / "sweep" / "1", "--yes")


@pytest.mark.long
def test_a_full_disk_stops_no_cancellation_and_spoils_no_resume(tmp_path):
    """A run can be ended all the same; it is resumed once there is room, from where it was."""
    with mounted(tmp_path / "disk", "64m") as disk:
        runs = Runs(disk)
        runs.env["XDG_STATE_HOME"] = str(tmp_path / "state")
        runs.submit("nodes=1", "epochs=4")
        eventually(lambda: runs.steps(), within_s=120)
        with full(disk):
            done = runs.call("cancel", runs.run)
            assert "cannot be written (No space left on device)" in done.stderr
            eventually(lambda: not processes_of(disk), within_s=60)  # the launcher looks on a while
            refused = runs.call("resume", runs.run, code=1)
            assert "No space left on device" in refused.stderr, refused.stderr
            assert "Traceback" not in refused.stderr
        runs.call("resume", runs.run)
        assert runs.ends()["status"] == "succeeded"
        eventually(lambda: not processes_of(disk), within_s=60)
