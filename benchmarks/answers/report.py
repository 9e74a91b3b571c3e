"""What `python -m benchmarks answers` found, for programs and for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answers.ways import (
    DIRECT,
    KV_ANSWERS,
    KV_ONLY,
    NEW_TOKENS,
    NONE,
    PERCACHE,
    TOP_K,
    VERIFIED,
    WAYS,
    AnswerResult,
    Asked,
)
from benchmarks.base import Report, TableRow, interval
from benchmarks.quality import rouge_l
from rekindle.engine.base import Engine
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

BAR_MEAN, BAR_USER = 0.126, 0.344
MAX_FALSE = 0.02
BAR_PAIRS = 0.90
BAR_SCHEDULER = 0.14
_RESAMPLES = 2000

TextScore = Callable[[str, str], float]  # how near a text is to another


@dataclass
class UserResults:
    """One user's questions in every way."""

    set: str
    user: str
    asked: list[Asked]
    results: dict[str, list[AnswerResult]]  # of each way
    idle_seconds: dict[str, float]
    storage: list[dict[str, Any]]  # how much KV is known, by room
    near: list[dict[str, float]]  # of each question: how near was one foreseen, by source

    def mean(self, name: str) -> float:
        """The mean latency of a way."""
        return statistics.fmean(one.seconds for one in self.results[name])

    def is_false(self, place: int, one: AnswerResult, score: TextScore | None) -> bool:
        """Whether a stored answer was given that answers another question.

        Nobody wrote down what answers a foreseen question: its answer is wrong where it is further from the right one
        than what the model computes for the question that was asked.
        """
        if one.stored is None or one.stored.way != "direct":
            return False
        asked = self.asked[place]
        if one.stored.origin == "user":
            golds = {other.gold for other in self.asked if other.text == one.stored.question}
            return asked.gold is None or asked.gold not in golds
        if asked.gold is None or score is None:
            return asked.gold is None
        return score(asked.gold, one.text) < score(asked.gold, self.results[NONE][place].text)

    def against_none(self, name: str) -> dict[str, float]:
        """The mean latency of a way over that of computing, with an interval over the questions, 95 %."""
        pairs = np.array([(a.seconds, b.seconds) for a, b in zip(self.results[name], self.results[NONE], strict=True)])
        draws = pairs[np.random.default_rng(0).integers(0, len(pairs), (_RESAMPLES, len(pairs)))].sum(axis=1)
        low, high = interval(draws[:, 0] / draws[:, 1])
        return {"mean": self.mean(name) / self.mean(NONE), "low": low, "high": high}


@dataclass(frozen=True)
class AnswerResults:
    """Everything that was measured."""

    measured: Sequence[UserResults]
    schedule: dict[str, Any] | None  # None: not in a quick run
    guard: dict[str, Any]


def add_rows(report: Report, found: AnswerResults) -> None:
    """Fill the report."""
    measured = found.measured
    score = rouge_l()
    rows = [_row(name, measured, score) for name in (way.name for way in WAYS)]
    by_name = {row["mode"]: row for row in rows}
    safe = [row["mode"] for row in rows if not _is_ours(row["mode"]) and not row["false_hits"]]
    every = [row["mode"] for row in rows if not _is_ours(row["mode"])]
    equal = [
        a.text == b.text for one in measured for a, b in zip(one.results[NONE], one.results[VERIFIED], strict=True)
    ]
    fields: dict[str, Any] = {
        "users": [
            {
                "set": one.set,
                "user": one.user,
                "questions": len(one.asked),
                "verified_vs_none": one.against_none(VERIFIED),
            }
            | {name: one.mean(name) for name in by_name}
            for one in measured
        ],
        "rows": rows,
        "verified_equal": sum(equal) / len(equal),
        "reduction_vs_best": _reduction(measured, VERIFIED, safe),
        "reduction_users": _by_user(measured, VERIFIED, safe),
        "reduction_vs_best_direct": _reduction(measured, DIRECT, every),
        "reduction_vs_best_safe_direct": _reduction(measured, DIRECT, safe),
        "reduction_users_direct": _by_user(measured, DIRECT, every),
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
    }
    if score is None:
        fields["rouge_l_reason"] = "rouge-score is not installed (rekindle-llm[bench])"
    fields |= {
        "reduction_best_user": fields["reduction_users"]["best"],
        "reduction_best_user_direct": fields["reduction_users_direct"]["best"],
    }
    report.fields |= fields
    report.rows += _table(fields, by_name)


def _sources(measured: Sequence[UserResults]) -> list[dict[str, Any]]:
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


def _row(name: str, measured: Sequence[UserResults], score: TextScore | None) -> dict[str, Any]:
    results = [one for some in measured for one in some.results[name]]
    seconds = [one.seconds for one in results]
    golds = [asked.gold for some in measured for asked in some.asked]
    direct = [one for one in results if one.stored is not None and one.stored.way == "direct"]
    false = sum(some.is_false(place, one, score) for some in measured for place, one in enumerate(some.results[name]))
    scored = [score(gold, one.text) for gold, one in zip(golds, results, strict=True) if gold] if score else []
    return {
        "mode": name,
        "questions": len(results),
        "mean_latency_s": statistics.fmean(seconds),
        "p50": float(np.percentile(seconds, 50)),
        "p95": float(np.percentile(seconds, 95)),
        "answer_hits": len(direct),
        "predicted_hits": sum(one.stored is not None and one.stored.origin != "user" for one in direct),
        "drafted_share": sum(one.drafted_tokens for one in results) / (NEW_TOKENS * len(results)),
        "kv_hit_share": statistics.fmean(_known_share(one) for one in results),
        "false_hits": false,
        "rouge_l_gold": statistics.fmean(scored) if scored else None,
        "idle_seconds": sum(some.idle_seconds[name] for some in measured),
    }


def _known_share(one: AnswerResult) -> float:
    return one.known_tokens / one.prompt_tokens if one.prompt_tokens else 0.0


def _reduction(measured: Sequence[UserResults], ours: str, rivals: Sequence[str]) -> float:
    """By how much the mean latency is below that of the best rival, all questions counting the same."""

    def mean(name: str) -> float:
        return statistics.fmean(one.seconds for some in measured for one in some.results[name])

    return 1.0 - mean(ours) / min(map(mean, rivals))


def _by_user(measured: Sequence[UserResults], ours: str, rivals: Sequence[str]) -> dict[str, float]:
    """The same for the best, the median and the worst user, each against their own best rival."""
    found = [1.0 - some.mean(ours) / min(some.mean(name) for name in rivals) for some in measured]
    return {"best": max(found), "median": statistics.median(found), "worst": min(found)}


def _table(fields: dict[str, Any], by_name: dict[str, dict[str, Any]]) -> list[TableRow]:
    none = by_name[NONE]["mean_latency_s"]
    rows = [
        TableRow(
            name,
            f"{row['mean_latency_s']:.2f} s, p95 {row['p95']:.2f} s",
            f"{row['answer_hits']} given ({row['false_hits']} wrong), {row['kv_hit_share']:.0%} of KV known",
            f"{row['mean_latency_s'] / none:.2f}",
        )
        for name, row in by_name.items()
    ]
    guard = fields["guard"]
    rows += [
        TableRow("ours-verified below the best that gives no wrong answer", f"{fields['reduction_vs_best']:.1%}",
            fields["best_safe"], bar=f">= {BAR_MEAN:.1%}"),
        _users_row(fields["reduction_users"]),
        TableRow("ours-direct below the best that gives no wrong answer",
            f"{fields['reduction_vs_best_safe_direct']:.1%}", fields["best_safe"], bar=f">= {BAR_MEAN:.1%}"),
        TableRow("ours-direct below the best of all", f"{fields['reduction_vs_best_direct']:.1%}", fields["best"],
            bar=f">= {BAR_MEAN:.1%}"),
        _users_row(fields["reduction_users_direct"]),
        _worst_row(fields["users"]),
        TableRow("verified text equal to none", f"{fields['verified_equal']:.1%}", bar="100%"),
        TableRow("more KV known by foreseeing", f"{fields['prediction_gain_kv']:+.1%}", bar="> 0"),
        TableRow("more answers known by foreseeing", f"{fields['prediction_gain_answers']:+.1%}", bar="> 0"),
    ]  # fmt: skip
    rows += [] if fields["scheduler"] is None else _schedule_rows(fields["scheduler"])
    rows += [
        TableRow(
            f"questions foreseen from: {row['source']}",
            f"{row['near85_share']:.0%} at 0.85, {row['near70_share']:.0%} at 0.7",
            f"of {row['questions']} new ones",
        )
        for row in fields["sources"]
    ]
    if guard.get("near_misses"):
        share = guard["false_hits"] / guard["near_misses"]
        rows.append(TableRow("near misses that are served", f"{share:.1%} of {guard['near_misses']}",
                        f"{guard['cosine_false_hits']} by cosine", bar=f"<= {MAX_FALSE:.0%}"))  # fmt: skip
        rows.append(TableRow("questions in other words that are served", f"{guard['paraphrase_recall']:.1%}",
                        f"{guard['cosine_paraphrase_recall']:.1%} by cosine"))  # fmt: skip
    if guard.get("pairs_precision") is not None:
        both = f"{guard['pairs_precision']:.3f}, {guard['pairs_recall']:.3f}"
        rows.append(TableRow("labelled pairs: precision, recall", both,
                        f"{guard['cosine_precision']:.3f}, {guard['cosine_recall']:.3f} by cosine",
                        bar=f">= {BAR_PAIRS:.2f}"))  # fmt: skip
    return rows


def _users_row(found: dict[str, float]) -> TableRow:
    others = f"median {found['median']:.1%}, worst {found['worst']:.1%}"
    return TableRow("the same for the best user", f"{found['best']:.1%}", others, bar=f">= {BAR_USER:.1%}")


def _worst_row(users: Sequence[dict[str, Any]]) -> TableRow:
    """The user for whom `verified` takes longest beside computing."""
    worst = max((user["verified_vs_none"] for user in users), key=lambda found: found["low"])
    others = f"{worst['low']:.2f}-{worst['high']:.2f}"
    return TableRow("ours-verified, worst user, of computing", f"{worst['mean']:.2f}", others, bar="low end <= 1")


def _schedule_rows(cases: dict[str, Any]) -> list[TableRow]:
    rows = []
    for name, bar in (("raised", f">= {BAR_SCHEDULER:.0%}"), ("fallen", ""), ("room", "")):
        case = cases[name]
        known = [case["ways"][way]["later_known_tokens"] for way in ("rekindle", "always")]
        saved = case["saved_share"]
        rows.append(
            TableRow(
                f"idle work that the scheduler saves, {name}",
                "nothing was done" if saved is None else f"{saved:.1%}",
                f"{known[0]:.0f} tokens known later, without it {known[1]:.0f}",
                f"{case['later_latency_ratio']:.2f} of the time",
                bar,
            )
        )
    return rows


SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of what the store takes after the stream
MAX_QUESTIONS = 30


def measure_storage(engine: Engine, folder: Path, questions: Sequence[str]) -> list[dict[str, Any]]:
    """The share of stored KV of the questions for each size of the store, the largest first. Shrinks the store."""
    cache = folder / "cache"
    whole = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    rows = []
    for share in SHARES:
        limit = int(whole * share)
        with Session(
            engine, cache=str(cache), library=str(folder / "library"), memory_limit="0", disk_limit=limit, answers="off"
        ) as session:
            assert session.cache.store is not None
            session.cache.store.disk.room.prune(limit)
            known = [_known(session, question) for question in questions[:MAX_QUESTIONS]]
        rows.append({"share": share, "limit_bytes": limit, "known_share": statistics.fmean(known) if known else None})
    return rows


def _known(session: Session, question: str) -> float:
    """The share of a question's prompt that has KV."""
    request = session.prepare(question, top_k=TOP_K).request
    prompt = encode_prompt(session.engine, request)
    with session.cache.peek(request, prompt.tokens, prompt.prompt_layout) as prefill:
        return prefill.lookup.matches.length / len(prompt.tokens)
