"""The ONNX Runtime engine: decoders as graphs with a cache of keys and values, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime
import psutil
import tokenizers

from rekindle.core.adapter import AdapterFit, Lora
from rekindle.core.identity import Identity, digest_of_fields
from rekindle.core.kv import LayerKv, Span
from rekindle.core.request import Sampling
from rekindle.engine.base import Capabilities, HeldKv, HostStopwatch, Logits, Reserve, Row, choose_context
from rekindle.engine.onnx.graph_runner import GraphRunner, as_float32
from rekindle.engine.onnx.onnx_options import OnnxOptions
from rekindle.engine.onnx.onnx_sequence import MAX_SLOTS, OnnxSequence, PackedKv, SlabKv, SlabPool
from rekindle.engine.row_checks import CheckedRow, check_next_tokens, check_rows
from rekindle.engine.sample import Sampler
from rekindle.engine.threaded_job import ThreadedJob, stop_if
from rekindle.errors import AdapterRefused, BrokenModel, Cancelled, Closed, NotAModel, StepRefused, UnsupportedModel
from rekindle.machine import free_memory
from rekindle.models.files import ModelFiles, digest_of_files, is_file, read_text
from rekindle.models.hf_folder import read_json, read_tokenizer_config, template_digest, tokenizer_digest
from rekindle.models.onnx_folder import read_onnx_model
from rekindle.text.chat_template import make_renderer
from rekindle.text.tokenizer import HfTokenizer

_REGIME = "plain"
_PIECE_TOKENS = 512  # computed in one run: attention takes memory for each of them and all before
_LOGITS_BYTES = 64 << 20  # of one run: graphs compute those of every token
_CHECK_TOKENS = 6
_CHECK_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1, "uint8": 2e-1}  # of the largest logit


class OnnxEngine:
    """A loaded graph. See `Engine` for the contract.

    It computes the tokens that come next and nothing else (`recompute` is none): KV is exported and fed by span, but
    not moved, and nobody looks inside. Replies of several requests share a run where the graph appends to the buffers
    it reads.
    """

    def __init__(self, files: ModelFiles, options: OnnxOptions, reserve: Reserve | None = None) -> None:
        """Load it; `reserve` makes room first.

        Raises `BrokenModel`, `NotAModel`, `UnsupportedModel`, `OutOfMemory` or `InvalidSetting`.
        """
        if files.onnx is None:
            raise NotAModel(f"{files.name} has no ONNX graph. Make one with: rekindle pull {files.name} --format onnx")
        self.name = files.name
        self._model = model = read_onnx_model(files.onnx)
        self.layout = model.layout
        steady = model.layout.dtype == "float32"  # with fewer bits a step of several tokens rounds otherwise
        self.capabilities = Capabilities(layer_feeds=False, recompute="none", probes=False, steady=steady)
        self.longest_context = model.context_tokens
        self.memory_bytes = sum(file.stat().st_size for file in model.graph.weights)
        free = free_memory()
        if reserve is not None:
            free = min(free, reserve(self.memory_bytes, self.device_bytes))
        self.context_tokens = choose_context(
            options.context_tokens, self.longest_context, self.layout.token_bytes, free - self.memory_bytes
        )
        self.parameters = model.graph.parameters
        self.attention = model.query_heads * sum(shape.key_dim for shape in model.layout.layers)
        self.tokenizer = load_tokenizer(model.folder, model.stop_ids, model.vocabulary_size)
        # As they are now: what is loaded stays the same if the files change.
        self._tokenizer_digest, self._template_digest = tokenizer_digest(model.folder), template_digest(model.folder)
        self._runner: GraphRunner | None = GraphRunner(model, options)
        row = self._runner.logits_buffer((1, model.vocabulary_size))
        self.prefill_tokens = max(1, min(_PIECE_TOKENS, options.batch_tokens, _LOGITS_BYTES // row.nbytes))
        self._logits = self._runner.logits_buffer((max(MAX_SLOTS, self.prefill_tokens), model.vocabulary_size))
        self.device = self._runner.provider.removesuffix("ExecutionProvider").lower()
        # On a CPU several rows of 16 bits take longer together than one by one.
        self._together = model.shares and not (self.device == "cpu" and self.layout.dtype == "float16")
        self._pool = SlabPool(model.layout)
        self._lock = threading.Lock()
        self._weights: str | None = None
        self._check_itself()

    @property
    def device_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    @property
    def arithmetic(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}, {self.device}"

    def regime(self, tokens: int) -> str:  # noqa: ARG002  (graphs that rotate long contexts otherwise are refused)
        """The same for every length."""
        return _REGIME

    def identity(self, regime: str) -> Identity:
        """What its KV depends on: the digest of graph and weights covers their precision, `dtype` that of KV."""
        self._live()
        if self._weights is None:
            self._weights = digest_of_files(self._model.graph.weights)
        return Identity(
            weights=self._weights,
            config=digest_of_fields("rekindle/onnx/1"),
            tokenizer=self._tokenizer_digest,
            template=self._template_digest,
            dtype=self.layout.dtype,
            rope=regime,
        )

    def check_adapter(self, lora: Lora) -> AdapterFit:
        """Refused."""
        _refuse_adapter(lora.source)

    def load_adapter(self, lora: Lora) -> None:
        """Refused."""
        _refuse_adapter(lora.source)

    def unload_adapter(self, digest: str) -> None:
        """None was loaded."""

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> OnnxSequence:
        """An empty sequence of `capacity` tokens."""
        self._live()
        if not 0 < capacity <= self.context_tokens:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self.context_tokens} tokens.")
        if regime != _REGIME:
            raise StepRefused(f"The regime {regime!r} is unknown. Ask `regime(tokens)`.")
        if adapter is not None:
            raise StepRefused("The adapter of a sequence is not loaded. Load it before it is used.")
        kv = SlabKv(self._pool, capacity) if self._model.shares else PackedKv(self.layout, capacity)
        return OnnxSequence(self, kv, capacity, regime)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> Sampler:
        """The sampler of a reply."""
        return Sampler(sampling, context)

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows: replies in one run where they can be, the others one after the other."""
        with self._lock:
            runner = self._live()
            size = self._model.vocabulary_size
            checked = check_rows(rows, layers=len(self.layout.layers), vocabulary_size=size)
            sequences = [self._own(row) for row in checked]
            finished = False
            try:
                for row, sequence in zip(checked, sequences, strict=True):
                    if row.row.feeds:
                        _feed(row, sequence, cancelled)
                logits = self._compute(runner, checked, sequences, cancelled)
                finished = True
            finally:
                for row, sequence in zip(checked, sequences, strict=True):
                    sequence.set_length(row.end if finished else row.kept)
            return logits

    def close(self) -> None:
        """Free the graph. Open sequences can then only be closed."""
        with self._lock:
            self._runner, self._pool, self._logits = None, SlabPool(self.layout), self._logits[:0].copy()

    def _live(self) -> GraphRunner:
        if self._runner is None:
            raise Closed("The engine was closed. Load the model again.")
        return self._runner

    def _own(self, row: CheckedRow) -> OnnxSequence:
        sequence = row.row.sequence
        if not isinstance(sequence, OnnxSequence) or sequence.owner is not self:
            raise StepRefused("A row holds a sequence of another engine.")
        check_next_tokens(row, "ONNX Runtime")
        return sequence

    def _compute(
        self,
        runner: GraphRunner,
        rows: Sequence[CheckedRow],
        sequences: Sequence[OnnxSequence],
        cancelled: Callable[[], bool] | None,
    ) -> list[Logits]:
        found: dict[int, Logits] = {}
        for group in _groups(rows, sequences, together=self._together):
            if len(group) > 1:
                found.update(zip(group, self._run_together(runner, rows, sequences, group, cancelled), strict=True))
            else:
                (place,) = group
                found[place] = self._run_alone(runner, rows[place], sequences[place], cancelled)
        return [found[place] for place in range(len(rows))]

    def _run_together(
        self,
        runner: GraphRunner,
        rows: Sequence[CheckedRow],
        sequences: Sequence[OnnxSequence],
        group: Sequence[int],
        cancelled: Callable[[], bool] | None,
    ) -> list[Logits]:
        """One token each of sequences in adjacent slots."""
        stop_if(cancelled)
        first = _slab_of(sequences[group[0]])
        places = slice(first.place, first.place + len(group))
        kv = [LayerKv(keys[places], values[places]) for keys, values in first.slab.layers]
        tokens = np.stack([rows[place].tokens for place in group])
        out = self._logits[: len(group)].reshape(len(group), 1, -1)
        runner.run(tokens, [int(rows[place].positions[0]) for place in group], [(one, one) for one in kv], out, None)
        return [as_float32(out[at, : rows[place].wanted]) for at, place in enumerate(group)]

    def _run_alone(
        self, runner: GraphRunner, row: CheckedRow, sequence: OnnxSequence, cancelled: Callable[[], bool] | None
    ) -> Logits:
        """The tokens of one sequence, in pieces."""
        first, count, last_only = int(row.positions[0]), len(row.tokens), self._model.logits_last
        size = 1 if last_only and row.wanted > 1 else self.prefill_tokens
        logits = []
        for start in range(0, count, size):
            stop_if(cancelled)
            tokens = row.tokens[start : start + size]
            new = len(tokens)
            # Alone, a token is rounded otherwise than among others: a token of a prompt gets another one behind it.
            accompanied = new == 1 and (count > 1 or row.row.prefill) and not last_only
            if accompanied and first + start + 2 <= self.longest_context:
                tokens = np.repeat(tokens, 2)
            sequence.make_room(first + start)
            out = self._logits[: 1 if last_only else len(tokens)].reshape(1, -1, self._model.vocabulary_size)
            runner.run(tokens[None], [first + start], sequence.bound(len(tokens)), out, cancelled)
            sequence.advance(len(tokens))
            sequence.set_length(first + start + new)
            unwanted = max(0, count - row.wanted - start)
            if unwanted < new:
                logits.append(as_float32(out[0, 0 if last_only else unwanted : new]))
        return np.concatenate(logits) if logits else np.zeros((0, self._model.vocabulary_size), np.float32)

    def _check_itself(self) -> None:
        """Tokens in one run must get the logits that they get one after the other, behind KV that was fed. A graph for
        which that does not hold is refused."""
        if self.context_tokens < _CHECK_TOKENS:
            return
        tokens = [place * 37 % self._model.vocabulary_size for place in range(3, 3 + _CHECK_TOKENS)]
        half = _CHECK_TOKENS // 2
        whole, cut = (self.open(_CHECK_TOKENS, _REGIME) for _ in range(2))
        try:
            (expected,) = self.step([Row.following(whole, tokens, logits="all")])
            fed = HeldKv(whole.export(Span(0, half)))
            parts = self.step([Row(cut, tokens[half:-1], range(half, _CHECK_TOKENS - 1), "all", (fed,))])
            parts += self.step([Row.following(cut, tokens[-1:])])
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModel(
                f"{self._model.graph.path} does not take its own KV back ({str(error).splitlines()[0][:300]}). Export "
                "the model again, or use engine='hf'."
            ) from error
        finally:
            whole.close()
            cut.close()
        off = float(np.abs(np.concatenate(parts) - expected[half:]).max())
        if not off <= _CHECK_TOLERANCE[self.layout.dtype] * max(1.0, float(np.abs(expected).max())):
            raise UnsupportedModel(
                f"{self._model.graph.path} gives other logits behind its own KV (off by {off:.2g}). Export the model "
                "again, or use engine='hf'."
            )


def _feed(row: CheckedRow, sequence: OnnxSequence, cancelled: Callable[[], bool] | None) -> None:
    """Fill the sequence's own buffers from the feeds, in a thread that a cancelled step need not wait for."""
    layers = sequence.make_room(int(row.positions[0]))

    def fill() -> None:
        for layer, own in enumerate(layers):
            for feed in row.row.feeds:
                if layer in feed.layers:
                    part = slice(feed.span.start, feed.span.stop)
                    feed.fill(layer, LayerKv(own.keys[:, part], own.values[:, part]))

    job = ThreadedJob(fill)
    if not job.done(cancelled):
        job.abandon(sequence.leave_buffers())
        raise Cancelled("The request was cancelled.")


def _groups(rows: Sequence[CheckedRow], sequences: Sequence[OnnxSequence], *, together: bool) -> list[list[int]]:
    """Which rows share a run: single tokens of replies whose sequences are in adjacent slots."""
    if not together:
        return [[place] for place in range(len(rows))]
    replies = {
        place: _slab_of(sequences[place])
        for place, row in enumerate(rows)
        if len(row.tokens) == 1 and not row.row.prefill
    }
    groups: list[list[int]] = []
    for place in sorted(replies, key=lambda place: (id(replies[place].slab), replies[place].place)):
        if groups and replies[groups[-1][-1]].is_before(replies[place]):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [*groups, *([place] for place in range(len(rows)) if place not in replies)]


def _slab_of(sequence: OnnxSequence) -> SlabKv:
    assert isinstance(sequence.kv, SlabKv)
    return sequence.kv


def _refuse_adapter(source: Any) -> NoReturn:
    raise AdapterRefused(f"ONNX Runtime does not take {source}: a graph is fixed. Use engine='hf' or 'llamacpp'.")


def load_tokenizer(folder: Path, stop_ids: frozenset[int], vocabulary_size: int) -> HfTokenizer:
    """The folder's tokenizer; `stop_ids` end a reply, beside its own end token. Raises `BrokenModel`."""
    path = folder / "tokenizer.json"
    if not is_file(path):
        raise BrokenModel(f"{folder} has no tokenizer.json. Copy it from where the model came from.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise BrokenModel(f"{path} cannot be read ({error}). Get it again.") from error
    config = read_tokenizer_config(folder)
    template, bos, eos = _template(folder, config), _token(config, "bos_token"), _token(config, "eos_token")
    end = backend.token_to_id(eos) if eos else None
    return HfTokenizer(
        backend,
        render=make_renderer(template, bos, eos) if template else None,
        stop_ids=stop_ids | ({end} if end is not None and end < vocabulary_size else set()),
        vocabulary_size=vocabulary_size,
        template=template,
    )


def _template(folder: Path, config: dict[str, Any]) -> str:
    """The chat template: a file of its own, or in the tokenizer's configuration, as text or as a list of named ones."""
    if is_file(folder / "chat_template.jinja"):
        return read_text(folder / "chat_template.jinja")
    if is_file(folder / "chat_template.json"):
        try:
            found = read_json(folder / "chat_template.json")
        except ValueError as error:
            raise BrokenModel(f"{folder / 'chat_template.json'} is not JSON ({error}). Get it again.") from error
    else:
        found = config
    value = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _token(config: dict[str, Any], name: str) -> str:
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""
