"""The llama.cpp engine: any GGUF model, on CPU or GPU, without torch."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import psutil
from numpy.typing import NDArray

from rekindle.core.adapter import AdapterFit, Lora
from rekindle.core.identity import Identity, digest_of_fields
from rekindle.core.kv import PAGES, Kv, Span
from rekindle.core.request import Sampling
from rekindle.engine.base import Capabilities, HostStopwatch, Logits, Reserve, Row, note_brought
from rekindle.engine.llamacpp.c_api import DEFAULT_SEED, TokenData, TokenDataArray, llama
from rekindle.engine.llamacpp.kv_buffer import BatchTokens, KvBuffer
from rekindle.engine.llamacpp.loaded_model import LoadedContext, LoadedModel, build, version
from rekindle.engine.llamacpp.lora import LlamaLoras
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.llamacpp.sequence import LlamaSequence, SequenceModel
from rekindle.engine.llamacpp.state import HEAD_BYTES, Staging, StateLayout, UnknownLayout, read_layout
from rekindle.engine.llamacpp.tokenizer import GgufTokenizer
from rekindle.engine.row_checks import CheckedRow, check_next_tokens, check_rows
from rekindle.errors import Closed, NotAModel, StepRefused, UnsupportedModel
from rekindle.machine import free_memory
from rekindle.models.files import ModelFiles, digest_of_files

log = logging.getLogger("rekindle.llamacpp")

_PAGES = PAGES  # for tests to replace
_NO_ROTATION = "LLAMA_ATTN_ROT_DISABLE"  # changes what llama.cpp quantizes
_MOVING_TYPES = ("f16", "f32")  # llama.cpp crashes when it rotates others
_CHECK_TOKENS = 6
_CHECK_TOLERANCE = 1e-3  # of the largest logit


class LlamaCppEngine:
    """A loaded model. See `Engine` for the contract.

    If the state of a sequence is plain KV of a known layout, it has spans. Otherwise, as with recurrent and hybrid
    models, it has snapshots, and `opaque` says why; if a part of the state is plain KV, it is split.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: LlamaOptions,
        progress: Callable[[float], None] | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Load it; `reserve` makes room first.

        Raises `BrokenModel`, `NotAModel`, `UnsupportedModel`, `OutOfMemory` or `InvalidSetting`.
        """
        if files.gguf is None:
            raise NotAModel(f"llama.cpp needs a GGUF file, and {files.name} has none. Use engine='hf' for it.")
        self.name = files.name
        self.files = files
        self.options = options
        if reserve is not None:
            reserve(_size_bytes(files), self.device_bytes)
        self.loaded_model = LoadedModel(files.gguf, options, progress)
        self._held = ExitStack()  # freed in reverse order, also if the engine is never closed
        self._held.callback(self.loaded_model.close)
        weakref.finalize(self, self._held.close).atexit = False
        self._identities: dict[str, Identity] = {}
        self._closing = threading.Lock()
        try:
            if not self.loaded_model.has_decoder:
                raise UnsupportedModel(f"{files.gguf} does not generate text. Use a decoder such as smollm2.")
            self.tokenizer = GgufTokenizer(self.loaded_model)
            self._start(options, reserve)
        except BaseException:
            self.close()
            raise

    def _start(self, options: LlamaOptions, reserve: Reserve | None) -> None:
        weights = _size_bytes(self.files)
        room = free_memory()  # where weights are mapped, they count as free
        if reserve is not None:
            room = min(room, reserve(weights + self.loaded_model.usual_context_bytes(options), self.device_bytes))
        context = LoadedContext(self.loaded_model, options, room - weights)
        self.memory_bytes = weights + context.memory_bytes
        self.context_tokens, self.longest_context = context.tokens, self.loaded_model.trained_tokens
        self.prefill_tokens = context.batch_tokens
        self.parameters, self.attention = self.loaded_model.parameters, self.loaded_model.attention
        self.flash_attention = context.flash_attention
        self.threads = context.threads
        self._cells = KvBuffer(context, options.sequences, self.tokenizer.vocabulary_size)
        self._held.callback(self._cells.close)
        self._adapters = LlamaLoras(self.loaded_model)
        self._regime = context.regime
        self.opaque = self._why_opaque()
        self._state: StateLayout | None = None
        self._attention: StateLayout | None = None  # of a split state
        try:
            if self.opaque is None:
                self._state = self._read_state_layout(split=False)
            else:
                self._attention = self._read_state_layout(split=True)
        except UnknownLayout as error:
            if self.opaque is None:
                self.opaque = f"this llama.cpp hands KV out in a layout that is not known ({error})"
                log.warning("%s: reuse is by checkpoint, because %s.", self.name, self.opaque)
        self._staging = None if self._state is None else Staging(self._state, self.context_tokens)
        if self._staging is not None:
            self._held.callback(self._staging.close)
        moves = self._state is not None and options.kv_type in _MOVING_TYPES
        moves = moves and bool(llama.llama_memory_can_shift(context.memory))
        self._sequences = SequenceModel(
            self._cells,
            self._state,
            self._attention,
            self._regime,
            self.context_tokens,
            context.window,
            moves,
            _owner_of(weakref.ref(self)),
        )
        known = self._state or self._attention
        self.layout = _PAGES if known is None else known.kv
        self.capabilities = Capabilities(
            layer_feeds=False,
            recompute="leading" if moves else "none",
            probes=False,
            steady=False,
            crowded=True,
            opaque=self.opaque,
            split=self._attention is not None,
            adapters=True,
        )

    @property
    def device(self) -> str:
        return "gpu" if self.loaded_model.on_gpu else "cpu"

    @property
    def device_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    @property
    def arithmetic(self) -> str:
        return f"{version()}, {build()}, flash attention {self.flash_attention}, {self.device}"

    def regime(self, tokens: int) -> str:  # noqa: ARG002  (llama.cpp chooses by the size of its buffer)
        """The same for every length: it is chosen with the context."""
        return self._regime

    def identity(self, regime: str) -> Identity:
        """What its KV depends on; the first call reads the whole file, unless it was read before."""
        self._cells.context  # noqa: B018  (raises)
        known = self._identities.get(regime)
        if known is None:
            weights = digest_of_files(self.files.parts)
            how = f"snapshot, flash attention {self.flash_attention}" if self._state is None else "plain"
            if self._attention is not None:
                how = f"split, rotated by {self._attention.rotations}, flash attention {self.flash_attention}"
            if self._state is not None and self._state.rotations:
                how = f"plain, rotated by {self._state.rotations}"  # quantized after a rotation: other numbers
            known = Identity(
                weights=weights,
                config=digest_of_fields("rekindle/llamacpp/1", version(), how, os.environ.get(_NO_ROTATION, "")),
                tokenizer=weights,
                template=digest_of_fields("rekindle/template/1", self.tokenizer.template),
                dtype=self.options.kv_type,
                rope=regime,
            )
            self._identities[regime] = known
        return known

    def check_adapter(self, lora: Lora) -> AdapterFit:
        """What it takes, by loading it for a moment: only llama.cpp knows. All layers count as changed."""
        with self._cells.lock:
            self.load_adapter(lora)
            self.unload_adapter(lora.digest)
        return AdapterFit(0, lora.size_bytes)

    def load_adapter(self, lora: Lora) -> None:
        with self._cells.lock:
            self._cells.context  # noqa: B018  (raises)
            self._adapters.load(lora)

    def unload_adapter(self, digest: str) -> None:
        with self._cells.lock:
            self._adapters.unload(digest, self._cells.context)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> LlamaSequence:
        """An empty sequence of `capacity` tokens, computed with the adapter of that digest."""
        if not 0 < capacity <= self.context_tokens:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self.context_tokens} tokens.")
        if regime != self._regime:
            raise StepRefused(f"The regime {regime!r} is unknown. Ask `regime(tokens)`.")
        return LlamaSequence(self._sequences, capacity, adapter)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> ChainSampler:
        """llama.cpp's own samplers."""
        size, most = self.tokenizer.vocabulary_size, self.context_tokens
        return ChainSampler(sampling, context, size, token_limit=most)

    def stopwatch(self) -> HostStopwatch:
        """It waits for layers on a GPU: llama.cpp does not say how long they took."""
        return _SynchronizedStopwatch(self._cells)

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows in one batch."""
        with self._cells.lock:
            self._cells.context  # noqa: B018  (raises)
            layers, size = len(self.layout.layers), self.tokenizer.vocabulary_size
            checked = check_rows(rows, layers=layers, vocabulary_size=size)
            sequences = [self._own(row) for row in checked]
            finished = False
            try:
                for row, sequence in zip(checked, sequences, strict=True):
                    if row.row.feeds:
                        self._feed(row, sequence, cancelled)
                work = [
                    BatchTokens(_number(sequence), row.tokens, int(row.positions[0]), row.wanted)
                    for row, sequence in zip(checked, sequences, strict=True)
                ]
                alone = len(work) == len(work[0].tokens) == 1 and rows[0].prefill and self._state is not None
                logits = self._compute(work, [sequence.adapter for sequence in sequences], cancelled, alone=alone)
                finished = True
            finally:
                for row, sequence in zip(checked, sequences, strict=True):
                    self._settle(row, sequence, finished)
            return logits

    def _compute(
        self,
        work: Sequence[BatchTokens],
        adapters: Sequence[str | None],
        cancelled: Callable[[], bool] | None,
        *,
        alone: bool,
    ) -> list[Logits]:
        """The logits of each, one adapter at a time."""
        logits: dict[int, Logits] = {}
        for adapter in dict.fromkeys(adapters):
            self._adapters.use(adapter, self._cells.context)
            own = [place for place, other in enumerate(adapters) if other == adapter]
            some = [work[place] for place in own]
            compute = self._cells.compute
            found = self._cells.compute_with_dummy(some[0], cancelled) if alone else compute(some, cancelled)
            logits.update(zip(own, found, strict=True))
        return [logits[place] for place in range(len(work))]

    def close(self) -> None:
        """Free the model. Open sequences can then only be closed."""
        with self._closing:
            self._held.close()  # waits for a running step

    def _own(self, row: CheckedRow) -> LlamaSequence:
        sequence = row.row.sequence
        if not isinstance(sequence, LlamaSequence) or sequence.cells is not self._cells:
            raise StepRefused("A row holds a sequence of another engine.")
        if sequence.adapter is not None and sequence.adapter not in self._adapters:
            raise StepRefused("The adapter of a sequence is not loaded. Load it before it is used.")
        check_next_tokens(row, "llama.cpp")
        if row.row.feeds and self._state is None:
            raise StepRefused("This model has no plain KV to feed. Restore a snapshot.")
        return sequence

    def _feed(self, row: CheckedRow, sequence: LlamaSequence, cancelled: Callable[[], bool] | None) -> None:
        assert self._staging is not None
        span = Span(row.kept, int(row.positions[0]))
        state, started = self._staging.bring(row.row.feeds, span, cancelled), time.perf_counter()
        if not row.kept:
            taken = self._cells.put(_number(sequence), state)
        else:
            taken = self._cells.put_behind(_number(sequence), state, span, span.start)
        note_brought(row.row.feeds, time.perf_counter() - started)
        if not taken:
            raise StepRefused(f"llama.cpp does not take the KV of {span}.")

    def _settle(self, row: CheckedRow, sequence: LlamaSequence, finished: bool) -> None:
        if finished:
            sequence.set_length(row.end)
            return
        length = min(row.kept, row.first_touched) if self._state is not None else 0
        if self._cells.remove(_number(sequence), length):
            sequence.set_length(length)
        else:
            self._cells.remove(_number(sequence), 0)
            sequence.set_length(0)

    def _why_opaque(self) -> str | None:
        pointer = self.loaded_model.pointer
        if llama.llama_model_is_recurrent(pointer):
            return "the model is recurrent: its state cannot be cut"
        if llama.llama_model_is_hybrid(pointer):
            return "the model is hybrid: a part of its state is recurrent and cannot be cut"
        if self.loaded_model.window and not self.options.swa_full:
            return "the model has a sliding window, and with swa_full=False llama.cpp forgets what left it"
        return None

    def _read_state_layout(self, *, split: bool) -> StateLayout:
        """The layout of states, or of their attention layers, after checking that exported and reloaded KV gives the
        same logits.

        Raises `UnknownLayout`.
        """
        cells, count = self._cells, _CHECK_TOKENS
        tokens = np.arange(1, count + 2) * 37 % self.tokenizer.vocabulary_size
        number = cells.open(count + 1)
        try:
            cells.compute([BatchTokens(number, tokens[:count], 0, 0)])
            whole = cells.whole_state_of(number)
            partial = cells.partial_state_of(number) if split else whole[:HEAD_BYTES]
            rest = partial[HEAD_BYTES:]
            plain_bytes = len(whole) - len(rest)
            if plain_bytes <= HEAD_BYTES or not np.array_equal(whole[plain_bytes:], rest):
                raise UnknownLayout("no part of it is plain KV")
            layout = read_layout(whole[:plain_bytes], count)
            kv, middle = layout.parse(whole[:plain_bytes], Span(0, count)), Span(2, count - 1)
            part = cells.state_of(number, middle, layout.size_bytes(len(middle)) + len(rest))
            if not _same(layout.parse(part[: layout.size_bytes(len(middle))], middle), kv, middle):
                raise UnknownLayout("the state of a part is not a part of the state")
            (expected,) = cells.compute([BatchTokens(number, tokens[count:], count, 1)])
            cells.remove(number, 0)
            if not cells.put(number, layout.join(kv, partial)):
                raise UnknownLayout("it does not take back what it gave")
            if not _same(layout.parse(cells.whole_state_of(number)[:plain_bytes], Span(0, count)), kv, Span(0, count)):
                raise UnknownLayout("it gives back something else than it took")
            (got,) = cells.compute([BatchTokens(number, tokens[count:], count, 1)])
            if np.abs(got - expected).max() > _CHECK_TOLERANCE * max(1.0, float(np.abs(expected).max())):
                raise UnknownLayout("KV that went out and in again gives other logits")
            return layout
        finally:
            cells.close_sequence(number, count + 1)


class _SynchronizedStopwatch(HostStopwatch):
    def __init__(self, cells: KvBuffer) -> None:
        super().__init__()
        self._cells = cells

    def stop(self) -> None:
        self._cells.synchronize()
        super().stop()


def _same(part: Kv, whole: Kv, span: Span) -> bool:
    """Whether the KV of a part equals that part of the whole, bit for bit."""
    pairs = zip(part.layers, whole.layers, strict=True)
    start, stop = span.start, span.stop
    return all(
        a.keys.tobytes() == b.keys[:, start:stop].tobytes() and a.values.tobytes() == b.values[:, start:stop].tobytes()
        for a, b in pairs
    )


def _owner_of(engine: weakref.ref[LlamaCppEngine]) -> Callable[[], bytes]:
    """The digest of an engine's identity, computed when needed: the first time may read the whole file."""

    def owner() -> bytes:
        alive = engine()
        if alive is None:
            raise Closed("The engine was closed. Load the model again.")
        return bytes.fromhex(alive.identity(alive.regime(1)).digest)

    return owner


def _size_bytes(files: ModelFiles) -> int:
    return sum(part.stat().st_size for part in files.parts)


def _number(sequence: LlamaSequence) -> int:
    if sequence.number is None:
        raise Closed("The sequence was closed. Open a new one.")
    return sequence.number


_COLDEST = 1e-6  # lower temperatures would overflow, and are greedy anyway
_TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class ChainSampler:
    """Draws the tokens of one reply. See `TokenSampler` for the contract."""

    def __init__(
        self, sampling: Sampling, context: Sequence[int], vocabulary_size: int, *, token_limit: int = 1 << 16
    ) -> None:
        """`context` is the prompt: a repetition penalty counts it too, as far as the last `token_limit` go."""
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        weakref.finalize(self, llama.llama_sampler_free, self._chain).atexit = False
        self._remembers = sampling.repetition_penalty != 1.0
        for sampler in _samplers(sampling, vocabulary_size, token_limit):
            llama.llama_sampler_chain_add(self._chain, sampler)
        if self._remembers:
            for token in context:
                llama.llama_sampler_accept(self._chain, token)
        self._candidates = np.zeros(vocabulary_size, _TOKEN)
        self._plainly_greedy = sampling.temperature < _COLDEST and not self._remembers

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self._plainly_greedy:
            return int(logits.argmax())
        candidates = self._candidates
        candidates["id"] = np.arange(len(candidates))
        candidates["logit"], candidates["p"] = logits, 0.0
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(TokenData))
        array = TokenDataArray(data=data, size=len(candidates), selected=-1, sorted=False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama.llama_sampler_accept(self._chain, token)
        return token


def _samplers(sampling: Sampling, vocabulary_size: int, token_limit: int) -> list[int]:
    """In llama.cpp's usual order: penalties, truncation, temperature, sampling."""
    chain = []
    if (penalty := sampling.repetition_penalty) != 1.0:
        chain.append(llama.llama_sampler_init_penalties(vocabulary_size, token_limit, penalty, 0.0, 0.0))
    if sampling.temperature < _COLDEST:
        return [*chain, llama.llama_sampler_init_greedy()]
    if sampling.top_k is not None and sampling.top_k < vocabulary_size:
        chain.append(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        chain.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
    chain.append(llama.llama_sampler_init_temp(sampling.temperature))
    chain.append(llama.llama_sampler_init_dist(_seed(sampling.seed)))
    return chain


def _seed(seed: int | None) -> int:
    """32 bits of a seed; not the value that means a random seed to llama.cpp."""
    wanted = secrets.randbits(32) if seed is None else (seed ^ seed >> 32) & 0xFFFFFFFF
    return min(wanted, DEFAULT_SEED - 1)
