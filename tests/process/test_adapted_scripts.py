"""Unchanged scripts of Lightning and Hugging Face: made elastic in a worker, and only there."""

import contextlib
import inspect
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from framework_runs import CommandRun
from torch.utils.data import DataLoader

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import InexactError
from hpc_elastic.run.directory import RUN_DIR_VARIABLE

pl = pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
hf = pytest.importorskip("transformers", reason="pip install -e '.[frameworks]'")

from undisturbed import UNCHANGED, undisturbed  # noqa: E402

sys.path.insert(0, str(UNCHANGED))
import hf_trainer  # noqa: E402
import lightning_trainer  # noqa: E402

from hpc_elastic.integrations import huggingface, lightning  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
EXACT = "level 3: each sample once an epoch, in batches of 5 samples for any number of workers"


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Let this process be the only worker of a run, until the test ends."""
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    for module in (lightning, huggingface):
        monkeypatch.setattr(module, "global_batch", lambda of_worker: of_worker)
    for cls, name in ((pl.Trainer, "__init__"), (pl.Trainer, "fit"), (hf.Trainer, "__init__")):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    lightning.install.cache_clear()
    lightning.install()
    huggingface.install()


class Kill(BaseException):
    """What no framework handles."""


class Killed(pl.Callback):
    """Ends a training as a kill does, some steps after the last checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        """End it."""
        if trainer.global_step == self.step:
            raise Kill


def fit(monkeypatch, *more: pl.Callback, shape="map", by="datamodule", **options) -> torch.Tensor:
    """Run what an unchanged script runs, as a process of its own would; return the parameters."""
    monkeypatch.setattr(lightning, "_stages", itertools.count(1))
    pl.seed_everything(0, verbose=False)
    data, model = lightning_trainer.Lines(shape), lightning_trainer.Line()
    options = {"max_epochs": 6, "accelerator": "cpu", "devices": 1, "logger": False} | options
    trainer = pl.Trainer(
        callbacks=list(more), enable_progress_bar=False, enable_model_summary=False, **options
    )
    data.setup("fit")
    if by == "module":
        model.train_dataloader = data.train_dataloader
    given = {"datamodule": [data], "loader": [data.train_dataloader()], "module": []}[by]
    trainer.fit(model, *given)
    assert (by == "module") == ("train_dataloader" in vars(model)), "the script's own is back"
    assert "train_dataloader" not in vars(data)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def saves(monkeypatch):
    """Return the steps after which a checkpoint is due; a test changes them."""
    steps = {20}
    monkeypatch.setattr(lightning, "should_checkpoint", lambda step, **_: step in steps)
    monkeypatch.setattr(huggingface, "should_checkpoint", lambda step, **_: step in steps)
    return steps


@pytest.mark.parametrize("by", ["datamodule", "loader", "module"])
def test_a_killed_lightning_script_ends_as_an_undisturbed_one(
    worker, saves, monkeypatch, tmp_path, capsys, by
):
    """From inside of an epoch, wherever its loader comes from; its own callbacks stay."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Kill):
        fit(monkeypatch, Killed(23), by=by)
    more = lightning, "global_batch", lambda of_worker: 3 * of_worker  # resumed on more
    monkeypatch.setattr(*more)
    found = fit(monkeypatch, by=by)
    torch.testing.assert_close(found, undisturbed())
    assert [path.name for path in Path("checkpoints").iterdir()], "the script's own checkpoint"
    said = capsys.readouterr().err
    assert said.count(f"hpc_elastic: adapted: Lightning Trainer (callback, loader), {EXACT}") == 2


def _forgets_position(monkeypatch):
    monkeypatch.setattr(ElasticSampler, "load_state_dict", lambda *_: None)
    monkeypatch.setattr(lightning.ElasticCheckpoint, "_load_positions", lambda *_: True)


def _forgets_schedule(monkeypatch):
    connector = "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector"
    monkeypatch.setattr(f"{connector}.restore_lr_schedulers", lambda _: None)


def _is_one_batch_off(monkeypatch):
    load = ElasticSampler.load_state_dict

    def load_wrongly(sampler, state):
        load(sampler, state | {"position": state["position"] - 5})

    monkeypatch.setattr(ElasticSampler, "load_state_dict", load_wrongly)


@pytest.mark.parametrize("mistake", [_forgets_position, _forgets_schedule, _is_one_batch_off])
def test_a_restart_with_a_mistake_would_be_seen(worker, saves, monkeypatch, tmp_path, mistake):
    """The comparison above is not blind to what a restart can forget."""
    monkeypatch.chdir(tmp_path)
    whole = undisturbed()
    with pytest.raises(Kill):
        fit(monkeypatch, Killed(23))
    mistake(monkeypatch)
    with contextlib.suppress(InexactError):  # refused, which is better
        assert not torch.allclose(fit(monkeypatch), whole)


INEXACT = {
    "stream": ({}, "draws from an IterableDataset (Stream)"),
    "weighted": ({}, "its order is that of a WeightedRandomSampler"),
    "batches": ({}, "its order is that of a batch_sampler"),
    "map": ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: leave it at 1"),
}


@pytest.mark.parametrize("shape", INEXACT)
def test_what_is_not_exact_is_said_and_loses_no_step(
    worker, saves, monkeypatch, tmp_path, capsys, shape
):
    """The state is kept; the data is the script's own."""
    monkeypatch.chdir(tmp_path)
    options, why = INEXACT[shape]
    saves.clear()
    saves.add(8)
    with pytest.raises(Kill):
        fit(monkeypatch, Killed(9), shape=shape, max_steps=12, max_epochs=-1, **options)
    assert lightning_checkpoints() == ["step-8.ckpt"]
    fit(monkeypatch, shape=shape, max_steps=12, max_epochs=-1, **options)
    assert lightning_checkpoints() == ["step-12.ckpt", "step-8.ckpt"]
    said = [line for line in capsys.readouterr().err.splitlines() if "level" in line]
    assert len(said) == 2
    assert all("adapted: Lightning Trainer (callback), level 1: " in line for line in said)
    assert all(why in line and "its epoch's data anew" in line for line in said)


def lightning_checkpoints() -> list[str]:
    """Return the names of the checkpoints that the callback has written."""
    return sorted(path.name for path in Path("run", "checkpoints").glob("step-*"))


def test_a_strategy_that_is_not_known_is_left_alone(worker, monkeypatch, tmp_path, capsys):
    """Its checkpoints may fit one number of workers; and its devices are those of the group."""
    monkeypatch.chdir(tmp_path)

    class Own(pl.strategies.SingleDeviceStrategy):
        pass

    fit(monkeypatch, strategy=Own("cpu"), max_steps=2, devices=8)
    assert not lightning_checkpoints()
    assert (
        "not adapted: Lightning Trainer, level 1: Own: its checkpoints" in capsys.readouterr().err
    )


def test_each_training_of_a_script_has_its_own_checkpoints(worker, saves, monkeypatch, tmp_path):
    """Of one Trainer or two; a script that uses the callback itself has none beside it."""
    monkeypatch.chdir(tmp_path)
    fit(monkeypatch, max_steps=3)
    pl.seed_everything(0, verbose=False)
    data, model = lightning_trainer.Lines(), lightning_trainer.Line()
    trainer = pl.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(model, data)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, data)
    assert lightning_checkpoints() == ["step-3.ckpt"]
    assert [p.name for p in Path("run/checkpoints/fit-2").glob("step-*")] == ["step-2.ckpt"]
    assert [p.name for p in Path("run/checkpoints/fit-3").glob("step-*")] == ["step-4.ckpt"]
    ours = [c for c in trainer.callbacks if isinstance(c, lightning.ElasticCheckpoint)]
    assert len(ours) == 1


def test_a_script_that_is_elastic_already_is_left_as_it_is(worker, monkeypatch, tmp_path, capsys):
    """Nothing is added twice."""
    monkeypatch.chdir(tmp_path)
    own = lightning.ElasticCheckpoint(tmp_path / "own", every_steps=1)
    data = lightning_trainer.Lines()
    data.setup("fit")
    sampler = ElasticSampler(data.data, 5, name=None)
    loader = lightning.ElasticLoader(DataLoader(data.data, batch_sampler=sampler))
    trainer = pl.Trainer(
        max_steps=2, callbacks=[own], accelerator="cpu", logger=False, enable_progress_bar=False
    )
    trainer.fit(lightning_trainer.Line(), loader, ckpt_path=own.newest())
    assert [c for c in trainer.callbacks if isinstance(c, lightning.ElasticCheckpoint)] == [own]
    args = hf.TrainingArguments(str(tmp_path / "hf"), max_steps=2, use_cpu=True, report_to="none")
    huggingface.ElasticTrainer(
        model=hf_trainer.Net(), args=args, train_dataset=hf_trainer.samples(), global_batch=8
    ).train()
    assert "adapted" not in capsys.readouterr().err


class KilledTrainer(hf.TrainerCallback):
    """As `Killed`."""

    def on_step_begin(self, args, state, control, **_):
        """End it."""
        if state.global_step == 23:
            raise Kill


def train(monkeypatch, tmp_path, *more: str, killed=False) -> torch.Tensor:
    """Run hf_trainer.py, as a process of its own would; return the parameters."""
    monkeypatch.setattr(huggingface, "_trained", set())
    callbacks = [hf.trainer.DefaultFlowCallback, *([KilledTrainer] if killed else [])]
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", callbacks)
    result, folder = tmp_path / "result.json", tmp_path / "out"
    folder.mkdir(exist_ok=True, parents=True)
    hf_trainer.main(str(result), str(folder), *more)
    values = json.loads(result.read_text())
    return torch.tensor(values["parameters"])


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_killed_trainer_script_ends_as_an_undisturbed_one(
    worker, saves, monkeypatch, tmp_path, capsys, strategy
):
    """Of its own checkpoints all stay, and of those that were added the newest."""
    more = f'save_strategy="{strategy}"'
    whole = train(monkeypatch, tmp_path / "whole", more)
    saves |= {17, 22}
    with pytest.raises(Kill):
        train(monkeypatch, tmp_path / "parts", more, killed=True)
    found = train(monkeypatch, tmp_path / "parts", more)
    assert torch.equal(found, whole)
    said = capsys.readouterr().err
    assert said.count(f"adapted: Hugging Face Trainer (callback, loader, gradients), {EXACT}") == 3
    left = {int(p.name[11:]) for p in (tmp_path / "parts" / "out").glob("checkpoint-*")}
    assert left == ({10, 20, 30, 40, 50, 60, 70, 80, 90} if strategy == "steps" else {90})


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("enable_jit_checkpoint=true", "enable_jit_checkpoint=True: give False"),
        ("save_on_each_node=true", "save_on_each_node=True: give False"),
    ],
)
def test_a_trainer_that_cannot_be_exact_is_left_as_it_is(
    worker, monkeypatch, tmp_path, capsys, argument, why
):
    """The reason says which line would raise the level."""
    train(monkeypatch, tmp_path, argument, "max_steps=2")
    said = capsys.readouterr().err
    assert "not adapted: Hugging Face Trainer, level 1: " in said and why in said
    assert not list(tmp_path.rglob(huggingface.MARK))


def test_what_the_adapters_rely_on():
    """Public names of the frameworks; a release that changes one of them is seen here."""
    assert {"devices", "num_nodes"} <= inspect.signature(pl.Trainer.__init__).parameters.keys()
    names = ["self", "model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path"]
    assert list(inspect.signature(pl.Trainer.fit).parameters)[:6] == names
    assert pl.Trainer.__module__ == "lightning.pytorch.trainer.trainer"
    names = ["self", "model", "args", "data_collator", "train_dataset"]
    assert list(inspect.signature(hf.Trainer.__init__).parameters)[:5] == names
    assert hf.Trainer.__module__ == "transformers.trainer"


def test_a_script_outside_of_our_workers_loads_nothing_of_ours(tmp_path):
    """The package is installed beside the frameworks, and has no entry point in them."""
    code = (
        "import sys, lightning.pytorch as pl; from transformers import Trainer;"
        "pl.Trainer(accelerator='cpu', logger=False);"
        "print(pl.Trainer.fit.__globals__['__name__'], Trainer.__init__.__globals__['__name__'],"
        "[m for m in sys.modules if m.startswith('hpc_elastic.integrations')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [pl.Trainer.__module__, hf.Trainer.__module__, "[]"]


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        (["--adapt=off"], "lightning.pytorch.trainer.trainer"),
        pytest.param([], "hpc_elastic.integrations.lightning", marks=pytest.mark.long),
    ],
)
def test_a_setting_leaves_scripts_as_they_are(tmp_path, settings, module):
    """In a worker of a run."""
    code = "import lightning.pytorch as pl; print(pl.Trainer.fit.__globals__['__name__'])"
    (tmp_path / "which.py").write_text(code)
    with CommandRun(["which.py"], tmp_path, *settings) as run:
        assert run.wait() == 0, run.output()
    (output,) = (run.path / "tasks").rglob("*.out")
    assert output.read_text().split() == [module]


COMMANDS = {
    "lightning_trainer.py": ["result.json"],
    "lightning_cli.py": [
        "fit", "--trainer.max_epochs=6", "--trainer.accelerator=cpu", "--trainer.logger=false",
    ],
    "other_name.py": ["result.json"],
    "hf_trainer.py": ["result.json", "out"],
    "accumulating.py": ["result.json", "out", "gradient_accumulation_steps=3"],
}  # fmt: skip
COPIES = {
    "other_name.py": ("lightning_trainer.py", "lightning.pytorch", "pytorch_lightning"),
    "accumulating.py": ("hf_trainer.py", "", ""),
}
"""Scripts that are made of another one: with the package's other name, with other arguments."""


@pytest.mark.long
@pytest.mark.parametrize("script", COMMANDS)
def test_an_unchanged_script_loses_nothing_as_its_nodes_come_and_go(
    worker, monkeypatch, tmp_path, script
):
    """Of two nodes one leaves in an epoch, comes back, and dies; the result is as undisturbed."""
    if "cli" in script:
        pytest.importorskip("jsonargparse", reason="pip install -e '.[frameworks]'")
    words = COMMANDS[script]
    whole = train(monkeypatch, tmp_path / "whole", *words[2:]) if "out" in words else undisturbed()
    for file in UNCHANGED.glob("*.py"):
        shutil.copy(file, tmp_path)
    for name, (source, old, new) in COPIES.items():
        (tmp_path / name).write_text((UNCHANGED / source).read_text().replace(old or "\0", new))
    (tmp_path / "out").mkdir()
    monkeypatch.delenv(RUN_DIR_VARIABLE)
    with CommandRun([script, *words], tmp_path, "--nodes=1:2", PAUSE_S="0.4") as run:
        run.leaves_returns_and_dies()
    result = json.loads((tmp_path / "result.json").read_text())
    batch = 15 if script == "accumulating.py" else 5
    assert result["steps"] == 6 * -(-73 // batch)
    torch.testing.assert_close(torch.tensor(result["parameters"]), whole, rtol=1e-4, atol=1e-5)
    outputs = "".join(file.read_text() for file in (run.path / "tasks").rglob("*.err"))
    exact = EXACT.replace("batches of 5", f"batches of {batch}")
    assert outputs.count(exact) == 4, outputs  # once a round
