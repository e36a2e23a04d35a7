"""What an agent tells its leader of its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Message = dict[str, Any]


class Reports(ABC):
    """An agent's reports. All public methods may be called from any thread."""

    @abstractmethod
    def _report(self, type_: str, **fields: Any) -> None:
        """Send one to the leader of the present round."""

    def failed(self, failures: list[Message]) -> None:
        """Report failed workers: fields of `failures.Failure`, with ``age_s`` for ``time``."""
        self._report("failed", failures=failures)

    def finished(self) -> None:
        """Report that all workers of this agent have returned."""
        self._report("finished")

    def boundary(self, step: int, *, held: int) -> None:
        """Report that all workers have announced the checkpoint of a step.

        Args:
            step: The optimizer step that the checkpoint holds.
            held: Not 0: some of them stay there; the number of the request that they obey.
        """
        self._report("boundary", step=step, held=held)

    def want_checkpoint(self) -> None:
        """Ask that all ranks save at one step soon."""
        self._report("want")

    def stalled(self, stalled_s: float, limit_s: float) -> None:
        """Report that workers have made no step for so long, which is longer than the limit."""
        self._report("stalled", stalled_s=stalled_s, limit_s=limit_s)

    def answer_stacks(self, number: int, ranks: list[Message]) -> None:
        """Answer what the workers of this node are at.

        Args:
            number: Of the question.
            ranks: Fields of `hang.RankState`, with ``age_s`` for ``time``.
        """
        self._report("stacks", number=number, ranks=ranks)

    def answer(self, number: int, *, ok: bool, passed: int | None, rate: float) -> None:
        """Answer a proposal; once more when all workers have passed its step, if it is confirmed.

        Args:
            number: Of the proposal.
            ok: No worker of this node has passed the step, or may be about to without having seen
                the proposal: each is before it, or waits there.
            passed: The largest step that a worker has published; in the second answer the smallest.
                None: no worker has asked `should_checkpoint` yet.
            rate: Steps per second, at least 0.
        """
        self._report("answer", number=number, ok=ok, passed=passed, rate=rate)
