"""One file for each benchmark: its last result, and when, where and with what it was measured.

``benchmarks/results/<name>.json``. A later failure is written beside the figures, which stay: they
were true when they were taken. So each section of the page has its own date, versions and load.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from evidence.result import Result


@dataclass(frozen=True)
class Taken:
    """The circumstances of a measurement; None: not known.

    `transcribed`: where figures were taken over from that were not written by ``run_all``.
    """

    date: str
    command: str
    machine: dict[str, str]
    versions: dict[str, str]
    load_before: float | None = None
    load_after: float | None = None
    took_s: float | None = None
    transcribed: str = ""


@dataclass(frozen=True)
class Failure:
    date: str
    why: str


@dataclass(frozen=True)
class Record:
    """What is known of one benchmark.

    Attributes:
        result: None: it was never measured.
        taken: With the result, and only with it.
        failure: What came of the last attempt, if that was not the result.
    """

    name: str
    result: Result | None = None
    taken: Taken | None = None
    failure: Failure | None = None

    def failed(self, failure: Failure) -> Record:
        """Return it with the last attempt failed; the figures before it stay."""
        return replace(self, failure=failure)

    def as_json(self) -> dict[str, Any]:
        result = None if self.result is None else self.result.as_json()
        return {**asdict(self), "result": result}


def path_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


def read(name: str, folder: Path) -> Record:
    """Return what is known of a benchmark; nothing but its name if there is no file."""
    path = path_of(name, folder)
    try:
        return msgspec.convert(json.loads(path.read_text()), Record)
    except FileNotFoundError:
        return Record(name)
    except ValueError as e:
        raise SystemExit(f"{path}: {e}; remove it, or take it back from git") from e


def write(record: Record, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(record.name, folder)
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(record.as_json(), indent=1) + "\n")
    staged.replace(path)
