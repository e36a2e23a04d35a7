"""The control page between a worker and its agent."""

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.worker import reporting, shared_page
from hpc_elastic.worker.reporting import mark_checkpoint
from hpc_elastic.worker.shared_page import (
    DIRECTORY_VARIABLE,
    CheckpointRequest,
    SharedPage,
    WorkerStatus,
)

AT_NEXT = CheckpointRequest(7, None, confirmed=True, pause=True)
"""To stay at the next checkpoint, whichever that is."""


@pytest.fixture
def sides(tmp_path) -> tuple[SharedPage, SharedPage]:
    """The agent's and the worker's side of a page."""
    return SharedPage.create(tmp_path, 0), SharedPage(tmp_path / "worker-0")


def test_a_fresh_page_says_nothing(tmp_path):
    """Before the first report every field is None, and nobody holds."""
    page = SharedPage.create(tmp_path, 0)
    assert page.read() == WorkerStatus(None, None, None, None, None, None, 0)


def test_the_agent_reads_what_the_worker_wrote(tmp_path):
    """What is not reported keeps its last value."""
    agent = SharedPage.create(tmp_path, 3)
    worker = SharedPage(tmp_path / "worker-3")
    worker.report(7, 0.5, None, 100)
    worker.report(None, None, 448)
    worker.pause_at(5)
    progress = agent.read()
    assert (progress.step, progress.loss, progress.samples) == (7, 0.5, 448)
    assert (progress.total_steps, progress.boundary, progress.paused) == (100, 5, 0)
    assert progress.step_time is not None


def test_each_field_stands_by_itself(tmp_path):
    """Whatever else is reported."""
    page = SharedPage.create(tmp_path, 0)
    page.report(None, None, None, 9)
    assert page.read() == WorkerStatus(None, None, None, None, 9, None, 0, pulse=1)
    page.pause_at(0)
    assert page.read() == WorkerStatus(None, None, None, None, 9, 0, 0, pulse=1)


def test_a_new_workers_page_does_not_show_the_last_ones_progress(tmp_path):
    """After a restart the page is empty again; the old worker writes to nowhere."""
    old = SharedPage.create(tmp_path, 0)
    old.request_checkpoint(AT_NEXT)
    fresh = SharedPage.create(tmp_path, 0)
    old.report(9, 1.0, None, 10)
    assert fresh.read() == WorkerStatus(None, None, None, None, None, None, 0)
    assert fresh.pause_at(1), "it has no request"


def test_a_loss_that_is_not_a_number_is_none(tmp_path):
    """A run whose loss has become NaN shows no loss, rather than breaking JSON."""
    page = SharedPage.create(tmp_path, 0)
    page.report(1, math.nan, None)
    assert page.read().loss is None


def test_the_first_step_is_the_first_that_is_made(tmp_path):
    """Not the one that was restored, though a script may report that, too."""
    page = SharedPage.create(tmp_path, 0)
    page.report(0, None, None)
    assert page.read().first_step is None and page.read().restored is None
    page.report_restored(40, 1.5)
    page.report(40, None, None)
    assert page.read().first_step is None
    begin = time.time()
    page.report(41, None, None)
    page.report(42, None, None)
    seen = page.read()
    assert (seen.first_step, seen.restored, seen.restore_s) == (41, 40, 1.5)
    assert seen.first_time is not None and begin <= seen.first_time <= time.time()
    assert not seen.counted


def test_what_checkpoints_took_adds_up_and_a_search_in_vain_counts(sides):
    """A worker that found none begins with step 1."""
    agent, worker = sides
    worker.report_restored(None, 0.25)
    worker.report(1, None, None)
    worker.report_blocked(0.5)
    worker.report_blocked(0.25)
    seen = agent.read()
    assert (seen.first_step, seen.restored, seen.restore_s) == (1, None, 0.25)
    assert seen.blocked_s == 0.75


def test_steps_that_are_counted_go_on_from_what_was_restored(tmp_path):
    """Until the script reports them itself: then all that was counted is forgotten."""
    page = SharedPage.create(tmp_path, 0)
    page.report_restored(40, 1.0)
    page.report_counted_step(1)
    assert (page.read().step, page.read().first_step, page.read().counted) == (41, 41, True)
    page.set_explicit_steps()
    assert page.read().first_step is None
    page.report(82, None, None)
    assert (page.read().first_step, page.read().counted) == (82, False)


@pytest.mark.parametrize("then", [None, replace(AT_NEXT, released=True), CheckpointRequest(8, 0)])
def test_a_worker_that_pauses_continues_when_the_request_is_gone(sides, then):
    """It is withdrawn, released or replaced; until then the page shows where the worker stays."""
    agent, worker = sides
    agent.request_checkpoint(AT_NEXT)
    with ThreadPoolExecutor(1) as pool:
        passed = pool.submit(worker.pause_at, 40)
        wait_until(lambda: agent.read().paused)
        assert (agent.read().boundary, agent.read().paused) == (40, 7)
        assert not passed.done()
        agent.request_checkpoint(then)
        assert passed.result(timeout=10) is True
    assert (agent.read().boundary, agent.read().paused) == (40, 0)


def test_a_pause_has_an_end(tmp_path, monkeypatch):
    """An agent that asks and never stops the group costs a while, not the run."""
    monkeypatch.setattr(shared_page, "LONGEST_PAUSE_S", 0.05)
    page = SharedPage.create(tmp_path, 0)
    page.request_checkpoint(AT_NEXT)
    assert page.pause_at(40) is False
    assert page.read().paused == 0


@pytest.fixture
def worker(tmp_path, monkeypatch) -> SharedPage:
    """Make this process a worker, with a page that its agent has made."""
    page = SharedPage.create(tmp_path, 2)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())
    return page


def test_a_report_is_a_few_calls(worker):
    """It is made at each step of the training."""

    def calls_of(**values: object) -> int:
        made = []
        sys.setprofile(lambda _frame, what, _: made.append(what) if what[-4:] == "call" else None)
        reporting.report(**values)
        sys.setprofile(None)
        return len(made) - 1  # without setprofile

    reporting.report(step=0, loss=1.0, total_steps=9, lr=0.1)
    assert calls_of(step=1) <= 20
    assert calls_of(step=2, loss=1.0, total_steps=9, lr=0.1) <= 36
    assert worker.read().step == 2


def test_a_script_announces_its_checkpoints_and_where_it_will_stop(worker):
    """It goes on at once while nobody waits; with the total, a late node is weighed."""
    mark_checkpoint(step=10)
    mark_checkpoint(step=20)
    reporting.report(total_steps=1000)
    reporting.report(step=3)
    seen = worker.read()
    assert (seen.boundary, seen.step, seen.total_steps) == (20, 3, 1000)


def test_a_scripts_own_metrics(worker, caplog):
    """The first 16 names have room, and one warning says so."""
    assert worker.read().metrics == {}
    reporting.report(step=1, lr=0.1, **{"val/accuracy": torch.tensor(0.5)})
    reporting.report(lr=0.2)
    assert worker.read().metrics == {"lr": 0.2, "val/accuracy": 0.5}
    reporting.report(**{"lr": math.inf, "val/accuracy": math.nan})
    assert worker.read().metrics == {}, "status.json would be no JSON for browsers and jq"
    reporting.report(lr=0.2, **{"val/accuracy": 0.5})
    for number in range(20):
        reporting.report(**{f"{number:040d}": number})
    kept = worker.read().metrics
    assert len(kept) == 16 and kept[f"{13:040d}"] == 13
    assert caplog.text.count("only the first 16 metrics") == 1
    reporting.report_logged({"lr": 0.3, "step": 7, "loss": 1, "a b": 1, "note": "x"})
    assert worker.read().metrics["lr"] == 0.3 and worker.read().step == 1


UNUSABLE = [
    ("step", 5.5), ("step", -1), ("step", "5"), ("step", torch.ones(2)), ("step", 2**63),
    ("samples", 0.5), ("samples", float("nan")),
    ("total_steps", 0), ("total_steps", float("inf")), ("total_steps", [7]),
    ("loss", torch.ones(2)), ("loss", "0.5"), ("loss", torch.ones(1, device="meta")),
    ("lr", None), ("lr", "0.1"), ("lr", torch.ones(3)), ("lr", 1j), ("a b", 1.0),
]  # fmt: skip


@pytest.mark.parametrize("in_a_run", [True, False])
@pytest.mark.parametrize(("key", "value"), UNUSABLE)
def test_a_report_never_ends_the_training(worker, caplog, monkeypatch, key, value, in_a_run):
    """What cannot be used is left out and said once; the rest of the report is published."""
    if not in_a_run:
        monkeypatch.delenv(DIRECTORY_VARIABLE)
    before = worker.read()
    for _ in range(3):
        reporting.report(**{"acc": 0.5, key: value})
    after = worker.read()
    metrics = {"acc": 0.5} if in_a_run else {}
    assert after == replace(before, pulse=3 if in_a_run else 0, metrics=metrics)
    (line,) = [r.message for r in caplog.records]
    assert key in line and ("give" in line or "name it" in line), line


def test_numbers_of_other_kinds_are_numbers(worker, caplog):
    """Floats that are whole, NumPy's numbers, and tensors of one element."""
    reporting.report(
        step=5.0, samples=np.int64(7), total_steps=torch.tensor(9), loss=torch.ones(1, 1), lr=True
    )
    seen = worker.read()
    assert (seen.step, seen.samples, seen.total_steps, seen.loss) == (5, 7, 9, 1.0)
    assert seen.metrics == {"lr": 1.0}
    mark_checkpoint(step=np.float64(4))
    assert worker.read().boundary == 4
    assert not caplog.records
    mark_checkpoint(step=4.5)
    assert worker.read().boundary == 4 and "give a whole number" in caplog.text


def test_outside_a_run_a_loss_is_looked_at_once(monkeypatch):
    """To read it from a GPU costs time."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())

    class Loss:
        num_read = 0

        def __float__(self) -> float:
            Loss.num_read += 1
            return 0.5

    for step in range(3):
        reporting.report(step=step, loss=Loss())
    assert Loss.num_read == 1


def test_a_script_that_has_paused_for_too_long_warns(worker, monkeypatch, caplog):
    """Its user sees where the time went."""
    monkeypatch.setattr(shared_page, "LONGEST_PAUSE_S", 0.05)
    worker.request_checkpoint(AT_NEXT)
    mark_checkpoint(step=10)
    assert "did not change within 0.05 s at the checkpoint of step 10" in caplog.text


def in_worker(code: str, tmp_path) -> tuple[WorkerStatus, str]:
    """Run code as a worker whose agent has made its page; return the page, and what it printed."""
    page = SharedPage.create(tmp_path, 1)
    env = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path), "LOCAL_RANK": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True
    )
    return page.read(), done.stdout


def test_report_from_a_script(tmp_path):
    """`from hpc_elastic import ...` is all a script needs."""
    code = """
from hpc_elastic import mark_checkpoint, report
report(step=5, loss=0.25)
mark_checkpoint(step=4)
"""
    progress, _ = in_worker(code, tmp_path)
    assert (progress.step, progress.loss, progress.boundary) == (5, 0.25, 4)


def test_optimizer_steps_are_counted_unless_the_script_reports_them(tmp_path):
    """A script that calls nothing of ours still shows steps."""
    code = f"""
import json, pathlib, torch
from dataclasses import asdict, replace
from hpc_elastic import report
from hpc_elastic.agent.worker_main import _prepare_torch
from hpc_elastic.run.directory import RunDir
from hpc_elastic.worker.shared_page import SharedPage
_prepare_torch(RunDir(pathlib.Path("none")))
w = torch.nn.Parameter(torch.zeros(1))
sgd = torch.optim.SGD([w], 0.1)
for _ in range(3):
    sgd.step()
print(json.dumps(asdict(SharedPage(pathlib.Path({str(tmp_path / "worker-1")!r})).read())))
report(step=100)
sgd.step()
"""
    last, printed = in_worker(code, tmp_path)
    assert set(json.loads(printed)) == set(asdict(last))
    assert json.loads(printed)["step"] == 3 and last.step == 100


def test_the_step_by_which_torch_makes_an_optimizers_state_is_not_counted(tmp_path):
    """torch.distributed.checkpoint calls `step` before it loads a state into a new optimizer."""
    code = """
import pathlib, torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from hpc_elastic.agent.worker_main import _prepare_torch
from hpc_elastic.run.directory import RunDir
_prepare_torch(RunDir(pathlib.Path("none")))
net = torch.nn.Linear(2, 1)
adam = torch.optim.AdamW(net.parameters())
assert get_optimizer_state_dict(net, adam)["state"], "torch has called step"
print("made")
"""
    last, printed = in_worker(code, tmp_path)
    assert printed == "made\n" and last.step is None and last.first_step is None


def test_outside_a_run_nothing_happens():
    """The same script runs without us."""
    code = """
from hpc_elastic import mark_checkpoint, report
report(step=1, loss=2.0)
mark_checkpoint(step=1)
"""
    env = {k: v for k, v in os.environ.items() if k != DIRECTORY_VARIABLE}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def confirm(agent, number, step, pause=False):
    """Confirm a request."""
    agent.request_checkpoint(CheckpointRequest(number, step))
    agent.request_checkpoint(CheckpointRequest(number, step, confirmed=True, pause=pause))


def wait_until(holds):
    """Wait, ten seconds at most, until something holds."""
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_without_a_proposal_every_step_goes_on(sides):
    """And the agent sees how far the worker is."""
    agent, worker = sides
    assert not any(worker.poll_checkpoint(step) for step in range(5))
    assert (agent.read().passed, agent.read().waiting) == (4, 0)


@pytest.mark.parametrize("pause", [False, True])
def test_a_confirmed_step_is_saved_once_and_no_other(sides, pause):
    """Confirmed before the worker comes there, it does not wait."""
    agent, worker = sides
    confirm(agent, 2, 7, pause)
    polled = {s: (worker.poll_checkpoint(s), worker.changes_group_at(s)) for s in range(1, 10)}
    assert polled.pop(7) == (True, pause)
    assert set(polled.values()) == {(False, False)}
    assert agent.read().agreed == 7


def test_a_script_that_polls_every_few_steps_saves_at_the_first_one_behind(sides):
    """All ranks poll the same steps."""
    agent, worker = sides
    confirm(agent, 2, 11)
    assert [step for step in range(0, 40, 10) if worker.poll_checkpoint(step)] == [20]
    assert not worker.changes_group_at(20)


def test_the_largest_numbers_fit(sides):
    """A request's number and step share one field."""
    agent, worker = sides
    confirm(agent, 2**22, 2**40 - 2)
    assert not worker.poll_checkpoint(2**40 - 3)
    assert worker.poll_checkpoint(2**40 - 2)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("then", "found"),
    [
        (CheckpointRequest(3, 5, confirmed=True), True),
        (CheckpointRequest(4, 9), False),
        (CheckpointRequest(4, 0), False),
        (None, False),
    ],
)
def test_a_worker_waits_at_the_proposed_step_until_it_is_decided(sides, earlier, then, found):
    """It says for which proposal; the confirmation of an earlier one does not count."""
    agent, worker = sides
    if earlier:
        confirm(agent, 2, 5)
    agent.request_checkpoint(CheckpointRequest(3, 5))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(worker.poll_checkpoint, 5)
        wait_until(lambda: agent.read().waiting == 3)
        assert agent.read().passed == 5 and not answer.done()
        agent.request_checkpoint(then)
        assert answer.result(10) is found


def test_a_worker_does_not_wait_for_ever(sides, monkeypatch):
    """The message says at which step, and where to look."""
    monkeypatch.setattr(shared_page, "LONGEST_WAIT_S", 0.05)
    agent, worker = sides
    agent.request_checkpoint(CheckpointRequest(1, 5))
    with pytest.raises(HpcElasticError, match=r"checkpoint of step 5 .* log of this node's agent"):
        worker.poll_checkpoint(5)


def test_a_worker_that_is_past_the_proposed_step_goes_on(sides):
    """The agent has seen it, and will ask for a later one."""
    agent, worker = sides
    worker.poll_checkpoint(5)
    agent.request_checkpoint(CheckpointRequest(1, 5))
    assert not worker.poll_checkpoint(6)
    assert agent.read().passed == 6


def test_wishes_of_a_worker_reach_its_agent(sides):
    """For a checkpoint of the group, and for its node to be left."""
    agent, worker = sides
    worker.want_checkpoint()
    worker.want_checkpoint()
    before = time.monotonic()
    worker.release_node(100.0)
    assert agent.read().wanted == 2
    assert before + 100 <= agent.read().leave_by <= time.monotonic() + 100


def test_a_worker_knows_how_long_its_node_has(sides):
    """None before a notice."""
    agent, worker = sides
    assert worker.notice_left_s is None
    by = time.monotonic() + 50
    agent.set_deadline(by)
    most, left = by - time.monotonic(), worker.notice_left_s
    assert by - time.monotonic() <= left <= most


def test_an_announced_checkpoint_does_not_stay(sides):
    """That of a step before the one at which the group changes."""
    agent, worker = sides
    agent.request_checkpoint(AT_NEXT)
    assert worker.pauses_at(8)
    worker.announce(8)
    assert (agent.read().boundary, agent.read().paused) == (8, 0)


def test_a_worker_pauses_at_the_agreed_checkpoint_and_none_before(sides):
    """The others wait for it at the agreed step; a later request lets it continue."""
    agent, worker = sides
    confirm(agent, 4, 9, pause=True)
    worker.poll_checkpoint(8)
    assert worker.pause_at(8)
    assert worker.poll_checkpoint(10) and worker.changes_group_at(10)
    assert not worker.pauses_at(8)
    with ThreadPoolExecutor() as threads:
        stays = threads.submit(worker.pause_at, 10)
        wait_until(lambda: agent.read().paused == 4)
        agent.request_checkpoint(CheckpointRequest(5, 12))
        assert stays.result(10), "it is to come along to the later step"


def test_a_loss_and_a_metric_may_have_a_graph(worker):
    """The loss itself can be reported: torch's warning about its conversion does not appear."""
    loss = torch.tensor(0.5, requires_grad=True) * 2
    reporting.report(step=1, loss=loss, twice=loss * 2)
    assert worker.read().loss == 1.0
    assert worker.read().metrics == {"twice": 2.0}
