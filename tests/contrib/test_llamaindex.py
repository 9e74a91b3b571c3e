"""LlamaIndex: the same prompts, replies and passages as the session's own, in LlamaIndex's words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="LlamaIndex is not installed: make setup")

from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, ImageBlock, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from llama_index_rekindle import RekindleLLM, RekindleNodeRetriever
from rekindle import Session
from rekindle.answers.ask_terms import asking
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidPrompt, InvalidSetting, NothingKnown
from rekindle.session.prompt import encode_prompt
from tests.contrib.frameworks import BOATS, CountingEngine, session_in, wait_in_search
from tests.server.soak import tiny_embedder

QUESTION = "What does the ferry from Vesk to Ormund cost?"
ASKING = [ChatMessage(role=message.role, content=message.content) for message in asking(QUESTION)]
HELLO = [ChatMessage(content="Hello.")]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def session(tmp_path: Path, embedder: str) -> Iterator[Session]:
    with session_in(tmp_path, embedder) as session:
        yield session


@pytest.fixture
def llm(session: Session) -> RekindleLLM:
    return RekindleLLM(session=session, max_tokens=12)


@pytest.fixture
def retriever(session: Session) -> RekindleNodeRetriever:
    return RekindleNodeRetriever(session, top_k=2, retrieval="bm25")


def told(response: ChatResponse | CompletionResponse) -> dict[str, Any]:
    found: dict[str, Any] = response.additional_kwargs["rekindle"]
    return found


def test_the_retriever_finds_what_the_session_finds(session: Session, retriever: RekindleNodeRetriever) -> None:
    found = retriever.retrieve(QUESTION)
    hits = session.knowledge.search(QUESTION, 2, "bm25").hits
    assert [(node.text, node.score) for node in found] == [(hit.chunk.passage.shown, hit.score) for hit in hits]
    assert found[0].text == BOATS
    assert found[0].metadata == {
        "source": "Boats", "title": "Boats", "document": hits[0].chunk.name, "chunk": hits[0].chunk.id,
    }  # fmt: skip
    with pytest.raises(InvalidSetting, match="top_k"):
        RekindleNodeRetriever(session, top_k=0)


def test_a_model_reads_the_same_text_of_a_passage_whatever_was_asked(session: Session) -> None:
    session.ingest(documents=[{"text": "It leaves at noon.", "title": "The ferry", "source": "noon"}])
    retriever = RekindleNodeRetriever(session, top_k=4, retrieval="bm25")
    for question in ("When does the ferry leave?", "noon"):
        shown = [node.get_content(metadata_mode=MetadataMode.LLM) for node in retriever.retrieve(question)]
        assert "title: The ferry\n\nIt leaves at noon." in shown


def test_another_tenant_has_another_library(session: Session) -> None:
    session.ingest(documents=["The ferry is free."], tenant="ann")
    assert [n.text for n in RekindleNodeRetriever(session, tenant="ann").retrieve(QUESTION)] == ["The ferry is free."]
    with pytest.raises(NothingKnown):
        RekindleNodeRetriever(session, tenant="bob").retrieve(QUESTION)


async def test_retrieving_leaves_the_event_loop_free(
    session: Session, retriever: RekindleNodeRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = wait_in_search(session, monkeypatch)
    task = asyncio.create_task(retriever.aretrieve(QUESTION))
    await asyncio.sleep(0.05)
    go.set()  # never, if the search holds the loop
    assert (await task)[0].text == BOATS


def test_a_reply_is_the_session_s_own(session: Session, llm: RekindleLLM) -> None:
    own = session.chat("Hello.", max_tokens=12)
    response = llm.chat(HELLO)
    assert response.message.content == own.text and response.message.role == "assistant"
    assert response.raw["usage"]["cached_tokens"] == own.usage.prompt_tokens - 1  # type: ignore[index]
    counts = [response.additional_kwargs[n] for n in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert counts == [own.usage.prompt_tokens, own.usage.completion_tokens, own.usage.total_tokens]
    assert told(response)["level"] == "exact" and told(response)["computed"] == 1 and told(response)["miss"] is None
    assert response.additional_kwargs["timings"]["first_token_seconds"] > 0


async def test_every_way_to_call_gives_the_same_reply(session: Session, llm: RekindleLLM) -> None:
    expected = session.chat("Hello.", max_tokens=12).text
    chats = [list(llm.stream_chat(HELLO)), [each async for each in await llm.astream_chat(HELLO)]]
    texts = [list(llm.stream_complete("Hello.")), [each async for each in await llm.astream_complete("Hello.")]]
    for pieces in (*chats, *texts):
        assert len(pieces) > 2 and "".join(each.delta for each in pieces) == expected
        assert told(pieces[-1])["computed"] == 1
    chat_replies = [llm.chat(HELLO), await llm.achat(HELLO), *(pieces[-1] for pieces in chats)]
    assert [each.message.content for each in chat_replies] == [expected] * 4
    completions = [llm.complete("Hello."), await llm.acomplete("Hello."), *(pieces[-1] for pieces in texts)]
    assert [each.text for each in completions] == [expected] * 4


def test_a_formatted_prompt_is_continued_as_it_is(session: Session, llm: RekindleLLM) -> None:
    own = session.generate("Once upon a time", max_tokens=12)
    assert llm.complete("Once upon a time", formatted=True).text == own.text
    assert llm.complete("Once upon a time").text != own.text


def test_options_hold_in_the_model_and_in_the_call(session: Session, llm: RekindleLLM) -> None:
    drawn = RekindleLLM(session=session, max_tokens=12, temperature=2.0, seed=7, options={"top_k": 40})
    own = session.chat("Hello.", max_tokens=12, temperature=2.0, seed=7, top_k=40)
    assert drawn.complete("Hello.").text == own.text != llm.complete("Hello.").text
    assert llm.complete("Hello.", max_tokens=3).additional_kwargs["completion_tokens"] == 3
    assert told(llm.complete("Hello.", reuse="off"))["level"] == "off"
    with pytest.raises(InvalidSetting, match="temperature"):
        llm.complete("Hello.", temprature=1.0)
    with pytest.raises(InvalidSetting, match="tools"):
        llm.complete("Hello.", tools=[{"type": "function", "function": {"name": "look"}}])


def test_messages_become_the_prompt_that_the_session_makes_of_them(session: Session, llm: RekindleLLM) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant", "user")
    own = session.chat([{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)], max_tokens=1)
    response = llm.chat([ChatMessage(role=role, content=f"{role} {n}") for n, role in enumerate(roles)])
    assert response.additional_kwargs["prompt_tokens"] == own.usage.prompt_tokens and told(response)["computed"] == 1


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(blocks=[TextBlock(text="See:"), ImageBlock(url="https://example.org/a.png")]),
        ChatMessage(role="function", content="A ship."),
    ],
)
def test_what_is_no_text_is_refused(llm: RekindleLLM, message: ChatMessage) -> None:
    with pytest.raises(InvalidPrompt, match="image|function"):
        llm.chat([message])


def test_documents_are_quoted_as_ask_quotes_them(
    session: Session, llm: RekindleLLM, retriever: RekindleNodeRetriever
) -> None:
    answer = session.ask(QUESTION, top_k=2, retrieval="bm25", max_tokens=12)
    response = llm.chat(ASKING, documents=retriever.retrieve(QUESTION))
    assert response.message.content == answer.text
    assert told(response)["computed"] == 1 and told(response)["quoted_passages"] == len(answer.sources) == 2
    other = llm.chat(ASKING, documents=[TextNode(text="Sky.", metadata={"title": "Up"}), "Sea.", {"text": "Land."}])
    quotes = [{"text": "Sky.", "title": "Up"}, "Sea.", "Land."]
    own = session.chat(asking(QUESTION), documents=quotes, max_tokens=12)
    assert other.message.content == own.text and own.reuse.computed == 1


def test_forgetting_a_document_removes_the_kv_of_its_quotes(
    session: Session, llm: RekindleLLM, retriever: RekindleNodeRetriever
) -> None:
    nodes: list[NodeWithScore] = retriever.retrieve(QUESTION)[:1]
    request = Request.of(asking(QUESTION), documents=[nodes[0].text])
    start = encode_prompt(session.engine, request).quoted[0].span.start
    llm.chat(ASKING, documents=nodes)
    assert told(llm.chat(ASKING, documents=nodes))["computed"] == 1
    session.forget(nodes[0].metadata["document"])
    for _ in range(2):  # the second time as well: what was forgotten is not kept again
        response = llm.chat(ASKING, documents=nodes)
        assert response.raw["usage"]["cached_tokens"] <= start  # type: ignore[index]
        assert told(response)["quoted_passages"] == 1
        assert session.cache.rest()  # nothing is left in the engine, so that the next one shows what was kept


async def test_a_cancelled_task_stops_the_model(session: Session, llm: RekindleLLM) -> None:
    engine = session.engine
    assert isinstance(engine, CountingEngine)
    task = asyncio.create_task(llm.achat(HELLO, max_tokens=3000, min_tokens=3000))
    assert await asyncio.to_thread(engine.busy.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps = engine.steps
    assert steps < 3000
    await asyncio.sleep(0.2)
    assert engine.steps == steps


def test_a_query_engine_answers_from_the_library(
    session: Session, llm: RekindleLLM, retriever: RekindleNodeRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = TokenCountingHandler(tokenizer=session.engine.tokenizer.encode)
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager([counter]))
    Settings.llm = llm
    answer = RetrieverQueryEngine.from_args(retriever).query(QUESTION)
    assert [node.text for node in answer.source_nodes] == [node.text for node in retriever.retrieve(QUESTION)]
    assert str(answer) and counter.total_llm_token_count > 0
    again = RetrieverQueryEngine.from_args(retriever).query(QUESTION)
    assert str(again) == str(answer)


def test_the_metadata_is_the_model_s(session: Session, llm: RekindleLLM) -> None:
    about = llm.metadata
    assert (about.context_window, about.num_output, about.model_name) == (4000, 12, session.engine.name)
    assert about.is_chat_model and not about.is_function_calling_model
    assert "session" not in llm.model_dump() and "Session" not in repr(llm)


@pytest.mark.real
def test_a_real_model_answers_from_its_library(smollm2: Engine, tmp_path: Path) -> None:
    with Session(smollm2, cache=tmp_path / "cache") as session:
        session.ingest(documents=[{"text": BOATS, "source": "boats"}])
        llm, retriever = RekindleLLM(session=session, max_tokens=24), RekindleNodeRetriever(session)
        answer = RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
        assert "eleven" in str(answer) and answer.source_nodes[0].text == BOATS
