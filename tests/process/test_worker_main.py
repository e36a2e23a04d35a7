"""The worker's entry: what it imports, what it returns, what it reports when it fails."""

import enum
import gzip
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from hpc_elastic.agent.worker_main import _enter, after_import, load_function, to_json
from hpc_elastic.agent.worker_process import (
    NodeIdentity,
    WorkerFiles,
    describe,
    earliest,
    recorded_exit_code,
)
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.log_entry import Failure, is_secondary
from hpc_elastic.rendezvous.messages import Failed
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.transport.messages import pack
from hpc_elastic.worker.shared_page import DIRECTORY_VARIABLE, SharedPage
from specs import spec_of, started_run

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

def leave_open(how):
    import gzip
    global left
    left = [open("left.csv", "w"), open("left.bin", "wb"), gzip.open("left.gz", "wt")]
    left.append(left)  # as the globals of a script, which its functions refer to
    left[0].write("text")
    left[1].write(b"bytes")
    left[2].write("packed")
    if how == "raise":
        raise ValueError("boom")
    if how == "silent":
        sys.stdout = None

def hooked(fails):
    from pathlib import Path
    def hook(kind, error, frames):
        Path("hooked").write_text(f"{kind.__name__} {error} {frames.tb_frame.f_code.co_name}")
        assert not fails, "of the hook"
    sys.excepthook = hook
    raise ValueError("boom")

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

def search_path():
    return sys.path

def talk():
    import logging
    print("to standard output")
    logging.warning("to standard error")
    sys.stdout.flush()
    return sys.stdout.encoding

def frozen():
    import gc
    return gc.get_freeze_count() > 1000

def clear(fails):
    os.environ.clear()
    if fails:
        raise ValueError("boom")
    return "done"

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

def command(*argv):
    from hpc_elastic.agent.command import run_command
    run_command(*argv)

def loses(stop):
    from hpc_elastic import report
    for step, loss in [(1, 0.5), (2, float("nan")), (3, float("inf")), (4, 0.1)]:
        report(step=step, loss=loss)

def trains(how):
    import torch, torch.distributed as dist
    if how == "group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = torch.nn.Parameter(torch.ones(1))
    weights.grad = torch.ones(1)
    torch.optim.SGD([weights]).step()

def makes_store(port):
    import os
    import torch.distributed as dist
    address = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    return dist.get_world_size()

def makes_file_store(url):
    import torch.distributed as dist
    store, *_ = next(dist.rendezvous(url, 0, 1))
    return store.check(["of an earlier round"])

def child():
    sys.exit(int("TORCHELASTIC_USE_AGENT_STORE" in os.environ))

def spawns(start):
    import multiprocessing
    process = multiprocessing.get_context(start).Process(target=child)
    process.start()
    process.join()
    return [process.exitcode, os.environ["TORCHELASTIC_USE_AGENT_STORE"]]

def spawns_two(port, how):
    import torch.multiprocessing as mp
    mp.spawn(spawned, (port, how), 2)

def spawned(rank, port, how):
    import torch, torch.distributed as dist
    if how == "env":
        os.environ.update(MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    url = "env://" if how == "env" else f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    dist.destroy_process_group()

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
        self,
        qualname: str,
        args: list[object],
        sys_path: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        outputs: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a worker to its end; its output is captured, unless another one is given."""
        entry = Entry(
            "function", qualname, str(self.script), args=args, cwd=str(self.folder),
            sys_path=list(sys_path),
        )  # fmt: skip
        run = RunDir(self.folder / "run")
        started_run(run, spec_of("r", 1, 1, 1, 0, entry, "", [(0, 0)], **settings))
        env = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "HPC_ELASTIC_ROUND": "1",
            "TORCHELASTIC_ERROR_FILE": str(self.files.error),
            DIRECTORY_VARIABLE: str(self.folder), **(env or {}),
        }  # fmt: skip
        argv = [*prefix, sys.executable, "-m", "hpc_elastic.agent.worker_main", str(run.path)]
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **(outputs or {})}
        return subprocess.run(argv, env=env, text=True, timeout=300, **outputs)

    def value(self) -> object:
        """What the function returned."""
        return json.loads((self.folder / "run/results/round-1/rank-0.json").read_text())

    @property
    def files(self) -> WorkerFiles:
        """Where the worker leaves its failure."""
        return WorkerFiles(NodeIdentity("7_1", "node2", self.folder), 1, 3, 0)

    def failure(self, exit_code: int) -> Failure:
        """What the agent makes of it."""
        return describe(exit_code, self.files, self.page.read())


@pytest.fixture
def job(tmp_path) -> Job:
    """A job in a fresh directory."""
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [
        ("add", [2, 3], 5),
        ("who", [], ["__main__", "SCRIPT", ["SCRIPT"]]),
        ("frozen", [], True),
    ],
)
def test_what_the_function_returns_is_kept_by_rank(job, name, args, value):
    """A script is loaded as a spawned child would; what it imported is no garbage."""
    done = job.worker(name, args)
    assert done.returncode == 0, done.stderr
    assert job.value() == json.loads(json.dumps(value).replace("SCRIPT", str(job.script)))


def test_the_working_directory_hides_no_package(job, tmp_path):
    """A script's modules are searched where Python would: beside it, not where it is called."""
    (tmp_path / "sub").mkdir()
    done = job.worker("search_path", [], ["/a"], outputs={"cwd": tmp_path / "sub"})
    assert done.returncode == 0, done.stderr
    found = job.value()
    assert found[0] == "/a" and str(tmp_path / "sub") not in found


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_may_clear_its_environment(job, fails):
    """Its value, and its failure, go where they would have gone."""
    done = job.worker("clear", [fails])
    assert done.returncode == int(fails), done.stderr
    assert (job.failure(1).message if fails else job.value()) == ("boom" if fails else "done")


def test_output_that_can_not_be_written_ends_no_script(job):
    """The disk of the logs is full, or its server returns an error: the text is lost."""
    with Path("/dev/full").open("w") as full:
        done = job.worker("talk", [], outputs={"stdout": full, "stderr": full})
    assert done.returncode == 0
    value = job.value()
    assert value.lower() == "utf-8"
    done = job.worker("talk", [])
    assert "to standard output" in done.stdout and "to standard error" in done.stderr


@pytest.mark.parametrize(
    ("name", "exception", "message"),
    [
        ("fail", "ValueError", "boom from the user's code"),
        ("mute", "__main__.Mute", "<exception str() failed>"),
    ],
)
def test_an_exception_is_reported_with_the_users_frames_only(job, name, exception, message):
    """Class, message, if it has one, and traceback reach the report; our own frames do not."""
    done = job.worker(name, [0])
    failure = job.failure(done.returncode)
    assert (failure.exception, failure.message) == (exception, message)
    assert (failure.rank, failure.host) == (3, "node2")
    assert f"in {name}" in failure.traceback and "worker.py" not in failure.traceback
    assert failure.exit_code == 1 and failure.phase == "run"
    assert message in done.stderr


def test_what_a_script_leaves_for_its_end_is_done(job):
    """Threads are waited for, then exit handlers run, and nothing printed is lost."""
    done = job.worker("goodbye", [])
    assert (done.returncode, done.stdout.split()) == (0, ["returned", "threaded", "registered"])


@pytest.mark.parametrize("how", ["return", "raise", "silent"])
def test_files_that_a_script_leaves_open_are_whole(job, how):
    """The end of an interpreter writes their buffers, and so does that of a worker."""
    done = job.worker("leave_open", [how])
    assert done.returncode == (how == "raise") and "Error" not in done.stderr.replace("ValueE", "")
    assert (job.folder / "left.csv").read_text() == "text"
    assert (job.folder / "left.bin").read_bytes() == b"bytes"
    assert gzip.decompress((job.folder / "left.gz").read_bytes()) == b"packed"


@pytest.mark.parametrize("fails", [False, True])
def test_the_scripts_own_hook_sees_what_it_raised(job, fails):
    """sys.excepthook, which scripts set to log what ends them; its own error hides nothing."""
    done = job.worker("hooked", [fails])
    assert (job.folder / "hooked").read_text() == "ValueError boom hooked"
    assert ("boom" in done.stderr, "of the hook" in done.stderr) == (fails, fails)
    assert job.failure(done.returncode).message == "boom"


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_of_a_function_may_have_a_group_of_their_own(job, start):
    """With an address of their own, where no agent has a store: torch.multiprocessing.spawn."""
    done = job.worker("spawns", [start], env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert done.returncode == 0, done.stderr
    assert job.value() == [0, "True"]


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
    assert done.returncode == 1 and "no data here" in job.failure(1).message


def test_a_signal_is_reported_by_name(job):
    """A crash leaves no exception: the signal is named."""
    failure = job.failure(job.worker("crash", [0]).returncode)
    assert (failure.signal, failure.exit_code) == ("SIGSEGV", None)


@pytest.mark.parametrize("letter", ["a", "\u00e4", "\U0001f600"])
def test_a_report_of_a_large_node_fits_into_one_frame(tmp_path, letter):
    """However many workers fail, and whatever they say, the leader hears of the earliest."""
    place = NodeIdentity("7_1", "node2", tmp_path)
    found = []
    for rank in range(128):
        files = WorkerFiles(place, 1, rank, rank)
        told = dict.fromkeys(("message", "traceback", "exception"), letter * 99_999)
        told["time"] = rank
        files.error.write_text(json.dumps({"hpc_elastic": told}))
        found.append(describe(1, files))
    report = earliest(found)
    assert report and [f.rank for f in report] == list(range(len(report)))
    FrameSigner(b"key", "client").seal(pack(Failed(report), time.time()))


SCRIPTS = {
    "broken.py": "import json\njson.nosuch\n",
    "offline.py": "raise ConnectionError('no route to the hub')\n",
    "busy.py": "raise RuntimeError('address already in use')\n",
    "typo.py": "def main():\n    print(nosuchname)\nmain()\n",
    "half.py": "def main(:\n",
    "args.py": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "exits.py": "raise SystemExit(2)\n",
    "refused.py": "from hpc_elastic.errors import InexactError\nraise InexactError('a', 1, 'b')\n",
}


def test_a_missing_module_is_an_import_failure(job):
    """What fails before the function is entered is marked so."""
    job.script.write_text("import nosuchmodule\n")
    failure = job.failure(job.worker("add", [1, 2]).returncode)
    assert failure.phase == "import" and "nosuchmodule" in failure.message


@pytest.mark.parametrize(
    ("name", "args", "phase"),
    [
        ("import_late", ["nosuchmodule", 0], "import"),
        ("import_late", ["broken", 0], "import"),
        ("import_late", ["broken", 7], "run"),
        ("import_late", ["offline", 0], "run"),
        ("command", ["{python}", "offline.py"], "run"),
        ("command", ["{python}", "busy.py"], "run"),
        ("command", ["{python}", "typo.py"], "import"),
        ("command", ["{python}", "half.py"], "import"),
        ("command", ["{python}", "args.py", "--nosuch"], "import"),
        ("command", ["{python}", "exits.py"], "run"),
        ("command", ["no_such_command_anywhere"], "import"),
        ("command", ["sh", "-c", "no_such_command_anywhere"], "import"),
        ("command", ["sh", "-c", "exit 1"], "run"),
        ("import_late", ["refused", 0], "final"),
        ("import_late", ["refused", 7], "run"),
        ("locate", ["broken"], "import"),
        ("fail", [0], "run"),
    ],
)
def test_an_import_that_fails_before_the_first_step_is_an_import_failure(job, name, args, phase):
    """In the function and in commands too: another try would not change it; a download may pass."""
    for script, text in SCRIPTS.items():
        (job.folder / script).write_text(text)
    args = [str(a).replace("{python}", sys.executable) if isinstance(a, str) else a for a in args]
    done = job.worker(name, args, sys_path=[str(job.folder)])
    assert done.returncode and job.failure(done.returncode).phase == phase, done.stderr


@pytest.mark.parametrize(
    ("name", "args", "exit_code", "how"),
    [
        ("exit_with", [0], 0, "exited with code 0 before its function returned"),
        ("exit_with", [None], 0, "exited with code 0 before its function returned"),
        ("exit_with", [256], 0, "exited with code 0 before its function returned"),
        ("exit_with", [7], 7, "exited with code 7 before its function returned"),
        ("exit_hard", [0], 0, "exited with code 0 before its function returned"),
        ("fork_and_exit", [], 0, "exited with code 0 before its function returned"),
    ],
)
def test_an_exit_is_told_as_what_it_is(job, name, args, exit_code, how):
    """An exit code of 0 does not say that the function returned; the control page does."""
    done = job.worker(name, args)
    assert done.returncode == exit_code, done.stderr
    failure = job.failure(exit_code)
    assert (failure.message, failure.exception) == (how, None)
    assert not job.page.read().returned
    assert ("return from the function" in (failure.remedy or "")) is (exit_code == 0)
    if name == "exit_with":
        assert recorded_exit_code(job.files) == exit_code and "in exit_with" in failure.traceback


@pytest.mark.parametrize("name", ["exit_in_thread", "fork_and_return"])
def test_an_exit_that_is_not_the_workers_changes_nothing(job, name):
    """Of a thread, or of a process that the function has forked."""
    done = job.worker(name, [])
    assert done.returncode == 0 and job.page.read().returned, done.stderr
    assert recorded_exit_code(job.files) is None


def test_an_exit_because_of_a_lost_peer_is_a_consequence(job):
    """Many scripts catch an error of a collective, and exit."""
    done = job.worker("exit_after_peer", [])
    failure = job.failure(done.returncode)
    assert failure.message.endswith("while it handled RuntimeError: Connection closed by peer "
                                       "[10.0.0.1]")  # fmt: skip
    assert is_secondary(failure)


def test_a_step_that_is_known_is_told(job):
    """It helps to find the place."""
    job.page.report(5, None, None)
    assert job.failure(0).message == "exited with code 0 at step 5 before its function returned"


def test_a_function_that_is_not_there_is_named(job):
    """The error says which function which script lacks."""
    with pytest.raises(HpcElasticError, match="no function 'nosuch'"):
        load_function(Entry("function", "nosuch", str(job.script), cwd=str(job.folder)))


class Colour(enum.Enum):
    """A value of the user's own."""

    RED = "red"


@dataclass
class Score:
    """A value of the user's own."""

    loss: float
    path: Path


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"loss": torch.tensor(0.5), "v": torch.arange(2)}, {"loss": 0.5, "v": [0, 1]}),
        (Path("model.pt"), "model.pt"),
        ({"best": Path("a"), 1: {2}}, {"best": "a", "1": [2]}),
        ({("lr", 0.1): [Colour.RED]}, {"('lr', 0.1)": ["red"]}),
        (Score(0.5, Path("a")), {"loss": 0.5, "path": "a"}),
        (OmegaConf.create({"lr": 0.1, "twice": ["${lr}"]}), {"lr": 0.1, "twice": [0.1]}),
    ],
)
def test_a_return_value_is_kept_as_far_as_json_has_it(value, kept, capsys):
    """A loss tensor is a float, a vector a list, a path its text."""
    assert json.loads(to_json(value)) == kept
    assert not capsys.readouterr().err


class Untold:
    """A value without a text."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), 1j, Untold(), b"x", [object()]])
def test_what_json_cannot_hold_is_a_warning_and_no_failure(value, capsys):
    """The training is done; another one would return the same."""
    assert json.loads(to_json(value))
    assert "the function returned" in capsys.readouterr().err


def test_a_value_that_contains_itself_is_no_failure(capsys):
    """Its text is kept."""
    value: list[object] = []
    value.append(value)
    assert json.loads(to_json(value)) == "[[...]]"
    assert "the function returned" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_published_with_its_step(job):
    """The first one; the training goes on."""
    done = job.worker("loses", [False])
    page = job.page.read()
    assert done.returncode == 0 and page.returned, done.stderr
    assert (page.bad_step, page.bad_loss, page.loss) == (2, "nan", 0.1)


def test_a_loss_that_is_no_number_may_end_the_run(job):
    """With on_bad_loss=stop; no other try is made."""
    done = job.worker("loses", [True], on_bad_loss="stop")
    assert done.returncode == 1
    failure = job.failure(1)
    assert failure.phase == "final" and "the loss is nan at step 2" in failure.message


@pytest.mark.parametrize(
    ("how", "world_size", "group"), [("alone", 2, 0), ("group", 2, 1), ("alone", 1, None)]
)
def test_a_worker_that_trains_without_the_others_is_published(job, how, world_size, group):
    """Without a process group, or in one of another size; a single worker needs none."""
    done = job.worker("trains", [how], env={"WORLD_SIZE": str(world_size)})
    assert done.returncode == 0, done.stderr
    assert job.page.read().group == group


def test_a_worker_without_a_group_is_an_error_if_the_run_wants_that(job):
    """No other try is made."""
    done = job.worker("trains", ["alone"], env={"WORLD_SIZE": "2"}, require_group=True)
    failure = job.failure(1)
    assert done.returncode == 1 and failure.phase == "final"
    assert "init_process_group" in failure.message


def test_a_script_may_host_a_store_of_its_own_on_rank_0(job):
    """torch would take any store for that of the agent, and rank 0 for a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
              "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    done = job.worker("makes_store", [port], env=agents)
    assert done.returncode == 0 and job.value() == 1, done.stderr


def test_a_store_in_a_file_is_that_of_one_round(job, tmp_path):
    """What the killed processes of another round have left there would be waited for for ever."""
    stale = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    stale.set("of an earlier round", "")
    done = job.worker("makes_file_store", [f"file://{tmp_path}/store"])
    assert done.returncode == 0 and job.value() is False, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["env", "tcp"])
def test_processes_that_a_script_spawns_may_host_a_store_of_their_own(job, how):
    """As in many scripts that start a process for each GPU; on two nodes they train twice."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2",
           "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    done = job.worker("spawns_two", [port, how], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("are not counted") == 1
    assert job.page.read().group == 1


def test_torch_still_makes_stores_where_we_replace_it():
    """A private name: otherwise scripts with a store of their own would hang."""
    module = importlib.import_module("torch.distributed.rendezvous")
    theirs = module._create_c10d_store
    assert list(inspect.signature(theirs).parameters)[:2] == ["hostname", "port"]
    assert "TORCHELASTIC_USE_AGENT_STORE" in inspect.getsource(module)
    assert "= FileStore(path, " in inspect.getsource(module._file_rendezvous_handler)
    for handler in (module._tcp_rendezvous_handler, module._env_rendezvous_handler):
        assert "_create_c10d_store(" in inspect.getsource(handler)


def test_a_worker_may_be_ended_by_a_signal_without_a_name(tmp_path):
    """Real-time signals have none; the agent does not end for it."""
    place = NodeIdentity("7_1", "node2", tmp_path)
    told = describe(-40, WorkerFiles(place, 1, 0, 0))
    assert (told.signal, told.message) == ("signal 40", "ended by signal 40")


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


def test_a_look_up_is_no_import(importable):
    """transformers and datasets ask whether torch is there before they import it."""
    seen = []
    after_import(importable, lambda: seen.append(1))
    for _ in range(2):
        assert importlib.util.find_spec(importable).origin.endswith(".py")
    assert seen == []
    importlib.import_module(importable)
    assert seen == [1]


class OtherHook(importlib.abc.MetaPathFinder):
    """An import hook that wraps the execution of a module, as profilers and type checkers do."""

    def __init__(self, name: str) -> None:
        self.name, self.seen, self._is_asking = name, [], False

    def find_spec(self, fullname, path, target=None):
        """Find the module as the others do, and wrap its execution."""
        if fullname != self.name or self._is_asking:
            return None
        self._is_asking = True
        spec = importlib.util.find_spec(fullname)
        self._is_asking = False
        theirs = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (theirs(module), self.seen.append(fullname))
        return spec


@pytest.mark.parametrize("is_first", [True, False])
def test_another_import_hook_works_beside_ours(importable, is_first, monkeypatch):
    """Before ours and after it; each is called once."""
    seen, other = [], OtherHook(importable)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    if is_first:
        sys.meta_path.insert(0, other)
    after_import(importable, lambda: seen.append(1))
    if not is_first:
        sys.meta_path.insert(0, other)
    importlib.import_module(importable)
    assert (seen, other.seen) == ([1], [importable])


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


def test_a_worker_has_the_search_path_of_the_program_that_was_submitted(tmp_path, monkeypatch):
    """In its order, also where PYTHONPATH has some of it, or an editable install; twice, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/clone", "/src", "/scripts", "/lib", "/site-packages"])
    entry = Entry("function", "f", cwd=str(tmp_path), sys_path=["/scripts", "/src", "", "/clone"])
    for _ in range(2):
        _enter(entry)
        assert sys.path == ["/scripts", "/src", "/lib", "/site-packages", "/clone"]


@pytest.mark.parametrize(("agent", "works"), [("1", True), ("4711", False)])
def test_a_worker_whose_parent_is_process_1_knows_whether_that_is_its_agent(job, agent, works):
    """It is in a container without another process; else the agent has died before its worker."""
    if os.geteuid() != 0:
        pytest.skip("only root may make a namespace of processes")
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh")
    done = job.worker("add", [2, 3], env={"HPC_ELASTIC_AGENT_PID": agent}, prefix=prefix)
    assert (done.returncode == 0) == works, done.stderr
