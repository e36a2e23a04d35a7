"""All kinds of events that a run writes: the one registry (pure).

Whoever adds an event adds its kind here; ``python docs/generate.py events`` writes the page. Tests
hold that runs write nothing else, and that the page is fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_elastic.run.events import VERSION, Event

# ---- What is written down of a kind of event, and whether an event is as it should be (pure)


@dataclass(frozen=True)
class Field:
    """One field of a kind of event.

    Attributes:
        name: Its key.
        type: ``texts`` is a list of text; ``members`` a list of agents as a round has them;
            ``ranks`` a list of objects about ranks.
        meaning: What it says, with its unit.
        optional: It may be absent or null; the meaning says what that means.
    """

    name: str
    type: Type
    meaning: str
    optional: bool = False


_HOST = Field("host", "text", "the node's host name")
_ATTEMPT = Field("attempt", "integer", "how often the task had been requeued when it began")
_ROUND = Field("round", "integer", "the round's number, from 1 on")
_TASK_OF_NODE = "its agent"
_LEADER = "the leader"


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Attributes:
        name: What stands in ``kind``.
        meaning: One line.
        when: When it is written.
        by: Who writes it.
        fields: Besides those that all events have.
    """

    name: str
    meaning: str
    when: str
    by: str
    fields: tuple[Field, ...] = ()


_OF_TASKS = (
    Kind("task", "A task has started on a node.", "as soon as its agent runs", _TASK_OF_NODE,
         (_ATTEMPT, _HOST, Field("pid", "integer", "process id of the agent"),
          Field("started", "number", "when its process began, in Unix seconds", True))),
    Kind("preemption_notice", "A node is to be left soon.",
         "when it is announced, and again if there is less time than was said; then by the leader, "
         "who has been told",
         "its agent, and the leader",
         (Field("reason", "text", "`signal`: SIGTERM; `time_limit`; `asked`: by the user signal, a "
                "notice file or the script"),
          Field("left_s", "number", "seconds until the node has to have been left"),
          Field("signal", "text", "the signal that announced it; absent: none did", True),
          Field("given_s", "number", "seconds from the announcement to the end; absent: unknown",
                True),
          Field("host", "text", "the node's host name; in the leader's line only", True))),
    Kind("first_step", "The workers of a node train: all have made a step.",
         "once in a round, at their first step", _TASK_OF_NODE,
         (_ATTEMPT, _ROUND, Field("step", "integer", "the first step that they have made"),
          Field("restored", "integer", "the step of the checkpoint that they have loaded; "
                "null: none", True),
          Field("restore_s", "number", "seconds that took", True),
          Field("start_s", "number", "seconds from the workers' start to that step", True),
          Field("counted", "flag", "nobody says which steps these are: they were counted", True))),
    Kind("workers_stopped", "The workers of a node were stopped before they were done.",
         "when a round is over and they have ended", _TASK_OF_NODE,
         (_ATTEMPT, _ROUND,
          Field("step", "integer", "the last step that they have made; absent: unknown", True),
          Field("step_time", "number", "when, in Unix seconds; absent: unknown", True))),
    Kind("warm_worker_died", "A spare, which imports ahead for the next restart, ended by itself.",
         "when that is seen", _TASK_OF_NODE,
         (_HOST, Field("why", "text", "the signal that ended it, such as `SIGKILL`, or its exit "
                       "code"))),
    Kind("checkpoint_failed",
         "A checkpoint could not be written; the earlier ones are as they were.",
         "with the first one in a row", "the agent of the first rank",
         (Field("step", "integer", "of the checkpoint"), Field("why", "text", "the error"))),
    Kind("checkpoint_recovered", "Checkpoints are written again.",
         "with the first one after `checkpoint_failed`, if the first rank has not moved meanwhile",
         "the agent of the first rank", (Field("step", "integer", "of the checkpoint"),)),
    Kind("task_exited", "A node is left because of a notice.", "when its task ends", _TASK_OF_NODE,
         (Field("reason", "text", "as in `preemption_notice`"),
          Field("how", "text", "`requeue`: the task has put itself back into the queue; "
                "`requeued`: the scheduler, or somebody else, has; `replace`: another task was "
                "submitted in its place; `exit`: it was cancelled, or may not come back; `stay`: "
                "it can not be told"),
          Field("means", "text", "what SIGTERM meant, as the scheduler said when asked: "
                "`preempted`; `requeued`, and not preempted; `cancelled`; `time_limit`; "
                "`run_ended`; absent: it is not known, or there was none", True),
          Field("node", "text", "where the task was not preempted, and its node was not in service "
                "then: the node's state and the reason, in Slurm's words", True))),
    Kind("nodes_requeued", "Nodes that cannot be used go back to the queue.",
         "when that is decided, and when each goes", "the leader, and the node's agent",
         (Field("delay_s", "number", "seconds for which they stay away"),
          Field("nodes", "integer", "how many; in the leader's line only", True),
          Field("hosts", "texts", "which, at most 20; in the leader's line only", True),
          Field("all", "flag", "all nodes of the run, because they are too few; in the leader's "
                "line only", True),
          Field("why", "text", "why they wait in vain, where other runs of the sweep hold what "
                "they lack; in the leader's line only", True))),
    Kind("agent_killed", "An agent was ended by a signal.", "when the signal has come",
         _TASK_OF_NODE,
         (Field("signal", "text", "SIGINT, SIGHUP or SIGQUIT"),)),
    Kind("agent_failed", "An agent can not go on.", "when its task fails", _TASK_OF_NODE,
         (Field("why", "text", "the error"),)),
)  # fmt: skip

_OF_THE_GROUP = (
    Kind("leader", "An agent has begun to lead the run.", "when it has been elected", _LEADER,
         (Field("epoch", "integer", "the number of the leadership; larger with each leader"),)),
    Kind("joined", "A node is ready for the next round.", "when its agent has asked for a place",
         _LEADER, (_HOST,)),
    Kind("round", "A group has formed: its members have ranks, and start their workers.",
         "when all of them may know it", _LEADER,
         (Field("number", "integer", "the round's number, from 1 on"),
          Field("record", "integer", "number of the record in `<run>/rdzv` that decides it"),
          Field("epoch", "integer", "of the leader"), Field("nodes", "integer", "its members"),
          Field("world_size", "integer", "its workers"),
          Field("members", "members", "by group rank"),
          Field("restarts", "integer", "restarts that the run has spent so far"),
          Field("placed", "texts", "with ft=true: the tasks whose workers start; those of the "
                "others go on", True))),
    Kind("node_lost", "A node was lost, or has left on its own.", "when the leader has noticed",
         _LEADER, (_HOST, Field("why", "text", "what the leader saw of it"))),
    Kind("replica_left", "With ft=true: a replica is none any more.", "when that is recorded",
         _LEADER, (_HOST, Field("nodes", "integer", "members that are left"))),
    Kind("round_stopped", "A round is over: its workers are stopped, and its nodes join again.",
         "when it is decided", _LEADER,
         (Field("reason", "text", "why, in words"),
          Field("cause", "text", "`regroup`: nodes come or leave, as planned; `node_lost`: a "
                "member was lost; `failed`: a worker failed; `agent_restarted`: an agent has come "
                "back; `at_max_nodes`: with ft=true, there is no room for it"),
          _ROUND,
          Field("step", "integer", "the step whose checkpoint all ranks have made before; absent: "
                "they stop as they are", True),
          Field("nodes", "integer", "nodes that are stopped"),
          Field("hosts", "texts", "which, at most 20"))),
    Kind("members_released", "Nodes under notice may go: they are not waited for.",
         "when a round is stopped because of them", _LEADER,
         (Field("tasks", "texts", "their tasks"),)),
    Kind("scale_up_decision", "Nodes wait to join a group that trains, and were weighed.",
         "when that comes out differently than before", _LEADER,
         (Field("waiting", "texts", "their tasks, at most 20"),
          Field("admit", "text", "`not now`; else when, as launcher.scale_up says: `checkpoint`, "
                "`immediate` or `on_restart`"),
          Field("why", "text", "what was weighed"))),
    Kind("tasks_restarted", "Tasks that were lost are let start again soon.",
         "when the scheduler holds them, or has ended them", _LEADER,
         (Field("tasks", "texts", "which"),
          Field("avoids", "texts", "nodes where some of them may run still, for nobody has seen "
                "their end: they start there again once the node is rid of them", True))),
    Kind("end", "The run has ended.", "when its result is written", _LEADER,
         (Field("status", "text", "`succeeded`, `failed` or `closed`"),
          Field("rounds", "integer", "how many there were"),
          Field("restarts", "integer", "how many were spent"),
          Field("failure", "text", "what failed first; null: nothing did", True))),
)  # fmt: skip

_OF_FAILURES = (
    Kind("restart", "Workers failed by themselves: that spends one of max_restarts.",
         "when a broken round was judged", _LEADER,
         (Field("restarts", "integer", "spent so far, with this one"),
          Field("host", "text", "of the worker that failed first"),
          Field("failure", "text", "who failed first, and of what"))),
    Kind("secondary_failures", "Workers failed because of others: that spends nothing.",
         "when a broken round was judged", _LEADER,
         (Field("workers", "integer", "how many"),)),
    Kind("crash_loop", "The workers fail again and again without a new checkpoint.",
         "when that ends the run", _LEADER,
         (Field("attempts", "integer", "how often"),
          Field("checkpoint", "integer", "the last step that was saved; null: none", True))),
    Kind("host_failure", "A failure speaks against a host.", "when a broken round was judged",
         _LEADER, (_HOST, Field("strikes", "integer", "against it so far; two exclude it"),
          Field("why", "text", "the failure"))),
    Kind("excluded", "The run's tasks are not to start on a host any more.",
         "when it has two strikes", _LEADER,
         (_HOST, Field("why", "text", "the failure"),
          Field("hosts_left", "integer", "hosts that the run has besides"))),
    Kind("start_failed", "A task ended, or could not be started, before its agent joined.",
         "when Slurm has said so", _LEADER,
         (Field("host", "text", "where; empty: Slurm does not say"),
          Field("state", "text", "Slurm's word for the task's state"),
          Field("reason", "text", "Slurm's reason; empty: none"),
          Field("hosts", "texts", "where it has failed so in a row, this time last"),
          Field("again", "flag", "it is tried on another node"))),
    Kind("preflight", "A node was found not to be as it should be before it joined.",
         "when its checks have ended", _TASK_OF_NODE,
         (Field("check", "text", "`gpus`, `memory`, `arithmetic`, `space` or `clock`"),
          Field("reason", "text", "what was found"), _HOST,
          Field("fit", "flag", "it joins all the same"),
          Field("excluded", "flag", "the run's tasks are not to start there any more"))),
    Kind("hang", "The workers make no step any more, and some hold the others up.",
         "when their stacks were judged", "the leader; with ft=true the node's agent",
         (Field("stalled_s", "number", "seconds without a step"),
          Field("ranks", "ranks", "who is to blame, and what each is at"),
          Field("others", "text", "what the others are at; empty: there are none"),
          Field("shared", "flag", "the blame is nobody's alone"))),
    Kind("straggler", "A rank is slower than the others, or is not any more.",
         "when that has held for a while", _LEADER,
         (Field("rank", "integer", "the rank"), _HOST,
          Field("ratio", "number", "what it needs for a step, over the median of all"),
          Field("slow", "flag", "it is slow; else it keeps up again"))),
)  # fmt: skip

_USER = Field("user", "text", "who gave it")
_COMMAND = "the command, in `events/command.jsonl`"

_OF_COMMANDS = (
    Kind("cancel", "A user has cancelled the run.", "before its tasks are ended", _COMMAND,
         (_USER, Field("host", "text", "where it was given"))),
    Kind("preempt", "A user has a node of the run left, with notice.", "before the notice is given",
         _COMMAND,
         (_USER, _HOST, Field("node_task", "text", "the task of the node"),
          Field("grace_s", "number", "seconds that it was given"))),
    Kind("kill", "A user has killed the processes of a node.", "before that", _COMMAND,
         (_USER, _HOST, Field("node_task", "text", "the task of the node"))),
    Kind("resume", "A user has let the run go on, in new tasks.", "once they are submitted",
         _COMMAND,
         (_USER, Field("host", "text", "where it was given"),
          Field("generation", "integer", "how often that was done, with this one"),
          Field("nodes", "text", "the range of nodes from now on, such as `1:3`"))),
)  # fmt: skip

KINDS: Mapping[str, Kind] = {
    kind.name: kind for kind in (*_OF_TASKS, *_OF_THE_GROUP, *_OF_FAILURES, *_OF_COMMANDS)
}
"""All kinds of events, by name, in the order of the page."""


def problems(event: Mapping[str, Any]) -> list[str]:
    """Tell what is wrong with an event; see `schema.problems`."""
    return field_problems(event, KINDS)


def valid_events(events: Iterable[Event]) -> list[Event]:
    """Return the events that can be relied on: what a disk or a person has damaged is left out."""
    return [event for event in events if fits(event, KINDS)]


Type = Literal["text", "integer", "number", "flag", "texts", "members", "ranks"]


COMMON = (
    Field("v", "integer", f"version of this schema: {VERSION}"),
    Field("time", "number", "when it happened, in Unix seconds, by the clock of the writer's node"),
    Field("kind", "text", "what happened"),
    Field("task", "text", "whom it concerns: the array task; else, the task that writes it"),
)
"""The fields of every event."""


def field_problems(event: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """Tell what is wrong with an event; nothing is the usual case.

    Args:
        event: A line of an event log.
        kinds: Those that there are, by name.

    Returns:
        Sentences that name the kind and the field.
    """
    name = event.get("kind")
    kind = kinds.get(str(name))
    if kind is None:
        return [f"{name!r} is no kind of event: describe it in hpc_elastic/run/event_schema.py"]
    fields = {field.name: field for field in (*COMMON, *kind.fields)}
    found = [*_wrong(event, fields.values()), *_unknown(event, fields)]
    if event.get("v") not in (None, VERSION):
        found.append(f"v is {event['v']!r}, not {VERSION}")
    return [f"{name}: {problem}" for problem in found]


def fits(event: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bool:
    """Tell whether a reader can rely on an event: what belongs to its kind is there, and as it is.

    What a newer version has added does not matter, and kinds that are not known are passed over
    by their readers.
    """
    kind = kinds.get(str(event.get("kind")))
    return kind is None or not any(_wrong(event, kind.fields))


def _wrong(event: Mapping[str, Any], fields: Iterable[Field]) -> Iterator[str]:
    for field in fields:
        value = event.get(field.name)
        if value is None:
            if not field.optional:
                yield f"{field.name} is missing"
        elif not _IS[field.type](value):
            yield f"{field.name} is {value!r}, which is no {field.type}"


def _unknown(event: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[str]:
    return (f"{name} is no field of it" for name in event if name not in fields)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_members(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_member, value))


def _is_member(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), str) for key in ("task", "host"))
        and all(_is_integer(value.get(key)) for key in ("attempt", "slot", "nproc"))
    )


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and _is_integer(m.get("rank")) for m in value
    )


_IS: dict[Type, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "flag": lambda value: isinstance(value, bool),
    "texts": _is_texts,
    "members": _is_members,
    "ranks": _is_ranks,
}
