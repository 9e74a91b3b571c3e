"""/v1/rekindle/ask, /search, /documents and /library: the caller's own library. Files of this machine are not read."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.document import Document
from rekindle.core.reply import Reply, TextPiece
from rekindle.errors import Cancelled, DocumentNotFound
from rekindle.knowledge.ingest import IngestProgress, IngestResult, parse_documents
from rekindle.knowledge.library import DocumentEntry, Library
from rekindle.knowledge.retrieve import Hit
from rekindle.knowledge.salvage import Loss
from rekindle.server.body import documents_of
from rekindle.server.call import Call
from rekindle.server.job import Finished
from rekindle.server.openai.translate import ask_options, usage_of
from rekindle.server.pending_reply import PendingReply, answer_prepared
from rekindle.server.reply_fields import (
    new_id,
    quote_of_source,
    rekindle_of,
    retrieval_of,
    sources_of,
    stored_of,
    timings_of,
    warnings_of,
)
from rekindle.server.schema import AskRequest, DocumentsRequest, LibraryCheckRequest, SearchRequest
from rekindle.session.ask import Prepared


async def answer_question(call: Call, body: AskRequest) -> Response:
    """The answer to a question from the caller's own documents, with its sources, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    session, options = call.service.session, ask_options(body, call.caller.tenant, call.service.reply_length())
    options["adapter"] = adapter
    started = time.perf_counter()
    prepared = await call.in_thread(lambda: session.prepare(body.question, **options))
    events = answer_prepared(call, body, prepared, started)
    pending = PendingReply(call, prepared.request, events, call.ignored(body), prepared=prepared)
    head = {"id": new_id("answer-"), "created": int(time.time()), "model": pending.model}

    def whole(replies: list[Reply]) -> dict[str, Any]:
        (reply,) = replies
        fields = {"question": body.question, "answer": reply.text, "sources": sources_of(prepared)}
        return {**head, "object": "rekindle.answer", **fields, **_ended(reply, prepared, pending.ignored)}

    return await pending.respond(body.stream, lambda _: _chunks(head, prepared, pending), whole)


async def _chunks(
    head: Mapping[str, Any], prepared: Prepared, pending: PendingReply
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The sources, then the answer in pieces, then usage, timings and reuse."""
    head = {**head, "object": "rekindle.answer.chunk"}
    yield {**head, "sources": sources_of(prepared), "delta": "", "finish_reason": None}
    async for item in pending.events:
        if isinstance(item.event, TextPiece):
            yield {**head, "delta": str(item.event), "finish_reason": None}
        elif isinstance(item.event, Finished):
            yield {**head, "delta": "", **_ended(item.event.reply, prepared, pending.ignored)}


def _ended(reply: Reply, prepared: Prepared, ignored: list[str]) -> dict[str, Any]:
    about = {**rekindle_of(reply.reuse, ignored), "retrieval": retrieval_of(prepared), **stored_of(prepared, reply)}
    fields = {
        **quote_of_source(prepared, reply),
        "usage": usage_of([reply]),
        "timings": timings_of(reply),
        "rekindle": about,
    }
    return {"finish_reason": reply.finish_reason, **fields}


_PIECE_CHARACTERS = 200_000  # embedded in a few seconds, then it is somebody else's turn
_SOURCES_AT_ONCE = 500
_COUNTS = ("added", "changed", "unchanged", "passages", "embedded", "truncated")


async def search_documents(call: Call, body: SearchRequest) -> Response:
    """The passages of the caller's documents most likely to answer a question."""
    knowledge = call.service.session.knowledge
    whose = call.scope
    found = await call.in_thread(
        lambda: knowledge.search(body.query, body.top_k, body.retrieval, tenant=whose.tenant, cache_salt=whose.salt)
    )
    fields = {"object": "list", "data": [_hit(hit) for hit in found.hits], "retrieval": found.retrieval}
    about = {"ignored": body.ignored(), **warnings_of(found.losses)}
    return JSONResponse({**fields, "ms": round(found.seconds * 1e3, 3), "rekindle": about})


async def add_documents(call: Call, body: DocumentsRequest) -> Response:
    """Put documents into the caller's library; one of the same source is replaced, an unchanged one costs nothing."""
    given = await call.in_thread(lambda: list(parse_documents(documents_of(body.documents, "documents"))))
    left = threading.Event()

    def look(_: IngestProgress) -> None:
        if left.is_set():  # documents stored so far stay: sent again, it continues there
            raise Cancelled("The client is gone.")

    ingest = functools.partial(
        call.service.session.knowledge.ingest,
        app=body.app_id,
        tenant=call.scope.tenant,
        cache_salt=call.scope.salt,
        report=look,
    )
    done = IngestResult()
    try:
        for some in _pieces(given):
            _add(done, await call.in_thread(functools.partial(ingest, documents=some), call.service.ingesting))
    finally:
        left.set()
    if call.service.idle_thread is not None:
        call.service.idle_thread.look_again()
    library = await call.in_thread(lambda: _library(call))
    entries = await call.in_thread(lambda: _of_sources(library, [one.source for one in given]))
    counts = {name: getattr(done, name) for name in _COUNTS}
    problems = [asdict(problem) for problem in done.problems]
    fields = {"data": [_entry(entry) for entry in entries], **counts, "problems": problems}
    about = {"ignored": body.ignored(), **await call.in_thread(lambda: warnings_of(library.losses()))}
    if done.begun and (kept := call.service.session.knowledge.what_is_kept("your library")):
        about["note"] = kept
    return JSONResponse({**fields, "ms": round(done.seconds * 1e3, 3), "rekindle": about})


async def list_documents(call: Call) -> Response:
    """The caller's documents, a page at a time: `after` is the name of the last one of the previous page."""
    wanted = call.page()

    def work() -> dict[str, Any]:
        if not _is_there(call):
            return {"data": [], "total": 0, "has_more": False}
        library = _library(call)
        chosen = "d.id IN (SELECT id FROM documents WHERE name > ? ORDER BY name LIMIT ?)"
        found = sorted(library.entries(chosen, (wanted.after, wanted.limit + 1)), key=lambda entry: entry.name)
        with library.reading() as connection:
            (total,) = connection.execute("SELECT count(*) FROM documents").fetchone()
        page = [_entry(entry) for entry in found[: wanted.limit]]
        return {"data": page, "total": total, "has_more": len(found) > wanted.limit, **warnings_of(library.losses())}

    return JSONResponse(await call.in_thread(work))


async def show_document(call: Call) -> Response:
    """One of the caller's documents, with its passages."""

    def work() -> dict[str, Any]:
        entry = _named(call)
        library = _library(call)
        passages = [{"chunk": chunk.id, "text": chunk.passage.shown} for chunk in library.chunks_of(entry.id)]
        return {**_entry(entry), "passages": passages, **warnings_of(library.losses())}

    return JSONResponse(await call.in_thread(work))


async def forget_document(call: Call) -> Response:
    """Remove one of the caller's documents: its text, vectors and words, and all KV that was computed from it."""
    knowledge, whose = call.service.session.knowledge, call.scope

    def work() -> dict[str, Any]:
        entry = _named(call)
        done = knowledge.forget(entry.name, tenant=whose.tenant, cache_salt=whose.salt)
        fields = {"forgotten": len(done.documents), "passages": done.passages}
        if done.damaged_files:  # their paths are only for the operator, who has the log
            fields["damaged_files"] = len(done.damaged_files)
        return {**fields, **warnings_of(_library(call).losses())}

    done = await call.in_thread(work)
    call.service.recent.drop_texts(whose)
    return JSONResponse(done)


async def show_library(call: Call) -> Response:
    """The size of the caller's library, the limit for all libraries, and what was lost to damage."""
    knowledge = call.service.session.knowledge

    def work() -> dict[str, Any]:
        fields: dict[str, Any] = {"limit_bytes": knowledge.limit.limit_bytes}
        if call.caller.operator:
            fields |= {"folder": str(knowledge.folder), "folder_bytes": knowledge.limit.used_bytes()}
        if not _is_there(call):
            return {"documents": 0, "chunks": 0, **fields, "lost": []}
        library = _library(call)
        return {**library.counts(), **fields, "lost": [_loss(call, loss) for loss in library.losses()]}

    return JSONResponse(await call.in_thread(work))


async def check_library(call: Call, body: LibraryCheckRequest) -> Response:
    """Check the file of the caller's library; salvage it if it is damaged; acknowledge losses."""
    knowledge, whose = call.service.session.knowledge, (call.scope.tenant, call.scope.salt)

    def work() -> dict[str, Any]:
        found = knowledge.check(*whose, fix=body.fix)
        sound = found.damage is None or found.salvaged is not None
        if sound and body.acknowledge:
            knowledge.acknowledge(*whose)
        lost = knowledge.losses(*whose) if sound else []
        saved = found.salvaged
        fields = None if saved is None else {"documents": saved.documents, "passages": saved.passages}
        damage = found.damage if call.caller.operator or found.damage is None else "its file is damaged"
        return {
            "sound": sound,
            "damage": damage,
            "salvaged": fields,
            "lost": [_loss(call, loss) for loss in lost],
            "damaged_files": len(found.damaged_files),
            "rekindle": {"ignored": body.ignored()},
        }

    return JSONResponse(await call.in_thread(work))


def _loss(call: Call, loss: Loss) -> dict[str, Any]:
    return {name: value for name, value in asdict(loss).items() if name != "file" or call.caller.operator}


def _pieces(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """The documents in order, in batches of bounded length; a longer document is a batch of its own."""
    piece: list[Document] = []
    size = 0
    for document in documents:
        own = sum(len(section.text) for section in document.sections)
        if piece and size + own > _PIECE_CHARACTERS:
            yield piece
            piece, size = [], 0
        piece.append(document)
        size += own
    yield piece


def _add(done: IngestResult, more: IngestResult) -> None:
    for field in fields(done):
        setattr(done, field.name, getattr(done, field.name) + getattr(more, field.name))


def _library(call: Call) -> Library:
    return call.service.session.knowledge.library(call.scope.tenant, call.scope.salt)


def _is_there(call: Call) -> bool:
    return call.service.session.knowledge.holds(call.scope.tenant, call.scope.salt)


def _named(call: Call) -> DocumentEntry:
    """The document that the path names, by name only: a source could be anything."""
    found = _library(call).entries("d.name=?", (call.http.path_params["name"],)) if _is_there(call) else []
    if not found:
        raise DocumentNotFound("There is no document of that name.")
    return found[0]


def _of_sources(library: Library, sources: Sequence[str]) -> list[DocumentEntry]:
    """The documents of some sources, in that order, each once."""
    found: dict[str, DocumentEntry] = {}
    for start in range(0, len(sources), _SOURCES_AT_ONCE):
        some = sources[start : start + _SOURCES_AT_ONCE]
        entries = library.entries(f"d.source IN ({','.join('?' * len(some))})", some)
        found |= {entry.source: entry for entry in entries}
    return [found[source] for source in dict.fromkeys(sources) if source in found]


def _entry(entry: DocumentEntry) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name != "id"}


def _hit(hit: Hit) -> dict[str, Any]:
    chunk = hit.chunk
    ranks = {"bm25_rank": hit.bm25_rank, "embedding_rank": hit.embedding_rank}
    about = {"document": chunk.name, "source": chunk.source, "title": chunk.title, "text": chunk.passage.shown}
    return {**about, "score": hit.score, **ranks, "chunk": chunk.id}
