"""Inserts and deletes that touch several tables of a library: a document with its passages and words.

Every function works in the caller's transaction.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.document import Document, Passage, title_above
from rekindle.core.identity import digest_of_fields
from rekindle.knowledge.segment import character_pairs

NAME_DIGITS = 12
_PASSAGE_BYTES = 4096  # besides its text: a vector, and an index page of its own


@dataclass(frozen=True)
class BackedUp:
    """What a backup records of a document: digest, length, and when it was first added."""

    digest: str
    characters: int
    added: float


@dataclass(frozen=True)
class SplitDocument:
    """A document split into passages, with a vector (half precision) for each; None: not embedded yet."""

    document: Document
    passages: Sequence[Passage]
    vectors: Sequence[bytes | None]
    splitting: str
    file: str | None = None
    app: str | None = None
    restored: BackedUp | None = None

    @property
    def size_bytes(self) -> int:
        """An upper estimate of what its rows take, with words, vectors and indexes."""
        return sum(
            _PASSAGE_BYTES + len(text.encode())
            for passage in self.passages
            for text in (f"{self.document.title}{passage.heading}{passage.text}",)
        )


def passage_digest(title: str, passage: Passage) -> bytes:
    """A digest of everything that a passage's vector depends on."""
    return bytes.fromhex(digest_of_fields("rekindle/passage/1", title, passage.heading, passage.text))


def document_digest(document: Document) -> str:
    """A digest of a document's content, whatever its source."""
    parts = [text for section in document.sections for text in (*section.headings, "\0", section.text)]
    return digest_of_fields("rekindle/document/1", document.title, document.headers, *parts)


def embedded_text(title: str, passage: Passage) -> str:
    """The text of a passage that is embedded, title included: questions often name what only the title says."""
    above = title_above(title, passage.shown)
    return "\n".join(part for part in (above, passage.heading, passage.text) if part)


def name_of(source: str) -> str:
    """The short name of the document of a source."""
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()[:NAME_DIGITS]


def put_document(connection: sqlite3.Connection, cut: SplitDocument) -> None:
    """Add a document, replacing the one of the same source: answers that cite it become stale."""
    old = connection.execute("SELECT id FROM documents WHERE source=?", (cut.document.source,)).fetchall()
    for (document,) in old:
        mark_answers_stale(connection, document)
        _delete_document(connection, document)
    new = _add_document(connection, cut)
    connection.executemany("UPDATE OR REPLACE grounds SET document=? WHERE document=?", [(new, id) for (id,) in old])


def _add_document(connection: sqlite3.Connection, cut: SplitDocument) -> int:
    document = cut.document
    name = name_of(document.source)
    first = cut.restored or BackedUp(
        document_digest(document), sum(len(section.text) for section in document.sections), time.time()
    )
    id = connection.execute(
        "INSERT INTO documents (name, source, file, title, app, digest, splitting, characters, added) "
        "VALUES (?,?,?,?,?,?,?,?,?)",
        (
            name, document.source, cut.file, document.title, cut.app, first.digest, cut.splitting, first.characters,
            first.added,
        ),
    ).lastrowid  # fmt: skip
    for place, (passage, vector) in enumerate(zip(cut.passages, cut.vectors, strict=True)):
        digest = passage_digest(document.title, passage)
        chunk = connection.execute(
            "INSERT INTO chunks (document, place, heading, text, digest, vector) VALUES (?,?,?,?,?,?)",
            (id, place, passage.heading, passage.text, digest, vector),
        ).lastrowid
        connection.execute(
            "INSERT INTO words (rowid, title, body) VALUES (?,?,?)",
            (chunk, f"{document.title}\n{passage.heading}", passage.text),
        )
        _index_pairs(connection, chunk, f"{document.title}\n{passage.heading}\n{passage.text}")
    assert id is not None
    return id


def remove_documents(connection: sqlite3.Connection, documents: Sequence[int]) -> int:
    """Remove documents with all questions and answers that may quote them, and return the number of passages.

    Their texts and tokens go to `leaving`.
    """
    count = 0
    for document in documents:
        _remove_answers(connection, document)
        count += _delete_document(connection, document)
    if connection.execute("SELECT 1 FROM documents LIMIT 1").fetchone() is None:
        connection.execute("DELETE FROM answers")  # including those without evidence: nothing may be left
        connection.execute("DELETE FROM grounds")
        connection.execute("DELETE FROM terms")
        bump_answers(connection)
    return count


def mark_answers_stale(connection: sqlite3.Connection, document: int) -> None:
    """Drop answers that may quote a document; their questions stay."""
    changed = connection.execute(
        "UPDATE answers SET state='stale', text=NULL, tokens=NULL, evidence=x'' "
        "WHERE state!='open' AND id IN (SELECT answer FROM grounds WHERE document=?)",
        (document,),
    )
    if changed.rowcount:
        bump_answers(connection)


def _remove_answers(connection: sqlite3.Connection, document: int) -> None:
    removed = connection.execute(
        "DELETE FROM answers WHERE id IN (SELECT answer FROM grounds WHERE document=?)", (document,)
    )
    if removed.rowcount:
        connection.execute("DELETE FROM grounds WHERE answer NOT IN (SELECT id FROM answers)")
        bump_answers(connection)


def _delete_document(connection: sqlite3.Connection, document: int) -> int:
    """Delete a document with its passages and words, and return the number of passages."""
    for table in ("abstracts", "part_abstracts"):
        connection.execute(f"DELETE FROM {table} WHERE document=?", (document,))
    connection.execute("DELETE FROM merged_abstracts")  # any of them may quote it
    rows = connection.execute(
        "SELECT c.id, s.title, s.body, c.heading FROM chunks c JOIN searched s ON s.id=c.id WHERE c.document=?",
        (document,),
    ).fetchall()
    for chunk, title, body, heading in rows:
        connection.execute(
            "INSERT INTO words (words, rowid, title, body) VALUES ('delete',?,?,?)", (chunk, title, body)
        )
        if pairs := character_pairs(f"{title}\n{body}"):
            connection.execute("INSERT INTO pairs (pairs, rowid, body) VALUES ('delete',?,?)", (chunk, " ".join(pairs)))
        cut = connection.execute("SELECT tokenizer, tokens FROM tokens WHERE chunk=?", (chunk,)).fetchall()
        text = Passage(body, heading).shown
        connection.executemany(
            "INSERT INTO leaving (chunk, text, tokenizer, tokens) VALUES (?,?,?,?)",
            [(chunk, text, *row) for row in cut or [(None, None)]],
        )
        connection.execute("DELETE FROM tokens WHERE chunk=?", (chunk,))
    connection.execute("DELETE FROM chunks WHERE document=?", (document,))
    connection.execute("DELETE FROM documents WHERE id=?", (document,))
    return len(rows)


def _index_pairs(connection: sqlite3.Connection, chunk: int | None, text: str) -> None:
    if pairs := character_pairs(text):
        connection.execute("INSERT INTO pairs (rowid, body) VALUES (?,?)", (chunk, " ".join(pairs)))


def index_pairs(connection: sqlite3.Connection) -> None:
    """Index scripts without spaces in a library from before there was such an index, or after a salvage."""
    connection.execute("INSERT INTO pairs (pairs) VALUES ('delete-all')")
    for chunk, title, body in connection.execute("SELECT id, title, body FROM searched").fetchall():
        _index_pairs(connection, chunk, f"{title}\n{body}")
    connection.execute("INSERT OR REPLACE INTO about VALUES ('pairs', 'indexed')")


def embedder_of(connection: sqlite3.Connection) -> str | None:
    """The embedder that made the library's vectors."""
    row = connection.execute("SELECT value FROM about WHERE name='embedder'").fetchone()
    return None if row is None else str(row[0])


def claim_embedder(connection: sqlite3.Connection, embedder: str) -> None:
    """Make `embedder` the library's: vectors of another one, which do not compare, are dropped to be made again."""
    if embedder_of(connection) != embedder:
        connection.execute("UPDATE chunks SET vector=NULL")
        connection.execute("UPDATE answers SET vector=NULL")
        bump_answers(connection)
        connection.execute("INSERT OR REPLACE INTO about VALUES ('embedder', ?)", (embedder,))


def bump_generation(connection: sqlite3.Connection) -> None:
    """Record that passages changed."""
    connection.execute("UPDATE about SET value=CAST(value AS INTEGER)+1 WHERE name='generation'")


def bump_answers(connection: sqlite3.Connection) -> None:
    """Record that stored questions or answers changed."""
    connection.execute(
        "INSERT INTO about VALUES ('answers', '1') ON CONFLICT (name) DO UPDATE SET value=CAST(value AS INTEGER)+1"
    )
