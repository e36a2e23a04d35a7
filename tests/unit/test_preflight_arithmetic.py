"""What a CPU or GPU that counts wrong, or the process that looks for one, shows before it joins."""

import contextlib
import errno
import io
import subprocess

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hpc_elastic import _util
from hpc_elastic.agent import gpu_check, preflight
from hpc_elastic.agent.preflight import (
    Preflight,
    Problem,
    check_arithmetic,
    check_gpu_arithmetic,
)


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
            assert argv[1:] == ["-m", gpu_check.__name__]
            with contextlib.redirect_stdout(io.StringIO()) as output, Cuda(spoil, at):
                gpu_check.main()
            return subprocess.CompletedProcess(argv, 0, output.getvalue(), "")

        if spoil is not None:
            monkeypatch.setattr(gpu_check, "_SIZE", 64)
        monkeypatch.setattr(torch.version, "cuda", "12.4")
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


def test_gpus_that_torch_does_not_see_are_a_problem(gpus):
    """They were granted."""
    gpus(0)
    assert check_gpu_arithmetic(["0"]) == Problem("arithmetic", "torch sees no GPU")


def test_a_gpu_that_fails_is_told_in_cudas_words(gpus):
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
    """It can not use them, whoever granted them."""
    stand_in(NO_GPU.replace('cuda = "12.4"', "cuda = hip = None"))
    assert check_gpu_arithmetic(["0"]) is None


def test_a_gpu_that_does_not_answer_is_a_problem(stand_in, monkeypatch):
    """The process hangs in its driver."""
    monkeypatch.setattr(preflight, "_GPU_CHECK_S", 0.2)
    stand_in("import time; time.sleep(600)")
    problem = check_gpu_arithmetic(["0"])
    assert problem.check == "arithmetic" and "is not done after" in problem.reason


def test_without_gpus_no_process_is_started(monkeypatch):
    """There is nothing to check."""
    monkeypatch.setattr(_util, "run", None)
    assert check_gpu_arithmetic([]) is None


def test_a_process_that_can_not_be_started_says_nothing_of_the_gpus(tmp_path, monkeypatch, caplog):
    """The log says why."""

    def run(*_, **__):
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(preflight, "check_gpus", lambda *_, **__: None)
    monkeypatch.setattr(_util, "run", run)
    assert Preflight(tmp_path, ["0"], shared=True).problems() == []
    assert "no more processes" in caplog.text
