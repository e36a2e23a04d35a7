"""The worker's entry: what it imports, what it returns, what it reports when it fails."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_elastic.agent.worker_failures import (
    NodeIdentity,
    WorkerFiles,
    describe,
    earliest,
    told_exit_code,
)
from hpc_elastic.agent.worker_main import load_function, to_json
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.log_entry import Failure, is_secondary
from hpc_elastic.run.directory import Entry, RunDir, RunSpec
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.worker.shared_page import DIRECTORY_VARIABLE, SharedPage

SCRIPT = """
import os, sys

def add(a, b):
    return a + b

def fail(_):
    raise ValueError("boom from the user's code")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def mute(_):
    raise Mute

def leave(_):
    sys.exit("no data here")

def crash(_):
    os.kill(os.getpid(), 11)

def goodbye():
    import atexit, threading, time
    atexit.register(print, "registered")
    threading.Thread(target=lambda: (time.sleep(0.3), print("threaded"))).start()
    print("returned", end=" ")

def train():
    return [train_once() for _ in range(3)]

def train_once():
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()
    return len(list(Path("/proc/self/task").iterdir()))

def who():
    return [__name__, __file__, sys.argv]

def talk():
    import logging
    print("to standard output")
    logging.warning("to standard error")
    sys.stdout.flush()
    return sys.stdout.encoding

def frozen():
    import gc
    return gc.get_freeze_count() > 1000

def exit_with(code):
    sys.exit(code)

def exit_hard(code):
    os._exit(code)

def exit_after_peer():
    try:
        raise RuntimeError("Connection closed by peer [10.0.0.1]")
    except RuntimeError:
        sys.exit(1)

def exit_in_thread():
    import threading
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()

def exit_at_exit(code):
    import atexit
    atexit.register(os._exit, code)

def fork_and_exit():
    if os.fork() == 0:
        return "of the child"
    os.wait()
    os._exit(0)

def fork_and_return():
    if os.fork() == 0:
        sys.exit(3)
    os.wait()
    return "of the parent"

def import_late(name, after_step):
    import hpc_elastic, importlib
    if after_step:
        hpc_elastic.report(step=after_step)
    importlib.import_module(name)

def locate(name):
    try:
        import_late(name, 0)
    except Exception as e:
        raise ValueError(f"Error locating target {name}") from e

if __name__ == "__main__":
    raise SystemExit("the main block must not run")
"""


class Job:
    """A run directory with one script, and its worker as a real process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.page = SharedPage.create(folder, 0)

    def worker(
        self, qualname: str, args: list[object], sys_path: Sequence[str] = (), **outputs: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a worker to its end; its output is captured, unless another one is given."""
        entry = Entry(
            "function", qualname, str(self.script), args=args, cwd=str(self.folder),
            sys_path=list(sys_path),
        )  # fmt: skip
        run = RunDir(self.folder / "run")
        run.create(RunSpec("r", 1, 1, 1, 0, entry, "", [(0, 0)], agent=AgentSettings()))
        env = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "HPC_ELASTIC_ROUND": "1",
            "TORCHELASTIC_ERROR_FILE": str(self.files.error),
            DIRECTORY_VARIABLE: str(self.folder),
        }  # fmt: skip
        argv = [sys.executable, "-m", "hpc_elastic.agent.worker_main", str(run.path)]
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **outputs}
        return subprocess.run(argv, env=env, text=True, timeout=300, **outputs)

    @property
    def files(self) -> WorkerFiles:
        """Where the worker leaves its failure."""
        return WorkerFiles(self.folder, 1, 3)

    def failure(self, exit_code: int) -> dict:
        """What the agent makes of it."""

        class Ended:
            local_rank, exitcode = 0, exit_code

        place = NodeIdentity("7_1", "node2", self.folder)
        return describe(Ended, self.files, place, self.page.read())


@pytest.fixture
def job(tmp_path) -> Job:
    """A job in a fresh directory."""
    return Job(tmp_path)


def test_the_return_value_is_kept_by_rank(job):
    """What the function returns is in the round's results."""
    done = job.worker("add", [2, 3])
    assert done.returncode == 0, done.stderr
    assert json.loads((job.folder / "run/results/round-1/rank-0.json").read_text()) == 5


def test_the_script_is_loaded_as_a_spawned_child_would(job):
    """Its main block does not run, and it sees its own file and arguments."""
    job.worker("who", [])
    value = json.loads((job.folder / "run/results/round-1/rank-0.json").read_text())
    assert value == ["__mp_main__", str(job.script), [str(job.script)]]


def test_output_that_can_not_be_written_ends_no_script(job):
    """The disk of the logs is full, or its server returns an error: the text is lost."""
    with Path("/dev/full").open("w") as full:
        done = job.worker("talk", [], stdout=full, stderr=full)
    assert done.returncode == 0
    value = json.loads((job.folder / "run/results/round-1/rank-0.json").read_text())
    assert value.lower() == "utf-8"
    done = job.worker("talk", [])
    assert "to standard output" in done.stdout and "to standard error" in done.stderr


def test_imports_are_no_garbage(job):
    """What was imported is not looked through again and again while the script trains."""
    assert job.worker("frozen", []).returncode == 0
    assert json.loads((job.folder / "run/results/round-1/rank-0.json").read_text()) is True


def test_an_exception_is_reported_with_the_users_frames_only(job):
    """Class, message and traceback reach the report; our own frames do not."""
    done = job.worker("fail", [0])
    failure = job.failure(done.returncode)
    assert (failure["exception"], failure["rank"], failure["host"]) == ("ValueError", 3, "node2")
    assert failure["message"] == "boom from the user's code"
    assert "in fail" in failure["traceback"] and "worker.py" not in failure["traceback"]
    assert failure["exit_code"] == 1 and failure["phase"] == "run"
    assert "boom from the user's code" in done.stderr


def test_an_exception_without_a_text_is_reported_all_the_same(job):
    """A class of the user's may fail to say what it is: that hides neither it nor its place."""
    failure = job.failure(job.worker("mute", [0]).returncode)
    assert failure["exception"].endswith("Mute") and failure["exit_code"] == 1
    assert failure["message"] == "<exception str() failed>"
    assert "in mute" in failure["traceback"] and "worker.py" not in failure["traceback"]


def test_what_a_script_leaves_for_its_end_is_done(job):
    """Threads are waited for, then exit handlers run, and nothing printed is lost."""
    done = job.worker("goodbye", [])
    assert (done.returncode, done.stdout.split()) == (0, ["returned", "threaded", "registered"])


def test_a_process_group_is_not_destroyed_while_the_script_holds_the_lock(job):
    """Its threads live until the process ends, though the script has let go of it."""
    done = job.worker("train", [])
    assert done.returncode == 0, done.stderr
    threads = json.loads((job.folder / "run/results/round-1/rank-0.json").read_text())
    second, third = (after - before for before, after in pairwise(threads))
    assert second == third > 0


def test_sys_exit_with_a_message_is_a_failure_with_that_message(job):
    """`sys.exit("why")` is how scripts give up."""
    done = job.worker("leave", [0])
    assert done.returncode == 1 and "no data here" in job.failure(1)["message"]


def test_a_signal_is_reported_by_name(job):
    """A crash leaves no exception: the signal is named."""
    done = job.worker("crash", [0])
    failure = job.failure(done.returncode)
    assert (failure["signal"], failure["exit_code"]) == ("SIGSEGV", None)


def test_a_report_of_a_large_node_fits_into_one_frame(tmp_path):
    """However many workers fail, and whatever they say, the leader hears of the earliest."""

    class Ended:
        local_rank, exitcode = 0, 1

    place = NodeIdentity("7_1", "node2", tmp_path)
    found = []
    for rank in range(128):
        files = WorkerFiles(tmp_path, 1, rank)
        told = {"message": "\u00e4" * 99_999, "traceback": "\u00e4" * 99_999, "time": rank}
        files.error.write_text(json.dumps({"hpc_elastic": told}))
        found.append(describe(Ended, files, place))
    report = earliest(found)
    assert [f["rank"] for f in report] == list(range(len(report)))
    FrameSigner(b"key", "client").seal({"type": "failed", "round": 1, "failures": report})


def test_a_missing_module_is_an_import_failure(job):
    """What fails before the function is entered is marked so."""
    job.script.write_text("import nosuchmodule\n")
    done = job.worker("add", [1, 2])
    failure = job.failure(done.returncode)
    assert failure["phase"] == "import" and "nosuchmodule" in failure["message"]


@pytest.mark.parametrize(
    ("name", "args", "phase"),
    [
        ("import_late", ["nosuchmodule", 0], "import"),
        ("import_late", ["broken", 0], "import"),
        ("import_late", ["broken", 7], "run"),
        ("locate", ["broken"], "import"),
        ("fail", [0], "run"),
    ],
)
def test_an_import_that_fails_before_the_first_step_is_an_import_failure(job, name, args, phase):
    """Of whatever error, in the function too: another try would not change it."""
    (job.folder / "broken.py").write_text("import json\njson.nosuch\n")
    done = job.worker(name, args, sys_path=[str(job.folder)])
    assert (done.returncode, job.failure(1)["phase"]) == (1, phase), done.stderr


@pytest.mark.parametrize(
    ("name", "args", "exit_code", "how"),
    [
        ("exit_with", [0], 0, "exited with code 0 before its function returned"),
        ("exit_with", [None], 0, "exited with code 0 before its function returned"),
        ("exit_with", [256], 0, "exited with code 0 before its function returned"),
        ("exit_with", [7], 7, "exited with code 7 before its function returned"),
        ("exit_hard", [0], 0, "exited with code 0 before its function returned"),
        ("fork_and_exit", [], 0, "exited with code 0 before its function returned"),
        ("exit_at_exit", [3], 3, "exited with code 3 after its function had returned"),
    ],
)
def test_an_exit_is_told_as_what_it_is(job, name, args, exit_code, how):
    """An exit code of 0 does not say that the function returned; the control page does."""
    done = job.worker(name, args)
    assert done.returncode == exit_code, done.stderr
    failure = job.failure(exit_code)
    assert (failure["message"], failure["exception"]) == (how, None)
    assert job.page.read().returned is ("had returned" in how)
    assert ("return from the function" in (failure["remedy"] or "")) is (exit_code == 0)
    if name == "exit_with":
        assert told_exit_code(job.files) == exit_code and "in exit_with" in failure["traceback"]


@pytest.mark.parametrize("name", ["exit_in_thread", "fork_and_return"])
def test_an_exit_that_is_not_the_workers_changes_nothing(job, name):
    """Of a thread, or of a process that the function has forked."""
    done = job.worker(name, [])
    assert done.returncode == 0 and job.page.read().returned, done.stderr
    assert told_exit_code(job.files) is None


def test_an_exit_because_of_a_lost_peer_is_a_consequence(job):
    """Many scripts catch an error of a collective, and exit."""
    done = job.worker("exit_after_peer", [])
    failure = job.failure(done.returncode)
    assert failure["message"].endswith("while it handled RuntimeError: Connection closed by peer "
                                       "[10.0.0.1]")  # fmt: skip
    fields = {name: value for name, value in failure.items() if name != "age_s"}
    assert is_secondary(Failure(time=0.0, **fields))


def test_a_step_that_is_known_is_told(job):
    """It helps to find the place."""
    job.page.report(5, None, None)
    assert job.failure(0)["message"] == "exited with code 0 at step 5 before its function returned"


def test_a_function_that_is_not_there_is_named(job):
    """The error says which function which script lacks."""
    with pytest.raises(HpcElasticError, match="no function 'nosuch'"):
        load_function(Entry("function", "nosuch", str(job.script), cwd=str(job.folder)))


def test_tensors_and_arrays_come_back_as_numbers():
    """A loss tensor is a float, a vector a list."""
    assert json.loads(to_json({"loss": torch.tensor(0.5), "v": torch.arange(2)})) == {
        "loss": 0.5,
        "v": [0, 1],
    }


def test_a_value_that_can_not_be_sent_back_says_what_can():
    """A model is refused with a remedy, not pickled."""
    with pytest.raises(TypeError, match=r"torch.nn.*Linear.*return numbers"):
        to_json(torch.nn.Linear(1, 1))


def test_a_worker_may_be_ended_by_a_signal_without_a_name(tmp_path):
    """Real-time signals have none; the agent does not end for it."""
    failure = SimpleNamespace(local_rank=0, exitcode=-40)
    told = describe(failure, WorkerFiles(tmp_path, 1, 0), NodeIdentity("7_1", "node2", tmp_path))
    assert (told["signal"], told["message"]) == ("signal 40", "ended by signal 40")
