"""Prepare questions before anybody asks them: prefill or answer them, and keep them in the bank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from rekindle.answers.ask_terms import AskTerms
from rekindle.answers.bank import AnswerBank, BankQuestion
from rekindle.answers.bank_rows import AnswerText, BankEntry
from rekindle.answers.citations import only_cites
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.reply import QuestionOrigin
from rekindle.core.request import AnswersWay, Request, Sampling
from rekindle.errors import KnowledgeUnusable, ModelError, NothingKnown, RequestError
from rekindle.idle.generated_questions import (
    SAME_QUESTION,
    PredictedQuestion,
    is_answerable,
    judging_message,
    yes_no_grammar,
)
from rekindle.idle.log import Action, IdleAction
from rekindle.idle.sources import QuestionSources
from rekindle.idle.worker import IdleWorker, WorkResult
from rekindle.session.answers import Consulted
from rekindle.session.ask import Prepared
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

Strategy = Literal["prefill", "answer"]
Rule = Literal["rekindle", "percache"]
_READ_PASSAGES = 2
_JUDGE_TOKENS = 4  # for yes or no


def choose_strategy(answers: AnswersWay, threshold: float, cutoff: float, rule: Rule = "rekindle") -> Strategy | None:
    """What a predicted question gets. None: nothing, because no question may be kept.

    answers     how stored answers are used
    threshold   the similarity from which a stored answer is given directly
    cutoff      from this threshold on, hardly any question is similar enough

    percache   as published: from the cutoff on a question is only prefilled, below it also answered
    rekindle   the same where answers are given directly; where the model verifies them, a draft helps at any
               similarity, so every question is answered
    """
    if answers == "off":
        return None
    if rule == "rekindle" and answers == "verified":
        return "answer"
    return "prefill" if threshold >= cutoff else "answer"


def passages_to_read(asked: bool, rule: Rule = "rekindle") -> int | None:
    """Number of passages to prefill of a question that is not answered; None: all of them.

    Real questions share the first passage with predicted ones, sometimes two. Those that share more were nearly all
    asked before, so prefilling more for a question that nobody asked is wasted. As published (percache), all are.
    """
    return None if asked or rule == "percache" else _READ_PASSAGES


def first_passages(used: Sequence[int], predicted: Sequence[int], all_of_them: Iterable[int]) -> list[int]:
    """Passages by their value as the first of a prompt, each once.

    used       those of earlier prompts, the most frequent first
    predicted  the first passages of predicted questions
    """
    counts: dict[int, int] = {}
    for id in predicted:
        counts[id] = counts.get(id, 0) + 1
    frequent = sorted(counts, key=lambda id: (-counts[id], id))
    present = set(rest := list(all_of_them))
    return [id for id in dict.fromkeys((*used, *frequent, *rest)) if id in present]


_NEAR_ENTRIES = 4
_FLUSH_SECONDS = 60.0
_MAX_TERMS, _MIN_SHARE = 3, 0.25  # the ways of asking that are prepared for: each this share of the users' questions


class Preparer:
    """Prepares the questions of one tenant. Used by one thread.

    Each question is asked as users ask: under its own terms if it is in the bank, else under the commonest terms of
    users' questions; `expected` until there are some.
    """

    def __init__(
        self,
        session: Session,
        worker: IdleWorker,
        expected: AskTerms,
        tenant: str | None = None,
        salt: str | None = None,
        rule: Rule = "rekindle",
    ) -> None:
        self._session = session
        self._worker = worker
        self._expected = expected
        self._rule = rule
        self._tenant, self._salt = tenant, salt
        self._foreign: set[int] = set()  # questions under terms of another model or unknown ones: not ours to answer
        self._tried: tuple[int, set[tuple[str, str]]] = (0, set())  # a generation of the library; questions and terms
        self._opened: tuple[AnswerBank, QuestionSources] | None = None

    @property
    def bank(self) -> AnswerBank:
        return self._open()[0]

    @property
    def sources(self) -> QuestionSources:
        return self._open()[1]

    def _open(self) -> tuple[AnswerBank, QuestionSources]:
        bank = self._session.answers.bank(self._tenant, self._salt)
        if self._opened is None or self._opened[0] is not bank:
            self._opened = (bank, QuestionSources(bank))
        return self._opened

    def answer_all(self, action: Action, entries: Iterable[BankEntry]) -> list[IdleAction]:
        """Answer questions of the bank, each under its own terms."""
        done: list[IdleAction] = []
        for entry in entries:
            if not self._worker.may_continue():
                break
            prepared = self._again(entry)
            if prepared is None or not self.bank.entries([entry.id]):
                continue
            # "user" would count as asked now
            origin: QuestionOrigin = "history" if entry.origin == "user" else entry.origin
            done.append(self._answer(action, prepared, origin, ()))
        return done

    def restore_all(self, entries: Iterable[BankEntry]) -> list[IdleAction]:
        """Prefill prompts whose KV was evicted again, as long as there is room."""
        done: list[IdleAction] = []
        for entry in entries:
            if not self._worker.may_continue():
                break
            prepared = self._again(entry)
            if prepared is None:
                continue
            request = self._prefill_request(prepared, asked=entry.asked is not None)
            missing = self.missing(request)
            if missing and not self.has_room(missing):
                break
            if missing:
                done.append(self.record("restore", entry.question, self._worker.compute(request), entry.id))
        return done

    def terms(self) -> list[AskTerms]:
        """The commonest terms that users ask under and that this model can answer, the commonest first."""
        own = [(terms, uses) for digest, terms, uses in self.bank.terms() if self._digest(terms) == digest]
        total = sum(uses for _, uses in own)
        return [terms for terms, uses in own[:_MAX_TERMS] if uses >= _MIN_SHARE * total] or [self._expected]

    def _digest(self, terms: AskTerms) -> str | None:
        """The digest of terms under the model that runs now; None if it cannot answer under them."""
        try:
            return self._session.answers.digest(terms.request(""), terms)
        except (ModelError, RequestError):  # an adapter that is not there
            return None

    def prepare(self, question: PredictedQuestion, strategy: Strategy) -> list[IdleAction]:
        """Prefill or answer a question for each of the terms under which it is new and can be answered."""
        done: list[IdleAction] = []
        for terms in self.terms():
            if done and not self._worker.may_continue():
                break
            prepared = self._useful(question.text, terms)
            if prepared is None or not self._judge(prepared, terms, strategy, done):
                continue
            if strategy == "answer":
                done.append(self._answer("answer", prepared, question.origin, question.documents))
            else:
                done.append(self._prefill(prepared, question))
            if not done[-1].finished:  # its turn comes again
                self._tried[1].discard((question.text, terms.fingerprint))
        return done

    def _useful(self, question: str, terms: AskTerms) -> Prepared | None:
        """The question ready to be asked; None if it is known, or the passages found for it hardly answer it."""
        prepared = None if self._was_tried(question, terms) else self._prepare(question, terms)
        if prepared is None or not self._is_new(prepared) or not self._is_answerable(prepared):
            return None
        return prepared

    def _judge(self, prepared: Prepared, terms: AskTerms, strategy: Strategy, done: list[IdleAction]) -> bool:
        """Whether the model says that the passages answer a question. It reads those that are prepared, and no more."""
        request = replace(
            prepared.request if strategy == "answer" else self._prefill_request(prepared, asked=False),
            prompt=terms.messages(judging_message(prepared.question)),
            max_tokens=_JUDGE_TOKENS,
            min_tokens=0,
            sampling=Sampling(),
            stop=(),
            grammar=yes_no_grammar(),
            answers="off",
            drafts=(),
        )
        result = self._worker.compute(request)
        done.append(self.record("judge", prepared.question, result))
        if result.reply is None:  # its turn comes again
            self._tried[1].discard((prepared.question, terms.fingerprint))
        return result.reply is not None and result.reply.text == "yes"

    def _was_tried(self, text: str, terms: AskTerms) -> bool:
        """Whether a question was tried before with the same documents and terms; it counts as tried from now on."""
        generation, asked = self.bank.library.generation, (text, terms.fingerprint)
        if self._tried[0] != generation:
            self._tried = (generation, set())
        known = asked in self._tried[1]
        self._tried[1].add(asked)
        return known

    def missing(self, request: Request) -> int:
        """Number of prompt tokens without KV anywhere; 0 if less than a block."""
        prompt = encode_prompt(self._session.engine, request)
        with self._session.cache.peek(request, prompt.tokens, prompt.prompt_layout) as prefill:
            found = prefill.lookup.matches.length
        end = prompt.quoted[-1].span.stop if prompt.quoted else len(prompt.tokens)  # what follows the quotes is short
        unknown = end - found
        return unknown if unknown >= BLOCK_TOKENS else 0  # a partly different block is only found up to its start

    def has_room(self, tokens: int) -> bool:
        """Whether KV of `tokens` tokens fits without evicting anything."""
        store = self._session.cache.store
        if store is None:
            return False
        self._session.cache.flush(_FLUSH_SECONDS)
        with store.disk.database.reading() as connection:
            return store.disk.room.allows(connection, tokens * self._session.engine.layout.token_bytes)

    def record(self, action: Action, what: str, result: WorkResult, answer: int | None = None) -> IdleAction:
        return self._worker.record(self.bank.library, action, what, result, answer)

    def _again(self, entry: BankEntry) -> Prepared | None:
        """A question of the bank, ready to be asked again; None if it cannot be asked as it was."""
        if entry.id in self._foreign:
            return None
        known = [terms for _, terms, _ in self.bank.terms(entry.terms)]
        expected = replace(self._expected, top_k=entry.top_k, retrieval=entry.retrieval)
        prepared = self._prepare(entry.question, known[0] if known else expected)
        if prepared is None or _consulted(prepared).question.terms != entry.terms:
            self._foreign.add(entry.id)
            return None
        return prepared

    def _prepare(self, question: str, terms: AskTerms) -> Prepared | None:
        """Retrieve for a question that no user asks now, without serving it from the bank.

        None if it cannot be asked: no document is left, it is too long now, or its adapter is gone.
        """
        whose = {"tenant": self._tenant, "cache_salt": self._salt}
        try:
            request = terms.request(question, answers="verified", **whose)
            return self._session.prepare_request(question, request, terms.top_k, terms.retrieval)
        except (RequestError, NothingKnown, ModelError):
            return None

    def _is_new(self, prepared: Prepared) -> bool:
        own = _consulted(prepared).question
        near = self.bank.nearest(own.vector, _NEAR_ENTRIES)
        return not any(one.similarity >= SAME_QUESTION and one.entry.terms == own.terms for one in near)

    def _is_answerable(self, prepared: Prepared) -> bool:
        hits, vector = prepared.retrieved.hits, _consulted(prepared).question.vector
        cosines = self.sources.cosines([hit.chunk.id for hit in hits], vector)
        texts = [f"{hit.chunk.title}\n{hit.chunk.passage.shown}" for hit in hits]
        return is_answerable(prepared.question, list(zip(texts, cosines, strict=True)))

    def _prefill(self, prepared: Prepared, question: PredictedQuestion) -> IdleAction:
        result = self._worker.compute(self._prefill_request(prepared, asked=False))
        id = None
        if result.reply is not None:
            id = self.bank.keep(_with(prepared, question.documents), None, question.origin)
        return self.record("prefill", question.text, result, id)

    def _prefill_request(self, prepared: Prepared, asked: bool) -> Request:
        """The request that only prefills a prompt, as far as that pays: with passages that fit when it is answered."""
        shown = {source.text for source in prepared.sources}
        quotes = tuple(quote for quote in prepared.request.quotes if quote.text in shown)[
            : passages_to_read(asked, self._rule)
        ]
        return replace(prepared.request, max_tokens=0, min_tokens=0, quotes=quotes, drafts=())

    def _answer(
        self, action: Action, prepared: Prepared, origin: QuestionOrigin, documents: tuple[int, ...]
    ) -> IdleAction:
        result = self._worker.compute(prepared.request)
        reply, id = result.reply, None
        if reply is not None:
            tokenizer = _consulted(prepared).tokenizer
            text = AnswerText(reply.text, reply.tokens, tokenizer, reply.finish_reason, result.seconds)
            id = self.bank.keep(_with(prepared, documents), text, origin)
            if id is not None and only_cites(reply.text):
                self._foreign.add(id)  # it was kept without an answer, and would get the same one again
        return self.record(action, prepared.question, result, id)


def _consulted(prepared: Prepared) -> Consulted:
    if prepared.consulted is None:
        raise KnowledgeUnusable("The stored questions cannot be used; the log says why.")
    return prepared.consulted


def _with(prepared: Prepared, documents: tuple[int, ...]) -> BankQuestion:
    """The question as it is kept: also tied to the documents that it was made from."""
    own = _consulted(prepared).question
    return replace(own, documents=tuple(dict.fromkeys((*own.documents, *documents))))
