"""Where an agent's prompt parts from the one before, and why: the turn, the token, both texts and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.divergence import ChatPlace, Parting, cause_of
from rekindle.cache.explain import Explanation
from rekindle.core.request import Message
from rekindle.engine.fake import VOCABULARY
from tests.server.scripted import ScriptedEngine
from tests.text.test_replay import THINKING, tokenizer_of

RULES = "The keeper lights the lamp at dusk, and writes the hour into the book. " * 40
CALL = '<tool_call>\n{"name":"look","arguments":{"at":   "the lamp"}}\n</tool_call>'


def tool(name: str) -> dict[str, Any]:
    about = {"name": name, "description": f"Does {name}. " * 8, "parameters": {"properties": {"at": {}}}}
    return {"type": "function", "function": about}


TOOLS = [tool("look"), tool("light"), tool("write")]
SYSTEM = {"role": "system", "content": f"Version 2.1.345; keep this.\n{RULES}"}
ASKED = {"role": "user", "content": "Is the lamp lit?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the lamp"}'}}
SAID = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "It is dark."}
FIRST = [SYSTEM, ASKED]
SECOND = [*FIRST, SAID, RESULT]


def explained(
    folder: Path, reply: str, earlier: Sequence[Sequence[dict[str, Any]]], now: Sequence[dict[str, Any]], **options: Any
) -> Explanation:
    """What is said of a prompt after others were answered."""
    engine = ScriptedEngine([reply])
    engine.tokenizer = tokenizer_of(THINKING, VOCABULARY)  # type: ignore[assignment]
    with Session(engine, cache=str(folder)) as session:
        for messages in earlier:
            session.chat(messages, tools=TOOLS, max_tokens=200)  # type: ignore[arg-type]
        session.flush()
        session.cache.unpark()
        return session.explain(now, **{"tools": TOOLS, **options})  # type: ignore[arg-type]


def changed(message: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    assert old in message["content"]
    return {**message, "content": message["content"].replace(old, new)}


CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str, str | None]] = {
    "nonce": ("Yes.", [changed(SYSTEM, "345", "678"), ASKED], {}, "message 1 of 2 (system)", "nonce"),
    "reordered tools": ("Yes.", FIRST, {"tools": [TOOLS[1], TOOLS[0], TOOLS[2]]}, "the tools", "tools"),
    "another tool": ("Yes.", FIRST, {"tools": TOOLS[:2]}, "the tools", "tools"),
    "stripped thought": (f"<think>\nHm.\n</think>\n\n{CALL}", SECOND, {}, "message 3 of 4 (assistant)", "thought"),
    "respelled reply": (f"Let me look.{CALL}", SECOND, {}, "message 3 of 4 (assistant)", "reply"),
    "edited history": ("Yes.", [SYSTEM, changed(ASKED, "lamp", "fire"), SAID, RESULT], {}, "message 2 of 4 (user)",
                       "history"),
    "compaction": ("Yes.", [SYSTEM, {"role": "user", "content": "So far: all dark."}, SAID, RESULT], {},
                   "message 2 of 4 (user)", "history"),
    "another question": ("Yes.", [SYSTEM, {"role": "user", "content": "Is it late?"}], {}, "message 2 of 2 (user)",
                         None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_turn_token_texts_and_cause_are_named_in_ten_lines(tmp_path: Path, name: str) -> None:
    reply, now, options, where, cause = CASES[name]
    told = explained(tmp_path / "cache", reply, [FIRST], now, **options)
    found = told.difference
    assert found is not None and (found.where, found.cause) == (where, cause)
    assert found.ours != found.known and found.position >= told.reused
    text = str(told)
    assert len(text.splitlines()) <= 10 and f"token {found.position:,}, in {where}" in text
    assert ("likely cause" in text) == (cause is not None)
    assert Explanation.from_dict(told.as_dict()) == told


def test_what_changes_with_every_request_is_still_ten_lines(tmp_path: Path) -> None:
    earlier = [[changed(SYSTEM, "345", str(number)), ASKED] for number in (111, 222, 333)]
    told = explained(tmp_path / "cache", "Yes.", earlier, [changed(SYSTEM, "345", "444"), ASKED])
    assert told.difference is not None and told.difference.cause == "nonce" and told.change is not None
    assert len(str(told).splitlines()) <= 10


def test_the_same_text_in_other_tokens_is_called_that() -> None:
    tokenizer = tokenizer_of(THINKING)
    text = "The lamp is lit."
    whole = tokenizer.encode(text)
    messages = [Message("user", "?"), Message("assistant", text), Message("user", "Sure?")]

    class TwoSpellings:
        stop_ids, template = tokenizer.stop_ids, tokenizer.template

        def spell(self, tokens: Sequence[int]) -> str:
            return tokenizer.spell([token for one in tokens for token in (whole[:2] if one == 999 else [one])])

    parting = Parting((), whole, [999, *whole[2:]])
    assert cause_of(parting, ChatPlace(1), messages, TwoSpellings()) == "tokens"  # type: ignore[arg-type]
