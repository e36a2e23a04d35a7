"""The README's two commands, and the sweep of the quickstart, as a newcomer sees them."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from doc_pages import ROOT, blocks, typed_lines


def _commands() -> list[str]:
    """Return what the first block of the README types."""
    block, *_ = blocks((ROOT / "README.md").read_text(), "console")
    return [line.split("#")[0].strip() for line in typed_lines(block)]


def test_the_readme_begins_with_its_two_commands():
    """They stand in its first screen, are scripts of the clone, and can be typed as they are."""
    assert _commands() == ["./scripts/quickstart", "./scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in _commands())
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) < 120
    assert page.index("./scripts/test") < page.index("\n## ")


@pytest.mark.long
def test_the_two_commands_of_the_readme_work_in_a_fresh_clone(tmp_path):
    """Typed as they stand there, they set up, train, and pass tests."""
    quickstart, test = _commands()
    clone = _clone(tmp_path / "clone")
    trained = _type(f"{quickstart} epochs=2", clone)
    assert len(re.findall(r"succeeded +0\.\d+", trained)) == 2
    assert len(list(clone.glob("multirun/*/*/*/result.json"))) == 2
    passed = _type(f"{test} --fast -k test_step_agreement", clone)
    assert re.search(r"[1-9]\d* passed", passed)


@pytest.mark.long
def test_the_runs_of_the_quickstart_differ(tmp_path):
    """Its learning rates lead to results that nobody takes for one and the same."""
    found = re.search(r"'lr=([\d.]+),([\d.]+)'", (ROOT / "scripts/quickstart").read_text())
    assert found is not None
    what = ["nodes=1", "epochs=8", f"lr={found[1]},{found[2]}", f"hydra.sweep.dir={tmp_path}"]
    train = [sys.executable, str(ROOT / "train.py"), "-m", "launcher=local"]
    done = subprocess.run(
        [*train, *what], check=True, timeout=300, cwd=tmp_path, capture_output=True, text=True
    )
    first, second = map(float, re.findall(r"succeeded +(0\.\d+)", done.stdout))
    assert first > 0.95 and first - second > 0.01


def _clone(folder: Path) -> Path:
    """Copy what is tracked; its environment finds the packages of this one, and not this clone."""
    tracked = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(tracked, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    venv.create(folder / ".venv", with_pip=True)
    (site,) = (folder / ".venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def _type(command: str, folder: Path) -> str:
    """Return the output of a command line."""
    shell = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        ["bash", "-c", command], timeout=600, cwd=folder, env=shell, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
