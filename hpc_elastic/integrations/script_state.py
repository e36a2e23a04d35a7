"""What a script's training consists of: its place between two loops, its objects and its values.

They are found by their names: those of the script, and those of the functions from the loop over
the epochs to the one over the batches. A list, a dict, or an object of the script's own class may
be changed by anything that the loops call, so its plain values are looked at. An object of a
library is taken to keep nothing for the training, except those in `_WITH_STATE`.
`UnknownStateError` has the reason why a training cannot be continued.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import marshal
import site
import sys
import sysconfig
import types
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from hpc_elastic import tree_codec
from hpc_elastic.errors import ConfigError, HpcElasticError
from hpc_elastic.worker import optimizer_steps
from hpc_elastic.worker.script_loops import LOOPS, Epochs, Loop, Scope, head_of, used_before_batches

_BARS = ("tqdm", "rich")
"""Packages that draw a batch only when the loop asks for it."""


class UnknownStateError(Exception):
    """Why a training cannot be continued inside of an epoch."""


@contextlib.contextmanager
def _of_script() -> Iterator[None]:
    """Make a reason of whatever the script's objects raise: the training itself goes on."""
    try:
        yield
    except (UnknownStateError, HpcElasticError):
        raise
    except Exception as e:
        why = f"its objects cannot be read ({type(e).__name__}: {e})"
        raise UnknownStateError(why) from e


@dataclass(frozen=True)
class Place:
    """Where a loop over batches is: both loops, and the frames from the inner to the outer one."""

    epochs: Epochs
    outer: Loop
    inner: Loop
    frames: tuple[tuple[Scope, types.FrameType], ...]

    @property
    def is_one_function(self) -> bool:
        """Whether both loops are in one function."""
        return len(self.frames) == 1

    @property
    def spaces(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The names of the script, and of the functions, outer ones first; then of own objects."""
        spaces = [("", self.frames[0][1].f_globals)]
        spaces += [(f"{s.name}.", frame.f_locals) for s, frame in reversed(self.frames) if s.name]
        yield from spaces
        seen = set[int]()
        for space, names in spaces:
            yield from _attributes_in(space, names, seen)

    def forget_locals(self) -> None:
        """Let the frames hold no copy of their variables, such as the last batch's output."""
        for _, frame in self.frames:
            if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                frame.f_locals.clear()


@_of_script()
def find_place(loader: Any) -> Place:
    """Return where the caller of a loader is; UnknownStateError if that cannot be continued."""
    script, frame = LOOPS.script, _frame_of_user()
    if script is None or frame is None:
        raise UnknownStateError(
            "the script is none that the worker compiles, such as a module (-m)"
        )
    scope = script.scope_of(frame.f_code, frame.f_lineno)
    if scope is None:
        raise UnknownStateError(
            f"the loop over the batches is in {_module_of(frame)}, not the script"
        )
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise UnknownStateError(f"the batches come from a generator, {scope.name}")
    inner = next((loop for loop in scope.loops if loop.has_in_header(frame.f_lineno)), None)
    if inner is None:
        raise UnknownStateError("a batch is not drawn by the head of a for loop")
    drawn = None if inner.source is None else _look_up(inner.source, frame)
    if drawn is not loader and getattr(drawn, "iterable", None) is not loader:
        raise UnknownStateError(f"the loop draws from {ast.unparse(inner.node.iter)}")
    if len(LOOPS.active) != 1:
        what = "two loops" if LOOPS.active else "no loop"
        raise UnknownStateError(f"{what} over range(...) around the loop over the batches")
    epochs, frames = LOOPS.active[0], [(scope, frame)]
    while frame.f_code is not epochs.code:
        frame = frame.f_back
        scope = None if frame is None else script.scope_of(frame.f_code, frame.f_lineno)
        if frame is None or scope is None:
            where = "another thread" if frame is None else _module_of(frame)
            raise UnknownStateError(f"the loop over the batches is called from {where}")
        frames.append((scope, frame))
    outer = next(loop for loop in scope.loops if loop.key == epochs.key)
    above: types.FrameType | None = frame
    while above is not None:
        of_above = script.scope_of(above.f_code, above.f_lineno)
        if above is not frame and of_above is not None:
            frames_around = of_above.loops_around(above.f_lineno)
            _refuse_loops(frames_around)
        above = above.f_back
    for each, at in frames:
        _refuse_loops([n for n in each.loops_around(at.f_lineno) if n is not outer.node])
    if why := used_before_batches(outer, inner, frame.f_lineno, is_one=len(frames) == 1):
        raise UnknownStateError(why)
    return Place(epochs, outer, inner, tuple(frames))


def _look_up(node: ast.expr, frame: types.FrameType) -> Any:
    """Return what a part of a script stands for; of a property, which may do anything, itself."""
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_look_up(node.value, frame), node.attr, None)
    return eval(ast.unparse(node), frame.f_globals, frame.f_locals)


def _refuse_loops(found: list[ast.AST]) -> None:
    if found:
        raise UnknownStateError(f"a further loop is around it: {head_of(found[0])}")


def _frame_of_user() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    own = (__name__, LOOPS.__module__, "hpc_elastic.integrations.plain", contextlib.__name__)
    while frame is not None:
        module = _module_of(frame)
        if module not in own and module.partition(".")[0] not in _BARS:
            break
        frame = frame.f_back
    return frame


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", frame.f_code.co_filename))


def modules_of_callers() -> Iterator[str]:
    """Yield the names of the modules whose code is running, inner ones first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield _module_of(frame)
        frame = frame.f_back


# ---- what a training consists of


def _attributes_in(
    space: str, names: Mapping[str, Any], seen: set[int]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the attributes of the script's own objects that have a name, and of their parts."""
    for name, value in list(names.items()):
        if not name.startswith("__") and id(value) not in seen and _is_own(value):
            seen.add(id(value))
            yield f"{space}{name}.", vars(value)
            yield from _attributes_in(f"{space}{name}.", vars(value), seen)


def _is_stateful(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def _bare(value: Any) -> Any:
    while isinstance(value, torch.nn.Module):
        wrapped = isinstance(value, DistributedDataParallel)
        inside = value.module if wrapped else getattr(value, "_orig_mod", None)
        if inside is None:
            break
        value = inside
    return value


@_of_script()
def find_objects(place: Place) -> dict[str, Any]:
    """Return the objects that have a state, each by the first name that it has."""
    found: dict[str, Any] = {}
    seen = set[int]()
    inner_space = f"{place.frames[0][0].name}." if place.frames[0][0].name else ""
    for space, names in place.spaces:
        for name, value in list(names.items()):
            if space == inner_space and name in place.inner.stored | place.inner.targets:
                continue  # of a batch
            if not _is_stateful(value) or id(_bare(value)) in seen:
                continue
            seen.add(id(_bare(value)))
            if not isinstance(value, torch.nn.Module) or value.state_dict():
                found[f"{space}{name}"] = value
    return found


_NO_NAME = "has no name in the script, or in a function between the loops"


@_of_script()
def refuse_objects(objects: Mapping[str, Any]) -> None:
    """Raise UnknownStateError if something that is trained has no name, or cannot be kept."""
    values = [_bare(value) for value in objects.values()]
    known = set(map(id, values))
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    known.update(id(part) for module in modules for part in module.modules())
    parameters = {id(p): p for module in modules for p in module.parameters()}
    if any(hasattr(p, "to_local") for p in parameters.values()):
        raise UnknownStateError("a model is sharded (FSDP)")
    for optimizer in optimizer_steps.stepped_optimizers():
        name = type(optimizer).__name__
        if id(optimizer) not in known:
            raise UnknownStateError(f"{name} {_NO_NAME}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnknownStateError(f"{name} steps with a closure")
        if any(id(p) not in parameters for p in optimizer_steps.parameters_of(optimizer)):
            raise UnknownStateError(f"{name} trains a model that {_NO_NAME}")
    parts = {
        id(part)
        for value in values if isinstance(value, LRScheduler)
        for attribute in vars(value).values() if isinstance(attribute, list | tuple)
        for part in attribute
    }  # fmt: skip
    for kind in (LRScheduler, AveragedModel, torch.amp.GradScaler):
        for each in optimizer_steps.live_objects(kind):
            optimizer = getattr(each, "optimizer", None)
            is_ours = optimizer is None or id(optimizer) in known
            is_used = not isinstance(each, torch.amp.GradScaler) or each.is_enabled()
            if is_ours and is_used and id(each) not in known | parts:
                raise UnknownStateError(f"{type(each).__name__} {_NO_NAME}")


_LIBRARIES = tuple(
    {sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(site.getsitepackages())
)
_UNCHANGING = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    functools.partial, torch.Tensor, torch.nn.Module, Dataset, DataLoader, Sampler,
)  # fmt: skip
_NAMESPACES = (Namespace, types.SimpleNamespace)
_WITH_STATE = ("random.Random", "torch._C.Generator", "collections.deque", "numpy.random.")
"""Types of libraries whose objects change when they are used."""
_WITH_ITERATORS = (
    "builtins", "itertools", "torch.utils.data.dataloader", "hpc_elastic.integrations.plain",
)  # fmt: skip


CONTENT = ", what it holds"
"""Behind a name: the digest of what is in no checkpoint, and must not change."""
_LARGE = 10_000


def text_of(value: Any) -> str | None:
    """Return the text of a plain value, of a large one a digest; None: it has something else."""
    with contextlib.suppress(ValueError):
        if _is_large(value):
            return str(zlib.crc32(marshal.dumps(value, 2)))  # which depends on the value alone
    try:
        return json.dumps(tree_codec.encode(value, "", lambda _path, _leaf: None))
    except ConfigError:
        return None


def _is_large(value: Any) -> bool:
    """Return whether a list or a dict has so much in it that its text takes long, as data have."""
    if not isinstance(value, list | dict) or len(value) > _LARGE:
        return isinstance(value, list | dict)
    parts = value.values() if isinstance(value, dict) else value
    return sum(len(part) for part in parts if isinstance(part, list | dict | tuple)) > _LARGE


def _is_own(value: Any) -> bool:
    """Return whether its attributes are its state: a namespace, or of a class of the script."""
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, (_SCALAR, *_UNCHANGING)) or _is_of_library(type(value)):
        return False
    return hasattr(value, "__dict__") and not _is_stateful(value)


def _is_of_library(kind: type) -> bool:
    return kind.__module__ == "builtins" or _is_in_library(sys.modules.get(kind.__module__))


def _is_in_library(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or str(file).startswith(_LIBRARIES)


def _refuse_unknown(name: str, kind: type) -> None:
    if hasattr(kind, "__next__") and kind.__module__ in _WITH_ITERATORS:
        raise UnknownStateError(f"{name} is an iterator, whose position is unknown")
    if f"{kind.__module__}.{kind.__qualname__}".startswith(_WITH_STATE):
        raise UnknownStateError(f"{name} is a {kind.__name__}, whose state is unknown")


def parts_of(name: str, value: Any, around: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Return what may change in an object, by name; UnknownStateError if that cannot be kept.

    It is an attribute of the objects ``around``, which are not looked at again.
    """
    kind, around = type(value), around | {id(value)}
    if isinstance(value, list | dict | set):
        if text_of(value) is not None:
            return {name: value}
        inside = [leaf for leaf in tree_codec.leaves(value) if text_of(leaf) is None]
        for leaf in inside:
            if not isinstance(leaf, _UNCHANGING) and not _is_of_library(type(leaf)):
                raise UnknownStateError(
                    f"{name} has a {type(leaf).__name__}, whose state is unknown"
                )
        return {}
    if isinstance(value, _UNCHANGING) or _is_stateful(value):
        return {}
    _refuse_unknown(name, kind)
    if _is_of_library(kind) and not isinstance(value, _NAMESPACES):
        return {}
    found = {}
    for attribute, part in getattr(value, "__dict__", {}).items():
        if text_of(part) is not None:
            found[f"{name}.{attribute}"] = part
        elif _is_own(part):
            if id(part) not in around:
                found |= parts_of(f"{name}.{attribute}", part, around)
        elif _is_stateful(part):
            continue  # it is saved by its name
        elif not isinstance(part, _UNCHANGING) and not _is_of_library(type(part)):
            what = f"{name} is a {kind.__name__} with a {type(part).__name__}"
            raise UnknownStateError(f"{what}, and without state_dict()")
        elif isinstance(part, list | dict | set):
            raise UnknownStateError(f"{name}.{attribute} holds more than plain values")
        else:
            _refuse_unknown(f"{name}.{attribute}", type(part))
    return found


def _used(place: Place) -> Iterator[tuple[str, str, Any]]:
    """Yield the space, the name and the value of what the loops use from before them."""
    script = LOOPS.script
    assert script is not None
    scope, frame = place.frames[-1]
    read = {n.id for n in ast.walk(place.outer.node) if isinstance(n, ast.Name)}
    read -= place.outer.stored | place.outer.targets
    wanted = [("", frame.f_globals, script.read_by_functions)]
    if scope.name:
        wanted.append((f"{scope.name}.", frame.f_locals, read))
    wanted.append(("", frame.f_globals, read - set(frame.f_locals if scope.name else ())))
    for space, names, used in wanted:
        for name in sorted(used.intersection(names)):
            if not name.startswith("__"):
                yield space, name, names[name]


def find_items(place: Place, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return lists, dicts and objects that the loops may change, by the names that they have."""
    assert LOOPS.script is not None
    kept = {id(_bare(value)) for value in objects.values()}
    loops = place.outer, place.inner
    assigned, changed = (
        {name for loop in loops for name in loop.changed_parts(methods=methods)}
        for methods in (False, True)
    )
    found: dict[str, Any] = {}
    for space, name, value in _used(place):
        is_kept = id(_bare(value)) in kept
        parts = assigned | (set() if space else LOOPS.script.changed_by_functions)
        if name in parts and not _takes_parts(value, is_kept=is_kept):
            raise UnknownStateError(f"a part of {name} is assigned in the loop")
        if name in changed and isinstance(value, torch.Tensor):
            raise UnknownStateError(f"{name} is changed in the loop")
        if not is_kept and not isinstance(value, _SCALAR | tuple):
            parts_of(f"{space}{name}", value)
            found[f"{space}{name}"] = value
    return found


def _takes_parts(value: Any, *, is_kept: bool) -> bool:
    """Return whether the parts of an object that are assigned are among what is kept."""
    if isinstance(value, (list, dict, set, *_NAMESPACES)):
        return True
    if isinstance(value, torch.nn.Module) or is_kept:
        return not isinstance(value, torch.nn.Module)
    if isinstance(value, types.ModuleType):  # such as torch.backends
        return _is_in_library(value)
    return not isinstance(value, _UNCHANGING) and not _is_of_library(type(value))


@_of_script()
def plain_values(place: Place, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what loops and functions may change, beside variables of the loops, by name."""
    assert LOOPS.script is not None
    module = place.frames[0][1].f_globals
    found = {
        name: module[name] for name in LOOPS.script.set_by_functions & module.keys()
        if text_of(module[name]) is not None
    }  # fmt: skip
    items = find_items(place, objects)
    for name, item in items.items():
        found |= parts_of(name, item)
    contents = _Contents(place, objects)
    others = {f"{space}{name}": value for space, name, value in _used(place)}
    for name, value in (dict(objects) | others).items():
        if digest := contents.digest(value):
            found[f"{name}{CONTENT}"] = digest
    return found


_SCALAR = str | int | float | complex | bytes | None
_WHOLE_BYTES = 64 << 20
_MOST_PARTS = 100_000
"""What is larger is read in steps, or in part: data that a script has in memory."""


def content_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, on whatever device it is."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Contents:
    """Digests of what objects hold beside that which is saved; it has to stay as it is."""

    def __init__(self, place: Place, objects: Mapping[str, Any]) -> None:
        self._names = place.frames[0][1].f_globals
        self._variables = {n for _, frame in place.frames for n in frame.f_code.co_cellvars}
        self._saved = set[int]()
        for value in map(_bare, objects.values()):
            if isinstance(value, torch.nn.Module):
                self._saved |= set(map(id, value.state_dict(keep_vars=True).values()))
            else:
                self._saved |= {id(value), *map(id, getattr(value, "param_groups", ()))}

    def digest(self, value: Any) -> int:
        """Return a digest; 0 if all that a value holds is saved."""
        value = _bare(value)
        if isinstance(value, _SCALAR) or text_of(value) is not None:
            return 0
        digest, seen, todo, looked_into = 0, set(self._saved), [value], {id(value)}
        parts: list[Any]
        text: bytes | memoryview
        while todo and len(seen) < _MOST_PARTS:
            item = _bare(todo.pop())
            if id(item) in seen:
                continue
            if isinstance(item, _SCALAR):
                parts, text = [], repr(item).encode()
            else:
                seen.add(id(item))
                parts, text = self._parts(item)
                if id(item) in looked_into and _is_own(item):
                    parts = [part for part in parts if text_of(part) is None]
                    looked_into |= set(map(id, parts))
            digest = zlib.crc32(text, digest)
            todo += parts
        return digest

    def _parts(self, item: Any) -> tuple[list[Any], bytes | memoryview]:
        """Return what an object holds, and what it is itself."""
        kind = type(item)
        if isinstance(item, torch.Tensor):
            if item.layout != torch.strided or item.is_meta:
                return [], b""
            step = 1 + item.numel() * item.element_size() // _WHOLE_BYTES
            return [], content_of(item.detach().reshape(-1)[::step])
        if f"{kind.__module__}.{kind.__name__}" == "numpy.ndarray":
            return [], item.reshape(-1)[:: 1 + item.nbytes // _WHOLE_BYTES].tobytes()
        if isinstance(item, torch.nn.Module):
            persistent = item.state_dict(keep_vars=True)
            flags = [p.requires_grad for p in item.parameters()]
            buffers = [b for name, b in item.named_buffers() if name not in persistent]
            own = [
                part for module in item.modules() for name, part in vars(module).items()
                if not name.startswith("_")
                and isinstance(part, _SCALAR | list | dict | torch.Tensor)
            ]  # fmt: skip
            return [*buffers, *own], bytes(flags)
        if isinstance(item, Mapping):
            return [*item, *item.values()], b"%d" % len(item)
        if isinstance(item, list | tuple | set | frozenset):
            return list(item), b"%d" % len(item)
        if isinstance(item, functools.partial):
            return [item.func, *item.args, item.keywords], b""
        if isinstance(item, types.MethodType):
            return [item.__self__], b""
        if isinstance(item, types.FunctionType):
            return self._parts_of_function(item), b""
        if isinstance(item, DataLoader):
            return [item.dataset], b""
        if isinstance(item, Dataset):
            return [part for part in vars(item).values() if isinstance(part, _SCALAR)], b""
        is_of_library = _is_of_library(item if isinstance(item, type) else kind)
        if hasattr(kind, "__next__") or (is_of_library and not isinstance(item, _NAMESPACES)):
            return [], b""
        return [p for n, p in getattr(item, "__dict__", {}).items() if not n.startswith("__")], b""

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """Return what a function keeps, or reads from a module of the script's own."""
        assert LOOPS.script is not None
        if _is_in_library(sys.modules.get(function.__module__)):
            return []
        code, names = function.__code__, function.__globals__
        found = [function.__defaults__, function.__kwdefaults__, vars(function)]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in self._variables or name in LOOPS.script.set_from_inside:
                with contextlib.suppress(ValueError):  # not assigned yet
                    found.append(cell.cell_contents)
        if names is not self._names:
            found += [names[name] for name in code.co_names if name in names]
        return found


_MISSING = object()


@_of_script()
def carried_values(place: Place, objects: Mapping[str, Any]) -> list[tuple[str, str, Any, bool]]:
    """Return the keys of loops, what they carry, the values, and whether they may begin anew."""
    (scope, frame), (_, outer_frame) = place.frames[0], place.frames[-1]
    one, outer, inner = place.is_one_function, place.outer, place.inner
    found = [(outer.key, name, outer_frame, False) for name in sorted(outer.carried)]
    for name in sorted(inner.carried | (outer.carried if one else frozenset())):
        of_epoch = (not scope.name or name in frame.f_locals) and not (
            one and name in outer.carried
        )
        found.append((inner.key, name, frame, of_epoch and inner.is_only_shown(name)))
    values = []
    for key, name, at, is_shown in found:
        value = _value(at, name)
        mine = {each.rpartition(".")[2] for each, kept in objects.items() if kept is value}
        if value is not _MISSING and name not in mine:
            values.append((key, name, value, is_shown))
    return values


def _value(frame: types.FrameType, name: str) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name, _MISSING))
