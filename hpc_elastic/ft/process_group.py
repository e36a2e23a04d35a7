"""Process groups that can be aborted and configured again without leaving the process.

The names are torchft's. `ProcessGroupGloo` and `ProcessGroupNCCL` do the work; the others wrap or
imitate one. What a group has to do is said in `pg_base`, how it is made and aborted in
`reconfigure`. There are no groups in a subprocess (torchft's Baby*): both kinds here can be aborted
in their own process.
"""

from hpc_elastic.ft.broken import (
    AbortedError,
    CollectiveTimeoutError,
    NotConfiguredError,
    ProcessGroupError,
)
from hpc_elastic.ft.gloo import ProcessGroupGloo
from hpc_elastic.ft.nccl import ProcessGroupNCCL
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
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
]
