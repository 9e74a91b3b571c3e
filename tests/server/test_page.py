"""The page at /, and what it shows: to operators only, texts of their own requests only, numbers that are true."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rekindle.cli import server_client
from rekindle.cli.main import app
from rekindle.core.reply import SOURCES, Reply, Reuse, Timings, Usage
from rekindle.core.scope import Scope
from rekindle.errors import RekindleError
from rekindle.server import recent_requests
from rekindle.server.job import Finished, Planned
from rekindle.server.page import views
from rekindle.server.recent_requests import RecentRequests
from rekindle.server.usage_log import HOUR, MINUTE, UsageLog
from tests.server.conftest import Serve
from tests.server.serving import ADMIN, ALICE, Asking, Served, eventually

OWN = "/v1/rekindle"
LONG = "The keeper of the lighthouse wrote down the wind every morning, and the boats that he counted at night. "
HTML = {"Accept": "text/html,application/xhtml+xml"}
STATIC = Path(views.__file__).parent / "static"


def live(served: Served, key: str | None = None) -> dict[str, Any]:
    """The first event of the stream: everything there is."""
    with served.http(key) as client, client.stream("GET", f"{OWN}/live") as answer:
        assert answer.status_code == 200, answer.read()
        return next(iter(events_of(answer)))


def events_of(answer: httpx.Response) -> Any:
    return (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {"))


def rows(served: Served, key: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = live(served, key)["rows"]
    return found


def test_browsers_get_the_page_and_clients_the_greeting(served: Served) -> None:
    page = served.get("/", **HTML)
    assert page.headers["content-type"].startswith("text/html") and "Rekindle" in page.text
    assert served.get("/").json()["name"] == "Rekindle"
    with served.http() as client:
        assert client.head("/").status_code == 200


def test_the_policy_allows_no_script_but_the_servers_own_files(served: Served) -> None:
    page = served.get("/", **HTML)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "require-trusted-types-for 'script'" in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)", page.text) and not re.search(r"\bon\w+=|style=", page.text)
    for path in STATIC.iterdir():
        text = path.read_text("utf-8")
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
        foreign = [found for found in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in found]
        assert foreign == [], f"{path.name} names another host"
        assert served.get(f"/page/{path.name}").headers["content-security-policy"] == policy


def test_without_a_page_nothing_of_it_is_there(serve: Serve) -> None:
    served = serve(page=False)
    served.chat("Hi")
    assert served.get("/", **HTML).json()["name"] == "Rekindle"
    assert served.get("/page/app.js").status_code == 404
    assert {served.get(f"{OWN}/{path}").status_code for path in ("live", "requests/1", "map", "usage")} == {404}
    assert served.service.recent.rows() == []


def test_the_page_is_open_and_what_it_shows_is_the_operators(keyed: Served) -> None:
    assert keyed.get("/", **HTML).status_code == keyed.get("/page/app.js").status_code == 200
    for path in ("live", "requests/1", "map", "usage"):
        assert keyed.get(f"{OWN}/{path}").status_code == 401
        assert keyed.get(f"{OWN}/{path}", ALICE).status_code == 403
    assert live(keyed, ADMIN)["server"]["model"] == "fake-0"


def test_a_request_says_where_its_prompt_came_from(served: Served) -> None:
    served.chat(LONG)
    told = served.chat(f"{LONG}Why?", app_id="mail")
    first, second = rows(served)
    assert [row["state"] for row in (first, second)] == ["done", "done"] and second["app"] == "mail"
    assert first["spans"] == [[0, first["tokens"], "computed"]]
    assert (
        second["spans"][0][2] == "engine"
        and second["reused"] == told["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    assert second["spans"][-1][1] == second["tokens"] == told["usage"]["prompt_tokens"]
    assert list(second["marks"]) == ["queued", "lookup", "prefill", "decode", "done"]
    details = served.get(f"{OWN}/requests/{second['id']}").json()
    assert "".join(part["text"] for part in details["prompt"]).count(LONG.strip()) == 1
    assert details["explanation"]["reason"]["kind"] == "differs" and details["explanation"]["difference"]["ours"]
    assert details["usage"]["refused_tokens"] == 0 and details["reply"] == told["choices"][0]["message"]["content"]


def test_a_bar_fills_while_the_prompt_is_read(served: Served) -> None:
    served.engine.go.clear()
    asking = Asking(lambda: served.chat(LONG * 12))
    eventually(lambda: [row["state"] for row in rows(served)] == ["prefill"])
    (row,) = rows(served)
    assert row["present"] < row["tokens"] and "first_ms" not in row
    served.engine.permits.release()
    eventually(lambda: rows(served)[0]["present"] > 0)
    served.engine.go.set()
    asking.result()
    assert rows(served)[0]["present"] == row["tokens"]


def test_waiting_and_cancelled_requests_are_shown(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    first = Asking(lambda: served.chat(LONG))
    eventually(lambda: served.service.admission.running == 1)
    second = Asking(
        lambda: served.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], app_id="x")
    )
    eventually(lambda: [row["state"] for row in rows(served)] == ["prefill", "queued"])
    served.http().put(f"{OWN}/apps/x", json={"state": "killed"})
    second.result()
    served.engine.go.set()
    first.result()
    assert [row["state"] for row in rows(served)] == ["done", "cancelled"]


def test_texts_of_others_are_not_shown_and_not_kept(keyed: Served) -> None:
    keyed.chat("the secret of alice", ALICE)
    keyed.chat("the operator's own", ADMIN)
    keyed.chat("under a salt", ADMIN, cache_salt="other")
    told = [keyed.get(f"{OWN}/requests/{row['id']}", ADMIN) for row in rows(keyed, ADMIN)]
    assert ["prompt" in one.json() for one in told] == [False, True, False]
    assert "secret" not in told[0].text and "explanation" not in told[0].json() and told[0].json()["tenant"] == "alice"
    assert keyed.service.recent.get(1).reply.text == "" and keyed.service.recent.get(3).tokens == b""  # type: ignore[union-attr]
    listed = keyed.get(f"{OWN}/map", ADMIN).json()["entries"]
    assert {entry["tenant"] for entry in listed if entry.get("text")} <= {"local"}


def test_the_map_is_a_tree_of_prefixes(served: Served) -> None:
    served.chat(LONG * 3, app_id="mail")
    served.chat(
        [
            {"role": "user", "content": LONG * 3},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": LONG},
        ]
    )
    assert served.session.flush()
    entries = {entry["name"]: entry for entry in served.get(f"{OWN}/map").json()["entries"]}
    children = [entry for entry in entries.values() if entry["parent"]]
    assert children and all(child["parent"] in entries for child in children)
    root = next(entry for entry in entries.values() if not entry["parent"])
    assert "keeper" in root["text"] and root["apps"] == ["mail"]


def test_entries_that_begin_alike_are_named_by_what_differs(served: Served) -> None:
    questions = ("When was the lamp lit at last?", "Which of the ships passed?", "Whose hand kept the log?")
    for question in questions:
        served.chat([{"role": "system", "content": LONG * 3}, {"role": "user", "content": f"{question} {LONG}"}])
    for number, keeper in enumerate(("Anna", "Berta")):
        served.chat(
            [{"role": "system", "content": f"You are keeper {keeper} of the lighthouse, born 190{number}. {LONG}"}]
        )
    assert served.session.flush()
    entries = served.get(f"{OWN}/map").json()["entries"]
    names = [entry["text"] for entry in entries]
    assert len({name[:8] for name in names}) == len(names), names
    assert {name.removeprefix("…").split()[0] for name in names} >= {"Which", "Whose", "Anna", "Berta"}


def test_documents_that_are_forgotten_leave_no_text_behind(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("torch")  # makes the tiny embedder
    from tests.server.soak import tiny_embedder

    served = serve(session={"embedder": tiny_embedder(tmp_path / "embedder"), "answers": "off"})
    added = served.post(f"{OWN}/documents", documents=[{"text": LONG, "source": "<b>log</b>"}]).json()
    served.post(f"{OWN}/ask", question="Who wrote down the wind?", max_tokens=4)
    asked = served.get(f"{OWN}/requests/1").json()
    assert asked["sources"][0]["text"].startswith("The keeper") and asked["question"] == "Who wrote down the wind?"
    served.http().delete(f"{OWN}/documents/{added['data'][0]['name']}")
    left = served.get(f"{OWN}/requests/1")
    assert "keeper" not in left.text and left.json()["tokens"] == asked["tokens"]


def made_reply(reuse: Reuse, text: str = "yes") -> Reply:
    return Reply(text, (1, 2), "stop", Usage(10, 2), Timings(0.5, 0.1, 10.0), reuse)


def test_a_prompt_of_many_sources_has_a_coarse_bar() -> None:
    runs = [(at, at + 1, "passages" if at % 3 else "recomputed") for at in range(3000)]
    coarse = recent_requests._coarse(runs)
    assert len(coarse) == 256 and (coarse[0][0], coarse[-1][1]) == (0, 3000)
    assert (
        all(before[1] == after[0] for before, after in pairwise(coarse))
        and recent_requests._coarse(runs[:9]) == runs[:9]
    )


def test_rows_and_texts_are_bounded() -> None:
    recent = RecentRequests(max_rows=3, max_text_bytes=20)
    for number in range(5):
        record = recent.begin(Scope("local"), "", "m", None, keeps_text=True)
        record.tokens = bytes(8)
        recent.take(record, Planned(Reuse("exact", 10)))
        recent.take(record, Finished(made_reply(Reuse("exact", 10), f"reply {number}")))
    assert [row["id"] for row in recent.rows()] == [3, 4, 5]
    assert [len(recent.get(id).tokens) for id in (3, 4, 5)] == [0, 8, 8]  # type: ignore[union-attr]
    assert [recent.get(id).reply.text for id in (3, 4, 5)] == ["", "reply 3", "reply 4"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "reuse",
    [
        Reuse("exact", 10),
        Reuse("exact", 3, engine=5, memory=1, disk=1),
        Reuse("quantized", 2, memory=3, disk=5, quantized=6),
        Reuse("approximate", 4, disk=2, from_chunks=6, recomputed=2),
        Reuse("quantized", 4, streamed=6, quantized=6),
    ],
    ids=str,
)
def test_every_token_of_a_prompt_has_one_source(reuse: Reuse) -> None:
    assert sum(reuse.by_source.values()) == 10 and set(reuse.by_source) <= set(SOURCES)


def test_usage_is_counted_by_minute_and_hour_and_old_rows_go(tmp_path: Path) -> None:
    now = [1_000_000 * 3600.0]
    totals: dict[str, float] = {"bytes.disk": 5.0, "evicted.limit": 100.0}
    log = UsageLog(tmp_path / "usage.db", lambda: dict(totals), lambda: now[0])
    log.count(made_reply(Reuse("exact", 3, disk=7, cold_seconds=2.0, miss="differs")))
    now[0] += 60
    log.count(made_reply(Reuse("exact", 10)))
    totals |= {"bytes.disk": 9.0, "evicted.limit": 130.0}
    minutes = log.rows(MINUTE, HOUR)
    assert [row.get("tokens.disk") for row in minutes] == [7, None] and minutes[0]["miss.differs"] == 1
    assert minutes[1]["bytes.disk"] == 9 and minutes[1]["evicted.limit"] == 130
    (hour,) = UsageLog(tmp_path / "usage.db", dict, lambda: now[0]).rows(HOUR, 24 * HOUR)
    assert hour["requests"] == 2 and hour["tokens.computed"] == 13 and hour["cold"] == 2 and hour["timed"] == 1
    now[0] += 32 * 24 * HOUR
    log.flush()
    assert len(log.rows(MINUTE, 1e9)) <= 1 and len(log.rows(HOUR, 1e9)) <= 1


def test_a_usage_log_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    log = UsageLog(tmp_path / "file" / "usage.db")
    log.count(made_reply(Reuse("exact", 10)))
    assert log.rows(MINUTE, HOUR) == []


def test_usage_outlives_the_server_and_has_no_text(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    served.chat("a secret")
    assert served.get(f"{OWN}/usage").json()["hour"][0]["requests"] == 1
    (path,) = (Path(os.environ["REKINDLE_HOME"]) / "usage").iterdir()
    assert b"secret" not in path.read_bytes()


def test_the_stream_ends_with_the_server(served: Served) -> None:
    with served.http() as client, client.stream("GET", f"{OWN}/live") as answer:
        lines = answer.iter_lines()
        next(lines)
        served.server.host.stopping = True
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_top_shows_the_same(served: Served) -> None:
    served.chat(LONG, app_id="\x1b[31mmail")
    served.chat(f"{LONG}Why?", app_id="mail")
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["top", "--server", served.url, "--once"])
    assert shown.exit_code == 0 and "fake-0" in shown.output and "0 of 4 running" in shown.output
    assert shown.output.count("mail") == 2 and "\x1b[31m" not in shown.output and "█" in shown.output


def test_top_waits_for_a_model_as_long_as_it_loads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, given = server_client.make_client, list[httpx.Timeout]()

    def noting(url: str, api_key: str | None, timeout: httpx.Timeout) -> httpx.Client:
        given.append(timeout)
        return opened(url, api_key, timeout)

    monkeypatch.setattr(server_client, "make_client", noting)
    assert CliRunner().invoke(app, ["top", "--server", served.url, "--once"]).exit_code == 0
    assert [(timeout.connect, timeout.read) for timeout in given] == [(30.0, None)]


def test_top_needs_the_operators_key(keyed: Served) -> None:
    refused = CliRunner().invoke(app, ["top", "--server", keyed.url, "--api-key", ALICE, "--once"])
    assert isinstance(refused.exception, RekindleError) and "--admin-key" in str(refused.exception)


def test_the_dashboard_shows_metrics_that_there_are(served: Served) -> None:
    told = served.chat(LONG) and served.get("/metrics").text
    dashboard = (Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json").read_text("utf-8")
    used = {name.removesuffix("_bucket") for name in re.findall(r"rekindle_\w+", dashboard)}
    known = set(re.findall(r"^# TYPE (rekindle_\w+)", told, re.M))
    assert used and {name for name in used if name not in known and f"{name}_total" not in known} == set()


def test_the_palette_is_the_same_everywhere() -> None:
    styles = (STATIC / "page.css").read_text("utf-8")
    assert {name: found for name, found in re.findall(r"--(\w+): (#\w{6})", styles) if name in SOURCES} == SOURCES
    names = re.search(r"SOURCES = \{(.*?)\};", (STATIC / "bars.js").read_text("utf-8"), re.S)
    assert names is not None and re.findall(r"^  (\w+):", names[1], re.M) == list(SOURCES)
