"""What is frozen of the time that a task has after SIGTERM, and of its global batch."""

from pathlib import Path

import pytest

from hpc_elastic.config import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.slurm.outputs import Preemption
from hpc_elastic.submit.grace import graces
from hpc_elastic.submit.plan import PlannedRun
from hpc_elastic.submit.session import lay_out


class Slurm:
    """Knows what a preemption is like in its partitions, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def preemption(self, partition: str | None) -> Preemption:
        """Return a grace by the partition's name."""
        self.asked.append(partition)
        return Preemption(grace_s=60 if partition == "gpu" else 0, kill_wait_s=30)


def run_with(launcher: SlurmSettings | LocalSettings, nodes: int = 1) -> PlannedRun:
    """A run of one worker a node."""
    return PlannedRun(Path("run"), RunSettings(NodeRange(1, nodes), 1, launcher))


def test_what_slurm_gives_after_sigterm_is_asked_once_for_each_partition():
    """What the user says of it goes before that; a process of this machine has half a minute."""
    slurm = Slurm()
    launchers = [
        *(SlurmSettings(partition="gpu"), SlurmSettings(), SlurmSettings(partition="gpu")),
        *(SlurmSettings(grace_s=20.0), LocalSettings(), LocalSettings(grace_s=45.0)),
    ]
    found = [(g.preempted_s, g.ended_s) for g in graces(list(map(run_with, launchers)), slurm)]
    assert found == [(90, 30), (30, 30), (90, 30), (20, 20), (30, 30), (45, 30)]
    assert slurm.asked == ["gpu", None]


def test_more_workers_than_samples_in_a_global_batch_are_refused(tmp_path):
    """At the submission, with what would fit; a script that names no batch is not asked."""
    small = LocalSettings(global_batch=4)
    assert lay_out([run_with(small, nodes=4)], tmp_path).runs
    assert lay_out([run_with(LocalSettings(), nodes=5)], tmp_path).runs
    with pytest.raises(ConfigError, match=r"launcher\.global_batch=4: 5 nodes .* at least 5"):
        lay_out([run_with(small, nodes=5)], tmp_path)
