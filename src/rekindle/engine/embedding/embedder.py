"""Sentence embeddings: one unit vector per text. No torch."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from rekindle.core.identity import digest_of_config, digest_of_fields
from rekindle.engine.embedding.bert import BertWeights, NumpyEncoder, read_bert
from rekindle.engine.embedding.encoder_settings import EncoderSettings, Pooling, read_encoder_settings
from rekindle.engine.threaded_job import stop_if
from rekindle.errors import BrokenModel, EngineMissing, InvalidPrompt, ModelError, UnsupportedModel
from rekindle.models.files import ModelFiles, digest_of_files
from rekindle.models.hf_folder import check_folder, read_config, read_floats
from rekindle.models.onnx_folder import read_encoder
from rekindle.text.tokenizer import LARGE_CHARACTERS, encode_text, trim_heap

_BATCH_TOKENS = 1024  # larger batches are not faster
_NUMPY_TOKENS = 4096  # computed before ONNX Runtime is loaded: for fewer, loading takes longer than it saves
_TEXTS_AT_ONCE = 256  # tokenized between two checks for cancellation

Ids = NDArray[np.int32]
log = logging.getLogger("rekindle.engine")


@dataclass(frozen=True)
class Embeddings:
    """The vectors of texts, in order."""

    vectors: NDArray[np.float32]  # [texts, dimensions], each of unit length
    tokens: int  # of all texts
    truncated: int  # number of texts longer than the model reads


class Encoder(Protocol):
    """What computes vectors. Thread-safe."""

    @property
    def dimensions(self) -> int: ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""

    @property
    def token_limit(self) -> int:
        """The longest text, by the model's positions."""

    def pooled(
        self, prompts: Sequence[Ids], pooling: Pooling, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        """The pooled states `[prompts, dimensions]` of prompts in order of length. Raises `Cancelled`."""


class Embedder:
    """A sentence encoder. Thread-safe.

    A text's vector does not depend on the other texts, up to rounding. `token_limit` is what it reads of a text,
    including special tokens.
    """

    def __init__(
        self,
        name: str,
        weights: Sequence[Path],
        folder: Path,
        encoder: Encoder,
        settings: EncoderSettings,
    ) -> None:
        """`weights` are the files of the encoder, `folder` has its configuration and tokenizer."""
        self.name = name
        self.dimensions = encoder.dimensions
        self.token_limit = min(encoder.token_limit, settings.token_limit or encoder.token_limit)
        self._weights = weights
        self._folder = folder
        self._encoder = encoder
        self._settings = settings
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        frame = self._tokenizer.encode("").ids  # the special tokens around every text
        if not 0 < len(frame) < self.token_limit or max(frame) >= encoder.vocabulary_size:
            raise BrokenModel(
                f"The tokenizer.json in {folder} puts {len(frame)} tokens {frame} around a text; that does not "
                f"fit the model, which reads {self.token_limit}. Get both again."
            )
        self._frame = [int(token) for token in frame]
        self._tokenizer.enable_truncation(self.token_limit)

    @classmethod
    def load(cls, files: ModelFiles) -> Embedder:
        """The encoder in a folder in Hugging Face form, or in an ONNX graph.

        Raises `UnsupportedModel`, `ModelNotFound`, `NotAModel` or `BrokenModel`, and `EngineMissing` for a graph
        without ONNX Runtime.
        """
        if files.onnx is not None:
            return cls._load_graph(files.name, files.onnx)
        weights = check_folder(files.folder)
        settings = read_encoder_settings(files.folder)
        bert = read_bert(read_config(files.folder), read_floats(weights))
        encoder = BertEncoder(bert) if runtime_installed() else NumpyEncoder(bert)
        return cls(files.name, weights, files.folder, encoder, settings)

    @classmethod
    def _load_graph(cls, name: str, path: Path) -> Embedder:
        if not runtime_installed():
            raise EngineMissing(f"{path} needs ONNX Runtime. Install it with: pip install 'rekindle-llm[onnx]'")
        from rekindle.engine.embedding.graph_encoder import GraphEncoder

        about = read_encoder(path)
        settings = read_encoder_settings(about.folder, pooled=about.spec.pooled)
        return cls(name, about.graph.weights, about.folder, GraphEncoder.of_file(about), settings)

    @cached_property
    def digest(self) -> str:
        """Of everything the vectors depend on: weights, tokenizer and settings. Vectors of equal digests compare.

        Reads the files the first time, unless they were read before.
        """
        settings = self._settings
        return digest_of_fields(
            "rekindle/embedder/1",
            digest_of_files([*self._weights, self._folder / "tokenizer.json"]),
            digest_of_config(read_config(self._folder)),
            f"{settings.pooling} {self.token_limit} {settings.lower}",
            *(prefix for prefix in (settings.question_prefix, settings.passage_prefix) if prefix),
        )

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text of any length, without special tokens."""
        return len(encode_text(self._uncut, text, add_special_tokens=False))

    @cached_property
    def _uncut(self) -> tokenizers.Tokenizer:
        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        whole.no_truncation()
        return whole

    def embed_questions(self, texts: Sequence[str]) -> Embeddings:
        """The vectors of questions, to look for passages with: some models read a word before each."""
        return self.embed([f"{self._settings.question_prefix}{text}" for text in texts])

    def embed_passages(self, texts: Sequence[str]) -> Embeddings:
        """The vectors of passages that questions are compared with."""
        return self.embed([f"{self._settings.passage_prefix}{text}" for text in texts])

    def embed(self, texts: Sequence[str], *, cancelled: Callable[[], bool] | None = None) -> Embeddings:
        """The vectors of texts, also of empty ones.

        Raises `InvalidPrompt` for what is not text, and `Cancelled`.
        """
        _check_texts(texts)
        prompts: list[Ids] = []
        truncated = 0
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            stop_if(cancelled)
            some = texts[start : start + _TEXTS_AT_ONCE]
            begun = [self._beginning(text, cancelled) for text in some]
            wanted = [text.lower() for text in begun] if self._settings.lower else begun
            for encoding in self._tokenizer.encode_batch_fast(wanted):
                prompts.append(np.array(encoding.ids, np.int32))
                truncated += bool(encoding.overflowing)
            if sum(map(len, begun)) >= LARGE_CHARACTERS:
                del encoding
                trim_heap()
        return self._embedded(prompts, truncated, cancelled)

    def _beginning(self, text: str, cancelled: Callable[[], bool] | None) -> str:
        """As much of a text as the model reads: its first part that has twice as many tokens.

        Most texts need one trial. White space, and words that the vocabulary does not know, may take more text.
        """
        size = 2 * self.token_limit * self._longest_token
        while size < len(text) and self.count_tokens(text[:size]) < 2 * self.token_limit:
            stop_if(cancelled)
            size *= 4
        return text[:size]

    @cached_property
    def _longest_token(self) -> int:
        """In characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def embed_tokens(
        self, prompts: Sequence[Sequence[int]], *, cancelled: Callable[[], bool] | None = None
    ) -> Embeddings:
        """The vectors of texts given as token ids, including the special tokens around each.

        Raises `InvalidPrompt` for ids without these, which another tokenizer made, and for an unknown id; `Cancelled`.
        """
        kept: list[Ids] = []
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise InvalidPrompt(f"Input {index} has no tokens. Give at least one.")
            if not 0 <= min(prompt) <= max(prompt) < self._encoder.vocabulary_size:
                raise InvalidPrompt(
                    f"Input {index} has token ids that {self.name} does not know: they go from 0 to "
                    f"{self._encoder.vocabulary_size - 1:,}. Use its own tokenizer, or send text."
                )
            if prompt[-1] != self._frame[-1] or (len(self._frame) > 1 and prompt[0] != self._frame[0]):
                raise InvalidPrompt(
                    f"Input {index} has token ids of another tokenizer: those of {self.name} have {self._frame} around "
                    "each text. Send text (LangChain: check_embedding_ctx_length=False)."
                )
            kept.append(np.array(self._cut(prompt), np.int32))
        truncated = sum(len(prompt) > self.token_limit for prompt in prompts)
        return self._embedded(kept, truncated, cancelled)

    def _cut(self, prompt: Sequence[int]) -> Sequence[int]:
        """Truncated as the tokenizer does it: the end token stays."""
        if len(prompt) <= self.token_limit:
            return prompt
        return [*prompt[: self.token_limit - 1], self._frame[-1]]

    def _embedded(self, prompts: Sequence[Ids], truncated: int, cancelled: Callable[[], bool] | None) -> Embeddings:
        vectors = np.empty((len(prompts), self.dimensions), np.float32)
        for batch in _batches([len(prompt) for prompt in prompts]):
            stop_if(cancelled)
            some = [prompts[index] for index in batch]
            vectors[batch] = self._encoder.pooled(some, self._settings.pooling, cancelled)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embeddings(vectors, sum(len(prompt) for prompt in prompts), truncated)


def runtime_installed() -> bool:
    """Whether ONNX Runtime is here."""
    return importlib.util.find_spec("onnxruntime") is not None


class BertEncoder:
    """A checkpoint. The first texts are computed by numpy, which has the first vector sooner; once there are many, by
    ONNX Runtime, which has a vector sooner but takes a while to load. Thread-safe."""

    def __init__(self, weights: BertWeights) -> None:
        self.dimensions = weights.dimensions
        self.vocabulary_size = weights.vocabulary_size
        self.token_limit = weights.token_limit
        self._weights: BertWeights | None = weights  # until ONNX Runtime has them
        self._chosen: Encoder = NumpyEncoder(weights)
        self._tokens_left = _NUMPY_TOKENS
        self._lock = threading.Lock()

    def pooled(
        self, prompts: Sequence[Ids], pooling: Pooling, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        """See `Encoder`."""
        with self._lock:
            self._tokens_left -= sum(map(len, prompts))
            if self._tokens_left < 0 and self._weights is not None:
                self._chosen, self._weights = self._load_graph(self._weights), None
        return self._chosen.pooled(prompts, pooling, cancelled)

    def _load_graph(self, weights: BertWeights) -> Encoder:
        try:
            from rekindle.engine.embedding.graph_encoder import GraphEncoder

            return GraphEncoder.of_weights(weights)
        except (ImportError, ModelError) as error:  # an installation that is broken, or too old
            log.warning("ONNX Runtime cannot compute vectors (%s); numpy does, more slowly.", error)
            return self._chosen


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UnsupportedModel(
            f"{path.parent} has its tokenizer only in an older form. Write tokenizer.json beside it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        return tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library has no narrower one
        raise BrokenModel(f"{path} cannot be read ({error}). Get it again.") from error


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The indices of prompts in order of length, in batches of bounded tokens."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and tokens + lengths[index] > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise InvalidPrompt("Give a list of texts, not one text: embed([text]).")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidPrompt(f"Input {index} is {type(text).__name__}, not text.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPrompt(
                f"Input {index} is not valid Unicode: a lone surrogate at character {error.start}. "
                "Read the file as UTF-8, or pass errors='replace' when decoding."
            ) from None
