"""`python -m benchmarks adapters`: several adapters that work on the same texts, within a limit.

scenarios   apps ask as in a recorded usage, their adapters by a Pareto law: PEFT's own generate, a cache for each
            adapter, whole KV with LRU and LFU, what MobiLoRA published, and ours (see `modes`, `workload`)
deltas      what a difference takes, and how near the answers are to the exact ones (see `quality`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.adapters import quality
from benchmarks.adapters.data import Material, encoded, read_adapters, read_material
from benchmarks.adapters.modes import MODES, REPLY_TOKENS, Replies, Watch, answer_all, open_runs
from benchmarks.adapters.report import ModeResult, ScenarioResult, add_rows
from benchmarks.adapters.shape import run_shape
from benchmarks.adapters.workload import (
    CONTEXTS,
    EXPONENT,
    INSTRUCTIONS,
    LIMIT_SHARE,
    SCENARIOS,
    AppWorkload,
    Scenario,
    make_contexts,
    make_workload,
)
from benchmarks.base import Advance, BenchOptions, Report, Units, about
from benchmarks.baselines.peft_generate import PeftGenerate
from benchmarks.models import load
from rekindle.engine.base import Engine
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import InvalidSetting
from rekindle.models.adapter_registry import RegisteredAdapter

REQUESTS, QUICK_REQUESTS = 60, 6  # that are measured, in each scenario
FILLING = 24  # come before them, or as many as are measured: the caches are as full as they get in use
QUICK_SCENARIOS, QUICK_CONTEXTS = 1, 2
ALL_MODES = ("S1", "S4")  # the scenarios in which every mode is measured: few adapters, and many


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything. The model is loaded before."""
    if options.shape is not None:
        return run_shape(options, advance)
    known = read_adapters(options.adapters)
    material = read_material(options.data, options.seed)
    advance("load the model")
    engine = load(options)
    try:
        if options.calibrate:
            started = time.perf_counter()
            coder = quality.calibrate(engine, advance)
            return quality.report_calibration(engine, coder, time.perf_counter() - started)
        units = Units("adapters", options, _about(engine, options, known, material), advance)
        bench = _AdapterBench(engine, options, known, material, units)
        deltas = units.one("deltas", dict[str, Any], bench.deltas) or quality.unmeasured("the time was up")
        scenarios = range(QUICK_SCENARIOS if options.quick else len(SCENARIOS))
        results = [one for one in map(bench.scenario, scenarios) if one is not None]
    finally:
        engine.close()
    report = units.report()
    if results:
        add_rows(report, results, deltas)
    else:
        report.fields |= {"scenarios": [], **deltas}
    return report


def _about(engine: Engine, options: BenchOptions, known: list[RegisteredAdapter], material: Material) -> dict[str, Any]:
    return {
        **about(engine, options),
        "seed": options.seed,
        "adapters": [adapter.name for adapter in known],
        "exponent": EXPONENT,
        "limit_share": LIMIT_SHARE,
        "contexts": QUICK_CONTEXTS if options.quick else CONTEXTS,
        "reply_tokens": REPLY_TOKENS,
        "data_reasons": list(material.reasons),
        "calibrated_on_others": options.data is not None and options.adapters is not None,  # texts and adapters
    }


class _AdapterBench:
    """The parts of the bench, on one engine."""

    def __init__(
        self,
        engine: Engine,
        options: BenchOptions,
        known: list[RegisteredAdapter],
        material: Material,
        units: Units,
    ) -> None:
        if not engine.capabilities.adapters:
            raise InvalidSetting(f"{engine.name} takes no adapters with this engine.")
        self._engine, self._options, self._known, self._units = engine, options, known, units
        self._peft = PeftGenerate(engine, known) if isinstance(engine, HfEngine) else None
        self._material = material
        random = np.random.default_rng(options.seed)
        self._conversations = encoded(engine, material.conversations, random)
        self._documents = encoded(engine, material.documents, random)

    def deltas(self) -> dict[str, Any]:
        """What differences take, and what they do to answers."""
        if (why := self._engine.capabilities.opaque) is not None:
            return quality.unmeasured(why)
        random = np.random.default_rng((self._options.seed, len(SCENARIOS)))
        length = quality.PROMPT_TOKENS + quality.FORCED_TOKENS
        contexts = make_contexts(self._conversations, self._documents, length, CONTEXTS, random)
        loras = {adapter.name: read_adapter(adapter.path, adapter.scale) for adapter in self._known}
        texts = [context.tokens for context in contexts]
        return quality.measure_deltas(
            self._engine, loras, texts, self._options.seed, self._units.advance, quick=self._options.quick
        )

    def scenario(self, number: int) -> ScenarioResult | None:
        """All modes on the requests of one scenario; None if none of those that count was asked."""
        workload = self._workload(number, SCENARIOS[number])
        name = workload.scenario.name
        working_set_bytes = workload.working_set_tokens * self._engine.layout.token_bytes
        limit_bytes = int(working_set_bytes * LIMIT_SHARE)
        modes = [mode for mode in MODES if mode.everywhere or name in ALL_MODES]
        own = [adapter for adapter in self._known if adapter.name in workload.adapters]

        @contextmanager
        def requests() -> Iterator[Callable[[int], Replies]]:
            quality.coder_in_use(self._engine, self._units.advance, quick=self._options.quick)
            with (
                self._units.kept(name) as folder,
                open_runs(self._engine, self._peft, modes, own, folder, limit_bytes) as runs,
                Watch() as watch,
            ):
                yield lambda number: answer_all(runs, workload, number, watch, self._units.advance)

        replies = self._units.steps(name, Replies, len(workload.asks), requests)
        if len(replies) <= workload.filling:
            return None
        served = {mode.name: ModeResult.of(mode, replies, workload.filling) for mode in modes}
        return ScenarioResult(workload, served, working_set_bytes, limit_bytes)

    def _workload(self, number: int, scenario: Scenario) -> AppWorkload:
        random = np.random.default_rng((self._options.seed, number))
        usage = self._material.usages[number % len(self._material.usages)]
        count = QUICK_CONTEXTS if self._options.quick else CONTEXTS
        contexts = make_contexts(self._conversations, self._documents, scenario.input_tokens, count, random)
        instructions = [tuple(self._engine.tokenizer.encode(text)) for text in INSTRUCTIONS]
        measured = self._options.rounds(REQUESTS, quick=QUICK_REQUESTS)
        names = [adapter.name for adapter in self._known]
        fewer = replace(scenario, adapters=min(scenario.adapters, len(names)))
        return make_workload(fewer, names, contexts, instructions, usage, (min(measured, FILLING), measured), random)
