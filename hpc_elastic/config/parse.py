"""Values of settings: a dataclass of `hpc_elastic.config.schema` from a mapping of the config.

The dataclass is the schema: a field's name is the key, its annotation the type. All errors are
collected, so that a user sees them at once.

The conversion is stricter than that of OmegaConf's structured configs, which know no ``Literal``,
stop at the first error, and accept ``yes`` as a truth value or 0123 as the text "83".

YAML 1.1 reads an unquoted ``1:16`` as the base-60 number 76 and ``24:00:00`` as 86400. Which of the
two was written is lost then. Such an integer is refused if it comes from YAML; in quotes, or on the
command line (where Hydra's grammar makes a text of ``1:16``), it stands for itself. Source:
https://yaml.org/type/int.html
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from hpc_elastic.config.schema import BACKENDS, NodeRange, Nproc, RunSettings
from hpc_elastic.errors import ConfigError, near_miss

T = TypeVar("T")
type_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Annotations, evaluated once: that takes longer than reading all values of a run."""
_hints_with_forms: Callable[[Any], dict[str, Any]] = cache(
    partial(typing.get_type_hints, include_extras=True)
)
_origin_of: Callable[[Any], Any] = cache(get_origin)
_args_of: Callable[[Any], tuple[Any, ...]] = cache(get_args)
UNSET = "???"
"""OmegaConf's mark of a key without a value; such a key takes its default."""


@dataclass(frozen=True)
class Given:
    """A value under its dotted key, and whether it was given on the command line."""

    key: str
    value: Any
    typed: bool = False

    def refuse(self, remedy: str) -> ConfigError:
        """Return the error that names this key and value."""
        return ConfigError(self.key, self.value, remedy)


Parser = Callable[[Given], object]


@dataclass
class GroupReader:
    """Reads groups of settings and collects the errors.

    Attributes:
        forms: Parsers of the forms that fields have beyond their types.
        typed: The dotted keys that were given on the command line.
        elsewhere: Returns where an unknown key exists instead, as the end of the error.
    """

    forms: Mapping[str, Parser]
    typed: frozenset[str] = frozenset()
    elsewhere: Callable[[Given], str | None] = lambda given: None
    errors: list[ConfigError] = field(default_factory=list)

    def attempt(self, parse: Callable[[], T]) -> T | None:
        """Return the result of ``parse``; None if it refuses, which is recorded."""
        try:
            return parse()
        except ConfigError as e:
            self.errors.append(e)
            return None

    def group(self, cls: type[T], raw: object, path: str) -> T:
        """Return the dataclass with all values that can be read, and defaults for the others."""
        if raw is None or raw == UNSET:
            raw = {}
        if not isinstance(raw, Mapping):
            self.errors.append(ConfigError(path, raw, "allowed is a mapping of keys to values"))
            raw = {}
        hints = _hints_with_forms(cls)
        for name in raw:
            if name not in hints:
                self.errors.append(self._unknown(Given(f"{path}.{name}", raw[name]), hints))
        values: dict[str, Any] = {}
        for name, hint in hints.items():
            if name in raw and raw[name] != UNSET:
                key = f"{path}.{name}"
                values[name] = self._field(hint, Given(key, raw[name], key in self.typed))
        return cls(**values)

    def _field(self, hint: object, given: Given) -> object:
        parser: Parser | None = None
        if get_origin(hint) is Annotated:
            hint, form = get_args(hint)
            parser = self.forms[form]
        if isinstance(hint, type) and is_dataclass(hint):
            return self.group(hint, given.value, given.key)
        item = get_args(hint)[0] if get_origin(hint) is list else None
        if isinstance(item, type) and is_dataclass(item):
            return self._groups(item, given)
        return self.attempt(lambda: convert(hint, given, parser))

    def _groups(self, cls: type[T], given: Given) -> list[T]:
        """Return a list of dataclasses; what is given on the command line is the whole list."""
        if given.value is None:
            return []
        if not isinstance(given.value, Sequence) or isinstance(given.value, str):
            self.errors.append(given.refuse("allowed is a list of mappings of keys to values"))
            return []
        numbered = [(f"{given.key}.{number}", raw) for number, raw in enumerate(given.value)]
        keys = [f"{path}.{name}" for path, _ in numbered for name in type_hints(cls)]
        reader = GroupReader(self.forms, frozenset(keys if given.typed else ()), errors=self.errors)
        return [reader.group(cls, raw, path) for path, raw in numbered]

    def _unknown(self, given: Given, hints: Mapping[str, Any]) -> ConfigError:
        group, _, name = given.key.rpartition(".")
        hint = self.elsewhere(given) or near_miss(name, hints)
        return given.refuse(f"no such key{hint or f'; {group} has ' + ', '.join(hints)}")


_LARGEST = 1 << 63


def restored(hint: Any, value: Any) -> Any:
    """Return a value from a JSON file in the type of its annotation (pure).

    For values from a file that `convert` need not convert. An object becomes a dataclass, whose
    absent keys have their defaults. A number is finite, and an integer has at most 64 bits: Python
    fails at larger ones in many places.
    """
    origin, args = _origin_of(hint), _args_of(hint)
    kind, is_union = type(value), origin in (Union, UnionType)
    if kind in (str, bool, NoneType) and (kind in args if is_union else kind is hint):
        return value  # most values; what follows takes longer
    if isinstance(value, dict) and is_dataclass(hint):
        hints = type_hints(hint)
        return cast(type, hint)(**{name: restored(hints[name], v) for name, v in value.items()})
    if origin is list and isinstance(value, list):
        return [restored(args[0], item) for item in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(map(restored, args, value))
    if is_union:
        for arg in reversed(args):  # None first
            with suppress(KeyError, TypeError, ValueError):
                return restored(arg, value)
    elif origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
    elif isinstance(value, int) and hint in (int, float):
        if not isinstance(value, bool) and abs(value) < _LARGEST:
            return value
    elif isinstance(value, float) and hint is not Any:
        if hint is float and math.isfinite(value):
            return value
    elif hint is Any or isinstance(value, origin or hint):
        return value
    raise ValueError("a value has a wrong type")


def restored_settings(config: Mapping[str, Any]) -> RunSettings:
    """Return the settings that `RunSettings.as_config` has returned, unchecked (pure).

    Raises KeyError, TypeError or ValueError if they are no such settings.
    """
    launcher = dict(config["launcher"])
    backend = BACKENDS[launcher.pop("backend")]
    nodes = parse_nodes(config["nodes"], from_yaml=False)
    nproc, ft = restored(Nproc, config["nproc_per_node"]), restored(bool, config["ft"])
    return RunSettings(nodes, nproc, restored(backend, launcher), ft)


def convert(hint: object, given: Given, parser: Parser | None = None) -> object:
    """Return the value in its annotation's type, by the key's own parser if any; or ConfigError."""
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
    if optional:  # X of ``X | None``
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return convert(inner, given)
    return _CONVERTERS[hint](given)


def choice(given: Given, allowed: tuple[str, ...]) -> str:
    """Return one of a few words; YAML reads ``on`` and ``off`` as truth values."""
    word = ("off", "on")[given.value] if isinstance(given.value, bool) else given.value
    if word in allowed and isinstance(word, str):
        return word
    hint = near_miss(str(given.value), allowed)
    raise given.refuse(f"allowed is {' or '.join(allowed)}{hint}")


def boolean(given: Given) -> bool:
    """Return a truth value; no text is one."""
    if not isinstance(given.value, bool):
        raise given.refuse("allowed is true or false")
    return given.value


def integer(given: Given) -> int:
    """Return a whole number, which may be in quotes."""
    value = given.value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise given.refuse("allowed is a whole number")
    return value


def number(given: Given) -> float:
    """Return a finite number, which may be in quotes."""
    try:
        value = math.nan if isinstance(given.value, bool) else float(given.value)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise given.refuse("allowed is a number")
    return value


def text(given: Given) -> str:
    """Return one line of text. A number from YAML is refused: ``0123`` is 83 there."""
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


BASE = 60
NODES = "a count such as 4, a range such as '1:16', or with multiples '4:16:4', at least 1"
TIME = "minutes, 'MM:SS', 'HH:MM:SS', 'D-HH', 'D-HH:MM', 'D-HH:MM:SS' or 'UNLIMITED'"
NPROC_WORDS = ("auto", "gpu", "cpu")

_TIME = re.compile(r"\d+|\d+:[0-5]?\d(:[0-5]?\d)?|\d+-\d+(:[0-5]?\d){0,2}")


def parse_nodes(value: object, *, from_yaml: bool) -> NodeRange:
    """Return the range of nodes of ``4``, ``'4'``, ``'1:16'`` or ``'4:16:4'``; or ConfigError.

    With ``from_yaml``, YAML may have read a range as a base-60 number.
    """
    if from_yaml and isinstance(value, int) and value > BASE and value % BASE:
        low, high = divmod(value, BASE)
        typed, meant = f"{low}:{high}", f"{low} to {high} nodes"
        first, second = divmod(low, BASE)
        if 0 < first <= second and high > 1 and not (first % high or second % high):
            typed = f"{first}:{second}:{high}"
            meant = f"{first} to {second} nodes in multiples of {high}"
            low, high = first, second
        why = f"write nodes: '{typed}' for {meant}"
        if low > high:
            why = f"a range of nodes has the smaller number first; write nodes: '{high}:{low}'"
            why += " for that"
        yaml = f"unquoted in YAML, {typed} is the base-60 number {value}"
        exact = f"nodes: '{value}' for exactly {value} nodes"
        raise ConfigError("nodes", value, f"{yaml}; {why}, or {exact}")
    m = re.fullmatch(r"(\d+)(?::(\d+)(?::(\d+))?)?", _text(value))
    low, high, unit = (int(m[1]), int(m[2] or m[1]), int(m[3] or 1)) if m else (0, 0, 0)
    if low < 1 or unit < 1:
        raise ConfigError("nodes", value, f"allowed is {NODES}")
    if low > high:
        remedy = f"min is above max; write nodes: '{NodeRange(high, low, unit)}'"
        raise ConfigError("nodes", value, remedy)
    if low % unit or high % unit:
        low, high = (-(-count // unit) * unit for count in (low, high))
        why = f"min and max must be multiples of {unit}, the number of nodes that work together"
        raise ConfigError("nodes", value, f"{why}; write nodes: '{low}:{high}:{unit}'")
    return NodeRange(low, high, unit)


def parse_time(value: object, *, from_yaml: bool, key: str = "launcher.time") -> str:
    """Return a wall time in a form that sbatch accepts; an integer is minutes; or ConfigError.

    With ``from_yaml``, YAML may have read ``24:00:00`` as a base-60 number.
    """
    if from_yaml and isinstance(value, int) and value >= BASE:
        minutes, seconds = divmod(value, BASE)
        clock = f"{minutes}:{seconds:02}"
        if minutes >= BASE:
            clock = f"{minutes // BASE}:{minutes % BASE:02}:{seconds:02}"
        name = key.rpartition(".")[2]
        yaml = f"unquoted in YAML, {clock} is the base-60 number {value}"
        both = f"write {name}: '{clock}' for that clock time, or {name}: '{value}' for {value}"
        raise ConfigError(key, value, f"{yaml}; {both} minutes")
    text = _text(value)
    if text.upper() == "UNLIMITED":
        return "UNLIMITED"
    if not _TIME.fullmatch(text) or not text.strip("0:-"):
        raise ConfigError(key, value, f"allowed is {TIME}")
    return text


def time_limit_s(text: str) -> float | None:
    """Return the seconds of a wall time of a form in `TIME` (pure); None for UNLIMITED."""
    m = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip(), re.ASCII)
    if m is None:
        return None
    days, *rest = m.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        parts = [*parts, 0, 0]
    elif len(parts) < 3:  # minutes, with or without seconds
        parts = [0, *parts, 0]
    hours, minutes, seconds = parts[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def gpus_in_gres(gres: object) -> int | None:
    """Return the number of GPUs of a node in a value of --gres; None if it names none.

    GPUs of all types count together: ``lustre:1,gpu:a100:2,gpu:h100`` are three.
    Source: https://slurm.schedmd.com/sbatch.html#OPT_gres
    """
    requests = str(gres).replace("gres/", "").split(",")
    gpus = [request.split(":") for request in requests if re.match("gpu(:|$)", request)]
    counts = [int(words[-1]) if words[-1].isdecimal() else 1 for words in gpus]
    return sum(counts) if counts else None


def parse_nproc(value: object) -> Nproc:
    """Return the number of workers of a node: at least 1, or one of the three words."""
    if value == "auto" or value == "gpu" or value == "cpu":
        return value
    text = _text(value)
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    hint = near_miss(text, NPROC_WORDS)
    remedy = f"allowed is a count of at least 1, auto, gpu or cpu{hint}"
    raise ConfigError("nproc_per_node", value, remedy)


def _text(value: object) -> str:
    """Return a text or a whole number as text; empty for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    return str(value).strip()
