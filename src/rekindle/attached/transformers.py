"""For transformers loops of your own: a cache filled with stored KV, and new KV is kept.

    kv = rekindle.attach(model)
    cache = kv.match(input_ids)                                       lookup, load
    model.generate(input_ids, past_key_values=cache)                  hooks record the tokens; the prompt is kept
    kv.close()                                                        the reply is kept, the hooks are removed

The model is not changed: two hooks on its decoder observe the calls, and a thread copies and writes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rekindle.attached.model_facts import ModelFacts, refuse_unfit
from rekindle.attached.tracked_cache import (
    OTHER_TOKENS,
    CacheSnapshot,
    DecoderCall,
    LayerTensors,
    MatchedCache,
    MatchTerms,
    Track,
)
from rekindle.cache.cost import remember_costs
from rekindle.cache.deadline import DeadlineCaller, NoAnswer
from rekindle.cache.open_store import open_store
from rekindle.cache.prefix_cache import CLOSE_SECONDS, PrefixCache
from rekindle.cache.stored_kv import LOAD_SECONDS, StoredKv
from rekindle.cache.writer import BackgroundWriter, WriteJob
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.core.keys import KvSpace, Namespace, common_tokens, token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.engine.hf.device import Placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.sequence import TORCH_TYPE, raw_view
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import Closed, InvalidPrompt, InvalidSetting, KvLost, RekindleError, nearest
from rekindle.models.registry import loaded_name
from rekindle.settings import Settings
from rekindle.settings.keywords import CacheSettings, SettingsLike
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore
from rekindle.text.base import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

log = logging.getLogger("rekindle.attach")

_HARMLESS = frozenset({"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"})
# What bookkeeping may raise in a hand-made call: it ends the track, never the call.
_TROUBLE = (RekindleError, TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_SLOWEST_BYTES = 100e6  # per second: a slower cache is not waited for


def attach(model: PreTrainedModel, **settings: Unpack[CacheSettings]) -> Attached:
    """Keep the KV that `model` computes in loops of your own, and reuse it.

        with rekindle.attach(model) as kv:
            cache = kv.match(input_ids)
            output = model.generate(input_ids, past_key_values=cache)

    Reads all weights, to identify the model; what else it measures the first time is remembered. The settings are
    those of a `Session`: `cache` (the folder), `memory_limit`, `disk_limit`, `tenant`, `cache_salt` and so on. Raises
    `UnsupportedModel` for a model whose KV cannot be kept, `CacheUnusable` if the folder you named cannot be opened,
    `InvalidSetting` for a wrong setting.
    """
    for name in settings:
        if name in SettingsLike.__annotations__ and name not in CacheSettings.__annotations__:
            raise InvalidSetting(f"attach has no {name}: your loop runs the model. Use a Session({name}=...) for it.")
        if name not in CacheSettings.__annotations__:
            raise InvalidSetting(f"Unknown setting {name!r}.{nearest(name, CacheSettings.__annotations__)}")
    return Attached(refuse_unfit(model), Settings.load(settings))


class Attached:
    """A model with hooks. Make one with `attach`. May be used from several threads."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._lock = threading.Lock()
        self._facts = ModelFacts(model)
        if settings.reuse == "quantized":
            raise InvalidSetting("attach keeps KV as it is: leave reuse='quantized' out, or use a Session.")
        if settings.origin is not None:
            raise InvalidSetting(
                "attach asks no origin. Unset REKINDLE_ORIGIN, or take origin out of rekindle.toml; a Session asks it."
            )
        self._store = open_store(settings)
        self._writer = None if self._store is None else BackgroundWriter(self._store)
        self._deadline = DeadlineCaller()
        self._matcher: TextMatcher | None = None  # made for the first prompt, if text of others may be reused
        self._tracks: list[Track] = []  # of caches in use, or whose reply is not queued for writing yet
        self._logged: set[str] = set()
        self._closed = False
        decoder: nn.Module = model.get_decoder()
        self._parameters = tuple(inspect.signature(decoder.forward).parameters)
        self._hooks = (
            decoder.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            decoder.register_forward_hook(_Hook(self._after), with_kwargs=True),
        )

    def match(self, input_ids: Tensor | Sequence[int]) -> MatchedCache:
        """A cache for `model.generate(input_ids, past_key_values=...)`, or for a loop of your own.

        It holds the KV of the longest stored prefix of the prompt, at most all but its last token; its `reused_tokens`
        says how much that is. With reuse="approximate", where text of earlier prompts is found in it, it holds the KV
        of all but the last token, computed here as far as it is new; its `reuse` says what was reused, or why not.

        Use it once, for this prompt; a loop of your own gives the model the tokens after those. What the model computes
        is kept: the prompt after its first token, the reply when `match` or `flush` is called next, or `close`.

        `input_ids` has the shape [1, tokens] or is a list of token ids. Raises `InvalidPrompt` for anything else and
        `Closed` after `close`; never because of the cache.
        """
        prompt = _prompt_of(input_ids)
        if self._closed:
            raise Closed("The model was detached. Attach to it again.")
        recent = self._offer_all(threading.get_ident())
        terms = self._terms(len(prompt))
        if terms is None or self._store is None:
            return MatchedCache()
        text = self._match_text(self._store, prompt[:-1])
        moved = None if text is None else text.layers
        cache = MatchedCache(self._recall(terms, prompt[:-1], recent) if moved is None else moved)
        cache.reuse = None if text is None else text.reuse
        cache.track = Track(cache, prompt, terms)
        with self._lock:
            self._tracks.append(cache.track)
        return cache

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Keep everything computed so far; False if that takes longer."""
        self._offer_all()
        others = self._matcher is None or self._matcher.flush(timeout_seconds)
        return others and (self._writer is None or self._writer.flush(timeout_seconds))

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Keep what was computed, within that time, and leave the model as it was. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._offer_all()
        self._tracks.clear()
        self._deadline.close()
        if self._matcher is not None:
            self._matcher.close(timeout_seconds)
        if self._writer is not None and self._store is not None and self._writer.close(timeout_seconds):
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Attached {'closed' if self._closed else type(self._model).__name__}>"

    # -- reuse ---------------------------------------------------------------------------------------------

    def _terms(self, tokens: int) -> MatchTerms | None:
        """The terms for a prompt of `tokens` tokens; None if nothing may be reused or kept."""
        with self._lock:
            if self._facts.weights.changed():
                log.info("The weights of the model changed: they are read again.")
                self._facts = ModelFacts(refuse_unfit(self._model))
            facts = self._facts
        reason = facts.interference.reason()
        if reason is not None:
            self._log_once(f"Nothing is reused or kept while {reason}.")
            return None
        regime = facts.rope.regime(tokens)
        identity = facts.identity(regime).digest
        namespace = Namespace(identity, self._settings.tenant, self._settings.cache_salt)
        name = loaded_name(str(getattr(self._model.config, "_name_or_path", ""))) or facts.family
        terms = MatchTerms(self, KvSpace(namespace, facts.layout, model=name), facts.weights, facts.rope, regime)
        return terms if terms.cover(tokens) else None

    def _match_text(self, store: TieredStore, tokens: tuple[int, ...]) -> MatchedText | None:
        """The KV of a prompt with text of earlier ones; None if that is not allowed, or nothing is found."""
        if self._settings.reuse != "approximate" or not tokens:
            return None
        with self._lock:
            if self._matcher is not None and self._matcher.facts is not self._facts:
                self._matcher.close(CLOSE_SECONDS)
                self._matcher = None
            if self._matcher is None:
                self._matcher = TextMatcher(self._model, self._facts, self._settings, store)
        return self._matcher.match(tokens)

    def _recall(self, terms: MatchTerms, tokens: tuple[int, ...], recent: Sequence[Track]) -> tuple[LayerTensors, ...]:
        """The KV of the longest stored prefix of `tokens`: from a cache just in use, else from the store."""
        store = self._store
        assert store is not None
        try:
            match = self._deadline.ask(lambda: store.lookup(terms.kv_space, tokens), LOAD_SECONDS)
        except NoAnswer as late:
            self._log_once(f"The cache does not answer ({late}), so everything is computed.")
            return ()
        if match.pieces:
            store.record_use(match)
        longest, recent_kv, wanted = match.length, None, token_bytes(tokens)
        for track in recent:
            with self._guarded(track):
                usable = track.exact and track.settled() and track.terms.equal(terms)
                common = common_tokens(token_bytes(track.tokens() or ()), wanted) if usable else 0
                if common and common >= longest:
                    longest, recent_kv = common, track.prefix(common)
        if recent_kv is not None or not match.pieces:
            return recent_kv or ()
        device = self._model.device
        seconds = LOAD_SECONDS + match.length * terms.kv_space.layout.token_bytes / _SLOWEST_BYTES
        try:
            read = self._deadline.ask(
                lambda: _read(store, terms.kv_space, match, pinned=device.type == "cuda"), seconds
            )
            return tuple((k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for k, v in read)
        except (NoAnswer, torch.OutOfMemoryError) as error:
            log.info("computing instead: %s", error)
            return ()

    # -- keep -----------------------------------------------------------------------------------------------

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        cache, track = self._ours(given)
        if cache is not None and track is not None:
            with self._guarded(track):
                self._note(track, cache, _call_of(given))

    def _after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: object) -> None:
        track = self._ours({**dict(zip(self._parameters, args, strict=False)), **kwargs})[1]
        if track is not None:
            with self._guarded(track):
                track.commit()

    def _ours(self, given: Mapping[str, Any]) -> tuple[MatchedCache | None, Track | None]:
        """The cache of a call and its track, if this attachment made it."""
        cache = given.get("past_key_values")
        track = cache.track if isinstance(cache, MatchedCache) else None
        if track is None or track.terms.owner is not self or track.ended or torch.compiler.is_compiling():
            return None, None
        return cache, track

    @contextlib.contextmanager
    def _guarded(self, track: Track) -> Iterator[None]:
        """Wraps the bookkeeping of a cache: an error ends its track, never the model's call."""
        with track.lock:
            try:
                yield
            except InvalidPrompt:
                raise  # continuing would give a wrong answer
            except _TROUBLE as error:
                track.end(str(error))
            if track.ended is not None:
                level = logging.WARNING if track.ended == OTHER_TOKENS else logging.INFO
                self._log_once(f"KV is not kept from here on: {track.ended}.", level)

    def _note(self, track: Track, cache: MatchedCache, call: DecoderCall) -> None:
        if not track.settled():
            return track.end("a call with it failed")
        if track.offered < len(track.prompt) <= track.length:
            self._offer(track)  # the prompt's KV, now that the first token is out
        cache.adapt_to(call)
        reason = self._facts.interference.reason() or track.begin(call)
        if reason is not None:
            self._offer(track)
            track.end(reason)
        return None

    def _offer_all(self, thread: int | None = None) -> list[Track]:
        """Offer the KV of all caches for writing, drop those that nobody holds any more, and return all there were.

        With `thread`, caches that other threads hold are left alone: they may be in the middle of a reply.
        """
        with self._lock:
            tracks = list(self._tracks)
        for track in tracks:
            with self._guarded(track):
                if thread is None or track.thread == thread or not track.alive:
                    self._offer(track)
        with self._lock:
            gone = [track for track in tracks if track.ended is not None or not track.alive]
            self._tracks = [track for track in self._tracks if track not in gone]
        return tracks

    def _offer(self, track: Track) -> None:
        """Queue the KV of a settled cache for writing."""
        if self._writer is None or not track.exact or track.length <= track.offered or not track.settled():
            return
        tokens = track.tokens()
        if tokens is not None:
            self._writer.offer(_SnapshotWrite(track.terms, tokens, track.snapshot()))
            track.offered = track.length

    def _log_once(self, sentence: str, level: int = logging.WARNING) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            log.log(level, "%s", sentence)


class _Hook:
    """An observing hook. In a copy of the model it does nothing: the copy may have other weights."""

    def __init__(self, callback: Callable[..., None] | None) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        if self._callback is not None:
            self._callback(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)


class _SnapshotWrite(WriteJob):
    """Writes a snapshot, unless the weights changed since it was matched."""

    def __init__(self, terms: MatchTerms, tokens: tuple[int, ...], snapshot: CacheSnapshot) -> None:
        def export(span: Span) -> Kv:
            kv = snapshot.export(span)
            if terms.weights.changed():
                raise KvLost("The weights of the model changed, so what they computed is not kept.")
            return kv

        super().__init__(terms.kv_space, tokens, export)
        self._size_bytes = snapshot.size_bytes

    def detached_bytes(self) -> int:
        """The size of the tensors it keeps alive."""
        return self._size_bytes


def _call_of(given: Mapping[str, Any]) -> DecoderCall:
    parts = {"input_ids", "position_ids", "attention_mask", "past_key_values"}
    others = (n for n, v in given.items() if n not in parts | _HARMLESS and v is not None and v is not False)
    return DecoderCall(given.get("input_ids"), given.get("position_ids"), given.get("attention_mask"), tuple(others))


def _prompt_of(input_ids: Tensor | Sequence[int]) -> tuple[int, ...]:
    ids = np.asarray(input_ids.tolist() if isinstance(input_ids, Tensor) else input_ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim == 2:
        raise InvalidPrompt(f"match takes one prompt, not a batch of {len(ids)}. Call it once for each.")
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or not len(ids):
        raise InvalidPrompt("match takes the token ids of a prompt: a tensor [1, tokens], or a list, and not empty.")
    if int(ids.min()) < 0:
        raise InvalidPrompt("Token ids are not negative.")
    return tuple(ids.tolist())


def _read(store: TieredStore, kv_space: KvSpace, match: Match, *, pinned: bool) -> list[LayerTensors]:
    """The KV of a match, in host memory. Raises `KvLost` if it was removed."""
    dtype = TORCH_TYPE[kv_space.layout.dtype]
    layers = []
    with store.load(kv_space, match) as feed:
        for layer, shape in enumerate(kv_space.layout.layers):
            keys, values = (
                torch.empty(1, shape.kv_heads, match.length, dim, dtype=dtype, pin_memory=pinned)
                for dim in (shape.key_dim, shape.value_dim)
            )
            feed.fill(layer, LayerKv(raw_view(keys[0]), raw_view(values[0])))
            layers.append((keys, values))
    return layers


@dataclass(frozen=True, eq=False)
class MatchedText:
    """What was found of a prompt in other ones, and its KV; None where moving that would take longer than computing."""

    layers: tuple[LayerTensors, ...] | None
    reuse: Reuse


class TextMatcher:
    """Reuses text of earlier prompts for one model, as long as its weights stay. Thread-safe."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, settings: Settings, store: TieredStore) -> None:
        self.facts = facts
        placement = Placement(model.device, model.dtype, "attached")
        tokenizer = cast(Tokenizer, None)  # prompts come as tokens
        self._engine = HfEngine(
            model, tokenizer, name=facts.family, placement=placement, fingerprint=lambda: facts.fingerprint
        )
        kv = StoredKv(self._engine, settings, store)
        self._cache = PrefixCache(kv, settings, LoraManager(self._engine), ChunkPrefill(kv, settings))
        self._lock = threading.Lock()

    def match(self, tokens: tuple[int, ...]) -> MatchedText | None:
        """Prefill a prompt with text that is found in it, unless computing is faster; None if there is none."""
        try:
            with self._lock, self._cache.prepare(Request.of(list(tokens), max_tokens=1), tokens, _never) as prefill:
                if prefill.plan.reuse_chunks is None:
                    return MatchedText(None, prefill.reuse) if prefill.plan.refused_chunks is not None else None
                prefill.run(len(tokens), _never)
                kv = prefill.context.sequence.export(Span(0, len(tokens)))
                return MatchedText(_tensors(kv, self._engine.placement.device), prefill.reuse)
        except (RekindleError, torch.OutOfMemoryError) as error:
            log.info("computing instead: %s", error)
            return None

    def flush(self, timeout_seconds: float) -> bool:
        """Write everything; False if that takes longer."""
        return self._cache.flush(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write what is queued, and free the engine's memory; the store stays open, and the model as it is."""
        remember_costs(self._engine, self._cache.costs)
        if self._cache.writer is not None:
            self._cache.writer.close(timeout_seconds)
        self._cache.unpark()
        self._engine.close()


def _tensors(kv: Kv, device: torch.device) -> tuple[LayerTensors, ...]:
    """KV as a cache of transformers has it."""
    layers = []
    for layer in kv.layers:
        pair = []
        for array in (layer.keys, layer.values):
            tensor = torch.empty(1, *array.shape, dtype=TORCH_TYPE[kv.layout.dtype])
            raw_view(tensor[0])[...] = array
            pair.append(tensor.to(device))
        layers.append((pair[0], pair[1]))
    return tuple(layers)


def _never() -> bool:
    return False
