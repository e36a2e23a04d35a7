"""A stranger: another user of the same machine.

Tests that need one are skipped unless root runs them; all that a stranger does is done by a
process with his uid.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strangers import STRANGER

Stranger = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that both users may enter and read, and nobody but the victim may write."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


_AS_STRANGER = """
import ast, importlib, os, sys
text = sys.argv.pop(1)
for node in ast.walk(ast.parse(text)):  # his uid may not be able to read the interpreter's folder
    if isinstance(node, ast.Import):
        [importlib.import_module(name.name) for name in node.names]
os.setgroups([])
os.setgid(%d)
os.setuid(%d)
exec(compile(text, "stranger", "exec"))
"""


@pytest.fixture
def stranger() -> Stranger:
    """Runs Python text as the stranger: ``stranger("import os; os.getuid()", *argv)``.

    The text imports by ``import module``, not by ``from``.
    """
    if os.geteuid():
        pytest.skip("only root can be two users")

    def run(text: str, *argv: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _AS_STRANGER % (STRANGER, STRANGER), text, *map(str, argv)],
            cwd="/", text=True, capture_output=True, timeout=timeout_s,
        )  # fmt: skip

    return run
