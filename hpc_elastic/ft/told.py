"""What a Manager tells of itself, and the user's state that it keeps: the quiet half of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from hpc_elastic.ft.checkpointing import CheckpointTransport
from hpc_elastic.ft.link import Link
from hpc_elastic.ft.membership import Healed, Limits, Membership
from hpc_elastic.ft.one_step import ExceptionWithTraceback, Step
from hpc_elastic.ft.participation import NOBODY, Progress, Share
from hpc_elastic.ft.process_group import ProcessGroup
from hpc_elastic.ft.server import Group
from hpc_elastic.ft.states import States

T = TypeVar("T")


class Told:
    """The base of `Manager`: questions, and the functions for the state."""

    _group: Group
    _limits: Limits
    _pg: ProcessGroup
    _link: Link
    _membership: Membership
    _states: States
    _transport: CheckpointTransport[dict[str, Any]]
    _progress: Progress
    _pending: Healed | None = None
    _share: Share = NOBODY
    _this: Step | None = None

    def wait_quorum(self) -> None:
        """Wait until the quorum is known; see `Manager`."""
        raise NotImplementedError

    # ---- the step -------------------------------------------------------------------------

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step; None if all is well so far."""
        return None if self._this is None else self._this.error

    def current_step(self) -> int:
        """Return the steps committed; where a peer's state has come, that state's."""
        return self._newest.step

    def batches_committed(self) -> int:
        """Return the contributions in all steps committed: 2 steps of 5 replicas are 10."""
        return self._newest.batches_committed

    def participating_rank(self) -> int | None:
        """Return this group's place among the contributors to this step, the same on all its ranks.

        Waits for the quorum.

        Returns:
            None: it adds zero to this step, since it heals or is a spare; or no quorum was started.
        """
        self._tell()
        return self._share.rank

    def num_participants(self) -> int:
        """Return how many groups contribute to this step; 0 before the first `start_quorum`.

        Waits for the quorum.
        """
        self._tell()
        return self._share.size

    def is_participating(self) -> bool:
        """Tell whether this group contributes to this step, as far as is known now."""
        return self._share.rank is not None

    def quorum_id(self) -> int:
        """Return the id of the quorum that was entered last; -1 before the first."""
        return self._link.quorum_id

    def group_rank(self) -> int:
        """Return this worker's rank in its replica group."""
        return self._group.rank

    def group_world_size(self) -> int:
        """Return the number of workers of its replica group."""
        return self._group.world_size

    def replica_id(self) -> str:
        """Return this group's name among its peers."""
        return self._link.replica_id

    def _tell(self) -> None:
        if self._this is not None:
            self.wait_quorum()
            self._this.is_told = True

    @property
    def _newest(self) -> Progress:
        return self._progress if self._pending is None else self._pending.progress

    # ---- state ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint has to hold of the Manager: step and batches_committed."""
        newest = self._newest
        return {"step": newest.step, "batches_committed": newest.batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a checkpoint; all groups that load one must load the same.

        Args:
            state_dict: What `state_dict` returned when the parameters were saved.
        """
        self._progress = Progress.loaded(state_dict["step"], state_dict["batches_committed"])

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Add a part to the state that a replica heals with.

        Args:
            key: Its name, the same on all replicas.
            load_state_dict: Takes the part of a peer; called on the main thread, in
                `start_quorum` or `should_commit`.
            state_dict: Gives it; called on another thread, see `disallow_state_dict_read`.

        Raises:
            ValueError: the key is taken.
        """
        self._states.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Register a state without a key; `register_state_dict_fn` is the better name."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """Keep the state from being read until `allow_state_dict_read`: it is about to change.

        Returns once no peer reads it any more. Between `should_commit` and the next `start_quorum`
        nobody does, so that it is needed for changes within a step only.
        """
        self._states.disallow_reading()
        self._transport.disallow_checkpoint()

    def allow_state_dict_read(self) -> None:
        """Let peers read the state again."""
        self._states.allow_reading()

    def heal_from_one_source(self) -> None:
        """Take a state from one peer alone; for algorithms whose replicas differ at a step.

        `LocalSGD` and `DiLoCo` call it: between two averages each replica goes its own way, and the
        pieces of several would make no model. Call it on all groups before the first quorum.
        """
        self._membership.one_source = True

    def _manager_state_dict(self) -> dict[str, Any]:
        """Return the state in the form in which peers send it (torchft's private name)."""
        return {"user": self._states.collect(), "torchft": asdict(self._progress)}
