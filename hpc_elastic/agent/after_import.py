"""To do something once a module has been imported, whoever imports it, and only then."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module has been imported; now, if it has been.

    Args:
        name: Of a module or package, as in ``import name``.
        then: Called once, by the thread that imports, before its import statement ends.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module as it would be found without this, and see to what follows."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then

        def load_and_tell(module: types.ModuleType) -> None:
            del loader.exec_module  # of this instance: a reload is none of ours
            loader.exec_module(module)
            then()

        loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec
