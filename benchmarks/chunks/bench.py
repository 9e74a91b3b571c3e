"""`python -m benchmarks chunks`: passages that stand anywhere in any prompt start at once; at what price in quality.

contexts    single prompts, all modes, on the same store: what each computes, how near its answers are, how soon
streams     questions of one person in order, each cache keeping what it computed: what is saved in use
endurance   a long run with chunk reuse throughout: quality and speed stay

With `--calibrate --kl 0.015` it finds the budget of a model instead, and keeps it. With `--shape` it measures time
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.base import Advance, BenchOptions, Report, Units, about, scratch
from benchmarks.chunks import calibrate, contexts, endurance, shape
from benchmarks.chunks.modes import require_chunk_reuse
from benchmarks.chunks.report import add_rows
from benchmarks.chunks.streams import Streams
from benchmarks.models import load
from benchmarks.personal import PersonalSet, personal_sets
from benchmarks.quality import rouge_l
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.prompts import read_questions

_NO_CONTEXTS: dict[str, Any] = {
    "rows": [],
    "rows_reason": "--data has no records with question and contexts, or the time was up",
    "best": None,
    "best_vs_cachecraft": None,
    "cachecraft_alpha": None,
    "cachecraft_alpha_tuned": None,
    "preload_layers": None,
    "probe_cost": None,
    "partial": None,
}


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything, or calibrate."""
    _check(options)
    if options.shape is not None:
        return shape.run(options, advance)
    if options.workload == "endurance":
        return endurance.run(options, advance)
    asked, people = read_questions(options.data), _people(options.data)
    if not asked and (options.calibrate or not people):
        more = "" if options.calibrate else ", and no corpus.jsonl and queries.jsonl either"
        raise InvalidSetting(f"--data {options.data} has no .jsonl files with question and contexts{more}.")
    advance("load the model")
    engine = load(options)
    try:
        require_chunk_reuse(engine)
        if options.calibrate:
            report = calibrate.run(engine, asked, options, advance)
            report.fields = {**about(engine, options), **report.fields}
            return report
        units = Units("chunks", options, about(engine, options), advance)
        found = _NO_CONTEXTS | (contexts.measure(engine, asked, options, units) if asked else {})
        found |= _streams(engine, people, options, units)
    finally:
        engine.close()
    report = units.report()
    report.fields |= found
    if rouge_l() is None:
        report.fields["rouge_l_reason"] = "rouge-score is not installed (rekindle-llm[bench])"
    add_rows(report)
    return report


def _check(options: BenchOptions) -> None:
    if options.workload not in (None, "endurance"):
        raise InvalidSetting(f"--workload {options.workload!r} is unknown. Use endurance.")
    if not options.calibrate:
        if options.kl is not None:
            raise InvalidSetting("--kl says what to calibrate for: give --calibrate, too.")
        return
    if options.kl is None or not options.kl > 0.0:
        raise InvalidSetting("Say how far from the full computation it may be (mean KL in nats): --kl 0.015")
    if options.shape is not None:
        raise InvalidSetting("--shape has random weights, which say nothing about quality: give a --model.")


def _people(folder: Path | None) -> list[PersonalSet]:
    """The personal sets of a folder; none if it has none."""
    if folder is not None and not any((*folder.glob("corpus.jsonl"), *folder.glob("*/corpus.jsonl"))):
        return []
    return [some for some in personal_sets(folder) if any(person.questions for person in some.people)]


def _streams(engine: Engine, people: list[PersonalSet], options: BenchOptions, units: Units) -> dict[str, Any]:
    if not people:
        reason = "--data has no corpus.jsonl and queries.jsonl"
        return {"streams": None, "streams_reason": reason, "endurance": None, "endurance_reason": reason}
    with scratch() as name:
        streams = Streams(engine, Path(name), options)
        try:
            found = {some.name: streams.measure(some, units) for some in people}
            count = endurance.QUICK_QUESTIONS if options.quick else endurance.QUESTIONS
            lasting = endurance.measure(engine, people[0], streams, options, units, count)
        finally:
            streams.close()
    return {"streams": found, "endurance": lasting}
