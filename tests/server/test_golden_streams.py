"""A stream of each protocol, byte for byte but for ids, times and what Rekindle adds: a thought, text, a tool call.

What a change does to them shows in golden/; written again with `python -m tests.server.test_golden_streams`.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import ScriptedEngine, fill_in_engine
from tests.server.serving import Served, fake_session, serving

REPLY = '<think>Hm.</think>Yes.<tool_call>{"name": "look", "arguments": {"at": "ö"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
USER = [{"role": "user", "content": "Look."}]
CUT = len("<think>Hm.</think>Ye")
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}],
         "stream_options": {"include_usage": True}},
    ),
    "responses": ("/v1/responses", {"input": USER, "tools": [{"type": "function", **FUNCTION}]}),
    "messages": (
        "/v1/messages", {"messages": USER, "max_tokens": 200, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
    "ollama_chat": ("/api/chat", {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}),
    "ollama_generate": ("/api/generate", {"prompt": "Look."}),
    "completion": ("/completion", {"prompt": "Look.", "return_tokens": True, "seed": 1, "stop": ["ö"]}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}),
    "completions": ("/v1/completions", {"prompt": "Look.", "stream_options": {"include_usage": True}}),
    # Cut after a few tokens, in the text behind the thought.
    "chat_cut": (
        "/v1/chat/completions", {"messages": USER, "max_tokens": CUT, "stream_options": {"include_usage": True}},
    ),
    "responses_cut": ("/v1/responses", {"input": USER, "max_output_tokens": CUT}),
    "messages_cut": ("/v1/messages", {"messages": USER, "max_tokens": CUT}),
    "ollama_chat_cut": ("/api/chat", {"messages": USER, "options": {"num_predict": CUT}}),
    # Ended by a stop string.
    "messages_stop": ("/v1/messages", {"messages": USER, "max_tokens": 200, "stop_sequences": ["s."]}),
}  # fmt: skip
GOLDEN = Path(__file__).parent / "golden"
_IDS = re.compile(r'"(id|item_id|call_id)":"[^"]*"')
_TIMES = re.compile(r'"(created|created_at|completed_at|\w+_duration)":(\d+|"[^"]*")')


def read_stream(served: Served, name: str) -> str:
    """The text of a stream, without what differs each time and without what no protocol has."""
    path, body = STREAMS[name]
    with served.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        text = "".join(answer.iter_text())
    lines = [_without_ours(line) for line in text.split("\n")]
    return _TIMES.sub(r'"\1":0', _IDS.sub(r'"\1":"*"', "\n".join(lines)))


def _without_ours(line: str) -> str:
    before, brace, rest = line.partition("{")
    if not brace:
        return line
    item = json.loads(brace + rest)
    for part in (item, item.get("response")):
        if isinstance(part, dict):  # the text of Ollama's generate has this name, too
            part.pop("rekindle", None)
            part.pop("timings", None)
    return f"{before}{json.dumps(item, ensure_ascii=False, separators=(',', ':'))}"


def scripted_engine() -> ScriptedEngine:
    engine = fill_in_engine(REPLY)
    engine.tokenizer.template = "<think>"
    return engine


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_what_it_was(tmp_path: Path, name: str) -> None:
    with serving(fake_session(tmp_path, scripted_engine())) as served:
        assert read_stream(served, name) == (GOLDEN / f"{name}.txt").read_text("utf-8")


if __name__ == "__main__":
    for each in STREAMS:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(fake_session(folder, scripted_engine())) as server,
        ):
            (GOLDEN / f"{each}.txt").write_text(read_stream(server, each), "utf-8")
