"""``hpc-elastic report --live``: the pages of runs in a browser, as they are now."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError, RunDirectoryError
from hpc_elastic.run import registry

_PORT, _NUM_PORTS = 8672, 50


def serve_pages(
    runs: Sequence[Path], *, everything: bool, control: bool, as_json: bool, port: int | None
) -> None:
    """Print the URL of the pages of runs, or of all, and serve them until SIGINT or SIGTERM."""
    if everything == bool(runs):
        raise click.UsageError("give RUN, or --all (and not both)")
    try:
        from hpc_elastic.report.page import charts_script
        from hpc_elastic_watch.live_pages import application
        from hpc_elastic_watch.live_server import serve
    except ImportError as e:
        remedy = "pip install 'hpc_elastic[watch]'"
        raise click.ClickException(f"--live needs starlette and uvicorn ({e}): {remedy}") from e
    from hpc_elastic_watch.live_runs import LiveRuns

    charts_script()  # refuses now, if the library is missing
    token = secrets.token_urlsafe(32)
    with listen(port) as listener, LiveRuns(_finder(runs)) as live:
        app = application(live, token, control=control)
        number = listener.getsockname()[1]
        url = f"http://127.0.0.1:{number}/?token={token}"
        forward = f"ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}"
        told = {"url": url, "port": number, "forward": forward}
        text = f"{url}\nfrom another machine, first: {forward}"
        print(json.dumps(told) if as_json else text, flush=True)
        serve(app, listener, live.close)


def listen(port: int | None) -> socket.socket:
    """Return a listening socket of 127.0.0.1, by default on the usual port or the next free one.

    Raises HpcElasticError if the port is not free.
    """
    ports = range(_PORT, _PORT + _NUM_PORTS) if port is None else (port,)
    for number in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
            listener.listen(128)
        except OSError as e:
            listener.close()
            error = e
            continue
        return listener
    raise HpcElasticError(f"--port {ports[-1]}: {error.strerror}: give another port") from error


def _finder(given: Sequence[Path]) -> Callable[[], list[Path]]:
    """Return a function that lists the directories of runs: those given, or all if none is."""

    def find() -> list[Path]:
        if not given:
            return [run.path for run in registry.newest_first()]
        found = dict[Path, None]()
        for path in given:
            found |= dict.fromkeys(_runs_below(path) if options.is_sweep(path) else [path])
        return list(found)

    if not find():
        what = "the directory of a sweep holds no run" if given else "no run was submitted yet"
        raise RunDirectoryError(f"{what}; give a run directory, or an id of `hpc-elastic list`")
    return find


def _runs_below(sweep: Path) -> list[Path]:
    def order(run: Path) -> tuple[int, str]:
        return (int(run.name) if run.name.isdecimal() else 0, run.name)

    return sorted(options.runs_below(sweep), key=order)
