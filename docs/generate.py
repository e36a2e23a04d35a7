"""The generator of those reference pages whose facts stand in the code.

    python docs/generate.py       writes all of them into docs/reference, and the blocks of figures

Tests compare the pages with what this writes.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import Field as DataclassField
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
import figures

from hpc_elastic import errors
from hpc_elastic.cli.main import program
from hpc_elastic.config import schema
from hpc_elastic.config.resolve import ORDER
from hpc_elastic.report.log_files import NothingSelectedError
from hpc_elastic.report.node_time import Interval, NodeTime, Size
from hpc_elastic.report.page import ReportLibraryError
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.report import VERSION as REPORT_VERSION
from hpc_elastic.report.report import (
    About,
    Change,
    Configuration,
    Report,
    SavedCheckpoints,
    Spent,
    WorkerFailure,
)
from hpc_elastic.report.timeline import Cause, Cost, TimelineEntry
from hpc_elastic.run.events import COMMON, KINDS, Field, Kind
from hpc_elastic.run.events import VERSION as EVENTS_VERSION


@dataclass(frozen=True)
class Setting:
    """One row of the settings.

    Attributes:
        key: As it is typed, such as ``launcher.agent.warm_workers``.
        type: Its type, in words.
        default: Its default, as YAML.
        meaning: What it does; empty if its name says it.
    """

    key: str
    type: str
    default: str
    meaning: str


def settings_page() -> str:
    """Return the text of reference/settings.md."""
    common = {setting.key for setting in _group(schema.LauncherSettings)}
    sections = [
        _HEAD,
        _table(_group(schema.LauncherSettings)),
        _SLURM,
        _table(s for s in _group(schema.SlurmSettings) if s.key not in common),
        _LOCAL,
        _table(s for s in _group(schema.LocalSettings) if s.key not in common),
        _SWEEPER,
        _table(_group(schema.OptunaSettings, "hydra.sweeper")),
        _TIMEOUTS,
        *(f"| {_time(o.shorter, o.times)} | {_time(o.longer)} | {o.why} |" for o in ORDER),
        "",
    ]
    return "\n".join(sections)


def _time(name: str, times: float = 1.0) -> str:
    """Return the name of a time in `ORDER`, as Markdown."""
    return f"`{name.rpartition(':')[2]}`" + (f" x {times:g}" if times != 1 else "")


def _group(cls: type[Any], path: str = "launcher") -> Iterator[Setting]:
    """Yield the settings of a dataclass, and of the dataclasses in it."""
    for key, field, hint, meaning in schema.described(cls, f"{path}."):
        yield Setting(key, _type(hint), _default(field), _markdown(meaning))


def _type(hint: object) -> str:
    """Return an annotation in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        texts = (v if isinstance(v, str) else str(v).lower() for v in get_args(hint))
        return " or ".join(f"`{text}`" for text in texts)
    if get_origin(hint) is list:
        return "list"
    if get_origin(hint) is dict:
        return "mapping"
    return _WORDS[hint]


_WORDS: dict[object, str] = {
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    str: "text",
    type(None): "`null`",
}


def _default(field: DataclassField[Any]) -> str:
    """Return the default as YAML."""
    value = field.default_factory() if callable(field.default_factory) else field.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"


def _markdown(meaning: str) -> str:
    return meaning.replace("``", "`").replace("|", "\\|")


def _table(settings: Iterator[Setting]) -> str:
    rows = [f"| `{s.key}` | {s.type} | {s.default} | {s.meaning} |" for s in settings]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


_HEAD = """# Settings

This page lists every key of `launcher=slurm` and `launcher=local`, with its type and default. Set a key on the command line (`launcher.partition=gpu`), in your config, or in a group file for your cluster. A group file `launcher/mycluster.yaml` in the folder of your configs makes `launcher=mycluster` an option:

```yaml
defaults: [slurm, _self_]
partition: gpu
gpus_per_node: 4
```

A misspelt key or an impossible value is refused before anything is submitted; the message names the key, the value and the remedy. Keys that end in `_s` are in seconds.

<!-- Written by `python docs/generate.py` from hpc_elastic/config/schema.py. -->

## The run

| key | type | default | meaning |
|---|---|---|---|
| `nodes` | integer, `min:max` or `min:max:unit` | `1` | `4`, or `1:16`: start with one, grow to sixteen, or `4:16:4`: in multiples of four nodes ([units](../howto/nodes.md#units-of-nodes)). In a YAML file, quote it: `'1:16'` |
| `nproc_per_node` | integer, `gpu`, `cpu` or `auto` | `auto` | workers on each node: a number; one for each GPU; one for each CPU; or one for each GPU, and one if there is no GPU |
| `ft` | `true` or `false` | `false` | each node, or each unit of nodes, is a replica group whose processes survive changes of the others ([per-step fault tolerance](../howto/fault-tolerance.md)) |

## Both launchers
"""  # noqa: E501

_SLURM = """## `launcher=slurm` only

Keys that are also options of sbatch have the same meaning, and default to the cluster's value. `SBATCH_PARTITION`, `SBATCH_ACCOUNT`, `SBATCH_QOS`, `SBATCH_TIMELIMIT`, `SBATCH_CONSTRAINT`, `SBATCH_RESERVATION` and `SBATCH_WCKEY` of the submitting shell are defaults of theirs: what is typed wins, and run.json has the result. Other `SBATCH_*` variables have no effect and are named at the submission; `SALLOC_*`, `SRUN_*` and `SLURM_*` do not reach the tasks.
"""  # noqa: E501

_LOCAL = """## `launcher=local` only

Every node is a process on this machine.
"""

_SWEEPER = """## `hydra/sweeper=elastic_optuna`

The trials of an Optuna study as runs of `launcher=slurm` or `launcher=local` ([sweeps](../howto/sweeps.md)).
"""  # noqa: E501

_TIMEOUTS = """## Order of the time-outs

Each time on the left must be below the one on the right; a pair of keys that is not is refused. A time without `launcher` is fixed in the code.

| below | above | so that |
|---|---|---|"""  # noqa: E501


# ---- reference/events.md -----------------------------------------------------------------


def events_page(kinds: Iterable[Kind] = KINDS.values()) -> str:
    """Return the text of reference/events.md."""
    head = _EVENTS_HEAD.format(version=EVENTS_VERSION, common=_fields_table(COMMON))
    objects = [
        _object("### An entry", TimelineEntry),
        _object("### `cost`", Cost),
        _object("### `causes`", Cause),
    ]
    return "\n".join([head, *(_section(kind) for kind in kinds), _TIMELINE, *objects])


def _section(kind: Kind) -> str:
    text = f"### {kind.name}\n\n{kind.meaning} Written by {kind.by}, {kind.when}.\n"
    return f"{text}\n{_fields_table(kind.fields)}" if kind.fields else text


def _fields_table(fields: Iterable[Field]) -> str:
    rows = [f"| `{f.name}` | {_type_of(f)} | {f.meaning} |" for f in fields]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n"


def _type_of(field: Field) -> str:
    return f"{field.type}, optional" if field.optional else field.type


def _object(heading: str, made_of: type) -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in attributes(made_of)]
    return "\n".join([f"{heading}\n", "| key | meaning |", "|---|---|", *rows]) + "\n"


def attributes(made_of: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class, each with its meaning: the comment behind it, or the text below.

    A comment begins with a small letter, and has no full stop.
    """
    lines, _ = inspect.getsourcelines(made_of)
    (definition,) = ast.parse("".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in pairwise([*definition.body, None]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        meaning = lines[(field.end_lineno or 0) - 1].rstrip().partition("  # ")[2]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield field.target.id, _in_json(" ".join(str(below.value.value).split()))
        elif meaning:
            yield field.target.id, _in_json(f"{meaning[0].upper()}{meaning[1:]}.")


def _in_json(meaning: str) -> str:
    return meaning.replace("``", "`").replace("None", "null")


_EVENTS_HEAD = """# The event log

Each task of a run appends its events to `<run>/events/<task>.jsonl`, one JSON object a line. The
leader, which is the agent of one of the nodes, writes the events of the group into the file of its
own task. `hpc-elastic events RUN` prints the events as sentences, `--raw` prints the lines of all
files in order of time, and `--json` prints the sentences as objects (at the end of this page).

This is version {version} of the schema. A new kind or field does not change the version; one that
is removed or changes its meaning does. Readers should ignore unknown kinds and fields.

Types: `texts` is a list of text. `members` is a list of objects with `task`, `attempt` (how often
the task was requeued), `slot` (the node's place in the run), `host` and `nproc` (number of
workers). `ranks` is a list of objects with `rank`, `host`, `task`, `state`, `at` and `stack`. An
optional field may be absent or null.

<!-- Written by `python docs/generate.py` from hpc_elastic/run/events.py. -->

## Events

Every event has:

{common}"""

_TIMELINE = """## Events as sentences, in JSON

`hpc-elastic events RUN --json` prints a list of entries; with `--follow`, one object per line. Each
has its `sentence`, as it is printed without `--json`, and the keys below. Later versions may add
keys.
"""


# ---- reference/report.md -------------------------------------------------------------------

OBJECTS: tuple[tuple[str, type], ...] = (
    ("The report", Report),
    ("`about`", About),
    ("`spent`", Spent),
    ("Each of `nodes`", NodeTime),
    ("Each of its `intervals`", Interval),
    ("Each of `group`", Size),
    ("Each of `progress`", Point),
    ("Each of `changes`", Change),
    ("Each of `failures`", WorkerFailure),
    ("`checkpoints`", SavedCheckpoints),
    ("`configuration`", Configuration),
)
"""The objects of a report, by title."""


def report_page() -> str:
    """Return the text of reference/report.md."""
    head = _REPORT_HEAD.format(version=REPORT_VERSION)
    return "\n".join([head, *(_object(f"## {title}", made_of) for title, made_of in OBJECTS)])


_REPORT_HEAD = """# The JSON form of a report

`hpc-elastic report RUN --format json` prints one object. The page and the picture of a report are
made of it ([how to make them](../howto/watch-runs.md#make-a-report)). This is version {version}. A
new key does not change the version; one that is removed or changes its meaning does. Times are Unix
seconds.

<!-- Written by `python docs/generate.py` from hpc_elastic/report. -->
"""


# ---- reference/cli.md ---------------------------------------------------------------------


def cli_page() -> str:
    """Return the text of reference/cli.md: the help of `hpc-elastic` and of its commands."""
    root = click.Context(
        program, info_name="hpc-elastic", terminal_width=100, **program.context_settings
    )
    return "\n".join([_CLI_HEAD, _help(root), *_commands(root), _CLI_ERRORS, *_error_rows(), ""])


def _commands(group: click.Context, path: str = "") -> Iterator[str]:
    """Yield the section of each command, those of a group behind it."""
    assert isinstance(group.command, click.Group)
    for name in group.command.list_commands(group):
        command = group.command.get_command(group, name)
        assert command is not None
        context = click.Context(command, group, info_name=name)
        yield f"## {path}{name}\n"
        yield _help(context)
        if isinstance(command, click.Group):
            yield from _commands(context, f"{name} ")


def _error_rows() -> Iterator[str]:
    """Yield a row for each class of errors that commands print with --json."""
    for error in (*vars(errors).values(), NothingSelectedError, ReportLibraryError):
        if isinstance(error, type) and issubclass(error, errors.HpcElasticError):
            is_own = issubclass(error, errors.ConfigError)
            meaning = (error.__doc__ or "").splitlines()[0].replace("``", "`")
            remedy = "of the setting that `key` names" if is_own else error.remedy
            yield f"| `{errors.error_code(error.__name__)}` | {meaning} | {remedy} |"


def _help(context: click.Context) -> str:
    text = "\n".join(line.rstrip() for line in context.get_help().splitlines())
    return f"```text\n{text}\n```\n"


_CLI_HEAD = """# Commands

This page is the `--help` of `hpc-elastic` and of each of its commands.

<!-- Written by `python docs/generate.py` from hpc_elastic/cli. -->
"""
_CLI_ERRORS = """## Errors with --json

A command that fails prints an object on standard output, and its message on standard error:

```text
{"error": {"code": "config-error", "message": "nodes=0: ...", "key": "nodes", "remedy": "..."}}
```

- `code`: the class of the error, as in `hpc_elastic.errors`.
- `key`: the setting or argument that was refused, or null.
- `remedy`: what to do about it; by default that of the class, and the message may name more.

The exit code is as without `--json`. If the script of a submission fails, the error is the one that
its launcher has found, or else a `script-error`.

| code | meaning | remedy |
|---|---|---|
| `usage-error` | The arguments are wrong, and nothing was done (exit code 2). | the --help of the \
command describes its arguments |
| `os-error` | The system has refused a file. | check the path and its permissions |"""


PAGES = {
    "settings.md": settings_page,
    "events.md": events_page,
    "report.md": report_page,
    "cli.md": cli_page,
}
"""The page that each function writes, below docs/reference."""

if __name__ == "__main__":
    from api_pages import api_pages  # Griffe, of the extras `docs` and `test`, reads the code
    from badges import badges
    from sizing_page import sizing_page

    written = {name: page() for name, page in PAGES.items()}
    written |= {f"api/{name}": text for name, text in api_pages().items()}
    written |= {"../explanation/sizing.md": sizing_page(), "../images/badges.svg": badges()}
    for name, text in written.items():
        (Path(__file__).parent / "reference" / name).write_text(text)
    figures.write()
