"""When the checkpoints of a group begin to fail, as the agent of its first rank tells."""

from typing import Any

from hpc_elastic.agent.elastic_agent import CheckpointFailureLog
from hpc_elastic.worker.shared_page import SharedPage

Told = list[tuple[str, dict[str, Any]]]


class Agent:
    """An agent that looks after its first rank's checkpoints, and what it has told."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self._told: Told = []
        self._saves = CheckpointFailureLog(lambda kind, **fields: self._told.append((kind, fields)))

    def round(self) -> SharedPage:
        """Begin another round, of which it has the first rank; return the worker's page."""
        page = SharedPage.create(self._folder, 0)
        self._saves.watch(page)
        return page

    def round_of_others(self) -> None:
        """Begin another round, of which it does not have the first rank."""
        self._saves.watch(None)

    def look(self) -> Told:
        """Return what is told at one look."""
        self._saves.poll()
        told, self._told = self._told, []
        return told


def test_an_incident_is_told_once_with_its_reason_and_its_end(tmp_path):
    """However many checkpoints it costs."""
    agent = Agent(tmp_path)
    worker = agent.round()
    assert agent.look() == []
    worker.report_stored(20)
    assert agent.look() == []
    worker.report_not_saved(40, "No space left on device")
    assert agent.look() == [("checkpoint_failed", {"step": 40, "why": "No space left on device"})]
    worker.report_not_saved(60, "No space left on device")
    assert agent.look() == agent.look() == []
    worker.report_stored(80)
    assert agent.look() == [("checkpoint_recovered", {"step": 80})]
    assert agent.look() == []
    worker.report_not_saved(100, "Stale file handle")
    assert agent.look() == [("checkpoint_failed", {"step": 100, "why": "Stale file handle"})]


def test_what_stays_in_memory_ends_no_incident(tmp_path):
    """The directory still does not take anything."""
    agent = Agent(tmp_path)
    worker = agent.round()
    worker.report_not_saved(40, "why")
    assert [kind for kind, _ in agent.look()] == ["checkpoint_failed"]
    worker.announce(60)
    assert agent.look() == []


def test_the_same_step_may_be_saved_at_the_second_try(tmp_path):
    """An urgent save repeats the one that failed, perhaps before anybody looks."""
    agent = Agent(tmp_path)
    worker = agent.round()
    worker.report_stored(20)
    worker.report_not_saved(40, "why")
    worker.report_stored(40)
    assert [kind for kind, _ in agent.look()] == ["checkpoint_failed", "checkpoint_recovered"]


def test_an_incident_may_outlast_a_round(tmp_path):
    """Until it is over, or another node has the first rank: nobody here hears of its end."""
    agent = Agent(tmp_path)
    agent.round().report_not_saved(40, "why")
    assert [kind for kind, _ in agent.look()] == ["checkpoint_failed"]
    worker = agent.round()
    worker.report_not_saved(60, "why")
    assert agent.look() == []
    worker.report_stored(80)
    assert agent.look() == [("checkpoint_recovered", {"step": 80})]
    worker.report_not_saved(100, "why")
    assert len(agent.look()) == 1
    agent.round_of_others()
    assert agent.look() == []
    agent.round().report_stored(120)
    assert agent.look() == []


def test_a_reason_of_any_length_and_alphabet_fits_on_the_page(tmp_path):
    """What is too long is cut, and nothing else on the page is touched."""
    agent = Agent(tmp_path)
    worker = agent.round()
    worker.report(40, 0.5, 7)
    worker.report_not_saved(40, "ü€" * 5000)
    ((_, fields),) = agent.look()
    assert fields["why"].startswith("ü€ü€") and 400 < len(fields["why"]) < 1000
    worker.report_not_saved(60, "short")
    assert worker.why_not_saved() == "short"
    now = worker.read()
    assert (now.step, now.loss, now.samples) == (40, 0.5, 7)
