"""What `python -m benchmarks stream` found, for programs and for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.base import Report, TableRow, known
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import KL_BUDGET, LEVEL, LEVELS, StreamMode
from benchmarks.stream.site import StreamRun

CHANGING = 2.0  # the fastest tenth of a prompt's time over the slowest: from here on the bandwidth changes
NEAR_RATIOS = (0.5, 2.0)  # between which both lanes matter
BAR_OVERLAP, BAR_FIXED, BAR_BIDIRECTIONAL, BAR_CHANGING, BAR_SINGLE = 0.90, 1.3, 0.99, 1.05, 0.97
BAR_EXACT, BAR_PREDICTOR, BAR_TROUBLE = 1.05, 0.10, 1.05
STREAM, OURS, AT_LEVEL = f"stream {LEVEL}", "ours", f"ours {LEVEL}"
RIVALS = {"sparkv": "sparkv", "cachegen": "cachegen", "q2": "stream q2", "one_level": AT_LEVEL}


@dataclass(frozen=True)
class TracePass:
    """Some ways over one trace at one ratio, each once, in turns."""

    window_seconds: float  # in which all of the context comes at `LEVEL`
    change: float  # of the bandwidth while both lanes work: see `Trace.change`
    runs: tuple[StreamRun, ...]
    skipped: Mapping[str, float] = field(default_factory=dict)  # ways, and how long they would stream

    def ttft(self, name: str) -> float | None:
        """The time of one way; None if it did not run."""
        return next((run.ttft_s for run in self.runs if run.mode.name == name), None)

    def against_ours(self, name: str) -> float | None:
        """The time of one way as a multiple of ours."""
        return _over(self.ttft(name), self.ttft(OURS))

    def overlap_efficiency(self, computed: str) -> float | None:
        """See `TraceCase`."""
        local, stream, ours = self.ttft(computed), self.ttft(STREAM), self.ttft(AT_LEVEL)
        if local is None or stream is None or ours is None:
            return None
        question = next(run.question_s for run in self.runs if run.mode.name == "local")
        return (question + 1 / (1 / (local - question) + 1 / (stream - question))) / ours


@dataclass(frozen=True, eq=False)
class TraceCase:
    """One trace at one ratio. What is compared was measured in the same pass."""

    trace: str
    ratio: float
    passes: Sequence[TracePass]
    modes: Sequence[StreamMode]  # of the sets that were measured
    kls: Mapping[str, float] = field(default_factory=dict)  # of each level, as published

    @property
    def change(self) -> float:
        """How much the bandwidth changes while both lanes work."""
        return statistics.median(one.change for one in self.passes)

    @property
    def skipped(self) -> dict[str, float]:
        """Ways that were not run, and how long they would stream."""
        return {name: seconds for one in self.passes for name, seconds in one.skipped.items()}

    def of(self, name: str) -> list[StreamRun]:
        """The runs of one way."""
        return [run for one in self.passes for run in one.runs if run.mode.name == name]

    def ttft(self, name: str) -> float | None:
        """The median of one way; None if it did not run."""
        return _median(run.ttft_s for run in self.of(name))

    def against_ours(self, name: str) -> float | None:
        """The time of one way as a multiple of ours."""
        return _median(one.against_ours(name) for one in self.passes)

    def overlap_efficiency(self, computed: str = "local") -> float | None:
        """The ideal, both lanes at full speed until the end, as a share of the time that ours took at the same level.

        `computed` is the way that says how fast the compute lane is: `plain` knows no chunks.
        """
        return _median(one.overlap_efficiency(computed) for one in self.passes)

    @property
    def vs_best_single(self) -> float | None:
        """The sooner of computing and streaming, as a multiple of ours; no level whose KL ours may not have."""
        levels = [f"stream {level}" for level in LEVELS if self.kls.get(level, 0.0) <= KL_BUDGET]
        known = (self.against_ours(name) for name in ("local", "plain", *levels))
        return min((ratio for ratio in known if ratio is not None), default=None)


@dataclass(frozen=True, eq=False)
class StreamResults:
    """Everything that was measured."""

    cases: Sequence[TraceCase]
    measured: LayerTimings
    schedules: Mapping[str, Any]
    sensitivity: Sequence[Mapping[str, Any]]  # none in a quick run
    trouble: Sequence[Mapping[str, Any]]  # nor this
    passages: Sequence[Mapping[str, Any]]  # nor this
    simulated: Sequence[Mapping[str, Any]]  # nor this
    kls: Mapping[str, float]  # of each level, as published
    local_seconds: float
    sizes: Mapping[str, int]
    context_tokens: int
    question_tokens: int
    made: bool  # the traces were
    sample: bool  # the text is the package's own
    judged: bool  # quality means something
    quick: bool


def add_rows(report: Report, found: StreamResults) -> None:
    """Fill the report."""
    cases = found.cases
    changing = [case for case in cases if case.change >= CHANGING]
    near = [case for case in cases if NEAR_RATIOS[0] <= case.ratio <= NEAR_RATIOS[1]]
    whole, top = found.measured.whole_model, found.measured.top_model
    overlaps = known(case.overlap_efficiency() for case in near)
    fields: dict[str, Any] = {
        "text": "the sample that the package ships" if found.sample else "as given with --data",
        "traces": "made by code" if found.made else "as given with --traces",
        "context_tokens": found.context_tokens,
        "question_tokens": found.question_tokens,
        "level": LEVEL,
        "level_bytes": dict(found.sizes),
        "level_kl": dict(found.kls),
        "kl_budget": KL_BUDGET,
        "simulated": list(found.simulated) or None,
        "local_s": found.local_seconds,
        "rows": [_row(case, mode, found.judged) for case in cases for mode in case.modes],
        "cases": [_case(case) for case in cases],
        "overlap_efficiency": _median(overlaps),
        "overlap_efficiency_worst": min(overlaps, default=None),
        "overlap_efficiency_plain": _median(case.overlap_efficiency("plain") for case in near),
        "local_vs_plain": _median(_over(case.ttft("local"), case.ttft("plain")) for case in cases),
        "vs_fixed": _versus(cases, "fixed"),
        "vs_fixed_changing": _versus(changing, "fixed"),
        "vs_fixed_window": _versus(cases, "fixed-window"),
        "vs_bidirectional": _versus(cases, "bidirectional"),
        "vs_bidirectional_worst": min(known(case.against_ours("bidirectional") for case in cases), default=None),
        "vs_bidirectional_changing": _versus(changing, "bidirectional"),
        **{f"vs_{rival}": _versus(cases, name) for rival, name in RIVALS.items()},
        "worst_vs_best_single": min(known(case.vs_best_single for case in cases), default=None),
        "sensitivity": list(found.sensitivity) or None,
        "trouble": list(found.trouble) or None,
        "passages": list(found.passages) or None,
        "trouble_worst": max((row["vs_local"] for row in found.trouble), default=None),
        **found.schedules,
        "predictor_error": whole.mlp_error,
        "roofline_error": whole.roofline_error,
        "predictor": whole.kind,
        "top_predictor_error": top.mlp_error,
        "top_roofline_error": top.roofline_error,
        "top_predictor": top.kind,
        "samples": len(found.measured.whole),
    }
    report.fields |= {**fields, **_reasons(found, bool(changing))}
    report.rows += _table(found, fields)


def _reasons(found: StreamResults, changing: bool) -> dict[str, str]:
    reasons = {}
    if not found.judged:
        reasons["kl_reason"] = "a model of random weights says nothing about quality"
    if found.quick:
        names = ("vs_fixed_window", "vs_sparkv", "vs_cachegen", "vs_q2", "sensitivity", "trouble", "passages")
        reasons |= {f"{name}_reason": "not in a quick run" for name in names}
    else:
        missing = (name for name in ("sensitivity", "trouble", "passages", "simulated") if not getattr(found, name))
        reasons |= {f"{name}_reason": "not reached in time, or not for this model" for name in missing}
    if not changing:
        reasons["changing_reason"] = f"no trace changes by a factor of {CHANGING:g} while the context comes"
    return reasons


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _median(values: Iterable[float | None]) -> float | None:
    measured = known(values)
    return statistics.median(measured) if measured else None


def _versus(cases: Sequence[TraceCase], name: str) -> float | None:
    return _median(case.against_ours(name) for case in cases)


def _row(case: TraceCase, mode: StreamMode, judged: bool) -> dict[str, Any]:
    """One way over one trace."""
    runs = case.of(mode.name)
    row: dict[str, Any] = {"trace": case.trace, "ratio": case.ratio, "mode": mode.name, "level": mode.level}
    if not runs:
        nothing = dict.fromkeys(("ttft_s", "bytes", "streamed_share", "kl", "top1"))
        return {**row, **nothing, "reason": f"not run: it would stream for {case.skipped[mode.name]:.1f} s"}

    def middle(of: Callable[[StreamRun], float]) -> float:
        return statistics.median(map(of, runs))

    failed = sorted({run.failed for run in runs if run.failed is not None})
    return {
        **row,
        "ttft_s": middle(lambda run: run.ttft_s),
        "bytes": middle(lambda run: run.bytes),
        "streamed_share": middle(lambda run: run.streamed_share),
        "kl": middle(lambda run: run.kl) if judged else None,
        "top1": middle(lambda run: run.top1) if judged else None,
        "find_s": middle(lambda run: run.find_s),
        "question_s": middle(lambda run: run.question_s) if mode.kind != "plain" else None,
        "revisions": middle(lambda run: run.revisions),
        "slices": dict(runs[-1].slices),
        "expected_kl": runs[-1].expected_kl if judged else None,
        "failed": failed or None,
    }


def _case(case: TraceCase) -> dict[str, Any]:
    return {
        "trace": case.trace,
        "ratio": case.ratio,
        "measured_ratio": _over(case.ttft(STREAM), case.ttft("local")),
        "window_s": statistics.median(one.window_seconds for one in case.passes),
        "change": case.change,
        "overlap_efficiency": case.overlap_efficiency(),
        "vs_fixed": case.against_ours("fixed"),
        "vs_bidirectional": case.against_ours("bidirectional"),
        "vs_best_single": case.vs_best_single,
    }


def _table(found: StreamResults, fields: Mapping[str, Any]) -> list[TableRow]:
    rows = []
    for case in found.cases:
        local = case.ttft("local")
        for mode in case.modes:
            seconds, runs = case.ttft(mode.name), case.of(mode.name)
            title = f"{case.trace}, ratio {case.ratio:g}: {mode.name}"
            if seconds is None or local is None:
                rows.append(TableRow(title, "not run", f"would stream for {case.skipped[mode.name]:.1f} s"))
                continue
            kl = f", KL {statistics.median(run.kl for run in runs):.4f}" if found.judged else ""
            share = statistics.median(run.streamed_share for run in runs)
            size = statistics.median(run.bytes for run in runs) / 1e6
            row_text = f"{seconds:.2f} s, {share:.0%} streamed, {size:.1f} MB{kl}"
            rows.append(TableRow(title, row_text, f"{local:.2f} s (local)", f"{seconds / local:.2f}"))
    rows += [
        TableRow("ideal overlap / ours, ratios 0.5 to 2", _number(fields["overlap_efficiency"]),
            f"worst {_number(fields['overlap_efficiency_worst'])}", bar=f">= {BAR_OVERLAP:.2f}"),
        TableRow("the same, if computing knew no chunks", _number(fields["overlap_efficiency_plain"]),
            f"computing chunk by chunk takes {_number(fields['local_vs_plain'])} of that time"),
        TableRow("fixed hybrid / ours", _number(fields["vs_fixed"]),
            f"{_number(fields['vs_fixed_window'])} if it knew the mean to come"),
        TableRow(f"the same, bandwidth changes {CHANGING:g} times", _number(fields["vs_fixed_changing"]),
            bar=f">= {BAR_FIXED}"),
        *(TableRow(f"{name} / ours", _number(fields[f"vs_{rival}"])) for rival, name in RIVALS.items()),
        TableRow("bidirectional / ours", _number(fields["vs_bidirectional"]),
            f"worst {_number(fields['vs_bidirectional_worst'])}", bar=f">= {BAR_BIDIRECTIONAL}"),
        TableRow("the same, changing bandwidth", _number(fields["vs_bidirectional_changing"]),
            bar=f">= {BAR_CHANGING}"),
        TableRow("sooner of computing and streaming / ours, worst", _number(fields["worst_vs_best_single"]),
            bar=f">= {BAR_SINGLE}"),
        TableRow(f"our schedule / the exact one ({fields['exact_cells']} cells), worst",
        _number(fields["greedy_vs_exact"]), bar=f"<= {BAR_EXACT}"),
        TableRow(f"finding our schedule ({fields['schedule_cells']} cells)", f"{fields['schedule_ms']:.2f} ms",
            f"exact, {fields['exact_cells']} cells: {_number(fields['exact_ms'], ' ms')}"),
        TableRow("error of the network for layers, held out", f"{fields['predictor_error']:.1%}",
            f"{fields['roofline_error']:.1%} (roofline)", f"used: {fields['predictor']}", f"<= {BAR_PREDICTOR:.0%}"),
        TableRow("the same, keys and values alone", f"{fields['top_predictor_error']:.1%}",
            f"{fields['top_roofline_error']:.1%} (roofline)", f"used: {fields['top_predictor']}"),
    ]  # fmt: skip
    return rows + _more_rows(found)


def _more_rows(found: StreamResults) -> list[TableRow]:
    """Several contexts in one prompt, what trouble costs, and what the gain depends on."""
    rows = []
    for row in found.passages:
        share, rouge = row["streamed_tokens"], _number(row["rouge_l"])
        row_text = f"{row['ours_s']:.2f} s, {share} tokens streamed, KL {row['kl']:.4f}, ROUGE-L {rouge}"
        others = f"{row['computed_s']:.2f} s (computed), {row['fetched_s']:.2f} s (fetched, then reused)"
        title = f"{row['passages']} passages, ratio {row['ratio']:g}"
        rows.append(TableRow(title, row_text, others, f"{row['ours_s'] / row['computed_s']:.2f}"))
    rows += _simulated_rows(found.simulated)
    for row in found.trouble:
        seconds, alone = f"{row['ours_s']:.2f} s", f"{row['local_s']:.2f} s (no origin)"
        rows.append(
            TableRow(f"origin: {row['trouble']}", seconds, alone, f"{row['vs_local']:.3f}", f"<= {BAR_TROUBLE}")
        )
    for row in found.sensitivity:
        row_text = f"{row['ours_s']:.2f} s, {row['streamed_share']:.0%} streamed, {row['overlap']:.2f} of the ideal"
        took = f"{row['ours_s'] / row['local_s']:.2f}"
        rows.append(TableRow(f"{row['what']}: {row['value']}", row_text, f"{row['local_s']:.2f} s (local)", took))
    return rows


def _simulated_rows(simulated: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """The goals, by length."""
    rows = []
    for tokens in dict.fromkeys(row["tokens"] for row in simulated):
        own = [row for row in simulated if row["tokens"] == tokens]
        near = [row["overlap_efficiency"] for row in own if NEAR_RATIOS[0] <= row["ratio"] <= NEAR_RATIOS[1]]
        changing = [row["vs_fixed"] for row in own if row["change"] >= CHANGING]
        others = ", ".join(
            f"{name} {statistics.median(row[f'vs_{name}'] for row in own):.2f} of ours"
            for name in ("bidirectional", *RIVALS)
        )
        title, worst = f"{tokens:,} tokens, simulated over {len(own)} cases", min(row["vs_best_single"] for row in own)
        rows += [
            TableRow(f"{title}: ideal overlap / ours", _number(statistics.median(near)), f"worst {min(near):.3f}",
                bar=f">= {BAR_OVERLAP:.2f}"),
            TableRow(f"{title}: fixed / ours, changing bandwidth", _number(_median(changing)), others,
                bar=f">= {BAR_FIXED}"),
            TableRow(f"{title}: sooner single / ours, worst", _number(worst),
                f"expected KL at most {max(row['ours_kl'] for row in own):.4f}", bar=f">= {BAR_SINGLE}"),
        ]  # fmt: skip
    return rows


def _number(value: float | None, unit: str = "") -> str:
    return "not measured" if value is None else f"{value:.3f}{unit}"
