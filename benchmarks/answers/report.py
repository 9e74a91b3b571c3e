"""What `python -m benchmarks answers` found, for programs and for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.answers.lanes import (
    DIRECT,
    KV_ANSWERS,
    KV_ONLY,
    NEW_TOKENS,
    NONE,
    PERCACHE,
    VERIFIED,
    WAYS,
    Lane,
    Told,
)
from benchmarks.answers.stream import Asked
from benchmarks.base import Report, Row
from benchmarks.quality import rouge_l

BAR_MEAN, BAR_USER = 0.126, 0.344
MAX_FALSE = 0.02
BAR_PAIRS = 0.90
BAR_SCHEDULER = 0.14
MAX_LATENCY = 1.05  # what counts as equal, of times on a shared machine


@dataclass
class Measured:
    """One user's questions in every way."""

    set: str
    user: str
    asked: list[Asked]
    lanes: list[Lane]
    storage: list[dict[str, Any]]  # how much KV is known, by room
    near: list[dict[str, float]]  # of each question: how near was one foreseen, by source

    def told(self, name: str) -> list[Told]:
        """What came of them in one way."""
        return next(lane.told for lane in self.lanes if lane.way.name == name)

    def mean(self, name: str) -> float:
        """The mean latency of a way."""
        return statistics.fmean(one.seconds for one in self.told(name))

    def is_false(self, place: int, one: Told) -> bool:
        """Whether a stored answer was given that answers another question."""
        if one.stored is None or one.stored.way != "direct" or one.stored.origin != "user":
            return False
        asked = self.asked[place]
        golds = {other.gold for other in self.asked if other.text == one.stored.question}
        return asked.gold is None or asked.gold not in golds


@dataclass(frozen=True)
class Found:
    """Everything that was measured."""

    measured: Sequence[Measured]
    schedule: dict[str, Any] | None  # None: not in a quick run
    guard: dict[str, Any]
    foresight: list[dict[str, Any]]


def tell(report: Report, found: Found) -> None:
    """Fill the report."""
    measured = found.measured
    score = rouge_l()
    rows = [_row(name, measured, score) for name in (way.name for way in WAYS)]
    by_name = {row["mode"]: row for row in rows}
    safe = [row["mode"] for row in rows if not _is_ours(row["mode"]) and not row["false_hits"]]
    every = [row["mode"] for row in rows if not _is_ours(row["mode"])]
    equal = [a.text == b.text for one in measured for a, b in zip(one.told(NONE), one.told(VERIFIED), strict=True)]
    fields: dict[str, Any] = {
        "users": [
            {"set": one.set, "user": one.user, "questions": len(one.asked)} | {name: one.mean(name) for name in by_name}
            for one in measured
        ],
        "rows": rows,
        "verified_equal": sum(equal) / len(equal),
        "reduction_vs_best": _reduction(measured, VERIFIED, safe),
        "reduction_best_user": _best_user(measured, VERIFIED, safe),
        "reduction_vs_best_direct": _reduction(measured, DIRECT, every),
        "reduction_best_user_direct": _best_user(measured, DIRECT, every),
        "best_safe": min(safe, key=lambda name: by_name[name]["mean_latency_s"]),
        "best": min(every, key=lambda name: by_name[name]["mean_latency_s"]),
        "prediction_gain_kv": by_name[VERIFIED]["kv_hit_share"] - by_name[KV_ONLY]["kv_hit_share"],
        "prediction_gain_answers": (by_name[PERCACHE]["answer_hits"] - by_name[KV_ANSWERS]["answer_hits"])
        / max(1, by_name[NONE]["questions"]),
        "scheduler": found.schedule,
        "scheduler_saved_share": None if found.schedule is None else found.schedule["raised"]["saved_share"],
        "storage": [{"set": one.set, "user": one.user, **row} for one in measured for row in one.storage],
        "sources": _sources(measured),
        "guard": found.guard,
        "foresight": found.foresight,
    }
    if score is None:
        fields["rouge_l_reason"] = "rouge-score is not installed (rekindle[bench])"
    report.fields |= fields
    report.rows += _table(fields, by_name)


def _sources(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """How many new questions had been foreseen, from each source alone and from all of them."""
    pairs = [pair for one in measured for pair in zip(one.asked, one.near, strict=True)]
    found = [near for asked, near in pairs if asked.kind == "first"]
    names = [*sorted({name for near in found for name in near}), "all"]

    def share(name: str, least: float) -> float:
        nearest = [max(near.values(), default=0.0) if name == "all" else near.get(name, 0.0) for near in found]
        return sum(cosine >= least for cosine in nearest) / max(1, len(nearest))

    return [
        {"source": name, "questions": len(found), "near85_share": share(name, 0.85), "near70_share": share(name, 0.7)}
        for name in names
    ]


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _row(name: str, measured: Sequence[Measured], score: Callable[[str, str], float] | None) -> dict[str, Any]:
    told = [one for some in measured for one in some.told(name)]
    seconds = [one.seconds for one in told]
    golds = [asked.gold for some in measured for asked in some.asked]
    direct = [one for one in told if one.stored is not None and one.stored.way == "direct"]
    false = sum(some.is_false(place, one) for some in measured for place, one in enumerate(some.told(name)))
    scored = [score(gold, one.text) for gold, one in zip(golds, told, strict=True) if gold] if score else []
    lanes = [lane for some in measured for lane in some.lanes if lane.way.name == name]
    return {
        "mode": name,
        "questions": len(told),
        "mean_latency_s": statistics.fmean(seconds),
        "p50": float(np.percentile(seconds, 50)),
        "p95": float(np.percentile(seconds, 95)),
        "answer_hits": len(direct),
        "predicted_hits": sum(one.stored is not None and one.stored.origin != "user" for one in direct),
        "drafted_share": sum(one.drafted_tokens for one in told) / (NEW_TOKENS * len(told)),
        "kv_hit_share": statistics.fmean(_known_share(one) for one in told),
        "false_hits": false,
        "rouge_l_gold": statistics.fmean(scored) if scored else None,
        "idle_tflop": sum(lane.idle_flop for lane in lanes) / 1e12,
    }


def _known_share(one: Told) -> float:
    return one.known_tokens / one.prompt_tokens if one.prompt_tokens else 0.0


def _reduction(measured: Sequence[Measured], ours: str, rivals: Sequence[str]) -> float:
    """By how much the mean latency is below that of the best rival, all questions counting the same."""

    def mean(name: str) -> float:
        return statistics.fmean(one.seconds for some in measured for one in some.told(name))

    return 1.0 - mean(ours) / min(map(mean, rivals))


def _best_user(measured: Sequence[Measured], ours: str, rivals: Sequence[str]) -> float:
    return max(1.0 - some.mean(ours) / min(some.mean(name) for name in rivals) for some in measured)


def _table(fields: dict[str, Any], by_name: dict[str, dict[str, Any]]) -> list[Row]:
    none = by_name[NONE]["mean_latency_s"]
    rows = [
        Row(
            name,
            f"{row['mean_latency_s']:.2f} s, p95 {row['p95']:.2f} s",
            f"{row['answer_hits']} given ({row['false_hits']} wrong), {row['kv_hit_share']:.0%} of KV known",
            f"{row['mean_latency_s'] / none:.2f}",
        )
        for name, row in by_name.items()
    ]
    guard = fields["guard"]
    rows += [
        Row("ours-verified below the best that gives no wrong answer", f"{fields['reduction_vs_best']:.1%}",
            fields["best_safe"], "", f">= {BAR_MEAN:.1%}"),
        Row("the same for the best user", f"{fields['reduction_best_user']:.1%}", "", "", f">= {BAR_USER:.1%}"),
        Row("ours-direct below the best of all", f"{fields['reduction_vs_best_direct']:.1%}", fields["best"], "",
            f">= {BAR_MEAN:.1%}"),
        Row("the same for the best user", f"{fields['reduction_best_user_direct']:.1%}", "", "", f">= {BAR_USER:.1%}"),
        Row("verified text equal to none", f"{fields['verified_equal']:.1%}", "", "", "100%"),
        Row("more KV known by foreseeing", f"{fields['prediction_gain_kv']:+.1%}", "", "", "> 0"),
        Row("more answers known by foreseeing", f"{fields['prediction_gain_answers']:+.1%}", "", "", "> 0"),
    ]  # fmt: skip
    rows += [] if fields["scheduler"] is None else _schedule_rows(fields["scheduler"])
    rows += [
        Row(
            f"questions foreseen from: {row['source']}",
            f"{row['near85_share']:.0%} at 0.85, {row['near70_share']:.0%} at 0.7",
            f"of {row['questions']} new ones",
            "",
        )
        for row in fields["sources"]
    ]
    rows += [
        Row(
            f"foreseen of {row['set']}, {row['stride']} a document",
            f"{row['near85_share']:.0%} at 0.85, {row['near70_share']:.0%} at 0.7",
            f"{row['first_passage_warm_share']:.0%} of first passages warm",
            "",
        )
        for row in fields["foresight"]
        if row["stride"] == max(other["stride"] for other in fields["foresight"])
    ]
    if guard.get("near_misses"):
        share = guard["false_hits"] / guard["near_misses"]
        rows.append(Row("near misses that are served", f"{share:.1%} of {guard['near_misses']}",
                        f"{guard['cosine_false_hits']} by cosine", "", f"<= {MAX_FALSE:.0%}"))  # fmt: skip
        rows.append(Row("questions in other words that are served", f"{guard['paraphrase_recall']:.1%}",
                        f"{guard['cosine_paraphrase_recall']:.1%} by cosine", ""))  # fmt: skip
    if guard.get("pairs_precision") is not None:
        both = f"{guard['pairs_precision']:.3f}, {guard['pairs_recall']:.3f}"
        rows.append(Row("labelled pairs: precision, recall", both,
                        f"{guard['cosine_precision']:.3f}, {guard['cosine_recall']:.3f} by cosine", "",
                        f">= {BAR_PAIRS:.2f}"))  # fmt: skip
    return rows


def _schedule_rows(cases: dict[str, Any]) -> list[Row]:
    rows = []
    for name, bar in (("raised", f">= {BAR_SCHEDULER:.0%}"), ("fallen", ""), ("room", "")):
        case = cases[name]
        known = [case["ways"][way]["later_known_tokens"] for way in ("rekindle", "always")]
        saved = case["saved_share"]
        rows.append(
            Row(
                f"idle work that the scheduler saves, {name}",
                "nothing was done" if saved is None else f"{saved:.1%}",
                f"{known[0]:.0f} tokens known later, without it {known[1]:.0f}",
                f"{case['later_latency_ratio']:.2f} of the time",
                bar,
            )
        )
    return rows
