"""The shape of the package: one meaning for each name, and no circles."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

import hpc_elastic

PACKAGE = Path(hpc_elastic.__file__).parent
MODULES = {
    ".".join(["hpc_elastic", *p.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): ast.parse(p.read_text())
    for p in PACKAGE.rglob("*.py")
    if "testing" not in p.parts
}


def test_no_two_modules_define_public_classes_of_the_same_name():
    """A reader who has met a name once knows what it stands for."""
    homes = defaultdict(list)
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def imported(body: list[ast.stmt]) -> set[str]:
    """The modules that are imported when a module is, or for its types."""
    found = set()
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {node.module}
        elif isinstance(node, ast.If | ast.Try):
            found |= imported(node.body)
    return found


def test_no_module_imports_itself_by_way_of_others():
    """Not for types either."""
    graph = {m: imported(tree.body) - {m} for m, tree in MODULES.items()}
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the circle
