"""A picture of a run in the holes of a machine: nodes over time, as SVG (pure)."""

from collections.abc import Sequence

import numpy as np

from harvest.account import Account
from harvest.holes import Holes

WIDTH, HEIGHT = 860, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 48, 30
_COLOURS = {"trains": "#2da44e", "idle": "#ffffff", "other jobs": "#d8dee4"}
_LINE = "#8c959f"
_SHOWN = 1.5
"""Idle nodes are shown up to this multiple of the nodes that the run has at most."""


def draw(holes: Holes, account: Account, num_nodes: int, hours: float) -> str:
    """Return a picture of the nodes that are idle, and of those that train.

    The holes are those from the start of the run on.
    """
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    shown = _SHOWN * num_nodes
    times = np.linspace(0.0, 3600.0 * hours, width + 1)
    training = np.zeros(len(times))
    for span in account.spans:
        inside = (times >= span.begin_s) & (times < span.end_s)
        training[inside] = np.maximum(training[inside], span.nodes)
    free = np.maximum(np.minimum(holes.idle_at(times), shown), training)
    frame = f'x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}"'
    font = 'font-family="system-ui, sans-serif" font-size="13" fill="#24292f"'
    size, caption = f"0 0 {WIDTH} {HEIGHT}", f"One run of nodes=1:{num_nodes} on idle nodes"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" {font}>',
        "<title>The nodes of a run that fills holes, over time</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        f'<text x="14" y="26" font-weight="600">{caption}</text>',
    ]
    for number, (label, colour) in enumerate(_COLOURS.items()):
        x = 540 + 100 * number
        square = f'x="{x}" y="16" width="12" height="12" rx="2" fill="{colour}"'
        lines += [f'<rect {square} stroke="{_LINE}"/>', f'<text x="{x + 17}" y="26">{label}</text>']
    lines.append(f'<rect {frame} fill="{_COLOURS["other jobs"]}"/>')
    lines.append(_area(free.tolist(), shown, _COLOURS["idle"]))
    lines.append(_area(training.tolist(), shown, _COLOURS["trains"]))
    lines.append(f'<rect {frame} fill="none" stroke="{_LINE}"/>')
    for nodes in (0, num_nodes // 2, num_nodes):
        y = _TOP + height * (1 - nodes / shown) + 4
        lines.append(f'<text x="{_LEFT - 8}" y="{y:.0f}" text-anchor="end">{nodes}</text>')
    for hour in range(0, int(hours) + 1, max(1, int(hours) // 5)):
        x = round(_LEFT + width * hour / hours)
        anchor = "end" if x > WIDTH - 2 * _RIGHT else "middle"  # the last one ends with the frame
        lines.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="{anchor}">{hour} h</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _area(nodes: Sequence[float], shown: float, colour: str) -> str:
    """Return the area below a curve of steps, one for each pixel."""
    height = HEIGHT - _TOP - _BOTTOM
    low = _TOP + height
    path, last = [f"M{_LEFT} {low}"], 0.0
    for x, number in enumerate(nodes):
        if number != last:
            path.append(f"H{_LEFT + x}V{low - height * number / shown:.1f}")
            last = number
    return f'<path d="{"".join(path)}H{_LEFT + len(nodes) - 1}V{low}Z" fill="{colour}"/>'
