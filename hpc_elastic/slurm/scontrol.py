"""What scontrol prints, read: the configuration, partitions, and jobs. Pure.

Only fields are read whose names have been the same from Slurm 20 to 26. Values with blanks in them
(a job's name, its comment) come cut off; none of those is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_elastic.slurm import nodelist

_FIELD = re.compile(r"(?<!\S)([A-Za-z][\w/:-]*)=(\S*)")
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
_NOTHING = ("", "(null)", "N/A", "None")
_BY_PARTITION = "preempt/partition_prio"
_DEFAULT_KILL_WAIT_S = 30


@dataclass(frozen=True)
class Preemption:
    """What a task gets when it is preempted.

    Attributes:
        grace_s: Seconds between its SIGTERM and the end; 0 if there is no grace.
        kill_wait_s: Seconds between the SIGTERM of that end and SIGKILL. A task with no grace has
            these only.
        mode: ``off``, ``requeue``, ``cancel`` or ``suspend``.
    """

    grace_s: int = 0
    kill_wait_s: int = _DEFAULT_KILL_WAIT_S
    mode: str = "off"


@dataclass(frozen=True)
class Record:
    """One record of ``scontrol show job``: a task, or the waiting elements of an array.

    Attributes:
        tasks: Their names, as squeue prints them.
        state: Slurm's word.
        excluded: The nodes that they are kept away from.
    """

    tasks: tuple[str, ...]
    state: str
    excluded: tuple[str, ...] = ()

    @property
    def may_wait(self) -> bool:
        """Whether it waits for nodes, or is on its way back to the queue perhaps."""
        return self.state in ("PENDING", "COMPLETING", "REQUEUED")


def parse_config(output: str) -> dict[str, str]:
    """Return the settings in what ``scontrol show config`` printed."""
    return dict(_SETTING.findall(output))


def parse_preemption(config: str, partitions: str, wanted: str | None) -> Preemption:
    """Return what a task gets when it is preempted.

    Args:
        config: What ``scontrol show config`` printed.
        partitions: What ``scontrol -o show partition`` printed.
        wanted: Names of partitions with commas; None is the default one. Of several, the one with
            the least grace counts.
    """
    settings = parse_config(config)
    rows = [dict(_FIELD.findall(line)) for line in partitions.splitlines() if line.strip()]
    names = set(wanted.split(",")) if wanted else set()
    chosen = [
        row
        for row in rows
        if row.get("PartitionName") in names or (not names and row.get("Default") == "YES")
    ]
    row = min(chosen, key=lambda row: _number(row.get("GraceTime"), 0), default={})
    by_partition = settings.get("PreemptType") == _BY_PARTITION
    mode = (row if by_partition else settings).get("PreemptMode", "off")
    return Preemption(
        grace_s=_number(row.get("GraceTime"), 0),
        kill_wait_s=_number(settings.get("KillWait"), _DEFAULT_KILL_WAIT_S),
        mode=_mode(mode),
    )


def _mode(text: str) -> str:
    """Return one mode of ``GANG,SUSPEND`` and the like."""
    modes = [mode for mode in text.lower().split(",") if mode not in ("gang", "within")]
    return modes[0] if modes else "off"


def _number(text: str | None, default: int) -> int:
    m = re.match(r"\d+", text or "")
    return int(m[0]) if m else default


def parse_records(output: str) -> list[Record]:
    """Return the jobs in what ``scontrol -o show job`` printed.

    Raises:
        ValueError: a list of nodes or indices in it can not be read.
    """
    lines = [dict(_FIELD.findall(line)) for line in output.splitlines()]
    return [_record(fields) for fields in lines if "JobId" in fields]


def _record(fields: dict[str, str]) -> Record:
    excluded = fields.get("ExcNodeList", "")
    return Record(
        tuple(_names(fields)),
        fields.get("JobState", ""),
        () if excluded in _NOTHING else tuple(nodelist.expand(excluded)),
    )


def _names(fields: dict[str, str]) -> Iterator[str]:
    array, indices = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "N/A")
    if array is None:
        yield fields["JobId"]
    elif indices not in _NOTHING:
        yield from (f"{array}_{index}" for index in nodelist.expand_indices(indices)[0])
