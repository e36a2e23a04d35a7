"""What a repeated submission does, by the report of the calls before it."""

import pytest

from hpc_elastic.launcher.detach import Next, append, decide, read_lines

BEGIN, PREPARING = {"stage": "attempt"}, {"stage": "preparing", "sweep": "/s"}
STARTING, STARTED = {"stage": "starting", "sweep": "/s"}, {"stage": "started"}
SLURM, LOCAL = {"launcher": "slurm", "runs": []}, {"launcher": "local", "runs": []}


def ended(code: int):
    return {"stage": "ended", "exit_code": code}


@pytest.mark.parametrize(
    ("report", "step"),
    [
        ([], Next.SUBMIT),
        ([BEGIN], Next.SUBMIT),
        ([BEGIN, PREPARING], Next.SUBMIT),
        ([BEGIN, PREPARING, ended(1)], Next.SUBMIT),
        ([BEGIN, ended(0)], Next.SUBMIT),  # a script without a launcher
        ([BEGIN, PREPARING, STARTING], Next.ADOPT),
        ([BEGIN, PREPARING, STARTING, ended(-9)], Next.ADOPT),
        ([BEGIN, PREPARING, STARTING, ended(1)], Next.SUBMIT),  # it was refused, or taken back
        ([BEGIN, PREPARING, STARTING, STARTED], Next.ADOPT),
        ([BEGIN, PREPARING, STARTING, STARTED, ended(1)], Next.ADOPT),  # its report failed
        ([BEGIN, PREPARING, STARTING, STARTED, SLURM], Next.REPEAT),
        ([BEGIN, PREPARING, STARTING, STARTED, SLURM, ended(0)], Next.REPEAT),
        ([BEGIN, PREPARING, STARTING, STARTED, SLURM, ended(1)], Next.REFUSE),
        ([BEGIN, PREPARING, STARTING, STARTED, SLURM, PREPARING], Next.REFUSE),  # the second batch
        ([BEGIN, PREPARING, STARTING, LOCAL], Next.REPEAT),
        ([BEGIN, STARTING, ended(1), BEGIN, PREPARING], Next.SUBMIT),
        ([BEGIN, STARTING, ended(1), BEGIN, STARTING], Next.ADOPT),
    ],
)
def test_the_report_of_earlier_calls_decides(report, step):
    """When they have ended; what it cannot say is looked up, and a part is never completed."""
    assert decide(report, is_over=True) is step


@pytest.mark.parametrize("report", [[], [BEGIN], [BEGIN, STARTING], [BEGIN, STARTED, SLURM]])
def test_a_call_that_is_at_work_is_waited_for(report):
    """Unless what it has submitted is complete: a local launcher goes on with its runs."""
    assert decide(report, is_over=False) is Next.WAIT
    assert decide([BEGIN, STARTING, LOCAL], is_over=False) is Next.REPEAT
    assert decide([BEGIN, STARTED, SLURM, ended(0)], is_over=False) is Next.REPEAT


def test_a_line_that_was_never_finished_spoils_no_other(tmp_path):
    """Its writer was killed; the next line stands behind it."""
    file = tmp_path / "report"
    file.touch()
    append(file, BEGIN)
    with file.open("a") as f:
        f.write('{"stage": "star')
    assert read_lines(file) == [BEGIN]
    append(file, PREPARING)
    append(file, SLURM)
    assert read_lines(file) == [BEGIN, PREPARING, SLURM]
