"""What happens in one step, from `Manager.start_quorum` to `Manager.should_commit`."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from hpc_elastic.ft.work import ManagedWork


class ExceptionWithTraceback(Exception):  # noqa: N818  # torchft's name
    """An error of a step, with the stack that it was caught with.

    Attributes:
        original_exception: What was raised.
        stack_trace: Where, as text.
    """

    def __init__(self, e: Exception) -> None:
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))
        super().__init__(f"{e}\n{self.stack_trace}")


@dataclass(eq=False)
class Step:
    """One try at a step.

    Attributes:
        allow_heal, shrink_only: As `Manager.start_quorum` was called.
        error: The first that it met.
        works: Collectives begun.
        is_told: The script has been told its rank or the number of contributors, and may have
            chosen its samples by them.
        is_ended: `Manager.should_commit` has been called.
        used_device: One of the collectives was on an accelerator.
    """

    allow_heal: bool = True
    shrink_only: bool = False
    error: ExceptionWithTraceback | None = None
    works: list[ManagedWork] = field(default_factory=list)
    is_told: bool = False
    is_ended: bool = False
    used_device: bool = False

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has come of it yet."""
        return not (self.is_ended or self.works or self.error)

    def fail(self, error: Exception) -> bool:
        """Record an error; return whether it is the first."""
        if self.error is not None:
            return False
        self.error = ExceptionWithTraceback(error)
        return True

    def drain(self) -> None:
        """Wait for all collectives; their errors are recorded."""
        for work in self.works:
            work.wait()
