"""The Hugging Face engine: any decoder of transformers, on CPU, CUDA or MPS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from rekindle.core.adapter import AdapterFit, Lora
from rekindle.core.identity import Identity
from rekindle.core.kv import KvLayout, Span
from rekindle.core.request import Sampling
from rekindle.engine.base import (
    Capabilities,
    HeldKv,
    HostStopwatch,
    Logits,
    MovedFeed,
    RecomputeSupport,
    Reserve,
    Row,
    StayingFeed,
    Stopwatch,
    choose_context,
)
from rekindle.engine.hf.checkpoint import Fingerprint, fingerprint_of, load_checkpoint
from rekindle.engine.hf.cuda_graph import GraphRecorder, replayable
from rekindle.engine.hf.decoder import TESTED_FAMILIES, Decoder, refusal
from rekindle.engine.hf.device import DeviceStopwatch, Placement, free_memory_on, stable_matmul, total_memory
from rekindle.engine.hf.layer_loader import LayerLoader, PinnedSlots, decodes_on
from rekindle.engine.hf.row_batch import ForwardBatch, own_sequence
from rekindle.engine.hf.sequence import BufferPool, TorchSequence
from rekindle.engine.hooks import KvDrift, Probe
from rekindle.engine.row_checks import CheckedRow, check_rows
from rekindle.engine.sample import Sampler
from rekindle.errors import Closed, OutOfMemory, StepRefused, UnsupportedModel
from rekindle.models.files import ModelFiles
from rekindle.text.base import Tokenizer

_PREFILL_TOKENS = {"cpu": 2048, "mps": 2048, "cuda": 16384}
_CHECK_TOKENS = 12
_TRIED_TOKENS = 2
_WARM_TOKENS = 128  # of a context in which short steps are recorded
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}  # of the largest logit


class HfEngine:
    """A loaded model. See `Engine` for the contract."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        name: str,
        placement: Placement,
        context_tokens: int | None = None,
        fingerprint: Callable[[], Fingerprint] | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Drive `model` as it is. `fingerprint` identifies its files; without it, its tensors are hashed."""
        self.name = name
        decodes = decodes_on(placement.device)
        self.model = model
        self.tokenizer = tokenizer
        self.placement = placement
        self._decoder: Decoder | None = Decoder(model.eval())
        recompute: RecomputeSupport = "none" if self._decoder.turner is None else "scattered"
        steady = self._decoder.layout.dtype == "float32"  # with fewer bits a step of several tokens rounds otherwise
        self.capabilities = Capabilities(True, recompute, True, adapters=True, decodes=decodes, steady=steady)
        self._fingerprint = fingerprint or (lambda: fingerprint_of(self.model))
        self._known: Fingerprint | None = None
        self._pool = BufferPool(self._decoder.layout, self._decoder.device)
        self._slots = PinnedSlots() if self._decoder.device.type == "cuda" else None
        self._lock = threading.Lock()
        self.longest_context = int(getattr(self._live().config, "max_position_embeddings", 0) or 2048)
        self.memory_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self.context_tokens = self._choose_context(context_tokens, reserve)
        self._recorder = GraphRecorder.for_decoder(self._decoder, self.context_tokens)
        self.prefill_tokens = _PREFILL_TOKENS[model.device.type]
        self.parameters = sum(weights.numel() for weights in model.parameters())  # shared ones once
        self.attention = _attention(self._decoder.config, len(self._decoder.layout.layers))
        if self._decoder.family not in TESTED_FAMILIES:
            self._check_against_model()
        self._pool.warm()
        if self._slots is not None:
            self._slots.warm()
        if self._recorder is not None:
            self._warm(self._recorder)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        device: str = "auto",
        dtype: str = "auto",
        context_tokens: int | None = None,
        reserve: Reserve | None = None,
    ) -> HfEngine:
        """Load a model folder; a GGUF file must have been converted (see `checkpoint.convert_gguf`).

        Raises `BrokenModel`, `NotAModel`, `UnsupportedModel`, `InvalidSetting`, and what `reserve` raises.
        """
        loaded = load_checkpoint(files.folder, device, dtype, reserve)
        return cls(
            loaded.model,
            loaded.tokenizer,
            name=files.name,
            placement=loaded.placement,
            context_tokens=context_tokens,
            fingerprint=loaded.fingerprint,
            reserve=reserve,
        )

    @property
    def device(self) -> str:
        """Name of the device, for display."""
        device = self.placement.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @property
    def device_bytes(self) -> int:
        return total_memory(self.placement.device)

    @property
    def arithmetic(self) -> str:
        """What the last bits of its results depend on."""
        return f"torch {torch.__version__}, transformers {transformers.__version__}, {self.device}"

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""
        return self._live().layout

    @property
    def linears(self) -> Mapping[str, nn.Linear]:
        """The linear layers its steps run through, by name: for hooks. Steps of every thread call them."""
        return self._live().linears

    def regime(self, tokens: int) -> str:
        """The rotary regime of a context of this length."""
        return self._live().rope.regime(tokens)

    def identity(self, regime: str) -> Identity:
        """What makes its KV interchangeable; the first call reads all weights unless their digests are known."""
        self._live()
        if self._known is None:
            self._known = self._fingerprint()
        known = self._known
        return Identity(known.weights, known.config, known.tokenizer, known.template, self.layout.dtype, regime)

    def check_adapter(self, lora: Lora) -> AdapterFit:
        return self._live().adapters.check(lora, len(self.layout.layers))

    def load_adapter(self, lora: Lora) -> None:
        """Load an adapter beside the others."""
        with self._lock:
            try:
                self._live().adapters.load(lora)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(
                    f"{self.device} has no memory left for {lora.source}. Lower adapter_memory."
                ) from error

    def unload_adapter(self, digest: str) -> None:
        with self._lock:
            adapters = self._live().adapters
            adapters.unload(digest)
            if self._recorder is not None and digest not in adapters:
                self._recorder.forget_adapter(digest)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> TorchSequence:
        """An empty sequence with room for `capacity` tokens, computed with the adapter of that digest."""
        self._live()
        if not 0 < capacity <= self.context_tokens:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self.context_tokens} tokens.")
        if regime not in self._live().rope.regimes:
            raise StepRefused(f"The regime {regime!r} is unknown. Ask `regime(tokens)`.")
        try:
            return TorchSequence(self._pool, capacity, regime, self.context_tokens, adapter)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device} has no memory left for a context of {capacity:,} tokens. Ask for fewer at once, or use "
                "a shorter context."
            ) from error

    def stopwatch(self) -> Stopwatch:
        device = self.placement.device
        return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows in one pass."""
        with self._lock:
            decoder = self._live()
            layers = len(decoder.layout.layers)
            turns = decoder.turner is not None
            checked = check_rows(rows, layers=layers, vocabulary_size=decoder.vocabulary_size, turns=turns)
            for row in checked:
                self._check_sequence(row)
            finished = False
            try:
                logits = self._compute(decoder, checked, cancelled)
                finished = True
            finally:
                for row in checked:
                    if finished:
                        own_sequence(row).extend(row.end)
                    else:
                        own_sequence(row).truncate(min(row.kept, row.first_touched))
            return logits

    def _compute(
        self, decoder: Decoder, rows: Sequence[CheckedRow], cancelled: Callable[[], bool] | None
    ) -> list[Logits]:
        logits, layers = None, len(decoder.layout.layers)
        if self._recorder is not None and not (cancelled is not None and cancelled()):
            rows, logits = self._replay(self._recorder, rows, cancelled)
            if logits is not None and rows[0].row.gaze is not None:
                self._recorder.report_look(rows[0])
        if logits is None:
            with ForwardBatch(rows, decoder.device, layers, cancelled, decoder.turner, self._slots) as step:
                logits = decoder.run(step)
                step.finish()
        stops = np.cumsum([row.wanted for row in rows])
        return np.split(logits.float().cpu().numpy(), stops[:-1])

    def _warm(self, recorder: GraphRecorder) -> None:
        """Compile and record what the first requests need: they shall not wait for it."""
        decoder = self._live()
        with self.open(_WARM_TOKENS, self.regime(_WARM_TOKENS)) as sequence, self._lock:
            recorder.warm(sequence)
            sequence.extend(_TRIED_TOKENS)
            held = HeldKv(sequence.export(Span(0, _TRIED_TOKENS)))
            feed = MovedFeed(held, 1, 1 if decoder.turner is not None else 0)
            with LayerLoader([(sequence, feed)], len(held.layers), decoder.device, decoder.turner) as loader:
                loader.wait_until(len(held.layers), None)
        with self.open(_WARM_TOKENS, self.regime(_WARM_TOKENS)) as sequence:
            whole = Span(0, _WARM_TOKENS)
            probe = Probe(lambda _: None, queries=whole, segments=(whole,))
            self.step([replace(Row.following(sequence, [0] * _WARM_TOKENS), probe=probe)])
            some = range(0, _WARM_TOKENS, 2)
            self.step([Row(sequence, [0] * len(some), some, "none", spread=KvDrift((whole,), 1.0), replay=False)])

    def _replay(
        self, recorder: GraphRecorder, rows: Sequence[CheckedRow], cancelled: Callable[[], bool] | None
    ) -> tuple[Sequence[CheckedRow], Tensor | None]:
        """The logits if the rows can be replayed, else None; and the rows, without feeds if these were loaded.

        What a single row follows is loaded meanwhile. Launching its kernels one by one would take longer.
        """
        decoder, row, feeds = self._live(), rows[0], rows[0].row.feeds
        layers = len(decoder.layout.layers)
        if not feeds:
            return rows, recorder.run(rows)
        loaded = replace(row, row=replace(row.row, feeds=()), kept=int(row.positions[0]))
        whole = all(feed.layers == range(layers) and not isinstance(feed, StayingFeed) for feed in feeds)
        if len(rows) > 1 or not whole or replayable(loaded) is None:
            return rows, None
        given = [(own_sequence(row), feed) for feed in feeds]
        with LayerLoader(given, layers, decoder.device, decoder.turner, slots=self._slots) as loader:
            logits = recorder.run([loaded], lambda stop: loader.wait_until(stop, cancelled))
            loader.wait_until(layers, cancelled)
        return [loaded], logits

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> Sampler:
        """The sampler of a reply."""
        return Sampler(sampling, context)

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            self._decoder = None
            self._recorder = self._slots = None
            self._pool.close()
            self.__dict__.pop("model", None)

    def _live(self) -> Decoder:
        if self._decoder is None:
            raise Closed("The engine was closed. Load the model again.")
        return self._decoder

    def _check_sequence(self, row: CheckedRow) -> None:
        sequence = own_sequence(row)
        if sequence.pool is not self._pool:
            raise StepRefused("A row holds a sequence of another engine.")
        if sequence.adapter is not None and sequence.adapter not in self._live().adapters:
            raise StepRefused("The adapter of a sequence is not loaded. Load it before it is used.")
        limit = self._live().rope.limit(sequence.regime)
        if limit is not None and row.end > limit:
            raise StepRefused(
                f"Position {row.end - 1} is beyond the {limit} tokens of the rotary regime {sequence.regime!r}. "
                "Compute the context again in a sequence of the next regime."
            )

    def _choose_context(self, wanted: int | None, reserve: Reserve | None) -> int:
        rope = self._live().rope
        if wanted is not None and rope.fixed_length is not None and wanted > rope.fixed_length:
            raise UnsupportedModel(
                f"--context {wanted} is beyond the {rope.fixed_length:,} tokens of this model's dynamic RoPE, which "
                "changes all KV with every further token. Use a smaller one, or a model with another RoPE."
            )
        free = free_memory_on(self.placement.device)
        if reserve is not None:
            free = min(free, reserve(self.memory_bytes, self.device_bytes) - self.memory_bytes)
        return choose_context(wanted, self.longest_context, self.layout.token_bytes, free)

    def _check_against_model(self) -> None:
        """An untested family must reproduce the model's own logits, whole and in pieces, or is refused."""
        decoder = self._live()
        tokens = [i % decoder.vocabulary_size for i in range(3, 3 + _CHECK_TOKENS)]
        with torch.inference_mode(), stable_matmul(decoder.device, self.model.dtype):
            expected = self.model(torch.tensor([tokens], device=decoder.device), use_cache=False).logits[0]
        half = _CHECK_TOKENS // 2
        whole, cut = (self.open(_CHECK_TOKENS, self.regime(_CHECK_TOKENS)) for _ in range(2))
        try:
            (got,) = self.step([Row.following(whole, tokens, logits="all")])
            self.step([Row.following(cut, tokens[:half], logits="none")])
            (last,) = self.step([Row.following(cut, tokens[half:])])
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
            raise UnsupportedModel(refusal(decoder.family, str(error))) from error
        finally:
            whole.close()
            cut.close()
        reference = expected.float().cpu().numpy()
        off = max(np.abs(got - reference).max(), np.abs(last[0] - reference[-1]).max())
        share = float(off / max(np.abs(reference).max(), 1e-6))
        if share > _CHECK_TOLERANCE[self.placement.dtype]:
            reason = f"driven layer by layer its logits are off by {share:.1%}"
            raise UnsupportedModel(refusal(decoder.family, reason))


def _attention(config: object, layers: int) -> int:
    """Total size of a token's queries in all layers."""
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    return layers * heads * int(getattr(config, "head_dim", None) or hidden // heads)
