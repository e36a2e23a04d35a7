"""Slurm's host lists (``n[1-3,07-09],gpu-a``) and array index sets (``1,3-5%4``). Pure.

A host list is names separated by commas; each name may hold groups of ranges in brackets, and
stands for every combination. Zeros in front are kept: ``[07-09]`` is 07 08 09. Source:
https://slurm.schedmd.com/scontrol.html (show hostnames), https://slurm.schedmd.com/job_array.html
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

MAX_EXPANDED = 1 << 16
"""More names than Slurm itself allows in one range; a malformed list may not eat the memory."""

_NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_STEPPED = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")
_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


def expand(hostlist: str) -> list[str]:
    """Return the host names of a list, in its order; ValueError if malformed or absurdly long."""
    if not hostlist:
        return []
    hosts: list[str] = []
    for name in _names(hostlist):
        hosts.extend(_combinations(name, MAX_EXPANDED - len(hosts)))
    return hosts


def _names(hostlist: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    at = 0
    while at <= len(hostlist):
        m = _NAME.match(hostlist, at)
        if m is None or (m.end() < len(hostlist) and hostlist[m.end()] != ","):
            raise ValueError(f"malformed host list {hostlist!r} at character {at + 1}")
        yield m[0]
        at = m.end() + 1


def _combinations(name: str, limit: int) -> list[str]:
    """Return every name that one bracketed name stands for; the last group runs fastest."""
    parts = [
        _numbers(part[1:-1], limit) if part.startswith("[") else [part]
        for part in re.split(r"(\[[^\]]*\])", name)
        if part
    ]
    names = list(itertools.islice(map("".join, itertools.product(*parts)), limit + 1))
    if len(names) > limit:
        raise ValueError(f"host list has more than {MAX_EXPANDED} names")
    return names


def _numbers(ranges: str, limit: int) -> list[str]:
    """Return the numbers of ``1-3,07`` as texts, padded as the first of each range is."""
    numbers: list[str] = []
    for part in ranges.split(","):
        m = _RANGE.fullmatch(part)
        if m is None or int(m[2] or m[1]) < int(m[1]):
            raise ValueError(f"malformed range {part!r} in a host list")
        low, high = int(m[1]), int(m[2] or m[1])
        if high - low >= limit:
            raise ValueError(f"host list has more than {MAX_EXPANDED} names")
        numbers.extend(f"{number:0{len(m[1])}}" for number in range(low, high + 1))
    return numbers


def compress(hosts: Iterable[str]) -> str:
    """Return the shortest list that expands to these hosts; their order may change."""
    order: dict[str, int] = {}

    def place(host: str) -> tuple[int, int, int]:
        prefix, digits = _split(host)
        return order.setdefault(prefix, len(order)), len(digits), int(digits or 0)

    return compress_in_order(sorted(dict.fromkeys(hosts), key=place))


def compress_in_order(hosts: Iterable[str]) -> str:
    """Return a list that expands to these hosts in their order, each as often as it is given."""
    parts: list[str] = []
    for (prefix, is_whole), same in itertools.groupby(
        map(_split, hosts), key=lambda host: (host[0], host[1] == "")
    ):
        if is_whole:
            parts += [prefix for _ in same]
            continue
        ranges = _ranges(digits for _, digits in same)
        parts.append(prefix + ranges if ranges.isdecimal() else f"{prefix}[{ranges}]")
    return ",".join(parts)


def _split(host: str) -> tuple[str, str]:
    """Return the name of a host before its last digits, and these."""
    m = _NUMBERED.fullmatch(host)
    return (m[1], m[2]) if m else (host, "")


def repeat_counts(numbers: Iterable[int]) -> str:
    """Return numbers as Slurm does: ``2(x3),1``."""
    groups = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    return ",".join(f"{n}(x{count})" if count > 1 else str(n) for n, count in groups)


def _ranges(numbers: Iterable[str]) -> str:
    """Join numbers that follow each other as the padding of the first counts on: ``07-09,3``."""
    runs: list[tuple[str, str]] = []
    for number in numbers:
        if runs and number == f"{int(runs[-1][1]) + 1:0{len(runs[-1][0])}}":
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in runs)


def expand_indices(indices: str) -> tuple[list[int], int | None]:
    """Return the indices of ``1,3-5:2%4``, and its limit; ValueError if malformed or cut short."""
    text, percent, limit = indices.strip("[]").partition("%")
    if percent and not limit.isdecimal():
        raise ValueError(f"malformed limit in the array indices {indices!r}")
    found: list[int] = []
    for part in text.split(","):
        m = _STEPPED.fullmatch(part)
        if m is None or int(m[2] or m[1]) < int(m[1]):
            raise ValueError(f"malformed range {part!r} in the array indices {indices!r}")
        found.extend(range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)))
    return found, int(limit) if percent else None


def compress_indices(indices: Iterable[int], limit: int | None = None) -> str:
    """Return array indices as ``--array`` and scancel take them: ``0-3,7``, with ``%limit``."""
    text = _ranges(str(index) for index in sorted(set(indices)))
    return text if limit is None else f"{text}%{limit}"
