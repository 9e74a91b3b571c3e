"""What `bench fleet` found: fields and rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.base import Report, TableRow, interval
from benchmarks.fleet.rivals import RIVALS
from benchmarks.fleet.worker import VllmReply

PHASES = ("cold", "restarted")
_RESAMPLES = 2000
Replies = Sequence[tuple[VllmReply, int]]  # each with the number of retries


@dataclass(frozen=True)
class Pass:
    """The requests of a round, by one rival; `prompts` are their lengths."""

    rival: str
    phase: str
    round: int
    prompts: Sequence[int]
    replies: Replies
    moved_bytes: Mapping[str, int]
    load_average: float

    def __str__(self) -> str:
        return str(PassRow.of([self], [self]))


@dataclass(frozen=True)
class PassRow:
    """All rounds of a rival. `ttft_s` are in the order of the requests, null for one that failed."""

    rival: str
    phase: str
    requests: int
    errors: int
    retries: int
    wrong_texts: int
    hit_share: float | None
    ttft_p50: float | None
    ttft_interval: tuple[float, float] | None
    moved_bytes: Mapping[str, int]
    load_average: Sequence[float]
    ttft_s: Sequence[float | None]

    @classmethod
    def of(cls, passes: Sequence[Pass], reference: Sequence[Pass]) -> PassRow:
        """A row of the passes of a rival in one phase; `reference` are those of vLLM alone in the same rounds."""
        replies = [reply for one in passes for reply in one.replies]
        texts = [reply.tokens for one in reference for reply, _ in one.replies]
        seconds = [reply.first_token_seconds if reply.error is None else None for reply, _ in replies]
        measured = [one for one in seconds if one is not None]
        names = passes[0].moved_bytes
        return cls(
            passes[0].rival,
            passes[0].phase,
            requests=len(replies),
            errors=sum(reply.error is not None for reply, _ in replies),
            retries=sum(retries for _, retries in replies),
            wrong_texts=sum(reply.differs_from(text) for (reply, _), text in zip(replies, texts, strict=True)),
            hit_share=sum(reply.cached_tokens for reply, _ in replies) / sum(sum(one.prompts) for one in passes),
            ttft_p50=statistics.median(measured) if measured else None,
            ttft_interval=_of_median(measured) if measured else None,
            moved_bytes={name: sum(one.moved_bytes[name] for one in passes) for name in names},
            load_average=[one.load_average for one in passes],
            ttft_s=seconds,
        )

    def __str__(self) -> str:
        return f"{self.phase}: {_shown(self)}, {_hits(self)} hits, {_moved(self)}, {self.errors} failed"


@dataclass(frozen=True)
class FaultRow:
    """Prompts that are stored, asked while something is broken."""

    rival: str
    fault: str
    requests: int
    errors: int
    retries: int
    wrong_texts: int
    hit_share: float
    ttft_max: float | None
    errors_told: Sequence[str]

    @classmethod
    def of(cls, rival: str, fault: str, prompts: Sequence[int], replies: Replies, wrong: int) -> FaultRow:
        """A row of replies to prompts of these lengths."""
        seconds = [reply.first_token_seconds for reply, _ in replies if reply.first_token_seconds is not None]
        errors = [reply.error for reply, _ in replies if reply.error is not None]
        return cls(
            rival,
            fault,
            requests=len(replies),
            errors=len(errors),
            retries=sum(retries for _, retries in replies),
            wrong_texts=wrong,
            hit_share=sum(reply.cached_tokens for reply, _ in replies) / sum(prompts),
            ttft_max=max(seconds, default=None),
            errors_told=errors,
        )

    def __str__(self) -> str:
        return f"{self.fault}: {self.errors} failed, {self.wrong_texts} wrong of {self.requests}"


def pooled(passes: Sequence[Pass]) -> list[PassRow]:
    """The passes of each rival and phase, as far as every rival has run the round."""
    rows = []
    for phase in PHASES:
        by_rival: dict[str, list[Pass]] = {}
        for one in passes:
            by_rival.setdefault(one.rival, []).extend([one] if one.phase == phase else [])
        rounds = min(map(len, by_rival.values()))
        if rounds and "vllm" in by_rival:
            rows += [PassRow.of(by_rival[name][:rounds], by_rival["vllm"][:rounds]) for name in sorted(by_rival)]
    return rows


def add_rows(report: Report, passes: Sequence[Pass], faults: Sequence[FaultRow], absent: Mapping[str, str]) -> None:
    """Fields and rows. `vs` compares Rekindle with each rival in the same phase, by request."""
    rows = pooled(passes)
    ours = {row.phase: row for row in rows if row.rival == "rekindle"}
    pairs = [(ours[row.phase], row) for row in rows if row.rival != "rekindle" and row.phase in ours]
    compared = [_compared(mine, theirs) for mine, theirs in pairs]
    broken = [row for row in faults if row.rival == "rekindle"]
    own: list[PassRow | FaultRow] = [*ours.values(), *broken]
    report.fields |= {
        "rows": [asdict(row) for row in rows],
        "faults": [asdict(row) for row in faults],
        "vs": compared,
        "errors": sum(row.errors for row in own),
        "wrong_texts": sum(row.wrong_texts for row in own),
        "not_measured": dict(absent),
    }
    for (mine, theirs), ratio in zip(pairs, compared, strict=True):
        name = f"{mine.phase}, {RIVALS[theirs.rival]}"
        bar = "<= 1 within its interval" if theirs.rival == "lmcache" else ""
        shown = (
            "-"
            if ratio["ttft_ratio"] is None
            else "{:.2f} ({:.2f}-{:.2f})".format(ratio["ttft_ratio"], *ratio["ttft_ratio_interval"])
        )
        report.rows.append(TableRow(f"{name}: first token", _shown(mine), _shown(theirs), shown, bar))
        report.rows.append(TableRow(f"{name}: hit share", _hits(mine), _hits(theirs)))
        report.rows.append(TableRow(f"{name}: moved", _moved(mine), _moved(theirs)))
        report.rows.append(TableRow(f"{name}: wrong texts", str(mine.wrong_texts), str(theirs.wrong_texts), bar="0"))
    for row in broken:
        other = next((one for one in faults if one.rival == "lmcache" and one.fault == row.fault), None)
        shown = "not measured" if other is None else f"{other.errors} / {other.wrong_texts}"
        measure = f"{row.fault}, {row.requests} requests: failed / wrong texts"
        report.rows.append(TableRow(measure, f"{row.errors} / {row.wrong_texts}", shown, bar="0 / 0"))


def _compared(ours: PassRow, theirs: PassRow) -> dict[str, Any]:
    """The median of the ratios of first tokens, request by request, with the interval of resampled medians."""
    pairs = [(a, b) for a, b in zip(ours.ttft_s, theirs.ttft_s, strict=True) if a is not None and b is not None]
    ratios = [a / b for a, b in pairs]
    return {
        "rival": theirs.rival,
        "phase": ours.phase,
        "ttft_ratio": statistics.median(ratios) if ratios else None,
        "ttft_ratio_interval": _of_median(ratios) if ratios else None,
        "hit_share_diff": (ours.hit_share or 0.0) - (theirs.hit_share or 0.0),
    }


def _of_median(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by resampling."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_RESAMPLES, len(values)))
    return interval(np.median(drawn, axis=1))


def _shown(row: PassRow) -> str:
    if row.ttft_p50 is None or row.ttft_interval is None:
        return "nothing came"
    low, high = row.ttft_interval
    return f"{row.ttft_p50 * 1e3:,.0f} ms ({low * 1e3:,.0f}-{high * 1e3:,.0f})"


def _hits(row: PassRow) -> str:
    return f"{100 * (row.hit_share or 0.0):.0f} %"


def _moved(row: PassRow) -> str:
    return ", ".join(f"{name} {count / 1e6:,.0f} MB" for name, count in row.moved_bytes.items()) or "nothing"
