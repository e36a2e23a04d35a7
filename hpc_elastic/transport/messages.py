"""The JSON form of messages and log entries, which are dataclasses (pure).

A message is a JSON object: the fields of its class, and the ``type`` of the class. A field is read
by its annotation, unless it has a reader of its own (`json_form`). A type or a field of another
version is ignored; a message without one of its fields, or with one that cannot be read, is
malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Json = dict[str, Any]
T = TypeVar("T")
Convert = Callable[[Any, float], Any]  # it is given the Unix time of this node's clock, too

LEFT_OUT: dict[str, Any] = {"is_left_out": True}
"""Metadata of a field that is not sent where it has its default."""


class JsonMessage:
    """Base of the messages of a protocol; the name of a class is its ``type`` unless it has one."""

    type_name: ClassVar[str]

    def __init_subclass__(cls, type_name: str = "") -> None:
        cls.type_name = type_name or cls.__name__


M = TypeVar("M", bound=JsonMessage)


def table_of(*kinds: type[M]) -> dict[str, type[M]]:
    """Return these classes by the ``type`` of their messages."""
    return {kind.type_name: kind for kind in kinds}


def json_form(read: Convert | None = None, write: Convert | None = None) -> dict[str, Any]:
    """Return the metadata of a field that is read or written otherwise."""
    return {"read": read, "write": write}


def pack(message: JsonMessage, now: float = 0.0) -> Json:
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
    except (TypeError, KeyError, AttributeError, OverflowError) as e:
        raise ValueError(f"malformed message {raw['type']!r}: {e}") from e


def read_fields(kind: type[T], raw: Json, now: float = 0.0) -> T:
    """Return a dataclass of the fields in a JSON object; TypeError if one is missing."""
    return kind(**read_values(kind, raw, now))


def read_values(kind: type[T], raw: Json, now: float = 0.0) -> dict[str, Any]:
    """Return the values of the fields of a dataclass that a JSON object has."""
    readers = _readers(kind)  # type: ignore[arg-type]  # a class is hashable
    return {name: read(raw[name], now) for name, read in readers if name in raw}


@cache
def _readers(kind: type[Any]) -> list[tuple[str, Convert]]:
    hints = get_type_hints(kind)
    return [(f.name, f.metadata.get("read") or _reader(hints[f.name])) for f in fields(kind)]


def _reader(hint: Any) -> Convert:
    """Return what reads a value by its annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or origin in (dict, Literal):
        return lambda raw, now: raw
    if hint in (int, float, str, bool):
        return lambda raw, now: hint(raw)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda raw, now: read_fields(hint, raw, now)
    if origin in (Union, UnionType):
        inner = _reader(next(arg for arg in args if arg is not NoneType))
        return lambda raw, now: None if raw is None else inner(raw, now)
    readers = [_reader(arg) for arg in args if arg is not ...]
    if origin in (tuple, Sequence) and len(readers) == 1:
        (each,) = readers
        return lambda raw, now: tuple([each(item, now) for item in raw])
    if origin is tuple:
        return lambda raw, now: tuple(
            read(item, now) for read, item in zip(readers, raw, strict=True)
        )
    if origin is Mapping:
        key, value = readers
        return lambda raw, now: {key(k, now): value(v, now) for k, v in raw.items()}
    raise TypeError(f"a field of type {hint} needs a reader of its own")


@cache
def _writers(kind: type[Any]) -> list[tuple[str, Convert | None, bool, Any]]:
    found = (f for f in fields(kind) if f.metadata)
    return [
        (f.name, f.metadata.get("write"), "is_left_out" in f.metadata, f.default) for f in found
    ]
