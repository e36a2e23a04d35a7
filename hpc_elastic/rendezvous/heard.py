"""What an agent's session has heard, and what it came to: the part that two threads share.

The event loop's thread calls `Heard.hear` with what `following` tells; the agent's own thread reads
the fields, and waits in `Heard.outcome_within`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_log = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """What a member is told of a closed round."""

    number: int
    record: int
    """The number of the record that closed it: the group's fencing token."""
    restarts: int
    store: tuple[str, int]
    group_rank: int
    group_size: int
    """Nodes in the group."""
    first_rank: int
    """Global rank of this node's first worker."""
    world_size: int
    """Workers in the group."""


@dataclass(frozen=True)
class Verdict:
    """How the run ended."""

    status: str
    failure: str | None


@dataclass(frozen=True)
class SentBack:
    """This node is to go back to the queue, and not to start again for a while."""

    delay_s: float


@dataclass(frozen=True)
class Leaving:
    """This node was to be left, and has left the run; its workers are still to be stopped."""

    reason: str


Ending = Verdict | SentBack | Leaving
Outcome = Round | Ending


@dataclass(frozen=True)
class Proposal:
    """A step at which all ranks may have to save; they do once it is confirmed (`agreement`)."""

    number: int
    step: int
    confirmed: bool = False


@dataclass(frozen=True)
class Notice:
    """This node has to be left."""

    reason: str
    left_s: float
    """How much time there was when it was noticed."""
    deadline: float
    """The same as monotonic seconds."""


class Heard:
    """The last of everything that an agent was told."""

    def __init__(self) -> None:
        self.round: Round | None = None
        self.stop_requested = False
        self.hold = 0
        self.stacks = 0
        self.proposal: Proposal | None = None
        self.notice: Notice | None = None
        self.ending: Ending | None = None
        self.news = "reading the records of the run"
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    # ---- the agent's thread -------------------------------------------------------------

    def outcome_within(self, timeout_s: float, ask: Callable[[], None]) -> Outcome | None:
        """Forget the last round, ask for another, and wait for what comes; None: nothing does.

        Raises:
            BaseException: what the event loop's thread has failed with.
        """
        with self._changed:
            self.round, self.proposal = None, None
            self.stop_requested, self.hold, self.stacks = False, 0, 0
            ask()
            self._changed.wait_for(lambda: self.round or self.ending or self.error, timeout_s)
            if self.error is not None:
                raise self.error
            return self.ending or self.round

    # ---- the event loop's thread --------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """There will be no more to hear."""
        with self._changed:
            self.error = error
            self.stop_requested = True
            self._changed.notify_all()

    def hear(self, message: Message) -> None:
        """Take in what `following.Tell` brings."""
        with self._changed:
            self._take(message)
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        match message["type"]:
            case "round":
                fields = {k: v for k, v in message.items() if k not in ("type", "ask")}
                self.round = Round(**{**fields, "store": tuple(message["store"])})
            case "stop":
                _log.info("workers are to stop: %s", message["reason"])
                self.stop_requested = True
            case "hold":
                self.hold = int(message["number"])
            case "stacks":
                self.stacks = int(message["number"])
            case "propose" | "confirm":
                self._note_proposal(message)
            case "noticed":
                self._note_notice(message)
            case "end" | "give back" | "leaving":
                self._end(message)
            case "waiting" | "news":
                if message["text"] != self.news:
                    _log.info("%s", message["text"])
                self.news = message["text"]

    def _note_proposal(self, message: Message) -> None:
        number = int(message["number"])
        if message["type"] == "propose":
            self.proposal = Proposal(number, int(message["step"])) if number else None
        elif self.proposal is not None and self.proposal.number == number:
            self.proposal = replace(self.proposal, confirmed=True)

    def _note_notice(self, message: Message) -> None:
        left_s = float(message["left_s"])
        self.notice = Notice(message["reason"], left_s, time.monotonic() + left_s)
        _log.info("this node is to be left within %.0f s: %s", left_s, self.notice.reason)

    def _end(self, message: Message) -> None:
        match message["type"]:
            case "end":
                self.ending = Verdict(message["status"], message["failure"])
            case "give back":
                self.ending = SentBack(float(message["delay_s"]))
                self.stop_requested = True
            case "leaving":
                self.ending = Leaving(message["reason"])
                self.stop_requested = True


class Hearing:
    """What an agent's own thread may ask about what was heard, at any time."""

    def __init__(self) -> None:
        self._heard = Heard()

    @property
    def placed(self) -> Round | None:
        """The round that this agent has a place in; None while it waits for one."""
        return self._heard.round

    @property
    def stop_requested(self) -> bool:
        """Whether this agent's workers must be stopped and `join` be called again."""
        return self._heard.stop_requested

    @property
    def hold(self) -> int:
        """Not 0: workers are to stay at their next checkpoint boundary; the request's number."""
        return self._heard.hold

    @property
    def stacks(self) -> int:
        """Not 0: the leader asks what the workers are at (`hang`); the question's number."""
        return self._heard.stacks

    @property
    def proposal(self) -> Proposal | None:
        """The step at which all ranks may have to save; None: there is none, or none any more."""
        return self._heard.proposal

    @property
    def noticed(self) -> Notice | None:
        """Set once this node is to be left, whoever said so."""
        return self._heard.notice

    @property
    def verdict(self) -> Verdict | None:
        """How the run ended; None while it goes on."""
        ending = self._heard.ending
        return ending if isinstance(ending, Verdict) else None

    @property
    def sent_back(self) -> SentBack | None:
        """Set once this node is to go back to the queue."""
        ending = self._heard.ending
        return ending if isinstance(ending, SentBack) else None

    @property
    def leaving(self) -> Leaving | None:
        """Set once this node has left the run because it is to be left."""
        ending = self._heard.ending
        return ending if isinstance(ending, Leaving) else None
