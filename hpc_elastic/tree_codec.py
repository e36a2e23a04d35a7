"""JSON form of a state tree, which gives back the same types (without torch and pickle).

JSON has no tuples, sets, bytes, complex numbers, infinity, not-a-number, and no keys but strings.
Such a value is an object with the key ``!``: ``{"!": "tuple", "of": [1, 2]}``. Everything else
stands as it is, so that a manifest can be read by eye. A *leaf*, such as a tensor, has memory that
is stored or sent elsewhere: the caller gives it a kind and JSON, and gets both back.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from hpc_elastic.errors import ConfigError

_MARK = "!"
_REMEDY = (
    "a state takes tensors, NumPy arrays and numbers, None, bool, int, float, complex, str, bytes, "
    "timedelta, and list, tuple, set and dict of them. Convert it, or give the object state_dict() "
    "and load_state_dict()"
)
_MAX_DEPTH = 100  # Python's readers and writers of JSON fail at some hundred levels of nesting
_MAX_BITS = 2000
"""Longer numbers stand as hexadecimal digits: Python may refuse to convert more than 640 decimal
ones (`sys.set_int_max_str_digits`)."""
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_MAPPING_NAMES = {kind: name for name, kind in _MAPPINGS.items()} | {defaultdict: "defaultdict"}
_FACTORIES: dict[str, Any] = {
    f.__name__: f
    for f in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
"""Of a defaultdict: any other is code."""
_NAMESPACES: dict[str, Any] = {"namespace": Namespace, "simple": SimpleNamespace}
"""What argparse has read, among the arguments of a function."""
_SETS: dict[str, Any] = {"set": set, "frozenset": frozenset}

Encoded = tuple[str, Any]  # a kind and JSON
LeafOf = Callable[[str, object], Encoded | None]
"""Returns the kind and JSON of the leaf at a path; None if the object is no leaf."""


def join(path: str, key: object) -> str:
    """Return the path of an element, as in a JSON pointer (RFC 6901)."""
    return f"{path}/{escape(key)}"


def escape(key: object) -> str:
    """Return a key without slashes."""
    return str(key).replace("~", "~0").replace("/", "~1")


def encode(tree: object, path: str, leaf_of: LeafOf, depth: int = 0) -> Any:
    """Return the JSON form of a tree.

    A tree is any nesting of Python's own types, of NumPy's numbers, of torch's sizes, types and
    devices, and of leaves. ``leaf_of`` is called for each object of another type, with its path
    from ``path`` on. Keys, and elements of sets, have no path, so they cannot be leaves. Raises
    ConfigError, with the path, if an object has another type, or is nested too deep.
    """
    kind: Any = type(tree)
    value: Any = tree
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return _marked("int", hex(value)) if value.bit_length() > _MAX_BITS else value
    if depth > _MAX_DEPTH:
        remedy = f"it is nested more than {_MAX_DEPTH} deep, or contains itself: make it flatter"
        raise ConfigError(f"state: {path:.80}...", kind, remedy)
    if kind is float:
        return value if math.isfinite(value) else _marked("float", repr(value))
    if kind in (list, tuple):
        elements = [encode(v, join(path, i), leaf_of, depth + 1) for i, v in enumerate(value)]
        return elements if kind is list else _marked("tuple", elements)
    if kind in (set, frozenset):  # each process has another order: sort
        of_set = (encode(v, path, _no_leaf, depth + 1) for v in value)
        return _marked(kind.__name__, sorted(of_set, key=json.dumps))
    if kind in _MAPPING_NAMES:
        try:
            paths = [join(path, k) for k in value]
        except ValueError as e:  # a number of thousands of digits
            raise ConfigError(f"state: {path or '/'}", kind, f"a key has no text ({e})") from None
        below = zip(value.values(), paths, strict=True)
        values = [encode(v, at, leaf_of, depth + 1) for v, at in below]
        if kind is dict and all(type(k) is str and k != _MARK for k in value):
            return dict(zip(value, values, strict=True))
        keys = [encode(k, f"{path} (key {k!r:.40})", _no_leaf, depth + 1) for k in value]
        pairs = [list(p) for p in zip(keys, values, strict=True)]
        if kind is defaultdict:
            return _marked("defaultdict", [_name_factory(value, path), pairs])
        return _marked(_MAPPING_NAMES[kind], pairs)
    found = _encode_plain(value) or leaf_of(path, value)
    if found is None:
        raise ConfigError(f"state: {path or '/'}", kind, _REMEDY)
    return _marked(*found)


def decode(value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """Return the tree of a JSON form.

    ``leaf`` returns the leaf of a kind and JSON; it raises KeyError for an unknown kind. Raises
    ValueError if `encode` never returned this.
    """
    try:
        return _decode(value, leaf)
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"not an encoded state: {e!r} in {value!r:.80}") from e


def map_values(tree: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return a decoded tree in which a function has replaced all but lists, tuples and dicts."""
    if isinstance(tree, dict):
        mapped = {k: map_values(v, value_of) for k, v in tree.items()}
        return (
            defaultdict(tree.default_factory, mapped)
            if type(tree) is defaultdict
            else type(tree)(mapped)
        )
    if type(tree) in (list, tuple):
        return type(tree)(map_values(v, value_of) for v in tree)
    return value_of(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield all but lists, tuples and dicts of a tree, of a decoded one or of any other."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for element in tree:
            yield from leaves(element)
    else:
        yield tree


def _marked(kind: str, of: Any) -> dict[str, Any]:
    return {_MARK: kind, "of": of}


def _name_factory(mapping: defaultdict[Any, Any], path: str) -> str | None:
    factory = mapping.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        remedy = (
            f"a defaultdict of {', '.join(_FACTORIES)} or None can be kept: convert it to a dict"
        )
        raise ConfigError(f"state: {path or '/'}", factory, remedy)
    return name


def _no_leaf(_path: str, _value: object) -> None:
    return None


def _encode_plain(value: Any) -> Encoded | None:
    """Return a value of other types that have no memory of their own; None if it is none."""
    if type(value) is complex:
        return "complex", repr(value)
    if type(value) is timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    if type(value) in (bytes, bytearray):
        return type(value).__name__, base64.b64encode(value).decode()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy and isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return "number", [value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    if torch and type(value) in (torch.Size, torch.dtype, torch.device):
        name = {torch.Size: "size", torch.dtype: "dtype", torch.device: "device"}[type(value)]
        return name, list(value) if name == "size" else str(value).removeprefix("torch.")
    return None


def _decode(value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(v, leaf) for v in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {k: _decode(v, leaf) for k, v in value.items()}
    kind, of = value[_MARK], value["of"]
    if kind == "tuple":
        return tuple(_decode(v, leaf) for v in of)
    if kind in _SETS:
        return _SETS[kind](_decode(v, leaf) for v in of)
    if kind == "defaultdict":
        name, pairs = of
        factory = None if name is None else _FACTORIES[name]
        return defaultdict(factory, {_decode(k, leaf): _decode(v, leaf) for k, v in pairs})
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(k, leaf): _decode(v, leaf) for k, v in of})
    plain = _PLAIN.get(kind)
    return leaf(kind, of) if plain is None else plain(of)


def _decode_number(of: Any) -> Any:
    import numpy as np  # a process that stored one has it

    dtype, raw = of
    return np.frombuffer(base64.b64decode(raw), dtype=np.dtype(dtype))[0]


def _decode_of_torch(kind: str, of: Any) -> Any:
    import torch

    if kind != "dtype":
        return torch.Size(of) if kind == "size" else torch.device(of)
    found = getattr(torch, of, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no type {of}")
    return found


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda of: int(of, 16),
    "float": float,
    "complex": complex,
    "timedelta": lambda of: timedelta(*of),
    "bytes": lambda of: base64.b64decode(of, validate=True),
    "bytearray": lambda of: bytearray(base64.b64decode(of, validate=True)),
    "number": _decode_number,
    "size": lambda of: _decode_of_torch("size", of),
    "dtype": lambda of: _decode_of_torch("dtype", of),
    "device": lambda of: _decode_of_torch("device", of),
}
