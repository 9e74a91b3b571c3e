"""`python -m benchmarks slower`: a cache is never slower than none.

Each mechanism against computing the same prompt in the same process, in turns: `first` where no load was measured and
all are tried, `later` with what this run has learned. Nothing that is asked is kept, so that every turn finds the same.
Deltas of adapters and KV from an origin, over loopback and over a slow link, are measured unless the run is quick.
A row fails where the lower end of the interval of ours / computing exceeds 1.05 and the median loss 3 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.adapters.data import read_adapters
from benchmarks.base import Advance, BenchOptions, Report, TableRow, Units, about, interval, rotated, scratch
from benchmarks.data import texts
from benchmarks.models import load
from benchmarks.prompts import tokens_for
from benchmarks.stream.shaped_origin import ShapedOrigin
from benchmarks.stream.traces import Trace
from rekindle.cache.cost import Costs, prior_rates
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import AdapterRefused
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.signing import SigningKey
from rekindle.session.prompt import encode_prompt
from rekindle.session.publish import computed, levels_of
from rekindle.session.session import Session

SIZES, QUICK_SIZES, ACCELERATOR_SIZES = (64, 256, 1024, 4096), (64, 256), (64, 256, 1024, 4096, 16_384, 32_768)
MAX_RATIO, MAX_LOSS_MS = 1.05, 3.0
_ENDING = 20  # tokens behind a known prefix
_PASSAGES = 4
_REPLY = 48  # tokens of a drafted reply
_SAMPLES = 2000  # of the bootstrap
_PREFIXES: dict[str, dict[str, Any]] = {
    "prefix from memory": {"memory_limit": "4GB"},
    "prefix from disk": {"memory_limit": "0"},
    "quantized prefix from disk": {"memory_limit": "0", "reuse": "quantized"},
}
_DELTAS = {"lossless delta": "exact", "quantized delta": "quantized"}  # and the reuse that stores it
_ORIGINS = {  # the reuse, and bytes a second of the link
    "remote KV": ("exact", 1e9),
    "quantized remote KV": ("quantized", 1e9),
    "remote KV, slow link": ("exact", 2e5),
}

Job = Callable[[], tuple[float, bool]]  # the seconds it took, and whether something was reused
Turn = dict[str, tuple[float, bool]]  # of each job
Group = Callable[[Engine, BenchOptions, int], AbstractContextManager[dict[str, Job]]]
COMPUTING = "computing"


@dataclass(frozen=True)
class SlowerRow:
    """One mechanism at one size. `interval` is that of the median ratio, 95 %."""

    mechanism: str
    request: str  # first, or later
    tokens: int
    pairs: int
    ours_s: float
    computing_s: float
    ratio: float
    interval: tuple[float, float]
    loss_ms: float
    reused: float  # share of the requests that reused something
    fails: bool


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure every mechanism at every size that fits the model's context."""
    advance("load the model")
    engine = load(options)
    on_cpu = engine.device == "cpu"
    sizes = QUICK_SIZES if options.quick else SIZES if on_cpu else ACCELERATOR_SIZES
    rows: list[SlowerRow] = []
    groups = {"prefixes": _prefixes, "chunks": _chunks, "drafts": _drafts, "deltas": _deltas, "remote KV": _remote}
    largest = min(options.tokens or sizes[-1], engine.context_tokens - 4 * _ENDING - _REPLY)
    units = Units("slower", options, about(engine, options), advance)
    for size in (one for one in sizes if one <= largest):
        for name, opened in list(groups.items())[: 3 if options.quick else None]:
            begin = partial(_turns, opened, engine, options, size)
            rows += _rows(units.steps(f"{name}, {size} tokens", Turn, options.rounds(15), begin), size, options)
    engine.close()
    report = units.report()
    report.fields |= {"largest_tokens": max((row.tokens for row in rows), default=None)}
    report.fields |= {"rows": [asdict(row) for row in rows], "failures": sum(row.fails for row in rows)}
    report.rows += [_table_row(row) for row in rows]
    return report


@contextmanager
def _turns(opened: Group, engine: Engine, options: BenchOptions, size: int) -> Iterator[Callable[[int], Turn]]:
    """Every job of a group once a turn, after one turn that does not count."""
    with opened(engine, options, size) as jobs:

        def measure(turn: int) -> Turn:
            return {name: jobs[name]() for name in rotated(list(jobs), turn)}

        measure(0)
        yield measure


def _rows(turns: Sequence[Turn], size: int, options: BenchOptions) -> list[SlowerRow]:
    """Every job against computing."""
    computing = [turn[COMPUTING][0] for turn in turns if turn]
    found = []
    for name in (name for name in (turns[0] if turns else ()) if name != COMPUTING):
        measured = [turn[name] for turn in turns]
        ours = [seconds for seconds, _ in measured]
        ratios = np.array(ours) / np.array(computing)
        draws = np.random.default_rng(options.seed).integers(0, len(ratios), (_SAMPLES, len(ratios)))
        low, high = interval(np.median(ratios[draws], axis=1))
        loss_ms = 1e3 * statistics.median(a - b for a, b in zip(ours, computing, strict=True))
        mechanism, _, request = name.rpartition(", ")
        medians = statistics.median(ours), statistics.median(computing), float(np.median(ratios))
        reused = statistics.fmean(some for _, some in measured)
        fails = low > MAX_RATIO and loss_ms > MAX_LOSS_MS
        found.append(SlowerRow(mechanism, request, size, len(ours), *medians, (low, high), loss_ms, reused, fails))
    return found


def _table_row(row: SlowerRow) -> TableRow:
    low, high = row.interval
    return TableRow(
        f"{row.mechanism}, {row.tokens:,} tokens, {row.request}",
        f"{row.ours_s * 1e3:,.1f} ms, {row.reused:.0%} reused",
        f"{row.computing_s * 1e3:,.1f} ms",
        f"{row.ratio:.2f} ({low:.2f}-{high:.2f}), {row.loss_ms:+.1f} ms",
        "FAILS" if row.fails else f"<= {MAX_RATIO} or {MAX_LOSS_MS:.0f} ms",
    )


class _Asking:
    """Requests to a session that keeps nothing of them."""

    def __init__(self, session: Session, learned: Costs | None = None) -> None:
        self._session, self._prior = session, prior_rates(session.engine)
        self._learned = learned or Costs(self._prior)

    def jobs(self, mechanism: str, ask: Job) -> dict[str, Job]:
        return {f"{mechanism}, first": lambda: self.first(ask), f"{mechanism}, later": lambda: self.later(ask)}

    def first(self, ask: Job) -> tuple[float, bool]:
        """With costs that know what computing takes, and of loads nothing."""
        return self._with(Costs(self._prior, {"compute": self._learned.as_json()["compute"]}), ask)

    def later(self, ask: Job) -> tuple[float, bool]:
        return self._with(self._learned, ask)

    def computing(self, ask: Job) -> dict[str, Job]:
        return {COMPUTING: lambda: self.later(ask)}

    def prefill(self, request: Request) -> tuple[float, bool]:
        """The time until the first logits are there."""
        session, cache = self._session, self._session.cache
        cache.unpark()
        with session.adapters.use(request.adapter) as adapter:
            started = time.perf_counter()
            request = replace(request, adapter=adapter)
            prompt = encode_prompt(session.engine, request)
            prefill = cache.prepare(request, prompt.tokens, lambda: False, None, prompt.prompt_layout)
            prefill.run(len(prompt.tokens) + 1, lambda: False)
            seconds = time.perf_counter() - started
            prefill.context.passing = True
            prefill.commit()
            return seconds, prefill.reuse.reused > 0

    def _with(self, costs: Costs, ask: Job) -> tuple[float, bool]:
        self._session.flush()
        self._session.cache.kv.costs = costs
        return ask()


@contextmanager
def _prefixes(engine: Engine, options: BenchOptions, size: int) -> Iterator[dict[str, Job]]:
    """A prefix that every tier knows, with an ending that none does."""
    prefix = tokens_for(engine, options, size + _ENDING)
    known, unknown = Request.of(prefix, max_tokens=1), Request.of(prefix, max_tokens=1, reuse="off")
    jobs: dict[str, Job] = {}
    learned = Costs(prior_rates(engine))
    with ExitStack() as opened:
        for name, settings in _PREFIXES.items():
            folder = opened.enter_context(scratch())
            session = opened.enter_context(Session(engine, cache=folder, disk_limit="90%", **settings))
            session.warm(prefix[:size])
            asking = _Asking(session, learned)
            jobs |= asking.computing(partial(asking.prefill, unknown)) if not jobs else {}
            jobs |= asking.jobs(name, partial(asking.prefill, known))
        yield jobs


@contextmanager
def _chunks(engine: Engine, options: BenchOptions, size: int) -> Iterator[dict[str, Job]]:
    """Passages that another prompt had in another order."""
    if engine.capabilities.recompute == "none" or not engine.capabilities.spans:
        yield {}
        return
    words = " ".join(texts(options.data)).split()
    words *= 1 + size // len(words)
    each = max(24, size // _PASSAGES)
    passages, place = list[str](), 0
    for _ in range(max(2, size // each)):
        count = each
        while len(engine.tokenizer.encode(" ".join(words[place : place + count]))) > 1.1 * each:
            count = int(0.95 * count)
        passages.append(" ".join(words[place : place + count]))
        place += count
    with scratch() as folder, Session(engine, cache=folder, disk_limit="90%", reuse="approximate") as session:
        question = "What do these passages say?"
        messages = [{"role": "user", "content": question}]
        session.warm([messages], documents=passages)
        asking = _Asking(session)
        known = Request.of(messages, documents=passages[::-1], max_tokens=1)
        unknown = Request.of(messages, documents=passages[::-1], max_tokens=1, reuse="off")
        yield {
            **asking.computing(partial(asking.prefill, unknown)),
            **asking.jobs("chunks", partial(asking.prefill, known)),
        }


@contextmanager
def _drafts(engine: Engine, options: BenchOptions, size: int) -> Iterator[dict[str, Job]]:
    """A reply that was given before, and one that goes on otherwise after every two tokens that it has in common."""
    prompt = tokens_for(engine, options, size)
    length: dict[str, Any] = {"max_tokens": _REPLY, "min_tokens": _REPLY}
    with scratch() as folder, Session(engine, cache=folder, disk_limit="90%") as session:
        right = session.generate(prompt, **length).tokens
        wrong = [token if place % 8 < 2 else (token + 1) % 256 for place, token in enumerate(right)]

        def reply(**drafts: Any) -> tuple[float, bool]:
            found = session.generate(prompt, **length, **drafts)
            return found.timings.decode_seconds, found.usage.drafted_tokens > 0

        asking = _Asking(session)
        yield {
            **asking.computing(reply),
            **asking.jobs("right drafts", lambda: reply(drafts=[right])),
            **asking.jobs("wrong drafts", lambda: reply(drafts=[wrong])),
        }


@contextmanager
def _deltas(engine: Engine, options: BenchOptions, size: int) -> Iterator[dict[str, Job]]:
    """A prefix under an adapter, stored as what differs from the same prefix without one."""
    prefix = tokens_for(engine, options, size + _ENDING)
    adapter = read_adapters(options.adapters)[0]
    jobs: dict[str, Job] = {}
    learned = Costs(prior_rates(engine))
    with ExitStack() as opened:
        for name, reuse in _DELTAS.items():
            settings: dict[str, Any] = {"memory_limit": "0", "reuse": reuse, "codec": "auto"}
            folder = opened.enter_context(scratch())
            session = opened.enter_context(Session(engine, cache=folder, disk_limit="90%", **settings))
            try:
                session.adapters.load(adapter.name, Path(adapter.path))
            except AdapterRefused:  # made for another model
                break
            session.warm(prefix[:size])
            session.warm(prefix[:size], adapter=adapter.name)
            asking = _Asking(session, learned)
            known = Request.of(prefix, max_tokens=1, adapter=adapter.name)
            unknown = replace(known, reuse="off")
            jobs |= asking.computing(partial(asking.prefill, unknown)) if not jobs else {}
            jobs |= asking.jobs(name, partial(asking.prefill, known))
        yield jobs


@contextmanager
def _remote(engine: Engine, options: BenchOptions, size: int) -> Iterator[dict[str, Job]]:
    """A prefix that only an origin has; it runs in a process of its own, behind a link of a chosen speed."""
    if engine.capabilities.opaque is not None or size < CHUNK_TOKENS:  # less is never published
        yield {}
        return
    prefix, key = tokens_for(engine, options, size + _ENDING), SigningKey.new()
    known, unknown = Request.of(prefix, max_tokens=1), Request.of(prefix, max_tokens=1, reuse="off")
    jobs: dict[str, Job] = {}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(scratch()))
        with Session(engine, cache="off") as session, computed(session, Request.of(prefix[:size])) as source:
            Publisher(folder, key).publish(source, levels_of("raw,quantized", session))
        for name, (reuse, rate) in _ORIGINS.items():
            origin = opened.enter_context(ShapedOrigin(folder))
            origin.begin(Trace(name, np.ones(1), np.full(1, rate)))
            settings: dict[str, Any] = {"origin": origin.url, "origin_keys": key.public, "reuse": reuse}
            settings["cache"] = opened.enter_context(scratch())
            asking = _Asking(opened.enter_context(Session(engine, **settings)))
            jobs |= asking.computing(partial(asking.prefill, unknown)) if not jobs else {}
            jobs[f"{name}, first"] = partial(_first_of_session, engine, settings, known)
            jobs[f"{name}, later"] = partial(asking.later, partial(asking.prefill, known))
        yield jobs


def _first_of_session(engine: Engine, settings: Mapping[str, Any], request: Request) -> tuple[float, bool]:
    """A request to a session that knows nothing of the link either, nor what layers cost."""
    with scratch() as home, mock.patch.dict("os.environ", REKINDLE_HOME=home), Session(engine, **settings) as session:
        asking = _Asking(session)
        return asking.first(partial(asking.prefill, request))
