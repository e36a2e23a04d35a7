"""The division of a global batch among fault-tolerant replicas, which may change at every step.

A fault-tolerant manager (`hpc_elastic.ft`, or torchft's) keeps processes alive while others join
and leave. So two things are determined at each step, once its quorum is known:

- The division of the batch: among the participants, and in each among the ranks of its group. The
  manager averages over the participants, so the weights of `batch` hold unchanged.
- The position: the batch counts once the manager has committed its step. Otherwise the participants
  of the next step take the same batch again. A replica that was healed has the position of the
  state that it was healed with.

A replica that does not contribute, because it heals or is a spare, takes part in the same
collectives. It is a `NonParticipant`, with a sample of weight 0 for each micro-batch of the others.
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
    """The interface of a fault-tolerant manager; methods about the quorum wait for it."""

    def current_step(self) -> int:
        """Return the number of committed steps."""

    def participating_rank(self) -> int | None:
        """Return this replica's rank among the participants; None if it is not one."""

    def is_participating(self) -> bool:
        """Return whether this replica contributes."""

    def num_participants(self) -> int:
        """Return the number of replicas in the average; 0 before the first quorum."""

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[State], None],
        state_dict: Callable[[], State],
    ) -> None:
        """Add a part to the state that heals a replica."""


_num_unnamed: WeakKeyDictionary[ReplicaManager, int] = WeakKeyDictionary()


def unnamed_sampler_key(manager: ReplicaManager) -> str:
    """Return a name for a manager's next unnamed sampler, the same in every process.

    It counts the samplers in the order of their creation, which the script fixes.
    """
    number = _num_unnamed[manager] = _num_unnamed.get(manager, 0) + 1
    return f"unnamed.{number}"


class NonParticipant(BatchDivision):
    """The share of a replica that does not contribute."""

    def share(self, size: int) -> tuple[int, int]:
        """Return no sample."""
        return 0, 0


class StepReplicas:
    """The replicas of the present step, and the outcome of the step.

    Args:
        manager: The fault-tolerant manager.
    """

    def __init__(self, manager: ReplicaManager) -> None:
        self._manager = manager
        self._counts = False
        """Whether the step began at the sampler's position, or the sampler was healed since."""

    def begin_step(
        self, plan: EpochPlan, place: SamplePosition
    ) -> tuple[BatchDivision, SamplePosition]:
        """Begin a step.

        Args:
            plan: The sampler's plan.
            place: The sampler's position.

        Returns:
            The division of the batch, and the position of the other replicas. It differs from the
            sampler's if this replica is about to be healed, or only its manager's state was loaded.

        Raises:
            RuntimeError: No quorum was started.
            ConfigError: The manager is behind the sampler.
        """
        division = _division(plan.batch, self._manager)
        ahead = self._manager.current_step() - place.step
        if ahead < 0:
            raise ConfigError("step", place.step, f"{_BEHIND % self._manager.current_step()}")
        self._counts = ahead == 0 or self._manager.is_participating()
        return division, plan.after(place, ahead)

    @property
    def waits_for_heal(self) -> bool:
        """Whether the step began at another position, so that the sampler waits to be healed."""
        return not self._counts

    def on_healed(self) -> None:
        """Record that the sampler has the position of the other replicas."""
        self._counts = True

    def end_step(self) -> None:
        """Record that the step is over and accounted for."""
        self._counts = False

    def num_committed(self, place: SamplePosition) -> int:
        """Return the number of steps committed since the sampler was at a position."""
        ahead = self._manager.current_step() - place.step
        return max(0, ahead) if self._counts else 0

    def quorum_id(self) -> int:
        """Return the number of the quorum of the present step.

        Raises:
            ConfigError: The manager has no quorum id.
        """
        quorum_id = getattr(self._manager, "quorum_id", None)
        if quorum_id is None:
            remedy = "use hpc_elastic.ft.Manager, or name=None on the sampler: it writes no ledger"
            raise ConfigError("manager", type(self._manager).__name__, remedy)
        return int(quorum_id())


_BEHIND = (
    "the manager is at step %d: load its state from the checkpoint as well as the sampler's, or "
    "neither of them"
)


def _division(batch: BatchDivision, manager: ReplicaManager) -> BatchDivision:
    """Return the division of a batch among the ranks of all participants."""
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
