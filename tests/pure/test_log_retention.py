"""Which logs of past rounds a task keeps, and that its agent removes no others."""

import threading

import pytest

from hpc_elastic.agent.output_files import NEWEST, LogRetention, superfluous

SUFFIXES = ("out", "out.times", "err", "err.times")


def write_logs(folder, number, *suffixes, num_ranks=2) -> None:
    """The files of the workers of a round."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        for suffix in (*SUFFIXES, *suffixes):
            (folder / f"round-{number}.rank-{rank}.{suffix}").write_text("x")


def rounds_in(folder) -> list[int]:
    """The rounds that have logs in a folder."""
    names = [path.name.split(".") for path in folder.iterdir() if ".rank-" in path.name]
    return sorted({int(parts[0].removeprefix("round-")) for parts in names})


class Agent:
    """The logs of a task's attempt, whose rounds follow each other."""

    def __init__(self, task, attempt=0):
        self.folder = task / f"attempt-{attempt}"
        self.retention = LogRetention(self.folder, attempt)
        self.restarts = 0

    def start(self, number, *suffixes, had_step=True) -> None:
        """Begin a round, and wait until what is removed for it is gone."""
        write_logs(self.folder, number, *suffixes)
        others = set(threading.enumerate())
        self.retention.start_round(number, self.restarts, had_step=had_step)
        for thread in set(threading.enumerate()) - others:
            thread.join(60.0)

    @property
    def rounds(self) -> list[int]:
        """The rounds that have logs."""
        return rounds_in(self.folder)


def test_a_month_of_rounds_keeps_a_bounded_number_of_files(tmp_path):
    """The first round, the newest ones, and the present one; other files stay."""
    agent = Agent(tmp_path / "7_0")
    for number in range(1, 200):
        agent.start(number)
        (agent.folder / "agent.log").touch()
    assert agent.rounds == [1, *range(199 - NEWEST, 200)]
    assert (agent.folder / "agent.log").exists()
    assert len(list(agent.folder.iterdir())) == (NEWEST + 2) * 2 * len(SUFFIXES) + 1


def test_what_a_report_names_is_never_removed(tmp_path):
    """A failure that spent a restart here or elsewhere, and stacks; not one that spent none."""
    agent = Agent(tmp_path / "7_0")
    for number in range(1, 100):
        agent.start(number, *(["stack.txt"] if number == 7 else []))
        if number in (5, 11):  # here
            agent.retention.keep_round()
        agent.restarts += number in (5, 9)  # 9 on another node; 11 because of another
    assert agent.rounds[:4] == [1, 5, 7, 9] and agent.rounds[4] > 70


def test_a_round_without_a_step_is_removed_once_a_later_one_has_one(tmp_path):
    """Until then it may show why there was none; a script may report none at all."""
    agent = Agent(tmp_path / "7_0")
    for number in range(1, 6):
        agent.start(number, had_step=False)
    assert agent.rounds == [1, 2, 3, 4, 5]
    agent.start(6)
    assert agent.rounds == [5, 6]


def test_the_next_attempt_removes_what_the_last_one_has_left(tmp_path):
    """But the round whose failure ended that, and what another task has."""
    first = Agent(tmp_path / "7_0")
    for number in range(1, 31):
        first.start(number)
    first.retention.keep_round()
    write_logs(tmp_path / "7_1" / "attempt-0", 2)
    second = Agent(tmp_path / "7_0", 1)
    for number in range(31, 60):
        second.start(number)
    assert first.rounds == [1, 30] and rounds_in(tmp_path / "7_1" / "attempt-0") == [2]
    assert second.rounds == [*range(59 - NEWEST, 60)]


@pytest.mark.parametrize("kept", [set(), {(0, 3)}])
def test_the_first_and_the_newest_are_kept(kept):
    """A pure rule over rounds of all attempts."""
    rounds = [(attempt, number) for attempt in (0, 1) for number in range(1, 21)]
    removed = superfluous(rounds, kept, {(1, 19)})
    assert (0, 1) not in removed and (1, 20) not in removed and (1, 19) in removed
    assert len(rounds) - len(removed) == NEWEST + 1 + len(kept)


def test_a_folder_that_cannot_be_read_stops_no_round(tmp_path):
    """Its files stay."""
    agent = Agent(tmp_path / "7_0")
    agent.start(1)
    for path in agent.folder.iterdir():
        path.unlink()
    agent.folder.rmdir()
    agent.retention.keep_round()
    agent.retention.start_round(2, 1, had_step=True)
