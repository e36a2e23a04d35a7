"""No text of a run's files reaches the terminal as a command to it, whichever command shows it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.run.directory import RunDir

SCRIPT = """
import hydra

from hpc_elastic import Checkpointer, report

@hydra.main(version_base=None)
def main(cfg):
    checkpoints = Checkpointer({"x": {"y": 1}})
    step = (checkpoints.load_latest() or 0) + 1
    report(step=step, total_steps=2, loss=1.0)
    checkpoints.save(step)
    checkpoints.wait()
    if step == 1:
        raise ValueError("it fails once")

if __name__ == "__main__":
    main()
"""
POISON = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x1b[8m\x9b2K\r\u202e"
FAKE = "\nthe run succeeded"
KEPT = {"kind", "launcher", "phase", "status", "reason", "outcome", "state", "file", "submission"}
"""Keys whose values are words of ours, or names of files that are to be found."""
COMMANDS = [
    ("status",), ("status", "--json"), ("events",), ("events", "--all"), ("logs",),
    ("checkpoints", "verify", "RUN"),
    ("checkpoints", "prune", "RUN", "--keep-last", "1", "--dry-run"), ("cancel", "-y"),
    ("report", "--json"), ("checkpoints", "export", "RUN", "-o", "state.pt"),
    ("audit",), ("wait",), ("list", "--all"), ("resume",),
]  # fmt: skip
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
REDRAWN = re.compile(r"\x1b\[\?25[lh]|\r?\x1b\[(1A\x1b\[)?2K")
"""What Rich writes to draw a table again in its place."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run that has failed once, and then succeeded."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "script.py").write_text(SCRIPT)
    argv = ["script.py", "+launcher=local", "hydra.sweep.dir=sweep", "nproc_per_node=1"]
    done = subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "sweep"


def poisoned(value: object, key: str = "") -> object:
    """Return a value of JSON with the poison behind each text."""
    if isinstance(value, dict):
        return {name: poisoned(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, key) for inner in value]
    return value + POISON + FAKE if isinstance(value, str) and key not in KEPT else value


@pytest.fixture
def run(ended, tmp_path, monkeypatch) -> Path:
    """A copy of it, in which a stranger has changed all texts."""
    shutil.copytree(ended, tmp_path / "sweep")
    run = RunDir(tmp_path / "sweep" / "0")
    for path in (run.status, run.result, *run.path.glob("checkpoints/step-*/manifest*.json")):
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()))))
    for path in (*(run.path / "events").glob("*.jsonl"), run.progress):
        lines = [json.dumps(poisoned(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
    for path in run.path.rglob("*.out"):
        path.write_text(path.read_text() + f"a line{POISON}\n{POISON}\n")
    monkeypatch.chdir(tmp_path)
    return run.path


@pytest.mark.parametrize("on_terminal", [False, True])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_of_a_run_commands_the_terminal(run, command, on_terminal, capsys, monkeypatch):
    """Neither control characters nor turned text nor a line of its own; colours on a terminal."""
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    name, *more = command
    words = command if name in ("list", "checkpoints") else (name, "RUN", *more)
    main([str(run) if word == "RUN" else word for word in words])
    shown = "".join(capsys.readouterr())
    assert shown
    rest = COLOUR.sub("", shown) if on_terminal else shown
    if on_terminal and name == "wait":
        assert REDRAWN.search(rest)
        rest = REDRAWN.sub("", rest)
    assert not [c for c in rest if c in POISON and not c.isprintable()], ascii(shown)
    assert FAKE not in rest
