"""The contracts of every engine.

One step computes any set of positions of any number of sequences:

    sequence a   [kept kept kept kept][fed  fed  fed ][row row]      a row = tokens at sorted positions
    sequence b   [kept kept][row kept row kept kept row]             also scattered ones
    position      0    1    2    ...                                 a slot of the buffer is a position

A row attends to every position up to its own that is *present*: kept by an earlier step, fed by a feed, or part
of the row. A position below the row's last that is none of these is a gap, and the step is refused.

Not every engine can do all of it: see `Capabilities`. What it cannot do it refuses before computing anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rekindle.core.adapter import AdapterFit, Lora
from rekindle.core.identity import Identity
from rekindle.core.kv import CodedPiece, Held, Kv, KvLayout, LayerKv, Span
from rekindle.core.request import Sampling
from rekindle.engine.hooks import AttentionMap, KvDrift, Positions, Probe, Selector
from rekindle.errors import InvalidSetting, KvLost, StepRefused
from rekindle.text.base import Tokenizer

Logits = NDArray[np.float32]  # [tokens, vocabulary]
Wanted = Literal["last", "all", "none"]
RecomputeSupport = Literal["scattered", "leading", "none"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond computing the next tokens.

    opaque        None: KV of any span can be exported and fed back (`spans`). Else the reason why not: then only the
                  whole state can (`snapshot`), and a sequence can only be truncated to nothing
    split         of an opaque state, the KV of attention layers can be exported by span; a snapshot is only the rest,
                  and is restored together with that KV
    layer_feeds   feeds fill layer by layer, while earlier layers compute
    recompute     how KV of another context can be recomputed. scattered: rows may be any sorted set of positions, so
                  any of its tokens. leading: KV is appended to what is present (`append`), so only tokens before it.
                  none: it cannot be
    probes        attention and deviation can be read
    adapters      LoRA adapters can be loaded, several at a time; rows of different ones share a step
    steady        a few tokens in one step get the logits that each would get alone, up to rounding
    decodes       coded KV is decoded on the device that computes, which is not the CPU
    crowded       all sequences share one buffer: every open one makes every step slower
    """

    layer_feeds: bool
    recompute: RecomputeSupport
    probes: bool
    steady: bool = True
    decodes: bool = False
    crowded: bool = False
    opaque: str | None = None
    split: bool = False
    adapters: bool = False

    @property
    def spans(self) -> bool:
        """Whether KV of any span can be exported and fed back."""
        return self.opaque is None


class EngineSequence(Protocol):
    """The KV of one context, in buffers of the engine. Closing frees them."""

    @property
    def length(self) -> int:
        """Number of positions present, from 0 on."""

    @property
    def capacity(self) -> int:
        """Number of positions that fit."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers."""

    @property
    def regime(self) -> str:
        """The rotary regime of its keys."""

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` positions, keeping what is present. Not while a step runs. Raises `StepRefused`
        beyond the context."""

    def export(self, span: Span) -> Kv:
        """A copy of the KV of `span`. Raises `StepRefused` if it is not present.

        May be called while a step appends after `span`.
        """

    def append(self, kv: Kv) -> None:
        """Append KV to what is present, with its keys rotated to their new positions.

        Raises `StepRefused` if there is no room, or the engine's `recompute` is not `leading`.
        """

    def truncate(self, length: int) -> None:
        """Drop every position from `length` on. Raises `StepRefused` if fewer are present. Without spans, only all or
        nothing can be dropped."""

    def snapshot(self) -> bytes:
        """Its whole state, or what it has beside the KV of attention layers (`split`), for `restore` on an engine of
        the same identity. Raises `StepRefused` if the engine has spans: then use `export`."""

    def restore(self, snapshot: bytes | memoryview, length: int, kv: Kv | None = None) -> None:
        """Restore an empty sequence from a snapshot of `length` positions; of a split state with their `kv`. Raises
        `KvLost` for an invalid snapshot; the sequence is then still empty."""

    def close(self) -> None:
        """Free the buffers. Idempotent; any later use raises `Closed`."""


class SpansOnly:
    """For sequences of engines with spans and scattered rows: the operations they refuse."""

    def append(self, kv: Kv) -> None:
        """Refused."""
        raise StepRefused(f"This engine does not append KV: feed the {len(kv.span)} tokens to a row.")

    def snapshot(self) -> bytes:
        """Refused."""
        raise StepRefused("This engine gives no snapshots: export the KV of a span.")

    def restore(self, snapshot: bytes | memoryview, length: int, kv: Kv | None = None) -> None:  # noqa: ARG002
        """Refused."""
        raise StepRefused(f"This engine takes no snapshots ({len(snapshot)} bytes of {length} tokens): feed KV.")


class KvFeed(Protocol):
    """Loads KV from memory, disk or network into a sequence while it is being computed."""

    @property
    def span(self) -> Span:
        """The positions it fills."""

    @property
    def layers(self) -> range:
        """The layers it fills; each exactly once, before that layer computes.

        An engine without layer feeds fills all layers before it computes any.
        """

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of `span` in `layer` into `out`, the sequence's own buffer; block until it is there.

        May be called from several threads of the engine at once, the layers begun in order, ahead of those being
        computed. `out` is only valid during the call. What it raises ends the step; a step that is cancelled need not
        wait for it.
        """


@runtime_checkable
class HeldFeed(Protocol):
    """A feed that may have its KV in memory, from where an engine can copy it instead of calling `fill`."""

    def held(self) -> Sequence[Held] | None:
        """The KV of its span, in order, valid until the step ends; None if some is not in memory."""


@runtime_checkable
class CodedFeed(Protocol):
    """A feed whose KV may be stored quantized: an engine can decode it on its device instead of calling `fill`."""

    @property
    def coded(self) -> bool:
        """Whether some of it is quantized."""

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """Give `take` the pieces of a layer, in order. In place of `fill`, with the same rules; passes on what `take`
        raises."""

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:
        """Report that a piece cannot be decoded, so that it is never found again; returns what to raise."""


@runtime_checkable
class TimedFeed(Protocol):
    """A feed that is timed, also where an engine takes over what was filled."""

    def brought(self, seconds: float) -> None:
        """Count the time of bringing its KV from where it was filled to where the model reads it."""


def note_brought(feeds: Sequence[KvFeed], seconds: float) -> None:
    """Tell feeds how long an engine took to take over what they had filled together."""
    for feed in feeds:
        inner = feed.feed if isinstance(feed, MovedFeed) else feed
        if isinstance(inner, TimedFeed):
            inner.brought(seconds / len(feeds))


@dataclass(frozen=True, eq=False)
class HeldKv:
    """A feed of KV that was exported."""

    kv: Kv

    @property
    def span(self) -> Span:
        return self.kv.span

    @property
    def layers(self) -> range:
        return range(len(self.kv.layers))

    def fill(self, layer: int, out: LayerKv) -> None:
        """Copy a layer."""
        np.copyto(out.keys, self.kv.layers[layer].keys)
        np.copyto(out.values, self.kv.layers[layer].values)

    def held(self) -> Sequence[Held]:
        """All of it."""
        return [Held(self.kv.layers, Span(0, len(self.span)))]


@dataclass(frozen=True)
class MovedFeed:
    """A feed of KV that was computed at other positions; itself a feed, the outermost one of a row.

    Once `feed` has filled a layer, the engine rotates the keys by `shift` positions (back if negative) on its own
    device, before the layer computes. A shift of 0 changes no bit; values never change. Both places must be in the
    regime of the row's sequence.

    Only engines with scattered rows can do that. Others refuse a row with a shift.
    """

    feed: KvFeed
    start: int  # the new position of its first token
    shift: int

    def __post_init__(self) -> None:
        if isinstance(self.feed, MovedFeed):  # its own shift would be ignored
            raise ValueError("a moved feed cannot be moved: move what it moves, by both shifts together")

    @property
    def span(self) -> Span:
        """The positions it fills, from `start` on."""
        return Span(self.start, self.start + len(self.feed.span))

    @property
    def layers(self) -> range:
        """The layers it fills."""
        return self.feed.layers

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of a layer as it was computed, with keys not rotated yet."""
        self.feed.fill(layer, out)

    def held(self) -> Sequence[Held] | None:
        """The KV of `feed`, if it is in memory; keys not rotated."""
        return self.feed.held() if isinstance(self.feed, HeldFeed) else None

    @property
    def coded(self) -> bool:
        """Whether some KV of `feed` is quantized."""
        return isinstance(self.feed, CodedFeed) and self.feed.coded

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """Give the pieces of `feed`; keys not rotated."""
        assert isinstance(self.feed, CodedFeed)
        self.feed.fill_coded(layer, take)

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:
        """Report it to `feed`."""
        assert isinstance(self.feed, CodedFeed)
        return self.feed.damaged(piece, reason)


@dataclass(frozen=True)
class StayingFeed:
    """Adopts what earlier look-ahead rows computed or loaded: it is still in the buffers."""

    span: Span
    layers: range

    def fill(self, layer: int, out: LayerKv) -> None:
        """Leave it as it is."""


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence to compute in a step: token `i` stands at position `positions[i]`.

    With `replay` an engine may record a step's kernels and replay them later, which is faster and may round
    differently. `prefill` says that the tokens belong to a prompt: even a single one shall round as it would among the
    others, if the engine can do that.

    With `until` the row only looks ahead: the first `until` layers are computed, for a probe or a gaze. It is alone in
    its step and has no logits. Nothing that it computed or loaded is present afterwards, but later rows may adopt it
    (`StayingFeed`). Without probe and gaze (`blind`) only keys and values of the last of these layers are wanted, and
    earlier positions need not be fed there: such a row asks after each layer whether that is `enough`, a device being
    at most a layer behind.
    """

    sequence: EngineSequence
    tokens: Sequence[int]
    positions: Sequence[int] | Positions
    logits: Wanted = "last"
    feeds: tuple[KvFeed, ...] = ()
    selector: Selector | None = None
    probe: Probe | None = None
    gaze: AttentionMap | None = None
    spread: KvDrift | None = None
    until: int | None = None
    enough: Callable[[int], bool] | None = None
    replay: bool = True
    prefill: bool = False

    @property
    def blind(self) -> bool:
        """Whether it has neither probe nor gaze."""
        return not (self.probe or self.gaze)

    @classmethod
    def following(cls, sequence: EngineSequence, tokens: Sequence[int], *, logits: Wanted = "last") -> Row:
        """The row of the next tokens of a sequence."""
        start = sequence.length
        return cls(sequence, tokens, np.arange(start, start + len(tokens), dtype=np.int64), logits)


class Stopwatch(Protocol):
    """Times steps, from when it was made until `stop`."""

    def stop(self) -> None:
        """The last step was made. Does not wait for a device that has yet to compute it."""

    @property
    def seconds(self) -> float | None:
        """How long they took; None while a device computes them."""


class HostStopwatch:
    """For engines whose steps end when everything is computed."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.seconds: float | None = None

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._begun


class TokenSampler(Protocol):
    """Draws the tokens of one reply."""

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`. Same sampling, seed and logits: same tokens."""


class Engine(Protocol):
    """A loaded model. `step` may be called from several threads; calls are served one after the other."""

    @property
    def name(self) -> str:
        """The model's display name."""

    @property
    def device(self) -> str:
        """What it computes on, for display: cpu, or the name of an accelerator."""

    @property
    def device_bytes(self) -> int:
        """All memory of that device, as far as it is known; else of the machine."""

    @property
    def memory_bytes(self) -> int:
        """About what it takes of that memory while it is loaded: weights, and KV buffers that come with them."""

    @property
    def arithmetic(self) -> str:
        """What the rounding of its results depends on, beside the model: versions, kernels, device."""

    @property
    def capabilities(self) -> Capabilities:
        """What it supports."""

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def context_tokens(self) -> int:
        """The longest context this engine takes: what the setting `context` says, else all that it can."""

    @property
    def longest_context(self) -> int:
        """The longest context the model was made for: `context` may be raised to it."""

    @property
    def prefill_tokens(self) -> int:
        """The most tokens of a prompt to compute in one step: more only costs memory."""

    @property
    def parameters(self) -> int:
        """Number of weights."""

    @property
    def attention(self) -> int:
        """Size of the queries of one token, over all heads and layers."""

    def regime(self, tokens: int) -> str:
        """The rotary regime of a context of that length."""

    def identity(self, regime: str) -> Identity:
        """What its KV depends on. The first call may read all weights."""

    def check_adapter(self, lora: Lora) -> AdapterFit:
        """What loading an adapter would take. Raises `AdapterRefused` if it does not fit this model."""

    def load_adapter(self, lora: Lora) -> None:
        """Load an adapter, until it was unloaded as often: sessions may share an engine.

        Raises as `check_adapter` does, and `OutOfMemory`; then nothing has changed.
        """

    def unload_adapter(self, digest: str) -> None:
        """Unload an adapter. Its sequences can still be exported, but not computed further."""

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        """An empty sequence for `capacity` tokens, computed with the adapter of that digest. Raises `OutOfMemory`."""

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        """The sampler of a reply to the prompt `context`, which a repetition penalty counts too."""

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows in one forward pass; returns the logits each asked for (none: an empty array).

        Afterwards a row's positions are present. Raises `StepRefused` before anything is computed if a row breaks
        the contract. If it fails later (`Cancelled`, checked between layers, a selector's forbidden choice, what a
        feed raised), every sequence is truncated to below its first touched position, or to nothing if the engine
        has no spans.
        """

    def stopwatch(self) -> Stopwatch:
        """Begin to time steps that this thread makes."""

    def close(self) -> None:
        """Free the model. Idempotent."""


class EngineWrapper:
    """An engine over another one, `inner`. It copies what the other is and forwards what it does; subclasses override
    what they do differently.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self.name, self.device, self.arithmetic = engine.name, engine.device, engine.arithmetic
        self.device_bytes, self.memory_bytes = engine.device_bytes, engine.memory_bytes
        self.capabilities, self.layout = engine.capabilities, engine.layout
        self.context_tokens, self.prefill_tokens = engine.context_tokens, engine.prefill_tokens
        self.longest_context = engine.longest_context
        self.parameters, self.attention = engine.parameters, engine.attention

    @property
    def inner(self) -> Engine:
        """The engine underneath."""
        assert self._engine is not None
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inner.tokenizer

    def regime(self, tokens: int) -> str:
        return self.inner.regime(tokens)

    def identity(self, regime: str) -> Identity:
        return self.inner.identity(regime)

    def check_adapter(self, lora: Lora) -> AdapterFit:
        return self.inner.check_adapter(lora)

    def load_adapter(self, lora: Lora) -> None:
        self.inner.load_adapter(lora)

    def unload_adapter(self, digest: str) -> None:
        self.inner.unload_adapter(digest)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        return self.inner.open(capacity, regime, adapter)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        return self.inner.sampler(sampling, context)

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        return self.inner.step(rows, cancelled)

    def stopwatch(self) -> Stopwatch:
        return self.inner.stopwatch()

    def close(self) -> None:
        self.inner.close()


# Called before a model takes memory, with all that it takes then and the memory of its device. Makes room for that, and
# returns the bytes that it may take in all. Raises `OutOfMemory`.
Reserve = Callable[[int, int], int]

_MIN_TOKENS = 512  # a model that has less memory than this takes fails when it needs it
_ROUND_TOKENS = 256
_SHARE = 2  # one context takes at most half of what is free: others want some, too


def choose_context(wanted: int | None, longest: int, token_bytes: int, free_bytes: int) -> int:
    """The number of tokens of a context: `wanted`, if it is given, else the most whose KV fits half of `free_bytes`.

    Raises `InvalidSetting` if the model does not take as many as `wanted`.
    """
    if wanted is not None:
        if not 0 < wanted <= longest:
            raise InvalidSetting(f"--context {wanted} is out of range: this model takes 1 to {longest:,} tokens.")
        return wanted
    affordable = free_bytes // _SHARE // max(1, token_bytes)
    return min(longest, max(_MIN_TOKENS, affordable // _ROUND_TOKENS * _ROUND_TOKENS))


def describe_context(engine: Engine) -> str:
    """What to say when a model was loaded: its context, and that it could be longer."""
    tokens, longest = engine.context_tokens, engine.longest_context
    limited = f", of {longest:,} that the model takes: see --context" if tokens < longest else ""
    return f"a context of {tokens:,} tokens{limited}"
