"""``hpc-elastic lighthouse``: the quorum of fault-tolerant training without this launcher."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import click

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft.coordination import LighthouseOptions, open_port, serve


@click.command(
    epilog="\b\nExample:\n  hpc-elastic lighthouse --bind 0.0.0.0:29510 --min-replicas 2"
)
@click.option("--bind", default="0.0.0.0:29510", show_default=True, metavar="ADDRESS:PORT")
@click.option("--min-replicas", default=1, show_default=True, help="Fewest members of a quorum.")
@click.option(
    "--join-timeout-ms", default=100, show_default=True,
    help="Longest wait for replicas that have not joined yet.",
)  # fmt: skip
@click.option(
    "--quorum-tick-ms", default=100, show_default=True,
    help="Interval between two checks of the time-outs.",
)  # fmt: skip
@click.option(
    "--heartbeat-timeout-ms", default=5000, show_default=True,
    help="A replica without a heartbeat for longer is lost.",
)  # fmt: skip
def lighthouse_command(bind: str, **options: int) -> int:
    """Serve the quorum of hpc_elastic.ft to Managers that this launcher has not started.

    They find its address in TORCHFT_LIGHTHOUSE. It can be killed and started again at any time.
    """
    with suppress(asyncio.CancelledError):  # SIGINT or SIGTERM
        asyncio.run(_serve(bind, LighthouseOptions(**options)))
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
