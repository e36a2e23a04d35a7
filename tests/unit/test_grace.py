"""What is frozen of the time that a task has after SIGTERM, and of its global batch."""

from pathlib import Path

import pytest

from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.plan import PlannedRun
from hpc_elastic.launcher.prepare import graces
from hpc_elastic.launcher.session import lay_out
from hpc_elastic.slurm.parsing import Partition, Preemption


class Slurm:
    """Knows what a preemption is like in its partitions, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def preemption(self, partition: str | None) -> Preemption:
        """Return a grace by the partition's name."""
        self.asked.append(partition)
        return Preemption(preempt_grace_s=60 if partition == "gpu" else 0, kill_wait_s=30)


def run_with(launcher: SlurmSettings | LocalSettings, nodes: int = 1) -> PlannedRun:
    """A run of one worker a node."""
    return PlannedRun(Path("run"), RunSettings(NodeRange(1, nodes), 1, launcher))


def test_what_slurm_gives_after_sigterm_is_asked_once_for_each_partition():
    """What the user says of it goes before that; a process of this machine has half a minute."""
    slurm = Slurm()
    launchers = [
        *(SlurmSettings(partition="gpu"), SlurmSettings(), SlurmSettings(partition="gpu")),
        *(
            SlurmSettings(preempt_grace_s=20.0),
            LocalSettings(),
            LocalSettings(preempt_grace_s=45.0),
        ),
    ]
    found = [(g.preempted_s, g.ended_s) for g in graces(list(map(run_with, launchers)), slurm)]
    assert found == [(90, 30), (30, 30), (90, 30), (20, 20), (30, 30), (45, 30)]
    assert slurm.asked == ["gpu", None]


class OnePartition:
    """Has one partition, of four nodes and half an hour."""

    def preemption(self, partition: str | None) -> Preemption:
        """Return it."""
        short = Partition("short", num_nodes=4, max_time_s=1800.0)
        return Preemption(partitions=(short,))


def with_minimum(least: int, **settings) -> list[PlannedRun]:
    """A run of at least so many nodes."""
    return [PlannedRun(Path("run"), RunSettings(NodeRange(least, 8), 1, SlurmSettings(**settings)))]


def test_a_minimum_that_the_partition_does_not_have_is_refused():
    """It would hold all its nodes in silence. Tasks that share nodes may be more than nodes."""
    graces(with_minimum(4), OnePartition())
    with pytest.raises(ConfigError, match=r"nodes=5: .* partition short has 4 nodes") as refused:
        graces(with_minimum(5), OnePartition())
    assert "minimum of 4 or less" in str(refused.value)
    graces(with_minimum(5, gpus_per_node=1), OnePartition())
    with pytest.raises(ConfigError, match="nodes=5"):
        graces(with_minimum(5, gpus_per_node=1, exclusive=True), OnePartition())


def test_a_time_limit_above_the_partitions_is_said_at_the_submission(capsys):
    """Slurm takes the tasks, and they would wait for ever; a QOS may permit them."""
    graces(with_minimum(1, time="30"), OnePartition())
    graces(with_minimum(1), OnePartition())
    assert capsys.readouterr().err == ""
    graces([*with_minimum(1, time="120"), *with_minimum(2, time="120")], OnePartition())
    said = capsys.readouterr().err
    assert said.count("launcher.time=120: partition short allows 30 min at most") == 1
    assert "launcher.time=30 or less" in said


def test_more_workers_than_samples_in_a_global_batch_are_refused(tmp_path):
    """At the submission, with what would fit; a script that names no batch is not asked."""
    small = LocalSettings(global_batch=4)
    assert lay_out([run_with(small, nodes=4)], tmp_path).runs
    assert lay_out([run_with(LocalSettings(), nodes=5)], tmp_path).runs
    with pytest.raises(ConfigError, match=r"launcher\.global_batch=4: 5 nodes .* at least 5"):
        lay_out([run_with(small, nodes=5)], tmp_path)
