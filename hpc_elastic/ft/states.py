"""The user's state: the functions that give and take it, and who may call them when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Load = Callable[[Any], None]
Save = Callable[[], Any]


class States:
    """Functions by key, and a lock that keeps the state from being read while it changes.

    They are read on the Manager's quorum thread, and written on the main thread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loads: dict[str, Load] = {}
        self._saves: dict[str, Save] = {}
        self._lock = threading.Lock()
        self._allowed = True

    def register(self, key: str, load: Load, save: Save) -> None:
        """Add a part of the state.

        Raises:
            ValueError: there is one of that key.
        """
        if key in self._loads:
            raise ValueError(f"key={key!r}: a state of that key is registered already")
        self._loads[key], self._saves[key] = load, save

    def disallow_reading(self) -> None:
        """Wait until nobody reads, and let nobody begin; the second call in a row does nothing."""
        if self._allowed:
            self._allowed = False
            self._lock.acquire()

    def allow_reading(self) -> None:
        """Let the state be read again."""
        if not self._allowed:
            self._allowed = True
            self._lock.release()

    def collect(self) -> dict[str, Any]:
        """Return the state by key, with the live tensors.

        Raises:
            TimeoutError: reading has been disallowed for longer than the Manager's time-out.
            RuntimeError: nothing is registered.
        """
        self._demand()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise TimeoutError(
                f"a peer needs the state, which has not been allowed to be read for "
                f"{self._timeout_s:g} s: call allow_state_dict_read"
            )
        try:
            return {key: save() for key, save in self._saves.items()}
        finally:
            self._lock.release()

    def apply(self, user: dict[str, Any]) -> None:
        """Give each part that came from a peer to its function.

        Raises:
            RuntimeError: nothing is registered, or the peer has registered other keys.
        """
        self._demand()
        missing = sorted(self._loads.keys() - user.keys())
        if missing:
            raise RuntimeError(f"the peer's state has no {missing}: register the same keys on all")
        for key, load in self._loads.items():
            load(user[key])

    def _demand(self) -> None:
        if not self._loads:
            raise RuntimeError(
                "a replica has to heal, but there is no state to send or to take: give the "
                "Manager load_state_dict and state_dict, or call register_state_dict_fn"
            )
