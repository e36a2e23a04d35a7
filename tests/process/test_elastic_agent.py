"""The agent of a node: its workers, what it reports, the events it writes."""

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from group import eventually

from hpc_elastic.agent import elastic_agent as module
from hpc_elastic.agent.elastic_agent import (
    CheckpointFailureLog,
    ElasticAgent,
    ExitWatch,
    TrainingWatch,
    first_step_fields,
)
from hpc_elastic.agent.preemption import PreemptionState
from hpc_elastic.agent.signals import STOP, SignalError
from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles, WorkerProcess
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.rendezvous.messages import Finished, PreemptionNotice
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)


def test_a_worker_that_ends_before_its_signal_is_no_error(tmp_path):
    """It may end by itself, as its peers have."""
    files = WorkerFiles(NodeIdentity("7_1", "n1", tmp_path), 1, 0, 0)
    worker = WorkerProcess(["true"], os.environ, files, WarmWorkerPool(0, ()))
    worker.proc.wait(60)
    worker.send_signal(STOP)
    assert worker.own_exit_code == 0


def test_a_worker_that_does_not_end_in_time_is_killed(training, tmp_path):
    """The others of its node share the wait."""
    deaf = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); print(1, flush=True)"
    training._agent_context = SimpleNamespace(settings=AgentSettings(stop_timeout_s=0))
    training._processes = workers = [
        WorkerProcess(
            [sys.executable, "-c", f"{deaf}; time.sleep(600)"], os.environ,
            WorkerFiles(NodeIdentity("7_1", "n1", tmp_path), 1, rank, rank), WarmWorkerPool(0, ()),
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [tmp_path / f"round-1.rank-{rank}.out" for rank in range(2)]
    eventually(lambda: all(output.read_text() for output in outputs))
    training._end_workers()
    assert [worker.proc.returncode for worker in workers] == [-signal.SIGKILL] * 2
    assert [worker.own_exit_code for worker in workers] == [None] * 2


@pytest.fixture
def training(tmp_path: Path, monkeypatch) -> ElasticAgent:
    """An agent whose only worker has been started, at second 100."""
    agent = ElasticAgent.__new__(ElasticAgent)
    agent._warm_workers, agent._filled, agent._started_at = Mock(), False, 100.0
    agent._warm_workers.maintain.return_value = []
    agent._agent_context = SimpleNamespace(stores=Mock())
    agent.pages = {3: SharedPage.create(tmp_path, 0)}
    monkeypatch.setattr(module.time, "monotonic", lambda: 101.0)
    # the children of this process are other tests'
    monkeypatch.setattr(module.worker_process, "kill_strays", lambda *_: None)
    return agent


def test_warm_workers_are_made_once_the_workers_have_made_a_step(training):
    """Before it, the workers need the CPU themselves; and dead warm workers are not made again."""
    training._maintain_warm_workers()
    training.pages[3].report(0, None, None)
    training._maintain_warm_workers()
    training._warm_workers.fill.assert_not_called()
    training._agent_context.stores.prepare.assert_not_called()
    training.pages[3].report(1, None, None)
    training._maintain_warm_workers()
    training._maintain_warm_workers()
    training._warm_workers.fill.assert_called_once_with(paced=True)
    training._agent_context.stores.prepare.assert_called_once_with()  # it may lead next


def test_warm_workers_are_made_after_a_while_where_no_step_is_reported(training, monkeypatch):
    """A script need not report anything."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 111.0)
    training._maintain_warm_workers()
    training._warm_workers.fill.assert_called_once_with(paced=True)


def test_nothing_outlives_the_agent(training, monkeypatch):
    """However its run ends: with a signal, say."""
    ended = []
    monkeypatch.setattr(module, "adopt_orphans", lambda: None)
    monkeypatch.setattr(module.worker_process, "kill_strays", lambda: ended.append(True))

    def taken(*_):
        raise SignalError(signal.SIGQUIT)

    monkeypatch.setattr(module, "raise_signals", lambda: None)
    monkeypatch.setattr(ElasticAgent, "_join_round", taken)
    monkeypatch.setattr(ElasticAgent, "_end_workers", lambda _, number: ended.append(number))
    training._session = SimpleNamespace(verdict=None)
    with pytest.raises(SignalError, match="SIGQUIT"):
        training.run()
    assert training._warm_workers.close.called and ended == [signal.SIGQUIT, True]


@pytest.mark.parametrize(
    ("code", "why"),
    [(-signal.SIGKILL, "SIGKILL"), (-40, "signal 40"), (1, "exit code 1"), (-signal.SIGTERM, None)],
)
def test_a_warm_worker_that_ends_by_itself_is_told(training, code, why):
    """Once; not where the whole node is signalled."""
    told = []
    events = SimpleNamespace(write_behind=lambda kind, **fields: told.append((kind, fields)))
    training._agent_context = SimpleNamespace(
        events=events, place=NodeIdentity("7_1", "n1", Path()), stores=Mock()
    )
    training._warm_workers.maintain.side_effect = [[code], []]
    training._maintain_warm_workers()
    training._maintain_warm_workers()
    assert told == ([] if why is None else [("warm_worker_died", {"host": "n1", "why": why})])


@pytest.fixture
def told(training, tmp_path, monkeypatch) -> list[object]:
    """What that agent tells its leader: exit codes of failed workers, or that it leaves."""
    said: list[object] = []
    training._session = SimpleNamespace(
        report=lambda report: said.append(
            "finished" if isinstance(report, Finished) else [f.exit_code for f in report.failures]
        ),
        leave_now=lambda: said.append("leaves"),
        verdict=None,
    )
    notices = PreemptionState(EventLog(tmp_path / "7_1.jsonl", "7_1"))
    training._agent_context = SimpleNamespace(
        notices=notices, place=NodeIdentity("7_1", "n1", tmp_path), replica=None, is_command=False
    )
    monkeypatch.setattr(ElasticAgent, "_round", SimpleNamespace(number=1, first_rank=3))
    training._awaits_leader, training._processes = False, []
    training._retention = Mock()
    training.pages_folder = tmp_path
    return said


@pytest.mark.parametrize(
    ("exit_code", "reason", "expected"),
    [
        (-signal.SIGTERM, None, [None]),
        (-signal.SIGTERM, Reason.TIME_LIMIT, [None]),
        (-signal.SIGTERM, Reason.SIGNAL, "leaves"),
        (0, None, [0]),
        (0, Reason.SIGNAL, "leaves"),
        (0, Reason.ASKED, "leaves"),
        (7, Reason.TIME_LIMIT, "leaves"),
    ],
)
def test_workers_that_end_under_notice_have_not_failed(
    training, told, monkeypatch, exit_code, reason, expected
):
    """Slurm signals every process of a task in some set-ups; a script may save, and exit."""
    monkeypatch.setattr(module, "_NOTICE_MAY_COME_S", 0.0)
    if reason is not None:
        training._agent_context.notices.add(PreemptionNotice(reason, 1e9))
    training._report({3: exit_code})
    assert told == [expected]
    assert training._retention.keep_round.called == (expected != "leaves")


def test_a_notice_may_come_a_moment_after_a_worker_has_exited(training, told, monkeypatch):
    """Slurm signals one process after another."""
    notices = training._agent_context.notices
    monkeypatch.setattr(
        module.time, "sleep", lambda _: notices.add(PreemptionNotice(Reason.SIGNAL, 1e9))
    )
    training._report({3: 0})
    assert told == ["leaves"]


@pytest.mark.parametrize(
    ("step", "total", "reason", "expected"),
    [
        (23, 100, Reason.SIGNAL, "leaves"),
        (23, 100, Reason.ASKED, "leaves"),
        (23, 100, None, "finished"),
        (100, 100, Reason.SIGNAL, "finished"),
        (23, None, Reason.SIGNAL, "finished"),
    ],
)
def test_a_function_that_returns_under_notice_before_the_last_step_has_not_succeeded(
    training, told, monkeypatch, step, total, reason, expected
):
    """A script may set a flag at SIGTERM, save, and return; one that stops early is done."""
    monkeypatch.setattr(module, "_NOTICE_MAY_COME_S", 0.0)
    training._session.report = lambda _: told.append("finished")
    training.pages[3].report(step, None, None, total)
    if reason is not None:
        training._agent_context.notices.add(PreemptionNotice(reason, 1e9))
    training.pages[3].report_return()
    training._check_workers()
    assert told == [expected]


@pytest.mark.parametrize(
    ("exit_code", "reason", "expected"),
    [(0, None, "finished"), (0, Reason.SIGNAL, "leaves"), (7, None, [7])],
)
def test_a_command_succeeds_by_its_exit_code(
    training, told, monkeypatch, exit_code, reason, expected
):
    """As for torchrun: a script may call os._exit(0). Under a notice that is no end of it."""
    monkeypatch.setattr(module, "_NOTICE_MAY_COME_S", 0.0)
    ended = {3: exit_code}
    monkeypatch.setattr(
        ElasticAgent, "_ended_by_themselves",
        lambda self: {} if self.pages[3].read().returned else ended,
    )  # fmt: skip
    training._agent_context.is_command = True
    training._agent_context.settings = SimpleNamespace(stop_timeout_s=1)
    if reason is not None:
        training._agent_context.notices.add(PreemptionNotice(reason, 1e9))
    training._check_workers()
    if not training._awaits_leader:
        training._check_workers()
    assert told == [expected]


def test_workers_are_done_once_the_function_has_returned_in_all(training, told):
    """Their processes may go on for a while: a tracker sends its files at exit."""
    training._session.report = lambda _: told.append("finished")
    training.pages[4] = SharedPage.create(training.pages_folder, 1)
    training.pages[4].report_return()
    training._check_workers()
    assert told == [] and not training._awaits_leader
    training.pages[3].report_return()
    training._check_workers()
    assert told == ["finished"]


class Exits:
    """The processes of a node's two workers after the success of the run, and the events."""

    def __init__(self, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.notices = PreemptionState(EventLog(folder / "7_1.jsonl", "7_1"))
        context = SimpleNamespace(
            settings=AgentSettings(exit_timeout_s=60.0), control=SimpleNamespace(path=folder),
            notices=self.notices,
            place=NodeIdentity("7_1", "n1", folder),
            events=SimpleNamespace(write=lambda _, **fields: self.events.append(fields)),
        )  # fmt: skip
        self.watch = ExitWatch(context, 100.0)
        proc = SimpleNamespace(pid=2**30)
        self.workers = {
            rank: SimpleNamespace(own_exit_code=None, local_rank=rank - 4, proc=proc)
            for rank in (4, 5)
        }

    def is_over(self, now: float) -> bool:
        """Ask it at a time."""
        return self.watch.is_over(self.workers, now)


def test_processes_that_linger_after_the_success_are_named_and_ended(tmp_path):
    """Named once after a while, and ended after a limit of their own."""
    exits = Exits(tmp_path)
    exits.workers[4].own_exit_code = 0
    assert not any(exits.is_over(now) for now in (100.0, 109.0, 111.0, 112.0, 159.0))
    assert exits.is_over(160.0)
    named, ended = exits.events
    assert named["ranks"] == ended["ranks"] == [{"rank": 5}]
    assert "still running" in named["how"] and "exit_timeout_s=60" in ended["how"]


def test_processes_that_end_in_time_are_silent_and_failures_at_exit_named(tmp_path):
    """The run has succeeded in both cases."""
    exits = Exits(tmp_path)
    exits.workers[4].own_exit_code = exits.workers[5].own_exit_code = 0
    assert exits.is_over(105.0) and not exits.events
    exits.workers[5].own_exit_code = -signal.SIGSEGV
    assert exits.is_over(105.0)
    assert "by SIGSEGV" in exits.events[0]["how"]


def test_a_node_under_notice_does_not_wait_for_what_lingers(tmp_path):
    """It would be killed, and its task requeued."""
    exits = Exits(tmp_path)
    exits.notices.add(PreemptionNotice(Reason.SIGNAL, 130.0))
    assert not exits.is_over(120.0)
    assert exits.is_over(126.0) and "the node is left" in exits.events[-1]["how"]


def test_an_error_under_a_notice_without_a_signal_is_a_failure(training, told, tmp_path):
    """The script says that something is wrong, whatever becomes of the node."""
    training._agent_context.notices.add(PreemptionNotice(Reason.TIME_LIMIT, 1e9))
    error = {"hpc_elastic": {"exception": "ValueError", "message": "boom", "exit_code": 1}}
    WorkerFiles(NodeIdentity("7_1", "n1", tmp_path), 1, 3, 0).error.write_text(json.dumps(error))
    training._report({3: 1})
    assert told == [[1]]


def test_what_has_failed_is_told_before_its_group_is_stopped(training, told, tmp_path, monkeypatch):
    """The process group of a worker that exits may be gone a while before its process is.

    Its peers fail of that, and their agents report first.
    """
    monkeypatch.setattr(module, "_NOTICE_MAY_COME_S", 0.0)
    training._report_before_stop()
    assert told == [], "it is at work"
    files = WorkerFiles(NodeIdentity("7_1", "n1", tmp_path), 1, 3, 0)
    files.error.write_text('{"hpc_elastic": {"exit_code": 0}}')
    training._report_before_stop()
    training._report_before_stop()
    assert told == [[0]], "once"


def first_steps(*workers: dict[str, Any], started: float = 90.0) -> dict[str, Any] | None:
    """The event of the first step of workers that have published these fields."""
    return first_step_fields([replace(BLANK, **fields) for fields in workers], started)


def test_an_event_once_all_workers_of_the_node_have_made_a_step():
    """With the slowest one's times; one that only counts its steps is enough to say so."""
    slow = {"first_step": 8, "first_time": 101.0, "restored": 7, "restore_s": 2.5}
    fast = {**slow, "first_time": 100.0, "restore_s": 2.0, "counted": True}
    assert first_steps() is first_steps({}) is first_steps(fast, {}) is None
    assert first_steps(fast, slow) == {
        "step": 8, "restored": 7, "restore_s": 2.5, "start_s": 11.0, "counted": True, "time": 101.0,
    }  # fmt: skip


def test_a_start_never_takes_less_than_nothing():
    """Clocks may be set; and nothing was restored."""
    fields = first_steps({"first_step": 1, "first_time": 80.0})
    assert (fields["start_s"], fields["restored"], fields["counted"]) == (0.0, None, False)


class Saving:
    """An agent that watches its first rank's checkpoints, and the events that it writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[tuple[str, int]] = []
        self.log = CheckpointFailureLog(self._write)

    def _write(self, kind: str, *, step: int, why: str = "-") -> None:
        self._events.append((kind.removeprefix("checkpoint_"), step, why))

    def start_round(self) -> SharedPage:
        """Begin another round, of which it has the first rank; return the worker's page."""
        page = SharedPage.create(self._folder, 0)
        self.log.watch(page)
        return page

    def poll(self) -> list[tuple[str, int, str]]:
        """Return the events of one poll: kind, step, reason."""
        self.log.poll()
        events, self._events = self._events, []
        return events


def test_an_incident_is_written_once_with_its_reason_and_its_end(tmp_path):
    """However many checkpoints it costs; what stays in memory does not end it."""
    agent = Saving(tmp_path)
    worker = agent.start_round()
    worker.report_stored(20, 0.5)
    assert agent.poll() == []
    worker.report_not_saved(40, "No space left on device")
    assert agent.poll() == [("failed", 40, "No space left on device")]
    worker.report_not_saved(60, "No space left on device")
    worker.announce(60)
    assert agent.poll() == agent.poll() == []
    worker.report_stored(80, 0.5)
    assert agent.poll() == [("recovered", 80, "-")]
    worker.report_not_saved(100, "Stale file handle")
    worker.report_stored(100, 0.5)  # an urgent save repeats the one that failed
    assert agent.poll() == [("failed", 100, "Stale file handle"), ("recovered", 100, "-")]


def test_an_incident_may_outlast_a_round(tmp_path):
    """Until it is over, or another node has the first rank: nobody here hears of its end."""
    agent = Saving(tmp_path)
    agent.start_round().report_not_saved(40, "why")
    assert len(agent.poll()) == 1
    worker = agent.start_round()
    worker.report_not_saved(60, "why")
    assert agent.poll() == []
    worker.report_stored(80, 0.5)
    assert agent.poll() == [("recovered", 80, "-")]
    worker.report_not_saved(100, "why")
    assert len(agent.poll()) == 1
    agent.log.watch(None)
    assert agent.poll() == []
    agent.start_round().report_stored(120, 0.5)
    assert agent.poll() == []


def test_a_reason_of_any_length_and_alphabet_fits_on_the_page(tmp_path):
    """What is too long is cut, and nothing else on the page is touched."""
    agent = Saving(tmp_path)
    worker = agent.start_round()
    worker.report(40, 0.5, 7)
    worker.report_not_saved(40, "ü€" * 5000)
    ((_, _, why),) = agent.poll()
    assert why.startswith("ü€ü€") and 400 < len(why) < 1000
    worker.report_not_saved(60, "short")
    assert worker.why_not_saved() == "short"
    now = worker.read()
    assert (now.step, now.loss, now.samples) == (40, 0.5, 7)


def test_a_training_that_is_not_what_was_meant_is_an_event_once_a_round():
    """Workers without the others' process group, and a loss that is no number."""
    told = []
    events = SimpleNamespace(write_behind=lambda kind, **fields: told.append((kind, fields)))
    watch = TrainingWatch(2, "n1", events)
    for worker in ({}, {"group": 2}, {"group": 0}, {"group": 0, "bad_step": 7, "bad_loss": "nan"}):
        watch.update({1: replace(BLANK, **worker)})
        watch.update({1: replace(BLANK, **worker)})
    (apart, group), (bad, loss) = told
    assert (apart, bad) == ("group_mismatch", "bad_loss") and group["world_size"] == 2
    assert group["ranks"] == [{"rank": 1, "group_size": 0}]
    assert loss["ranks"] == [{"rank": 1, "step": 7, "loss": "nan"}]


def test_replicas_need_no_process_group_of_all():
    """With ft=true each has its own."""
    told = []
    watch = TrainingWatch(None, "n1", SimpleNamespace(write_behind=lambda *a, **_: told.append(a)))
    watch.update({0: replace(BLANK, group=1)})
    assert not told


@pytest.mark.parametrize("way", ["passes", "lasts", "notice"])
def test_a_start_that_the_system_refuses_is_tried_again(training, monkeypatch, way):
    """With growing pauses; what lasts is reported as the workers' failure, with its reason."""
    now, results, told = [0.0], [OSError(errno.ENOSPC, "no space")] * 3, []
    if way == "lasts":
        results *= 100

    def start_once():
        if results:
            raise results.pop()

    agent = training
    agent._start_once = start_once
    agent._saves, agent._placed = Mock(), SimpleNamespace(first_rank=3, number=2)
    agent._refused, agent._awaits_leader = None, False
    agent._session = SimpleNamespace(
        verdict=None,
        stop_requested=False,
        leave_now=lambda: told.append("left"),
        report=lambda failed: told.extend(failed.failures),
    )
    agent._agent_context = SimpleNamespace(
        place=NodeIdentity("7_1", "n1", Path("logs")), control=Mock(),
        notices=SimpleNamespace(current=None),
    )  # fmt: skip
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.worker_process, "kill_strays", lambda _: 0)
    agent._start_workers()
    if way == "notice":
        agent._agent_context.notices.current = "a notice"
    while agent._refused is not None and now[0] < 600.0:
        now[0] += 0.5
        assert agent._monitor_workers()
    if way == "passes":
        assert (told, 3.0 <= now[0] <= 10.0) == ([], True)
    elif way == "notice":
        assert told == ["left"]
    else:
        (failure,) = told
        assert "no space" in failure.message and failure.exception == "OSError"


def test_a_start_in_a_removed_directory_waits_for_the_end_of_the_run(training, monkeypatch):
    """The leader ends it, with the reason; a traceback of this node would hide that."""
    training._start_once = Mock(side_effect=FileNotFoundError(errno.ENOENT, "tasks/round-1.out"))
    monkeypatch.setattr(module.worker_process, "kill_strays", lambda _: 0)
    training._refused = None
    training._start_workers()
    assert "round-1.out" in str(training._refused.error)


def test_an_error_that_does_not_pass_is_not_hidden(training):
    """A folder that may not be written, say."""
    training._start_once = Mock(side_effect=PermissionError(errno.EACCES, "denied"))
    with pytest.raises(PermissionError):
        training._start_workers()
