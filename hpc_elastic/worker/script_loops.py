"""The loops of a script: what they carry from one iteration to the next, and where they continue.

A worker compiles the script that it runs with changes (`prepare`) that have no effect until
a training is continued inside of an epoch:

    for epoch in range(n):                for epoch in LOOPS.range(KEY, range(n)):
        for i, x in enumerate(loader):        for i, x in LOOPS.enumerate(KEY, loader):
                                                  if LOOPS.values: seen = ...
            seen += len(x)                        seen += len(x)

So the loop over the epochs begins with the one that is continued, a number of the batch goes on,
and a local variable gets its value back. Python has no other way to set one from outside. What has
to be set is what an iteration may read before it assigns it (`carried`), by the order of the
statements: a name that is assigned in a branch counts as read before.

Loops in other modules stay as they are, and those that no such loop over a range leads to. Nothing
here needs torch, and all but `Loops` is pure.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

NAME = "__hpc_elastic__"  # of the `Loops`, among the globals of a script
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_LEAVES = ast.Continue | ast.Break | ast.Return | ast.Raise
_WRAPPERS = ("enumerate", "tqdm", "track")
"""Calls that yield the batches of a loader one by one, as the loop asks for them."""
_RANGES = ("range", "trange")
_EFFECTS = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
"""What must not be evaluated a second time."""
_OUTPUT = frozenset(
    [
        "print",
        "info",
        "debug",
        "warning",
        "log",
        "write",
        "add_scalar",
        "add_scalars",
        "set_postfix",
        "set_postfix_str",
        "set_description",
        "report",
        "display",
    ]
)
"""Functions whose arguments do not change a training."""


# ---- the order of reads and assignments


class _Flow:
    """Which names some statements read before they assign them, and which they assign."""

    def __init__(self, *, loops_run: bool = False) -> None:
        self.read_first = set[str]()
        self.stored = set[str]()
        self.definite = set[str]()
        self._loops_run = loops_run  # whether each loop inside is taken to run at least once

    def block(self, statements: list[ast.stmt]) -> bool:
        """Follow statements; return whether they end by leaving the block."""
        for each in statements:
            self._statement(each)
        return bool(statements) and isinstance(statements[-1], _LEAVES)

    def _branches(self, *blocks: list[ast.stmt]) -> None:
        before, after = set(self.definite), []
        for block in blocks:
            self.definite = set(before)
            if not self.block(block):
                after.append(self.definite)
        self.definite = set.intersection(*after) if after else before

    def _store(self, name: str) -> None:
        self.stored.add(name)
        self.definite.add(name)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self.expression(node.test)
            self._branches(node.body, node.orelse)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.expression(node.iter)
            before = set(self.definite)
            self.expression(node.target)
            self.block(node.body)
            if not self._loops_run:
                self.definite = before
            self.block(node.orelse)
        elif isinstance(node, ast.While):
            self.expression(node.test)
            self._branches(node.body, [])
            self.block(node.orelse)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.expression(item)
            self.block(node.body)
        elif isinstance(node, ast.Try | ast.TryStar):
            before = set(self.definite)
            self.block(node.body)
            self.block(node.orelse)
            for handler in node.handlers:
                self.definite = set(before)
                if handler.name:
                    self._store(handler.name)
                self.block(handler.body)
            self.definite = before
            self.block(node.finalbody)
        elif isinstance(node, ast.Assign):
            self.expression(node.value)
            for target in node.targets:
                self.expression(target)
        elif isinstance(node, ast.AugAssign):
            self.expression(node.value)
            if isinstance(node.target, ast.Name):
                self._read(node.target.id)
            self.expression(node.target)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.expression(node.value)
                self.expression(node.target)
        elif isinstance(node, _FUNCTIONS | ast.ClassDef):
            for name in _free_names(node):
                self._read(name)
            self._store(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                self._store(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.Match):
            self.expression(node.subject)
            self._branches(*(case.body for case in node.cases), [])
        else:
            self.expression(node)

    def _read(self, name: str) -> None:
        if name not in self.definite:
            self.read_first.add(name)

    def expression(self, node: ast.AST) -> None:
        """Follow an expression, or the target of an assignment."""
        if isinstance(node, ast.Name):
            (self._read if isinstance(node.ctx, ast.Load) else self._store)(node.id)
        elif isinstance(node, ast.NamedExpr):
            self.expression(node.value)
            self.expression(node.target)
        elif isinstance(node, ast.Lambda | _COMPREHENSIONS):
            for name in _free_names(node):
                self._read(name)
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child)


_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _free_names(node: ast.AST) -> set[str]:
    """Return the names that a function or a comprehension may read from outside."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return {each.id for each in names} - own


def _mentions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that are read, and those of the attributes, such as methods."""
    found = (each for node in nodes for each in ast.walk(node))
    return _reads(nodes) | {each.attr for each in found if isinstance(each, ast.Attribute)}


def _reads(nodes: Iterable[ast.AST]) -> set[str]:
    found = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in found if isinstance(each.ctx, ast.Load)}


def _stores(nodes: Iterable[ast.stmt]) -> set[str]:
    flow = _Flow()
    flow.block(list(nodes))
    return flow.stored


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _changed_parts(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield names of objects whose parts are assigned; True: a ``method_()`` changes them."""
    for node in (each for root in nodes for each in ast.walk(root)):
        if isinstance(node, ast.Attribute | ast.Subscript) and (name := _root(node)):
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            if not isinstance(node.ctx, ast.Load) and attribute not in ("data", "grad"):
                yield name, False
            elif attribute.endswith("_") and not attribute.startswith("_"):
                yield name, True


# ---- a script


@dataclass(frozen=True, eq=False)
class Loop:
    """A ``for`` of a script.

    Attributes:
        key: Its function and its target, by which it is found again in an edited script.
        scope: Its function, or the module level.
    """

    key: str
    node: ast.For = field(repr=False)
    scope: Scope = field(repr=False)

    @cached_property
    def carried(self) -> set[str]:
        """What an iteration may read before it assigns it.

        What only a loop inside assigns, such as a loss, is there after it; if that had no
        iteration, a name from before the loop would be read instead, and any other is an error.
        """
        flow, once = _Flow(), _Flow(loops_run=True)
        for each in (flow, once):
            each.expression(self.node.target)
            each.block(self.node.body)
        line, end = self.node.lineno, self.node.end_lineno or 0
        statements = (each for each in self.scope.nodes() if isinstance(each, ast.stmt))
        before = _stores(each for each in statements if (each.end_lineno or 0) < line)
        flow.read_first &= once.read_first | before
        flow.definite |= once.definite - before
        inside = {id(each) for each in ast.walk(self.node)}
        others = {
            each.id for each in ast.walk(self.scope.node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
            and id(each) not in inside and each.lineno > end
        }  # fmt: skip
        return flow.stored & (flow.read_first | (others - flow.definite))

    @property
    def targets(self) -> set[str]:
        """The names that each iteration begins with."""
        return {each.id for each in ast.walk(self.node.target) if isinstance(each, ast.Name)}

    @property
    def source(self) -> ast.expr | None:
        """What it draws from, without `enumerate` and the like; None: a call."""
        node = _drawn(self)
        return None if any(isinstance(each, _EFFECTS) for each in ast.walk(node)) else node

    @property
    def may_train(self) -> bool:
        """Whether it may train: it draws from no call, and calls something for what it draws."""
        calls = (isinstance(n, ast.Call) for part in self.node.body for n in ast.walk(part))
        return not isinstance(_drawn(self), ast.Call) and any(calls)

    def has_in_header(self, line: int) -> bool:
        """Return whether a line is between ``for`` and the first statement."""
        return self.node.lineno <= line < self.node.body[0].lineno

    def stored_before(self, line: int) -> set[str]:
        """Return what an iteration assigns before the statement of a line."""
        return _stores(self._before(line))

    def read_before(self, line: int) -> set[str]:
        """Return what an iteration reads before the statement of a line."""
        return _reads(self._before(line))

    def _before(self, line: int) -> list[ast.stmt]:
        found = (each for each in ast.walk(self.node) if isinstance(each, ast.stmt))
        return [each for each in found if (each.end_lineno or 0) < line]

    @property
    def stored(self) -> set[str]:
        """What an iteration assigns."""
        return _stores(self.node.body)

    def changed_parts(self, *, methods: bool) -> set[str]:
        """Return the objects whose parts an iteration assigns, or whose ``method_()`` it calls."""
        found = _changed_parts(self.node.body)
        return {name for name, by_method in found if methods or not by_method}

    def is_only_shown(self, name: str) -> bool:
        """Return whether an iteration uses a name in output alone, and where it adds it up."""

        def allows(node: ast.stmt) -> bool:
            if name not in _reads([node]) and name not in _stores([node]):
                return True
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                return node.target.id == name and name not in _reads([node.value])
            if isinstance(node, ast.Assign):  # it begins anew, or is added up in another way
                return all(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                return _name_of(node.value.func) in _OUTPUT
            if isinstance(node, ast.If | ast.With):
                head = [node.test] if isinstance(node, ast.If) else node.items
                parts = node.body + (node.orelse if isinstance(node, ast.If) else [])
                shows = name not in _reads(head) or all(
                    isinstance(p, ast.Expr) and isinstance(p.value, ast.Call)
                    and _name_of(p.value.func) in _OUTPUT for p in parts
                )  # fmt: skip
                return shows and all(allows(part) for part in parts)
            return False

        return all(allows(each) for each in self.node.body)


def _drawn(loop: Loop) -> ast.expr:
    """Return what a loop draws from, without `enumerate` and the like."""
    node = loop.node.iter
    while isinstance(node, ast.Call) and _name_of(node.func) in _WRAPPERS and node.args:
        node = node.args[0]
    return node


@dataclass(frozen=True, eq=False)
class Scope:
    """A function of a script, or its module level."""

    name: str
    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef = field(repr=False)
    of_class: str = ""
    """With a dot, if it is a method."""

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler of torch's translates it."""
        decorators = [] if isinstance(self.node, ast.Module) else self.node.decorator_list
        return any(re.search("compile|jit|script", ast.unparse(each)) for each in decorators)

    @cached_property
    def loops(self) -> list[Loop]:
        """Its loops, outer ones first, without those of functions inside."""
        found: list[Loop] = []
        keys = set[str]()
        for node in self.nodes():
            if isinstance(node, ast.For):
                function = f"{self.of_class}{self.name}" or "the script"
                key = f"{function}: for {ast.unparse(node.target)}"
                while key in keys:
                    key += "+"
                keys.add(key)
                found.append(Loop(key, node, self))
        return found

    def nodes(self, node: ast.AST | None = None) -> Iterator[ast.AST]:
        """Yield its nodes, outer ones first, without those of functions inside."""
        for child in ast.iter_child_nodes(node or self.node):
            if not isinstance(child, _FUNCTIONS | ast.ClassDef | ast.Lambda):
                yield child
                yield from self.nodes(child)

    def loops_around(self, line: int) -> list[ast.AST]:
        """Return the loops whose body has a line."""
        return [
            node for node in self.nodes()
            if isinstance(node, ast.For | ast.AsyncFor | ast.While)
            and node.body[0].lineno <= line <= (node.end_lineno or 0)
        ]  # fmt: skip


class ScriptSource:
    """The source of a script, taken apart.

    What only the adapter asks for is found then: most scripts that start are not asked.
    """

    def __init__(self, source: bytes | str, file: str) -> None:
        self.file = file
        self.tree = ast.parse(source, file)
        self.scopes = list(_scopes(self.tree))

    @cached_property
    def set_by_functions(self) -> set[str]:
        """Names of the module that functions assign."""
        of_module = (node for node in ast.walk(self.tree) if isinstance(node, ast.Global))
        return {name for node in of_module for name in node.names}

    @cached_property
    def set_from_inside(self) -> set[str]:
        """Names of functions that functions inside of them assign."""
        from_inside = (node for node in ast.walk(self.tree) if isinstance(node, ast.Nonlocal))
        return {name for node in from_inside for name in node.names}

    @cached_property
    def read_by_functions(self) -> set[str]:
        """Names of the module that functions read, and some more."""
        return {name for scope in self.scopes[1:] for name in _free_names(scope.node)}

    @cached_property
    def changed_by_functions(self) -> set[str]:
        """Names of the module whose objects get parts from functions."""
        return {
            name for scope in self.scopes[1:]
            for name in {n for n, by_method in _changed_parts([scope.node]) if not by_method}
            & _free_names(scope.node)
        }  # fmt: skip

    @cached_property
    def packages(self) -> set[str]:
        """What it imports, by the name of the package."""
        nodes = list(ast.walk(self.tree))
        modules = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        modules += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        return {module.partition(".")[0] for module in modules}

    @cached_property
    def methods(self) -> set[str]:
        """The names of the attributes that it uses."""
        return {n.attr for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}

    def scope_of(self, code: types.CodeType, line: int) -> Scope | None:
        """Return the function that a frame executes, by its code and line."""
        if code.co_filename != self.file:
            return None
        name = "" if code.co_name == "<module>" else code.co_name
        found = [
            scope for scope in self.scopes
            if scope.name == name and (isinstance(scope.node, ast.Module)
                or scope.node.lineno <= line <= (scope.node.end_lineno or 0))
        ]  # fmt: skip
        return found[-1] if found else None


def _scopes(tree: ast.Module) -> Iterator[Scope]:
    yield Scope("", tree)

    def below(node: ast.AST, of_class: str) -> Iterator[Scope]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTIONS):
                yield Scope(child.name, child, of_class)
            name = f"{child.name}." if isinstance(child, ast.ClassDef) else ""
            yield from below(child, of_class + name)

    yield from below(tree, "")


def _name_of(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def why_not_continued(script: ScriptSource) -> str | None:
    """Return why a script cannot be continued inside of an epoch; None if reading shows nothing.

    What decides at the end are its objects, which a worker sees.
    """
    trains: list[tuple[Scope, Loop, set[Scope]]] = []
    for scope in script.scopes:
        for loop in scope.loops:
            called = _called(script, loop.node)
            bodies = [loop.node, *(each.node for each in called)]
            if {"step", "backward"} <= {_name_of(n) for body in bodies for n in ast.walk(body)}:
                trains.append((scope, loop, called))
    inside = {scope for scope, *_ in trains}
    trains = [each for each in trains if each[2].isdisjoint(inside)]
    if not trains:
        return "no loop of it calls backward() and step()"
    scope, inner, _ = trains[-1]
    if inner.source is None:
        return f"the loop draws from {ast.unparse(inner.node.iter)}"
    if "zero_grad" not in script.methods:
        return "it does not call zero_grad(), so gradients may be kept"
    line = inner.node.lineno
    while not (around := scope.loops_around(line)):
        calls = [
            (each, node.lineno) for each in script.scopes for node in each.nodes()
            if isinstance(node, ast.Call) and _is_named(node.func, scope)
        ]  # fmt: skip
        if not scope.name or not calls or calls[0][0] is scope:
            return "no loop over range(...) around the loop over the batches"
        scope, line = calls[0]
    if len(around) > 1:
        return "a further loop is around it: " + head_of(around[0])
    outer = next((loop for loop in scope.loops if loop.node is around[0]), None)
    if outer is None or not _is_over_range(script, outer):
        return "no loop over range(...) around the loop over the batches"
    is_one = inner.node in ast.walk(outer.node)
    return used_before_batches(outer, inner, line, is_one=is_one)


def _called(script: ScriptSource, node: ast.AST) -> set[Scope]:
    """Return the functions of a script that a part of it calls, and those that these call."""
    found, todo = set[Scope](), [node]
    while todo:
        calls = [each.func for each in ast.walk(todo.pop()) if isinstance(each, ast.Call)]
        new = {s for s in script.scopes[1:] if any(_is_named(call, s) for call in calls)} - found
        found |= new
        todo += [scope.node for scope in new]
    return found


def _is_named(function: ast.expr, scope: Scope) -> bool:
    """Return whether a call names a function of the script, or a method of some variable."""
    if scope.of_class and isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.attr == scope.name
    return isinstance(function, ast.Name) and function.id == scope.name and not scope.of_class


def _is_over_range(script: ScriptSource, loop: Loop) -> bool:
    """Return whether a loop draws from a call of range, or from a name that one is assigned to."""
    drawn = [loop.node.iter]
    if isinstance(name := _drawn(loop), ast.Name):
        assigned = (node for node in ast.walk(script.tree) if isinstance(node, ast.Assign))
        drawn += [n.value for n in assigned if name.id in map(_root, n.targets)]
    return any(_name_of(node) in _RANGES for each in drawn for node in ast.walk(each))


def used_before_batches(outer: Loop, inner: Loop, line: int, *, is_one: bool) -> str | None:
    """Return what would be changed twice, or read too late, before the first batch of an epoch.

    ``line`` is where the loop over the epochs has the batches; ``is_one``: in its own function.
    """
    twice = outer.carried & outer.stored_before(line)
    if is_one:
        twice |= outer.carried & inner.stored & outer.read_before(line)
    return f"{min(twice)} is used before the batches of an epoch, and kept" if twice else None


def head_of(loop: ast.AST) -> str:
    """Return the first line of a loop."""
    return ast.unparse(loop).partition("\n")[0].rstrip(":")


# ---- the changed script


def prepare(source: bytes, file: str, names: dict[str, Any]) -> ast.Module:
    """Return the tree of the script that this worker runs; ``names`` are its globals to be."""
    if not LOOPS.is_enabled:
        return ast.parse(source, file)
    LOOPS.script, LOOPS.loaded_before = ScriptSource(source, file), frozenset(sys.modules)
    names[NAME] = LOOPS
    return changed(ScriptSource(source, file))


def changed(script: ScriptSource) -> ast.Module:
    """Return the tree of a script with the changes for continuing."""
    if _stores(script.tree.body) & {"range", "enumerate"}:
        return script.tree
    epochs, reached = _leading(script)
    names: dict[Loop, set[str]] = {}  # what its iterations take: all is found before it is changed
    for scope in script.scopes:
        if scope.is_compiled:
            continue
        for loop in scope.loops:
            around = [each for each in scope.loops if _contains(each, loop)]
            is_inner = scope.name in reached or not epochs.isdisjoint(around)
            if loop in epochs or (is_inner and loop.may_train):
                names[loop] = loop.carried.union(*(each.carried for each in around))
    for loop, carried in names.items():
        _wrap(loop, is_epochs=loop in epochs)
        loop.node.body[:0] = [_taking(loop, name) for name in sorted(carried)]
    return ast.fix_missing_locations(script.tree)


def _leading(script: ScriptSource) -> tuple[set[Loop], set[str]]:
    """Return the loops over a range that lead to one over batches, and the functions they call."""
    reads: dict[str, set[str]] = {}
    for scope in script.scopes[1:]:
        reads.setdefault(scope.name, set()).update(_mentions([scope.node]))
    to = {s.name for s in script.scopes[1:] if any(loop.may_train for loop in s.loops)}
    while more := {name for name, read in reads.items() if read & to} - to:
        to |= more
    epochs = {
        loop for scope in script.scopes for loop in scope.loops
        if _may_be_range(_drawn(loop)) and (
            _mentions(loop.node.body) & to
            or any(_contains(loop, inner) and inner.may_train for inner in scope.loops)
        )
    }  # fmt: skip
    reached = set[str]()
    found = {name for loop in epochs for name in _mentions(loop.node.body)}
    while more := found & reads.keys() - reached:
        reached |= more
        found = {name for each in more for name in reads[each]}
    return epochs, reached


def _may_be_range(node: ast.AST) -> bool:
    """Return whether a loop draws from a call of range, or from a name, such as that of a bar."""
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Call) and _name_of(node.func) in _RANGES
    )


def _contains(outer: Loop, inner: Loop) -> bool:
    return outer.node.lineno < inner.node.lineno <= (outer.node.end_lineno or 0)


def _wrap(loop: Loop, *, is_epochs: bool) -> None:
    """Wrap what a loop draws from, if it may be a range or is numbered."""
    node: ast.expr = loop.node.iter
    replace: Callable[[ast.expr], None] = partial(setattr, loop.node, "iter")
    while isinstance(node, ast.Call):
        name = _name_of(node.func)
        if isinstance(node.func, ast.Name) and name == "enumerate" and node.args:
            node.func = _expression(f"{NAME}.enumerate", node.func)
            node.args.insert(0, ast.copy_location(ast.Constant(loop.key), node))
            return
        if name not in _WRAPPERS or not node.args:
            break
        arguments = node.args
        node, replace = arguments[0], partial(arguments.__setitem__, 0)
    if is_epochs:
        function = _expression(f"{NAME}.range", node)
        key = ast.Constant(loop.key)
        replace(ast.copy_location(ast.Call(function, [key, node], []), node))


def _expression(text: str, like: ast.AST) -> ast.expr:
    made = ast.parse(text, mode="eval").body
    for each in ast.walk(made):
        ast.copy_location(each, like)
    return made


def _taking(loop: Loop, name: str) -> ast.stmt:
    text = (
        f"if {NAME}.values and {NAME}.has({loop.key!r}, {name!r}):\n"
        f"    {name} = {NAME}.take_value({loop.key!r}, {name!r})"
    )
    made = ast.parse(text).body[0]
    for each in ast.walk(made):
        ast.copy_location(each, loop.node.body[0])
    return made


class Epochs:
    """The range of a loop, as far as it is still to be run, and the present value."""

    def __init__(self, key: str, values: range, code: types.CodeType | None, whole: range) -> None:
        self.key, self.values, self.code, self.whole = key, values, code, whole
        self.value: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[int]:
        LOOPS.active.append(self)
        try:
            for value in self.values:
                self.value = value
                yield value
        finally:
            LOOPS.active.remove(self)
            if LOOPS.on_end is not None:
                LOOPS.on_end(self.key)


class Loops:
    """What the script's loops call, and what is known of them at present.

    Attributes:
        is_enabled: Whether the script of this worker is compiled with the changes.
        script: The script's source; None before it is compiled.
        loaded_before: Modules that were loaded before the script began, as by a warm worker.
        active: The loops over a range that are being run, outer ones first.
        values: What variables are to be set to, by the key of the loop and their names.
        first_index: The number of the first batch of a loop that is continued.
        on_begin: Called with the key and the range of a loop that begins; returns its rest.
        on_end: Called with the key of such a loop that has ended.
        is_compiling: Whether torch.compile traces the caller, for which nothing is changed.
    """

    def __init__(self) -> None:
        self.is_enabled = False
        self.script: ScriptSource | None = None
        self.loaded_before = frozenset[str]()
        self.active: list[Epochs] = []
        self.values: dict[str, dict[str, Any]] = {}
        self.first_index: dict[str, int] = {}
        self.on_begin: Callable[[str, range], range] | None = None
        self.on_end: Callable[[str], None] | None = None
        self.is_compiling: Callable[[], bool] = bool

    def __reduce__(self) -> str:
        """Pickle it by its name, with functions of the script that use it."""
        return "LOOPS"

    def range(self, key: str, values: Any) -> Any:
        """Return what a loop over a range runs, or over a bar of tqdm's around one."""
        if self.is_compiling():
            return values
        is_bar = type(values).__module__.partition(".")[0] == "tqdm"
        inner = getattr(values, "iterable", values) if is_bar else values
        inner = inner.whole if type(inner) is Epochs else inner
        if type(inner) is not builtins.range:
            return values
        rest = inner if self.on_begin is None else self.on_begin(key, inner)
        epochs = Epochs(key, rest, sys._getframe(1).f_code, inner)
        if inner is values:
            return epochs
        values.iterable = epochs
        return values

    def enumerate(self, key: str, iterable: Iterable[Any], start: int = 0) -> Iterator[Any]:
        """Return numbers and items, with the numbers that they have in the whole epoch."""
        if self.is_compiling():
            return builtins.enumerate(iterable, start)
        return self._enumerated(key, iterable, start)

    def _enumerated(self, key: str, iterable: Iterable[Any], start: int) -> Iterator[Any]:
        first = None
        for number, item in builtins.enumerate(iterable, start):
            if first is None:
                first = self.first_index.pop(key, 0)
            yield first + number, item

    def has(self, key: str, name: str) -> bool:
        """Return whether a variable is to be set at the beginning of an iteration."""
        return name in self.values.get(key, ())

    def take_value(self, key: str, name: str) -> Any:
        """Return what a variable is to be set to, once."""
        names = self.values[key]
        value = names.pop(name)
        if not names:
            del self.values[key]
        return value


LOOPS = Loops()
