"""Questions that are prepared before anybody asks them: read by the model, or answered, and kept in the bank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rekindle.answers.bank import Bank, Entry, Question, Text
from rekindle.core.answer import Origin
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.request import DEFAULT_MAX_TOKENS, Request
from rekindle.errors import KnowledgeUnusable, NothingKnown, RequestError
from rekindle.knowledge.retrieve import Retrieval
from rekindle.predict.populate import Rule, Strategy, depth
from rekindle.predict.queries import NEAR, Predicted, answerable
from rekindle.run.answers import Consulted
from rekindle.run.ask import Prepared
from rekindle.run.foresee import Foresight
from rekindle.run.prompt import encode_prompt
from rekindle.run.session import Session
from rekindle.run.work import Action, Did
from rekindle.run.worker import Took, Worker

_NEAR_ENTRIES = 4
_FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class Asking:
    """How users ask: an answer is found again only if it was asked for in the same way."""

    top_k: int = 5
    retrieval: Retrieval = "fused"
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0


class Ahead:
    """The questions of one tenant. Used by one thread."""

    def __init__(
        self,
        session: Session,
        worker: Worker,
        how: Asking,
        tenant: str | None = None,
        salt: str | None = None,
        rule: Rule = "rekindle",
    ) -> None:
        self._session = session
        self._worker = worker
        self._how = how
        self._rule = rule
        self._tenant, self._salt = tenant, salt
        self._strange: set[int] = set()  # questions that were asked in other ways: not ours to answer
        self._tried: tuple[int, set[str]] = (0, set())  # the questions looked at, of which generation of documents
        self._opened: tuple[Bank, Foresight] | None = None

    @property
    def bank(self) -> Bank:
        """Where questions and answers are."""
        return self._open()[0]

    @property
    def foresight(self) -> Foresight:
        """Where questions are foreseen from."""
        return self._open()[1]

    def _open(self) -> tuple[Bank, Foresight]:
        bank = self._session.answers.bank(self._tenant, self._salt)
        if self._opened is None or self._opened[0] is not bank:
            self._opened = (bank, Foresight(bank.library, bank))
        return self._opened

    def answer_all(self, action: Action, entries: Iterable[Entry]) -> list[Did]:
        """Answer questions of the bank, each with as many passages and found as it was."""
        done: list[Did] = []
        for entry in entries:
            if not self._worker.goes_on():
                break
            prepared = self._again(entry)
            if prepared is None or not self.bank.entries([entry.id]):
                continue
            origin: Origin = "history" if entry.origin == "user" else entry.origin  # else it would count as asked now
            done.append(self._answer(action, prepared, origin, ()))
        return done

    def restore_all(self, entries: Iterable[Entry]) -> list[Did]:
        """Compute again the prompts whose KV is gone, as long as there is room."""
        done: list[Did] = []
        for entry in entries:
            if not self._worker.goes_on():
                break
            prepared = self._again(entry)
            if prepared is None:
                continue
            request = self._reading(prepared, asked=entry.asked is not None)
            missing = self.missing(request)
            if missing and not self.has_room(missing):
                break
            if missing:
                done.append(self.note("restore", entry.question, self._worker.compute(request), entry.id))
        return done

    def prepare_first(self, questions: Iterable[Predicted], strategy: Strategy) -> list[Did]:
        """Read, or answer, the first of some questions that is new and can be answered."""
        for question in questions:
            if self._was_tried(question.text):
                continue
            prepared = self._prepare(question.text, self._how.top_k, self._how.retrieval)
            if prepared is not None and self._is_new(prepared) and self._is_answerable(prepared):
                if strategy == "answer":
                    return [self._answer("answer", prepared, question.origin, question.documents)]
                return [self._read(prepared, question)]
        return []

    def _was_tried(self, text: str) -> bool:
        """Whether a question was looked at before, from the same documents; it counts as looked at from now on."""
        generation = self.bank.library.generation
        if self._tried[0] != generation:
            self._tried = (generation, set())
        known = text in self._tried[1]
        self._tried[1].add(text)
        return known

    def missing(self, request: Request) -> int:
        """How many tokens of a prompt have no KV anywhere; 0 if that is next to nothing."""
        prompt, cache = encode_prompt(self._session.engine, request), self._session.cache
        known = cache.look(request, prompt.tokens, prompt.outline)
        cache.forget(known)
        end = prompt.quoted[-1].span.stop if prompt.quoted else len(prompt.tokens)  # what follows is short
        unknown = end - known.matches.length
        return unknown if unknown >= BLOCK_TOKENS else 0  # a block that goes on otherwise is found up to its start

    def has_room(self, tokens: int) -> bool:
        """Whether KV of so many tokens fits without anything having to go."""
        store = self._session.cache.store
        if store is None:
            return False
        self._session.cache.flush(_FLUSH_SECONDS)
        with store.disk.database.reading() as connection:
            return store.disk.room.allows(connection, tokens * self._session.engine.layout.token_bytes)

    def note(self, action: Action, what: str, took: Took, answer: int | None = None) -> Did:
        """Write down what was done."""
        return self._worker.note(self.bank.library, action, what, took, answer)

    def _again(self, entry: Entry) -> Prepared | None:
        """A question of the bank, ready to be asked again; None if it was asked in another way than ours."""
        if entry.id in self._strange:
            return None
        prepared = self._prepare(entry.question, entry.top_k, entry.retrieval)
        if prepared is None or _consulted(prepared).question.terms != entry.terms:
            self._strange.add(entry.id)
            return None
        return prepared

    def _prepare(self, question: str, top_k: int, retrieval: Retrieval) -> Prepared | None:
        """Find the passages of a question that no user asks now. Nothing is given from the bank for it.

        None if it cannot be asked: no document is left, or it is too long by now.
        """
        try:
            return self._session.prepare(
                question,
                top_k=top_k,
                retrieval=retrieval,
                max_tokens=self._how.max_tokens,
                min_tokens=self._how.min_tokens,
                answers="verified",
                tenant=self._tenant,
                cache_salt=self._salt,
            )
        except (RequestError, NothingKnown):
            return None

    def _is_new(self, prepared: Prepared) -> bool:
        own = _consulted(prepared).question
        near = self.bank.nearest(own.vector, _NEAR_ENTRIES)
        return not any(one.similarity >= NEAR and one.entry.terms == own.terms for one in near)

    def _is_answerable(self, prepared: Prepared) -> bool:
        hits, vector = prepared.retrieved.hits, _consulted(prepared).question.vector
        cosines = self.foresight.cosines([hit.chunk.id for hit in hits], vector)
        texts = [f"{hit.chunk.title}\n{hit.chunk.passage.shown}" for hit in hits]
        return answerable(prepared.question, list(zip(texts, cosines, strict=True)))

    def _read(self, prepared: Prepared, question: Predicted) -> Did:
        took = self._worker.compute(self._reading(prepared, asked=False))
        id = None
        if took.reply is not None:
            id = self.bank.keep(_with(prepared, question.documents), None, question.origin)
        return self.note("prefill", question.text, took, id)

    def _reading(self, prepared: Prepared, asked: bool) -> Request:
        """The request that only reads a prompt, as far as that pays: passages that stand in it when it is answered."""
        shown = {source.text for source in prepared.sources}
        quotes = tuple(quote for quote in prepared.request.quotes if quote.text in shown)[: depth(asked, self._rule)]
        return replace(prepared.request, max_tokens=0, min_tokens=0, quotes=quotes, drafts=())

    def _answer(self, action: Action, prepared: Prepared, origin: Origin, documents: tuple[int, ...]) -> Did:
        took = self._worker.compute(prepared.request)
        reply, id = took.reply, None
        if reply is not None:
            tokenizer = _consulted(prepared).tokenizer
            text = Text(reply.text, reply.tokens, tokenizer, reply.finish_reason, took.seconds)
            id = self.bank.keep(_with(prepared, documents), text, origin)
        return self.note(action, prepared.question, took, id)


def _consulted(prepared: Prepared) -> Consulted:
    if prepared.consulted is None:
        raise KnowledgeUnusable("The stored questions cannot be used; the log says why.")
    return prepared.consulted


def _with(prepared: Prepared, documents: tuple[int, ...]) -> Question:
    """The question as it is kept: it also goes with the documents that it was made from."""
    own = _consulted(prepared).question
    return replace(own, documents=tuple(dict.fromkeys((*own.documents, *documents))))
