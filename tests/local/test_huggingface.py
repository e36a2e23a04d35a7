"""The examples with Hugging Face's Trainer and Accelerate: killed workers, nodes that go."""

import shutil
from pathlib import Path

import pytest
import torch
from framework_runs import FrameworkRun, killed_and_told_to_go
from torch.utils.data import DataLoader

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError

pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
hf = pytest.importorskip("transformers", reason="pip install -e '.[frameworks]'")
from hpc_elastic.integrations.huggingface import (  # noqa: E402
    MARK,
    ElasticTrainer,
    ElasticTraining,
    WeightedLoader,
    newest_checkpoint,
)


@pytest.mark.long
def test_the_trainer_withstands_a_kill_and_a_node_that_goes(tmp_path):
    """Nothing is lost but what the kill cost."""
    overrides = ("epochs=4", "pause_s=0.2", "save_every_s=3")
    killed_and_told_to_go("huggingface/trainer.py", tmp_path, *overrides, num_steps=4 * 30)


@pytest.mark.long
def test_accelerate_goes_on_without_a_node(tmp_path):
    """One of two nodes is asked to leave: the other goes on from the step that both have saved."""
    overrides = ("nodes=1:2", "epochs=2", "pause_s=0.1", "save_every_s=1000")
    with FrameworkRun("huggingface/accelerated.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.tell_to_go(run.tasks()[0])
        (value,) = run.values()

    assert run.lost_at_notice() == 0
    assert value["steps"] == 2 * 38
    assert "recorded and lost: 0 steps" in run.audit()


class Net(torch.nn.Module):
    """A linear model, as a Trainer takes it; its loss is the mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        """Return the loss."""
        return {"loss": (self.layer(x) - labels).square().mean()}


def arguments(folder: Path, **more) -> "hf.TrainingArguments":
    """Three epochs; a checkpoint every step, by the Trainer's own strategy."""
    return hf.TrainingArguments(
        str(folder), num_train_epochs=3, learning_rate=0.1, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=1, **more,
    )  # fmt: skip


def train(folder: Path, **more) -> Net:
    """Train on 22 samples, eight a step, in this process."""
    hf.set_seed(0)
    net, x = Net(), torch.randn(22, 3)
    data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
    trainer = ElasticTrainer(
        model=net, args=arguments(folder, **more), train_dataset=data, global_batch=8
    )
    trainer.train()
    return net


WAYS = {
    "at once": {"per_device_train_batch_size": 8},
    "accumulated": {"per_device_train_batch_size": 2, "dataloader_drop_last": True},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_goes_on_is_the_same_to_the_bit(tmp_path, way):
    """From inside of an epoch and from an epoch's last step."""
    whole = train(tmp_path / "whole", **WAYS[way])
    folders = sorted((tmp_path / "whole").glob("checkpoint-*"))
    assert len(folders) == (9 if way == "at once" else 6)
    for step in (1, 3, 4):
        rest = tmp_path / f"rest-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", rest / f"checkpoint-{step}")
        net = train(rest, **WAYS[way])
        assert len(list(rest.iterdir())) == len(folders) - step + 1
        assert torch.equal(whole.layer.weight, net.layer.weight), step


def test_a_checkpoint_counts_once_it_is_marked(tmp_path):
    """A later one that was being written is passed over."""
    assert newest_checkpoint(tmp_path) is None
    for step, names in ((9, [MARK]), (10, [MARK]), (11, ["model.safetensors"])):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in names:
            (tmp_path / f"checkpoint-{step}" / name).touch()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("dataloader_drop_last", {"per_device_train_batch_size": 2}),
        ("save_total_limit", {"save_total_limit": 1}),
        ("average_tokens_across_devices", {"average_tokens_across_devices": False}),
        ("enable_jit_checkpoint", {"enable_jit_checkpoint": True}),
    ],
)
def test_what_would_go_wrong_later_is_refused(tmp_path, key, more):
    """The message names the argument and what to give."""
    with pytest.raises(ConfigError, match=f"{key}.*give"):
        train(tmp_path, **more)


class Fixed:
    """Stands for a Trainer whose loss is two."""

    current_gradient_accumulation_steps = 3

    def compute_loss(self, model, inputs, **kwargs):
        """Return two, for inputs of the model alone."""
        assert inputs == {"x": 1}
        return 2.0


class FixedElastic(ElasticTraining, Fixed):
    """It, elastic."""


def test_a_mean_loss_is_weighed_and_one_by_labels_is_not():
    """The Trainer divides by the number of micro-batches, or the model by that of labels."""
    trainer = object.__new__(FixedElastic)
    inputs = {"x": 1, "hpc_elastic_weight": 0.5}
    assert trainer.compute_loss(None, dict(inputs), num_items_in_batch=None) == 2.0 * 0.5 * 3
    assert trainer.compute_loss(None, dict(inputs), num_items_in_batch=7) == 2.0
    assert trainer.compute_loss(None, {"x": 1}) == 2.0, "an evaluation"


def test_a_sample_that_is_lent_has_no_labels():
    """Where the loss is divided by their number; the other rank trains on it."""
    labels = torch.tensor([1, 2, 3])
    data = [{"x": label, "labels": label} for label in labels]
    seen = []
    for rank in range(2):
        sampler = ElasticSampler(3, 2, seed=0, rank=rank, world_size=2, shuffle=False, name=None)
        loader = WeightedLoader(DataLoader(data, batch_sampler=sampler), by_labels=True)
        seen.append([batch["labels"].tolist() for batch in loader])
    assert seen == [[[1], [-100]], [[2], [3]]]
