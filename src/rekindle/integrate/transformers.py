"""For people who own their transformers loop: a cache filled with what is known, and what was new is kept.

    kv = rekindle.attach(model)
    cache = kv.match(input_ids)                                       lookup, load
    model.generate(input_ids, past_key_values=cache)                  hooks note the tokens; the prompt is kept
    kv.close()                                                        the reply is kept, the hooks are gone

The model stays as it is: two hooks on its decoder look at what passes, and a thread copies and writes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rekindle.core.identity import Identity
from rekindle.core.keys import Namespace, Shelf, common_tokens, token_bytes
from rekindle.core.kv import Kv, KvLayout, LayerKv, Span
from rekindle.engine.checkpoint import Fingerprint, fingerprint_of
from rekindle.engine.decoder import Decoder
from rekindle.engine.rope import Rope
from rekindle.engine.sequence import TORCH_TYPE, raw_view
from rekindle.errors import Closed, InvalidPrompt, InvalidSetting, KvLost, RekindleError, nearest
from rekindle.index.prefix import Match
from rekindle.integrate.tracked import OTHER_TOKENS, Call, LayerTensors, MatchedCache, Snapshot, Terms, Track
from rekindle.integrate.weights import Conditions, Weights, refuse_unfit, refuse_untested
from rekindle.run.cache import CLOSE_SECONDS, LOAD_SECONDS
from rekindle.run.folder import open_store
from rekindle.run.keep import Keep, Keeper
from rekindle.run.patience import NoAnswer, Patience
from rekindle.settings import CacheSettings, Settings
from rekindle.store.tiered import TieredStore

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

log = logging.getLogger("rekindle.integrate")

_HARMLESS = frozenset({"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"})
# What bookkeeping can meet in a call made by hand: it ends the track, never the call.
_TROUBLE = (RekindleError, TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_SLOWEST_BYTES = 100e6  # a second: a cache that is slower than this is not waited for


def attach(model: PreTrainedModel, **settings: Unpack[CacheSettings]) -> Attached:
    """Keep the KV that `model` computes in loops of your own, and give it back.

        with rekindle.attach(model) as kv:
            cache = kv.match(input_ids)
            output = model.generate(input_ids, past_key_values=cache)

    Reads all weights once, to know the model again. The settings are those of a `Session`: `cache` (the folder),
    `memory_limit`, `disk_limit`, `tenant`, `cache_salt` and so on. Raises `UnsupportedModel` for a model whose KV
    cannot be kept, `CacheUnusable` if the folder you named cannot be opened, `InvalidSetting` for a wrong setting.
    """
    for name in settings:
        if name not in CacheSettings.__annotations__:
            raise InvalidSetting(f"Unknown setting {name!r}.{nearest(name, CacheSettings.__annotations__)}")
    return Attached(refuse_unfit(model), Settings.load(settings))


class Attached:
    """A model that is being looked at. Make one with `attach`. May be used from several threads."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._lock = threading.Lock()
        self._known = _Known(model)
        refuse_untested(model, self._known.family, self._known.layout.dtype)
        if settings.reuse == "near":
            raise InvalidSetting("attach keeps KV as it is: leave reuse='near' out, or use a Session.")
        self._store = open_store(settings)
        self._keeper = None if self._store is None else Keeper(self._store)
        self._patience = Patience()
        self._tracks: list[Track] = []  # of caches in use, or whose reply is not handed on yet
        self._said: set[str] = set()
        self._closed = False
        decoder: nn.Module = model.get_decoder()
        self._parameters = tuple(inspect.signature(decoder.forward).parameters)
        self._hooks = (
            decoder.register_forward_pre_hook(_Eye(self._before), with_kwargs=True),
            decoder.register_forward_hook(_Eye(self._after), with_kwargs=True),
        )

    def match(self, input_ids: Tensor | Sequence[int]) -> MatchedCache:
        """A cache for `model.generate(input_ids, past_key_values=...)`, or for a loop of your own.

        It holds the KV of the longest known beginning of the prompt, all but its last token at most; how much that is
        stands in its `reused_tokens`. Use it once, for this prompt; a loop of your own gives the model the tokens
        after those. What the model computes is kept: the prompt after its first token, the reply when `match` or
        `flush` is called next, or `close`.

        `input_ids` has the shape [1, tokens] or is a list of token ids. Raises `InvalidPrompt` for anything else and
        `Closed` after `close`; never because of the cache.
        """
        prompt = _prompt_of(input_ids)
        if self._closed:
            raise Closed("The model was detached. Attach to it again.")
        recent = self._hand_on(threading.get_ident())
        terms = self._terms(len(prompt))
        if terms is None or self._store is None:
            return MatchedCache()
        cache = MatchedCache(self._recall(terms, prompt[:-1], recent))
        cache.track = Track(cache, prompt, terms)
        with self._lock:
            self._tracks.append(cache.track)
        return cache

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Keep everything computed so far; False if that takes longer."""
        self._hand_on()
        return self._keeper is None or self._keeper.flush(timeout_seconds)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Keep what was computed, within that time, and leave the model as it was. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hand_on()
        self._tracks.clear()
        self._patience.close()
        if self._keeper is not None and self._store is not None and self._keeper.close(timeout_seconds):
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Attached {'closed' if self._closed else type(self._model).__name__}>"

    # -- what is known ---------------------------------------------------------------------------------------------

    def _terms(self, tokens: int) -> Terms | None:
        """What a prompt of so many tokens is matched under; None if nothing may be reused or kept."""
        with self._lock:
            if self._known.weights.changed():
                log.info("The weights of the model changed: they are read again.")
                self._known = _Known(refuse_unfit(self._model))
            known = self._known
        reason = known.conditions.disturbance()
        if reason is not None:
            self._say(f"Nothing is reused or kept while {reason}.")
            return None
        regime = known.rope.regime(tokens)
        identity = known.identity(regime).digest
        namespace = Namespace(identity, self._settings.tenant, self._settings.cache_salt)
        name = str(getattr(self._model.config, "_name_or_path", "")) or known.family
        terms = Terms(self, Shelf(namespace, known.layout, model=name), known.weights, known.rope, regime)
        return terms if terms.cover(tokens) else None

    def _recall(self, terms: Terms, tokens: tuple[int, ...], recent: Sequence[Track]) -> tuple[LayerTensors, ...]:
        """The KV of the longest known beginning of `tokens`: from a cache that was just in use, else from the store."""
        store = self._store
        assert store is not None
        try:
            match = self._patience.ask(lambda: store.lookup(terms.shelf, tokens), LOAD_SECONDS)
        except NoAnswer as late:
            self._say(f"The cache does not answer ({late}), so everything is computed.")
            return ()
        if match.pieces:
            store.used(match)
        longest, near, given = match.length, None, token_bytes(tokens)
        for track in recent:
            with self._guarded(track):
                usable = track.settled() and track.terms.equal(terms)
                common = common_tokens(token_bytes(track.tokens() or ()), given) if usable else 0
                if common and common >= longest:
                    longest, near = common, track.beginning(common)
        if near is not None or not match.pieces:
            return near or ()
        device = self._model.device
        seconds = LOAD_SECONDS + match.length * terms.shelf.layout.token_bytes / _SLOWEST_BYTES
        try:
            read = self._patience.ask(lambda: _read(store, terms.shelf, match, pinned=device.type == "cuda"), seconds)
            return tuple((k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for k, v in read)
        except (NoAnswer, torch.OutOfMemoryError) as error:
            log.info("computing instead: %s", error)
            return ()

    # -- what is new -----------------------------------------------------------------------------------------------

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
        """The cache of a call, and its track, if it is one that this attachment follows."""
        cache = given.get("past_key_values")
        track = cache.track if isinstance(cache, MatchedCache) else None
        if track is None or track.terms.owner is not self or track.ended or torch.compiler.is_compiling():
            return None, None
        return cache, track

    @contextlib.contextmanager
    def _guarded(self, track: Track) -> Iterator[None]:
        """Around the bookkeeping of a cache: trouble with it ends its track, never the call it is about."""
        with track.lock:
            try:
                yield
            except InvalidPrompt:
                raise  # going on would give a wrong answer
            except _TROUBLE as error:
                track.end(str(error))
            if track.ended is not None:
                level = logging.WARNING if track.ended == OTHER_TOKENS else logging.INFO
                self._say(f"KV is not kept from here on: {track.ended}.", level)

    def _note(self, track: Track, cache: MatchedCache, call: Call) -> None:
        if not track.settled():
            return track.end("a call with it failed")
        if track.offered < len(track.prompt) <= track.length:
            self._offer(track)  # the prompt's KV, now that its first token is out
        cache.suit(call)
        reason = self._known.conditions.disturbance() or track.begin(call)
        if reason is not None:
            self._offer(track)
            track.end(reason)
        return None

    def _hand_on(self, thread: int | None = None) -> list[Track]:
        """Offer what the caches hold; let those go that nobody has any more. Gives all there were.

        With a thread, caches that other threads still have are left alone: they may be in the middle of a reply.
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
        """Hand what is in a settled cache to the keeper."""
        if self._keeper is None or track.length <= track.offered or not track.settled():
            return
        tokens = track.tokens()
        if tokens is not None:
            self._keeper.offer(_SnapshotKeep(track.terms, tokens, track.snapshot()))
            track.offered = track.length

    def _say(self, sentence: str, level: int = logging.WARNING) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.log(level, "%s", sentence)


class _Eye:
    """A hook that looks. A copy of the model has blind ones: what it computes is not known by this model's weights."""

    def __init__(self, see: Callable[..., None] | None) -> None:
        self._see = see

    def __call__(self, *args: Any) -> None:
        if self._see is not None:
            self._see(*args)

    def __reduce__(self) -> tuple[type[_Eye], tuple[None]]:
        return _Eye, (None,)


class _Known:
    """What is known of a model that makes its KV what it is. Reads all its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights = Weights(model)  # first: what changes from here on is seen
        self.conditions = Conditions(model)
        self._fingerprint: Fingerprint = fingerprint_of(model)
        decoder = Decoder(model)
        self.family = decoder.family
        self.layout: KvLayout = decoder.layout
        self.rope: Rope = decoder.rope

    def identity(self, regime: str) -> Identity:
        """The model under a rotary regime."""
        return Identity(**asdict(self._fingerprint), dtype=self.layout.dtype, rope=regime)


class _SnapshotKeep(Keep):
    """Keeps a snapshot, unless the weights changed since it was matched."""

    def __init__(self, terms: Terms, tokens: tuple[int, ...], snapshot: Snapshot) -> None:
        def export(span: Span) -> Kv:
            kv = snapshot.export(span)
            if terms.weights.changed():
                raise KvLost("The weights of the model changed, so what they computed is not kept.")
            return kv

        super().__init__(terms.shelf, tokens, export)
        self._size_bytes = snapshot.size_bytes

    def detached_bytes(self) -> int:
        """The size of the tensors it holds on to."""
        return self._size_bytes


def _call_of(given: Mapping[str, Any]) -> Call:
    parts = {"input_ids", "position_ids", "attention_mask", "past_key_values"}
    others = (n for n, v in given.items() if n not in parts | _HARMLESS and v is not None and v is not False)
    return Call(given.get("input_ids"), given.get("position_ids"), given.get("attention_mask"), tuple(others))


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


def _read(store: TieredStore, shelf: Shelf, match: Match, *, pinned: bool) -> list[LayerTensors]:
    """What `match` found, in host memory. Raises `KvLost` if it is not there any more."""
    dtype = TORCH_TYPE[shelf.layout.dtype]
    layers = []
    with store.load(shelf, match) as feed:
        for layer, shape in enumerate(shelf.layout.layers):
            keys, values = (
                torch.empty(1, shape.kv_heads, match.length, dim, dtype=dtype, pin_memory=pinned)
                for dim in (shape.key_dim, shape.value_dim)
            )
            feed.fill(layer, LayerKv(raw_view(keys[0]), raw_view(values[0])))
            layers.append((keys, values))
    return layers
