"""`python -m benchmarks stream`: a context that an origin has, computed, streamed or both, over links of many speeds.

The context is published by an origin in another process and comes over a real socket, through a proxy that is as fast
as a trace says (`shaped_origin`). A ratio is how long streaming takes (at level q5), as a multiple of computing: traces
are scaled to it. Every way (`modes`) gets the same prompt over the same trace from the same moment on, in turns.
The clock runs from the request, looking for the context at the origin included, to the logits of the last token of the
prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.base import Advance, BenchOptions, Report, Units, about, rotated, scratch
from benchmarks.models import load
from benchmarks.prompts import tokens_for
from benchmarks.stream import costs, schedules, sensitivity
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import LEVEL, LEVELS, MODE_SETS, QUICK_LEVELS, QUICK_SETS, SIMULATED_MODES, StreamMode
from benchmarks.stream.passages import PASSAGES, Passages
from benchmarks.stream.report import StreamResults, TraceCase, TracePass, add_rows
from benchmarks.stream.simulated import Simulation, summary, tiled
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.traces import MADE, Trace, made_trace, read_traces
from benchmarks.stream.trouble import KINDS, Trouble
from rekindle.core.cells import CHUNK_TOKENS, CellGrid
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.remote.ladder import PricedLevel
from rekindle.remote.latency import LayerTiming

RATIOS, QUICK_RATIOS = (1.0, 0.25, 4.0), (1.0,)
CONTEXT_TOKENS, QUICK_CONTEXT_TOKENS, CUDA_CONTEXT_TOKENS = 2048, 640, 8192
SIMULATED_TOKENS, SIMULATED_RATIOS = (2048, 4096, 8192), (0.25, 0.5, 1.0, 2.0, 4.0)
QUESTION_TOKENS, PASSAGE_TOKENS = 24, 200
TRACES, QUICK_TRACES, SIMULATED_TRACES = 3, 2, 7
QUICK_MADE = ("constant", "step down")
MAX_TIMES = 4.5  # of computing: a baseline that would stream for longer is not waited for
_LOCAL_ROUNDS = 2
_COST_ROUNDS = 3

Fields = dict[str, Any]


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything."""
    traces = _read(options)
    advance("load the model")
    engine = load(options)
    try:
        if (why := engine.capabilities.opaque) is not None:
            raise InvalidSetting(f"{engine.name} cannot take KV from an origin: {why}.")
        units = Units("stream", options, {**about(engine, options), "layers": len(engine.layout.layers)}, advance)
        with scratch() as folder, ExitStack() as stack:
            found = _StreamBench(engine, options, traces, Path(folder), units, stack).measure()
        report = units.report()
    finally:
        engine.close()
    if found is not None:
        add_rows(report, found)
    return report


def _read(options: BenchOptions) -> list[Trace] | None:
    if options.traces is None:
        return None
    return read_traces(options.traces, QUICK_TRACES if options.quick else TRACES, options.seed)


@dataclass(frozen=True)
class LinkSetup:
    """What every case is made from: the costs of layers, how long computing takes, what is published."""

    whole: tuple[LayerTiming, ...]
    top: tuple[LayerTiming, ...]
    local_seconds: float
    slice_bytes: Mapping[str, list[list[float]]]  # [chunks][layers] of each level
    kls: Mapping[str, float]
    schedules: Fields

    def sizes(self, level: str) -> NDArray[np.float64]:
        """[chunks, layers]"""
        return np.array(self.slice_bytes[level])


class _StreamBench:
    def __init__(
        self,
        engine: Engine,
        options: BenchOptions,
        traces: list[Trace] | None,  # None: they are made
        folder: Path,
        units: Units,
        stack: ExitStack,
    ) -> None:
        self.engine, self.options, self.traces = engine, options, traces
        self.folder, self.units, self.stack, self.advance = folder, units, stack, units.advance
        self.setting = self._setting()
        self._measured: LayerTimings | None = None

    def measure(self) -> StreamResults | None:
        """What cases are made from first, then every trace at every ratio, then what the gain depends on."""
        options, setting = self.options, self.setting
        known = self.units.one("costs", LinkSetup, self._known, shared=True)
        if known is None:
            return None
        self._measured = measured = LayerTimings.of(known.whole, known.top, options.seed)
        cases = self._cases(known)
        sensitive, trouble, passages, simulated = ([], [], [], []) if options.quick else self._more(known)
        return StreamResults(
            cases=tuple(cases),
            measured=measured,
            schedules=known.schedules,
            sensitivity=sensitive,
            trouble=trouble,
            passages=passages,
            simulated=simulated,
            kls=known.kls,
            local_seconds=known.local_seconds,
            sizes={level: int(known.sizes(level).sum()) for level in known.slice_bytes},
            context_tokens=setting.context_tokens,
            question_tokens=len(setting.tokens) - setting.context_tokens,
            made=self.traces is None,
            sample=options.data is None,
            judged=options.shape is None,
            quick=options.quick,
        )

    @cached_property
    def _site(self) -> Site:
        """Opened when the first unit needs it: the context is computed and published, which takes its time."""
        self.advance("compute and publish the context")
        levels = QUICK_LEVELS if self.options.quick else LEVELS
        site = self.stack.enter_context(Site(self.setting, self.folder, levels))
        if self._measured is not None:
            site.learn(self._measured)
        return site

    def _known(self) -> LinkSetup:
        options, setting, site = self.options, self.setting, self._site
        context, rounds = setting.tokens[: setting.context_tokens], 2 if options.quick else _COST_ROUNDS
        measured = costs.measure(self.engine, context, options.quick, rounds, options.seed, self.advance)
        site.learn(measured)
        local_seconds, kls = self._local(site), site.kls()
        bandwidths = [float(site.sizes(LEVEL).sum()) / (ratio * local_seconds) for ratio in SIMULATED_RATIOS]
        scheduled = schedules.compare(site.costs(LEVEL), bandwidths, self.advance)
        sizes = {level: site.sizes(level).tolist() for level in kls}
        return LinkSetup(measured.whole, measured.top, local_seconds, sizes, kls, scheduled)

    def _cases(self, known: LinkSetup) -> list[TraceCase]:
        """Every trace at every ratio: first where both lanes take equally long, then where one is much slower."""
        ratios, sets = (QUICK_RATIOS, QUICK_SETS) if self.options.quick else (RATIOS, MODE_SETS)
        local_seconds, size_bytes = known.local_seconds, float(known.sizes(LEVEL).sum())
        traces = self._traces(self.traces, max(ratios) * local_seconds)
        cases = []
        for ratio, begin in product(ratios, traces):
            trace = begin(_together(local_seconds, ratio)).at_ratio(size_bytes, local_seconds, ratio)
            sets_of = {name: self._passes(known, trace, ratio, name, modes) for name, modes in sets.items()}
            passes = [one for some in sets_of.values() for one in some]
            ways = [mode for name, modes in sets.items() if sets_of[name] for mode in modes]
            if passes:
                cases.append(TraceCase(trace.name, ratio, passes, list(dict.fromkeys(ways)), known.kls))
        return cases

    def _passes(
        self, known: LinkSetup, trace: Trace, ratio: float, name: str, modes: Sequence[StreamMode]
    ) -> list[TracePass]:
        """Some ways over one trace, as often as is asked for."""
        one = partial(self._pass, known, trace, ratio, modes)
        unit = f"{trace.name}, ratio {ratio:g}: {name}"
        return self.units.steps(unit, TracePass, self.options.rounds(1, 1), lambda: nullcontext(one))

    def _more(self, known: LinkSetup) -> tuple[list[Fields], list[Fields], list[Fields], list[Fields]]:
        """What the gain depends on, origins in trouble, several contexts in one prompt, longer ones simulated."""
        setting, measured, local_seconds = self.setting, self._measured, known.local_seconds
        assert measured is not None

        def trouble(kind: str) -> Fields:
            return Trouble(setting, self._site, self.folder, measured, local_seconds, self.advance).row(kind)

        def rows(jobs: Mapping[str, Callable[[], Fields]]) -> list[Fields]:
            return [row for name, job in jobs.items() if (row := self.units.one(name, Fields, job)) is not None]

        def simulated(tokens: int) -> list[Fields]:
            job = partial(self._simulate, known, tokens)
            return self.units.one(f"{tokens} tokens simulated", list[Fields], job) or []

        sensitive = rows(sensitivity.jobs(lambda: self._site, setting, self.folder, measured, local_seconds))
        troubles = rows({f"an origin in trouble ({kind})": partial(trouble, kind) for kind in KINDS})
        passages = self.units.one("passages", list[Fields], self._passages) or []
        return sensitive, troubles, passages, [row for tokens in SIMULATED_TOKENS for row in simulated(tokens)]

    def _simulate(self, known: LinkSetup, tokens: int) -> list[Fields]:
        """One row for each trace and ratio."""
        folder, seed, kls, rows = self.options.traces, self.options.seed, known.kls, list[Fields]()
        traces = None if folder is None else read_traces(folder, SIMULATED_TRACES, seed)
        cells = CellGrid(tokens, len(self.engine.layout.layers))
        sizes = {level: tiled(known.sizes(level), cells.chunks) for level in kls}
        levels = sorted((PricedLevel(name, kls[name], 0.0, sizes[name]) for name in kls), key=lambda one: one.kl)
        assert self._measured is not None
        costs = self._measured.costs(cells, sizes[LEVEL].astype(np.float64), QUESTION_TOKENS)
        local = float(costs.depth_seconds[:, -1].sum())
        for begin, ratio in product(self._traces(traces, max(SIMULATED_RATIOS) * local), SIMULATED_RATIOS):
            together = _together(local, ratio)
            trace = begin(together).at_ratio(float(sizes[LEVEL].sum()), local, ratio)
            self.advance(f"{tokens} tokens over {trace.name}, streaming takes {ratio:g} of computing: simulated")
            one = Simulation(cells, costs, levels, trace)
            runs = {mode.name: one.run(mode) for mode in SIMULATED_MODES}
            about = {"tokens": tokens, "trace": trace.name, "ratio": ratio, "change": trace.change(together)}
            rows.append({**about, **summary(runs, one.ideal_seconds())})
        return rows

    def _passages(self) -> list[dict[str, Any]]:
        """Several contexts in one prompt; not with a model that says nothing."""
        if self.options.shape is not None or self.engine.capabilities.recompute == "none":
            return []
        tokens = tokens_for(self.engine, self.options, PASSAGES * PASSAGE_TOKENS)
        return Passages(self.engine, tokens, self.folder / "several", self.advance).measure()

    def _setting(self) -> ContextSetup:
        """A text, and the text behind it as the question."""
        usual = CONTEXT_TOKENS if self.engine.device == "cpu" else CUDA_CONTEXT_TOKENS
        wanted = self.options.tokens or (QUICK_CONTEXT_TOKENS if self.options.quick else usual)
        room = (self.engine.context_tokens - 2 * QUESTION_TOKENS - CHUNK_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS
        context = min(wanted, room)
        if context < 2 * CHUNK_TOKENS:
            raise InvalidSetting(f"{self.engine.name} takes {self.engine.context_tokens} tokens: too few to stream.")
        tokens = tokens_for(self.engine, self.options, context + QUESTION_TOKENS)
        return ContextSetup(self.engine, tuple(tokens), context)

    def _local(self, site: Site) -> float:
        """How long computing takes on the executor, after one that does not count."""
        still = made_trace("constant", 1.0, 0)
        seconds = []
        rounds = 1 if self.options.quick else _LOCAL_ROUNDS
        for turn in range(1 + rounds):
            self.advance(f"compute alone, {turn + 1} of {1 + rounds}")
            seconds.append(site.run(StreamMode("local"), still, 1.0, 1.0).ttft_s)
        return statistics.median(seconds[1:])

    def _traces(self, traces: list[Trace] | None, max_seconds: float) -> list[Callable[[float], Trace]]:
        """What gives each trace, or one made by code, for something that shall come within some seconds, and within
        `max_seconds`."""
        options = self.options
        if traces is None:
            names = QUICK_MADE if options.quick else MADE
            return [partial(made_trace, name, seed=options.seed) for name in names]
        begun = [trace.beginning(max_seconds, options.seed + n) for n, trace in enumerate(traces)]
        return [partial(_as_it_is, trace) for trace in begun]

    def _pass(self, known: LinkSetup, trace: Trace, ratio: float, modes: Sequence[StreamMode], turn: int) -> TracePass:
        """Some ways over one trace, each once, another one first each time."""
        window, max_seconds = ratio * known.local_seconds, MAX_TIMES * known.local_seconds
        skipped = {
            mode: expected
            for mode in modes
            if mode.kind == "stream" and mode.level is not None
            if (expected := trace.moment(0.0, float(known.sizes(mode.level).sum()))) > max_seconds
        }
        runs, site = [], self._site
        for mode in rotated([mode for mode in modes if mode not in skipped], turn):
            self.advance(f"{trace.name}, streaming takes {ratio:g} of computing: {mode.name}")
            runs.append(replace(site.run(mode, trace, known.local_seconds, window), events=()))
        change = trace.change(window / (1 + ratio))
        return TracePass(window, change, tuple(runs), {mode.name: seconds for mode, seconds in skipped.items()})


def _together(local_seconds: float, ratio: float) -> float:
    """How long both lanes take at best, were the link always alike."""
    return local_seconds * ratio / (1 + ratio)


def _as_it_is(trace: Trace, _seconds: float) -> Trace:
    """A trace that somebody measured is not made to fit."""
    return trace
