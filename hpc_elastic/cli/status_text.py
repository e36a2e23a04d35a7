"""How `status` shows the facts of a run to a person; `page` for a terminal or a file, and lines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpc_elastic._util import counted, duration, node_time
from hpc_elastic.cli.run_view import RunFacts, RunTask
from hpc_elastic.report.node_time import KINDS

PHASES = {
    "training": "bold green", "succeeded": "bold green", "failed": "bold red", "lost": "bold red",
    "cancelled": "bold red",
    "waiting": "bold yellow", "starting": "bold yellow", "requeued": "bold yellow",
    "queued": "bold cyan",
}  # fmt: skip
_COLOURS = {
    "useful": "green", "replayed": "red", "checkpoint": "magenta", "restore": "cyan",
    "import": "blue", "rendezvous": "yellow", "start": "bright_black", "idle": "white",
}  # fmt: skip
_DEPARTURES = {
    "preempted": ("preemption", None), "time_limit": ("time limit", None),
    "requeued": ("task requeued", "tasks requeued"),
    "cancelled": ("task cancelled", "tasks cancelled"), "node_lost": ("node lost", "nodes lost"),
    "silence": ("node lost without a word", "nodes lost without a word"),
    "asked": ("node left as asked", "nodes left as asked"),
    "nodes_requeued": ("node given back", "nodes given back"),
    "agent_failed": ("node gave up", "nodes gave up"),
    "signal": ("task told to stop", "tasks told to stop"),
}  # fmt: skip
_NOT_LISTED = "not in the queue"
_LAST = {"end": "until the end", "node_lost": "lost", "silence": "lost without a word"}
"""How the last attempt of a task ended that the scheduler lists no more."""
_MOST_TASKS = 40
_MOST_SLOW = 4
_FILE_WIDTH = 160
_WORTH_TELLING_S = 1.0
_WORTH_NAMING = 0.0005
_WORTH_WAITING_S = 7 * 86_400.0
"""Slurm expects a start in a year where nobody has set a time limit."""
_LABEL_WIDTH = 10


def console() -> Console:
    """Return where to print to; a file or pipe has lines as long as those of a wide terminal."""
    narrow = Console(highlight=False)
    wide = not narrow.is_terminal and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_FILE_WIDTH) if wide else narrow


def page(facts: RunFacts, width: int, *, most_tasks: int = _MOST_TASKS) -> RenderableType:
    """Return the whole page.

    Args:
        facts: What is to be shown.
        width: Characters of a line.
        most_tasks: Lines for tasks; what is beyond is counted.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(facts, max(24, width - _LABEL_WIDTH - 4)):
        grid.add_row(label, text)
    parts: list[RenderableType] = [_head(facts), Text(), grid, Text()]
    if facts.tasks:
        parts += [_tasks(facts, most_tasks)]
    parts += [Text(f"! {note}", style="yellow") for note in facts.notes]
    return Group(*parts)


def _head(facts: RunFacts) -> RenderableType:
    title = Text.assemble((facts.run_id, "bold"), "  ", _phase(facts))
    if facts.submitted is not None:
        title.append(f"  submitted {duration(facts.now - facts.submitted)} ago", style="dim")
    where = Text(str(facts.directory), style="dim", overflow="fold")
    if facts.label:
        where.append(f"\n{facts.label}")
    return Group(title, where)


def _phase(facts: RunFacts) -> tuple[str, str]:
    return f"● {facts.phase}", PHASES.get(facts.phase, "bold")


def _rows(facts: RunFacts, width: int) -> Iterator[tuple[str, RenderableType]]:
    """Yield a label and a text for each line; what is not known has none."""
    makers = (
        ("ended", _ended), ("step", _step), ("pace", _pace), ("checkpoint", _checkpoint),
        ("nodes", _nodes), ("slow", _slow), ("so far", _history), ("goodput", _goodput),
        ("node time", _time),
    )  # fmt: skip
    for label, maker in makers:
        text = maker(facts, width)
        if text is not None:
            yield label, text


def _ended(facts: RunFacts, width: int) -> RenderableType | None:
    if facts.ended is None:
        return None
    ended = facts.ended
    took = ended.time - facts.submitted if facts.submitted is not None else 0.0
    ago = duration(facts.now - ended.time)
    text = Text(f"{clock(ended.time, facts.now)}, {ago} ago")
    text.append(f", {duration(took)} after it was submitted" if took > 0 else "")
    if ended.why:
        text.append(f"\n{ended.why}", style="red")
    log = (ended.failure or {}).get("log")
    return text.append(f"\n{log}", style="dim") if log else text


def _step(facts: RunFacts, width: int) -> RenderableType | None:
    status = facts.status
    if status is None or status.step is None:
        return None
    text = Text().append(f"{status.step:,}", style="bold")
    if status.total_steps:
        share = min(1.0, status.step / status.total_steps)
        done = round(share * 24)
        text.append(f" of {status.total_steps:,}  ")
        text.append("━" * done, style="green").append("╌" * (24 - done), style="dim")
        text.append(f" {share:.0%}")
    if status.loss is not None:
        text.append(f"   loss {status.loss:.4g}")
    return text


def _pace(facts: RunFacts, width: int) -> RenderableType | None:
    pace = facts.pace
    if pace.steps_per_s is None:
        return None
    parts = [f"{number(pace.steps_per_s)} steps/s"]
    if pace.samples_per_s is not None:
        parts.append(f"{number(pace.samples_per_s)} samples/s")
    if pace.remaining_s is not None:
        at = clock(facts.now + pace.remaining_s, facts.now)
        parts.append(f"done in about {duration(pace.remaining_s)} ({at})")
    return Text(" · ".join(parts))


def _checkpoint(facts: RunFacts, width: int) -> RenderableType | None:
    saved = facts.saved
    if saved is None:
        return None if facts.status is None or facts.status.step is None else Text("none yet")
    kept = f" ({saved.kept} kept)" if saved.kept else ""
    return Text(f"step {saved.step:,}, {duration(facts.now - saved.time)} ago{kept}")


def _nodes(facts: RunFacts, width: int) -> RenderableType | None:
    if facts.nodes is None:
        return None
    now, fewest, most = facts.nodes
    wanted = counted(most, "node") if fewest == most else f"{fewest}–{most} nodes"
    text = Text()
    if facts.ended is None:
        text.append(f"{now} of {wanted}", style="bold" if now else "bold yellow")
        if now and facts.status is not None:
            text.append(f", {counted(facts.status.world_size, 'worker')}, round {facts.round}")
    else:
        text.append(f"{wanted}, {counted(facts.round, 'round')}")
    spark = _spark(facts, min(60, width - len(text) - 4))
    return text.append("  ").append(spark, style="cyan") if spark else text


def _spark(facts: RunFacts, width: int) -> str:
    sizes = facts.account.sizes
    if not sizes or facts.nodes is None or width < 8:
        return ""
    changes = [(size.time, float(size.nodes)) for size in sizes]
    end = facts.now if facts.ended is None else facts.ended.time
    return sparkline(changes, changes[0][0], end, width, facts.nodes[2])


def _slow(facts: RunFacts, width: int) -> RenderableType | None:
    """Return the ranks that hold the others up."""
    named = [f"rank {s.get('rank')} on {s.get('host')}" for s in facts.stragglers]
    ratios = [f" ({s.get('ratio')} times the median)" for s in facts.stragglers]
    shown = [name + ratio for name, ratio in zip(named, ratios, strict=True)][:_MOST_SLOW]
    more = len(named) - len(shown)
    shown += [f"and {more} more"] if more else []
    return Text(", ".join(shown), style="yellow") if shown else None


def _history(facts: RunFacts, width: int) -> RenderableType | None:
    spent, allowed = facts.restarts
    parts = [f"{spent} of {counted(allowed, 'restart')} spent"]
    for why, (one, many) in _DEPARTURES.items():
        if facts.departures.get(why):
            parts.append(counted(facts.departures[why], one, many))
    if len(parts) == 1 and not spent and facts.status is None:
        return None
    return Text(" · ".join(parts))


def _goodput(facts: RunFacts, width: int) -> RenderableType | None:
    spent = facts.account
    if spent.goodput is None:
        return Text("unknown: no step was reported yet", style="dim") if spent.node_s else None
    text = Text().append(f"{spent.goodput:.1%}", style="bold")
    text.append(f" of {node_time(spent.node_s)}")
    waited = spent.queue_s
    if waited >= _WORTH_TELLING_S:
        text.append(f"; {node_time(waited)} in the queue besides", style="dim")
    return text


def _time(facts: RunFacts, width: int) -> RenderableType | None:
    """Return where the node-seconds went, as a bar and in numbers."""
    spent, total = facts.account.seconds, facts.account.node_s
    if not total:
        return None
    bar = Text(no_wrap=True)
    for kind, num in _shares(spent, total, min(60, width)):
        bar.append("█" * num, style=_COLOURS[kind])
    kinds = [kind for kind in KINDS if spent[kind] / total >= _WORTH_NAMING]
    shares = {kind: f"{kind} {spent[kind] / total:.1%}" for kind in kinds}
    return Group(bar, _legend(shares, width))


def _legend(texts: dict[str, str], width: int) -> Text:
    """Return the colour and the text of each kind, in lines of at most so many characters."""
    legend, used = Text(), 0
    for kind, text in texts.items():
        needed = len(text) + len("■   ")
        gap = "" if not used else "\n" if used + needed > width else "  "
        used = needed + (0 if gap != "  " else used)
        legend.append(gap).append("■ ", style=_COLOURS[kind]).append(text)
    return legend


def _shares(spent: dict[str, float], total: float, width: int) -> Iterator[tuple[str, int]]:
    """Yield how many of so many characters each kind gets; together, all of them."""
    at, drawn = 0.0, 0
    for kind in KINDS:
        at += spent[kind]
        upto = round(at / total * width)
        yield kind, upto - drawn
        drawn = upto


# ---- tasks ---------------------------------------------------------------------------------


def _tasks(facts: RunFacts, most: int) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = list(_grouped(facts.tasks))
    limited = any(task.time_left_s is not None for task in facts.tasks)
    names = ("task", "state", "node", "attempt", "ranks", *(["time left"] if limited else []))
    for name in names:
        right = name in ("attempt", "ranks", "time left")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "state")
    for task, num in rows[:most]:
        table.add_row(*_cells(task, num)[: len(names)])
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} more: --json has all of them"
        table.caption_justify = "left"
    return table


def _grouped(tasks: Sequence[RunTask]) -> Iterator[tuple[RunTask, int]]:
    """Yield tasks, and how many of them each stands for: those that wait alike are one."""
    for waits, group in groupby(tasks, key=_alike):
        alike = list(group)
        if waits is None or len(alike) < 3:
            yield from ((task, 1) for task in alike)
        else:
            last = alike[-1].task.rpartition("_")[2]
            yield replace(alike[0], task=f"{alike[0].task} to {last}"), len(alike)


def _alike(task: RunTask) -> tuple[object, ...] | None:
    waits = task.state == "PENDING" and not task.node
    return (task.state, task.reason, task.attempt) if waits else None


def _cells(task: RunTask, num: int) -> tuple[RenderableType, ...]:
    ranks = task.ranks
    shown = "" if ranks is None else str(ranks[0])
    if ranks is not None and ranks[1] > ranks[0]:
        shown = f"{ranks[0]} to {ranks[1]}"
    left = "" if task.time_left_s is None else duration(task.time_left_s)
    attempt = "" if task.attempt is None else str(task.attempt)
    return task.task, _state(task, num), Text(task.node or ""), attempt, shown, left


def _state(task: RunTask, num: int) -> Text:
    if task.last_known is not None:
        text = Text("unknown", style="yellow")
        return text.append(f" (last known: {_LAST.get(task.last_known, task.last_known)})", "dim")
    if task.state is None:
        return Text(_LAST.get(task.reason or "", task.reason or _NOT_LISTED), style="dim")
    colour = {"RUNNING": "green", "PENDING": "cyan", "COMPLETED": "green"}.get(task.state, "yellow")
    text = Text(f"{num} {task.state}" if num > 1 else task.state, style=colour)
    if task.reason:
        text.append(f" ({task.reason})", style="dim")
    starts_in_s = task.starts_in_s or 0.0
    if task.state == "PENDING" and 0 < starts_in_s < _WORTH_WAITING_S:
        text.append(f" in {duration(starts_in_s)}", style="dim")
    return text


# ---- one line ------------------------------------------------------------------------------


def line(facts: RunFacts) -> str:
    """Return a run in one line, for a watch that no terminal shows."""
    parts = [facts.phase]
    if facts.nodes is not None and facts.ended is None:
        parts.append(f"{facts.nodes[0]} of {facts.nodes[2]} nodes")
    status = facts.status
    if status is not None and status.step is not None:
        of = f" of {status.total_steps:,}" if status.total_steps else ""
        parts.append(f"step {status.step:,}{of}")
        parts += [f"loss {status.loss:.4g}"] if status.loss is not None else []
    if facts.pace.steps_per_s is not None:
        parts.append(f"{number(facts.pace.steps_per_s)} steps/s")
    if facts.pace.remaining_s is not None:
        parts.append(f"{duration(facts.pace.remaining_s)} to go")
    if facts.account.goodput is not None:
        parts.append(f"goodput {facts.account.goodput:.1%}")
    if facts.ended is not None and facts.ended.why:
        parts.append(facts.ended.why)
    return ", ".join(parts)


def calm(facts: RunFacts) -> tuple[object, ...]:
    """Return what a line is printed for at once when it changes: not steps, pace and loss."""
    return facts.phase, facts.nodes, facts.restarts, tuple(sorted(facts.departures.items()))


# ---- Times and numbers as a person reads them (pure)


BLOCKS = "▁▂▃▄▅▆▇█"

_HOUR = 3600


def clock(at: float, now: float) -> str:
    """Return a moment on this machine's clock, with its day where that is not today."""
    there, here = time.localtime(at), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M:%S" if abs(at - now) < _HOUR else "%H:%M", there)
    return time.strftime("%a %d %b %H:%M", there)


def number(value: float) -> str:
    """Return a number with three significant digits; whole ones from a thousand on by thousands."""
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def sparkline(
    changes: Sequence[tuple[float, float]], begin: float, end: float, width: int, top: float
) -> str:
    """Return a value over time as a line of blocks, each the mean over its stretch.

    Args:
        changes: From when on it was what, in order of time; before the first it was 0.
        begin: Unix seconds of the left edge.
        end: Of the right edge.
        width: Characters, at least 1.
        top: What the highest block stands for.
    """
    if end <= begin or top <= 0:
        return ""
    step = (end - begin) / width
    edges = [(begin + i * step, begin + (i + 1) * step) for i in range(width)]
    return "".join(_block(_mean(changes, a, b) / top) for a, b in edges)


def _mean(changes: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    total = 0.0
    ends = [at for at, _ in changes[1:]] + [end]
    for (at, value), until in zip(changes, ends, strict=True):
        total += value * max(0.0, min(end, until) - max(begin, at))
    return total / (end - begin)


def _block(share: float) -> str:
    if share <= 0.01:
        return " "
    return BLOCKS[min(len(BLOCKS) - 1, max(0, round(share * len(BLOCKS)) - 1))]
