"""`keep_reply_tokens`: the tokens that a model wrote stand in for its reply, for whoever it was given to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle import Session
from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Request, Sampling
from rekindle.engine.fake import END, START, VOCABULARY, ByteTokenizer, FakeEngine
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import InvalidPrompt
from rekindle.session.prompt import PromptTokens, WrittenReplies
from rekindle.settings import Settings
from rekindle.text.base import ReplayedChat, Written, WrittenReply
from tests.server.scripted import Reciting
from tests.text.test_replay import THINKING, tokenizer_of


class TwoSpellings(ByteTokenizer):
    """Where a reply is not known as it was written, it takes a token more."""

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self.encode_replayed(messages, {}, **options).tokens

    def encode_replayed(self, messages: Sequence[Message], written: Written, **options: Any) -> ReplayedChat:
        spelled = sum(m.role == "assistant" and at not in written for at, m in enumerate(messages))
        return ReplayedChat([*[START] * spelled, *super().encode_chat(messages, **options)], len(written))


class Names:
    """Adapters whose digests are their names."""

    def digest(self, name: str | None) -> str | None:
        return name


ENGINE = FakeEngine()
HELLO = [{"role": "user", "content": "Hello."}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}]


@pytest.mark.parametrize("stranger", [("alice", "other"), ("alice", None), ("bob", "own")])
def test_a_reply_to_somebody_else_changes_no_prompt(tmp_path: Path, stranger: tuple[str, str | None]) -> None:
    engine = FakeEngine()
    engine.tokenizer = TwoSpellings()
    with Session(engine, cache=str(tmp_path / "cache"), keep_reply_tokens=True) as session:

        def count(tenant: str, salt: str | None) -> int:
            return session.chat(ANSWERED, max_tokens=1, tenant=tenant, cache_salt=salt).usage.prompt_tokens

        before = count("alice", "own")
        assert count(*stranger) == before
        yes = Grammar.gbnf('root ::= "yes"')
        assert session.chat(HELLO, grammar=yes, max_tokens=4, tenant="alice", cache_salt="own").text == "yes"
        assert count("alice", "own") == before - 1
        assert count(*stranger) == before


def replies(**limits: int) -> WrittenReplies:
    return WrittenReplies(Settings(keep_reply_tokens=True), cast(LoraManager, Names()), **limits)


def asked(tenant: str = "a", salt: str = "", adapter: str = "") -> Request:
    return Request((Message("user", "x"),), tenant=tenant, cache_salt=salt, adapter=adapter)


def note(kept: WrittenReplies, request: Request, text: str) -> None:
    kept.note(ENGINE, PromptTokens((1, 2)), request, cast(Reply, _Said(text)))


def is_known(kept: WrittenReplies, request: Request, text: str) -> bool:
    found = kept.standing_for(request, [Message("user", "x"), Message("assistant", text)])
    return found == {1: WrittenReply(tuple(text.encode()), "", (1, 2))}


class _Said:
    thinking, tool_calls = "", ()

    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, tuple(text.encode())


def test_each_scope_and_adapter_has_its_own() -> None:
    kept = replies()
    whose = [asked(), asked("b"), asked(salt="s"), asked(adapter="l"), asked("b", "s", "l")]
    for number, request in enumerate(whose):
        note(kept, request, f"reply {number}")
    for number, request in enumerate(whose):
        assert [is_known(kept, request, f"reply {n}") for n in range(5)] == [n == number for n in range(5)]


def test_a_reply_stands_in_only_in_the_chat_that_it_answered() -> None:
    kept = replies()
    note(kept, asked(), "yes")
    assert is_known(kept, asked(), "yes")
    assert kept.standing_for(asked(), [Message("user", "y"), Message("assistant", "yes")]) == {}
    assert kept.standing_for(asked(), [Message("user", "x"), Message("user", "yes")]) == {}


def test_so_many_are_remembered_and_nobody_drives_out_those_of_another_tenant() -> None:
    kept = replies(most=3, max_tenants=2)
    note(kept, asked("a"), "mine")
    for number in range(10):
        note(kept, asked("b", salt=f"salt {number}"), "theirs")
    assert is_known(kept, asked("a"), "mine")
    assert sum(is_known(kept, asked("b", salt=f"salt {number}"), "theirs") for number in range(10)) == 3
    note(kept, asked("c"), "new")
    assert not is_known(kept, asked("a"), "mine"), "tenants are bounded too"


def test_without_the_setting_nothing_is_remembered() -> None:
    kept = WrittenReplies(Settings(), cast(LoraManager, Names()))
    note(kept, asked(), "yes")
    assert not is_known(kept, asked(), "yes")
    assert not kept._tenants


def test_calls_that_are_no_list_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=str(tmp_path / "cache"), keep_reply_tokens=True) as session:
        session.chat(HELLO, max_tokens=1)
        with pytest.raises(InvalidPrompt, match="tool_calls"):
            session.chat([*HELLO, {"role": "assistant", "content": "", "tool_calls": 5}, *HELLO])


# Replies with thoughts and calls: what the model reads is the same with and without the cache

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
REPLY = '<think>\nHm.\n</think>\n\n<tool_call>{"name":"weather","arguments":{"city":   "Oslo"}}</tool_call>'
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SAID = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALLED]}
ROUND = [*HELLO, SAID, {"role": "tool", "content": "wet"}]


class RecitesFirst(FakeEngine):
    """A real decoder whose first replies are given; what it says then depends on all it has read."""

    def __init__(self, *replies: str) -> None:
        super().__init__()
        self.tokenizer = tokenizer_of(THINKING, VOCABULARY)  # type: ignore[assignment]
        self._replies = list(replies)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> Any:
        if not self._replies:
            return super().sampler(sampling, context)
        return Reciting([*self.tokenizer.encode(self._replies.pop(0)), END])


def second_reply(folder: Path, *, keeps: bool, cache: bool, others: int = 0) -> Reply:
    """The reply to the second round, after `others` answered in between."""
    engine = RecitesFirst(REPLY, *["Yes."] * others)
    with Session(engine, cache=str(folder) if cache else "off", keep_reply_tokens=keeps) as session:
        first = session.chat(HELLO, tools=[WEATHER])
        assert first.thinking == "Hm." and [call.name for call in first.tool_calls] == ["weather"]
        for number in range(others):
            session.chat(f"Other {number}?")
        return session.chat(ROUND, tools=[WEATHER], max_tokens=12, min_tokens=12, logprobs=3)


@pytest.mark.parametrize(
    ("keeps", "others", "replayed"),
    [
        pytest.param(True, 0, 1, id="present"),
        pytest.param(True, 2, 0, id="evicted"),
        pytest.param(False, 0, 0, id="off"),
    ],
)
def test_the_cache_changes_nothing_with_replies_present_evicted_and_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, others: int, replayed: int
) -> None:
    monkeypatch.setattr("rekindle.session.session.WrittenReplies", functools.partial(WrittenReplies, most=2))
    warm = second_reply(tmp_path / "cache", keeps=keeps, cache=True, others=others)
    cold = second_reply(tmp_path, keeps=keeps, cache=False, others=others)
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs and cold.reuse.reused == 0
    assert warm.reuse.replayed_replies == cold.reuse.replayed_replies == replayed
    new = len("\ntool\nwet\nassistant\n") + 4
    assert warm.reuse.computed <= new if replayed else warm.reuse.computed > new
    if not replayed:
        assert warm.tokens == second_reply(tmp_path, keeps=False, cache=False).tokens, "as if nothing was ever kept"
