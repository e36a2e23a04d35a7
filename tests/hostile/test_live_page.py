"""`report --live` over real connections: what other users and foreign pages can do with it."""

import contextlib
import http.cookiejar
import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest

from hpc_elastic.run.directory import Entry, RunDir, Submission
from specs import spec_of, started_run

PATIENCE_S = 60.0
_SERVE = """
import sys
from hpc_elastic_watch import live_server
from hpc_elastic.cli.main import main
live_server.REQUEST_S = float(sys.argv.pop(1))
sys.exit(main(sys.argv[1:]))
"""
NASTY = "</script><script>x=1</script><img src=x onerror='x=1'>\u2028\x1b[2J{{7*7}}\"'`${x}"
SLOW = 200


@dataclass(frozen=True)
class Site:
    """A running `hpc-elastic report --live`, and the browser of its owner."""

    process: psutil.Process
    port: int
    token: str
    root: str = ""
    cookie: str = ""

    @property
    def host(self) -> str:
        """What the owner's browser sends as Host."""
        return f"127.0.0.1:{self.port}"

    def connected(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def head(self, method: str, target: str, **headers: str | None) -> bytes:
        """A request as the owner's browser sends it; a header that is None is left out."""
        given = {
            "host": self.host, "cookie": self.cookie, "connection": "close", "origin": None,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }  # fmt: skip
        lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
        return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()

    def answer(self, request: bytes) -> tuple[int, bytes]:
        """The status, and all of the answer; 0 if the server has hung up."""
        received = b""
        with self.connected() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(request)
            while part := connection.recv(1 << 16):
                received += part
        return int(received.split(b" ", 2)[1]) if received else 0, received

    def get(self, path: str, **headers: str | None) -> tuple[int, bytes]:
        """The answer to a GET of the owner's browser, which may have been told other headers."""
        return self.answer(self.head("GET", self.root + path, **headers))

    def post(self, body: str, **headers: str | None) -> tuple[int, bytes]:
        """The answer to a command."""
        size = str(len(body.encode()))
        given = {"origin": f"http://{self.host}", "content_length": size, **headers}
        head = self.head("POST", f"{self.root}/runs/0/control", **given)
        return self.answer(head + body.encode())


def run_in(folder: Path) -> RunDir:
    """A run that waits for nothing, all of whose texts are nasty."""
    submission = Submission(folder / ".hpc_elastic")
    submission.logs.mkdir(parents=True)
    submission.array(0).submitted_as("7")
    run = RunDir(folder / "0")
    entry = Entry("hydra", "main")
    started_run(run, spec_of(NASTY, 1, 1, 1, 0, entry, str(submission.path), [(0, 0)]))
    run.hydra.mkdir()
    overrides = [f"note={NASTY}", f"{NASTY}=1"]
    (run.hydra / "overrides.yaml").write_text(json.dumps(overrides))
    (run.hydra / "config.yaml").write_text(json.dumps({NASTY: NASTY}))
    at = 1.9e9
    member = {"task": "7_0", "attempt": 0, "slot": 0, "host": NASTY, "nproc": 1}
    events = (
        {"kind": "task", "attempt": 0, "host": NASTY, "pid": 1, "started": at},
        {"kind": "joined", "host": NASTY},
        {"kind": "round", "number": 1, "index": 1, "term": 1, "nodes": 1, "world_size": 1,
         "members": [member], "restarts": 0},
        {"kind": "end", "status": "failed", "rounds": 1, "restarts": 0,
         "failure": {**member, "rank": 0, "message": NASTY, "exception": NASTY}},
    )  # fmt: skip
    lines = [{"v": 1, "time": at, "task": "7_0", **event} for event in events]
    run.events("7_0").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    point = {"phase": "training", "round": 1, "nodes": 1, "step": 1, "metrics": {NASTY: 1.0}}
    points = [{"time": at + i, "loss": 1.0, **point, "step": i} for i in range(3)]
    run.progress.write_text("".join(f"{json.dumps(p)}\n" for p in points))
    result = {"status": "failed", "ended": at, "restarts": 0}
    run.result.write_text(json.dumps(result))
    logs = run.attempt("7_0", 0)
    logs.mkdir(parents=True)
    text = f'{NASTY}\n0 %\rdata: {{}}\n\ndata: {{"error": 1}}\n'
    (logs / "round-1.rank-0.out").write_text(text)
    (folder / "secret").write_text("private")
    return run


@contextlib.contextmanager
def watching(run: RunDir, *args: str, request_s: float = 600.0) -> Iterator[Site]:
    """Serve the pages of a run by the command."""
    argv = [
        sys.executable,
        "-c",
        _SERVE,
        str(request_s),
        "report",
        "--live",
        str(run.path),
        "--json",
        *args,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            told = json.loads(process.stdout.readline())
            site = Site(psutil.Process(process.pid), told["port"], told["url"].split("token=")[1])
            status, text = site.answer(site.head("GET", f"/?token={site.token}", cookie=None))
            assert status == 303
            headers = dict(line.split(": ", 1) for line in text.decode().split("\r\n")[1:] if line)
            root, cookie = headers["location"].rstrip("/"), headers["set-cookie"].split(";")[0]
            yield Site(site.process, site.port, site.token, root, cookie)
        finally:
            process.terminate()
            errors = process.communicate(timeout=PATIENCE_S)[1]
    assert errors == "", "nobody writes to the owner's terminal"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """A run."""
    return run_in(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(run) -> Iterator[Site]:
    """Its pages, which take commands."""
    with watching(run, "--control") as served:
        yield served


# ---- foreign names and foreign pages


@pytest.mark.parametrize("host", [
    "evil.org", "evil.org:{port}", "127.0.0.1.evil.org", "evil.org@127.0.0.1", "127.1", "0.0.0.0",
    "2130706433", "127.0.0.1.", "localhost.", "[::ffff:127.0.0.1]", "[::]", "[::1", "::1",
    "127.0.0.1:{port}:1", "127.0.0.1:x", "127.0.0.1 ", "127.0.0.2", "",
])  # fmt: skip
def test_a_name_that_was_rebound_gets_nothing(site, host):
    """DNS rebinding, even with the cookie: the Host is not this machine's own."""
    wrong = host.format(port=site.port)
    assert site.get("/runs/0")[0] == 200
    status, text = site.get("/runs/0", host=wrong)
    if wrong != wrong.strip():  # blanks around a header's value do not count
        assert status == 200
    else:
        assert status == 403 and b"set-cookie" not in text
    status, _ = site.answer(site.head("GET", f"http://evil.org{site.root}/", host=wrong))
    assert status in (403, 404)


def test_two_hosts_or_none_are_no_request(site):
    """Which of two the guard would see is not left to chance."""
    assert site.get("/", host=f"evil.org\r\nhost: {site.host}")[0] == 400
    assert site.get("/", host=None)[0] == 400
    assert site.answer(f"GET / HTTP/1.0\r\ncookie: {site.cookie}\r\n\r\n".encode())[0] == 403
    for target in ("http://evil.org/", "//evil.org/", "*", "evil.org:443"):
        assert site.answer(site.head("GET", target))[0] in (400, 403, 404)


@pytest.mark.parametrize("path", ["/news", "/runs/0/report", "/runs/0/logs", "/assets/live.js"])
@pytest.mark.parametrize("foreign", ["cross-site", "same-site"])
def test_pages_of_others_embed_nothing(site, path, foreign):
    """A page at another port is of the same site for the browser, which sends cookies along."""
    assert site.get(path, sec_fetch_site=foreign, sec_fetch_dest="image")[0] == 403
    assert site.get("/runs/0", sec_fetch_site="same-origin")[0] == 200
    assert site.get("/runs/0", sec_fetch_site="none")[0] == 200  # a bookmark


def test_commands_need_the_own_origin_and_post(site, run):
    """Forms, images and scripts of others start no process; the owner's page does."""
    body, form = json.dumps({"command": "kill", "node": "n1"}), "text/plain"
    for origin in (
        "http://evil.org", "null", "", None, f"https://{site.host}", "http://127.0.0.1:1",
        f"http://localhost:{site.port}", f"http://{site.host}/", f"http://{site.host}.evil.org",
    ):  # fmt: skip
        status, text = site.post(body, origin=origin, content_type=form)
        assert status == 403 and b"exit_code" not in text, origin
    assert site.post(body, sec_fetch_site="cross-site")[0] == 403
    assert site.post(body, cookie=None)[0] == 403
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        head = site.head(method, f"{site.root}/runs/0/control?command=cancel")
        assert site.answer(head)[0] in (403, 405), method
    assert not run.cancelled.exists()
    status, text = site.post(body, content_type=form)
    assert status == 200 and b"exit_code" in text


# ---- the token


def test_the_token_counts_in_the_url_and_the_cookie_alone(site, run):
    """It is refused elsewhere, and that of another server is."""
    name, token = site.cookie.split("=")
    for cookie, headers in (
        (None, {"authorization": f"Bearer {token}"}), (None, {"x_token": token}),
        (f"{name}={token}x", {}), (f"{name}={token[:-1]}", {}), (f"{name}=", {}), (name, {}),
        (f"x={token}", {}), (f"{name}x={token}", {}), (f"x{name}={token}", {}),
    ):  # fmt: skip
        assert site.get("/", cookie=cookie, **headers)[0] == 403, (cookie, headers)
    for path in ("/?token=", "/?Token={}", "/?x=token={}", "/;token={}", "/?token={}x"):
        assert site.get(path.format(token), cookie=None)[0] == 403, path
    for method in ("HEAD", "POST"):
        assert site.answer(site.head(method, f"/?token={token}", cookie=None))[0] == 403
    with watching(run) as other:
        assert other.token != token
        assert other.answer(other.head("GET", f"/?token={token}"))[0] in (403, 404)
        assert other.get("/", cookie=site.cookie)[0] == 403


def test_a_page_at_another_port_is_not_sent_the_cookie(site):
    """Browsers share cookies between ports: somebody else may listen at the next one."""
    browser = urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    )
    with browser.open(f"http://{site.host}/?token={site.token}", timeout=PATIENCE_S) as page:
        own = page.url
    assert own.startswith(f"http://{site.host}{site.root}/") and site.token not in own
    heads = []
    with socket.create_server(("127.0.0.1", 0)) as theirs:

        def listen() -> None:
            for _ in range(4):
                connection, _ = theirs.accept()
                with connection:
                    heads.append(connection.recv(1 << 16).decode())
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=listen)
        thread.start()
        for path in ("/", "/runs/0", "/news", "/runs/0/control"):
            browser.open(f"http://127.0.0.1:{theirs.getsockname()[1]}{path}", timeout=PATIENCE_S)
        thread.join()
    assert [head for head in heads if site.token in head] == []
    assert len(heads) == 4


def test_a_redirect_stays_on_this_server(site):
    """The URL with the token leads to a page of the same server, whatever its path is."""
    for path in (
        "//evil.org", "/%2f/evil.org", "/\\evil.org", "/%5cevil.org", "/%0d%0ax:1", "/%E2%82%AC",
    ):  # fmt: skip
        status, text = site.answer(site.head("GET", f"{path}?token={site.token}", cookie=None))
        location = text.split(b"location: ")[1].split(b"\r\n")[0].decode()
        assert status == 303 and location.startswith("/"), path
        assert not location.startswith(("//", "/\\")) and "x:1" not in text.decode().split("\r\n")


def test_another_user_of_the_machine_gets_nothing(site, stranger):
    """Without the token no page; and the token is in no process list, nor can he take the port."""
    done = stranger(
        """
import encodings.idna, socket, sys, pathlib
port, pid = int(sys.argv[1]), sys.argv[2]
connection = socket.create_connection(("127.0.0.1", port))
connection.sendall(f"GET / HTTP/1.0\\r\\nhost: 127.0.0.1:{port}\\r\\n\\r\\n".encode())
print(connection.recv(100).split()[1].decode())
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        print(file.read_text(errors="replace"))
    except OSError:
        pass
try:
    print(pathlib.Path(f"/proc/{pid}/environ").read_text())
except OSError as e:
    print(type(e).__name__)
for host in ("127.0.0.1", "0.0.0.0"):
    theirs = socket.socket()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        theirs.bind((host, port))
        theirs.listen()
        print("taken")
    except OSError:
        print("refused")
""",
        site.port, site.process.pid,
    )  # fmt: skip
    assert done.stderr == "" and site.token not in done.stdout
    lines = done.stdout.split("\n")
    assert lines[0] == "403" and "watch" in done.stdout
    assert done.stdout.split()[-3:] == ["PermissionError", "refused", "refused"]


# ---- what is shown


class _Tags(HTMLParser):
    """All tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Note it."""
        self.found.append((tag, dict(attrs)))


def _events(site: Site, path: str, wanted: str) -> list[dict]:
    """The events of a stream, up to the first that contains a key; each is one line of JSON."""
    with site.connected() as stream:
        stream.sendall(site.head("GET", site.root + path))
        found: list[dict] = []
        for line in stream.makefile("r", encoding="utf-8", newline="\n"):
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if wanted in found[-1]:
                    return found
        return found


def test_texts_of_a_run_are_text(site):
    """Names, hosts, parameters, errors and log lines make no tag, no script and no event."""
    for path in ("/", "/runs/0"):
        status, shell = site.get(path)
        assert status in (200, 303) and b"x=1" not in shell
    news = _events(site, "/runs/0/news", "page")
    assert any(event["rows"].get("0", {}).get("id") == NASTY for event in news)
    status, text = site.get("/runs/0/report")
    report = json.loads(text.split(b"\r\n\r\n", 1)[1])
    tags = _Tags(report["html"]).found
    assert status == 200 and len(tags) > 50 and report["html"].count("x=1") > 5
    assert {tag for tag, _ in tags}.isdisjoint({"script", "img", "iframe", "object", "base"})
    assert [a for _, attributes in tags for a in attributes if a.startswith("on")] == []
    assert "{{7*7}}" in report["html"]
    logs = _events(site, "/runs/0/logs/new", "lines")[0]["lines"]
    assert all("\x1b" not in line[4] for line in logs) and len(logs) == 4
    status, text = site.get("/runs/0/logs?text=script")
    assert b"\x1b" not in text and b"<script>x=1" in text  # JSON, which no browser takes for HTML
    assert b"content-type: application/json" in text and b"nosniff" in text


def test_every_answer_has_the_policy(site):
    """Pages, data, errors and refusals alike: no frame, no sniffing, no cache, no Referer."""
    for path, headers in (
        ("/", {}), ("/runs/0", {}), ("/runs/0/report", {}), ("/runs/9", {}), ("/nothing", {}),
        ("/", {"cookie": None}), ("/", {"host": "evil.org"}),
        ("/", {"sec_fetch_site": "same-site"}),
    ):  # fmt: skip
        text = site.get(path, **headers)[1].lower()
        for header in (
            b"default-src 'none'; script-src 'self'", b"frame-ancestors 'none'",
            b"x-content-type-options: nosniff", b"x-frame-options: deny",
            b"referrer-policy: no-referrer", b"cache-control: no-store",
            b"cross-origin-resource-policy: same-origin",
        ):  # fmt: skip
            assert header in text, (path, header)
        assert b"access-control" not in text and site.token.lower().encode() not in text


@pytest.mark.parametrize("path", [
    "/assets/../secret", "/assets/..%2fpage.py", "/assets/%2e%2e/page.py", "/assets//etc/passwd",
    "/assets/%00", "/runs/0/../../secret", "/runs/0%2f..%2f..%2fsecret", "/runs/0/logs/../secret",
    "/runs/-1", "/runs/00000000000000000000001", "/runs/9" + "9" * 4000, "/runs/0x0/news",
    "/runs/%D9%A0/news", "/runs/0.0", "/runs/../secret/news", "/..;/secret",
])  # fmt: skip
def test_no_url_leads_to_a_file(site, path):
    """Runs are numbers, and scripts are those of a list."""
    status, text = site.get(path)
    assert status == 404 and b"private" not in text and b"root:" not in text


# ---- strangers that cost something


def test_slow_strangers_hold_no_place(run):
    """200 connections that send one byte keep nobody out, and the oldest of them go."""
    with watching(run) as site, contextlib.ExitStack() as held:
        before = site.process.num_fds()
        slow = [held.enter_context(site.connected()) for _ in range(SLOW + 50)]
        for connection in slow:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"G")
        assert site.get("/runs/0")[0] == 200
        assert site.process.num_fds() - before < SLOW / 2
        assert "rows" in _events(site, "/news", "rows")[0]


@pytest.mark.parametrize(
    "first",
    [
        *(pytest.param(text, marks=pytest.mark.long) for text in (b"", b"G")),
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ",
    ],
)
def test_a_stranger_that_asks_nothing_is_hung_up_on(run, first):
    """After a deadline, however many bytes come by then; a stream of the owner goes on."""
    with watching(run, request_s=1.0) as site, site.connected() as stream:
        stream.sendall(site.head("GET", site.root + "/news", connection=None))
        assert stream.recv(1 << 16)
        with site.connected() as slow, contextlib.suppress(ConnectionError):
            slow.settimeout(0.1)
            slow.sendall(first)
            while True:
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(1 << 16):
                        break
                if first:
                    slow.sendall(b"x")
        stream.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while True:
                assert stream.recv(1 << 16), "the stream was closed"


def test_requests_of_a_stranger_are_small_or_end(site):
    """A huge line, header or body without the token is refused before it is read."""
    huge = "x" * (1 << 20)
    for request in (
        f"GET /{huge} HTTP/1.1\r\n", site.head("GET", "/", cookie=huge).decode(),
        "GET / HTTP/1.1\r\n" + "a: b\r\n" * 100_000,
    ):  # fmt: skip
        assert site.answer(request.encode())[0] in (0, 400)
    head = site.head("POST", "/runs/0/control", cookie=None, content_length=str(1 << 40))
    assert site.answer(head)[0] == 403  # its connection is closed at once
    chunked = site.head("POST", "/", cookie=None, transfer_encoding="chunked", connection=None)
    assert site.answer(chunked + b"5\r\nxxxxx\r\n")[0] == 403
    assert site.post("[" * 9_000)[0] == 400
    assert site.post("x" * 20_000)[0] == 413
    assert site.answer(b"\x16\x03\x01\x00\xa5\x01\x00\x00")[0] in (0, 400)  # TLS
    upgrade = site.head("GET", "/", cookie=None, connection="upgrade", upgrade="websocket")
    assert site.answer(upgrade)[0] == 403


def test_a_cookie_is_read_in_linear_time(site):
    """Python's own parser takes ten seconds for one such header (CVE-2024-7592)."""
    cookie = 'a="' + "\\0" * 30_000 + '"'
    connections = [site.connected() for _ in range(20)]
    for connection in connections:
        connection.sendall(site.head("GET", "/", cookie=cookie))
    assert site.get("/runs/0")[0] == 200
    for connection in connections:
        connection.close()
