"""Optimizer that steps only if the Manager commits the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


class OptimizerWrapper(Optimizer):
    """An optimizer under a Manager: `zero_grad` starts a step, `step` commits or skips it.

    Call `zero_grad` before the forward pass and `step` after the backward pass, each step.
    Schedulers may be given this wrapper.

    Args:
        manager: The Manager.
        optim: The wrapped optimizer; its state is the one that is saved.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        # Not Optimizer's own __init__: everything that it would create is the wrapped one's.
        self.optim = optim
        self.manager = manager
        manager.register_optimizer(optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a step, unless one was started in which nothing was done yet; clear the gradients.

        Raises:
            TimeoutError, LeftQuorumError: As `Manager.start_quorum`.
        """
        self.manager.begin_step()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: object | None = None) -> None:  # type: ignore[override]
        """Step the optimizer if the step is committed.

        Args:
            closure: Not supported: it would run the collectives again.

        Raises:
            ValueError: A closure was given.
            RuntimeError, TimeoutError, LeftQuorumError: As `Manager.should_commit`.
        """
        if closure is not None:
            raise ValueError("closure: optimizers with closures cannot be made fault tolerant")
        if self.manager.should_commit():
            self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see torch.optim.Optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state, by parameter."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults, which some schedulers read."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
