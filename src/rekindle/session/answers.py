"""Earlier answers to the questions of a session: when they are looked up, given, checked, and kept.

consult   a question whose passages were found: the stored answer that may be given, drafts for the model to check
keep      the question with its answer, in the background
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from rekindle.answers.ask_terms import AskTerms
from rekindle.answers.bank import AnswerBank, BankLookup, BankQuestion, Retrieve, SimilarQuestion
from rekindle.answers.bank_rows import AnswerText, given_stored
from rekindle.core.reply import QuestionOrigin, Reply, StoredAnswer
from rekindle.core.request import MAX_DRAFTS, AnswersWay, Request, ReuseLevel
from rekindle.core.size import parse_limit
from rekindle.errors import InvalidSetting, RekindleError
from rekindle.knowledge.retrieve import PASSAGES, Retrieval, RetrievalResult
from rekindle.session.draft import MIN_RUN
from rekindle.session.library import Knowledge
from rekindle.session.model_memo import AnsweringModel, ModelMemo
from rekindle.settings import Settings

log = logging.getLogger("rekindle.answers")

_MAX_BANKS = 32


@dataclass(frozen=True)
class Consulted:
    """A question that the bank was asked about."""

    bank: AnswerBank
    question: BankQuestion
    found: BankLookup
    tokenizer: str
    level: ReuseLevel  # of the request, and so of what is stored for it
    direct: AnswerText | None = None

    def used(self, reply: Reply) -> SimilarQuestion | None:
        """The earlier answer that took part: the one that was given, else the draft that the reply begins like."""
        if self.direct is not None:
            return self.found.direct
        if not reply.usage.drafted_tokens:
            return None
        best = max(self.found.drafts, key=lambda near: _common(near, reply), default=None)
        return best if best is not None and _common(best, reply) >= MIN_RUN else None

    def stored(self, reply: Reply) -> StoredAnswer | None:
        """What to say of it in an answer; None if it had no part in it."""
        near = self.used(reply)
        if near is None or near.entry.answer is None:
            return None
        given = given_stored(near.entry, near.similarity)
        return given if self.direct is not None else replace(given, way="verified", saved_seconds=None)


class Answers:
    """The banks of a session. Used from several threads."""

    def __init__(
        self,
        settings: Settings,
        knowledge: Knowledge,
        adapter_digest: Callable[[str | None], str | None],
        model: Callable[[], AnsweringModel],
        memo: ModelMemo | None = None,
        passages: Callable[[], int] = lambda: PASSAGES,
    ) -> None:
        """`model` is called once, when a question comes; `memo` notes the model for runs that begin without it.
        `passages` is how many the model can use.

        Raises `InvalidSetting`: later, what is wrong with a bank would only mean that there is none.
        """
        threshold = settings.similarity_threshold
        if not 0.0 <= threshold <= 1.0:
            raise InvalidSetting(f"similarity_threshold={threshold} makes no sense. Use a number from 0 to 1.")
        self._limit = parse_limit(settings.answers_limit, "answers_limit")
        self._settings = settings
        self._knowledge = knowledge
        self._adapter_digest = adapter_digest
        self._find_model = model
        self._memo = memo
        self._passages = passages
        self._lock = threading.Lock()
        self._banks: dict[str, AnswerBank] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rekindle-answers")
        self._writing: set[Future[None]] = set()

    def bank(self, tenant: str | None = None, salt: str | None = None) -> AnswerBank:
        """The bank of a tenant; the session's own unless another is named."""
        library = self._knowledge.library(tenant, salt)
        with self._lock:
            bank = self._banks.pop(str(library.path), None)
            if bank is None or bank.library is not library:
                embedder = self._knowledge.embedder()
                disk = shutil.disk_usage(library.path.parent).total
                limit = self._limit.resolve(disk)
                bank = AnswerBank(library, embedder.digest, embedder.dimensions, limit_bytes=limit, soon=self._soon)
            self._banks[str(library.path)] = bank
            while len(self._banks) > _MAX_BANKS:
                del self._banks[next(iter(self._banks))]
        return bank

    def way(self, request: Request) -> AnswersWay:
        """How earlier answers may take part in a question about documents.

        Unless somebody chose, drafts are checked where they change nothing: not where tokens are drawn at random.
        """
        chosen = request.answers or self._settings.answers
        if chosen != "auto":
            return chosen
        return "verified" if request.sampling.greedy and not self._settings.deterministic else "off"

    def chat_way(self, request: Request) -> AnswersWay:
        """The same for a prompt that asks nothing about the library: off unless somebody chose."""
        chosen = request.answers or self._settings.answers
        return "off" if chosen == "auto" else chosen

    def heeds(self, request: Request) -> bool:
        """Whether earlier answers may take part in a request: they are texts, and say nothing else."""
        plain = request.grammar is None and not request.tools and request.logprobs is None and request.think is None
        return self.way(request) != "off" and plain and request.max_tokens > 0

    def find(
        self, question: str, top_k: int | None, retrieval: Retrieval, tenant: str | None, salt: str | None
    ) -> RetrievalResult:
        """The passages for a question, the best first: `top_k`, or the relevant ones, as many as the model can use."""
        count = PASSAGES if top_k is None else top_k
        found = self._knowledge.search(question, count, retrieval, tenant=tenant, cache_salt=salt)
        if top_k is not None:
            return found
        relevant = found.relevant()
        return replace(relevant, hits=relevant.hits[: self._passages()])

    def consult(
        self,
        text: str,
        request: Request,
        terms: AskTerms,
        retrieved: RetrievalResult,
        generation: int,
    ) -> Consulted | None:
        """Ask the bank about a question whose passages were found; `generation` is the library's from before that.

        None if it cannot be asked: then the model answers, as if there were none.
        """
        try:
            question = self._question(text, request, terms, retrieved, generation)
            bank, tokenizer = self.bank(request.tenant, request.cache_salt), self._model.tokenizer
            found = self._look(bank, question, request)
        except (RekindleError, OSError, ValueError) as error:
            log.warning("Earlier answers cannot be used: %s", error)
            return None
        direct = None if found.direct is None else _fitting(found.direct.entry.answer, request)
        if direct is None and self.way(request) == "direct":
            found = replace(found, refused=found.refused or self._why_not(found))
        return Consulted(bank, question, found, tokenizer, request.reuse or self._settings.reuse, direct)

    def give(self, consulted: Consulted, near: SimilarQuestion, request: Request) -> Consulted:
        """The same with the answer of a question that a model takes for the same, if the request allows its length."""
        direct = _fitting(near.entry.answer, request)
        found = replace(consulted.found, direct=near, refused=None)
        return consulted if direct is None else replace(consulted, found=found, direct=direct)

    def _why_not(self, found: BankLookup) -> str:
        """Why no answer is given at once although none is refused."""
        if found.direct is not None:
            return f"its answer is longer than this request allows ({found.direct.entry.question!r})"
        threshold = self._settings.similarity_threshold
        return f"no earlier question is near enough (similarity_threshold={threshold:g}; idle work prepares some)"

    def _question(
        self, text: str, request: Request, terms: AskTerms, retrieved: RetrievalResult, generation: int
    ) -> BankQuestion:
        vector = retrieved.vector
        if vector is None:
            vector = self._knowledge.embedder().embed_questions([text]).vectors[0]
        return BankQuestion(
            text.strip(),
            vector,
            self.digest(request, terms),
            terms.top_k,
            terms.retrieval,
            tuple(hit.chunk.id for hit in retrieved.hits),
            tuple({hit.chunk.document for hit in retrieved.hits}),
            generation,
            terms,
        )

    def _look(self, bank: AnswerBank, question: BankQuestion, request: Request) -> BankLookup:
        threshold = self._settings.similarity_threshold if self.way(request) == "direct" else None
        retrieve = self.retrieving(request.tenant, request.cache_salt)
        return bank.lookup(question, retrieve, threshold)

    def drafting(self, request: Request, consulted: Consulted | None) -> Request:
        """The request, with the drafts that were found."""
        if consulted is None:
            return request
        drafts: list[str | tuple[int, ...]] = []
        for near in consulted.found.drafts:
            answer = near.entry.answer
            if answer is not None:
                drafts.append(answer.tokens if answer.tokenizer == consulted.tokenizer else answer.text)
        return replace(request, drafts=(*request.drafts, *drafts)[:MAX_DRAFTS])

    def keep(self, consulted: Consulted, reply: Reply, seconds: float, origin: QuestionOrigin = "user") -> None:
        """Keep a question with its answer, soon; what an earlier answer saved is counted."""
        near = consulted.used(reply)
        if consulted.direct is not None:
            answer = None  # the true one is found when idle
        else:
            answer = AnswerText(reply.text, reply.tokens, consulted.tokenizer, reply.finish_reason, seconds)

        def work() -> None:
            if self._memo is not None:
                self._memo.keep(self._model)
            consulted.bank.keep(consulted.question, answer, origin)
            if near is not None and near.entry.answer is not None:
                consulted.bank.record_use(near.entry.id, max(0.0, near.entry.answer.seconds - seconds))

        self._soon(work)

    def retrieving(self, tenant: str | None, salt: str | None) -> Retrieve:
        """What finds the passages for a question now."""

        def retrieve(question: str, top_k: int | None, retrieval: Retrieval) -> Sequence[int]:
            return [hit.chunk.id for hit in self.find(question, top_k, retrieval, tenant, salt).hits]

        return retrieve

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is kept; False if that takes longer."""
        with self._lock:
            waiting = set(self._writing)
        return not wait(waiting, timeout_seconds).not_done

    def close(self) -> None:
        """Keep what is waiting. Idempotent."""
        self._writer.shutdown(wait=True)

    def _soon(self, work: Callable[[], None]) -> None:
        def safely() -> None:
            try:
                work()
            except RekindleError as error:
                log.warning("An answer could not be kept: %s", error)

        with self._lock:
            self._writing = {future for future in self._writing if not future.done()}
            with suppress(RuntimeError):  # the session was closed meanwhile
                self._writing.add(self._writer.submit(safely))

    @cached_property  # so that a model that rests is not loaded for it
    def _model(self) -> AnsweringModel:
        return self._find_model()

    def digest(self, request: Request, terms: AskTerms) -> str:
        """A digest of what an answer depends on beside the question and its passages."""
        level = request.reuse or self._settings.reuse
        return terms.digest(self._model.identity, self._adapter_digest(request.adapter) or "", level)


def _common(near: SimilarQuestion, reply: Reply) -> int:
    """How many tokens a reply begins with that an earlier answer begins with, too."""
    tokens = () if near.entry.answer is None else near.entry.answer.tokens
    return next(
        (place for place, pair in enumerate(zip(tokens, reply.tokens, strict=False)) if pair[0] != pair[1]),
        min(len(tokens), len(reply.tokens)),
    )


def _fitting(answer: AnswerText | None, request: Request) -> AnswerText | None:
    """A stored answer, if the request would have let the model write all of it."""
    return answer if answer is not None and len(answer.tokens) <= request.max_tokens else None
