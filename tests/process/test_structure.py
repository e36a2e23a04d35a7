"""The shape of the package and its tools: one meaning for each name, and no circles."""

import ast
import graphlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import hpc_elastic

ROOT = Path(hpc_elastic.__file__).parents[1]
DISTRIBUTIONS = ("hpc_elastic_testing", "hpc_elastic_watch", "slurm_sandbox")
ROOTS = (ROOT, ROOT / "tools", *(ROOT / "tools" / name for name in DISTRIBUTIONS))
PACKAGES = (
    ROOT / "hpc_elastic", ROOT / "tools" / "soak", *(ROOT / "tools" / n / n for n in DISTRIBUTIONS),
)  # fmt: skip


def name_of(path: Path) -> str:
    """The name by which a module is imported."""
    root = max((r for r in ROOTS if path.is_relative_to(r)), key=lambda r: len(r.parts))
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text()) for p in PACKAGES for path in p.rglob("*.py")}


def test_no_two_modules_define_public_classes_of_the_same_name():
    """A reader who has met a name once knows what it stands for."""
    homes = defaultdict(list)
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def imported(module: str, tree: ast.AST) -> set[str]:
    """The modules of the package that a module imports, in functions and for types too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
    return found - {module}


def test_no_module_imports_itself_by_way_of_others():
    """Not in a function or for types either."""
    graph = {module: imported(module, tree) for module, tree in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_report_can_be_called_where_its_package_has_been_imported():
    """The integrations import `hpc_elastic.report`, which takes the place of the function."""
    code = (
        "import hpc_elastic.integrations.tracking; from hpc_elastic import report; report(step=1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
