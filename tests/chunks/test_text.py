"""Text found in any prompt: at any offset, verified token by token, and never where it may not be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.session.prompt import encode_prompt
from rekindle.store.text_index import SHARED_TOKENS, SINK_TOKENS
from tests.chunks.chunk_reuse import Outcome, assert_is_exact, assert_store_is_exact, cold, kv_space_of, prefill
from tests.parity.engines import params
from tests.parity.sessions import opened
from tests.server.soak import tiny_embedder

APPROXIMATE: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3}


def some(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 250, count)]


FILE, OTHER = some(300, 1), some(200, 2)
HEAD, QUESTION = some(70, 3), some(40, 4)


def asked(*parts: Sequence[int], **options: Any) -> Request:
    return Request.of([token for part in parts for token in part], **{"max_tokens": 1, **options})


def reused(outcome: Outcome) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in outcome.reuse.chunks if chunk.source == "reused"]


@pytest.fixture
def session(tmp_path: Path) -> Any:
    with opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session:
        yield session


def test_text_of_an_earlier_prompt_is_found_to_the_token_at_any_offset(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    for offset in (0, 1, 33, 130):
        outcome = prefill(session, asked(some(offset, 6 + offset), FILE, QUESTION))
        first = max(offset, SINK_TOKENS)
        assert reused(outcome) == [(first, offset + len(FILE))]
        assert outcome.reuse.level == "approximate" and outcome.reuse.chunks[0].found_at == len(HEAD) + first - offset
        assert outcome.reuse.recomputed == round(0.3 * (len(FILE) - first + offset))


def test_the_first_tokens_of_a_prompt_are_never_reused_elsewhere(session: Session) -> None:
    prefill(session, asked(FILE, some(50, 5)))
    outcome = prefill(session, asked(some(20, 9), FILE, QUESTION))
    assert reused(outcome) == [(20 + SINK_TOKENS, 20 + len(FILE))]


def test_the_exact_prefix_comes_first_and_only_what_is_behind_it_is_looked_for(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    prefill(session, asked(HEAD[:9], OTHER, some(100, 6)))
    outcome = prefill(session, asked(HEAD, FILE, some(9, 7), OTHER, QUESTION))
    start = len(HEAD) + len(FILE) + 9
    assert outcome.reuse.loaded == start - 9
    assert reused(outcome) == [(start, start + len(OTHER))]


def test_a_text_that_changed_in_the_middle_is_found_on_both_sides_and_the_change_is_computed(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    changed = [*FILE[:150], *some(3, 8), *FILE[151:]]
    outcome = prefill(session, asked(some(20, 9), changed, QUESTION))
    assert reused(outcome) == [(20, 170), (173, 20 + len(changed))]


def test_two_files_of_two_prompts_are_found_in_one_and_a_file_of_one_prompt_as_one_passage(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    prefill(session, asked(HEAD, OTHER, some(50, 6)))
    outcome = prefill(session, asked(some(11, 7), OTHER, some(5, 8), FILE, QUESTION))
    assert reused(outcome) == [(11, 211), (216, 516)]
    both = prefill(session, asked(some(12, 9), FILE, some(50, 5)[:30], QUESTION))
    assert reused(both) == [(12, 342)]


def test_a_text_in_two_files_of_the_store_is_one_passage(session: Session) -> None:
    """The prompt was kept in two steps: its second half in another extent than its first."""
    prefill(session, asked(HEAD, FILE[:150], max_tokens=0))
    prefill(session, asked(HEAD, FILE, some(50, 5), max_tokens=0))
    outcome = prefill(session, asked(some(20, 9), FILE, QUESTION))
    assert reused(outcome) == [(20, 320)]


def test_text_shorter_than_the_bound_or_at_the_very_end_is_computed(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    assert_is_exact(prefill(session, asked(some(20, 9), FILE[:60], QUESTION)))
    end = prefill(session, asked(some(20, 10), FILE))
    assert reused(end) == [(20, 320 - 32)]


def test_a_text_of_the_stated_length_is_always_found(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    for start in range(0, len(FILE) - SHARED_TOKENS, 23):
        part = FILE[start : start + SHARED_TOKENS]
        outcome = prefill(session, asked(some(20, 100 + start), part, some(60, 200 + start)))
        assert reused(outcome)[0][0] <= 20 + 31 and reused(outcome)[0][1] == 20 + SHARED_TOKENS


def test_exact_requests_reuse_nothing_from_elsewhere_but_record_it(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache") as session:
        prefill(session, asked(HEAD, FILE, some(50, 5)))
        assert_is_exact(prefill(session, asked(some(20, 9), FILE, QUESTION)))
    with opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session:
        outcome = prefill(session, asked(some(21, 10), FILE, QUESTION))
        assert reused(outcome) == [(21, 321)]
        assert_is_exact(prefill(session, asked(some(22, 11), FILE, QUESTION, reuse="exact")))
        prompts = [outcome.tokens, (*some(20, 9), *FILE, *QUESTION)]
        assert_store_is_exact(session, kv_space_of(session), prompts)


def test_tenants_salts_and_adapters_do_not_find_each_others_text(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5), tenant="a"))
    for options in ({}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}):
        assert_is_exact(prefill(session, asked(some(20, 9), FILE, QUESTION, **options)))
    assert reused(prefill(session, asked(some(20, 9), FILE, QUESTION, tenant="a")))


def test_new_text_behind_reused_text_is_found_later_though_it_is_not_exact(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    prefill(session, asked(some(20, 9), FILE, OTHER, some(128, 10)))
    outcome = prefill(session, asked(some(33, 11), OTHER, QUESTION))
    assert reused(outcome) == [(33, 33 + len(OTHER))]
    (chunk,) = outcome.reuse.chunks
    assert chunk.drift is not None and chunk.drift > 0 and chunk.found_at == 320


def test_the_kv_of_found_text_is_that_of_its_prompt_where_it_is_not_recomputed(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache", reuse="approximate", recompute_budget=0.0) as session:
        first = prefill(session, asked(HEAD, FILE, some(50, 5)))
        outcome = prefill(session, asked(HEAD[:5], FILE, QUESTION))
    values = [kv.layers[-1].values for kv in (first.kv, outcome.kv)]
    assert np.array_equal(values[0][:, 70:370], values[1][:, 5:305])
    assert not np.array_equal(outcome.kv.layers[-1].values, cold(outcome.tokens)[1].layers[-1].values)


def test_documents_and_text_are_reused_in_one_prompt(session: Session) -> None:
    passage = "Boats leave Vesk on Tuesdays at six, bread is baked at four, and nobody has wound the harbour clock. "
    notes = "The lamp on the pier went out in March; a ferry to Ormund costs eleven crowns, and the hall is dark."
    session.chat("Who?", documents=[passage], max_tokens=1)
    session.chat(f"Notes: {notes} Thanks.", max_tokens=1)
    assert session.flush()
    reply: Reply = session.chat(
        [{"role": "user", "content": f"Read: {notes}"}, {"role": "assistant", "content": "ok"},
         {"role": "user", "content": "What else is there that one should know of all this?"}],
        documents=["Something new, first.", passage], max_tokens=1,
    )  # fmt: skip
    found = {chunk.number for chunk in reply.reuse.chunks if chunk.source == "reused"}
    assert found == {None, 2}


def test_a_document_pasted_in_an_earlier_chat_is_found_though_nobody_gave_it_as_a_document(session: Session) -> None:
    passage = "Boats leave Vesk on Tuesdays at six, bread is baked at four, and nobody has wound the clock since."
    session.chat(f"Context:\n{passage}\nWho leaves?", max_tokens=1)
    assert session.flush()
    reply = session.chat("Who?", documents=["Something new.", passage], max_tokens=1)
    assert [chunk.number for chunk in reply.reuse.chunks if chunk.source == "reused"] == [2]


def test_a_document_of_which_little_is_found_is_computed_and_listed_as_a_document(session: Session) -> None:
    text = "Boats leave Vesk on Tuesdays at six, bread is baked at four, and nobody has wound the harbour clock since. "
    document = text + "".join(f"Item {number} of the list costs {number * 7} crowns. " for number in range(12))
    session.chat(f"Context:\n{text}\nWho leaves?", max_tokens=1)
    assert session.flush()
    first = session.chat("Who?", documents=["Something new.", document], max_tokens=1)
    assert first.reuse.from_chunks == 0 and session.flush()
    again = session.chat("Who?", documents=["Another one.", document], max_tokens=1)
    assert [chunk.number for chunk in again.reuse.chunks if chunk.source == "reused"] == [2]


def test_explain_says_where_a_text_was_found_and_how_much_of_it_is_recomputed(session: Session) -> None:
    prefill(session, asked(HEAD, FILE, some(50, 5)))
    explained = str(session.explain([*some(20, 9), *FILE, *QUESTION]))
    assert "[-] tokens 20 to 320: from another prompt, where it began at token 70, about 30% to recompute" in explained
    assert "100% of what its KV depends on has changed" in explained


@pytest.mark.parametrize("kind", params("hf", "llamacpp-f32"))
def test_every_engine_that_can_recompute_tokens_reuses_text(kind: str, tmp_path: Path) -> None:
    settings = {"reuse": "approximate", "recompute_budget": 0.3}
    with opened(kind, tmp_path / "cache", **settings) as session:
        session.generate([*HEAD, *FILE[:150], *some(50, 5)], max_tokens=1)
        assert session.flush()
        tokens = [*some(20, 9), *FILE[:150], *QUESTION]
        reply = session.generate(tokens, max_tokens=2)
        assert [(chunk.start, chunk.stop) for chunk in reply.reuse.chunks] == [(20, 170)]
        assert reply.reuse.recomputed == 45
        leads = session.engine.capabilities.recompute == "leading"
        assert not leads or reply.reuse.chunks[0].recomputed_positions == tuple(range(20, 65))
        assert session.generate(tokens, max_tokens=2, reuse="exact").reuse.level == "exact"


def test_the_library_s_passages_are_found_in_templates_of_others(tmp_path: Path) -> None:
    text = (
        "The lighthouse of Ormund was built in 1871 by Edda Vint, whose daughter kept it until the war. Its lamp burns "
        "for nine hours a night, and the keeper writes down every ship that passes the point."
    )
    settings = {"embedder": tiny_embedder(tmp_path / "embedder"), **APPROXIMATE}
    with opened(FakeEngine(context_tokens=4000), tmp_path / "cache", **settings) as session:
        session.ingest(documents=[{"text": text, "source": "lighthouse"}])
        session.ask("Who built the lighthouse?", max_tokens=1)
        assert session.flush()
        reply = session.chat(f"<context>{text}</context> In one word: for how many hours does the lamp burn a night?")
        assert reply.reuse.level == "approximate" and reply.reuse.from_chunks >= len(text) - 4
        session.forget("lighthouse")
        again = session.chat(f"<doc>{text}</doc> In one word: for how many hours does the lamp burn a night, and why?")
        assert again.reuse.from_chunks == 0


def test_a_prompt_that_nothing_is_found_in_is_planned_as_without_passages(session: Session) -> None:
    request = asked(some(500, 20))
    prompt = encode_prompt(session.engine, request)
    assert session.cache.peek(request, prompt.tokens).lookup.passages is None
