"""What `python -m benchmarks chunks` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.base import Report, TableRow
from benchmarks.baselines.recompute_policies import CRAFTS
from benchmarks.chunks.modes import CRAFT, SIGNALS


def add_rows(report: Report) -> None:
    """Write the table from the fields."""
    fields = report.fields
    for row in fields["rows"]:
        if row.get("reason") is None:
            report.rows.append(_mode(row))
    for row in (fields.get("partial") or {"rows": ()})["rows"]:
        one = _mode(row)
        report.rows.append(replace(one, measure=f"one passage before changed: {one.measure}"))
    if fields.get("best") is not None and fields["best"]["kl"] is not None:
        _best(report)
    for name, result in (fields["streams"] or {}).items():
        if result["questions"]:
            _stream(report, name, result)
    endurance = fields["endurance"]
    if endurance is not None and endurance["questions"]:
        _endurance(report, endurance)
    if fields.get("probe_cost") is not None:
        report.rows.append(TableRow("prefill with scores / without", "", "", f"{fields['probe_cost']:.3f}"))


def _mode(row: Mapping[str, Any]) -> TableRow:
    shares = f"recomputed {row['recomputed']:.2f}, computed {row['computed_share']:.2f}"
    quality = "not judged: random weights"
    if row["kl"] is not None:
        rouge = "-" if row["rouge_l"] is None else f"{row['rouge_l']:.3f}"
        quality = f"ROUGE-L {rouge}, KL {row['kl']:.4f}, top-1 {row['top1']:.3f}"
        if (less := row["ours_kl_diff"]) is not None:
            quality += f"; ours - it: KL {less['mean']:+.4f} ({less['low']:+.4f} to {less['high']:+.4f})"
    times = f"{row['ttft_s']:.2f} s, {row['ttft_vs_none']:.2f}x none, {row['ttft_vs_prefix']:.2f}x prefix"
    return TableRow(_label(row), quality, shares, times)


def _label(row: Mapping[str, Any]) -> str:
    name, budget = row["mode"], row["budget"]
    if budget is None:
        return str(name)
    if name in CRAFTS:
        return f"{name}, alpha {budget:.2f}"
    return f"{name} alone {budget:.0%}" if name in SIGNALS and "*" not in name else f"{name} {budget:.0%}"


def _best(report: Report) -> None:
    best, against = report.fields["best"], report.fields["best_vs_cachecraft"]
    alpha = report.fields["cachecraft_alpha"]
    craft = next(row for row in report.fields["rows"] if row["mode"] == CRAFT and row["budget"] == alpha)
    if craft["kl"]:
        ours, theirs = (f"{row['kl']:.4f} (computes {row['computed_share']:.2f})" for row in (best, craft))
        report.rows.append(
            TableRow("KL, best / cache-craft", ours, theirs, f"{best['kl'] / craft['kl']:.2f}", "<= 0.5")
        )
    if against["rouge_l_diff"] is not None:
        interval = f"{against['rouge_l_diff']:+.3f} ({against['low']:+.3f} to {against['high']:+.3f})"
        report.rows.append(
            TableRow(
                "ROUGE-L, best - cache-craft",
                f"{best['rouge_l']:.3f}",
                f"{craft['rouge_l']:.3f}",
                interval,
                "low > 0.03, ours >= 0.87 (150 prompts)",
            )
        )


def _stream(report: Report, name: str, result: Mapping[str, Any]) -> None:
    before = result["computed_tokens_prefix"]
    for way, some in (
        ("reused", {**result, "computed_tokens": result["computed_tokens_reused"]}),
        ("warmed", result["warmed"]),
    ):
        report.rows.append(
            TableRow(
                f"{result['questions']} questions ({name}), {way}: computed tokens",
                f"{some['computed_tokens']:,}",
                f"{before:,} (prefix)",
                f"{some['reduction']:.0%} less",
                ">= 51 %",
            )
        )
        kl = "" if some["kl"] is None else f", KL {some['kl']:.4f}, top-1 {some['top1']:.3f}"
        sums, computing = some["ttft_vs_prefix_sums"], some["ttft_vs_none"]
        report.rows.append(
            TableRow(
                f"{result['questions']} questions ({name}), {way}: first token",
                f"{some['ttft_s']:.2f} s{kl}",
                f"{result['ttft_prefix_s']:.2f} s (prefix), {result['ttft_none_s']:.2f} s (none)",
                f"{some['ttft_vs_prefix']:.2f}x ({sums:.2f}x of sums), {computing:.2f}x none",
                ">= 2",
            )
        )
    for title, some, bar in (
        ("nothing found yet", result["first_sight"], ">= 1"),
        ("passages found", result["warmed"]["known"], ">= 2"),
    ):
        if some["questions"]:
            measure = f"{some['questions']} questions ({name}), {title}: first token / prefix"
            report.rows.append(TableRow(measure, f"{some['ttft_vs_prefix']:.2f} times as soon", bar=bar))


def _endurance(report: Report, result: Mapping[str, Any]) -> None:
    speed, worse = result["ttft_vs_prefix_slope"], result["kl_slope"]
    title = f"{result['questions']} questions in a row"
    if speed is not None:
        change = f"{speed['per_100']:+.2f} per 100 ({speed['low']:+.2f} to {speed['high']:+.2f})"
        report.rows.append(
            TableRow(f"{title}: speedup", f"{result['ttft_vs_prefix']:.2f}x", "1 (prefix)", change, "flat")
        )
    if worse is not None and result["kl"] is not None:
        change = f"{worse['per_100']:+.4f} per 100 ({worse['low']:+.4f} to {worse['high']:+.4f})"
        report.rows.append(TableRow(f"{title}: KL", f"{result['kl']:.4f}", "0 (exact)", change, "flat"))
