"""`python -m benchmarks warmstart`: an adapter's first request over a context that only the model, or another adapter,
has computed.

That KV stands in for the adapter's own, and a share of it is computed with the adapter. Ways to choose the share:

leading            the first tokens
first-layers       all tokens, in the first layers only
seen               the tokens that the question attends to, as `chunks/select` finds them
seen+drift         the same; the others follow the mean change of those that are computed (`KvDrift`)
deviation+drift    of what the question attends to, what the adapter changes most in the first layers, which all
                   tokens pass

The first half of the texts compares the ways at one budget and chooses one; the second half shows that one at several.
Quality is judged on the reply that the full computation gives, which the model is made to follow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.adapters.data import encoded, read_adapters, read_material
from benchmarks.adapters.workload import INSTRUCTIONS, make_contexts
from benchmarks.base import Advance, BenchOptions, Report, TableRow, about
from benchmarks.models import load
from rekindle.core.adapter import Lora
from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Engine, EngineSequence, HeldKv, Row
from rekindle.engine.hooks import AttentionMap, KvDrift, Positions, Probe, Reading, look_layers
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.nearness import nearness

CONTEXT_TOKENS, REPLY_TOKENS = 192, 16
TEXTS, QUICK_TEXTS, QUICK_ADAPTERS = 2, 1, 2  # texts of each half
CHOOSING_BUDGET = 0.3
BUDGETS = (0.1, 0.2, 0.3, 0.5)
MAX_KL, MIN_TOP1 = 0.015, 0.95  # what quantized KV has to keep as well
_DEVIATION_LAYERS = range(1, 3)

Half = Literal["chosen", "shown"]


@dataclass(frozen=True)
class WarmWay:
    """How the share is chosen; `looks`: by a pass of the question over the KV that is there."""

    name: str
    looks: bool = False
    by_layer: bool = False
    deviation: bool = False
    drift: float = 0.0


WAYS = (
    WarmWay("leading"),
    WarmWay("first-layers", by_layer=True),
    WarmWay("seen", looks=True),
    WarmWay("seen+drift", looks=True, drift=1.0),
    WarmWay("deviation+drift", looks=True, deviation=True, drift=1.0),
)


@dataclass(frozen=True)
class WarmRun:
    """One prompt under one adapter, over the KV of `source`."""

    half: Half
    adapter: str
    source: str
    way: str
    budget: float
    kl: float
    top1: float
    seconds: float
    full_seconds: float


@dataclass(frozen=True)
class WarmRow:
    """One way at one budget, over all adapters. The ratio is of sums of time, on a CPU of processor time, against
    computing everything."""

    half: Half
    source: str
    way: str
    budget: float
    kl: float  # median of adapters
    worst_kl: float  # of the adapter that is changed most
    top1: float
    ratio: float
    near: bool  # enough for quantized KV


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure every way on the first texts, the best one on the others."""
    known = read_adapters(options.adapters)[: QUICK_ADAPTERS if options.quick else None]
    material = read_material(options.data, options.seed)
    advance("load the model")
    engine = load(options)
    if engine.capabilities.recompute != "scattered":
        engine.close()
        raise InvalidSetting("bench warmstart recomputes chosen tokens: it is for --engine hf.")
    random = np.random.default_rng(options.seed)
    conversations, documents = (encoded(engine, some, random) for some in (material.conversations, material.documents))
    count = options.rounds(TEXTS, QUICK_TEXTS)
    contexts = [list(one.tokens) for one in make_contexts(conversations, documents, CONTEXT_TOKENS, 2 * count, random)]
    bench = WarmBench(engine, {adapter.name: read_adapter(adapter.path, adapter.scale) for adapter in known}, advance)
    runs = [one for text in contexts[:count] for one in bench.choosing(text)]
    way = best_way(runs)
    runs += [one for text in contexts[count:] for one in bench.showing(text, way)]
    report = Report("warmstart", fields=about(engine, options))
    engine.close()
    add_rows(report, runs, way, [adapter.name for adapter in known])
    return report


class WarmBench:
    """All adapters of one engine."""

    def __init__(self, engine: Engine, loras: dict[str, Lora], advance: Advance) -> None:
        self._engine, self._loras, self._advance = engine, loras, advance
        self._instructions = [engine.tokenizer.encode(text) for text in INSTRUCTIONS]
        self._asked = 0
        for lora in loras.values():
            engine.load_adapter(lora)

    def choosing(self, context: list[int]) -> Iterable[WarmRun]:
        """Every way at one budget, over the model's KV."""
        base = self._kv(context, None)
        for name, prompt in self._prompts(context):
            yield prompt.measure("chosen", name, "model", base, WAYS[0], 0.0)
            for way in WAYS:
                yield prompt.measure("chosen", name, "model", base, way, CHOOSING_BUDGET)
            prompt.close()

    def showing(self, context: list[int], way: WarmWay) -> Iterable[WarmRun]:
        """One way over the model's KV, and over another adapter's."""
        base, names = self._kv(context, None), list(self._loras)
        for name, prompt in self._prompts(context):
            other = self._kv(context, self._loras[names[names.index(name) - 1]])
            for budget in (0.0, *BUDGETS):
                yield prompt.measure("shown", name, "model", base, way, budget)
            for budget in BUDGETS[2:]:
                yield prompt.measure("shown", name, "adapter", other, way, budget)
            prompt.close()

    def _prompts(self, context: list[int]) -> Iterable[tuple[str, WarmPrompt]]:
        for name, lora in self._loras.items():
            self._advance(f"text {self._asked // len(self._loras) + 1}, {name}")
            question = self._instructions[self._asked // len(self._loras) % len(self._instructions)]
            self._asked += 1
            yield name, WarmPrompt(self._engine, lora, context, question)

    def _kv(self, context: list[int], lora: Lora | None) -> Kv:
        sequence = _opened(self._engine, len(context), lora)
        self._engine.step([Row.following(sequence, context, logits="none")])
        kv = sequence.export(Span(0, len(context)))
        sequence.close()
        return kv


class WarmPrompt:
    """A prompt under an adapter: its full computation, and what stands in for it."""

    def __init__(self, engine: Engine, lora: Lora, context: list[int], question: list[int]) -> None:
        self._engine, self._context = engine, len(context)
        # What a shared machine disturbs least; a device computes outside of this process.
        self._clock = time.process_time if engine.device == "cpu" else time.perf_counter
        self._tokens = [*context, *question]
        self._question = np.arange(len(context), len(self._tokens))
        self._sequence = _opened(engine, len(self._tokens) + REPLY_TOKENS, lora)
        started = self._clock()
        (first,) = engine.step([Row.following(self._sequence, self._tokens)])
        self.full_seconds = self._clock() - started
        self._reply = [int(first[-1].argmax())]
        while len(self._reply) < REPLY_TOKENS:
            (logits,) = engine.step([Row.following(self._sequence, self._reply[-1:])])
            self._reply.append(int(logits[-1].argmax()))
        self._sequence.truncate(len(self._tokens))
        self._exact = self._followed(first)

    def measure(self, half: Half, adapter: str, source: str, kv: Kv, way: WarmWay, budget: float) -> WarmRun:
        """Prefill over `kv`, then follow the reply."""
        self._sequence.truncate(0)
        started = self._clock()
        (first,) = self._engine.step([self._row(HeldKv(kv), way, budget)])
        seconds = self._clock() - started
        near = nearness(self._exact, self._followed(first))
        name = way.name if budget else "none"
        return WarmRun(half, adapter, source, name, budget, near.mean_kl, near.top1, seconds, self.full_seconds)

    def _row(self, feed: HeldKv, way: WarmWay, budget: float) -> Row:
        weights = self._look(feed) if way.looks and budget else -np.arange(self._context, dtype=np.float32)
        spread = KvDrift((Span(0, self._context),), way.drift) if way.drift and budget else None
        if budget and (way.by_layer or way.deviation):
            chosen = _Chosen(weights, 0.0 if way.by_layer else budget)
            layers = len(self._engine.layout.layers)
            chosen.stop = max(1, round(budget * layers)) if way.by_layer else min(_DEVIATION_LAYERS.stop, layers - 1)
            probe = Probe(chosen.take, deviation=True, layers=_DEVIATION_LAYERS) if way.deviation else None
            positions = np.arange(len(self._tokens))
            return Row(
                self._sequence, self._tokens, positions, "last", (feed,), selector=chosen, probe=probe, spread=spread
            )
        positions = np.concatenate([_top(weights, budget), self._question])
        tokens = [self._tokens[position] for position in positions.tolist()]
        return Row(self._sequence, tokens, positions, "last", (feed,), spread=spread)

    def _look(self, feed: HeldKv) -> NDArray[np.float32]:
        """What the question attends to, over the KV that is there. `[context]`"""
        seen: list[NDArray[np.float32]] = []
        layers = look_layers(len(self._engine.layout.layers))
        gaze = AttentionMap(Span(self._context, len(self._tokens)), seen.append, layers)
        question = self._tokens[self._context :]
        row = Row(self._sequence, question, self._question, "none", (feed,), gaze=gaze, until=layers.stop)
        self._engine.step([row])
        return seen[0][: self._context]

    def _followed(self, first: Any) -> Any:
        """Logits `[reply tokens, vocabulary]` of the reply."""
        (logits,) = self._engine.step([Row.following(self._sequence, self._reply[:-1], logits="all")])
        return np.concatenate([first[-1:], logits])

    def close(self) -> None:
        """Give the engine's memory back."""
        self._sequence.close()


class _Chosen:
    """A selector: all tokens pass the first `stop` layers, then those with the largest weights x deviation."""

    def __init__(self, weights: NDArray[np.float32], budget: float) -> None:
        self._weights, self._budget = weights, budget
        self._deviation = np.zeros(len(weights), dtype=np.float32)
        self.stop = 1

    def take(self, reading: Reading) -> None:
        """Add up how far the adapter's KV is from what it replaces."""
        assert reading.deviation is not None
        self._deviation += reading.deviation[: len(self._weights)]

    def choose(self, layer: int, positions: Positions) -> Positions:
        """See `Selector`."""
        if layer != self.stop:
            return positions
        chosen = _top(self._weights * self._deviation, self._budget)
        return np.concatenate([chosen, positions[positions >= len(self._weights)]])


def _opened(engine: Engine, capacity: int, lora: Lora | None) -> EngineSequence:
    return engine.open(capacity, engine.regime(capacity), None if lora is None else lora.digest)


def _top(weights: NDArray[np.float32], budget: float) -> Positions:
    """The share with the largest weights, in order."""
    count = round(budget * len(weights))
    return np.sort(np.argsort(-weights, kind="stable")[:count]).astype(np.int64)


def best_way(runs: Sequence[WarmRun]) -> WarmWay:
    """The way whose KL (the median of adapters) times time is least."""

    def loss(way: WarmWay) -> float:
        row = _row("chosen", "model", way.name, CHOOSING_BUDGET, [run for run in runs if run.way == way.name])
        return row.kl * row.ratio

    return min(WAYS, key=loss)


def add_rows(report: Report, runs: Sequence[WarmRun], way: WarmWay, adapters: Sequence[str]) -> None:
    """Fields and rows."""
    groups: dict[tuple[Half, str, str, float], list[WarmRun]] = {}
    for one in runs:
        groups.setdefault((one.half, one.source, one.way, one.budget), []).append(one)
    rows = [_row(*group, own) for group, own in groups.items()]
    shown = [row for row in rows if row.half == "shown" and row.budget]
    report.fields |= {
        "adapters": list(adapters),
        "context_tokens": CONTEXT_TOKENS,
        "positions": REPLY_TOKENS * sum(one.half == "shown" and not one.budget for one in runs),
        "max_kl": MAX_KL,
        "min_top1": MIN_TOP1,
        "chosen": way.name,
        "rows": [asdict(row) for row in rows],
        "wins": sum(row.near and row.ratio < 1 for row in shown),
        "kl_by_adapter": {
            f"{row.source} {row.budget:.0%}": kl_by_adapter(groups["shown", row.source, row.way, row.budget])
            for row in shown
        },
    }
    report.rows += [_table_row(row) for row in rows]


def _row(half: Half, source: str, way: str, budget: float, runs: Sequence[WarmRun]) -> WarmRow:
    means = kl_by_adapter(runs).values()
    kl, top1 = statistics.median(means), statistics.mean(one.top1 for one in runs)
    ratio = sum(one.seconds for one in runs) / sum(one.full_seconds for one in runs)
    return WarmRow(half, source, way, budget, kl, max(means), top1, ratio, kl <= MAX_KL and top1 >= MIN_TOP1)


def kl_by_adapter(runs: Sequence[WarmRun]) -> dict[str, float]:
    names = dict.fromkeys(one.adapter for one in runs)
    return {name: statistics.mean(one.kl for one in runs if one.adapter == name) for name in names}


def _table_row(row: WarmRow) -> TableRow:
    share = f" {row.budget:.0%}" if row.budget else ""
    return TableRow(
        f"{row.half}: {row.way}{share}, from the {row.source}",
        f"KL {row.kl:.4f} (worst {row.worst_kl:.4f}), top-1 {row.top1:.3f}",
        "computing",
        f"{row.ratio:.2f}",
        f"< 1, KL <= {MAX_KL}, top-1 >= {MIN_TOP1}" + (", met" if row.near and row.ratio < 1 else ""),
    )
