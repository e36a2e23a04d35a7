"""Runs that are not waited for: `Run` and `ElasticExecutor`, on this machine and a fake Slurm."""

import functools
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import CancelledError, as_completed
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpc_elastic
from hpc_elastic import ElasticExecutor, Run, launch
from hpc_elastic.api import RunFuture
from hpc_elastic.errors import ConfigError, RunDirectoryError, SlurmError, WorkerGroupError
from hpc_elastic.slurm.client import SlurmClient

DEADLINE_S = 60.0


def wait_for(file: str, value: str) -> str:
    """Return the value once the file exists."""
    while not Path(file).exists():
        time.sleep(0.05)
    return value


def divide(dividend: int, divisor: int = 1) -> list[int]:
    """Return both; fail as Python does for a divisor of 0."""
    return [dividend // divisor, dividend % divisor]


def by_name(value: int, *, scale: int) -> int:
    """Cannot be called by position."""
    return value * scale


def slurm_is_away(*_: object, **__: object) -> None:
    """Stand in for a query."""
    raise SlurmError("away")


def eventually(run: Run, *states: str) -> None:
    """Wait until the run is in one of the states."""
    deadline = time.monotonic() + DEADLINE_S
    while (state := run.status()) not in states:
        assert time.monotonic() < deadline, f"{run} is {state}"
        time.sleep(0.1)


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.long), "slurm"])
def settings(request, monkeypatch, tmp_path):
    """Settings of one process on one node; the work is in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two runs on a machine with one GPU
    found = {"launcher": request.param, "nproc_per_node": 1, "poll_interval_s": 0.1}
    if request.param == "slurm":
        slurm = request.getfixturevalue("fake_slurm")
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def go(tmp_path) -> Path:
    """The file that runs wait for; it exists after the test, so that they end."""
    file = tmp_path / "go"
    yield file
    file.touch()


def test_a_run_that_is_not_waited_for(settings, go, tmp_path):
    """Its state while it trains, a time-out that names it, and its values; also by its folder."""
    run = launch(wait_for, str(go), "done", wait=False, run_dir=tmp_path / "run", **settings)
    assert run.run_dir == tmp_path / "run"
    eventually(run, "training")
    with pytest.raises(TimeoutError, match="run has no result after 0 s: it is training"):
        run.result(timeout=0)
    go.touch()
    results = run.result(timeout=DEADLINE_S)
    assert (dict(results), results.run_dir, results.restarts) == ({0: "done"}, run.run_dir, 0)
    again = Run(str(tmp_path / "run"))
    assert (again.status(), dict(again.result(timeout=0))) == ("succeeded", {0: "done"})
    assert again.cancel() is False, "it has ended"
    with pytest.raises(RunDirectoryError, match="has succeeded"):
        again.resume()


@pytest.mark.long
def test_a_failed_run_raises_and_is_resumed(settings):
    """`resume` waits until the tasks of the failed generation are gone."""
    run = launch(divide, 1, 0, wait=False, max_restarts=0, **settings)
    for _ in range(2):
        with pytest.raises(WorkerGroupError, match="ZeroDivisionError"):
            run.result(timeout=DEADLINE_S)
        assert run.status() == "failed"
        run.resume("launcher.max_restarts=1")
    with pytest.raises(WorkerGroupError) as raised:
        run.result(timeout=DEADLINE_S)
    assert raised.value.failure["exception"] == "ZeroDivisionError"


@pytest.mark.long
def test_a_cancelled_run_is_resumed(settings, go):
    """Cancelled while it trains; after that it continues in the same folder."""
    run = launch(wait_for, str(go), "done", wait=False, **settings)
    eventually(run, "training")
    with pytest.raises(RunDirectoryError, match="still has tasks"):
        run.resume()
    assert run.cancel() is True
    assert run.status() == "cancelled"
    with pytest.raises(CancelledError, match="was cancelled"):
        run.result(timeout=0)
    run.resume()
    eventually(run, "training")
    go.touch()
    assert run.result(timeout=DEADLINE_S)[0] == "done"


def test_futures_complete_as_their_runs_end(settings, go):
    """Two runs at once; the value is that of rank 0, and those of all ranks are the run's."""
    with ElasticExecutor("work", **settings) as executor:
        slow = executor.submit(wait_for, str(go), "slow")
        fast = executor.submit(divide, 7, divisor=2)
        completed = as_completed([slow, fast], timeout=DEADLINE_S)
        assert next(completed) is fast
        assert (fast.result(), dict(fast.run.result())) == ([3, 1], {0: [3, 1]})
        assert not fast.running() and not slow.done()
        eventually(slow.run, "training")
        assert slow.running()
        with pytest.raises(TimeoutError, match="it is training"):
            slow.result(timeout=0)
        go.touch()
        assert next(completed).result() == "slow"
    assert {slow.run.run_dir.parent, fast.run.run_dir.parent} == {Path("work").absolute()}
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(divide, 1)


@pytest.mark.long
def test_a_cancelled_future(settings, go):
    """Also one whose run trains; a run that another process cancels completes its future too."""
    executor = ElasticExecutor(**settings)
    with executor.batch():
        mine, others, unsent = (executor.submit(wait_for, str(go), word) for word in "abc")
        assert unsent.cancel()
    with pytest.raises(RuntimeError, match="after the block"):
        assert unsent.run
    for future in (mine, others):
        eventually(future.run, "training")
    assert mine.cancel() and mine.cancelled() and mine.done()
    with pytest.raises(CancelledError):
        mine.result()
    assert Run(others.run.run_dir).cancel()
    done, _ = wait_for_futures([mine, others, unsent], timeout=DEADLINE_S)
    assert len(done) == 3 and others.cancelled()
    executor.shutdown()


@pytest.mark.long
def test_runs_of_one_map_are_one_array(settings):
    """A run that fails raises in its turn, and the others are not affected."""
    executor = ElasticExecutor("work", max_restarts=0, **settings)
    futures = executor.map_array(divide, [7, 8, 9], [2, 0, 4])
    results = [future.exception(timeout=DEADLINE_S) or future.result() for future in futures]
    assert (results[0], type(results[1]), results[2]) == ([3, 1], WorkerGroupError, [2, 1])
    (sweep,) = Path("work").iterdir()
    assert [future.run.run_dir.relative_to(sweep.absolute()).name for future in futures] == [*"012"]
    assert len(list((sweep / ".hpc_elastic").glob("array-*.json"))) == 1
    assert list(executor.map(divide, [5, 6], timeout=DEADLINE_S)) == [[5, 0], [6, 0]]
    executor.shutdown()


def test_shutdown_cancels_what_has_not_ended(settings, go, monkeypatch):
    """`cancel_futures` ends runs that train; nothing follows them then, though Slurm is away."""
    executor = ElasticExecutor(**settings)
    futures = executor.map_array(wait_for, [str(go)] * 2, "ab")
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)
    monkeypatch.setattr(SlurmClient, "tasks", slurm_is_away)
    for thread in [t for t in threading.enumerate() if t.name == "hpc_elastic-follow"]:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "it follows runs that are cancelled"


def test_calls_that_cannot_work():
    """They are refused at once, and nothing is submitted."""
    with pytest.raises(ConfigError, match=r"launcher\.patience"):
        ElasticExecutor(patience=3)
    with pytest.raises(ConfigError, match="no dry run"):
        ElasticExecutor(dry_run=True)
    executor = ElasticExecutor()
    with pytest.raises(ConfigError, match="give these parameters a position"):
        executor.submit(by_name, 1, scale=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        executor.submit(divide, 1, scale=2)
    with pytest.raises(ConfigError, match="JSON"):
        executor.submit(divide, object())
    with pytest.raises(ConfigError, match="module level"):
        executor.submit(lambda: 1)


class Trainer:
    """The form of submitit's users: an object with the arguments of the command line."""

    def __init__(self, args: Namespace, output: Path) -> None:
        self.args, self.output = args, output
        self.is_made_here = True

    def __call__(self, factor: float) -> list[object]:
        """Train."""
        return [self.args.lr * factor, list(self.args.shape), type(self.output).__name__]

    def checkpoint(self) -> None:
        """As submitit calls it, and nothing here."""
        raise AssertionError


def test_an_object_is_called_with_its_attributes(settings):
    """Its class is imported, and its attributes are written as JSON; without its __init__."""
    trainer = Trainer(Namespace(lr=0.5, shape=(2, 3)), Path("out"))
    with ElasticExecutor(**settings) as executor:
        assert executor.submit(trainer, 4).result(DEADLINE_S) == [2.0, [2, 3], "PosixPath"]


def test_an_object_whose_attributes_cannot_be_written_is_refused():
    """With the attribute's name."""
    trainer = Trainer(Namespace(lr=0.5), Path("out"))
    trainer.args.device = open
    with pytest.raises(ConfigError, match=r"Trainer\.args/device.*make other objects in the func"):
        ElasticExecutor().submit(trainer, 1)
    with pytest.raises(ConfigError, match=r"Trainer\.checkpoint.*give the object itself"):
        ElasticExecutor().submit(trainer.checkpoint)
    with pytest.raises(ConfigError, match="a state beside its attributes"):
        ElasticExecutor().submit(functools.partial(divide, 1), 2)


SCRIPT = """
from hpc_elastic import ElasticExecutor

class Adder:
    def __init__(self, to):
        self.to = to

    def __call__(self, number):
        return number + self.to

def outer(number):
    with ElasticExecutor("inner", nproc_per_node=1, agent={"warm_workers": False}) as executor:
        return executor.submit(Adder(1), number).result()

if __name__ == "__main__":
    with ElasticExecutor("outer", nproc_per_node=1, agent={"warm_workers": False}) as executor:
        print(executor.submit(outer, 3).result())
"""


def test_a_worker_submits_what_its_own_script_has(tmp_path):
    """A function and a class of a script, which has another name in a worker."""
    script = tmp_path / "nested.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "4\n", done.stdout + done.stderr


def test_a_batch_that_raises_submits_nothing(tmp_path, monkeypatch):
    """Its futures are cancelled, and the executor remains usable."""
    monkeypatch.chdir(tmp_path)
    executor = ElasticExecutor()
    with pytest.raises(LookupError), executor.batch():
        future = executor.submit(divide, 1)
        with pytest.raises(TimeoutError, match="batch"):
            future.result(timeout=0)
        raise LookupError
    assert future.cancelled()
    assert list(tmp_path.iterdir()) == []
    executor.shutdown()


class Submitted:
    """A run that was submitted, which ends only when it is cancelled; it notes that."""

    def __init__(self, path: Path) -> None:
        self.path, self.cancelled = path, False

    def cancel(self) -> bool:
        """Take note of it."""
        self.cancelled = True
        return True


@pytest.fixture
def slow_submission(tmp_path, monkeypatch):
    """An executor in the middle of a submission in another thread; what lets it go on; its run."""
    run, begun, goes_on = Submitted(tmp_path), threading.Event(), threading.Event()

    def submit(requests, *, sweep, name):
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        return [SimpleNamespace(dir=tmp_path, jobs=None)]

    monkeypatch.setattr("hpc_elastic.launcher.submit.submit", submit)
    monkeypatch.setattr("hpc_elastic.api.Run", lambda path: run)
    monkeypatch.setattr("hpc_elastic.api._follow", lambda runs, interval, futures: None)
    executor = ElasticExecutor(tmp_path / "runs")
    futures: list[RunFuture] = []
    thread = threading.Thread(target=lambda: futures.append(executor.submit(divide, 1)))
    thread.start()
    assert begun.wait(DEADLINE_S)
    yield executor, goes_on, run, futures, thread
    goes_on.set()
    thread.join()


def test_shutdown_waits_for_a_submission_in_another_thread(slow_submission):
    """Its run would train on when the program is believed to be done."""
    executor, goes_on, _, futures, thread = slow_submission
    ends = threading.Thread(target=executor.shutdown, daemon=True)
    ends.start()
    ends.join(0.3)
    assert ends.is_alive()
    goes_on.set()
    thread.join()
    ends.join(0.3)
    assert ends.is_alive(), "its run has not ended"
    futures[0].set_result(None)
    ends.join(DEADLINE_S)
    assert not ends.is_alive()


def test_a_submission_that_is_cancelled_under_way_leaves_no_run(slow_submission):
    """It has no run yet that could be cancelled."""
    executor, goes_on, run, futures, thread = slow_submission
    executor.shutdown(cancel_futures=True)
    goes_on.set()
    thread.join()
    assert futures[0].cancelled() and run.cancelled


def test_a_batch_that_outlives_the_executor_submits_nothing(tmp_path):
    """Its futures are cancelled."""
    executor = ElasticExecutor(tmp_path / "runs")
    with pytest.raises(RuntimeError, match="shut down"), executor.batch():
        future = executor.submit(divide, 1)
        executor.shutdown()
    assert future.cancelled() and not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_run(tmp_path):
    """The error names it."""
    with pytest.raises(RunDirectoryError, match=str(tmp_path)):
        Run(tmp_path)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_local_runs_end_with_their_program(tmp_path, is_awaited):
    """A run that was waited for ends quietly; the others are ended, and can be resumed."""
    script = tmp_path / "program.py"
    script.write_text(
        "import time\n"
        "from hpc_elastic import launch\n"
        "def work(word, pause_s):\n"
        "    time.sleep(pause_s)\n"
        "    return word\n"
        "if __name__ == '__main__':\n"
        f"    run = launch(work, 'a', {0 if is_awaited else 600}, run_dir='run', wait=False)\n"
        f"    print(run.result() if {is_awaited} else run)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = hpc_elastic.Run(tmp_path / "run")
    if is_awaited:
        assert (done.stderr, run.status()) == ("", "succeeded")
    else:
        assert "hpc-elastic resume" in done.stderr
        assert run.status() == "cancelled"
