"""What the Manager has to know about accelerators; on a machine without one all of it is free."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current_index() -> int | None:
    """Return the index of this thread's device; None: there is none."""
    return torch.accelerator.current_device_index() if has_one() else None


def use(index: int | None) -> None:
    """Make it this thread's device, as it is the main thread's."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def has_one() -> bool:
    """Tell whether torch sees an accelerator."""
    return torch.accelerator.is_available()


def own_stream() -> torch.Stream | None:
    """Return a stream beside the main thread's for healing; None without a device."""
    return torch.Stream() if has_one() else None


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return the context in which work goes to that stream."""
    return nullcontext() if stream is None else stream


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if has_one():
        torch.accelerator.synchronize()
