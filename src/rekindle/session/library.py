"""The documents of a session: ingest them, find passages in them, forget them.

Works without a model, too: what is not a question needs only the library, the embedder and the cache's folder.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rekindle.cache.open_store import open_store
from rekindle.core.document import Document, Quote, title_above
from rekindle.core.scope import scope_of
from rekindle.core.size import parse_limit
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import InvalidSetting, NothingKnown, RekindleError
from rekindle.knowledge.backup import Backup, export, import_
from rekindle.knowledge.ingest import Ingester, IngestProgress, IngestResult, parse_documents
from rekindle.knowledge.library import Chunk, DocumentEntry, Library
from rekindle.knowledge.library_file import (
    LibraryCheck,
    check_library,
    current_file,
    damaged_files,
    library_owners,
    library_path,
)
from rekindle.knowledge.library_folder import LibraryLimit, knowledge_folder
from rekindle.knowledge.retrieve import Retrieval, RetrievalResult, Retriever, check_question, check_retrieval
from rekindle.knowledge.salvage import Loss
from rekindle.knowledge.split import Splitting
from rekindle.machine import cache_folder
from rekindle.models.pull import pull
from rekindle.settings import Settings
from rekindle.store.folder import may_hold_cache
from rekindle.store.purge import TokenRun

log = logging.getLogger("rekindle.knowledge")

ADVICE = "`rekindle knowledge check --acknowledge` ends this message."
_PASSAGE = frozenset({"text", "source", "title", "document", "chunk"})
_MAX_OPEN = 32  # libraries: anybody may name salts, and each one open takes files and memory

FOREIGN = (
    "The embedder %s does not know the language of these documents: passages are found by their words, hardly by their "
    "meaning. Use a multilingual one, such as embedder='sentence-transformers/paraphrase-multilingual-mpnet-base-v2'."
)

_KEPT = (
    "Greedy questions about these documents are kept with their answers in %s (at most %s): the model checks them as "
    "drafts of later answers, which changes no text. answers=off ends that (--answers off, REKINDLE_ANSWERS=off), and "
    "`rekindle answers rm --all` removes them."
)


class Purge(Protocol):
    """Removes every trace of some runs of tokens, and of some texts, from where KV is kept."""

    def __call__(
        self, tenant: str, salt: str, runs: Sequence[TokenRun], texts: Sequence[str], *, everything: bool = False
    ) -> None:
        """Do it; `everything`: all KV of that tenant and salt, too.

        Raises `CacheError` if it cannot be finished; it can then be begun again.
        """


@dataclass(frozen=True)
class Forgotten:
    """What was forgotten."""

    documents: tuple[DocumentEntry, ...]
    passages: int
    damaged_files: tuple[Path, ...] = ()  # damaged files of the library: they may still hold the texts


class Knowledge:
    """The libraries of all tenants. Used from several threads. What it opens is opened when it is first needed.

    What was lost to damage is logged with every `ingest`, `search` and `forget` until it is acknowledged.
    """

    def __init__(self, settings: Settings, purge: Purge) -> None:
        self.folder = knowledge_folder(settings)
        self.limit = LibraryLimit(self.folder, _limit_bytes(settings.library_limit, self.folder))
        self._settings = settings
        self._purge = purge
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._libraries: dict[tuple[str, str], tuple[Library, Retriever]] = {}
        self._embedder: Embedder | None = None

    def embedder(self) -> Embedder:
        """What makes vectors of texts, loaded. Raises `ModelError`."""
        with self._loading:
            if self._embedder is None:
                self._embedder = Embedder.load(pull(self._settings.embedder).files)
            return self._embedder

    def library(self, tenant: str | None = None, salt: str | None = None) -> Library:
        """The documents of a tenant; the session's own unless another is named."""
        return self._opened(tenant, salt)[0]

    def generation(self, tenant: str | None = None, cache_salt: str | None = None) -> int:
        """How often the documents of a tenant changed; 0 if there is no library."""
        return self.library(tenant, cache_salt).generation if self.holds(tenant, cache_salt) else 0

    def holds(self, tenant: str | None = None, salt: str | None = None) -> bool:
        """Whether there is such a library. Looking makes none."""
        return current_file(library_path(self.folder, *self._key(tenant, salt))).exists()

    def owners(self) -> list[tuple[str, str]]:
        """Tenant and salt of everybody who has a library here."""
        return library_owners(self.folder)

    def losses(self, tenant: str | None = None, cache_salt: str | None = None) -> list[Loss]:
        """Damage that was not acknowledged yet."""
        return self.library(tenant, cache_salt).losses() if self.holds(tenant, cache_salt) else []

    def warn(self, tenant: str | None = None, cache_salt: str | None = None) -> list[Loss]:
        """Log and return the damage that was not acknowledged yet."""
        losses = self.losses(tenant, cache_salt)
        for loss in losses:
            log.warning("%s", loss.sentence(ADVICE))
        return losses

    def acknowledge(self, tenant: str | None = None, cache_salt: str | None = None) -> None:
        """Acknowledge what was lost, so that it is no longer reported. Damaged files stay."""
        if self.holds(tenant, cache_salt):
            self.library(tenant, cache_salt).acknowledge()

    def check(self, tenant: str | None = None, cache_salt: str | None = None, *, fix: bool = False) -> LibraryCheck:
        """Look through a library's file, all of it; salvage it if it is damaged and `fix` says so.

        Opening a damaged library salvages it anyway, as far as damage is seen then. Raises `KnowledgeUnusable`.
        """
        first = library_path(self.folder, *self._key(tenant, cache_salt))
        if not current_file(first).exists():
            return LibraryCheck(None, tuple(damaged_files(first)))
        with self._lock:
            opened = self._libraries.pop(self._key(tenant, cache_salt), None)
        if opened is not None:
            opened[0].close()
        return check_library(first, fix=fix)

    def remove_damaged(self, tenant: str | None = None, cache_salt: str | None = None) -> tuple[Path, ...]:
        """Remove damaged files of a library: only here, where somebody asks for it. Which ones those were."""
        files = tuple(damaged_files(library_path(self.folder, *self._key(tenant, cache_salt))))
        for file in files:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{file}{suffix}").unlink(missing_ok=True)
        return files

    def export(self, path: str | Path, *, tenant: str | None = None, cache_salt: str | None = None) -> Backup:
        """Write all documents with their passages into a file, as a backup. Raises `InvalidSetting`, `NothingKnown`."""
        if not self.holds(tenant, cache_salt):
            raise NothingKnown("Nothing was ingested yet: there is nothing to export.")
        self.warn(tenant, cache_salt)
        return export(self.library(tenant, cache_salt), Path(path))

    def import_(self, path: str | Path, *, tenant: str | None = None, cache_salt: str | None = None) -> Backup:
        """Verify a backup, all of it, then add the documents that are not here, or not whole.

        Raises `BrokenBackup`, `LibraryFull`: what was added by then stays, and doing it again does the rest.
        """
        self.warn(tenant, cache_salt)
        library = self.library(tenant, cache_salt)
        done = import_(library, Path(path))
        if done.documents:
            Ingester(library, self.embedder()).embed_missing()
        self._clear(library)
        return done

    def ingest(
        self,
        paths: str | Path | Sequence[str | Path] = (),
        *,
        documents: Iterable[str | Mapping[str, Any] | Document] = (),
        splitting: Splitting | None = None,
        app: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        report: Callable[[IngestProgress], None] | None = None,
        watched: bool = False,
    ) -> IngestResult:
        """Put files, or documents that are given, into the library; what is in it already costs next to nothing.

        Files that were in one of the folders and are gone are removed, with their KV. Raises `KnowledgeError`, also for
        a path that does not exist unless a watch saw it (`watched`), `InvalidPrompt` and `InvalidSetting`; a file that
        cannot be read is among the result's problems.
        """
        self.warn(tenant, cache_salt)
        named = [paths] if isinstance(paths, (str, Path)) else list(paths)
        library = self.library(tenant, cache_salt)
        ingester = Ingester(library, self.embedder(), splitting, app=app, report=report)
        given, is_first = list(parse_documents(documents)), library.generation == 0
        if not named and not given:
            raise InvalidSetting("There is nothing to ingest. Name files or folders, or give documents.")
        if named:
            ingester.ingest(named, watched=watched)
        if given:
            ingester.ingest_documents(given)
        ingester.done.begun = int(is_first and ingester.done.added > 0)
        if ingester.done.is_foreign:
            log.warning(FOREIGN, self._settings.embedder)
        self._clear(library)
        return ingester.done

    def what_is_kept(self, where: str) -> str | None:
        """What asking about documents keeps `where` by default: a sentence for people. None if nothing."""
        settings = self._settings
        return None if settings.answers != "auto" or settings.deterministic else _KEPT % (where, settings.answers_limit)

    def search(
        self,
        question: str,
        top_k: int = 5,
        retrieval: Retrieval = "fused",
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> RetrievalResult:
        """The passages that are most likely to answer a question, the best first.

        Raises `NothingKnown`, `InvalidPrompt` and `InvalidSetting`.
        """
        check_question(question)
        check_retrieval(top_k, retrieval)
        if not self.holds(tenant, cache_salt):
            raise NothingKnown("Nothing was ingested yet. Do that first: rekindle ingest FOLDER")
        losses = self.warn(tenant, cache_salt)
        found = self._opened(tenant, cache_salt)[1].retrieve(question, top_k, retrieval)
        return replace(found, losses=tuple(losses)) if losses else found

    def quotes(
        self, documents: Sequence[Any], *, tenant: str | None = None, cache_salt: str | None = None
    ) -> list[Any]:
        """Documents for a request, of which some were passages of this library when another program got them.

        Such a passage comes back as a mapping of its `text` and of what `search` said of it: `source`, `title`,
        `document` (its name) and `chunk`. It is quoted as `Session.ask` does, so that `forget` finds its KV. One that
        was forgotten meanwhile is quoted, but no KV of it is kept; one whose text was changed is a text like others.
        """
        numbers = [one["chunk"] for one in documents if _is_passage(one)]
        known = self.library(tenant, cache_salt).chunks(numbers) if numbers else {}
        return [_quote_again(one, known) if _is_passage(one) else one for one in documents]

    def forget(
        self,
        *names: str,
        app: str | None = None,
        before: float | None = None,
        everything: bool = False,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> Forgotten:
        """Remove documents by name, source or file; those of an app; those ingested before a time (seconds since
        1970); or all of them: texts, vectors, words, and all KV that was computed from them.

        Raises `DocumentNotFound`, and `CacheError` or `KnowledgeError` if something is in the way: then do it again.
        """
        if not names and app is None and before is None and not everything:
            raise InvalidSetting("Say what to forget: documents by name, --app, --before, or --all.")
        self.warn(tenant, cache_salt)
        library = self.library(tenant, cache_salt)
        if everything:
            chosen = library.entries()
        elif names:
            chosen = [entry for name in names for entry in library.find(name)]
        else:
            chosen = library.entries()
        chosen = [
            entry
            for entry in dict.fromkeys(chosen)
            if (app is None or entry.app == app) and (before is None or entry.added < before)
        ]
        passages = library.remove([entry.id for entry in chosen])
        self._clear(library, thoroughly=True)
        damaged = tuple(library.damaged_files())
        if damaged:
            log.warning("%s", damaged_sentence(damaged))
        return Forgotten(tuple(chosen), passages, damaged)

    def _clear(self, library: Library, *, thoroughly: bool = False) -> None:
        """Remove the KV of what was removed. What fails here is tried again the next time."""
        leaving = library.removed_passages()
        if not leaving and not library.unclean and not thoroughly:
            return
        runs = [TokenRun(row.tokenizer, row.tokens) for row in leaving if row.tokenizer is not None and row.tokens]
        texts = [row.text for row in leaving if row.text]
        try:
            # Without the tokens of a damaged passage, its KV cannot be found among the rest.
            self._purge(library.tenant, library.salt, runs, texts, everything=library.unaccounted)
            library.purge_removed(leaving)
        except RekindleError as error:
            if thoroughly:
                raise
            log.warning("KV of removed documents is still there, and will be removed later: %s", error)

    def _opened(self, tenant: str | None, salt: str | None) -> tuple[Library, Retriever]:
        key = self._key(tenant, salt)
        with self._lock:
            made = self._libraries.get(key)
        if made is None:  # not under the lock: a large library is checked for some time, and others have theirs
            library = Library(self.folder, *key, limit=self.limit)
            made = (library, Retriever(library, self.embedder))
        with self._lock:
            opened = self._libraries.pop(key, made)
            self._libraries[key] = opened  # the last one used stands last
            oldest = next(iter(self._libraries))
            spare = self._libraries.pop(oldest) if len(self._libraries) > _MAX_OPEN else None
        if opened is not made:  # another thread was faster
            made[0].close()
        if spare is not None:
            spare[0].close()  # reopened if it is still in use
        return opened

    def _key(self, tenant: str | None, salt: str | None) -> tuple[str, str]:
        scope = scope_of(self._settings, tenant, salt)
        return scope.tenant, scope.salt

    def close(self) -> None:
        """Close the libraries. Idempotent."""
        with self._lock:
            opened, self._libraries = list(self._libraries.values()), {}
        for library, _ in opened:
            library.close()


def purging(settings: Settings) -> Purge:
    """What removes KV from the folder of the settings where no session is open."""

    def purge(
        tenant: str, salt: str, runs: Sequence[TokenRun], texts: Sequence[str], *, everything: bool = False
    ) -> None:
        folder = Path(settings.cache) if settings.cache not in (None, "off") else cache_folder()
        if may_hold_cache(folder) and (runs or texts or everything):
            store = open_store(replace(settings, cache=str(folder), reuse="exact", memory_limit="0"))
            assert store is not None
            try:
                if everything:
                    store.remove_all(tenant, salt)
                store.purge(tenant, salt, runs, texts=texts)
            finally:
                store.close()

    return purge


def damaged_sentence(files: Sequence[Path]) -> str:
    """That damaged files of a library may still hold what was forgotten."""
    return (
        "Damaged files of the library may still hold what was forgotten, and are never removed by themselves: "
        f"{', '.join(map(str, files))}. When you no longer need them: rekindle knowledge check --remove-damaged"
    )


def _limit_bytes(limit: str | None, folder: Path) -> int | None:
    if limit is None:
        return None
    parsed = parse_limit(limit, "library_limit")
    if parsed.size_bytes is not None:
        return parsed.size_bytes
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return parsed.resolve(shutil.disk_usage(place).free + LibraryLimit(folder).used_bytes())


def quote_of(chunk: Chunk) -> Quote:
    """A passage as it stands in a prompt."""
    text = chunk.passage.shown
    return Quote(text, title_above(chunk.title, text), chunk.id)


def _is_passage(document: object) -> bool:
    return isinstance(document, Mapping) and document.keys() >= _PASSAGE and type(document["chunk"]) is int


def _quote_again(given: Mapping[str, Any], known: Mapping[int, Chunk]) -> Quote | dict[str, str]:
    found, text, title = known.get(given["chunk"]), given["text"], title_above(given["title"], given["text"])
    if found is None:
        return Quote(text, title, given["chunk"])
    # Of a changed text the tokens must not stand for those of the passage.
    return quote_of(found) if found.passage.shown == text else {"text": text, "title": title}
