"""What a script reports from a GPU."""

import os
import time
from pathlib import Path

import pytest

from gpu_ranks import run_ranks

STEPS = 6


def losses_of_steps(rank, size, store, folder, bad_step=0):
    import torch

    from hpc_elastic.errors import PermanentError
    from hpc_elastic.worker import reporting, shared_page

    os.environ |= {shared_page.DIRECTORY_VARIABLE: folder, "LOCAL_RANK": "0"}
    page = shared_page.SharedPage.create(Path(folder), 0)
    reporting.set_bad_loss_policy(stop=bad_step > 0)
    torch.cuda.set_device(0)
    loss = torch.zeros((), device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    shown, error, issued_s, begun = [], "", 0.0, time.monotonic()
    try:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                loss.add_(1.0 if step != bad_step else float("nan"))
            reporting.report(step=step, loss=loss, accuracy=loss)
            shown.append([page.read().step, page.read().loss])
        issued_s = time.monotonic() - begun
        reporting.function_returned()
    except PermanentError as e:
        error = str(e)
    return [
        shown,
        issued_s,
        time.monotonic() - begun,
        page.read().loss,
        page.read().returned,
        error,
    ]


def test_a_report_waits_for_no_gpu_and_loses_no_value(gpus, tmp_path):
    """Steps are issued ahead of the GPU; the last loss is there once the function has returned."""
    (found,) = run_ranks(gpus(count=1, delay_us=100_000), losses_of_steps, 1, str(tmp_path))
    shown, issued_s, whole_s, loss, has_returned, error = found
    assert [step for step, _ in shown] == list(range(1, STEPS + 1))
    assert None in [loss for _, loss in shown] and issued_s < whole_s / 2
    assert (loss, has_returned, error) == (STEPS, True, "")


@pytest.mark.parametrize("bad_step", [2, STEPS])
def test_a_loss_that_is_not_finite_ends_the_training_once_it_is_known(gpus, tmp_path, bad_step):
    """With on_bad_loss=stop; at the function's return at the latest, which is no success then."""
    machine = gpus(count=1, delay_us=100_000)
    (found,) = run_ranks(machine, losses_of_steps, 1, str(tmp_path), bad_step)
    assert found[4] is False and "the loss is nan" in found[5]
