"""/v1/rekindle/documents and /search: the library of whoever calls. Files of this machine are not read here."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.document import Document
from rekindle.errors import Cancelled, DocumentNotFound
from rekindle.knowledge.ingest import Ingested, Step, parse_documents
from rekindle.knowledge.library import Entry, Library
from rekindle.knowledge.retrieve import Hit
from rekindle.server.asked import documents_of
from rekindle.server.call import Call
from rekindle.server.problem import Problem
from rekindle.server.schema import DocumentsRequest, SearchRequest

MOST_SALT = 1024  # characters
_PIECE_CHARACTERS = 200_000  # are embedded in a few seconds: then it is somebody else's turn
_SOURCES_AT_ONCE = 500
_COUNTS = ("added", "changed", "unchanged", "passages", "embedded", "truncated")


async def search_documents(call: Call, body: SearchRequest) -> Response:
    """The passages of the caller's documents that are most likely to answer a question."""
    knowledge = call.service.session.knowledge
    tenant = call.caller.tenant
    found = await call.aside(
        lambda: knowledge.search(body.query, body.top_k, body.retrieval, tenant=tenant, cache_salt=body.cache_salt)
    )
    told = {"object": "list", "data": [_hit(hit) for hit in found.hits], "retrieval": found.retrieval}
    return JSONResponse({**told, "ms": round(found.seconds * 1e3, 3), "rekindle": {"ignored": body.ignored()}})


async def add_documents(call: Call, body: DocumentsRequest) -> Response:
    """Put documents into the caller's library; one of the same source is replaced, one that is known costs nothing."""
    given = list(parse_documents(documents_of(body.documents, "documents")))
    left = threading.Event()

    def look(_: Step) -> None:
        if left.is_set():  # what was put so far stays: sent again, it goes on from there
            raise Cancelled("The client is gone.")

    ingest = functools.partial(
        call.service.session.knowledge.ingest,
        app=body.app_id,
        tenant=call.caller.tenant,
        cache_salt=body.cache_salt,
        report=look,
    )
    done = Ingested()
    try:
        for some in _pieces(given):
            _add(done, await call.aside(functools.partial(ingest, documents=some), call.service.ingesting))
    finally:
        left.set()
    entries = await call.aside(lambda: _of_sources(_library(call, body.cache_salt), [one.source for one in given]))
    counts = {name: getattr(done, name) for name in _COUNTS}
    problems = [asdict(problem) for problem in done.problems]
    told = {"data": [_entry(entry) for entry in entries], **counts, "problems": problems}
    return JSONResponse({**told, "ms": round(done.seconds * 1e3, 3), "rekindle": {"ignored": body.ignored()}})


async def list_documents(call: Call) -> Response:
    """The caller's documents, a page at a time: `after` is the name of the last one of the page before."""
    salt, wanted = _salt(call), call.page()

    def work() -> dict[str, Any]:
        if not call.service.session.knowledge.holds(call.caller.tenant, salt):
            return {"data": [], "total": 0, "has_more": False}
        library = _library(call, salt)
        chosen = "d.id IN (SELECT id FROM documents WHERE name > ? ORDER BY name LIMIT ?)"
        found = sorted(library.entries(chosen, (wanted.after, wanted.limit + 1)), key=lambda entry: entry.name)
        with library.reading() as connection:
            (total,) = connection.execute("SELECT count(*) FROM documents").fetchone()
        page = [_entry(entry) for entry in found[: wanted.limit]]
        return {"data": page, "total": total, "has_more": len(found) > wanted.limit}

    return JSONResponse(await call.aside(work))


async def show_document(call: Call) -> Response:
    """One of the caller's documents, with its passages."""
    salt = _salt(call)

    def work() -> dict[str, Any]:
        entry = _named(call, salt)
        library = _library(call, salt)
        passages = [{"chunk": chunk.id, "text": chunk.passage.shown} for chunk in library.chunks_of(entry.id)]
        return {**_entry(entry), "passages": passages}

    return JSONResponse(await call.aside(work))


async def forget_document(call: Call) -> Response:
    """Remove one of the caller's documents: its text, vectors and words, and all KV that was computed from it."""
    salt, knowledge = _salt(call), call.service.session.knowledge

    def work() -> dict[str, Any]:
        entry = _named(call, salt)
        done = knowledge.forget(entry.name, tenant=call.caller.tenant, cache_salt=salt)
        return {"forgotten": len(done.documents), "passages": done.passages}

    return JSONResponse(await call.aside(work))


def _pieces(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """The documents in order, a bounded number of characters at a time; a larger one comes alone."""
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


def _add(done: Ingested, more: Ingested) -> None:
    for field in fields(done):
        setattr(done, field.name, getattr(done, field.name) + getattr(more, field.name))


def _library(call: Call, salt: str | None) -> Library:
    return call.service.session.knowledge.library(call.caller.tenant, salt)


def _salt(call: Call) -> str | None:
    salt = call.http.query_params.get("cache_salt")
    if salt is not None and len(salt) > MOST_SALT:
        raise Problem(400, f"cache_salt has up to {MOST_SALT:,} characters.", param="cache_salt")
    return salt


def _named(call: Call, salt: str | None) -> Entry:
    """The document that the path names. Only by its name: what a source looks like is up to whoever gave it."""
    name, there = call.http.path_params["name"], call.service.session.knowledge.holds(call.caller.tenant, salt)
    found = _library(call, salt).entries("d.name=?", (name,)) if there else []
    if not found:
        raise DocumentNotFound("There is no document of that name.")
    return found[0]


def _of_sources(library: Library, sources: Sequence[str]) -> list[Entry]:
    """The documents of some sources, in the order of these; each once."""
    found: dict[str, Entry] = {}
    for start in range(0, len(sources), _SOURCES_AT_ONCE):
        some = sources[start : start + _SOURCES_AT_ONCE]
        entries = library.entries(f"d.source IN ({','.join('?' * len(some))})", some)
        found |= {entry.source: entry for entry in entries}
    return [found[source] for source in dict.fromkeys(sources) if source in found]


def _entry(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name != "id"}


def _hit(hit: Hit) -> dict[str, Any]:
    chunk = hit.chunk
    ranks = {"word_rank": hit.word_rank, "meaning_rank": hit.meaning_rank}
    about = {"document": chunk.name, "source": chunk.source, "title": chunk.title, "text": chunk.passage.shown}
    return {**about, "score": hit.score, **ranks, "chunk": chunk.id}
