"""The fake as users' tests have it: what it offers, and that nothing is left of it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from backends import eventually

from hpc_elastic.testing.fake_slurm import FakeCommandError, FakeConfig, FakeSlurm, FakeSlurmError
from hpc_elastic_testing.controller import Controller

ESCAPES = (
    "setsid sh -c 'echo $$ > {0}/session; exec sleep 600' & "
    "(env -i setsid sh -c 'echo $$ > {0}/orphan; exec sleep 600' &) ; "
    "srun -n1 sh -c 'trap \"\" TERM; echo $$ > {0}/step; exec sleep 600' & "
    "trap '' TERM; echo $$ > {0}/batch; wait; sleep 600"
)
NAMES = ("session", "orphan", "step", "batch")


def started(folder: Path) -> list[psutil.Process]:
    """Wait until all processes of the job have written their ids."""
    files = [folder / name for name in NAMES]
    eventually(lambda: all(f.exists() and f.read_text().strip() for f in files))
    return [psutil.Process(int(f.read_text())) for f in files]


def submit(slurm: FakeSlurm, folder: Path) -> None:
    """Start a job whose processes do all they can to stay."""
    slurm.run(["sbatch", "--output=/dev/null", f"--wrap={ESCAPES.format(folder)}"])


def test_nothing_is_left_after_the_block_whatever_happened(tmp_path):
    """Processes that ignore signals, have no parent or a session of their own end with it."""
    with pytest.raises(ZeroDivisionError), FakeSlurm(nodes=2) as slurm:
        folder = slurm.folder
        submit(slurm, tmp_path)
        waits = slurm.start(["sleep", "600"])
        processes = [*started(tmp_path), psutil.Process(waits.pid)]
        _ = 1 / 0
    assert not [p for p in processes if p.is_running()]
    assert not folder.exists()
    with pytest.raises(FakeSlurmError, match="with"):
        _ = slurm.env


ABANDONED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_fake_slurm import submit, started
from hpc_elastic.testing.fake_slurm import FakeSlurm
with FakeSlurm(nodes=2) as slurm:
    submit(slurm, Path(sys.argv[1]))
    started(Path(sys.argv[1]))
    print(slurm.folder, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_when_the_test_is_killed(tmp_path):
    """The controller sees that no process is left."""
    argv = [sys.executable, "-c", ABANDONED, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        folder = Path(test.stdout.readline().strip())
        processes = started(tmp_path)
        os.kill(test.pid, signal.SIGKILL)
    eventually(lambda: not folder.exists() and not any(p.is_running() for p in processes))


def test_a_cluster_is_used_by_its_methods():
    """Waiting, holding, preempting, killing and restoring, by the names of the guide."""
    with FakeSlurm(nodes=3, grace_s=0, kill_wait_s=1, requeue_hold_s=1) as slurm:
        slurm.hold_queue()
        slurm.run(["sbatch", "--exclusive", "--array=0-2", "-o", "/dev/null", "--wrap=sleep 600"])
        assert slurm.tasks("PENDING") == ["1_0", "1_1", "1_2"]
        slurm.release_queue()
        assert slurm.wait_running(3) == ["1_0", "1_1", "1_2"]
        slurm.preempt("node2", for_s=600)
        assert slurm.wait_running(2) == ["1_0", "1_2"]
        slurm.kill_node(3)
        slurm.wait_until(lambda: slurm.node_states()["node3"] == "down*", "its death is known")
        assert slurm.wait_running(1) == ["1_0"]
        slurm.restore_node(3)
        assert len(slurm.wait_running(2)) == 2
        slurm.heal_all()
        assert set(slurm.node_states().values()) == {"idle"} and not slurm.tasks()
        with pytest.raises(FakeSlurmError, match=r"4 tasks run"):
            slurm.wait_running(4, timeout_s=0.1)


def test_a_paused_node_stands_still_until_it_is_restored(tmp_path):
    """Its processes make no progress meanwhile, and go on after that."""
    log = tmp_path / "beats"
    with FakeSlurm(nodes=1) as slurm:
        beat = f"while :; do echo x >> {log}; sleep 0.05; done"
        slurm.run(["sbatch", "-o", "/dev/null", f"--wrap={beat}"])
        eventually(lambda: log.exists() and log.stat().st_size > 4)
        slurm.pause_node("node1")
        spool = str(slurm.folder / "spool")
        processes = [p for p in psutil.process_iter() if spool in " ".join(_argv(p))]
        assert processes
        eventually(lambda: all(p.status() == psutil.STATUS_STOPPED for p in processes))
        size = log.stat().st_size
        time.sleep(0.5)
        assert log.stat().st_size == size
        slurm.restore_node("node1")
        eventually(lambda: log.stat().st_size > size + 4)


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.cmdline()[:1] == ["/bin/sh"] else []
    except psutil.Error:
        return []


def test_a_cluster_that_runs_short_of_descriptors_answers_later(monkeypatch):
    """A command waits for a moment, and not for ever."""
    ours, theirs = socket.socketpair()
    answers = [OSError(24, "Too many open files"), (theirs, ""), SystemExit()]
    served = threading.Event()

    class Listener:
        def accept(self):
            answer = answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def fileno(self):
            return 3

    monkeypatch.setattr(Controller, "_serve_one", lambda *_: served.set())
    with ours, theirs, pytest.raises(SystemExit):
        Controller(None, "").serve(Listener())
    assert served.wait(60)


def test_what_the_fake_does_not_know_it_says(fake_cluster):
    """By name, and as an error: a test that passes over it would prove nothing."""
    with pytest.raises(FakeCommandError, match=r"FakeSlurm does not know --reservation") as error:
        fake_cluster.run(["sbatch", "--reservation=night", "--wrap=true"])
    assert error.value.exit_code == 255
    for argv in (["squeue", "-O", "Cluster"], ["scontrol", "reboot"], ["sinfo", "-o", "%Z"]):
        with pytest.raises(FakeCommandError, match="FakeSlurm does not know"):
            fake_cluster.run(argv)


@pytest.mark.parametrize("setting", [{"nodes": 0}, {"cpus_per_node": 0}, {"grace_s": -1}])
def test_settings_that_make_no_sense_are_refused(setting):
    """With the name and the value."""
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        FakeConfig(**setting)


def test_an_unknown_node_is_refused(fake_cluster):
    """With those that there are."""
    with pytest.raises(ValueError, match="node1 to node4"):
        fake_cluster.kill_node("node9")
