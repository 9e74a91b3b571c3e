"""What chunk reuse costs on a model of a well-known shape: time alone, with random weights and random tokens.

Everything counts: looking up, loading from host memory, the question's pass, choosing, recomputing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, TableRow, Units, scratch
from benchmarks.models import load
from rekindle.core.chunk import PromptLayout
from rekindle.core.kv import Span
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.session.session import Session

CHUNKS = 16
HEAD_TOKENS, MARK_TOKENS, QUESTION_TOKENS = 32, 4, 64
DONOR_CHUNKS = 4
BUDGET = 0.3
SIZES, QUICK_SIZES = (8192, 16384), (2048,)
BARS = {8192: ">= 2.0", 16384: ">= 2.3"}


@dataclass(frozen=True)
class Shaped:
    """Made-up prompts of one size: what the chunks were cached in, and the one that is measured."""

    donors: list[tuple[list[int], PromptLayout]]
    tokens: list[int]
    prompt_layout: PromptLayout


def make(tokens: int, vocabulary: int, seed: int) -> Shaped:
    """A prompt of about `tokens` tokens in sixteen chunks, each stored from a prompt with other neighbours."""
    random = np.random.default_rng(seed)

    def some(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, vocabulary, count)]

    rest = tokens - HEAD_TOKENS - QUESTION_TOKENS - CHUNKS * MARK_TOKENS
    head, chunks = some(HEAD_TOKENS), [some(rest // CHUNKS) for _ in range(CHUNKS)]
    marks = [some(MARK_TOKENS) for _ in range(CHUNKS)]
    order = random.permutation(CHUNKS).tolist()
    groups = [order[start : start + DONOR_CHUNKS] for start in range(0, CHUNKS, DONOR_CHUNKS)]
    donors = [_prompt(head, [chunks[i] for i in group], marks, some(QUESTION_TOKENS)) for group in groups]
    return Shaped(donors, *_prompt(head, chunks, marks, some(QUESTION_TOKENS)))


def _prompt(
    head: list[int], chunks: list[list[int]], marks: list[list[int]], question: list[int]
) -> tuple[list[int], PromptLayout]:
    tokens, spans = list(head), []
    for chunk, mark in zip(chunks, marks, strict=False):
        tokens += mark
        spans.append(Span(len(tokens), len(tokens) + len(chunk)))
        tokens += chunk
    return tokens + question, PromptLayout(len(head), tuple(spans))


def run(options: BenchOptions, advance: Advance) -> Report:
    """Computing everything against chunk reuse, on a model of a shape."""
    advance("build the model")
    engine = load(options)
    sizes = QUICK_SIZES if options.quick else SIZES
    with_what = {"model": engine.name, "device": engine.device, "dtype": engine.layout.dtype}
    units = Units("chunks", options, with_what, advance)
    try:
        jobs = {size: partial(_of_size, engine, size, options) for size in sizes}
        measured = {str(size): units.one(f"{size} tokens", dict[str, Any], job) for size, job in jobs.items()}
    finally:
        engine.close()
    report, found = units.report(), {size: one for size, one in measured.items() if one is not None}
    reason = "random weights say nothing about quality"
    report.fields |= {"rows": [], "rows_reason": reason, "best": None, "best_vs_cachecraft": None, "sizes": found}
    for size, result in found.items():
        times = f"{result['reuse_s'] * 1e3:,.0f} ms", f"{result['full_s'] * 1e3:,.0f} ms"
        report.rows.append(
            TableRow(f"{result['tokens']:,} tokens", *times, f"{result['reuse_vs_full']:.2f}", BARS.get(int(size), ""))
        )
        if result["reuse_vs_full_device"] is not None:
            busy = f"{result['reuse_device_s'] * 1e3:,.0f} ms", f"{result['full_device_s'] * 1e3:,.0f} ms"
            ratio = f"{result['reuse_vs_full_device']:.2f}"
            report.rows.append(TableRow(f"{result['tokens']:,} tokens, device busy", *busy, ratio))
    return report


def _of_size(engine: Engine, size: int, options: BenchOptions) -> dict[str, Any]:
    """Computing everything, and chunk reuse, in turns; and how long the device is busy with each."""
    shaped = make(size, engine.tokenizer.vocabulary_size, options.seed)
    with scratch() as folder:
        settings: dict[str, Any] = {"memory_limit": "16GB", "disk_limit": "20GB", "recompute_budget": BUDGET}
        with Session(engine, cache=folder, reuse="approximate", **settings) as session:
            return _measure(session, shaped, options.rounds(7))


def _measure(session: Session, shaped: Shaped, rounds: int) -> dict[str, Any]:
    for tokens, prompt_layout in shaped.donors:
        _fill(session, tokens, prompt_layout, "approximate", keep=True)
    session.flush()
    for _ in range(2):  # the first ones set things up
        _fill(session, shaped.tokens, shaped.prompt_layout, "off")
        _fill(session, shaped.tokens, shaped.prompt_layout, "approximate")
    full, reused, loads = [], [], []
    for _ in range(rounds):
        full.append(_fill(session, shaped.tokens, shaped.prompt_layout, "off")["seconds"])
        result = _fill(session, shaped.tokens, shaped.prompt_layout, "approximate")
        reused.append(result["seconds"])
        loads.append(result["load_seconds"])
    ratios = [a / b for a, b in zip(full, reused, strict=True)]
    busy = {
        level: device_seconds(lambda level=level: _fill(session, shaped.tokens, shaped.prompt_layout, level))
        for level in ("off", "approximate")
    }
    device = busy["off"] / busy["approximate"] if busy["off"] and busy["approximate"] else None
    return {
        "tokens": len(shaped.tokens),
        "from_chunks": result["from_chunks"],
        "recomputed": result["recomputed"],
        "full_s": statistics.median(full),
        "reuse_s": statistics.median(reused),
        "load_s": statistics.median(loads),
        "reuse_vs_full": statistics.median(ratios),
        "full_device_s": busy["off"],
        "reuse_device_s": busy["approximate"],
        "reuse_vs_full_device": device,
    }


def _fill(
    session: Session, tokens: list[int], prompt_layout: PromptLayout, level: str, *, keep: bool = False
) -> dict[str, Any]:
    """Prefill a prompt as a session does up to the first token's logits, and drop it; returns the outcome."""
    cache = session.cache
    request = Request(tuple(tokens), reuse=level)  # type: ignore[arg-type]
    started = time.perf_counter()
    with cache.prepare(request, tokens, lambda: False, None, prompt_layout) as prefill:
        prefill.run(len(tokens) + 1, lambda: False)
        seconds = time.perf_counter() - started
        result, reuse = prefill.result, prefill.reuse
        prefill.context.passing = not keep
    return {
        "seconds": seconds,
        "load_seconds": result.load_seconds,
        "from_chunks": reuse.from_chunks,
        "recomputed": reuse.recomputed,
    }


def device_seconds(work: Any) -> float | None:
    """For how long a CUDA device is busy with kernels and copies; None without one.

    What it would take if every launch were there in time: as from a recorded graph.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6
