"""`keep_reply_tokens`: the tokens that a model wrote stand in for its reply, for whoever it was given to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle import Session
from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Request
from rekindle.engine.fake import START, ByteTokenizer, FakeEngine
from rekindle.engine.lora_manager import LoraManager
from rekindle.session.prompt import OwnReplies, WrittenReplies
from rekindle.settings import Settings
from rekindle.text.base import Written


class TwoSpellings(ByteTokenizer):
    """Where a reply is not known as it was written, it takes a token more."""

    def encode_chat(self, messages: Sequence[Message], written: Written | None = None, **options: Any) -> list[int]:
        spelled = sum(m.role == "assistant" and m.content not in (written or {}) for m in messages)
        return [*[START] * spelled, *super().encode_chat(messages, **options)]


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
    return Request("x", tenant=tenant, cache_salt=salt, adapter=adapter)


def note(kept: WrittenReplies, request: Request, text: str) -> None:
    own = kept.of(request)
    assert isinstance(own, OwnReplies)
    own.note(ENGINE, cast(Reply, _Said(text)))


class _Said:
    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, tuple(text.encode())


def test_each_scope_and_adapter_has_its_own() -> None:
    kept = replies()
    whose = [asked(), asked("b"), asked(salt="s"), asked(adapter="l"), asked("b", "s", "l")]
    for number, request in enumerate(whose):
        note(kept, request, f"reply {number}")
    for number, request in enumerate(whose):
        assert dict(kept.of(request) or {}) == {f"reply {number}": tuple(f"reply {number}".encode())}


def test_so_many_are_remembered_and_nobody_drives_out_those_of_another_tenant() -> None:
    kept = replies(most=3, max_tenants=2)
    note(kept, asked("a"), "mine")
    for number in range(10):
        note(kept, asked("b", salt=f"salt {number}"), "theirs")
    assert "mine" in (kept.of(asked("a")) or {})
    assert sum("theirs" in (kept.of(asked("b", salt=f"salt {number}")) or {}) for number in range(10)) == 3
    note(kept, asked("c"), "new")
    assert "mine" not in (kept.of(asked("a")) or {}), "tenants are bounded too"


def test_without_the_setting_nothing_is_remembered() -> None:
    assert WrittenReplies(Settings(), cast(LoraManager, Names())).of(asked()) is None
