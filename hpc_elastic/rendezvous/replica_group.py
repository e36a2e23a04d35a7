"""What a session knows of the workers of its node, where they are a replica of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, Any]


class ReplicaGroup(Protocol):
    """Speaks for a node's workers to the keeper of the quorum, who is with the leader.

    All methods are called on the session's event loop.
    """

    async def start(self, say: Callable[[Message], None]) -> None:
        """Begin; ``say`` sends a message to the keeper, if the connection stands."""

    async def stop(self) -> None:
        """The session ends."""

    def up(self) -> None:
        """A leader is there: tell his keeper what he has to know."""

    def down(self) -> None:
        """The connection to the leader is gone."""

    def heard(self, message: Message) -> None:
        """The keeper says something.

        Raises:
            ValueError: it is no message of a keeper.
        """
