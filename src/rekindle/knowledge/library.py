"""A library: the documents of one tenant, their passages, vectors and words, in one SQLite file.

    put      documents with their passages and vectors, in one transaction
    remove   documents; their texts and tokens stay in `removed_passages` until their KV is purged (`purge_removed`)

Used from several threads and processes. `generation` grows with every change, so that a copy of the vectors can be
recognized as old. Deleted bytes are overwritten with zeros.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rekindle.core.document import Passage
from rekindle.errors import CacheUnusable, DocumentNotFound, KnowledgeUnusable
from rekindle.knowledge.library_file import LibraryFile, current_file, damaged_files, library_path, locked
from rekindle.knowledge.library_folder import LibraryLimit
from rekindle.knowledge.rows import (
    SplitDocument,
    bump_generation,
    claim_embedder,
    embedder_of,
    index_pairs,
    put_document,
    remove_documents,
)
from rekindle.knowledge.salvage import Loss, read_losses, write_losses

_AT_ONCE = 500  # parameters of one statement


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A document in the library. `name` is a short id for people, `source` where it came from."""

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
class RemovedPassage:
    """A passage that was removed while KV of it may still exist."""

    id: int
    text: str
    tokenizer: str | None
    tokens: bytes | None


class Library:
    """The documents of one tenant and salt. Raises `KnowledgeUnusable` if its file cannot be used.

    Writes are durable when the call returns. A damaged file is salvaged: see `library_file`.
    """

    def __init__(self, folder: Path, tenant: str = "local", salt: str = "", limit: LibraryLimit | None = None) -> None:
        self.tenant, self.salt = tenant, salt
        self.first_path = library_path(folder, tenant, salt)
        self.limit = limit or LibraryLimit(folder)
        with _usable(self.first_path):
            self._database = LibraryFile(self.first_path)
            if self.about("pairs") is None and not self._database.read_only:
                with self.writing() as connection:
                    index_pairs(connection)

    @property
    def path(self) -> Path:
        """The current file: another one after a salvage."""
        return self._database.path

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view. Never waits for writers."""
        with _usable(self.path), self._database.reading() as connection:
            yield connection

    @contextmanager
    def long_reading(self) -> Iterator[sqlite3.Connection]:
        """The same for long reads, on a connection of its own that nobody else waits for."""
        with _usable(self.path), closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction: all or nothing, and durable when it ends.

        With `durable=False` it may be lost as a whole when the power fails.
        """
        with _usable(self.path), self._database.writing(durable=durable) as connection:
            if connection.execute("SELECT 1 FROM about WHERE name='tenant'").fetchone() is None:
                # A new file: the first one, or a replacement for one that was deleted while we had it open.
                about = {"tenant": self.tenant, "salt": self.salt, "made": time.time_ns(), "generation": 0}
                connection.executemany(
                    "INSERT OR IGNORE INTO about VALUES (?,?)", [(k, str(v)) for k, v in about.items()]
                )
            yield connection

    def about(self, name: str) -> str | None:
        """A value of the `about` table."""
        with self.reading() as connection:
            row = connection.execute("SELECT value FROM about WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])

    @property
    def generation(self) -> int:
        """A counter that every change of passages increments."""
        return int(self.about("generation") or 0)

    def put(self, cuts: Sequence[SplitDocument], embedder: str | None) -> None:
        """Add documents, or replace those of the same source. `embedder` made their vectors; None: they have none yet.

        Raises `LibraryFull`: then none of them was added.
        """
        with _usable(self.path), self.limit.growing(), self.writing() as connection:
            if embedder is not None:
                claim_embedder(connection, embedder)
            for cut in cuts:
                self.limit.check(connection, cut.size_bytes)
                put_document(connection, cut)
            bump_generation(connection)

    def remove(self, documents: Sequence[int]) -> int:
        """Remove documents by id, with passages, vectors and words, and return the number of passages.

        Their texts and tokens stay in `removed_passages`.
        """
        with self.writing() as connection:
            for some in _some(documents):
                # Forget that its file was read: ingesting the file again brings it back.
                connection.execute(
                    "DELETE FROM files WHERE path IN "
                    f"(SELECT file FROM documents WHERE file IS NOT NULL AND id IN ({_marks(some)}))", some,
                )  # fmt: skip
            count = remove_documents(connection, documents)
            bump_generation(connection)
        return count

    def files(self) -> dict[str, tuple[str, str]]:
        """The files that were read: path -> (digest, splitting)."""
        with self.reading() as connection:
            rows = connection.execute("SELECT path, digest, splitting FROM files").fetchall()
        return {path: (digest, splitting) for path, digest, splitting in rows}

    def finish_file(self, path: str, digest: str, splitting: str, sources: Iterable[str]) -> int:
        """Record that a file was read completely; remove its documents of other sources and return their number."""
        kept = set(sources)
        with self.writing() as connection:
            rows = connection.execute("SELECT id, source FROM documents WHERE file=?", (path,)).fetchall()
            removed = [id for id, source in rows if source not in kept]
            if removed:
                remove_documents(connection, removed)
                bump_generation(connection)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?,?,?,?)", (path, digest, splitting, time.time()))
        return len(removed)

    def remove_file(self, path: str) -> int:
        """Remove everything that was read from a file, and return the number of documents."""
        with self.writing() as connection:
            rows = connection.execute("SELECT id FROM documents WHERE file=?", (path,)).fetchall()
            remove_documents(connection, [row[0] for row in rows])
            connection.execute("DELETE FROM files WHERE path=?", (path,))
            bump_generation(connection)
        return len(rows)

    def stored_digest(self, source: str) -> tuple[str, str] | None:
        """(digest, splitting) of the document of that source; None if there is none."""
        with self.reading() as connection:
            row = connection.execute("SELECT digest, splitting FROM documents WHERE source=?", (source,)).fetchone()
        return None if row is None else (row[0], row[1])

    def vectors_of(self, digests: Sequence[bytes], embedder: str) -> dict[bytes, bytes]:
        """Vectors of that embedder that passages with these digests already have."""
        found: dict[bytes, bytes] = {}
        with self.reading() as connection:
            if embedder_of(connection) != embedder:
                return {}
            for some in _some(digests):
                found |= connection.execute(
                    f"SELECT digest, vector FROM chunks WHERE vector IS NOT NULL AND digest IN ({_marks(some)})", some
                ).fetchall()
        return found

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> list[DocumentEntry]:
        """The documents for which an SQL condition holds, the newest first."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT d.id, d.name, d.source, d.title, d.app, "
                "(SELECT count(*) FROM chunks c WHERE c.document=d.id), d.characters, d.added "
                f"FROM documents d WHERE {where} ORDER BY d.id DESC",
                tuple(values),
            ).fetchall()
        return [DocumentEntry(*row) for row in rows]

    def find(self, name: str) -> list[DocumentEntry]:
        """The documents of a name, a source, or a file. Raises `DocumentNotFound`."""
        path = str(Path(os.path.expanduser(name)).absolute())  # noqa: PTH111  (a name may begin with ~, too)
        where = "d.name=? OR d.source IN (?, ?) OR d.file IN (?, ?)"
        found = self.entries(where, (name, name, path, name, path))
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
        """Count passages that went into a prompt, given in prompt order."""
        with self.writing(durable=False) as connection:
            connection.executemany("UPDATE chunks SET retrieved=retrieved+1 WHERE id=?", [(id,) for id in ids])
            connection.executemany("UPDATE chunks SET first=first+1 WHERE id=?", [(id,) for id in ids[:1]])

    def top_retrieved(self, count: int, *, others: bool = False) -> list[Chunk]:
        """The passages most often at the start of prompts, then those most often in them; then `others`, if set."""
        with self.reading() as connection:
            rows = connection.execute(
                f"{_CHUNK} WHERE c.retrieved > ? ORDER BY c.first DESC, c.retrieved DESC, c.id LIMIT ?",
                (-1 if others else 0, count),
            ).fetchall()
        return [_chunk(row) for row in rows]

    def note_tokens(self, tokenizer: str, tokens: Mapping[int, bytes]) -> bool:
        """Record the tokens of passages, so that `forget` can find their KV again; durable when it returns.

        False if a passage was removed, or the library is full: no KV of them must be kept. Of a passage that only
        partly fit into a prompt the shortest part is recorded: it is found wherever more is.
        """
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
        new = [
            (tokenizer, data, id) for id, data in tokens.items() if noted[id] is None or not data.startswith(noted[id])
        ]
        if not new:
            return True
        with self.writing() as connection:
            if not self.limit.allows(connection, sum(len(data) for _, data, _ in new)):
                return False
            connection.executemany(
                "INSERT INTO tokens SELECT id, ?, ? FROM chunks WHERE id=? "
                "ON CONFLICT (chunk, tokenizer) DO UPDATE SET tokens=excluded.tokens "
                "WHERE substr(tokens, 1, length(excluded.tokens))=excluded.tokens",
                new,
            )
            select = "SELECT 1 FROM tokens WHERE tokenizer=? AND substr(?, 1, length(tokens))=tokens AND chunk=?"
            return all(connection.execute(select, row).fetchone() for row in new)

    def has_passages(self, ids: Iterable[int]) -> bool:
        """Whether all of these passages still exist."""
        wanted = list(ids)
        with self.reading() as connection:
            rows = connection.execute(f"SELECT count(*) FROM chunks WHERE id IN ({_marks(wanted)})", wanted)
            return int(rows.fetchone()[0]) == len(wanted)

    def without_vector(self, embedder: str, max_count: int) -> list[Chunk]:
        """Passages that have no vector of that embedder yet; vectors of another embedder are dropped."""
        with self.reading() as connection:
            owner = embedder_of(connection)
            rows = connection.execute(f"{_CHUNK} WHERE c.vector IS NULL LIMIT ?", (max_count,)).fetchall()
        if owner is not None and owner != embedder:
            with self.writing() as connection:
                claim_embedder(connection, embedder)
                bump_generation(connection)
            return self.without_vector(embedder, max_count)
        return [_chunk(row) for row in rows]

    def set_vectors(self, vectors: Mapping[int, bytes], embedder: str) -> None:
        """Give passages their vectors; not if the library has another embedder's now."""
        with self.writing() as connection:
            if embedder_of(connection) != embedder:
                return
            connection.executemany("UPDATE chunks SET vector=? WHERE id=?", [(v, id) for id, v in vectors.items()])
            bump_generation(connection)

    def removed_passages(self) -> list[RemovedPassage]:
        """Removed passages of which KV may still exist."""
        with self.reading() as connection:
            rows = connection.execute("SELECT id, text, tokenizer, tokens FROM leaving").fetchall()
        return [RemovedPassage(*row) for row in rows]

    def purge_removed(self, removed: Sequence[RemovedPassage]) -> None:
        """Erase removed passages whose KV is gone, to the last byte.

        Raises `KnowledgeUnusable` if a process keeps reading an old view, so that bytes are left; then call it again.
        """
        with self.writing() as connection:
            connection.executemany("DELETE FROM leaving WHERE id=?", [(row.id,) for row in removed])
            # Only a full merge of the index removes deleted words from it.
            connection.execute("INSERT INTO words(words) VALUES('optimize')")
            connection.execute("INSERT INTO pairs(pairs) VALUES('optimize')")
            connection.execute("INSERT OR REPLACE INTO about VALUES ('unclean', 'yes')")
        with _usable(self.path):
            self._database.scrub()
            with locked(self.first_path):  # leftovers of a killed salvage hold texts, too
                pass
        with self.writing() as connection:
            connection.execute("DELETE FROM about WHERE name IN ('unclean', 'unaccounted')")

    @property
    def unclean(self) -> bool:
        """Whether bytes of removed passages may be left in its file."""
        return self.about("unclean") is not None

    @property
    def unaccounted(self) -> bool:
        """Whether KV may exist that nothing here names any more, because tokens were lost to damage."""
        return self.about("unaccounted") is not None

    def losses(self) -> list[Loss]:
        """What was lost to damage and is not acknowledged yet."""
        with self.reading() as connection:
            return read_losses(connection)

    def acknowledge(self) -> None:
        """Stop reporting what was lost."""
        with self.writing() as connection:
            write_losses(connection, [])

    def damaged_files(self) -> list[Path]:
        """Damaged files of this library: they may hold texts that were forgotten since."""
        return damaged_files(self.first_path)

    def set_app(self, sources: Iterable[str], app: str) -> None:
        """Set the app that documents belong to."""
        with self.writing() as connection:
            connection.executemany("UPDATE documents SET app=? WHERE source=?", [(app, source) for source in sources])

    def counts(self) -> dict[str, int]:
        """Totals: documents, chunks, embedded, characters, file_bytes."""
        with self.reading() as connection:
            (documents, characters) = connection.execute(
                "SELECT count(*), coalesce(sum(characters), 0) FROM documents"
            ).fetchone()
            (chunks, embedded) = connection.execute("SELECT count(*), count(vector) FROM chunks").fetchone()
        return {"documents": documents, "chunks": chunks, "embedded": embedded, "characters": characters,
                "file_bytes": self._database.size_bytes()}  # fmt: skip

    def close(self) -> None:
        """Close its connections. Idempotent; a later use opens them again."""
        self._database.close()


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
        if current_file(path) != path:
            raise KnowledgeUnusable(
                f"The library {path} was damaged; what could be read was saved. Try again."
            ) from error
        raise KnowledgeUnusable(f"The library {path} cannot be used: {error}") from error
