"""How a run is cancelled, resumed and cleaned: what is decided, and what is refused."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from arrays import GONE, run_of, write_table
from ended import sleeping
from followers import ENTRY, LEADER, LIVENESS, agent, delivered, of
from groups import B
from hpc_elastic.agent.task import find_task
from hpc_elastic.checkpoint import owner, prune
from hpc_elastic.checkpoint.owner import Owner, tag
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.cli.main import main
from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.control import change_settings, to_cancel
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import Claim, PublishResult
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.log_entry import NOBODY, RunEnding, claim, decode_signed, resume_entry
from hpc_elastic.rendezvous.messages import End
from hpc_elastic.rendezvous.term import StatusWriter
from hpc_elastic.run.directory import Submission
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.slurm import requeue, run_tasks
from hpc_elastic.slurm.environment import SlurmEnvironment, as_array_task
from hpc_elastic.slurm.exit_action import ExitAction
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.local_queue import start_ticks
from hpc_elastic.slurm.scheduler import Scheduler

BEFORE = RunSettings(NodeRange(2, 2), 1, SlurmSettings(partition="gpu", time="1:00:00", wait=False))


# ---- what may be changed ----------------------------------------------------------------


def test_nodes_and_settings_of_the_launcher_may_be_changed():
    """All else stays as it was, but for what belongs to one submission only."""
    now = change_settings(
        BEFORE, ["nodes=1:4", "launcher.partition=low", "+launcher.sbatch.nice=5"]
    )
    assert (now.nodes.min, now.nodes.max) == (1, 4)
    assert now.launcher.partition == "low" and now.launcher.sbatch == {"nice": 5}
    assert now.launcher.time == "1:00:00" and now.launcher.wait
    assert change_settings(BEFORE, []).nodes.max == 2


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("lr=0.2", "lr", "submit a new run"),
        ("launcher=local", "launcher", "keeps its launcher"),
        ("ft=true", "ft", "when a run is submitted"),
        ("launcher.code_snapshot=true", "launcher.code_snapshot", "code of a run stays"),
        ("launcher.partiton=a", "launcher.partiton", "did you mean 'partition'"),
        ("nodes=1,2", "nodes", "one value"),
        ("~launcher.time", "~launcher.time", "cannot be deleted"),
        ("nodes", "override", "KEY=VALUE"),
        ("nodes=0", "nodes", ""),
    ],
)
def test_what_would_make_another_run_of_it_is_refused(override, key, remedy):
    """By its name, with what to do instead."""
    with pytest.raises(ConfigError) as e:
        change_settings(BEFORE, [override])
    assert e.value.key == key and remedy in str(e.value)


# ---- the entry that begins a new generation --------------------------------------------


def test_a_resumed_run_goes_on_to_count_and_forgets_what_it_has_spent():
    """Rounds and terms never repeat; the next agent leads at once, and nobody counts as lost."""
    ended = replace(ENTRY, restarts=3, lost={"7_3": 0}, ending=RunEnding("failed"), started=5.0)
    again = resume_entry(6, ended, 1)
    assert (again.index, again.term, again.round, again.generation) == (6, 3, 2, 1)
    assert (again.restarts, again.lost, again.members, again.ending) == (0, {}, (), None)
    led = claim(7, again, LEADER, 9.0)
    assert (led.term, led.lost, led.generation, led.started) == (4, {}, 1, 5.0)
    assert claim(2, resume_entry(1, None, 1), LEADER, 9.0).started == 9.0
    assert decode_signed(again.encode_signed(b"k"), b"k") == again and again.leader == NOBODY


def test_the_first_agent_of_a_resumed_run_leads_without_waiting():
    """There is no leader whose death would have to be proved."""
    f = FollowerState(B, LIVENESS, 0.0, generation=1)
    f.join()
    f.tick(0.0)
    again = resume_entry(6, ENTRY, 1)
    assert of(f.log_read(6, again, None, 0.1), Claim) == [Claim(7, again, possibly_alive=True)]


@pytest.mark.parametrize("ending", [None, RunEnding("failed")])
def test_an_agent_from_before_ends_and_publishes_nothing(ending):
    """It was paused when its run was resumed: it neither joins, nor leads, nor writes a result."""
    f = agent()
    f.tick(0.0)
    effects = f.log_read(9, replace(ENTRY, index=9, generation=1, ending=ending), 1, 0.1)
    assert [end.status for end in delivered(effects, End)] == ["superseded"]
    assert not of(effects, Claim, PublishResult)
    assert f.tick(9.0) == []


async def _publish(run, entry):
    journal = StatusWriter(run, "r", None, 0)
    journal.append_event = lambda *_, **__: None
    await journal.publish_result(entry)
    await journal.close()


def test_a_result_from_before_is_not_published_any_more(tmp_path):
    """Its leader was paused between its decision and the file; the run was resumed meanwhile."""
    run = run_of(tmp_path, "7", [(0, 0)])
    register = DecisionLog(run.rdzv, b"k")
    ended = replace(ENTRY, index=1, ending=RunEnding("failed"))
    assert register.create(ended) and register.create(resume_entry(2, ended, 1))
    asyncio.run(_publish(run, ended))
    assert not run.result.exists()


# ---- tasks ------------------------------------------------------------------------------


def test_a_task_from_before_has_no_part_in_the_run(tmp_path):
    """It ends at its start, and does not requeue itself when it is told to go."""
    run = run_of(tmp_path, "7", [(1, 0)], generation=1)
    files = Submission(tmp_path / ".hpc_elastic").array(0)
    files.submitted_as("5")
    files.tasks.write_text(json.dumps({"runs": [{"dir": str(run.path), "slot": 0}]}))
    variables = as_array_task(5, 0, node_name="n", cpus=1)
    assert find_task(files.tasks, SlurmEnvironment.from_env(variables)).superseded
    assert not run_tasks.is_recorded(run.load(), "5_0")
    assert run_tasks.is_recorded(run.load(), "8_0")


class Client:
    """Stands for Slurm while a user cancels the run."""

    def __init__(self, run, moment):
        self.run, self.moment, self.cancelled, self.requeued = run, moment, [], []

    def _reach(self, moment):
        if moment == self.moment:
            self.run.cancelled.touch()

    def tasks(self, _):
        """Say that it runs."""
        self._reach("asked")
        return {"7_0": TaskState("7_0", "RUNNING")}

    def requeue(self, task):
        """Take note."""
        self._reach("requeued")
        self.requeued.append(task)

    def cancel(self, tasks):
        """Take note."""
        self.cancelled += tasks

    def postpone(self, *_, **__):
        """Nothing."""

    exclude = postpone


@pytest.mark.parametrize(
    ("moment", "requeued", "cancelled"), [("asked", [], []), ("requeued", ["7_0"], ["7_0"])]
)
def test_a_task_that_requeues_itself_while_its_run_is_cancelled_stays_away(
    tmp_path, monkeypatch, moment, requeued, cancelled
):
    """Before the requeue it sees the mark; after it, it takes itself back."""
    monkeypatch.setattr(requeue, "_deaf_to_sigterm", lambda **_: contextlib.nullcontext())
    run = run_of(tmp_path, "7", [(0, 0), (0, 1)])
    client = Client(run, moment)
    assert requeue.requeue_or_exit("7_0", client, run=run) is ExitAction.EXIT
    assert (client.requeued, client.cancelled) == (requeued, cancelled)


def test_who_is_cancelled_and_when():
    """Each task once; those that are back, and one that runs on for some seconds, again."""
    running, waits, ends = (
        TaskState(f"7_{i}", state) for i, state in enumerate(["RUNNING", "PENDING", "COMPLETING"])
    )
    assert to_cancel([running, waits, ends], {}, 0.0) == [running, waits]
    assert to_cancel([running, waits], {"7_0": 0.0, "7_1": 0.0}, 2.0) == [waits]
    assert to_cancel([running], {"7_0": 0.0}, 6.0) == [running]


def test_a_mark_stays_the_first_one_s(tmp_path):
    """Who has cancelled the run can be told, also from a mark that was cut off by a full disk."""
    run = run_of(tmp_path, "7", [(0, 0), (0, 1)])
    assert run.cancellation() is None and not run.is_over
    mark_cancelled(run, print)
    first = run.cancellation()
    mark_cancelled(run, print)
    assert run.cancellation() == first and socket.gethostname() in first.by_whom and run.is_over
    run.cancelled.write_text("")
    assert run.cancellation().by_whom == ""


# ---- processes of this machine ----------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path):
    """A process that does nothing, with the command line of an agent."""
    with sleeping(Submission(tmp_path / ".hpc_elastic").array(0).tasks) as process:
        yield process


def table(folder, **entry):
    """Return the processes of a run with one task that has this entry."""
    run = run_of(folder, "7", [(0, 0)], launcher="local")
    write_table(Submission(folder / ".hpc_elastic"), **{"7_0": entry})
    return Scheduler(run, run.load())


def test_a_process_is_known_by_the_time_of_its_start(tmp_path, sleeper):
    """One that has its pid by chance is left alone."""
    made = start_ticks(sleeper.pid)
    tasks = table(tmp_path, state="RUNNING", pid=sleeper.pid, started=made)
    assert list(tasks.list_live_tasks()) == ["7_0"]
    (tmp_path / "other").mkdir()
    others = table(tmp_path / "other", state="RUNNING", pid=sleeper.pid, started=made - 60)
    assert others.list_live_tasks()["7_0"].phase is Phase.COMPLETING, "its launcher sees to it"
    others.cancel_tasks([TaskState("7_0", "RUNNING")])
    others.kill_task("7_0")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.5)
    tasks.cancel_tasks(tasks.list_live_tasks().values())
    sleeper.wait(20)
    assert tasks.list_live_tasks()["7_0"].phase is Phase.COMPLETING


def test_what_waits_for_a_launcher_that_is_dead_waits_for_nothing(tmp_path):
    """Else a run whose launcher was killed could never be resumed."""
    assert not table(tmp_path, state="PENDING", launcher=GONE, launcher_started=1).list_live_tasks()
    (tmp_path / "two").mkdir()
    mine = {"launcher": os.getpid(), "launcher_started": start_ticks(os.getpid())}
    assert table(tmp_path / "two", state="PENDING", **mine).list_live_tasks()


def test_processes_of_another_machine_are_told_as_such(tmp_path):
    """Its pids mean nothing here."""
    with pytest.raises(RunDirectoryError, match="call this command on login7"):
        table(tmp_path, state="RUNNING", pid=1, started=1, host="login7").list_live_tasks()


# ---- checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "keep_last", "going"),
    [
        ([40], 1, [10, 20, 30]),
        ([30, 20], 2, [10]),
        ([30], 2, []),  # fewer are good than are to stay
        ([], 1, []),
        ([], 0, [10, 20, 30, 40]),
    ],
)
def test_only_what_is_older_than_the_newest_good_ones_goes(kept, keep_last, going):
    """Newer ones stay, damaged or not: somebody may want to know why."""
    assert prune.steps_to_clean([40, 30, 20, 10], kept, keep_last) == going


def test_what_a_living_group_writes_is_no_leftover():
    """Groups of earlier entries are fenced; of others nobody knows, least of all of other runs."""
    mine, other = tag("mine"), tag("another")
    names = [f".staging-step-20-{token}-1" for token in (
        f"r3u{mine}", f"r5u{mine}", f"f3s1u{mine}", f"r3u{other}", "r3", "pabc"
    )]  # fmt: skip
    kept = ["step-00000010", "step-00000010.replaced", "owner.json", ".memory-id"]
    found = prune.list_leftovers([*kept, *names, ".trash-step-1-ab"], "mine", 5)
    assert found == [names[0], ".trash-step-1-ab"]
    found = prune.list_leftovers([*kept, *names, ".trash-step-1-ab"], "mine", None)
    assert found == sorted([*names[:3], ".trash-step-1-ab"])


def test_a_directory_that_another_run_has_taken_is_not_pruned(tmp_path, capsys):
    """The message names that run."""
    run = run_of(tmp_path, "7", [(0, 0)], launcher="local")
    step = run.path / "checkpoints" / "step-00000009"
    step.mkdir(parents=True)
    owner.write(step.parent, Owner("later-1", "/runs/later", restarts=True), replaces=False)
    assert main(["checkpoints", "prune", str(run.path), "--keep-last", "0", "--yes"]) == 1
    assert "belongs to the run later-1 (/runs/later) now" in capsys.readouterr().err
    assert step.exists()


# ---- what launchers tell, and shells ask ------------------------------------------------


def test_what_can_not_be_removed_is_named(tmp_path, monkeypatch, capsys):
    """With exit code 1, for scripts too."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    run = run_of(tmp_path, "7", [(0, 0)], launcher="local")
    kept = run.path / "checkpoints" / f".staging-step-9-r1u{tag(run.load().run_id)}-0"
    kept.mkdir(parents=True)
    monkeypatch.setattr(Store, "remove", refuse)
    prune = ["checkpoints", "prune", str(run.path), "--keep-last", "1"]
    assert main(prune) == 1
    assert capsys.readouterr().err == f"could not be removed: {kept}\n"
    assert main([*prune, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["left"] == [str(kept)]


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path):
    """The command looks at the file while the launcher appends to it."""
    file = tmp_path / "report"
    file.write_text('{"launcher": "slurm", "runs": []}\n{"launcher": "lo')
    assert detach.read_report(file) == [{"launcher": "slurm", "runs": []}]


def test_what_fails_in_the_background_is_told_in_front():
    """The user sees the remedy where he typed the command."""

    def refuse(_):
        raise ConfigError("nodes", 0, "give one")

    assert detach.in_background(refuse)["error"]["message"] == "nodes=0: give one"
    assert detach.in_background(lambda tell: tell({"log": "x"})) == {"log": "x"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_asks_the_command(shell, capsys):
    """It sets the variable by which click answers."""
    assert main(["init", "--completion", shell]) == 0
    assert "_HPC_ELASTIC_COMPLETE" in capsys.readouterr().out


BASH = """
eval "$(hpc-elastic init --completion bash)"
COMP_WORDS=(hpc-elastic cancel dig) COMP_CWORD=2
_hpc_elastic_completion hpc-elastic
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
autoload -U compinit && compinit -D -u
eval "$(hpc-elastic init --completion zsh)"
(( $+functions[$_comps[hpc-elastic]] ))
compadd() { print -rl -- ${(P)@[-1]} }
words=(hpc-elastic cancel dig) CURRENT=3
_hpc_elastic_completion
"""
FISH = """
hpc-elastic init --completion fish | source
complete --do-complete 'hpc-elastic cancel dig'
"""


@pytest.mark.parametrize(
    ("shell", "script"),
    [(["bash", "-euc"], BASH), (["zsh", "-fec"], ZSH), (["fish", "-Nc"], FISH)],
    ids=["bash", "zsh", "fish"],
)
def test_runs_are_completed_by_their_ids(tmp_path, shell, script):
    """As each shell does it, with what is printed for it."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"there is no {shell[0]} here")
    run = run_of(tmp_path, "7", [(0, 0), (0, 1)])
    entry = {"submitted": time.time(), "runs": {"digits-1": str(run.path)}}
    folder = tmp_path / "state" / "hpc_elastic" / "submissions"
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps(entry))
    command = tmp_path / "bin" / "hpc-elastic"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpc_elastic "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    env["PATH"] = f"{command.parent}:{env['PATH']}"
    done = subprocess.run([*shell, script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["digits-1"] and done.returncode == 0, done.stderr
