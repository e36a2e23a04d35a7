"""Replicas that share each global batch, as many as there are at this very step.

A fault-tolerant manager (`hpc_elastic.ft`, or torchft's) keeps processes alive while others come
and go. So what is fixed elsewhere is asked anew at each step, once the quorum is known:

- Who divides the batch: the participants, and in each the ranks of its group. The manager averages
  over the participants, so the weights of `batch` are right as they are.
- Where the training is: the batch counts once the manager has committed its step. If it has not,
  the same batch is taken again by whoever is there then. A replica that was healed is where the
  others are, by the state that it was healed with.

A replica that does not contribute, since it heals or is a spare, has to take part in the same
collectives. It is an `NonParticipant`: lent a sample with weight 0 for each micro-batch of the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import EpochPlan, SamplePosition
from hpc_elastic.errors import ConfigError

State = dict[str, Any]


class ReplicaManager(Protocol):
    """What is asked of a fault-tolerant manager; those about the quorum wait for it."""

    def current_step(self) -> int:
        """Return the steps that were committed."""

    def participating_rank(self) -> int | None:
        """Return this replica's place among those that contribute; None: it does not."""

    def is_participating(self) -> bool:
        """Tell whether this replica contributes."""

    def num_participants(self) -> int:
        """Return over how many the gradient is averaged; 0 before the first quorum."""

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[State], None],
        state_dict: Callable[[], State],
    ) -> None:
        """Make something a part of the state that heals a replica."""


_num_unnamed: WeakKeyDictionary[ReplicaManager, int] = WeakKeyDictionary()


def number_of_unnamed(manager: ReplicaManager) -> str:
    """Return what names a manager's next sampler without a name, equal in every process.

    It is the order in which they are made, which follows from the script.
    """
    number = _num_unnamed[manager] = _num_unnamed.get(manager, 0) + 1
    return f"unnamed.{number}"


class NonParticipant(BatchDivision):
    """The part in a global batch of one that contributes nothing."""

    def share(self, size: int) -> tuple[int, int]:
        """Return no sample."""
        return 0, 0


class StepReplicas:
    """The replicas of the present step, and what becomes of it.

    Args:
        manager: Who knows.
    """

    def __init__(self, manager: ReplicaManager) -> None:
        self._manager = manager
        self._counts = False
        """The step was begun from the sampler's place, or that was healed since."""

    def begin(self, plan: EpochPlan, place: SamplePosition) -> tuple[BatchDivision, SamplePosition]:
        """Begin a step.

        Args:
            plan: The sampler's.
            place: Where it is.

        Returns:
            How the batch is divided now, and where the others are: elsewhere than the sampler if
            this replica is about to be healed, or its manager's state was loaded alone.

        Raises:
            RuntimeError: no quorum was started.
            ConfigError: the manager is behind the sampler.
        """
        division = _division(plan.batch, self._manager)
        ahead = self._manager.current_step() - place.step
        if ahead < 0:
            raise ConfigError("step", place.step, f"{_BEHIND % self._manager.current_step()}")
        self._counts = ahead == 0 or self._manager.is_participating()
        return division, plan.after(place, ahead)

    @property
    def heals(self) -> bool:
        """Whether the step was begun elsewhere, and the sampler waits to be healed."""
        return not self._counts

    def healed(self) -> None:
        """The sampler is now where the others are."""
        self._counts = True

    def end(self) -> None:
        """The step is over, and was accounted for."""
        self._counts = False

    def num_committed(self, place: SamplePosition) -> int:
        """Return how many steps were committed since the sampler was at a place."""
        ahead = self._manager.current_step() - place.step
        return max(0, ahead) if self._counts else 0

    def quorum_id(self) -> int:
        """Return the number of the quorum of the present step.

        Raises:
            ConfigError: the manager has none to tell.
        """
        ask = getattr(self._manager, "quorum_id", None)
        if ask is None:
            remedy = "use hpc_elastic.ft.Manager, or name=None on the sampler: it writes no ledger"
            raise ConfigError("manager", type(self._manager).__name__, remedy)
        return int(ask())


_BEHIND = (
    "the manager is at step %d: load its state from the checkpoint as well as the sampler's, or "
    "neither of them"
)


def _division(batch: BatchDivision, manager: ReplicaManager) -> BatchDivision:
    """Return how a batch is divided among the ranks of all participants."""
    rank, group_size = batch.group()
    world_size = manager.num_participants() * group_size
    if not world_size:
        raise RuntimeError(
            "there is no quorum: call optimizer.zero_grad() or manager.start_quorum() before "
            "batch.micro_batches()"
        )
    replica_rank = manager.participating_rank()
    sizes = batch.global_batch_size, batch.micro_batch_size
    if replica_rank is None or not manager.is_participating():
        return NonParticipant(*sizes, 0, world_size)
    return BatchDivision(*sizes, replica_rank * group_size + rank, world_size)
