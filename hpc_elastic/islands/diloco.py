"""DiLoCo between islands that share only a folder.

    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    with IslandDiLoCo("/shared/run7", "a", [model], inner, outer, sync_every=500) as islands:
        while islands.tokens < 1e9:
            inner.zero_grad()
            loss_of(model(x), y).backward()
            inner.step()
        islands.finish()

Islands have no connection: they may be jobs of several clusters that share a folder, and need not
run at the same time. `outer_round` has the theory. An island's local parameters are at all times

    the global ones - its own contributions that no round has counted - what it trained since,

so that a round is adopted by adding a shift, between any two steps, and the training in between
stays. All files are written and read by one thread beside the training, and a file system that
does not answer holds up no step.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from hpc_elastic import shared_files
from hpc_elastic.errors import (
    ConfigError,
    HpcElasticError,
)
from hpc_elastic.islands import outer_round as rounds
from hpc_elastic.islands.folder import (
    IslandFolder,
    OuterOptimizer,
    Tensors,
    are_finite,
    packed,
    unpacked,
)
from hpc_elastic.islands.outer_round import ContributionHead, OuterRound, RoundPolicy, RoundSteps
from hpc_elastic.shared_files import Steps, carried_out

_log = logging.getLogger(__name__)

_EXIT_S = 60.0


class IslandTimeoutError(HpcElasticError, TimeoutError):
    """What an island has trained was not counted in time; the message names what is missing."""


class DivergedIslandError(HpcElasticError, FloatingPointError):
    """The parameters of this island are not finite any more; the global ones still are.

    Start the island again, with a lower learning rate: it begins with the global parameters.
    """


class IslandDiLoCo:
    """Trains one island, and exchanges pseudo-gradients with others through a folder.

    A context manager around an ordinary training loop. On entry the model gets the newest global
    parameters; the first island of all gives its own. Buffers and the inner optimizer stay each
    island's own.

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv:2311.08105), and "Decoupled DiLoCo for Resilient Distributed Pre-training"
    (arXiv:2604.21428).

    Args:
        folder: Shared by all islands of one training, and by no other. All that may write to it
            are trusted.
        island: Name of this island: letters, digits, ``_`` and ``-``. Another one of the same name
            must not run at the same time; after a restart the name stays.
        model_fragments: Parts of the model, the same on all islands; together all of it. Each is
            agreed on by itself, in turn.
        inner_optimizer: The loop's optimizer.
        outer_optimizer: Makes the outer optimizer of a list of parameters, as
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`` does. It steps in host
            memory, and its state is a part of the global state.
        sync_every: Number of inner steps in which each fragment is published once; at least the
            number of fragments. Choose it so that this takes 30 s or more.
        tokens_per_step: Weight of a step of this island, above 0; may be changed at any time.
        policy: When a round is closed, and what is counted in it.
        quantize: Whether to publish 8-bit integers, a quarter of the bytes. The rounding errors of
            a contribution go into the next one.
        poll_s: Seconds from one look into the folder to the next, above 0.
        group: The process group of this island, if it has several processes. Its rank 0 uses the
            folder; parameters may be DTensors on a mesh of all ranks.

    Attributes:
        held_up_s: Seconds that the training steps were held up so far.
        file_s: Seconds that the thread spent on files and outer steps so far, beside the training.

    Raises:
        ConfigError: An argument is out of range, or the folder has another model.
        OSError: On entry: the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        island: str,
        model_fragments: list[nn.Module],
        inner_optimizer: optim.Optimizer,
        outer_optimizer: OuterOptimizer,
        sync_every: int,
        *,
        tokens_per_step: float = 1.0,
        policy: RoundPolicy | None = None,
        quantize: bool = False,
        poll_s: float = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        num = len(model_fragments)
        if not num:
            raise ConfigError("model_fragments", [], "give at least one module")
        if sync_every < num:
            raise ConfigError("sync_every", sync_every, f"give at least one a fragment, {num}")
        if not tokens_per_step > 0:
            raise ConfigError("tokens_per_step", tokens_per_step, "give more than 0")
        if not poll_s > 0:
            raise ConfigError("poll_s", poll_s, "give more than 0")
        self.tokens_per_step = tokens_per_step
        self.held_up_s: float = 0.0
        self.file_s: float = 0.0
        self._inner_optimizer = inner_optimizer
        self._sync_every = sync_every
        self._poll_s = poll_s
        self._step = 0
        self._hook: RemovableHandle | None = None
        self._thread: threading.Thread | None = None
        self._wakes = threading.Event()
        self._stops = False
        self._error: Exception | None = None
        name, nonce = rounds.check_island(island), secrets.token_hex(4)
        self._fragments = [
            _IslandFragment(
                Path(folder) / str(i), module, group, outer_optimizer,
                name, f"{nonce}{i:02x}", policy or RoundPolicy(), quantize,
            )
            for i, module in enumerate(model_fragments)
        ]  # fmt: skip
        self._uses_folder = group is None or group.rank() == 0

    def __enter__(self) -> Self:
        for fragment in self._fragments:
            fragment.load_newest()
        if self._uses_folder:
            self._thread = threading.Thread(
                target=self._exchange, name="hpc_elastic islands", daemon=True
            )
            self._thread.start()
        self._hook = self._inner_optimizer.register_step_post_hook(self._step_post_hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_clean = kind is None and self._error is None
        if is_clean:
            self._publish_rest(_EXIT_S)
        self._stop(_EXIT_S if is_clean else self._poll_s)
        if is_clean:
            self._raise_error()

    @property
    def tokens(self) -> float:
        """Tokens of all islands that rounds have counted, of the fragment with the fewest.

        As adopted by the last step: the same on all ranks of an island.
        """
        return min(f.tokens for f in self._fragments)

    @property
    def round(self) -> int:
        """Index of the newest round that the model has adopted, of the oldest fragment."""
        return min(f.round for f in self._fragments)

    def finish(self, timeout_s: float = 600.0) -> None:
        """Publish what is left, wait until rounds have counted it, and load the global parameters.

        Call it on all ranks; it ends the part of this island. Others may close further rounds:
        `load_global_parameters` gives the last ones once all have ended.

        Args:
            timeout_s: Longest wait, in seconds.

        Raises:
            IslandTimeoutError: It was not counted. What is published counts later.
        """
        self._publish_rest(timeout_s)
        counted = self._thread is None or self._wait_until(self._is_counted, timeout_s)
        self._stop(timeout_s)
        self._raise_error()
        if not counted or (self._thread is not None and self._thread.is_alive()):
            missing = self._missing() or "the file system does not answer"
            raise IslandTimeoutError(
                f"after {timeout_s:.0f} s: {missing}. If a round lacks a quorum, start more "
                "islands, or lower RoundPolicy.quorum"
            )
        for fragment in self._fragments:
            fragment.load_newest()

    def _step_post_hook(self, *_: Any) -> None:
        begun = time.perf_counter()
        self._raise_error()
        self._step += 1
        num = len(self._fragments)
        for i, fragment in enumerate(self._fragments):
            fragment.count_step(self.tokens_per_step)
            at = (i + 1) * self._sync_every // num % self._sync_every
            if fragment.synchronize(is_due=self._step % self._sync_every == at):
                self._wakes.set()
        self.held_up_s += time.perf_counter() - begun

    def _publish_rest(self, timeout_s: float) -> None:
        """Publish what was trained since the last contribution, and wait until it is written."""
        if self._stops:
            return
        if self._thread is not None:
            self._wait_until(self._is_published, timeout_s)
        for fragment in self._fragments:
            fragment.synchronize(is_due=True, is_last=True)
        self._wakes.set()
        if self._thread is not None and not self._wait_until(self._is_published, timeout_s):
            _log.warning("not published within %.0f s: %s", timeout_s, self._missing())

    def _stop(self, timeout_s: float) -> None:
        self._stops = True
        self._wakes.set()
        if self._hook is not None:
            self._hook.remove()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _is_published(self) -> bool:
        return all(f.is_published for f in self._fragments)

    def _is_counted(self) -> bool:
        for fragment in self._fragments:
            fragment.drop_shift()
        return not self._missing()

    def _missing(self) -> str:
        return "; ".join(f.missing for f in self._fragments if f.missing)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        ends = time.monotonic() + timeout_s
        while not condition() and self._error is None and time.monotonic() < ends:
            time.sleep(0.02)
        return condition()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _exchange(self) -> None:
        """Publish, adopt and close rounds, until the context is closed."""
        failed = False
        while not self._stops:
            begun = time.perf_counter()
            try:
                for fragment in self._fragments:
                    while fragment.advance(time.monotonic()) and not self._stops:
                        pass
                failed = False
            except OSError as e:
                if not failed:
                    _log.warning("islands: %s; it is tried again, and the training continues", e)
                failed = True
            except Exception as e:
                self._error = e
                return
            self.file_s += time.perf_counter() - begun
            self._wakes.wait(self._poll_s)
            self._wakes.clear()


def load_global_parameters(
    folder: str | os.PathLike[str], model_fragments: Sequence[nn.Module]
) -> float:
    """Load the newest global parameters into a model, without taking part.

    Args:
        folder: As for `IslandDiLoCo`.
        model_fragments: As there; not DTensors.

    Returns:
        The number of tokens that were counted so far.

    Raises:
        FileNotFoundError: No island has started there.
        ConfigError: The folder has another model.
        OSError: It cannot be read.
    """
    tokens = []
    for i, module in enumerate(model_fragments):
        files = IslandFolder(Path(folder) / str(i), _copies(module))
        steps = RoundSteps(files, "reader", "0", RoundPolicy())
        last, parameters = carried_out(_newest(files, steps))
        _apply(module, parameters, None)
        tokens.append(last.tokens)
    return min(tokens)


class _IslandFragment:
    """One fragment of the model of an island.

    The training thread calls `count_step` and `synchronize`, the exchange's thread `advance`.

    `_anchor` is the global parameters minus all own contributions that no round has counted. Its
    difference from the local parameters is what was trained since.
    """

    def __init__(
        self, path: Path, module: nn.Module, group: dist.ProcessGroup | None,
        outer_optimizer: OuterOptimizer, island: str, nonce: str, policy: RoundPolicy,
        quantize: bool,
    ) -> None:  # fmt: skip
        self._module = module
        self._group = group
        self._island = island
        self._nonce = nonce
        self._policy = policy
        self._quantize = quantize
        self._path = path
        self._outer_optimizer = outer_optimizer
        self._timer = rounds.RoundTimer(island, policy)
        self._uses_folder = group is None or group.rank() == 0
        self.tokens = 0.0
        self.round = 0
        self._adopted = OuterRound(0, "", "")
        self._anchor: Tensors = {}
        self._lock = threading.Lock()
        """Held for `_shift` and `_snapshot`: a snapshot belongs to the anchor that was adopted."""
        self._shift: Tensors | None = None
        self._snapshot: tuple[ContributionHead, Tensors] | None = None
        self._unpublished: tuple[ContributionHead, Tensors, Tensors] | None = None
        """Head, tensors of the file, and the movement that they stand for."""
        self._published: dict[int, Tensors] = {}
        """Movement of each contribution that no round has settled."""
        self._tokens = 0.0
        self._num_steps = 0
        self._num_contributions = 0

    # ---- in the training thread

    def load_newest(self) -> None:
        """Give the model the newest global parameters; the first island of all gives its own.

        Not while the exchange's thread runs.
        """
        parameters: Tensors = {}
        copies = _copies(self._module)
        if self._uses_folder:
            shared_files.make_folder(self._path, parents=True)
            self._files = IslandFolder(self._path, copies, self._outer_optimizer)
            self._steps = RoundSteps(self._files, self._island, self._nonce, self._policy)
            carried_out(self._steps.start())
            self._adopted, parameters = carried_out(_newest(self._files, self._steps))
            self._anchor, self._shift = parameters, None
        _apply(self._module, parameters, self._group)
        self._set_progress()
        self._tokens, self._num_steps = 0.0, 0

    def count_step(self, tokens: float) -> None:
        self._tokens += tokens
        self._num_steps += 1

    def synchronize(self, *, is_due: bool, is_last: bool = False) -> bool:
        """Adopt the round that was read, if there is one, and publish what was trained if due.

        If it ``is_due`` it publishes, unless too many contributions are open; if it ``is_last``,
        even then. Returns whether there is something to publish now.
        """
        with self._lock:
            adopts = self._shift is not None
            publishes = is_due and self._num_steps > 0 and self.is_published
            publishes = publishes and (is_last or len(self._published) < self._policy.max_open)
            if self._group is not None:
                device = next(self._module.parameters()).device
                plan = torch.tensor([adopts, publishes], device=device)
                dist.broadcast(plan, group=self._group, group_src=0)
                adopts, publishes = (bool(flag) for flag in plan.tolist())
            if adopts:
                _apply(self._module, self._shift or {}, self._group, adds=True)
                self._shift = None
                self._set_progress()
            if publishes:
                copies = _copies(self._module)
                nonce = f"{self._nonce}{self._num_contributions:x}"
                head = ContributionHead(nonce, self._adopted.index, self._tokens, self._num_steps)
                self._num_contributions += 1
                self._tokens, self._num_steps = 0.0, 0
                if self._uses_folder:
                    self._snapshot = head, copies
        return publishes

    def drop_shift(self) -> None:
        """Let later rounds be read although the model does not adopt this one."""
        with self._lock:
            self._shift = None

    def _set_progress(self) -> None:
        adopted = torch.tensor([self._adopted.tokens, self._adopted.index], dtype=torch.float64)
        if self._group is not None:
            adopted = adopted.to(next(self._module.parameters()).device)
            dist.broadcast(adopted, group=self._group, group_src=0)
        self.tokens, self.round = float(adopted[0]), int(adopted[1])

    @property
    def is_published(self) -> bool:
        """Whether all that was handed over is in the folder."""
        return self._snapshot is None and self._unpublished is None

    @property
    def missing(self) -> str:
        """What no round has counted yet; empty if there is nothing."""
        if not self.is_published:
            return f"a contribution of {self._island} is not written to {self._path}"
        if self._published:
            numbers = ", ".join(map(str, list(self._published)))
            return f"no round in {self._path} counts contribution {numbers} of {self._island}"
        return ""

    # ---- in the thread of the exchange

    def advance(self, now: float) -> bool:
        """Do what is to be done in the folder; return whether there may be more at once.

        After an OSError it may be called again. Raises DivergedIslandError if the parameters are
        not finite.
        """
        self._take_snapshot()
        if self._unpublished is not None:
            head, tensors, movement = self._unpublished
            number = carried_out(self._steps.publish(head, tensors))
            self._published[number] = movement
            self._unpublished = None
        view = carried_out(self._steps.view())
        if view.last is None:
            raise FileNotFoundError(f"{self._path} has no undamaged round any more")
        if view.last.index > self._adopted.index and self._shift is None:
            self._adopt(view.last)
        contributors = rounds.open_contributions(view.names, view.last)
        if not self._timer.is_due(view.last, contributors, now):
            return False
        return carried_out(self._steps.close(view)) is not None

    def _take_snapshot(self) -> None:
        if self._snapshot is None:
            return
        head, trained = self._snapshot
        movement = {name: self._anchor[name] - tensor for name, tensor in trained.items()}
        if not are_finite(movement.values()):
            raise DivergedIslandError(
                f"the parameters of island {self._island} are not finite; nothing of that was "
                "published. Start it again with a lower learning rate"
            )
        tensors = packed(movement, quantized=self._quantize)
        if self._quantize:
            movement = unpacked(tensors, {n: t.shape for n, t in movement.items()}) or {}
        self._anchor = {name: self._anchor[name] - tensor for name, tensor in movement.items()}
        self._unpublished = head, tensors, movement
        self._snapshot = None  # the training thread may set the next one from here on

    def _adopt(self, last: OuterRound) -> None:
        """Prepare the shift to the parameters after a round."""
        read = partial(self._files.read_parameters, last)
        parameters = carried_out(self._steps.of_state(last, read))
        if parameters is None:
            return
        settled = last.settled.get(self._island, 0)
        self._published = {n: m for n, m in self._published.items() if n > settled}
        open_ = list(self._published.values())
        if self._unpublished is not None:
            open_.append(self._unpublished[2])
        anchor = {n: tensor - sum(part[n] for part in open_) for n, tensor in parameters.items()}
        with self._lock:
            if self._snapshot is None:  # else it belongs to the anchor before
                self._shift = {name: anchor[name] - self._anchor[name] for name in anchor}
                self._anchor, self._adopted = anchor, last


def _newest(files: IslandFolder, steps: RoundSteps) -> Steps[tuple[OuterRound, Tensors]]:
    """Return the newest round whose state can be read, and its parameters."""
    while (last := (yield from steps.view()).last) is not None:
        parameters = yield from steps.of_state(last, partial(files.read_parameters, last))
        if parameters is not None:
            return last, parameters
    raise FileNotFoundError(f"{files.path} has no round, or all are damaged")


def _copies(module: nn.Module) -> Tensors:
    """Return float32 copies of the whole parameters in host memory; a collective for DTensors."""
    copies = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            copies[name] = whole.detach().to("cpu", torch.float32, copy=True)
    return copies


@torch.no_grad()
def _apply(
    module: nn.Module, tensors: Tensors, group: dist.ProcessGroup | None, *, adds: bool = False
) -> None:
    """Set the parameters of all ranks, or add to them, by what rank 0 of the group has."""
    for name, parameter in module.named_parameters():
        whole = tensors.get(name)
        if whole is None:
            whole = torch.zeros(parameter.shape)
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        elif group is not None:
            dist.broadcast(whole, group=group, group_src=0)
        if adds:
            parameter.add_(whole)
        else:
            parameter.copy_(whole)
