"""Draw the pictures of docs/explanation/design.md.

    python docs/images/design.py       writes design-*.svg beside this file

Each has a background of its own, so it can be read on a light and on a dark page.
"""

from html import escape
from pathlib import Path

WIDTH = 860
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #0f172a } .s { font-size: 11.5px; fill: #475569 }
.h { font-weight: 600 } .m { text-anchor: middle } .e { text-anchor: end }
.a { fill: #eef2ff; stroke: #6366f1 } .b { fill: #fef3c7; stroke: #d97706 }
.ok { fill: #dcfce7; stroke: #16a34a } .no { fill: #fee2e2; stroke: #dc2626 }
.x { fill: #f1f5f9; stroke: #94a3b8 } .l { stroke: #475569; fill: none; stroke-width: 1.4 }
.d { stroke: #94a3b8; stroke-dasharray: 3 4 }
"""


class Picture:
    """An SVG that is drawn piece by piece."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a line; ``kind`` is classes of the style: h, s, m (middle) or e (end)."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str, *lines: str) -> None:
        """Draw a box with lines of text in its middle."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" class="{kind}"/>')
        top = y + h / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + 16 * i, line, "m" if i == 0 else "m s")

    def line(self, path: str, kind: str = "l", *, arrow: bool = True) -> None:
        """Draw a path of SVG."""
        end = ' marker-end="url(#to)"' if arrow else ""
        self.parts.append(f'<path d="{path}" class="{kind}"{end}/>')

    def svg(self) -> str:
        """Return the picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                f'role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z" fill="#475569"/></marker>'
                f"<style>{STYLE}</style></defs>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="10" fill="#fafafa"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def log() -> Picture:
    """The log of decisions, and a leader that is fenced."""
    p = Picture(270, "Two agents and the log: a paused leader finds its next entry taken")
    entries = [
        ("a", "entry 1", "A claims term 1"),
        ("a", "entry 2", "A closes round 1"),
        ("b", "entry 3", "B claims term 2"),
        ("b", "entry 4", "B closes round 2"),
    ]
    p.text(20, 32, "agent A leads", "h")
    p.line("M120 28H370", arrow=False)
    p.box(372, 15, 150, 26, "x", "paused, or cut off")
    p.line("M522 28H640")
    p.text(648, 32, "continues, wants entry 3")
    for i, (kind, name, what) in enumerate(entries):
        x = 40 + 205 * i
        p.box(x, 108, 160, 50, kind, name, what)
        if i:
            p.line(f"M{x - 45} 133H{x - 3}")
    p.line("M120 44V104")
    p.line("M325 44V104")
    p.line("M700 42C690 80 590 80 545 104")
    p.text(660, 82, "link(2) fails: EEXIST, fenced", "s")
    p.text(20, 215, "agent B follows", "h")
    p.line("M132 211H430")
    p.text(300, 203, "the lease has not changed", "s m")
    p.line("M470 196V162")
    p.text(482, 190, "link(2) succeeds", "s")
    p.line("M530 211H640")
    p.line("M735 196V162")
    p.text(442, 215, "B leads", "h")
    text = "Each entry holds the whole state; an agent that creates entry n + 1 has read entry n."
    p.text(WIDTH / 2, 252, text, "s m")
    return p


def step() -> Picture:
    """The agreement on a step."""
    p = Picture(250, "Ranks agree on step 104: it is proposed ahead of all, then confirmed")
    left, per_step, first = 130, 62, 97
    for number in range(first, 108):
        x = left + per_step * (number - first)
        p.text(x, 30, str(number), "s m")
        p.line(f"M{x} 38V190", "d", arrow=False)
    at = left + per_step * (104 - first)
    for row, (name, to, now) in enumerate([("rank 0", 104, 104), ("rank 1", 104, 102)]):
        y = 62 + 44 * row
        p.text(20, y + 4, name, "h")
        p.line(f"M{left} {y}H{left + per_step * (now - first)}", arrow=False)
        if now < to:
            p.line(f"M{left + per_step * (now - first)} {y}H{at - 4}", "l d")
    p.box(at - 5, 46, 96, 30, "b", "waits here")
    p.text(left + per_step * 5 + 4, 98, "ok: before it", "s")
    p.text(20, 154, "leader", "h")
    p.box(left - 34, 136, 140, 40, "x", "asks: which step?", "no rank waits")
    p.box(left + 160, 136, 140, 40, "b", "proposes 104", "ahead of all ranks")
    p.box(at - 66, 136, 132, 40, "ok", "confirms 104", "all voted ok on it")
    p.line(f"M{left + 106} 156H{left + 157}")
    p.line(f"M{left + 300} 156H{at - 69}")
    p.line(f"M{at} 136V112")
    p.text(at + 12, 124, "all ranks save step 104", "s")
    text = "The proposal stands on a page of memory that a worker shares with its agent."
    p.text(WIDTH / 2, 226, text, "s m")
    return p


def commit() -> Picture:
    """The commit of a checkpoint."""
    p = Picture(236, "A checkpoint: parts, then the manifest, then the fence, then one rename")
    for row in range(3):
        y = 30 + 44 * row
        p.text(20, y + 20, f"rank {row}", "h")
        p.box(80, y, 130, 32, "x", "copy to host memory")
        p.box(240, y, 150, 32, "a", "write part, sync, sum")
        p.line(f"M210 {y + 16}H237")
        p.line(f"M390 {y + 16}L{423} {90 - 8 + 8 * row}")
    p.text(240, 178, "by a thread; the training goes on", "s")
    p.box(426, 62, 100, 56, "b", "manifest", "lists every file")
    p.box(556, 62, 106, 56, "b", "check fence", "still our group?")
    p.box(692, 62, 148, 56, "ok", "rename(2)", "to step-00000104")
    p.line("M526 90H553")
    p.line("M662 90H689")
    p.line("M609 118V150")
    p.box(540, 152, 138, 30, "no", "replaced: no commit")
    p.text(766, 142, "only now it exists", "s m")
    text = "Nothing here is collective: a rank that dies costs this checkpoint, and no more."
    p.text(WIDTH / 2, 216, text, "s m")
    return p


def quorum() -> Picture:
    """Steps with replicas: a death, and a newcomer that heals."""
    p = Picture(276, "Replicas over steps: one dies in step 12, another joins at step 15")
    left, per_step, first = 110, 90, 10
    for number in range(first, 18):
        p.text(left + per_step * (number - first) + 40, 30, f"step {number}", "s m")
    lanes = [
        ("replica A", ["ok", "ok", "no", "ok", "ok", "ok", "ok", "ok"]),
        ("replica B", ["ok", "ok", "no", "ok", "ok", "ok", "ok", "ok"]),
        ("replica C", ["ok", "ok", "no", "", "", "", "", ""]),
        ("replica D", ["", "", "", "x", "x", "b", "ok", "ok"]),
    ]
    words = {"ok": "committed", "x": "starts", "b": "heals"}
    for row, (name, steps) in enumerate(lanes):
        y = 42 + 42 * row
        p.text(20, y + 20, name, "h")
        for i, kind in enumerate(steps):
            if kind:
                word = ("dies" if name == "replica C" else "made again") if kind == "no" else ""
                p.box(left + per_step * i, y, 80, 30, kind, word or words[kind])
    p.text(left, 232, "quorum 1: A, B, C", "s")
    p.text(left + per_step * 2 + 4, 232, "abort, quorum 2: A, B", "s")
    p.text(left + per_step * 5 + 4, 232, "switch, quorum 3: A, B, D", "s")
    for i in (2, 5):
        p.line(f"M{left + per_step * i - 5} 38V238", "d", arrow=False)
    text = "Within a quorum a step costs no message. A join waits for an agreed step."
    p.text(WIDTH / 2, 262, text, "s m")
    return p


if __name__ == "__main__":
    for draw in (log, step, commit, quorum):
        (Path(__file__).parent / f"design-{draw.__name__}.svg").write_text(draw().svg())
