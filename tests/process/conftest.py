"""Every test of this folder may make groups of agents, which end with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from group import Group

from hpc_elastic.run.events import problems, read_events


@pytest.fixture(autouse=True)
def _events_are_as_documented(request: pytest.FixtureRequest, tmp_path) -> Iterator[None]:
    """Every event that a run of a test has written is of a kind that is described."""
    yield
    if getattr(request.module, "EVENTS_ARE_INCOMPLETE", False):
        return
    events = (e for folder in tmp_path.rglob("events") for e in read_events(folder))
    found = sorted({problem for event in events for problem in problems(event)})
    assert found == [], "every event is as hpc_elastic/run/events.py says"


@pytest.fixture
def group(tmp_path) -> Iterator[Callable[..., Group]]:
    """Makes groups, and ends their agents."""
    made: list[Group] = []

    def make(folder: Path = tmp_path, **rules: object) -> Group:
        made.append(Group(folder, **rules))
        return made[-1]

    yield make
    for g in made:
        for session in g.sessions:
            session.leave("the test is over")
        g.threads.shutdown()


@pytest.fixture
def nvidia_smi_runs(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Puts a command ``nvidia-smi`` before all others, which runs a shell script."""

    def install(script: str) -> None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


@pytest.fixture
def nvidia_smi(nvidia_smi_runs) -> Callable[[str], None]:
    """Puts a command ``nvidia-smi`` before all others, which writes an answer."""
    return lambda answer: nvidia_smi_runs(f"cat <<'END'\n{answer}\nEND")
