"""What a process that imports ahead of its script knows of GPUs."""

import contextlib
import io
import os

import pytest

from gpu_ranks import run_ranks


def choose_a_gpu_late(rank, size, store, asks):
    import torch

    from hpc_elastic.agent import warm_workers

    if asks:
        assert torch.cuda.is_available()
    warm_workers.note_choice_of_gpus()
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        warm_workers.warn_of_late_variables(before)
    return [torch.cuda.device_count(), printed.getvalue()]


@pytest.mark.parametrize(("asks", "count"), [(False, 1), (True, 2)])
def test_a_choice_of_gpus_that_comes_too_late_is_named(gpus, asks, count):
    """A module that asks for the GPUs at its import makes the choice for the script."""
    ((seen, printed),) = run_ranks(gpus(count=2), choose_a_gpu_late, 1, asks)
    assert seen == count and ("the script sets CUDA_VISIBLE_DEVICES" in printed) is asks
