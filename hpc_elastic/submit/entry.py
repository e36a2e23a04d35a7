"""The user's function as an `Entry`: what a fresh Python process needs to find it again.

Nothing is pickled: a worker loads the same script or module and looks the name up in it. So the
function must have such a name, and must come from a file; and loading the file must not submit it
again, or train with nobody's settings.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.errors import ConfigError
from hpc_elastic.rundir import Entry


def entry_of(
    function: Callable[..., Any],
    kind: Literal["hydra", "function"],
    args: Sequence[Any] = (),
) -> Entry:
    """Return the entry of a function at module level.

    Args:
        function: What `@hydra.main` was put on, or what is given to `hpc_elastic.launch`.
        kind: How a worker calls it: with the frozen config, or with ``args``.
        args: Arguments of a ``function`` entry, JSON only.

    Raises:
        ConfigError: workers could not import the function; says how to change that.
    """
    qualname = _qualname(function)
    script, module = _source(function)
    return Entry(
        kind=kind,
        qualname=qualname,
        script=script,
        module=module,
        args=list(args),
        cwd=str(Path.cwd()),
        sys_path=search_path(),
    )


def _qualname(function: Callable[..., Any]) -> str:
    qualname = getattr(function, "__qualname__", None)
    if qualname is None or "<" in qualname:
        remedy = "workers import the function by name: define it with `def` at module level"
        raise ConfigError("task function", qualname or repr(function), remedy)
    return str(qualname)


def _source(function: Callable[..., Any]) -> tuple[str | None, str | None]:
    """Return (script, module) of the function; one of the two is None."""
    name = function.__module__
    if name != "__main__":
        _require_importable(name)
        return None, name
    _require_guard()
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, spec.name
    file = getattr(main, "__file__", None)
    if file is None:
        remedy = "it was typed into an interpreter or a notebook: put it into a .py file"
        raise ConfigError("task function", function.__qualname__, remedy)
    return str(Path(file).resolve()), None


def _require_guard() -> None:
    """Refuse a script of which the statement that has led here runs whenever it is imported."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None:  # another thread than the one that runs the script
        return
    script, line = frame.f_code.co_filename, frame.f_lineno
    try:
        statements = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # changed meanwhile
        return
    for statement in statements:
        if statement.lineno <= line <= (statement.end_lineno or line):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if "__name__" not in names:
                why = f"line {line} runs whenever the file is imported, and workers import it"
                remedy = 'put it under `if __name__ == "__main__":`'
                raise ConfigError("script", script, f"{why}: {remedy}")


def _require_importable(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        remedy = "its module can not be imported by name; workers have to"
        raise ConfigError("task function", name, remedy)


def search_path() -> list[str]:
    """Return the entries of sys.path that a worker's interpreter would not have by itself."""
    paths = sysconfig.get_paths()
    own = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    own |= {str(Path(p) / "lib-dynload") for p in (paths["stdlib"], paths["platstdlib"])}
    entries = [os.path.abspath(p) for p in sys.path]  # noqa: PTH100 - '' is the working directory
    kept = [p for p in entries if p not in own and not p.endswith(".zip") and Path(p).is_dir()]
    return list(dict.fromkeys(kept))
