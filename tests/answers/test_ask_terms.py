"""How an application asks: what is remembered of it, and that questions are asked again in the same way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rekindle.answers.ask_terms import AskTerms
from rekindle.core.request import Message, Request

SYSTEM = Message("system", "You are the mail app.")
QUESTION = "Who wrote last?"


def terms_of(*messages: Message, **options: Any) -> AskTerms | None:
    return AskTerms.of(Request.of(list(messages), **options), QUESTION, 3, "bm25")


def own(**options: Any) -> AskTerms:
    found = terms_of(SYSTEM, Message("user", f"Q: {QUESTION} "), **options)
    assert found is not None
    return found


def test_another_question_is_asked_in_the_same_way() -> None:
    terms = own(temperature=0.5, seed=7, stop=["."], max_tokens=9, min_tokens=2, adapter="mail", reuse="quantized")
    assert (terms.lead, terms.top_k, terms.retrieval) == ("Q: ", 3, "bm25")
    request = terms.request(" When? ", tenant="alice")
    assert request.prompt == (SYSTEM, Message("user", "Q: When?")) and request.tenant == "alice"
    assert (request.stop, request.max_tokens, request.min_tokens) == ((".",), 9, 2)
    assert (request.adapter, request.reuse, request.sampling.temperature) == ("mail", "quantized", 0.5)
    assert request.sampling.seed is None


def test_terms_survive_being_stored() -> None:
    terms = own(stop=["a", "b"], top_p=0.5)
    text = terms.to_json()
    assert text is not None and AskTerms.from_json(text) == terms


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"before": 3}'])
def test_damaged_terms_are_none(text: str) -> None:
    assert AskTerms.from_json(text) is None


def test_a_chat_with_a_history_is_not_learnt_but_has_a_fingerprint_of_its_own() -> None:
    history = (SYSTEM, Message("user", "Hello."), Message("assistant", "Hi."))
    terms = terms_of(*history, Message("user", QUESTION))
    assert terms is not None and terms.to_json() is None
    assert terms.fingerprint != own().fingerprint


def test_a_very_long_system_prompt_is_not_learnt() -> None:
    assert replace(own(), before=(Message("system", "a" * 100_000),)).to_json() is None


@pytest.mark.parametrize(
    "last",
    [Message("user", "Something else."), Message("assistant", QUESTION), Message("user", QUESTION, {"name": "x"})],
)
def test_a_chat_that_does_not_end_with_the_question_has_no_terms(last: Message) -> None:
    assert terms_of(SYSTEM, last) is None


def test_only_what_shapes_the_text_is_in_the_fingerprint() -> None:
    assert own(max_tokens=9, seed=1).fingerprint == own(max_tokens=8, seed=2).fingerprint
    different = [own(), own(temperature=1.0), own(stop=["x"]), own(min_tokens=1), replace(own(), top_k=4)]
    different += [replace(own(), lead=""), replace(own(), before=())]
    assert len({terms.fingerprint for terms in different}) == len(different)
