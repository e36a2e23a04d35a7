"""A save of several ranks, and the end of a run, on a local disk and as by NFS."""

import statistics
from dataclasses import dataclass, field

from evidence.result import Cell, Column, Figure, Table, Target, figure

from shared_folder.place import LOCAL, NEVER, NFS, Place, training

SAVES = 4
"""Of one run; the first makes the buffers and does not count."""
MIB = 96
HELD_UP_S, COMPLETE_S, END_S = 0.2, 2.0, 5.0
_SETTLED_S = 5.0


@dataclass(frozen=True)
class Course:
    """One run that was left alone; seconds, of the saves one for each.

    ``held_up_s``: of the rank that was held up longest; ``complete_s``: from its begin until the
    first rank had it committed. ``end_s``: from the run's result until the launcher's last word;
    ``end_of_workers_s``: from the end of the last worker's function. ``problems``: what the
    launcher said that was not so.
    """

    held_up_s: list[float] = field(default_factory=list)
    complete_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    end_of_workers_s: float = 0.0
    problems: tuple[str, ...] = ()


def measure(place: Place, *, num_saves: int) -> Course:
    """Let a run train on all nodes, save so many times beside the first, and end."""
    mib = MIB if num_saves else 0
    with training(place, mib=mib, every_steps=NEVER) as run:
        started = run.wait_for_group(4)
        run.wait_for_group(4, max(w.joined for w in started) + _SETTLED_S)
        saves = [run.save() for _ in range(num_saves + 1 if num_saves else 0)][1:]
        problems = run.finish()
        end_s, end_of_workers_s = run.end_s
    begin = [min(rank["begin"] for rank in save) for save in saves]
    end = [min(rank["end"] for rank in save) for save in saves]
    failed = any(rank["failures"] for save in saves for rank in save)
    return Course(
        held_up_s=[max(rank["blocked_s"] for rank in save) for save in saves],
        complete_s=[e - b for b, e in zip(begin, end, strict=True)],
        end_s=end_s,
        end_of_workers_s=end_of_workers_s,
        problems=(*problems, *(["a save failed"] if failed else [])),
    )


def table(found: dict[str, list[Course]]) -> Table:
    rows: dict[str, dict[str, Cell]] = {}
    for place, courses in found.items():
        ends = [c.end_of_workers_s for c in courses]
        cells = {
            f"a save of {MIB} MiB: held up": [s for c in courses for s in c.held_up_s],
            f"a save of {MIB} MiB: complete": [s for c in courses for s in c.complete_s],
            "the end: from the result to the launcher's word": [c.end_s for c in courses],
            "the end: from the last worker's to the launcher's word": ends,
        }
        for what, seconds in cells.items():
            if seconds:
                rows.setdefault(what, {})[place] = figure(seconds)
    columns = (Column(""), *(Column(place, ".2f") for place in found), Column("more", "+.2f"))
    lines = tuple((what, *cells.values(), _more(cells)) for what, cells in rows.items())
    return Table("four ranks on four nodes, nobody disturbs them; seconds", columns, lines)


def _more(cells: dict[str, Cell]) -> Cell:
    local, nfs = cells.get(LOCAL), cells.get(NFS)
    if not isinstance(local, Figure) or not isinstance(nfs, Figure):
        return ""
    return Figure(nfs.median - local.median)


def targets(found: dict[str, list[Course]]) -> list[Target]:
    """Hold NFS against the local disk, and the launcher's word against what was so."""
    aims = []
    saves = {place: [c for c in courses if c.complete_s] for place, courses in found.items()}
    if all(saves.values()):
        for what, bound in (("held up", HELD_UP_S), ("complete", COMPLETE_S)):
            field_ = f"{what.replace(' ', '_')}_s"
            local, nfs = (
                statistics.median(s for c in saves[place] for s in getattr(c, field_))
                for place in (LOCAL, NFS)
            )
            name = f"a save of four ranks, {MIB} MiB: {what}, more than on the local disk"
            aims.append(Target(name, bound, nfs - local, "s"))
    name = "a run's end until the launcher says so"
    aims.append(Target(name, END_S, max(c.end_s for c in found[NFS]), "s"))
    wrong = [problem for courses in found.values() for c in courses for problem in c.problems]
    aims.append(Target(f"{name}: wrong words, failed saves", 0, len(wrong)))
    return aims
