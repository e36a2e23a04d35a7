"""The Lightning example: a worker is killed, a node is asked to leave."""

import enum
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from framework_runs import killed_and_told_to_go
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import UntrustedRunError

pl = pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
from hpc_elastic.integrations.lightning import (  # noqa: E402
    ElasticCheckpoint,
    ElasticLoader,
    world,
)


@pytest.mark.long
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_killed_worker_and_a_node_that_goes(fsdp, tmp_path):
    """Nothing is lost but what the kill cost; sharded parameters are resharded."""
    overrides = ("epochs=4", "pause_s=0.1", "save_every_s=3", f"fsdp={fsdp}")
    killed_and_told_to_go("lightning/train.py", tmp_path, *overrides, num_steps=4 * 38)


class Line(pl.LightningModule):
    """A linear model whose validations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.validated: list[int] = []
        self.handlers: set[object] = set()

    def training_step(self, batch, _):
        """Return the loss; note the handler of SIGTERM."""
        self.handlers.add(signal.getsignal(signal.SIGTERM))
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def validation_step(self, batch, _):
        """Note at which step it is."""
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Kind(enum.Enum):
    """A hyperparameter of the script's own type."""

    SMALL = 1


class Tuned(Line):
    """A model whose hyperparameters are objects, as Hydra instantiates them."""

    def __init__(self, net: torch.nn.Module, optimizer: Any, config: Any, kind: Kind) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.layer = net

    def configure_optimizers(self):
        """Return the optimizer."""
        return self.hparams.optimizer(self.parameters())


def tuned() -> Tuned:
    """Return one."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    config = OmegaConf.create({"a": {"b": "${c}"}, "c": 1})
    return Tuned(torch.nn.Linear(3, 1), optimizer, config, Kind.SMALL)


def fit(
    folder: Path, ckpt_path: Path | None = None, make: Callable[[], Line] = Line, epochs: int = 3
) -> Line:
    """Train epochs of four steps in this process, and save at each step."""
    pl.seed_everything(0, verbose=False)
    module, x = make(), torch.randn(14, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = ElasticSampler(data, 4, seed=0, name=None)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(folder, keep_last=20, every_steps=1)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[elastic], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(data), ckpt_path=ckpt_path or elastic.newest())
    assert trainer.global_step == 4 * epochs
    return module


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "step", [4, 6, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 11, 12))]
)
def test_a_training_that_goes_on_is_the_same_to_the_bit(tmp_path, step):
    """From any step. The validation after a saved step is made up for."""
    whole = fit(tmp_path / "whole")
    assert len(list((tmp_path / "whole").iterdir())) == 12
    rest = fit(tmp_path / "rest", tmp_path / "whole" / f"step-{step}.ckpt")
    assert torch.equal(whole.layer.weight, rest.layer.weight)
    assert set(whole.validated) == {0, 4, 8, 12}, "the first is Lightning's sanity check"
    assert set(rest.validated) == {end for end in (4, 8, 12) if end >= step}


@pytest.mark.filterwarnings("default")
def test_hyperparameters_may_be_objects(tmp_path, request):
    """A restart reads its own checkpoint, and so does a test after the training.

    One that another user could have written is refused.
    """
    before = os.umask(0o002)  # as where each user has a group of the same name
    request.addfinalizer(lambda: os.umask(before))
    torch.serialization.clear_safe_globals()
    fit(tmp_path, make=tuned, epochs=1)
    loaded = torch.load(tmp_path / "step-4.ckpt", weights_only=True)
    assert loaded["hyper_parameters"]["kind"] is Kind.SMALL
    torch.serialization.clear_safe_globals()
    fit(tmp_path, make=tuned)
    (tmp_path / "step-12.ckpt").chmod(0o666)
    torch.serialization.clear_safe_globals()
    with pytest.raises(UntrustedRunError, match=r"step-12\.ckpt.*may be written by others"):
        ElasticCheckpoint(tmp_path).newest()


def test_the_newest_checkpoint_is_found(tmp_path):
    """By its number; one that was not committed is none."""
    elastic = ElasticCheckpoint(tmp_path)
    assert elastic.newest() is None
    for name in ("step-9.ckpt", "step-10.ckpt", ".step-11.r3"):
        (tmp_path / name).touch()
    assert elastic.newest() == str(tmp_path / "step-10.ckpt")


def test_the_trainer_is_told_of_the_group(monkeypatch):
    """Workers of a node, and nodes."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert world() == {"devices": 2, "num_nodes": 3}
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert world() == {"devices": 1, "num_nodes": 1}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("in_a_run", [True, False])
def test_lightning_does_not_answer_sigterm_in_a_run(tmp_path, monkeypatch, in_a_run):
    """The handler that the agent gave its worker stays; outside of a run Lightning has its own."""

    def agents_own(*_):
        pass

    before = signal.signal(signal.SIGTERM, agents_own)
    try:
        monkeypatch.setattr(
            "hpc_elastic.worker.reporting.own_page", lambda: Mock() if in_a_run else None
        )
        module = fit(tmp_path)
        assert (module.handlers == {agents_own}) == in_a_run
        assert signal.getsignal(signal.SIGTERM) is agents_own
    finally:
        signal.signal(signal.SIGTERM, before)
