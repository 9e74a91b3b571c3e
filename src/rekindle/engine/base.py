"""What every engine can do, as contracts.

One step computes any set of positions of any number of sequences:

    sequence a   [kept kept kept kept][fed  fed  fed ][row row]      a row = tokens at sorted positions
    sequence b   [kept kept][row kept row kept kept row]             also scattered ones
    position      0    1    2    ...                                 a slot of the buffer is a position

A row attends to every position up to its own that is *present*: kept by an earlier step, fed by a feed, or part
of the row. A position below the row's last that is none of these is a gap, and the step is refused.

Not every engine can do all of it: `Capabilities` tells. What one cannot do it refuses, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rekindle.core.adapter import Lora
from rekindle.core.identity import Identity
from rekindle.core.kv import Held, Kv, KvLayout, LayerKv, Span
from rekindle.core.request import Message, Sampling
from rekindle.core.tools import Tool
from rekindle.engine.watch import Gaze, Positions, Probe, Selector, Spread
from rekindle.errors import StepRefused

Logits = NDArray[np.float32]  # [tokens, vocabulary]
Wanted = Literal["last", "all", "none"]
Written = Mapping[str, Sequence[int]]  # texts of replies -> the tokens they were generated as
Mends = Literal["scattered", "leading", "none"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond computing the next tokens.

    opaque        None: KV of any span can be taken out and put back (`spans`). Else why not, for people: then only a
                  whole state can, where it stands (`snapshot`), and a sequence is truncated to nothing
    layer_feeds   feeds fill one layer at a time, while earlier layers compute
    mends         how KV of another context is made to fit. scattered: rows may be any sorted set of positions, so any
                  of its tokens can be computed anew. leading: it is appended behind what is present (`append`), so
                  only the tokens that lead to it can. none: not at all
    selects       rows can be chosen between layers
    probes        attention and deviation can be read, by probes and gazes
    adapters      LoRA adapters can be put on, several at a time; rows of different ones share a step
    steady        a few tokens in one step get the logits that each alone would, but for the last digits
    crowded       all sequences share one buffer: each that is open, in use or not, makes every step slower
    """

    layer_feeds: bool
    mends: Mends
    selects: bool
    probes: bool
    steady: bool = True
    crowded: bool = False
    opaque: str | None = None
    adapters: bool = False

    @property
    def spans(self) -> bool:
        """Whether KV of any span can be taken out and put back."""
        return self.opaque is None


class EngineSequence(Protocol):
    """The KV of one context, in buffers of the engine. Closing gives the buffers back."""

    @property
    def length(self) -> int:
        """How many positions are present, from 0 on."""

    @property
    def capacity(self) -> int:
        """How many positions fit."""

    @property
    def size_bytes(self) -> int:
        """How much memory its buffers take."""

    @property
    def regime(self) -> str:
        """The rotary regime its keys are computed under."""

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` positions, not while a step runs; what is present stays. Raises
        `StepRefused` beyond the context."""

    def export(self, span: Span) -> Kv:
        """A copy of the KV of `span`, which must be present. Raises `StepRefused` if it is not.

        May be called while a step appends to the sequence behind `span`.
        """

    def append(self, kv: Kv) -> None:
        """Put KV behind what is present, its keys turned from where they were computed to where they stand now.

        Raises `StepRefused` where there is no room, or an engine mends in another way than `leading`.
        """

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on. Raises `StepRefused` if fewer are present. Where an engine has no
        spans, only all of it can be forgotten, or nothing."""

    def snapshot(self) -> bytes:
        """All of its state, for `restore` of an engine of the same identity alone. Raises `StepRefused` where an engine
        has spans: then `export` is the better way."""

    def restore(self, snapshot: bytes | memoryview, length: int) -> None:
        """Make an empty sequence what another was, with `length` positions present, when its snapshot was taken. Raises
        `KvLost` for bytes that are no such snapshot; it is then still empty."""

    def close(self) -> None:
        """Give the buffers back. Idempotent; any later use raises `Closed`."""


class SpansOnly:
    """For sequences of engines that have spans and mend otherwise: what they need not be able to do, refused."""

    def append(self, kv: Kv) -> None:
        """Refused."""
        raise StepRefused(f"This engine does not append KV: feed the {len(kv.span)} tokens to a row.")

    def snapshot(self) -> bytes:
        """Refused."""
        raise StepRefused("This engine gives no snapshots: export the KV of a span.")

    def restore(self, snapshot: bytes | memoryview, length: int) -> None:
        """Refused."""
        raise StepRefused(f"This engine takes no snapshots ({len(snapshot)} bytes of {length} tokens): feed KV.")


class KvFeed(Protocol):
    """Brings KV from memory, disk or network into a sequence while it is being computed."""

    @property
    def span(self) -> Span:
        """The positions it fills."""

    @property
    def layers(self) -> range:
        """The layers it fills; each exactly once, in order, before that layer computes.

        An engine without layer feeds has all layers filled before it computes any.
        """

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of `span` in `layer` into `out`, the sequence's own buffer; block until it is there.

        May be called from a thread of the engine, ahead of the layers being computed. `out` is only valid during the
        call. What it raises ends the step; a step that is cancelled need not wait for it.
        """


@runtime_checkable
class HeldFeed(Protocol):
    """A feed that may have its KV in memory already: then an engine can copy from there, in place of `fill`."""

    def held(self) -> Sequence[Held] | None:
        """The KV of its span, piece by piece in order, to be read until the step ends; None if some is elsewhere."""


@dataclass(frozen=True)
class MovedFeed:
    """A feed of KV that was computed at other positions; itself a feed, the outermost one of a row.

    Once `feed` has filled a layer, the engine turns the keys by `shift` positions, back where it is below 0: on its
    own device, before the layer computes. A shift of 0 leaves every bit as it is; values are never changed. Both
    places must lie in the regime of the row's sequence.

    An engine that mends by scattered rows can do that. Any other refuses a row with a shift, before it computes.
    """

    feed: KvFeed
    start: int  # where its first token shall stand
    shift: int

    def __post_init__(self) -> None:
        if isinstance(self.feed, MovedFeed):  # whose own shift nobody would see
            raise ValueError("a moved feed cannot be moved: move what it moves, by both shifts together")

    @property
    def span(self) -> Span:
        """The positions it fills: as many as `feed` does, from `start` on."""
        return Span(self.start, self.start + len(self.feed.span))

    @property
    def layers(self) -> range:
        """The layers it fills."""
        return self.feed.layers

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of a layer as it was computed; its keys are not turned yet."""
        self.feed.fill(layer, out)

    def held(self) -> Sequence[Held] | None:
        """The same where it stands, if it is in memory."""
        return self.feed.held() if isinstance(self.feed, HeldFeed) else None


@dataclass(frozen=True)
class StayingFeed:
    """Takes up what rows before computed, or their feeds brought, that only looked ahead: it is in the buffers."""

    span: Span
    layers: range

    def fill(self, layer: int, out: LayerKv) -> None:
        """Leave it as it is."""


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence to compute in a step: token `i` stands at position `positions[i]`.

    Without `replay` the step is computed the same way every time. With it an engine may record a step's kernels and
    replay them later, which is faster and may round differently. `prefill` says that the tokens belong to a prompt:
    even one alone shall round as it would in the company of the others, if the engine can see to that.

    With `until` the row only looks ahead: the first so many layers are computed, for a probe or a gaze to see. It is
    alone in its step and has no logits. Nothing that it computed, or its feeds brought, is present afterwards, but rows
    that follow may take it up (`StayingFeed`). Where nobody looks (`blind`), keys and values are all that is wanted of
    the last of these layers, and what stands before need not be fed there: such a row asks each if it is `enough`.
    """

    sequence: EngineSequence
    tokens: Sequence[int]
    positions: Sequence[int] | Positions
    logits: Wanted = "last"
    feeds: tuple[KvFeed, ...] = ()
    selector: Selector | None = None
    probe: Probe | None = None
    gaze: Gaze | None = None
    spread: Spread | None = None
    until: int | None = None
    enough: Callable[[int], bool] | None = None
    replay: bool = True
    prefill: bool = False

    @property
    def blind(self) -> bool:
        """Whether nobody looks at what it computes."""
        return not (self.probe or self.gaze)

    @classmethod
    def following(cls, sequence: EngineSequence, tokens: Sequence[int], *, logits: Wanted = "last") -> Row:
        """The row of the tokens that come next."""
        start = sequence.length
        return cls(sequence, tokens, np.arange(start, start + len(tokens), dtype=np.int64), logits)


@dataclass(frozen=True)
class Quoting:
    """The tokens of a chat with quotes in it: what stands before them, each of them, what comes after."""

    before: Sequence[int]
    quotes: Sequence[Sequence[int]]
    after: Sequence[int]


class Tokenizer(Protocol):
    """Text to tokens and back. Text of users never becomes a control token."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens with which the model ends its reply."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start."""

    @property
    def template(self) -> str:
        """The source of the model's chat template; empty where it has none, or none that can be read."""

    def encode_chat(
        self, messages: Sequence[Message], written: Written | None = None, *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins.

        A template that takes `tools` writes them; for another they are put into words, and calls and results too.

        `written` has the tokens that the model generated for some texts: they stand in for an assistant message of
        exactly that text, where the rest of the chat is tokenized the same with and without it.

        Raises `InvalidPrompt` if the model has no template or it refuses the messages.
        """

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], *, tools: Sequence[Tool] = ()
    ) -> Quoting:
        """The same for a chat in which quotes stand in front of what the user first says, without `written`.

        Every part is tokenized alone, so a quote has the same tokens wherever it stands. Raises as `encode_chat`
        does, and where there is no user message.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens spelled out: for people who look for a difference."""

    def pieces(self) -> list[bytes]:
        """The bytes that each token adds inside a text, by its id; none for control tokens and ids without a use.

        `vocabulary_size` of them; some 100 ms of work the first time. A space that `decode` strips from the very
        beginning of a text is part of the piece.
        """


class TokenSampler(Protocol):
    """Draws the tokens of one reply."""

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`. Same sampling, seed and logits: same tokens."""


class Engine(Protocol):
    """A loaded model. `step` may be called from several threads; calls are served one after the other."""

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def device(self) -> str:
        """What it computes on, for people: cpu, or the name of an accelerator."""

    @property
    def arithmetic(self) -> str:
        """What the last bits of its results depend on, beside the model: versions, kernels, where it computes."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def context_tokens(self) -> int:
        """The longest context the model takes."""

    @property
    def prefill_tokens(self) -> int:
        """How many tokens of one prompt to give to a step at most: more only costs memory."""

    @property
    def parameters(self) -> int:
        """How many weights the model has."""

    @property
    def attention(self) -> int:
        """How many numbers the queries of one token have, those of all heads and layers together."""

    def regime(self, tokens: int) -> str:
        """The rotary regime of a context of so many tokens."""

    def identity(self, regime: str) -> Identity:
        """What makes its KV interchangeable with another's. The first call may read all weights."""

    def load_adapter(self, lora: Lora) -> int:
        """Put an adapter on, beside those that are; how many first layers have the same KV without it.

        Raises `AdapterRefused` if it does not fit this model, or the engine takes none; then nothing has changed.
        """

    def unload_adapter(self, digest: str) -> None:
        """Take it off. Its sequences can be exported still, but not computed further."""

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        """An empty sequence for `capacity` tokens, computed with the adapter of that digest. Raises `OutOfMemory`."""

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        """What draws the tokens of a reply to the prompt `context`, which a repetition penalty counts too."""

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows in one pass; returns the logits each asked for (none: an array of no rows).

        Afterwards a row's positions are present. Raises `StepRefused` before anything is computed if a row breaks
        the contract. If it fails later (`Cancelled`, checked between layers, a selector's forbidden choice, what a
        feed raised), every sequence is truncated to below its first touched position, or to nothing where an engine
        has no spans: nothing half-computed stays.
        """

    def close(self) -> None:
        """Free the model. Idempotent."""
