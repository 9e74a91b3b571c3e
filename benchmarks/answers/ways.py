"""The ways of answering that `python -m benchmarks answers` compares, each with a cache and a library of its own.

none, kv-only, answers-only, predicted, kv+answers, kv+predicted   the baselines: KV and answers as questions come,
                    answers to foreseen questions, and both pairs; stored answers by similarity alone, as published
percache            as published: Q, K and V of passages, answers, and foreseen questions in both
ours-verified       KV, foreseen questions, warm passages; stored answers are drafts that the model checks
ours-direct         all that may change an answer is switched on, too: the stored answer is given where the guard
                    agrees, and passages of other prompts are reused (reuse=approximate)
ours-direct-exact   the same without that; ours-unguarded: and without the guard

All answer the same questions with the same loaded model, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from benchmarks.baselines.qkv_engine import QkvReuse
from benchmarks.baselines.qkv_tree import QkvTree
from benchmarks.baselines.qkv_tree import answer as answer_by_qkv
from benchmarks.personal import Person, PersonalSet
from rekindle.answers.bank import AnswerBank, BankQuestion
from rekindle.answers.bank_rows import AnswerText, BankEntry
from rekindle.core.reply import QuestionOrigin, Reply, Reuse, StoredAnswer, Timings, Usage
from rekindle.engine.base import Engine
from rekindle.engine.hf.engine import HfEngine
from rekindle.session.ask import Prepared
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

TOP_K = 5
NEW_TOKENS = 64  # of every answer, no more and no fewer
PUBLISHED_SIMILARITY = 0.85


@dataclass(frozen=True)
class Way:
    """One way of answering.

    reuse, answers  what it reuses; `guarded`: stored answers must pass the guard
    foresees     answers: foreseen questions are answered; both: their KV is kept, too
    """

    name: str
    reuse: str = "off"
    answers: str = "off"
    guarded: bool = False
    foresees: str = ""
    qkv: bool = False
    ours: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Of its session."""
        settings: dict[str, Any] = {"reuse": self.reuse, "answers": self.answers}
        return settings | ({} if self.ours else {"similarity_threshold": PUBLISHED_SIMILARITY})


NONE, KV_ONLY, PERCACHE, VERIFIED, DIRECT = "none", "kv-only", "percache", "ours-verified", "ours-direct"
KV_ANSWERS, DIRECT_EXACT, UNGUARDED = "kv+answers", "ours-direct-exact", "ours-unguarded"
WAYS = (
    Way(NONE),
    Way(KV_ONLY, "exact"),
    Way("answers-only", answers="direct"),
    Way("predicted", answers="direct", foresees="answers"),
    Way(KV_ANSWERS, "exact", answers="direct"),
    Way("kv+predicted", "exact", answers="direct", foresees="answers"),
    Way(PERCACHE, answers="direct", foresees="both", qkv=True),
    Way(VERIFIED, "exact", answers="verified", guarded=True, foresees="both", ours=True),
    Way(DIRECT, "approximate", answers="direct", guarded=True, foresees="both", ours=True),
    Way(DIRECT_EXACT, "exact", answers="direct", guarded=True, foresees="both", ours=True),
    Way(UNGUARDED, "exact", answers="direct", foresees="both", ours=True),
)


@dataclass
class AnswerResult:
    """The outcome of one question in one way."""

    seconds: float
    text: str
    prompt_tokens: int
    known_tokens: int
    drafted_tokens: int
    stored: StoredAnswer | None


@dataclass
class WayRun:
    """One way of answering, with its session, for one person."""

    way: Way
    session: Session
    tree: QkvTree | None = None
    results: list[AnswerResult] = field(default_factory=list)
    idle_seconds: float = 0.0

    @classmethod
    def open(cls, way: Way, engine: Engine, folder: Path, limit_bytes: int) -> WayRun:
        """A run with its own folders; what is in them is used."""
        session = Session(
            engine,
            cache=str(folder / "cache"),
            library=str(folder / "library"),
            memory_limit="0",
            disk_limit=limit_bytes,
            **way.settings,
        )
        change_banks(session, take_cut)
        if not way.guarded:
            change_banks(session, unguard)
        return cls(way, session, QkvTree(folder / "qkv", limit_bytes) if way.qkv else None)

    def ask(self, question: str) -> AnswerResult:
        """Answer a question; what it took, from the question to the last token."""
        started = time.perf_counter()
        reply: Reply = self.session.ask(question, **_options()) if self.way.ours else self._as_published(question)
        seconds = time.perf_counter() - started
        stored = getattr(reply, "stored", None)
        usage = reply.usage
        results = AnswerResult(
            seconds, reply.text, usage.prompt_tokens, usage.cached_tokens, usage.drafted_tokens, stored
        )
        self.session.flush()
        self.results.append(results)
        return results

    def _as_published(self, question: str) -> Reply:
        """Give the stored answer, or write one token by token: drafts are ours."""
        started = time.perf_counter()
        prepared = self.session.prepare(question, **_options())
        reply = prepared.stored_reply
        if reply is None and self.tree is not None:
            reply = self._computed_by_qkv(prepared, self.tree)
        elif reply is None:
            reply = self.session.answer(replace(prepared.request, drafts=(), answers="off")).reply
        if prepared.consulted is not None:
            self.session.answers.keep(prepared.consulted, reply, time.perf_counter() - started)
        return prepared.answer(reply, 0.0)

    def _computed_by_qkv(self, prepared: Prepared, tree: QkvTree) -> Reply:
        engine = self.session.engine
        assert isinstance(engine, HfEngine)
        prompt = encode_prompt(engine, prepared.request)
        cuts = [0, prompt.head, *(used.span.stop for used in prompt.quoted)]
        segments = [prompt.tokens[a:b] for a, b in pairwise(cuts)]
        done = answer_by_qkv(QkvReuse(engine), tree, segments, prompt.tokens[cuts[-1] :], NEW_TOKENS)
        usage = Usage(done.prompt_tokens, len(done.tokens), cached_tokens=done.known_tokens)
        timings = Timings(done.first_token_seconds, done.seconds - done.first_token_seconds, None)
        reuse = Reuse("exact", done.prompt_tokens - done.known_tokens)
        return Reply(engine.tokenizer.decode(done.tokens), done.tokens, "length", usage, timings, reuse)

    def learn(self, entries: Sequence[BankEntry]) -> None:
        """Know foreseen questions that another run answered, in the layers that this way has.

        Its idle work counts the seconds that its layers take here, and those that answering took there.
        """
        for entry in entries:
            started = time.perf_counter()
            prepared = self.session.prepare(entry.question, **_options())
            if self.tree is not None:
                self._computed_by_qkv(prepared, self.tree)  # attention and MLP run over all of it
            elif self.way.foresees == "both":
                options: dict[str, Any] = {**_options(), "max_tokens": 0, "min_tokens": 0, "answers": "off"}
                self.session.answer(self.session.prepare(entry.question, **options).request)
            self.idle_seconds += time.perf_counter() - started + (0.0 if entry.answer is None else entry.answer.seconds)
            if prepared.consulted is not None and entry.answer is not None:
                self.session.answers.bank().keep(prepared.consulted.question, entry.answer, entry.origin)
        self.session.flush()

    def close(self) -> None:
        """Close the session; the engine stays."""
        self.session.close()


def _options() -> Mapping[str, Any]:
    return {"top_k": TOP_K, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}


Kind = Literal["first", "again", "near"]  # asked for the first time; again in other words; one that only looks alike
LAG = 2  # number of questions between a question and its return


@dataclass(frozen=True)
class Asked:
    """A question of the stream. `gold` is the right answer; None if there is none."""

    text: str
    gold: str | None
    kind: Kind


def stream(person: Person, max_count: int) -> list[Asked]:
    """The first `max_count` questions of a person, each followed by its returns a little later.

    Questions that come back are preferred, so that a short stream has some.
    """
    back = {again.of for again in person.revisits}
    chosen = sorted(range(len(person.questions)), key=lambda i: (person.questions[i].id not in back, i))[:max_count]
    placed: list[tuple[float, Asked]] = []
    for place, number in enumerate(sorted(chosen)):
        question = person.questions[number]
        placed.append((place, Asked(question.text, question.answer, "first")))
        returns = [again for again in person.revisits if again.of == question.id]
        for step, again in enumerate(sorted(returns, key=lambda again: not again.same), start=1):
            kind: Kind = "again" if again.same else "near"
            placed.append((place + LAG + step / 10, Asked(again.text, again.answer, kind)))
    return [asked for _, asked in sorted(placed, key=lambda pair: pair[0])]


def people(sets: list[PersonalSet], users: int) -> list[tuple[str, Person]]:
    """The first users with questions of each set, by the name of their set; first those whose questions come back."""
    found = []
    for some in sets:
        asking = [person for person in some.people if person.questions]
        ordered = sorted(asking, key=lambda person: not person.revisits)
        found += [(some.name, person) for person in ordered[:users]]
    return found


def unguard(bank: AnswerBank) -> AnswerBank:
    """The bank without the guard, as published: answers are chosen by similarity alone."""
    setattr(bank, "difference", lambda _question, _entry: None)  # noqa: B010  (of this bank alone)
    return bank


def take_cut(bank: AnswerBank) -> AnswerBank:
    """The bank that gives answers which the token limit cut off, too: here all of them have the same length."""
    if not isinstance(bank.keep, partial):
        setattr(bank, "keep", partial(_keep_as_whole, bank.keep))  # noqa: B010  (of this bank alone)
    return bank


def _keep_as_whole(
    keep: Callable[..., int | None], question: BankQuestion, answer: AnswerText | None, origin: QuestionOrigin = "user"
) -> int | None:
    return keep(question, answer and replace(answer, finish="stop"), origin)


def change_banks(session: Session, change: Callable[[AnswerBank], AnswerBank]) -> None:
    """The same for every bank of a session."""
    answers: Any = session.answers
    opened = answers.bank
    answers.bank = lambda *whose: change(opened(*whose))
