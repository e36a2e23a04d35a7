"""The script of a worker: loaded under its own name, ``__main__``, without its main block.

What stands under ``if __name__ == "__main__":`` would submit the run again. But the script's
loggers, its classes in pickles, and targets in a config have its name, as under Hydra and torchrun.
So a worker executes the script as ``__main__``, and tests of ``__name__`` at module level have the
result of an import.

Many scripts set the start method of processes, the precision or the environment in that block. So a
worker runs these statements, up to the one that names the function, when it has loaded the script.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hpc_elastic.worker import script_loops

AS_IMPORTED = "__mp_main__"  # name of a script in a spawned child of multiprocessing
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def load_main(script: str | None, module: str | None) -> types.ModuleType:
    """Load a script, or a module as ``python -m`` does, without its main block (worker)."""
    spec = None if module is None else importlib.util.find_spec(module)
    file = spec.origin if spec is not None else script
    if file is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__, main.__package__ = file, spec, spec.parent if spec else None
    sys.modules["__main__"] = sys.modules[AS_IMPORTED] = main
    if spec is not None:  # a config names its types so
        sys.modules[spec.name] = main
        if spec.parent:
            setattr(sys.modules[spec.parent], spec.name.rpartition(".")[2], main)
    sys.argv[0] = file
    tree = script_loops.prepare(Path(file).read_bytes(), file, vars(main))
    _replace_tests(tree)
    exec(compile(tree, file, "exec", dont_inherit=True), vars(main))
    return main


def _replace_tests(tree: ast.AST) -> None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If):
            node.test = _NameOfImport().visit(node.test)
        elif isinstance(node, ast.Compare):
            _NameOfImport().generic_visit(node)
        if not isinstance(node, _SCOPES):
            _replace_tests(node)


class _NameOfImport(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_name = node.id == "__name__"
        return ast.copy_location(ast.Constant(AS_IMPORTED), node) if is_name else node


def split_block(source: bytes, called_by: Collection[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements that run in workers, and those that cannot be run there (pure).

    ``called_by`` are the names by which the script calls the function.
    """
    top = ast.parse(source).body
    blocks = [each for each in top if isinstance(each, ast.If) and "__name__" in _names(each.test)]
    callers = {
        each.name: each for each in top
        if isinstance(each, ast.FunctionDef) and not _names(each).isdisjoint(called_by)
        and each.name not in called_by
    }  # fmt: skip
    for block in blocks:
        for at, statement in enumerate(block.body):
            names = _names(statement)
            if not names.isdisjoint(called_by):
                return block.body[:at], []
            caller = next((callers[name] for name in names if name in callers), None)
            if caller is not None:
                body = caller.body
                end = next(i for i, each in enumerate(body) if _names(each) & {*called_by})
                return block.body[:at], [each for each in body[:end] if not _is_docstring(each)]
    return [], []


def is_in_block(source: bytes, name: str) -> bool:
    """Return whether a script defines a function in its main block, which workers lack (pure)."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {
        isinstance(node, ast.If) and "__name__" in _names(node.test)
        for node in ast.parse(source).body
        if any(isinstance(each, kinds) and each.name == name for each in ast.walk(node))
    } == {True}


def names_of(function: Callable[..., Any], script: Mapping[str, Any]) -> set[str]:
    """Return the names by which a script calls a function, with a dot for one of a module.

    `hydra.main` may have wrapped what the script calls; ``script`` has the script's names.
    """
    wanted = inspect.unwrap(function)
    found = {
        name for name, value in script.items()
        if isinstance(value, types.FunctionType) and inspect.unwrap(value) is wanted
    }  # fmt: skip
    return found | {f".{wanted.__name__}"}


def run_block(script: types.ModuleType, function: Callable[..., Any]) -> None:
    """Run the statements before the call of the function (worker, once it is imported)."""
    file = Path(str(script.__file__))
    statements, _ = split_block(file.read_bytes(), names_of(function, vars(script)))
    if statements:
        code = compile(ast.Module(statements, []), str(file), "exec", dont_inherit=True)
        exec(code, vars(script))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    attributes = {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}
