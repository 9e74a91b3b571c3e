"""Idle work: prepare answers and KV while nobody asks.

refresh    answers whose documents changed
settle     own answers for questions that were given another question's answer
abstracts  summaries of new documents and of the library
predict    questions that may be asked: a model that is large enough asks them, of abstracts and earlier questions; each
           that can be answered is prefilled, and answered where that helps
convert    answers for questions that were only prefilled; KV that was evicted is computed again
warm       KV of prompt beginnings: the instructions, and each passage as the first one

Everything is a small action that stops within a token, and is recorded in the library (`idle/log`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rekindle.answers.ask_terms import AskTerms, asking
from rekindle.core.adapter import Lora
from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import DEFAULT_MAX_TOKENS, Message, Request, Sampling
from rekindle.core.size import count_of, parse_duration
from rekindle.engine.base import Engine, EngineWrapper, Logits, Row
from rekindle.engine.fairness import IDLE, taking
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterRefused, Cancelled, InvalidSetting
from rekindle.idle.abstracts import AbstractWriter
from rekindle.idle.generated_questions import (
    Origin,
    PredictedQuestion,
    list_grammar,
    parse_questions,
    pick_novel,
    prompt_for_questions,
    prompt_from_history,
)
from rekindle.idle.log import IdleAction, prediction_yield
from rekindle.idle.prepare import Preparer, Rule, Strategy, choose_strategy, first_passages
from rekindle.idle.sources import AbstractBatch, LibraryState
from rekindle.idle.worker import IdleConditions, IdleWorker, StopOrDeadline, WorkResult
from rekindle.knowledge.retrieve import Retrieval
from rekindle.session.calibrate.calibration import Calibration, measure, missing_parts
from rekindle.session.library import quote_of
from rekindle.session.session import Session
from rekindle.settings import ServerSettings, warn_once

_QUESTION_TOKENS = 48
_GONE_SOURCE = "passage"  # of questions, in earlier versions
_GONE_SOURCE_SENTENCE = (
    "idle_sources has no passage any more: questions are predicted from abstract and history, by a model that is large "
    "enough to ask; passages are prefilled."
)
_FEWEST_PARAMETERS = 500_000_000  # of a model that asks questions
_AGAIN_TEMPERATURE = 0.8  # for abstracts that were used before
_MAX_RESTORED = 64  # questions whose KV is checked per run
_FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class IdleOptions:
    """What to do while idle, and how much of it.

    stride          number of questions predicted at a time
    rounds          how often that is done, from each source, when documents or questions are new
    seconds_per_hit more rounds follow while a predicted question that is used costs at most this much work
    sources         where questions are predicted from
    settle_seconds  abstracts are written once no document was added for this long
    warm_passages   number of passages to warm; None: as many as the KV store has room for
    budget_seconds  most seconds of work; None: any
    max_tokens, min_tokens, top_k, retrieval   as users are expected to ask, until some did
    cutoff          from this similarity_threshold on, predicted questions are only prefilled, not answered
    rule            which predicted questions are answered, see `choose_strategy`
    conditions      when to stop because of load or battery; None: never
    calibrate_seconds   most time to calibrate a model that nobody calibrated, see `IdleCalibration`; 0: never
    """

    stride: int = 5
    rounds: int = 1
    seconds_per_hit: float = 600.0
    sources: tuple[str, ...] = ("abstract", "history")
    settle_seconds: float = 60.0
    warm_passages: int | None = None
    budget_seconds: float | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    top_k: int | None = None
    retrieval: Retrieval = "fused"
    cutoff: float = 0.9
    rule: Rule = "rekindle"
    conditions: IdleConditions | None = None
    calibrate_seconds: float = 0.0

    @classmethod
    def of(cls, settings: ServerSettings, max_tokens: int = DEFAULT_MAX_TOKENS) -> IdleOptions:
        """What the settings say. Raises `InvalidSetting`."""
        if _GONE_SOURCE in settings.idle_sources:
            warn_once(_GONE_SOURCE_SENTENCE)
        seconds, calibrate = (
            None if time is None else parse_duration(time) for time in (settings.idle_seconds, settings.idle_calibrate)
        )
        return cls(
            stride=settings.idle_stride,
            rounds=settings.idle_rounds,
            seconds_per_hit=parse_duration(settings.idle_per_hit),
            sources=tuple(source for source in settings.idle_sources if source != _GONE_SOURCE),
            settle_seconds=parse_duration(settings.idle_settle),
            warm_passages=settings.idle_passages,
            budget_seconds=seconds,
            max_tokens=max_tokens,
            conditions=IdleConditions(settings.idle_load, settings.on_battery),
            calibrate_seconds=calibrate or 0.0,
        )

    def __post_init__(self) -> None:
        unknown = set(self.sources) - {"abstract", "history"}
        if unknown:
            raise InvalidSetting(f"Questions cannot be predicted from {min(unknown)!r}: use abstract, history.")
        if self.stride < 1 or self.rounds < 0 or self.max_tokens < 1:
            raise InvalidSetting("stride and max_tokens are 1 or more, rounds 0 or more.")

    @property
    def expected_terms(self) -> AskTerms:
        """How users are expected to ask, until some did."""
        asked = Request(asking("?"), max_tokens=self.max_tokens, min_tokens=self.min_tokens)
        terms = AskTerms.of(asked, "?", self.top_k, self.retrieval)
        assert terms is not None
        return terms


class Idle:
    """Idle work for one tenant of a session. Used by one thread; `stop` of `run` may be set by any.

    The budget covers all its work together. Every step can be called alone, too; each returns its actions.
    """

    def __init__(
        self,
        session: Session,
        options: IdleOptions | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        report: Callable[[IdleAction], None] | None = None,
    ) -> None:
        self.options = options or IdleOptions()
        self._session = session
        self._worker = IdleWorker(session, self.options.budget_seconds, self.options.conditions, report)
        self._tenant, self._salt = tenant, cache_salt
        self._finished: LibraryState | None = None  # the library when nothing was left to do
        self._lacks_room = False  # the last time passages were to be prefilled
        self._preparer = Preparer(
            session, self._worker, self.options.expected_terms, tenant, cache_salt, self.options.rule
        )

    @property
    def spent_seconds(self) -> float:
        return self._worker.spent_seconds

    @property
    def blocked_by(self) -> str | None:
        """Why it stopped, if because of load or battery."""
        return self._worker.blocked_by

    def why_nothing(self) -> str:
        """Why a `run` found nothing to do, and what brings work: a sentence for people."""
        settings, options = self._session.settings, self.options
        if self._worker.is_spent:
            return "the budget is spent."
        if self.strategy is None and self._session.cache.store is None:
            return "answers is off and there is no cache. Use --answers verified, or leave out --cache off."
        if self._lacks_room:
            return "the cache has no room left for more. Set a larger disk_limit: --disk-limit 2GB."
        waiting = self._preparer.sources.without_abstract(0.0) if "abstract" in options.sources else []
        if self._strategy_of_predicted is not None and waiting:
            return f"documents came less than {options.settle_seconds:g} s ago. Wait, or use --idle-settle 0s."
        if self._strategy_of_predicted is not None and not self._pays():
            hits, seconds = prediction_yield(self._preparer.bank.library)
            spent = f"predicted questions were used {count_of(hits, 'time')} for {seconds:.0f} s of work"
            return (
                f"more would not pay: {spent}. New documents and questions bring work, and --idle-per-hit allows more."
            )
        more = "; --answers verified predicts questions, too" if settings.answers == "off" else ""
        more = more or ("" if self.asks else f"; no questions are predicted: {self.why_no_questions}")
        return f"all is prepared. New documents and questions bring work{more}."

    def run(self, stop: threading.Event | None = None) -> list[IdleAction]:
        """Do everything there is to do, until `stop` is set or the budget is spent.

        After it has finished, there is work again only when documents or users' questions arrive.
        """
        self._worker.stop = stop or threading.Event()
        if not self._session.knowledge.holds(self._tenant, self._salt) or self._finished == self._state():
            return []
        done = [*self.refresh(), *self.settle()]
        if "abstract" in self.options.sources:
            done += self.abstracts()
        done += [*self.predict_in_rounds(), *self.convert(), *self.warm()]
        waits = (
            "abstract" in self.options.sources
            and self._strategy_of_predicted is not None
            and self._preparer.sources.without_abstract(0.0)
        )
        if self._worker.may_continue() and not waits:
            self._finished = self._state()
        return done

    def _state(self) -> LibraryState:
        self._session.answers.flush(_FLUSH_SECONDS)
        return self._preparer.sources.state()

    def predict_in_rounds(self) -> list[IdleAction]:
        """Predict from what is new, then go on as long as that brings questions and what was predicted is used."""
        done: list[IdleAction] = []
        sources, engine = self._preparer.sources, self._session.engine
        model = engine.identity(engine.regime(1)).digest
        before = sources.predicted(self._state(), model)
        if before == "none":
            for _ in range(self.options.rounds):
                done += self.predict()
        more = self.options.rounds > 0 and before != "all"
        while more and self._pays() and self._worker.may_continue():
            round_ = self.predict()
            done += round_
            more = any(action.action in ("prefill", "answer") for action in round_)
        if done and self._worker.may_continue():
            sources.mark_predicted(self._state(), model, all_of_them=not more)
        return done

    def _pays(self) -> bool:
        """Whether predicted questions are used often enough for the work they cost; one use is given in advance."""
        if self._strategy_of_predicted is None:
            return False
        hits, seconds = prediction_yield(self._preparer.bank.library)
        return seconds < self.options.seconds_per_hit * (hits + 1)

    def predict(self) -> list[IdleAction]:
        """Predict `stride` questions from each source."""
        ways = {"abstract": self.predict_from_abstracts, "history": self.predict_from_history}
        return [action for source in self.options.sources for action in ways[source](self.options.stride)]

    @property
    def asks(self) -> bool:
        """Whether the model is large enough to ask: a smaller one repeats one question, or answers it."""
        return self._session.engine.parameters >= _FEWEST_PARAMETERS

    @property
    def why_no_questions(self) -> str | None:
        """Why no questions are predicted, a clause for people; None if they are."""
        engine = self._session.engine
        if self._session.settings.answers == "off":
            return "answers is off"
        size, least = (f"{count / 1e6:.0f} million parameters" for count in (engine.parameters, _FEWEST_PARAMETERS))
        return None if self.asks else f"{engine.name} ({size}) is too small to ask, which takes {least}"

    @property
    def _strategy_of_predicted(self) -> Strategy | None:
        return self.strategy if self.asks else None

    @property
    def strategy(self) -> Strategy | None:
        """What a question gets now; None: nothing, because no question may be kept or it would not help."""
        own, expected = self._session.settings, self.options.expected_terms.request("?")
        way = self._session.answers.way(expected)
        chosen = choose_strategy(way, own.similarity_threshold, self.options.cutoff, self.options.rule)
        return None if chosen == "prefill" and self._session.cache.store is None else chosen

    def refresh(self) -> list[IdleAction]:
        """Answer again the questions whose documents changed."""
        if self.strategy is None:
            return []
        bank = self._preparer.bank
        bank.mark_stale(self._session.answers.retrieving(self._tenant, self._salt))
        order = "ORDER BY asked IS NOT NULL DESC, uses DESC, id"
        return self._preparer.answer_all("refresh", bank.entries(where=f"state='stale' {order}"))

    def settle(self) -> list[IdleAction]:
        """Answer users' questions that were given another question's answer."""
        if self.strategy is None:
            return []
        waiting = self._preparer.bank.entries(where="state='open' AND asked IS NOT NULL ORDER BY asked, id")
        return self._preparer.answer_all("true-answer", waiting)

    def abstracts(self, max_count: int | None = None) -> list[IdleAction]:
        """Summarize documents that have no abstract yet, once no more are being added."""
        if self._strategy_of_predicted is None:
            return []
        writer = AbstractWriter(self._session, self._preparer, self._worker.may_continue, self._write)
        done = writer.documents(self.options.settle_seconds, max_count)
        if max_count is None and not self._preparer.sources.without_abstract(0.0):
            done += writer.library()
        return done

    def predict_from_abstracts(self, max_count: int) -> list[IdleAction]:
        """Generate questions from the abstracts whose turn it is, and prepare those that are new."""
        done: list[IdleAction] = []
        if self._strategy_of_predicted is None or not self._worker.may_continue():
            return done
        sources = self._preparer.sources
        chosen = sources.next_abstracts(max_count)
        library = sources.next_library_abstract()
        for batch in (library, chosen):
            if batch is not None and self._worker.may_continue():
                done += self._guess_from(batch, max_count)
                if batch is library and done and done[0].finished:
                    sources.mark_library_used(batch)
        return done

    def _guess_from(self, batch: AbstractBatch, max_count: int) -> list[IdleAction]:
        if not batch.documents:
            return []
        prompt = prompt_for_questions(batch.about, batch.texts, max_count)
        seed = batch.trips or None  # greedy the first time, then sampled
        result = self._write(prompt, max_count * _QUESTION_TOKENS, list_grammar(max_count), seed)
        action = self._preparer.record("guess-abstract", count_of(len(batch.about + batch.texts), "abstract"), result)
        return [action, *self._prepare_guessed(result.reply, max_count, "abstract", batch.documents)]

    def predict_from_history(self, max_count: int) -> list[IdleAction]:
        """Generate questions from users' latest ones, if they asked anything since this was done last."""
        if self._strategy_of_predicted is None or not self._worker.may_continue():
            return []
        self._session.answers.flush(_FLUSH_SECONDS)
        asked = self._preparer.sources.asked()
        if asked is None:
            return []
        prompt = prompt_from_history(asked.questions, max_count)
        result = self._write(prompt, max_count * _QUESTION_TOKENS, list_grammar(max_count))
        if result.reply is not None:
            self._preparer.sources.mark_used(asked)
        action = self._preparer.record("guess-history", count_of(len(asked.questions), "question"), result)
        return [action, *self._prepare_guessed(result.reply, max_count, "history", asked.documents)]

    def convert(self) -> list[IdleAction]:
        """Answer questions that were only prefilled, if that helps now; recompute evicted KV, if there is room."""
        done: list[IdleAction] = []
        strategy, preparer = self.strategy, self._preparer
        if strategy is None:
            return done
        if strategy == "answer":
            done += preparer.answer_all(
                "decode", preparer.bank.entries(where="state='open' AND asked IS NULL ORDER BY id")
            )
        useful = "ORDER BY uses DESC, coalesce(asked, 0) DESC, id DESC"
        return [
            *done,
            *preparer.restore_all(preparer.bank.entries(where=f"state!='stale' {useful}", max_count=_MAX_RESTORED)),
        ]

    def warm(self) -> list[IdleAction]:
        """Prefill the instructions and passages that prompts may begin with, the likeliest first."""
        done: list[IdleAction] = []
        max_count, library = self.options.warm_passages, self._preparer.bank.library
        self._lacks_room = False
        ways = self._preparer.terms()
        for id, terms in itertools.product(self._beginnings(max_count), ways):
            if not self._worker.may_continue():
                break
            chunk = None if id is None else library.chunks([id]).get(id)
            if chunk is None and id is not None:
                continue
            quotes = () if chunk is None else (quote_of(chunk),)
            begun = {"max_tokens": 0, "min_tokens": 0, "quotes": quotes}
            before = replace(terms, lead="")  # the passages come before it
            request = before.request("", **begun, tenant=self._tenant, cache_salt=self._salt)
            missing = self._preparer.missing(request)
            if not missing:
                continue
            if not self._preparer.has_room(missing):
                self._lacks_room = True
                break
            what = "the instructions" if chunk is None else f"{chunk.title} {chunk.place + 1}"
            done.append(self._preparer.record("warm", what, self._worker.compute(request)))
        return done

    def _beginnings(self, max_count: int | None) -> list[int | None]:
        if self._session.cache.store is None:
            return []
        present = self._preparer.sources.passages()
        used = [chunk.id for chunk in self._preparer.bank.library.top_retrieved(len(present))]
        return [None, *first_passages(used, self._preparer.sources.first_evidence(), present)[:max_count]]

    def _prepare_guessed(
        self, reply: Reply | None, max_count: int, origin: Origin, documents: tuple[int, ...]
    ) -> Iterator[IdleAction]:
        """Prepare the questions in a reply that are new and can be answered."""
        texts = [] if reply is None else parse_questions(reply.text, max_count)
        guessed = [PredictedQuestion(text, origin, documents) for text in texts]
        strategy = self.strategy
        if not guessed or strategy is None:
            return
        vectors = self._session.knowledge.embedder().embed_questions(texts).vectors  # [questions, dimensions]
        for place in pick_novel(guessed, vectors, vectors[:0], max_count):
            if not self._worker.may_continue():
                return
            yield from self._preparer.prepare(guessed[place], strategy)

    def _write(
        self, messages: tuple[Message, ...], token_limit: int, grammar: Grammar | None = None, seed: int | None = None
    ) -> WorkResult:
        """Generate a text for internal use. It quotes documents, so none of its KV is kept."""
        sampling = Sampling() if seed is None else Sampling(temperature=_AGAIN_TEMPERATURE, seed=seed)
        request = Request(
            messages,
            sampling,
            max_tokens=token_limit,
            grammar=grammar,
            reuse="off",
            answers="off",
            tenant=self._tenant,
            cache_salt=self._salt,
        )
        return self._worker.compute(request)


_MAX_ADAPTERS = 4  # that deltas are measured with


class IdleCalibration:
    """Measures what the level of reuse of a session needs, if nobody did; at most `calibrate_seconds` of work in all.

    Sessions that are opened later use what was found.
    """

    def __init__(self, session: Session, options: IdleOptions) -> None:
        self._session, self._seconds = session, options.calibrate_seconds
        self._worker = IdleWorker(session, self._seconds, options.conditions)
        self._is_over = False

    def run(self, stop: threading.Event) -> Calibration | None:
        """Work until `stop` is set, load or battery forbid it, or the time is spent: nothing is kept then.

        None if nothing was found. Raises `RekindleError` once if the model cannot be calibrated.
        """
        self._worker.stop, self._worker.blocked_by = stop, None
        parts = [] if self._is_over else missing_parts(self._session)
        if not parts or not self._worker.may_continue():
            return None
        started, spent = time.perf_counter(), self._worker.spent_seconds
        self._is_over = True
        try:
            with self._session.staying(), ExitStack() as opened:
                ended = StopOrDeadline(stop, started + self._seconds - spent)
                engine = _StoppableEngine(self._session.engine, self._worker, ended)
                return measure(engine, self._adapters(opened), None, lambda _: None, parts=parts)
        except Cancelled:
            self._is_over = False
            return None
        finally:
            self._worker.spent_seconds = spent + time.perf_counter() - started

    def _adapters(self, opened: ExitStack) -> list[Lora]:
        """Some of the session's adapters, loaded without waiting for memory."""
        found: list[Lora] = []
        for adapter in list(self._session.adapters)[:_MAX_ADAPTERS]:
            try:
                opened.enter_context(self._session.adapters.use(adapter.name, lambda: True))
                found.append(read_adapter(adapter.source, adapter.scale))
            except (AdapterRefused, Cancelled):
                continue
        return found


class _StoppableEngine(EngineWrapper):
    """Its steps end between two layers when idle work must stop."""

    def __init__(self, engine: Engine, worker: IdleWorker, ended: threading.Event) -> None:
        super().__init__(engine)
        self._worker, self._ended = worker, ended

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:  # noqa: ARG002
        if self._ended.is_set() or not self._worker.may_continue():
            raise Cancelled("Idle work was stopped.")
        with taking(IDLE):
            return super().step(rows, self._ended.is_set)
