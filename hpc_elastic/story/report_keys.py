"""The part of docs/report.md on the JSON form, from the docstrings of what it is made of (pure).

``python -m hpc_elastic.story.report_keys`` prints it; a test holds that the page ends with it.
"""

from __future__ import annotations

from hpc_elastic.story.account import Interval, NodeTime
from hpc_elastic.story.page import attributes
from hpc_elastic.story.points import Point
from hpc_elastic.story.report import (
    VERSION,
    About,
    Change,
    Configuration,
    Report,
    Saved,
    Spent,
)
from hpc_elastic.story.spans import Size

OBJECTS: tuple[tuple[str, type], ...] = (
    ("The report", Report),
    ("`about`", About),
    ("`spent`", Spent),
    ("Each of `nodes`", NodeTime),
    ("Each of its `intervals`", Interval),
    ("Each of `group`", Size),
    ("Each of `progress`", Point),
    ("Each of `changes`", Change),
    ("`checkpoints`", Saved),
    ("`configuration`", Configuration),
)
"""What the report consists of, by title."""


def keys() -> str:
    """Return the text."""
    head = _HEAD.format(version=VERSION)
    return "\n".join([head, *(_object(title, made_of) for title, made_of in OBJECTS)])


def _object(title: str, made_of: type) -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in attributes(made_of)]
    return "\n".join([f"### {title}\n", "| key | meaning |", "|---|---|", *rows]) + "\n"


_HEAD = """## The JSON form

`hpc-elastic report RUN --format json` prints one object, of which the page and the picture are
made. This is version {version}. A key that is added does not change it; one that goes or changes
its meaning does. Times are Unix seconds.

<!-- Written by `python -m hpc_elastic.story.report_keys`. -->
"""

if __name__ == "__main__":
    print(keys(), end="")
