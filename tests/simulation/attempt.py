"""One attempt of an agent to connect to a leader: greeted, refused, or in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_elastic.rendezvous.log_entry import Endpoint
from simulation.network import CLIENT, Connection

if TYPE_CHECKING:
    from simulation.agent import AgentProcess


class Attempt:
    """One attempt of an agent to connect."""

    __slots__ = ("client", "connection", "endpoint", "is_over")

    def __init__(self, client: AgentProcess, endpoint: Endpoint) -> None:
        self.client = client
        self.endpoint = endpoint
        self.connection: Connection | None = None
        self.is_over = False

    def reach(self) -> None:
        """The request arrives, or not, at the leader's node."""
        client = self.client
        node = client.sim.nodes[int(self.endpoint.address)]
        if not node.up or client.sim.network.is_cut(client.host, node):
            return
        listener = node.listener(self.endpoint.port)
        if listener is None:
            self.refuse()
        else:
            listener.process.call(listener.accept, self)

    def refuse(self) -> None:
        """Nobody listens there."""
        world = self.client.sim.world
        world.after(0.001, self.client.process, self.fail, "connection refused", True)

    def fail(self, why: str, refused: bool) -> None:
        """It has come to nothing."""
        if not self.is_over:
            self.client.not_connected(self, why, refused)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.is_over = True
        if self.connection is not None:
            self.connection.close(CLIENT)
