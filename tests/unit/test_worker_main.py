"""The worker's entry: what it imports, what it returns, what it reports when it fails."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hpc_elastic.agent.worker_failures import (
    EndedWorker,
    NodeIdentity,
    WorkerFiles,
    describe,
    earliest,
    told_exit_code,
)
from hpc_elastic.agent.worker_main import after_import, load_function, to_json
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

    def value(self) -> object:
        """What the function returned."""
        return json.loads((self.folder / "run/results/round-1/rank-0.json").read_text())

    @property
    def files(self) -> WorkerFiles:
        """Where the worker leaves its failure."""
        return WorkerFiles(self.folder, 1, 3)

    def failure(self, exit_code: int) -> dict:
        """What the agent makes of it."""
        place = NodeIdentity("7_1", "node2", self.folder)
        return describe(EndedWorker(0, exit_code), self.files, place, self.page.read())


@pytest.fixture
def job(tmp_path) -> Job:
    """A job in a fresh directory."""
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [
        ("add", [2, 3], 5),
        ("who", [], ["__mp_main__", "SCRIPT", ["SCRIPT"]]),
        ("frozen", [], True),
    ],
)
def test_what_the_function_returns_is_kept_by_rank(job, name, args, value):
    """A script is loaded as a spawned child would; what it imported is no garbage."""
    done = job.worker(name, args)
    assert done.returncode == 0, done.stderr
    assert job.value() == json.loads(json.dumps(value).replace("SCRIPT", str(job.script)))


def test_output_that_can_not_be_written_ends_no_script(job):
    """The disk of the logs is full, or its server returns an error: the text is lost."""
    with Path("/dev/full").open("w") as full:
        done = job.worker("talk", [], stdout=full, stderr=full)
    assert done.returncode == 0
    value = job.value()
    assert value.lower() == "utf-8"
    done = job.worker("talk", [])
    assert "to standard output" in done.stdout and "to standard error" in done.stderr


@pytest.mark.parametrize(
    ("name", "exception", "message"),
    [
        ("fail", "ValueError", "boom from the user's code"),
        ("mute", "__mp_main__.Mute", "<exception str() failed>"),
    ],
)
def test_an_exception_is_reported_with_the_users_frames_only(job, name, exception, message):
    """Class, message, if it has one, and traceback reach the report; our own frames do not."""
    done = job.worker(name, [0])
    failure = job.failure(done.returncode)
    assert (failure["exception"], failure["message"]) == (exception, message)
    assert (failure["rank"], failure["host"]) == (3, "node2")
    assert f"in {name}" in failure["traceback"] and "worker.py" not in failure["traceback"]
    assert failure["exit_code"] == 1 and failure["phase"] == "run"
    assert message in done.stderr


def test_what_a_script_leaves_for_its_end_is_done(job):
    """Threads are waited for, then exit handlers run, and nothing printed is lost."""
    done = job.worker("goodbye", [])
    assert (done.returncode, done.stdout.split()) == (0, ["returned", "threaded", "registered"])


def test_a_process_group_is_not_destroyed_while_the_script_holds_the_lock(job):
    """Its threads live until the process ends, though the script has let go of it."""
    done = job.worker("train", [])
    assert done.returncode == 0, done.stderr
    threads = job.value()
    second, third = (after - before for before, after in pairwise(threads))
    assert second == third > 0


def test_sys_exit_with_a_message_is_a_failure_with_that_message(job):
    """`sys.exit("why")` is how scripts give up."""
    done = job.worker("leave", [0])
    assert done.returncode == 1 and "no data here" in job.failure(1)["message"]


def test_a_signal_is_reported_by_name(job):
    """A crash leaves no exception: the signal is named."""
    failure = job.failure(job.worker("crash", [0]).returncode)
    assert (failure["signal"], failure["exit_code"]) == ("SIGSEGV", None)


def test_a_report_of_a_large_node_fits_into_one_frame(tmp_path):
    """However many workers fail, and whatever they say, the leader hears of the earliest."""
    place = NodeIdentity("7_1", "node2", tmp_path)
    found = []
    for rank in range(128):
        files = WorkerFiles(tmp_path, 1, rank)
        told = {"message": "\u00e4" * 99_999, "traceback": "\u00e4" * 99_999, "time": rank}
        files.error.write_text(json.dumps({"hpc_elastic": told}))
        found.append(describe(EndedWorker(0, 1), files, place))
    report = earliest(found)
    assert [f["rank"] for f in report] == list(range(len(report)))
    FrameSigner(b"key", "client").seal({"type": "failed", "round": 1, "failures": report})


def test_a_missing_module_is_an_import_failure(job):
    """What fails before the function is entered is marked so."""
    job.script.write_text("import nosuchmodule\n")
    failure = job.failure(job.worker("add", [1, 2]).returncode)
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


def test_tensors_and_arrays_come_back_as_numbers_and_a_model_is_refused():
    """A loss tensor is a float, a vector a list; a refusal says what can be sent back."""
    value = {"loss": torch.tensor(0.5), "v": torch.arange(2)}
    assert json.loads(to_json(value)) == {"loss": 0.5, "v": [0, 1]}
    with pytest.raises(TypeError, match=r"torch.nn.*Linear.*return numbers"):
        to_json(torch.nn.Linear(1, 1))


def test_a_worker_may_be_ended_by_a_signal_without_a_name(tmp_path):
    """Real-time signals have none; the agent does not end for it."""
    told = describe(
        EndedWorker(0, -40), WorkerFiles(tmp_path, 1, 0), NodeIdentity("7_1", "node2", tmp_path)
    )
    assert (told["signal"], told["message"]) == ("signal 40", "ended by signal 40")


@pytest.fixture
def importable(tmp_path, monkeypatch) -> str:
    """A module that can be imported, once it is."""
    (tmp_path / "made_for_this_test.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_for_this_test"
    sys.modules.pop("made_for_this_test", None)


def test_what_follows_an_import_is_done_when_the_import_is(importable):
    """Once, with the module there; the import is as it would have been."""
    seen = []
    after_import(importable, lambda: seen.append(sys.modules[importable].value))
    assert seen == []
    imported = importlib.import_module(importable)
    assert seen == [7] and imported.value == 7 and imported.__spec__.origin.endswith(".py")
    importlib.reload(imported)
    assert seen == [7]


def test_what_is_imported_already_is_done_now(importable):
    """A warm worker has imported it ahead."""
    importlib.import_module(importable)
    seen = []
    after_import(importable, lambda: seen.append(1))
    assert seen == [1]


def test_what_is_not_there_stays_an_error():
    """The user's own, as it would be."""
    after_import("nowhere_to_be_found", lambda: pytest.fail("it was not imported"))
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        importlib.import_module("nowhere_to_be_found")
