"""Questions about documents: retrieve, quote, answer, and tell the sources.

The order of the passages is the retrieval's, never the cache's. What the prompt shares with earlier ones, the system
prompt and the longest run of equal passages, is reused like any other beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.answers.ask_terms import AskTerms
from rekindle.answers.bank_rows import given_reply, given_sources
from rekindle.answers.citations import quote_under
from rekindle.core.keys import token_bytes
from rekindle.core.reply import Answer, AnswerSource, Reply, SourceQuote, TextPiece
from rekindle.core.request import MessageLike, ReplyOptions, Request
from rekindle.engine.base import Engine
from rekindle.engine.fairness import CURRENT, IDLE
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import PASSAGES, Retrieval, RetrievalResult
from rekindle.session.answers import Answers, Consulted
from rekindle.session.library import Knowledge, quote_of
from rekindle.session.prompt import PromptTokens
from rekindle.session.reply_stream import ReplyStream
from rekindle.session.reply_stream import Run as Running
from rekindle.store.tiered import TieredStore

_FEW_PASSAGES = ((400_000_000, 2), (3_000_000_000, 3))  # models below a number of parameters
_PASSAGE_TOKENS = 512  # of the context, for each passage

Keeping = Callable[[Consulted, Reply, float], None]


class AskOptions(ReplyOptions, total=False):
    """The keyword arguments of `Session.ask`. `top_k` is how many passages, not how many tokens to draw from; None:
    those that are relevant, as many as the model can use.

    `messages` is a chat that is answered in place of the question, which is then only what is looked for.
    """

    top_k: int | None
    retrieval: Retrieval
    instructions: str | None
    messages: Sequence[MessageLike]


@dataclass(frozen=True)
class Prepared:
    """A question whose passages were found: what to ask the model, and what its sources are."""

    question: str
    request: Request
    retrieved: RetrievalResult
    sources: tuple[AnswerSource, ...]
    prompt_tokens: int = 0  # 0 if a stored answer is given
    consulted: Consulted | None = None  # earlier answers, if they may be used

    @property
    def has_own_documents(self) -> bool:
        """Whether its documents came with the request, and not from the library."""
        return any(quote.chunk is None for quote in self.request.quotes)

    @property
    def stored_reply(self) -> Reply | None:
        """The stored answer, if it is given without the model: `usage` and `reuse` say that nothing was computed."""
        if self.consulted is None or self.consulted.direct is None:
            return None
        return given_reply(self.consulted.direct, len(self.sources), self.consulted.level)

    def quote(self, reply: Reply) -> SourceQuote | None:
        """The sentence to show under a reply."""
        return quote_under(reply.text, self.question, self.sources)

    def answer(self, reply: Reply, seconds: float) -> Answer:
        """The reply with its sources; `seconds` went by before the model was asked."""
        return Answer.of(
            reply,
            seconds,
            question=self.question,
            sources=self.sources,
            retrieval=self.retrieved.retrieval,
            retrieve_seconds=self.retrieved.seconds,
            left_out=len(self.retrieved.hits) - len(self.sources),
            stored=None if self.consulted is None else self.consulted.stored(reply),
            refused=None if self.consulted is None else self.consulted.found.refused,
            quote=self.quote(reply),
            uncertain=self.retrieved.uncertain,
        )


class AnswerStream(ReplyStream):
    """Pieces of an answer as they are decoded. `sources` are known before the first one."""

    def __init__(self, prepared: Prepared, run: Running, started: float, keep: Keeping) -> None:
        super().__init__(lambda *how: _answering(prepared, lambda: run(*how), started, keep))
        self.request = prepared.request
        self.sources = prepared.sources
        self.retrieved = prepared.retrieved

    @property
    def answer(self) -> Answer:
        """The whole answer; reads what is left of the stream first."""
        reply = self.reply
        assert isinstance(reply, Answer)
        return reply


def sources_of(retrieved: RetrievalResult, prompt: PromptTokens) -> tuple[AnswerSource, ...]:
    """The passages that stand in a prompt, numbered as there."""
    return tuple(
        AnswerSource(
            number,
            hit.chunk.name,
            hit.chunk.source,
            hit.chunk.title,
            hit.chunk.passage.shown,
            hit.score,
            used.cut,
            hit.chunk.passage.heading,
        )
        for number, used in enumerate(prompt.quoted, start=1)
        for hit in (retrieved.hits[used.index],)
    )


def find_stored(
    knowledge: Knowledge, answers: Answers, question: str, request: Request, top_k: int | None, retrieval: Retrieval
) -> Prepared:
    """Find the passages for a question, and the stored answer that may be given. No model is needed for that.

    Earlier answers take part if the question is the last message of the request.
    """
    request = replace(request, answers=answers.way(request))
    whose = (request.tenant, request.cache_salt)
    generation = knowledge.generation(*whose)
    retrieved = answers.find(question, top_k, retrieval, *whose)
    request = replace(request, quotes=tuple(quote_of(hit.chunk) for hit in retrieved.hits))
    terms = AskTerms.of(request, question, top_k, retrieval)
    if terms is None or not answers.heeds(request):
        return Prepared(question, request, retrieved, ())
    consulted = answers.consult(question, request, terms, retrieved, generation)
    return with_stored_reply(Prepared(question, request, retrieved, ()), consulted)


def find_for_documents(answers: Answers, question: str, request: Request) -> Prepared:
    """The same for a chat whose documents came with it: they are a part of its terms, and nothing is retrieved."""
    request = replace(request, answers=answers.chat_way(request))
    prepared = Prepared(question, request, RetrievalResult((), "fused", 0.0, 0.0), ())
    terms = AskTerms.of(request, question, 0, "fused")
    if terms is None or not answers.heeds(request):
        return prepared
    return with_stored_reply(prepared, answers.consult(question, request, terms, prepared.retrieved, 0))


def with_stored_reply(prepared: Prepared, consulted: Consulted | None) -> Prepared:
    """What the bank said of a question, with the sources of the answer that it gives, if it does."""
    near = None if consulted is None or consulted.direct is None else consulted.found.direct
    if consulted is None or near is None:
        return replace(prepared, consulted=consulted)
    if prepared.has_own_documents:
        sources = tuple(
            AnswerSource(number, "", quote.title, quote.title, quote.text, near.similarity)
            for number, quote in enumerate(prepared.request.quotes, start=1)
        )
    else:
        sources = given_sources(consulted.bank.library, near.entry, near.similarity)
    return replace(prepared, sources=sources, consulted=consulted)


def most_passages(engine: Engine) -> int:
    """How many passages a model is given unless somebody chose: a small one takes facts from the wrong passage, and
    in a short context they leave no room."""
    fit = max(1, engine.context_tokens // _PASSAGE_TOKENS)
    return min(fit, next((count for below, count in _FEW_PASSAGES if engine.parameters < below), PASSAGES))


class Evidence:
    """The passages of a library in a prompt: a write guard, so that no KV of them outlives them, and a background job.

    Before KV of them is written, their tokens are recorded in the library, so that `forget` finds it. If they are
    removed before it is listed, it is not listed.
    """

    def __init__(self, library: Library, tokenizer: str, tokens: Mapping[int, bytes]) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._counts = CURRENT.get() is not IDLE  # idle work does not count as use
        self.allows = False  # whether KV of it may be kept

    @classmethod
    def of(cls, library: Library, tokenizer: str, request: Request, prompt: PromptTokens) -> Evidence | None:
        """What of a library stands in a prompt; None if nothing does."""
        tokens: dict[int, bytes] = {}
        for used in prompt.quoted:
            chunk = request.quotes[used.index].chunk
            if chunk is not None:
                tokens[chunk] = token_bytes(prompt.tokens[used.span.start : used.span.stop])
        return cls(library, tokenizer, tokens) if tokens else None

    def do(self, store: TieredStore) -> str:  # noqa: ARG002  (a job gets it)
        """Note the tokens, and count that the passages were used."""
        self.note()
        if self.allows and self._counts:
            self._library.note_retrieved(list(self._tokens))
        return "noted"

    def note(self) -> None:
        """Record the tokens: KV of them may be written then, unless one of the passages was removed."""
        self.allows = self._library.note_tokens(self._tokenizer, self._tokens)

    def present(self) -> bool:
        """Whether all of the passages are still there."""
        return self._library.has_passages(self._tokens)

    def detached_bytes(self) -> int:
        return 0


def _answering(
    prepared: Prepared, run: Callable[[], Generator[TextPiece, None, Reply]], started: float, keep: Keeping
) -> Generator[TextPiece, None, Reply]:
    """Give the stored answer, or let the model write one; then keep it."""
    before = time.perf_counter() - started
    reply = prepared.stored_reply
    if reply is not None:
        yield TextPiece(reply.text)
    else:
        reply = yield from run()
    if prepared.consulted is not None:
        keep(prepared.consulted, reply, time.perf_counter() - started)
    return prepared.answer(reply, before)
