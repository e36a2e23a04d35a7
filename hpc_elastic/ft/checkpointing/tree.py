"""A state as JSON, without pickle: what is no tensor, and where the tensors are (pure, no torch).

JSON knows no tuples, bytes, keys but texts, infinity and not-a-number. What it lacks is a list
whose first element is ``"!"``: ``["!", "tuple", [1, 2]]``; a list of the state's own that begins so
is marked itself. Leaves that Python's types do not cover (tensors, NumPy) are the caller's: it
gives each a kind of its own and JSON, and gets them back.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing.transport import HealError

_MARK = "!"
_REMEDY = (
    "a replica's state takes tensors, NumPy arrays and numbers, None, bool, int, float, complex, "
    "str, bytes, and list, tuple, set and dict of them. Convert it in the function that returns "
    "the state, and back in the one that loads it"
)
_DEEPEST = 100
"""Nesting: Python's readers and writers of JSON fail at some hundred levels."""
_MOST_BITS = 2000
"""Longer numbers stand as hexadecimal digits: Python may refuse to convert more than 640 decimal
ones (`sys.set_int_max_str_digits`)."""
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in _MAPPINGS.items()} | {defaultdict: "dict"}
"""A defaultdict comes back as a dict: its factory is code."""
_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}

LeafOf = Callable[[str, object], tuple[str, Any] | None]
"""Gives kind and JSON of an object at a path; None if it knows no such type."""


def encode(tree: object, path: str, leaf_of: LeafOf, depth: int = 0) -> Any:
    """Return JSON for a tree.

    Args:
        tree: Any nesting of Python's own types and what ``leaf_of`` knows.
        path: Of the tree, for messages; the root is ``""``.
        leaf_of: Called for each object that is none of Python's own types.
        depth: How deep in the whole it is.

    Raises:
        ConfigError: something in the tree is of another type, or is nested too deep; the message
            names its path.
    """
    kind = type(tree)
    if tree is None or kind in (bool, str):
        return tree
    if kind is int:
        is_long = tree.bit_length() > _MOST_BITS  # type: ignore[attr-defined]
        return [_MARK, "int", hex(tree)] if is_long else tree  # type: ignore[arg-type]
    if depth > _DEEPEST:
        remedy = f"it is nested more than {_DEEPEST} deep, or contains itself: make it flatter"
        raise ConfigError(f"state: {path:.80}...", kind, remedy)
    if kind is float:
        return tree if math.isfinite(tree) else [_MARK, "float", repr(tree)]  # type: ignore[arg-type]
    if kind is list:
        elements = _encode_all(tree, path, leaf_of, depth)
        return [_MARK, "list", elements] if elements[:1] == [_MARK] else elements
    if kind in _NAMES:
        return _encode_mapping(tree, path, leaf_of, depth)
    return [_MARK, *_encode_other(tree, path, leaf_of, depth)]


def decode(value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """Return the tree that was encoded.

    Args:
        value: What `encode` returned.
        leaf: Given kind and JSON of a leaf, returns it; raises KeyError for an unknown kind.

    Raises:
        HealError: no encoder wrote this.
    """
    if isinstance(value, dict):
        return {k: decode(v, leaf) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    if value[:1] != [_MARK]:
        return [decode(v, leaf) for v in value]
    try:
        _, kind, of = value
        return _decode_marked(kind, of, leaf)
    except (KeyError, TypeError, ValueError) as e:
        raise HealError(f"not a state that a peer of this version sent: {value!r:.80}") from e


def _encode_other(tree: Any, path: str, leaf_of: LeafOf, depth: int) -> tuple[str, Any]:
    for name, kind in _SEQUENCES.items():
        if type(tree) is kind:
            elements = _encode_all(tree, path, leaf_of, depth)
            # Sets are in another order in each process, and are to be the same text in all.
            return name, sorted(elements, key=json.dumps) if "set" in name else elements
    if type(tree) is complex:
        return "complex", repr(tree)
    if type(tree) in (bytes, bytearray):
        return type(tree).__name__, base64.b64encode(tree).decode()
    leaf = leaf_of(path, tree)
    if leaf is None:
        raise ConfigError(f"state: {path or '/'}", type(tree), _REMEDY)
    return leaf


def _encode_all(tree: Any, path: str, leaf_of: LeafOf, depth: int) -> list[Any]:
    return [encode(v, f"{path}/{i}", leaf_of, depth + 1) for i, v in enumerate(tree)]


def _encode_mapping(tree: Any, path: str, leaf_of: LeafOf, depth: int) -> Any:
    if type(tree) in (dict, defaultdict) and all(type(k) is str for k in tree):
        return {k: encode(v, f"{path}/{k}", leaf_of, depth + 1) for k, v in tree.items()}
    pairs = [
        [_encode_key(k, path, depth + 1), encode(v, f"{path}/{k}", leaf_of, depth + 1)]
        for k, v in tree.items()
    ]
    return [_MARK, _NAMES[type(tree)], pairs]


def _encode_key(key: object, path: str, depth: int) -> Any:
    try:
        named = f"{path} (key {key!r:.40})"
    except ValueError as e:  # a number of thousands of digits
        raise ConfigError(f"state: {path or '/'}", type(key), f"a key has no text ({e})") from None
    return encode(key, named, _no_leaf, depth)


def _no_leaf(_path: str, _leaf: object) -> None:
    return None


def _decode_marked(kind: str, of: Any, leaf: Callable[[str, Any], Any]) -> Any:
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(v, leaf) for v in of)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(k, leaf): decode(v, leaf) for k, v in of})
    if kind == "int":
        return int(of, 16)
    if kind == "float":
        return float(of)
    if kind == "complex":
        return complex(of)
    if kind in ("bytes", "bytearray"):
        raw = base64.b64decode(of, validate=True)
        return raw if kind == "bytes" else bytearray(raw)
    return leaf(kind, of)
