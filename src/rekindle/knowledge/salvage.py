"""Save what can still be read of a damaged library into a new one, and note what was lost.

The damaged file is only read, page by page (`sqlite_pages`). Tables are recognised by the types of their columns, so
it does not matter which page was lost: the root of a table, an inner page, or a leaf. Indexes tell which documents and
passages there were: what they name and no table holds is lost, and reported with every call until somebody acknowledges
it. A passage whose digest does not match its text is lost, too.

What is derived is left behind: the word index is rebuilt here, missing vectors when something is next ingested.
Stored answers and abstracts, which a model wrote, are not taken over.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rekindle.core.document import Passage
from rekindle.core.size import count_of
from rekindle.knowledge.rows import NAME_DIGITS, index_pairs, name_of, passage_digest
from rekindle.knowledge.sqlite_pages import RawRow, SqlitePages, Value
from rekindle.store.catalog.database import Database


@dataclass(frozen=True)
class Loss:
    """A damaged file: where it is, and what could not be read of it.

    documents, passages   how many are missing from the library now
    names                 sources of the first documents that are missing or incomplete
    """

    at: float
    file: str
    documents: int
    passages: int
    names: tuple[str, ...] = ()

    def sentence(self, advice: str, *, show_path: bool = True) -> str:
        """What happened, for people; without `show_path` no path of this machine is named."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.at))
        counts = f"{count_of(self.documents, 'document')} and {count_of(self.passages, 'passage')}"
        lost = f"at least {counts} could not be read"
        whole = "everything in it could be read" if not (self.documents or self.passages or self.names) else lost
        named = f" (ingest again, or import a backup: {', '.join(self.names)})" if self.names else ""
        where = f" The damaged file is still there: {self.file}." if show_path else ""
        return f"The library was damaged; on {when} it was saved into a new file, and {whole}{named}.{where} {advice}"


def read_losses(connection: sqlite3.Connection) -> list[Loss]:
    """Losses that are not acknowledged yet, oldest first."""
    row = connection.execute("SELECT value FROM about WHERE name='lost'").fetchone()
    if row is None:
        return []
    try:
        return [Loss(**{**one, "names": tuple(one["names"])}) for one in json.loads(row[0])]
    except (ValueError, TypeError, KeyError):  # this record is damaged, too: something was lost, nobody knows what
        return [Loss(time.time(), "", 0, 0, ("?",))]


def write_losses(connection: sqlite3.Connection, losses: Sequence[Loss]) -> None:
    """Replace the recorded losses."""
    connection.execute("DELETE FROM about WHERE name='lost'")
    if losses:
        text = json.dumps([asdict(loss) for loss in losses])
        connection.execute("INSERT INTO about VALUES ('lost', ?)", (text,))


_ROWS_A_TRANSACTION = 2000
_MAX_NAMES = 20  # of documents that a loss names
_NAME = re.compile(f"[0-9a-f]{{{NAME_DIGITS}}}")

# The types each column may have, one letter per type. SQLite may store a whole number as an integer.
_LETTERS = {type(None): "n", int: "i", float: "r", str: "t", bytes: "b"}
_TABLES = {
    "documents": "n t t tn t tn t t i ri",
    "chunks": "n i i t t b bn i i",
    "leaving": "n i t tn bn",
}
_WITHOUT_ROWID = {"tokens": "i t b", "files": "t t t ri", "about": "t t"}
_KEPT_ABOUT = ("embedder", "generation", "lost")


@dataclass(frozen=True)
class SalvageResult:
    """What could be read of a damaged library and what could not; `names` are the first lost sources."""

    documents: int
    passages: int
    lost_documents: int
    lost_passages: int
    names: tuple[str, ...]


def salvage(damaged: Path, database: Database) -> SalvageResult:
    """Read everything from a damaged file and its log into a new, empty library. Raises `OSError`, `sqlite3.Error`."""
    with database.writing() as connection:
        for statement in _SEEN:
            connection.execute(statement)
    rows = SqlitePages(damaged).rows()
    while some := list(islice(rows, _ROWS_A_TRANSACTION)):
        with database.writing() as connection:
            for row in some:
                _put(connection, row)
    with database.writing() as connection:
        return _Repair(connection).run()


# What the indexes name. Not temporary tables: the next transaction may use another connection.
_SEEN = (
    "CREATE TABLE seen_texts (id INTEGER, text TEXT)",  # of documents: names, sources, files
    "CREATE TABLE seen_passages (id INTEGER PRIMARY KEY)",
    "CREATE TABLE seen_places (document INTEGER, place INTEGER, id INTEGER)",
    "CREATE TABLE seen_last (name TEXT, id INTEGER)",
    "CREATE INDEX seen_texts_id ON seen_texts (id)",
    "CREATE INDEX seen_places_id ON seen_places (id)",
)


def _put(connection: sqlite3.Connection, row: RawRow) -> None:
    """Insert a row into the table that its column types fit; derived and foreign rows are dropped."""
    shapes = _TABLES if row.rowid is not None else _WITHOUT_ROWID
    for table, shape in shapes.items():
        if _fits(row.values, shape.split()):
            values = row.values if row.rowid is None else (row.rowid, *row.values[1:])
            marks = ",".join("?" * len(values))
            connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", values)
            return
    kinds = "".join(_LETTERS[type(value)] for value in row.values)
    if row.rowid is not None:
        if kinds == "ti":  # sqlite_sequence: the last id of a table
            connection.execute("INSERT INTO seen_last VALUES (?,?)", row.values)
    elif kinds == "ti":
        connection.execute("INSERT INTO seen_texts VALUES (?,?)", row.values[::-1])
    elif kinds == "bi":
        connection.execute("INSERT OR IGNORE INTO seen_passages VALUES (?)", row.values[1:])
    elif kinds == "iii":
        connection.execute("INSERT INTO seen_places VALUES (?,?,?)", row.values)


def _fits(values: Sequence[Value], shape: Sequence[str]) -> bool:
    return len(values) == len(shape) and all(
        _LETTERS[type(value)] in letters for value, letters in zip(values, shape, strict=True)
    )


class _Repair:
    """Makes a consistent library of the rows that were read: no dangling references."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lost: dict[int, str] = {}  # documents that are gone, or not whole: the source
        self._lost_documents = 0

    def run(self) -> SalvageResult:
        self._drop_wrong_passages()
        self._adopt_orphans()
        lost_passages = self._note_lost_passages()
        self._drop_empty_documents()
        self._keep_tokens()
        self._restore_counters()
        self._execute("INSERT INTO words(words) VALUES('rebuild')")
        index_pairs(self._connection)
        for (table,) in self._rows("SELECT name FROM sqlite_master WHERE name GLOB 'seen_*' AND type='table'"):
            self._execute(f"DROP TABLE {table}")
        (documents,), (passages,) = (self._rows(f"SELECT count(*) FROM {name}")[0] for name in ("documents", "chunks"))
        names = tuple(sorted(self._lost.values()))[:_MAX_NAMES]
        return SalvageResult(documents, passages, self._lost_documents, lost_passages, names)

    def _drop_wrong_passages(self) -> None:
        """Drop passages whose text no longer matches its digest."""
        wrong: dict[int, list[int]] = {}
        for id, document in wrong_passages(self._connection):
            wrong.setdefault(document, []).append(id)
        for document, ids in list(wrong.items()):
            (count,) = self._rows("SELECT count(*) FROM chunks WHERE document=?", document)[0]
            if len(ids) == count > 1:  # all of them: then it is the title that is damaged
                self._execute("DELETE FROM documents WHERE id=?", document)
                del wrong[document]
        for id, name, source in self._rows("SELECT id, name, source FROM documents"):
            if name != name_of(source):
                self._execute("DELETE FROM documents WHERE id=?", id)
        for id in (id for ids in wrong.values() for id in ids):
            self._execute("INSERT OR IGNORE INTO seen_passages VALUES (?)", id)
            self._execute("INSERT INTO seen_places SELECT document, place, id FROM chunks WHERE id=?", id)
            self._execute("DELETE FROM chunks WHERE id=?", id)

    def _adopt_orphans(self) -> None:
        """Keep passages whose document row is lost, under its source if an index names it."""
        orphans = self._rows(
            "SELECT document, sum(length(text)) FROM chunks WHERE document NOT IN (SELECT id FROM documents) "
            "GROUP BY document"
        )
        for document, characters in orphans:
            source, file = self._source_of(document)
            title = Path(source).name or source
            # Without a digest it is read again when it is next ingested.
            self._execute(
                "INSERT OR IGNORE INTO documents VALUES (?,?,?,?,?,NULL,'','',?,?)",
                document, name_of(source), source, file, title, characters, time.time(),
            )  # fmt: skip
            for id, heading, text in self._rows("SELECT id, heading, text FROM chunks WHERE document=?", document):
                digest = passage_digest(title, Passage(text, heading))
                self._execute("UPDATE chunks SET digest=?, vector=NULL WHERE id=?", digest, id)
            self._lost[document] = source

    def _source_of(self, document: int) -> tuple[str, str | None]:
        """Source and file of a document, as far as the indexes name them."""
        texts = [text for (text,) in self._rows("SELECT DISTINCT text FROM seen_texts WHERE id=?", document)]
        source = next((text for text in texts if name_of(text) in texts), None)
        if source is None:
            others = [text for text in texts if not _NAME.fullmatch(text)]
            source = others[0] if others else f"recovered:{document}"
        file = next((text for text in texts if self._rows("SELECT 1 FROM files WHERE path=?", text)), None)
        if self._rows("SELECT 1 FROM documents WHERE source=? OR name=?", source, name_of(source)):
            source = f"recovered:{document}"
        return source, file

    def _note_lost_passages(self) -> int:
        """Find incomplete documents, so that they are read again; return the number of lost passages."""
        lost = [id for (id,) in self._rows("SELECT id FROM seen_passages EXCEPT SELECT id FROM chunks")]
        unknown = False
        for id in lost:
            found = self._rows(
                "SELECT document FROM seen_places s WHERE id=? AND NOT EXISTS "
                "(SELECT 1 FROM chunks c WHERE c.document=s.document AND c.place=s.place)", id
            )  # fmt: skip
            unknown = unknown or not found
            for (document,) in found:
                self._lost.setdefault(document, "")
        gaps = self._rows("SELECT document FROM chunks GROUP BY document HAVING count(*) <= max(place)")
        for (document,) in gaps:
            self._lost.setdefault(document, "")
        if unknown:  # they may be of any document
            self._execute("UPDATE documents SET digest=''")
            self._execute("DELETE FROM files")
        return len(lost)

    def _drop_empty_documents(self) -> None:
        """Drop documents of which nothing is left, or that only an index names."""
        for id, source in self._rows("SELECT id, source FROM documents WHERE id NOT IN (SELECT document FROM chunks)"):
            self._execute("DELETE FROM files WHERE path=(SELECT file FROM documents WHERE id=?)", id)
            self._execute("DELETE FROM documents WHERE id=?", id)
            self._lost[id] = source
        named = self._rows("SELECT DISTINCT id, text FROM seen_texts WHERE id NOT IN (SELECT id FROM documents)")
        for id, text in named:
            if _NAME.fullmatch(text):
                self._lost.setdefault(id, "")
                self._lost[id] = self._lost[id] or self._source_of(id)[0]
        for id, source in list(self._lost.items()):
            there = self._rows("SELECT source, file FROM documents WHERE id=?", id)
            if there:
                self._lost[id] = there[0][0]
                self._execute("UPDATE documents SET digest='' WHERE id=?", id)
                self._execute("DELETE FROM files WHERE path=?", there[0][1])
            elif source:
                self._lost_documents += 1
                self._execute("DELETE FROM files WHERE path=?", source)
            else:  # not a document id after all
                del self._lost[id]

    def _keep_tokens(self) -> None:
        """Keep the tokens of lost passages until their KV is purged."""
        self._execute(
            "INSERT INTO leaving (chunk, text, tokenizer, tokens) "
            "SELECT chunk, '', tokenizer, tokens FROM tokens WHERE chunk NOT IN (SELECT id FROM chunks)"
        )
        self._execute("DELETE FROM tokens WHERE chunk NOT IN (SELECT id FROM chunks)")

    def _restore_counters(self) -> None:
        """Make sure that no id is given twice, and that copies of the old data are recognized as old."""
        seen = {
            "documents": "SELECT max(id) FROM (SELECT id FROM seen_texts UNION SELECT id FROM documents "
            "UNION SELECT document FROM chunks)",
            "chunks": "SELECT max(id) FROM (SELECT id FROM chunks UNION SELECT id FROM seen_passages "
            "UNION SELECT chunk FROM leaving)",
        }
        for table, query in seen.items():
            counted = self._rows(f"{query} UNION SELECT max(id) FROM seen_last WHERE name=?", table)
            last = max((number for (number,) in counted if number is not None), default=0)
            self._execute("DELETE FROM sqlite_sequence WHERE name=?", table)
            self._execute("INSERT INTO sqlite_sequence VALUES (?,?)", table, last)
        kept = ",".join(f"'{name}'" for name in _KEPT_ABOUT)
        self._execute(f"DELETE FROM about WHERE name NOT IN ({kept})")
        self._execute("DELETE FROM about WHERE name='generation' AND value GLOB '*[^0-9]*'")
        if not self._rows("SELECT 1 FROM about WHERE name='embedder'"):
            self._execute("UPDATE chunks SET vector=NULL")
        # The damaged file may hold bytes of removed passages, and their tokens may be lost.
        self._execute("INSERT OR REPLACE INTO about VALUES ('unclean', 'yes'), ('unaccounted', 'yes')")

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _execute(self, statement: str, *values: object) -> None:
        self._connection.execute(statement, values)


def wrong_passages(connection: sqlite3.Connection) -> Iterator[tuple[int, int]]:
    """(passage, document) ids of passages whose digest does not match their text."""
    rows: Iterable[tuple[int, int, str, str, str, bytes]] = connection.execute(
        "SELECT c.id, c.document, d.title, c.heading, c.text, c.digest "
        "FROM chunks c JOIN documents d ON d.id=c.document"
    )
    for id, document, title, heading, text, digest in rows:
        if passage_digest(title, Passage(text, heading)) != digest:
            yield id, document
