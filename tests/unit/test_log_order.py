"""The output of many files as one stream: order, choice, and what is refused. All of it pure."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_elastic.report.log_files import (
    LogLine,
    LogSource,
    NothingSelectedError,
    Selection,
    Settling,
    is_over,
    merge,
    newest_of_tasks,
    readable,
    require_there,
    source_of,
)


def worker(rank, host="n1", stream="out", attempt=0, round_=1, task="7_0") -> LogSource:
    """A worker's file."""
    path = Path(f"{task}/{attempt}/{round_}.{rank}.{stream}")
    return LogSource(path, stream, task, attempt, round_, rank, host)


AGENT = LogSource(Path("7_0/0/agent.log"), "agent", "7_0", 0, host="n1")
SLURM = LogSource(Path("7_0.log"), "slurm", "7_0", host="n1")
RUN = [worker(0), worker(1), worker(2, "n2", task="7_1"), worker(2, "n2", "err", task="7_1")]


def texts(lines) -> str:
    """What lines say."""
    return " ".join(line.text for line in lines)


def stream(source, *times):
    """A file whose lines say when they were written."""
    return (
        times[0] if times else 0.0,
        iter([LogLine(t, source, f"{source.rank}:{t}") for t in times]),
    )


def test_lines_of_several_files_come_by_time_and_those_of_one_in_its_order():
    """Lines of one time come by file, and no file is torn apart."""
    merged = merge([stream(RUN[0], 1, 3, 3, 9), stream(RUN[1], 2, 3), stream(RUN[2])])
    assert texts(merged) == "0:1 1:2 0:3 0:3 1:3 0:9"


def test_random_files_are_merged_as_if_they_had_been_sorted_together():
    """For whatever is in them."""
    dice = random.Random(4)
    for _ in range(200):
        files = [sorted(dice.choices(range(9), k=dice.randrange(6))) for _ in range(4)]
        merged = list(merge([stream(worker(r), *times) for r, times in enumerate(files)]))
        assert len(merged) == sum(map(len, files))
        assert all((a.time, a.source.rank) <= (b.time, b.source.rank) for a, b in pairwise(merged))


def test_a_file_is_begun_only_when_its_time_has_come():
    """A run of days has tens of thousands of files, which can not all be open."""
    begun = []

    def file(rank, *times):
        begun.append(rank)
        yield from (LogLine(t, worker(rank), f"{rank}:{t}") for t in times)

    merged = merge([(1.0, file(0, 1, 2)), (5.0, file(1, 5))])
    next(merged), next(merged)
    assert begun == [0]
    assert texts(merged) == "1:5" and begun == [0, 1]


def test_followed_lines_wait_for_earlier_ones_of_other_files():
    """And go when they have waited, whatever the clock of their node says."""
    settling = Settling(0.5)
    ahead = 1000.0
    settling.add([LogLine(ahead + 2, RUN[0], "b")], now=10.0)
    assert settling.take(10.4) == []
    settling.add([LogLine(ahead + 1, RUN[1], "a"), LogLine(ahead + 9, RUN[1], "c")], now=10.4)
    assert texts(settling.take(10.5)) == "a b"
    assert settling.take(10.8) == []
    assert texts(settling.take(10.9)) == "c"


def test_lines_of_one_file_stay_in_order_while_they_settle():
    """Also those of the same time."""
    settling = Settling(0.5)
    settling.add(
        [LogLine(1.0, RUN[0], "1"), LogLine(1.0, RUN[0], "2"), LogLine(1.0, RUN[0], "3")], 0.0
    )
    assert texts(settling.take(1.0)) == "1 2 3"
    settling.add([LogLine(2.0, RUN[0], "4")], 5.0)
    assert texts(settling.take_all()) == "4"
    assert settling.take_all() == []


@pytest.mark.parametrize(
    ("size", "read", "covered", "waited_s", "expected"),
    [
        (100, 40, 80, 0.0, 80),  # as far as it is known when it came
        (100, 40, 40, 0.3, 40),  # its agent will say soon
        (100, 40, 40, 1.5, 100),  # it does not: there is none
        (60, 40, 80, 0.0, 60),  # the index came over the network before the file
    ],
)
def test_what_grows_is_read_as_far_as_it_is_known_when_it_came(
    size, read, covered, waited_s, expected
):
    """For a while; then it is read all the same."""
    assert readable(size=size, read=read, covered=covered, waited_s=waited_s) == expected


def test_a_file_is_over_when_its_task_has_gone_on_to_another_round_or_attempt():
    """What Slurm captures never is."""
    files = [worker(0, round_=1), worker(0, round_=2), replace(AGENT, attempt=0), SLURM]
    newest = newest_of_tasks(files)["7_0"]
    assert newest.round == 2
    assert [is_over(file, newest) for file in files] == [True, False, False, False]
    again = worker(0, attempt=1, round_=3)
    assert [is_over(file, again) for file in files] == [True, True, True, False]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [0, 1, 2, 3]),
        (Selection(agents=True), [0, 1, 2, 3, 4, 5]),
        (Selection(ranks=frozenset([1, 2])), [1, 2, 3]),
        (Selection(ranks=frozenset([1]), agents=True), [1, 4, 5]),
        (Selection(nodes=frozenset(["n2"]), agents=True), [2, 3]),
        (Selection(attempt=0, agents=True), [0, 1, 2, 3, 4, 5]),
        (Selection(attempt=1), []),
        (Selection(round=1), [0, 1, 2, 3]),
        (Selection(round=2), []),
    ],
)
def test_files_are_chosen_by_rank_node_attempt_and_round(selection, expected):
    """Agents have no rank and no round; what Slurm captures has no attempt."""
    files = [*RUN, AGENT, SLURM]
    assert [number for number, file in enumerate(files) if selection.selects(file)] == expected


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (
            Selection(ranks=frozenset([0, 7])),
            "--rank 7: the run has no such rank; it has ranks 0-2",
        ),
        (Selection(nodes=frozenset(["n9"])), "--node n9: .* it has nodes n1, n2"),
        (Selection(attempt=3), "--attempt 3: .* it has attempt 0"),
        (Selection(round=2), "--round 2: .* it has round 1"),
        (Selection(ranks=frozenset([2]), nodes=frozenset(["n1"])), "these ranks were on n2"),
    ],
)
def test_what_is_not_there_is_refused_and_what_is_there_is_named(selection, words):
    """The next try is to be the right one."""
    with pytest.raises(NothingSelectedError, match=words):
        require_there(selection, RUN)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("round-3.rank-12.err", ("err", 3, 12)),
        ("round-3.rank-12.out", ("out", 3, 12)),
        ("agent.log", ("agent", None, None)),
        ("round-3.rank-12.out.times", None),
        ("round-3.rank-12.error.json", None),
    ],
)
def test_a_file_is_known_by_its_name(file, expected):
    """Its index, and the report of a failure, are no output."""
    source = source_of(file, Path("/run"), "7_0", 2, "n1")
    found = source and (source.stream, source.round, source.rank)
    assert found == expected
