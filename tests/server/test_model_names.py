"""Names of models: the model, its adapters, MODEL:ADAPTER, and aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import InvalidSetting
from rekindle.server.errors import ApiError
from rekindle.server.host import ModelNames
from tests.server.conftest import Serve
from tests.server.soak import tiny_embedder

ALIASES = ["claude-*-haiku=small:writer", "claude-*=small", "gpt-5=writer"]


@pytest.mark.parametrize(
    ("name", "adapter"),
    [(None, ""), ("", ""), ("small", ""), ("writer", "writer"), ("small:writer", "writer"), ("claude-4-opus", ""),
     ("claude-4-haiku", "writer"), ("gpt-5", "writer")],
)  # fmt: skip
def test_what_names_stand_for(name: str | None, adapter: str) -> None:
    assert ModelNames("small", ALIASES).resolve(name, {"small": ["writer"]}) == ("small", adapter)


@pytest.mark.parametrize("name", ["gpt-5-mini", "small:poet", "other:writer", "CLAUDE-4"])
def test_unknown_names_are_refused_unless_there_is_a_default(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        ModelNames("small", ALIASES).resolve(name, {"small": ["writer"]})
    assert refused.value.status == 404 and name in refused.value.message
    assert ModelNames("small", [*ALIASES, "*=writer"]).resolve(name, {"small": ["writer"]}).adapter == "writer"


def test_a_name_of_its_own_comes_before_an_alias() -> None:
    assert ModelNames("small", ["*=writer"]).resolve("small", {"small": ["writer"]}).adapter == ""


def test_an_alias_of_what_is_not_loaded_is_refused() -> None:
    with pytest.raises(ApiError):
        ModelNames("small", ["gpt=writer"]).resolve("gpt", {"small": []})


@pytest.mark.parametrize("alias", ["claude", "=small", "claude=", ""])
def test_an_alias_names_both(alias: str) -> None:
    with pytest.raises(InvalidSetting, match="PATTERN=MODEL"):
        ModelNames("small", [alias])


def test_aliases_work_in_every_protocol(serve: Serve) -> None:
    served = serve(alias=("claude-*=fake-0",))
    chat = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = served.post(path, model="claude-opus", **chat)
        assert answer.status_code == 200 and answer.json()["model"] == "fake-0"
    assert served.get("/v1/models/claude-opus").json()["id"] == "fake-0"
    assert served.get("/v1/models/gpt").status_code == 404


def test_an_alias_may_stand_for_the_embedder(serve: Serve, tmp_path: Path) -> None:
    embedder = tiny_embedder(tmp_path / "embedder")
    own: dict[str, Any] = {"embedder": embedder}
    served = serve(session=own, alias=("gpt-*=fake-0", f"text-embedding-*={embedder}", f"fake-*={embedder}"))
    expected = served.post("/v1/embeddings", input="A lamp.").json()["data"]
    for name in ("text-embedding-3-small", embedder):
        answer = served.post("/v1/embeddings", model=name, input="A lamp.").json()
        assert (answer["data"], answer["model"]) == (expected, embedder)
        assert served.post("/api/embed", model=f"{name}:latest", input="A lamp.").json()["model"] == embedder
        assert served.post("/api/embeddings", model=name, prompt="A lamp.").status_code == 200
        assert served.post("/api/show", model=name).json()["capabilities"] == ["embedding"]
    assert served.get("/v1/models/text-embedding-3-small").json()["id"] == embedder
    for name in ("gpt-5", "fake-0"):  # language models: an alias of theirs, and a name of its own
        assert served.post("/v1/embeddings", model=name, input="A lamp.").status_code == 404
        assert served.get(f"/v1/models/{name}").json()["id"] == "fake-0"
