"""A leader's term: the one place through which all that a leader does passes.

A leader decides (`leadership`), and has duties beside that: it shows the run's status, passes
notices on, and readmits tasks. Both return effects. `Term` hands them on to what carries them out
(`leader` in a run, `testing.simulation.leader` in virtual time), for as long as the term lasts.
Once it is over, no event reaches the leadership and no effect comes out, whoever asks.

A term that its leader does not know to be over yet is fenced where its effects arrive: decisions by
`record`, shared files by `term_folder`, Slurm by a look at the last record right before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hpc_elastic.rendezvous.leader_effects import (
    Effect,
    Message,
    Publish,
    Readmit,
    Show,
    StepDown,
)
from hpc_elastic.rendezvous.leadership import Leadership
from hpc_elastic.rendezvous.record import Record
from hpc_elastic.rendezvous.series import Series
from hpc_elastic.rendezvous.status import NUMBERS, status_of


class Hands(Protocol):
    """What carries a leader's effects out."""

    def carry_out(self, effect: Effect) -> None:
        """Carry one effect out, or begin to."""

    def publish(self, record: Record, afterwards: list[Effect]) -> None:
        """Write the run's result; hand the other effects to `Term.do` once that is done."""

    def let_go(self) -> None:
        """The term is over: let go of everybody, and drop what is not carried out yet."""


class Decider(Protocol):
    """What decides during a term."""

    fenced: bool


class Gate:
    """Lets effects out for as long as a term lasts."""

    def __init__(self, decider: Decider, hands: Hands) -> None:
        self._decider = decider
        self._hands = hands
        self._has_let_go = False

    @property
    def is_over(self) -> bool:
        """Whether this leader knows that it leads no more."""
        return self._decider.fenced

    def handle(self, event: Callable[..., list[Effect]], *args: Any) -> None:
        """Tell the leadership of an event, and carry out what it wants."""
        if not self.is_over:
            self.do(event(*args))

    def do(self, effects: Iterable[Effect]) -> None:
        """Carry effects out, in order."""
        remaining = iter(effects)
        for effect in remaining:
            if isinstance(effect, StepDown) or self.is_over:
                self.end()
                return
            if isinstance(effect, Publish):
                self._hands.publish(effect.record, list(remaining))
            else:
                self._hands.carry_out(effect)

    def end(self) -> None:
        """Let nothing more come out. May be repeated."""
        self._decider.fenced = True
        if not self._has_let_go:
            self._has_let_go = True
            self._hands.let_go()


class Term(Gate):
    """The term of one leader, with its duties.

    Args:
        leadership: The leader.
        hands: What carries its effects out.
        show_s: So long a status is not shown again that differs in its numbers alone.
    """

    def __init__(self, leadership: Leadership, hands: Hands, show_s: float = 0.0) -> None:
        super().__init__(leadership, hands)
        self._leadership = leadership
        self._series = Series()
        self._show_s = show_s
        self._shown: tuple[float, dict[str, Any]] = (0.0, {})
        """When a status was shown last, and what was in it beside its numbers."""
        self._lines: list[Message] = []
        """Lines of the progress that go with the next status."""

    def show(self, now: float) -> None:
        """Show how the run is, if that is due; ``now`` in Unix seconds."""
        status = status_of(self._leadership)
        self._lines += self._series.look(status, now, self._leadership.at.started)
        rest = {name: value for name, value in status.items() if name not in NUMBERS}
        shown, before = self._shown
        if rest == before and abs(now - shown) < self._show_s:
            return
        self._shown, lines, self._lines = (now, rest), tuple(self._lines), []
        self.do([Show({**status, **self._series.rates}, lines)])

    def readmit(self) -> None:
        """See whether tasks that are gone may start again on the nodes that they were lost with."""
        machine = self._leadership.machine
        if gone := machine.comebacks.awaited(machine.muster.lost):
            self.do([Readmit(tuple(gone))])
