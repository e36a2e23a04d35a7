"""The keeper of the replicas' quorum at his leader's: who comes and goes, and what they say.

The keeper (`quorum_keeper`) decides about quorums; two things he can not know, and are seen to
here. While the leader may be the one that is cut off, nothing reaches the keeper: another leader
may have been elected, whose keeper makes quorums of the others. And a newcomer, which has not been
in a quorum yet, has to wait while a replica ends whose workers have gone: if they have finished,
the run is over, and a newcomer left alone would begin it from the start.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from hpc_elastic.rendezvous.leadership import Leadership
from hpc_elastic.rendezvous.office import Office
from hpc_elastic.rendezvous.quorum_keeper import Answers, Message, QuorumKeeper, replica_name
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.rendezvous.replica_leadership import ReplicaLeadership

_TICK_S = 0.05
_SETTLES_WITHIN_S = 2.0
"""An agent reports within a tenth of a second what became of workers that have gone."""
_NO_QUORUM = -1

Send = Callable[[Agent, Message], None]


class Desk:
    """Between one leader and the keeper of his epoch."""

    def __init__(self, keeper: QuorumKeeper, leadership: ReplicaLeadership, send: Send) -> None:
        self._keeper = keeper
        self._leadership = leadership
        self._send = send
        self._agents: dict[str, Agent] = {}
        self._waiting: deque[Callable[[], Answers]] = deque()
        """What the keeper is to hear once it is sure that this leader leads."""
        self._ending: dict[Agent, float] = {}
        """Whose workers have gone, and since when, until it is known what became of them."""
        self._held: dict[Agent, Message] = {}
        """What newcomers ask meanwhile."""

    def arrived(self, agent: Agent) -> None:
        """An agent has connected."""
        name = replica_name(agent)
        self._agents[name] = agent
        self._tell(lambda: self._keeper.arrived(name, time.monotonic()))

    def said(self, agent: Agent, message: Message) -> None:
        """An agent has sent this for the keeper.

        Raises:
            ValueError: it is nothing that a keeper knows.
        """
        self._note(agent, message)
        if message["type"] == "ask" and self._is_early(agent):
            self._held[agent] = message
            return
        if message["type"] in ("withdraw", "lost", "bye"):
            self._held.pop(agent, None)
        name = replica_name(agent)
        self._tell(lambda: self._keeper.said(name, message, time.monotonic()))

    def left(self, agent: Agent, why: str) -> None:
        """The connection to an agent is gone, or it is not heard any more."""
        name = replica_name(agent)
        self._agents.pop(name, None)
        self._held.pop(agent, None)
        self._ending.pop(agent, None)
        self._tell(lambda: self._keeper.left(name, why, time.monotonic()))

    async def keep(self) -> None:
        """Let the keeper see that time passes, until this is cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._release()
            self._tell(lambda: self._keeper.tick(time.monotonic()))

    # ---- the keeper ---------------------------------------------------------------------

    def _tell(self, event: Callable[[], Answers]) -> None:
        now, leadership = time.monotonic(), self._leadership
        self._waiting.append(event)
        while self._waiting and not (leadership.fenced or leadership.is_cut_off(now)):
            self._answer(self._waiting.popleft()())

    def _answer(self, answers: Answers) -> None:
        for name, message in answers:
            agent = self._agents.get(name)
            if agent is not None:
                if message["type"] == "placements":
                    self._leadership.machine.takes_part(agent)
                self._send(agent, {"type": "ft", "message": message})

    # ---- the end of the run -------------------------------------------------------------

    def _note(self, agent: Agent, message: Message) -> None:
        machine = self._leadership.machine
        if message["type"] == "here" and message["quorum_id"] != _NO_QUORUM:
            machine.takes_part(agent)
        elif message["type"] in ("bye", "lost") and agent in machine.taking_part:
            self._ending[agent] = time.monotonic()

    def _is_early(self, agent: Agent) -> bool:
        machine = self._leadership.machine
        return agent not in machine.taking_part and bool(self._ending or machine.done)

    def _release(self) -> None:
        """Let newcomers ask once it is known that the run goes on."""
        machine, now = self._leadership.machine, time.monotonic()
        self._ending = {
            agent: since
            for agent, since in self._ending.items()
            if agent in machine.taking_part and now - since < _SETTLES_WITHIN_S
        }
        if self._held and not (self._ending or machine.done):
            held, self._held = self._held, {}
            for agent, message in held.items():
                name = replica_name(agent)
                self._tell(partial(self._keeper.said, name, message, now))


def open_desk(office: Office, claim: Record, leadership: Leadership, send: Send) -> Desk | None:
    """Return the desk of a leader whose run has replicas; None for another's."""
    if not isinstance(leadership, ReplicaLeadership):
        return None
    assert office.make_keeper is not None, "a run with ft=true needs Office.make_keeper"
    lost = [a for a in claim.members if a not in leadership.machine.roster]
    keeper = office.make_keeper(claim.epoch, map(replica_name, lost))
    return Desk(keeper, leadership, send)
