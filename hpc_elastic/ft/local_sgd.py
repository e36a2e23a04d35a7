"""LocalSGD and DiLoCo: replicas train by themselves and synchronise every ``sync_every`` steps.

`LocalSGD` averages the parameters. `DiLoCo` averages their movement (the pseudo-gradient) and
passes it to a second, outer optimizer, optionally one fragment of the model at a time. Both are
context managers around an ordinary training loop: hooks on the optimizer count its steps, so the
loop does not change, and its optimizer is not wrapped.

    with DiLoCo(manager, [model], inner, outer, sync_every=100):
        for x, y in loader:
            inner.zero_grad()
            loss_of(model(x), y).backward()
            inner.step()                         # each 100th: quorum, average, commit

A synchronisation is a step of the Manager: it needs a quorum, `Manager.current_step` counts it, and
if a replica is lost in it, it fails as a whole and is repeated `sync_every` steps later. Other
replicas see only the outcome of a replica's own steps, so a failed synchronisation leaves the
parameters of `LocalSGD` as they are, and resets those of `DiLoCo` to the last one.

The user's state (`Manager(load_state_dict, state_dict)`) is the model and the inner optimizer;
`DiLoCo` adds its own. Outside of a run, the time between two synchronisations has to be shorter
than the manager's ``quorum_timeout``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hpc_elastic.errors import ConfigError

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


_MIB = 1024 * 1024
_BUCKET_MB = 1024


class _StepHooks:
    """Hooks around each step of an optimizer: no peer reads a state that changes."""

    def __init__(self, manager: Manager, optimizer: optim.Optimizer) -> None:
        self._manager = manager
        self._local_optimizer = optimizer
        manager.heal_from_one_source()  # between two averages all replicas differ
        self._hooks: list[RemovableHandle] = []
        self._local_step = 0

    def __enter__(self) -> Self:
        optimizer, manager = self._local_optimizer, self._manager

        def before_step(*_: Any) -> None:  # torch takes what a hook returns for arguments
            manager.disallow_state_dict_read()

        def after_step(*_: Any) -> None:
            manager.allow_state_dict_read()
            self._local_step += 1
            self._on_step()

        self._hooks = [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_step_post_hook(after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_step(self) -> None:
        raise NotImplementedError


class LocalSGD(_StepHooks):
    """Averages the parameters over the replicas every ``sync_every`` steps of the optimizer.

    S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv:1805.09767).

    Only parameters are averaged: buffers, and the optimizer's state, stay each replica's own.

    Args:
        manager: Its state has to hold the model and the optimizer. With async quorum a replica
            that heals does not contribute to its first average: it takes over the others'.
        model: Its parameters may be DTensors.
        optimizer: The loop's optimizer.
        sync_every: Steps from one average to the next, at least 1.

    Raises:
        ConfigError: ``sync_every`` is out of range.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: optim.Optimizer, sync_every: int
    ) -> None:
        super().__init__(manager, optimizer)
        if sync_every < 1:
            raise ConfigError("sync_every", sync_every, "give at least 1")
        self._model = model
        self._sync_every = sync_every

    def _on_step(self) -> None:
        if self._local_step >= self._sync_every:
            self.sync()

    def sync(self) -> None:
        """Average now, and restart the count of steps.

        If that is not committed, the replica goes on from its own parameters.
        """
        self._manager.start_quorum()
        self._local_step = 0
        parameters = [local(p) for p in self._model.parameters()]
        means = [p.clone() for p in parameters]
        Averaging(self._manager, means, bucket_bytes=_BUCKET_MB * _MIB).wait()
        if self._manager.should_commit():
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean)


class DiLoCo(_StepHooks):
    """Steps an outer optimizer by the mean movement of the replicas, every ``sync_every`` steps.

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv:2311.08105); with several fragments in turn, whose exchange overlaps with the inner
    steps: A. Douillard et al., "Streaming DiLoCo with overlapping communication"
    (arXiv:2501.18512).

    Args:
        manager: Made with ``use_async_quorum=False``: a replica heals before it computes its
            movement. Its state has to hold the model and the inner optimizer.
        model_fragments: Parts of the model, the same on all replicas; together all of it.
        inner_optimizer: The loop's optimizer.
        outer_optimizer: One for all fragments, or a list with one for each. SGD with Nesterov
            momentum in the papers.
        sync_every: Number of inner steps in which each fragment is synchronised once; a multiple
            of the number of fragments.
        backup_device: Device of the global parameters; None: host memory.
        pin_memory: Pin them in host memory, if there is an accelerator.
        use_bucketization: Pack pseudo-gradients into buckets. $TORCHFT_USE_BUCKETIZATION=True also.
        bucket_cap_mb: MiB of a bucket, above 0; None: 1024.
        should_quantize: As in `Manager.allreduce`.
        fragment_sync_delay: Number of inner steps from the start of a fragment's exchange to its
            end, from 0; fewer than between two fragments.
        fragment_update_alpha: Weight of the local parameters in the mix that the training
            continues from, 0 to 1.

    Raises:
        ConfigError: An argument is out of range, or excludes another.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: list[nn.Module],
        inner_optimizer: optim.Optimizer,
        outer_optimizer: optim.Optimizer | list[optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        super().__init__(manager, inner_optimizer)
        num = len(model_fragments)
        if manager._use_async_quorum:
            remedy = "make the Manager with use_async_quorum=False: DiLoCo heals before it averages"
            raise ConfigError("use_async_quorum", True, remedy)
        if not num:
            raise ConfigError("model_fragments", [], "give at least one module")
        if sync_every < 1 or sync_every % num:
            remedy = f"give a multiple of the number of fragments, {num}"
            raise ConfigError("sync_every", sync_every, remedy)
        if not 0 <= fragment_sync_delay < sync_every // num:  # one at a time is under way
            remedy = f"give 0 to {sync_every // num - 1}, less than the steps between two"
            raise ConfigError("fragment_sync_delay", fragment_sync_delay, remedy)
        if not 0 <= fragment_update_alpha <= 1:
            raise ConfigError("fragment_update_alpha", fragment_update_alpha, "give 0 to 1")
        buckets = use_bucketization or os.environ.get("TORCHFT_USE_BUCKETIZATION") == "True"
        bucket_bytes = int((bucket_cap_mb or _BUCKET_MB) * _MIB) if buckets else None
        options = SyncOptions(
            backup_device, pin_memory, bucket_bytes, should_quantize, fragment_update_alpha
        )
        outer = outer_optimizer if isinstance(outer_optimizer, list) else [outer_optimizer] * num
        if len(outer) != num:
            remedy = f"give one for each of the {num} fragments, or one for all"
            raise ConfigError("outer_optimizer", f"{len(outer)} optimizers", remedy)
        self._fragments = [
            Fragment(manager, i, module, outer[i], options)
            for i, module in enumerate(model_fragments)
        ]
        self._sync_every = sync_every // num
        self._fragment_sync_delay = fragment_sync_delay

    def _on_step(self) -> None:
        if self._local_step == self._sync_every - self._fragment_sync_delay:
            self._manager.start_quorum()
            self._next_fragment.prepare_sync()
        if self._local_step == self._sync_every:
            self._local_step = 0
            self._next_fragment.perform_sync()

    @property
    def _next_fragment(self) -> Fragment:
        """The same on all replicas: by the committed steps, so one that failed is repeated."""
        return self._fragments[self._manager.current_step() % len(self._fragments)]


# ---- fragments of a model under DiLoCo


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SyncOptions:
    """Options of the synchronisation of fragments; see `DiLoCo`."""

    backup_device: torch.device | None
    pin_memory: bool
    bucket_bytes: int | None
    should_quantize: bool
    update_alpha: float


class Fragment:
    """A part of a model that `DiLoCo` synchronises at one time.

    Beside the parameters that the replica trains (the local ones) it keeps those that all replicas
    agreed on last (the global ones). Their difference is the pseudo-gradient. A synchronisation
    takes its mean over the replicas, and the outer optimizer steps the global parameters with it;
    if that is not committed, the replica goes on from the global parameters. They and the outer
    optimizer are a part of the state with which a replica heals.
    """

    def __init__(
        self,
        manager: Manager,
        number: int,
        module: nn.Module,
        outer_optimizer: optim.Optimizer,
        options: SyncOptions,
    ) -> None:
        self._manager = manager
        self._module = module
        self._outer_optimizer = outer_optimizer
        self._options = options
        self._gradients: Tensors = {}
        self._averaging: Averaging | None = None
        self.original_parameters: Tensors = {
            name: self._backup(p) for name, p in self._local().items()
        }
        manager.register_state_dict_fn(
            f"StreamingDiLoCoFragment_{number}", self._load_state_dict, self._state_dict
        )

    @torch.no_grad()
    def prepare_sync(self) -> None:
        """Start to average the pseudo-gradients; to be called after `Manager.start_quorum`."""
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

        Returns whether it was committed; if not, the local training since the last one is
        discarded. Raises RuntimeError if `prepare_sync` has not been called for this
        synchronisation.
        """
        if self._averaging is None:
            raise RuntimeError("no synchronisation is under way: call prepare_sync() first")
        self._averaging.wait()
        self._averaging = None
        mixes = self._options.update_alpha > 0
        trained = {name: p.clone() for name, p in self._local().items()} if mixes else {}
        for name, parameter in self._local().items():
            parameter.copy_(self.original_parameters[name])
        committed = self._manager.should_commit()
        if committed:
            self._outer_optimizer.zero_grad()  # other fragments may have the same one
            for name, parameter in self._module.named_parameters():
                parameter.grad = like(self._gradients[name], parameter)
            self._outer_optimizer.step()
            for name, parameter in self._local().items():
                self.original_parameters[name].copy_(parameter)
                if mixes:
                    parameter.lerp_(trained[name], self._options.update_alpha)
        self._outer_optimizer.zero_grad()
        self._gradients = {}
        return committed

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


# ---- means of tensors over the replicas


class Averaging:
    """The mean of each tensor over the replicas; starts at once, beside other work.

    The tensors are floating-point; they hold the means once `wait` has returned. They are not to be
    used before, and are undefined if the manager does not commit, as after an error.

    Tensors of one type and device are packed into buckets of at most ``bucket_bytes``, which is
    faster for many small tensors; None sends each by itself, and a larger tensor always goes so.
    """

    def __init__(
        self,
        manager: Manager,
        tensors: Sequence[torch.Tensor],
        *,
        bucket_bytes: int | None = None,
        should_quantize: bool = False,
    ) -> None:
        packed = [[t] for t in tensors] if bucket_bytes is None else _packed(tensors, bucket_bytes)
        self._buckets = list(packed)
        self._stream: torch.Stream | None = None
        if torch.accelerator.is_available():  # it waits for the training's work so far
            self._stream = torch.Stream(device=torch.accelerator.current_accelerator())
            self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream or nullcontext():
            self._flat = [
                b[0] if len(b) == 1 else torch.cat([t.reshape(-1) for t in b])
                for b in self._buckets
            ]
            self._works: list[Any] = [
                manager.allreduce(flat, should_quantize=should_quantize) for flat in self._flat
            ]

    def wait(self) -> None:
        """Wait until all tensors hold their means, or the manager has recorded an error."""
        with self._stream or nullcontext():
            for bucket, flat, work in zip(self._buckets, self._flat, self._works, strict=True):
                work.wait()
                if len(bucket) > 1:
                    pieces = torch.split(flat, [t.numel() for t in bucket])
                    for tensor, piece in zip(bucket, pieces, strict=True):
                        tensor.copy_(piece.view_as(tensor))
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._works, self._flat, self._buckets = [], [], []


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, or of this rank's shard of a DTensor (torchft's name)."""
    return local(t).clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; another tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def like(shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor with the layout of ``whole``, or itself if that is none."""
    if isinstance(whole, DTensor):
        shard = DTensor.from_local(
            shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
        )
    return shard


def _packed(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in buckets, in the same order on all replicas."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket: list[torch.Tensor] = []
        for tensor in same:
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
