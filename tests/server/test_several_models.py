"""Several models on one address: each request gets the one it names, loaded when it must be, warm when it returns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rekindle import Session
from rekindle.errors import InvalidSetting, ModelError
from rekindle.models.download import Progress
from rekindle.server.host import ServedModel
from rekindle.server.serve import Server
from rekindle.session.session_group import SessionGroup
from rekindle.settings import ServerSettings, Settings
from tests.lora import save_lora
from tests.server.serving import PATIENCE_SECONDS, Asking, connected, eventually

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

TEXT = "What was the wind like today, keeper of the lighthouse?"
_CHAT = [{"role": "user", "content": TEXT}]
_GREEDY = {"temperature": 0, "max_tokens": 6}
_OPTIONS = {"temperature": 0, "num_predict": 6}
PROTOCOLS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/chat/completions": ({"messages": _CHAT, **_GREEDY}, lambda told: told["choices"][0]["message"]["content"]),
    "/v1/completions": ({"prompt": TEXT, **_GREEDY}, lambda told: told["choices"][0]["text"]),
    "/v1/messages": ({"messages": _CHAT, **_GREEDY}, lambda told: "".join(b["text"] for b in told["content"])),
    "/v1/responses": (
        {"input": TEXT, "temperature": 0, "max_output_tokens": 6},
        lambda told: "".join(item["content"][0]["text"] for item in told["output"]),
    ),
    "/api/chat": ({"messages": _CHAT, "options": _OPTIONS, "stream": False}, lambda told: told["message"]["content"]),
    "/api/generate": ({"prompt": TEXT, "raw": True, "options": _OPTIONS, "stream": False}, lambda t: t["response"]),
}


@dataclass
class Several:
    """A server with the models alpha and beta."""

    url: str
    server: Server
    opened: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)  # models are opened while it is set
    broken: bool = False

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_SECONDS)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_SECONDS).raise_for_status().json()

    def ask(self, model: str, path: str = "/v1/chat/completions") -> tuple[str, dict[str, str]]:
        """What a model says, and where the KV of the prompt came from."""
        body, text_of = PROTOCOLS[path]
        answer = self.post(path, model=model, **body)
        assert answer.status_code == 200, answer.text
        plan = dict(part.split("=") for part in answer.headers["X-Rekindle-Plan"].split("; "))
        return text_of(answer.json()), plan

    def loaded(self) -> list[str]:
        return [model["model"] for model in self.get("/v1/rekindle/server")["models"] if model["loaded"]]


Start = Callable[..., Several]


@pytest.fixture
def start(two_folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Start]:
    """Serve both within a limit, as a multiple of the size of one; 0: one byte."""
    given: dict[str, Any] = {"engine": "hf", "device": "cpu", "cache": str(tmp_path / "cache"), "parallel": 2}
    with Session(two_folders[0], **given) as one:
        size = one.engine.memory_bytes
    with ExitStack() as stack:

        def begin(models: float = 1.5, adapters: dict[str, list[str]] | None = None, **settings: Any) -> Several:
            known = Settings.load(given)
            group = SessionGroup(max(1, int(models * size)), known)

            def open_session(folder: Path, report: Progress) -> Session:
                several.opened.append(folder.name)
                assert several.go.wait(PATIENCE_SECONDS)
                if several.broken:
                    raise ModelError("There is no such folder.")
                return Session(folder, progress=report, group=group, **given)

            served = [
                ServedModel(folder.name, functools.partial(open_session, folder), (adapters or {}).get(folder.name, []))
                for folder in two_folders
            ]
            server = Server(served, ServerSettings(port=0, **settings), None, None, group, known)
            several = Several(server.url, server)
            several.go.set()
            stack.enter_context(server.running())
            return several

        yield begin


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_model_that_left_is_warm_when_it_returns(start: Start, path: str) -> None:
    several = start()
    first, cold = several.ask("alpha", path)
    assert several.loaded() == ["alpha"] and cold["disk"] == "0"
    other, cold = several.ask("beta", path)
    assert several.loaded() == ["beta"] and other != first and cold["computed"] != "1", "nothing of alpha is beta's"
    again, warm = several.ask("alpha", path)
    assert again == first and int(warm["disk"]) > 0 and warm["computed"] == "1"
    assert several.loaded() == ["alpha"]


def test_lists_say_which_models_are_loaded(start: Start) -> None:
    several = start()
    assert [one["id"] for one in several.get("/v1/models")["data"]] == ["alpha", "beta", "minilm"]
    assert several.opened == [] and several.get("/api/ps") == {"models": []}, "looking loads nothing"
    several.ask("beta")
    told = {one["id"]: one for one in several.get("/v1/models")["data"]}
    assert told["beta"]["loaded"] and not told["alpha"]["loaded"] and several.opened == ["beta"]
    assert told["beta"]["max_model_len"] == several.get("/v1/models/beta")["max_model_len"] == 512
    assert "max_model_len" not in told["alpha"], "nobody knows it yet"
    assert [one["name"] for one in several.get("/api/ps")["models"]] == ["beta"]
    tags = several.get("/api/tags")["models"]
    assert [(tag["name"], tag.get("rekindle")) for tag in tags[:2]] == [
        ("alpha", {"loaded": False}),
        ("beta", {"loaded": True}),
    ]
    assert several.post("/api/show", model="alpha").json()["capabilities"] == ["completion", "tools"]
    assert several.post("/api/show", model="beta").json()["parameters"] == "num_ctx 512"
    lines = httpx.get(f"{several.url}/metrics").text.splitlines()
    assert {'rekindle_model_loaded{model="alpha"} 0.0', 'rekindle_model_loaded{model="beta"} 1.0'} <= set(lines)


def test_names_aliases_and_the_default(start: Start) -> None:
    several = start(2.5, alias=("gpt-*=beta",))
    alpha, beta = several.ask("alpha")[0], several.ask("beta")[0]
    assert several.ask("")[0] == alpha and several.ask("gpt-5")[0] == beta
    assert several.ask("beta:latest", "/api/chat")[0] == beta
    refused = several.post("/v1/chat/completions", model="gamma", messages=_CHAT)
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert several.loaded() == ["alpha", "beta"], "both fit"


def test_adapters_belong_to_a_model(start: Start, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    down, up = (random.normal(0, 1, shape).astype(np.float32) for shape in ((2, 32), (16, 2)))
    folder = save_lora(tmp_path / "lora", {"model.layers.1.self_attn.v_proj": (down, up)})
    several = start(adapters={"beta": [f"writer={folder}"]})
    assert [one["id"] for one in several.get("/v1/models")["data"]] == ["alpha", "beta", "writer", "minilm"]
    plain, written = several.ask("beta")[0], several.ask("writer")[0]
    assert written != plain and several.ask("beta:writer")[0] == written and several.loaded() == ["beta"]
    assert several.post("/v1/chat/completions", model="alpha:writer", messages=_CHAT).status_code == 404
    several.ask("alpha")
    assert several.ask("writer")[0] == written, "it is loaded again with its model"


def test_requests_to_both_at_once_get_the_answers_of_each(start: Start) -> None:
    several = start()
    expected = {name: several.ask(name)[0] for name in ("alpha", "beta")}
    with ThreadPoolExecutor(6) as pool:
        asked = [(name, pool.submit(several.ask, name)) for name in ("alpha", "beta") * 6]
        for name, answer in asked:
            assert answer.result(PATIENCE_SECONDS)[0] == expected[name]
    assert len(several.loaded()) == 1


@pytest.mark.parametrize("path", PROTOCOLS)
def test_what_does_not_fit_alone_is_refused_with_both_sizes(start: Start, path: str) -> None:
    several = start(0)
    refused = several.post(path, model="alpha", **PROTOCOLS[path][0])
    assert refused.status_code == 503
    assert "alpha takes " in refused.text and "model_memory allows 1 B" in refused.text


def test_others_are_answered_while_a_model_is_loaded(start: Start) -> None:
    several = start(2.5, queue=1)
    several.ask("alpha")
    several.go.clear()
    waiting = [Asking(lambda: several.ask("beta")) for _ in range(2)]
    beta = several.server.host.models["beta"]
    eventually(lambda: beta.waiting == 2)
    assert several.ask("alpha")[0] and httpx.get(f"{several.url}/health").status_code == 200
    refused = several.post("/v1/messages", model="beta", messages=_CHAT, max_tokens=1)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
    assert several.get("/v1/rekindle/server")["waiting"] == 2
    several.go.set()
    assert waiting[0].result()[0] == waiting[1].result()[0] and several.opened.count("beta") == 1


def test_a_client_that_leaves_while_its_model_is_loaded_disturbs_nobody(start: Start) -> None:
    several = start()
    several.go.clear()
    model = several.server.host.models["alpha"]
    with connected(several, "/v1/chat/completions", model="alpha", messages=_CHAT):  # type: ignore[arg-type]
        eventually(lambda: model.waiting == 1)
    eventually(lambda: model.waiting == 0)
    several.go.set()
    assert several.ask("alpha")[0] and several.opened == ["alpha"]


def test_a_wait_for_a_model_ends_in_time(start: Start) -> None:
    several = start(timeout="0.1s")
    several.go.clear()
    refused = several.post("/v1/chat/completions", model="alpha", messages=_CHAT)
    assert refused.status_code == 504 and "--timeout" in refused.text
    several.go.set()


def test_a_model_that_could_not_be_opened_is_tried_again(start: Start) -> None:
    several = start()
    several.broken = True
    refused = several.post("/v1/chat/completions", model="alpha", messages=_CHAT)
    assert refused.status_code == 500 and "no such folder" in refused.text
    several.broken = False
    assert several.ask("alpha")[0]


def test_a_server_that_stops_while_a_model_is_loaded_says_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    several = start(stop_timeout="0.1s")
    several.go.clear()
    gone = Asking(lambda: several.post("/v1/chat/completions", model="alpha", messages=_CHAT))
    eventually(lambda: several.server.host.models["alpha"].waiting == 1)
    several.server.stop()
    answer = gone.result()
    assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]
    several.go.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_model_that_cannot_be_opened_at_the_start_ends_the_server() -> None:
    def broken(_: Progress) -> Session:
        raise InvalidSetting("It cannot be opened.")

    server = Server([ServedModel("alpha", broken)], ServerSettings(port=0))
    with pytest.raises(InvalidSetting, match="cannot be opened"):
        server.run()
