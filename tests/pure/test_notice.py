"""What a notice is: why a node is left, by when, and when there is no sense in waiting."""

import signal
from typing import Any

import pytest

from hpc_elastic.agent.preemption import (
    measured_departure_s,
    merged,
    of_command,
    of_departure,
    of_signal,
    of_time_limit,
    why_leave_now,
    within,
)
from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.rendezvous.messages import PreemptionNotice
from hpc_elastic.run.directory import Pool, PoolTerms
from hpc_elastic.slurm.exit_action import ExitAction, Reason
from hpc_elastic.worker.shared_page import WorkerStatus

POOL = Pool(range(1), SlurmSettings(signal_delay_s=120), PoolTerms(60, 30, whole_nodes=False), 1.0)


def worker(**shows: Any) -> WorkerStatus:
    """A worker that shows this, and nothing else."""
    return WorkerStatus(**{**dict.fromkeys(WorkerStatus.__match_args__), "paused": 0, **shows})


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGTERM, PreemptionNotice(Reason.SIGNAL, 1055)),
        (signal.SIGUSR2, PreemptionNotice(Reason.ASKED, 1115)),
        (signal.SIGUSR1, None),
    ],
)
def test_what_a_signal_means(number, expected):
    """SIGTERM has the preemption's grace, the user signal what he has set; five seconds less."""
    assert of_signal(number, POOL, 1000) == expected


@pytest.mark.parametrize(
    ("how", "by"),
    [
        (ExitAction.REQUEUE, 1055),
        (ExitAction.REPLACE, 1055),
        (ExitAction.REQUEUED, 1025),
        (ExitAction.EXIT, 1025),
        (None, 1025),
    ],
)
def test_a_task_that_is_being_ended_has_kill_wait_only(how, by):
    """Slurm says which; where it is silent, the worse is taken."""
    assert of_departure(how, POOL, 1000) == PreemptionNotice(Reason.SIGNAL, by)


@pytest.mark.parametrize(
    ("exit_code", "output", "by"),
    [
        (0, "30\n", 1025),
        (0, "90.5 spot interruption", 1085.5),
        (0, "TRUE\n", 1115),
        (0, "-5", 1115),
        (0, "1e999", 1115),
        (0, " \n", None),
        (1, "404 - Not Found", None),
    ],
)
def test_output_of_the_notice_command_is_a_notice(exit_code, output, by):
    """A number at its beginning is the seconds that are left, else they are signal_delay_s."""
    expected = None if by is None else PreemptionNotice(Reason.ASKED, by)
    assert of_command(exit_code, output, 120, 1000) == expected


def test_the_reserve_is_a_third_of_a_short_time():
    """What comes last needs time in any case."""
    assert within(Reason.ASKED, 6, 0).by == 4
    assert within(Reason.ASKED, 600, 0).by == 595


def test_of_two_notices_the_earlier_deadline_and_the_first_reason_stay():
    """But for a signal, which only Slurm can explain."""
    asked, limit = PreemptionNotice(Reason.ASKED, 50), PreemptionNotice(Reason.TIME_LIMIT, 40)
    taken = PreemptionNotice(Reason.SIGNAL, 60)
    assert merged(None, asked) == asked
    assert merged(asked, limit) == PreemptionNotice(Reason.ASKED, 40)
    assert merged(limit, taken) == PreemptionNotice(Reason.SIGNAL, 40)
    assert merged(taken, limit) == PreemptionNotice(Reason.SIGNAL, 40)


@pytest.mark.parametrize(("length_s", "ahead_s"), [(86_400, 120), (1200, 120), (60, 6)])
def test_the_notice_of_a_time_limit_takes_no_more_than_a_tenth_of_it(length_s, ahead_s):
    """A short job would do nothing else but leave."""
    due_at, notice = of_time_limit(10_000, length_s, 120)
    assert due_at == 10_000 - ahead_s and due_at < notice.by < 10_000
    assert notice.reason is Reason.TIME_LIMIT


TEN_STEPS = {"first_step": 1, "first_time": 50.0, "step": 11, "step_time": 52.0}


@pytest.mark.parametrize(
    ("workers", "departure_s"),
    [
        ([worker(**TEN_STEPS, save_s=0.3)], 1.5 * (1.0 + 0.4 + 0.6)),
        ([worker(**TEN_STEPS, save_s=0.3, restore_s=9.0)], 1.5 * (1.0 + 0.4 + 0.6)),
        ([worker(**TEN_STEPS, restore_s=0.8), worker(**TEN_STEPS, save_s=0.3)], 1.5 * 3.0),
        ([worker(**TEN_STEPS), worker(**TEN_STEPS, save_s=0.3)], None),
        ([worker(step=1, step_time=50.0, first_step=1, first_time=50.0, save_s=0.3)], None),
        ([worker(save_s=0.3)], None),
        ([], None),
    ],
)
def test_how_long_leaving_takes_is_measured(workers, departure_s):
    """By the slowest worker, with twice its steps and its last save; before that it is unknown."""
    assert measured_departure_s(workers) == pytest.approx(departure_s)


def test_a_node_is_left_no_sooner_than_leaving_takes():
    """Of a slot of five minutes no more is lost; what takes longer than a tenth begins there."""
    assert of_time_limit(1000.0, 300.0, 120.0)[0] == 970.0
    due_at, notice = of_time_limit(1000.0, 300.0, 120.0, departure_s=3.0)
    assert (due_at, notice.by) == (997.0, 999.0)
    assert of_time_limit(1000.0, 300.0, 120.0, departure_s=60.0)[0] == 970.0


@pytest.mark.parametrize(
    ("workers", "fields", "why"),
    [
        ([worker(passed=3)], {"now": 100.0}, "its time is up"),
        ([worker(passed=3)], {}, None),
        ([worker(), worker(boundary=10)], {"saves_itself": False}, None),
        ([worker(), worker()], {}, "its workers have made no step"),
        ([worker(), worker()], {"since": 19.0}, None),
        ([worker(step=1)], {}, None),
        ([worker(step=1)], {"saves_itself": False}, "its script does not report when it saves"),
    ],
)
def test_when_there_is_no_sense_in_waiting_for_a_checkpoint(workers, fields, why):
    """Too late, or nothing to lose, or nobody who could say that it is saved."""
    asked = {"now": 50.0, "since": 45.0, "saves_itself": True, **fields}
    assert why_leave_now(PreemptionNotice(Reason.SIGNAL, 100.0), workers, **asked) == why


def test_a_notice_keeps_what_announced_it_and_how_much_time_that_gave():
    """For the event log: the first one's, or the signal's."""
    sigterm = of_signal(signal.SIGTERM, POOL, 1000)
    _, limit = of_time_limit(1100, 3600, 120)
    assert (sigterm.signal, sigterm.given_s) == ("SIGTERM", 60)
    assert (limit.signal, limit.given_s) == (None, 120)
    for notice in (merged(limit, sigterm), merged(sigterm, limit)):
        assert (notice.signal, notice.given_s) == ("SIGTERM", 60)
    later = merged(sigterm, of_departure(ExitAction.EXIT, POOL, 1000))
    assert (later.signal, later.by) == ("SIGTERM", 1025)
