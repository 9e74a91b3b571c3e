"""What no model should read is dropped, with the cache on or off alike; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.core.request import Request
from rekindle.server.canonical import Canonical, canonical_request
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"
RULES = "You are an agent. " * 40
NAMED = "system (x-anthropic-billing-header)"


def ask(served: Served, number: int, **more: Any) -> dict[str, Any]:
    """A conversation of Claude Code, whose header has another number."""
    system = [{"type": "text", "text": HEADER.format(number)}, {"type": "text", "text": RULES}]
    answer = served.post(
        "/v1/messages", model="fake-0", max_tokens=4, messages=[{"role": "user", "content": "Go."}], system=system,
        **more,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_a_second_conversation_reuses_what_is_behind_the_header(serve: Serve) -> None:
    served = serve(ScriptedEngine(["Yes."]))
    first, second = (ask(served, number) for number in (495, 88))
    assert first["rekindle"]["ignored"] == second["rekindle"]["ignored"] == [NAMED]
    assert first["rekindle"]["computed"] > len(RULES) and second["rekindle"]["computed"] == 1


def test_it_is_dropped_without_a_cache_too(serve: Serve) -> None:
    served = serve(ScriptedEngine(["Yes."]))
    prompts = served.session.engine.inner.prompts  # type: ignore[attr-defined]
    assert ask(served, 1, rekindle={"reuse": "off"})["rekindle"]["ignored"] == [NAMED]
    ask(served, 2)
    assert prompts[0] == prompts[1] and "billing" not in prompts[0] and RULES in prompts[0]


def test_off_drops_nothing(serve: Serve) -> None:
    served = serve(ScriptedEngine(["Yes."]), canonical="off")
    first, second = (ask(served, number) for number in (495, 88))
    assert first["rekindle"]["ignored"] == [] and second["rekindle"]["computed"] > len(RULES)
    assert HEADER.format(88) in served.session.engine.inner.prompts[-1]  # type: ignore[attr-defined]


def test_the_prompt_of_a_chat_and_its_explanation_are_the_same(serve: Serve) -> None:
    served = serve(ScriptedEngine(["Yes."]))
    messages = [{"role": "system", "content": f"{HEADER.format(3)}\n\n{RULES}"}, {"role": "user", "content": "Go."}]
    reply = served.chat(messages)
    assert reply["rekindle"]["ignored"] == [NAMED]
    explained = served.post("/v1/rekindle/explain", messages=messages).json()
    assert explained["tokens"] == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "content", [f"See {HEADER}", "x-anthropic-billing-header", "X-Anthropic-Billing-Header: a", f"\n{HEADER}", "Plain."]
)
def test_text_that_only_resembles_it_stays(content: str) -> None:
    request = Request.of([{"role": "system", "content": content}, {"role": "user", "content": HEADER}])
    assert canonical_request(request, "default") == (request, [])


def tools(*names: str) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]


@pytest.mark.parametrize(("level", "sorted_too"), [("off", False), ("default", False), ("full", True)])
def test_full_makes_the_order_of_tools_and_keys_stable(level: Canonical, sorted_too: bool) -> None:
    one, other = (
        canonical_request(Request.of([{"role": "user", "content": "Go."}], tools=tools(*names)), level)
        for names in (("write", "read"), ("read", "write"))
    )
    assert (repr(one[0].tools) == repr(other[0].tools)) is sorted_too
    assert one[1] == (["tools (order)"] if sorted_too else [])


def test_a_system_message_of_nothing_else_is_left_out() -> None:
    request = Request.of([{"role": "system", "content": HEADER}, {"role": "user", "content": "Go."}])
    changed, names = canonical_request(request, "default")
    assert [message.role for message in changed.prompt] == ["user"] and names == [NAMED]  # type: ignore[union-attr]
