"""A stored answer without the model: what a command with answers=direct tries before it loads one.

    in_same_words    the library's row of that question: no retrieval, no embedder
    in_other_words   as a session does it: embedder, retrieval and the guard

Both return None where the model must be asked. An answer of a model that was not seen on this machine before, or under
an adapter, is found only once the model is loaded.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from rekindle.answers.ask_terms import AskTerms, asking
from rekindle.answers.bank_rows import (
    BankEntry,
    answered_wordings,
    given_reply,
    given_sources,
    given_stored,
    note_given,
    same_wording,
)
from rekindle.answers.citations import quote_under
from rekindle.core.reply import Answer
from rekindle.core.request import Request
from rekindle.core.scope import scope_of
from rekindle.errors import RekindleError
from rekindle.knowledge.library import Library
from rekindle.knowledge.library_file import current_file, library_path
from rekindle.knowledge.library_folder import knowledge_folder
from rekindle.session.model_memo import AnsweringModel, ModelMemo
from rekindle.settings import Settings

_MAX_COMPARED = 1000  # questions, the latest ones


@dataclass(frozen=True)
class ModelFreeAsk:
    """A question that may have a stored answer."""

    question: str
    request: Request
    terms: AskTerms
    model: AnsweringModel
    settings: Settings
    started: float

    @classmethod
    def of(cls, question: str, model: str, settings: Settings, options: dict[str, Any]) -> ModelFreeAsk | None:
        """None if no stored answer may be given, or none can be found without the model."""
        started = time.perf_counter()
        if settings.answers != "direct" or settings.adapter is not None:
            return None
        chosen = {**options}
        top_k, retrieval = chosen.pop("top_k"), chosen.pop("retrieval")
        request = Request.of(asking(question), **chosen)
        terms = AskTerms.of(request, question, top_k, retrieval)
        scope = scope_of(settings, None, None)
        first = library_path(knowledge_folder(settings), scope.tenant, scope.salt)
        known = ModelMemo(model, settings).recall() if current_file(first).exists() else None
        if known is None or terms is None or request.max_tokens == 0:
            return None
        return cls(question, request, terms, known, settings, started)

    @property
    def digest(self) -> str:
        return self.terms.digest(self.model.identity, "", self.settings.reuse)

    def open_library(self) -> Library:
        scope = scope_of(self.settings, None, None)
        return Library(knowledge_folder(self.settings), scope.tenant, scope.salt)


def in_same_words(asked: ModelFreeAsk) -> Answer | None:
    """The stored answer to a question in the same words, if no document changed since."""
    with closing(asked.open_library()) as library:
        if library.losses():  # a session says so
            return None
        entry = same_wording(library, asked.question, asked.digest, asked.model.embedder)
        if entry is None or entry.answer is None or len(entry.answer.tokens) > asked.request.max_tokens:
            return None
        answer = _answer(asked, library, entry)
        with suppress(RekindleError):  # a count that is lost changes nothing
            note_given(library, entry)
        return answer


def _answer(asked: ModelFreeAsk, library: Library, entry: BankEntry) -> Answer:
    sources = given_sources(library, entry, 1.0)
    assert entry.answer is not None
    reply = given_reply(entry.answer, len(sources), asked.settings.reuse)
    return Answer.of(
        reply,
        before_seconds=time.perf_counter() - asked.started,
        question=asked.question,
        sources=sources,
        retrieval=asked.terms.retrieval,
        stored=given_stored(entry, 1.0),
        quote=quote_under(reply.text, asked.question, sources),
    )


def in_other_words(asked: ModelFreeAsk) -> Answer | None:
    """The stored answer to a question that the guard takes for the same.

    The embedder is loaded only if the words of a stored question allow it: others need the model anyway.
    """
    from rekindle.answers.guard import disagreement

    with closing(asked.open_library()) as library:
        wordings = answered_wordings(library, asked.digest, _MAX_COMPARED)
    if all(disagreement(asked.question, wording) is not None for wording in wordings):
        return None
    from rekindle.session.answers import Answers  # takes a third of a second
    from rekindle.session.ask import find_stored
    from rekindle.session.library import Knowledge, purging

    with closing(Knowledge(asked.settings, purging(asked.settings))) as knowledge:
        answers = Answers(
            asked.settings, knowledge, lambda _: None, lambda: asked.model, None, lambda: asked.model.passages
        )
        with closing(answers):
            terms = asked.terms
            prepared = find_stored(knowledge, answers, asked.question, asked.request, terms.top_k, terms.retrieval)
            reply = prepared.stored_reply
            if reply is None or prepared.consulted is None:
                return None
            seconds = time.perf_counter() - asked.started
            answers.keep(prepared.consulted, reply, seconds)
            return prepared.answer(reply, seconds)
