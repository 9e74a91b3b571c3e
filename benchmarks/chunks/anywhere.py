"""`python -m benchmarks anywhere`: text that earlier prompts had, found in prompts that name no documents.

    agent   files that were read in another conversation are read again, in another order and behind other words
    rag     passages that were pasted into one template are pasted into another one

Each prompt is started in four ways, on the same store and the same tokens: computed; with prefix caching alone; with
what is found in it; and with its passages marked as documents. Nothing of it is kept. KL and top-1 are against
computing, along its own answer.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.base import Advance, BenchOptions, Report, TableRow, about
from benchmarks.chunks.modes import require_chunk_reuse
from benchmarks.models import load
from benchmarks.quality import POSITIONS, compare
from rekindle.core.chunk import MIN_CHUNK_TOKENS, PromptLayout
from rekindle.core.keys import TOKEN_BYTES, token_bytes
from rekindle.core.kv import Span
from rekindle.core.request import Request, ReuseLevel
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import PassageTrials, StartedPrompt
from rekindle.session.calibrate.prompts import PassagePrompt, distinct_prompts, donors_of, read_questions
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

PROMPTS, QUICK_PROMPTS = 12, 2
_EDGE_TOKENS = 2  # of a passage, which may merge with what is around it
_PREFIX, _TEXT, _DOCUMENTS = "prefix", "text", "documents"
Chat = list[dict[str, str]]


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure both kinds of prompts."""
    engine = load(options)
    require_chunk_reuse(engine)
    order = random.Random(options.seed)
    questions = read_questions(options.data)
    prompts = distinct_prompts(questions, order)[: options.rounds(PROMPTS, QUICK_PROMPTS)]
    donors = donors_of(prompts, questions, order)
    report = Report("anywhere", fields=about(engine, options))
    report.fields |= {"prompts": len(prompts), "rows": []}
    for kind, (earlier, later) in {"agent": (_first_work, _later_work), "rag": (_pasted, _quoted)}.items():
        advance(kind)
        with PassageTrials.warmed(engine, (), advance) as session:
            trial = _Trial(session, options)
            for donor in donors:
                trial.keep(_Asked.of(engine, earlier(donor), donor))
            for number, prompt in enumerate(prompts, start=1):
                advance(f"{kind}, prompt {number} of {len(prompts)}")
                trial.ask(_Asked.of(engine, later(prompt), prompt))
            report.fields["rows"] += [{"kind": kind, **row} for row in trial.rows()]
    engine.close()
    report.rows = [_table_row(row) for row in report.fields["rows"]]
    return report


def _table_row(row: Mapping[str, Any]) -> TableRow:
    return TableRow(
        f"{row['kind']}, {row['mode']}",
        f"KL {row['kl']:.4f} (median {row['kl_median']:.4f}), top-1 {row['top1']:.1%}",
        f"{row['found']:.0%} of the passages' tokens, {row['recomputed']:.0%} of them recomputed",
        f"first token {row['ttft_vs_none']:.2f} times as soon, {row['ttft_vs_prefix']:.2f} of prefix caching, "
        f"{row['reduction']:.0%} less computed",
    )


def _chat(system: str, *turns: str) -> Chat:
    """A chat that ends with the user."""
    roles = ["user" if place % 2 == 0 else "assistant" for place in range(len(turns))]
    said = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    return [{"role": "system", "content": system}, *said]


def _first_work(prompt: PassagePrompt) -> Chat:
    turns = ["Read the files in this folder and keep notes."]
    for number, quote in enumerate(prompt.quotes, start=1):
        turns += [f"read_file(notes/{number}.txt)", f"Result:\n{quote.shown}"]
    return _chat("You are an assistant who works with files.", *turns, "Noted.", prompt.question)


def _later_work(prompt: PassagePrompt) -> Chat:
    turns = ["The work so far, in short: all files were read once, and notes were kept. Go on where you were."]
    for number, quote in enumerate(prompt.quotes, start=1):
        turns += [
            f"I need number {number} once more, to be sure.",
            f"$ cat number-{number}.txt\n\n{quote.shown}\n\nexit code 0",
        ]
    last = f"Enough read. {prompt.question} Answer in one short sentence."
    return _chat("You are a careful agent. Check what you say against the files.", *turns, "I have what I need.", last)


def _pasted(prompt: PassagePrompt) -> Chat:
    context = "\n\n".join(quote.shown for quote in prompt.quotes)
    return _chat("You are helpful.", f"Context information is below.\n---\n{context}\n---\nQuery: {prompt.question}")


def _quoted(prompt: PassagePrompt) -> Chat:
    texts = [f"<document>\n{quote.shown}\n</document>" for quote in prompt.quotes]
    asked = f"Use only these documents.\n\n{' '.join(texts)}\n\nQuestion: {prompt.question}\nShort answer:"
    return _chat("Answer truthfully; say so if the documents do not tell.", asked)


@dataclass(frozen=True)
class _Asked:
    """A prompt, its tokens, and where its passages are."""

    request: Request
    tokens: tuple[int, ...]
    layout: PromptLayout

    @classmethod
    def of(cls, engine: Engine, chat: Chat, prompt: PassagePrompt) -> _Asked:
        request = Request.of(chat, max_tokens=1)
        tokens = encode_prompt(engine, request).tokens
        found = [_find(tokens, engine.tokenizer.encode(quote.shown)) for quote in prompt.quotes]
        spans = sorted((span for span in found if span is not None), key=lambda span: span.start)
        return cls(request, tokens, PromptLayout(spans[0].start, tuple(spans)))


def _find(tokens: Sequence[int], passage: Sequence[int]) -> Span | None:
    """Where a passage is, without the tokens at its edges."""
    inner = token_bytes(list(passage)[_EDGE_TOKENS:-_EDGE_TOKENS])
    place = token_bytes(tokens).find(inner)
    start, count = place // TOKEN_BYTES, len(inner) // TOKEN_BYTES
    return None if place < 0 or place % TOKEN_BYTES or count < MIN_CHUNK_TOKENS else Span(start, start + count)


class _Trial:
    """A session that knows the earlier prompts, and what was measured on it."""

    def __init__(self, session: Session, options: BenchOptions) -> None:
        self._session, self._engine, self._judges = session, session.engine, options.shape is None
        self._seen: dict[str, list[dict[str, float]]] = {_PREFIX: [], _TEXT: [], _DOCUMENTS: []}

    def keep(self, asked: _Asked) -> None:
        """Compute an earlier prompt, and keep it with its documents, so that both ways find it."""
        some = self._start(asked, "approximate", asked.layout, max_tokens=0)
        some.end(self._session.cache, keep=True)
        self._session.flush()
        self._session.cache.unpark()

    def ask(self, asked: _Asked) -> None:
        """Start a prompt in every way, and compare."""
        exact = self._start(asked, "off", None)
        started = {
            _PREFIX: self._start(asked, "exact", None),
            _TEXT: self._start(asked, "approximate", None),
            _DOCUMENTS: self._start(asked, "approximate", asked.layout),
        }
        near = compare(self._engine, exact, list(started.values())) if self._judges else [(0.0, 1.0)] * len(started)
        tokens, prefix = sum(map(len, asked.layout.chunks)), started[_PREFIX]
        for (mode, some), (kl, top1) in zip(started.items(), near, strict=True):
            self._seen[mode].append(
                {
                    "kl": kl,
                    "top1": top1,
                    "found": min(1.0, some.reuse.from_chunks / tokens),
                    "recomputed": some.reuse.recomputed / max(1, some.reuse.from_chunks),
                    "computed_tokens": some.reuse.computed,
                    "reduction": 1.0 - some.reuse.computed / prefix.reuse.computed,
                    "ttft_vs_none": exact.seconds / some.seconds,
                    "ttft_vs_prefix": prefix.seconds / some.seconds,
                }
            )
        for some in (exact, *started.values()):
            some.end(self._session.cache, keep=False)

    def rows(self) -> list[dict[str, Any]]:
        """The means over the prompts, a row for each way."""
        return [
            {
                "mode": mode,
                **{name: statistics.fmean(one[name] for one in seen) for name in seen[0]},
                "kl_median": statistics.median(one["kl"] for one in seen),
                **{name: statistics.median(one[name] for one in seen) for name in ("ttft_vs_none", "ttft_vs_prefix")},
            }
            for mode, seen in self._seen.items()
        ]

    def _start(
        self, asked: _Asked, reuse: ReuseLevel, layout: PromptLayout | None, max_tokens: int = 1
    ) -> StartedPrompt:
        request = Request.of(asked.request.prompt, max_tokens=max_tokens, reuse=reuse)
        began = time.perf_counter()
        prefill = self._session.cache.prepare(request, asked.tokens, lambda: False, None, layout)
        prefill.run(len(asked.tokens) + POSITIONS, lambda: False)
        seconds = time.perf_counter() - began
        prefill.result.context.land()
        return StartedPrompt(prefill.result, prefill.reuse, seconds, 0.0, 0.0, fallback=False)
