"""A real browser on a page of another origin, which tries what pages can do without asking anybody."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.scope import Scope
from rekindle.server.routes import ENDPOINTS
from tests.server.conftest import Serve
from tests.server.serving import PATIENCE_SECONDS, Served

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_POSTS = [endpoint.path for endpoint in ENDPOINTS if endpoint.method == "POST"]
_TRIES = len(_POSTS) + 4  # and a form, an image, a script, and one that wants to read the reply

_PAGE = """<!doctype html><iframe name="hidden"></iframe><script>
const victim = VICTIM, posts = POSTS;
const body = {prompt: "hello", messages: [{role: "user", content: "hello"}], documents: ["A lamp."], content: "hello",
              tokens: [1], max_tokens: 1, question: "what?", query: "what?", input: "hello",
              lora_name: "a", lora_path: "/a"};
const only = path => path.endsWith("/explain") || path.endsWith("/warm") ? {messages: body.messages}
                   : path == "/tokenize" ? {content: "hello"} : body;
function loads(element, source) {
  return new Promise(done => {
    element.onload = () => done("loaded");
    element.onerror = () => done("refused");
    element.src = source;
    document.body.append(element);
  });
}
function sendsForm() {
  return new Promise(done => {
    const form = document.createElement("form"), field = document.createElement("input");
    Object.assign(form, {method: "POST", enctype: "text/plain", target: "hidden", action: victim + "/v1/completions"});
    field.name = '{"prompt": "hello", "max_tokens": 1, "other": "';
    field.value = '"}';
    form.append(field);
    document.body.append(form);
    document.querySelector("iframe").onload = () => done("answered");
    form.submit();
  });
}
async function everything() {
  const told = {};
  for (const path of posts)
    await fetch(victim + path, {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"},
                                body: JSON.stringify(only(path))}).catch(() => 0);
  told.form = await sendsForm();
  told.image = await loads(new Image(), victim + "/metrics");
  told.script = await loads(document.createElement("script"), victim + "/v1/rekindle/entries");
  try {
    const answer = await fetch(victim + "/v1/completions", {method: "POST", headers: {"Content-Type": "text/plain"},
                                                            body: JSON.stringify(body)});
    told.read = (await answer.json()).object;
  } catch { told.read = "refused"; }
  return told;
}
const report = told => fetch("/report", {method: "POST", body: JSON.stringify(told)});
window.onload = () => everything().then(report, error => report(String(error)));
</script>"""


class _Evil(ThreadingHTTPServer):
    """Serves the page, and hears what became of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = b""
        self.reports: queue.Queue[Any] = queue.Queue()


class _Handler(BaseHTTPRequestHandler):
    server: _Evil

    def do_GET(self) -> None:
        self._say(self.server.page if self.path == "/" else b"")

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._say(b"")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def evil() -> Iterator[_Evil]:
    with _Evil() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _browser(url: str, profile: Path) -> Iterator[None]:
    assert CHROMIUM is not None
    browser = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", url],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def _visited(page: str, victim: Served, evil: _Evil, profile: Path, posts: list[str]) -> Any:
    """What a page reports on which somebody is who runs the server."""
    evil.page = _PAGE.replace("VICTIM", json.dumps(victim.url)).replace("POSTS", json.dumps(posts)).encode()
    with _browser(page, profile):
        return evil.reports.get(timeout=PATIENCE_SECONDS)


def _refused(served: Served) -> float:
    told = served.get("/metrics").text.splitlines()
    lines = [one for one in told if one.startswith("rekindle_requests_total{") and "4xx" in one and "nobody" in one]
    return float(lines[0].split()[-1]) if lines else 0.0


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])  # another site; the same site, but another origin
def test_a_page_of_another_origin_drives_nothing(served: Served, evil: _Evil, tmp_path: Path, host: str) -> None:
    told = _visited(f"http://{host}:{evil.server_port}", served, evil, tmp_path / "profile", _POSTS)
    assert told == {"form": "answered", "image": "refused", "script": "refused", "read": "refused"}
    assert _refused(served) == _TRIES, "all of them came, and all were refused"
    assert served.engine.steps == 0 and served.service.apps.merge_catalog(Scope("local"), []) == []
    assert not served.session.knowledge.holds("local", None)


def test_a_page_of_an_allowed_origin_is_answered(serve: Serve, evil: _Evil, tmp_path: Path) -> None:
    page = f"http://localhost:{evil.server_port}"
    served = serve(cors_origin=(page,))
    told = _visited(page, served, evil, tmp_path / "profile", ["/v1/chat/completions"])
    assert told["read"] == "text_completion" and served.engine.steps > 0
    assert served.service.apps.merge_catalog(Scope("local"), []) != []
    assert told["image"] == told["script"] == "refused", "nobody knows whose they are"
