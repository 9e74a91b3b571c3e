"""What `bench serve` found: fields and rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.base import Report, TableRow, Timing, paired_ratio
from benchmarks.serve.clients import Answered, LoadResult

CLIENTS = (1, 4, 16)
STREAMS = 4
BARS = {"batch_ratio_4": ">= 1.5", "errors": "0"}
_MAX_ERRORS_TOLD = 5


@dataclass(frozen=True)
class LoadSetting:
    """The number of clients, with the cache or without."""

    clients: int
    cache: bool

    def __str__(self) -> str:
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return f"{clients}, cache {'on' if self.cache else 'off'}"


SETTINGS = tuple(LoadSetting(clients, cache) for clients in CLIENTS for cache in (True, False))
BASELINE = LoadSetting(1, cache=False)  # one after the other, and everything computed
_HEADLINE = LoadSetting(STREAMS, cache=True)


@dataclass
class ServeResults:
    """What was measured: for each setting, all replies of each round."""

    random_weights: bool
    trace_shared_share: float
    reply_tokens: int = 0
    stream_tokens: int = 0
    parallel: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)  # of the prompts of each round
    served: dict[LoadSetting, list[LoadResult]] = field(default_factory=lambda: {setting: [] for setting in SETTINGS})
    row: list[LoadResult] = field(default_factory=list)
    together: list[LoadResult] = field(default_factory=list)

    def good(self, setting: LoadSetting) -> list[Answered]:
        """The replies of all rounds that came as they should."""
        return [reply for served in self.served[setting] for reply in served.good]

    def first_tokens(self, setting: LoadSetting) -> list[float]:
        """Seconds until the first token of each."""
        return [reply.first_token_seconds for reply in self.good(setting)]

    def tokens_per_s(self, setting: LoadSetting) -> float:
        """The median over the rounds."""
        return statistics.median(served.tokens_per_s for served in self.served[setting])

    @property
    def everything(self) -> list[LoadResult]:
        """Whatever was asked."""
        return [*(served for rounds in self.served.values() for served in rounds), *self.row, *self.together]


def add_rows(report: Report, found: ServeResults) -> None:
    """Fields and rows."""
    rows = [_row_of(setting, found) for setting in SETTINGS]
    headline = rows[SETTINGS.index(_HEADLINE)]
    errors = [reply.error for served in found.everything for reply in served.replies if reply.error is not None]
    report.fields |= {
        "rounds": len(found.shared),
        "parallel": found.parallel,
        "reply_tokens": found.reply_tokens,
        "prompt_tokens": statistics.mean(found.prompt_tokens),
        "shared_share": statistics.mean(found.shared),
        "trace_shared_share": found.trace_shared_share,
        **{name: headline[name] for name in ("clients", "ttft_p50", "ttft_p99", "tokens_per_s")},
        "errors": len(errors),
        **_streams(found),
        "rows": rows,
        "errors_told": errors[:_MAX_ERRORS_TOLD],
    }
    report.rows += [row for clients in CLIENTS for row in _rows_of(clients, found)]
    report.rows += [
        TableRow(
            f"{STREAMS} streams of {found.stream_tokens} tokens, in a row / together",
            str(_timing(found.together)),
            str(_timing(found.row)),
            f"{report.fields['batch_ratio_4']:.2f}",
            BARS["batch_ratio_4"],
        ),
        TableRow("their texts equal", str(report.fields["equal_texts"]), bar="True"),
        TableRow("requests that failed", str(len(errors)), bar=BARS["errors"]),
    ]


def _row_of(setting: LoadSetting, found: ServeResults) -> dict[str, Any]:
    """One setting. Replies whose prompt was known for its half or more are warm, the others cold."""
    replies, served = found.good(setting), found.served[setting]
    warm = [reply.first_token_seconds for reply in replies if 2 * reply.cached_tokens >= reply.prompt_tokens]
    cold = [reply.first_token_seconds for reply in replies if 2 * reply.cached_tokens < reply.prompt_tokens]
    prompts = sum(reply.prompt_tokens for reply in replies)
    speeds = [one.tokens_per_s for one in served]
    return {
        "clients": setting.clients,
        "cache": "on" if setting.cache else "off",
        "ttft_p50": _percentile(found.first_tokens(setting), 50),
        "ttft_p99": _percentile(found.first_tokens(setting), 99),
        "ttft_warm_p50": _percentile(warm, 50),
        "ttft_cold_p50": _percentile(cold, 50),
        "tokens_per_s": found.tokens_per_s(setting),
        "tokens_per_s_spread": [min(speeds), max(speeds)],
        "requests": sum(len(one.replies) for one in served),
        "errors": sum(len(one.replies) - len(one.good) for one in served),
        "cached_share": sum(reply.cached_tokens for reply in replies) / prompts if prompts else None,
        "equal_share": None if found.random_weights else _equal_share(served, found.served[BASELINE]),
    }


def _streams(found: ServeResults) -> dict[str, Any]:
    """Replies at once against the same in a row."""
    fields = {
        "batch_ratio_4": paired_ratio(_timing(found.row), _timing(found.together)),
        "batch_row_s": _timing(found.row).as_json(),
        "batch_together_s": _timing(found.together).as_json(),
    }
    if found.random_weights:
        reason = "random weights have no likeliest token"
        return {**fields, "equal_texts": None, "equal_texts_reason": reason}
    share = _equal_share(found.together, found.row)
    return {**fields, "equal_texts": share == 1.0, "equal_texts_share": share}


def _equal_share(ours: Sequence[LoadResult], theirs: Sequence[LoadResult]) -> float | None:
    """The share of requests that got the same greedy text in both."""
    pairs = [
        (one, other)
        for mine, yours in zip(ours, theirs, strict=True)
        for one, other in zip(mine.replies, yours.replies, strict=True)
        if one.error is None and other.error is None
    ]
    return sum(one.text == other.text for one, other in pairs) / len(pairs) if pairs else None


def _timing(served: Sequence[LoadResult]) -> Timing:
    return Timing(tuple(one.seconds for one in served))


def _percentile(seconds: Sequence[float], percent: float) -> float | None:
    """The percentile of the values; None without values."""
    return float(np.percentile(seconds, percent, method="inverted_cdf")) if seconds else None


def _rows_of(clients: int, found: ServeResults) -> list[TableRow]:
    """Cache on against off, and against the same requests one after the other."""
    on, off = LoadSetting(clients, cache=True), LoadSetting(clients, cache=False)
    name = str(on).partition(",")[0]
    rows = []
    for percent in (50, 99):
        ours, theirs = (_percentile(found.first_tokens(setting), percent) for setting in (on, off))
        rows.append(_compared(f"{name}, first token p{percent}, cache on / off", ours, theirs, 1e3, "ms"))
    speed, without = found.tokens_per_s(on), found.tokens_per_s(off)
    rows.append(_compared(f"{name}, cache on / off", speed, without, 1, "tokens/s"))
    if clients > 1:
        alone, bare = found.tokens_per_s(LoadSetting(1, cache=True)), found.tokens_per_s(BASELINE)
        rows.append(_compared(f"{name} / one after the other, cache on", speed, alone, 1, "tokens/s"))
        rows.append(_compared(f"{name} / one after the other, cache off", without, bare, 1, "tokens/s"))
    return rows


def _compared(measure: str, ours: float | None, theirs: float | None, unit: float, name: str) -> TableRow:
    def result(value: float | None) -> str:
        return "-" if value is None else f"{value * unit:,.1f} {name}"

    return TableRow(measure, result(ours), result(theirs), f"{ours / theirs:.3f}" if ours and theirs else "-")
