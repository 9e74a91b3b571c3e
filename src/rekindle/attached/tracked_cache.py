"""A transformers cache that knows which tokens its KV was computed for, or that it does not know.

transformers gives a cache keys and values, never tokens. So each call of the model's decoder is recorded before it
runs, and one invariant makes the record valid: *the tensors in the layers are the very ones that the last recorded call
left there*. Growing a `DynamicCache` makes new tensors and leaves the old ones alone, and so does everything else that
can be done to one (reordering beams, dropping tokens, an unrecorded forward). Unexpected tensors end the track, and
nothing is kept from then on. Because a tensor never changes once seen, holding it is a free snapshot.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from rekindle.attached.model_facts import Weights
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.reply import Reuse
from rekindle.engine.hf.rope import Rope
from rekindle.engine.hf.sequence import TORCH_TYPE, raw_view
from rekindle.errors import InvalidPrompt, KvLost

LayerTensors = tuple[Tensor, Tensor]  # keys, values: [1, kv_heads, tokens, dim] each

OTHER_TOKENS = "it was used for other tokens than those of the prompt it was matched for"

_Stamp = tuple["weakref.ref[Tensor]", int]


@dataclass(frozen=True, eq=False)
class MatchTerms:
    """What a cache was matched under: its KV space, and the weights and RoPE its KV must be computed with."""

    owner: object
    kv_space: KvSpace
    weights: Weights
    rope: Rope
    regime: str

    def equal(self, other: MatchTerms) -> bool:
        """Whether KV of one may be used under the other."""
        return self.weights is other.weights and self.kv_space.digest == other.kv_space.digest

    def cover(self, tokens: int) -> bool:
        """Whether a call that ends at `tokens` computes KV of this KV space."""
        # A dynamic RoPE that exceeded its length resets only strictly below it.
        fixed = self.rope.fixed_length
        return self.rope.regime(tokens) == self.regime and (fixed is None or tokens < fixed)


@dataclass(frozen=True, eq=False)
class DecoderCall:
    """The arguments of a decoder call that its KV depends on. `others` names any further arguments."""

    tokens: Tensor | None  # [rows, new]
    positions: Tensor | None  # [rows, new]
    mask: Tensor | None  # [rows, present and new]
    others: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """The KV of a cache at one moment."""

    kv_space: KvSpace
    layers: tuple[LayerTensors, ...]
    stamps: tuple[_Stamp, ...]
    ready: torch.cuda.Event | None  # recorded when the tensors may be read from another stream

    @property
    def size_bytes(self) -> int:
        """Size of the tensors it keeps alive."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)

    def export(self, span: Span) -> Kv:
        """A copy of the KV of `span` in host memory. Raises `KvLost` if the tensors are not as expected."""
        layout = self.kv_space.layout
        layers = []
        with torch.inference_mode(), _HostCopier(self.ready) as side:
            for (keys, values), shape in zip(self.layers, layout.layers, strict=True):
                for tensor, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                    expected = (1, shape.kv_heads, tensor.shape[2], dim)
                    if tensor.shape != expected or tensor.dtype != TORCH_TYPE[layout.dtype]:
                        raise KvLost(f"KV of the type {tensor.dtype} and shape {tuple(tensor.shape)} is not kept.")
                layers.append(LayerKv(*(raw_view(side.copy(t[0, :, span.start : span.stop])) for t in (keys, values))))
        if not _same(self.stamps, _stamps(self.layers)):
            raise KvLost("The tensors of the cache were written to, so their KV is not kept.")
        return Kv(span, layout, tuple(layers))


class Track:
    """The tokens of one cache, as long as they are certain. Used from the model's thread and from `match`.

    prompt   what the cache was matched for
    offered  number of tokens that were queued for writing
    exact    whether its KV is what computing gives: other KV is never kept, nor given to others
    thread   the thread that used it last
    """

    def __init__(self, cache: MatchedCache, prompt: tuple[int, ...], terms: MatchTerms) -> None:
        self.terms = terms
        self.prompt = prompt
        self.offered = 0
        self.exact = cache.reuse is None or cache.reuse.level == "exact"
        self.thread = threading.get_ident()
        self.lock = threading.RLock()
        self.ended: str | None = None
        self._cache = weakref.ref(cache)
        self._layers: list[Any] = cache.layers
        self._read = list(prompt[: cache.reused_tokens])
        self._unread: list[Tensor] = []  # tokens [new] that are still on the device
        self._doubts: list[Tensor] = []  # bools; one that is true invalidates the record
        self._pending: int | None = None  # tokens of a running call
        self.length = cache.reused_tokens
        self._left = _stamps(_tensors(self._layers))

    @property
    def alive(self) -> bool:
        """Whether the cache still exists."""
        return self._cache() is not None

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.length < len(self.prompt)

    def settled(self) -> bool:
        """Whether no call is running and the cache is as the last one left it; if it was changed, the track ends."""
        if self.ended is None and self._pending is None and not _same(self._left, _stamps(_tensors(self._layers))):
            self.end("its tensors were changed")
        return self.ended is None and self._pending is None

    def end(self, reason: str) -> None:
        """End the track: nothing is certain from now on."""
        self.ended = self.ended or reason
        self._read, self._unread, self._doubts = [], [], []
        self._layers = []  # do not keep the tensors alive

    def _refusal(self, call: DecoderCall) -> str | None:
        """Why the tokens of this call do not determine its KV; None if they do."""
        tokens, stop = call.tokens, self.length
        if tokens is None:
            return "it was given embeddings, not tokens"
        if tokens.ndim != 2 or tokens.shape[0] != 1:
            return "it was used for a batch"
        stop += tokens.shape[1]
        if call.others:
            return f"the model was called with {', '.join(call.others)}"
        if call.mask is not None and call.mask.shape != (1, stop):
            return "its attention mask has another length"
        if call.positions is not None and call.positions.shape != tokens.shape:
            return "its positions have another shape"
        if not self.terms.cover(stop):
            return "its length leaves the rotary regime"
        return None

    def begin(self, call: DecoderCall) -> str | None:
        """Record a call that is about to run, or return why not. Within the prompt it must continue the prompt."""
        reason = self._refusal(call)
        if reason is not None or call.tokens is None:
            return reason
        doubts = self._doubts_about(call, call.tokens.shape[1])
        if self.in_prompt:  # the device is still idle, so reading costs no synchronization
            if any(map(bool, doubts)):
                return "its attention mask or positions leave tokens out"
            new = call.tokens[0].tolist()
            expected = list(self.prompt[self.length : self.length + len(new)])
            if new[: len(expected)] != expected:
                return OTHER_TOKENS
            self._read += new
        else:
            self._unread.append(call.tokens[0].detach().clone())  # the caller may overwrite it
            self._doubts += doubts
        self._pending = call.tokens.shape[1]
        self.thread = threading.get_ident()
        return None

    def commit(self) -> None:
        """The recorded call has run."""
        if self._pending is None or self.ended is not None:
            return
        self.length += self._pending
        self._pending = None
        tensors = _tensors(self._layers)
        whole = len(tensors) == len(self.terms.kv_space.layout.layers)
        if not whole or any(t.shape[0] != 1 or t.shape[2] != self.length for pair in tensors for t in pair):
            self.end("not every layer took every token")
        self._left = _stamps(tensors)

    def shorten(self) -> None:
        """Tokens were taken off the end of a settled cache."""
        tensors = _tensors(self._layers)
        rows = {tensor.shape[2] for pair in tensors for tensor in pair}
        if len(rows) == 1 and self.tokens() is not None:
            self.length = rows.pop()
            del self._read[self.length :]
            self.prompt = self.prompt[: self.length]  # from here on any token may follow
            self.offered = min(self.offered, self.length)
            self._left = _stamps(tensors)

    def restart(self) -> None:
        """The cache was emptied."""
        self._read, self.length, self._left = [], 0, ()

    def tokens(self) -> tuple[int, ...] | None:
        """All tokens whose KV is in the cache; None if they are not certain. Synchronizes with the device."""
        if self._doubts and bool(torch.stack(self._doubts).any()):
            self.end("its attention mask or positions leave tokens out")
        if self.ended is not None:
            return None
        if self._unread:
            self._read += torch.cat(self._unread).tolist()
        self._unread, self._doubts = [], []
        return tuple(self._read) if len(self._read) == self.length else None

    def snapshot(self) -> CacheSnapshot:
        """The KV of a settled cache now: no copy, the tensors are kept alive."""
        tensors = self.prefix(self.length)
        ready = None
        if tensors[0][0].device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(tensors[0][0].device))
        return CacheSnapshot(self.terms.kv_space, tensors, _stamps(tensors), ready)

    def prefix(self, length: int) -> tuple[LayerTensors, ...]:
        """The KV of the first `length` tokens of a settled cache: views, no copies."""
        detached = ((keys.detach(), values.detach()) for keys, values in _tensors(self._layers))
        return tuple((keys[:, :, :length], values[:, :, :length]) for keys, values in detached)

    def _doubts_about(self, call: DecoderCall, new: int) -> list[Tensor]:
        doubts = []
        if call.mask is not None:
            doubts.append((call.mask == 0).any())
        if call.positions is not None:
            stop = self.length + new
            expected = self.length if new == 1 else torch.arange(self.length, stop, device=call.positions.device)
            doubts.append((call.positions != expected).any())
        return doubts


class MatchedCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` that holds the KV of the prompt's first `reused_tokens` tokens.

    Every layer holds the KV of all tokens, also those with a sliding window; transformers masks the rest.
    A copy is an ordinary cache: its KV is not kept.
    """

    def __init__(self, layers: Sequence[LayerTensors] = ()) -> None:
        super().__init__()
        for keys, values in layers:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            self.layers.append(layer)
        self.reused_tokens = layers[0][0].shape[2] if layers else 0
        self.reuse: Reuse | None = None  # what was reused, where text of other prompts was found
        self.track: Track | None = None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove tokens from the end, as every cache can."""
        track = self.track
        with contextlib.nullcontext() if track is None else track.lock:
            settled = track is not None and track.settled()
            super().crop(*args, **kwargs)
            if track is not None and settled:
                track.shorten()

    def adapt_to(self, call: DecoderCall) -> None:
        """Make the cache fit the first call after the match, where transformers does not do so itself.

        Assisted generation (and, in older versions, chunked prefill) begins with the first token of the prompt, not
        with the one after the cache: then the cache is emptied. Beams and several return sequences pass the rest in
        several rows: then the cache is repeated. Raises `InvalidPrompt` for a mask that hides tokens whose KV was
        reused: that KV was computed with all of them visible.
        """
        track, known, tokens = self.track, self.reused_tokens, call.tokens
        if track is None or not known or track.length != known or tokens is None or tokens.ndim != 2:
            return
        rows = tokens.shape[0]
        if rows == 1 and self._starts_over(track, tokens, call.positions):
            self.layers.clear()
            self.reused_tokens = 0
            track.restart()
        elif call.mask is not None and call.mask.ndim == 2 and bool((call.mask[:, :known] == 0).any()):
            raise InvalidPrompt("The attention mask hides tokens whose KV was reused. Give `match` no padded prompts.")
        elif rows > 1 and bool((tokens == tokens[:1]).all()):
            self.batch_repeat_interleave(rows)

    def _starts_over(self, track: Track, tokens: Tensor, positions: Tensor | None) -> bool:
        if positions is not None:
            return int(positions.reshape(-1)[0]) == 0
        new, known = tuple(tokens[0].tolist()), self.reused_tokens
        rest = track.prompt[known : known + len(new)]
        return new[: len(rest)] != rest and new[:known] == track.prompt[:known]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "track": None}


class _HostCopier:
    """Copies tensors to host memory: on CUDA in a stream of its own, through pinned memory, one at a time."""

    def __init__(self, ready: torch.cuda.Event | None) -> None:
        self._ready = ready
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> _HostCopier:
        if self._ready is not None:
            self._stream = torch.cuda.Stream(self._ready.device)  # type: ignore[no-untyped-call]
            self._stream.wait_event(self._ready)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:  # tensors must not be freed while they are being read
            self._stream.synchronize()

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in pageable memory, complete on return."""
        if self._stream is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        with torch.cuda.stream(self._stream):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor.detach(), non_blocking=True)
            self._stream.synchronize()
        return pinned.clone()


def _tensors(layers: Sequence[Any]) -> tuple[LayerTensors, ...]:
    """The tensors of the layers; none at all if one layer is missing or of another kind."""
    if any(type(layer) is not DynamicLayer or not layer.is_initialized for layer in layers):
        return ()
    return tuple((layer.keys, layer.values) for layer in layers)


def _stamps(layers: Sequence[LayerTensors]) -> tuple[_Stamp, ...]:
    """Identities and write counts of tensors. Inference-mode tensors do not count writes."""
    tensors = (tensor for pair in layers for tensor in pair)
    return tuple((weakref.ref(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)


def _same(one: Sequence[_Stamp], other: Sequence[_Stamp]) -> bool:
    # `is`, because `==` on references compares the tensors; a living tensor has one plain reference.
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b and version == now for (a, version), (b, now) in pairs)
