"""Training that talks seldom: replicas train by themselves and meet every so many steps.

`LocalSGD` averages the parameters themselves. `DiLoCo` averages how far they have moved (the
pseudo-gradient) and gives that to a second, outer optimizer, a fragment of the model at a time if
one likes. Both are context managers around an ordinary training loop: hooks on the optimizer count
its steps, so the loop does not change, and its optimizer is not wrapped.

    with DiLoCo(manager, [model], inner, outer, sync_every=100):
        for x, y in loader:
            inner.zero_grad()
            loss_of(model(x), y).backward()
            inner.step()                         # each 100th: quorum, average, commit

A synchronisation is what a step is elsewhere: it needs a quorum, `Manager.current_step` counts it,
and if a replica is lost in it, it fails as a whole and comes again `sync_every` steps later. What
the other replicas see of a replica's own steps is the outcome only, so a failed synchronisation
leaves the parameters of `LocalSGD` as they are, and sets those of `DiLoCo` back to the last one.

The user's state (`Manager(load_state_dict, state_dict)`) is the model and the inner optimizer;
`DiLoCo` adds its own. The time between two synchronisations has to be shorter than the manager's
``quorum_timeout``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hpc_elastic.errors import ConfigError

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


USE_BUCKETIZATION_ENV = "TORCHFT_USE_BUCKETIZATION"
_MIB = 1024 * 1024
_BUCKET_MB = 1024
"""MiB of a bucket where none is given."""


class _AfterEachStep:
    """Has itself called after each step of an optimizer, while the context is open.

    While the optimizer is at work nobody reads the state that heals a replica.
    """

    def __init__(self, manager: Manager, optimizer: optim.Optimizer) -> None:
        self._manager = manager
        self._local_optimizer = optimizer
        manager.heal_from_one_source()  # between two averages no two replicas are alike
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        optimizer = self._local_optimizer
        self._hooks.append(optimizer.register_step_pre_hook(self._step_pre_hook))
        self._hooks.append(optimizer.register_step_post_hook(self._step_post_hook))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _step_pre_hook(self, *_: Any) -> None:
        self._manager.disallow_state_dict_read()

    def _step_post_hook(self, *_: Any) -> None:
        self._manager.allow_state_dict_read()
        self._stepped()

    def _stepped(self) -> None:
        raise NotImplementedError


class LocalSGD(_AfterEachStep):
    """Averages the parameters over the replicas every so many steps of the optimizer.

    S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv:1805.09767).

    Only parameters are averaged: buffers, and the optimizer's state, stay each replica's own.

    Args:
        manager: Its state has to hold the model and the optimizer. With async quorum the first
            average of a replica that heals is not its own: it takes over that of the others.
        model: Its parameters may be DTensors.
        optimizer: The one that the loop steps.
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
        self._local_step = 0
        self._sync_every = sync_every

    def _stepped(self) -> None:
        self._local_step += 1
        if self._local_step >= self._sync_every:
            self.sync()

    def sync(self) -> None:
        """Average now; the count of steps begins anew.

        Where it is not committed, the replica goes on from its own parameters.
        """
        self._manager.start_quorum()
        self._local_step = 0
        parameters = [local(p) for p in self._model.parameters()]
        means = [p.clone() for p in parameters]
        Averaging(self._manager, means, bucket_bytes=_BUCKET_MB * _MIB).wait()
        if self._manager.should_commit():
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean)


class DiLoCo(_AfterEachStep):
    """Lets an outer optimizer step by how far the replicas have moved, every so many steps.

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv:2311.08105); with several fragments, each in its turn, and its exchange going on behind
    the inner steps: A. Douillard et al., "Streaming DiLoCo with overlapping communication"
    (arXiv:2501.18512).

    Args:
        manager: Made with ``use_async_quorum=False``: a replica heals before it computes how far it
            has moved. Its state has to hold the model and the inner optimizer.
        model_fragments: Parts of the model, the same on all replicas; together all of it.
        inner_optimizer: The one that the loop steps.
        outer_optimizer: One for all fragments, or a list with one for each. SGD with Nesterov
            momentum in the papers.
        sync_every: Inner steps in which each fragment is synchronised once; a multiple of the
            number of fragments.
        backup_device: Where the global parameters are kept; None: in host memory.
        pin_memory: Pin them there, if there is an accelerator.
        use_bucketization: Pack pseudo-gradients into buckets. $TORCHFT_USE_BUCKETIZATION=True also.
        bucket_cap_mb: MiB of a bucket, above 0; None: 1024.
        should_quantize: As in `Manager.allreduce`.
        fragment_sync_delay: Inner steps that a fragment's exchange may take before it is waited
            for, from 0; fewer than there are between two fragments.
        fragment_update_alpha: Share of the local parameters in those that are gone on from, 0 to 1.

    Raises:
        ConfigError: an argument is out of range, or does not go with another.
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
        _check_schedule(manager, len(model_fragments), sync_every, fragment_sync_delay)
        if not 0 <= fragment_update_alpha <= 1:
            raise ConfigError("fragment_update_alpha", fragment_update_alpha, "give 0 to 1")
        buckets = use_bucketization or os.environ.get(USE_BUCKETIZATION_ENV, "False") == "True"
        options = SyncOptions(
            backup_device,
            pin_memory,
            int((bucket_cap_mb or _BUCKET_MB) * _MIB) if buckets else None,
            should_quantize,
            fragment_update_alpha,
        )
        outer = _one_each(outer_optimizer, len(model_fragments))
        self._fragments = [
            Fragment(manager, i, module, outer[i], options)
            for i, module in enumerate(model_fragments)
        ]
        self._local_step = 0
        self._sync_every = sync_every // len(model_fragments)
        self._fragment_sync_delay = fragment_sync_delay

    def _stepped(self) -> None:
        self._local_step += 1
        if self._local_step == self._sync_every - self._fragment_sync_delay:
            self._manager.start_quorum()
            self._next_fragment().prepare_sync()
        if self._local_step == self._sync_every:
            self._local_step = 0
            self._next_fragment().perform_sync()

    def _next_fragment(self) -> Fragment:
        """Return the fragment whose turn it is, which all replicas have to agree on.

        So it depends on the committed steps alone: a fragment that failed comes again.
        """
        return self._fragments[self._manager.current_step() % len(self._fragments)]


def _check_schedule(
    manager: Manager, num_fragments: int, sync_every: int, fragment_sync_delay: int
) -> None:
    """Accept a schedule in which one fragment is under way at a time.

    Raises:
        ConfigError: it is none.
    """
    if manager._use_async_quorum:
        remedy = "make the Manager with use_async_quorum=False: DiLoCo heals before it averages"
        raise ConfigError("use_async_quorum", True, remedy)
    if not num_fragments:
        raise ConfigError("model_fragments", [], "give at least one module")
    if sync_every < 1 or sync_every % num_fragments:
        remedy = f"give a multiple of the number of fragments, {num_fragments}"
        raise ConfigError("sync_every", sync_every, remedy)
    if not 0 <= fragment_sync_delay < sync_every // num_fragments:
        remedy = f"give 0 to {sync_every // num_fragments - 1}, less than the steps between two"
        raise ConfigError("fragment_sync_delay", fragment_sync_delay, remedy)


def _one_each(
    outer_optimizer: optim.Optimizer | list[optim.Optimizer], num_fragments: int
) -> Sequence[optim.Optimizer]:
    if not isinstance(outer_optimizer, list):
        return [outer_optimizer] * num_fragments
    if len(outer_optimizer) != num_fragments:
        remedy = f"give one for each of the {num_fragments} fragments, or one for all"
        raise ConfigError("outer_optimizer", f"{len(outer_optimizer)} optimizers", remedy)
    return outer_optimizer


# ---- A fragment of a model under DiLoCo: what `local_sgd.DiLoCo` synchronises at one time
# Beside the parameters that the replica trains (the local ones) a fragment keeps those that all
# replicas agreed on last (the global ones). Their difference is the pseudo-gradient. A
# synchronisation takes its mean over the replicas and lets the outer optimizer step from the
# global parameters with it; where that is not committed, the replica goes on from the global
# parameters.
#
# The global parameters and the outer optimizer are a part of the state that heals a replica.


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SyncOptions:
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
        options: SyncOptions,
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


# ---- Means of tensors over the replicas, under way while something else is done
# Used by `local_sgd`. Tensors are sent one by one, or packed into buckets, which is faster where
# there are many small ones. Errors are the manager's: it records them, and does not commit.


class Averaging:
    """The mean of each tensor over the replicas; begins at once.

    Args:
        manager: Asked for the mean; its quorum has to be started.
        tensors: Floating-point; they hold the means once `wait` has returned, and garbage if the
            manager does not commit. Not to be touched before.
        bucket_bytes: Tensors of one type and device are packed into buckets of at most so many
            bytes, a larger one by itself; None sends each by itself.
        should_quantize: As in `Manager.allreduce`.
    """

    def __init__(
        self,
        manager: Manager,
        tensors: Sequence[torch.Tensor],
        *,
        bucket_bytes: int | None = None,
        should_quantize: bool = False,
    ) -> None:
        self._buckets = (
            [[t] for t in tensors] if bucket_bytes is None else list(_packed(tensors, bucket_bytes))
        )
        self._stream = _side_stream()
        with self._stream or nullcontext():
            self._flat = [_flattened(bucket) for bucket in self._buckets]
            self._works: list[Any] = [
                manager.allreduce(flat, should_quantize=should_quantize) for flat in self._flat
            ]

    def wait(self) -> None:
        """Wait until all tensors hold their means, or the manager has recorded an error."""
        with self._stream or nullcontext():
            for bucket, flat, work in zip(self._buckets, self._flat, self._works, strict=True):
                work.wait()
                _unpack(flat, bucket)
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._works, self._flat, self._buckets = [], [], []


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; others as they are."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def like(shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor that is laid out like another; for others the shard itself."""
    if not isinstance(whole, DTensor):
        return shard
    sharded: torch.Tensor = DTensor.from_local(
        shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )
    return sharded


def _side_stream() -> torch.Stream | None:
    """Return a stream beside the training's that sees what the training has done so far."""
    if not torch.accelerator.is_available():
        return None
    stream = torch.Stream(device=torch.accelerator.current_accelerator())
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def _packed(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in buckets; their order is the same on all replicas."""
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


def _flattened(bucket: list[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with the contents of all; of a single one itself."""
    return bucket[0] if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])


def _unpack(flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    if len(bucket) > 1:
        pieces = torch.split(flat, [t.numel() for t in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
