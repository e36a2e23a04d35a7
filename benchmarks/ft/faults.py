"""Parts b, c, g and h: a replica is killed or stopped, the coordinator is killed."""

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ft.crew import Crew, crew
from ft.libraries import OURS, PEER, lighthouse
from ft.report import Row, Settings
from ft.training import MB, Training, delays, has_gone_on, longest_gap

NUM_BYTES = 10 * MB
BOUND_S = {OURS: 15.0, PEER: 75.0}
"""A survivor that goes on later than that counts as one that does not."""
CONFIGURATION_S = 100.0
"""No new round is begun of a configuration that has taken a library so long."""
BACK_S = 3.0
WATCH_S = {OURS: 10.0, PEER: 66.0}
"""For how long gaps are looked for after the coordinator's death; torchft gives up after 60 s."""


def killed(settings: Settings) -> Iterator[Row]:
    """SIGKILL of one replica, to the next commit of the slowest survivor."""
    yield from _hit(settings, "b SIGKILL", signal.SIGKILL)


def stopped(settings: Settings) -> Iterator[Row]:
    """SIGSTOP of one replica, to the next commit of the slowest of the others."""
    yield from _hit(settings, "g SIGSTOP", signal.SIGSTOP)


def _hit(settings: Settings, part: str, number: signal.Signals) -> Iterator[Row]:
    by_signal = {signal.SIGKILL: (False, True), signal.SIGSTOP: (False,)}
    with crew() as people:
        for world_size in settings.worlds:
            for by_cli in by_signal[number] if not settings.quick else (False,):
                hit = Hit(part, number, world_size, by_cli)
                yield from _rows(hit, _delays(settings, people, hit))


def killed_groups(settings: Settings) -> Iterator[Row]:
    """SIGKILL of one or of all workers of one of two groups of two ranks."""
    with crew() as people:
        for num_hit in (1, 2) if not settings.quick else (2,):
            hit = Hit("h HSDP", signal.SIGKILL, 2, by_cli=False, ranks=2, num_hit=num_hit)
            yield from _rows(hit, _delays(settings, people, hit))


@dataclass(frozen=True)
class Hit:
    """A fault of one replica: of its ``ranks`` workers ``num_hit`` get the signal."""

    part: str
    number: signal.Signals
    world_size: int
    by_cli: bool
    ranks: int = 1
    num_hit: int = 1


def _rows(hit: Hit, found: dict[str, list[list[float]]]) -> Iterator[Row]:
    defaults = "CLI" if hit.by_cli else "Python"
    what = f"to the next commit, n = {hit.world_size}, {defaults} defaults"
    ours, peer = found.get(OURS, []), found.get(PEER, [])
    if hit.ranks > 1:
        what = f"{hit.num_hit} of {hit.ranks} ranks of a group killed, {what}"
        slowest = [max(d) for d in ours], [max(d) for d in peer]
        yield Row(hit.part, f"{what}, slowest survivor", "s", *slowest, of_peer=1.0)
        return
    slowest = [max(d) for d in ours], [max(d) for d in peer]
    yield Row(hit.part, f"{what}, slowest survivor", "s", *slowest, limit=0.2)
    if hit.world_size > 2:
        fastest = [min(d) for d in ours], [min(d) for d in peer]
        yield Row(hit.part, f"{what}, first survivor", "s", *fastest)


def _delays(settings: Settings, people: Crew, hit: Hit) -> dict[str, list[list[float]]]:
    """Return the survivors' delays by library and round; each round is a training of its own."""
    found: dict[str, list[list[float]]] = {library: [] for library in settings.libraries}
    spent = dict.fromkeys(settings.libraries, 0.0)
    for _ in range(settings.repeats):
        for library in settings.libraries:
            if spent[library] < CONFIGURATION_S:
                begun = time.monotonic()
                with lighthouse(library, by_cli=hit.by_cli) as light:
                    training = Training(people, light, NUM_BYTES, hit.ranks)
                    training.start(hit.world_size)
                    found[library].append(_one(people, training, hit))
                    training.end()
                spent[library] += time.monotonic() - begun
    return found


def _one(people: Crew, training: Training, hit: Hit) -> list[float]:
    survivors = training.replicas[hit.ranks :]
    bound = BOUND_S[training.lighthouse.library]
    moment = time.monotonic()
    for victim in training.replicas[: hit.num_hit]:
        victim.signal(hit.number)
    people.wait(lambda: has_gone_on([m for m in survivors if not m.gone], moment), bound)
    return [bound if math.isnan(d) else d for d in delays(survivors, moment)]


def coordinator(settings: Settings) -> Iterator[Row]:
    """Kill -9 of the lighthouse: the longest gap between commits, and how many crash."""
    world_size = settings.worlds[-1]
    with crew() as people:
        for comes_back in (True, False) if not settings.quick else (True,):
            gaps: dict[str, list[float]] = {OURS: [], PEER: []}
            crashes: dict[str, list[float]] = {OURS: [], PEER: []}
            for library in settings.libraries:
                for _ in range(settings.repeats if library == OURS else 1):
                    gap, crashed = _without(people, library, world_size, comes_back)
                    gaps[library].append(gap)
                    crashes[library].append(crashed)
            when = f"back after {BACK_S:g} s" if comes_back else "not back"
            what = f"lighthouse killed, {when}, n = {world_size}"
            part = "c coordinator"
            yield Row(part, f"{what}: longest gap", "s", gaps[OURS], gaps[PEER], limit=1.0)
            what = f"{what}: replicas that crash"
            yield Row(part, what, "", crashes[OURS], crashes[PEER], limit=0)


def _without(people: Crew, library: str, world_size: int, comes_back: bool) -> tuple[float, float]:
    """Return the longest gap between commits of any replica, and how many crashed."""
    with lighthouse(library) as light:
        training = Training(people, light, NUM_BYTES)
        training.start(world_size)
        moment = time.monotonic()
        light.kill()
        if comes_back:
            people.listen(BACK_S)
            light.start()
        people.wait(lambda: all(m.gone for m in training.replicas), WATCH_S[library])
        end = time.monotonic()
        crashed = sum(m.gone for m in training.replicas)
        gap = max(longest_gap(m, moment, end) for m in training.replicas)
        training.end()
        return gap, float(crashed)
