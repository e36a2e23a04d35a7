"""Mistakes that the simulated GPUs have to show: each passes on a CPU."""

import pytest

import gpu_ranks
import test_nccl
import test_wrong_numbers
from gpu_ranks import run_ranks


def communicator_on_the_wrong_device(rank, size, store):
    from hpc_elastic.ft import nccl

    def configure(self, *args):
        self._device = nccl.torch.device("cuda", 0)
        super(nccl.ProcessGroupNCCL, self).configure(*args)

    nccl.ProcessGroupNCCL.configure = configure
    return test_wrong_numbers.first_device(rank, size, store)


def context_on_a_foreign_gpu(rank, size, store):
    import torch

    torch.cuda.set_device(rank)
    return torch.zeros(1, device="cuda").item() + torch.zeros(1, device="cuda:0").item()


def future_without_its_stream(rank, size, store):
    from hpc_elastic.ft import futures

    plain = futures.Future
    futures.Future = lambda devices: plain()
    return test_wrong_numbers.values_of_a_future_of_nccl(rank, size, store)


def completed_is_success(rank, size, store):
    from hpc_elastic.ft import nccl

    nccl._error_of = lambda backend: None
    return test_nccl.outlive_a_peer(rank, size, store)


def no_abort(rank, size, store):
    from hpc_elastic.ft import nccl

    nccl.NCCLGroup.end_group = lambda self, error, **_: self.watchdog.stop()
    return test_nccl.outlive_a_peer(rank, size, store)


def test_a_communicator_on_the_wrong_device(gpus):
    """NCCL refuses two ranks on one GPU."""
    machine = gpus(count=2)
    with pytest.raises(AssertionError, match="failed"):
        run_ranks(machine, communicator_on_the_wrong_device, 2)
    assert machine.events("duplicate_gpu")


def test_a_context_on_a_foreign_gpu(gpus):
    """It takes half a gigabyte there, of each other process."""
    machine = gpus(count=2)
    run_ranks(machine, context_on_a_foreign_gpu, 2)
    assert sorted(map(sorted, machine.contexts().values())) == [[0], [0, 1]]


def test_a_future_without_its_stream(gpus):
    """Its value is read before it is computed."""
    found = run_ranks(gpus(delay_us=3000), future_without_its_stream, 2)
    assert found != [[[30.0] * test_wrong_numbers.TIMES] * 2] * 2


@pytest.mark.parametrize("mutant", [completed_is_success, no_abort])
def test_a_group_that_is_not_aborted(gpus, monkeypatch, mutant):
    """Its kernels spin for ever; so its ranks are ended after a while, shorter here."""
    monkeypatch.setattr(gpu_ranks, "PATIENCE_S", 25.0)
    with pytest.raises(AssertionError, match=r"late: \[0\]"):
        run_ranks(gpus(), mutant, 2)
