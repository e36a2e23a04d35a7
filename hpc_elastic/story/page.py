"""The page docs/events.md: the kinds of events, and the objects of ``events --json`` (pure)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from hpc_elastic.events import VERSION
from hpc_elastic.story.causes import Cause
from hpc_elastic.story.episode import Cost, Episode
from hpc_elastic.story.schema import COMMON, Field, Kind


def page(kinds: Iterable[Kind]) -> str:
    """Return the text of the page."""
    head = _HEAD.format(version=VERSION, common=_table(COMMON))
    objects = [_object("An episode", Episode), _object("`cost`", Cost), _object("`causes`", Cause)]
    return "\n".join([head, *(_section(kind) for kind in kinds), _EPISODES, *objects])


def _section(kind: Kind) -> str:
    text = f"### {kind.name}\n\n{kind.meaning} Written by {kind.by}, {kind.when}.\n"
    return f"{text}\n{_table(kind.fields)}" if kind.fields else text


def _table(fields: Iterable[Field]) -> str:
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


_HEAD = """# The event log

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

<!-- Written by `python -m hpc_elastic.story.kinds`. -->

## Events

Every event has:

{common}"""

_EPISODES = """## The story as JSON

`hpc-elastic events RUN --json` prints a list of episodes; with `--follow`, one object a line. Each
has its `sentence`, as it is printed without `--json`, and the keys below. Further keys may come.
"""
