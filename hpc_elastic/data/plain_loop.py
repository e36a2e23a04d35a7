"""The loop over a DataLoader itself: the weight of its gradients, and the items that count.

A rank's share of a global batch has a weight (`batch`). It acts once, on the gradient with which
``backward()`` begins, so it depends neither on the model (several outputs, recurrence, second
derivatives) nor on its wrapper. `torch.autograd.backward`, through which every ``backward()``
passes, is wrapped for that. `torch.autograd.grad` returns a derivative, which is never weighted.

An item counts as trained when an optimizer has stepped with its gradient. One without a
``backward()`` counts when the next is drawn, as there is nothing to wait for. Gradients that are
accumulated over items keep all of them open until the optimizer steps, and a state that is taken
before has none of them. So it holds the same samples as the parameters, wherever it is taken.

What cannot be known to be right is refused, as early as it shows:

- An optimizer that steps with gradients that no ``backward()`` has made from the item.
- An update without an optimizer, or gradients that are held at the end of an epoch: refused once a
  state is taken.
- A first ``backward()`` that comes after a further item was drawn: something draws ahead.
- Two loops at a time whose weights differ.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import GradientEdge

from hpc_elastic._util import counted
from hpc_elastic.data.epoch_plan import EpochPlan, SamplePosition
from hpc_elastic.errors import ConfigError, InexactError
from hpc_elastic.worker import optimizer_steps

_loops: list[PlainLoop] = []  # those that train and have not ended
_trained: list[weakref.ref[TrainedModels]] = []  # the `TrainedModels` of this process
_thread = threading.local()  # whether this thread is in a ``backward()`` that has its weight
_PIPELINE = "torch.distributed.pipelining._backward"


class TrainedModels:
    """The models of a sampler's plain loops, and what is known of their training."""

    def __init__(self) -> None:
        self._models = WeakSet[Any]()
        self.has_stepped = False  # whether an optimizer has since the first ``backward()``
        self.holds_rest = False  # whether gradients of an epoch that has ended may be held
        self.is_in_step = False  # a ``backward()`` came before the second draw: none draws ahead
        self.left_loop: PlainLoop | None = None  # with items whose gradients may be held
        self._versions: list[int] | None = None  # before the first ``backward()``

    def add(self, model: Any) -> None:
        """Add a model, and let every ``backward()`` pass here."""
        self._models.add(model)
        if (mine := weakref.ref(self, _trained.remove)) not in _trained:
            _trained.append(mine)
        _install()

    def before_backward(self) -> None:
        """Record the parameters before the first ``backward()``."""
        if self._versions is None:
            self._versions = self._present_versions()

    def on_step(self) -> None:
        """Record a step of an optimizer, in a loop or after it."""
        if self._versions is not None:
            self.has_stepped, self.holds_rest = True, False
        if self.left_loop is not None:
            self.left_loop.count_waiting()
            self.left_loop = None

    def begin_loop(self) -> None:
        """Count the items of the loop before whose gradients are held; others are drawn again."""
        if self.left_loop is not None and self._hold_gradients():
            self.left_loop.count_waiting()
            self.holds_rest = True
        self.left_loop = None

    def wait_for_optimizer(self) -> bool:
        """Return whether the parameters change by an optimizer's steps alone, as far as is seen."""
        return self.has_stepped or (
            self._versions == self._present_versions() and self._are_in_an_optimizer
        )

    def require_known_state(self) -> None:
        """Raise ConfigError if the parameters may hold other samples than the data's state."""
        remedy = None
        if self._versions is not None and not self.wait_for_optimizer():
            remedy = (
                "the parameters have changed without a step of a torch optimizer, so it is unknown "
                "whether they hold the present item: use torch.optim, or iterate over "
                "sampler.batches(loader), where a batch counts once its micro_batches() have ended"
            )
        elif self.holds_rest and self._hold_gradients():
            remedy = (
                "an epoch has ended with gradients that no optimizer has stepped with, and a "
                "checkpoint would lose them: call optimizer.step() with the last item of an epoch, "
                "or drop them with optimizer.zero_grad() before the save"
            )
        if remedy is not None:
            raise InexactError("optimizer.step", "not called", remedy)

    @functools.cached_property
    def _are_in_an_optimizer(self) -> bool:
        """Whether a torch optimizer has one of the parameters; searched once, if none steps."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(
            id(parameter) in ours
            for optimizer in optimizer_steps.live_objects(torch.optim.Optimizer)
            for parameter in optimizer_steps.parameters_of(optimizer)
        )

    def _hold_gradients(self) -> bool:
        """Whether there are gradients, and not those of a step that a GradScaler has skipped."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        return any(bool(g.any()) for g in local) and all(bool(g.isfinite().all()) for g in local)

    def _present_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters()]

    def _parameters(self) -> Iterable[Any]:
        return (parameter for model in self._models for parameter in model.parameters())


class PlainLoop:
    """One loop over a DataLoader, and the items that it has handed out.

    ``models`` is None in a loop without gradients; ``count`` is called for each item that counts as
    trained next; ``is_new``: the training has not continued from a state.
    """

    def __init__(
        self,
        plan: EpochPlan,
        models: TrainedModels | None,
        *,
        count: Callable[[], None],
        is_new: bool,
    ) -> None:
        self.plan, self._models, self._count, self._is_new = plan, models, count, is_new
        self.has_ended = False
        self.num_drawn = 0
        self.begin: SamplePosition | None = None  # before the present item
        self.weight = 1.0
        self._loader_thread = 0
        self._num_open = 0  # items that do not count yet
        self._num_waiting = 0  # of these, up to the last that had a ``backward()``
        self._had_backward = False  # whether the present item had one
        if models is not None:
            _loops.append(self)

    def before_draw(self) -> None:
        """Count the items that wait for no optimizer step, before the next one is drawn."""
        if self.has_ended:
            return
        waits = self._num_waiting and self._models and self._models.wait_for_optimizer()
        if self._num_open and not waits:
            self._count_open(self._num_open)  # else their gradients may be held
        self.begin, self._loader_thread = None, threading.get_ident()

    def hand_out(self, begin: SamplePosition, weight: float) -> None:
        """Record that the loop receives an item."""
        self.begin, self.weight = begin, weight
        self.num_drawn += 1
        self._num_open += 1
        self._had_backward = False

    def end_epoch(self) -> None:
        """Count all items: the next state is of the next epoch."""
        if self._num_waiting and self._models:
            self._models.holds_rest = True
        self._count_open(self._num_open)
        self.close()

    def close(self) -> None:
        """End the loop; an item counts later only if it had a ``backward()``."""
        if self._num_waiting and self._models and not self.has_ended:
            if self._models.wait_for_optimizer():
                self._models.left_loop = self
            else:
                self.count_waiting()
        self.has_ended, self.begin = True, None
        if self in _loops:
            _loops.remove(self)

    def count_waiting(self) -> None:
        """Count the items up to the last that had a ``backward()``."""
        self._count_open(self._num_waiting)

    def on_backward(self) -> bool:
        """Record a ``backward()``; return whether it is one of the present item."""
        if self.begin is None:
            if self.num_drawn and self._loader_thread != threading.get_ident():
                raise self._draws_ahead()
            return False  # of the dataset, which loads the next item
        assert self._models is not None
        if not self._models.is_in_step:
            if self.num_drawn > 1 and self._is_new:
                raise self._draws_ahead()
            self._models.is_in_step = True
        self._models.before_backward()
        self._num_waiting, self._had_backward = self._num_open, True
        return True

    def _draws_ahead(self) -> ConfigError:
        remedy = (
            "no backward() came between them: something between the loader and the loop draws "
            "ahead, or leaves out the first items; iterate over sampler.batches(loader)"
        )
        return InexactError("loader", f"{counted(self.num_drawn, 'item')} drawn", remedy)

    def on_step(self, optimizer: Any) -> None:
        """Count the items with whose gradients an optimizer has stepped; refuse other gradients."""
        if self.begin is None or self._models is None:
            return
        if not self._num_waiting and not self._had_backward and not self._models.holds_rest:
            if _has_gradients(optimizer):
                remedy = (
                    "it has no gradient by a backward() with the present item, so the weight of "
                    "this rank's share is missing: iterate over sampler.batches(loader), and "
                    "multiply the loss by the weight"
                )
                raise InexactError("optimizer.step", type(optimizer).__name__, remedy)
            return
        self._count_open(self._num_waiting)

    def _count_open(self, num: int) -> None:
        self._num_open -= num
        self._num_waiting = 0
        for _ in range(num):
            self._count()

    def require_same_weights(self, other: PlainLoop) -> None:
        """Refuse a second loop at the same time with other weights, for any number of ranks."""
        mine, theirs = self.plan, other.plan
        divisions = [replace(plan.batch, micro_batch_size=None) for plan in (mine, theirs)]
        if divisions[0] == divisions[1] and self.sizes_ahead() == other.sizes_ahead():
            return
        sizes = [plan.batch.global_batch_size for plan in (mine, theirs)]
        remedy = (
            f"another loop has batches of {sizes[1]}, at another place of its epoch or with "
            "another last batch: the shares of a rank have different weights, and one backward() "
            "has one; iterate over sampler.batches(loader) in both and weight each loss, end the "
            "other loop before, or give both end='drop' and the same global_batch_size"
        )
        raise InexactError("global_batch_size", sizes[0], remedy)

    def sizes_ahead(self) -> tuple[int, ...]:
        """Return what fixes the sizes of this batch and of all that follow."""
        assert self.begin is not None
        whole = self.plan.batch.global_batch_size
        position = self.begin.position
        if self.plan.end != "keep" or self.plan.length % whole == position % whole == 0:
            return (whole,)
        return self.plan.length, position


def _has_gradients(optimizer: Any) -> bool:
    return any(
        isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
        for parameter in optimizer_steps.parameters_of(optimizer)
    )


def is_beside_another() -> bool:
    """Return whether another loop has an item now, so that one which begins is drawn with it."""
    return any(loop.begin is not None for loop in _loops)


def _on_step(optimizer: Any) -> None:
    for loop in list(_loops):
        loop.on_step(optimizer)
    for each in list(_trained):
        if (models := each()) is not None:
            models.on_step()


def is_in_backward() -> bool:
    """Return whether this thread is in a ``backward()``, which torch has no public way to see."""
    return bool(torch._C._current_graph_task_id() != -1)


_of_torch = torch.autograd.backward


def _install() -> None:
    """Let every ``backward()`` of this process pass here, from the first call on."""
    if torch.autograd.backward is _of_torch:
        torch.autograd.backward = backward
        optimizer_steps.watch(_on_step)


@functools.wraps(_of_torch)
def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Call torch's, with the weight of the present item in a plain loop."""
    given = grad_tensors if grad_variables is None else grad_variables
    before = getattr(_thread, "is_inside", False)
    outermost = bool(_loops) and not before and not is_in_backward()
    if outermost and (inputs is None or _reaches_parameters(inputs)):
        weight = _weight(create_graph=create_graph, given=given)
        if weight != 1.0:
            given = _weighted(tensors, given, weight)
    if grad_variables is not None:
        grad_variables = given
    else:
        grad_tensors = given
    # A subclass of Tensor calls this once more, from inside.
    _thread.is_inside = True
    try:
        _of_torch(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    finally:
        _thread.is_inside = before


def _reaches_parameters(inputs: Any) -> bool:
    """Whether a ``backward(inputs=...)`` makes gradients of parameters, and not of data alone."""
    if isinstance(inputs, torch.nn.Parameter):
        return True
    if isinstance(inputs, (torch.Tensor, GradientEdge)):
        return False
    return any(isinstance(each, torch.nn.Parameter) for each in inputs)


def _weight(*, create_graph: bool, given: Any) -> float:
    """Return the weight of the present items, and record the ``backward()`` with them."""
    found = [loop for loop in list(_loops) if loop.on_backward()]
    if not found:
        return 1.0
    for other in found[1:]:
        found[0].require_same_weights(other)
    if create_graph:
        remedy = (
            "the gradient would be weighted in its own derivative: use "
            "torch.autograd.grad(..., create_graph=True), or sampler.batches(loader)"
        )
        raise InexactError("create_graph", True, remedy)
    if given is not None and optimizer_steps.is_called_from(_PIPELINE):
        remedy = (
            "each stage of a pipeline begins a backward() of its own, and would be weighted again: "
            "iterate over sampler.batches(loader), and weight the loss of the last stage"
        )
        raise InexactError("scale_gradients", "a pipeline", remedy)
    return found[0].weight


def _weighted(tensors: Any, given: Any, weight: float) -> list[Any]:
    """Return the gradients with which a ``backward()`` begins, multiplied by the weight."""
    is_one = isinstance(tensors, (torch.Tensor, GradientEdge))
    roots: Sequence[Any] = (tensors,) if is_one else tuple(tensors)
    if given is None or isinstance(given, torch.Tensor):
        given = (given,) if given is not None else (None,) * len(roots)
    return [
        _first_gradient(root, weight) if gradient is None else gradient * weight
        for root, gradient in zip(roots, given, strict=True)
    ]


def _first_gradient(root: Any, weight: float) -> Any:
    if isinstance(root, GradientEdge):
        remedy = "give the gradient of the GradientEdge: torch.ones"
        raise InexactError("grad_tensors", None, remedy)
    if root.numel() != 1 or not root.requires_grad:
        return None  # torch refuses it, or has nothing to do
    return torch.full_like(root, weight, memory_format=torch.preserve_format)
