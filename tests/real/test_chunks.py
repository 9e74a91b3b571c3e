"""Chunk reuse with real weights: exact answers stay exact, approximate ones stay close, and nothing stale is kept."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.base import Row
from rekindle.engine.step_scheduler import StepScheduler
from tests.chunks.chunk_reuse import Outcome, compute, kv_space_of, prefill, stored_kv
from tests.kvs import variant_counts
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = pytest.mark.real

PASSAGES = {
    "Harbour": "The harbour of Vesk was dug in 1712 by order of the governor, Ilse Marn. Ships of up to forty feet "
    "could anchor there, and the fee for a night was two crowns, payable to the keeper of the lighthouse.",
    "Lighthouse": "The lighthouse stands on the northern rock. Its keeper, Tomas Ivarsen, lit the lamp every evening "
    "for thirty-one years and kept a diary about the weather, which is now in the town's museum.",
    "Bakery": "In the bakery behind the chapel bread is baked at four in the morning. The rye comes from Ormund by "
    "ferry, and on Sundays there are small cakes with caraway for the children of the choir.",
    "Ferry": "The ferry to Ormund leaves on Tuesdays and Fridays at six. It costs eleven crowns, children pay half, "
    "and whoever carries mail for the post office travels free of charge.",
}
ENGINES = [
    pytest.param("hf", id="hf"),
    pytest.param(
        "llamacpp",
        marks=[
            pytest.mark.llamacpp,
            pytest.mark.long,
            pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not installed"),
        ],
    ),
]
TOLERANCE = {"hf": 1e-4, "llamacpp": 5e-2}  # of the largest logit: what rounding may do to a prompt cut otherwise


@pytest.fixture(scope="module", params=ENGINES)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("chunks") / "cache"
    hf = request.param == "hf"
    model: Any = request.getfixturevalue("smollm2") if hf else "smollm2"
    options: dict[str, Any] = {} if hf else {"engine": request.param, "device": "cpu"}
    with Session(model, cache=folder, reuse="approximate", recompute_budget=0.3, **options) as session:
        session.cache.kv.costs = UnmeasuredCosts()
        for names in (("Harbour", "Lighthouse"), ("Ferry", "Bakery")):
            prefill(session, about("What is this?", *names))
        yield session


def about(question: str, *names: str, **options: Any) -> Request:
    messages = [{"role": "system", "content": "Answer from the passages."}, {"role": "user", "content": question}]
    documents = [{"text": PASSAGES[name], "title": name} for name in names]
    return Request.of(messages, documents=documents, **options)


def off_by(session: Session, logits: np.ndarray, outcome: Outcome) -> float:
    right = compute(session.engine, outcome.tokens)[0]
    return float(np.abs(logits - right).max() / np.abs(right).max())


def test_exact_is_exact_between_approximate_prompts_and_nothing_stale_is_kept(session: Session) -> None:
    tolerance = TOLERANCE[session.engine_kind]
    order = ("Bakery", "Lighthouse", "Harbour")
    approximate = prefill(session, about("Who lit the lamp?", *order))
    assert approximate.reuse.level == "approximate"
    exact = prefill(session, about("Who lit the lamp?", *order, reuse="exact"))
    assert exact.reuse.level == "exact" and off_by(session, exact.logits, exact) <= tolerance
    found = stored_kv(session, kv_space_of(session), exact.tokens)
    assert found is not None
    right = compute(session.engine, exact.tokens)[1]
    for ours, theirs in zip(found.layers, right.layers, strict=True):
        a, b = ours.keys.astype(np.float32), theirs.keys[:, : len(found.span)].astype(np.float32)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_selective_recompute_comes_closer_to_the_right_logits_than_reuse_alone(session: Session) -> None:
    chosen = session.cache.chunks.recompute_policy
    distances: dict[float, float] = {}
    right: dict[tuple[str, ...], np.ndarray] = {}
    try:
        for budget in (0.0, 0.3, 0.9):
            session.cache.chunks.recompute_policy = type(chosen)(**{**vars(chosen), "budget": budget})
            distances[budget] = 0.0
            for names in (("Ferry", "Lighthouse", "Harbour"), ("Bakery", "Harbour", "Lighthouse")):
                session.cache.unpark()
                done = prefill(session, about("Who lit the lamp, and for how long?", *names))
                assert done.reuse.recomputed == round(budget * done.reuse.from_chunks) and done.reuse.from_chunks > 40
                if names not in right:
                    right[names] = compute(session.engine, done.tokens)[0][-1]
                distances[budget] += divergence(right[names], done.logits[-1])
    finally:
        session.cache.chunks.recompute_policy = chosen
    assert distances[0.9] < distances[0.0] and distances[0.3] < 2 * distances[0.0]
    assert distances[0.9] < 0.5


def divergence(right: np.ndarray, ours: np.ndarray) -> float:
    """The KL divergence of two distributions over tokens."""
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (right.astype(np.float64), ours.astype(float)))
    return float((p * (np.log(p + 1e-30) - np.log(q + 1e-30))).sum())


def test_exact_replies_between_approximate_ones_are_those_with_everything_computed(session: Session) -> None:
    question = "What does the ferry to Ormund cost?"
    for order in (("Lighthouse", "Ferry"), ("Ferry", "Harbour")):
        approximate, exact, plain = (
            session.answer(about(question, *order, max_tokens=6, reuse=level)).reply
            for level in ("approximate", "exact", "off")
        )
        assert approximate.reuse.from_chunks > 0 and exact.reuse.level == "exact" and plain.reuse.level == "off"
        assert exact.tokens == plain.tokens


def test_a_chat_continues_an_approximate_context_and_says_so(session: Session) -> None:
    session.cache.unpark()
    first = about("Who lit the lamp?", "Harbour", "Ferry", "Lighthouse", max_tokens=8)
    reply = session.answer(first).reply
    assert reply.reuse.level == "approximate"
    more = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "And when?"}]
    follow = prefill(session, Request.of([*first.prompt, *more], documents=list(first.quotes)))
    assert follow.plan.in_engine and follow.reuse.level == "approximate"
    assert follow.reuse.from_chunks == reply.reuse.from_chunks


NOTES = (
    "Minutes of the harbour board, 3 May. The crane will be painted in June, not in July, because the yard is "
    "full then. Mrs Aalto asked for a bench near the post office; the board agreed to two, of oak, for ninety "
    "crowns each. The pump at the fish hall has failed four times since winter. Jonas Pell offered to repair it "
    "for a barrel of herring and was thanked. The fee for boats under twenty feet stays at one crown a night. A "
    "letter from Ormund about the mail was read aloud and put aside until the ferryman is back. The next meeting "
    "is on the first Monday of autumn, in the chapel."
)


def test_text_pasted_into_another_template_is_found_but_for_its_seams_and_the_answer_stays_close(
    session: Session,
) -> None:
    def chat(text: str, **options: Any) -> Request:
        return Request.of([{"role": "user", "content": text}], **options)

    prefill(session, chat(f"Please remember these minutes.\n\n{NOTES}", reuse="exact"))
    question = (
        "</minutes>\nHow much does a boat of fifteen feet pay for one night in the harbour? Answer in a few words."
    )
    outcome = prefill(session, chat(f"<minutes>{NOTES}{question}"))
    tokens = len(session.engine.tokenizer.encode(NOTES))
    assert tokens - 4 <= outcome.reuse.from_chunks <= tokens and len(outcome.reuse.chunks) == 1
    right, got = (
        logits[-1] - np.logaddexp.reduce(logits[-1])
        for logits in (compute(session.engine, outcome.tokens)[0], outcome.logits)
    )
    assert float((np.exp(right) * (right - got)).sum()) < 0.2


def test_the_recomputed_tokens_of_a_prompt_share_a_step_with_the_reply_of_another(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.engine.batching._RETURN_SECONDS", 3.0)  # however slow this machine gives it a core
    monkeypatch.setattr(StepScheduler, "_sharing_pays", True)
    steps: list[Sequence[Row]] = []
    step = smollm2.step
    monkeypatch.setattr(smollm2, "step", lambda rows, stop=None: steps.append(rows) or step(rows, stop))

    def asked(folder: Path, *, company: bool) -> Reply:
        settings: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3, "parallel": 2}
        with Session(smollm2, cache=folder, **settings) as session, ThreadPoolExecutor(1) as threads:
            session.cache.kv.costs = UnmeasuredCosts()
            for names in (("Harbour", "Lighthouse"), ("Ferry", "Bakery")):
                prefill(session, about("What is this?", *names))
            with session.stream("Once upon a time", max_tokens=1000, min_tokens=1000) as other:
                if company:
                    next(other)
                    threads.submit(list, other)
                steps.clear()
                request = about("Who lit the lamp?", "Bakery", "Lighthouse", "Harbour", max_tokens=2)
                return session.answer(request).reply

    for company in (False, True):
        reply = asked(tmp_path / str(company), company=company)
        (mended,) = [rows for rows in steps if any(row.spread is not None for row in rows)]
        assert len(mended) == 1 + company
        if not company:
            alone = reply
    assert reply.text == alone.text and reply.reuse.recomputed == alone.reuse.recomputed > 0


def test_a_passage_that_is_computed_although_it_is_known_is_found_as_it_is_now(smollm2: Any, tmp_path: Path) -> None:
    with Session(smollm2, cache=tmp_path / "cache", reuse="approximate", recompute_budget=0.99) as session:
        session.cache.kv.costs = UnmeasuredCosts()
        assert session.cache.store is not None
        prefill(session, about("What is this?", "Harbour", "Lighthouse", "Ferry"))
        before = variant_counts(session.cache.store).variants
        done = prefill(session, about("Who lit the lamp?", "Harbour", "Bakery", "Lighthouse", "Ferry"))
        passages = done.known.passages
        assert passages is not None and done.reuse.level == "approximate"
        computed = passages.computed_in(done.plan)
        assert computed and variant_counts(session.cache.store).variants == before + 1 + len(computed)
        again = prefill(session, about("Who lit the lamp?", "Ferry", "Harbour", "Bakery", "Lighthouse"))
        assert again.known.passages is not None
        found = {chunk.digest: chunk.known for chunk in again.known.passages.picked}
        for chunk in computed:
            known = found[chunk.digest]
            assert (
                known is not None and known.variant.before == passages.digests[: passages.digests.index(chunk.digest)]
            )
