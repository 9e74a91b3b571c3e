"""What comes back from a session."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rekindle.core.cells import Event
from rekindle.core.request import ReuseLevel
from rekindle.core.tools import ToolCall

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and the logarithm of its probability, as the model gave it: before temperature, grammar or cuts."""

    token: int
    text: bytes  # what it adds to the reply; may be a part of a character
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of a reply, and the likeliest ones in its place, as many as were asked for."""

    chosen: Likelihood
    likeliest: tuple[Likelihood, ...] = ()


class Piece(str):
    """A piece of a reply's text. `drawn` are the tokens it became certain with, if their likelihood was asked for."""

    drawn: tuple[Drawn, ...]

    def __new__(cls, text: str, drawn: tuple[Drawn, ...] = ()) -> Piece:
        piece = super().__new__(cls, text)
        piece.drawn = drawn
        return piece


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens went in and came out, and how many of those that went in did not have to be computed.

    `drafted_tokens` of those that came out were foreseen by a draft, and only checked.
    """

    prompt_tokens: int
    completion_tokens: int
    dropped_messages: int = 0
    cached_tokens: int = 0
    quoted_passages: int = 0
    drafted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and reply together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. `first_token_seconds` counts from the call, `decode_seconds` from the first token."""

    first_token_seconds: float
    decode_seconds: float
    tokens_per_second: float | None  # of the tokens after the first; None when there is only one


@dataclass(frozen=True, slots=True)
class ChunkReuse:
    """A passage of a prompt, tokens `[start, stop)`, and where its KV comes from.

    number      the number it has there; None for what is no passage any more, but was mended as one
    source      exact (computed in this very context, now or before), mended (computed in another prompt), computed
                (anew, but after mended ones)
    recomputed  so many of its tokens were computed anew; `anew` says which
    impact      how much it took from what stood before it, when its KV was computed (CCI)
    overlap     how much of that stands before it now (beta)
    disorder    how much of that stands in another order now (gamma)
    overhead    what the published method would compute anew, as a share (CFO)
    drift       how much of what stood before it was not exact, when its KV was computed
    streamed    whether it came from an origin, for this prompt
    """

    number: int | None
    start: int
    stop: int
    source: Literal["exact", "mended", "computed"]
    recomputed: int = 0
    anew: tuple[int, ...] = ()
    impact: float | None = None
    overlap: float | None = None
    disorder: float | None = None
    overhead: float | None = None
    drift: float | None = None
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt was spared, and why not more.

    level               what was really done: exact, near (some KV was quantized), approximate (passages were mended),
                        off
    engine              tokens whose KV was still in the engine
    memory, disk        tokens whose KV was loaded from there
    near                so many of those loaded or still in the engine had been quantized
    mended              tokens of passages whose KV was computed in other prompts
    recomputed          so many of those were computed anew
    streamed            tokens whose KV came from an origin; of a token that came in some layers, its share of them
    timeline            what was computed and what came when, if something was streamed
    computed            tokens that were computed, these included
    chunks              the passages, if mending was allowed
    mender, budget      how the tokens to compute anew were chosen, and how many, if passages were mended
    calibrated          whether that budget was calibrated for this model
    load_seconds        what bringing KV took; most of it overlaps with computing
    predicted_seconds   what the prefill was expected to take; None while nothing was measured
    cold_seconds        what computing everything was expected to take
    miss                why the rest was computed: None (only the last token was), "off", "unknown" (nothing like it
                        is known), "differs" (what is known goes on otherwise, or ends), "slower" (loading would have
                        been), "lost" (KV could not be read), "late" (the cache did not answer), "checkpoint" (a state
                        that cannot be cut was reused up to where it was kept)
    """

    level: ReuseLevel
    computed: int
    engine: int = 0
    memory: int = 0
    disk: int = 0
    near: int = 0
    mended: int = 0
    recomputed: int = 0
    streamed: int = 0
    timeline: tuple[Event, ...] = ()
    load_seconds: float = 0.0
    predicted_seconds: float | None = None
    cold_seconds: float | None = None
    miss: str | None = None
    chunks: tuple[ChunkReuse, ...] = ()
    mender: str | None = None
    budget: float | None = None
    calibrated: bool | None = None

    @property
    def loaded(self) -> int:
        """Tokens whose KV was computed in this very context before."""
        return self.engine + self.memory + self.disk

    @property
    def reused(self) -> int:
        """Tokens that were not computed."""
        return self.loaded + self.mended - self.recomputed + self.streamed


@dataclass(frozen=True)
class Reply:
    """A finished generation. `str(reply)` is its text."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    reuse: Reuse
    drawn: tuple[Drawn, ...] = ()  # if `logprobs` was asked for
    tool_calls: tuple[ToolCall, ...] = ()  # found in the text, if tools were given; `text` is what stands beside them

    def __str__(self) -> str:
        return self.text

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
        return (
            f"<div style='white-space:pre-wrap'>{html.escape(self.text)}</div>"
            f"<div style='color:gray;font-size:smaller'>{html.escape(self.summary())}</div>"
        )

    def summary(self) -> str:
        """One line for people: sizes and times."""
        rate = self.timings.tokens_per_second
        near = ", quantized" if self.reuse.near else ""
        mended = f", {self.reuse.mended} mended" if self.reuse.mended else ""
        mended += f", {self.reuse.streamed} streamed" if self.reuse.streamed else ""
        cached = f" ({self.usage.cached_tokens} reused{near}{mended})" if self.usage.cached_tokens else ""
        drafted = f" ({self.usage.drafted_tokens} foreseen)" if self.usage.drafted_tokens else ""
        parts = [
            f"{self.usage.prompt_tokens} tokens in{cached}, {self.usage.completion_tokens} out{drafted}",
            f"first token {self.timings.first_token_seconds:.3f} s",
        ]
        if rate is not None:
            parts.append(f"{rate:.1f} tokens/s")
        if self.usage.dropped_messages:
            parts.append(f"{self.usage.dropped_messages} oldest messages left out")
        return ", ".join(parts)
