"""The interface between a Manager and its healing transport; a user may bring another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

from hpc_elastic.errors import HpcElasticError

T = TypeVar("T")


class HealError(HpcElasticError, RuntimeError):
    """The state could not be fetched from a peer, or is damaged; the step may be tried again."""


class UnusableStateError(HealError):
    """The peer's state cannot be sent or does not fit here; another attempt would fail alike."""


class HealTimeoutError(HealError, TimeoutError):
    """A peer did not give its state, or did not fetch ours, in time; the message names it."""


class CheckpointTransport(ABC, Generic[T]):
    """Moves the state of a replica that is ahead to one that is behind.

    The Manager of each worker has one. All methods but `abort` are called by one thread at a time.
    """

    multi_source: bool = False
    """Whether `recv_checkpoint` takes the metadata of several sources: a JSON list, the best first.

    Then each source gets the ranks of all destinations that may come to it.
    """
    in_place: bool = False
    """Whether `recv_checkpoint` writes into this replica's own tensors.

    Then a heal that fails leaves them damaged, and the replica cannot go on without another.
    """

    needs_group: bool = True
    """Whether states go over the process group, so that it has to be formed before."""

    state_dict: Callable[[], object] | None = None
    """Returns this replica's present state, for the meshes of its DTensors.

    A Manager sets it if it is None.
    """

    @abstractmethod
    def metadata(self) -> str:
        """Return what a peer's transport needs to fetch from this one (sent with each request)."""

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send the state, or begin to offer it: may return before it is sent.

        Args:
            dst_ranks: Replica ranks of those that may fetch it.
            step: Steps committed in this state.
            state_dict: The state; it is not changed until `disallow_checkpoint` has returned.
            timeout: How long they may take.
        """

    def refuse_checkpoint(  # without it they wait until their time-out
        self, dst_ranks: list[int], step: int, reason: str, timeout: timedelta
    ) -> None:
        """Let these peers fail at once: this replica's state cannot be sent.

        Their `recv_checkpoint` raises `UnusableStateError` with the reason.

        Args:
            dst_ranks: As those of `send_checkpoint`.
            step: Of the state.
            reason: The error.
            timeout: How long they may take.
        """

    def disallow_checkpoint(self) -> None:  # as torchft's: not all need it
        """Return once no peer reads the offered state any more, so that it may change."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of a peer.

        Args:
            src_rank: Replica rank of the (best) source.
            metadata: What its `metadata` returned; with `multi_source` a JSON list of several.
            step: Which step it must be at.
            timeout: How long it may take without any progress.

        Raises:
            HealError: It could not be fetched; the own state is unchanged, unless `in_place`.
            UnusableStateError: Another attempt would fail alike.
        """

    def abort(self) -> None:
        """Give up whatever is under way, at once, and until `resume` (any thread).

        The quorum is broken, and the peer may be dead. `recv_checkpoint` raises, and
        `disallow_checkpoint` returns; both leave no byte under way when they do.
        """

    def resume(self) -> None:
        """Allow transfers again: a new quorum begins. Call it before asking if it is broken."""

    def shutdown(self, wait: bool = True) -> None:
        """Release everything; nothing may be called after it.

        Args:
            wait: Whether to return only after all threads have ended.
        """
