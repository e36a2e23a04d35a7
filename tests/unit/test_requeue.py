"""How a task goes that was told to."""

import pytest

from hpc_elastic.slurm.requeue import Departure, departure
from hpc_elastic.slurm.states import TaskState


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", Departure.REQUEUE),
        ("COMPLETING", Departure.EXIT),
        ("CANCELLED", Departure.EXIT),
        ("TIMEOUT", Departure.EXIT),
        ("REQUEUED", Departure.EXIT),
        (None, Departure.EXIT),
    ],
)
def test_only_a_task_that_slurm_still_calls_running_requeues_itself(state, expected):
    """Preemption's grace leaves the task RUNNING; a cancelled or expired one must not come back."""
    assert departure(state and TaskState("7_0", state)) is expected
