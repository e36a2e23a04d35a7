"""How long until one client sees what another one did, by each way of asking."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import primitives
from .machines import Machine

_MODULE = "kernel_nfs.primitives"
_SETTLE_S = 1.0
_LONG_S = 65.0
"""Longer than attributes of a folder live (acdirmax, 60 s)."""


@dataclass(frozen=True)
class Change:
    """Something that one client does to a path, and that another one waits for.

    ``kind`` is what is there before: ``""`` nothing, ``folder``, ``file``, or ``linked``, a file of
    two names. The one does ``deed`` of `primitives.DEEDS`, the other its ``wait`` with the
    way as the first argument.
    """

    name: str
    kind: str
    deed: str
    arguments: Callable[[str], list[Any]]
    wait: str
    waits_for: Any
    ways: tuple[str, ...]


_NAMES = tuple(primitives.NAMES)
_GONE = tuple(way for way in _NAMES if way != "list the parent, open what it names")
_CONTENT = tuple(primitives.CONTENT)
CHANGES = (
    Change("a new file, after a look-up in vain", "", "make", lambda p: [p], "seen", True, _NAMES),
    Change("a renamed folder is gone", "folder", "rename", lambda p: [p, p + ".moved"], "seen",
           False, tuple(way for way in _GONE if way not in ("O_DIRECT open", "link(2) to it"))),
    Change("a removed file is gone", "file", "remove", lambda p: [p], "seen", False, _GONE),
    Change("appended text", "file", "append", lambda p: [p, "new"], "contains", "new",
           (*_CONTENT, "held open, read")),
    Change("a file that was replaced", "file", "replace", lambda p: [p, "new"], "contains", "new",
           _CONTENT),
    Change("a file that was replaced, the old one has another name", "linked", "replace",
           lambda p: [p, "new"], "contains", "new", _CONTENT),
)  # fmt: skip


def measure(
    change: Change, writer: Machine, reader: Machine, folder: str, limit_s: float
) -> Iterator[tuple[str, float | None]]:
    """Yield each way of asking, and for how many seconds it did not tell of the change.

    None: it did not in time. 0: every look that began after the change found it.

    Each way has a folder of its own, so that none profits from what another one fetched.
    """
    paths = {way: f"{folder}/{number}/it" for number, way in enumerate(change.ways)}
    writer.call(_MODULE, "prepare", list(paths.values()), change.kind)
    reader.call(_MODULE, "warm", list(paths.values()))
    apart_s = reader.ahead_s() - writer.ahead_s()
    with ThreadPoolExecutor(len(paths)) as pool:

        def wait(way: str) -> Any:
            asked = [way, paths[way], change.waits_for, limit_s]
            return reader.call(_MODULE, change.wait, *asked, timeout_s=limit_s + 60)

        waits = {way: pool.submit(wait, way) for way in change.ways}
        time.sleep(_SETTLE_S)
        done = {
            way: writer.call(_MODULE, "act", change.deed, *change.arguments(path))
            for way, path in paths.items()
        }
        for way in change.ways:
            seen = waits[way].result()
            yield way, max(0.0, seen["vain"] - apart_s - done[way]) if seen["ended"] else None


def compete(one: Machine, other: Machine, folder: str, rounds: int = 20) -> dict[str, int]:
    """Let two clients link their files to the same names at the same moments.

    Returns how often each pair of outcomes came, see `primitives.compete`.
    """
    one.run(["mkdir", folder])
    other.run(["ls", "-l", folder])
    at, outcomes = time.time() + 3, []
    with ThreadPoolExecutor(2) as pool:
        for name, machine in (("one", one), ("other", other)):
            asked = [folder, name, at, rounds]
            call = pool.submit(machine.call, _MODULE, "compete", *asked, timeout_s=120)
            outcomes.append(call)
    pairs = zip(*(outcome.result() for outcome in outcomes), strict=True)
    return dict(Counter(" / ".join(sorted(pair)) for pair in pairs))


def two_in_a_tick(
    writer: Machine, reader: Machine, folder: str, rounds: int = 100
) -> dict[str, list[int]]:
    """Make two files at once in each of many folders, while another client lists that folder."""
    names = [f"{folder}/{number}" for number in range(rounds)]
    writer.run(["mkdir", folder, *names])
    reader.run(["ls", *names])
    asked = [folder, rounds, time.time() + 2, 0.3]
    with ThreadPoolExecutor(1) as pool:
        listed = pool.submit(reader.call, _MODULE, "list_two", *asked, timeout_s=120)
        writer.call(_MODULE, "two_at_once", *asked, timeout_s=120)
        listed.result()
    found: dict[str, list[int]] = reader.call(
        _MODULE, "unseen", folder, rounds, _LONG_S, timeout_s=2 * _LONG_S + 60
    )
    return found


def delegated(owner: Machine, other: Machine, folder: str, held: Callable[[], int]) -> list[str]:
    """Kill a client that holds delegations; return how long another one's changes then take.

    ``held`` tells how many delegations the server has given to the owner.
    """
    deeds = {
        "unlink": "remove",
        "rename over it": "replace",
        "append to it": "append",
        "unlink what the product reads as removable": "remove",
    }
    paths = {deed: f"{folder}/{number}/it" for number, deed in enumerate(deeds)}
    *delegated, removable = paths.values()
    owner.call(_MODULE, "prepare", list(paths.values()), "file")
    time.sleep(_SETTLE_S)
    owner.call(_MODULE, "warm", delegated)
    owner.call(_MODULE, "read_undelegated", removable)
    number = held()
    owner.kill()
    deeds["list a folder in which a removal hangs"] = "list"
    paths["list a folder in which a removal hangs"] = paths["unlink"]
    with ThreadPoolExecutor(len(deeds)) as pool:

        def timed(deed: str) -> float:
            if deeds[deed] == "list":
                time.sleep(2 * _SETTLE_S)
            arguments = [paths[deed]]
            if deeds[deed] in ("replace", "append"):
                arguments.append("new")
            began = time.time()
            other.call(_MODULE, "act", deeds[deed], *arguments, timeout_s=240)
            return time.time() - began

        found = {deed: pool.submit(timed, deed) for deed in deeds}
    times = ", ".join(f"{deed}: {took.result():.0f} s" for deed, took in found.items())
    return [f"{number} delegations held by a client that was killed", f"another client: {times}"]
