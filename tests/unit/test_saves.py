"""When the checkpoints of a group begin to fail, as the agent of its first rank tells."""

from typing import Any

from hpc_elastic.agent.saves import Saves
from hpc_elastic.control import ControlPage


class Told:
    """A worker's page, and what was told of it."""

    def __init__(self, folder) -> None:
        self.page = ControlPage.create(folder, 0)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.saves = Saves(lambda kind, **fields: self.told.append((kind, fields)), self.page)

    def look(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what is told at one look."""
        self.saves.look()
        told, self.told = self.told, []
        return told


def test_an_incident_is_told_once_with_its_reason_and_its_end(tmp_path):
    """However many checkpoints it costs."""
    worker = Told(tmp_path)
    assert worker.look() == []
    worker.page.announce(20)
    assert worker.look() == []
    worker.page.not_saved(40, "No space left on device")
    assert worker.look() == [("not saved", {"step": 40, "why": "No space left on device"})]
    worker.page.not_saved(60, "No space left on device")
    assert worker.look() == worker.look() == []
    worker.page.announce(80)
    assert worker.look() == [("saved again", {"step": 80})]
    assert worker.look() == []
    worker.page.not_saved(100, "Stale file handle")
    assert worker.look() == [("not saved", {"step": 100, "why": "Stale file handle"})]


def test_the_same_step_may_be_saved_at_the_second_try(tmp_path):
    """An urgent save repeats the one that failed."""
    worker = Told(tmp_path)
    worker.page.announce(20)
    worker.page.not_saved(40, "why")
    worker.look()
    worker.page.announce(40)
    assert worker.look() == [("saved again", {"step": 40})]


def test_a_reason_of_any_length_and_alphabet_fits_on_the_page(tmp_path):
    """What is too long is cut, and nothing else on the page is touched."""
    worker = Told(tmp_path)
    worker.page.report(40, 0.5, 7)
    worker.page.not_saved(40, "ü€" * 5000)
    ((_, fields),) = worker.look()
    assert fields["why"].startswith("ü€ü€") and 400 < len(fields["why"]) < 1000
    worker.page.not_saved(60, "short")
    assert worker.page.why_not_saved() == "short"
    now = worker.page.read()
    assert (now.step, now.loss, now.samples) == (40, 0.5, 7)
