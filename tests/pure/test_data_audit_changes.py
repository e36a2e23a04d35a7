"""Ledgers that were changed or lost in part: whatever changes what they tell has to be found.

A plain reference reads the files step by step and position by position. Where it tells another
history of the changed ledger than of the true one, the audit must not hold.
"""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data_worlds import Run, train_on
from hpc_elastic.data.audit import audit
from hpc_elastic.errors import RunDirectoryError

HEAD = ("step", "epoch", "position", "rank", "world_size")
"""Each rank's record of the beginning of a stretch."""


def told_by(folder: Path) -> list[tuple]:
    """Return what files tell: each step of the surviving history, its epoch and its positions.

    And behind the steps of each stretch, where its ranks record that it began.
    """
    stretches: dict[tuple, dict] = {}
    mine: dict = {}
    for path in folder.glob("*.jsonl"):
        for raw in map(json.loads, path.read_text().splitlines()):
            if isinstance(raw, list):
                step, num_steps, epoch, start, stride, count = raw
                for i in range(num_steps):
                    begin = start + i * stride
                    taken = range(begin, begin + count)
                    mine["steps"].setdefault(step + i, []).append((epoch, taken))
            elif "stretch" in raw:
                name = tuple(raw["stretch"])
                mine = stretches.setdefault(name, {**raw, "steps": {}, "heads": []})
                mine["heads"].append(tuple(raw[key] for key in HEAD))
    if not stretches:
        return []
    name, until, history = max(stretches), None, []
    while name in stretches:
        mine = stretches[name]
        for step in sorted(mine["steps"], reverse=True):
            if until is None or step <= until:
                for epoch in {epoch for epoch, taken in mine["steps"][step] if taken}:
                    positions = [p for e, t in mine["steps"][step] if e == epoch for p in t]
                    history.append((step, epoch, Counter(positions)))
        if history and history[-1][0] > mine["step"]:
            history.append((mine["step"], sorted(mine["heads"])))
        until = mine["step"]
        name = tuple(mine["parent"] or ())
    return history[::-1]


class Change:
    """Ways to change a ledger; each returns False if it had nothing to change."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.files = sorted(folder.glob("*.jsonl"))
        self.last = max(int(re.search(r"entry-(\d+)", path.name)[1]) for path in self.files)

    def of_group(self, record: int) -> list[Path]:
        """Return the files of a group."""
        """Return the files of a group."""
        return [path for path in self.files if f".entry-{record}." in path.name]

    def lose_last_group(self) -> None:
        """Remove what all ranks of the last group wrote."""
        for path in self.of_group(self.last):
            path.unlink()

    def lose_a_group(self) -> None:
        """Remove what all ranks of a group wrote."""
        for path in self.of_group(self.chance.randint(1, self.last)):
            path.unlink()

    def lose_a_file(self) -> None:
        """Remove what one rank wrote."""
        self.chance.choice(self.files).unlink()

    def cut_off_last_group(self) -> None:
        """As a disk does that was full at the end: all ranks lost as many lines or more."""
        num = self.chance.randint(1, 4)
        for path in self.of_group(self.last):
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines[: max(0, len(lines) - num)]))

    def cut_off_a_file(self) -> None:
        """Remove the end of a file."""
        path = self.chance.choice(self.files)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: self.chance.randrange(len(lines))]))

    def lose_a_line(self) -> None:
        """Remove a line."""
        path = self.chance.choice(self.files)
        lines = path.read_text().splitlines(keepends=True)
        del lines[self.chance.randrange(len(lines))]
        path.write_text("".join(lines))

    def double_a_line(self) -> None:
        """Have a line stand there twice."""
        path = self.chance.choice(self.files)
        lines = path.read_text().splitlines(keepends=True)
        i = self.chance.randrange(len(lines))
        path.write_text("".join([*lines[:i], lines[i], *lines[i:]]))

    def edit_a_span(self) -> None:
        """Change a number of some steps."""

        def edit(raw):
            raw[self.chance.randrange(6)] += self.chance.choice([-3, -2, -1, 1, 2, 3])

        self._edit(list, edit)

    def edit_two_spans(self) -> None:
        """Change two numbers."""
        self.edit_a_span()
        self.edit_a_span()

    def exchange_two_starts(self) -> None:
        """Let steps have trained what others did."""
        path = self.chance.choice(self.files)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        spans = [raw for raw in rows if isinstance(raw, list)]
        if len(spans) > 1:
            one, other = self.chance.sample(spans, 2)
            one[3], other[3] = other[3], one[3]
        path.write_text("".join(f"{json.dumps(raw)}\n" for raw in rows))

    def edit_a_head(self) -> None:
        """Change a rank's record of the beginning of a stretch."""

        def edit(raw):
            if "stretch" not in raw:
                return
            key = self.chance.choice(
                ["step", "epoch", "position", "rank", "world_size", "global_batch", "end", "parent"]
            )
            if key == "end":
                raw[key] = self.chance.choice(["keep", "drop", "pad"])
            elif key == "parent":
                raw[key] = [self.chance.randint(1, self.last), 1]
            else:
                raw[key] = max(0, raw[key] + self.chance.choice([-2, -1, 1, 2]))

        self._edit(dict, edit)

    def _edit(self, kind, edit) -> None:
        path = self.chance.choice(self.files)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if found := [raw for raw in rows if isinstance(raw, kind)]:
            edit(self.chance.choice(found))
        path.write_text("".join(f"{json.dumps(raw)}\n" for raw in rows))


CHANGES = [name for name in vars(Change) if name[0] != "_" and name != "of_group"]


@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_ledger_does_not_hold(tmp_path, monkeypatch, change, end):
    """Lost files, lines and groups, and numbers that are others, in any history of groups."""
    told_otherwise = 0
    for seed in range(6 if os.environ.get("HPC_ELASTIC_LONG") else 2):
        chance = random.Random(f"{seed} {change} {end}")
        run = Run(tmp_path / f"{seed}", monkeypatch)
        length, batch = chance.randint(20, 90), chance.randint(2, 20)
        train_on(run, chance, length, (batch, None), end=end)
        run.succeed()
        ledger = run.path / "ledger"
        truth = told_by(ledger)
        assert audit(run.path)[0].holds
        files = {path: path.read_bytes() for path in ledger.glob("*.jsonl")}
        for _ in range(4):
            getattr(Change(ledger, chance), change)()
            if not same_history(ledger, truth):
                told_otherwise += 1
                assert not holds(run.path), (seed, changed(files))
            for path, text in files.items():
                path.write_bytes(text)
    assert told_otherwise > 0


def same_history(ledger: Path, truth: list) -> bool:
    """Whether files show the true history; False if they cannot be read."""
    try:
        return told_by(ledger) == truth
    except (ValueError, LookupError):
        return False


def holds(run: Path) -> bool:
    """Whether an audit holds; not if the ledger is damaged or gone."""
    try:
        return all(proof.holds for proof in audit(run))
    except RunDirectoryError:
        return False


def changed(files: dict[Path, bytes]) -> dict[str, str]:
    """Return what files have become, for a message."""
    return {
        path.name: path.read_text() if path.exists() else "lost"
        for path, text in files.items()
        if not path.exists() or path.read_bytes() != text
    }
