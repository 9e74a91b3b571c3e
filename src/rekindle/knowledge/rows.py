"""The rows of a library: a document with its passages and words goes in and out of all tables at once.

Each of these works in the transaction of whoever calls it.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.document import Document, Passage, title_above
from rekindle.core.identity import digest_of_fields

_NAME_DIGITS = 12


@dataclass(frozen=True)
class Cut:
    """A document with its passages, and a vector (half precision) for each; None: not embedded yet."""

    document: Document
    passages: Sequence[Passage]
    vectors: Sequence[bytes | None]
    splitting: str
    file: str | None = None
    app: str | None = None


def passage_digest(title: str, passage: Passage) -> bytes:
    """What a passage's vector depends on."""
    return bytes.fromhex(digest_of_fields("rekindle/passage/1", title, passage.heading, passage.text))


def document_digest(document: Document) -> str:
    """What a document says, wherever it stands."""
    parts = [text for section in document.sections for text in (*section.headings, "\0", section.text)]
    return digest_of_fields("rekindle/document/1", document.title, document.headers, *parts)


def embedded_text(title: str, passage: Passage) -> str:
    """What is embedded of a passage: a question often names what only the title says."""
    above = title_above(title, passage.shown)
    return "\n".join(part for part in (above, passage.heading, passage.text) if part)


def put_document(connection: sqlite3.Connection, cut: Cut) -> None:
    """Add a document in place of the one of the same source, if there is one: its answers have to be found anew."""
    old = connection.execute("SELECT id FROM documents WHERE source=?", (cut.document.source,)).fetchall()
    for (document,) in old:
        outdate_answers(connection, document)
        _take_out(connection, document)
    new = _add_document(connection, cut)
    connection.executemany("UPDATE OR REPLACE grounds SET document=? WHERE document=?", [(new, id) for (id,) in old])


def _add_document(connection: sqlite3.Connection, cut: Cut) -> int:
    document = cut.document
    name = hashlib.blake2b(document.source.encode(), digest_size=16).hexdigest()[:_NAME_DIGITS]
    characters = sum(len(section.text) for section in document.sections)
    id = connection.execute(
        "INSERT INTO documents (name, source, file, title, app, digest, splitting, characters, added) "
        "VALUES (?,?,?,?,?,?,?,?,?)",
        (
            name, document.source, cut.file, document.title, cut.app, document_digest(document), cut.splitting,
            characters, time.time(),
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
    assert id is not None
    return id


def remove_documents(connection: sqlite3.Connection, documents: Sequence[int]) -> int:
    """Remove documents with all questions and answers that may quote them; how many passages that were.

    Notes what of them is leaving.
    """
    count = 0
    for document in documents:
        _remove_answers(connection, document)
        count += _take_out(connection, document)
    if connection.execute("SELECT 1 FROM documents LIMIT 1").fetchone() is None:
        connection.execute("DELETE FROM answers")  # also those that no passage answered: nothing shall be left
        connection.execute("DELETE FROM grounds")
        note_answers(connection)
    return count


def outdate_answers(connection: sqlite3.Connection, document: int) -> None:
    """A document changes: answers that may quote it are gone, their questions stay."""
    changed = connection.execute(
        "UPDATE answers SET state='stale', text=NULL, tokens=NULL, evidence=x'' "
        "WHERE state!='open' AND id IN (SELECT answer FROM grounds WHERE document=?)",
        (document,),
    )
    if changed.rowcount:
        note_answers(connection)


def _remove_answers(connection: sqlite3.Connection, document: int) -> None:
    gone = connection.execute(
        "DELETE FROM answers WHERE id IN (SELECT answer FROM grounds WHERE document=?)", (document,)
    )
    if gone.rowcount:
        connection.execute("DELETE FROM grounds WHERE answer NOT IN (SELECT id FROM answers)")
        note_answers(connection)


def _take_out(connection: sqlite3.Connection, document: int) -> int:
    """Remove a document with its passages and words; how many passages that were."""
    connection.execute("DELETE FROM abstracts WHERE document=?", (document,))
    rows = connection.execute(
        "SELECT c.id, s.title, s.body, c.heading FROM chunks c JOIN searched s ON s.id=c.id WHERE c.document=?",
        (document,),
    ).fetchall()
    for chunk, title, body, heading in rows:
        connection.execute(
            "INSERT INTO words (words, rowid, title, body) VALUES ('delete',?,?,?)", (chunk, title, body)
        )
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


def owner_of(connection: sqlite3.Connection) -> str | None:
    """The embedder whose vectors the library has."""
    row = connection.execute("SELECT value FROM about WHERE name='embedder'").fetchone()
    return None if row is None else str(row[0])


def claim(connection: sqlite3.Connection, embedder: str) -> None:
    """Vectors of two embedders do not compare: those of another one are dropped, to be made anew."""
    if owner_of(connection) != embedder:
        connection.execute("UPDATE chunks SET vector=NULL")
        connection.execute("UPDATE answers SET vector=NULL")
        note_answers(connection)
        connection.execute("INSERT OR REPLACE INTO about VALUES ('embedder', ?)", (embedder,))


def note_change(connection: sqlite3.Connection) -> None:
    """Note that passages are not as they were."""
    connection.execute("UPDATE about SET value=CAST(value AS INTEGER)+1 WHERE name='generation'")


def note_answers(connection: sqlite3.Connection) -> None:
    """Note that stored questions or answers are not as they were."""
    connection.execute(
        "INSERT INTO about VALUES ('answers', '1') ON CONFLICT (name) DO UPDATE SET value=CAST(value AS INTEGER)+1"
    )
