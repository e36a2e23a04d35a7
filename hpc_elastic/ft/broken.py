"""What a process group raises, so that a caller need not read gloo's or NCCL's own texts.

    ProcessGroupError (RuntimeError)
    |- NotConfiguredError               used before `configure`, or after `shutdown`
    |- AbortedError                     somebody called `abort`; configure it again
    `- CollectiveTimeoutError (TimeoutError)   an operation, or `configure`, took too long

They are RuntimeErrors, as torch's own are, so a script that expects those needs no change.
"""

from __future__ import annotations

from hpc_elastic.errors import HpcElasticError


class ProcessGroupError(HpcElasticError, RuntimeError):
    """A process group can not do what it was asked for."""


class NotConfiguredError(ProcessGroupError):
    """The group has no members yet: call `configure` first."""


class AbortedError(ProcessGroupError):
    """The group was given up: what was pending has failed, and `configure` makes a new one."""


class CollectiveTimeoutError(ProcessGroupError, TimeoutError):
    """An operation took longer than allowed; its message names it, its group and the seconds."""
