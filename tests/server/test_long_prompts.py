"""Long texts and large bodies: whoever sends them may have to wait, or is refused; nobody else waits."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from rekindle.core.request import Message
from rekindle.engine.fake import ByteTokenizer
from rekindle.text.base import QuotedChat
from tests.server.conftest import Serve
from tests.server.serving import Gated, Served

LONG = "word " * 40_000  # far more than the context holds
_LOOP = "rekindle-serve"


class Watched(ByteTokenizer):
    """Knows which threads tokenized, and the most that was tokenized at once."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.longest = 0

    def encode(self, text: str, *, token_limit: int | None = None) -> list[int]:
        self.threads.add(threading.current_thread().name)
        tokens = super().encode(text, token_limit=token_limit)
        self.longest = max(self.longest, len(tokens))
        return tokens

    def encode_chat(self, *given: Any, **options: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return super().encode_chat(*given, **options)

    def encode_quoting(self, messages: list[Message], *given: Any, **options: Any) -> QuotedChat:  # type: ignore[override]
        self.threads.add(threading.current_thread().name)
        return super().encode_quoting(messages, *given, **options)


@pytest.fixture
def watched(serve: Serve) -> Served:
    """A server whose tokenizer is watched."""
    engine = Gated()
    engine.tokenizer = Watched()  # type: ignore[misc]
    return serve(engine)


_CHAT = [{"role": "user", "content": LONG}]
_TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": [1] * 100_000}),
    ("/v1/completions", {"prompt": [[1], [1] * 100_000]}),
    ("/v1/chat/completions", {"messages": _CHAT}),
    ("/v1/chat/completions", {"messages": _CHAT, "rekindle": {"documents": ["a"]}}),
    ("/tokenize", {"content": LONG}),
    ("/tokenize", {"messages": _CHAT}),
    ("/detokenize", {"tokens": [1] * 100_000}),
    ("/v1/rekindle/warm", {"prompt": LONG}),
    ("/v1/rekindle/explain", {"prompt": LONG}),
    ("/v1/rekindle/explain", {"prompt": [1] * 100_000}),
]


@pytest.mark.parametrize(("path", "body"), _TOO_LONG)
def test_what_cannot_fit_is_refused_without_being_tokenized(watched: Served, path: str, body: dict[str, Any]) -> None:
    answer = watched.post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    tokenizer = watched.engine.tokenizer
    assert isinstance(tokenizer, Watched) and tokenizer.longest < len(LONG) and watched.engine.steps == 0


def test_nothing_is_tokenized_on_the_event_loop(watched: Served) -> None:
    chat = [{"role": "user", "content": "hello " * 20}]
    assert _LOOP in {thread.name for thread in threading.enumerate()}
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1, "rekindle": {"documents": ["a", LONG]}}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1, "prediction": {"content": LONG}}),
        ("/tokenize", {"content": "hello", "with_pieces": True}),
        ("/tokenize", {"messages": chat}),
        ("/v1/rekindle/warm", {"messages": chat}),
        ("/v1/rekindle/explain", {"messages": chat}),
    ):
        assert watched.post(path, **body).status_code == 200, (path, body)
    tokenizer = watched.engine.tokenizer
    assert isinstance(tokenizer, Watched) and tokenizer.threads and _LOOP not in tokenizer.threads


_SAID = {
    "/v1/chat/completions": ({"messages": _CHAT}, "maximum context length is {1} tokens. However, .* in {0} tokens"),
    "/v1/completions": ({"prompt": LONG}, "maximum context length is {1} tokens. However, .* in {0} tokens"),
    "/v1/responses": ({"input": LONG}, "maximum context length is {1} tokens. However, .* in {0} tokens"),
    "/v1/messages": ({"messages": _CHAT, "max_tokens": 1}, "prompt is too long: {0} tokens > {1} maximum"),
    "/api/chat": ({"messages": _CHAT}, "input length exceeds the context length: {0} > {1}"),
    "/api/generate": ({"prompt": LONG}, "input length exceeds the context length: {0} > {1}"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", _SAID)
def test_a_prompt_that_does_not_fit_gets_the_error_of_its_protocol_with_both_numbers(
    served: Served, path: str, stream: bool
) -> None:
    body, words = _SAID[path]
    answer = served.post(path, **body, stream=stream)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and re.search(words.format(r"\d+", 4096), message), answer.text
    if path.startswith("/v1/") and path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"


_NESTED = "[" * 190 + "]" * 190
_TOO_MANY = {
    "lists": f"[{','.join(['[]'] * 120_000)}]",
    "objects": f"[{','.join(['{}'] * 120_000)}]",
    "fields": json.dumps({str(number): 0 for number in range(120_000)}),
    "values": f"[{','.join(['1'] * 1_700_000)}]",
    "nested lists": f"[{','.join([_NESTED] * 1000)}]",
}


@pytest.mark.parametrize("value", _TOO_MANY.values(), ids=list(_TOO_MANY))
def test_a_body_that_takes_long_to_parse_is_refused(served: Served, value: str) -> None:
    with served.http() as client:
        answer = client.post("/v1/completions", content=f'{{"prompt": "a", "max_tokens": 1, "other": {value}}}')
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_large"


def test_texts_may_say_what_they_like(served: Served) -> None:
    text = '\\"[{:' * 60_000 + "\\\\"
    assert served.post("/tokenize", content="a", other=text).status_code == 200
    assert served.post("/tokenize", content="a", other=[1] * 200_000).status_code == 200
