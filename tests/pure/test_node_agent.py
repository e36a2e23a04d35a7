"""What a node's task decides by itself: how many workers, and how it goes back to the queue."""

import time
from collections.abc import Callable
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from hpc_elastic.agent import node_agent as module
from hpc_elastic.agent.node_agent import TAKEN, num_workers
from hpc_elastic.config.schema import BACKENDS, NodeRange, RunSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, SlurmCommandError
from hpc_elastic.rendezvous.messages import Requeue
from hpc_elastic.run.events import EventLog, read_events
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import NodeRecord


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [(3, 8, 3), ("gpu", 2, 2), ("cpu", 2, 16), ("auto", 2, 2), ("auto", 0, 1)],
)
def test_workers_of_a_node(wanted, gpus, expected, monkeypatch):
    """A number is taken as it is; the words go by torch's GPUs and Slurm's CPUs."""
    assert num_workers(wanted, 16, gpus) == expected
    monkeypatch.setattr(module, "driver_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(module, "can_be_used_by_torch", lambda: True)
    counted = CompletedProcess([], 0, f"a note of torch's\n{gpus}\n", "")
    monkeypatch.setattr(module._util, "run", lambda *_, **__: counted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert num_workers(wanted, 16, None) == expected
    counted.returncode, counted.stderr = 1, "ImportError: libcudart"
    if isinstance(wanted, str) and wanted != "cpu":
        with pytest.raises(HpcElasticError, match="libcudart"):
            num_workers(wanted, 16, None)


def test_gpu_without_a_gpu_says_which_key_asks_for_one():
    """The remedy is a setting."""
    with pytest.raises(ConfigError, match=r"launcher\.gpus_per_node"):
        num_workers("gpu", 16, 0)
    with pytest.raises(ConfigError, match=r"no GPU on this node: give a number or cpu, or leave"):
        num_workers("gpu", 16, 0, is_local=True)


@pytest.mark.parametrize("granted", [None, ""])
def test_a_node_with_gpus_whose_task_has_none_does_not_train_on_a_cpu(
    monkeypatch, tmp_path, granted
):
    """One CPU worker a node would be said by nothing. A number of workers is a choice."""
    monkeypatch.setattr("hpc_elastic.gpus.NVIDIA_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if granted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", granted)
    assert num_workers("auto", 16, None) == 1, "no process is started to count none"
    (tmp_path / "0000:07:00.0").mkdir()
    with pytest.raises(ConfigError, match=r"was granted none: set launcher\.gpus_per_node"):
        num_workers("auto", 16, 0)
    assert num_workers(1, 16, 0) == num_workers("auto", 16, 0, is_local=True) == 1


def test_a_node_has_a_worker_for_each_slice_of_mig(monkeypatch):
    """torch counts one, since CUDA shows one to a process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2,MIG-3")
    assert num_workers("auto", 16, 1) == num_workers("gpu", 16, None) == 3
    assert num_workers(2, 16, 1) == 2


def settings(backend: str) -> RunSettings:
    """The settings of a run of two nodes."""
    return RunSettings(NodeRange(2, 2), 1, BACKENDS[backend]())


@pytest.mark.parametrize(("known", "since"), [({}, 0), ({"SCRIPT_STARTED": "-600"}, -600)])
def test_the_time_limit_counts_from_the_job_s_start(monkeypatch, known, since):
    """A release without SLURM_JOB_END_TIME: a setup of ten minutes is a part of the limit."""
    monkeypatch.setattr(module, "task_queue", lambda *_: None)
    now = time.time()
    env = {f"HPC_ELASTIC_{k}": str(int(now + int(v))) for k, v in known.items()}
    spec = SimpleNamespace(settings=settings("slurm"))
    task = SimpleNamespace(
        slurm=SlurmEnvironment.from_env({**IN_JOB, **env}), spec=spec, run=None, name="7_1",
        attempt=0, num_in_array=1, pool=SimpleNamespace(time_s=3600.0, time_min_s=None),
    )  # fmt: skip
    left_s = module._time_limit(task, now).known_left_s
    assert left_s == pytest.approx(3600 + since, abs=10)


IN_JOB = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
"""What a task of Slurm 22.05 knows of itself."""


def sent_back(tmp_path, monkeypatch, requeue_after) -> int:
    """Let a node be sent back for half a minute; return its task's exit code."""
    monkeypatch.setattr(module.requeue, "requeue_after", requeue_after)
    spec = SimpleNamespace(settings=settings("slurm"))
    node = SimpleNamespace(
        _task=SimpleNamespace(name="7_1", attempt=2, run="its run", spec=spec),
        _events=EventLog(tmp_path / "7_1.jsonl", "7_1"),
        _spec=spec,
    )
    return module.NodeAgent._go_back(node, Requeue(30.04))


def test_a_node_that_is_sent_back_requeues_itself(tmp_path, monkeypatch):
    """This attempt of its task, and not before its time."""
    given = []
    code = sent_back(tmp_path, monkeypatch, lambda *a, **fields: given.append((a, fields)))
    ((task, _, delay_s), fields) = given[0]
    assert (task, delay_s, fields) == ("7_1", 30.04, {"attempt": 2, "run": "its run"})
    assert code == TAKEN
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["delay_s"]) == ("nodes_requeued", 30.0)


def test_a_node_that_can_not_be_requeued_ends_its_task(tmp_path, monkeypatch, caplog):
    """It holds no node that nobody uses; Slurm shows that it failed."""

    def fails(*_: object, **__: object) -> None:
        raise SlurmCommandError(["scontrol"], 1, "Unable to contact slurm controller")

    assert sent_back(tmp_path, monkeypatch, fails) == 1
    assert "could not be given back" in caplog.text and "Unable to contact" in caplog.text


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_node_that_is_left_goes_as_its_scheduler_says(tmp_path, monkeypatch, launcher):
    """The local launcher is one, and knows when a node is rid of a task."""
    given, left = [], []

    def requeue_or_exit(*args: object, **fields: object) -> ExitAction:
        given.append((args[0], fields))
        return ExitAction.REQUEUE

    def leave(*args: object) -> None:
        left.append(args[:3])

    monkeypatch.setattr(module.requeue, "requeue_or_exit", requeue_or_exit)
    monkeypatch.setattr(module.quarantine, "lift_own_quarantine", leave)
    spec = SimpleNamespace(settings=settings(launcher), submission=str(tmp_path))
    slurm = SimpleNamespace(node_name="n3")
    task = SimpleNamespace(name="7_1", attempt=2, run="its run", spec=spec, slurm=slurm)
    assert (
        module._leave_job(task, EventLog(tmp_path / "7_1.jsonl", "7_1"), Reason.TIME_LIMIT) == TAKEN
    )
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["reason"], event["how"]) == (
        "task_exited",
        "time_limit",
        "requeue",
    )
    expected = {"attempt": 2, "reason": Reason.TIME_LIMIT, "run": "its run"}
    for _, fields in given:
        assert fields.pop("note") is not None
    assert given == [("7_1", expected)]
    assert left == ([("its run", "7_1", "n3")] if launcher == "slurm" else [])


@pytest.mark.parametrize(
    ("reason", "state", "node", "told"),
    [
        (Reason.SIGNAL, {"preempted": True}, "IDLE+DRAIN: broken", {"means": "preempted"}),
        (Reason.SIGNAL, {"state": "COMPLETING", "restarts": 3}, "", {"means": "requeued"}),
        (
            Reason.SIGNAL, {"state": "COMPLETING", "restarts": 3}, "IDLE+DRAIN: broken",
            {"means": "requeued", "node": "IDLE+DRAIN: broken"},
        ),
        (Reason.SIGNAL, {"state": "COMPLETING"}, "", {"means": "cancelled"}),
        (Reason.SIGNAL, {}, "IDLE+DRAIN: broken", {"node": "IDLE+DRAIN: broken"}),
        (Reason.SIGNAL, {"state": "COMPLETING"}, None, {"means": "cancelled"}),
        (Reason.ASKED, {"preempted": True}, "", {}),
    ],
)  # fmt: skip
def test_what_sigterm_meant_is_written_down(tmp_path, monkeypatch, reason, state, node, told):
    """As Slurm says; where it says nothing of it, or does not answer, nothing is claimed."""

    class Client:
        def node(self, host: str) -> NodeRecord:
            assert host == "n3"
            if node is None:
                raise SlurmCommandError(["scontrol"], 1, "Unable to contact slurm controller")
            return NodeRecord(None, True, False, str(node))

    def requeue_or_exit(*_: object, note: Callable[[ExitFacts], None], **__: object) -> ExitAction:
        note(ExitFacts(reason, TaskState("7_1", **{"state": "RUNNING", "restarts": 2, **state}), 2))
        return ExitAction.REQUEUED

    monkeypatch.setattr(module, "SlurmClient", Client)
    monkeypatch.setattr(module.requeue, "requeue_or_exit", requeue_or_exit)
    monkeypatch.setattr(module.quarantine, "lift_own_quarantine", lambda *_: None)
    spec = SimpleNamespace(settings=settings("slurm"))
    slurm = SimpleNamespace(node_name="n3")
    task = SimpleNamespace(name="7_1", attempt=2, run=None, spec=spec, slurm=slurm)
    module._leave_job(task, EventLog(tmp_path / "7_1.jsonl", "7_1"), reason)
    (event,) = read_events(tmp_path)
    assert {key: event[key] for key in ("means", "node") if key in event} == told
