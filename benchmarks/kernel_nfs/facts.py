"""What the files of a run say: functions that run on the server, which sees each change at once."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hpc_elastic.run.events import read_events

_LATE_LINES = 2
"""Of one append, at most, which a leader made that was stopped right before it."""


def look(run: str) -> dict[str, Any]:
    """Return how a run is: its events, its checkpoints, its end."""
    path = Path(run)
    events = read_events(path / "events") if (path / "events").is_dir() else []
    result = path / "result.json"
    kinds = (
        "leader", "round", "first_step", "joined", "node_lost", "checkpoint_failed", "end",
        "round_stopped",
    )  # fmt: skip
    return {
        "events": [event for event in events if event["kind"] in kinds],
        "hosts": {e["task"]: e["host"] for e in events if e["kind"] == "task"},
        "result": json.loads(result.read_text()) if result.exists() else None,
        "ended": result.stat().st_mtime if result.exists() else 0,
        "checkpoints": sorted(
            (p.name, p.stat().st_mtime) for p in (path.parent / "checkpoints").glob("step-*")
        ),
    }


def split(run: str) -> list[str]:
    """Return what shows that two have led at a time; [] if nothing does."""
    leaders: dict[int, set[str]] = defaultdict(set)
    numbers, found = [], []
    for path in sorted(
        (Path(run) / "rdzv").glob("entry.*.json"), key=lambda p: int(p.name.split(".")[1])
    ):
        entry = json.loads(json.loads(path.read_text())["entry"])
        leaders[entry["term"]].add(f"{entry['leader']['task']}/{entry['leader']['attempt']}")
        numbers.append(entry["term"])
    found += [f"term {e} is led by {sorted(who)}" for e, who in leaders.items() if len(who) > 1]
    if numbers != sorted(numbers):
        found.append(f"terms go back: {numbers}")
    if not numbers:
        found.append("there are no entries")
    last, late = 0, 0
    for line in (Path(run) / "progress.jsonl").read_text().splitlines():
        try:
            term = int(json.loads(line).get("term") or 0)
        except ValueError:
            continue  # cut short by the end of its writer
        late += term < last
        last = max(term, last)
    if late > _LATE_LINES:
        found.append(f"{late} lines of progress.jsonl are of an earlier leader than one before")
    return found


def ranks(run: str) -> list[dict[str, Any]]:
    path = Path(run)
    folder = path / json.loads((path / "result.json").read_text())["results"]
    return [json.loads(each.read_text()) for each in sorted(folder.glob("rank-*.json"))]


def touch(path: str) -> None:
    Path(path).touch()


def delegations(address: str) -> int:
    """Return how many delegations of NFS 4 the server has given to the client at an address."""
    total = 0
    for client in Path("/proc/fs/nfsd/clients").glob("*"):
        if f'"{address}:' in (client / "info").read_text():
            total += (client / "states").read_text().count("type: deleg")
    return total
