"""What a function is called with, as JSON in run.json (`tree_codec`), without pickle.

Beside JSON values these are tuples, sets and the like, paths, and namespaces: the arguments that
argparse has read.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from hpc_elastic import tree_codec
from hpc_elastic.errors import ConfigError

_NAMESPACES: dict[str, Any] = {"namespace": Namespace, "simple": SimpleNamespace}


def encode(value: object, name: str) -> Any:
    """Return the JSON form of arguments called ``name``, or ConfigError for another type."""

    def leaf_of(path: str, leaf: object) -> tuple[str, Any] | None:
        if isinstance(leaf, PurePath):
            return "path", str(leaf)
        kind = next((kind for kind, cls in _NAMESPACES.items() if type(leaf) is cls), None)
        return None if kind is None else (kind, tree_codec.encode(vars(leaf), path, leaf_of))

    try:
        return tree_codec.encode(value, name, leaf_of)
    except ConfigError as e:
        remedy = (
            "workers read what a function is called with as JSON: give texts, numbers, lists, "
            "dicts, paths or the namespace of argparse, and make other objects in the function"
        )
        raise ConfigError(e.key.removeprefix("state: "), e.value, remedy) from None


def decode(value: Any) -> Any:
    """Return the arguments of a JSON form; ValueError if `encode` never returned this."""

    def leaf(kind: str, of: Any) -> Any:
        return Path(of) if kind == "path" else _NAMESPACES[kind](**decode(of))

    return tree_codec.decode(value, leaf)
