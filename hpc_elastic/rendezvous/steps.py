"""Procedures on the shared file system, as generators (pure).

A procedure yields one step on the file system after the other, and is sent what came of it. So the
same procedure runs on real files, in a thread that may wait (`carried_out`), and in virtual time
(`testing.simulation.storage`), where another node may come between any two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""Yields what is to be done on the file system, is sent the result, or thrown the `OSError`."""


def carried_out(steps: Steps[T]) -> T:
    """Carry a procedure out on real files, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except OSError as e:
                step = steps.throw(e)
            else:
                step = steps.send(result)
    except StopIteration as over:
        value: T = over.value
        return value
