"""The last requests of a server, for its page and `rekindle top`: in memory, bounded in number and in text.

The texts of a request are kept only if an operator sent it, under the server's own salt.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from rekindle.cache.prefix_cache import PromptPrefill
from rekindle.core.keys import token_bytes
from rekindle.core.reply import Reply, Reuse, TextPiece
from rekindle.core.scope import Scope
from rekindle.server.job import Event, Finished, Planned
from rekindle.session.ask import Prepared

_MAX_ROWS = 10_000
_MAX_TEXT_BYTES = 16 << 20  # of the tokens of prompts, 4 each; replies are shorter

_MAX_SPANS = 256  # of a row: a bar is hardly wider
_ENDED = ("done", "cancelled", "failed")
SourceSpan = tuple[int, int, str]
State = Literal["queued", "lookup", "prefill", "decode", "done", "cancelled", "failed"]


@dataclass(eq=False)
class RecordedRequest:
    """A request on its way, or answered. Changed by the event loop only.

    marks     when each state began, in seconds after it arrived
    spans     runs of its prompt: start, stop, source; as planned, then as it came out; coarse if there are many
    runs      the same, all of them; empty where texts are not kept
    tokens    of its prompt, as bytes; empty where texts are not kept
    prepared  the passages of a question and the stored answer it stood on; None where texts are not kept
    """

    id: int
    scope: Scope
    app: str
    model: str
    adapter: str | None
    keeps_text: bool
    on_change: Callable[[RecordedRequest], None]
    at: float = field(default_factory=time.time)
    state: State = "queued"
    marks: dict[str, float] = field(default_factory=lambda: {"queued": 0.0})
    spans: list[SourceSpan] = field(default_factory=list)
    runs: list[SourceSpan] = field(default_factory=list)
    tokens: bytes = b""
    reuse: Reuse | None = None
    reply: Reply | None = None
    prepared: Prepared | None = None
    problem: str | None = None
    written: int = 0
    version: int = 0
    prefill: PromptPrefill | None = None
    _arrived: float = field(default_factory=time.perf_counter)

    @property
    def owner(self) -> tuple[Scope, str]:
        """Scope and app."""
        return self.scope, self.app

    def enter(self, state: State, problem: str | None = None) -> None:
        """Its next state begins now, unless it has ended: a task is cancelled also after its reply is complete."""
        if self.state in _ENDED:
            return
        self.state, self.problem = state, problem
        self.marks[state] = time.perf_counter() - self._arrived
        if state in _ENDED:
            self.prefill = None  # it holds buffers of the engine
        self.on_change(self)

    def take(self, event: Event) -> None:
        """Note an event of its reply."""
        if isinstance(event, Planned):
            self.reuse, self.prefill = event.reuse, event.prefill
            if event.prefill is not None:
                self._paint(event.prefill, event.reuse)
                self.tokens = token_bytes(event.prefill.lookup.tokens) if self.keeps_text else b""
            self.enter("prefill")
        elif isinstance(event, TextPiece):
            self.written += 1
            if self.state != "decode":
                self.enter("decode")
            self.on_change(self)
        elif isinstance(event, Finished):
            self._finish(event.reply)

    def _finish(self, reply: Reply) -> None:
        self.reuse, self.reply, self.written = reply.reuse, replace(reply, tokens=(), logprobs=()), len(reply.tokens)
        if not self.keeps_text:
            self.drop_text()
        if self.prefill is not None:
            self._paint(self.prefill, reply.reuse)
        self.enter("done")

    def _paint(self, prefill: PromptPrefill, reuse: Reuse) -> None:
        runs = prefill.source_spans(reuse.chunks)
        self.spans, self.runs = _coarse(runs), runs if self.keeps_text else []

    def drop_text(self) -> None:
        """Keep numbers only."""
        self.tokens, self.runs, self.prepared, self.keeps_text = b"", [], None, False
        if self.reply is not None:
            self.reply = replace(self.reply, text="", thinking="", tool_calls=(), stopped_by=None)

    def row(self) -> dict[str, Any]:
        """What everybody who sees the page may see of it: no text."""
        reuse, reply = self.reuse, self.reply
        total = self.spans[-1][1] if self.spans else 0
        running = self.state == "prefill" and self.prefill is not None
        fields = {
            "id": self.id, "at": self.at, "tenant": self.scope.tenant, "app": self.app,
            "model": self.adapter or self.model, "state": self.state, "problem": self.problem, "marks": self.marks,
            "tokens": total, "spans": self.spans,
            "present": self.prefill.present if running and self.prefill else total, "written": self.written,
        }  # fmt: skip
        if reuse is not None:
            fields |= {"miss": reuse.miss, "level": reuse.level, "reused": reuse.reused}
            fields |= {"cold_ms": _ms(reuse.cold_seconds), "predicted_ms": _ms(reuse.predicted_seconds)}
        if reply is not None:
            fields |= {"first_ms": _ms(reply.timings.first_token_seconds), "rate": reply.timings.tokens_per_second}
        return fields

    def details(self) -> dict[str, Any]:
        """What its own page shows beside that, still without text."""
        fields: dict[str, Any] = {"has_text": bool(self.tokens or self.prepared)}
        if self.reuse is not None:
            fields |= {"reuse": asdict(self.reuse), "summary": str(self.reuse)}
        if self.reply is not None:
            fields |= {"usage": asdict(self.reply.usage), "timings": asdict(self.reply.timings)}
            fields["finish_reason"] = self.reply.finish_reason
        return fields


class RecentRequests:
    """Used by one event loop. `max_rows` 0 keeps nothing."""

    def __init__(self, max_rows: int = _MAX_ROWS, max_text_bytes: int = _MAX_TEXT_BYTES) -> None:
        self._max_rows, self._text_left = max_rows, max_text_bytes
        self._rows: dict[int, RecordedRequest] = {}
        self._with_text: deque[tuple[RecordedRequest, int]] = deque()
        self._count = 0
        self.version = 0  # grows with every change

    def begin(self, scope: Scope, app: str, model: str, adapter: str | None, *, keeps_text: bool) -> RecordedRequest:
        """A request arrived; the oldest rows, and the oldest texts, go for it."""
        self._count += 1
        record = RecordedRequest(
            self._count, scope, app, model, adapter, keeps_text and self._max_rows > 0, self._changed
        )
        if self._max_rows:
            self._rows[record.id] = record
            self._changed(record)
        while len(self._rows) > self._max_rows:
            del self._rows[next(iter(self._rows))]
        return record

    def _changed(self, record: RecordedRequest) -> None:
        self.version += 1
        record.version = self.version

    def take(self, record: RecordedRequest, event: Event) -> None:
        """Note an event of a request."""
        if not self._max_rows:
            return
        record.take(event)
        if isinstance(event, Planned) and record.tokens:
            self._with_text.append((record, len(record.tokens)))
            self._text_left -= len(record.tokens)
            while self._text_left < 0:
                oldest, size = self._with_text.popleft()
                self._text_left += size
                oldest.drop_text()

    def get(self, id: int) -> RecordedRequest | None:
        return self._rows.get(id)

    def rows(self, after: int = 0) -> list[dict[str, Any]]:
        """Those that changed after a version, the oldest first; those whose prompt is being prefilled always."""
        return [r.row() for r in self._rows.values() if r.version > after or r.state == "prefill"]

    def drop_texts(self, scope: Scope) -> None:
        """Forget what was asked and answered in a scope: documents of it were removed."""
        for record in self._rows.values():
            if record.scope == scope:
                record.drop_text()


def _coarse(runs: list[SourceSpan]) -> list[SourceSpan]:
    """The same with at most `_MAX_SPANS`: of each column, the source in its middle."""
    if len(runs) <= _MAX_SPANS:
        return runs
    total, stops = runs[-1][1], [stop for _, stop, _ in runs]
    edges = [total * column // _MAX_SPANS for column in range(_MAX_SPANS + 1)]
    return [(a, b, runs[bisect_right(stops, (a + b) // 2)][2]) for a, b in pairwise(edges) if b > a]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
