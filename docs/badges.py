"""The badges of the README: the releases that were seen, drawn from what the build knows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SLURM = ROOT / "tests/pure/data/slurm"
"""What each release of Slurm printed, a folder for each."""
_PER_LETTER = 6.6
_PAD = 7
_ROW = re.compile(r"^\| [\w.() -]+ \| (3[\d.]+) \| ([\d.]+) \| ([\w.]+), ", re.MULTILINE)
"""A row of docs/reference/versions.md: Python, torch, Hydra."""


def badges() -> str:
    """Return a picture with a badge for each of Python, torch, Hydra, Slurm, and the license."""
    rows = _ROW.findall((ROOT / "docs/reference/versions.md").read_text())
    seen = zip(("Python", "torch", "Hydra"), zip(*rows, strict=True), strict=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {
        **{name: _range(found) for name, found in seen},
        "Slurm": _range(path.name for path in _SLURM.iterdir()),
        "license": project["license"],
    }
    x, drawn = 0.0, []
    for name, value in shown.items():
        left, right = (len(text) * _PER_LETTER + 2 * _PAD for text in (name, value))
        drawn += [
            f'<rect x="{x:.1f}" width="{left + right:.1f}" height="20" rx="3" fill="#1f6feb"/>',
            f'<rect x="{x:.1f}" width="{left:.1f}" height="20" rx="3" fill="#424a53"/>',
            f'<text x="{x + left / 2:.1f}" y="14">{name}</text>',
            f'<text x="{x + left + right / 2:.1f}" y="14">{value}</text>',
        ]
        x += left + right + _PAD
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x - _PAD:.0f} 20" height="20" '
        'role="img" font-family="system-ui, sans-serif" font-size="11" fill="#ffffff" '
        'text-anchor="middle">'
    )
    title = ", ".join(f"{name} {value}" for name, value in shown.items())
    return "\n".join([head, f"<title>{title}</title>", *drawn, "</svg>", ""])


def _range(releases: Iterable[str]) -> str:
    """Return the lowest and the highest of releases, by their first two numbers."""
    minors = sorted(tuple(map(int, re.findall(r"\d+", name)[:2])) for name in releases)
    lowest, highest = (f"{major}.{minor:02}" if major > 20 else f"{major}.{minor}"
                       for major, minor in (minors[0], minors[-1]))  # fmt: skip
    return f"{lowest} to {highest}"
