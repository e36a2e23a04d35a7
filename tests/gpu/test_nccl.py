"""NCCL's asynchronous errors: the group is aborted, whoever uses it, and its process goes on."""

import os
import signal
import time
from datetime import timedelta

import pytest

from gpu_ranks import run_ranks

SETTING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
AS_IN_A_RUN = {SETTING: "1"}  # by torch's agent, of every worker


def outlive_a_peer(rank, size, store):
    import torch

    from hpc_elastic.ft.process_group import ProcessGroupNCCL

    torch.cuda.set_device(rank)
    group = ProcessGroupNCCL(timedelta(seconds=50))
    group.configure(f"{store}/q/1", f"r{rank}", rank, size, 1)
    x = torch.ones(1000, device="cuda")
    group.allreduce([x]).wait()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    group.allreduce([x]).wait()
    error = group.errored()
    took_s = time.monotonic() - begun
    time.sleep(2)  # in which torch's own watchdog would have ended this process
    group.configure(f"{store}/q/2", f"r{rank}", 0, 1, 2)
    x.fill_(1.0)
    group.allreduce([x]).wait()
    return [str(error), took_s < 30, x.max().item(), os.environ.get(SETTING)]


@pytest.mark.parametrize("variables", [{}, AS_IN_A_RUN], ids=["alone", "in a run"])
def test_a_group_whose_nccl_has_failed_is_aborted_before_the_time_out(gpus, variables):
    """Its kernels end, and the next group is formed by the same process."""
    machine = gpus(nccl_error_ms=300)
    survivor, _ = run_ranks(machine, outlive_a_peer, 2, env=variables)
    why, is_early, total, setting = survivor
    assert "NCCL reports" in why
    assert (is_early, total) == (True, 1.0)
    assert setting == variables.get(SETTING), "other groups of the process keep theirs"


def abort_for_long(rank, size, store):
    import torch

    from hpc_elastic.ft import nccl

    nccl._ABORT_S = 1.0  # of 60: the test waits for it
    torch.cuda.set_device(rank)
    group = nccl.ProcessGroupNCCL(timedelta(seconds=50))
    group.configure(f"{store}/q/1", f"r{rank}", rank, size, 1)
    group.abort(why="a test")
    return "it goes on"


def test_an_abort_that_does_not_end_ends_the_process(gpus):
    """A GPU that fell off the bus is freed by the end of its process only."""
    with pytest.raises(AssertionError, match=r"failed: \[\('[\w-]+', 1, None\)\]"):
        run_ranks(gpus(nccl_abort_ms=600_000), abort_for_long)
