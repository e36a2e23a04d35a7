"""The options of the fake's commands, the jobs that sbatch and srun ask for, and times; pure.

An option that is not in a command's table is refused by name: a test that passes because an option
was ignored would prove nothing.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.slurm import nodelist
from hpc_elastic_testing.config import FakeConfig, Refusal, unknown

FLAG, VALUE, OPTIONAL = "flag", "value", "optional"
"""An option without a value, with one, or with one only after an equals sign."""


@dataclass(frozen=True)
class OptionTable:
    """The options of one command.

    ``kinds`` are FLAG, VALUE or OPTIONAL by long name, ``short`` the long name of each single
    letter. ``stops``: options end at the first other argument, as for srun and sbatch.
    """

    kinds: Mapping[str, str]
    short: Mapping[str, str] = field(default_factory=dict)
    stops: bool = False


@dataclass
class ParsedOptions:
    """A parsed command line: values by long name (``""`` for flags; the last counts), the rest."""

    options: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.options

    def get(self, name: str) -> str | None:
        """Return an option's value, None without the option."""
        return self.options.get(name)


def parse(argv: Sequence[str], table: OptionTable) -> ParsedOptions:
    """Parse a command line; raise Refusal for an unknown option or a missing value."""
    parsed, words = ParsedOptions(), list(argv)

    def next_word(name: str) -> str:
        if not words:
            raise Refusal(f"option '{name}' requires an argument")
        return words.pop(0)

    while words:
        word = words.pop(0)
        if word == "--":
            parsed.rest += words
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            kind = table.kinds.get(name)
            if kind is None:
                raise unknown(f"--{name}")
            if kind == FLAG and equals:
                raise Refusal(f"option '--{name}' doesn't allow an argument")
            needs_next = kind == VALUE and not equals
            parsed.options[name] = next_word(f"--{name}") if needs_next else value
        elif word.startswith("-") and len(word) > 1:
            letters = word[1:]
            while letters:
                letter, letters = letters[0], letters[1:]
                if letter not in table.short:
                    raise unknown(f"-{letter}")
                name = table.short[letter]
                value = ""
                if table.kinds[name] != FLAG:
                    value, letters = letters, ""
                needs_next = table.kinds[name] == VALUE and not value
                parsed.options[name] = next_word(f"-{letter}") if needs_next else value
        elif table.stops:
            parsed.rest += [word, *words]
            break
        else:
            parsed.rest.append(word)
    return parsed


def directives(script: str) -> list[str]:
    """Return the options in the #SBATCH lines of a script, up to its first command.

    Raises Refusal if the text is not a script.
    """
    if not script.startswith("#!"):
        raise Refusal(
            "This does not look like a batch script.  The first line must start with #! followed "
            "by the path to an interpreter.\nFor instance: #!/bin/sh"
        )
    found: list[str] = []
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            found += _words(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _words(text: str) -> Iterator[str]:
    """Yield the words of a line as sbatch does: a backslash also escapes in quotes."""
    word, quote, characters = "", "", iter(text.strip())
    begun = False
    for c in characters:
        if c == "\\":
            word, begun = word + next(characters, ""), True
        elif c == quote:
            quote = ""
        elif not quote and c in "'\"":
            quote, begun = c, True
        elif not quote and c == "#" and not begun:
            return
        elif not quote and c.isspace():
            if begun:
                yield word
            word, begun = "", False
        else:
            word, begun = word + c, True
    if begun:
        yield word


_SHARED = {
    **dict.fromkeys(("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task"), VALUE),
    **dict.fromkeys(("partition", "time", "output", "error", "open-mode", "chdir"), VALUE),
    **dict.fromkeys(("nodelist", "exclude", "begin", "dependency", "account", "qos"), VALUE),
    **dict.fromkeys(("mem", "constraint", "gpus-per-node", "gres", "export", "comment"), VALUE),
    "no-kill": OPTIONAL,
    "exclusive": OPTIONAL,
    "hold": FLAG,
}
_SHORT = {
    **{"J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "p": "partition"},
    **{"t": "time", "o": "output", "e": "error", "D": "chdir", "w": "nodelist", "x": "exclude"},
    **{"b": "begin", "d": "dependency", "A": "account", "q": "qos", "C": "constraint"},
    **{"H": "hold", "k": "no-kill"},
}
_SBATCH_ONLY = {
    **dict.fromkeys(("array", "wrap", "signal", "mail-type", "mail-user"), VALUE),
    **dict.fromkeys(("parsable", "requeue", "no-requeue"), FLAG),
}
SBATCH = OptionTable({**_SHARED, **_SBATCH_ONLY}, {**_SHORT, "a": "array"}, stops=True)
SRUN = OptionTable(
    {**_SHARED, "kill-on-bad-exit": OPTIONAL, "wait": VALUE, "label": FLAG},
    {**_SHORT, "K": "kill-on-bad-exit", "W": "wait", "l": "label"},
    stops=True,
)


@dataclass(frozen=True)
class SignalOption:
    """The option ``--signal``: a signal (without SIG) some seconds before the time limit.

    ``to_shell``: it goes to the batch script instead of the steps.
    """

    name: str
    ahead_s: float = 60.0
    to_shell: bool = False


@dataclass(frozen=True)
class JobRequest:
    """The options of one job, or of each element of an array; None if not given.

    Attributes:
        num_tasks: Default number of tasks of its steps.
        limit_s: Its time limit; None without one.
        begin: Its earliest start, in epoch seconds.
        dependency: Kinds and job ids of its dependencies.
        output: File name pattern of its log.
        error: File name pattern of its standard error; None for the log.
        append: Whether the log is kept at a restart.
        env: The environment of the submission.
        script: The batch script; None for an allocation of srun.
        command: Path of the batch script, and its arguments; empty if it has none.
    """

    name: str
    partition: str
    num_nodes: int
    num_tasks: int
    tasks_per_node: int | None
    cpus_per_task: int | None
    exclusive: bool
    nodelist: tuple[str, ...]
    exclude: tuple[str, ...]
    limit_s: float | None
    requeue: bool
    no_kill: bool
    hold: bool
    begin: float
    dependency: tuple[tuple[str, int], ...]
    warning: SignalOption | None
    output: str | None
    error: str | None
    append: bool
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    script: str | None = field(repr=False)
    arguments: tuple[str, ...] = ()
    command: str = ""

    @property
    def cpus(self) -> int:
        """CPUs that it needs on each node."""
        per_node = self.tasks_per_node or -(-self.num_tasks // self.num_nodes)
        return per_node * (self.cpus_per_task or 1)


@dataclass(frozen=True)
class SubmitContext:
    """The circumstances of a submission: directory, environment, time, script and its path."""

    cwd: str
    env: Mapping[str, str]
    now: float
    script: str | None = None
    path: Path = Path("wrap")
    """Path of the script; without a script, a name."""
    arguments: tuple[str, ...] = ()


def read_request(options: ParsedOptions, origin: SubmitContext, config: FakeConfig) -> JobRequest:
    """Return the request of a job; raise Refusal if it can never run on this cluster."""
    _refuse_unavailable(options, config)
    listed = _hosts(options, "nodelist", config)
    command = [str(origin.path), *origin.arguments] if origin.path.is_absolute() else []
    num_nodes = _number(options, "nodes") or max(1, len(listed))
    per_node = _number(options, "ntasks-per-node")
    warning = None
    if (text := options.get("signal")) is not None:
        name, _, ahead = text.removeprefix("B:").partition("@")
        if ahead and not ahead.isdecimal():
            raise Refusal(f"Invalid --signal specification: {text}")
        to_shell = text.startswith("B:")
        warning = SignalOption(signal_name(name), float(ahead or 60), to_shell=to_shell)
    return JobRequest(
        name=options.get("job-name") or origin.path.name,
        partition=options.get("partition") or "low",
        num_nodes=num_nodes,
        num_tasks=_number(options, "ntasks") or num_nodes * (per_node or 1),
        tasks_per_node=per_node,
        cpus_per_task=_number(options, "cpus-per-task"),
        exclusive="exclusive" in options,
        nodelist=listed,
        exclude=_hosts(options, "exclude", config),
        limit_s=parse_limit(options.get("time") or "0"),
        requeue="no-requeue" not in options,
        no_kill="no-kill" in options,
        hold="hold" in options,
        begin=parse_begin(options.get("begin") or "now", origin.now),
        dependency=_dependency(options.get("dependency")),
        warning=warning,
        output=options.get("output"),
        error=options.get("error"),
        append=options.get("open-mode") == "append",
        cwd=options.get("chdir") or origin.cwd,
        env=origin.env,
        script=origin.script,
        arguments=origin.arguments,
        command=" ".join(command),
    )


def _refuse_unavailable(options: ParsedOptions, config: FakeConfig) -> None:
    def refused(why: str, *first: str) -> Refusal:
        return Refusal("\n".join([*first, f"Batch job submission failed: {why}"]))

    names = [partition.name for partition in config.partitions]
    if (partition := options.get("partition")) is not None and partition not in names:
        first = f"invalid partition specified: {partition}"
        raise refused("Invalid partition name specified", first)
    if "gpus-per-node" in options or "gres" in options:
        raise refused("Invalid generic resource (gres) specification")
    if "constraint" in options:
        raise refused("Invalid feature specification")
    if options.get("export") not in (None, "ALL"):
        raise unknown(f"--export={options.get('export')}, only ALL")
    if memory := options.get("mem"):
        units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
        number, unit = (memory[:-1], memory[-1].upper()) if memory[-1].isalpha() else (memory, "M")
        if unit not in units or not number.isdecimal():
            raise Refusal(f"Invalid --mem specification: {memory}")
        if int(number) * units[unit] > config.memory_mb:
            first = "Memory specification can" + " not be satisfied"  # in the words of Slurm
            raise refused("Requested node configuration is not available", first)


def _number(options: ParsedOptions, name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise unknown(f"--{name}={text}: it takes a number from 1 on")
    return int(text)


def _hosts(options: ParsedOptions, name: str, config: FakeConfig) -> tuple[str, ...]:
    try:
        hosts = nodelist.expand(options.get(name) or "")
    except ValueError as e:
        raise Refusal(f"Invalid --{name}: {e}") from e
    if not set(hosts) <= set(config.node_names):
        raise Refusal("Batch job submission failed: Invalid node name specified")
    return tuple(hosts)


def _dependency(text: str | None) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for part in (text or "").split(","):
        kind, *ids = part.split(":")
        if not part:
            continue
        if (
            kind not in ("after", "afterany", "afterok")
            or not ids
            or not all(i.isdecimal() for i in ids)
        ):
            raise unknown(f"--dependency={text}")
        found += [(kind, int(job)) for job in ids]
    return tuple(found)


def signal_name(text: str) -> str:
    """Return a signal's name without SIG, given with or without it, or as a number.

    Raises Refusal if there is no such signal.
    """
    name = text.upper().removeprefix("SIG")
    try:
        found = signal.Signals(int(name)) if name.isdecimal() else signal.Signals[f"SIG{name}"]
    except (KeyError, ValueError):
        raise Refusal(f"Unknown job signal: {text}") from None
    return found.name.removeprefix("SIG")


DATE = "%Y-%m-%dT%H:%M:%S"
_AHEAD = re.compile(r"now(?:\+(\d+)([a-z]*))?")
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}


def parse_limit(text: str) -> float | None:
    """Return the seconds of a ``--time``, None for no limit.

    ``5`` are minutes, ``5:30`` minutes and seconds, ``1-12`` days and hours. Slurm rounds up to
    whole minutes; the fake does not, so that tests are short.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    limit_s = time_limit_s(text)
    if limit_s is None:
        raise Refusal("Invalid --time specification")
    return limit_s


def parse_begin(text: str, now: float) -> float:
    """Return the epoch seconds of ``now``, ``now+10``, ``now+1hour`` or a full date."""
    if m := _AHEAD.fullmatch(text):
        unit = (m[2] or "").removesuffix("s")
        if unit not in _UNITS:
            raise Refusal(f"Invalid time specification: {text}")
        return now + int(m[1] or 0) * _UNITS[unit]
    try:
        return time.mktime(time.strptime(text, DATE))
    except ValueError:
        raise unknown(f"the time {text}; it takes now, now+SECONDS and dates") from None


def show_span(seconds: float | None) -> str:
    """Return a duration in the format of squeue: ``2:03``, ``1-02:03:04`` or ``UNLIMITED``."""
    if seconds is None:
        return "UNLIMITED"
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour:02}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def show_full_span(seconds: float | None) -> str:
    """Return a duration in the format of scontrol: ``00:02:03``."""
    text = show_span(seconds)
    return text if seconds is None or seconds >= 3600 else f"00:{text:0>5}"


def show_date(moment: float | None, nothing: str = "N/A") -> str:
    """Return a time in Slurm's format, in local time."""
    return nothing if moment is None else time.strftime(DATE, time.localtime(moment))
