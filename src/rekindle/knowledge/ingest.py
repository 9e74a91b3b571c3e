"""Files into a library: new ones are read, split, embedded and stored; vanished ones are removed; the rest costs a
digest.

Documents are stored in batches, so after an interruption the next run continues there. A file that cannot be read is
reported at the end and stops nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rekindle.core.document import CUT_SHORT, Document, Section
from rekindle.core.identity import digest_of_fields
from rekindle.core.size import count_of
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import ExtraMissing, InvalidPrompt, RekindleError, UnreadableDocument, why_unreadable
from rekindle.knowledge.library import Library
from rekindle.knowledge.paths import FoundFiles, absolute, find_files, is_there
from rekindle.knowledge.read.clean_text import ReadProblem
from rekindle.knowledge.read.file import read_file
from rekindle.knowledge.retrieve import to_stored
from rekindle.knowledge.rows import SplitDocument, document_digest, embedded_text, passage_digest
from rekindle.knowledge.split import Splitting, split

_PASSAGES_AT_ONCE = 64
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """Progress of an ingestion; `passages` counts those embedded so far."""

    files_done: int
    files: int
    documents: int
    passages: int
    name: str


# Tokens a letter. MiniLM: 0.35 to 0.5 for English, code, German, Spanish and French, 1.0 to 1.2 for Russian, Arabic,
# Chinese and Japanese.
_FOREIGN = 0.8


@dataclass
class IngestResult:
    """What an ingestion did: numbers of documents and passages, and each problem."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    passages: int = 0
    embedded: int = 0
    truncated: int = 0  # passages longer than the embedder reads
    letters: int = 0  # of embedded prose
    letter_tokens: int = 0  # what the embedder's tokenizer made of it
    problems: list[ReadProblem] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # files in folders whose kind is not read
    seconds: float = 0.0
    begun: int = 0  # 1 if these are the first documents of the library

    @property
    def is_foreign(self) -> bool:
        """Whether the embedder does not know the language: its tokenizer has no words of it, only letters."""
        return self.letter_tokens > _FOREIGN * self.letters

    @property
    def changes(self) -> int:
        """Number of documents added, changed or removed."""
        return self.added + self.changed + self.removed


class Ingester:
    """Puts documents into a library. `report` is called with the progress; `app` is the app they belong to."""

    def __init__(
        self,
        library: Library,
        embedder: Embedder,
        splitting: Splitting | None = None,
        *,
        app: str | None = None,
        report: Callable[[IngestProgress], None] | None = None,
    ) -> None:
        self._library = library
        self._embedder = embedder
        self._splitting = splitting or Splitting()
        self._how = f"{self._splitting.signature} {embedder.digest}"
        self._app = app
        self._report = report
        self._done = IngestResult()
        self._waiting: list[SplitDocument] = []
        self._files_done = self._files = 0

    def ingest(self, paths: Sequence[str | Path], *, watched: bool = False) -> IngestResult:
        """Ingest files, folders and patterns. Documents whose files vanished from a folder are removed.

        `watched`: the paths are changes that a watch saw, so a file may be gone again. Raises `UnreadableDocument`
        before anything is read if no path was named or one does not exist and never did, and what the library raises.
        """
        started = time.perf_counter()
        found = find_files(paths)
        known = self._library.files()
        missing = [path for path in found.missing if not _knows(found, path, known)]
        typed = {absolute(os.fspath(path)): path for path in paths}
        if nowhere := [path for path in missing if str(path) not in found.patterns and not watched]:
            raise UnreadableDocument(
                " ".join(f"There is no file or folder {str(typed[path])[:200]}." for path in nowhere)
            )
        self.embed_missing()
        self._done.problems += found.problems
        self._done.skipped += map(str, found.skipped)
        self._files = len(found.files)
        for path in missing:
            if str(path) in found.patterns:
                self._done.problems.append(ReadProblem(str(typed[path]), f"No file matches {typed[path]}."))
        for path in found.files:
            self._report_progress(path.name)
            self._file(path, known.get(str(path)))
            self._files_done += 1
        for vanished in _vanished(found, known):
            self._done.removed += self._library.remove_file(vanished)
        return self._finished(started)

    def ingest_documents(self, documents: Iterable[Document]) -> IngestResult:
        """Ingest given documents; one of the same source is replaced."""
        started = time.perf_counter()
        self.embed_missing()
        for document in documents:
            self._document(document, None)
        self._put()
        return self._finished(started)

    @property
    def done(self) -> IngestResult:
        return self._done

    def _finished(self, started: float) -> IngestResult:
        self._done.seconds += time.perf_counter() - started
        self._report_progress("")
        return self._done

    def _file(self, path: Path, known: tuple[str, str] | None) -> None:
        sources: set[str] = set()
        try:
            digest = _digest(path)
            if known == (digest, self._how):
                same = self._library.entries("d.file=?", (str(path),))
                self._done.unchanged += len(same)
                self._claim([entry.source for entry in same if entry.app != self._app])
                return
            for item in read_file(path):
                if isinstance(item, ReadProblem):
                    self._done.problems.append(item)
                else:
                    sources.add(item.source)
                    self._document(item, str(path))
        except (UnreadableDocument, ExtraMissing, OSError) as error:
            reason = str(error) if isinstance(error, RekindleError) else why_unreadable(path, error)
            self._done.problems.append(ReadProblem(str(path), reason))
            if not sources:
                # The old content is out of date. The file is tried again next time.
                self._done.removed += self._library.remove_file(str(path))
                return
        self._put()
        self._done.removed += self._library.finish_file(str(path), digest, self._how, sources)

    def _document(self, document: Document, file: str | None) -> None:
        if any(cut.document.source == document.source for cut in self._waiting):
            self._put()
        known = self._library.stored_digest(document.source)
        if known == (document_digest(document), self._how):
            self._done.unchanged += 1
            self._claim([document.source])
            return
        passages = split(document, self._splitting, self._embedder.count_tokens)
        if not passages:
            self._done.problems.append(ReadProblem(document.source, f"{document.source} has no text."))
            old = self._library.entries("d.source=?", (document.source,))
            if old:
                self._library.remove([entry.id for entry in old])
                self._done.removed += len(old)
            return
        self._done.added, self._done.changed = (
            self._done.added + (known is None),
            self._done.changed + (known is not None),
        )
        self._waiting.append(SplitDocument(document, passages, [None] * len(passages), self._how, file, self._app))
        if sum(len(cut.passages) for cut in self._waiting) >= _PASSAGES_AT_ONCE:
            self._put()

    def _claim(self, sources: Sequence[str]) -> None:
        if self._app is not None and sources:
            self._library.set_app(sources, self._app)

    def _put(self) -> None:
        """Embed the waiting documents and put them into the library."""
        if not self._waiting:
            return
        keyed = [
            (cut, [passage_digest(cut.document.title, passage) for passage in cut.passages]) for cut in self._waiting
        ]
        texts = {
            digest: embedded_text(cut.document.title, passage)
            for cut, digests in keyed
            for digest, passage in zip(digests, cut.passages, strict=True)
        }
        vectors = self._library.vectors_of(list(texts), self._embedder.digest)
        long = len(texts) - len(vectors) > _PASSAGES_AT_ONCE
        if not long:
            vectors = self._completed(vectors, texts)
        cuts = [replace(cut, vectors=[vectors.get(digest) for digest in digests]) for cut, digests in keyed]
        self._library.put(cuts, self._embedder.digest)
        self._done.passages += sum(len(cut.passages) for cut in cuts)
        self._waiting = []
        name = cuts[-1].document.title
        if long:  # stored first, so that every embedded batch survives an interruption
            self.embed_missing(f"{name} ({count_of(len(texts), 'passage')})")
        self._report_progress(name)

    def _completed(self, vectors: Mapping[bytes, bytes], texts: Mapping[bytes, str]) -> dict[bytes, bytes]:
        """A vector for every text; missing ones are computed."""
        new = [digest for digest in texts if digest not in vectors]
        made = self._embed([texts[digest] for digest in new]) if new else []
        return {**vectors, **dict(zip(new, made, strict=True))}

    def _embed(self, texts: Sequence[str]) -> list[bytes]:
        embedded = self._embedder.embed_passages(texts)
        self._done.embedded += len(texts)
        self._done.truncated += embedded.truncated
        letters = sum(map(str.isalpha, "".join(texts)))
        if 2 * letters > sum(map(len, texts)):  # tables of numbers say nothing about a language
            self._done.letters += letters
            self._done.letter_tokens += embedded.tokens
        return to_stored(embedded.vectors)

    def embed_missing(self, name: str = "embedding again") -> None:
        """Embed passages without a vector of this embedder: after a change of embedder, or an interruption."""
        whose = self._embedder.digest
        while missing := self._library.without_vector(whose, _PASSAGES_AT_ONCE):
            digests = {chunk.id: passage_digest(chunk.title, chunk.passage) for chunk in missing}
            texts = {digests[chunk.id]: embedded_text(chunk.title, chunk.passage) for chunk in missing}
            vectors = self._completed(self._library.vectors_of(list(texts), whose), texts)
            self._library.set_vectors({id: vectors[digest] for id, digest in digests.items()}, whose)
            self._report_progress(name)

    def _report_progress(self, name: str) -> None:
        if self._report is not None:
            done = self._done
            documents = done.added + done.changed + done.unchanged
            self._report(IngestProgress(self._files_done, self._files, documents, done.embedded, name))


def parse_documents(items: Iterable[str | Mapping[str, Any] | Document]) -> Iterator[Document]:
    """Documents from texts, or mappings with `text` and optionally `title`, `source` (or `id`).

    Raises `InvalidPrompt` for anything else.
    """
    for number, item in enumerate(items):
        if isinstance(item, Document):
            yield item
            continue
        fields: Mapping[str, Any] = {"text": item} if isinstance(item, str) else item
        if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str) or not fields["text"].strip():
            raise InvalidPrompt(f"Document {number} has no text. Give {{'text': ..., 'title': ..., 'source': ...}}.")
        text = _valid(fields["text"])
        title = _valid(str(fields.get("title") or _first_words(text)))
        source = fields.get("source") or fields.get("id") or f"given:{digest_of_fields(title, text)[:16]}"
        yield Document(_valid(str(source)), title, (Section(text),))


def _valid(text: str) -> str:
    """The text without surrogates, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def _first_words(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= 60 else line[:60].rsplit(" ", 1)[0] + CUT_SHORT


def _vanished(found: FoundFiles, known: Iterable[str]) -> list[str]:
    """Files that were read before, would be found by the same paths, and no longer exist."""
    there = {str(path) for path in found.files}
    return [path for path in known if path not in there and found.covers(Path(path)) and not is_there(Path(path))]


def _knows(found: FoundFiles, missing: Path, known: Iterable[str]) -> bool:
    """Whether files read before were found by a path that does not exist now."""
    own = FoundFiles(
        named=[missing], missing=[missing], patterns=[str(missing)] if str(missing) in found.patterns else []
    )
    return any(own.covers(Path(path)) for path in known)


def _digest(path: Path) -> str:
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            state.update(part)
    return state.hexdigest()
