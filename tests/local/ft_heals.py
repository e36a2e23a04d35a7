"""States that are healed, and what is between a source and a destination."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch

LONG = timedelta(seconds=60)
STEP = 5
NUM_MB = 24


def make_state(value: float = 1.0, **values: object) -> dict[str, object]:
    """Return a state of some large tensors and a small one."""
    big = {f"w{i}": torch.full((NUM_MB * 1000 * 250 // 3,), value + i) for i in range(3)}
    return {"model": {**big, "small": torch.full((5,), value)}, "lineage": "abc", **values}


def is_equal(a: dict, b: dict) -> bool:
    """Tell whether two states have the same tensors."""
    return all(a["model"][k].equal(b["model"][k]) for k in {*a["model"], *b["model"]})


class InThread(threading.Thread):
    """Calls a function in a thread; `result` waits for it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call, self._value, self._error = call, None, None
        self.start()

    def run(self) -> None:
        """Call it."""
        try:
            self._value = self._call()
        except Exception as e:
            self._error = e

    def result(self) -> object:
        """Return or raise what the function did; it must come to an end."""
        self.join(20)
        assert not self.is_alive()
        if self._error:
            raise self._error
        return self._value


def cut_after(num_bytes: int) -> Callable[[bytes, int], bytes | None]:
    """End all connections once so many bytes have passed."""
    return lambda data, before: data if before < num_bytes else None


class StallAfter:
    """Nothing more comes once so many bytes have passed."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.reached = threading.Event()
        self.end = threading.Event()

    def __call__(self, data: bytes, before: int) -> bytes | None:
        """Pass the bytes on, or wait."""
        if before < self._num_bytes:
            return data
        self.reached.set()
        self.end.wait(60)
        return None
