"""A node's metrics: totals, the text file, the port, and the content of heartbeats."""

import os
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hpc_elastic.agent import metrics
from hpc_elastic.agent.metrics import (
    Exporter,
    Sample,
    TaskCounters,
    WorkerLoads,
    WorkerObserver,
)
from hpc_elastic.agent.stacks import main_thread_load_s
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)
LABELS = ("r1", "7_1", "n3")


def read(text: str) -> dict[str, float]:
    """The values in a text of metrics; all have the labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels == dict(zip(metrics.LABELS, LABELS, strict=True))
            found[sample.name] = sample.value
    return found


def test_steps_that_are_made_again_are_no_goodput():
    """Ten seconds of ten steps; a restart that repeats five of them; then five new ones."""
    counters = TaskCounters(0.0)
    for step in range(11):
        counters.update(replace(BLANK, step=step), float(step))
    counters.new_round()
    for i, step in enumerate(range(5, 16)):
        sample = counters.update(replace(BLANK, step=step), 20.0 + i)
    assert sample.goodput_ratio == pytest.approx(15 / 30) and sample.up_seconds == 30.0
    assert sample.steps_per_second == pytest.approx(1.0)


def test_checkpoints_are_timed():
    """Their age since the last that was announced; what they held up, over all rounds."""
    counters = TaskCounters(0.0)
    assert counters.update(BLANK, 1.0).checkpoint_age_seconds is None
    counters.update(replace(BLANK, boundary=4, busy_s=1.5), 2.0)
    counters.new_round()
    sample = counters.update(replace(BLANK, busy_s=0.5), 7.0)
    assert (sample.checkpoint_age_seconds, sample.checkpoint_blocked_seconds) == (5.0, 2.0)


def test_the_file_parses_and_says_what_is_known(tmp_path):
    """Nothing is invented for what the script does not report."""
    file = tmp_path / "metrics" / "7_1.prom"
    exporter = Exporter(file, LABELS, lambda: Sample(step=12, loss=0.5, restarts=1))
    exporter.close()
    exporter._thread.join(60)
    assert read(file.read_text()) == {
        "hpc_elastic_step": 12.0, "hpc_elastic_loss": 0.5, "hpc_elastic_restarts_total": 1.0,
    }  # fmt: skip
    assert [f.name for f in file.parent.iterdir()] == ["7_1.prom"]


def test_the_port_is_loopbacks_and_one_that_is_taken_is_no_error(tmp_path, caplog):
    """Two agents on one machine may be given the same."""
    first = Exporter(tmp_path / "a.prom", LABELS, lambda: Sample(step=1), port=0)
    address, port = first._server.server_address
    assert address == "127.0.0.1"
    second = Exporter(tmp_path / "b.prom", LABELS, lambda: Sample(step=2), port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    first.close()
    second.close()
    second._thread.join(60)
    assert f"no metrics on port {port}" in caplog.text
    assert read((tmp_path / "b.prom").read_text())["hpc_elastic_step"] == 2.0


def test_a_file_system_that_fails_costs_the_file_only(tmp_path):
    """The agent goes on."""
    (tmp_path / "metrics").write_text("in the way")
    Exporter(tmp_path / "metrics" / "x.prom", LABELS, Sample).close()


def test_loads_are_measured_over_windows_of_several_steps():
    """A window is as long as it takes, and a restart begins another."""
    loads = WorkerLoads()
    loads.update({0: (10, 1.0), 1: (10, 2.0)}, 100.0)
    loads.update({0: (12, 1.2), 1: (12, 3.0)}, 105.0)
    assert loads.number == 0, "two steps are too few"
    loads.update({0: (20, 2.0), 1: (20, 7.0)}, 110.0)
    assert loads.number == 1
    assert loads.last == [(0, pytest.approx(0.1), 1.0), (1, pytest.approx(0.5), 1.0)]
    loads.update({0: (3, 0.1), 1: (3, 0.1)}, 115.0)
    assert loads.number == 1
    loads.update({0: (8, 1.1), 1: (8, 0.6)}, 120.0)
    assert loads.number == 2 and loads.last[0][1] == pytest.approx(0.2)


def test_a_process_without_a_known_load_is_left_out():
    """It has ended, or the kernel has no such counter."""
    assert main_thread_load_s(2**22 + 1) is None
    ours = main_thread_load_s(os.getpid())
    if Path("/proc/self/schedstat").exists():
        assert ours is not None and ours > 0
    loads = WorkerLoads()
    loads.update({0: (1, None)}, 0.0)
    loads.update({0: (9, None)}, 9.0)
    assert loads.number == 0


def test_an_observer_tells_of_the_first_worker_and_of_the_node(tmp_path):
    """Before there are workers, of the node alone."""
    no_gpus = metrics.GpuMeter((), print)
    observer = WorkerObserver(lambda: Sample(group_nodes=2, requeues=1), no_gpus)
    assert observer.progress() == {} and observer.sample().group_nodes == 2
    pages = {4: SharedPage.create(tmp_path, 0), 5: SharedPage.create(tmp_path, 1)}
    observer.start_round(pages, lambda: {0: os.getpid(), 1: os.getpid()})
    pages[4].report(7, 0.25, 128, 20)
    pages[4].report_metrics({"lr": 0.5})
    expected = {"step": 7, "total": 20, "loss": 0.25, "samples": 128, "blocked_s": 0.0,
                "metrics": {"lr": 0.5}, "gpu_use": None, "gpu_memory": None}  # fmt: skip
    assert observer.progress() == expected
    sample = observer.sample()
    assert (sample.step, sample.samples, sample.group_nodes, sample.requeues) == (7, 128, 2, 1)


def test_the_use_of_the_tasks_own_gpus_is_measured(tmp_path, monkeypatch):
    """By nvidia-smi, seldom; and more seldom after a failure, the first of which is reported."""
    command, listed = tmp_path / "nvidia-smi", tmp_path / "listed"
    command.write_text(f"#!/bin/sh\ncat {listed}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    lines = ["0, GPU-a, 1000, 500, 80", "1, GPU-b, 1000, 100, 40", "2, GPU-c, 1000, 900, [N/A]"]
    listed.write_text("\n".join(lines))
    failures, every_s = [], metrics.GPUS_EVERY_S
    meter = metrics.GpuMeter(["0", "GPU-b"], failures.append)
    sample = meter.measure(0.0)
    assert (sample.gpu_use_ratio, sample.gpu_memory_ratio) == (pytest.approx(0.6), 0.5)
    listed.write_text("Unable to determine the device handle")
    assert meter.measure(every_s - 1) == sample and meter.measure(every_s) == Sample()
    assert meter.measure(11 * every_s) == Sample() and meter.fails
    assert failures == ["Unable to determine the device handle"]
    lines.append("3, GPU-d, [N/A], [N/A], [N/A]")
    listed.write_text("\n".join(lines))
    assert meter.measure(12 * every_s) == Sample() and meter.measure(21 * every_s) == sample
    assert not meter.fails
    of_all = metrics.GpuMeter(["?", "?", "?"], print).measure(0.0)
    assert (of_all.gpu_use_ratio, of_all.gpu_memory_ratio) == (pytest.approx(0.6), 0.9)
