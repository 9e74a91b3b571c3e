"""Sentence embeddings: texts in, one vector of unit length a text out. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from rekindle.core.identity import digest_of_config, digest_of_fields
from rekindle.core.model import ModelFiles
from rekindle.engine.bert import Bert, Group
from rekindle.engine.recipe import Recipe, read_recipe
from rekindle.engine.tensors import read_floats
from rekindle.errors import BrokenModel, Cancelled, InvalidPrompt, UnsupportedModel
from rekindle.models.check import check_folder, read_config
from rekindle.models.digest import digest_of_files

_BATCH_TOKENS = 1024  # computed at once: more make none of them cheaper
_TEXTS_AT_ONCE = 256  # tokenized between two looks at whether the caller still wants them

Ids = NDArray[np.int32]
Look = Callable[[], None]  # raises `Cancelled` when the caller wants no more


@dataclass(frozen=True)
class Embedded:
    """The vectors of some texts, in their order."""

    vectors: NDArray[np.float32]  # [texts, dimensions], each of unit length
    tokens: int  # read, over all texts
    truncated: int  # texts longer than the model reads: only their beginning counts


class Embedder:
    """A sentence encoder. Used from several threads.

    A text has the same vector whatever stands beside it, up to rounding. `most_tokens` is what it reads of a text,
    with the tokens that begin and end it.
    """

    def __init__(self, files: ModelFiles, bert: Bert, tokenizer: tokenizers.Tokenizer, recipe: Recipe) -> None:
        """`tokenizer` becomes its own: it is set to cut texts and not to pad them."""
        self.name = files.name
        self.dimensions = bert.dimensions
        self.most_tokens = min(bert.most_tokens, recipe.most_tokens or bert.most_tokens)
        self._folder = files.folder
        self._bert = bert
        self._recipe = recipe
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        frame = tokenizer.encode("").ids  # the tokens that stand around every text
        if not 0 < len(frame) < self.most_tokens or max(frame) >= bert.vocabulary_size:
            raise BrokenModel(
                f"The tokenizer.json in {files.folder} puts {len(frame)} tokens {frame} around a text; that does not "
                f"fit the model, which reads {self.most_tokens}. Get both again."
            )
        self._end = int(frame[-1])
        tokenizer.enable_truncation(self.most_tokens)

    @classmethod
    def load(cls, files: ModelFiles) -> Embedder:
        """The encoder in a folder in Hugging Face form.

        Raises `UnsupportedModel` for one that is not computed here, and `ModelNotFound`, `NotAModel` or `BrokenModel`.
        """
        weights = check_folder(files.folder)
        config, recipe = read_config(files.folder), read_recipe(files.folder)
        tokenizer = _read_tokenizer(files.folder / "tokenizer.json")
        return cls(files, Bert(config, read_floats(weights)), tokenizer, recipe)

    @cached_property
    def digest(self) -> str:
        """Identifies what the vectors depend on: weights, tokenizer and settings. Vectors of equal ones compare.

        Reads the files when it is asked for the first time, unless they were read before.
        """
        files = [*check_folder(self._folder), self._folder / "tokenizer.json"]
        recipe = self._recipe
        return digest_of_fields(
            "rekindle/embedder/1",
            digest_of_files(files),
            digest_of_config(read_config(self._folder)),
            f"{recipe.pooling} {self.most_tokens} {recipe.lower}",
        )

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has, without those that begin and end it, however long it is."""
        return len(self._uncut.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _uncut(self) -> tokenizers.Tokenizer:
        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        whole.no_truncation()
        return whole

    def embed(self, texts: Sequence[str], *, cancelled: Callable[[], bool] | None = None) -> Embedded:
        """The vectors of texts; an empty one has a vector too.

        Raises `InvalidPrompt` for what is not text, and `Cancelled` soon after `cancelled` says so.
        """
        _check_texts(texts)
        look = _look(cancelled)
        prompts: list[Ids] = []
        truncated = 0
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            look()
            some = texts[start : start + _TEXTS_AT_ONCE]
            wanted = [text.lower() for text in some] if self._recipe.lower else list(some)
            for encoding in self._tokenizer.encode_batch_fast(wanted):
                prompts.append(np.array(encoding.ids, np.int32))
                truncated += bool(encoding.overflowing)
        return self._embedded(prompts, truncated, look)

    def embed_tokens(
        self, prompts: Sequence[Sequence[int]], *, cancelled: Callable[[], bool] | None = None
    ) -> Embedded:
        """The vectors of texts given as token ids, taken as they are: with the tokens that begin and end a text.

        Raises `InvalidPrompt` for an empty one or an id that the model does not have, and `Cancelled`.
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
        truncated = sum(len(prompt) > self.most_tokens for prompt in prompts)
        return self._embedded(kept, truncated, _look(cancelled))

    def _cut(self, prompt: Sequence[int]) -> Sequence[int]:
        """As the tokenizer cuts a text: the token that ends it stays."""
        if len(prompt) <= self.most_tokens or prompt[-1] != self._end:
            return prompt[: self.most_tokens]
        return [*prompt[: self.most_tokens - 1], self._end]

    def _embedded(self, prompts: Sequence[Ids], truncated: int, look: Look) -> Embedded:
        vectors = np.empty((len(prompts), self.dimensions), np.float32)
        for batch in _batches([len(prompt) for prompt in prompts]):
            look()
            vectors[batch] = self._compute([prompts[index] for index in batch], look)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embedded(vectors, sum(len(prompt) for prompt in prompts), truncated)

    def _compute(self, prompts: Sequence[Ids], look: Look) -> NDArray[np.float32]:
        """The pooled states `[prompts, dimensions]` of prompts that stand in order of length."""
        groups, start = [], 0
        for tokens, same in groupby(prompts, key=len):
            group = Group(start, len(list(same)), tokens)
            groups.append(group)
            start = group.rows.stop
        states = self._bert.states(np.concatenate(prompts), groups, look)  # [tokens, dimensions]
        pooled = []
        for group in groups:
            texts = states[group.rows].reshape(group.texts, group.tokens, self.dimensions)
            pooled.append(texts.mean(axis=1) if self._recipe.pooling == "mean" else texts[:, 0])
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
    """The indices of prompts in order of length, a bounded number of tokens at a time."""
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


def _look(cancelled: Callable[[], bool] | None) -> Look:
    def look() -> None:
        if cancelled is not None and cancelled():
            raise Cancelled("The request was cancelled.")

    return look
