"""A fragment of a model under DiLoCo: what `local_sgd.DiLoCo` synchronises at one time.

Beside the parameters that the replica trains (the local ones) a fragment keeps those that all
replicas agreed on last (the global ones). Their difference is the pseudo-gradient. A
synchronisation takes its mean over the replicas and lets the outer optimizer step from the global
parameters with it; where that is not committed, the replica goes on from the global parameters.

The global parameters and the outer optimizer are a part of the state that heals a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from hpc_elastic.ft.averaging import Averaging, like, local

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """How the fragments of a model are synchronised; see `local_sgd.DiLoCo`."""

    backup_device: torch.device | None
    pin_memory: bool
    bucket_bytes: int | None
    should_quantize: bool
    update_alpha: float


class Fragment:
    """A part of a model with its global parameters and its outer optimizer.

    Args:
        manager: Its state gets this fragment's, under a key with the fragment's number.
        number: The fragment's place in the model's list, the same on all replicas.
        module: The part of the model.
        outer_optimizer: Of this part, or of all.
        options: Those of all fragments.
    """

    def __init__(
        self,
        manager: Manager,
        number: int,
        module: nn.Module,
        outer_optimizer: optim.Optimizer,
        options: Options,
    ) -> None:
        self._manager = manager
        self._module = module
        self._outer_optimizer = outer_optimizer
        self._options = options
        self._gradients: Tensors = {}
        self._averaging: Averaging | None = None
        self.original_parameters = {name: self._backup(p) for name, p in self._local().items()}
        manager.register_state_dict_fn(
            f"StreamingDiLoCoFragment_{number}", self._load_state_dict, self._state_dict
        )

    @torch.no_grad()
    def prepare_sync(self) -> None:
        """Begin to average the pseudo-gradients; to be called behind `Manager.start_quorum`."""
        self._gradients = {
            name: self.original_parameters[name].to(p.device) - p
            for name, p in self._local().items()
        }
        self._averaging = Averaging(
            self._manager,
            list(self._gradients.values()),
            bucket_bytes=self._options.bucket_bytes,
            should_quantize=self._options.should_quantize,
        )

    @torch.no_grad()
    def perform_sync(self) -> bool:
        """Step the global parameters by the mean, if it is committed, and go on from them.

        Returns:
            Whether it was committed. If not, what was trained locally since then is discarded.

        Raises:
            RuntimeError: `prepare_sync` has not been called for this synchronisation.
        """
        if self._averaging is None:
            raise RuntimeError("nothing to wait for: call prepare_sync() first")
        self._averaging.wait()
        self._averaging = None
        mixes = self._options.update_alpha > 0
        trained = {name: p.clone() for name, p in self._local().items()} if mixes else {}
        self._go_back()
        committed = self._manager.should_commit()
        if committed:
            self._step_global()
            self._mix_in(trained)
        self._outer_optimizer.zero_grad()
        self._gradients = {}
        return committed

    def _step_global(self) -> None:
        self._outer_optimizer.zero_grad()  # it may be that of other fragments, too
        for name, parameter in self._module.named_parameters():
            parameter.grad = like(self._gradients[name], parameter)
        self._outer_optimizer.step()
        self._keep()

    def _mix_in(self, trained: Tensors) -> None:
        """Keep a share of what was trained locally."""
        for name, parameter in self._local().items():
            if name in trained:
                parameter.lerp_(trained[name], self._options.update_alpha)

    def _keep(self) -> None:
        for name, parameter in self._local().items():
            self.original_parameters[name].copy_(parameter)

    def _go_back(self) -> None:
        for name, parameter in self._local().items():
            parameter.copy_(self.original_parameters[name])

    def _local(self) -> Tensors:
        """Return this rank's parameters, sharing the memory of the model's."""
        return {name: local(p) for name, p in self._module.named_parameters()}

    def _backup(self, parameter: torch.Tensor) -> torch.Tensor:
        backup = torch.empty_like(parameter, device=self._options.backup_device or "cpu")
        pins = self._options.pin_memory and backup.device.type == "cpu"
        if pins and torch.accelerator.is_available():
            backup = backup.pin_memory()
        return backup.copy_(parameter)

    def _state_dict(self) -> dict[str, Any]:
        return {
            "outer_optimizer": self._outer_optimizer.state_dict(),
            "original_parameters": {n: t.clone() for n, t in self.original_parameters.items()},
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for name, kept in self.original_parameters.items():
            kept.copy_(state["original_parameters"][name])
        self._outer_optimizer.load_state_dict(state["outer_optimizer"])
