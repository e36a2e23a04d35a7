"""pyproject.toml decides: the version and the dependencies stand in other files as well."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

CLONE = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((CLONE / "pyproject.toml").read_text())
RECIPE = CLONE / "packaging" / "conda-forge" / "recipe.yaml"
SPACK = CLONE / "packaging" / "spack" / "package.py"

OF_CONDA = {"torch": "pytorch", "prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}
"""The packages that have another name on conda-forge."""


def wanted() -> dict[str, str]:
    """The dependencies of pyproject.toml on each Python: the bounds of each name, and of Python."""
    project = PROJECT["project"]
    always = [d for d in project["dependencies"] if ";" not in d]
    required = [re.split(r"(?=[<>=])", d, maxsplit=1) for d in always]
    return {"python": project["requires-python"], **{name: bounds for name, bounds in required}}


def range_of_spack(bounds: str) -> str:
    """``>=1.3.2,<1.5`` as Spack has it: ``1.3.2:1.4``, whose end has all of 1.4."""
    lower, _, upper = bounds.removeprefix(">=").partition(",<")
    if not upper:
        return f"{lower}:"
    major, minor = upper.split(".")
    return f"{lower}:{major}.{int(minor) - 1}"


def test_the_recipe_of_conda_forge_has_the_dependencies() -> None:
    """Each with the same bounds, and what builds the package."""
    recipe = yaml.safe_load(RECIPE.read_text())
    text = str(recipe["context"]["python_min"])
    listed = {
        kind: [entry.replace("${{ python_min }}", text) for entry in entries]
        for kind, entries in recipe["requirements"].items()
    }
    expected = {f"{OF_CONDA.get(name, name)} {bounds}" for name, bounds in wanted().items()}
    assert set(listed["run"]) == {"__linux", *expected}
    lower = wanted()["python"].removeprefix(">=")
    (setuptools,) = PROJECT["build-system"]["requires"]
    tool = setuptools.replace("setuptools", "setuptools ")
    assert set(listed["host"]) == {f"python {lower}.*", "pip", tool}
    (command,) = PROJECT["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(command)]
    assert recipe["about"]["summary"] == PROJECT["project"]["description"]


def test_the_package_of_spack_has_the_dependencies() -> None:
    """Each with the same bounds, and what builds the package."""
    text = SPACK.read_text()
    compile(text, str(SPACK), "exec")
    listed = re.findall(r'depends_on\("(?:py-)?([\w-]+)@([\d.:]+)', text)
    (setuptools,) = PROJECT["build-system"]["requires"]
    tool, _, bound = setuptools.partition(">=")
    expected = {name: range_of_spack(bounds) for name, bounds in wanted().items()}
    assert sorted(listed) == sorted([*expected.items(), (tool, f"{bound}:")])


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.*)$"),
        ("packaging/conda-forge/recipe.yaml", r'^  version: "(.*)"$'),
        ("packaging/spack/package.py", r'\bversion\("(.*?)"'),
        ("packaging/spack/package.py", r"hpc_elastic-(.*)\.tar\.gz"),
        ("CHANGELOG.md", r"^## \[(\d.*?)\]"),
        ("README.md", r"This is version ([\d.]+),"),
    ],
)
def test_the_version_is_that_of_the_project(file: str, pattern: str) -> None:
    """`scripts/release --version` writes it into all of these files."""
    found = re.search(pattern, (CLONE / file).read_text(), re.MULTILINE)
    assert found and found[1] == PROJECT["project"]["version"]


def test_the_readme_leads_to_the_project_from_other_sites(tmp_path: Path) -> None:
    """`scripts/release` makes each of its links inside absolute, if the address is known."""
    script = (CLONE / "scripts/release").read_text()
    (function,) = re.findall(r"^absolute_links\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)
    shutil.copy(CLONE / "README.md", tmp_path)
    before = re.findall(r"\]\((?!https?:)([^)]+)\)", (tmp_path / "README.md").read_text())
    variables = "address=https://git.example/us/it version=9.9"
    command = f"{function}\n{variables}; absolute_links {shlex.quote(str(tmp_path))}"
    subprocess.run(["bash", "-euc", command], check=True)
    after = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    at = "https://git.example/us/it/{}/v9.9/{}"
    pictures = {path for path in before if path.endswith((".svg", ".png"))}
    assert pictures and {at.format("raw", picture) for picture in pictures} < set(after)
    assert {at.format("blob", path) for path in {*before} - pictures} < set(after)
    assert all((CLONE / path.partition("#")[0]).exists() for path in before)


def test_the_citation_has_the_date_of_the_release() -> None:
    """That of the changelog's newest release."""
    dated = re.search(r"^## \[\d.*?\] - (\S+)$", (CLONE / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((CLONE / "CITATION.cff").read_text())
    assert dated and str(citation["date-released"]) == dated[1]
    assert citation["keywords"] == PROJECT["project"]["keywords"]
    assert citation["license"] == PROJECT["project"]["license"]
