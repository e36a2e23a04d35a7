"""`hpc-elastic status` and `list` beside a real run with `launcher=local`."""

import contextlib
import html
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_runs import PATIENCE_S, LocalRun
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hpc_elastic.cli.main import main
from hpc_elastic.report import KINDS
from hpc_elastic.report.details import RunDetails, read_details
from hpc_elastic.report.progress_log import read_points
from hpc_elastic.report.run_view import read_view

EVERY = 150
LOST = 15
"""So many steps at least die with a node."""
SCRIPT = textwrap.dedent(
    """
    import json
    import time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import Checkpointer, report, should_checkpoint
    from hpc_elastic.worker.reporting import run_scalars

    FOLDER = Path({folder!r})

    @hydra.main(version_base=None)
    def main(cfg):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        state = {{"weights": torch.zeros(100_000)}}
        checkpoints = Checkpointer(state)
        step, over = checkpoints.load_latest() or 0, torch.tensor(0)
        while not over:
            step += 1
            time.sleep(0.05)
            over.fill_(int((FOLDER / "stop").exists()))
            dist.all_reduce(over)
            report(step=step, loss=1 / step, samples=8 * step, total_steps=100_000, lr=0.5)
            if should_checkpoint(step, every_steps={every}):
                checkpoints.save(step)
        checkpoints.close()
        (FOLDER / "scalars").write_text(json.dumps(run_scalars()))
        return step

    if __name__ == "__main__":
        main()
    """
)


class Run(LocalRun):
    """A run of one to two nodes, and what is to be found out about it."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT.format(folder=str(folder), every=EVERY))
        super().__init__(script, folder, "-m", "+launcher=local", "nodes=1:2")

    def until(self, holds: Callable[[RunDetails], object], what: str) -> RunDetails:
        """Wait until something is so; return what was found then."""
        found: list[RunDetails] = []

        def is_so() -> bool:
            if (self.path / "run.json").exists():
                found.append(read_details(read_view(self.path)))
            return bool(found) and bool(holds(found[-1]))

        self.eventually(is_so, what)
        return found[-1]

    def metrics(self) -> dict[str, float]:
        """Return what the node of the leader shows to a monitoring system."""
        file = self.path / "metrics" / f"{self.events('leader')[-1]['task']}.prom"
        families = text_string_to_metric_families(file.read_text())
        samples = (sample for family in families for sample in family.samples)
        return {sample.name.removeprefix("hpc_elastic_"): sample.value for sample in samples}

    @contextlib.contextmanager
    def launcher_stopped(self) -> Iterator[None]:
        """Let no node be started."""
        self.launcher.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.launcher.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Let the training end."""
        (self.folder / "stop").touch()
        self.wait()


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    """A run under way."""
    with Run(tmp_path) as run:
        yield run


def test_a_run_is_told_of_from_its_start_to_its_end(run, capsys):
    """It trains; loses a node, and replays what was not saved; and ends, as its watch does."""
    details = run.until(
        lambda f: f.nodes and f.nodes[0] == 2 and f.pace.steps_per_s and f.saved,
        "two nodes train and have saved",
    )
    assert (details.view.phase, details.nodes) == ("training", (2, 1, 2))
    assert [task.ranks for task in details.tasks] == [(0, 0), (1, 1)]
    assert {task.state for task in details.tasks} == {"RUNNING"}
    assert details.pace.remaining_s and details.status.samples == 8 * details.status.step
    assert details.account.goodput is not None and 0 < details.account.goodput < 1
    first = {event["task"]: event for event in run.events("first_step")}
    assert {(e["step"], e["restored"], e["round"]) for e in first.values()} == {(1, None, 1)}
    assert all(e["start_s"] > 0 and e["attempt"] == 0 for e in first.values())

    follower = next(e for e in run.events("task") if e["task"] != run.events("leader")[0]["task"])
    run.until(lambda f: LOST <= f.status.step - f.saved.step < EVERY / 2, "something is to be lost")
    os.kill(follower["pid"], signal.SIGKILL)
    run.until(lambda f: "PENDING" in {task.state for task in f.tasks}, "a node is lost")
    known = {}

    def is_alone(details) -> bool:
        known.update(run.metrics())
        in_metrics = known["group_nodes"] == 1 and "checkpoint_age_seconds" in known
        return details.round == 2 and details.pace.steps_per_s and in_metrics

    with run.launcher_stopped():  # the lost node does not come back meanwhile
        details = run.until(is_alone, "one goes on alone, and its metrics show that")
        stays = watch(run)
    assert details.nodes == (1, 1, 2) and details.departures == {"node_lost": 1}
    sizes = [size.nodes for size in details.account.sizes]
    assert [size for size in sizes if size] in ([2, 1], [1, 2, 1]) and sizes[-2] == 0
    (again,) = (e for e in run.events("first_step") if e["round"] == 2)
    assert again["restored"] % EVERY == 0 and again["step"] == again["restored"] + 1
    assert 0 < again["restore_s"] < again["start_s"]
    assert main(["status", str(run.path)]) == 0
    page = capsys.readouterr().out
    assert "● training" in page and "1 node lost" in page and "replayed" in page

    assert (known["rounds_total"], known["restarts_total"], known["requeues_total"]) == (2, 0, 0)
    assert known["checkpoint_blocked_seconds_total"] > 0 and 0 < known["goodput_ratio"] < 1

    run.end()
    lines = stays.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert stays.returncode == 0 and "succeeded" in lines[-1], "a watch ends with the run"
    told = json.loads((run.folder / "scalars").read_text())
    assert (told["round"], told["restarts"], told["world_size"]) == (2, 0, 1)
    assert 0 < told["goodput"] < 1
    assert main(["status", str(run.path), "--watch"]) == 0, "it has ended"
    assert "succeeded" in capsys.readouterr().out
    assert main(["status", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["phase"] == told["ended"]["status"] == "succeeded" and told["notes"] == []
    spent = told["node_seconds"]
    assert list(spent) == list(KINDS) and spent["replayed"] > 0
    assert spent["restore"] >= again["restore_s"] - 0.05, "it is shown in tenths"
    blocked = max(point.blocked_s for point in read_points(run.path / "progress.jsonl"))
    assert 0 < blocked < spent["useful"]
    assert told["goodput"] == pytest.approx(spent["useful"] / sum(spent.values()), abs=0.01)
    assert told["step"] >= told["checkpoint"]["step"] > 0
    assert 1 <= told["checkpoint"]["kept"] <= 2, "a save that a newer one overtakes is left out"

    reported_as(told, run.path, capsys)

    assert main(["list", "--json"]) == 0
    (listed,) = (r for r in json.loads(capsys.readouterr().out) if r["run"] == str(run.path))
    assert (listed["state"], listed["run_id"]) == ("succeeded", told["run_id"])


def watch(run: Run) -> subprocess.Popen[str]:
    """Watch it without a terminal, in lines: once to leave by Ctrl-C, without a word, and again."""
    argv = [sys.executable, "-m", "hpc_elastic", "status", str(run.path), "--watch", "--every=0.2"]
    left = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert left.stdout is not None
    line = left.stdout.readline()
    assert "training" in line, line + left.communicate(timeout=PATIENCE_S)[1]
    left.send_signal(signal.SIGINT)
    said = left.communicate(timeout=PATIENCE_S)[1]
    assert said.strip() == "" and left.returncode == 130
    stays = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert stays.stdout is not None and "training" in stays.stdout.readline()
    return stays


def reported_as(told: dict, folder: Path, capsys) -> None:
    """The report says the same as the status; its sums are those of all stretches of all nodes."""
    assert main(["report", str(folder), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["about"]["phase"] == "succeeded" and report["notes"] == []
    assert {"lr": 0.5} in [point["metrics"] for point in report["progress"]]
    spent, kinds = report["spent"], report["spent"]["by_kind"]
    assert kinds == pytest.approx(told["node_seconds"], abs=0.06) and kinds["restore"] > 0
    assert sum(kinds.values()) == pytest.approx(spent["node_s"])
    for kind, total in kinds.items():
        stretches = [i for node in report["nodes"] for i in node["intervals"] if i["kind"] == kind]
        assert sum(i["end"] - i["begin"] for i in stretches) == pytest.approx(total, abs=1e-3)
    (lost,) = (change for change in report["changes"] if change["fault"])
    assert lost["cause"] == "node_lost" and lost["lost_steps"] >= LOST and lost["node_s"] > 0
    assert {node["ended_by"] for node in report["nodes"]} == {"node_lost", "end"}
    assert main(["report", str(folder), "-o", str(folder / "report.html")]) == 0
    page = html.unescape((folder / "report.html").read_text())
    assert "Goodput" in page and lost["sentence"] in page
    capsys.readouterr()
