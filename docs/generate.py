"""Writes the pages of the documentation that the code has all facts for.

    python docs/generate.py settings > docs/settings.md
    python docs/generate.py events > docs/events.md
    python docs/generate.py report      the last part of docs/report.md

Tests hold that the pages are what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import Field as DataclassField
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hpc_elastic.config import schema
from hpc_elastic.report.causes import Cause, Cost, TimelineEntry
from hpc_elastic.report.node_time import Interval, NodeTime, Size
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.report import VERSION as REPORT_VERSION
from hpc_elastic.report.report import About, Change, Configuration, Report, SavedCheckpoints, Spent
from hpc_elastic.run.event_schema import COMMON, KINDS, Field, Kind
from hpc_elastic.run.events import VERSION as EVENTS_VERSION


@dataclass(frozen=True)
class Setting:
    """One row of the settings.

    Attributes:
        key: As it is typed, such as ``launcher.agent.warm_workers``.
        type: What it may be.
        default: What it is if nobody says anything, as YAML.
        meaning: What it does; empty where its name says all.
    """

    key: str
    type: str
    default: str
    meaning: str


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    common = {setting.key for setting in _group(schema.LauncherSettings)}
    sections = [
        _HEAD,
        _table(_group(schema.LauncherSettings)),
        _SLURM,
        _table(s for s in _group(schema.SlurmSettings) if s.key not in common),
        _LOCAL,
        _table(s for s in _group(schema.LocalSettings) if s.key not in common),
    ]
    return "\n".join(sections)


def _group(cls: type[Any], path: str = "launcher") -> Iterator[Setting]:
    """Yield the settings of a dataclass, and of those in it."""
    hints, meanings = get_type_hints(cls), _meanings(cls)
    for field in fields(cls):
        key, hint = f"{path}.{field.name}", hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _group(hint, key)
            continue
        meaning = _markdown(meanings.get(field.name, ""))
        yield Setting(key, _type(hint), _default(field), meaning)


def _meanings(cls: type[Any]) -> dict[str, str]:
    """Return what stands below each field, of the classes it inherits from as well."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                target, value = field.target, below.value
                if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                    found[target.id] = " ".join(str(value.value).split())
    return found


def _type(hint: object) -> str:
    """Return an annotation in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
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
    """Return the default as it would stand in YAML."""
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

Every key that `launcher=slurm` and `launcher=local` know, with its type and default. They are given on the command line (`launcher.partition=gpu`), in your config, or in a group file for your cluster, `launcher/mycluster.yaml` in the folder of your configs, which is then `launcher=mycluster`:

```yaml
defaults: [slurm, _self_]
partition: gpu
gpus_per_node: 4
```

A misspelt key or an impossible value is refused before anything is submitted, with the key, the value and the remedy. Times that end in `_s` are in seconds.

<!-- Written by `python docs/generate.py settings` from hpc_elastic/config/schema.py. -->

## The run

| key | type | default | meaning |
|---|---|---|---|
| `nodes` | integer or `min:max` | `1` | `4`, or `1:16`: start with one, grow to sixteen; in a YAML file quote it: `'1:16'` |
| `nproc_per_node` | integer, `gpu`, `cpu` or `auto` | `auto` | workers on each node: a number, one a GPU, one a CPU, or one a GPU and one where there is none |
| `ft` | `true` or `false` | `false` | each node is a replica that lives on when others come and go ([per-step fault tolerance](ft.md)) |

## Both launchers
"""  # noqa: E501

_SLURM = """## `launcher=slurm` only

Keys that sbatch has as well mean the same, and default to what the cluster says.
"""

_LOCAL = """## `launcher=local` only

Every node is a process on this machine.
"""


# ---- docs/events.md ----------------------------------------------------------------------


def events_page(kinds: Iterable[Kind] = KINDS.values()) -> str:
    """Return the text of docs/events.md."""
    head = _EVENTS_HEAD.format(version=EVENTS_VERSION, common=_fields_table(COMMON))
    objects = [
        _object("An episode", TimelineEntry),
        _object("`cost`", Cost),
        _object("`causes`", Cause),
    ]
    return "\n".join([head, *(_section(kind) for kind in kinds), _EPISODES, *objects])


def _section(kind: Kind) -> str:
    text = f"### {kind.name}\n\n{kind.meaning} Written by {kind.by}, {kind.when}.\n"
    return f"{text}\n{_fields_table(kind.fields)}" if kind.fields else text


def _fields_table(fields: Iterable[Field]) -> str:
    rows = [f"| `{f.name}` | {_type_of(f)} | {f.meaning} |" for f in fields]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n"


def _type_of(field: Field) -> str:
    return f"{field.type}, optional" if field.optional else field.type


def _object(title: str, made_of: type) -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in attributes(made_of)]
    return "\n".join([f"### {title}\n", "| key | meaning |", "|---|---|", *rows]) + "\n"


def attributes(made_of: type) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a class's docstring describes, each with its meaning."""
    described = (inspect.getdoc(made_of) or "").partition("Attributes:\n")[2]
    for name, meaning in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", described, re.MULTILINE):
        yield name, _in_json(" ".join(meaning.split()))


def _in_json(meaning: str) -> str:
    return meaning.replace("``", "`").replace("None", "null")


_EVENTS_HEAD = """# The event log

Each task of a run appends what happens to `<run>/events/<task>.jsonl`, one JSON object a line. The
run's leader, the agent of one of its nodes, writes what concerns the group into its own task's
file. `hpc-elastic events RUN` tells the story, `hpc-elastic events RUN --raw` prints the lines of
all files in order of time, and `--json` the story as objects (at the end of this page).

This is version {version} of the schema. A kind or a field that is added does not change it; one
that goes or changes its meaning does. Readers should pass over kinds and fields they do not know.

Types: `texts` is a list of text; `members` a list of objects with `task`, `attempt` (how often the
task was requeued), `slot` (the node's place in the run), `host` and `nproc` (workers);
`ranks` a list of objects with `rank`, `host`, `task`, `state`, `at` and `stack`. A field that is
optional may be absent, or null.

<!-- Written by `python docs/generate.py events`. -->

## Events

Every event has:

{common}"""

_EPISODES = """## The story as JSON

`hpc-elastic events RUN --json` prints a list of episodes; with `--follow`, one object a line. Each
has its `sentence`, as it is printed without `--json`, and the keys below. Further keys may come.
"""


# ---- the end of docs/report.md ------------------------------------------------------------

OBJECTS: tuple[tuple[str, type], ...] = (
    ("The report", Report),
    ("`about`", About),
    ("`spent`", Spent),
    ("Each of `nodes`", NodeTime),
    ("Each of its `intervals`", Interval),
    ("Each of `group`", Size),
    ("Each of `progress`", Point),
    ("Each of `changes`", Change),
    ("`checkpoints`", SavedCheckpoints),
    ("`configuration`", Configuration),
)
"""What the report consists of, by title."""


def report_keys() -> str:
    """Return the text."""
    head = _REPORT_HEAD.format(version=REPORT_VERSION)
    return "\n".join([head, *(_object(title, made_of) for title, made_of in OBJECTS)])


_REPORT_HEAD = """## The JSON form

`hpc-elastic report RUN --format json` prints one object, of which the page and the picture are
made. This is version {version}. A key that is added does not change it; one that goes or changes
its meaning does. Times are Unix seconds.

<!-- Written by `python docs/generate.py report`. -->
"""


if __name__ == "__main__":
    PAGES = {"settings": settings_page, "events": events_page, "report": report_keys}
    print(PAGES[sys.argv[1]](), end="")
