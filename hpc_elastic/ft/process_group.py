"""Process groups that can be aborted and configured again without leaving the process.

The names are torchft's. `ProcessGroupGloo` and `ProcessGroupNCCL` do the work; the others wrap or
imitate one. What a group has to do is said in `pg_base`, how it is made and aborted in
`reconfigure`. There are no groups in a subprocess (torchft's Baby*): both kinds here can be aborted
in their own process.
"""

from __future__ import annotations

import importlib
from typing import Any

from hpc_elastic.ft.broken import (
    AbortedError,
    CollectiveTimeoutError,
    NotConfiguredError,
    ProcessGroupError,
)
from hpc_elastic.ft.pg_base import ProcessGroup
from hpc_elastic.ft.pg_dummy import ProcessGroupDummy
from hpc_elastic.ft.pg_wrapper import ProcessGroupWrapper
from hpc_elastic.ft.swallow import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
)

__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "NotConfiguredError",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",  # noqa: F822 - by __getattr__
    "ProcessGroupNCCL",  # noqa: F822 - by __getattr__
    "ProcessGroupWrapper",
]

_BACKENDS = {"ProcessGroupGloo": "hpc_elastic.ft.gloo", "ProcessGroupNCCL": "hpc_elastic.ft.nccl"}


def __getattr__(name: str) -> Any:
    """Import a backend at its first use: torchft has them here, and they are built on this."""
    if name not in _BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_BACKENDS[name]), name)
