"""One dataclass of `hpc_elastic.config` from one mapping of the composed config.

The dataclass is the schema: a field's name is the key, its annotation the type. Every error is
collected, so that a user sees all that is wrong at once.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_elastic.errors import ConfigError, near_miss

T = TypeVar("T")
type_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""Annotations, evaluated once: that takes longer than all else that is read of a run."""
UNSET = "???"
"""OmegaConf's mark of a key without a value; ours take their default then."""


@dataclass(frozen=True)
class Given:
    """A value under its dotted key, and whether it was typed on the command line."""

    key: str
    value: Any
    typed: bool = False

    def refuse(self, remedy: str) -> ConfigError:
        """Return the error that names this key and value."""
        return ConfigError(self.key, self.value, remedy)


Parser = Callable[[Given], object]


@dataclass
class Reader:
    """Reads groups of settings and collects what is wrong with them.

    Attributes:
        typed: The dotted keys whose values stand on the command line.
        parsers: Keys that are more than their annotation says.
        elsewhere: Where a key that does not exist here does exist: the remedy to give.
        errors: What was refused so far.
    """

    typed: frozenset[str] = frozenset()
    parsers: Mapping[str, Parser] = field(default_factory=dict)
    elsewhere: Callable[[str], str | None] = lambda key: None
    errors: list[ConfigError] = field(default_factory=list)

    def given(self, key: str, value: object) -> Given:
        """Pair a value with where it came from."""
        return Given(key, value, key in self.typed)

    def attempt(self, parse: Callable[[], T]) -> T | None:
        """Return what ``parse`` returns; None if it refuses, which is recorded."""
        try:
            return parse()
        except ConfigError as e:
            self.errors.append(e)
            return None

    def group(self, cls: type[T], raw: object, path: str) -> T:
        """Return the dataclass with all values that could be read, defaults for the rest."""
        if raw is None or raw == UNSET:
            raw = {}
        if not isinstance(raw, Mapping):
            self.errors.append(ConfigError(path, raw, "allowed is a mapping of keys to values"))
            raw = {}
        hints = type_hints(cls)
        for name in raw:
            if name not in hints:
                self.errors.append(self._unknown(f"{path}.{name}", raw[name], hints))
        values: dict[str, Any] = {
            name: self._field(hint, self.given(f"{path}.{name}", raw[name]))
            for name, hint in hints.items()
            if name in raw and raw[name] != UNSET
        }
        return cls(**values)

    def _field(self, hint: object, given: Given) -> object:
        if isinstance(hint, type) and is_dataclass(hint):
            return self.group(hint, given.value, given.key)
        return self.attempt(lambda: convert(hint, given, self.parsers.get(given.key)))

    def _unknown(self, key: str, value: object, hints: Mapping[str, Any]) -> ConfigError:
        group, _, name = key.rpartition(".")
        hint = self.elsewhere(key) or near_miss(name, hints)
        return ConfigError(key, value, f"no such key{hint or f'; {group} has ' + ', '.join(hints)}")


def convert(hint: object, given: Given, parser: Parser | None = None) -> object:
    """Return the value as its annotation wants it, through the key's own parser if it has one.

    Raises:
        ConfigError: it can not be read as that.
    """
    optional = type(None) in get_args(hint)
    if given.value is None:
        if optional:
            return None
        if (empty := get_origin(hint)) in (list, dict):
            return empty()
    if parser is not None:
        return parser(given)
    if get_origin(hint) is Literal:
        return choice(given, get_args(hint))
    if optional:
        hint = _only(hint)
        return convert(hint, given)
    return _CONVERTERS[hint](given)


def _only(hint: object) -> object:
    """Return X of ``X | None``."""
    assert get_origin(hint) in (Union, types.UnionType)
    (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
    return inner


def choice(given: Given, allowed: tuple[str, ...]) -> str:
    """Return one of a few words.

    Raises:
        ConfigError: it is another.
    """
    if given.value in allowed and isinstance(given.value, str):
        return given.value
    hint = near_miss(str(given.value), allowed)
    raise given.refuse(f"allowed is {' or '.join(allowed)}{hint}")


def boolean(given: Given) -> bool:
    """Return a truth value; texts are not guessed at."""
    if not isinstance(given.value, bool):
        raise given.refuse("allowed is true or false")
    return given.value


def integer(given: Given) -> int:
    """Return a whole number, which may stand in quotes."""
    value = given.value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise given.refuse("allowed is a whole number")
    return value


def number(given: Given) -> float:
    """Return a finite number, which may stand in quotes."""
    try:
        value = math.nan if isinstance(given.value, bool) else float(given.value)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise given.refuse("allowed is a number")
    return value


def text(given: Given) -> str:
    """Return one line of text.

    A number from YAML is refused: what was written may be lost (``0123`` is 83 there).
    """
    value = given.value
    if isinstance(value, int) and not isinstance(value, bool) and given.typed:
        value = str(value)
    if isinstance(value, bool | int | float):
        raise given.refuse("allowed is a text; put it in quotes, so that YAML leaves it as it is")
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise given.refuse("allowed is a text of one line, not empty")
    return value


def texts(given: Given) -> list[str]:
    """Return a list of texts; a text of a list may have several lines."""
    if not isinstance(given.value, list | tuple):
        raise given.refuse("allowed is a list of texts, such as ['one', 'two']")
    for item in given.value:
        if not isinstance(item, str):
            raise given.refuse(f"allowed is a list of texts; {item!r} is none, put it in quotes")
    return list(given.value)


_CONVERTERS: dict[object, Parser] = {
    bool: boolean,
    int: integer,
    float: number,
    str: text,
    list[str]: texts,
}
