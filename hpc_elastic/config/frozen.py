"""A config of Hydra's as plain data, and the same config again in another process.

A worker gets the config that Hydra composed: its interpolations as written, its structured types,
its flags. Nothing is pickled, and nothing is composed a second time, since the files and classes
that it was composed from may have changed by then. A frozen config has two parts:

- *values*, which Hydra writes to ``config.yaml`` too, interpolations unresolved;
- *types*, a JSON tree of what YAML cannot hold: for each node that is not what
  ``OmegaConf.create`` would make of its value, its class, its types by import path, its flags.

A resolver is called where the config is read, as by Hydra alone. Its result must not differ
between ranks and restarts if it depends on the moment, so such *calls* are recorded at the
submission (`Recorder`) and answered from the record in the workers (`answer_calls`).

The structure of OmegaConf's nodes, and its table of resolvers, are private: they are used in this
module only (`tests/pure/test_frozen_config.py`).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Union, cast

import omegaconf
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, UnionNode
from omegaconf.basecontainer import BaseContainer

from hpc_elastic.errors import ConfigError

FROZEN_FILE = "frozen.json"
"""File of the types and the calls, beside Hydra's ``config.yaml``."""

Types = dict[str, Any]
"""What is special about a node: ``kind`` (its class), ``ref``, ``object``, ``key``, ``element``
(types), ``optional``, ``flags``, ``value`` (type of an untyped value), ``keys`` (their Enum), and
``in``, the same of its children by position. Empty for a node that ``OmegaConf.create`` makes."""

_PLAIN = (bool, int, float, str, bytes)
_UNION = "|"


class Frozen(NamedTuple):
    """A config as plain data."""

    values: Any
    types: Types


# ---- nodes

_Tuple: type = getattr(omegaconf, "TupleConfig", ListConfig)
"""OmegaConf keeps tuples from 2.4 on."""
_CONTAINERS = (DictConfig, ListConfig, _Tuple)


@dataclass(frozen=True)
class Interpolation:
    """A text of a config that refers to something else, with its node and its dotted name."""

    node: Any
    name: str
    text: str

    def value(self) -> Any:
        """Return its value, as a reader of the config would get it."""
        return self.node._get_parent_container()[self.node._key()]


@dataclass
class Encoder:
    """Makes configs plain; ``lost`` are types that workers cannot import, by their first node."""

    interpolations: list[Interpolation] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def encode(self, node: Any, name: str = "", skip: Sequence[str] = ()) -> Frozen:
        """Return the node ``name`` as plain data without the keys ``skip``, or ConfigError."""
        raw, found = node._value(), self._types(node, name)
        if isinstance(node, UnionNode) and isinstance(raw, Node):
            values, inner = self.encode(raw, name)
            return Frozen(values, {**found, "in": inner} if found else inner)
        if isinstance(node, _CONTAINERS) and isinstance(raw, dict | list):
            if isinstance(raw, list):
                return Frozen(list(self._children(enumerate(raw), found, name).values()), found)
            for key in raw:
                if isinstance(key, Enum):
                    found["keys"] = self._type(type(key), name)
            kept = ((key, child) for key, child in raw.items() if key not in skip)
            return Frozen(self._children(kept, found, name), found)
        if isinstance(raw, str) and "${" in raw:
            self.interpolations.append(Interpolation(node, name, raw))
        return Frozen(self._leaf(raw, found, name), found)

    def _children(
        self, content: typing.Iterable[tuple[Any, Node]], found: Types, name: str
    ) -> dict[Any, Any]:
        values, below = {}, {}
        for at, (key, child) in enumerate(content):
            plain_key = key.name if isinstance(key, Enum) else key
            inner = f"{name}.{plain_key}" if name else str(plain_key)
            values[plain_key], special = self.encode(child, inner)
            if special:
                below[str(at)] = special
        if below:
            found["in"] = below
        return values

    def _leaf(self, raw: Any, found: Types, name: str) -> Any:
        if isinstance(raw, Enum | Path):
            kind = type(raw) if isinstance(raw, Enum) else Path
            if "kind" not in found and (written := self._type(kind, name)) is not None:
                found["value"] = written
            return raw.name if isinstance(raw, Enum) else str(raw)
        if raw is None or isinstance(raw, _PLAIN):
            return str(raw) if isinstance(raw, str) else raw
        remedy = "an object cannot be written: make it in the function, by _target_ or a resolver"
        raise ConfigError(name, raw, remedy)

    def _types(self, node: Node, name: str) -> Types:
        """Return what is special about a node itself."""
        meta: Any = node._metadata
        found: Types = {}
        if type(node).__name__ != _default_kind(node._value()):
            found["kind"] = type(node).__name__
        container = isinstance(node, _CONTAINERS)
        plain_object = {DictConfig: dict, ListConfig: list, _Tuple: tuple}.get(type(node))
        if meta.object_type is not plain_object and container:
            found["object"] = self._type(meta.object_type, name)
        if meta.ref_type is not Any and type(node) not in _BY_CLASS:
            found["ref"] = self._type(meta.ref_type, name)
        if container:
            if isinstance(node, DictConfig) and meta.key_type is not Any:
                found["key"] = self._type(meta.key_type, name)
            if meta.element_type is not Any:
                found["element"] = self._type(meta.element_type, name)
        if not meta.optional:
            found["optional"] = False
        flags = {flag: value for flag, value in (meta.flags or {}).items() if value is not None}
        if flags and not isinstance(node, UnionNode):
            found["flags"] = flags
        if type(node) in (omegaconf.EnumNode, UnionNode) and found["ref"] is None:
            return {}  # its class is lost: an untyped value
        return {key: value for key, value in found.items() if value is not None}

    def _type(self, hint: Any, name: str) -> Any:
        try:
            return _type_path(hint)
        except (AttributeError, ImportError, TypeError, ValueError):
            shown = f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', hint)}"
            self.lost.setdefault(shown, name)
            return None


_BY_CLASS = (
    omegaconf.BooleanNode, omegaconf.BytesNode, omegaconf.FloatNode, omegaconf.IntegerNode,
    omegaconf.PathNode, omegaconf.StringNode,
)  # fmt: skip
"""Classes of nodes that have one type."""


def decode(frozen: Frozen) -> Any:
    """Return the node that `Encoder.encode` has made plain; ImportError if a class has moved."""
    return _decode(frozen.values, frozen.types, None, None)


def _default_kind(raw: Any) -> str:
    """Return the class of the node that ``OmegaConf.create`` makes of a value."""
    kinds = {dict: "DictConfig", list: "ListConfig"}
    return next((name for kind, name in kinds.items() if isinstance(raw, kind)), "AnyNode")


def _decode(raw: Any, special: Types, key: Any, parent: Any) -> Any:
    kind = special.get("kind") or _default_kind(raw)
    if kind == "UnionNode":
        node: Any = UnionNode(None, _type_at(special["ref"]), key=key)
        inner = special.get("in")
        node.__dict__["_content"] = raw if inner is None else _decode(raw, inner, key, node)
    elif kind == "DictConfig":
        node = DictConfig({} if isinstance(raw, dict) else raw, key=key)
        if isinstance(raw, dict):
            enum = _type_at(special["keys"]) if "keys" in special else None
            names = getattr(enum, "__members__", {})
            pairs = [(names.get(name, name), value) for name, value in raw.items()]
            node.__dict__["_content"] = dict(_decoded(pairs, special, node))
    elif kind in ("ListConfig", "TupleConfig"):
        sequence: Any = getattr(omegaconf, kind)
        node = sequence([] if isinstance(raw, list) else raw, key=key)
        if isinstance(raw, list):
            pairs = list(enumerate(raw))
            node.__dict__["_content"] = [child for _, child in _decoded(pairs, special, node)]
    else:
        node = _decoded_leaf(kind, raw, special, key)
    meta = node._metadata
    for name, given in (("ref_type", "ref"), ("object_type", "object"), ("key_type", "key"),
                        ("element_type", "element")):  # fmt: skip
        if given in special:
            setattr(meta, name, _type_at(special[given]))
    meta.optional = special.get("optional", True)
    if "flags" in special:
        meta.flags = dict(special["flags"])
    node._set_parent(parent)
    return node


def _decoded(
    pairs: Sequence[tuple[Any, Any]], special: Types, parent: Node
) -> Iterator[tuple[Any, Any]]:
    below = special.get("in", {})
    for at, (key, raw) in enumerate(pairs):
        yield key, _decode(raw, below.get(str(at), {}), key, parent)


def _decoded_leaf(kind: str, raw: Any, special: Types, key: Any) -> Any:
    if kind == "EnumNode":
        return omegaconf.EnumNode(_type_at(special["ref"]), raw, key=key)
    if "value" in special:
        of = _type_at(special["value"])
        raw = of[raw] if issubclass(of, Enum) else of(raw)
    node_class = getattr(omegaconf, kind)
    return node_class(raw, key=key)


def whole_config(task: Frozen, hydra: Frozen) -> DictConfig:
    """Return the user's config with the ``hydra`` node in it, as Hydra composes it."""
    below = {**task.types.get("in", {}), str(len(task.values)): hydra.types}
    values = {**task.values, "hydra": hydra.values}
    return cast(DictConfig, decode(Frozen(values, {**task.types, "in": below})))


# ---- types


@lru_cache(1024)
def _type_path(hint: Any) -> Any:
    """Return the import path of a class, or a list of origin and arguments of a generic one."""
    if hint is None or hint is type(None):
        return "None" if hint is None else "types:NoneType"
    if hint is ...:
        return "builtins:Ellipsis"
    arguments = [_type_path(each) for each in typing.get_args(hint)]
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [_UNION, *arguments]
    if hint is Any or arguments:
        return [f"{hint.__module__}:{hint.__name__}", *arguments] if arguments else "typing:Any"
    module = hint.__module__
    main_spec = getattr(sys.modules["__main__"], "__spec__", None)
    if module == "__main__" and main_spec is not None:
        module = main_spec.name  # run by `python -m`: a worker imports it by this name
    path = f"{module}:{hint.__qualname__}"
    if _named(path) is not hint and module == hint.__module__:
        raise ValueError(path)
    return path


def _type_at(path: Any) -> Any:
    if isinstance(path, list):
        arguments = tuple(_type_at(each) for each in path[1:])
        origin = Union if path[0] == _UNION else _named(path[0])
        return origin[arguments]
    return _named(path)


def _named(path: str) -> Any:
    module, _, qualname = path.partition(":")
    if path == "None":
        return None
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except AttributeError as e:
        raise ImportError(f"the config has values of {qualname}, which {module} lacks") from e
    return found


# ---- calls of resolvers

_PURE = ("hydra", "python_version")
_ENV = "oc.env"


@dataclass(frozen=True)
class Call:
    """A call of a resolver with constants."""

    name: str
    args: tuple[str, ...]
    result: Any
    """What it returned at the submission, in JSON form."""
    is_fixed: bool
    """Whether all workers get this result. Otherwise it is the answer only where the worker cannot
    give one: the resolver or the variable does not exist there."""


class Recorder:
    """Records the calls of resolvers while configs of one sweep are read (login node).

    The result of a resolver depends on the moment if the resolver has a cache, as OmegaConf asks
    for in that case, or if it has another result in the next second. One wait serves all resolvers
    of the first job.
    """

    def __init__(self) -> None:
        self._depends: dict[str, bool] = {"now": True}
        self._calls: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._again: dict[str, Callable[[], Any]] = {}
        self._recorded = lru_cache(1024)(self._record)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Yield a list that holds, after the block, the calls in the block."""
        calls: list[Call] = []
        self._calls, self._again, self._called_at = {}, {}, 0.0
        resolvers = BaseContainer._resolvers
        is_pure = {n: n in _PURE or (n.startswith("oc.") and n != _ENV) for n in resolvers}
        theirs = {name: each for name, each in resolvers.items() if not is_pure[name]}
        ours = {name: self._recorded(each, name) for name, each in theirs.items()}
        resolvers.update(ours)
        try:
            yield calls
        finally:
            for name, each in theirs.items():
                if resolvers.get(name) is ours[name]:
                    resolvers[name] = each
        self._classify()
        calls += [
            Call(name, args, result, self._depends.get(name, False))
            for (name, args), result in self._calls.items()
        ]

    def _record(self, theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
        inner = inspect.getclosurevars(theirs).nonlocals
        if inner.get("use_cache"):
            self._depends[name] = True
        reads_config = any(inner.get(f"pass_{what}") for what in ("parent", "node", "root"))

        def resolver(config: Any, parent: Any, node: Any, args: Any, texts: Any) -> Any:
            result = theirs(config, parent, node, args, texts)
            key = (name, tuple(texts))
            if reads_config or key in self._calls or any("${" in text for text in texts):
                return result
            if name == _ENV and (args[0] not in os.environ):
                return result
            try:
                self._calls[key] = _to_json(result)
            except TypeError:
                return result
            if name not in self._depends and name != _ENV:
                before, self._called_at = self._calls[key], time.time()
                call = partial(theirs, config, parent, node, args, texts)
                self._again[name] = lambda: _to_json(call()) != before
            return result

        return resolver

    def _classify(self) -> None:
        """Call each new resolver a second time, in another second than the last of their calls."""
        again, self._again = self._again, {}
        while again and int(now := time.time()) == int(self._called_at):
            time.sleep(int(now) + 1 - now)
        for name, differs in again.items():
            try:
                self._depends[name] = bool(differs())
            except Exception:  # what a resolver raises is the worker's to see
                self._depends[name] = True


@contextmanager
def answer_calls(calls: Sequence[Call], configs: Sequence[Any]) -> Iterator[None]:
    """Answer calls of resolvers from the record of the submission (worker).

    The configs have a cache of results, for when Hydra registers ``now`` again.
    """
    resolvers = BaseContainer._resolvers
    before = dict(resolvers)
    answers: dict[str, dict[tuple[str, ...], Call]] = {}
    for call in calls:
        answers.setdefault(call.name, {})[call.args] = call
    for name, of_name in answers.items():
        resolvers[name] = _answering(name, before.get(name), of_name)
        for config in configs:
            fixed = {args: _from_json(c.result) for args, c in of_name.items() if c.is_fixed}
            OmegaConf.get_cache(config)[name].update(fixed)
    try:
        yield
    finally:
        resolvers.clear()
        resolvers.update(before)


def _answering(
    name: str, theirs: Callable[..., Any] | None, calls: Mapping[tuple[str, ...], Call]
) -> Callable[..., Any]:
    def resolver(config: Any, parent: Any, node: Any, args: Any, texts: Any) -> Any:
        call = calls.get(tuple(texts))
        if call is not None:
            is_lacking = theirs is None or (name == _ENV and args[0] not in os.environ)
            if call.is_fixed or is_lacking:
                return _from_json(call.result)
        if theirs is None:
            raise LookupError(f"resolver {name!r} is not registered when workers import the script")
        return theirs(config, parent, node, args, texts)

    return resolver


def _to_json(value: Any) -> Any:
    """Return the JSON form of a result; TypeError for an object, which the worker makes."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is list:
        return [_to_json(each) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(each) for key, each in value.items()}}
    if type(value) is tuple:
        return {"tuple": [_to_json(each) for each in value]}
    if type(value) is float or isinstance(value, Path):
        return {"float" if type(value) is float else "path": str(value)}
    raise TypeError(f"{type(value)} has no JSON form")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    if kind == "dict":
        return {key: _from_json(each) for key, each in of.items()}
    return tuple(_from_json(each) for each in of) if kind == "tuple" else _OF_TEXT[kind](of)


_OF_TEXT: dict[str, Callable[[str], Any]] = {"float": float, "path": Path}
