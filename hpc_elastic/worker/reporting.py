"""Reports of a worker to its agent, on its shared page.

Scripts call `report`, `mark_checkpoint` and `log_run_metrics`; the rest is for this package's own
parts, a `Checkpointer` above all. Outside a run they do nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from hpc_elastic.errors import ConfigError
from hpc_elastic.worker import shared_page
from hpc_elastic.worker.shared_page import SharedPage

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,40}")
_FIELDS = ("step", "loss", "samples", "total_steps")
"""Arguments of `report` that are no metrics."""


class _Reporter:
    """What this worker has reported; its page is opened on first use."""

    page: SharedPage | None = None
    opened = False
    by_user = False
    save_is_last = False
    is_full = False
    """Whether there was no room for a metric."""

    def __init__(self) -> None:
        self.when_returned: list[Callable[[], object]] = []
        self.names = set[str]()
        """Checked names of metrics."""


_reporter = _Reporter()


def own_page() -> SharedPage | None:
    """Return this worker's page; None outside a run."""
    if not _reporter.opened:
        _reporter.opened = True
        directory = os.environ.get(shared_page.DIRECTORY_VARIABLE)
        if directory is not None:
            _reporter.page = SharedPage.of(Path(directory), int(os.environ["LOCAL_RANK"]))
    return _reporter.page


def report(
    *,
    step: int | None = None,
    loss: SupportsFloat | None = None,
    samples: int | None = None,
    total_steps: int | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Publish this worker's progress to the live display and the run's status.

    May be called by any rank as often as it likes; outside a run it does nothing. The first rank's
    loss is the one shown. Every call is a sign of life, also with nothing new in it: where a
    validation or the like takes longer than `launcher.agent.hang_timeout_s`, call it now and then.

    Args:
        step: Optimizer steps done, at least 0. Without it the steps are counted by a hook on
            torch's optimizers.
        loss: The last loss. A tensor on a GPU is synchronised with: pass one every few steps.
        samples: Samples seen so far, at least 0.
        total_steps: The step at which the training will be done, at least 1. With it, a late node
            is admitted only if what remains repays the restart.
        **metrics: Values of the script's own, such as ``lr=0.1`` or ``**{"val/accuracy": 0.9}``;
            those of the first rank are shown over time. Up to 16 names of letters, digits and
            ``_./-``, 1 to 40 of them each; any further names are left out, with a warning.

    Raises:
        ConfigError: A metric has another name.
    """
    page = own_page()
    if metrics:
        _require_names(metrics)
        if page is not None and not page.report_metrics(metrics) and not _reporter.is_full:
            _reporter.is_full = True
            _log.warning(
                "report(%s=...): only the first %d metrics are shown over time",
                list(metrics)[-1], shared_page.MOST_METRICS,
            )  # fmt: skip
    if step is not None and not _reporter.by_user:
        _reporter.by_user = True
        if page is not None:
            page.set_explicit_steps()
    if page is not None:
        page.report(step, loss, samples, total_steps)


def report_logged(values: Mapping[str, Any]) -> None:
    """Publish what a framework logs, as far as it is numbers under names that metrics may have."""
    metrics: dict[str, Any] = {
        name: value
        for name, value in values.items()
        if name not in _FIELDS and isinstance(value, SupportsFloat) and _NAME.fullmatch(name)
    }
    report(**metrics)


def _require_names(metrics: Mapping[str, object]) -> None:
    for name in metrics.keys() - _reporter.names:
        if not _NAME.fullmatch(name):
            remedy = "a metric's name has 1 to 40 letters, digits, '_', '.', '/' and '-'"
            raise ConfigError("report(**metrics)", name, remedy)
        _reporter.names.add(name)


def report_counted(number: int) -> None:
    """Publish the n-th step of this worker, unless the script reports its steps itself."""
    page = None if _reporter.by_user else own_page()
    if page is not None:
        page.report_counted_step(number)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Publish, for as long as the context lasts, that this worker does something that takes long.

    It does not count as hung then. Checkpoints use it; other scripts `report` now and then.
    """
    page, since = own_page(), time.monotonic()
    if page is not None:
        page.set_busy(1)
    try:
        yield
    finally:
        if page is not None:
            page.set_busy(-1, time.monotonic() - since)


def save_is_last(yes: bool) -> None:
    """Set whether the checkpoint due now is the last copy of the state: no holder of it stays."""
    _reporter.save_is_last = yes


def save_is_urgent(step: int) -> bool:
    """Return whether the checkpoint of a step has to be committed before anything else is done.

    The group changes there, or this worker's node is left and the state with it. The same on all
    ranks.
    """
    page = own_page()
    return _reporter.save_is_last or (page is not None and page.changes_group_at(step))


def when_returned(then: Callable[[], object]) -> None:
    """Have something done once the user's function has returned in this worker."""
    _reporter.when_returned.append(then)


def function_returned() -> None:
    """Do what `when_returned` was asked for, then publish the return; the worker calls it, once.

    It is the only sign of success: see `agent.worker_failures.has_succeeded`.
    """
    while _reporter.when_returned:
        _reporter.when_returned.pop()()
    page = own_page()
    if page is not None:
        page.report_return()


def mark_checkpoint(*, step: int) -> None:
    """Mark the checkpoint of a step as complete: a good moment for the group to change.

    Every rank calls it, after each checkpoint, before the next step. It returns at once, unless
    nodes wait to join or are to leave: then it stays until the group is stopped, so that no later
    step is made that would be lost. Outside a run it does nothing.

    Args:
        step: Optimizer steps that the checkpoint holds, at least 0.
    """
    page = own_page()
    if page is not None and not page.pause_at(step):
        paused_s = shared_page.LONGEST_PAUSE_S
        _log.warning(
            "the group did not change within %g s at the checkpoint of step %d; the training "
            "continues", paused_s, step
        )  # fmt: skip


def run_scalars() -> dict[str, float]:
    """Return what is known of this worker's run; empty outside a run.

    Returns:
        ``restarts`` spent on workers' failures; ``round``: how often the group was formed;
        ``world_size``; and, once known, ``goodput``: the share of the time since this node's task
        was started in which steps were made that had not been made before.
    """
    page = own_page()
    if page is None:
        return {}
    scalars = {
        "restarts": float(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "round": float(os.environ.get("HPC_ELASTIC_ROUND", 0)),
        "world_size": float(os.environ.get("WORLD_SIZE", 1)),
    }
    goodput = page.goodput
    return scalars if goodput is None else {**scalars, "goodput": goodput}


def log_run_metrics(writer: Any, step: int) -> None:
    """Write the run's scalars, as ``hpc_elastic/restarts`` and so on, for an experiment tracker.

    Every rank may call it, as often as the script wants; rank 0 writes. Outside a run it does
    nothing.

    Args:
        writer: TensorBoard's ``SummaryWriter`` or what has its ``add_scalar(tag, value, step)``;
            an MLflow run of `hpc_elastic.integrations.mlflow`, or the module ``mlflow``; or a W&B
            run or what has its ``log(values, step=...)``.
        step: Optimizer steps done, at least 0.

    Raises:
        TypeError: the writer has none of these methods.
    """
    methods = [name for name in ("add_scalar", "log_metrics", "log") if hasattr(writer, name)]
    if not methods:
        raise TypeError(
            f"writer={type(writer).__name__}: needs add_scalar, as a SummaryWriter, "
            "log_metrics, as MLflow, or log, as a W&B run"
        )
    scalars = {f"hpc_elastic/{name}": value for name, value in run_scalars().items()}
    if os.environ.get("RANK", "0") != "0" or not scalars:
        return
    if methods[0] == "add_scalar":
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    else:
        getattr(writer, methods[0])(scalars, step=step)
