"""The event log of a run: one JSON object a line, append only.

Each line has ``v`` (the version of the schema), ``time`` (Unix seconds), ``kind``, ``task`` and
fields of its kind, which `KINDS` lists. Every task writes its own file, so that lines are not
interleaved on a shared file system.

Readers ignore unknown kinds and fields: a newer version may have started the run.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hpc_elastic import shared_files

if TYPE_CHECKING:
    from msgspec.json import Decoder

_log = logging.getLogger(__name__)

VERSION = 1  # it changes when a kind or a field changes its meaning or goes, not when one is added
COMMANDS = "command"  # name in place of a task, in events that a command writes

_LOGGED_CHARS = 500
_KEPT = 1000  # lines kept for a file system that does not accept them now
_MOST_EVENTS = 1_000_000  # of a run that a reader keeps: they are all in memory
_OF_EACH_NODE = ("first_step", "workers_stopped", "joined")
"""Events of each node in each round: of too many events the oldest of these are left out first."""
_LARGEST, _LARGEST_REAL = 1 << 63, 1e300  # of the integers, and other numbers, in a run's files

Event = dict[str, Any]


class EventLog:
    """The events of one task, appended from any thread.

    Events that the file system rejects, because it is full or does not answer, are written by the
    next call that succeeds.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path = path
        self.task = task
        self._waiting: list[str] = []
        self._lock = threading.Lock()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        self.append([self.line(kind, **fields)])

    def write_behind(self, kind: str, **fields: Any) -> None:
        """Append one event in a thread of its own; the caller does not wait for the file."""
        line = self.line(kind, **fields)
        try:
            threading.Thread(target=self.append, args=([line],), daemon=True).start()
        except RuntimeError:  # no more threads
            self.append([line])

    def line(self, kind: str, **fields: Any) -> str:
        """Return the line of an event at the present time, for `append`."""
        named = {"v": VERSION, "time": time.time(), "kind": kind, "task": self.task}
        line = json.dumps({**named, **fields})
        _log.info("%s", line[:_LOGGED_CHARS])
        return line

    def append(self, lines: Sequence[str]) -> None:
        """Append events, possibly none, and those that could not be written before."""
        with self._lock:
            self._waiting.extend(lines)
            if not self._waiting:
                return
            try:
                _append(self.path, "".join(f"{line}\n" for line in self._waiting).encode())
            except OSError as e:
                num_lost = max(0, len(self._waiting) - _KEPT)
                del self._waiting[:num_lost]
                told = "%s: %d events not written so far, %d lost: %s"
                _log.warning(told, self.path, len(self._waiting), num_lost, e)
            else:
                self._waiting.clear()


def _append(path: Path, data: bytes) -> None:
    """Append all of it or nothing: a disk that is nearly full accepts a part."""
    with open(path, "ab", buffering=0, opener=shared_files.owner_writes) as f:
        before = f.seek(0, os.SEEK_END)
        if f.write(data) < len(data):
            f.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@dataclass
class EventReader:
    """Incremental reader of the events of all tasks of a run; the folder need not exist yet."""

    folder: Path
    num_left_out: int = 0  # older events, because there were too many at once
    _read: dict[Path, int] = field(default_factory=dict)  # bytes of each file, up to a line's end

    def new(self) -> list[Event]:
        """Return the events since the last call, in order of time; of too many the newest.

        A line that is being written is returned by a later call. A line that was cut off, because
        the process or its node ended, is left out. Raises DamagedFileError if a log is no file, and
        OSError if the file system does not answer.
        """
        events: list[Event] = []
        for path in self._logs():
            for end, block in shared_files.blocks_in(path, self._read.get(path, 0), newest=True):
                self._read[path] = end
                events += _parsed(block)
                if len(events) >= 2 * _MOST_EVENTS:
                    events = self._newest(events)
        return sorted(self._newest(events), key=itemgetter("time"))

    def skip(self) -> None:
        """Leave out the events so far."""
        self._read = {path: shared_files.status_of(path).st_size for path in self._logs()}

    def _logs(self) -> list[Path]:
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - glob is silent where it may not look
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if name.endswith(".jsonl")]

    def _newest(self, events: list[Event]) -> list[Event]:
        surplus = len(events) - _MOST_EVENTS
        if surplus <= 0:
            return events
        self.num_left_out += surplus
        return sorted(events, key=lambda e: (e["kind"] not in _OF_EACH_NODE, e["time"]))[surplus:]

    @property
    def doubt(self) -> str | None:
        """What is incomplete because events were left out; None if none were."""
        if not self.num_left_out:
            return None
        what = f"{self.num_left_out:,} of the oldest events are left out"
        return f"{what}: what is known of the time before is incomplete"


def read_events(folder: Path) -> list[Event]:
    """Return the events of all tasks of a run, in order of time; cut-off lines are left out."""
    return EventReader(folder).new()


@functools.cache
def _decoder() -> Decoder[dict[str, Any]]:
    from msgspec import Meta
    from msgspec.json import Decoder  # 30 ms, which writers of events do not spend

    integer = Annotated[int, Meta(gt=-_LARGEST, le=_LARGEST - 1)]
    real = Annotated[float, Meta(gt=-_LARGEST_REAL, lt=_LARGEST_REAL)]
    return Decoder(dict[str, integer | real | str | bool | list[Any] | dict[str, Any] | None])


def decoded(line: str | bytes) -> dict[str, Any]:
    """Return the object of a line of a run's files.

    Raises ValueError at what is no JSON, such as NaN, and at numbers that no run writes.
    """
    from msgspec import convert

    try:
        return _decoder().decode(line)
    except ValueError:
        if not isinstance(line, bytes) or rb"\ud" not in line:
            raise  # else it may have a byte of a file's name that is no UTF-8
        value: dict[str, Any] = convert(json.loads(line), _decoder().type)
        return value


_BESIDE_BRACKETS = bytes(set(range(256)) - set(b"[{\n"))


def _parsed(lines: bytes) -> list[Event]:
    """Return the events of lines; all lines are decoded at once, if none is damaged."""
    brackets = lines.translate(None, _BESIDE_BRACKETS).split(b"\n")
    try:
        if max(map(len, brackets)) > shared_files.NESTED:
            raise ValueError
        found = _decoder().decode_lines(lines)
    except (ValueError, RecursionError):
        # an attempt that was killed while it wrote leaves half a line; the next one appends to it
        found = [
            _whole(line) or _whole(line[max(0, line.rfind(b'{"v": ')) :]) for line in BytesIO(lines)
        ]
    return [event for event in found if _is_event(event)]


def _whole(line: bytes) -> Event:
    try:
        event: Event = shared_files.parse_json(line, "the event", decoded)
    except ValueError:
        return {}
    return event if _is_event(event) else {}


def _is_event(value: Event) -> bool:
    try:
        named = isinstance(value["kind"], str) and isinstance(value["task"], str)
        return named and 0.0 <= value["time"] <= shared_files.LATEST_TIME
    except (KeyError, TypeError):
        return False


# ---- the schema: every kind that a run writes, and its fields (pure)
# ``python docs/generate.py events`` writes the page of a new kind. Tests check that runs write no
# other events, and that the page is up to date.


Type = Literal["text", "integer", "number", "flag", "texts", "members", "ranks"]


class LossReason(StrEnum):
    """What a leader has observed of a node that it lost: ``why`` of ``node_lost``."""

    CONNECTION_CLOSED = "its connection closed"
    SILENT = "silent"
    LEADER_NOT_FOUND = "has not found the new leader"
    TASK_ENDED = "the scheduler reports that its task has ended"
    NOT_REJOINED = "did not join again in time"
    TASK_RESTARTED = "its task has started again"
    RECONNECTED = "connected anew"
    LEADER_LEAVES = "it leaves"
    TO_BE_LEFT = "its node is to be left"
    """It has left by itself; the reason of its preemption notice follows, after a colon."""


@dataclass(frozen=True)
class Field:
    """One field of a kind of event."""

    name: str
    type: Type
    """``texts`` is a list of text; ``members`` a list of agents, as a round has them; ``ranks`` a
    list of objects about ranks."""
    meaning: str  # its meaning, with the unit
    optional: bool = False  # whether it may be absent or null; the meaning explains that


@dataclass(frozen=True)
class Kind:
    """A kind of event; ``fields`` are those besides the ones that all events have."""

    name: str
    meaning: str
    when: str
    by: str
    fields: tuple[Field, ...] = ()


COMMON = (
    Field("v", "integer", f"version of this schema: {VERSION}"),
    Field("time", "number", "when it happened, in Unix seconds, by the clock of the writer's node"),
    Field("kind", "text", "what happened"),
    Field("task", "text", "the array task that it concerns; else, the task that writes it"),
)
"""The fields of every event."""

_HOST = Field("host", "text", "host name of the node")
_ATTEMPT = Field("attempt", "integer", "number of requeues of the task before its start")
_ROUND = Field("round", "integer", "number of the round, from 1 on")
_AGENT = "its agent"
_LEADER = "the leader"
_FIRST_RANK = "the agent of the first rank"
_JUDGED = "when the failures of a round are judged"

_OF_TASKS = (
    Kind("task", "A task has started on a node.", "when its agent runs", _AGENT,
         (_ATTEMPT, _HOST, Field("pid", "integer", "process id of the agent"),
          Field("started", "number", "start of its process, in Unix seconds", True))),
    Kind("preemption_notice", "A node will be left soon.",
         "when that is announced, and again if less time is left than announced; then by the "
         "leader, when it receives the notice",
         "its agent, and the leader",
         (Field("reason", "text", "`signal`: SIGTERM; `time_limit`; `asked`: by the user signal, a "
                "notice file, launcher.agent.notice_command or the script"),
          Field("left_s", "number", "seconds until the node has to have been left"),
          Field("signal", "text", "the signal that announced it; absent: none", True),
          Field("given_s", "number", "seconds from the announcement to the end; absent: unknown",
                True),
          Field("host", "text", "host name of the node; in the leader's event only", True))),
    Kind("first_step", "The workers of a node train: all have made a step.",
         "once in a round, at their first step", _AGENT,
         (_ATTEMPT, _ROUND, Field("step", "integer", "the first step that they have made"),
          Field("restored", "integer", "step of the checkpoint that they have loaded; null: none",
                True),
          Field("restore_s", "number", "seconds in which they loaded it", True),
          Field("start_s", "number", "seconds from the start of the workers to that step", True),
          Field("counted", "flag", "the script reports no steps: they were counted", True))),
    Kind("workers_stopped", "The workers of a node were stopped before they were done.",
         "when a round is over and they have ended", _AGENT,
         (_ATTEMPT, _ROUND,
          Field("step", "integer", "the last step that they have made; absent: unknown", True),
          Field("step_time", "number", "when, in Unix seconds; absent: unknown", True))),
    Kind("gpus_not_measured",
         "nvidia-smi has failed or does not answer: often the sign of a GPU that is about to fail.",
         "once; it tries again every five minutes", _AGENT,
         (_HOST, Field("why", "text", "what nvidia-smi wrote, or the time-out"))),
    Kind("notice_command_failed", "launcher.agent.notice_command fails, or hangs.",
         "once for each attempt; it is called again every 5 s", _AGENT,
         (_HOST, Field("why", "text", "its exit code, or the time-out"))),
    Kind("warm_worker_died",
         "A warm worker, which imports in advance for the next restart, has ended by itself.",
         "when that is detected", _AGENT,
         (_HOST, Field("why", "text", "the signal that ended it, such as `SIGKILL`, or its exit "
                       "code"))),
    Kind("group_mismatch",
         "Workers of a node train without the others: they have no process group, or another one.",
         "once in a round, after an optimizer step", _AGENT,
         (_HOST, Field("ranks", "ranks", "the workers, each with its `group_size`, 0: none"),
          Field("world_size", "integer", "number of workers of the group"))),
    Kind("bad_loss", "A reported loss is not a finite number.",
         "once in a round", _AGENT,
         (_HOST, Field("ranks", "ranks", "the workers, each with `step` and `loss`"))),
    Kind("slow_exit",
         "Processes of workers do not end, or fail, though their run has succeeded: their function "
         "has returned on all ranks.",
         "when they have not ended 10 s after it; and when they are ended, or have failed", _AGENT,
         (_HOST, Field("ranks", "ranks", "the workers"),
          Field("waited_s", "number", "seconds since the success of the run"),
          Field("how", "text", "where the first of them is, or how it has ended"))),
    Kind("checkpoint_failed",
         "A checkpoint could not be written; earlier checkpoints are intact.",
         "for the first one in a row", _FIRST_RANK,
         (Field("step", "integer", "step of the checkpoint"), Field("why", "text", "the error"))),
    Kind("checkpoint_recovered", "Checkpoints are written again.",
         "for the first one after `checkpoint_failed`, if the first rank has not moved meanwhile",
         _FIRST_RANK, (Field("step", "integer", "step of the checkpoint"),)),
    Kind("state_mismatch",
         "With ft=true: the state of a replica differs from that of the others; most likely "
         "hardware has failed silently.",
         "at each check that finds it (`Manager(check_every=)`)", _AGENT,
         (Field("step", "integer", "steps committed at the check"),
          Field("worker", "text", "replica id, host and rank of the worker"),
          Field("tensors", "text", "tensors that differ, at most three and the number of others"),
          Field("heals", "flag", "most replicas agree, and this one heals from them"))),
    Kind("heal_failed",
         "With ft=true: a replica could not take over the state of the others, several times in a "
         "row. It is kept out for a time that doubles with each failure, up to five minutes.",
         "once in such a row", _AGENT,
         (Field("worker", "text", "replica id, host and rank of the worker"),
          Field("reason", "text", "the last error"))),
    Kind("state_unsaved",
         "With ft=true: replicas did not save their state before the run failed, or gave its nodes "
         "back; the steps since the last checkpoint are lost.",
         "when they have been awaited for five minutes", _LEADER,
         (Field("hosts", "texts", "their nodes, at most 20"),)),
    Kind("task_exited", "A task ends because of a preemption notice.", "when the task ends",
         _AGENT,
         (Field("reason", "text", "as in `preemption_notice`"),
          Field("how", "text", "`requeue`: the task has requeued itself; `requeued`: the scheduler "
                "or somebody else has; `replace`: another task was submitted in its place; `exit`: "
                "it was cancelled, or may not be requeued; `stay`: unknown"),
          Field("means", "text", "what SIGTERM meant, as the scheduler reported: `preempted`; "
                "`requeued`, and not preempted; `cancelled`; `time_limit`; `run_ended`; absent: "
                "unknown, or there was no SIGTERM", True),
          Field("node", "text", "if the task was not preempted and its node was out of service: "
                "state and reason of the node in Slurm's words", True))),
    Kind("nodes_requeued", "Nodes that cannot be used go back to the queue.",
         "when that is decided, and when each goes", "the leader, and the agent of the node",
         (Field("delay_s", "number", "seconds for which they stay away"),
          Field("nodes", "integer", "number of nodes; in the leader's event only", True),
          Field("hosts", "texts", "the nodes, at most 20; in the leader's event only", True),
          Field("all", "flag", "all nodes of the run, because they are too few; in the leader's "
                "event only", True),
          Field("why", "text", "why waiting longer would not help, if other runs of the user "
                "hold the missing nodes; in the leader's event only", True))),
    Kind("agent_killed", "A signal has ended an agent.", "when the signal has arrived", _AGENT,
         (Field("signal", "text", "SIGINT, SIGHUP or SIGQUIT"),)),
    Kind("agent_failed", "An agent cannot go on.", "when its task fails", _AGENT,
         (Field("why", "text", "the error"),)),
)  # fmt: skip

_OF_THE_GROUP = (
    Kind("leader", "An agent leads the run from now on.", "when it has been elected", _LEADER,
         (Field("term", "integer", "number of its term; it grows with each leader"),)),
    Kind("joined", "A node is ready for the next round; it was no member of the last one, or was "
         "lost since.", "when its agent has asked to join",
         _LEADER, (_HOST,)),
    Kind("round", "A group has formed: its members have ranks, and start their workers.",
         "when the decision is recorded", _LEADER,
         (Field("number", "integer", "number of the round, from 1 on"),
          Field("index", "integer", "index of the log entry in `<run>/rdzv` that decides it"),
          Field("term", "integer", "term of the leader"),
          Field("nodes", "integer", "number of members"),
          Field("world_size", "integer", "number of workers"),
          Field("members", "members", "by group rank"),
          Field("restarts", "integer", "restarts that the run has spent so far"),
          Field("placed", "texts", "with ft=true: the tasks whose workers start; those of other "
                "members go on", True))),
    Kind("node_lost", "A node was lost, or has left by itself.", "when the leader detects it",
         _LEADER, (_HOST, Field("why", "text", "what the leader has observed"))),
    Kind("replica_left", "With ft=true: a node is no replica any more.", "when that is recorded",
         _LEADER, (_HOST, Field("nodes", "integer", "number of members that are left"))),
    Kind("round_stopped", "A round is over: its workers are stopped, and its nodes join again.",
         "when it is decided", _LEADER,
         (Field("reason", "text", "the reason in words"),
          Field("cause", "text", "`regroup`: nodes come or leave, as planned; `node_lost`: a "
                "member was lost; `failed`: a worker failed; `agent_restarted`: an agent has come "
                "back; `at_max_nodes`: with ft=true, there is no room for it; `cut_off`: members "
                "do not reach each other"),
          _ROUND,
          Field("step", "integer", "the step whose checkpoint all ranks have made before; absent: "
                "they are stopped without one", True),
          Field("nodes", "integer", "number of nodes that are stopped"),
          Field("hosts", "texts", "these nodes, at most 20"))),
    Kind("left_out",
         "Nodes do not reach all others: they get no place in the group. They are tried again.",
         "when these nodes change", _LEADER,
         (Field("tasks", "texts", "their tasks, at most 20; empty: all nodes reach each other"),
          Field("hosts", "texts", "these nodes, at most 20"),
          Field("cut", "texts", "pairs of nodes that do not reach each other, at most 8"),
          Field("pairs", "integer", "number of such pairs"))),
    Kind("node_drained", "A node gets no new jobs: it is left at the next checkpoint.",
         "once, when Slurm is queried about other runs", _LEADER,
         (_HOST, Field("state", "text", "Slurm's state of the node, such as `draining`; or "
                      "`reserved from 14:00`, for a maintenance that ends its jobs"))),
    Kind("nodes_given_back",
         "Nodes go back for a job of somebody else that can start with them: they are left at a "
         "checkpoint.", "with launcher.give_way, at most every 20 seconds", _LEADER,
         (Field("job", "text", "the job that waits"),
          Field("user", "text", "whose it is, as far as Slurm shows it"),
          Field("needs", "integer", "number of nodes that it needs"),
          Field("tasks", "texts", "the tasks that leave"),
          Field("hosts", "texts", "their nodes, at most 20"))),
    Kind("members_released", "Nodes under notice may leave: the next round does not wait for them.",
         "when a round is stopped because of them", _LEADER,
         (Field("tasks", "texts", "their tasks"),)),
    Kind("waits_long", "The run has had no group for `launcher.notify.wait_s`.",
         "once for each round, with `waiting` in launcher.notify.events", _LEADER,
         (Field("round", "integer", "number of the last round; 0: there was none"),
          Field("waited_s", "number", "seconds without a group, under this leader"),
          Field("nodes", "integer", "number of nodes that have joined"),
          Field("min_nodes", "integer", "number of nodes that a group needs"))),
    Kind("notified", "A message about the run was sent, by launcher.notify.",
         "when the command and the webhook have answered, or were given up",
         "the agent that sends it; a launcher writes none",
         (Field("event", "text", "as in launcher.notify.events"),
          Field("key", "text", "each key is sent once: the name of a file in `notified/`"),
          Field("why", "text", "why the command or the webhook has failed; null: neither has",
                True))),
    Kind("scale_up_decision",
         "It was weighed whether waiting nodes join a group that trains.",
         "when the decision differs from the one before", _LEADER,
         (Field("waiting", "texts", "their tasks, at most 20"),
          Field("admit", "text", "`not now`; else when, by launcher.scale_up: `checkpoint`, "
                "`immediate` or `on_restart`"),
          Field("why", "text", "what was weighed"))),
    Kind("growth_decision",
         "The run grows no further, and its pending tasks are held; or they may start again.",
         "when that changes", _LEADER,
         (Field("nodes", "integer", "number of nodes that it has"),
          Field("grows", "flag", "the pending tasks may start; else they are held"),
          Field("why", "text", "what was weighed"))),
    Kind("sweep_decision", "Other runs of the user start now, or stay away from the queue.",
         "when a run that trains, or ends, decides that for runs that request the same nodes",
         _LEADER,
         (Field("runs", "texts", "these runs"),
          Field("why", "text", "what was decided, and why"))),
    Kind("tasks_restarted", "Lost tasks may start again soon.",
         "when the scheduler holds them, or has ended them", _LEADER,
         (Field("tasks", "texts", "the tasks"),
          Field("avoids", "texts", "nodes on which some of them may still run, because their end "
                "was not observed: they start there again when nothing of them runs there", True))),
    Kind("end", "The run has ended.", "when its result is written", _LEADER,
         (Field("status", "text", "`succeeded`, `failed` or `closed`"),
          Field("rounds", "integer", "number of rounds"),
          Field("restarts", "integer", "number of restarts that were spent"),
          Field("failure", "text", "the first failure; null: there was none", True))),
)  # fmt: skip

_OF_FAILURES = (
    Kind("restart", "Workers have failed by themselves: that spends one of max_restarts.",
         _JUDGED, _LEADER,
         (Field("restarts", "integer", "restarts spent so far, with this one"),
          Field("host", "text", "host of the worker that failed first"),
          Field("failure", "text", "the worker that failed first, and its error"),
          Field("rank", "integer", "its global rank", True),
          Field("round", "integer", "its round", True),
          Field("traceback", "text", "its traceback, or the end of its stderr; null: none", True),
          Field("log", "text", "the file with its stderr; null: none", True))),
    Kind("secondary_failures", "Workers have failed because of others: that spends no restart.",
         _JUDGED, _LEADER, (Field("workers", "integer", "number of workers"),)),
    Kind("crash_loop", "The workers have failed repeatedly without a new checkpoint.",
         "when that ends the run", _LEADER,
         (Field("attempts", "integer", "number of failures in a row"),
          Field("checkpoint", "integer", "the last step that was saved; null: none", True))),
    Kind("leader_failed", "A leader has failed by an error of its own, and gives up its term.",
         "when that happens", _LEADER,
         (_HOST, Field("why", "text", "the error"),
          Field("traceback", "text", "its traceback"),
          Field("terms", "integer", "terms that have failed in a row, with this one, without a new "
                "checkpoint or step"),
          Field("again", "flag", "another agent may lead; else the run ends with this error"))),
    Kind("host_failure", "A failure is counted against a host.", _JUDGED, _LEADER,
         (_HOST, Field("strikes", "integer", "failures of six hours; two exclude the host"),
          Field("why", "text", "the failure"))),
    Kind("excluded", "The tasks of the run do not start on a host, for up to an hour.",
         "when two failures are counted against it", _LEADER,
         (_HOST, Field("why", "text", "the failure"),
          Field("hosts_left", "integer", "number of other hosts that the run has"))),
    Kind("start_failed", "A task has ended, or could not start, before its agent joined.",
         "when Slurm reports it", _LEADER,
         (Field("host", "text", "the host; empty: Slurm does not report it"),
          Field("state", "text", "Slurm's state of the task"),
          Field("reason", "text", "Slurm's reason; empty: none"),
          Field("hosts", "texts", "hosts on which it has failed so in a row, this one last"),
          Field("again", "flag", "it is tried on another node"))),
    Kind("preflight", "A check of a node has failed before it joined.", "when its checks end",
         _AGENT,
         (Field("check", "text", "`gpus`, `memory`, `arithmetic`, `space` or `clock`"),
          Field("reason", "text", "what was found"), _HOST,
          Field("fit", "flag", "it joins all the same"),
          Field("excluded", "flag", "the tasks of the run do not start there any more"))),
    Kind("hang", "The workers make no step any more, because some ranks block the others.",
         "when their stacks were compared", "the leader; with ft=true the agent of the node",
         (Field("stalled_s", "number", "seconds without a step"),
          Field("ranks", "ranks", "the blocking ranks, and where each is"),
          Field("others", "text", "where the others are; empty: there are none"),
          Field("shared", "flag", "no single rank blocks"))),
    Kind("straggler", "A rank is slower than the others, or is not any more.",
         "when that has lasted for a while", _LEADER,
         (Field("rank", "integer", "the rank"), _HOST,
          Field("ratio", "number", "its own time for a step, divided by the median of all ranks"),
          Field("slow", "flag", "it is slow; else it keeps up again"))),
)  # fmt: skip

_USER = Field("user", "text", "the user")
_WHERE = Field("host", "text", "host on which the command ran")
_NODE_TASK = Field("node_task", "text", "the task of the node")
_COMMAND = "the command, in `events/command.jsonl`"

_OF_COMMANDS = (
    Kind("cancel", "A user has cancelled the run.", "before its tasks are ended", _COMMAND,
         (_USER, _WHERE)),
    Kind("preempt", "A user preempts a node of the run.", "before the notice is given", _COMMAND,
         (_USER, _HOST, _NODE_TASK,
          Field("grace_s", "number", "seconds that the node was given"))),
    Kind("kill", "A user has killed the processes of a node.", "before that", _COMMAND,
         (_USER, _HOST, _NODE_TASK)),
    Kind("resume", "A user has resumed the run in new tasks.", "when they are submitted", _COMMAND,
         (_USER, _WHERE,
          Field("generation", "integer", "number of resumptions, with this one"),
          Field("nodes", "text", "the range of nodes from now on, such as `1:3`"))),
)  # fmt: skip

KINDS: Mapping[str, Kind] = {
    kind.name: kind for kind in (*_OF_TASKS, *_OF_THE_GROUP, *_OF_FAILURES, *_OF_COMMANDS)
}
"""All kinds of events, by name, in the order of the page."""


def valid_events(events: Iterable[Event]) -> list[Event]:
    """Return the events that have the required fields of their kind, and in the right types.

    Fields and kinds that a newer version has added do not matter: readers ignore them.
    """
    from msgspec import convert

    found, structs = [], _structs()
    for event in events:
        struct = structs.get(str(event.get("kind")))
        try:
            if struct is not None:
                convert(event, struct)
        except ValueError:
            continue
        found.append(event)
    return found


def problems(event: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with an event, in sentences that name the kind and the field."""
    from msgspec import convert

    name = event.get("kind")
    kind = KINDS.get(str(name))
    if kind is None:
        return [f"{name!r} is no kind of event: describe it in hpc_elastic/run/events.py"]
    fields = {field.name: field for field in (*COMMON, *kind.fields)}
    found = [f"{key} is no field of it" for key in event if key not in fields]
    for name_, of in fields.items():
        value = event.get(name_)
        try:
            if value is not None:
                convert(value, _types()[of.type])
            elif not of.optional:
                found.append(f"{name_} is missing")
        except ValueError:
            found.append(f"{name_} is {value!r}, which is no {of.type}")
    if event.get("v") not in (None, VERSION):
        found.append(f"v is {event['v']!r}, not {VERSION}")
    return [f"{name}: {problem}" for problem in found]


@functools.cache
def _types() -> dict[Type, Any]:
    from msgspec import defstruct

    member = {"task": str, "host": str, "attempt": int, "slot": int, "nproc": int}
    return {
        "text": str, "integer": int, "number": float, "flag": bool, "texts": list[str],
        "members": list[defstruct("Member", member.items(), gc=False)],  # type: ignore[misc]
        "ranks": list[defstruct("Rank", [("rank", int)], gc=False)],  # type: ignore[misc]
    }  # fmt: skip


@functools.cache
def _structs() -> dict[str, type[Any]]:
    from msgspec import defstruct

    def typed(field: Field) -> tuple[Any, ...]:
        type_ = _types()[field.type]
        return (field.name, type_ | None, None) if field.optional else (field.name, type_)

    made = ((k.name, [typed(field) for field in k.fields]) for k in KINDS.values())
    return {name: defstruct(name, fields, kw_only=True, gc=False) for name, fields in made}
