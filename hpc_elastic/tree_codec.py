"""What is no tensor in a checkpoint, as JSON that gives back the same types (pure, without torch).

JSON knows no tuples, no keys but texts, no infinity and not-a-number. What it lacks is an object
with the key ``!``, such as ``{"!": "tuple", "of": [1, 2]}``; a tensor's place is ``{"!": "tensor",
"of": "<its name>"}``. Everything else stands as it is, so that the file can be read by eye.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_elastic.errors import CheckpointCorruptError, ConfigError

_MARK = "!"
_REMEDY = (
    "a checkpoint takes tensors, NumPy arrays and numbers, and int, float, str, bool, None, list, "
    "tuple and dict of them. Convert it, or give the object state_dict() and load_state_dict()"
)
_DEEPEST = 100
"""Nesting: Python's readers and writers of JSON fail at some hundred levels."""
_MOST_BITS = 2000
"""Longer numbers stand as hexadecimal digits: Python may refuse to convert more than 640 decimal
ones (`sys.set_int_max_str_digits`)."""
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
_NAMES = {kind: name for name, kind in _MAPPINGS.items()}


@dataclass(frozen=True)
class Ref:
    """The place of a tensor in a tree of values."""

    fqn: str
    """Name of the tensor in the checkpoint."""
    kind: Literal["tensor", "parameter", "array", "scalar"] = "tensor"
    """A torch tensor, a parameter, a NumPy array, or a NumPy number."""


RefOf = Callable[[str, object], Ref | None]
"""Gives the place of a tensor; None if an object (at that path) is none."""


def join(path: str, key: object) -> str:
    """Return the path of an element: as in a JSON pointer (RFC 6901), but without its first /."""
    return f"{path}/{escape(key)}"


def escape(key: object) -> str:
    """Return a key so that it has no slash."""
    return str(key).replace("~", "~0").replace("/", "~1")


def encode(tree: object, path: str, ref_of: RefOf, depth: int = 0) -> Any:
    """Return JSON for a tree.

    Args:
        tree: Lists, tuples and dicts of numbers, texts, None, and what ``ref_of`` knows.
        path: Of the tree, for messages and for the names of its tensors.
        ref_of: Called for each leaf that JSON has no type for.
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
        return _mark("int", hex(tree)) if is_long else tree  # type: ignore[arg-type]
    if depth > _DEEPEST:
        remedy = f"it is nested more than {_DEEPEST} deep, or contains itself: make it flatter"
        raise ConfigError(f"state: {path:.80}...", kind, remedy)
    if kind is float:
        return tree if math.isfinite(tree) else _mark("float", repr(tree))  # type: ignore[arg-type]
    if kind is list:
        return _encode_all(tree, path, ref_of, depth)
    if kind is tuple or _is_size(tree):
        return _mark("tuple" if kind is tuple else "size", _encode_all(tree, path, ref_of, depth))
    if kind in _NAMES:
        return _encode_mapping(tree, path, ref_of, depth)  # type: ignore[arg-type]
    ref = ref_of(path, tree)
    if ref is None:
        raise ConfigError(f"state: {path}", kind, _REMEDY)
    return _mark(ref.kind, ref.fqn)


def decode(value: Any) -> Any:
    """Return the tree that was encoded, with a `Ref` where a tensor stood.

    Raises:
        CheckpointCorruptError: no encoder wrote this.
    """
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {k: decode(v) for k, v in value.items()}
    try:
        return _decode_marked(value[_MARK], value["of"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointCorruptError(f"not a stored value: {value!r:.80}") from e


def replace_refs(tree: Any, value_of: Callable[[Ref], Any]) -> Any:
    """Return a decoded tree with every `Ref` replaced."""
    if isinstance(tree, Ref):
        return value_of(tree)
    if isinstance(tree, list):
        return [replace_refs(v, value_of) for v in tree]
    if type(tree) is tuple:
        return tuple(replace_refs(v, value_of) for v in tree)
    if isinstance(tree, dict):
        return type(tree)({k: replace_refs(v, value_of) for k, v in tree.items()})
    return tree


def refs_of(tree: Any) -> list[Ref]:
    """Return every `Ref` of a decoded tree."""
    found: list[Ref] = []
    replace_refs(tree, found.append)
    return found


def _mark(kind: str, of: object) -> dict[str, object]:
    return {_MARK: kind, "of": of}


def _is_size(tree: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(tree) is torch.Size


def _encode_all(tree: Any, path: str, ref_of: RefOf, depth: int) -> list[Any]:
    return [encode(v, join(path, i), ref_of, depth + 1) for i, v in enumerate(tree)]


def _encode_mapping(tree: Mapping[Any, Any], path: str, ref_of: RefOf, depth: int) -> Any:
    kind = type(tree)
    if kind is dict and all(type(k) is str and k != _MARK for k in tree):
        return {k: encode(v, join(path, k), ref_of, depth + 1) for k, v in tree.items()}
    pairs = [
        [_encode_key(k, path, depth + 1), encode(v, join(path, k), ref_of, depth + 1)]
        for k, v in tree.items()
    ]
    return _mark(_NAMES[kind], pairs)  # type: ignore[index]


def _encode_key(key: object, path: str, depth: int) -> Any:
    try:
        named = f"{path} (key {key!r:.40})"
    except ValueError as e:  # a number of thousands of digits
        raise ConfigError(f"state: {path}", type(key), f"a key has no text ({e})") from None
    return encode(key, named, _no_refs, depth)


def _no_refs(_path: str, _leaf: object) -> None:
    return None


def _decode_marked(kind: str, of: Any) -> Any:
    if kind in ("tensor", "parameter", "array", "scalar"):
        return Ref(str(of), kind)  # type: ignore[arg-type]
    if kind == "tuple":
        return tuple(decode(v) for v in of)
    if kind == "size":
        import torch  # whoever restores has it

        return torch.Size(of)
    if kind == "int":
        return int(of, 16)
    if kind == "float":
        return float(of)
    return _MAPPINGS[kind]({decode(k): decode(v) for k, v in of})
