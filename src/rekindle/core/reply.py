"""Replies and answers of a session, with their usage, timings and reuse."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from rekindle.core.cells import TimelineEvent
from rekindle.core.plan import RefusedChunks
from rekindle.core.request import ReuseLevel
from rekindle.core.size import count_of, human_bytes
from rekindle.core.tools import ToolCall

FinishReason = Literal["stop", "length", "timeout"]  # timeout: the server ended it


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log probability from the model: before temperature, grammar and top-k or top-p."""

    token: int
    text: bytes  # what it adds to the reply; may be part of a character
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of a reply and the most likely alternatives, as many as were asked for."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TextPiece(str):
    """A piece of a reply's text, with the tokens it came from, also as `logprobs` if these were asked for."""

    logprobs: tuple[SampledToken, ...]
    tokens: tuple[int, ...]

    def __new__(cls, text: str, logprobs: tuple[SampledToken, ...] = (), tokens: tuple[int, ...] = ()) -> TextPiece:
        piece = super().__new__(cls, text)
        piece.logprobs, piece.tokens = logprobs, tokens
        return piece


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far the prompt of a reply is read.

    total             its number of tokens
    cached            those that were planned to be reused
    processed         those that are read, at least the reused ones
    seconds           time since reading began
    expected_seconds  what all of it takes; None if nobody knows
    kept              whether its KV is kept for later prompts
    """

    total: int
    cached: int
    processed: int
    seconds: float
    expected_seconds: float | None
    kept: bool

    def as_event(self) -> dict[str, Any]:
        """It as an item of a stream: `prompt_progress` as llama.cpp's server has it, and what that does not tell."""
        time_ms, expected = round(self.seconds * 1e3), self.expected_seconds
        return {
            "prompt_progress": {
                "total": self.total, "cache": self.cached, "processed": self.processed, "time_ms": time_ms,
            },
            "rekindle": {"expected_ms": None if expected is None else round(expected * 1e3), "kept": self.kept},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of prompt and reply. `cached_tokens` of the prompt were reused instead of computed;
    `drafted_tokens` of the reply came from a draft and were only verified; `refused_tokens` of drafts were not written.
    """

    prompt_tokens: int
    completion_tokens: int
    dropped_messages: int = 0
    cached_tokens: int = 0
    quoted_passages: int = 0
    drafted_tokens: int = 0
    refused_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. `first_token_seconds` counts from the call, `decode_seconds` from the first token."""

    first_token_seconds: float
    decode_seconds: float
    tokens_per_second: float | None  # after the first token; None if there is only one


@dataclass(frozen=True, slots=True)
class ChunkReuse:
    """A passage of a prompt, tokens `[start, stop)`, and where its KV comes from.

    number      its number in the prompt; None for text that is no document, and for what no longer is a passage
    source      exact (computed in this very context, now or before), reused (computed in another prompt), computed
                (again, because reused ones come before it)
    recomputed  number of its tokens that were recomputed; `recomputed_positions` says which
    impact      how much it attended to what came before it when its KV was computed (CCI)
    overlap     how much of that comes before it now (beta)
    disorder    how much of that is in another order now (gamma)
    overhead    the share that the published method would recompute (CFO)
    drift       share of what came before it that was not exact when its KV was computed
    change      how much of what its KV depends on has changed since; 0: nothing of it is recomputed
    share       the share of its tokens to recompute that follows from that; 1: it is computed as a whole
    streamed    whether it came from an origin for this prompt
    found_at    the position that it had in the prompt its KV was computed in
    """

    number: int | None
    start: int
    stop: int
    source: Literal["exact", "reused", "computed"]
    recomputed: int = 0
    recomputed_positions: tuple[int, ...] = ()
    impact: float | None = None
    overlap: float | None = None
    disorder: float | None = None
    overhead: float | None = None
    drift: float | None = None
    change: float | None = None
    share: float | None = None
    streamed: bool = False
    found_at: int | None = None


_MISSES = {
    "off": "reuse is off",
    "unknown": "no earlier prompt begins like this one",
    "differs": "earlier prompts differ from there",
    "slower": "reuse would take longer",
    "limit": "the disk limit has room for its beginning only",
    "lost": "stored KV could not be read",
    "late": "the cache did not answer in time",
    "checkpoint": "reuse ends at a checkpoint",
}

SOURCES = {
    "engine": "#2fa36b",
    "memory": "#3b8eea",
    "disk": "#6c6fe8",
    "remote": "#b065e0",
    "quantized": "#17a2a8",
    "passages": "#8aa62f",
    "recomputed": "#e5a50a",
    "computed": "#e8623d",
}
"""Where the KV of a prompt's tokens came from, and the colour of that everywhere.

passages: from other prompts; remote: from an origin or a shared tier."""

_UNCALIBRATED = "nobody calibrated the bits of this quantized KV (rekindle calibrate MODEL)"

OriginMiss = Literal["nothing", "prompt", "level", "budget", "dtype", "quick", "slow", "late", "failed", "unable"]
ORIGIN_MISSES: dict[OriginMiss, str] = {
    "nothing": "it has nothing for this model, signed by a key you named (`rekindle origin publish`).",
    "prompt": "it has contexts for this model, but none that begins like this prompt (`rekindle origin check`).",
    "level": "it has this prompt only in quantized levels, which reuse='quantized' allows.",
    "budget": "it has this prompt only in levels whose KL is above kl_budget, or was not measured when they were "
    "published (`rekindle origin check`).",
    "dtype": "it has this prompt unquantized for another dtype, device or engine only. What is published as "
    "`quantized` fits all of them, and reuse='quantized' allows it.",
    "quick": "computing the prompt takes less time than asking.",
    "slow": "its link was so slow that little would come before all is computed; it is tried again after five minutes.",
    "late": "it had not answered when the prompt was computed.",
    "failed": "it failed, and is asked again half a minute later.",
    "unable": "the engine cannot mix KV from there with computing, or deterministic=True forbids it.",
}
"""Sentences for people that begin behind "Nothing came from the origin:"."""


_NOTE = "color:gray;font-size:smaller"


def source_bar(counts: Mapping[str, int]) -> str:
    """Tokens by the keys of `SOURCES` as HTML: a coloured bar and its legend, in that order."""
    total = sum(counts.values())
    parts = "".join(
        f"<div title='{count:,} {name}' style='width:{100 * count / total:.2f}%;background:{SOURCES[name]}'></div>"
        for name, count in counts.items()
    )
    names = " ".join(
        f"<span style='margin-right:1em;white-space:nowrap'><span style='color:{SOURCES[name]}'>&#9632;</span> "
        f"{count:,} {name}</span>"
        for name, count in counts.items()
    )
    bar = f"<div style='display:flex;height:10px;border-radius:4px;overflow:hidden;margin:6px 0'>{parts}</div>"
    return f"{bar}<div style='{_NOTE}'>{names}</div>" if total else ""


@dataclass(frozen=True, slots=True)
class OriginFinding:
    """What an origin has of a prompt: tokens at a level, or why nothing. `str()` is for people."""

    tokens: int = 0
    level: str | None = None
    size_bytes: int = 0
    miss: OriginMiss | None = None

    def __str__(self) -> str:
        if self.miss is not None:
            return ORIGIN_MISSES[self.miss]
        return f"{count_of(self.tokens, 'token')}, {self.level}, {human_bytes(self.size_bytes)}"


@dataclass(frozen=True, slots=True)
class Reuse:
    """What was reused for a prompt, and why not more.

    level               what was done: exact, quantized (some KV was quantized), approximate (passages were reused),
                        off
    engine              tokens whose KV was still in the engine
    memory, disk        tokens whose KV was loaded from there
    shared              the same from shared tiers, by name: redis, s3
    quantized           number of those loaded or still in the engine that had been quantized
    calibrated_bits     whether the bits that this session quantizes KV with were calibrated for the model (for the KV
                        of an adapter: with adapters); None if nothing quantized here was reused
    from_chunks         tokens of passages whose KV was computed in other prompts
    recomputed          number of those that were recomputed
    streamed            tokens whose KV came from an origin; a token that came in some layers counts as its share
    streamed_slices     number of slices (a chunk of 128 tokens in a layer) that came at each level
    streamed_kl         the expected KL of what was streamed, in nats: of each level by the share that came at it
    timeline            what was computed and what arrived when, if something was streamed
    computed            tokens that were computed, including those
    chunks              the passages, if chunk reuse was allowed
    recompute_policy, budget  how the tokens to recompute were chosen, and how many, if passages were reused
    calibrated          whether that budget was calibrated for this model
    load_seconds        time to load KV; most of it overlaps with computing
    predicted_seconds   expected time of the prefill; None where it was not planned as a whole
    cold_seconds        expected time of computing everything
    miss                why the rest was computed: None (all that is stored was reused), "off", "unknown"
                        (nothing stored begins like it), "differs" (what is stored continues differently), "slower"
                        (reuse would be), "lost" (KV could not be read), "late" (the cache did not answer in time),
                        "checkpoint" (a state that cannot be cut was reused up to its checkpoint), "limit" (its KV is
                        larger than the disk limit)
    refused_chunks      text of other prompts that was found and not reused, because that would take longer
    replayed_replies    number of replies in the prompt that are as the model generated them, not as the client sent
                        them back (`keep_reply_tokens`)
    origin_miss         why nothing came from the origin although one is set and more than a chunk was missing here: a
                        key of `ORIGIN_MISSES`
    """

    level: ReuseLevel
    computed: int
    engine: int = 0
    memory: int = 0
    disk: int = 0
    shared: Mapping[str, int] = field(default_factory=dict)
    quantized: int = 0
    calibrated_bits: bool | None = None
    from_chunks: int = 0
    recomputed: int = 0
    streamed: int = 0
    streamed_slices: Mapping[str, int] = field(default_factory=dict)
    streamed_kl: float | None = None
    timeline: tuple[TimelineEvent, ...] = ()
    load_seconds: float = 0.0
    predicted_seconds: float | None = None
    cold_seconds: float | None = None
    miss: str | None = None
    origin_miss: OriginMiss | None = None
    replayed_replies: int = 0
    chunks: tuple[ChunkReuse, ...] = ()
    recompute_policy: str | None = None
    budget: float | None = None
    calibrated: bool | None = None
    refused_chunks: RefusedChunks | None = None

    def __str__(self) -> str:
        """One line for people."""
        parts = {
            "from the engine": self.engine,
            "from memory": self.memory,
            "from disk": self.disk,
            **{f"from {tier}": count for tier, count in self.shared.items()},
            "from other prompts": self.from_chunks,
            f"from the origin{self._levels}": self.streamed,
        }
        where = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
        again = f", {self.recomputed:,} of them recomputed" if self.recomputed else ""
        reused = f"{self.reused:,} of {self.reused + self.computed:,} tokens reused"
        why = self.miss and (str(self.refused_chunks or "") or _MISSES.get(self.miss, self.miss))
        rest = f"{self.computed:,} computed" + (f" ({why})" if why else "")
        origin = "" if self.origin_miss is None else f"; origin: {OriginFinding(miss=self.origin_miss)}"
        bits = f"; {_UNCALIBRATED}" if self.calibrated_bits is False else ""
        return f"{reused}{f' ({where}{again})' if where else ''}; {rest}{origin}{bits}"

    @property
    def _levels(self) -> str:
        """How much came at which level, for people."""
        slices = " + ".join(f"{count:,} {level}" for level, count in self.streamed_slices.items())
        return f" (slices: {slices}; expected KL {self.streamed_kl:.4f})" if slices else ""

    @property
    def loaded(self) -> int:
        """Tokens whose KV was computed in this context before."""
        return self.engine + self.memory + self.disk + sum(self.shared.values())

    @property
    def reused(self) -> int:
        """Tokens that were not computed."""
        return self.loaded + self.from_chunks - self.recomputed + self.streamed

    @property
    def by_source(self) -> dict[str, int]:
        """The tokens of the prompt by the keys of `SOURCES`, those with any; what was quantized counts as that."""
        remote = self.streamed + sum(self.shared.values())
        counts = {"disk": self.disk, "memory": self.memory, "remote": remote, "engine": self.engine}
        left = self.quantized
        for place, count in counts.items():
            counts[place] = max(0, count - left)
            left -= count - counts[place]
        counts["quantized"] = self.quantized - left
        counts["passages"] = self.from_chunks - self.recomputed
        counts["recomputed"] = self.recomputed
        counts["computed"] = self.computed - self.recomputed
        return {source: counts[source] for source in SOURCES if counts[source]}


@dataclass(frozen=True)
class Reply:
    """A finished generation. `str(reply)` is its text."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    reuse: Reuse
    logprobs: tuple[SampledToken, ...] = ()  # if asked for
    tool_calls: tuple[ToolCall, ...] = ()  # parsed from the text, if tools were given; `text` is the rest
    thinking: str = ""  # what a model that thinks aloud wrote before the text
    stopped_by: str | None = None  # the stop string that ended it

    def __str__(self) -> str:
        return self.text

    @property
    def cut(self) -> bool:
        """Whether it ended before the model was done."""
        return self.finish_reason != "stop" or self.stopped_by is not None

    def as_dict(self) -> dict[str, Any]:
        """The reply as plain values, for JSON."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "usage": {**asdict(self.usage), "total_tokens": self.usage.total_tokens},
            "timings": asdict(self.timings),
            "reuse": asdict(self.reuse),
        }

    def _repr_html_(self) -> str:
        """The text, and where the prompt's KV came from, as on the server's page."""
        said = f"<div style='white-space:pre-wrap'>{html.escape(self.text)}</div>"
        counts = self.reuse.by_source if self.usage.prompt_tokens else {}
        return said + source_bar(counts) + f"<div style='{_NOTE}'>{html.escape(self.summary())}</div>"

    def summary(self) -> str:
        """One line for people: times and sizes."""
        usage, rate = self.usage, self.timings.tokens_per_second
        how = ["quantized"] if self.reuse.quantized else []
        how += [f"{self.reuse.from_chunks:,} from other prompts"] if self.reuse.from_chunks else []
        how += [f"{self.reuse.streamed:,} streamed"] if self.reuse.streamed else []
        reused = f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens reused"
        out = f"{count_of(usage.completion_tokens, 'token')} out"
        out += f" ({usage.drafted_tokens} drafted)" if usage.drafted_tokens else ""
        wanted = self.tokens or self.finish_reason != "length"  # with max_tokens=0 a prompt is only read
        parts = [
            f"{'first token' if wanted else 'prompt read in'} {self.timings.first_token_seconds:.3f} s",
            f"{reused} ({', '.join(how)})" if how else reused,
            (out if rate is None else f"{out}, {rate:.1f} tokens/s") if wanted else "no reply was wanted",
        ]
        if usage.dropped_messages:
            parts.append(f"{count_of(usage.dropped_messages, 'oldest message')} left out")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """A passage that the model was given. It is data, shown as it is.

    number      its number in the answer: [1]
    document    the name of its document in the library
    source      where that document came from
    score       of the retrieval; comparable within one answer
    cut         whether only its beginning fit
    heading     the lines of `text` above the passage's own words; they may be empty
    """

    number: int
    document: str
    source: str
    title: str
    text: str
    score: float
    cut: bool = False
    heading: str = ""


@dataclass(frozen=True, slots=True)
class SourceQuote:
    """A sentence of a source, word for word: the source's number, and the text."""

    number: int
    text: str


QuestionOrigin = Literal["user", "abstract", "history"]  # a user asked, or what the question was predicted from


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An earlier answer that was used for this one.

    way             direct: it is this answer, without the model; verified: a draft that the model verified
    question        what it answered
    origin          user, or what its question was predicted from: abstract, history
    made            when it was written, in seconds since 1970
    similarity      of the two questions (cosine)
    saved_seconds   time that answering took then, if it was not repeated now
    """

    way: Literal["direct", "verified"]
    question: str
    origin: QuestionOrigin
    made: float
    similarity: float
    saved_seconds: float | None = None

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.made))
        if self.way == "direct":
            return f"stored answer of {day} to {self.question!r} ({self.similarity:.3f} alike)"
        return f"checked against the answer of {day} to {self.question!r}"


@dataclass(frozen=True)
class Answer(Reply):
    """A reply with its sources. `timings.first_token_seconds` counts from the question, retrieval included.

    left_out    passages that were retrieved and did not fit into the context
    stored      the earlier answer that was used, if any
    refused     why the model wrote it although `answers` is direct
    quote       the sentence of the best passage that is likely to answer; of the cited one if the reply only cites
    uncertain   no passage is so relevant that it is likely to answer: the nearest one was quoted. None: not judged
    """

    question: str = ""
    sources: tuple[AnswerSource, ...] = ()
    retrieval: str = "fused"
    retrieve_seconds: float = 0.0
    left_out: int = 0
    stored: StoredAnswer | None = None
    refused: str | None = None
    quote: SourceQuote | None = None
    uncertain: bool | None = None

    @classmethod
    def of(cls, reply: Reply, before_seconds: float, **own: Any) -> Answer:
        """A reply as an answer; `before_seconds` went by before the model was asked, `own` are the fields above."""
        parts = {part.name: getattr(reply, part.name) for part in fields(Reply)}
        waited = reply.timings.first_token_seconds + before_seconds
        return cls(**{**parts, "timings": replace(reply.timings, first_token_seconds=waited)}, **own)

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        own = ("question", "retrieval", "retrieve_seconds", "left_out", "refused", "uncertain")
        values = {name: getattr(self, name) for name in own}
        values |= {"stored": self.stored and asdict(self.stored), "quote": self.quote and asdict(self.quote)}
        return {**Reply.as_dict(self), **values, "sources": [asdict(source) for source in self.sources]}

    def summary(self) -> str:
        """One line for people: sizes, times, and how many passages."""
        left = f" ({self.left_out} did not fit)" if self.left_out else ""
        parts = [f"{count_of(len(self.sources), 'passage')}{left} in {self.retrieve_seconds * 1e3:.0f} ms"]
        if self.stored is not None:
            parts.append(str(self.stored))
        if self.stored is not None and self.stored.way == "direct":
            return "; ".join([f"nothing computed, {self.timings.first_token_seconds:.3f} s", *parts])
        return "; ".join([Reply.summary(self), *parts])

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li value='{source.number}'>{html.escape(source.title)} "
            f"<span style='color:gray'>{html.escape(source.source)}</span></li>"
            for source in self.sources
        )
        return f"{Reply._repr_html_(self)}<ol>{items}</ol>"
