"""LangChain: the same prompts, replies and passages as the session's own, in LangChain's words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

pytest.importorskip("langchain_core", reason="LangChain is not installed: make setup")

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_rekindle import ChatRekindle, RekindleRetriever
from rekindle import Session
from rekindle.answers.ask_terms import asking
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidPrompt, InvalidSetting, NothingKnown
from rekindle.session.prompt import encode_prompt
from tests.contrib.frameworks import BOATS, CountingEngine, session_in, wait_in_search
from tests.server.soak import tiny_embedder

QUESTION = "What does the ferry from Vesk to Ormund cost?"
ASKING = [SystemMessage(asking("")[0].content), HumanMessage(asking(QUESTION)[1].content)]


class Weather(BaseModel):
    """How the weather is."""

    sky: Literal["clear", "cloudy"]
    warm: bool


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def session(tmp_path: Path, embedder: str) -> Iterator[Session]:
    with session_in(tmp_path, embedder) as session:
        yield session


@pytest.fixture
def chat(session: Session) -> ChatRekindle:
    return ChatRekindle(session=session, max_tokens=12)


@pytest.fixture
def retriever(session: Session) -> RekindleRetriever:
    return RekindleRetriever(session=session, top_k=2, retrieval="bm25")


def told(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["rekindle"]
    return found


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    return sum(rest, first)


def passage_start(session: Session, documents: list[Document]) -> int:
    """How many tokens of the question come before the first passage."""
    quotes = [{"text": d.page_content, "title": d.metadata["title"]} for d in documents]
    request = Request.of(
        [{"role": m.type.replace("human", "user"), "content": m.content} for m in ASKING], documents=quotes
    )
    return encode_prompt(session.engine, request).quoted[0].span.start


def test_the_retriever_finds_what_the_session_finds(session: Session, retriever: RekindleRetriever) -> None:
    found = retriever.invoke(QUESTION)
    hits = session.knowledge.search(QUESTION, 2, "bm25").hits
    assert [document.page_content for document in found] == [hit.chunk.passage.shown for hit in hits]
    assert found[0].page_content == BOATS
    assert found[0].metadata == {
        "source": "Boats", "title": "Boats", "document": hits[0].chunk.name, "chunk": hits[0].chunk.id,
        "score": hits[0].score,
    }  # fmt: skip
    assert len(retriever.model_copy(update={"top_k": 1}).invoke(QUESTION)) == 1


def test_another_tenant_has_another_library(session: Session) -> None:
    session.ingest(documents=["The ferry is free."], tenant="ann")
    found = RekindleRetriever(session=session, tenant="ann").invoke(QUESTION)
    assert [document.page_content for document in found] == ["The ferry is free."]
    with pytest.raises(NothingKnown):
        RekindleRetriever(session=session, tenant="bob").invoke(QUESTION)


async def test_retrieving_leaves_the_event_loop_free(
    session: Session, retriever: RekindleRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = wait_in_search(session, monkeypatch)
    task = asyncio.create_task(retriever.ainvoke(QUESTION))
    await asyncio.sleep(0.05)
    go.set()  # never, if the search holds the loop
    assert (await task)[0].page_content == BOATS


def test_a_reply_is_the_session_s_own(session: Session, chat: ChatRekindle) -> None:
    own = session.chat("What is a cache?", max_tokens=12)
    message = chat.invoke("What is a cache?")
    assert isinstance(message, AIMessage) and message.content == own.text
    assert message.usage_metadata == {
        "input_tokens": own.usage.prompt_tokens,
        "output_tokens": own.usage.completion_tokens,
        "total_tokens": own.usage.total_tokens,
        "input_token_details": {"cache_read": own.usage.prompt_tokens - 1},
    }
    assert told(message)["level"] == "exact" and told(message)["computed"] == 1 and told(message)["miss"] is None
    assert told(message)["engine"] + told(message)["memory"] + told(message)["disk"] == own.usage.prompt_tokens - 1
    assert message.response_metadata["timings"]["first_token_seconds"] > 0
    assert message.response_metadata["model_name"] == session.engine.name
    assert message.response_metadata["finish_reason"] == own.finish_reason


async def test_every_way_to_call_gives_the_same_reply(chat: ChatRekindle) -> None:
    expected = chat.invoke("Hello.")
    streamed = list(chat.stream("Hello."))
    astreamed = [chunk async for chunk in chat.astream("Hello.")]
    assert len(streamed) > 2 and len(astreamed) > 2
    for message in (whole(streamed), whole(astreamed), await chat.ainvoke("Hello.")):
        assert message.content == expected.content
        assert message.usage_metadata is not None and expected.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == expected.usage_metadata["output_tokens"]
        assert told(message)["computed"] == 1
    assert [message.content for message in chat.batch(["Hello."] * 3)] == [expected.content] * 3


def test_options_hold_in_the_model_and_in_the_call(session: Session, chat: ChatRekindle) -> None:
    text = chat.invoke("Hello.").content
    assert isinstance(text, str)
    stopped = chat.invoke("Hello.", stop=[text[4]]).content
    assert stopped == text[: text.index(text[4])] != text
    assert chat.model_copy(update={"stop": [text[4]]}).invoke("Hello.").content == stopped
    drawn = ChatRekindle(session=session, max_tokens=12, temperature=2.0, seed=7, options={"top_k": 40})
    own = session.chat("Hello.", max_tokens=12, temperature=2.0, seed=7, top_k=40)
    assert drawn.invoke("Hello.").content == own.text != text
    assert chat.invoke("Hello.", max_tokens=3).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    assert told(chat.invoke("Hello.", reuse="off"))["level"] == "off"
    with pytest.raises(InvalidSetting, match="temperature"):
        chat.invoke("Hello.", temprature=1.0)


def test_messages_become_the_prompt_that_the_session_makes_of_them(session: Session, chat: ChatRekindle) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
    own = session.chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is out there?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "A ship.", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "A ship."},
            {"role": "user", "content": "And now?"},
        ],
        max_tokens=1,
    )
    message = chat.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "What is "}, {"type": "text", "text": "out there?"}]),
            AIMessage("", tool_calls=[{"id": "call00001", "name": "look", "args": {"far": True}}]),
            ToolMessage("A ship.", tool_call_id="call00001"),
            AIMessage("A ship."),
            HumanMessage("And now?"),
        ]
    )
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == own.usage.prompt_tokens and told(message)["computed"] == 1


def test_calls_and_results_of_tools_may_be_parts_of_messages(session: Session, chat: ChatRekindle) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
    asked = {"role": "user", "content": "What is out there?"}
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    seen = {"role": "tool", "content": "A ship.", "tool_call_id": "call00001"}
    own = [
        session.chat([asked, called, seen], max_tokens=1),
        session.chat([asked, called, seen, {"role": "user", "content": "And now?"}], max_tokens=1),
    ]
    assert own[0].text != own[1].text or own[0].usage.prompt_tokens != own[1].usage.prompt_tokens
    text, used = {"type": "text", "text": "I look."}, {"id": "call00001", "name": "look"}
    known: Any = [{**used, "args": {"far": True}}]
    replies = [
        AIMessage([text, {"type": "tool_use", "input": {"far": True}, **used}], tool_calls=known),
        AIMessage([text, {"type": "tool_use", "input": {"far": True}, **used}]),
        AIMessage([text, {"type": "tool_call", "args": {"far": True}, **used}], tool_calls=known),
    ]
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "call00001", "content": "A ship."}
    listed = {**result, "content": [{"type": "text", "text": "A ship."}]}
    for reply in replies:
        for content in (
            ToolMessage("A ship.", tool_call_id="call00001"),
            HumanMessage([result]),
            HumanMessage([listed]),
        ):
            message = chat.invoke([HumanMessage("What is out there?"), reply, content], max_tokens=1)
            assert (message.content, told(message)["computed"]) == (own[0].text, 1)
        parts = HumanMessage([listed, {"type": "text", "text": "And now?"}])
        message = chat.invoke([HumanMessage("What is out there?"), reply, parts], max_tokens=1)
        assert (message.content, told(message)["computed"]) == (own[1].text, 1)
    with pytest.raises(InvalidPrompt, match="tool_use"):
        chat.invoke([HumanMessage([{"type": "tool_use", "input": {}, **used}])])


def test_thoughts_of_a_reply_are_no_text_of_it(session: Session, chat: ChatRekindle) -> None:
    before = {"role": "assistant", "content": "Blue.", "reasoning_content": "The sky."}
    own = session.chat([{"role": "user", "content": "Hi"}, before, {"role": "user", "content": "Why?"}], max_tokens=1)
    for thought in ({"type": "thinking", "thinking": "The sky."}, {"type": "reasoning", "reasoning": "The sky."}):
        reply = AIMessage([thought, {"type": "text", "text": "Blue."}])
        message = chat.invoke([HumanMessage("Hi"), reply, HumanMessage("Why?")], max_tokens=1)
        assert (message.content, told(message)["computed"]) == (own.text, 1)


def test_the_model_is_named_as_langchain_traces_it(session: Session, chat: ChatRekindle) -> None:
    about = chat._get_ls_params(stop=["."])
    assert about["ls_provider"] == chat._llm_type == "rekindle"
    assert about["ls_model_name"] == chat.model_name == session.engine.name
    assert (about["ls_model_type"], about["ls_temperature"], about["ls_max_tokens"]) == ("chat", 0.0, 12)


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
        HumanMessage([{"type": "text", "text": "See:"}, {"type": "image", "base64": "", "mime_type": "image/png"}]),
        FunctionMessage("A ship.", name="look"),
    ],
)
def test_what_is_no_text_is_refused(chat: ChatRekindle, message: BaseMessage) -> None:
    with pytest.raises(InvalidPrompt, match="image|FunctionMessage"):
        chat.invoke([message])


def test_documents_are_quoted_as_ask_quotes_them(
    session: Session, chat: ChatRekindle, retriever: RekindleRetriever
) -> None:
    answer = session.ask(QUESTION, top_k=2, retrieval="bm25", max_tokens=12)
    message = chat.invoke(ASKING, documents=retriever.invoke(QUESTION))
    assert message.content == answer.text
    assert told(message)["computed"] == 1 and told(message)["quoted_passages"] == len(answer.sources) == 2
    other = chat.invoke(ASKING, documents=[Document("Sky.", metadata={"title": "Up"}), "Sea.", {"text": "Land."}])
    own = session.chat(
        [{"role": "system", "content": ASKING[0].content}, {"role": "user", "content": ASKING[1].content}],
        documents=[{"text": "Sky.", "title": "Up"}, "Sea.", "Land."],
        max_tokens=12,
    )
    assert other.content == own.text and own.reuse.computed == 1


def test_forgetting_a_document_removes_the_kv_of_its_quotes(
    session: Session, chat: ChatRekindle, retriever: RekindleRetriever
) -> None:
    documents = retriever.invoke(QUESTION)[:1]
    start = passage_start(session, documents)
    chat.invoke(ASKING, documents=documents)
    assert told(chat.invoke(ASKING, documents=documents))["computed"] == 1
    changed = Document("Ferries are free.", metadata={**documents[0].metadata, "title": "Ferries"})
    chat.invoke(ASKING, documents=[changed])  # a text of its own: it does not stand for the passage
    session.forget(documents[0].metadata["document"])
    for _ in range(2):  # the second time as well: what was forgotten is not kept again
        message = chat.invoke(ASKING, documents=documents)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] <= start
        assert told(message)["quoted_passages"] == 1
        assert session.cache.rest()  # nothing is left in the engine, so that the next one shows what was kept


async def test_tools_are_called_in_langchain_s_form(chat: ChatRekindle) -> None:
    forced = chat.bind_tools([Weather], tool_choice="Weather", max_tokens=100)
    message = forced.invoke("How is the weather?")
    (call,) = message.tool_calls
    assert call["name"] == "Weather" and Weather.model_validate(call["args"])
    assert message.response_metadata["finish_reason"] == "tool_calls" and message.content == ""
    for merged in (
        whole(list(forced.stream("How is the weather?"))),
        whole([chunk async for chunk in forced.astream("How is the weather?")]),
    ):
        assert [(c["name"], c["args"]) for c in merged.tool_calls] == [(call["name"], call["args"])]
        assert merged.response_metadata["finish_reason"] == "tool_calls"
    free = chat.bind_tools([Weather], tool_choice="none").invoke("How is the weather?")
    assert free.tool_calls == [] and free.content


def test_structured_output_is_enforced(chat: ChatRekindle) -> None:
    found = chat.model_copy(update={"max_tokens": 100}).with_structured_output(Weather).invoke("How is the weather?")
    assert isinstance(found, Weather)


async def test_a_cancelled_task_stops_the_model(session: Session, chat: ChatRekindle) -> None:
    engine = session.engine
    assert isinstance(engine, CountingEngine)
    task = asyncio.create_task(chat.ainvoke("Hello.", max_tokens=3000, min_tokens=3000))
    assert await asyncio.to_thread(engine.busy.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps = engine.steps
    assert steps < 3000
    await asyncio.sleep(0.2)
    assert engine.steps == steps


async def test_leaving_a_stream_stops_the_model(session: Session, chat: ChatRekindle) -> None:
    engine = session.engine
    assert isinstance(engine, CountingEngine)
    sync, asynchronous = chat.stream("Hello.", max_tokens=3000), chat.astream("Hello.", max_tokens=3000)
    next(sync)
    await anext(asynchronous)
    sync.close()  # type: ignore[attr-defined]
    await asynchronous.aclose()  # type: ignore[attr-defined]
    steps = engine.steps
    await asyncio.sleep(0.2)
    assert engine.steps == steps < 3000


def test_a_chain_answers_from_documents(session: Session, chat: ChatRekindle, retriever: RekindleRetriever) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Use this:\n{context}"), ("human", "{question}")])
    chain = (
        {"context": retriever | (lambda found: found[0].page_content), "question": RunnablePassthrough()}
        | prompt
        | chat
        | StrOutputParser()
    )
    own = session.chat(
        [{"role": "system", "content": f"Use this:\n{BOATS}"}, {"role": "user", "content": QUESTION}], max_tokens=12
    )
    assert chain.invoke(QUESTION) == own.text


def test_what_is_traced_does_not_hold_the_session(chat: ChatRekindle) -> None:
    assert "session" not in chat.model_dump() and "Session" not in repr(chat)
    assert chat._identifying_params["model_name"] == chat.session.engine.name


@pytest.mark.real
def test_a_real_model_answers_from_its_library(smollm2: Engine, tmp_path: Path) -> None:
    with Session(smollm2, cache=tmp_path / "cache") as session:
        session.ingest(documents=[{"text": BOATS, "source": "boats"}])
        documents = RekindleRetriever(session=session).invoke(QUESTION)
        chat = ChatRekindle(session=session, max_tokens=24)
        message = chat.invoke(ASKING, documents=documents)
        assert "eleven" in message.content
        assert told(chat.invoke(ASKING, documents=documents))["computed"] == 1
