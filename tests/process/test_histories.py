"""Random scripts with random histories, against a truth that is computed without the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from histories import PLANTED

FILE = Path(__file__).with_name("histories.py")

SHOWN_BY = {
    "no_weight": 1,
    "weight_twice": 1,
    "counted_when_drawn": 6,
    "accumulated_items_count": 337,
    "left_items_are_drawn_again": 67,
    "something_draws_ahead": 140,
    "sampler_forgotten": 129,
    "optimizer_forgotten": 5,
    "any_owner": 0,
}
"""The seed of a history that a planted mistake makes silent."""
FIRST_SEEN = ("no_weight", "counted_when_drawn")
"""One mistake of the weights and one of the counting; the others run with HPC_ELASTIC_LONG=1."""


def play(seeds: str, *options: str) -> list[dict]:
    """Play the histories of some seeds; return each that is silent or failed, and the counts."""
    command = [sys.executable, str(FILE), seeds, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_ends_right_or_is_refused_or_has_a_finding():
    """None ends elsewhere while its audit has no problem; many end right."""
    first = int(os.environ.get("HPC_ELASTIC_SEED", "0"))
    number = 1000 if os.environ.get("HPC_ELASTIC_LONG") == "1" else 40
    *wrong, last = play(f"{first}:{first + number}")
    assert wrong == []
    assert last["counts"]["right"] > number / 4


@pytest.mark.parametrize(
    "mistake",
    [m if m in FIRST_SEEN else pytest.param(m, marks=pytest.mark.long) for m in PLANTED],
)
def test_a_planted_mistake_is_found(mistake):
    """A history shows it (its seed is looked for with --plant)."""
    seed = SHOWN_BY[mistake]
    *wrong, _ = play(f"{seed}:{seed + 1}", "--plant", mistake)
    assert [each["kind"] for each in wrong] == ["silent"]
