"""``hpc-elastic submit --test-only``: when a run would start, and how it would grow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from hpc_elastic import site
from hpc_elastic._console import console, plain_table
from hpc_elastic._util import counted, duration
from hpc_elastic.cli.status import clock, span
from hpc_elastic.config.schema import RunSettings
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.directory import ArrayFiles, RunDir
from hpc_elastic.shared_files import read_text
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient


@dataclass(frozen=True)
class RunForecast:
    """The forecast of one run: its own time limit, then shorter ones that help."""

    time: float
    settings: RunSettings
    partitions: Sequence[str]
    found: site.Outlook
    shapes: Sequence[site.Shape]
    notes: Sequence[str]
    learned_from: str

    @property
    def soonest(self) -> site.Shape | None:
        """The shape that starts soonest; None if no start is known."""
        return site.soonest(self.shapes)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints; the help describes the keys."""
        found, nodes = self.found, self.settings.nodes
        index = None if self.soonest is None else list(self.shapes).index(self.soonest)
        return {
            "time": self.time, "partition": ",".join(self.partitions) or None,
            "nodes": {"min": nodes.min, "max": nodes.max, "unit": nodes.unit},
            "time_limit_s": _finite(self.shapes[0].limit_s),
            "idle": found.num_idle, "planned": found.num_planned, "busy": found.num_busy,
            "out_of_service": found.num_out,
            "unknown": found.num_unknown(busy=True) + found.num_unknown(busy=False),
            "waiting_jobs": found.num_waiting, "unplanned_jobs": found.num_unplanned,
            "test_only": {str(n): at for n, at in self.shapes[0].tested.items()},
            "shapes": [
                {
                    "time_limit_s": _finite(shape.limit_s), "starts_at": shape.starts_at,
                    "growth": [{"nodes": n, "at": at} for n, at in shape.growth],
                    "learned": {str(n): asdict(start) for n, start in shape.learned.items()},
                }
                for shape in self.shapes
            ],
            "soonest": index, "notes": list(self.notes), "learned_from": self.learned_from,
        }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- queries


def make_forecast(scripts: Sequence[Path]) -> RunForecast:
    """Query Slurm, and return the forecast of the first run; ConfigError if sbatch refuses it."""
    client = SlurmClient(env=dict(os.environ))
    runs = dict.fromkeys(d for script in scripts for d in ArrayFiles.of(script).run_dirs())
    settings = RunDir(next(iter(runs))).load().settings
    config, partitions = client.config(), client.all_partitions()
    launchers: list[Any] = [own for _, own in settings.shares]
    asked = {own.partition: parsing.selected(partitions, own.partition) for own in launchers}
    names = list(dict.fromkeys(p.name for chosen in asked.values() for p in chosen))
    listed = {
        wanted: client.each_node(",".join(p.name for p in chosen) or wanted)
        for wanted, chosen in asked.items()
    }
    states = {node: state for each in listed.values() for node, state in each.items()}
    jobs, now = client.queue(), time.time()
    found = site.outlook(
        site.without_excluded(states, settings.launcher), jobs, now,
        partitions=names, are_jobs_hidden=parsing.hides_jobs(config),
    )  # fmt: skip
    notes = [*_notes(settings, found, config)]
    no_reserve = site.no_reserve_qos(launchers, client)
    pools = []
    for (slots, _), launcher in zip(settings.shares, launchers, strict=True):
        terms = site.task_terms(launcher, asked[launcher.partition], no_reserve)
        here = frozenset(listed[launcher.partition])
        pools.append(replace(terms, number=len(slots), nodes=here))
        if launcher.qos in no_reserve:
            notes.append(
                f"QOS {launcher.qos} has NoReserve: its tasks start in gaps of any length, and are "
                "preempted when the planned jobs start"
            )
        elif launcher.time_min is not None:
            notes.append(
                f"launcher.time_min={launcher.time_min}: tasks start in gaps that are as long, and "
                "return to the queue at their ends"
            )
    nodes = settings.nodes
    sizes = settings.node_counts or range(nodes.min, nodes.max + 1, nodes.unit)
    coallocated = settings.num_coallocated > 0
    own, *shorter = site.shapes(found, pools, sizes, now, coallocated=coallocated)
    tested, refused = _tests(client, scripts, settings, now)
    notes += refused
    own = replace(
        own, tested=tested, is_queue_empty=not found.num_waiting and not parsing.hides_jobs(config)
    )
    known = site.RunTimes(*client.job_runs(), now)
    found_shapes = [own, *shorter]
    if len(pools) == 1:
        found_shapes = [
            replace(shape, learned=site.learned_starts(
                found, jobs, replace(pools[0], limit_s=shape.limit_s), sizes, known, now,
                partitions=names, coallocated=coallocated,
                pass_s=parsing.backfill_interval_s(config),
            ))
            for shape in found_shapes
        ]  # fmt: skip
    if any(size > len(own.starts) for size, _ in own.growth):
        notes.append(
            "for nodes that are free at an unknown time `sbatch --test-only` counts, which "
            "includes waiting jobs only as a mean"
        )
    if len(runs) > 1:
        notes.append(f"the sweep has {len(runs)} runs, which share the queue: this is the first")
    note = known.describe_record(is_learned=any(shape.learned for shape in found_shapes))
    return RunForecast(now, settings, names, found, found_shapes, notes, note)


def _tests(
    client: SlurmClient, scripts: Sequence[Path], settings: RunSettings, now: float
) -> tuple[dict[int, float], list[str]]:
    """Return when Slurm would start jobs by their number of nodes, and which it refuses."""
    from hpc_elastic.launcher.slurm import refusal

    tested: dict[int, float] = {}
    notes: list[str] = []
    launchers: list[Any] = [own for _, own in settings.shares]
    sizes = {settings.nodes.min, settings.nodes.max} if len(launchers) == 1 else set[int]()
    tests = [(script, own, 1) for script, own in zip(scripts, launchers, strict=False)]
    tests += [(scripts[0], launchers[0], number) for number in sorted(sizes - {1})]
    for script, own, number in tests:
        flags = [f"--nodes={number}", f"--ntasks={number}"]
        flags += ["--array=0"] if "\n#SBATCH --array=" in read_text(script) else []
        try:
            at = parsing.parse_expected_start(client.test_only(str(script), flags))
        except SlurmCommandError as e:
            if number == 1:
                raise refusal(e, own, client) from e
            notes.append(f"sbatch --test-only, {number} nodes: {' '.join(e.stderr.split())}")
            continue
        if at is not None and at - now < site.FAR_S:
            tested[number] = min(at, tested.get(number, math.inf))
    return tested, notes


def _notes(settings: RunSettings, found: site.Outlook, config: Mapping[str, str]) -> Iterator[str]:
    """Yield what the forecast does not include, or cannot."""
    from hpc_elastic.launcher.batch_script import has_whole_nodes

    launcher: Any = settings.launcher
    if parsing.hides_jobs(config):
        yield (
            "PrivateData hides the jobs of other users: of the nodes that they use, only `sbatch "
            "--test-only` has the ends"
        )
    if not parsing.has_backfill(config):
        yield (
            f"{config['SchedulerType']}: without backfill Slurm plans no starts and fills no gaps, "
            "and a shorter time limit does not help"
        )
    if num_busy := found.num_unknown(busy=True):
        busy = counted(num_busy, "busy node")
        yield f"{busy} with hidden jobs, or jobs without a time limit: free at an unknown time"
    if num_idle := found.num_unknown(busy=False):
        idle = counted(num_idle, "idle node")
        yield f"{idle} planned for jobs whose start is not visible: not counted"
    if found.num_unplanned:
        jobs = counted(found.num_unplanned, "waiting job")
        yield f"{jobs} without a visible planned start: those with a higher priority are first"
    if not has_whole_nodes(launcher):
        yield "a task takes a share of a node: a node in use may have room for it before it is free"
    if launcher.constraint:
        yield (
            f"launcher.constraint={launcher.constraint}: the nodes above are all of the partition; "
            "only `sbatch --test-only` takes it into account"
        )


# ---- text


def print_forecast(forecast: RunForecast) -> None:
    """Print a forecast as a table and sentences."""
    out, found = console(), forecast.found
    parts = [f"{found.num_idle} idle"]
    if found.num_planned:
        parts[0] += f" ({found.num_planned} planned for other jobs)"
    parts += [f"{found.num_busy} busy"]
    parts += [f"{found.num_out} out of service or reserved"] if found.num_out else []
    parts += [f"{counted(found.num_waiting, 'job')} waiting"] if found.num_waiting else []
    where = ", ".join(forecast.partitions) or "no partition"
    out.print(f"{where}: {counted(len(found.nodes) + found.num_out, 'node')}, {', '.join(parts)}")
    table = plain_table()
    for name in ("time limit", "starts", "nodes, at the latest"):
        table.add_column(name)
    for shape in forecast.shapes:
        table.add_row(
            _limit(shape.limit_s), _start(shape, forecast.time),
            _growth(forecast, shape), style="bold" if shape is forecast.soonest else "",
        )  # fmt: skip
    out.print(table)
    tested = (
        f"{counted(n, 'node')} {_at(at, forecast.time, 'at ')}"
        for n, at in forecast.shapes[0].tested.items()
    )
    out.print(f"sbatch --test-only: {', '.join(tested) or 'no start'}")
    for sentence in sentences(forecast):
        out.print(sentence)
    out.print(f"starts: {forecast.learned_from}")
    for note in forecast.notes:
        out.print(Text(f"! {note}", style="yellow"))


_MOST_STEPS = 4


def _growth(forecast: RunForecast, shape: site.Shape) -> str:
    """Return the growth of the run: ``3 now, 5 at 14:20, 16 at 18:00``."""
    steps = shape.growth
    shown = steps if len(steps) <= _MOST_STEPS else [*steps[: _MOST_STEPS - 1], steps[-1]]
    text = ", ".join(f"{number} {_at(at, forecast.time, 'at ')}" for number, at in shown)
    most = forecast.settings.nodes.max
    return text if steps and steps[-1][0] == most else f"{text}{', ' * bool(text)}{most} unknown"


def sentences(forecast: RunForecast) -> Iterator[str]:
    """Yield what the forecast means for the user's settings."""
    nodes, own, best = forecast.settings.nodes, forecast.shapes[0], forecast.soonest
    now = forecast.time
    if best is None:
        yield "No start is known."
        return
    starts, steps = best.starts_at, best.growth
    number = steps[0][0] if steps and not best.learned else best.sizes[0]
    when = f"{_start(best, now, 'at ')} with {counted(number, 'node')}"
    if best is own:
        latest = f", {_at(starts, now, 'at ')}" if best.learned else ""
        yield f"The run starts {when}{latest}, at the latest."
    else:
        yield (
            f"launcher.time={best.limit_s // 60:.0f} starts soonest: {when}; with "
            f"{_limit(own.limit_s)} the start is {_start(own, now, 'at ')}."
        )
    sizes = {shape.limit_s: _num_at_once(forecast, shape) for shape in forecast.shapes}
    limit_s, most = max(sizes.items(), key=lambda size: (size[1], size[0]))
    if most > sizes[best.limit_s]:
        yield f"With launcher.time={limit_s // 60:.0f} it has {counted(most, 'node')} then."
    may_be_one = nodes.min > nodes.unit == 1 and not forecast.settings.node_counts
    fewer = best.start_of(1) if may_be_one else None
    if fewer is not None and starts is not None and starts - fewer >= site.SAME_S:
        yield f"With nodes=1:{nodes.max} it starts {_at(fewer, now, 'at ')} with 1 node."


def _num_at_once(forecast: RunForecast, shape: site.Shape) -> int:
    """Return the size of the run in its first minute, if that is the first minute of the best."""
    steps, best = shape.growth, forecast.soonest
    first = None if best is None else best.starts_at
    return steps[0][0] if steps and first is not None and steps[0][1] - first < site.SAME_S else 0


def _limit(limit_s: float) -> str:
    return duration(limit_s) if math.isfinite(limit_s) else "none"


def _start(shape: site.Shape, now: float, before: str = "") -> str:
    """Return when a shape has the minimum: eight of ten starts, or by the time limits."""
    learned = shape.learned.get(shape.sizes[0])
    return _at(shape.starts_at, now, before) if learned is None else span(learned, now)


def _at(at: float | None, now: float, before: str = "") -> str:
    if at is None:
        return "unknown"
    return "now" if at - now < site.SAME_S else f"{before}{clock(at, now)}"
