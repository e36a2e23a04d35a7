"""Whether a replica saves, and how urgent that is."""

from collections.abc import Iterator

import pytest

from hpc_elastic import control
from hpc_elastic.ft.protocol import Confirm
from hpc_elastic.ft.saving import Saving
from hpc_elastic.ft.server import Group


class _Link:
    """Knows what has been confirmed of the next call."""

    def __init__(self, confirm: Confirm | None) -> None:
        self._confirm = confirm

    def settle(self) -> Confirm | None:
        """Return it."""
        return self._confirm


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """Nothing is urgent afterwards."""
    yield
    control.save_is_last(False)


LEAVES, STAYS = Confirm(1, 7, leaves=True), Confirm(1, 7)
LAST = Confirm(1, 7, leaves=True, last=True)
ALONE = Group(0, 1, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("confirm", "is_saver", "due", "saves", "urgent"),
    [
        (None, True, False, False, False),
        (None, True, True, True, False),
        (STAYS, True, True, True, False),
        (LEAVES, True, False, False, False),
        (LAST, True, False, True, True),
        (LAST, True, True, True, True),
        (LAST, False, True, False, False),
        (None, False, True, False, False),
    ],
)
def test_one_replica_saves(confirm, is_saver, due, saves, urgent):
    """When it is due, and urgently in the last step before everybody leaves."""
    control.save_is_last(True)  # said before, and void
    saving = Saving(_Link(confirm), ALONE, 1.0, lambda: is_saver)
    assert saving.decide(5, due, False) is saves
    assert control.save_is_urgent() is urgent
