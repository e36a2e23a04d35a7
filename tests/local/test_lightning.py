"""The Lightning example: a worker is killed, a node is asked to leave."""

import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from framework_runs import killed_and_told_to_go
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler

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


def fit(folder: Path, ckpt_path: Path | None = None) -> Line:
    """Train three epochs of four steps in this process, and save at each step."""
    pl.seed_everything(0, verbose=False)
    module, x = Line(), torch.randn(14, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = ElasticSampler(data, 4, seed=0, name=None)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(folder, keep_last=20, every_steps=1)
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[elastic], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(data), ckpt_path=ckpt_path)
    assert trainer.global_step == 12
    return module


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("step", [1, 4, 6, 11, 12])
def test_a_training_that_goes_on_is_the_same_to_the_bit(tmp_path, step):
    """From any step. After an epoch's last one the validation is left out, as in the guide."""
    whole = fit(tmp_path / "whole")
    assert len(list((tmp_path / "whole").iterdir())) == 12
    rest = fit(tmp_path / "rest", tmp_path / "whole" / f"step-{step}.ckpt")
    assert torch.equal(whole.layer.weight, rest.layer.weight)
    assert set(whole.validated) == {0, 4, 8, 12}, "the first is Lightning's sanity check"
    assert set(rest.validated) == {end for end in (4, 8, 12) if end > step}


def test_the_newest_checkpoint_is_found(tmp_path):
    """By its number; one that was not committed is none."""
    elastic = ElasticCheckpoint(tmp_path)
    assert elastic.newest() is None
    for name in ("step-9.ckpt", "step-10.ckpt", ".step-11.r3"):
        (tmp_path / name).touch()
    assert elastic.newest() == str(tmp_path / "step-10.ckpt")


def test_a_smaller_share_weighs_less():
    """The gradient is that of the weighed loss."""
    loader = object.__new__(ElasticLoader)
    loader.weight = 0.25
    x = torch.ones(1, requires_grad=True)
    loss = (3 * x).sum()
    trainer = SimpleNamespace(train_dataloader=loader)
    ElasticCheckpoint("somewhere").on_before_backward(trainer, None, loss)
    loss.backward()
    assert x.grad.item() == 0.75


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
