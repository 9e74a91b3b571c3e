"""Who is answered next, who has to wait, who leaves, and what is computed once for many."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rekindle import Session
from rekindle.engine.fake import FakeEngine
from tests.server.conftest import Serve
from tests.server.serving import Asking, Gated, Served, connected, events, eventually, fake_session, serving

PATH = "/v1/completions"
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 3000, "min_tokens": 3000}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
PREFIX = "Every evening the old keeper climbed the stairs of the lighthouse to light its lamp. " * 8


def asking(served: Served, prompt: str, **body: Any) -> Asking:
    """Ask, and go on once the request is answered or stands in line."""
    line = served.service.admission
    before = line.running + line.waiting
    started = Asking(lambda: served.post(PATH, prompt=prompt, **{**SHORT, **body}))
    eventually(lambda: line.running + line.waiting > before)
    return started


@pytest.mark.parametrize("deaf", [False, True], ids=["notices within a step", "notices between steps"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_stops_its_work_within_a_token(serve: Serve, stream: bool, deaf: bool) -> None:
    engine = Gated(deaf=deaf)
    served = serve(engine, session={"parallel": 1})
    engine.go.clear()
    with connected(served, PATH, prompt="one", stream=stream, **LONG) as client:
        for _ in range(8):
            engine.permits.release()
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: engine.steps == 8)
    eventually(lambda: served.service.admission.running == 0)
    assert engine.steps <= 8 + deaf
    engine.go.set()
    steps = engine.steps
    assert served.post(PATH, prompt="two", **SHORT).status_code == 200, "its place is free again"
    assert engine.steps == steps + 2, "and nothing of it goes on"


def test_a_client_that_goes_away_while_its_prompt_is_computed_stops_it(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    with connected(served, PATH, prompt=PREFIX, **LONG):
        assert served.engine.entered.wait(60)
    eventually(lambda: served.service.admission.running == 0)
    assert served.engine.steps == 0


def test_a_client_that_goes_away_in_line_leaves_it(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    first = asking(served, "first")
    with connected(served, PATH, prompt="second", **SHORT):
        eventually(lambda: served.service.admission.waiting == 1)
    eventually(lambda: served.service.admission.waiting == 0)
    served.engine.go.set()
    assert first.result().status_code == 200
    assert served.engine.prompts == ["first"]


def test_the_openai_client_may_close_a_stream(serve: Serve) -> None:
    served = serve()
    served.engine.go.clear()
    served.engine.permits.release(6)
    stream = served.openai().completions.create(
        model="fake-0", prompt="one", stream=True, max_tokens=3000, temperature=0, extra_body={"min_tokens": 3000}
    )  # what is drawn may be parts of characters, and no text for a while
    next(iter(stream))
    stream.close()
    eventually(lambda: served.service.admission.running == 0)
    assert served.engine.steps <= 6


def test_many_that_leave_take_nothing_with_them(serve: Serve) -> None:
    served = serve()
    for number in range(12):
        with connected(served, PATH, prompt=f"{number} {PREFIX}", stream=bool(number % 2), **LONG) as client:
            if number % 3:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # rudely
    eventually(lambda: served.service.admission.running == 0 and served.service.admission.waiting == 0)
    assert served.chat("and now?")["usage"]["completion_tokens"] == 4


def test_a_full_line_refuses_and_tells_when_to_come_back(serve: Serve) -> None:
    served = serve(session={"parallel": 1}, queue=1)
    served.engine.go.clear()
    waiting = [asking(served, "first"), asking(served, "second")]
    with pytest.raises(openai.RateLimitError) as raised:
        served.openai().completions.create(model="fake-0", prompt="third", max_tokens=2)
    assert int(raised.value.response.headers["Retry-After"]) >= 1
    assert raised.value.code == "queue_full" and raised.value.type == "rate_limit_error"
    assert served.post(PATH, prompt="third", stream=True, **SHORT).status_code == 429, "a stream has not begun yet"
    served.engine.go.set()
    assert [one.result().status_code for one in waiting] == [200, 200]
    assert served.post(PATH, prompt="third", **SHORT).status_code == 200


def test_without_a_queue_whoever_finds_no_place_is_refused(serve: Serve) -> None:
    served = serve(session={"parallel": 1}, queue=0)
    served.engine.go.clear()
    first = asking(served, "first")
    assert served.post(PATH, prompt="second", **SHORT).status_code == 429
    served.engine.go.set()
    assert first.result().status_code == 200


def test_a_request_that_takes_too_long_is_told_so_and_stopped(serve: Serve) -> None:
    served = serve(timeout="0.3s")
    served.engine.go.clear()
    told = served.post(PATH, prompt="one", **LONG)
    assert told.status_code == 504 and "--timeout" in told.json()["error"]["message"]
    eventually(lambda: served.service.admission.running == 0)


def test_the_foreground_goes_before_the_background(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    asked = [asking(served, "first", app_id="a")]
    asked += [asking(served, f"{n} later", app_id="mail", app_state="background") for n in range(3)]
    asked += [asking(served, "soon", app_id="a", app_state="foreground")]
    served.engine.go.set()
    assert all(one.result().status_code == 200 for one in asked)
    assert served.engine.prompts == ["first", "soon", "0 later", "1 later", "2 later"]


def test_the_background_leaves_a_place_to_the_foreground(serve: Serve) -> None:
    served = serve(session={"parallel": 2}, queue=2)
    served.engine.go.clear()
    line, behind = served.service.admission, [asking(served, f"{n} later", app_state="background") for n in range(3)]
    assert (line.running, line.waiting) == (1, 2)
    first = asking(served, "now", app_id="chat", app_state="foreground")
    assert (line.running, line.waiting) == (2, 2), "a place is free for it, though the line is full"
    served.engine.go.set()
    assert all(one.result().status_code == 200 for one in (*behind, first))


def test_an_app_with_many_requests_does_not_starve_another(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    greedy = [asking(served, f"{n} greedy", app_id="greedy") for n in range(6)]
    modest = [asking(served, f"{'ab'[n]} modest", app_id="modest") for n in range(2)]
    served.engine.go.set()
    assert all(one.result().status_code == 200 for one in (*greedy, *modest))
    order = served.engine.prompts
    assert order[0] == "0 greedy" and order.index("a modest") == 1, "who has had least is next"
    assert order.index("b modest") <= 4, "and so on, by turns"
    assert [one for one in order if one.endswith("greedy")] == [f"{n} greedy" for n in range(6)]


def test_an_app_that_asks_while_others_are_answered_is_let_in_at_the_next_place(serve: Serve) -> None:
    served = serve(session={"parallel": 2})
    served.engine.go.clear()
    greedy = [asking(served, f"{n} greedy", app_id="greedy", max_tokens=40, min_tokens=40) for n in range(8)]
    modest = asking(served, "modest", app_id="modest")
    served.engine.go.set()
    assert modest.result().status_code == 200
    assert all(one.result().status_code == 200 for one in greedy)
    assert served.engine.prompts.index("modest") <= 3


def test_tenants_have_shares_of_their_own(serve: Serve) -> None:
    from rekindle.server.auth import ApiKeys
    from tests.server.serving import ALICE, BOB

    served = serve(session={"parallel": 1}, keys=ApiKeys([ALICE, BOB]))
    served.engine.go.clear()
    line = served.service.admission
    asked = []
    for number, key in enumerate([ALICE] * 4 + [BOB]):
        asked.append(Asking(lambda n=number, k=key: served.post(PATH, k, prompt=f"{n} {k}", app_id="same", **SHORT)))
        eventually(lambda n=number: line.running + line.waiting == n + 1)
    served.engine.go.set()
    assert all(one.result().status_code == 200 for one in asked)
    assert served.engine.prompts[1] == f"4 {BOB}"


def test_what_many_ask_at_once_is_computed_once(serve: Serve) -> None:
    served = serve(session={"parallel": 16})
    count, prefix = 16, len(PREFIX.encode())
    started = threading.Barrier(count)

    def ask(number: int) -> dict[str, Any]:
        started.wait()
        told: dict[str, Any] = served.post(PATH, prompt=f"{PREFIX}{number:02}?", **SHORT).json()
        return told

    replies = [one.result() for one in [Asking(lambda n=n: ask(n)) for n in range(count)]]
    computed = sum(reply["rekindle"]["computed"] for reply in replies)
    assert prefix <= computed <= prefix + 32 * count, "the beginning once, and of each at most a block"
    assert served.engine.prefilled == computed, "what is told is what was done"
    with Session(FakeEngine(), cache="off") as direct:
        for number, reply in list(enumerate(replies))[::5]:
            expected = direct.generate(f"{PREFIX}{number:02}?", temperature=0.0, max_tokens=2)
            assert reply["choices"][0]["text"] == expected.text


def test_replies_that_share_steps_are_those_of_each_alone(serve: Serve, direct: Session) -> None:
    served = serve(session={"parallel": 8})
    prompts = [f"{number}" * (1 + 20 * number) for number in range(8)]
    body = {"max_tokens": 30, "min_tokens": 30, "temperature": 1.0, "seed": 5}
    asked = [Asking(lambda p=p: served.post(PATH, prompt=p, **body).json()) for p in prompts]
    for prompt, one in zip(prompts, asked, strict=True):
        assert one.result()["choices"][0]["text"] == direct.generate(prompt, **body).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_may_end_while_the_server_stops(tmp_path: Path, direct: Session, stream: bool) -> None:
    engine = Gated()
    engine.go.clear()
    body: dict[str, Any] = {"prompt": PREFIX, "temperature": 0, "max_tokens": 12, "stream": stream}
    with serving(fake_session(tmp_path / "cache", engine), stop_timeout="60s") as served:
        client = served.http()
        reading = Asking(lambda: client.post(PATH, json=body))
        assert engine.entered.wait(60)
        stopping = Asking(lambda: setattr(served.server._uvicorn, "should_exit", True))
        stopping.result()
        eventually(lambda: refuses(served.url))
        engine.go.set()
        answer = reading.result()
        client.close()
    expected = direct.generate(PREFIX, temperature=0.0, max_tokens=12).text
    if stream:
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer)) == expected
    else:
        assert answer.json()["choices"][0]["text"] == expected
    assert reused(tmp_path / "cache", PREFIX) >= len(PREFIX) - 1, "and what it computed is on disk"


def test_a_reply_that_does_not_end_in_time_is_cut_and_kept(tmp_path: Path) -> None:
    engine = Gated()
    with (
        serving(fake_session(tmp_path / "cache", engine), stop_timeout="1s") as served,
        contextlib.ExitStack() as stack,
    ):
        client = stack.enter_context(served.http())
        answer = stack.enter_context(client.stream("POST", PATH, json={"prompt": PREFIX, "stream": True, **LONG}))
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        engine.go.clear()
        stopping = Asking(lambda: setattr(served.server._uvicorn, "should_exit", True))
        stopping.result()
        with contextlib.suppress(httpx.HTTPError):  # cut, or told in the stream
            for _ in lines:
                pass
        eventually(lambda: served.session._engine is None)
    assert reused(tmp_path / "cache", PREFIX) >= len(PREFIX) - 1


def refuses(url: str) -> bool:
    """Whether new requests are refused there, or nobody listens any more."""
    try:
        return httpx.get(f"{url}/health").status_code == 503
    except httpx.HTTPError:
        return True


def reused(folder: Path, prompt: str) -> int:
    """How much of a prompt a new session finds on disk."""
    with fake_session(folder, FakeEngine()) as session:
        return session.generate(prompt, max_tokens=0).reuse.disk


def test_what_is_on_disk_outlives_the_server(tmp_path: Path) -> None:
    with serving(fake_session(tmp_path / "cache")) as served:
        before = served.chat(PREFIX)
    with serving(fake_session(tmp_path / "cache")) as served:
        after = served.chat(PREFIX)
    assert after["choices"] == before["choices"]
    assert after["rekindle"]["loaded_from"]["disk"] == after["usage"]["prompt_tokens"] - 1


class Crowded(Gated):
    """All its sequences lie in one buffer, as llama.cpp's do."""

    capabilities = replace(FakeEngine.capabilities, crowded=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_where_company_in_the_buffer_changes_bits_deterministic_requests_come_one_by_one(
    serve: Serve, deterministic: bool
) -> None:
    served = serve(Crowded(), session={"deterministic": deterministic, "parallel": 4})
    assert served.service.admission.places == (1 if deterministic else 4)
    assert serve().service.admission.places > 1
