"""`python -m benchmarks sparse`: block-sparse prefill against dense, and what schedules make of its costs.

Every way goes through the model side by side: each layer is computed in all ways, one after the other, another one
first each time, so that neighbours are seconds apart. Prefill is the sum of the layers. Then the tokens that follow in
the text go through the same layer, attending to all KV of the prompt: so near would a reply be after such a prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.base import Advance, BenchOptions, Report, about, rotated
from benchmarks.data import texts
from benchmarks.models import load
from benchmarks.prompts import tokens_for
from benchmarks.sparse import attention, report, schedules
from benchmarks.sparse.attention import AttentionInputs, BlockRule
from benchmarks.sparse.report import PromptRun, RuleRun
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import InvalidSetting

# Tokens of a prompt, and how many prompts: a long one takes a CPU minutes each way.
SIZES, QUICK_SIZES, CUDA_SIZES = {2048: 3, 4096: 2, 8064: 1}, {2048: 3}, {8192: 3, 32_768: 3}
QUESTION = 64  # tokens behind the prompt: where quality is judged
RULES = (*(BlockRule(density=share) for share in (0.1, 0.2, 0.35, 0.5)), BlockRule(mass=0.95))
QUICK_RULES = (BlockRule(density=0.35), BlockRule(mass=0.95))
_INTERFACE = "rekindle_block_sparse"
_CHARACTERS = 6  # of a token, at most
_SAMPLE = Path(__file__).parent.parent / "sample_corpus"


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure every rule at every size that fits the model's context."""
    advance("load the model")
    engine = load(options)
    if not isinstance(engine, HfEngine):
        engine.close()
        raise InvalidSetting("bench sparse replaces the attention of transformers: it is for --engine hf.")
    sizes = QUICK_SIZES if options.quick else SIZES if engine.device == "cpu" else CUDA_SIZES
    runs: list[PromptRun] = []
    with torch.inference_mode():
        for size, count in sizes.items():
            able = size + QUESTION <= engine.context_tokens
            for name, tokens in _prompts(engine, options, size, options.limit or count) if able else ():
                runs.append(_Prefill(engine, tokens, size, options).measure(name, advance))
    found = Report("sparse", fields=about(engine, options))
    report.add_rows(found, runs, options)
    if engine.device == "cpu" and options.shape is None:
        advance("schedules")
        schedules.add_rows(found, runs)
    engine.close()
    return found


def _prompts(engine: HfEngine, options: BenchOptions, size: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Prompts and what follows them: consecutive text of different sources, nothing twice."""
    if options.shape is not None:
        for number in range(count):
            own = replace(options, seed=options.seed + number)
            yield "random tokens", tokens_for(engine, own, size + QUESTION)
        return
    for name, passages in _sets(options)[:count]:
        tokens: list[int] = []
        for passage in passages:
            tokens += engine.tokenizer.encode(passage)
            if len(tokens) >= size + QUESTION:
                yield name, tokens[: size + QUESTION]
                break


def _sets(options: BenchOptions) -> list[tuple[str, list[str]]]:
    """The sample from several places on; or a folder with enough texts, the sample, and other folders, as drawn."""
    sample = texts(_SAMPLE)
    if options.data is None:
        eighth = len(sample) // 8
        return [("sample", sample[start:] + sample[:start]) for start in range(0, 8 * eighth, eighth)]
    folders = sorted({path.parent for path in (*options.data.glob("*.jsonl"), *options.data.glob("*/*.jsonl"))})
    found = []
    for folder in folders or [options.data]:
        try:
            found.append((folder.name, texts(folder)))
        except InvalidSetting:  # questions or traces alone
            if len(folders) < 2:
                raise
    able = [one for one in found if sum(map(len, one[1])) > _CHARACTERS * max(SIZES)]
    order = np.random.default_rng(options.seed).permutation(len(able))
    drawn = [able[number] for number in order]
    return [*drawn[:1], ("sample", sample), *drawn[1:]]


@dataclass
class _Way:
    """One way through the model: the hidden states on their way up."""

    run: RuleRun
    hidden: torch.Tensor  # [1, tokens, width]
    question: torch.Tensor  # [1, QUESTION, width]


class _Prefill:
    """A prompt, in every way."""

    def __init__(self, engine: HfEngine, tokens: list[int], size: int, options: BenchOptions) -> None:
        self._engine, self._size, self._model = engine, size, engine.model
        self._cuda = engine.device != "cpu"
        self._judged, self._costed = options.shape is None, options.shape is None and not self._cuda
        base = self._model.model
        hidden = base.embed_tokens(torch.tensor([tokens], device=self._model.device))
        cos, sin = base.rotary_emb(hidden, torch.arange(len(tokens), device=self._model.device)[None])
        self._places = (cos[:, :size], sin[:, :size]), (cos[:, size:], sin[:, size:])
        rules = QUICK_RULES if options.quick else RULES
        self._ways = [_Way(RuleRun(rule), hidden[:, :size], hidden[:, size:]) for rule in (None, *rules)]
        keys = attention.CUDA_KEYS if self._cuda else attention.KEYS
        self._layer = _LayerAttention(attention.causal_blocks(size, keys, self._model.device))

    def measure(self, text: str, advance: Advance) -> PromptRun:
        """Through all layers; the first one is computed once more before, unmeasured."""
        ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, self._layer)
        before, self._model.config._attn_implementation = self._model.config._attn_implementation, _INTERFACE
        try:
            layers = list(self._model.model.layers)
            for way in self._ways:
                self._prefill(layers[0], way)
            for number, layer in enumerate(layers):
                advance(f"{self._size} tokens, layer {number + 1} of {len(layers)}")
                for way in rotated(self._ways, number):
                    self._through(layer, number, way)
        finally:
            self._model.config._attn_implementation = before
        if self._judged:
            for way in self._ways:
                last = torch.cat([way.hidden[:, -1:], way.question], dim=1)
                logits = self._model.lm_head(self._model.model.norm(last))[0].float()
                way.run.log_probabilities = logits.log_softmax(-1).cpu().numpy()
        blocks = int((self._layer.causal > 0).sum())
        return PromptRun(text, self._size, blocks, tuple(way.run for way in self._ways))

    def _through(self, layer: Any, number: int, way: _Way) -> None:
        entered = way.hidden
        way.hidden, seconds = self._prefill(layer, way)
        run, found = way.run, self._layer
        run.layer_seconds.append(seconds)
        run.attention_seconds.append(found.seconds)
        run.kept.append(found.kept)
        if not self._judged:
            return
        found.context = found.key, found.value
        way.question, seconds = self._timed(layer, way.question, self._places[1])
        found.context = None
        run.question_seconds.append(seconds)
        run.tile_seconds.append(found.tile_seconds)
        if self._costed:
            started = time.perf_counter()
            entering = layer.input_layernorm(entered)
            layer.self_attn.k_proj(entering), layer.self_attn.v_proj(entering)
            run.top_seconds.append(time.perf_counter() - started)
            if run.rule is None:
                run.slice_bytes.append(schedules.slice_bytes(self._engine.layout, number, found.key, found.value))

    def _prefill(self, layer: Any, way: _Way) -> tuple[torch.Tensor, float]:
        self._layer.rule = way.run.rule
        return self._timed(layer, way.hidden, self._places[0])

    def _timed(self, layer: Any, hidden: torch.Tensor, places: Any) -> tuple[torch.Tensor, float]:
        self._layer.settle()
        started = time.perf_counter()
        hidden = layer(hidden, position_embeddings=places)
        self._layer.settle()
        return hidden, time.perf_counter() - started


@dataclass
class _LayerAttention:
    """The attention function that transformers' layers call."""

    causal: torch.Tensor  # [query blocks, key blocks]
    rule: BlockRule | None = None
    context: tuple[torch.Tensor, torch.Tensor] | None = None  # what the question attends to beside itself
    seconds: float = 0.0  # of the last prefill, the choice of blocks included
    tile_seconds: list[float] = field(default_factory=list)  # [query blocks]
    kept: Any = None  # [heads, query blocks] number of kept blocks

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, tokens, heads, width], as transformers wants it."""
        inputs = AttentionInputs(query, key, value, scaling)
        if self.context is not None:
            return self._question(inputs).transpose(1, 2), None
        self.key, self.value, self.kept, self.tile_seconds = key, value, None, []
        self.settle()
        started = time.perf_counter()
        output = self._dense(module, inputs) if self.rule is None else self._sparse(inputs)
        self.settle()
        self.seconds = time.perf_counter() - started
        return output, None

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.causal.is_cuda:
            torch.cuda.synchronize()

    def _dense(self, module: Any, inputs: AttentionInputs) -> torch.Tensor:
        theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: torch.Tensor = theirs(module, inputs.query, inputs.key, inputs.value, None, scaling=inputs.scaling)[0]
        return output

    def _sparse(self, inputs: AttentionInputs) -> torch.Tensor:
        assert self.rule is not None
        mass = attention.estimate_mass(inputs, self.causal)
        kept = attention.choose_blocks(mass, self.causal, self.rule)
        self.kept = kept.sum(-1)
        if self.causal.is_cuda:
            return attention.attend_flex(inputs, kept, self.causal).transpose(1, 2)
        output, self.tile_seconds = attention.attend_tiles(inputs, kept)
        return output.transpose(1, 2)

    def _question(self, inputs: AttentionInputs) -> torch.Tensor:
        assert self.context is not None
        key, value = (torch.cat(both, dim=2) for both in zip(self.context, (inputs.key, inputs.value), strict=True))
        own, size = inputs.query.shape[2], key.shape[2]
        seen = torch.ones(own, size, dtype=torch.bool, device=key.device).tril(size - own)
        return functional.scaled_dot_product_attention(
            inputs.query, key, value, attn_mask=seen, scale=inputs.scaling, enable_gqa=True
        )
