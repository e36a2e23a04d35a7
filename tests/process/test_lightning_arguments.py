"""Each argument of Lightning's Trainer: it works, it is refused, or it is of no matter."""

import contextlib
import inspect
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gloo_ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError

pl = pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
from lightning.fabric.plugins.environments import SLURMEnvironment  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402

from hpc_elastic.integrations import lightning  # noqa: E402
from hpc_elastic.integrations.lightning import ElasticCheckpoint, ElasticLoader, world  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 3,
}  # fmt: skip


class Line(pl.LightningModule):
    """A linear model that notes which samples it trains, and at which steps it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.trained: list[list[int]] = []
        self.validated: list[int] = []

    def loss(self, batch):
        """Return the loss of a batch, or of all batches of a step."""
        if isinstance(batch, dict):
            batch = [torch.cat(parts) for parts in zip(*batch.values(), strict=True)]
        elif isinstance(batch[0], list):
            batch = [torch.cat(parts) for parts in zip(*batch, strict=True)]
        x, y, ids = batch
        self.trained.append(ids.tolist())
        return (self.layer(x) - y).square().mean()

    def training_step(self, batch, _):
        """Return the loss."""
        return self.loss(batch)

    def validation_step(self, batch, _):
        """Log a loss, and note the step."""
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)
        x, y, _ = batch
        self.log("val", (self.layer(x) - y).square().mean())

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Averaged(Line):
    """Averages its weights in its own hook, which Lightning calls after those of callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1, 3))

    def on_train_batch_end(self, *_):
        """Average."""
        self.average.mul_(0.5).add_(self.layer.weight.detach(), alpha=0.5)


class TwoOptimizers(Line):
    """Steps two optimizers for each batch; the second loss contains the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(3, 1)

    def training_step(self, batch, _):
        """Step both."""
        x, y, _ids = batch
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward((self.other(x) - y).square().mean() + 0.5 * loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        """Return two optimizers."""
        return [torch.optim.SGD(m.parameters(), 0.01) for m in (self.layer, self.other)]


class Plateau(Line):
    """Lowers its rate when the loss does not fall."""

    def configure_optimizers(self):
        """Return a schedule that takes each epoch as one without progress."""
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=9.0, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class PlainBackward(TwoOptimizers):
    """Calls backward() itself."""

    def training_step(self, batch, _):
        """Step without a word to Lightning."""
        first, _second = self.optimizers()
        self.loss(batch).backward()
        first.step()


class DrawsItself(Line):
    """Draws its batches."""

    def training_step(self, dataloader_iter):
        """Draw and train."""
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class MakesItsLoader(Line):
    """Has a hook for the loader."""

    batch_size = 4

    def train_dataloader(self):
        """Return a new loader."""
        return loader()


def loader(size: int = 14, batch: int = 4, **options: Any) -> ElasticLoader:
    """Return the loader of a few samples."""
    x = torch.arange(size * 3.0).reshape(size, 3) / size
    data = TensorDataset(x.sin(), x.sum(1, keepdim=True), torch.arange(size))
    sampler = ElasticSampler(data, batch, seed=0, name=None, **options)
    return ElasticLoader(DataLoader(data, batch_sampler=sampler))


def val_loader() -> DataLoader[Any]:
    """Return a loader for the validation."""
    x = torch.ones(4, 3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True), torch.arange(4)))


def fit(
    folder: Path,
    module: Any = Line,
    data: Any = loader,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train in this process, save at each step, and return the module."""
    pl.seed_everything(0, verbose=False)
    module = module()
    elastic = ElasticCheckpoint(folder, keep_last=99, every_steps=1)
    more = options.pop("callbacks", list)()
    fit_options = {key: options.pop(key) for key in ("datamodule",) if key in options}
    trainer = pl.Trainer(**{**QUIET, **options, "callbacks": [elastic, *more]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, None if data is None else data(), val_loader(),
            ckpt_path=ckpt_path or elastic.newest(), **fit_options,
        )  # fmt: skip
    return module


def checkpoint(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint."""
    return folder / f"step-{step}.ckpt"


def two(size: int = 14) -> list[ElasticLoader]:
    """Return two loaders, of which the first has as many samples as given."""
    return [loader(size, end="drop"), loader(10, end="drop")]


WORKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dict": {"data": lambda: {"a": loader(), "b": loader()}},
    "list": {"data": lambda: two()},
    "longer": {"data": lambda: two(22)},
    "min_size": {"data": lambda: CombinedLoader(two(), "min_size")},
    "max_size_cycle": {"data": lambda: CombinedLoader({"a": loader()}, "max_size_cycle")},
    "ema": {"module": Averaged},
    "two_optimizers": {"module": TwoOptimizers},
    "plateau": {"module": Plateau},
    "limit_train_batches": {"limit_train_batches": 3},
    "limit_train_batches_share": {"limit_train_batches": 0.5},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval_over_epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "limit_val_batches": {"limit_val_batches": 0},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "max_steps": {"max_epochs": None, "max_steps": 10},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "gradient_clip_algorithm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "precision": {"precision": "bf16-mixed"},
    "plugins": {
        "plugins": lambda: [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],
    },
    "model_checkpoint": {
        "callbacks": lambda: [callbacks.ModelCheckpoint(monitor="val", save_top_k=2)],
    },
    "early_stopping": {"callbacks": lambda: [callbacks.EarlyStopping("val", patience=9)]},
    "weight_averaging": {"callbacks": lambda: [callbacks.EMAWeightAveraging()]},
    "max_time": {"max_time": timedelta(hours=1)},
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_a_training_that_goes_on_is_the_same_to_the_bit(name, tmp_path):
    """From a step inside of an epoch and from an epoch's last, whatever the arguments."""
    options = {
        key: value() if key == "plugins" else value for key, value in WORKS[name].items()
    } | {"default_root_dir": tmp_path}
    whole = fit(tmp_path / "whole", **options)
    num_steps = len(whole.trained)
    for step in [step for step in (1, 2, 3, 4, 6, 8) if step <= num_steps]:
        options["default_root_dir"] = tmp_path / str(step)
        rest = fit(tmp_path / f"{step}", ckpt_path=checkpoint(tmp_path / "whole", step), **options)
        assert rest.trained == whole.trained[step:], (step, num_steps)
        found = {
            key: torch.equal(v, rest.state_dict()[key]) for key, v in whole.state_dict().items()
        }
        assert all(found.values()), (step, found)
        steps = [s for s in whole.validated if s >= step * (2 if name == "two_optimizers" else 1)]
        assert rest.validated == steps, step


def train_on_ranks(_rank: int, folder: Path, strategy: str) -> list[Any]:
    """Train with shares of different size; return the parameters of each case."""
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = [
        {},
        {"data": lambda: {"a": loader(batch=3), "b": loader(batch=3)}},
        {"data": lambda: CombinedLoader([loader(14, 5, end="drop"), loader(10, 5)], "min_size")},
        {"module": TwoOptimizers},
        {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 16.0))]},
    ]
    found = []
    for number, case in enumerate(cases):
        options = {"data": lambda: loader(batch=3), "strategy": strategy, **world(), **case}
        module = fit(folder / f"{number}", **options)
        found.append({key: value.tolist() for key, value in module.state_dict().items()})
    return found


def test_shares_of_different_size_train_as_one_process(tmp_path):
    """With several loaders, several backward() and losses that contain others, and GradScaler."""
    ranks = {
        rank: {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "test",
        }
        for rank in range(2)
    }  # fmt: skip
    strategy = "ddp_find_unused_parameters_true"
    on_two = run_ranks(train_on_ranks, 2, tmp_path / "two", strategy, env=ranks)
    alone = train_on_ranks(0, tmp_path / "one", "auto")
    assert on_two[0] == on_two[1]
    for number, (one, two) in enumerate(zip(alone, on_two[0], strict=True)):
        tolerance = 2e-3 if number == 4 else 1e-6
        for key in one:
            assert torch.allclose(torch.tensor(one[key]), torch.tensor(two[key]), atol=tolerance), (
                number, key
            )  # fmt: skip


def test_an_epoch_has_the_given_number_of_batches_and_the_data_goes_on(tmp_path):
    """Each epoch validates, and each sample is trained once before any is trained again."""
    module = fit(tmp_path, limit_train_batches=3, max_epochs=8, default_root_dir=tmp_path)
    assert sorted(set(module.validated)) == [3, 6, 9, 12, 15, 18, 21, 24]
    for begin in range(0, 24, 4):
        samples = [i for batch in module.trained[begin : begin + 4] for i in batch]
        assert sorted(samples) == list(range(14))


def test_more_epochs_go_on_after_the_last(tmp_path):
    """From the checkpoint of the end, which Lightning restores without the position in the data."""
    whole = fit(tmp_path / "whole", max_epochs=6, default_root_dir=tmp_path)
    elastic = ElasticCheckpoint(tmp_path / "part", every_steps=1000)
    pl.seed_everything(0, verbose=False)
    first = Line()
    pl.Trainer(**QUIET, callbacks=[elastic]).fit(first, loader(), val_loader())
    assert [path.name for path in elastic.directory.iterdir()] == ["step-12.ckpt"]
    rest = fit(tmp_path / "part", max_epochs=6, default_root_dir=tmp_path)
    assert first.trained + rest.trained == whole.trained
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_a_try_leaves_no_checkpoint(tmp_path):
    """The real training would continue from it."""
    fit(tmp_path, fast_dev_run=2, default_root_dir=tmp_path)
    assert not list(tmp_path.glob("*.ckpt"))


def test_steps_are_batches_for_any_number_of_optimizers(tmp_path, monkeypatch):
    """Lightning counts those of each optimizer: step 24 of 12."""
    reported = []
    monkeypatch.setattr(lightning.reporting, "report", lambda **values: reported.append(values))
    fit(tmp_path, TwoOptimizers, default_root_dir=tmp_path)
    steps = [(values["step"], values["total_steps"]) for values in reported if values]
    assert steps == [(step, 12) for step in range(1, 13)]
    assert checkpoint(tmp_path, 12).exists() and not checkpoint(tmp_path, 13).exists()


def test_the_module_and_the_loader_are_as_before(tmp_path):
    """Also if the training fails: the loader ends after an epoch, the module has its own hook."""
    module, data = Line(), loader()
    for fails in (True, False):
        stop = Mock(side_effect=ZeroDivisionError) if fails else Line.on_before_zero_grad
        module.on_before_zero_grad = stop.__get__(module) if not fails else stop
        elastic = ElasticCheckpoint(tmp_path / str(fails), every_steps=1)
        trainer = pl.Trainer(**QUIET, callbacks=[elastic])
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            trainer.fit(module, data)
        assert "on_train_batch_end" not in vars(module)
        assert len(list(data)) <= 4


def test_a_save_removes_what_killed_ones_left(tmp_path):
    """Files and folders, of other groups."""
    (tmp_path / ".step-9.r2").mkdir()
    (tmp_path / ".step-9.r2" / "part").touch()
    (tmp_path / ".step-10.r3").touch()
    fit(tmp_path, default_root_dir=tmp_path / "logs")
    assert not list(tmp_path.glob(".step-*"))


def test_the_best_checkpoint_is_that_of_a_model_checkpoint(tmp_path):
    """Whatever their order; without one, Lightning says that there is none."""
    best = callbacks.ModelCheckpoint(tmp_path / "best", monitor="val")
    fit(tmp_path, callbacks=lambda: [best], default_root_dir=tmp_path)
    assert best.best_model_path
    trainer = pl.Trainer(**QUIET, callbacks=[ElasticCheckpoint(tmp_path / "other")])
    with pytest.raises(ValueError, match="not configured to save the best"):
        trainer.fit(Line(), loader(), ckpt_path="best")


def test_a_checkpoint_without_a_position_is_said(tmp_path, caplog):
    """One that Lightning has made, with a loader of its own."""
    trainer = pl.Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(Line(), DataLoader(loader().dataset, batch_size=4))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    fit(tmp_path, ckpt_path=tmp_path / "plain.ckpt", max_epochs=4, default_root_dir=tmp_path)
    assert "holds no position in the data" in caplog.text


def test_another_number_of_loaders_is_refused(tmp_path):
    """The positions of the checkpoint are those of other data."""
    fit(tmp_path, data=lambda: [loader(), loader()], default_root_dir=tmp_path)
    with pytest.raises((ConfigError, RuntimeError), match="2"):
        fit(tmp_path, max_epochs=4, default_root_dir=tmp_path)


def in_a_run(monkeypatch: Any) -> None:
    """Make this process look like a worker of a run."""
    monkeypatch.setattr(lightning.reporting, "own_page", lambda: Mock(pause_at=lambda _: True))
    monkeypatch.setattr(lightning, "should_checkpoint", lambda *_, **__: False)


class Sharded(SingleDeviceStrategy):
    """A strategy of DeepSpeed, which is not installed."""

    __class__ = DeepSpeedStrategy


class InSlurm(SingleDeviceStrategy):
    """A strategy in an allocation."""

    cluster_environment = Mock(spec=SLURMEnvironment)


def end(folder: Path) -> None:
    """Train, and so leave checkpoints in the folder."""
    fit(folder, default_root_dir=folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accumulate_grad_batches": ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*at 1"),
    "overfit_batches": ({"overfit_batches": 2}, "overfit_batches=2.*Subset"),
    "reload_dataloaders_every_n_epochs": (
        {"reload_dataloaders_every_n_epochs": 1, "data": None, "module": MakesItsLoader},
        "reload_dataloaders_every_n_epochs=1.*pass the ElasticLoader",
    ),
    "GradientAccumulationScheduler": (
        {"callbacks": lambda: [callbacks.GradientAccumulationScheduler({0: 1, 2: 2})]},
        "callbacks='GradientAccumulationScheduler'.*leave it out",
    ),
    "StochasticWeightAveraging": (
        {"callbacks": lambda: [callbacks.StochasticWeightAveraging(0.1)]},
        "callbacks='StochasticWeightAveraging'.*WeightAveraging",
    ),
    "BatchSizeFinder": (
        {
            "callbacks": lambda: [callbacks.BatchSizeFinder()],
            "data": None,
            "module": MakesItsLoader,
        },
        "callbacks='BatchSizeFinder'.*that of the sampler",
    ),
    "LearningRateFinder": (
        {"callbacks": lambda: [callbacks.LearningRateFinder()]}, "a script of its own",
    ),
    "strategy": ({"strategy": Sharded()}, "strategy='deepspeed'.*ModelParallelStrategy"),
    "plugins": ({"strategy": InSlurm(), "in_a_run": True}, "plugins='SLURMEnvironment'"),
    "devices": ({"env": {"WORLD_SIZE": "2"}}, "devices=1.*world"),
    "training_step": ({"module": DrawsItself}, "training_step='dataloader_iter'.*take batch"),
    "backward": ({"module": PlainBackward}, "manual_backward"),
    "train_dataloaders": (
        {"data": lambda: DataLoader(loader().dataset)}, "train_dataloaders='DataLoader'",
    ),
    "a plain loader beside": (
        {"data": lambda: [loader(), val_loader()]}, "train_dataloaders='DataLoader'",
    ),
    "batch sizes": ({"data": lambda: [loader(), loader(batch=2)]}, "one size"),
    "last batches": ({"data": lambda: [loader(), loader(10)]}, "one size"),
    "mode": ({"data": lambda: CombinedLoader(two(), "max_size")}, "mode='max_size'"),
    "ckpt_path": ({"before": end, "ckpt_path": "step-4.ckpt"}, "ckpt_path='.*step-4.ckpt'.*newest"),
    "another fit": ({"before": end, "ckpt_path": "no"}, "ckpt_path='None'.*directory of its own"),
    "no ckpt_path": ({"ckpt_path": "no", "in_a_run": True}, "ckpt_path='None'.*begin anew"),
    "enable_checkpointing": ({"enable_checkpointing": False}, "enable_checkpointing=False"),
    "barebones": ({"barebones": True}, "enable_checkpointing=False"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_trained(name, tmp_path, monkeypatch):
    """With its name, its value and the remedy; what is in the directory stays."""
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    options.pop("before", lambda _: None)(tmp_path)
    for key, value in options.pop("env", {}).items():
        monkeypatch.setenv(key, value)
    if options.pop("in_a_run", False):
        in_a_run(monkeypatch)
    if (path := options.get("ckpt_path")) is not None:
        monkeypatch.setattr(ElasticCheckpoint, "newest", lambda _: None)
        options["ckpt_path"] = None if path == "no" else tmp_path / path
    kind = options.pop("module", Line)
    module = kind()
    before = sorted(tmp_path.glob("*.ckpt"))
    with pytest.raises((ConfigError, ValueError, MisconfigurationException), match=message):
        fit(tmp_path, lambda: module, default_root_dir=tmp_path / "logs", **options)
    assert len(module.trained) == (1 if name == "backward" else 0)
    assert sorted(tmp_path.glob("*.ckpt")) == before


NO_MATTER = {
    "self": "the Trainer itself",
    "model": "any LightningModule",
    "accelerator": "the device of a worker; a step's sequence is the same",
    "num_nodes": "as devices: their product is compared with the number of workers",
    "logger": "writes what the module logs",
    "min_epochs": "counted with the epochs, which a checkpoint holds",
    "min_steps": "counted with the steps, which a checkpoint holds",
    "limit_test_batches": "another loop",
    "limit_predict_batches": "another loop",
    "num_sanity_val_steps": "before the training",
    "log_every_n_steps": "how often values are logged and reported",
    "enable_progress_bar": "display",
    "enable_model_summary": "display",
    "deterministic": "torch's own setting",
    "benchmark": "torch's own setting",
    "inference_mode": "of validations",
    "use_distributed_sampler": "an ElasticLoader is no DataLoader, which Lightning would replace",
    "profiler": "measures only",
    "detect_anomaly": "torch's own setting",
    "sync_batchnorm": "torch's layer counts the samples of each rank",
    "default_root_dir": "where others write",
    "enable_autolog_hparams": "what a logger notes",
    "model_registry": "a download by name",
    "val_dataloaders": "begins anew at each validation",
    "weights_only": "the position is plain numbers, which both ways of torch.load read",
}
WITH_TESTS = {
    "callbacks": "test_what_cannot_work_is_refused_before_anything_is_trained",
    "fast_dev_run": "test_a_try_leaves_no_checkpoint",
    "max_epochs": "test_more_epochs_go_on_after_the_last",
    "datamodule": "test_a_datamodule_gives_its_loader_once",
}
"""Further arguments that work, and the test that shows it."""


def test_a_datamodule_gives_its_loader_once(tmp_path):
    """And the training goes on from its checkpoints."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

    def train(folder, **options):
        elastic = ElasticCheckpoint(tmp_path / folder, keep_last=99, every_steps=1)
        pl.seed_everything(0, verbose=False)
        module = Line()
        pl.Trainer(**QUIET, callbacks=[elastic]).fit(module, datamodule=Data(), **options)
        return module

    whole = train("whole")
    rest = train("rest", ckpt_path=checkpoint(tmp_path / "whole", 5))
    assert rest.trained == whole.trained[5:]


@pytest.mark.parametrize("function", [pl.Trainer.__init__, pl.Trainer.fit])
def test_every_argument_is_known(function):
    """A release of Lightning that adds or removes one has it looked at."""
    known = {*WORKS, *REFUSED, *NO_MATTER, *WITH_TESTS}
    arguments = set(inspect.signature(function).parameters)
    assert arguments <= known, f"new: {arguments - known}"
    assert all(name in globals() for name in WITH_TESTS.values())
    both = {
        p for f in (pl.Trainer.__init__, pl.Trainer.fit) for p in inspect.signature(f).parameters
    }
    assert {*NO_MATTER, *WITH_TESTS} <= both, f"gone: {({*NO_MATTER, *WITH_TESTS}) - both}"


def test_the_private_parts_are_there(tmp_path):
    """A release of Lightning that changes one is named here."""
    trainer = pl.Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(Line(), loader())
    loop = trainer.fit_loop
    assert isinstance(loop._combined_loader, CombinedLoader), "_FitLoop._combined_loader"
    assert loop._combined_loader._mode == "max_size_cycle", "CombinedLoader._mode"
    assert not loop._data_source.is_module(), "_DataLoaderSource.is_module"
    assert loop._restarting is False, "_Loop._restarting"
    assert trainer._val_check_time_interval is None, "Trainer._val_check_time_interval"
    assert callable(loop.epoch_loop._should_check_val_fx), "_TrainingEpochLoop._should_check_val_fx"
    counts = loop.state_dict()
    for key in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        assert {"ready", "started", "processed", "completed"} <= counts[key]["total"].keys(), key
