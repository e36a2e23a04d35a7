"""``hpc-elastic lighthouse``: the quorum of fault-tolerant training without this launcher."""

from __future__ import annotations

from contextlib import suppress

import click

from hpc_elastic.errors import HpcElasticError

_PORT = 29510


@click.command(epilog="\b\nExample:\n  hpc-elastic lighthouse --min-replicas 2")
@click.option(
    "--bind", metavar="ADDRESS:PORT",
    help=f"Where it listens; by default port {_PORT} of the address by which other nodes reach "
    "this one.",
)  # fmt: skip
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
def lighthouse_command(bind: str | None, **options: int) -> int:
    """Serve the quorum of hpc_elastic.ft to Managers that this launcher has not started.

    They find its address in TORCHFT_LIGHTHOUSE. It can be killed and started again at any time.
    """
    import asyncio

    with suppress(asyncio.CancelledError):  # SIGINT or SIGTERM
        asyncio.run(_serve(bind, options))
    return 0


async def _serve(bind: str | None, options: dict[str, int]) -> None:
    import asyncio
    import signal

    from hpc_elastic.ft.coordination import LighthouseOptions, open_port, serve

    try:
        listener, address = open_port(bind, _PORT)
    except OSError as e:
        raise HpcElasticError(f"--bind {bind or _PORT}: {e}") from e
    serving = asyncio.create_task(serve(listener, LighthouseOptions(**options)))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    print(f"A lighthouse for TORCHFT_LIGHTHOUSE={address}", flush=True)
    await serving
