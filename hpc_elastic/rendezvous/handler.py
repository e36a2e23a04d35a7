"""torch's `RendezvousHandler` over a `Session`.

Each round gets a fresh TCPStore, hosted by the leader's agent: torch's own handler caches the first
one's address over all rounds, and a joiner then waits for an address that nobody writes.
"""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from hpc_elastic.rendezvous.session import Leaving, Round, SentBack, Session

BACKEND = "slurm"
_STORE_TIMEOUT = timedelta(seconds=60)
_CONNECT_TIMEOUT = timedelta(seconds=15)
"""The store listens before its round is announced; if not, the leader has died since."""

_log = logging.getLogger(__name__)


class SlurmRendezvousHandler(RendezvousHandler):
    """The ``slurm`` backend.

    ``num_nodes_waiting`` is positive whenever the group must be formed anew: a node joins, or a
    member was lost. It answers from memory, since torch asks at every monitor interval.
    """

    def __init__(
        self,
        session: Session,
        run_id: str,
        join_timeout_s: float,
        *,
        stores: RoundStores | None = None,
    ) -> None:
        """Take part in a run.

        Args:
            session: The agent's.
            run_id: The run's.
            join_timeout_s: How long to wait for a round.
            stores: Where this node's workers are a group of their own: makes their stores.
        """
        self.session = session
        self._stores = stores
        self.round: Round | None = None
        """The round this agent is a member of; None before the first."""
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s

    def get_backend(self) -> str:
        """Return ``slurm``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers use the round's store, rather than opening one on a port that may be taken."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has a rank in a round.

        Raises:
            RendezvousTimeoutError: no round closed in time; names what it waited for.
            RendezvousGracefulExitError: the run has ended, or this node goes back to the queue, or
                is left.
            RendezvousClosedError: somebody has closed the rendezvous.
        """
        while True:
            self.round = self._join()
            address, port = self._stores.make() if self._stores else self.round.store
            try:
                store = TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT)
            except DistError as e:
                _log.warning("the store of round %d is gone: %s", self.round.number, e)
                continue
            where = RendezvousStoreInfo(address, port)
            return RendezvousInfo(store, self.round.group_rank, self.round.group_size, where)

    def _join(self) -> Round:
        try:
            outcome = self.session.join(self._join_timeout_s)
        except TimeoutError as e:
            raise RendezvousTimeoutError(str(e)) from e
        if isinstance(outcome, Round):
            return outcome
        if isinstance(outcome, SentBack):
            raise RendezvousGracefulExitError("this node goes back to the queue")
        if isinstance(outcome, Leaving):
            raise RendezvousGracefulExitError(f"this node is left: {outcome.reason}")
        if outcome.status == "closed":
            raise RendezvousClosedError("the rendezvous has been closed")
        raise RendezvousGracefulExitError(f"the run has {outcome.status}")

    def is_closed(self) -> bool:
        """Tell whether the run has ended."""
        return self.session.verdict is not None

    def set_closed(self) -> None:
        """End the run for everybody."""
        self.session.close_run()

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be restarted in another group, else 0."""
        return int(self.session.stop_requested and self.session.verdict is None)

    def get_run_id(self) -> str:
        """Return the run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous, as torch's own backends do, and leave it."""
        self.session.close_run()
        self.session.leave("its agent has shut down")
        return True


class RoundStores:
    """Makes the store of each round; the one before it is closed then, its workers being gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._current: TCPStore | None = None

    def make(self) -> tuple[str, int]:
        """Start a fresh store; return its address and port.

        It gets a socket of the address's own family. On one that takes IPv6 and IPv4, as torch
        opens it, torch's server looks up every client's name before it serves the next (the system
        knows no ``::ffff:10.0.0.7`` from its hosts file), and stands still where no name server
        answers.

        Raises:
            OSError: the address is not this node's.
        """
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listening = socket.create_server((self._address, 0), family=family)
        port = int(listening.getsockname()[1])
        self._current = TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listening.detach(),
        )
        return self._address, port
