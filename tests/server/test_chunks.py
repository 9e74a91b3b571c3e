"""Chunk reuse over HTTP: reported in every reply, right for requests that share steps, refused where not wanted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rekindle import Session
from rekindle.engine.fake import FakeEngine
from rekindle.server.auth import ApiKeys
from tests.chunks.chunk_reuse import PASSAGES
from tests.parity.sessions import opened
from tests.server.serving import ALICE, BOB, Served, serving

A, B, C, A2, D, E = PASSAGES
APPROXIMATE: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3, "parallel": 4}
ORDERS = ([B, A], [C, D, A], [D, B, C], [A, D, C, B], [C, A], [B, D, A2])


def known(session: Session) -> Session:
    """A session that knows the passages, each from another prompt."""
    for order in ([A, B], [C, D]):
        session.chat("Who?", documents=order, max_tokens=1)
    assert session.flush()
    return session


def quoting(served: Served, documents: list[str], **more: Any) -> dict[str, Any]:
    about = {"documents": documents, **more}
    return served.chat("Why?", rekindle=about)


def test_a_reply_with_reused_chunks_says_so_and_counts_every_token(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session, serving(known(session)) as served:
        told = quoting(served, [B, A])
        about = told["rekindle"]
        assert about["level"] == "approximate" and about["from_chunks"] > 0
        assert about["recomputed"] == round(0.3 * about["from_chunks"])
        count = about["loaded"] + about["from_chunks"] + about["computed"] - about["recomputed"]
        assert count == told["usage"]["prompt_tokens"]
        exact = quoting(served, [B, A], reuse="exact")
        assert exact["rekindle"]["level"] == "exact" and exact["rekindle"]["from_chunks"] == 0
        assert exact["usage"]["prompt_tokens"] == told["usage"]["prompt_tokens"]
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == about["loaded"] + about["from_chunks"] - about["recomputed"]


def test_an_exact_reply_of_a_server_that_reuses_chunks_is_that_without_a_cache(tmp_path: Path) -> None:
    with (
        opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session,
        serving(known(session)) as served,
        Session(FakeEngine(), cache="off") as plain,
    ):
        for order in ORDERS:
            quoting(served, order)
            text = quoting(served, order, reuse="exact")["choices"][0]["message"]["content"]
            assert text == plain.chat("Why?", documents=order, max_tokens=4, temperature=0.0).text


def test_requests_that_share_steps_reuse_chunks_as_they_do_alone(tmp_path: Path) -> None:
    def alone(order: list[str]) -> tuple[str, int, int]:
        with opened(FakeEngine(), tmp_path / f"{ORDERS.index(order)}", **APPROXIMATE) as session:
            reply = known(session).chat("Why?", documents=order, max_tokens=4, temperature=0.0)
            return reply.text, reply.reuse.from_chunks, reply.reuse.recomputed

    with (
        opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session,
        serving(known(session)) as served,
        ThreadPoolExecutor(4) as pool,
    ):
        told = list(pool.map(lambda order: quoting(served, order), ORDERS))
    for order, reply in zip(ORDERS, told, strict=True):
        text, from_chunks, recomputed = alone(order)
        assert reply["rekindle"]["from_chunks"] == from_chunks > 0 and reply["rekindle"]["recomputed"] == recomputed
        assert reply["choices"][0]["message"]["content"] == text


def test_tenants_of_a_server_do_not_reuse_chunks_of_each_other(tmp_path: Path) -> None:
    keys = ApiKeys([f"alice={ALICE}", f"bob={BOB}"])
    with opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session, serving(session, keys=keys) as served:

        def ask(key: str, *documents: str) -> dict[str, Any]:
            told: dict[str, Any] = served.chat("Why?", key, rekindle={"documents": list(documents)})["rekindle"]
            assert session.flush()
            return told

        ask(ALICE, A, B)
        theirs = ask(BOB, B, A)
        assert theirs["from_chunks"] == 0 and theirs["loaded"] == 0
        assert ask(ALICE, B, A)["from_chunks"] > 0


NOTES = (
    "The lamp in the hall burns for nine hours. Boats leave Vesk on Tuesdays at six. Bread is baked at four by Tomas "
    "Ivarsen, and a ferry to Ormund costs eleven crowns. Nobody has wound the harbour clock since."
)


def test_text_of_an_earlier_chat_is_reused_in_chats_and_completions_that_name_no_documents(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache", **APPROXIMATE) as session, serving(session) as served:
        first = served.chat(f"Here are my notes. {NOTES} Thank you.")
        assert first["rekindle"]["level"] == "exact"
        assert session.flush()
        asked = {"prompt": f"Read this:\n{NOTES}\nWhat does the ferry to Ormund cost, and who baked?", "max_tokens": 2}
        told = [
            served.chat(f"What of this is about boats, and what is not?\n\n{NOTES}\n\nAnswer with one short word."),
            served.post("/v1/completions", **asked).json(),
        ]
        for reply in told:
            (passage,) = reply["rekindle"]["chunk_reuse"]["passages"]
            assert reply["rekindle"]["level"] == "approximate" and passage["source"] == "reused"
            assert passage["number"] is None and passage["found_at"] > 0
            assert passage["stop"] - passage["start"] >= len(NOTES) - 1
        exact = served.post("/v1/completions", **asked, rekindle={"reuse": "exact"}).json()
        assert exact["rekindle"]["level"] == "exact" and "chunk_reuse" not in exact["rekindle"]
