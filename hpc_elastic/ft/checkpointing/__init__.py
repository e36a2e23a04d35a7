"""How a replica that is behind gets the state of its peers, from memory to memory.

`HTTPTransport` fetches over connections of its own, from several peers at once; `PGTransport`
(in `pg_transport`) sends over the process group. Neither unpickles anything.
"""

from hpc_elastic.ft.checkpointing.http_transport import HTTPTransport
from hpc_elastic.ft.checkpointing.transport import (
    CheckpointTransport,
    HealError,
    HealTimeoutError,
    UnusableStateError,
)

__all__ = [
    "CheckpointTransport",
    "HTTPTransport",
    "HealError",
    "HealTimeoutError",
    "UnusableStateError",
]
