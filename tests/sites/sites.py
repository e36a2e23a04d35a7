"""Described sites: a fake Slurm whose one command behaves as it does there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.launcher import slurm, submit
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.slurm.client import SlurmClient


@dataclass(frozen=True)
class Site:
    """A site.

    Attributes:
        commands: Each command that differs there, and what it does instead, as a shell's lines;
            ``real`` is the fake's command, ``$here`` a folder for what is to be remembered, and
            where a test puts what is to be shown.
    """

    commands: Mapping[str, str]


_CACHED = """
[ ! -e $here/empty ] || exit 0
key=$here/$(printf %s "$*" | cksum | tr ' ' -)
age=1; [ -e $here/frozen ] && age=600
[ -n "$(find "$key" -newermt "-$age seconds" 2>/dev/null)" ] || real "$@" > "$key"
cat "$key"
"""
_DENIED = """
case "$1 $4 $3" in
requeue*) echo "Requested operation is presently disabled for job $2" >&2; exit 1;;
*requeue=1*) echo "slurm_update error: Access/permission denied" >&2; exit 1;;
esac
real "$@"
"""
_BOOTS = """
real "$@" > $here/now; n=$(cat $here/n 2>/dev/null || echo 0); echo $((n+1)) > $here/n
if [ $n -lt 3 ]; then sed 's/RUNNING/CONFIGURING/' $here/now; else cat $here/now; fi
"""
_RESERVED = """
case "$*" in *reservation*) echo "ReservationName=maint StartTime=2099-01-01T00:00:00 \
EndTime=2099-01-02T00:00:00 Nodes=node4 NodeCnt=1 Flags=MAINT,SPEC_NODES State=INACTIVE";;
*) real "$@";; esac
"""
_REFUSED = """
if [ -e $here/enforced ]; then
    echo "sbatch: error: Batch job submission failed: Node count specification invalid" >&2; exit 1
fi
real "$@"
"""
TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"
MOVED = "sbatch: job_submit: moved to partition cancel"


def _says(closed: str) -> dict[str, str]:
    """Return a squeue that has this reason for what waits."""
    return {"squeue": f"real \"$@\" | sed 's/PartitionDown\\|Resources/{closed}/'"}


SITES = {
    "lost answers": Site({
        "sbatch": f'real "$@" >/dev/null; echo "sbatch: error: {TIMED_OUT}" >&2; exit 1'
    }),
    "GPUs a user": Site(_says("QOSMaxGRESPerUser")),
    "power saving": Site({
        "squeue": _BOOTS,
        "scontrol": 'if [ -e $here/power ]; then real "$@" | sed "s/\\bState=[A-Z]*/State=$(cat '
        '$here/power)/"; else real "$@"; fi',
    }),
    "job_submit talks": Site({
        "sbatch": f'echo "*** Welcome ***"; echo "{MOVED}" >&2; real --partition=cancel "$@"'
    }),
    "MinNodes": Site({**_says("PartitionNodeLimit"), "sbatch": _REFUSED}),
    "cached squeue": Site({"squeue": _CACHED}),
    "requeue denied": Site({"scontrol": _DENIED}),
    "reservations": Site({
        **_says("ReqNodeNotAvail, Reserved for maintenance"), "scontrol": _RESERVED
    }),
}  # fmt: skip
SCRIPT = """#!/bin/sh
#SBATCH --array=0-{last} --nodes=1 --exclusive --output=/dev/null
{where}sleep 300
"""


class Started:
    """Runs that were submitted at a site."""

    def __init__(self, folder: Path, runs: int, partition: str | None = None) -> None:
        settings = RunSettings(NodeRange(1, 1), 1, SlurmSettings(time="10", partition=partition))
        entry = Entry("function", "f", "f.py")
        requests = [RunRequest(folder / str(n), settings, entry) for n in range(runs)]
        plan = make_plan(requests, folder / ".hpc_elastic", max_array_size=99)
        submit.write(plan, "train")
        self.scripts = plan.scripts
        where = f"#SBATCH --partition={partition}\n" if partition else ""
        self.scripts[0].write_text(SCRIPT.format(last=runs - 1, where=where))
        self.client = SlurmClient(20, env=dict(os.environ))  # not that of the pytest process
        self.jobs = slurm.submit(plan, self.client)
        self.runs = [RunDir(run.dir) for run in plan.runs]
