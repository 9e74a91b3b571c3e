"""Sentence embeddings: one unit vector per text. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from rekindle.core.identity import digest_of_config, digest_of_fields
from rekindle.engine.embedding.bert import Bert, EqualLengthTexts
from rekindle.errors import BrokenModel, Cancelled, InvalidPrompt, UnsupportedModel
from rekindle.models.files import ModelFiles, digest_of_files
from rekindle.models.hf_folder import check_folder, read_config, read_floats, read_json
from rekindle.text.tokenizer import LARGE_CHARACTERS, encode_text, trim_heap

_BATCH_TOKENS = 1024  # larger batches are not faster
_TEXTS_AT_ONCE = 256  # tokenized between two checks for cancellation

Ids = NDArray[np.int32]
CancelCheck = Callable[[], None]  # raises `Cancelled`


@dataclass(frozen=True)
class Embeddings:
    """The vectors of texts, in order."""

    vectors: NDArray[np.float32]  # [texts, dimensions], each of unit length
    tokens: int  # of all texts
    truncated: int  # number of texts longer than the model reads


class Embedder:
    """A sentence encoder. Thread-safe.

    A text's vector does not depend on the other texts, up to rounding. `token_limit` is what it reads of a text,
    including special tokens.
    """

    def __init__(
        self, files: ModelFiles, bert: Bert, tokenizer: tokenizers.Tokenizer, settings: EncoderSettings
    ) -> None:
        """Takes over `tokenizer` and configures it to truncate and not to pad."""
        self.name = files.name
        self.dimensions = bert.dimensions
        self.token_limit = min(bert.token_limit, settings.token_limit or bert.token_limit)
        self._folder = files.folder
        self._bert = bert
        self._encoder_settings = settings
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        frame = tokenizer.encode("").ids  # the special tokens around every text
        if not 0 < len(frame) < self.token_limit or max(frame) >= bert.vocabulary_size:
            raise BrokenModel(
                f"The tokenizer.json in {files.folder} puts {len(frame)} tokens {frame} around a text; that does not "
                f"fit the model, which reads {self.token_limit}. Get both again."
            )
        self._end = int(frame[-1])
        tokenizer.enable_truncation(self.token_limit)

    @classmethod
    def load(cls, files: ModelFiles) -> Embedder:
        """The encoder in a folder in Hugging Face form.

        Raises `UnsupportedModel`, `ModelNotFound`, `NotAModel` or `BrokenModel`.
        """
        weights = check_folder(files.folder)
        config, settings = read_config(files.folder), read_encoder_settings(files.folder)
        tokenizer = _read_tokenizer(files.folder / "tokenizer.json")
        return cls(files, Bert(config, read_floats(weights)), tokenizer, settings)

    @cached_property
    def digest(self) -> str:
        """Of everything the vectors depend on: weights, tokenizer and settings. Vectors of equal digests compare.

        Reads the files the first time, unless they were read before.
        """
        files = [*check_folder(self._folder), self._folder / "tokenizer.json"]
        settings = self._encoder_settings
        return digest_of_fields(
            "rekindle/embedder/1",
            digest_of_files(files),
            digest_of_config(read_config(self._folder)),
            f"{settings.pooling} {self.token_limit} {settings.lower}",
        )

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text of any length, without special tokens."""
        return len(encode_text(self._uncut, text, add_special_tokens=False))

    @cached_property
    def _uncut(self) -> tokenizers.Tokenizer:
        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        whole.no_truncation()
        return whole

    def embed(self, texts: Sequence[str], *, cancelled: Callable[[], bool] | None = None) -> Embeddings:
        """The vectors of texts, also of empty ones.

        Raises `InvalidPrompt` for what is not text, and `Cancelled`.
        """
        _check_texts(texts)
        look = _cancel_check(cancelled)
        prompts: list[Ids] = []
        truncated = 0
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            look()
            some = texts[start : start + _TEXTS_AT_ONCE]
            wanted = [text.lower() for text in some] if self._encoder_settings.lower else list(some)
            for encoding in self._tokenizer.encode_batch_fast(wanted):
                prompts.append(np.array(encoding.ids, np.int32))
                truncated += bool(encoding.overflowing)
            if sum(map(len, some)) >= LARGE_CHARACTERS:
                del encoding
                trim_heap()
        return self._embedded(prompts, truncated, look)

    def embed_tokens(
        self, prompts: Sequence[Sequence[int]], *, cancelled: Callable[[], bool] | None = None
    ) -> Embeddings:
        """The vectors of texts given as token ids, including special tokens.

        Raises `InvalidPrompt` for an empty one or an unknown id, and `Cancelled`.
        """
        kept: list[Ids] = []
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise InvalidPrompt(f"Input {index} has no tokens. Give at least one.")
            if not 0 <= min(prompt) <= max(prompt) < self._bert.vocabulary_size:
                raise InvalidPrompt(
                    f"Input {index} has token ids that {self.name} does not know: they go from 0 to "
                    f"{self._bert.vocabulary_size - 1:,}. Use its own tokenizer, or send text."
                )
            kept.append(np.array(self._cut(prompt), np.int32))
        truncated = sum(len(prompt) > self.token_limit for prompt in prompts)
        return self._embedded(kept, truncated, _cancel_check(cancelled))

    def _cut(self, prompt: Sequence[int]) -> Sequence[int]:
        """Truncated as the tokenizer does it: the end token stays."""
        if len(prompt) <= self.token_limit or prompt[-1] != self._end:
            return prompt[: self.token_limit]
        return [*prompt[: self.token_limit - 1], self._end]

    def _embedded(self, prompts: Sequence[Ids], truncated: int, look: CancelCheck) -> Embeddings:
        vectors = np.empty((len(prompts), self.dimensions), np.float32)
        for batch in _batches([len(prompt) for prompt in prompts]):
            look()
            vectors[batch] = self._compute([prompts[index] for index in batch], look)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embeddings(vectors, sum(len(prompt) for prompt in prompts), truncated)

    def _compute(self, prompts: Sequence[Ids], look: CancelCheck) -> NDArray[np.float32]:
        """The pooled states `[prompts, dimensions]` of prompts in order of length."""
        groups, start = [], 0
        for tokens, same in groupby(prompts, key=len):
            group = EqualLengthTexts(start, len(list(same)), tokens)
            groups.append(group)
            start = group.rows.stop
        states = self._bert.states(np.concatenate(prompts), groups, look)  # [tokens, dimensions]
        pooled = []
        for group in groups:
            texts = states[group.rows].reshape(group.texts, group.tokens, self.dimensions)
            pooled.append(texts.mean(axis=1) if self._encoder_settings.pooling == "mean" else texts[:, 0])
        return np.concatenate(pooled)


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


def _cancel_check(cancelled: Callable[[], bool] | None) -> CancelCheck:
    def look() -> None:
        if cancelled is not None and cancelled():
            raise Cancelled("The request was cancelled.")

    return look


Pooling = Literal["mean", "cls"]

_STAGES = ("Transformer", "Pooling", "Normalize")
# mean_sqrt_len has the direction of the mean, and all vectors get unit length.
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "mean_sqrt_len_tokens": "mean"}
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # others have the names of their flags
_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What a folder says about pooling, as sentence-transformers reads it: `modules.json` and the pooling's config.

    `token_limit` is None if only the encoder limits it; `lower`: texts are lowercased.
    """

    pooling: Pooling = "mean"
    token_limit: int | None = None
    lower: bool = False


def read_encoder_settings(folder: Path) -> EncoderSettings:
    """Read the settings of a folder. Raises `UnsupportedModel` for an unknown stage or pooling, and `BrokenModel`."""
    stages = _read_typed(folder / "modules.json", [])
    pooling = "1_Pooling"
    try:
        for stage in stages:
            kind = str(stage["type"]).rpartition(".")[2]
            if kind not in _STAGES:
                raise UnsupportedModel(
                    f"{folder} passes its vectors through a stage {kind}, which is not computed here (only "
                    f"{', '.join(_STAGES)}). Use minilm, or another model without it."
                )
            if kind == "Pooling":
                pooling = str(stage["path"])
    except (KeyError, TypeError) as error:
        raise BrokenModel(f"{folder / 'modules.json'} is damaged ({error!r}). Get it again.") from error
    about = _read_typed(folder / "sentence_bert_config.json", {})
    limits = [about.get("max_seq_length"), _read_typed(folder / "tokenizer_config.json", {}).get("model_max_length")]
    known = [int(limit) for limit in limits if isinstance(limit, (int, float)) and limit > 0]
    return EncoderSettings(
        pooling=_pooling_of(folder / pooling / "config.json"),
        token_limit=min(known, default=None),
        lower=bool(about.get("do_lower_case", False)),
    )


def _pooling_of(path: Path) -> Pooling:
    config = _read_typed(path, {"pooling_mode": "mean"})
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    else:
        flags = [name for name, on in config.items() if name.startswith(_FLAG) and on]
        modes = [_FLAGS.get(name, name.removeprefix(_FLAG)) for name in flags]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{path} asks for the pooling {' + '.join(modes) or 'of nothing'}; known are mean and cls. "
            "Use minilm, or another model with one of them."
        )
    return _POOLINGS[modes[0]]


def _read_typed(path: Path, default: Any) -> Any:
    """The JSON of a file, of the default's type; the default if there is no such file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    if type(value) is not type(default):
        raise BrokenModel(f"{path} should hold a JSON {type(default).__name__}. Get it again.")
    return value
