"""The generator of explanation/sizing.md: what a model of some size needs, by measured rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_BYTES = 12
"""Of a parameter and AdamW's two moments, in float32."""
_STEP_S = 2.0
_NODES = 8
_FOLDERS = (2, 20)
"""GB a second that all nodes together write."""
_AROUND_S = 8.0
"""Of a preemption: notices of other nodes (2 s), the agreement (1 s), the reserve (5 s)."""


def sizing_page() -> str:
    """Return the text of explanation/sizing.md."""
    checkpoints = _medians("checkpoint", "1 GiB in tensors of 64 MiB, seconds")
    ours, floor = checkpoints["ours"], "floor: direct write + fsync"
    copy = 2**30 / 1e9 / ours["blocked"]
    written = ours["total"] / checkpoints[floor]["total"]
    restored = ours["cold restore"] / checkpoints["floor: read + checksum"]["cold restore"]
    pauses = _medians("recovery", "from the fault to the next training step, seconds")
    return _PAGE.format(
        bytes=_BYTES, nodes=_NODES, step_s=_STEP_S, around_s=_AROUND_S,
        rows="\n".join(_row(billions, copy, written) for billions in (1, 7, 70)),
        copy=copy, written=written, restored=restored, slow=_FOLDERS[0], fast=_FOLDERS[1],
        lost=pauses["follower"]["pause"], joined=pauses["join"]["pause"],
    )  # fmt: skip


def _medians(result: str, caption: str) -> dict[str, dict[str, float]]:
    """Return the medians of a table of benchmarks/results, by row and column, the first of each."""
    tables = json.loads((_RESULTS / f"{result}.json").read_text())["result"]["tables"]
    (table,) = (table for table in tables if table["caption"] == caption)
    names = [column["name"] for column in table["columns"]]
    rows: list[list[Any]] = table["rows"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        cells = zip(names, row, strict=False)
        found.setdefault(row[0], {n: v["median"] for n, v in cells if isinstance(v, dict)})
    return found


def _row(billions: int, copy: float, written: float) -> str:
    state = billions * _BYTES
    share = state / _NODES
    held_up_s = share / copy
    saved_s = [held_up_s + written * state / folder for folder in _FOLDERS]
    grace_s = [_AROUND_S + 2 * _STEP_S + save for save in saved_s]
    cells = [
        f"{billions} B", f"{state:,} GB", f"{share:.3g} GB", _time(held_up_s),
        *map(_time, saved_s), *map(_time, grace_s), f"{6 * share:.3g} GB",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.2g} min"


_PAGE = """# Sizing

What models of 1, 7 and 70 billion parameters need: bytes, time of a save, grace of a preemption, pauses and memory. Put your own figures into the formulas; the rates below were measured on one machine with one disk.

<!-- Written by `python docs/generate.py` from docs/sizing_page.py and benchmarks/results. -->

## The table

Weights and AdamW in float32 ({bytes} bytes a parameter), {nodes} nodes, steps of {step_s:g} s. *Slow folder*: all nodes together write {slow} GB/s. *Fast folder*: {fast} GB/s.

| parameters | state | of a node | held up | saved, slow folder | saved, fast folder | grace, slow folder | grace, fast folder | `MemoryTier`, of a node |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{rows}

- **held up**: the training stops while the state is copied into host memory.
- **saved**: until the checkpoint is committed. A periodic save is written beside the training, and takes longer where the training uses every core.
- **grace**: the least time between SIGTERM and SIGKILL with which a preemption costs no step.

## The formulas

| quantity | formula |
|---|---|
| state | parameters x bytes a parameter |
| of a node | state / nodes: without sharding too, since ranks divide what all of them have |
| held up | of a node / {copy:.0f} GB/s |
| saved | held up + {written:.2f} x state / rate at which all nodes together write |
| restored | {restored:.2f} x bytes that a rank reads / rate at which it reads |
| grace | {around_s:g} s + 2 steps + saved |
| time between periodic saves | held up / `overhead` (0.02 by default), and at least saved |
| steps lost with a dead node | half of the time between saves on average, all of it at worst |

The factors are medians of [Checkpoints](../../benchmarks/RESULTS.md#checkpoints). They relate a save to a plain direct write, and a cold restore to a plain read. They were measured in one process on CPU tensors. A copy from a GPU goes over PCIe, and is not in them.

Bytes a parameter, of what the script gives to its `Checkpointer`:

| state | bytes |
|---|---:|
| float32 weights, AdamW | 12 |
| bfloat16 weights, AdamW in float32, float32 master weights | 14 |
| bfloat16 weights, AdamW in bfloat16 | 6 |
| float32 weights, SGD with momentum | 8 |
| weights alone | 2 or 4 |

## The grace of a preemption

The {around_s:g} s have three parts:

- 2 s in which the leader gathers notices of other nodes;
- 1 s for the agreement on a step;
- 5 s of reserve, in which the workers end and the task returns to the queue.

The agreed step is at most two steps ahead. `hpc-elastic doctor partition=NAME` shows the grace of a partition. If it is too short:

- Save more often: then the loss is small. `overhead=0.05` saves every 20 times the time that a save holds up the training.
- Use a faster folder: `hpc-elastic doctor --probe --dir FOLDER` measures it.
- Save fewer bytes: keep what can be computed again out of the state.
- Ask the site for a longer GraceTime ([set up the cluster](../howto/cluster-admins.md)).

`MemoryTier` does not shorten this save: the checkpoint at which a node leaves goes to the shared folder.

## Pauses

A change of the group is a pause of three parts: the agreement and the new round, the start of the workers, and the restore.

| part | size |
|---|---|
| the new round | {lost:.1f} s where a node is lost, {joined:.1f} s where one joins, with warm workers and a model of a few KB ([Recovery](../../benchmarks/RESULTS.md#recovery-from-a-fault)) |
| the start of the workers | imports, NCCL, torch.compile: seconds to minutes, as of your script; [`warm_imports`](../howto/choose-settings.md) removes the imports |
| the restore | the formula above; with DistributedDataParallel each rank reads the whole state, with `fully_shard` its part |

With [`ft=true`](../howto/fault-tolerance.md) only the failed node pays the last two parts.

## Memory

- **Snapshot**: one host buffer of the bytes "of a node", on each node, pinned where the state is on a GPU. It is kept between saves.
- **`MemoryTier`**: up to three steps of the node's own part and of its neighbour's in `/dev/shm`. That is six times "of a node". Where that does not fit on every node, all saves go to the folder.
- **Folder**: `keep_last` (2) checkpoints and the one that is being written: three times the state.
"""  # noqa: E501
