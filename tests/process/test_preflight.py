"""The preflight: checks of a node's disk, clock, memory, GPUs and arithmetic before it joins."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hpc_elastic import _util
from hpc_elastic.agent import gpu_check, preflight
from hpc_elastic.agent.node_agent import exclude_node
from hpc_elastic.agent.preflight import (
    Preflight,
    Problem,
    check_arithmetic,
    check_clock,
    check_gpu_arithmetic,
    check_gpus,
    check_space,
    judge_clock,
    judge_gpus,
)
from hpc_elastic.config.schema import BACKENDS, NodeRange, RunSettings
from hpc_elastic.gpus import Gpu, can_be_used_by_torch
from hpc_elastic.run.directory import RunDir

GOOD = "0, GPU-aa, 81559, 4, 30\n1, GPU-bb, 81559, 4, 30\n"


@pytest.mark.parametrize(
    ("granted", "used", "shared", "check"),
    [
        (["0", "1"], 4, False, None),
        (["0", "1", "2"], 4, False, "gpus"),
        (["?", "?", "?"], 4, False, "gpus"),
        (["0"], 50_000, False, "memory"),
        (["GPU-aa"], 50_000, False, "memory"),
        (["1"], 50_000, False, None),  # others'
        (["0"], 50_000, True, None),
        (["MIG-1", "MIG-2", "MIG-3"], 50_000, False, None),
    ],
)
def test_gpus_are_counted_and_have_room(granted, used, shared, check):
    """As many as were granted, and no one else's data in them."""
    listed = [Gpu("0", "GPU-aa", 81_559, used), Gpu("1", "GPU-bb", 81_559, 4, 30)]
    problem = judge_gpus(granted, listed, shared=shared)
    assert (problem.check if problem else None) == check


@pytest.mark.parametrize(
    ("skew_s", "took_s", "text"),
    [
        (0.0, 0.1, None),
        (59.0, 0.1, None),
        (-90.0, 40.0, None),
        (61.0, 0.1, "61 s behind the"),
        (-600.0, 0.1, "600 s ahead of the"),
    ],
)
def test_the_clock(skew_s, took_s, text):
    """What the measurement took is in doubt; the remedy is named."""
    problem = judge_clock(skew_s, took_s)
    assert (
        problem is None if text is None else text in problem.reason and "chrony" in problem.reason
    )


def test_this_node_counts_right_and_its_clock_is_that_of_its_disk(tmp_path):
    """Real arithmetic, a real file."""
    assert check_arithmetic() is None and check_clock(tmp_path) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def free(monkeypatch):
    """Set the free space of every file system, in MiB."""

    def leave(mib: int) -> None:
        usage = SimpleNamespace(free=mib << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    return leave


@pytest.mark.parametrize(
    ("mib", "needed", "fit"), [(0, 16, False), (15, 16, False), (16, 16, True), (63, 64, False)]
)
@pytest.mark.parametrize("is_nodes", [True, False])
def test_space(free, tmp_path, mib, needed, fit, is_nodes):
    """As much as is needed is enough."""
    free(mib)
    reason = f"{tmp_path} has {mib} MiB free, and {needed} are needed"
    problem = None if fit else Problem("space", reason, is_nodes=is_nodes)
    assert check_space(tmp_path, needed << 20, is_nodes=is_nodes) == problem


@pytest.mark.parametrize(("mib", "shm", "logs"), [(15, True, True), (63, False, True)])
def test_a_node_without_space_is_not_fit(free, tmp_path, mib, shm, logs):
    """Its own memory, 16 MiB; the shared disk, 64 MiB, is only reported."""
    free(mib)
    found = Preflight(tmp_path, [], shared=True).problems()
    expected = [("/dev/shm", True)] * shm + [(str(tmp_path), False)] * logs
    assert [(p.reason.split()[0], p.is_nodes) for p in found] == expected


def test_a_full_shared_disk_does_not_hide_a_wrong_clock(free, tmp_path, monkeypatch):
    """Problems that are only reported come after the node's own."""
    free(32)
    clock = Problem("clock", "behind")
    monkeypatch.setattr(preflight, "check_clock", lambda _: clock)
    assert Preflight(tmp_path, [], shared=True).problems() == [clock]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"printf '{GOOD}'", None),
        ("echo 'Unable to determine the device handle: GPU is lost' >&2; exit 15", "GPU is lost"),
        (f"printf '{GOOD}WARNING: infoROM is corrupted at gpu 0000:41:00.0\\n'; exit 14", None),
        ("printf '0, GPU-aa, [N/A], [N/A], [N/A]\\n1, GPU-bb, [N/A], [N/A], 30\\n'", None),
        ("printf '0, GPU-aa, 81559, 4, 30\\n'", "2 GPUs were granted, but nvidia-smi lists 1"),
        ("printf '0, GPU-aa, ERR!, 4, 0\\n'", "ERR!"),
    ],
)
def test_what_nvidia_smi_says(nvidia_smi_runs, script, reason):
    """A real process, which may fail."""
    nvidia_smi_runs(script)
    problem = check_gpus(["0", "1"], shared=False)
    assert (problem is None) if reason is None else (reason in problem.reason)


def test_an_nvidia_smi_that_hangs_is_a_problem(nvidia_smi_runs, monkeypatch):
    """So it does where a GPU has fallen off."""
    monkeypatch.setattr("hpc_elastic.gpus.SMI_TIMEOUT_S", 0.2)
    nvidia_smi_runs("exec sleep 30")
    assert "does not answer" in check_gpus(["0"], shared=False).reason


def test_an_nvidia_smi_that_can_not_be_killed_is_one_too(nvidia_smi_runs, monkeypatch):
    """It hangs in the driver, and the kernel does not let it go."""
    started = []

    class Started(subprocess.Popen):
        """A process that no signal ends."""

        def __init__(self, *args, **options) -> None:
            started.append(self)
            super().__init__(*args, **options)

        def kill(self) -> None:
            """Do nothing."""

    monkeypatch.setattr("hpc_elastic.gpus.SMI_TIMEOUT_S", 0.2)
    monkeypatch.setattr(subprocess, "Popen", Started)
    nvidia_smi_runs("exec sleep 15")
    with monkeypatch.context() as kernel:
        kernel.setattr(os, "killpg", lambda *_: None)
        before = time.monotonic()
        problem = check_gpus(["0"], shared=False)
        took_s = time.monotonic() - before
    (process,) = started
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "does not answer" in problem.reason and took_s < 10


@pytest.fixture
def spaces(monkeypatch):
    """Replace what is found of the space in /dev/shm, and of that for the logs."""

    def replace(shm, logs) -> None:
        monkeypatch.setattr(
            preflight, "check_space", lambda folder, *_, **__: (shm if is_shm(folder) else logs)()
        )

    def is_shm(folder) -> bool:
        return str(folder) == "/dev/shm"

    return replace


def test_a_check_that_hangs_or_fails_says_nothing(tmp_path, monkeypatch, spaces):
    """The file system may hang for a while; the run is not to be kept waiting."""
    over = threading.Event()
    monkeypatch.setattr(preflight, "_WAIT_S", 0.1)
    waited = Problem("space", "it was waited for", is_nodes=False)
    spaces(lambda: 1 // 0, lambda: None if over.wait(30) else waited)
    assert Preflight(tmp_path, [], shared=True).problems() == []
    over.set()


def test_the_nodes_own_problem_comes_first(tmp_path, spaces):
    """A problem of what nodes share is only reported."""
    own, theirs = Problem("clock", "a"), Problem("space", "b", is_nodes=False)
    spaces(lambda: own, lambda: theirs)
    assert Preflight(tmp_path, [], shared=True).problems() == [own, theirs]


class Excluding:
    """Records the excluded nodes, as `Scheduler` does."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.asked: list[str] = []

    def exclude_nodes(self, hosts, why, until) -> None:
        """Write them to the run directory."""
        self.asked += hosts
        assert 0.0 < until - time.time() <= 3600.0
        (self.run.path / "excluded_nodes.json").write_text(json.dumps(dict.fromkeys(hosts, why)))


@pytest.mark.parametrize(
    ("launcher", "known", "goes"), [("slurm", 0, True), ("slurm", 2, False), ("local", 0, False)]
)
def test_a_node_is_avoided_unless_too_many_are(tmp_path, launcher, known, goes):
    """As many as the run may have: then it is not the nodes."""
    text = json.dumps({f"h{i}": "x" for i in range(known)})
    (tmp_path / "excluded_nodes.json").write_text(text)
    task = SimpleNamespace(
        slurm=SimpleNamespace(node_name="n7"), run=RunDir(tmp_path),
        spec=SimpleNamespace(settings=RunSettings(NodeRange(1, 2), 1, BACKENDS[launcher]())),
    )  # fmt: skip
    excluding = Excluding(task.run)
    assert exclude_node(Problem("gpus", "lost"), task, excluding) is goes
    assert excluding.asked == (["n7"] if goes else [])
    if goes:
        assert json.loads((tmp_path / "excluded_nodes.json").read_text())["n7"] == "preflight: lost"


def off_by(error):
    """Return what makes one element wrong."""

    def spoil(product) -> None:
        product[3, 5] += error

    return spoil


def even_out(product) -> None:
    """Make two elements of a row wrong, and not their sum."""
    product[3, 5] += 1
    product[3, 6] -= 1


WRONG = {"one": off_by(1), "a-fraction": off_by(0.25), "no-number": off_by(float("nan")),
         "as-much-in-two": even_out}  # fmt: skip
wrong = pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)


@wrong
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_cpu_that_counts_wrong_is_found(monkeypatch, kind, spoil):
    """One element of one product, by however little."""

    class Faulty(np.ndarray):
        """Whole numbers are multiplied well, and one kind of others is not."""

        def __matmul__(self, other):
            """Multiply."""
            product = np.asarray(self) @ np.asarray(other)
            if product.dtype == kind:
                spoil(product)
            return product

    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda size: arange(size).view(Faulty))
    reason = f"a product of {kind} matrices is wrong"
    assert check_arithmetic() == Problem("arithmetic", reason)


_PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__)


class Cuda(TorchFunctionMode):
    """GPUs that are this CPU.

    Args:
        spoil: What to do with the products of one GPU.
        at: Which, and of what kind.
    """

    def __init__(self, spoil, at) -> None:
        super().__init__()
        self._spoil, self._at, self._index = spoil, at, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Keep all tensors here."""
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            self._index = args[1].index
            args = (args[0], *args[2:])
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and (self._index, result.dtype) == self._at:
            self._spoil(result)
        return result


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are some; the process that checks them is this one."""

    def pretend(num, spoil=None, at=None) -> None:
        def run(argv, *, timeout_s):
            assert argv[1:] == ["-P", "-m", gpu_check.__name__]
            with contextlib.redirect_stdout(io.StringIO()) as output, Cuda(spoil, at):
                gpu_check.main()
            return subprocess.CompletedProcess(argv, 0, output.getvalue(), "")

        if spoil is not None:
            monkeypatch.setattr(gpu_check, "_SIZE", 64)
        in_turn = SimpleNamespace(map=map)  # a TorchFunctionMode belongs to its thread
        monkeypatch.setattr(
            gpu_check, "ThreadPoolExecutor", lambda _: contextlib.nullcontext(in_turn)
        )
        monkeypatch.setattr(torch.version, "cuda", "12.4")
        monkeypatch.setattr(preflight.gpus, "can_be_used_by_torch", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
        monkeypatch.setattr(_util, "run", run)

    return pretend


def test_gpus_that_count_right_are_fit(gpus):
    """All of them."""
    gpus(2)
    assert check_gpu_arithmetic(["0", "1"]) is None


@wrong
def test_a_gpu_that_counts_wrong_is_found(gpus, spoil):
    """One element, on one of them, by however little."""
    gpus(2, spoil, (1, torch.float32))
    reason = "GPU 1: a product of torch.float32 matrices is wrong"
    assert check_gpu_arithmetic(["0", "1"]) == Problem("arithmetic", reason)


@pytest.mark.parametrize(
    ("error", "fit"), [(1.0, True), (64.0, False), (-64.0, False), (float("nan"), False)]
)
def test_a_gpu_may_round_what_is_short(gpus, error, fit):
    """A sum in bfloat16 has eight bits."""
    gpus(1, off_by(error), (0, torch.bfloat16))
    problem = check_gpu_arithmetic(["0"])
    assert (problem is None) if fit else ("torch.bfloat16 matrices is wrong" in problem.reason)


def test_a_gpu_that_fails_is_reported_with_cudas_message(gpus):
    """The first line of them."""

    def fail(_) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error\nCompile with TORCH_USE_CUDA_DSA")

    gpus(1, fail, (0, torch.float32))
    reason = "RuntimeError: CUDA error: uncorrectable ECC error"
    assert check_gpu_arithmetic(["0"]) == Problem("arithmetic", reason)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put a torch of one's own before the real one, in the processes that are started."""

    def install(script: str) -> None:
        (tmp_path / "torch.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(preflight.gpus, "can_be_used_by_torch", lambda: True)

    return install


NO_GPU = """
class version: cuda = "12.4"
class cuda: device_count = staticmethod(lambda: 0)
"""


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (NO_GPU, "torch sees no GPU"),
        ("raise ImportError('libcudart.so.12: no such file')", "code 1: ImportError: libcudart"),
        ("import os; os.kill(os.getpid(), 9)", "code -9: ?"),
        ("raise SystemExit(0)", "code 0: ?"),
        ("print(7); raise SystemExit(0)", "code 0: ?"),
        ("print('{}'); raise SystemExit(0)", "code 0: ?"),
    ],
    ids=["says", "fails", "is-killed", "is-silent", "says-a-number", "says-nothing"],
)
def test_what_the_process_that_checks_gpus_says(stand_in, torch, reason):
    """A real process, which may die."""
    stand_in(torch)
    problem = check_gpu_arithmetic(["0"])
    assert problem.check == "arithmetic" and problem.is_nodes and reason in problem.reason


def test_a_torch_without_cuda_has_no_gpus_to_check(stand_in):
    """It cannot use them, although they were granted."""
    stand_in(NO_GPU.replace('cuda = "12.4"', "cuda = hip = None"))
    assert check_gpu_arithmetic(["0"]) is None


def test_a_gpu_that_does_not_answer_is_a_problem(stand_in, monkeypatch):
    """The process hangs in its driver."""
    monkeypatch.setattr(preflight, "_GPU_CHECK_S", 0.2)
    stand_in("import time; time.sleep(600)")
    problem = check_gpu_arithmetic(["0"])
    assert problem.check == "arithmetic" and "is not done after" in problem.reason


@pytest.mark.skipif(can_be_used_by_torch(), reason="this torch is built for GPUs")
@pytest.mark.parametrize("granted", [[], ["0"]])
def test_without_gpus_no_process_is_started(granted, monkeypatch):
    """There is nothing to check, also where torch is built for CPUs alone."""
    monkeypatch.setattr(_util, "run", None)
    assert check_gpu_arithmetic(granted) is None


def test_a_file_of_torch_says_whether_it_is_built_for_gpus():
    """If this fails, the file has another name, or other contents."""
    kinds = ("cuda", "hip", "rocm", "xpu")
    assert can_be_used_by_torch() == any(getattr(torch.version, kind, None) for kind in kinds)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("cuda = '13.0'", True), ("cuda = hip = None", False), ("cuda = (", True)],
)
def test_torch_is_not_imported_to_know_that(version, expected, tmp_path, monkeypatch):
    """A file that cannot be read leaves it open, so the GPUs are checked."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert can_be_used_by_torch() == expected


def test_a_process_that_can_not_be_started_says_nothing_of_the_gpus(tmp_path, monkeypatch, caplog):
    """The reason is in the log."""

    def run(*_, **__):
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(preflight, "check_gpus", lambda *_, **__: None)
    monkeypatch.setattr(_util, "run", run)
    monkeypatch.setattr(preflight.gpus, "can_be_used_by_torch", lambda: True)
    assert Preflight(tmp_path, ["0"], shared=True).problems() == []
    assert "no more processes" in caplog.text


def test_cpus_near_a_gpu_are_those_of_its_numa_node(monkeypatch):
    """By torch's own function, from the system's files; only CPUs of the task count."""
    binding = pytest.importorskip("torch.numa.binding", reason="torch has it from 2.9 on")
    files = {
        "/sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n",
        "/sys/bus/pci/devices/0000:02:00.0/numa_node": "-1\n",
        "/sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
        "/sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
    }
    place = {"pci_domain_id": 0, "pci_device_id": 0}
    properties = [SimpleNamespace(**place, pci_bus_id=bus) for bus in (1, 2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(binding, "open", lambda path: io.StringIO(files[path]), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert gpu_check.cpus_near(2, "node") == [[2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("numa", "printed", "expected", "logged"),
    [
        ("node", '{"problem": null, "cpus": [[0], [1]]}', [[0], [1]], ""),
        ("node", '{"problem": null, "cpus": []}', [], "not bound to CPUs"),
        (None, '{"problem": null, "cpus": []}', [], ""),
    ],
)
def test_the_preflight_has_the_cpus_near_each_gpu(
    tmp_path, monkeypatch, caplog, numa, printed, expected, logged
):
    """The process that checks the GPUs knows them."""
    asked = []

    def run(argv, *, timeout_s):
        asked.extend(argv[4:])
        return subprocess.CompletedProcess(argv, 0, printed, "no such file")

    monkeypatch.setattr(preflight, "check_gpus", lambda *_, **__: None)
    monkeypatch.setattr(_util, "run", run)
    monkeypatch.setattr(preflight.gpus, "can_be_used_by_torch", lambda: True)
    checks = Preflight(tmp_path, ["0", "1"], shared=True, numa=numa)
    assert (checks.problems(), checks.cpus) == ([], expected)
    assert asked == ([] if numa is None else [numa])
    assert (logged in caplog.text) and bool(caplog.text) == bool(logged)


def test_a_gpu_that_is_slower_than_the_others_of_its_node_is_told(monkeypatch, tmp_path):
    """It is no reason to leave the node."""
    times = iter(range(1000))
    monkeypatch.setattr(gpu_check, "ThreadPoolExecutor", lambda _: contextlib.nullcontext(OneByOne))
    monkeypatch.setattr(gpu_check, "_SIZE", 2)
    slow = {}
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(times) * slow["s"])

    def to(tensor, device, _):
        slow["s"] = 0.1 if device.index == 2 else 0.01
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    devices = [torch.device("cuda", i) for i in range(4)]
    told = gpu_check.slow_gpu(devices)
    assert re.fullmatch(r"GPU 2 computes at \d+% of the others' rate", told)
    assert gpu_check.slow_gpu(devices[:2]) is None


class OneByOne:
    """A pool without threads."""

    map = staticmethod(map)


def test_what_is_told_of_a_slow_gpu_keeps_no_node_out(monkeypatch):
    """Of the process that computes, beside a sum that is right."""
    answer = '{"problem": null, "slow": "GPU 1 computes at 40%", "cpus": []}'
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(_util, "run", lambda *_, **__: done)
    monkeypatch.setattr(preflight.gpus, "can_be_used_by_torch", lambda: True)
    assert check_gpu_arithmetic(["0", "1"]) == Problem("gpus", "GPU 1 computes at 40%", False)
