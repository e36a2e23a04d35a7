"""The JSON form of messages, which are dataclasses (pure).

A message is a JSON object: the fields of its class, and the ``type`` of the class. A type or a
field of another version is ignored; a message without one of its fields, or with one that cannot be
read by its annotation, is malformed. A field may have another JSON form than its value
(`json_form`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Any, ClassVar, TypeVar

Json = dict[str, Any]
T = TypeVar("T")
Convert = Callable[[Any, float], Any]
"""It is given the Unix time of this node's clock, too."""

LEFT_OUT: dict[str, Any] = {"is_left_out": True}
"""Metadata of a field that is not sent where it has its default."""
_READ: Mapping[str, Callable[[Any], Any]] = {
    "int": int, "float": float, "str": str, "bool": bool,
    "int | None": lambda raw: None if raw is None else int(raw),
    "str | None": lambda raw: None if raw is None else str(raw),
    "tuple[int, ...]": tuple, "tuple[str, ...]": tuple,
}  # fmt: skip


class Message:
    """Base of the messages of a protocol; the name of a class is its ``type`` unless it has one."""

    type_name: ClassVar[str]

    def __init_subclass__(cls, type_name: str = "") -> None:
        cls.type_name = type_name or cls.__name__


M = TypeVar("M", bound=Message)


def table_of(*kinds: type[M]) -> dict[str, type[M]]:
    """Return these classes by the ``type`` of their messages."""
    return {kind.type_name: kind for kind in kinds}


def json_form(read: Convert, write: Convert | None = None) -> dict[str, Any]:
    """Return the metadata of a field with another JSON form."""
    return {"read": read, "write": write}


def pack(message: Message, now: float = 0.0) -> Json:
    """Return a message as a JSON object; `asdict` copies deeply, and is slower than a signature."""
    packed = {"type": message.type_name, **vars(message)}
    writers = _writers(type(message))  # type: ignore[arg-type]  # a class is hashable
    for name, write, is_left_out, default in writers:
        if is_left_out and packed[name] == default:
            del packed[name]
        elif write is not None:
            packed[name] = write(packed[name], now)
    return packed


def unpack(raw: Json, types: Mapping[str, type[M]], now: float = 0.0) -> M | None:
    """Return the message in a JSON object; None if its type is of another version.

    Raises ValueError if the object is malformed: the peer is no process of a run.
    """
    kind = types.get(str(raw.get("type")))
    if kind is None:
        return None
    try:
        return read_fields(kind, raw, now)
    except (TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"malformed message {raw['type']!r}: {e}") from e


def read_fields(kind: type[T], raw: Json, now: float = 0.0) -> T:
    """Return a dataclass of the fields in a JSON object; TypeError if one is missing."""
    readers = _readers(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{name: read(raw[name], now) for name, read in readers if name in raw})


@cache
def _readers(kind: type[Any]) -> list[tuple[str, Convert]]:
    return [(f.name, _reader(f)) for f in fields(kind)]


def _reader(of: Field[Any]) -> Convert:
    if "read" in of.metadata:
        read: Convert = of.metadata["read"]
        return read
    convert = _READ.get(str(of.type))
    return lambda raw, now: raw if convert is None else convert(raw)


@cache
def _writers(kind: type[Any]) -> list[tuple[str, Convert | None, bool, Any]]:
    found = (f for f in fields(kind) if f.metadata)
    return [
        (f.name, f.metadata.get("write"), "is_left_out" in f.metadata, f.default) for f in found
    ]
