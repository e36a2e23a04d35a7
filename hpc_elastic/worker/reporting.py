"""Reports of a worker to its agent, on its shared page.

Scripts call `report`, `mark_checkpoint` and `log_run_metrics`; the rest is for this package's own
parts, a `Checkpointer` above all. Outside a run they do nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, SupportsFloat

from hpc_elastic.errors import PermanentError
from hpc_elastic.worker import shared_page
from hpc_elastic.worker.shared_page import SharedPage

_log = logging.getLogger(__name__)

_may_be_named = lru_cache(64)(re.compile(r"[A-Za-z0-9_./-]{1,40}").fullmatch)
_COUNTS = {"step": 0, "samples": 0, "total_steps": 1}
"""Arguments of `report` that are whole numbers, with the least of each."""
_MOST = 2**63 - 1  # the largest number that fits on the page


class _CopiesFromGpu:
    """Numbers that are on their way from a GPU, oldest first: no report waits for them."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[str, Any, Any]] = deque()

    def begin_copy(self, key: str, value: Any) -> bool:
        """Begin to copy a value on a GPU to the host; return False if it is no number."""
        if key in _COUNTS or value.numel() != 1:
            return False
        torch: Any = sys.modules["torch"]
        with torch.cuda.device(value.device):
            there, copied = value.detach().to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()
        self._under_way.append((key, there, copied))
        return True

    def publish(self, page: SharedPage, *, wait: bool = False) -> None:
        """Publish those that have arrived; all of them, with ``wait``."""
        while self._under_way and (wait or self._under_way[0][2].query()):
            key, there, copied = self._under_way.popleft()
            copied.synchronize()
            _publish(page, {key: there})


class _Reporter:
    """What this worker has reported; its page is opened on first use."""

    page: SharedPage | None = None
    opened = False
    by_user = False
    save_is_last = False
    stops_on_bad_loss = False
    is_full = False  # whether there was no room for a metric
    restored: int | None = None
    """The step of the last checkpoint that was restored; None if there is none."""

    def __init__(self) -> None:
        self.when_returned: list[Callable[[], object]] = []
        self.copies = _CopiesFromGpu()
        self.seen = set[str]()  # keys that were reported before
        self.left_out = set[str]()  # keys with a value that was left out, and named in a warning


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

    Only with ``launcher.on_bad_loss=stop`` does a report end the training. A value that cannot be
    published is left out, with one warning for each key, outside a run as well.

    Args:
        step: Optimizer steps done, at least 0. Without it the steps are counted by a hook on
            torch's optimizers.
        loss: The last loss. A tensor on a GPU (and so a metric) is copied without waiting for the
            GPU; its value is published, and judged, by a later report or at the function's return.
        samples: Samples seen so far, at least 0.
        total_steps: The step at which the training will be done, at least 1. With it, a late node
            is admitted only if what remains repays the restart.
        **metrics: Values of the script's own, such as ``lr=0.1`` or ``**{"val/accuracy": 0.9}``;
            those of the first rank are shown over time. Up to 16 names of letters, digits and
            ``_./-``, 1 to 40 of them each.

    Raises:
        PermanentError: The loss is not finite, and ``launcher.on_bad_loss=stop``: the run ends.
    """
    page = own_page()
    named = (("step", step), ("samples", samples), ("total_steps", total_steps), ("loss", loss))
    given = metrics | {key: value for key, value in named if value is not None}
    if page is None:  # each key is checked once: a tensor on a GPU is waited for
        given = {key: given[key] for key in given.keys() - _reporter.seen}
        _reporter.seen.update(given)
    else:
        copies = _reporter.copies
        copies.publish(page)
        given = {
            key: value for key, value in given.items()
            if not (getattr(value, "is_cuda", False) and copies.begin_copy(key, value))
        }  # fmt: skip
    _publish(page, given)


def _publish(page: SharedPage | None, given: Mapping[str, SupportsFloat]) -> None:
    usable: dict[str, Any] = {
        key: value for key in given if (value := _usable(key, given[key])) is not None
    }
    if page is None:
        return
    step, samples, total_steps, loss = (
        usable.pop("step", None), usable.pop("samples", None), usable.pop("total_steps", None),
        usable.pop("loss", None),
    )  # fmt: skip
    if usable and not page.report_metrics(usable) and not _reporter.is_full:
        _reporter.is_full = True
        _log.warning(
            "report(%s=...): only the first %d metrics are shown over time",
            list(usable)[-1], shared_page.MOST_METRICS,
        )  # fmt: skip
    if step is not None and not _reporter.by_user:
        _reporter.by_user = True
        page.set_explicit_steps()
    page.report(step, loss, samples, total_steps)
    if loss is not None and not math.isfinite(loss) and _reporter.stops_on_bad_loss:
        raise PermanentError(
            f"the loss is {loss} at step {page.read().bad_step} (on_bad_loss=stop)"
        )


def set_bad_loss_policy(*, stop: bool) -> None:
    """Set whether `report` ends the run at a loss that is not finite; the worker calls it."""
    _reporter.stops_on_bad_loss = stop


def report_logged(values: Mapping[str, Any]) -> None:
    """Publish what a framework logs, as far as it is numbers under names that metrics may have."""
    known = {*_COUNTS, "loss"}
    metrics: dict[str, Any] = {
        name: value for name, value in values.items()
        if name not in known and isinstance(value, SupportsFloat) and _may_be_named(name)
    }  # fmt: skip
    report(**metrics)


def _usable(key: str, value: object) -> float | None:
    """Return a value as the page takes it; None, with a warning at the first time, if it cannot."""
    try:
        if key in _COUNTS:
            return _whole_number(value, _COUNTS[key])
        if key != "loss" and not _may_be_named(key):
            raise ValueError("name it with 1 to 40 letters, digits, '_', '.', '/' and '-'")
        return _number(value)
    except ValueError as e:
        if key not in _reporter.left_out:
            _reporter.left_out.add(key)
            shown = " ".join(f"{value!r}".split())[:60]
            _log.warning("%s=%s is left out of the reports of this worker: %s", key, shown, e)
        return None


def _whole_number(value: Any, least: int) -> int:
    if type(value) is int and least <= value <= _MOST:  # the usual case, at each step
        return value
    try:
        number = int(value) if float(value).is_integer() else operator.index(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = -1
    if isinstance(value, str) or not least <= number <= _MOST:
        raise ValueError(f"give a whole number, at least {least}")
    return number


def _number(value: Any) -> float:
    """Return a value as a number, without torch's warning about a tensor that has a graph."""
    try:
        if not hasattr(type(value), "__float__"):  # isinstance(SupportsFloat), and ten times faster
            raise TypeError
        return float(value.item() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError("give one number") from None


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
    """Call what was registered by `when_returned`, then publish the return.

    The worker calls it, once. It is the only sign of success (`agent.elastic_agent`): exit codes
    are none.
    """
    while _reporter.when_returned:
        _reporter.when_returned.pop()()
    page = own_page()
    if page is not None:
        _reporter.copies.publish(page, wait=True)
        page.report_return()


def note_restored(step: int) -> None:
    """Record that this process goes on from a checkpoint (0: from none), also outside of a run.

    A sampler that trains afterwards needs a state that was loaded, too (`ElasticSampler`).
    """
    _reporter.restored = step


def restored_step() -> int | None:
    """Return the step of `note_restored`; None if this process began from the start."""
    return _reporter.restored


def mark_checkpoint(*, step: int) -> None:
    """Mark the checkpoint of a step as complete: a good moment for the group to change.

    Every rank calls it, after each checkpoint, before the next step. It returns at once, unless
    nodes wait to join or are to leave: then it stays until the group is stopped, so that no later
    step is made that would be lost. Outside a run it does nothing.

    Args:
        step: Optimizer steps that the checkpoint holds, at least 0.
    """
    page, known = own_page(), _usable("step", step)
    if page is not None and known is not None and not page.pause_at(int(known)):
        paused_s = shared_page.LONGEST_PAUSE_S
        _log.warning(
            "the group did not change within %g s at the checkpoint of step %d; the training "
            "continues", paused_s, step
        )  # fmt: skip


def run_scalars() -> dict[str, float]:
    """Return what is known of this worker's run; empty outside a run.

    ``restarts`` spent on workers' failures; ``round``: how often the group was formed;
    ``world_size``; and, once known, ``goodput``: the share of the time since this node's task was
    started in which steps were made that had not been made before.
    """
    page = own_page()
    if page is None:
        return {}
    scalars = {
        "restarts": float(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "round": float(os.environ.get(shared_page.ROUND_VARIABLE, 0)),
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
    known = _usable("step", step)
    if os.environ.get("RANK", "0") != "0" or not scalars or known is None:
        return
    if methods[0] == "add_scalar":
        for name, value in scalars.items():
            writer.add_scalar(name, value, int(known))
    else:
        getattr(writer, methods[0])(scalars, step=int(known))
