"""The colours of a report, light and dark: one home for the page and its charts (pure).

Those of what nodes were at are Okabe and Ito's, which people with any kind of colour vision can
tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_elastic.story.account import KINDS

QUEUE = "queue"
SPENT_ON = (*KINDS, QUEUE)
"""What is drawn in a colour of its own, in the order of the bars."""

_BOTH = {
    "useful": "#009e73", "replayed": "#d55e00", "checkpoint": "#0072b2", "restore": "#cc79a7",
    "import": "#e69f00", "rendezvous": "#56b4e9",
}  # fmt: skip
KIND: Mapping[str, Mapping[str, str]] = {
    "light": {**_BOTH, "start": "#f0e442", "idle": "#8c8c8c", "queue": "#d9d9d9"},
    "dark": {**_BOTH, "start": "#f0e442", "idle": "#9a9a9a", "queue": "#4a4f57"},
}
"""By theme, of each of `SPENT_ON`."""

PAGE: Mapping[str, Mapping[str, str]] = {
    "light": {"back": "#ffffff", "card": "#f6f7f9", "text": "#1c2430", "dim": "#5b6675",
              "line": "#d8dde4", "accent": "#0b63ce", "bad": "#b3261e"},
    "dark": {"back": "#12161c", "card": "#1b2129", "text": "#e6eaf0", "dim": "#a0abb9",
             "line": "#333c48", "accent": "#6fb1ff", "bad": "#ff8a80"},
}  # fmt: skip
"""By theme, of the page."""


def config(theme: str) -> dict[str, Any]:
    """Return Vega-Lite's config of a theme."""
    page = PAGE[theme]
    return {
        "background": page["back"], "font": "system-ui, sans-serif",
        "view": {"stroke": page["line"]},
        "range": {"category": [KIND[theme][kind] for kind in SPENT_ON]},
        "axis": {
            "labelColor": page["text"], "titleColor": page["dim"], "gridColor": page["line"],
            "domainColor": page["line"], "tickColor": page["line"], "titleFontWeight": "normal",
            "labelFontSize": 11, "titleFontSize": 11,
        },
        "axisY": {"minExtent": 50},
        "legend": {"labelColor": page["text"], "titleColor": page["dim"]},
        "title": {"color": page["text"], "subtitleColor": page["dim"], "anchor": "start"},
        "line": {"color": page["accent"], "strokeWidth": 1.5},
        "area": {"color": page["accent"], "opacity": 0.55},
        "rule": {"color": page["bad"], "strokeWidth": 1},
        "circle": {"color": page["text"], "opacity": 0.9},
        "point": {"color": page["text"], "filled": False, "opacity": 1, "strokeWidth": 1.5},
    }  # fmt: skip
