"""Starts the group's attendant while torch is being imported; `manager` imports this first of all.

The attendant needs 0.1 s for imports of its own, which a replica that comes back would wait for.
Only where a Manager will want one: in rank 0 of a group that is told of a lighthouse by the
environment, and has no agent. It ends with this process, used or not.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import suppress

from hpc_elastic.ft.manager_server_process import prewarm
from hpc_elastic.ft.messages import SOCKET_ENV

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"


def wants_attendant(env: Mapping[str, str], *, is_helper: bool) -> bool:
    """Tell whether a Manager of this process would start an attendant.

    Args:
        env: The environment.
        is_helper: This is another process's helper, such as a data loader.
    """
    is_first = env.get("RANK", "0") == "0"
    return is_first and not is_helper and bool(env.get(LIGHTHOUSE_ENV)) and SOCKET_ENV not in env


if wants_attendant(os.environ, is_helper=multiprocessing.parent_process() is not None):
    with suppress(OSError):  # the Manager will say what is wrong
        prewarm()
