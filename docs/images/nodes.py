"""Draw nodes.svg, the picture of the README, from a real run.

    python train.py -m launcher=local nodes=1:4 epochs=12,45 pause_s=0.1 &
    hpc-elastic status last       # until the second run has four nodes; some seconds later
    hpc-elastic node preempt last local-3
    hpc-elastic status last       # until it has four nodes again; some seconds later
    hpc-elastic node kill last local-0
    hpc-elastic report last --format json | python docs/images/nodes.py > docs/images/nodes.svg

The first run of the sweep holds two of the four places and ends early, so that the second run
starts small and grows.
"""

import json
import sys
from collections.abc import Iterator
from html import escape
from typing import Any

LEFT, RIGHT, TOP, LANE, BAR = 76, 12, 58, 26, 16
WIDTH = 860
COLOURS = {"trains": "#2da44e", "trains again": "#d29922", "gets ready": "#b6c2cf"}
SHORT_S = 0.4
"""A stretch that is shorter than this, such as a checkpoint of a small model, is not drawn."""


def kind_of(interval: dict[str, Any]) -> str:
    """Return how an interval of node time is drawn."""
    return {"useful": "trains", "replayed": "trains again"}.get(interval["kind"], "gets ready")


def stretches(intervals: list[dict[str, Any]]) -> Iterator[tuple[float, float, str]]:
    """Yield begin, end and kind of what is drawn, neighbours of one kind joined."""
    last: tuple[float, float, str] | None = None
    for i in intervals:
        if (i["end"] - i["begin"] < SHORT_S and last) or (last and last[2] == kind_of(i)):
            last = (last[0], i["end"], last[2])
        else:
            if last:
                yield last
            last = (i["begin"], i["end"], kind_of(i))
    if last:
        yield last


def label(change: dict[str, Any]) -> str:
    """Return a change of the group in a few words."""
    hosts = " and ".join(change["hosts"])
    causes = {"arrived": "join", "returned": "is back", "asked": "is preempted"}
    lost = change["lost_steps"]
    cost = f"{lost} steps are trained again" if lost else "no step is lost"
    cause = causes.get(change["cause"], "is killed")
    return f"{hosts} {cause}: {cost}, training pauses for {change['pause_s']:.0f} s"


def draw(report: dict[str, Any]) -> str:
    """Return the SVG of a run."""
    hosts = sorted({node["host"] for node in report["nodes"]})
    begin = min(node["begin"] for node in report["nodes"])
    length = report["about"]["until"] - begin
    bottom = TOP + LANE * len(hosts)
    changes = report["changes"]

    def x(time: float) -> float:
        return round(LEFT + (time - begin) / length * (WIDTH - LEFT - RIGHT), 1)

    def text(left: float, top: float, words: str, **more: str) -> str:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        return f'<text x="{left}" y="{top}"{extra}>{escape(words)}</text>'

    height = bottom + 46 + 19 * len(changes)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#24292f">',
        "<title>The nodes of a run over time</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        text(14, 26, f"One run: {report['about']['overrides']}", font_weight="600"),
    ]
    for number, (kind, colour) in enumerate(COLOURS.items()):
        left = WIDTH - 320 + 110 * number
        out.append(f'<rect x="{left}" y="16" width="12" height="12" rx="2" fill="{colour}"/>')
        out.append(text(left + 17, 26, kind))
    for row, host in enumerate(hosts):
        top = TOP + LANE * row
        out.append(text(14, top + 13, host))
        for node in (node for node in report["nodes"] if node["host"] == host):
            for first, last, kind in stretches(node["intervals"]):
                out.append(
                    f'<rect x="{x(first)}" y="{top}" width="{round(x(last) - x(first), 1)}"'
                    f' height="{BAR}" fill="{COLOURS[kind]}"/>'
                )
    for seconds in range(0, int(length) + 1, 30):
        out.append(text(x(begin + seconds), bottom + 16, f"{seconds} s", text_anchor="middle"))
    for number, change in enumerate(changes, 1):
        left, top = x(change["time"]), bottom + 26 + 19 * number
        out.append(f'<path d="M{left} 50V{bottom - 4}" stroke="#24292f" stroke-dasharray="2 3"/>')
        out.append(text(left, 46, str(number), text_anchor="middle", font_weight="600"))
        seconds = round(change["time"] - begin)
        out.append(text(14, top, str(number), font_weight="600"))
        out.append(text(34, top, f"{seconds} s: {label(change)}"))
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw(json.load(sys.stdin)), end="")
