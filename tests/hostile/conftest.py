"""Tests that need two users are skipped unless root runs them."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strangers import as_stranger

Stranger = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that both users may enter and read, and nobody but the victim may write."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stranger() -> Stranger:
    """Runs Python text as the stranger: ``stranger("import os; os.getuid()", *argv)``."""
    if os.geteuid():
        pytest.skip("only root can be two users")

    def run(text: str, *argv: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            as_stranger(text, *argv), cwd="/", text=True, capture_output=True, timeout=timeout_s
        )

    return run
