"""`python -m benchmarks stream`: a context that an origin has, computed, streamed or both, over links of many speeds.

The context is published by an origin in another process and comes over a real socket, through a proxy that is as fast
as a trace says (`shaped_origin`). A ratio is how long streaming takes (at level q5), as a multiple of computing: traces
are scaled to it. Every way (`modes`) gets the same prompt over the same trace from the same moment on, in turns.
The clock runs from the request, looking for the context at the origin included, to the logits of the last token of the
prompt.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, about, rotated, scratch, until_time_is_up
from benchmarks.models import load
from benchmarks.prompts import tokens_for
from benchmarks.stream import costs, schedules, sensitivity
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import LEVEL, LEVELS, MODES, QUICK_LEVELS, QUICK_MODES, SIMULATED_MODES, StreamMode
from benchmarks.stream.passages import PASSAGES, Passages
from benchmarks.stream.report import StreamResults, TraceCase, add_rows
from benchmarks.stream.simulated import Simulation, summary, tiled
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.traces import MADE, Trace, made_trace, read_traces
from benchmarks.stream.trouble import Trouble
from rekindle.core.cells import CHUNK_TOKENS, CellGrid
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.remote.ladder import PricedLevel

RATIOS, QUICK_RATIOS = (1.0, 0.25, 4.0), (1.0,)
CONTEXT_TOKENS, QUICK_CONTEXT_TOKENS, CUDA_CONTEXT_TOKENS = 2048, 640, 8192
SIMULATED_TOKENS, SIMULATED_RATIOS = (2048, 4096, 8192), (0.25, 0.5, 1.0, 2.0, 4.0)
QUESTION_TOKENS, PASSAGE_TOKENS = 24, 200
TRACES, QUICK_TRACES, SIMULATED_TRACES = 3, 2, 7
QUICK_MADE = ("constant", "step down")
MAX_TIMES = 4.5  # of computing: a baseline that would stream for longer is not waited for
_LOCAL_ROUNDS = 2
_COST_ROUNDS = 3


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything."""
    traces = _read(options)
    advance("load the model")
    engine = load(options)
    try:
        if (why := engine.capabilities.opaque) is not None:
            raise InvalidSetting(f"{engine.name} cannot take KV from an origin: {why}.")
        with scratch() as folder:
            found = _StreamBench(engine, options, traces, Path(folder), advance).measure()
        fields = {**about(engine, options), "layers": len(engine.layout.layers)}
    finally:
        engine.close()
    report = Report("stream", fields=fields)
    add_rows(report, found)
    return report


def _read(options: BenchOptions) -> list[Trace] | None:
    if options.traces is None:
        return None
    return read_traces(options.traces, QUICK_TRACES if options.quick else TRACES, options.seed)


@dataclass(frozen=True)
class _StreamBench:
    engine: Engine
    options: BenchOptions
    traces: list[Trace] | None  # None: they are made
    folder: Path
    advance: Advance

    def measure(self) -> StreamResults:
        """Costs first, then every trace at every ratio."""
        options, setting = self.options, self._setting()
        levels = QUICK_LEVELS if options.quick else LEVELS
        self.advance("compute and publish the context")
        with Site(setting, self.folder, levels) as site:
            context = setting.tokens[: setting.context_tokens]
            rounds = 2 if options.quick else _COST_ROUNDS
            measured = costs.measure(self.engine, context, options.quick, rounds, options.seed, self.advance)
            site.learn(measured)
            local_seconds = self._local(site)
            size_bytes = float(site.sizes(LEVEL).sum())
            cases: list[TraceCase] = []
            simulated, sensitive, trouble, passages = (list[dict[str, Any]]() for _ in range(4))
            with until_time_is_up(cases):
                self._measure_cases(cases, site, local_seconds, size_bytes)
                if not options.quick:
                    sensitive += sensitivity.measure(site, setting, self.folder, measured, local_seconds, self.advance)
                    trouble += Trouble(setting, site, self.folder, measured, local_seconds, self.advance).measure()
                    passages += self._passages()
                    self._simulate(simulated, site, measured)
            bandwidths = [size_bytes / (ratio * local_seconds) for ratio in SIMULATED_RATIOS]
            scheduled = schedules.compare(site.costs(LEVEL), bandwidths, lambda _: None)  # seconds, however late
            sizes, kls = {level: int(site.sizes(level).sum()) for level in levels}, site.kls()
        return StreamResults(
            cases=tuple(cases),
            measured=measured,
            schedules=scheduled,
            sensitivity=sensitive,
            trouble=trouble,
            passages=passages,
            simulated=simulated,
            kls=kls,
            local_seconds=local_seconds,
            sizes=sizes,
            context_tokens=setting.context_tokens,
            question_tokens=len(setting.tokens) - setting.context_tokens,
            made=self.traces is None,
            sample=options.data is None,
            judged=options.shape is None,
            quick=options.quick,
        )

    def _measure_cases(self, cases: list[TraceCase], site: Site, local_seconds: float, size_bytes: float) -> None:
        """Every trace at every ratio: first where both lanes take equally long, then where one is much slower."""
        ratios = QUICK_RATIOS if self.options.quick else RATIOS
        traces = self._traces(self.traces, max(ratios) * local_seconds)
        for ratio, begin in product(ratios, traces):
            scaled = begin(_together(local_seconds, ratio)).at_ratio(size_bytes, local_seconds, ratio)
            cases.append(self._case(site, scaled, ratio, local_seconds))
            self.advance(str(cases[-1]))

    def _simulate(self, rows: list[dict[str, Any]], site: Site, measured: LayerTimings) -> None:
        """Adds one row for each length, trace and ratio."""
        folder, seed, kls = self.options.traces, self.options.seed, site.kls()
        traces = None if folder is None else read_traces(folder, SIMULATED_TRACES, seed)
        for tokens in SIMULATED_TOKENS:
            cells = CellGrid(tokens, len(self.engine.layout.layers))
            sizes = {level: tiled(site.sizes(level), cells.chunks) for level in kls}
            levels = sorted((PricedLevel(name, kls[name], 0.0, sizes[name]) for name in kls), key=lambda one: one.kl)
            costs = measured.costs(cells, sizes[LEVEL].astype(np.float64), QUESTION_TOKENS)
            local = float(costs.depth_seconds[:, -1].sum())
            for begin, ratio in product(self._traces(traces, max(SIMULATED_RATIOS) * local), SIMULATED_RATIOS):
                together = _together(local, ratio)
                trace = begin(together).at_ratio(float(sizes[LEVEL].sum()), local, ratio)
                self.advance(f"{tokens} tokens over {trace.name}, streaming takes {ratio:g} of computing: simulated")
                one = Simulation(cells, costs, levels, trace)
                runs = {mode.name: one.run(mode) for mode in SIMULATED_MODES}
                about = {"tokens": tokens, "trace": trace.name, "ratio": ratio, "change": trace.change(together)}
                rows.append({**about, **summary(runs, one.ideal_seconds())})

    def _passages(self) -> list[dict[str, Any]]:
        """Several contexts in one prompt; not with a model that says nothing."""
        if self.options.shape is not None or self.engine.capabilities.recompute == "none":
            return []
        tokens = tokens_for(self.engine, self.options, PASSAGES * PASSAGE_TOKENS)
        return Passages(self.engine, tokens, self.folder / "several", self.advance).measure()

    def _setting(self) -> ContextSetup:
        """A text, and the text behind it as the question."""
        wanted = QUICK_CONTEXT_TOKENS if self.options.quick else CONTEXT_TOKENS
        if self.engine.device != "cpu" and not self.options.quick:
            wanted = CUDA_CONTEXT_TOKENS
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
            return [functools.partial(made_trace, name, seed=options.seed) for name in names]
        begun = [trace.beginning(max_seconds, options.seed + n) for n, trace in enumerate(traces)]
        return [functools.partial(_as_it_is, trace) for trace in begun]

    def _case(self, site: Site, trace: Trace, ratio: float, local_seconds: float) -> TraceCase:
        """All ways over one trace, in turns, another one first each time."""
        modes = QUICK_MODES if self.options.quick else MODES
        window, max_count = ratio * local_seconds, MAX_TIMES * local_seconds
        skipped = {
            mode: expected
            for mode in modes
            if mode.kind == "stream" and mode.level is not None
            if (expected := trace.moment(0.0, float(site.sizes(mode.level).sum()))) > max_count
        }
        able = [mode for mode in modes if mode not in skipped]
        runs = []
        for turn in range(self.options.rounds(1, 1)):
            for mode in rotated(able, turn):
                self.advance(f"{trace.name}, streaming takes {ratio:g} of computing: {mode.name}")
                runs.append(site.run(mode, trace, local_seconds, window))
        return TraceCase(trace, ratio, window, modes, tuple(runs), skipped, site.kls())


def _together(local_seconds: float, ratio: float) -> float:
    """How long both lanes take at best, were the link always alike."""
    return local_seconds * ratio / (1 + ratio)


def _as_it_is(trace: Trace, _seconds: float) -> Trace:
    """A trace that somebody measured is not made to fit."""
    return trace
