"""The page docs/settings.md: every key, as the dataclasses of `hpc_elastic.config` have it.

    python -m hpc_elastic.settings.page > docs/settings.md

What a key means stands below it in that module, as a string. Python forgets such strings, so they
are taken from its text.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hpc_elastic import config


@dataclass(frozen=True)
class Setting:
    """One row of the page.

    Attributes:
        key: As it is typed, such as ``launcher.agent.spares``.
        type: What it may be.
        default: What it is if nobody says anything, as YAML.
        meaning: What it does; empty where its name says all.
    """

    key: str
    type: str
    default: str
    meaning: str


def page() -> str:
    """Return the text of the page."""
    common = {setting.key for setting in _group(config.LauncherSettings)}
    sections = [
        _HEAD,
        _table(_group(config.LauncherSettings)),
        _SLURM,
        _table(s for s in _group(config.SlurmSettings) if s.key not in common),
        _LOCAL,
        _table(s for s in _group(config.LocalSettings) if s.key not in common),
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


def _default(field: Field[Any]) -> str:
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

<!-- Written by `python -m hpc_elastic.settings.page` from hpc_elastic/config.py. -->

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


if __name__ == "__main__":
    print(page(), end="")
