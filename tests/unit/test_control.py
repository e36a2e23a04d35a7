"""The control page between a worker and its agent."""

import math
import os
import subprocess
import sys

import pytest

from hpc_elastic.control import DIRECTORY_VARIABLE, ControlPage, Progress


def test_a_fresh_page_says_nothing(tmp_path):
    """Before the first report every field is None."""
    assert ControlPage.create(tmp_path, 0).read() == Progress(None, None, None, None)


def test_the_agent_reads_what_the_worker_wrote(tmp_path):
    """What is not reported keeps its last value."""
    agent = ControlPage.create(tmp_path, 3)
    worker = ControlPage(tmp_path / "worker-3")
    worker.report(7, 0.5, None)
    worker.report(None, None, 448)
    progress = agent.read()
    assert (progress.step, progress.loss, progress.samples) == (7, 0.5, 448)
    assert progress.step_time is not None


def test_a_new_workers_page_does_not_show_the_last_ones_progress(tmp_path):
    """After a restart the page is empty again; the old worker writes to nowhere."""
    old = ControlPage.create(tmp_path, 0)
    fresh = ControlPage.create(tmp_path, 0)
    old.report(9, 1.0, None)
    assert fresh.read().step is None


def test_a_loss_that_is_not_a_number_is_none(tmp_path):
    """A run whose loss has become NaN shows no loss, rather than breaking JSON."""
    page = ControlPage.create(tmp_path, 0)
    page.report(1, math.nan, None)
    assert page.read().loss is None


def in_worker(code: str, tmp_path) -> Progress:
    """Run code as a worker whose agent has made its page."""
    page = ControlPage.create(tmp_path, 1)
    env = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path), "LOCAL_RANK": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    return page.read()


def test_report_from_a_script(tmp_path):
    """`from hpc_elastic import report` is all a script needs."""
    progress = in_worker("from hpc_elastic import report; report(step=5, loss=0.25)", tmp_path)
    assert (progress.step, progress.loss) == (5, 0.25)


@pytest.mark.parametrize(("own", "expected"), [("", 3), ("report(step=100);", 100)])
def test_optimizer_steps_are_counted_unless_the_script_reports_them(tmp_path, own, expected):
    """A script that calls nothing of ours still shows steps."""
    code = f"""
import torch
from hpc_elastic import report
from hpc_elastic.agent.worker import _count_optimizer_steps
_count_optimizer_steps()
{own}
w = torch.nn.Parameter(torch.zeros(1))
sgd = torch.optim.SGD([w], 0.1)
for _ in range(3):
    sgd.step()
"""
    assert in_worker(code, tmp_path).step == expected


def test_outside_a_run_report_does_nothing():
    """The same script runs without us."""
    code = "from hpc_elastic import report; report(step=1, loss=2.0)"
    env = {k: v for k, v in os.environ.items() if k != DIRECTORY_VARIABLE}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
