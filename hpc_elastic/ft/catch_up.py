"""Catching up: a replica takes over a large state beside the training; the others do not wait.

A newcomer in a quorum with ``catch_up`` (`messages`) is a member that adds zero. In each step it
fetches a part of the state from members that have it, which offer it while the step lasts, out of
the tensors' own memory: parameters change at the end of a step only. It receives into its own
tensors; what its forward pass computes with them is worth nothing meanwhile.

*Units*. What has come in a step is as of the beginning of that step, and the optimizer of the
newcomer steps it with the same averaged gradients as all others do. So it stays up to date from
then on, if all that the optimizer keeps for a parameter comes in the same step as the parameter: a
*unit*. Values and small tensors, such as learning rates, come in the first step, so that the
optimizer steps alike.

*Steps*. A step that has brought something ends without any wait, and what is under way is given up;
otherwise it waits for one unit, so that the state is complete some time. Meanwhile the sources
wait, as a unit is not of use in the next step.

*The last step*. Once all units have come, the newcomer compares the digests of all large tensors
with a source's, and fetches again what differs, together with all small tensors: running means,
averages of parameters, whatever else changes in ways that are unknown here. So the state that is
complete is equal to the source's, bit by bit, however the optimizer works; one that couples its
parameters, such as L-BFGS, only takes longer. The others wait for this step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpc_elastic.ft.checkpointing import HealError, HTTPTransport, UnusableStateError, _layout
from hpc_elastic.ft.checkpointing._layout import SMALL_BYTES, StateLayout, Target
from hpc_elastic.ft.checkpointing._wire import Pieces
from hpc_elastic.ft.checkpointing.http_transport import FetchPlan, Range, cut_range
from hpc_elastic.ft.quorum import CommittedProgress
from hpc_elastic.ft.quorum_client import run_in_background

Optimizers = Sequence[torch.optim.Optimizer]
_MAX_EMPTY_STEPS = 3
"""In a row; after these the replica heals as if it could not catch up."""
_log = logging.getLogger(__name__)


class CatchUp:
    """Fetches the state of peers that train on, a part in each step, within the time-out."""

    def __init__(
        self,
        transport: HTTPTransport[Any],
        optimizers: Optimizers,
        timeout: timedelta,
    ) -> None:
        self.is_complete = False
        self._transport = transport
        self._optimizers = optimizers
        self._timeout = timeout
        self._has_values = False
        self._done: set[str] = set()
        """Paths of the tensors that have come, and are up to date."""
        self._num_steps = 0
        self._num_empty = 0
        self._fetching: Future[dict[str, Any] | None] | None = None
        self._is_ending = False
        self._num_new = 0
        """Units that have come in this step."""

    def start_step(
        self, sources: Sequence[str], progress: CommittedProgress, own: Callable[[], Any]
    ) -> None:
        """Begin to fetch a part, on other threads.

        ``sources`` are what the peers' `HTTPTransport.metadata` returned, ``progress`` is that of
        their state in this step, and ``own`` returns the own state in the same form, with live
        tensors.
        """
        self._is_ending, self._num_new = False, 0
        self._num_steps += 1
        self._fetching = run_in_background(lambda: self._fetch(sources, progress, own))

    def end_step(self) -> dict[str, Any] | None:
        """Return once nothing is written into the tensors any more; call it before they change.

        Returns a state to load now, or None: its values and small tensors are the peers', its large
        tensors the own ones in their own memory. Raises HealError if this replica cannot catch up:
        the state does not fit, or nothing came in several steps.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is None:
            return None
        self._is_ending = True
        self._transport.look_again()
        try:
            state = fetching.result()
        except UnusableStateError:
            raise
        except (HealError, OSError) as e:
            self._num_empty += 1
            _log.info("no part of the state came in this step: %s", e)
            if self._num_empty < _MAX_EMPTY_STEPS:
                return None
            raise HealError(f"no part of the state came in {self._num_empty} steps: {e}") from e
        self._num_empty = 0
        return state

    def _fetch(
        self, sources: Sequence[str], progress: CommittedProgress, own: Callable[[], Any]
    ) -> dict[str, Any] | None:
        """Fetch units, and the rest if all have come; return the state that is to be loaded."""
        part: _Part | None = None

        def plan(layout: StateLayout) -> FetchPlan:
            nonlocal part
            part = _Part.of(layout, own, self._optimizers)
            part.units = [u for u in part.units if not part.paths(u) <= self._done]
            return part.plan(part.units, with_rest=not self._has_values)

        def is_enough(finished: set[Range]) -> bool:
            units = part.units if part and self._is_ending else ()
            return any(part and part.has(unit, finished) for unit in units)

        step, timeout = progress.step, self._timeout
        finished = self._transport.fetch_parts(sources, step, plan, timeout, is_enough)
        assert part
        for unit in part.units:
            if part.has(unit, finished):
                part.land(unit)
                self._done |= part.paths(unit)
                self._num_new += 1
        state = None
        if not self._has_values and part.has_rest(finished):
            state = part.state(progress)
            self._has_values = True
        is_all = self._has_values and all(part.has(u, finished) for u in part.units)
        if is_all and not (self._is_ending and self._num_new):
            return self._fetch_last(sources, progress, own) or state
        return state

    def _fetch_last(
        self, sources: Sequence[str], progress: CommittedProgress, own: Callable[[], Any]
    ) -> dict[str, Any] | None:
        """Fetch all that differs; return the state, or None if the step ends before."""
        part: _Part | None = None
        wrong: list[int] = []

        def plan(layout: StateLayout) -> FetchPlan:
            nonlocal part, wrong
            part = _Part.of(layout, own, self._optimizers)
            wrong = self._find_wrong(sources, progress.step, part)
            return part.plan([wrong], with_rest=True)

        finished = self._transport.fetch_parts(
            sources, progress.step, plan, self._timeout,
            lambda _: self._is_ending and bool(self._num_new),
        )  # fmt: skip
        if part is None or not (part.has_rest(finished) and part.has(wrong, finished)):
            return None
        part.land(wrong)
        state = part.state(progress)
        self.is_complete = True
        _log.info(
            "caught up at step %d: %.1f MB in %d steps; %d of %d large tensors fetched again",
            progress.step, part.target.layout.num_bytes / 1e6, self._num_steps, len(wrong),
            len(part.large),
        )  # fmt: skip
        return state

    def _find_wrong(self, sources: Sequence[str], step: int, part: _Part) -> list[int]:
        """Return the large tensors that differ from the first source's that answers."""
        failure: Exception = HealError("there is no source")
        for source in sources:
            arguments = source, step, part.target.layout, self._timeout
            asking = run_in_background(partial(self._transport.fetch_digests, *arguments))
            digests = _layout.digest_tensors([part.target.in_place[n] for n in part.large])
            try:
                theirs = asking.result()
            except (HealError, OSError) as e:
                failure = e
            else:
                pairs = zip(part.large, digests, strict=True)
                return [n for n, digest in pairs if digest != theirs[n]]
        raise failure


Unit = Sequence[int]
"""Numbers of tensors."""


@dataclass
class _Part:
    """What is to be fetched in one step; ``large`` tensors are received into the own ones."""

    target: Target
    large: list[int]
    units: list[Unit]

    @classmethod
    def of(cls, layout: StateLayout, own: Callable[[], Any], optimizers: Optimizers) -> _Part:
        target = Target(layout, own, in_place=True, staged=True)
        large = [n for n in target.in_place if layout.specs[n].num_bytes > SMALL_BYTES]
        by_memory = {target.in_place[n].data_ptr(): n for n in large}
        units: list[Unit] = []
        single = set(large)
        for kept in _kept_together(optimizers):
            unit = {by_memory[at] for at in kept if at in by_memory} & single
            if unit:
                units.append(sorted(unit))
                single -= unit
        return cls(target, large, [*units, *([n] for n in sorted(single))])

    def plan(self, units: Iterable[Unit], *, with_rest: bool) -> FetchPlan:
        memory = Pieces(_layout.stream_parts(self.target.layout, self.target.raw))
        rest = self._rest if with_rest else []
        return FetchPlan(memory, rest, [self._range(n) for unit in units for n in unit])

    def has(self, unit: Unit, finished: set[Range]) -> bool:
        return _have_come([self._range(n) for n in unit], finished)

    def has_rest(self, finished: set[Range]) -> bool:
        """Return whether everything has come that is in no unit."""
        return _have_come(self._rest, finished)

    def land(self, unit: Unit) -> None:
        for number in unit:
            self.target.land(number)

    def paths(self, unit: Unit) -> set[str]:
        return {self.target.layout.specs[n].path for n in unit}

    def state(self, progress: CommittedProgress) -> dict[str, Any]:
        """Return the state; raise HealError if it is of other progress, or UnusableStateError."""
        self.land([*self.target.in_place.keys() - set(self.large)])
        state: dict[str, Any] = self.target.state()
        given = CommittedProgress(**state["torchft"])
        if (given.step, given.state_version) != (progress.step, progress.state_version):
            raise HealError(f"a peer offers step {given.step} with another history")
        return state

    @property
    def _rest(self) -> list[Range]:
        """All small tensors, and those that have no counterpart here."""
        layout, large = self.target.layout, set(self.large)
        others = (n for n, s in enumerate(layout.specs) if s.num_bytes > SMALL_BYTES)
        return [(0, layout.small_bytes), *(self._range(n) for n in others if n not in large)]

    def _range(self, number: int) -> Range:
        spec = self.target.layout.specs[number]
        return spec.begin, spec.begin + spec.num_bytes


def _have_come(ranges: Iterable[Range], finished: set[Range]) -> bool:
    return all(piece in finished for whole in ranges for piece in cut_range(whole))


def _kept_together(optimizers: Optimizers) -> Iterable[list[int]]:
    """Yield the addresses of each parameter and of what its optimizer keeps for it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept = [parameter, *optimizer.state.get(parameter, {}).values()]
                yield [_address(t) for t in kept if isinstance(t, torch.Tensor)]


def _address(tensor: Any) -> int:
    return int(_layout.local_part(tensor).data_ptr())


class SkipCopiesOntoItself(TorchFunctionMode):
    """Within it, `torch.Tensor.copy_` of a tensor onto its own memory takes no time.

    A `load_state_dict` of live tensors would read and write all of them for nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_ and _is_same(args[0], args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_same(a: Any, b: Any) -> bool:
    forms = {(t.dtype, t.shape, t.stride(), t.device, _address(t)) for t in (a, b)}
    return len(forms) == 1 and a.numel() > 0
