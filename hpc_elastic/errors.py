"""Every error that hpc_elastic raises on purpose, as one tree.

    HpcElasticError
    |- ConfigError (ValueError)          a setting is wrong; names the key and the remedy
    |  `- InexactError                   a training would not be exact, or nothing could show it
    |- SubmissionError                   the run could not be handed to the scheduler
    |  `- ScriptError                    the script that submits it has failed
    |- RunDirectoryError                 a run directory is missing, unwritable or not ours
    |  |- DamagedFileError (ValueError)  a file in it does not hold what it should
    |  `- UntrustedRunError              others may write it, or it belongs to another user
    |- LocalQueueError                   the launcher of launcher=local does not do what it is asked
    |- SlurmError
    |  |- SlurmEnvironmentError          the SLURM_* variables are absent or malformed
    |  `- SlurmCommandError              a Slurm command failed, timed out or is not installed
    |- CheckpointError
    |  |- CheckpointNotFoundError (FileNotFoundError)    there is none, or not the one asked for
    |  |- CheckpointCorruptError         what is stored is damaged
    |  |- CheckpointMismatchError        ranks differ in what is stored once for all of them
    |  `- CheckpointFencedError          the worker's group is over; another one has taken its place
    |- PermanentError                    another try would fail in the same way: the run ends
    |- WorkerGroupError                  the training itself failed; holds the failures
    |- AuthenticationError (ConnectionError)    a peer does not hold the secret (`transport.auth`)
    |
    |  per-step fault tolerance, defined in the modules of `hpc_elastic.ft` that raise them:
    |- LeftQuorumError (RuntimeError)    this replica has left, as announced
    |- DamagedStateError (RuntimeError)  a state was received only in part, for good
    |- QuorumAbortedError (RuntimeError) a member was lost, or has reported an error
    |- CheckpointBeforeLeaveError        this replica leaves once it has saved its state
    |- ManagerServerLostError (ConnectionError, RuntimeError)    the group's server has ended
    |- DivergedIslandError (FloatingPointError)    this island's parameters are not finite
    |- IslandTimeoutError (TimeoutError) no round has counted what this island has trained
    |- HealError (RuntimeError)          a peer's state could not be fetched
    |  `- HealTimeoutError (TimeoutError)
    `- ProcessGroupError (RuntimeError)  a collective between replicas failed
       |- NotConfiguredError
       |- AbortedError
       `- CollectiveTimeoutError (TimeoutError)

With torchrun, rendezvous errors are torch's own (torch.distributed.elastic.rendezvous), because
its agent acts on their types.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from hpc_elastic._util import cleaned_lines


class HpcElasticError(Exception):
    """Base of every error raised on purpose by this package.

    Its text may quote what a worker or a stranger has written to a run's files; since Python shows
    it on a terminal, it has no control characters.

    Attributes:
        remedy: What to do about it, by default about errors of its class; the text may name more.
    """

    remedy = "do what the message says; `hpc-elastic doctor` checks the cluster"

    def __init__(self, *args: object, remedy: str | None = None) -> None:
        super().__init__(*args)
        if remedy is not None:
            self.remedy = remedy

    def __str__(self) -> str:
        return cleaned_lines(super().__str__(), colours=False)

    def to_json(self) -> dict[str, str | None]:
        """Return what commands print of it with ``--json``; its code is the name of its class."""
        code, key = error_code(type(self).__name__), getattr(self, "key", None)
        return {"code": code, "message": str(self), "key": key, "remedy": self.remedy}


def error_code(name: str) -> str:
    """Return the code of a class of errors by its name, such as ``config-error`` (pure)."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


class PermanentError(HpcElasticError):
    """The training cannot go on, and another try would fail in the same way: the run ends."""


class ConfigError(HpcElasticError, ValueError):
    """A setting has a value that cannot work.

    Attributes:
        key: The dotted key as the user writes it, such as ``launcher.partition``.
        value: The value that was refused.
        remedy: What is wrong with it, and what to do.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        self.key = key
        self.value = value
        super().__init__(f"{key}={value!r}: {remedy}", remedy=remedy)


_EXACTNESS = "docs/explanation/exactness.md"


class InexactError(ConfigError):
    """A training would not be the one that was asked for, or nothing could show that it is.

    The page that the message names has what is compared, what is refused, and why.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(key, value, remedy)
        self.args = (f"{self.args[0]} ({_EXACTNESS})",)


class SubmissionError(HpcElasticError):
    """The run could not be handed to the scheduler; nothing was started."""

    remedy = "mend what the message names, and submit again"


class ScriptError(SubmissionError):
    """The script that submits has failed, or another launcher; it has printed why."""

    remedy = "mend what standard error shows, and repeat the command"

    def __init__(self, what: str, exit_code: int, reported: dict[str, str | None] | None) -> None:
        how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        super().__init__(f"{what} ended with {how}; its output is on standard error")
        self._reported = reported

    def to_json(self) -> dict[str, str | None]:
        """Return the error that its launcher has reported, if there is one."""
        return self._reported or super().to_json()


class RunDirectoryError(HpcElasticError, OSError):
    """A run directory is missing, unwritable, or was not made by hpc_elastic."""

    remedy = "mend what the message names; `hpc-elastic list` shows your runs and their states"


class DamagedFileError(RunDirectoryError, ValueError):
    """A file of a run does not hold what it should."""

    remedy = "restore the file from a copy, or submit a new run"


class UntrustedRunError(RunDirectoryError):
    """A run belongs to another user, or others may write it, so that they would decide."""

    remedy = "if you trust all users who may write to it, repeat the command with --trust"


class SlurmError(HpcElasticError):
    """Base of what goes wrong between us and Slurm."""

    remedy = "see whether Slurm answers on this host (`scontrol ping`), and repeat the command"


class SlurmEnvironmentError(SlurmError, ValueError):
    """The SLURM_* variables of this process are absent or malformed."""


class SlurmCommandError(SlurmError):
    """A Slurm command failed, timed out, or is not installed.

    Attributes:
        argv: The command line.
        exit_code: Its exit code; None if it timed out or could not be started.
        stderr: What it wrote to standard error.
    """

    def __init__(self, argv: Sequence[str], exit_code: int | None, stderr: str) -> None:
        self.argv: list[str] = list(argv)
        self.exit_code = exit_code
        self.stderr = stderr
        how = "could not be run" if exit_code is None else f"exited with {exit_code}"
        super().__init__(f"`{' '.join(argv)}` {how}: {stderr.strip()}")


class LocalQueueError(HpcElasticError):
    """The launcher of ``launcher=local`` has ended, or does not do what it is asked."""

    remedy = "call it on the launcher's host; `hpc-elastic resume` continues a run without one"


class CheckpointError(HpcElasticError):
    """Base of what goes wrong with checkpoints."""

    remedy = "`hpc-elastic checkpoints verify` lists those of a run, and what is wrong with them"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or not the one that was asked for."""


class CheckpointCorruptError(CheckpointError):
    """What is stored is damaged: truncated, changed, or never completed."""


class CheckpointMismatchError(CheckpointError):
    """Ranks have different tensors where one is stored for all: no checkpoint would be right."""

    def __init__(self, message: str) -> None:
        where = f" ({_EXACTNESS})"
        super().__init__(message.removesuffix(where) + where)  # once, if it comes from another rank


class CheckpointFencedError(CheckpointError):
    """The group that a worker belongs to is over: what it would commit must not come true."""


class WorkerGroupError(HpcElasticError):
    """The training failed and may not be restarted.

    Attributes:
        failure: The first failure as recorded in result.json (host, rank, traceback...).
        secondary_failures: Workers that died afterwards, or failed in a later attempt, in the
            same form.
    """

    def __init__(
        self,
        message: str,
        failure: dict[str, object] | None = None,
        secondary_failures: Iterable[dict[str, object]] = (),
    ) -> None:
        self.failure = failure
        self.secondary_failures: list[dict[str, object]] = list(secondary_failures)
        super().__init__(message)


def near_miss(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word closest to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
