"""One tracker run for one training run: no gap and no step twice, whenever its worker is killed."""

import json
import os
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_conversions import CommandRun

from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations import tracking
from hpc_elastic.run import directory, fencing

NUM_STEPS = 20
SCRIPT = """
    import os, signal, time
    from contextlib import ExitStack
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from hpc_elastic import Checkpointer, report

    def kill_once(name):
        if dist.get_rank() == 0 and not Path(name).exists():
            Path(name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def log(key, value, step):
        for log_to_one in logs:
            log_to_one(key, value, step)

    def train():
        dist.init_process_group("gloo")
        checkpointer = Checkpointer({"x": torch.zeros(3)})
        for step in range((checkpointer.load_latest() or 0) + 1, 21):
            dist.barrier()
            time.sleep(0.1)
            report(step=step)
            log("loss", 1 / step, step)
            if step in (3, 9, 13):
                kill_once(f"killed-{step}")
            if checkpointer.save_if_due(step, every_steps=6):
                checkpointer.wait()
                if step == 18:
                    kill_once("killed-18")
            if step % 5 == 0:
                if step == 15:
                    kill_once("killed-15")
                log("val", -step, step)
        checkpointer.wait()

    logs = []
    with ExitStack() as stack:
"""
START = {
    "tensorboard": """
        from hpc_elastic.integrations.tensorboard import SummaryWriter
        writer = stack.enter_context(SummaryWriter())
        logs.append(writer.add_scalar)
    """,
    "mlflow": """
        from hpc_elastic.integrations.mlflow import start_run
        tracked = stack.enter_context(start_run("digits", tracking_uri="sqlite:///mlflow.db"))
        tracked.log_params({"lr": 0.1})
        logs.append(tracked.log_metric)
    """,
    "wandb": """
        from hpc_elastic.integrations.wandb import init
        run = stack.enter_context(init(project="digits", mode="offline"))
        logs.append(lambda key, value, step: run.log({key: value}, step=step))
    """,
}
LOSS = [(step, pytest.approx(1 / step)) for step in range(1, NUM_STEPS + 1)]
VAL = [(step, -step) for step in range(5, NUM_STEPS + 1, 5)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The directory of a run with two nodes, whose rank 0 was killed five times.

    It is killed before the first checkpoint, twice after one, between two logs of one step, and
    between a checkpoint and the next step. The third time the run has failed, and is resumed with
    one node.
    """
    folder = tmp_path_factory.mktemp("killed")
    script = folder / "script.py"
    starts = [text.rstrip(" ") for tracker, text in START.items() if find_spec(tracker)]
    lines = [SCRIPT, *starts, "        train()\n"]
    script.write_text(textwrap.dedent("".join(lines)))
    settings = ("--nodes", "2", "--max-restarts", "2")
    with CommandRun(folder, "python", str(script), settings=settings) as run:
        assert run.wait() == 1, run.output() + run.command("logs").stdout
        assert run.command("resume", "nodes=1").returncode == 0
        waited = run.command("wait")
    assert waited.returncode == 0, waited.stderr + run.command("logs").stdout
    assert len(list(folder.glob("killed-*"))) == 5
    assert [e["world_size"] for e in run.events("round")] == [2, 2, 2, 1, 1, 1]
    return run.path


@pytest.mark.long
def test_tensorboard(killed):
    """Its own reader finds each step once, and the text of the events."""
    pytest.importorskip("tensorboard", reason="pip install -e '.[trackers]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(killed / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == LOSS
    assert [(e.step, e.value) for e in board.Scalars("val")] == VAL
    text = board.Tensors(f"{tracking.EVENTS}/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "worker failed" in text


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of SQLAlchemy
def test_mlflow(killed):
    """The store has one run, which has finished."""
    mlflow = pytest.importorskip("mlflow", reason="pip install -e '.[trackers]'")
    pytest.importorskip("sqlalchemy", reason="pip install -e '.[trackers]'")
    client = mlflow.MlflowClient(f"sqlite:///{killed.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    found = {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in ("loss", "val")
    }
    assert found == {"loss": LOSS, "val": VAL}
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    assert "worker failed" in run.data.tags["hpc_elastic.events"]


@pytest.mark.long
def test_wandb(killed):
    """The offline files of all workers have one id, and each row once."""
    pytest.importorskip("wandb", reason="pip install -e '.[trackers]'")
    from hpc_elastic.integrations.wandb import read_records

    rows, ids, summary = list[dict[str, float]](), set(), {}
    for file in sorted(killed.glob("wandb/offline-run-*/*.wandb")):
        for record in read_records(file.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if items := record.history.item:
                rows.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items})
            summary |= {(i.key or i.nested_key[0]): i.value_json for i in record.summary.update}
    assert [(row["_step"], row["loss"]) for row in rows] == LOSS
    assert [(row["_step"], row["val"]) for row in rows if "val" in row] == VAL
    assert ids == {json.loads((killed / "run.json").read_text())["run_id"]}
    assert "worker failed" in summary[tracking.EVENTS]


# ---- in this process


@pytest.fixture
def own_run(tmp_path, monkeypatch):
    """This process is rank 0 of a run."""
    own = tracking.OwnRun("digits-1", tmp_path)
    monkeypatch.setattr(tracking, "own_run", lambda: own)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(fencing.REPLICA_VARIABLE, raising=False)
    return own


def test_one_worker_logs(monkeypatch):
    """Rank 0, of the first replica where the nodes are replicas."""
    for rank, replica, logs in [
        ("0", None, True), ("1", None, False), ("0", "7_0:2:0", True), ("0", "7_1:2:1", False),
    ]:  # fmt: skip
        monkeypatch.setenv("RANK", rank)
        if replica is not None:
            monkeypatch.setenv(fencing.REPLICA_VARIABLE, replica)
        assert tracking.is_logger() == logs
    monkeypatch.delenv(directory.RUN_DIR_VARIABLE, raising=False)
    assert tracking.own_run() is None


def test_tensorboard_on_another_rank_makes_no_file(own_run, monkeypatch):
    """Nor does what a script does with it fail."""
    pytest.importorskip("tensorboard")
    from hpc_elastic.integrations.tensorboard import SummaryWriter

    monkeypatch.setenv("RANK", "1")
    with SummaryWriter() as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.add_text("note", "text")
        writer.add_hparams({"lr": 0.1}, {"loss": 1.0})
        writer.add_embedding(torch.zeros(2, 2))
        writer.flush()
    assert not list(own_run.path.iterdir())


def test_tensorboard_outside_of_a_run_is_torchs(tmp_path, monkeypatch):
    """A step that is logged again is in the files twice; the run's events are not."""
    pytest.importorskip("tensorboard")
    from hpc_elastic.integrations.tensorboard import SummaryWriter, read_last_steps

    monkeypatch.delenv(directory.RUN_DIR_VARIABLE, raising=False)
    for _ in range(2):
        with SummaryWriter(tmp_path) as writer:
            writer.add_scalar("loss", 1.0, 1)
    assert read_last_steps(tmp_path) == {"loss": 1}
    assert sum(f.read_bytes().count(b"loss") for f in tmp_path.iterdir()) == 2


def test_tensorboard_reads_files_that_were_cut_off(own_run):
    """Each tag has a last step of its own; what was cut off is written again."""
    pytest.importorskip("tensorboard")
    from hpc_elastic.integrations.tensorboard import SummaryWriter, read_last_steps

    with SummaryWriter() as writer:
        for step in (1, 2, 3):
            writer.add_scalar("loss", 1.0, step)
        writer.add_scalar("epoch/val", 1.0, 1)
    folder = own_run.path / "tensorboard"
    (file,) = folder.iterdir()
    assert read_last_steps(folder) | {"loss": 3, "epoch/val": 1} == read_last_steps(folder)
    os.truncate(file, file.stat().st_size - 5)
    with SummaryWriter() as writer:
        writer.add_scalar("loss", 1.0, 3)
        writer.add_scalar("epoch/val", 1.0, 1)
    files = sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime_ns)
    assert b"loss" not in files[-1].read_bytes() and b"epoch/val" in files[-1].read_bytes()


def test_runs_with_one_tensorboard_folder_keep_all_their_steps(own_run, monkeypatch):
    """Each goes on after its own last step; one's id may be the beginning of another's."""
    pytest.importorskip("tensorboard")
    from hpc_elastic.integrations.tensorboard import SummaryWriter, read_last_steps

    folder = own_run.path / "shared"
    for run_id in ("digits-1", "digits-10", "digits", "digits-1"):
        own = tracking.OwnRun(run_id, own_run.path)
        monkeypatch.setattr(tracking, "own_run", lambda own=own: own)
        with SummaryWriter(folder) as writer:
            for step in (1, 2, 3):
                writer.add_scalar("loss", 1.0, step)
    num_values = [f.read_bytes().count(b"loss") for f in sorted(folder.iterdir())]
    assert sorted(num_values) == [0, 3, 3, 3]
    assert read_last_steps(folder)["loss"] == 3


def test_tensorboard_refuses_what_would_make_more_folders(own_run):
    """With the remedy."""
    pytest.importorskip("tensorboard")
    from hpc_elastic.integrations.tensorboard import SummaryWriter

    with SummaryWriter() as writer, pytest.raises(ConfigError, match="add_scalar for each"):
        writer.add_scalars("losses", {"a": 1.0}, 1)


def test_mlflow_on_another_rank_does_nothing(own_run, monkeypatch):
    """It does not even open the store."""
    pytest.importorskip("mlflow")
    from hpc_elastic.integrations.mlflow import start_run

    monkeypatch.setenv("RANK", "1")
    with start_run("digits", tracking_uri=f"sqlite:///{own_run.path}/mlflow.db") as tracked:
        tracked.log_metrics({"loss": 1.0}, 1)
        tracked.log_params({"lr": 0.1})
        tracked.set_tags({"a": "b"})
    assert tracked.run_id is None and not list(own_run.path.iterdir())


class ServedRun:
    """A W&B run, online or not, that notes what it is sent."""

    def __init__(self, wandb_id="digits-1", starting_step=0, *, offline=True):
        self.id, self.starting_step, self.offline = wandb_id, starting_step, offline
        self.rows, self.summary, self.exit_code = [], {}, None

    def log(self, values, step, commit):
        """Note a row, which is complete."""
        assert commit
        self.rows.append((step, values))

    def finish(self, exit_code=None):
        """Note that it is over."""
        self.exit_code = exit_code


def wandb_run(own, served):
    """The W&B run of a worker that starts."""
    pytest.importorskip("wandb")
    from hpc_elastic.integrations.wandb import WandbRun

    return WandbRun(served, own, own.path / "wandb")


def test_wandb_continues_the_rows_of_a_killed_worker(own_run):
    """Those that its service has lost, and the one that was not complete."""
    first = ServedRun()
    run = wandb_run(own_run, first)
    for step in (1, 2):
        run.log({"loss": step}, step=step)
        run.log({"val": -step, "image": object()}, step=step)
    assert [step for step, _ in first.rows] == [1]

    after = ServedRun()
    wandb_run(own_run, after).log({"loss": 3}, step=3)
    kept = [(step, {"loss": step, "val": -step}) for step in (1, 2)]
    assert after.rows == kept

    again = ServedRun()
    with wandb_run(own_run, again) as run:
        for step in (1, 2, 3, 4):
            run.log({"loss": -step}, step=step)
        run.log({"loss": 0}, step=2)
    assert again.rows == [*kept, (3, {"loss": -3}), (4, {"loss": -4})]
    assert again.exit_code == 0


def test_wandb_warns_once_of_steps_that_go_backwards(own_run, caplog):
    """With the remedy; steps that a restart trains again are no news."""
    run = wandb_run(own_run, ServedRun())
    for step in (1, 2, 3):
        run.log({"loss": step}, step=step)
    for epoch in (1, 2):
        run.log({"val": 0.5}, step=epoch)
    (line,) = [r.message for r in caplog.records]
    assert "val of step 1" in line and "define_metric" in line
    caplog.clear()
    again = wandb_run(own_run, ServedRun())
    for step in (2, 3, 4):
        again.log({"loss": step}, step=step)
    assert not caplog.records


def test_wandb_keeps_few_rows(own_run):
    """And none that is cut off."""
    for _ in range(2):
        served = ServedRun()
        run = wandb_run(own_run, served)
        for step in range(100):
            run.log({"loss": step}, step=step)
        kept = own_run.path / "trackers" / "wandb.json"
        assert len(json.loads(kept.read_bytes().splitlines()[0])) == 33
    assert [step for step, _ in served.rows] == list(range(67, 99))
    kept.write_bytes(kept.read_bytes()[:50])
    assert wandb_run(own_run, ServedRun()).run.rows == []


def test_wandb_keeps_the_last_row_of_a_worker_that_fails(own_run):
    """The restart adds what is missing in it."""
    failed = ServedRun()
    with pytest.raises(ZeroDivisionError), wandb_run(own_run, failed) as run:
        run.log({"loss": 1}, step=1)
        _ = 1 / 0
    assert failed.rows == [] and failed.exit_code == 1
    restarted = ServedRun()
    with wandb_run(own_run, restarted) as run:
        run.log({"loss": 1}, step=1)
        run.log({"val": -1}, step=1)
    assert restarted.rows == [(1, {"loss": 1, "val": -1})]


def test_wandb_sends_again_what_the_server_has_not_received(own_run):
    """From the file of the worker before, which the server had received up to step 2."""
    wandb = pytest.importorskip("wandb")
    from hpc_elastic.integrations.wandb import init

    with init(project="digits", mode="offline", settings={"silent": True}) as run:
        for step in range(1, 6):
            run.log({"loss": step, "nested": {"a": step}}, step=step)
    assert isinstance(run.run, wandb.Run)
    wandb.teardown()  # its service has written everything
    served = ServedRun(starting_step=3, offline=False)
    with wandb_run(own_run, served) as run:
        for step in range(2, 7):
            run.log({"loss": -step}, step=step)
    assert [(step, row["loss"]) for step, row in served.rows] == [(3, 3), (4, 4), (5, 5), (6, -6)]
    assert served.rows[0][1] == {"loss": 3, "nested.a": 3}


def test_wandb_refuses_what_a_restart_would_break(own_run):
    """With the remedy."""
    pytest.importorskip("wandb")
    from hpc_elastic.integrations.wandb import init

    with pytest.raises(ConfigError, match="leave it out"):
        init(id="mine")
    with pytest.raises(ConfigError, match="step=step"):
        wandb_run(own_run, ServedRun()).log({"loss": 1.0})


def test_wandb_on_another_rank_does_nothing(own_run, monkeypatch):
    """Nor does what a script does with it fail."""
    pytest.importorskip("wandb")
    from hpc_elastic.integrations.wandb import init

    monkeypatch.setenv("RANK", "1")
    with init(project="digits") as run:
        run.log({"loss": 1.0}, step=1)
        run.summary["best"] = 1.0
    assert not list(own_run.path.iterdir())
