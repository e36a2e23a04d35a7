"""Every test of this folder may make groups of agents, which end with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from group import Group


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
