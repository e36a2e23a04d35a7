"""The pages of `hpc-elastic report --live`, as an ASGI application.

Other users of a login node reach its ports, and so does each page that the user's browser shows. So
a request needs a token, which is in the printed URL and then in a cookie that scripts cannot read;
its Host must be this machine itself, so that no foreign name resolves to it; no other page may have
caused it; and a command needs `--control` and the Origin of these pages. Browsers send a cookie to
all ports of a machine, where somebody else may listen, but not to another path: all pages are below
a secret one. Pages name runs by number and never a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpc_elastic._util import cleaned
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report import log_files, page
from hpc_elastic.report.log_files import LogLine, LogSource
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.log_index import Index
from hpc_elastic_watch.live_runs import LiveRun, LiveRuns

_COOKIE = "hpc_elastic_watch"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_ALIVE_S = 15.0  # interval of messages by which a stream finds out that its reader is gone
_LOGS_S = 1.0
_NUM_LINES, _MOST_LINES = 400, 2000  # lines of one answer, and of what was written in a second
_TIME_STEP_S = 0.001  # resolution of the times that pages have
_LONGEST_LINE = 4000
_SEARCH_S = 20.0
_COMMAND_S = 600.0
_LONGEST_BODY = 10_000

_HEADERS = (
    ("content-security-policy",
     "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
     "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)  # fmt: skip


def application(runs: LiveRuns, token: str, *, control: bool) -> ASGIApp:
    """Return the application; the caller starts and ends the thread of ``runs``.

    ``token`` is the secret of the printed URL. With ``control``, pages may cancel and resume runs,
    and take nodes from them.
    """
    root = "/" + hashlib.sha256(token.encode()).hexdigest()[:16]
    pages = _Pages(runs, root, control=control)
    routes = [
        Route("/", pages.show),
        Route("/runs/{number:int}", pages.show),
        Route("/news", pages.news),
        Route("/runs/{number:int}/news", pages.news),
        Route("/runs/{number:int}/report", pages.report),
        Route("/runs/{number:int}/logs", pages.logs),
        Route("/runs/{number:int}/logs/new", pages.new_logs),
        Route("/runs/{number:int}/control", pages.control, methods=["POST"]),
        Route("/assets/{name}", pages.asset),
    ]
    mounted = [Mount(root, routes=routes)]
    app = Starlette(routes=mounted, middleware=[Middleware(GZipMiddleware)])
    return _Guard(app, token, root)


class _Guard:
    """Refuses requests without the token, from foreign names, and of foreign pages."""

    def __init__(self, app: ASGIApp, token: str, root: str) -> None:
        self._app = app
        self._token = token.encode()
        self._root, self._assets = root, f"{root}/assets/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_asset = message["status"] == 200 and scope["path"].startswith(self._assets)
                cached = "private, max-age=86400" if is_asset else "no-store"
                own = [(k.encode(), v.encode()) for k, v in (*_HEADERS, ("cache-control", cached))]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        refused = self._refusal(scope, headers)
        response: ASGIApp = self._app if refused is None else refused
        await response(scope, receive, send_safely)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        host = headers.get("host", "")
        if re.sub(r":\d+$", "", host) not in _HOSTS:
            return _refused("these pages are served at http://127.0.0.1 and http://localhost only")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given is not None and scope["method"] == "GET" and self._is_token(given[0]):
            path = scope["path"].removeprefix(self._root).lstrip("/")
            response = Response(None, 303, {"location": f"{self._root}/{quote(path)}"})
            response.set_cookie(
                _COOKIE, self._token.decode(), path=self._root, httponly=True, samesite="strict"
            )
            return response
        if not self._is_token(_cookie_in(headers.get("cookie", ""))):
            return _refused(
                "open the whole URL that hpc-elastic report --live has printed, with its token"
            )
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refused("other pages cannot use these")
        changes = scope["method"] not in ("GET", "HEAD")
        if changes and headers.get("origin") != f"http://{host}":
            return _refused("commands are taken from these pages only")
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token)


def _refused(why: str) -> Response:
    """Return an answer after which the connection is closed, however much of its body comes."""
    return PlainTextResponse(f"403: {why}\n", 403, {"connection": "close"})


def _cookie_in(header: str) -> str:
    """Return the value of our cookie, in linear time: some Pythons' own parser is quadratic."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for name, _, value in pairs if name == _COOKIE), "")


class _Pages:
    def __init__(self, runs: LiveRuns, root: str, *, control: bool) -> None:
        self._runs = runs
        self._root = root
        self._control = control
        self._tag = secrets.token_hex(4)
        """Part of the URLs of scripts and styles, which browsers keep: another one each time."""

    def _run(self, request: Request) -> LiveRun | None:
        number = request.path_params.get("number")
        return None if number is None else self._runs.get(number)

    async def show(self, request: Request) -> Response:
        """Return the shell of a page; its content comes by `news`."""
        run = self._run(request)
        if run is None and "number" in request.path_params:
            return _missing()
        if run is None and len(self._runs) == 1:
            return RedirectResponse(f"{self._root}/runs/0", 303)
        text = live_page(
            run=None if run is None else run.number, control=self._control,
            is_alone=len(self._runs) == 1, root=self._root, tag=self._tag,
        )  # fmt: skip
        return Response(text, media_type="text/html")

    async def asset(self, request: Request) -> Response:
        make = _ASSETS.get(request.path_params["name"])
        if make is None:
            return _missing()
        content, kind = await run_in_threadpool(make)
        return Response(content, media_type=kind)

    async def news(self, request: Request) -> Response:
        """Return the stream of changes of all runs, or of one; see `LiveRuns.news`."""
        run = self._run(request)
        if run is None and "number" in request.path_params:
            return _missing()

        async def stream() -> AsyncIterator[str]:
            wake, loop = asyncio.Event(), asyncio.get_running_loop()

            def awaken() -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(wake.set)

            with self._runs.viewer(run, awaken):
                seen = -1
                while not self._runs.is_closed:
                    wake.clear()
                    seen, news = self._runs.news(seen, run)
                    yield _event(news)
                    try:
                        await asyncio.wait_for(wake.wait(), _ALIVE_S)
                    except TimeoutError:
                        yield ": alive\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def report(self, request: Request) -> Response:
        run = self._run(request)
        if run is None or run.page is None:
            return _missing()
        made = run.page
        text = await run_in_threadpool(json.dumps, {"html": made.html, "charts": made.charts})
        return Response(text, media_type="application/json")

    # ---- logs

    async def logs(self, request: Request) -> Response:
        """Return lines before those that a page has."""
        run = self._run(request)
        if run is None:
            return _missing()
        try:
            found = await run_in_threadpool(_LogQuery.of(request).older, run)
        except (HpcElasticError, OSError, ValueError) as e:
            return JSONResponse({"error": str(e)}, 400)
        return JSONResponse(found)

    async def new_logs(self, request: Request) -> Response:
        """Return the stream of the last lines, and of those that are written from now on."""
        run = self._run(request)
        if run is None:
            return _missing()
        query = _LogQuery.of(request)

        async def stream() -> AsyncIterator[str]:
            try:
                follower, first = await run_in_threadpool(query.follow, run)
            except (HpcElasticError, OSError) as e:
                yield _event({"error": str(e)})
                return
            yield _event(first)
            idle_s = 0.0
            while not self._runs.is_closed:
                await asyncio.sleep(_LOGS_S)
                lines = await run_in_threadpool(follower.poll)
                idle_s = 0.0 if lines else idle_s + _LOGS_S
                if lines:
                    yield _event({"lines": [_line(line) for line in lines[-_MOST_LINES:]],
                                  "left_out": max(0, len(lines) - _MOST_LINES)})  # fmt: skip
                elif idle_s % _ALIVE_S == 0:
                    yield ": alive\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    # ---- commands

    async def control(self, request: Request) -> Response:
        """Run one of the commands that change a run, and return its output."""
        run = self._run(request)
        if run is None:
            return _missing()
        if not self._control:
            text = "these pages are read-only: start hpc-elastic report --live --control"
            return JSONResponse({"error": text}, 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_BODY:
                return JSONResponse({"error": "the request is too long"}, 413)
        try:
            argv = command_line(str(run.path), json.loads(body))
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            return JSONResponse({"error": f"no such command: {e}"}, 400)
        # a process of its own: `resume` of a local run forks, which this process may not
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "hpc_elastic", *argv, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _COMMAND_S)
        except TimeoutError:
            process.kill()
            return JSONResponse({"error": f"no answer after {_COMMAND_S:g} s"}, 504)
        text = output.decode(errors="replace").strip()
        return JSONResponse({"output": text, "exit_code": process.returncode})


def command_line(run: str, request: dict[str, Any]) -> list[str]:
    """Return the arguments of a command that a page asks for (pure).

    The request has ``command``: ``cancel``, ``resume``, ``preempt`` or ``kill``; ``node`` for the
    last two; ``nodes`` for ``resume``, such as ``2:4``, or empty. Raises ValueError for any other.
    """
    match request:
        case {"command": "cancel"}:
            return ["cancel", run, "--yes"]
        case {"command": "resume", "nodes": str(nodes)} if not nodes.strip("0123456789:"):
            return ["resume", run, *([f"nodes={nodes}"] if nodes else [])]
        case {"command": "preempt" | "kill" as command, "node": str(node)} if (
            node and not node.startswith("-")
        ):
            return ["node", command, run, node]
    raise ValueError("cancel, resume with nodes, or preempt or kill with a node is needed")


def _missing() -> Response:
    return PlainTextResponse("404: there is no such run or file\n", 404)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


# ---- logs


class _LogQuery:
    """Lines that a page asks for; ``text`` is what a line contains, in any case.

    ``before`` are the Unix seconds of the first line that the page has, and its number of lines of
    that time; None if it has none.
    """

    def __init__(
        self, selection: log_files.Selection, text: str, before: tuple[float, int] | None
    ) -> None:
        self._selection = selection
        self._text = text.lower()
        self._before = before

    @classmethod
    def of(cls, request: Request) -> _LogQuery:
        """Return the query of a request; an invalid rank or time selects all."""
        given = request.query_params
        rank, before, seen = (given.get(name, "") for name in ("rank", "before", "seen"))
        ranks = frozenset([int(rank)] if rank.isdecimal() else ())
        selection = log_files.Selection(ranks=ranks, agents=given.get("agents") == "1")
        with suppress(ValueError):
            return cls(selection, given.get("text", ""), (float(before), int(seen)))
        return cls(selection, given.get("text", ""), None)

    def follow(self, run: LiveRun) -> tuple[log_files.Follower, dict[str, Any]]:
        """Return a follower, and lines before it; raise RunDirectoryError if the run is gone."""
        discovery = log_files.Discovery(RunDir(run.path))
        follower = log_files.Follower(discovery, self._selection, self._is_kept)
        sources = discovery.sources()
        until = follower.skip([s for s in sources if self._selection.selects(s)])
        ranks = sorted({s.rank for s in sources if s.rank is not None})
        return follower, {**self._last(sources, until, _NUM_LINES), "ranks": ranks, "first": True}

    def older(self, run: LiveRun) -> dict[str, Any]:
        """Return lines before those of the page; raise RunDirectoryError if the run is gone."""
        sources = log_files.Discovery(RunDir(run.path)).sources()
        at, seen = self._before or (math.inf, 0)
        until = {}
        for source in sources:
            if at < math.inf and Index(source.path).covered:  # others have no times
                until[source.path] = log_files.start_of(source, at + _TIME_STEP_S)
        found = self._last(sources, until, _NUM_LINES + seen, at)
        found["lines"] = found["lines"][: len(found["lines"]) - seen]
        return found

    def _last(
        self, sources: Sequence[LogSource], until: Mapping[Path, int], num_lines: int,
        at: float = math.inf,
    ) -> dict[str, Any]:  # fmt: skip
        ends_at = time.monotonic() + _SEARCH_S

        def is_kept(line: LogLine) -> bool:
            if time.monotonic() > ends_at:
                raise _TooLongError
            return line.time <= at and self._is_kept(line)

        chosen = [s for s in sources if self._selection.selects(s)]
        try:
            lines = log_files.tail(chosen, num_lines, is_kept, until=until)
        except _TooLongError:
            remedy = "search one rank, or use hpc-elastic logs --grep"
            return {"lines": [], "more": False,
                    "error": f"nothing found within {_SEARCH_S:g} s: {remedy}"}  # fmt: skip
        return {"lines": [_line(line) for line in lines], "more": len(lines) >= num_lines}

    def _is_kept(self, line: LogLine) -> bool:
        return not self._text or self._text in cleaned(line.text, colours=False).lower()


class _TooLongError(Exception):
    """A search takes too long."""


def _line(line: LogLine) -> list[Any]:
    """Return a line as a page shows it: time, node, origin, stream and text."""
    source, text = line.source, cleaned(line.text, colours=False)
    text = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."
    host = source.host.partition(".")[0] or source.task
    origin = f"r{source.rank}" if source.is_worker else source.stream
    return [round(line.time, 3), host, origin, source.stream, text]


# ---- the frame of a page, scripts and style sheets


def live_page(*, run: int | None, control: bool, is_alone: bool, root: str, tag: str) -> str:
    """Return the frame of a live page, which scripts fill; ``run`` is None for the list of runs.

    ``is_alone``: there is one run only, so the page needs no way to the list. ``root`` is the path
    of all pages, without a slash at its end; ``tag`` is part of the URLs of scripts and style
    sheets.
    """
    return page.templates(__package__).get_template("live.html.j2").render(
        run=run, control=control, is_alone=is_alone, root=root, tag=tag,
        configs=page.chart_configs(),
    )  # fmt: skip


def _file(name: str, package: str = __package__) -> str:
    return files(package).joinpath(name).read_text()


_ASSETS: Mapping[str, Callable[[], tuple[str, str]]] = {
    "vega.js": lambda: (page.charts_script(), "text/javascript"),
    "page.js": lambda: (_file("page.js", page.__package__), "text/javascript"),
    "live.js": lambda: (_file("live.js"), "text/javascript"),
    "live.css": lambda: (page.theme_css() + _file("live.css"), "text/css"),
}
"""Name -> its content and media type."""
