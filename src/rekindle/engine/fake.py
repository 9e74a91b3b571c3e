"""A tiny decoder in plain numpy with random weights: for tests, and as a readable model of the other engines.

It keeps every contract of `Engine`, and one more: its results are bit-identical however a context is cut into steps.
Each sum runs over exactly the terms it needs, one token at a time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.adapter import AdapterFit, Lora
from rekindle.core.identity import Identity, digest_of_fields
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.core.request import Message, Sampling, Think
from rekindle.engine.base import Capabilities, HostStopwatch, KvFeed, Logits, MovedFeed, Row, SpansOnly
from rekindle.engine.hooks import AttentionMap, KvDrift, Positions, Reading
from rekindle.engine.row_checks import CheckedRow, check_rows
from rekindle.engine.sample import Sampler
from rekindle.errors import AdapterRefused, Cancelled, Closed, InvalidPrompt, StepRefused
from rekindle.text.base import QuotedChat, ReplayedChat, TemplateOptions, Written, check_length
from rekindle.text.tools.styles import TemplateTools, tools_as_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[np.float32]

_LAYERS, _HEADS, _KV_HEADS, _DIM = 3, 4, 2, 8
_HIDDEN = _HEADS * _DIM
_REGIME = "plain"


class FakeSequence(SpansOnly):
    """KV in numpy arrays. See `EngineSequence` for the contract."""

    regime = _REGIME

    def __init__(self, engine: FakeEngine, capacity: int, adapter: str | None = None) -> None:
        self.engine = engine
        self.adapter = adapter
        self.layout = engine.layout
        self.capacity = capacity
        self._length = 0
        # [layers, keys and values, kv_heads, capacity, dim]; NaN where nothing was written, so that a gap shows
        self._kv = np.full((_LAYERS, 2, _KV_HEADS, capacity, _DIM), np.nan, dtype=np.float32)
        self._closed = False

    @property
    def length(self) -> int:
        if self._closed:
            raise Closed("The sequence was closed. Open a new one.")
        return self._length

    @property
    def size_bytes(self) -> int:
        return self._kv.nbytes

    def buffer(self, layer: int, span: Span) -> LayerKv:
        """The layer's own buffer of `span`."""
        return LayerKv(*self._kv[layer]).window(span.start, span.stop)

    def set_length(self, length: int) -> None:
        """Mark exactly the positions below `length` as present."""
        self._length = length

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise StepRefused(f"Cannot truncate to {length}: {self.length} positions are present.")
        self._length = length
        self._kv[:, :, :, length:] = np.nan

    def reserve(self, capacity: int) -> None:
        self.engine.check_capacity(capacity)
        more = capacity - self.capacity
        if more > 0:
            self._kv = np.pad(self._kv, ((0, 0),) * 3 + ((0, more), (0, 0)), constant_values=np.nan)
            self.capacity = capacity

    def export(self, span: Span) -> Kv:
        if span.stop > self.length:
            raise StepRefused(f"Cannot export up to {span.stop}: {self.length} positions are present.")
        views = (self.buffer(layer, span) for layer in range(_LAYERS))
        return Kv(span, self.layout, tuple(view.copy() for view in views))

    def close(self) -> None:
        self._closed = True


class FakeEngine:
    """See `Engine` for the contract. Another `seed` is another model."""

    capabilities = Capabilities(layer_feeds=True, recompute="scattered", probes=True, adapters=True)
    device = "cpu"
    device_bytes = 1 << 30
    memory_bytes = 0
    arithmetic = "numpy"
    prefill_tokens = 256

    def __init__(self, *, seed: int = 0, context_tokens: int = 4096) -> None:
        self.name = f"fake-{seed}"
        self.tokenizer = ByteTokenizer()
        self.context_tokens = self.longest_context = context_tokens
        self.layout = KvLayout("float32", (LayerShape(_KV_HEADS, _DIM, _DIM),) * _LAYERS)
        self._weights = _make_weights(seed)
        self.parameters = sum(weights.size for weights in self._weights.values())
        self.attention = _LAYERS * _HIDDEN
        self._adapted: dict[str, dict[str, Array]] = {}  # the weights with each adapter
        self._loads: Counter[str] = Counter()
        self._seed = seed
        self._lock = threading.Lock()
        self._closed = False

    def regime(self, tokens: int) -> str:  # noqa: ARG002  (one regime for every length)
        return _REGIME

    def identity(self, regime: str) -> Identity:
        """Derived from the seed."""
        digest = digest_of_fields("rekindle/fake/1", str(self._seed))
        tokenizer = digest_of_fields("bytes")
        return Identity(digest, digest, tokenizer, tokenizer, self.layout.dtype, regime)

    def check_adapter(self, lora: Lora) -> AdapterFit:
        self._adapt(lora)
        return AdapterFit(min(int(name.split(".")[1]) for name in lora.pairs), lora.size_bytes)

    def load_adapter(self, lora: Lora) -> None:
        self._adapted[lora.digest] = self._adapt(lora)
        self._loads[lora.digest] += 1

    def _adapt(self, lora: Lora) -> dict[str, Array]:
        """The weights with an adapter, whose layers are called `layers.0.q` and so on."""
        changed = dict(self._weights)
        for name, pair in lora.pairs.items():
            weights = self._weights.get(name.removeprefix("layers."))  # [outputs, inputs]
            if weights is None or weights.shape != (pair.up.shape[0], pair.down.shape[1]):
                raise AdapterRefused(f"The adapter changes {name}, which this model does not have in that shape.")
            changed[name.removeprefix("layers.")] = weights + np.float32(pair.scale) * (pair.up @ pair.down)
        return changed

    def unload_adapter(self, digest: str) -> None:
        self._loads[digest] -= 1
        if self._loads[digest] <= 0:
            del self._loads[digest]
            self._adapted.pop(digest, None)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> FakeSequence:
        if regime != _REGIME:
            raise StepRefused(f"The regime {regime!r} is unknown. Ask `regime(tokens)`.")
        self.check_capacity(capacity)
        return FakeSequence(self, capacity, adapter)

    def check_capacity(self, capacity: int) -> None:
        """Raises `StepRefused` for a capacity beyond the context."""
        if not 0 < capacity <= self.context_tokens:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self.context_tokens} tokens.")

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows, one after the other."""
        with self._lock:
            if self._closed:
                raise Closed("The engine was closed. Make a new one.")
            checked = check_rows(rows, layers=_LAYERS, vocabulary_size=VOCABULARY, turns=True)
            for row in checked:
                self._own(row)
            finished = False
            try:
                logits = [self._run(row, cancelled) for row in checked]
                finished = True
            finally:
                for row in checked:
                    self._own(row).set_length(row.end if finished else min(row.kept, row.first_touched))
            return logits

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> Sampler:
        return Sampler(sampling, context)

    def close(self) -> None:
        self._closed = True

    def _own(self, row: CheckedRow) -> FakeSequence:
        sequence = row.row.sequence
        if not isinstance(sequence, FakeSequence) or sequence.engine is not self:
            raise StepRefused("A row holds a sequence of another engine.")
        if sequence.adapter is not None and sequence.adapter not in self._adapted:
            raise StepRefused("The adapter of a sequence is not loaded. Load it before it is used.")
        return sequence

    def _weights_of(self, sequence: FakeSequence) -> dict[str, Array]:
        return self._weights if sequence.adapter is None else self._adapted[sequence.adapter]

    def _run(self, row: CheckedRow, cancelled: Callable[[], bool] | None) -> Logits:
        sequence, positions = self._own(row), row.positions
        weights = self._weights_of(sequence)
        hidden = weights["embed"][row.tokens]  # [tokens, hidden]
        seen: list[Array] = []
        until = _LAYERS if row.row.until is None else row.row.until
        for layer in range(_LAYERS):
            if cancelled is not None and cancelled():
                raise Cancelled("The request was cancelled.")
            if row.row.selector is not None and layer > 0:
                choice = row.row.selector.choose(layer, positions)
                chosen = row.check_choice(layer, positions, choice, _LAYERS)
                hidden, positions = hidden[np.searchsorted(positions, chosen)], chosen
            for feed in row.row.feeds:
                if layer in feed.layers:
                    _fill(feed, layer, sequence.buffer(layer, feed.span))
            if layer < until:
                until = layer + 1 if row.row.enough is not None and row.row.enough(layer) else until
                hidden = self._layer(layer, hidden, positions, row, sequence, seen)
        if row.row.gaze is not None:
            row.row.gaze.report(np.mean(seen, axis=0))
        if row.row.logits == "none":
            return np.zeros((0, VOCABULARY), dtype=np.float32)
        wanted = hidden if row.row.logits == "all" else hidden[-1:]
        return _times(_norm(wanted), weights["head"])

    def _layer(
        self,
        layer: int,
        hidden: Array,
        positions: Positions,
        row: CheckedRow,
        sequence: FakeSequence,
        seen: list[Array],
    ) -> Array:
        normed = _norm(hidden)
        known = self._weights_of(sequence)
        weights = {name: known[f"{layer}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
        queries = _rotate(_heads(_times(normed, weights["q"]), _HEADS), positions)  # [heads, tokens, dim]
        keys = _rotate(_heads(_times(normed, weights["k"]), _KV_HEADS), positions)
        values = _heads(_times(normed, weights["v"]), _KV_HEADS)
        own = sequence.buffer(layer, Span(0, sequence.capacity))
        deviation = _deviation(keys, values, own.keys[:, positions], own.values[:, positions])
        if row.row.spread is not None:
            _spread(row.row.spread, positions, (own.keys, keys), (own.values, values))
        own.keys[:, positions], own.values[:, positions] = keys, values
        mixed = np.empty((len(positions), _HIDDEN), dtype=np.float32)
        attention: list[Array] = []
        end = int(positions.max(initial=-1)) + 1
        shared_keys, shared_values = _columns(own.keys[:, :end]), _columns(own.values[:, :end])
        for index, position in enumerate(positions):
            seen_keys, seen_values = shared_keys[..., : position + 1], shared_values[..., : position + 1]
            out, mass = _attend(queries[:, index], seen_keys, seen_values)
            mixed[index] = out.reshape(-1)
            attention.append(mass)
        _report(row, layer, positions, attention, deviation)
        if row.row.gaze is not None and (row.row.gaze.layers is None or layer in row.row.gaze.layers):
            seen.append(_seen(row.row.gaze, positions, attention, own.values))
        hidden = hidden + _times(mixed, weights["o"])
        inner = np.tanh(_times(_norm(hidden), weights["up"]))
        return np.asarray(hidden + _times(inner, weights["down"]), dtype=np.float32)


def _spread(spread: KvDrift, positions: Positions, *halves: tuple[Array, Array]) -> None:
    for span in spread.spans:
        chosen = np.flatnonzero((positions >= span.start) & (positions < span.stop))
        rest = np.setdiff1d(np.arange(span.start, span.stop), positions)
        for old, new in halves:
            if len(chosen) and len(rest):
                change = new[:, chosen] - old[:, positions[chosen]]
                old[:, rest] += np.float32(spread.gain) * change.mean(axis=1, keepdims=True)


def _make_weights(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, int]] = {"embed": (VOCABULARY, _HIDDEN), "head": (VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        sizes = {"q": _HIDDEN, "k": _KV_HEADS * _DIM, "v": _KV_HEADS * _DIM, "o": _HIDDEN}
        shapes |= {f"{layer}.{name}": (rows, _HIDDEN) for name, rows in sizes.items()}
        shapes |= {f"{layer}.up": (2 * _HIDDEN, _HIDDEN), f"{layer}.down": (_HIDDEN, 2 * _HIDDEN)}
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def _times(rows: Array, matrix: Array) -> Array:
    """`rows @ matrix.T`, each sum on its own: the result of a row does not depend on the rows beside it."""
    return np.asarray((rows[:, None] * matrix).sum(axis=-1), dtype=np.float32)


def _norm(hidden: Array) -> Array:
    scale = np.sqrt(np.square(hidden).mean(axis=-1, keepdims=True) + 1e-6)
    return np.asarray(hidden / scale, dtype=np.float32)


def _heads(rows: Array, heads: int) -> Array:
    return np.moveaxis(rows.reshape(len(rows), heads, _DIM), 0, 1)


def _rotate(heads: Array, positions: Positions) -> Array:
    """Rotate each pair of numbers of a head by its position."""
    half = _DIM // 2
    angles = positions[:, None] / 100.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _fill(feed: KvFeed, layer: int, out: LayerKv) -> None:
    feed.fill(layer, out)
    if isinstance(feed, MovedFeed) and feed.shift:
        out.keys[:] = _rotate(out.keys, np.full(len(feed.span), feed.shift, dtype=np.int64))


def _columns(half: Array) -> Array:
    """Keys or values for every head, transposed: `[heads, dim, tokens]`."""
    return np.repeat(half.transpose(0, 2, 1), _HEADS // _KV_HEADS, axis=0)


def _attend(query: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """One token's output `[heads, dim]` and attention `[heads, keys]`; keys and values are `[heads, dim, keys]`."""
    scores = (query[..., None] * keys).sum(axis=1) / np.float32(_DIM**0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = (weights[:, None] * values).sum(axis=-1)
    return mixed, weights


def _deviation(keys: Array, values: Array, old_keys: Array, old_values: Array) -> Array:
    shares = [
        np.square(new - old).sum(axis=(0, 2)) / np.maximum(np.square(old).sum(axis=(0, 2)), 1e-12)
        for new, old in ((keys, old_keys), (values, old_values))
    ]
    return np.asarray(np.sqrt(np.mean(shares, axis=0)), dtype=np.float32)


def _seen(gaze: AttentionMap, positions: Positions, attention: list[Array], values: Array) -> Array:
    end = int(positions[-1]) + 1
    mass = np.zeros((_HEADS, end), dtype=np.float32)
    asked = [index for index, position in enumerate(positions) if position in gaze.queries]
    for index in asked:
        mass[:, : attention[index].shape[1]] += attention[index] / len(asked)
    lengths = np.sqrt(np.square(values[:, :end]).sum(axis=-1))  # [kv_heads, keys]
    weighed = mass * np.repeat(lengths / lengths.mean(), _HEADS // _KV_HEADS, axis=0)
    return np.asarray(weighed.max(axis=0), dtype=np.float32)


def _report(row: CheckedRow, layer: int, positions: Positions, attention: list[Array], deviation: Array) -> None:
    probe = row.row.probe
    if probe is None or not len(positions) or (probe.layers is not None and layer not in probe.layers):
        return
    received = np.zeros((_HEADS, int(positions[-1]) + 1), dtype=np.float32)
    asked = [i for i, p in enumerate(positions) if probe.queries is not None and p in probe.queries]
    for index in asked:
        received[:, : attention[index].shape[1]] += attention[index] / len(asked)
    sent = np.array(
        [[mass[:, s.start : s.stop].sum(axis=1).mean() for s in probe.segments] for mass in attention],
        dtype=np.float32,
    )
    queried: Any = probe.queries is not None
    probe.report(
        Reading(
            layer=layer,
            positions=positions,
            received=received.mean(axis=0) if queried else None,
            received_most=received.max(axis=0) if queried else None,
            sent=sent if probe.segments else None,
            deviation=deviation if probe.deviation else None,
        )
    )


END, START = 256, 257
VOCABULARY = 258


class ByteTokenizer:
    """One token per byte, and two control tokens that no text can spell."""

    stop_ids = frozenset({END})
    vocabulary_size = VOCABULARY
    needs_model = False
    template = ""

    def begins_thought(self, think: Think | None = None) -> bool:  # noqa: ARG002
        return False

    def token_of(self, spelling: str) -> int | None:  # noqa: ARG002  (no text spells one)
        return None

    def min_token_count(self, text: str) -> int:
        return len(text)

    def encode(self, text: str, *, token_limit: int | None = None) -> list[int]:
        check_length(text, token_limit, self.min_token_count)
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: Sequence[Message], **how: Unpack[TemplateOptions]) -> list[int]:
        """Each message between a start and an end token, then the start of the reply. Tools are written as text."""
        tools = how.get("tools", ())
        chat = [TemplateTools.of(self.template).prepare(m.as_template_input()) for m in messages]
        if tools or any(m.get("tool_calls") for m in chat):
            chat = tools_as_text(chat, [tool.as_template_input() for tool in tools])
        check_length("".join(m["content"] for m in chat), how.get("token_limit"), self.min_token_count)
        turns = [[START, *self.encode(f"{m['role']}\n{m['content']}"), END] for m in chat]
        tokens = [token for turn in turns for token in turn]
        if messages[-1].is_continued:
            return tokens[:-1]
        return tokens + ([START, *self.encode("assistant\n")] if how.get("add_generation_prompt", True) else [])

    def encode_replayed(self, messages: Sequence[Message], written: Written, **how: Any) -> ReplayedChat:  # noqa: ARG002
        """No reply stands in: a text has the same tokens, however it came about."""
        return ReplayedChat(self.encode_chat(messages, **how))

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], **how: Unpack[TemplateOptions]
    ) -> QuotedChat:
        place = next((at for at, message in enumerate(messages) if message.role == "user"), None)
        if place is None:
            raise InvalidPrompt("There is no user message that passages could be quoted for. Add one.")
        whole, rest = self.encode_chat(messages, **how), self.encode_chat(messages[place:])
        at = len(whole) - len(rest) + 1 + len(self.encode("user\n"))
        return QuotedChat(whole[:at], [self.encode(text[: how.get("token_limit")]) for text in quotes], whole[at:])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; a cut-off character becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def spell(self, tokens: Sequence[int]) -> str:
        names = {START: "<start>", END: "<end>"}
        runs = groupby(tokens, key=lambda token: token in names)
        return "".join("".join(names[t] for t in run) if control else self.decode(list(run)) for control, run in runs)

    def pieces(self) -> list[bytes]:
        """The bytes themselves; none for the two control tokens."""
        return [bytes([token]) if token < 256 else b"" for token in range(VOCABULARY)]
