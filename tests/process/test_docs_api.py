"""The pages of the Python API, which docs/api_pages.py makes of the docstrings.

It calls Griffe, which calls git.
"""

import importlib
import re
import sys

from doc_pages import ROOT
from hpc_elastic import errors

sys.path.append(str(ROOT / "docs"))

from api_pages import api_pages


def test_the_pages_of_the_python_api_are_fresh():
    """`python docs/generate.py` writes them, and there are no others."""
    written = {path.name: path.read_text() for path in (ROOT / "docs/reference/api").glob("*.md")}
    assert written == api_pages()


def test_the_api_reference_has_all_that_is_public():
    """The names that the packages export, each under a heading."""
    headings = set(re.findall(r"^### (\w+)$", "\n".join(api_pages().values()), re.MULTILINE))
    for package in ("", ".data", ".checkpoint", ".ft", ".testing.fake_slurm"):
        module = importlib.import_module(f"hpc_elastic{package}")
        assert set(module.__all__) - headings <= {"Optimizer"}  # another name of OptimizerWrapper
    assert {name for name in vars(errors) if name.endswith("Error")} <= headings


def test_an_entry_of_the_api_reference_has_signature_sections_and_links():
    """As the docstring has them; a name that a page has is a link to it."""
    text = api_pages()["script.md"].partition("### follow_checkpoints\n")[2]
    entry = text.partition("### ")[0]
    assert "after: int = -1,\n    poll_s: float = 10.0," in entry
    assert "- `run`: The run directory.\n" in entry
    assert "**Yields**\n\nThe step of" in entry
    assert "- [`ConfigError`](errors.md#configerror): The checkpoint lacks" in entry
