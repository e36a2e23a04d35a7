"""Whether a replica saves, and how urgent that is."""

from collections.abc import Iterator

import pytest

from hpc_elastic.ft.manager import Saving
from hpc_elastic.ft.manager_client import GroupPlace
from hpc_elastic.worker import reporting


class _Link:
    """Knows whether the newest state goes with this group, in the next step."""

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last

    def settle(self) -> bool:
        """Return it."""
        return self._is_last


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """Nothing is urgent afterwards."""
    yield
    reporting.save_is_last(False)


ALONE = GroupPlace(0, 1, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("is_last", "is_saver", "due", "saves", "urgent"),
    [
        (False, True, False, False, False),
        (False, True, True, True, False),
        (True, True, False, True, True),
        (True, True, True, True, True),
        (True, False, True, False, False),
        (False, False, True, False, False),
    ],
)
def test_one_replica_saves(is_last, is_saver, due, saves, urgent):
    """When it is due, and urgently in the last step before everybody leaves."""
    reporting.save_is_last(True)  # said before, and void
    saving = Saving(_Link(is_last), ALONE, 1.0, lambda: is_saver)
    assert saving.decide(5, due, False) is saves
    assert reporting.save_is_urgent() is urgent
