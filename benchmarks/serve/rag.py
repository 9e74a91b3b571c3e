"""`python -m benchmarks serve --workload rag`: questions over a library, from clients that paste passages themselves.

Several clients of the `openai` package ask `rekindle serve` at once, each in its own template: nothing says what is a
passage. The same requests come with reused passages (`approximate`), with prefix caching (`exact`) and with everything
computed (`off`), in turns, each with an empty cache:

first    nothing is known
known    every passage that is asked for stood in an earlier prompt, among others
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, TableRow, Units, about, interval, rotated, scratch
from benchmarks.chunks.modes import require_chunk_reuse
from benchmarks.models import load
from benchmarks.personal import Person, personal_sets
from rekindle.core.document import Quote
from rekindle.core.request import ReuseLevel
from rekindle.errors import InvalidSetting
from rekindle.server.serve import Server
from rekindle.server.service import DEFAULT_PARALLEL
from rekindle.session.session import Session
from rekindle.settings import ServerSettings

CLIENTS = 4
QUESTIONS, QUICK_QUESTIONS = 16, 4  # of each part
TOP_K, QUICK_TOP_K = 5, 3
REPLY_TOKENS = 16
LEVELS: tuple[ReuseLevel, ...] = ("approximate", "exact", "off")
_TEMPLATES = (  # of clients; each has one
    "Context information is below.\n---\n{passages}\n---\nAnswer the query from it.\nQuery: {question}",
    "<documents>\n{passages}\n</documents>\n\nQuestion: {question}\nShort answer:",
    "You may use these notes:\n\n{passages}\n\nMy question is: {question}",
)
_PATIENCE_SECONDS = 600.0
_RESAMPLES = 2_000


@dataclass(frozen=True)
class RagQuestion:
    """A question, and what a client pastes for it."""

    question: str
    quotes: tuple[Quote, ...]
    template: str

    @property
    def messages(self) -> list[dict[str, str]]:
        passages = "\n\n".join(quote.shown for quote in self.quotes)
        return [{"role": "user", "content": self.template.format(passages=passages, question=self.question)}]


_WARM_UP = RagQuestion("Why?", (), _TEMPLATES[0])


@dataclass(frozen=True)
class RagReply:
    """A reply as the client saw it, with the marks that it has."""

    first_token_seconds: float
    text: str
    prompt_tokens: int
    computed: int
    from_chunks: int
    recomputed: int
    miss: str | None  # why not more was reused


@dataclass(frozen=True)
class RagLoad:
    """All replies of one part, in the order of the requests."""

    replies: tuple[RagReply, ...]
    seconds: float

    @property
    def requests_per_s(self) -> float:
        return len(self.replies) / self.seconds


Loads = dict[ReuseLevel, RagLoad]


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything, over loopback. The model is loaded before."""
    advance("load the model")
    people = [person for some in personal_sets(options.data) for person in some.people]
    engine = load(options)
    require_chunk_reuse(engine)
    fields = {"workload": "rag", "parallel": DEFAULT_PARALLEL}
    units = Units("serve", options, about(engine, options) | fields, advance)
    found: dict[tuple[str, str], list[RagLoad]] = {}
    with scratch() as folder:
        session = Session(engine, cache=folder, disk_limit="90%", answers="off", parallel=DEFAULT_PARALLEL)
        with Server(session, ServerSettings(port=0)).running() as url:  # closes the session
            measure = _RagMeasure(session, url, people, options, units.advance)
            for turn in range(options.rounds(2, quick=1)):
                for part in ("first", "known"):
                    loads = units.one(f"{part}, round {turn + 1}", Loads, partial(measure.part, part, turn))
                    for level, load_of in (loads or {}).items():
                        found.setdefault((part, level), []).append(load_of)
    engine.close()
    report = units.report()
    add_rag_rows(report, found, options.seed)
    return report


@dataclass
class _RagMeasure:
    """The parts of the bench, on one server."""

    session: Session
    url: str
    people: Sequence[Person]
    options: BenchOptions
    advance: Advance
    asked: dict[int, list[RagQuestion]] = field(default_factory=dict)  # in each round

    def part(self, part: str, turn: int) -> Loads:
        """The same requests at all levels, in turns."""
        if not self.asked:
            for level in LEVELS:  # the first of its kind is always slower
                _Client(self.url, self.session.engine.name, level, "warm-up").ask_all([_WARM_UP] * 2)
        if turn not in self.asked:
            most = max(self.people, key=lambda one: len(one.questions))
            person = most if turn == 0 else self.people[turn % len(self.people)]
            self.asked[turn] = _questions(self.session, person, self.options, turn)
        asked = self.asked[turn]
        half = len(asked) // 2
        some, loads = (asked[:half] if part == "first" else asked[half:]), {}
        for level in rotated(LEVELS, turn):
            self.advance(f"{part}, {level}: {len(some)} questions")
            client = _Client(self.url, self.session.engine.name, level, f"{turn}-{part}-{level}")
            if part == "known":
                client.ask_all(_all_passages(some))
                self.session.flush()
            loads[level] = client.ask_all(some)
            self.session.flush()
            self.advance(f"{part}, {level}: {loads[level].requests_per_s:.3f} requests/s")
        return loads


def _all_passages(asked: Sequence[RagQuestion]) -> list[RagQuestion]:
    """Prompts that have every passage of some questions once, in another order."""
    quotes = list(dict.fromkeys(quote for one in asked for quote in one.quotes))
    random.Random(0).shuffle(quotes)
    size = len(asked[0].quotes)
    groups = [tuple(quotes[place : place + size]) for place in range(0, len(quotes), size)]
    return [RagQuestion("What is this about?", group, _TEMPLATES[0]) for group in groups]


def _questions(session: Session, person: Person, options: BenchOptions, turn: int) -> list[RagQuestion]:
    """The questions of one person, with the passages that are found for them."""
    count = 2 * (QUICK_QUESTIONS if options.quick else QUESTIONS)
    tenant = f"rag-{turn}"
    session.ingest(documents=person.documents, tenant=tenant)
    asked = []
    for number, question in enumerate(person.questions[:count]):
        top_k = QUICK_TOP_K if options.quick else TOP_K
        quotes = session.prepare(question.text, top_k=top_k, tenant=tenant, max_tokens=1).request.quotes
        asked.append(RagQuestion(question.text, tuple(quotes), _TEMPLATES[number % len(_TEMPLATES)]))
    if len(asked) < 2:
        raise InvalidSetting("The data has nobody with two questions.")
    return random.Random(options.seed + turn).sample(asked, len(asked))


class _Client:
    """Clients of the `openai` package that ask for one level of reuse, with a cache of their own."""

    def __init__(self, url: str, model: str, level: ReuseLevel, salt: str) -> None:
        self._url, self._model, self._level, self._salt = url, model, level, salt

    def ask_all(self, asked: Sequence[RagQuestion]) -> RagLoad:
        """Ask them, several at once."""
        return asyncio.run(self._all(asked))

    async def _all(self, asked: Sequence[RagQuestion]) -> RagLoad:
        from openai import AsyncOpenAI

        replies: dict[int, RagReply] = {}
        numbered = iter(enumerate(asked))
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=_PATIENCE_SECONDS) as openai:

            async def one_client() -> None:
                for number, one in numbered:
                    replies[number] = await self._one(openai, one)

            started = time.perf_counter()
            await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
            seconds = time.perf_counter() - started
        return RagLoad(tuple(replies[number] for number in range(len(asked))), seconds)

    async def _one(self, openai: Any, one: RagQuestion) -> RagReply:
        """One reply, read as it comes."""
        started, first, text, tokens = time.perf_counter(), 0.0, "", 0
        marks: dict[str, Any] = {}
        stream = await openai.chat.completions.create(
            model=self._model,
            messages=one.messages,
            max_tokens=REPLY_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": REPLY_TOKENS, "cache_salt": self._salt, "rekindle": {"reuse": self._level}},
        )
        async for chunk in stream:
            piece = "".join(choice.delta.content or "" for choice in chunk.choices)
            first = first or (time.perf_counter() - started if piece else 0.0)
            text += piece
            marks = (chunk.model_extra or {}).get("rekindle") or marks
            tokens = chunk.usage.prompt_tokens if chunk.usage else tokens
        first = first or time.perf_counter() - started
        return RagReply(
            first, text, tokens, *(marks[name] for name in ("computed", "from_chunks", "recomputed", "miss"))
        )


def add_rag_rows(report: Report, found: dict[tuple[str, str], list[RagLoad]], seed: int) -> None:
    """Fields and table: every level of both parts against prefix caching."""
    parts = dict.fromkeys(part for part, _ in found)  # a run whose time was up has one
    rows = [_row(part, level, found, seed) for part in parts for level in LEVELS]
    requests = sum(row["requests"] for row in rows if row["reuse"] == "exact")
    report.fields |= {"clients": CLIENTS, "reply_tokens": REPLY_TOKENS, "requests": requests, "rows": rows}
    for row, against in ((row, row["vs_prefix"]) for row in rows if row["reuse"] != "exact"):
        theirs = next(other for other in rows if other["part"] == row["part"] and other["reuse"] == "exact")
        bar = row["part"] == "known" and row["reuse"] == "approximate"
        name = f"{row['part']}, {row['reuse']} / prefix caching"
        sooner = against["ttft"]
        report.rows += [
            TableRow(
                f"{name}: throughput",
                f"{row['requests_per_s']:.2f} requests/s, {row['tokens_per_s']:.1f} tokens/s",
                f"{theirs['requests_per_s']:.2f} requests/s, {theirs['tokens_per_s']:.1f} tokens/s",
                f"{against['throughput']:.2f}",
                ">= 1.6" if bar else "",
            ),
            TableRow(
                f"{name}: first token",
                f"{row['ttft_p50']:.2f} s",
                f"{theirs['ttft_p50']:.2f} s",
                f"{sooner['median']:.2f} times as soon ({sooner['low']:.2f} to {sooner['high']:.2f})",
                ">= 2" if bar else "",
            ),
            TableRow(
                f"{name}: computed tokens",
                f"{row['computed_tokens']:,}",
                f"{theirs['computed_tokens']:,}",
                f"{against['reduction']:.0%} less",
                ">= 51 %" if bar else "",
            ),
        ]


def _row(part: str, level: str, found: dict[tuple[str, str], list[RagLoad]], seed: int) -> dict[str, Any]:
    """One level in one part: what its clients saw, and that against prefix caching, request by request."""
    loads = found[part, level]
    own, prefix, computed = (_replies(found[part, other]) for other in (level, "exact", "off"))
    firsts = [reply.first_token_seconds for reply in own]
    sooner = [theirs.first_token_seconds / mine.first_token_seconds for mine, theirs in zip(own, prefix, strict=True)]
    draws = np.random.default_rng(seed).choice(sooner, (_RESAMPLES, len(sooner)))
    low, high = interval(np.median(draws, axis=1))
    speeds = [one.requests_per_s for one in loads]
    tokens, before = (sum(reply.computed for reply in replies) for replies in (own, prefix))
    against = {
        "throughput": statistics.median(
            a.requests_per_s / b.requests_per_s for a, b in zip(loads, found[part, "exact"], strict=True)
        ),
        "ttft": {"median": statistics.median(sooner), "low": low, "high": high},
        "reduction": 1.0 - tokens / before,
    }
    return {
        "part": part,
        "reuse": level,
        "requests": len(own),
        "requests_per_s": statistics.median(speeds),
        "tokens_per_s": statistics.median(speeds) * REPLY_TOKENS,
        "ttft_p50": statistics.median(firsts),
        "ttft_p99": float(np.percentile(firsts, 99, method="inverted_cdf")),
        "prompt_tokens": sum(reply.prompt_tokens for reply in own),
        "computed_tokens": tokens,
        "from_chunks": sum(reply.from_chunks for reply in own),
        "recomputed": sum(reply.recomputed for reply in own),
        "misses": dict(Counter(reply.miss for reply in own if reply.miss is not None)),
        "marked_share": statistics.fmean(reply.from_chunks > 0 for reply in own),
        "equal_share": statistics.fmean(a.text == b.text for a, b in zip(own, computed, strict=True)),
        "vs_prefix": against,
    }


def _replies(loads: Sequence[RagLoad]) -> list[RagReply]:
    return [reply for one in loads for reply in one.replies]
