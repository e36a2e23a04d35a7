"""Slurm, as a run sees it: late, silent at times, and the one who starts tasks again."""

from __future__ import annotations

from collections.abc import Callable

from hpc_elastic.slurm.job_state import Phase, TaskState
from simulation.scenario import SLURM_TIMEOUT_S
from simulation.world import Process, World

_SOONEST_ANSWER_S = 0.03


class Slurm:
    """What Slurm believes of each task: its state and its attempt."""

    __slots__ = (
        "_longest_answer_s",
        "_tasks",
        "_tells_attempts",
        "_world",
        "down",
        "excluded",
        "hanging",
        "postponed_until",
    )

    def __init__(self, world: World, longest_answer_s: float, tells_attempts: bool) -> None:
        self._world = world
        self._longest_answer_s = longest_answer_s
        self._tells_attempts = tells_attempts
        self._tasks: dict[str, TaskState] = {}
        self.down = 0
        """How many faults at present make it refuse to answer."""
        self.hanging = 0
        self.postponed_until = 0.0
        """No queued task starts before."""

        self.excluded: set[str] = set()
        """Hosts on which no queued task starts."""

    def believe(
        self, task: str, state: str, attempt: int, starts_in_s: float | None = None
    ) -> None:
        """A task's state has changed, and Slurm knows."""
        self._tasks[task] = TaskState(
            task, state, reason="BeginTime" if starts_in_s else "",
            restarts=attempt if self._tells_attempts else None, starts_in_s=starts_in_s,
        )  # fmt: skip

    def ask(self, process: Process, answer: Callable[[dict[str, TaskState] | None], None]) -> None:
        """Ask how all tasks are; None comes where Slurm does not say."""
        if self.hanging:
            self._world.after(SLURM_TIMEOUT_S, process, answer, None)
        elif self.down:
            self._world.after(_SOONEST_ANSWER_S, process, answer, None)
        else:
            rng = self._world.rng
            takes = max(_SOONEST_ANSWER_S, self._longest_answer_s * rng.random())
            before = takes * rng.random()
            self._world.after(before, None, self._read, process, answer, takes - before)

    def inquire(self, process: Process, task: str, answer: Callable[[bool | None], None]) -> None:
        """Ask whether a task runs."""

        def runs(view: dict[str, TaskState] | None) -> None:
            state = (view or {}).get(task)
            answer(None if state is None else state.phase in (Phase.RUNNING, Phase.LEAVING))

        self.ask(process, runs)

    def _read(
        self,
        process: Process,
        answer: Callable[[dict[str, TaskState] | None], None],
        rest_s: float,
    ) -> None:
        self._world.after(rest_s, process, answer, dict(self._tasks))
