"""What is done when nobody asks: answers before the question is asked.

refresh    answers whose documents changed
settle     true answers to questions that were given another one's
abstracts  what new documents are about
predict    questions that may be asked, guessed from abstracts, from earlier questions, from the documents' own words;
           each is read by the model, and answered where that helps
convert    questions that were only read are answered; KV that is gone is computed again
warm       what questions begin with: the instructions, and each passage as the first one

Everything is a small action that stops within a token. What was done is written into the library (`run/work`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import DEFAULT_MAX_TOKENS, Message, Request, Sampling
from rekindle.errors import InvalidSetting
from rekindle.knowledge.retrieve import Retrieval
from rekindle.predict.populate import Budget, Conditions, Rule, Spent, Strategy, first_passages, population, spread
from rekindle.predict.queries import (
    Origin,
    Predicted,
    guessing_from_abstracts,
    guessing_from_history,
    listing,
    novel,
    openings_about,
    openings_of,
    parse_questions,
    summarizing,
    telling,
)
from rekindle.run.ahead import Ahead, Asking
from rekindle.run.foresee import News
from rekindle.run.knowledge import asking, quote_of
from rekindle.run.session import Session
from rekindle.run.work import Did
from rekindle.run.worker import Took, Worker

_ABSTRACT_TOKENS, _QUESTION_TOKENS = 96, 48
_READ_TOKENS = 1500  # of a document, for its abstract
_SPARE_TOKENS = 128  # for what stands around it
_AGAIN_TEMPERATURE = 0.8  # of guesses from abstracts that were guessed from before
_MOST_RESTORED = 64  # questions whose KV is looked for at a time
_FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class IdleOptions:
    """What to do, and how much of it.

    stride          questions foreseen at a time
    rounds          how often that is done, from each source
    sources         where questions are foreseen from
    settle_seconds  abstracts are written once no document came for so long
    warm_passages   so many passages are computed ahead; None: as many as the KV store has room for
    max_tokens, min_tokens   of an answer: as users ask for it
    rule            which foreseen questions are answered, see `population`
    conditions      when to stop because of load or battery; None: never
    """

    stride: int = 5
    rounds: int = 1
    sources: tuple[str, ...] = ("abstract", "history", "passage")
    settle_seconds: float = 60.0
    warm_passages: int | None = None
    budget: Budget = field(default_factory=Budget)
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    top_k: int = 5
    retrieval: Retrieval = "fused"
    rule: Rule = "rekindle"
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        unknown = set(self.sources) - {"abstract", "history", "passage"}
        if unknown:
            raise InvalidSetting(f"Questions cannot be foreseen from {min(unknown)!r}: use abstract, history, passage.")
        if self.stride < 1 or self.rounds < 0 or self.max_tokens < 1:
            raise InvalidSetting("stride and max_tokens are 1 or more, rounds 0 or more.")

    @property
    def asking(self) -> Asking:
        """How users are expected to ask."""
        return Asking(self.top_k, self.retrieval, self.max_tokens, self.min_tokens)


class Idle:
    """Work ahead for one tenant of a session. Used by one thread; `stop` of `run` may be set by any.

    The budget is that of all its work together. Every step can be called alone, too; each returns what it did.
    """

    def __init__(
        self,
        session: Session,
        options: IdleOptions | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        report: Callable[[Did], None] | None = None,
    ) -> None:
        """Raises `InvalidSetting` for a budget of joules where the machine does not tell them."""
        self.options = options or IdleOptions()
        self._session = session
        self._worker = Worker(session, self.options.budget, self.options.conditions, report)
        self._tenant, self._salt = tenant, cache_salt
        self._foreseen: News | None = None  # what was known when questions were foreseen last
        self._finished: News | None = None  # and when nothing was left to do
        self._ahead = Ahead(session, self._worker, self.options.asking, tenant, cache_salt, self.options.rule)

    @property
    def spent(self) -> Spent:
        """What its work took by now."""
        return self._worker.spent

    @property
    def hindered(self) -> str | None:
        """Why it stopped, if load or battery were in the way."""
        return self._worker.hindered

    def run(self, stop: threading.Event | None = None) -> list[Did]:
        """Do everything there is to do, until `stop` is set or the budget is spent.

        Once it came to its end, there is something to do again only after documents or users' questions came.
        """
        self._worker.stop = stop or threading.Event()
        self._worker.hindered = None
        if not self._session.knowledge.holds(self._tenant, self._salt) or self._finished == self._news():
            return []
        done = [*self.refresh(), *self.settle()]
        if "abstract" in self.options.sources:
            done += self.abstracts()
        if self._news() != self._foreseen:  # else the same documents and questions would be guessed from for ever
            for _ in range(self.options.rounds):
                done += self.predict()
            self._foreseen = self._news() if self._worker.goes_on() else None
        done += [*self.convert(), *self.warm()]
        waits = "abstract" in self.options.sources and self.strategy is not None and self._ahead.foresight.bare(0.0)
        if self._worker.goes_on() and not waits:
            self._finished = self._news()
        return done

    def _news(self) -> News:
        self._session.answers.flush(_FLUSH_SECONDS)
        return self._ahead.foresight.news()

    def predict(self) -> list[Did]:
        """Foresee `stride` questions from each source."""
        ways = {
            "abstract": self.predict_from_abstracts,
            "history": self.predict_from_history,
            "passage": self.predict_from_passages,
        }
        return [did for source in self.options.sources for did in ways[source](self.options.stride)]

    @property
    def strategy(self) -> Strategy | None:
        """What a foreseen question gets now; None: nothing, because no question may be kept or it would not help."""
        own = self._session.settings
        chosen = population(own.answers, own.similarity_threshold, own.scheduler_threshold, self.options.rule)
        return None if chosen == "prefill" and self._session.cache.store is None else chosen

    def refresh(self) -> list[Did]:
        """Answer anew what was answered from documents that changed."""
        if self.strategy is None:
            return []
        bank = self._ahead.bank
        bank.outdated(self._session.answers.retrieving(self._tenant, self._salt))
        order = "ORDER BY asked IS NOT NULL DESC, uses DESC, id"
        return self._ahead.answer_all("refresh", bank.entries(where=f"state='stale' {order}"))

    def settle(self) -> list[Did]:
        """Answer the questions of users that were given another question's answer."""
        if self.strategy is None:
            return []
        waiting = self._ahead.bank.entries(where="state='open' AND asked IS NOT NULL ORDER BY asked, id")
        return self._ahead.answer_all("true-answer", waiting)

    def abstracts(self, most: int | None = None) -> list[Did]:
        """Sum up documents that have no abstract yet, once no more of them come."""
        done: list[Did] = []
        if self.strategy is None:
            return done
        encode, context = self._session.engine.tokenizer.encode, self._session.engine.context_tokens
        for document in self._ahead.foresight.bare(self.options.settle_seconds)[:most]:
            if not self._worker.goes_on():
                break
            chunks = self._ahead.bank.library.chunks_of(document)
            if not chunks:
                continue
            texts = [chunk.passage.shown for chunk in chunks]
            room = max(1, min(_READ_TOKENS, context - _ABSTRACT_TOKENS - _SPARE_TOKENS))
            parts = [texts[at] for at in spread([len(encode(text)) for text in texts], room)]
            took = self._write(summarizing(parts), _ABSTRACT_TOKENS, telling())
            if took.reply is not None and took.reply.text.strip():
                self._ahead.foresight.put_abstract(document, " ".join(took.reply.text.split()))
            done.append(self._ahead.note("abstract", chunks[0].title, took))
        return done

    def predict_from_abstracts(self, most: int) -> list[Did]:
        """Guess so many questions from the abstracts whose turn it is, and prepare those that are new."""
        if self.strategy is None or not self._worker.goes_on():
            return []
        chosen = self._ahead.foresight.next_abstracts(most)
        if not chosen.documents:
            return []
        seed = chosen.trips or None  # the first time the likeliest ones, then others
        grammar = listing(most, openings_about(chosen.texts, most))
        took = self._write(guessing_from_abstracts(chosen.texts, most), most * _QUESTION_TOKENS, grammar, seed)
        did = self._ahead.note("guess-abstract", f"{len(chosen.documents)} abstracts", took)
        return [did, *self._prepare_guessed(took.reply, most, "abstract", chosen.documents)]

    def predict_from_history(self, most: int) -> list[Did]:
        """The same from what users asked last, if they asked anything since this was done before."""
        if self.strategy is None or not self._worker.goes_on():
            return []
        self._session.answers.flush(_FLUSH_SECONDS)
        asked = self._ahead.foresight.asked()
        if asked is None:
            return []
        grammar = listing(most, openings_of(asked.questions, most))
        took = self._write(guessing_from_history(asked.questions, most), most * _QUESTION_TOKENS, grammar)
        if took.reply is not None:
            self._ahead.foresight.looked_at(asked)
        did = self._ahead.note("guess-history", f"{len(asked.questions)} questions", took)
        return [did, *self._prepare_guessed(took.reply, most, "history", asked.documents)]

    def predict_from_passages(self, most: int) -> list[Did]:
        """Prepare so many questions that documents answer, one of each whose turn it is. Finding them is free."""
        done: list[Did] = []
        strategy = self.strategy
        if strategy is None or not self._worker.goes_on():
            return done
        for questions in self._ahead.foresight.from_passages():
            done += self._ahead.prepare_first(questions, strategy)
            if len(done) >= most or not self._worker.goes_on():
                break
        return done

    def convert(self) -> list[Did]:
        """Answer what was only read, if answers help by now; compute again what KV is gone, if there is room."""
        done: list[Did] = []
        strategy, ahead = self.strategy, self._ahead
        if strategy is None:
            return done
        if strategy == "answer":
            done += ahead.answer_all("decode", ahead.bank.entries(where="state='open' AND asked IS NULL ORDER BY id"))
        useful = "ORDER BY uses DESC, coalesce(asked, 0) DESC, id DESC"
        return [*done, *ahead.restore_all(ahead.bank.entries(where=f"state!='stale' {useful}", most=_MOST_RESTORED))]

    def warm(self) -> list[Did]:
        """Compute the instructions and passages with which prompts may begin, the likeliest first."""
        done: list[Did] = []
        most, library = self.options.warm_passages, self._ahead.bank.library
        for id in self._beginnings(most):
            if not self._worker.goes_on():
                break
            chunk = None if id is None else library.chunks([id]).get(id)
            if chunk is None and id is not None:
                continue
            quotes = () if chunk is None else (quote_of(chunk),)
            request = Request(asking(""), max_tokens=0, quotes=quotes, tenant=self._tenant, cache_salt=self._salt)
            missing = self._ahead.missing(request)
            if not missing:
                continue
            if not self._ahead.has_room(missing):
                break
            what = "the instructions" if chunk is None else f"{chunk.title} {chunk.place + 1}"
            done.append(self._ahead.note("warm", what, self._worker.compute(request)))
        return done

    def _beginnings(self, most: int | None) -> list[int | None]:
        if self._session.cache.store is None:
            return []
        present = self._ahead.foresight.passages()
        used = [chunk.id for chunk in self._ahead.bank.library.most_retrieved(len(present))]
        return [None, *first_passages(used, self._ahead.foresight.first_foreseen(), present)[:most]]

    def _prepare_guessed(
        self, reply: Reply | None, most: int, origin: Origin, documents: tuple[int, ...]
    ) -> Iterator[Did]:
        """Prepare the questions of a reply that are new and can be answered."""
        texts = [] if reply is None else parse_questions(reply.text, most)
        guessed = [Predicted(text, origin, documents) for text in texts]
        strategy = self.strategy
        if not guessed or strategy is None:
            return
        vectors = self._session.knowledge.embedder().embed(texts).vectors  # [questions, dimensions]
        for place in novel(guessed, vectors, vectors[:0], most):
            if not self._worker.goes_on():
                return
            yield from self._ahead.prepare_first([guessed[place]], strategy)

    def _write(
        self, messages: tuple[Message, ...], most_tokens: int, grammar: Grammar | None = None, seed: int | None = None
    ) -> Took:
        """Let the model write something for our own use. It quotes documents: none of its KV is kept."""
        sampling = Sampling() if seed is None else Sampling(temperature=_AGAIN_TEMPERATURE, seed=seed)
        request = Request(
            messages,
            sampling,
            max_tokens=most_tokens,
            grammar=grammar,
            reuse="off",
            answers="off",
            tenant=self._tenant,
            cache_salt=self._salt,
        )
        return self._worker.compute(request)
