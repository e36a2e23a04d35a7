"""A state that lacks what the process trains is refused; one that may have it is not."""

import copy
import gc

import pytest
import torch
from torch import nn

from hpc_elastic import Checkpointer
from hpc_elastic.checkpoint import CheckpointOptions
from hpc_elastic.errors import ConfigError
from hpc_elastic.worker import optimizer_steps


class Trained:
    """A model of two parts, its optimizer, and a schedule, after a step."""

    def __init__(self, *, schedule: bool = False, **options: float) -> None:
        self.net, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        parts = [*self.net.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parts, lr=0.1, **options)
        self.schedule = None
        if schedule:
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.head(self.net(torch.ones(2, 3))).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict:
        """Return all, in a form of its own."""
        return {"net": self.net.state_dict(), "head": self.head.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Take it over."""
        self.net.load_state_dict(state["net"])
        self.head.load_state_dict(state["head"])


@pytest.fixture(autouse=True)
def _alone():
    """No optimizer of another test is left."""
    optimizer_steps.watch()
    gc.collect()
    optimizer_steps._steps.optimizers.clear()
    yield
    optimizer_steps._steps.optimizers.clear()


def save(tmp_path, state: dict, **options) -> None:
    """Save once."""
    with Checkpointer(state, tmp_path / "c", options=CheckpointOptions(**options)) as c:
        assert c.save(1)


def with_averages(t: Trained) -> dict:
    """Return a state whose model is wrapped and averaged."""
    both = nn.ModuleList([t.net, t.head])
    return {"net": both, "ema": copy.deepcopy(both), "optimizer": t.optimizer}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda t: {"optimizer": t.optimizer, "run": {"lr": 0.1}}, "has no module, .* SGD trains"),
        (lambda t: {"net": t.net, "optimizer": t.optimizer}, r"SGD trains .* shapes \[\[1, 3\]"),
        (lambda t: {"net": t.net, "head": t.head, "run": {"lr": 0.1}}, "lacks the SGD"),
        (lambda t: {"net": t.net, "head": t.head, "best": {"loss": [1.0]}}, "lacks the SGD"),
    ],
)
def test_what_is_trained_and_not_saved_is_named(tmp_path, state, message):
    """At the first save; with it in the state, the same script goes on."""
    t = Trained(momentum=0.9)
    with pytest.raises(ConfigError, match=message):
        save(tmp_path, state(t))
    save(tmp_path, {**state(t), "net": t.net, "head": t.head, "optimizer": t.optimizer})


def test_an_optimizer_that_steps_after_the_first_save_is_looked_for(tmp_path):
    """The state without it does not change."""
    t = Trained(momentum=0.9)
    later = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(later.parameters(), lr=0.1, momentum=0.9)
    state = {"net": t.net, "head": t.head, "optimizer": t.optimizer, "later": later}
    with Checkpointer(state, tmp_path) as checkpointer:
        checkpointer.save(1)
        later(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="lacks the SGD"):
            checkpointer.save(2)


@pytest.mark.parametrize(
    ("state", "momentum"),
    [
        (lambda t: {"net": t.net, "head": t.head}, 0.0),  # the optimizer has no state
        (lambda t: {"all": t}, 0.9),  # it may be in there
        (lambda t: {"net": t.net, "optimizer": t.optimizer, "rest": {"x": torch.ones(1)}}, 0.9),
        (lambda t: {"net": nn.Linear(2, 2)}, 0.9),  # of another training, or a copy
        (with_averages, 0.9),
    ],
)
def test_what_may_be_right_is_not_refused(tmp_path, caplog, state, momentum):
    """Nothing is said, either."""
    t = Trained(momentum=momentum)
    save(tmp_path, state(t))
    assert caplog.text == ""


def test_the_best_model_is_a_part_of_the_state(tmp_path):
    """Beside the main checkpoint."""
    t = Trained(momentum=0.9)
    save(tmp_path, {"net": t.net}, boundary=False)


def test_a_phase_that_is_over_is_not_missed(tmp_path):
    """Its optimizer trained the same parameters."""
    t = Trained(momentum=0.9)
    later = torch.optim.Adam(t.optimizer.param_groups[0]["params"])
    later.step()
    save(tmp_path, {"net": t.net, "head": t.head, "optimizer": later})


def test_a_schedule_that_is_not_saved_is_refused(tmp_path):
    """At the first save; not one that is gone, of which the optimizer's state still tells."""
    t = Trained(schedule=True)
    state = {"net": t.net, "head": t.head, "optimizer": t.optimizer}
    with pytest.raises(ConfigError, match="ExponentialLR that sets the learning rate of SGD"):
        save(tmp_path / "c", state)
    save(tmp_path / "d", {**state, "schedule": t.schedule})
    t.schedule = None
    gc.collect()
    assert "initial_lr" in t.optimizer.param_groups[0]
    save(tmp_path / "e", state)


def test_the_schedule_of_another_training_is_not_missed(tmp_path):
    """Two trainings of one process, each with its checkpoints."""
    other = Trained(schedule=True)
    t = Trained(momentum=0.9)
    save(tmp_path, {"net": t.net, "head": t.head, "optimizer": t.optimizer})
    assert other.schedule


def test_a_step_by_which_torch_makes_a_state_is_none():
    """Before a state is loaded, with a learning rate of 0 (private: the module's name)."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), momentum=0.9)
    get_optimizer_state_dict(net, sgd)
    assert sgd.state and not optimizer_steps.stepped_optimizers()
