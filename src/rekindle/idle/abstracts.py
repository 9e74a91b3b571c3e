"""Abstracts of a library: of parts of documents, of documents, and of all of them.

    parts       consecutive passages, as many as a prompt holds: together all passages of a document
    document    the abstracts of its parts, merged until one is left
    library     the abstracts of documents, merged in the same way: of at most 256, spread over all

What was written is stored, so that work that was stopped goes on there, and a new document changes few of them. A
changed or removed document takes its abstracts with it, and all that were merged from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.core.grammar import Grammar
from rekindle.core.request import Message
from rekindle.idle.generated_questions import merging_prompt, summary_grammar, summary_prompt
from rekindle.idle.log import Action, IdleAction
from rekindle.idle.prepare import Preparer
from rekindle.idle.worker import WorkResult
from rekindle.knowledge.library import Chunk
from rekindle.session.session import Session

ABSTRACT_TOKENS = 96
_READ_TOKENS = 1500  # of a prompt
_SPARE_TOKENS = 128  # for what stands around the texts
_MAX_MERGED = 16  # abstracts at once: of more, a model remembers the first and the last
_MAX_DOCUMENTS = 256

Write = Callable[[tuple[Message, ...], int, Grammar | None], WorkResult]


@dataclass
class _Merging:
    """Abstracts that become one: the documents they are of, what was done so far, and which merges are in use."""

    what: str
    documents: tuple[int, ...]
    done: list[IdleAction] = field(default_factory=list)
    used: list[tuple[str, ...]] = field(default_factory=list)


class AbstractWriter:
    """Writes the abstracts of one tenant's library. Used by one thread."""

    def __init__(self, session: Session, preparer: Preparer, may_continue: Callable[[], bool], write: Write) -> None:
        self._session = session
        self._preparer = preparer
        self._may_continue = may_continue
        self._write = write

    def documents(self, settle_seconds: float, max_count: int | None = None) -> list[IdleAction]:
        """Summarize documents that have no abstract yet, once no more are being added."""
        done: list[IdleAction] = []
        for document in self._preparer.sources.without_abstract(settle_seconds)[:max_count]:
            chunks = self._preparer.bank.library.chunks_of(document)
            if chunks and self._may_continue():
                done += self._document(document, chunks)
        return done

    def library(self) -> list[IdleAction]:
        """Merge the abstracts of documents into one of the library; nothing is written if none of them changed."""
        sources = self._preparer.sources
        abstracts = sources.document_abstracts()
        step = -(-len(abstracts) // _MAX_DOCUMENTS) or 1
        chosen = dict(list(abstracts.items())[::step])
        if len(chosen) < 2:
            return []
        merging = _Merging("the library", tuple(chosen))
        text = self._merge([*chosen.values()], merging)
        if text is not None:
            sources.put_library_abstract(text, merging.documents, merging.used)
        return merging.done

    def _document(self, document: int, chunks: Sequence[Chunk]) -> list[IdleAction]:
        sources, title = self._preparer.sources, chunks[0].title
        groups = self._groups([chunk.passage.shown for chunk in chunks])
        known = sources.parts_of(document)
        merging = _Merging(title, (document,))
        texts = []
        for place, group in enumerate(groups):
            text = known.get(place)
            if text is None:
                what = title if len(groups) == 1 else f"{title}, part {place + 1} of {len(groups)}"
                text = self._summary("abstract", what, summary_prompt(group), merging)
                if text is None:
                    return merging.done
                sources.put_part(document, place, text)
            texts.append(text)
        merged = self._merge(texts, merging)
        if merged is not None:
            sources.put_abstract(document, merged)
        return merging.done

    def _merge(self, texts: Sequence[str], merging: _Merging) -> str | None:
        """One abstract of several; None if it was stopped."""
        level = list(texts)
        while len(level) > 1:
            merged = []
            for group in self._groups(level, fewest=2, most=_MAX_MERGED):
                text: str | None = group[0] if len(group) == 1 else self._merged(group, merging)
                if text is None:
                    return None
                merged.append(text)
            level = merged
        return level[0]

    def _merged(self, texts: tuple[str, ...], merging: _Merging) -> str | None:
        merging.used.append(texts)
        text = self._preparer.sources.merged(texts)
        if text is None:
            text = self._summary("merge", merging.what, merging_prompt(texts), merging)
            if text is not None:
                self._preparer.sources.put_merged(texts, text, merging.documents)
        return text

    def _summary(self, action: Action, what: str, prompt: tuple[Message, ...], merging: _Merging) -> str | None:
        if not self._may_continue():
            return None
        result = self._write(prompt, ABSTRACT_TOKENS, summary_grammar())
        merging.done.append(self._preparer.record(action, what, result))
        text = "" if result.reply is None else " ".join(result.reply.text.split())
        return text or None

    def _groups(self, texts: Sequence[str], fewest: int = 1, most: int | None = None) -> list[tuple[str, ...]]:
        """Consecutive texts that fit into one prompt together; never fewer than `fewest`, but at the end."""
        engine = self._session.engine
        room = max(1, min(_READ_TOKENS, engine.context_tokens - ABSTRACT_TOKENS - _SPARE_TOKENS))
        groups: list[list[str]] = []
        filled = 0
        for text in texts:
            size = len(engine.tokenizer.encode(text))
            full = bool(groups) and (filled + size > room or len(groups[-1]) == most) and len(groups[-1]) >= fewest
            if not groups or full:
                groups.append([])
                filled = 0
            groups[-1].append(text)
            filled += size
        return [tuple(group) for group in groups]
