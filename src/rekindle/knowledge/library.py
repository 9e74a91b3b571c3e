"""A library: the documents of one tenant, their passages, vectors and words, in one SQLite file.

    put      documents with their passages and vectors, in one transaction
    remove   documents; what is left of them waits in `leaving` until their KV is gone too (`cleared`)

Used from several threads and processes. `generation` grows with every change, so that whoever holds a copy of the
vectors knows when it is old. Deleted bytes are overwritten with zeros.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rekindle.core.document import Passage
from rekindle.core.identity import digest_of_fields
from rekindle.errors import CacheUnusable, DocumentNotFound, KnowledgeUnusable
from rekindle.knowledge.rows import Cut, claim, note_change, owner_of, put_document, remove_documents
from rekindle.knowledge.schema import MIGRATIONS
from rekindle.store.database import Database
from rekindle.store.files import Files

_LOG_BYTES = 64 << 20
_AT_ONCE = 500  # parameters of one statement


@dataclass(frozen=True, slots=True)
class Entry:
    """A document in the library. `name` is what people call it by, `source` where it came from."""

    id: int
    name: str
    source: str
    title: str
    app: str | None
    chunks: int
    characters: int
    added: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage in the library."""

    id: int
    document: int
    place: int
    name: str  # of its document
    source: str
    title: str
    passage: Passage


@dataclass(frozen=True, slots=True)
class Leaving:
    """A passage that was removed, as KV of it may still be around."""

    id: int
    text: str
    tokenizer: str | None
    tokens: bytes | None


class Library:
    """The documents of one tenant and salt. Raises `KnowledgeUnusable` if its file cannot be used."""

    def __init__(self, folder: Path, tenant: str = "local", salt: str = "") -> None:
        self.tenant, self.salt = tenant, salt
        self.path = library_path(folder, tenant, salt)
        with _usable(self.path):
            self._database = Database(self.path, Files(), migrations=MIGRATIONS, log_bytes=_LOG_BYTES)
            if self.about("tenant") is None and not self._database.read_only:
                with self.writing():
                    pass

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view. Never waits for writers."""
        with _usable(self.path), self._database.reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with _usable(self.path), self._database.writing() as connection:
            if connection.execute("SELECT 1 FROM about WHERE name='tenant'").fetchone() is None:
                # A new file: the first one, or one in place of a file that somebody deleted while we had it open.
                about = {"tenant": self.tenant, "salt": self.salt, "made": time.time_ns(), "generation": 0}
                connection.executemany("INSERT INTO about VALUES (?,?)", [(k, str(v)) for k, v in about.items()])
            yield connection

    def about(self, name: str) -> str | None:
        """What is noted under a name."""
        with self.reading() as connection:
            row = connection.execute("SELECT value FROM about WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])

    @property
    def generation(self) -> int:
        """How often its passages changed."""
        return int(self.about("generation") or 0)

    def put(self, cuts: Sequence[Cut], embedder: str) -> None:
        """Add documents, or replace those of the same source. `embedder` is whose vectors they have."""
        with self.writing() as connection:
            claim(connection, embedder)
            for cut in cuts:
                put_document(connection, cut)
            note_change(connection)

    def remove(self, documents: Sequence[int]) -> int:
        """Remove documents by id, with passages, vectors and words; how many passages that were.

        Their texts and tokens wait in `leaving`.
        """
        with self.writing() as connection:
            for some in _some(documents):
                # Nothing says any more that its file was read: who ingests it again wants it back.
                connection.execute(
                    "DELETE FROM files WHERE path IN "
                    f"(SELECT file FROM documents WHERE file IS NOT NULL AND id IN ({_marks(some)}))", some,
                )  # fmt: skip
            count = remove_documents(connection, documents)
            note_change(connection)
        return count

    def files(self) -> dict[str, tuple[str, str]]:
        """The files that were read: path -> digest and how they were split."""
        with self.reading() as connection:
            rows = connection.execute("SELECT path, digest, splitting FROM files").fetchall()
        return {path: (digest, splitting) for path, digest, splitting in rows}

    def finish_file(self, path: str, digest: str, splitting: str, sources: Iterable[str]) -> int:
        """Note that all of a file was read, and remove its documents of other sources; how many those were."""
        kept = set(sources)
        with self.writing() as connection:
            rows = connection.execute("SELECT id, source FROM documents WHERE file=?", (path,)).fetchall()
            gone = [id for id, source in rows if source not in kept]
            if gone:
                remove_documents(connection, gone)
                note_change(connection)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?,?,?,?)", (path, digest, splitting, time.time()))
        return len(gone)

    def remove_file(self, path: str) -> int:
        """Remove everything that was read from a file; how many documents that were."""
        with self.writing() as connection:
            rows = connection.execute("SELECT id FROM documents WHERE file=?", (path,)).fetchall()
            remove_documents(connection, [row[0] for row in rows])
            connection.execute("DELETE FROM files WHERE path=?", (path,))
            note_change(connection)
        return len(rows)

    def known(self, source: str) -> tuple[str, str] | None:
        """Digest and splitting of the document of that source; None if there is none."""
        with self.reading() as connection:
            row = connection.execute("SELECT digest, splitting FROM documents WHERE source=?", (source,)).fetchone()
        return None if row is None else (row[0], row[1])

    def vectors_of(self, digests: Sequence[bytes], embedder: str) -> dict[bytes, bytes]:
        """Vectors of that embedder that passages of these digests have already."""
        found: dict[bytes, bytes] = {}
        with self.reading() as connection:
            if owner_of(connection) != embedder:
                return {}
            for some in _some(digests):
                found |= connection.execute(
                    f"SELECT digest, vector FROM chunks WHERE vector IS NOT NULL AND digest IN ({_marks(some)})", some
                ).fetchall()
        return found

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> list[Entry]:
        """The documents for which an SQL condition holds, the newest first."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT d.id, d.name, d.source, d.title, d.app, "
                "(SELECT count(*) FROM chunks c WHERE c.document=d.id), d.characters, d.added "
                f"FROM documents d WHERE {where} ORDER BY d.id DESC",
                tuple(values),
            ).fetchall()
        return [Entry(*row) for row in rows]

    def find(self, name: str) -> list[Entry]:
        """The documents of a name, a source, or a file. Raises `DocumentNotFound`."""
        path = str(Path(os.path.expanduser(name)).absolute())  # noqa: PTH111  (a name may begin with ~, too)
        found = self.entries("d.name=?1 OR d.source IN (?1, ?2) OR d.file IN (?1, ?2)", (name, path))
        if not found:
            with self.reading() as connection:
                rows = connection.execute("SELECT name, source FROM documents LIMIT 1000").fetchall()
            close = get_close_matches(name, [text for row in rows for text in row], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise DocumentNotFound(f"There is no document {name!r}.{hint} `rekindle knowledge ls` lists them.")
        return found

    def chunks(self, ids: Sequence[int]) -> dict[int, Chunk]:
        """Passages by id; those that are gone are left out."""
        found: dict[int, Chunk] = {}
        with self.reading() as connection:
            for some in _some(ids):
                rows = connection.execute(
                    f"{_CHUNK} WHERE c.id IN ({_marks(some)})", some
                ).fetchall()  # fmt: skip
                found |= {row[0]: _chunk(row) for row in rows}
        return found

    def chunks_of(self, document: int) -> list[Chunk]:
        """The passages of a document, in order."""
        with self.reading() as connection:
            rows = connection.execute(f"{_CHUNK} WHERE c.document=? ORDER BY c.place", (document,)).fetchall()
        return [_chunk(row) for row in rows]

    def note_retrieved(self, ids: Sequence[int]) -> None:
        """Count passages that went into a prompt, in their order."""
        with self.writing() as connection:
            connection.executemany("UPDATE chunks SET retrieved=retrieved+1 WHERE id=?", [(id,) for id in ids])
            connection.executemany("UPDATE chunks SET first=first+1 WHERE id=?", [(id,) for id in ids[:1]])

    def most_retrieved(self, count: int, *, others: bool = False) -> list[Chunk]:
        """The passages that were in most prompts, those that came first in them first; then `others`, if asked for."""
        with self.reading() as connection:
            rows = connection.execute(
                f"{_CHUNK} WHERE c.retrieved > ? ORDER BY c.first DESC, c.retrieved DESC, c.id LIMIT ?",
                (-1 if others else 0, count),
            ).fetchall()
        return [_chunk(row) for row in rows]

    def note_tokens(self, tokenizer: str, tokens: Mapping[int, bytes]) -> bool:
        """Note how a tokenizer cut passages, so that KV of them can be found again; False if one is gone by now."""
        with self.reading() as connection:
            ids = list(tokens)
            rows = connection.execute(
                f"SELECT c.id, t.tokens FROM chunks c LEFT JOIN tokens t ON t.chunk=c.id AND t.tokenizer=? "
                f"WHERE c.id IN ({_marks(ids)})",
                [tokenizer, *ids],
            ).fetchall()
        noted = dict(rows)
        if len(noted) < len(tokens):
            return False
        new = [(id, tokenizer, data) for id, data in tokens.items() if noted[id] != data]
        if not new:
            return True
        with self.writing() as connection:
            done = connection.executemany(
                "INSERT OR REPLACE INTO tokens SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM chunks WHERE id=?1)", new
            )
            return done.rowcount == len(new)

    def present(self, ids: Iterable[int]) -> bool:
        """Whether all of these passages are still there."""
        wanted = list(ids)
        with self.reading() as connection:
            rows = connection.execute(f"SELECT count(*) FROM chunks WHERE id IN ({_marks(wanted)})", wanted)
            return int(rows.fetchone()[0]) == len(wanted)

    def without_vector(self, embedder: str, most: int) -> list[Chunk]:
        """Passages that have no vector of that embedder yet; those of another one are dropped."""
        with self.reading() as connection:
            owner = owner_of(connection)
            rows = connection.execute(f"{_CHUNK} WHERE c.vector IS NULL LIMIT ?", (most,)).fetchall()
        if owner is not None and owner != embedder:
            with self.writing() as connection:
                claim(connection, embedder)
                note_change(connection)
            return self.without_vector(embedder, most)
        return [_chunk(row) for row in rows]

    def set_vectors(self, vectors: Mapping[int, bytes], embedder: str) -> None:
        """Give passages their vectors; not if the library has another embedder's by now."""
        with self.writing() as connection:
            if owner_of(connection) != embedder:
                return
            connection.executemany("UPDATE chunks SET vector=? WHERE id=?", [(v, id) for id, v in vectors.items()])
            note_change(connection)

    def leaving(self) -> list[Leaving]:
        """What was removed, as long as KV of it may be around."""
        with self.reading() as connection:
            rows = connection.execute("SELECT id, text, tokenizer, tokens FROM leaving").fetchall()
        return [Leaving(*row) for row in rows]

    def cleared(self, gone: Sequence[Leaving]) -> None:
        """No KV is left of these: forget them here as well, to the last byte.

        Raises `KnowledgeUnusable` if a process has been reading for so long that bytes are left; then do it again.
        """
        with self.writing() as connection:
            connection.executemany("DELETE FROM leaving WHERE id=?", [(row.id,) for row in gone])
            # Only a merge of all its parts takes deleted words out of the index.
            connection.execute("INSERT INTO words(words) VALUES('optimize')")
            connection.execute("INSERT OR REPLACE INTO about VALUES ('unclean', 'yes')")
        with _usable(self.path):
            self._database.scrub()
            for damaged in self.path.parent.glob(f"{self.path.name}.broken-*"):  # set aside, but it holds texts
                damaged.unlink()
        with self.writing() as connection:
            connection.execute("DELETE FROM about WHERE name='unclean'")

    @property
    def unclean(self) -> bool:
        """Whether bytes of what was removed may be left in its file."""
        return self.about("unclean") is not None

    def set_app(self, sources: Iterable[str], app: str) -> None:
        """Say whose documents these are."""
        with self.writing() as connection:
            connection.executemany("UPDATE documents SET app=? WHERE source=?", [(app, source) for source in sources])

    def counts(self) -> dict[str, int]:
        """How much there is: documents, chunks, embedded, characters, file_bytes."""
        with self.reading() as connection:
            (documents, characters) = connection.execute(
                "SELECT count(*), coalesce(sum(characters), 0) FROM documents"
            ).fetchone()
            (chunks, embedded) = connection.execute("SELECT count(*), count(vector) FROM chunks").fetchone()
        size = self._database.size_bytes()
        return {"documents": documents, "chunks": chunks, "embedded": embedded, "characters": characters,
                "file_bytes": size}  # fmt: skip

    def close(self) -> None:
        """Close its connections. Idempotent; a later use opens them again."""
        self._database.close()


def library_path(folder: Path, tenant: str, salt: str) -> Path:
    """Where the library of a tenant and salt is, if there is one."""
    return folder.expanduser().absolute() / f"{digest_of_fields('rekindle/library/1', tenant, salt)}.sqlite"


_CHUNK = (
    "SELECT c.id, c.document, c.place, d.name, d.source, d.title, c.heading, c.text "
    "FROM chunks c JOIN documents d ON d.id=c.document"
)


def _chunk(row: Sequence[object]) -> Chunk:
    id, document, place, name, source, title, heading, text = row
    return Chunk(id, document, place, name, source, title, Passage(str(text), str(heading)))  # type: ignore[arg-type]


def _some(items: Sequence[object]) -> Iterator[list[object]]:
    for start in range(0, len(items), _AT_ONCE):
        yield list(items[start : start + _AT_ONCE])


def _marks(items: Sequence[object]) -> str:
    return ",".join("?" * len(items))


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, CacheUnusable) as error:
        raise KnowledgeUnusable(f"The library {path} cannot be used: {error}") from error
