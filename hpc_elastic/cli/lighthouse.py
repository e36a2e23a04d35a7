"""``hpc-elastic lighthouse``: a coordinator for fault-tolerant training without this launcher."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft.coordination import LighthouseOptions, open_port, serve


def lighthouse(bind: str, options: LighthouseOptions) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: ``bind`` is no ``address:port``.
        HpcElasticError: the port can not be had.
    """
    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(bind, options))
    return 0


async def _serve(bind: str, options: LighthouseOptions) -> None:
    try:
        listener, address = open_port(bind)
    except OSError as e:
        raise HpcElasticError(f"--bind {bind}: {e}") from e
    serving = asyncio.create_task(serve(listener, options))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    print(f"A lighthouse for TORCHFT_LIGHTHOUSE={address}", flush=True)
    await serving
