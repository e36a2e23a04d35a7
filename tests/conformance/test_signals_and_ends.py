"""How jobs end: exit codes, preemption, requeue, cancellation, the time limit, and signals."""

import time

import pytest
from backends import eventually

WHOLE = ["--exclusive", "--nodelist=node2"]


@pytest.mark.parametrize(
    ("line", "state", "code"),
    [
        ("true", "COMPLETED", "0:0"),
        ("exit 3", "FAILED", "3:0"),
        ("kill -9 $$", "FAILED", "0:9"),
        ("srun -n1 sh -c 'exit 4'", "FAILED", "4:0"),
    ],
)
def test_a_job_ends_as_its_script_does(backend, line, state, code):
    """By its exit code, or by the signal that ended it."""
    job = backend.submit(line)
    backend.wait_state(job, state)
    assert backend.shown(job)["ExitCode"] == code


@pytest.mark.long
def test_a_preempted_task_is_told_runs_on_in_its_grace_and_is_requeued(backend, teller):
    """The step gets SIGCONT and SIGTERM, the batch script and its children nothing, until the end.

    It comes back with one restart more, held for a while, and starts again when it is released.
    """
    job = backend.submit(teller.job(stays_s=100), "--array=3", *WHOLE)
    teller.wait("step", "starts 0")
    teller.wait("child", "starts 0")
    backend.cluster.preempt(["node2"], for_s=1)
    teller.wait("step", "SIGTERM")
    grace = backend.state(f"{job}_3")
    assert (grace.state, grace.preempted, grace.restarts) == ("RUNNING", True, 0)
    assert teller.told("batch") == [] and teller.told("child") == ["starts 0"]
    assert "SIGCONT" in teller.wait("step", "SIGCONT")
    leaving = backend.wait_state(f"{job}_3", "COMPLETING", "PENDING")
    assert leaving.restarts == 1
    held = backend.wait_reason(f"{job}_3", "BeginTime")
    assert (held.state, held.restarts, held.preempted) == ("PENDING", 1, False)
    assert held.starts_in_s == pytest.approx(backend.hold_s, abs=8)
    backend.client.release(f"{job}_3")
    teller.wait("step", "starts 1")


@pytest.mark.parametrize(("code", "state"), [(5, "FAILED"), (0, "COMPLETED")])
def test_a_task_that_ends_within_its_grace_has_ended_for_good(backend, teller, code, state):
    """Slurm does not requeue it, as if it had ended by itself; releases after 22.05 do."""
    job = backend.submit(teller.job(code), *WHOLE)
    teller.wait("step", "starts 0")
    thief = backend.cluster.preempt(["node2"], for_s=0)
    ended = backend.wait_state(job, "FAILED", "COMPLETED", "PENDING")
    is_requeued = backend.release > (22, 5)
    assert (ended.state, ended.restarts) == (("PENDING", 1) if is_requeued else (state, 0))
    backend.wait_state(thief, "COMPLETED")


@pytest.mark.long
@pytest.mark.parametrize("options", [["--partition=cancel"], ["--no-requeue"]])
def test_what_may_not_be_requeued_is_preempted_for_good(backend, teller, options):
    """By the partition's PreemptMode=CANCEL, or by the job's own word."""
    job = backend.submit(teller.job(stays_s=100), *WHOLE, *options)
    teller.wait("step", "starts 0")
    backend.cluster.preempt(["node2"], for_s=0)
    teller.wait("step", "SIGTERM")
    ended = backend.wait_state(job, "PREEMPTED", "PENDING")
    assert (ended.state, ended.restarts, ended.preempted) == ("PREEMPTED", 0, True)


def test_a_task_may_requeue_itself_within_its_grace(backend, tmp_path):
    """And set when it starts again: the two minutes do not apply."""
    told = "squeue -h -j $SLURM_JOB_ID -O PreemptTime | grep -q T"
    # on a slow machine the job is not back in the queue at once
    update = "scontrol update jobid=$SLURM_JOB_ID starttime=now+4"
    again = f"until {update}; do sleep 0.1; done; touch {tmp_path}/asked"
    asks = f"scontrol requeue $SLURM_JOB_ID && {{ {again}; }}"
    step = f"until {told}; do sleep 0.1; done; {asks}; exit 1"
    line = f"echo x >> {tmp_path}/starts; srun -n1 sh -c 'trap \"\" TERM; {step}'"
    job = backend.submit(line, *WHOLE)
    eventually((tmp_path / "starts").exists)
    backend.wait_state(job, "RUNNING")
    backend.cluster.preempt(["node2"], for_s=1)
    eventually(lambda: (tmp_path / "starts").read_text().count("x") == 2)
    assert (tmp_path / "asked").exists() and backend.state(job).restarts == 1


def test_a_cancelled_task_is_told_and_killed_after_killwait(backend, teller):
    """Everybody in it gets SIGTERM, the batch script too; other elements are left alone."""
    job = backend.submit(teller.job(stays_s=100), "--array=0", "--exclusive")
    others = backend.submit("sleep 600", "--array=0-1")
    teller.wait("step", "starts 0")
    teller.wait("child", "starts 0")
    backend.wait_state(f"{others}_1", "RUNNING")
    began = time.time()
    backend.run("scancel", f"{job}_0", f"{others}_1")
    for who in ("step", "child", "batch"):
        teller.wait(who, "SIGTERM")
    assert backend.state(f"{job}_0").state == "COMPLETING"
    ended = backend.wait_state(f"{job}_0", "CANCELLED")
    assert time.time() - began > 2
    assert (ended.restarts, ended.preempted) == (0, False)
    assert "ends" not in teller.told("step")
    backend.wait_state(f"{others}_1", "CANCELLED")
    assert backend.state(f"{others}_0").state == "RUNNING"
    backend.run("scancel", others)
    backend.wait_state(f"{others}_0", "CANCELLED")


def test_waiting_elements_are_cancelled_one_by_one_or_as_a_whole(backend):
    """By their indices; by the array's id; by their state."""
    job = backend.submit("sleep 600", "--array=0-9", "--hold")
    backend.run("scancel", f"{job}_[1-3,5]")
    left = backend.run("squeue", "-h", "-r", "-j", job, "-o", "%K").stdout.split()
    assert left == ["0", "4", "6", "7", "8", "9"]
    backend.run("scancel", job)
    assert not backend.run("squeue", "-h", "-r", "-j", job, check=False).stdout
    running = backend.submit("sleep 600")
    waits = backend.submit("sleep 600", "--hold")
    backend.wait_state(running, "RUNNING")
    backend.run("scancel", "--state=PENDING", running, waits)
    backend.wait_state(waits, "CANCELLED")
    assert backend.state(running).state == "RUNNING"


SENT = {
    ("--signal=USR2",): {"step": ["SIGUSR2"], "child": [], "batch": []},
    ("--batch", "--signal=USR2"): {"step": [], "child": [], "batch": ["SIGUSR2"]},
    ("--batch", "--signal=TERM"): {"step": [], "child": [], "batch": ["SIGTERM"]},
}


@pytest.mark.parametrize("options", SENT)
def test_signals_reach_the_steps_or_the_batch_script(backend, teller, options):
    """Without an option the steps only; with --batch the shell only. The job runs on."""
    job = backend.submit(teller.job(stays_s=100), *WHOLE)
    for who in ("step", "child"):
        teller.wait(who, "starts 0")
    backend.run("scancel", *options, job)
    for who, words in SENT[options].items():
        for word in words:
            teller.wait(who, word)
    for who, words in SENT[options].items():
        assert [w for w in teller.told(who) if w.startswith("SIG")] == words
    assert backend.state(job).state == "RUNNING"


def test_full_reaches_srun_which_kills_its_tasks_at_once(backend, teller):
    """For srun SIGTERM is an order."""
    late = f"{teller.shell_waits('child SIGTERM')}; exit $code"  # the child ends with the script
    job = backend.submit(teller.job(stays_s=100).replace("exit $code", late), *WHOLE)
    for who in ("step", "child"):
        teller.wait(who, "starts 0")
    backend.run("scancel", "--full", "--signal=TERM", job)
    backend.wait_state(job, "FAILED")
    assert "SIGTERM" in teller.told("child") and "SIGTERM" in teller.told("batch")
    assert backend.shown(job)["ExitCode"] == "137:0"


@pytest.mark.long
@pytest.mark.parametrize("signal", ["USR2@10", "B:USR2@10"])
def test_a_job_whose_time_is_up_is_warned_and_ended(backend, teller, signal):
    """As --signal asks for; then SIGTERM to all; its state is TIMEOUT.

    Slurm looks twice a minute, and warns up to half a minute early: more than 30 s ahead of the end
    of this minute could be before there is a step to be warned.
    """
    limit = "--time=0:20"  # which Slurm makes a minute of
    job = backend.submit(teller.job(stays_s=100), limit, f"--signal={signal}", *WHOLE)
    for who in ("step", "child"):
        teller.wait(who, "starts 0")
    warned = "batch" if signal.startswith("B:") else "step"
    teller.wait(warned, "SIGUSR2")
    assert backend.state(job).time_left_s <= 10 + backend.early_s
    backend.run("scontrol", "update", f"jobid={job}", "timelimit=0:01")
    for who in ("step", "child", "batch"):
        eventually(lambda who=who: "SIGTERM" in teller.told(who))
    ended = eventually(lambda: backend.state(job), lambda s: s.state == "TIMEOUT")
    assert ended.reason in ("", "TimeLimit") and ended.restarts == 0


@pytest.mark.long
def test_a_job_cancelled_while_it_is_requeued_does_not_come_back(backend, teller):
    """Its processes are being ended; nothing is left of it then."""
    job = backend.submit(teller.job(stays_s=100), *WHOLE)
    teller.wait("step", "starts 0")
    backend.run("scontrol", "requeue", job)
    assert backend.wait_state(job, "COMPLETING", "PENDING").restarts == 1
    backend.run("scancel", job)
    backend.wait_state(job, "CANCELLED")
