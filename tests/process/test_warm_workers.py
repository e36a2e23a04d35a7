"""Warm workers: what a node imports in advance, and workers made from that."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from group import eventually

from ended import is_gone
from hpc_elastic.agent import signals, warm_workers
from hpc_elastic.agent import task as task_module
from hpc_elastic.agent.task import prepare_environment
from hpc_elastic.agent.task_main import likely_workers
from hpc_elastic.agent.warm_workers import (
    WarmWorkerPool,
    _receive_start,
    is_compatible,
    is_training,
)
from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles, WorkerProcess
from hpc_elastic.config.schema import AgentSettings, LocalSettings, NodeRange, RunSettings
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.slurm.environment import as_worker
from specs import spec_of, started_run

SCRIPT = """
import os, signal, sys
from pathlib import Path

LOADED_AS = __name__

def who():
    prctl = Path("/proc/self/status").read_text()
    kinds = ("SigIgn", "SigCgt", "SigBlk")
    handled = [line for line in prctl.splitlines() if line.startswith(kinds)]
    threads = [int(t) for t in os.listdir("/proc/self/task")]
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
        "env": dict(os.environ), "name": LOADED_AS, "handled": handled,
        "main": [sys.modules[m].__file__ for m in ("__main__", "__mp_main__")],
        "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "own_session": os.getsid(0) == os.getpid(), "parent": os.getppid(),
        "policies": sorted({os.sched_getscheduler(t) for t in threads}),
        "nice": os.nice(0), "descriptors": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
        "threads": len(threads), "open": len(os.listdir("/proc/self/fd")),
        "flags": [sys.stdout.write_through, sys.stdout.line_buffering, sys.stdout.encoding],
    }

def imported(name):
    return name in sys.modules

def say():
    print("from the function")
    print("an error", file=sys.stderr)

def exit_with(code):
    sys.exit(code)

def fail():
    raise ValueError("boom")

def draw():
    import random
    import numpy
    return [random.random(), numpy.random.random()]

def load(method):
    from torch.utils.data import DataLoader
    loader = DataLoader([1.0] * 8, 2, num_workers=2, multiprocessing_context=method)
    return sum(len(batch) for batch in loader)

def compute():
    import torch
    torch.set_num_threads(2)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(512, 64)).sum().backward()
    optimizer.step()
    return (torch.ones(512, 512) @ torch.ones(512, 512)).sum().item()

def stay():
    import time
    print("stays", flush=True)
    time.sleep(300)
"""
COUNTS = """
import os
with open("imports", "a") as f:
    f.write(f"{os.getpid()}\\n")
"""
STARTS = {
    "1 thread": "import threading, time; "
    "threading.Thread(target=time.sleep, args=[300], daemon=True).start()",
    "have opened /dev/zero": "file = open('/dev/zero')",
    "have shared": "import mmap; page = mmap.mmap(-1, 4096)",
    "asks for the GPUs": "from hpc_elastic.agent import warm_workers; "
    "warm_workers._in_time.discard('CUDA_')",
    "torch refuses the GPUs": "import torch; torch.cuda._is_in_bad_fork = lambda: True",
}

PATIENCE_S = 300.0
ROUNDS = int(os.environ.get("HPC_ELASTIC_ROUNDS", "20"))
TALKS = "import sys\nprint('imported')\nprint('warned', file=sys.stderr)\n"
WAITS = """
import time
from pathlib import Path
Path("began").touch()
end = time.monotonic() + 300
while not Path("go").exists() and time.monotonic() < end:
    time.sleep(0.02)
"""
OPENS_GPU = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""


class Node:
    """A run with one script, started as torch's agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = NodeIdentity("7_1", "n1", folder)
        self.run = RunDir(folder / "run")
        worker_main = "hpc_elastic.agent.worker_main"
        self.command = (sys.executable, "-uP", "-m", worker_main, str(self.run.path))

    def entry(self, qualname: str, *args: object, imports: tuple[str, ...] = ("json",)) -> None:
        """Say what the workers call; before the warm workers are started."""
        (self.folder / "script.py").write_text(SCRIPT)
        entry = Entry(
            "function", qualname, str(self.folder / "script.py"), args=list(args),
            cwd=str(self.folder), sys_path=[str(self.folder)],
        )  # fmt: skip
        agent = AgentSettings(warm_imports=list(imports))
        started_run(self.run, spec_of("r", 1, 1, 1, 0, entry, "", [(0, 0)], agent=agent))

    def entry_that_waits(self) -> None:
        """Let warm workers import a module that creates ``began``, and waits for ``go``."""
        (self.folder / "waits.py").write_text(WAITS)
        self.entry("who", imports=("waits",))

    def start(self, pool: WarmWorkerPool, number: int = 1) -> WorkerProcess:
        """Start one worker; from a warm one where there is a compatible one."""
        return self.start_all(pool, number, 1)[0]

    def start_all(self, pool: WarmWorkerPool, number: int, num: int) -> list[WorkerProcess]:
        """Start the workers of a node, by local rank."""
        os.environ["HPC_ELASTIC_ROUND"], workers = str(number), []
        sizes = {"LOCAL_WORLD_SIZE": str(num), "WORLD_SIZE": str(num), "GROUP_WORLD_SIZE": "1"}
        for rank in range(num):
            files = WorkerFiles(self.place, number, rank, rank)
            env = as_worker({
                **os.environ, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(number),
                "TORCHELASTIC_ERROR_FILE": str(files.error),
            }, "n1", str(num))  # fmt: skip
            workers.append(WorkerProcess(self.command, env, files, pool))
        return workers

    def finish(self, worker: WorkerProcess) -> int | None:
        """Wait for the worker; return its exit code."""
        worker.proc.wait(PATIENCE_S)
        return worker.own_exit_code

    def finish_all(self, workers: list[WorkerProcess]) -> list[int | None]:
        """Wait for the workers; return their exit codes."""
        return [self.finish(worker) for worker in workers]

    def value(self, number: int = 1, rank: int = 0) -> object:
        """What the function returned."""
        return json.loads((self.run.results / f"round-{number}/rank-{rank}.json").read_text())

    def entry_that_counts(self, qualname: str, *args: object) -> None:
        """Let each import be counted (`num_imports`)."""
        (self.folder / "counts.py").write_text(COUNTS)
        self.entry(qualname, *args, imports=("counts",))

    @property
    def num_imports(self) -> int:
        """How many processes have imported."""
        return len((self.folder / "imports").read_text().splitlines())

    def files(self, number: int = 1) -> WorkerFiles:
        """The worker's logs."""
        return WorkerFiles(self.place, number, 0, 0)


@pytest.fixture
def node(tmp_path, monkeypatch) -> Node:
    """A node whose environment, and whose signal handlers, are as before when the test ends."""
    monkeypatch.setenv("HPC_ELASTIC_ROUND", "0")
    handlers = {s: signal.getsignal(s) for s in (1, 2, 3, 15)}
    yield Node(tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def make_pool(node):
    """Start the warm workers of the node; they are gone when the test ends."""
    made = []

    def make(
        slots: int = 1, how: str = "fork", *, paced: bool = False, ready: bool = True
    ) -> WarmWorkerPool:
        made.append(WarmWorkerPool(slots, node.command, how, num_warming=1))
        made[-1].fill(paced=paced)
        if ready:
            eventually(lambda: all_ready(made[-1], slots), PATIENCE_S)
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def all_ready(pool: WarmWorkerPool, slots: int) -> bool:
    """Whether all have imported."""
    return pool.await_imports(0) and len(warm_pids(pool)) == slots


def num_of(kind: str, pid: object) -> int:
    """How many threads (``task``) or descriptors (``fd``) a process has."""
    return len(list(Path(f"/proc/{pid}/{kind}").iterdir()))


def warm_pids(pool: WarmWorkerPool) -> list[int]:
    """The warm workers, without the process that forks them."""
    parent = pool._workers.get(warm_workers._PARENT)
    return [pid for pid in pool.pids if parent is None or pid != parent.process.pid]


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.parametrize("paced", [False, True])
def test_a_worker_made_from_a_warm_one_is_as_a_new_process(
    node, make_pool, paced, how, monkeypatch
):
    """Same command line, paths, environment, signals, priority, descriptors and modules."""
    monkeypatch.setenv("GONE_LATER", "1")
    node.entry("who")
    pool = make_pool(1, how, paced=paced)
    (pid,) = warm_pids(pool)
    assert num_of("fd", pid) == 4
    assert len(pool.pids) == (2 if how == "fork" else 1)
    monkeypatch.delenv("GONE_LATER")
    monkeypatch.setenv("NEW", "umlaut \u00e4 and no text \udcff")
    worker = node.start(pool)
    assert worker.proc.pid == pid
    assert node.finish(worker) == 0, node.files().err.read_text()
    prewarmed = node.value()
    assert node.finish(node.start(WarmWorkerPool(0, node.command))) == 0
    assert node.value() == prewarmed


def test_what_is_to_be_preloaded_is_imported(node, make_pool):
    """torch is there before the script asks for it, and so is what its optimizers import."""
    node.entry("imported", "torch._dynamo", imports=("torch",))
    node.finish(node.start(make_pool()))
    assert node.value() is True


def test_modules_are_found_where_the_script_would_find_them(node, make_pool):
    """The run's folder and paths come first, and output at import is in the worker's log."""
    (node.folder / "talks.py").write_text(TALKS)
    node.entry("say", imports=("talks",))
    node.finish(node.start(make_pool()))
    assert node.files().out.read_text() == "imported\nfrom the function\n"
    assert node.files().err.read_text() == "warned\nan error\n"


def test_a_warm_worker_that_still_imports_is_used(node, make_pool):
    """It goes on from where it is, and leaves out what it has not begun to import."""
    (node.folder / "waits.py").write_text(WAITS)
    node.entry("imported", "xml.dom.minidom", imports=("waits", "xml.dom.minidom"))
    pool = make_pool(ready=False)
    (pid,) = pool.pids
    eventually((node.folder / "began").exists, PATIENCE_S)
    worker = node.start(pool)
    assert worker.proc.pid == pid
    (node.folder / "go").touch()
    node.finish(worker)
    assert node.value() is False


def test_a_report_that_nobody_reads_keeps_no_warm_worker_from_its_work():
    """The agent closes the socket behind its message, and may do so before it has looked."""
    agent, warm = socket.socketpair()
    warm.sendall(b"{}\n")
    with agent:
        socket.send_fds(agent, [b'{"env": {"A": "1"}}'], [1, 2])
    env, outputs = _receive_start(warm)
    assert env == {"A": "1"}
    for descriptor in (*outputs, warm.detach()):
        os.close(descriptor)


@pytest.mark.parametrize(("qualname", "args", "code"), [("exit_with", [7], 7), ("fail", [], 1)])
def test_its_end_is_a_workers(node, make_pool, qualname, args, code):
    """Exit codes and the error file are where the agent looks for them."""
    node.entry(qualname, *args)
    assert node.finish(node.start(make_pool())) == code
    error = node.files().error
    assert (qualname == "fail") == (error.exists() and "boom" in error.read_text())


def test_the_agent_stops_it_as_any_worker(node, make_pool):
    """A signal to its process group reaches it, and its death is seen."""
    node.entry_that_waits()
    pool = make_pool(ready=False)
    (pid,) = pool.pids
    worker = node.start(pool)
    worker.send_signal(signals.STOP)
    assert worker.has_ended(time.monotonic() + 30) and worker.own_exit_code is None
    assert is_gone(pid)


def test_a_module_that_can_not_be_imported_is_logged_once(node, make_pool, caplog):
    """However many processes meet it; the others are imported, and the worker works."""
    node.entry("imported", "xml.dom.minidom", imports=("nosuchmodule", "xml.dom.minidom"))
    pool = make_pool(2)
    assert caplog.text.count("No module named 'nosuchmodule'") == 1
    node.finish(node.start(pool))
    assert node.value() is True


def test_while_workers_train_warm_workers_are_made_one_after_the_other(node, make_pool):
    """The next one starts once the one before has imported."""
    node.entry_that_waits()
    pool = make_pool(2, "spawn", paced=True, ready=False)
    pool.maintain()
    assert len(pool.pids) == 1
    (node.folder / "go").touch()
    eventually(lambda: all_ready(pool, 2), PATIENCE_S)


@pytest.mark.parametrize(("how", "num"), [("fork", 1), ("spawn", 3)])
def test_a_late_node_waits_until_its_warm_workers_have_imported(node, make_pool, how, num):
    """It looks up now and then, whether there is a need; closing leaves no process."""
    node.entry_that_waits()
    pool = make_pool(3, how, ready=False)
    pids = pool.pids
    assert not pool.await_imports(0.1)
    pool.resize(2)
    (node.folder / "go").touch()
    assert pool.await_imports(60) and all_ready(pool, 2)
    ready = pool.pids
    pool.close()
    assert len(pids) == num and all(map(is_gone, {*pids, *ready}))


@pytest.mark.parametrize(("how", "num"), [("fork", 3), ("spawn", 2)])
def test_a_warm_worker_that_died_is_replaced_by_a_new_process(node, make_pool, caplog, how, num):
    """It is buried when the agent looks, and no other one is made before the next round."""
    node.entry("who")
    pool = make_pool(2, how)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: is_gone(pid), PATIENCE_S)
    assert pool.take_worker(0, node.command, dict(os.environ), (1, 2)) is None
    assert pool.maintain() == [-signal.SIGKILL] * num
    assert "slot 1 ended by itself, with exit code -9" in caplog.text
    assert pool.maintain() == []
    assert pool.pids == []
    assert node.finish(node.start(pool)) == 0


def test_a_warm_worker_that_opens_the_gpu_is_not_kept(node, make_pool, caplog):
    """It would take memory from the worker beside it."""
    (node.folder / "opens.py").write_text(OPENS_GPU)
    node.entry("who", imports=("opens",))
    pool = make_pool(ready=False)
    (pid,) = pool.pids
    eventually(lambda: pool.maintain() or not pool.pids, PATIENCE_S)
    assert is_gone(pid) and "opens the GPU" in caplog.text


def test_what_is_read_at_start_makes_a_new_process(node, make_pool, monkeypatch):
    """OMP_NUM_THREADS of before would stay in force."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    node.entry("who")
    pool = make_pool()
    old = pool.pids
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    worker = node.start(pool)
    node.finish(worker)
    assert worker.proc.pid not in old
    assert node.value()["env"]["OMP_NUM_THREADS"] == "2"
    pool.fill(paced=False)
    assert all(map(is_gone, old))
    eventually(lambda: all_ready(pool, 1), PATIENCE_S)
    node.finish(node.start(pool, 2))
    assert node.value(2)["env"]["OMP_NUM_THREADS"] == "2"


def test_an_environment_that_does_not_fit_into_the_socket_never_blocks_the_agent(node, make_pool):
    """A warm worker that imports does not read; the worker is a new process then."""
    node.entry_that_waits()
    pool = make_pool(ready=False)
    (pid,) = pool.pids
    big = {**os.environ, "BIG": "x" * 4_000_000}
    assert pool.take_worker(0, node.command, big, (1, 2)) is None
    assert is_gone(pid)


@pytest.mark.parametrize("module", ["json", "waits"])
def test_warm_workers_die_with_their_agent(node, module):
    """Also when it is killed, ready or not."""
    (node.folder / "waits.py").write_text(WAITS)
    node.entry("who", imports=(module,))
    agent = (
        "import sys, time; from hpc_elastic.agent.warm_workers import WarmWorkerPool\n"
        "pool = WarmWorkerPool(1, sys.argv[1:]); pool.fill(paced=False)\n"
        f"pool.await_imports({300 if module == 'json' else 0})\n"
        "print(*pool.pids, flush=True)\n"
        "if sys.argv[-1].endswith('run'): sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", agent, *node.command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == (2 if module == "json" else 1)
        eventually(
            (node.folder / "began").exists if module == "waits" else lambda: True, PATIENCE_S
        )
        process.kill()
    eventually(lambda: all(map(is_gone, pids)), PATIENCE_S)


def test_a_node_imports_once(node, make_pool):
    """Also if the workers are needed before the imports are done; and for all restarts."""
    node.entry_that_counts("who")
    pool = make_pool(3, ready=False)
    for number in (1, 2, 3):
        codes = node.finish_all(node.start_all(pool, number, 3))
        assert codes == [0, 0, 0], node.files(number).err.read_text()
        pool.fill(paced=number > 1)
    assert node.num_imports == 1 and len({str(node.value(3, rank)) for rank in range(3)}) == 3


def test_forks_have_random_numbers_of_their_own(node, make_pool):
    """As processes that have imported NumPy for themselves."""
    node.entry("draw", imports=("numpy.random",))
    node.finish_all(node.start_all(make_pool(2), 1, 2))
    drawn = [*node.value(), *node.value(1, 1)]
    assert len(set(drawn)) == len(drawn)


def test_a_fork_that_has_torch_computes_as_a_new_process(node, make_pool):
    """With several threads, an optimizer, and matrix products; its node has no other thread."""
    node.entry("compute", imports=("torch",))
    pool = make_pool(2)
    assert all(num_of("task", pid) == 1 for pid in pool.pids)
    codes = node.finish_all(node.start_all(pool, 1, 2))
    assert codes == [0, 0], node.files().err.read_text()
    assert node.value() == node.value(1, 1) == 512**3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_fork_has_data_loaders(node, make_pool, method):
    """However they are started."""
    node.entry("load", method, imports=("torch",))
    assert node.finish(node.start(make_pool())) == 0, node.files().err.read_text()
    assert node.value() == 8


@pytest.mark.parametrize(("why", "text"), STARTS.items())
def test_where_a_fork_would_share_or_lack_something_each_imports(
    node, make_pool, caplog, why, text
):
    """What the imports have started is found, and named once."""
    (node.folder / "starts.py").write_text(COUNTS + text)
    node.entry("who", imports=("starts",))
    pool = make_pool(3)
    assert node.num_imports == len(pool.pids) == 3
    assert why in caplog.text and caplog.text.count("are not forked") == 1
    codes = node.finish_all(node.start_all(pool, 1, 3))
    assert codes == [0, 0, 0], node.files().err.read_text()


def test_parts_of_a_gpu_are_not_shared_out_by_forks(node, make_pool, caplog, monkeypatch):
    """The variable that names a part is read at the start."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    node.entry_that_counts("who")
    assert len(make_pool(2).pids) == 2 == node.num_imports
    assert "not forked: each has a part of a GPU" in caplog.text


def test_workers_outlive_the_process_that_has_forked_them(node, make_pool):
    """It is missed by nothing, and replaced at the next round; a killed worker is seen."""
    node.entry_that_counts("stay")
    pool = make_pool(2)
    parent = next(pid for pid in pool.pids if pid not in warm_pids(pool))
    workers = node.start_all(pool, 1, 2)
    os.kill(parent, signal.SIGKILL)
    eventually(lambda: pool.maintain() == [-signal.SIGKILL], PATIENCE_S)
    for rank, worker in enumerate(workers):
        out = WorkerFiles(node.place, 1, rank, rank).out
        eventually(lambda out=out: "stays" in out.read_text(), PATIENCE_S)
        assert not is_gone(worker.proc.pid)
    pool.fill(paced=True)
    eventually(lambda: all_ready(pool, 2), PATIENCE_S)
    assert node.num_imports == 2
    os.kill(workers[1].proc.pid, signal.SIGKILL)
    assert node.finish(workers[1]) == -signal.SIGKILL
    os.kill(workers[0].proc.pid, signal.SIGKILL)
    node.finish(workers[0])


def test_forked_workers_die_with_their_agent(node):
    """Also when they are at work, and the agent is killed."""
    node.entry("stay")
    agent = (
        "import os, sys; from hpc_elastic.agent.warm_workers import WarmWorkerPool\n"
        "pool = WarmWorkerPool(2, sys.argv[1:]); pool.fill(paced=False); pool.await_imports(300)\n"
        "pids = pool.pids; env = {**os.environ, 'HPC_ELASTIC_ROUND': '1', 'RANK': '0'}\n"
        "worker = pool.take_worker(0, sys.argv[1:], env, (1, 2))\n"
        "print(*pids, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", agent, *node.command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        lines = {process.stdout.readline(), process.stdout.readline()}
        (pids,) = (list(map(int, line.split())) for line in lines if line != "stays\n")
        assert len(pids) == 3 and not any(map(is_gone, pids))
        process.kill()
    eventually(lambda: all(map(is_gone, pids)), PATIENCE_S)


def test_nothing_grows_over_restarts(node, make_pool):
    """The descriptors and children of the agent, and those of the process that forks."""
    node.entry_that_counts("imported", "json")
    pool = make_pool(2)
    parent = next(pid for pid in pool.pids if pid not in warm_pids(pool))
    counted = set()
    for number in range(1, ROUNDS + 1):
        node.finish_all(node.start_all(pool, number, 2))
        pool.fill(paced=True)
        assert pool.await_imports(PATIENCE_S)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        both = (num_of(kind, pid) for kind in ("fd", "task") for pid in (parent, "self"))
        counted.add((len(children), *both))
        eventually(lambda: not Path(f"/proc/{parent}/task/{parent}/children").read_text())
    assert len(counted) <= 2 and node.num_imports == 1  # the first round opens what others keep


def test_a_warm_worker_that_can_not_be_started_is_done_without(caplog):
    """The round starts without it."""
    pool = WarmWorkerPool(1, ["/nonexistent/python"])
    pool.fill(paced=False)
    assert "no warm worker for slot 0" in caplog.text
    assert pool.take_worker(0, ["/nonexistent/python"], {}, (1, 2)) is None


def test_a_warm_worker_for_which_no_descriptor_is_left_is_done_without(node, monkeypatch, caplog):
    """Beside workers that train; nor does a working directory that is gone end them."""

    def fails(*_):
        raise OSError(24, "Too many open files")

    node.entry("who")
    monkeypatch.setattr(socket, "socketpair", fails)
    pool = WarmWorkerPool(1, node.command)
    pool.fill(paced=True)
    assert "no warm worker for slot 0" in caplog.text and not pool.pids
    monkeypatch.undo()
    (node.folder / "gone").mkdir()
    monkeypatch.chdir(node.folder / "gone")
    (node.folder / "gone").rmdir()
    pool.fill(paced=False)
    process = pool.take_worker(0, node.command, os.environ, (1, 2))
    assert process is not None
    process.kill()
    process.wait()


def test_a_script_that_sets_variables_too_late_is_told(node, make_pool):
    """torch has read them before; the choice of a GPU is in time."""
    node.entry("say")
    script = node.folder / "script.py"
    lines = "import os\nos.environ['{}'] = os.environ['{}'] = '0'\n"
    script.write_text(lines.format("OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES") + script.read_text())
    node.finish(node.start(make_pool()))
    warned, _ = node.files().err.read_text().splitlines()
    assert "sets OMP_PROC_BIND, but" in warned and "launcher.agent.warm_workers=false" in warned
    node.finish(node.start(WarmWorkerPool(0, node.command)))
    assert "OMP_PROC_BIND" not in node.files().err.read_text()


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("RANK", True), ("MASTER_ADDR", True), ("TORCHELASTIC_RESTART_COUNT", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", True), ("HPC_ELASTIC_ROUND", True), ("TOKEN", True),
        ("OMP_NUM_THREADS", False), ("CUDA_VISIBLE_DEVICES", False), ("PYTHONHASHSEED", False),
        ("LD_LIBRARY_PATH", False), ("TORCH_LOGS", False), ("TORCHINDUCTOR_FREEZING", False),
    ],
)  # fmt: skip
def test_which_variables_can_be_handed_over(name, fitting):
    """Those that are read when they are needed; not those that a process reads as it starts."""
    assert is_compatible({"A": "1"}, {"A": "1", name: "x"}) is fitting
    assert is_compatible({name: "x"}, {name: "y"}) is fitting
    assert is_compatible({name: "x"}, {name: "x", "B": "2"})


@pytest.mark.parametrize(
    ("wanted", "env", "num_devices", "expected"),
    [
        (3, {}, 8, 3),
        ("cpu", {}, 8, 16),
        ("auto", {}, 0, 1),
        ("auto", {}, 4, 4),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "2,3"}, 4, 2),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 4, 1),
        ("auto", {"CUDA_VISIBLE_DEVICES": "0,1"}, 0, 1),
        ("auto", {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2,MIG-3"}, 1, 3),
    ],
)
def test_the_workers_of_a_node_are_counted_without_torch(wanted, env, num_devices, expected):
    """One a GPU that Slurm gave the task; what torch finds later goes before it."""
    assert likely_workers(wanted, 16, env, num_devices) == expected


@pytest.mark.parametrize(
    ("setting", "given", "in_run", "expected"),
    [
        (None, None, {}, "1"),
        (5, None, {}, "5"),
        (5, "6", {}, "6"),
        (5, "6", {"OMP_NUM_THREADS": "7"}, "7"),
    ],
)
def test_threads_are_what_is_said_nearest_to_the_run(monkeypatch, setting, given, in_run, expected):
    """launcher.env, its file, the task's own environment, launcher.agent, and then a fair share."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(task_module, "_GIVEN_THREADS", given)
    launcher = LocalSettings(env=in_run, agent=AgentSettings(omp_num_threads=setting))
    spec = SimpleNamespace(
        file_env={"OMP_NUM_THREADS": "8"} if in_run else {},
        settings=RunSettings(NodeRange(1, 1), 1, launcher),
    )
    task = SimpleNamespace(spec=spec, slurm=SimpleNamespace(cpus_on_node=1))
    prepare_environment(task, 4)
    prepare_environment(task, 1)
    assert os.environ["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, False), ("{", False), (json.dumps({"phase": "training"}), True), ("{}", False)],
)
def test_whether_a_group_trains_is_read_from_the_status(tmp_path, text, expected):
    """A file that is not there, or damaged, tells nothing."""
    status = tmp_path / "status.json"
    if text is not None:
        status.write_text(text)
    assert is_training(status) is expected
