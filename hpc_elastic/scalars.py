"""What a run came through, as scalars beside the loss: for TensorBoard, W&B, or the like.

    from hpc_elastic import log_run_scalars

    if step % 50 == 0:
        log_run_scalars(writer, step)  # every rank may call it; rank 0 writes

Nothing is looked for or patched: the script says where to, and how often.
"""

from __future__ import annotations

import os
from typing import Any

from hpc_elastic.reports import own_page

_PREFIX = "hpc_elastic/"


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


def log_run_scalars(writer: Any, step: int) -> None:
    """Write the run's scalars, as ``hpc_elastic/restarts`` and so on (rank 0; others do nothing).

    Outside a run it does nothing.

    Args:
        writer: TensorBoard's ``SummaryWriter`` or what has its ``add_scalar(tag, value, step)``;
            or a W&B run or what has its ``log(values, step=...)``.
        step: Optimizer steps done, at least 0.

    Raises:
        TypeError: the writer has neither.
    """
    if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
        kind = type(writer).__name__
        raise TypeError(
            f"writer={kind}: needs add_scalar, as a SummaryWriter, or log, as a W&B run"
        )
    if os.environ.get("RANK", "0") != "0":
        return
    scalars = {_PREFIX + name: value for name, value in run_scalars().items()}
    if hasattr(writer, "add_scalar"):
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    elif scalars:
        writer.log(scalars, step=step)
