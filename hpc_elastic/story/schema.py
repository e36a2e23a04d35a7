"""What is written down of a kind of event, and whether an event is as it should be (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_elastic.events import VERSION

Type = Literal["text", "integer", "number", "flag", "texts", "members", "ranks"]


@dataclass(frozen=True)
class Field:
    """One field of a kind of event.

    Attributes:
        name: Its key.
        type: ``texts`` is a list of text; ``members`` a list of agents as a round has them;
            ``ranks`` a list of objects about ranks.
        meaning: What it says, with its unit.
        optional: It may be absent or null; the meaning says what that means.
    """

    name: str
    type: Type
    meaning: str
    optional: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Attributes:
        name: What stands in ``kind``.
        meaning: One line.
        when: When it is written.
        by: Who writes it.
        fields: Besides those that all events have.
    """

    name: str
    meaning: str
    when: str
    by: str
    fields: tuple[Field, ...] = ()


COMMON = (
    Field("v", "integer", f"version of this schema: {VERSION}"),
    Field("time", "number", "when it happened, in Unix seconds, by the clock of the writer's node"),
    Field("kind", "text", "what happened"),
    Field("task", "text", "whom it concerns: the array task; else, the task that writes it"),
)
"""The fields of every event."""


def problems(event: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """Tell what is wrong with an event; nothing is the usual case.

    Args:
        event: A line of an event log.
        kinds: Those that there are, by name.

    Returns:
        Sentences that name the kind and the field.
    """
    name = event.get("kind")
    kind = kinds.get(str(name))
    if kind is None:
        return [f"{name!r} is no kind of event: describe it in hpc_elastic/story/kinds.py"]
    fields = {field.name: field for field in (*COMMON, *kind.fields)}
    found = [*_wrong(event, fields.values()), *_unknown(event, fields)]
    if event.get("v") not in (None, VERSION):
        found.append(f"v is {event['v']!r}, not {VERSION}")
    return [f"{name}: {problem}" for problem in found]


def fits(event: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bool:
    """Tell whether a reader can rely on an event: what belongs to its kind is there, and as it is.

    What a newer version has added does not matter, and kinds that are not known are passed over
    by their readers.
    """
    kind = kinds.get(str(event.get("kind")))
    return kind is None or not any(_wrong(event, kind.fields))


def _wrong(event: Mapping[str, Any], fields: Iterable[Field]) -> Iterator[str]:
    for field in fields:
        value = event.get(field.name)
        if value is None:
            if not field.optional:
                yield f"{field.name} is missing"
        elif not _IS[field.type](value):
            yield f"{field.name} is {value!r}, which is no {field.type}"


def _unknown(event: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[str]:
    return (f"{name} is no field of it" for name in event if name not in fields)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_members(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_member, value))


def _is_member(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), str) for key in ("task", "host"))
        and all(_is_integer(value.get(key)) for key in ("attempt", "slot", "nproc"))
    )


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and _is_integer(m.get("rank")) for m in value
    )


_IS: dict[Type, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "flag": lambda value: isinstance(value, bool),
    "texts": _is_texts,
    "members": _is_members,
    "ranks": _is_ranks,
}
