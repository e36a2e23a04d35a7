"""A lost task avoids its node until its earlier attempt has ended there."""

import json

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.slurm import quarantine
from hpc_elastic.slurm.parsing import NodeRecord
from hpc_elastic.slurm.quarantine import RID_S


class Client:
    """One task that waits, or not, and the nodes."""

    def __init__(self) -> None:
        self.avoided: list[str] | None = []
        self.down: set[str] = set()
        self.off: set[str] = set()
        self.asked: list[str] = []
        self.mute = False

    def excluded(self, task):
        """What it avoids; None: it does not wait."""
        return None if self.avoided is None else tuple(self.avoided)

    def exclude(self, tasks, hosts):
        """Let it avoid more."""
        self.avoided += hosts

    def readmit(self, task, host):
        """Let it avoid less."""
        if self.mute:
            raise SlurmCommandError(["scontrol"], None, "no answer within 10 s")
        if self.avoided is not None and host in self.avoided:
            self.avoided.remove(host)
        return self.avoided is not None

    def node(self, node):
        """Whether a node answers, and whether it has no power."""
        self.asked.append(node)
        return NodeRecord(None, node not in self.down, node in self.off, "")


@pytest.fixture
def client():
    """Slurm's, with one task."""
    return Client()


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    return RunDir(tmp_path)


def when_back(run, client, seconds, tasks=("7_1",)) -> float | None:
    """Look every five seconds; return when the task may start on all nodes again."""
    for now in range(0, seconds, 5):
        quarantine.lift_quarantine(run, tasks, client, 1000.0 + now)
        if client.avoided == []:
            return now
    return None


def test_a_task_avoids_its_last_node_until_that_was_up_for_a_while(run, client):
    """Its last attempt has ended there by then."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    assert client.avoided == ["n3"]
    assert when_back(run, client, 300) == RID_S
    assert list(run.avoided.iterdir()) == []


def test_the_time_counts_from_its_return(run, client):
    """However often it goes, and however long it is away."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    for now in range(0, 600, 5):
        client.down = {"n3"} if now < 300 or now == 330 else set()
        quarantine.lift_quarantine(run, ["7_1"], client, float(now))
        if not client.avoided:
            break
    assert now == 335 + RID_S


def test_a_node_without_power_is_rid_of_everything(run, client):
    """A cloud's instance that was taken back stays powered down: the run would lack it for good."""
    client.down = {"n3"}
    quarantine.quarantine_node(run, "7_1", "n3", client)
    assert when_back(run, client, 300) is None
    client.off = {"n3"}
    assert when_back(run, client, 5) == 0


def test_the_next_leader_counts_on(run, client):
    """It finds in the run directory since when the node is up."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    assert when_back(run, client, 55) is None
    quarantine.lift_quarantine(run, ["7_1"], client, 1000.0 + RID_S)
    assert client.avoided == []


def test_what_a_task_avoids_for_other_reasons_stays(run, client):
    """The user has said so, or the run has excluded the node; meanwhile perhaps."""
    client.avoided = ["n3"]
    quarantine.quarantine_node(run, "7_1", "n3", client)
    assert not run.avoided.exists()
    quarantine.quarantine_node(run, "7_1", "n4", client)
    run.excluded.write_text(json.dumps({"n4": "CUDA error"}))
    assert when_back(run, client, 300) is None
    assert client.avoided == ["n3", "n4"] and list(run.avoided.iterdir()) == []


def test_a_task_that_runs_elsewhere_is_seen_to_when_it_waits_again(run, client):
    """Slurm changes what waiting tasks avoid, and of no others."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    client.avoided = None
    assert when_back(run, client, 100) is None
    client.avoided = ["n3"]
    assert when_back(run, client, 100) == RID_S


def test_nothing_is_asked_where_no_task_that_is_gone_avoids_a_node(run, client):
    """Slurm has better things to do."""
    assert when_back(run, client, 10, ()) == 0
    quarantine.quarantine_node(run, "7_1", "n3", client)
    assert when_back(run, client, 100, ("7_2",)) is None
    assert client.asked == []


def test_the_last_attempt_gives_its_node_free(run, client):
    """It ends within seconds, and has told Slurm to wait for so long."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    quarantine.lift_own_quarantine(run, "7_1", "n4", client)
    assert client.avoided == ["n3"], "another attempt, elsewhere"
    quarantine.lift_own_quarantine(run, "7_1", "n3", client)
    assert client.avoided == [] and list(run.avoided.iterdir()) == []


def test_a_last_attempt_that_can_not_tell_slurm_ends_all_the_same(run, client, caplog):
    """The leader sees to it a minute later."""
    quarantine.quarantine_node(run, "7_1", "n3", client)
    client.mute = True
    quarantine.lift_own_quarantine(run, "7_1", "n3", client)
    assert "no answer within 10 s" in caplog.text
    client.mute = False
    assert when_back(run, client, 100) == RID_S


def test_a_node_of_a_coallocated_job_is_avoided_by_its_job(run, client):
    """Slurm knows the job only."""
    quarantine.quarantine_node(run, "7.1", "n3", client)
    assert [file.name for file in run.avoided.iterdir()] == ["7@n3"]
    assert when_back(run, client, 100, ("7.0", "7.1")) == RID_S
