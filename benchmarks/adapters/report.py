"""What `bench adapters` found: fields and rows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.adapters.modes import (
    BASELINES,
    EXACT,
    MOBILORA,
    MODES,
    NONE,
    OURS,
    PEFT,
    PREFIX,
    UTILITY,
    AdapterReply,
    CacheMode,
    Replies,
)
from benchmarks.adapters.workload import AppWorkload, Kind
from benchmarks.base import Report, TableRow, known, mean

BARS = {
    "reduction_vs_best": ">= 0.351",
    "lossless_ratio": "<= 1 in every scenario",
    "delta_bits": "<= 2.75",
    "top1": ">= 0.95",
    "kl": "<= 0.015",
    "plain_kl": ">= 5 x ours",
}
_HIT = 0.5  # of a prompt's tokens: then the request counts as a hit
# Ours with one part changed.
_ABLATIONS = {"without_deltas": PREFIX, "with_utility": UTILITY, "without_loss": EXACT, "as_published": MOBILORA}


@dataclass(frozen=True)
class ModeResult:
    """What one mode did in one scenario; `reason` says why it did not."""

    mode: CacheMode
    reason: str | None
    answers: tuple[AdapterReply, ...]
    filled: tuple[AdapterReply, ...]

    @classmethod
    def of(cls, mode: CacheMode, replies: Sequence[Replies], filling: int) -> ModeResult:
        """What a mode said to each request."""
        found = [reply.get(mode.name) for reply in replies]
        answered = [
            [one for one in some if isinstance(one, AdapterReply)] for some in (found[:filling], found[filling:])
        ]
        reason = next((one for one in found if isinstance(one, str)), None)
        return cls(mode, reason, tuple(answered[1]), tuple(answered[0]))

    @property
    def peak_bytes(self) -> int:
        """The most that the folder took."""
        return max((reply.peak_bytes for reply in (*self.filled, *self.answers)), default=0)

    @property
    def kept(self) -> dict[str, Any]:
        """What it holds in the end, and what went or was not taken."""
        replies = [*self.filled, *self.answers]
        lost = Counter[str]()
        for reply in replies:
            lost.update(reply.lost)
        accounted = max(reply.accounted_bytes for reply in replies)
        return {"accounted_bytes": accounted, "bytes_per_token": replies[-1].bytes_per_token, **lost}

    def mean_ttft_s(self, kind: Kind | None = None) -> float | None:
        """Of the measured requests, or those of one kind; None of none."""
        return mean([answer.ttft_s for answer in self.answers if kind in (None, answer.kind)])


@dataclass(frozen=True)
class ScenarioResult:
    """What one scenario gave."""

    workload: AppWorkload
    served: Mapping[str, ModeResult]
    working_set_bytes: int
    limit_bytes: int

    def ttft_s(self, mode: str) -> float | None:
        """The mean of a mode; None if it was not measured."""
        served = self.served.get(mode)
        return None if served is None else served.mean_ttft_s()

    @property
    def best(self) -> str | None:
        """The best one of the baselines."""
        means = {mode: seconds for mode in BASELINES if (seconds := self.ttft_s(mode)) is not None}
        return min(means, key=lambda mode: means[mode]) if means else None

    @property
    def computed(self) -> ModeResult:
        """What nothing was reused for: with our engine where that was measured, else with PEFT."""
        return self.served.get(NONE) or self.served[PEFT]

    def ratio(self, mode: str) -> float | None:
        """A mode's time to the first token over the best baseline's."""
        reduction = self.reduction(mode, self.best)
        return None if reduction is None else 1 - reduction

    def reduction(self, mode: str, against: str | None) -> float | None:
        """By how much a mode's first tokens come sooner, as a share."""
        ours, theirs = self.ttft_s(mode), None if against is None else self.ttft_s(against)
        return None if ours is None or theirs is None else 1 - ours / theirs


def add_rows(report: Report, results: Sequence[ScenarioResult], deltas: Mapping[str, Any]) -> None:
    """Fields and rows."""
    rows = [_row_of(one, served.mode) for one in results for served in one.served.values()]
    report.fields |= {
        "scenarios": [_scenario_of(one) for one in results],
        **deltas,
        "reduction_vs_best": mean([one.reduction(OURS, one.best) for one in results]),
        "lossless_ratio": max(known(one.ratio(EXACT) for one in results), default=None),
        "reduction_by_mode": {mode.name: _compared(results, mode.name, None) for mode in MODES},
        "reduction_with_filling": mean([_reduction_with_filling(one) for one in results]),
        "ablations": {name: _compared(results, OURS, mode) for name, mode in _ABLATIONS.items()},
        "within_limit": all(row["peak_bytes"] <= row["limit_bytes"] for row in rows if row["peak_bytes"] is not None),
        "texts_equal": _texts_equal(rows),
        "rows": rows,
        "used_bytes": {served.mode.name: _used(served) for served in results[0].served.values()},
    }
    if report.fields["reduction_vs_best"] is None:
        report.fields["reduction_reason"] = _reason(results)
    report.rows += [row for one in results for row in _scenario_rows(one)]
    report.rows += _last_rows(report.fields)


def _compared(results: Sequence[ScenarioResult], mode: str, against: str | None) -> float | None:
    """By how much a mode comes sooner than another, or the best baseline: of the scenarios that have both."""
    found = [one.reduction(mode, against or one.best) for one in results]
    return mean([share for share in found if share is not None])


def _scenario_of(result: ScenarioResult) -> dict[str, Any]:
    work = result.workload
    return {
        "scenario": work.scenario.name,
        "adapters": work.scenario.adapters,
        "input_tokens": work.scenario.input_tokens,
        "usage": work.usage,
        "apps": len({ask.app for ask in work.asks}),
        "requests": max(len(served.answers) for served in result.served.values()),
        "filling": work.filling,
        "prompt_tokens": statistics.mean(len(ask.prompt) for ask in work.measured),
        "pairs": len({(ask.adapter, ask.prompt[:32]) for ask in work.asks}),
        "max_hit_share": work.max_hit_share,
        "lru_hit_share": work.lru_hit_share,
        "working_set_bytes": result.working_set_bytes,
        "limit_bytes": result.limit_bytes,
        "best_baseline": result.best,
        "reduction_vs_best": result.reduction(OURS, result.best),
        "lossless_ratio": result.ratio(EXACT),
    }


def _row_of(result: ScenarioResult, mode: CacheMode) -> dict[str, Any]:
    served = result.served[mode.name]
    about = {"scenario": result.workload.scenario.name, "mode": mode.name}
    if served.reason is not None or not served.answers:
        nothing = dict.fromkeys(("mean_ttft_s", "hit_share", "peak_bytes"))
        return {**about, **nothing, "limit_bytes": result.limit_bytes, "reason": served.reason or "nothing was asked"}
    answers, theirs = served.answers, result.computed.answers
    return {
        **about,
        "mean_ttft_s": served.mean_ttft_s(),
        "median_ttft_s": statistics.median(answer.ttft_s for answer in answers),
        "conversation_ttft_s": served.mean_ttft_s("conversation"),
        "writing_ttft_s": served.mean_ttft_s("writing"),
        "hit_share": sum(answer.reused_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers),
        "hits": sum(answer.reused_tokens >= _HIT * answer.prompt_tokens for answer in answers),
        "requests": len(answers),
        "misses": dict(Counter(answer.miss for answer in answers if answer.miss is not None)),
        "peak_bytes": served.peak_bytes,
        "limit_bytes": result.limit_bytes,
        **served.kept,
        "equal_share": mean([float(a.tokens == b.tokens) for a, b in zip(answers, theirs, strict=False)]),
    }


def _reduction_with_filling(result: ScenarioResult) -> float | None:
    """The same against whole KV for each adapter, where the requests that fill empty caches count as well."""
    ours, theirs = result.served[OURS], result.served[PREFIX]
    means = [mean([answer.ttft_s for answer in (*some.filled, *some.answers)]) for some in (ours, theirs)]
    return None if means[0] is None or means[1] is None else 1 - means[0] / means[1]


def _texts_equal(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether every mode that must gave the texts of our engine without a cache; None if that was not measured."""
    exact = {mode.name for mode in MODES if mode.exact and mode.caches}
    compared = {row["scenario"] for row in rows if row["mode"] == NONE and row.get("equal_share") is not None}
    shares = [row["equal_share"] for row in rows if row["mode"] in exact and row["scenario"] in compared]
    return all(share == 1.0 for share in shares) if shares else None


def _used(served: ModeResult) -> list[int]:
    """What the folder took after each request."""
    return [answer.used_bytes for answer in (*served.filled, *served.answers)]


def _reason(results: Sequence[ScenarioResult]) -> str:
    reasons = {served.reason for one in results for served in one.served.values() if served.reason is not None}
    return "; ".join(sorted(reasons)) or "nothing was asked"


def _scenario_rows(result: ScenarioResult) -> list[TableRow]:
    name, best = result.workload.scenario.name, result.best
    rows = []
    for served in result.served.values():
        mode, mean = served.mode, served.mean_ttft_s()
        row = _row_of(result, mode)
        ratio, baseline = "", ""
        if mode.name not in BASELINES and mean is not None and best is not None:
            theirs = result.ttft_s(best)
            assert theirs is not None
            ratio, baseline = f"{mean / theirs:.3f}", f"{theirs:.3f} s ({best})"
        if mean is None:
            rows.append(TableRow(f"{name}, {mode.name}: {mode.title}", f"- ({served.reason})", baseline, ratio))
            continue
        ours = f"{mean:.3f} s, {row['hit_share']:.0%} reused"
        if mode.caches:
            ours += f", peak {served.peak_bytes / 1e6:,.1f} of {result.limit_bytes / 1e6:,.1f} MB"
        rows.append(TableRow(f"{name}, {mode.name}: {mode.title}", ours, baseline, ratio))
    return rows


def _last_rows(fields: Mapping[str, Any]) -> list[TableRow]:
    def number(name: str, digits: int = 3) -> str:
        value = fields.get(name)
        return "-" if value is None else f"{value:.{digits}f}"

    worse = ""
    if fields.get("plain_kl") is not None and fields.get("kl"):
        worse = f"{fields['plain_kl'] / fields['kl']:.1f}"
    return [
        TableRow(
            "first token sooner than the best baseline", number("reduction_vs_best"), bar=BARS["reduction_vs_best"]
        ),
        TableRow("lossless / best baseline, worst scenario", number("lossless_ratio"), bar=BARS["lossless_ratio"]),
        *(
            TableRow(f"all, against {name.replace('_', ' ')}", "" if share is None else f"{share:+.1%}")
            for name, share in fields["ablations"].items()
        ),
        TableRow(
            "bits of a difference", number("delta_bits", 2), number("delta_bits_lossless", 2), bar=BARS["delta_bits"]
        ),
        TableRow("most likely token the same", number("top1"), bar=BARS["top1"]),
        TableRow("KL, median of adapters", number("kl", 4), f"{number('plain_kl', 4)} (plain)", worse, BARS["kl"]),
        TableRow("KL, plain of the same size", number("plain_kl", 4), number("kl", 4), worse, BARS["plain_kl"]),
        TableRow("as published: bits, KL", number("mobilora_bits", 2), number("mobilora_kl", 5)),
        TableRow("read back", f"{number('decode_mb_s', 0)} MB/s"),
        TableRow("within the limit", str(fields["within_limit"]), bar="True"),
        TableRow("same texts where nothing is lost", str(fields["texts_equal"]), bar="True"),
    ]
