"""Reasons for which a task waits that no patience cures, or has ended, and what to do. Pure.

Slurm takes such a task and keeps it pending for ever, unless the site has set EnforcePartLimits.
Reasons that pass by themselves (Resources, Priority, a limit that other jobs of the user use up)
are not among them.
Source: https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

_TIME = "ask for less by launcher.time, or choose another launcher.partition"
_NODES = "ask for fewer nodes, or choose another launcher.partition"
_REMEDIES = {
    "PartitionTimeLimit": f"the partition's time limit is shorter (`sinfo -o '%P %l'`): {_TIME}",
    "PartitionNodeLimit": f"the partition does not give that many nodes to one job: {_NODES}",
    "PartitionConfig": "the partition's nodes are fewer, or smaller, than what is asked for "
    "(`sinfo -o '%P %D %c %m %G'`): ask for less, or choose another launcher.partition",
    "PartitionDown": "the partition is down: choose another launcher.partition, or ask the site",
    "PartitionInactive": "the partition is off: choose another launcher.partition, or ask the site",
    "AssocMaxWallDurationPerJobLimit": f"your account's time limit is shorter: {_TIME}",
    "QOSMaxWallDurationPerJobLimit": f"the time limit of the QOS is shorter: {_TIME}",
    "AssocMaxNodePerJobLimit": f"your account gets fewer nodes for one job: {_NODES}",
    "QOSMaxNodePerJobLimit": f"the QOS gives fewer nodes to one job: {_NODES}",
    "InvalidAccount": "the account is not yours any more: set launcher.account",
    "InvalidQOS": "the QOS is not one that you may use: set launcher.qos",
    "BadConstraints": "no node has what launcher.constraint asks for (`sinfo -o '%N %f'`), or the "
    "task avoids those that have (ExcNodeList in `scontrol show job`)",
    "launch failed requeued held": "its node could not start it and takes no more jobs: `sinfo -R` "
    "says why; if that is not the prolog, which is the admin's, `scontrol release` lets it go",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "job requeued in held state": "it was requeued to be held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask the site",
}


_LOG = "the task's log says why"
_OF_ENDS = {
    "JobLaunchFailure": "its node could not start it: the folder of its log, or Slurm's own, can "
    "not be written there, say. `sinfo -R` and slurmd's log on the node tell more",
    "NonZeroExitCode": f"{_LOG}; a line of launcher.setup, or Python's environment, may not work "
    "there",
    "OutOfMemory": "it took more memory than it has: ask for more, by launcher.mem",
    "OUT_OF_MEMORY": "it took more memory than it has: ask for more, by launcher.mem",
    "BOOT_FAIL": "its node could not be booted: `sinfo -R` says why",
    "FAILED": _LOG,
}


def remedy_of_end(reason: str, state: str) -> str | None:
    """Return what to do about a task that ended by itself before it joined; None if unknown."""
    return _OF_ENDS.get(reason) or _OF_ENDS.get(state)


def remedy(reason: str) -> str | None:
    """Return what to do about a task that waits for this reason; None if it may yet start."""
    return _REMEDIES.get(reason.replace("_", " "))  # as some releases write blanks
